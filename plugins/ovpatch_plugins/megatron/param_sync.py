"""Gathers of parameters after a step of Megatron's distributed optimizer with ``overlap_param_gather``.

Megatron starts them in the next forward, module by module. Until then other ranks' shards of each parameter are stale,
which state_dict(), an evaluation without its hooks, or a functional read of a weight do not notice. Here they start at
the end of the step, in the order of the buckets, and readers wait: [Note: pending by type].
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from ovpatch.overlap.tensors.ownership import references_of_one, storage_references
from ovpatch.overlap.tensors.pending_param import count_owners, mark_pending, mark_ready, without_modes
from ovpatch_plugins.megatron.report import COUNTERS
from ovpatch_plugins.megatron.takeover import find_place, list_bucket_groups

_LOCK: Final = threading.RLock()


class ParamGather:
    """The gather of one bucket group's parameters, from the end of a step to the end of the next backward."""

    def __init__(self, group: Any) -> None:
        self._handle = group.param_gather_handle  # which Megatron drops when it has waited
        self._params = [param for bucket in group.buckets for param in bucket.params_list]
        device = group.buckets[0].param_data.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # A model may go while its parameters are pending, which keeps them.
        self._release = weakref.finalize(group, mark_ready, self._params)
        self._release.atexit = False

    def mark(self, owners: list[int]) -> None:
        """Have readers wait, or wait now if a parameter can be read without a call that sees its class.

        Args:
            owners: The fewest owners that each parameter had so far, Megatron's views of it among them; more are a
                graph's that is still to run backward.
        """
        aliases = storage_references(self._params[0]) - references_of_one()  # Megatron's own views of the buffer
        for i, param in enumerate(self._params):
            owners[i] = min(owners[i], count_owners([param]))
            if mark_pending([param], self.wait_for_reader, aliases=aliases, owners=owners[i]):
                self._wait()
                self.settle()
                return

    def wait_for_reader(self) -> None:
        """Wait for the values, on the reader's stream and on that of the step, and let further readers pass."""
        with _LOCK, without_modes():
            COUNTERS.reads += 1
            self._wait()
            self.settle()

    def settle(self) -> None:
        """Let readers pass: the values are there."""
        self._release.detach()
        mark_ready(self._params)

    def _wait(self) -> None:
        self._handle.wait()
        if self._stream is not None and self._stream != torch.cuda.current_stream(self._stream.device):
            with torch.cuda.stream(self._stream):
                self._handle.wait()


_GATHERS: Final[weakref.WeakKeyDictionary[Any, ParamGather]] = weakref.WeakKeyDictionary()  # by the bucket group
_OWNERS: Final[weakref.WeakKeyDictionary[Any, list[int]]] = weakref.WeakKeyDictionary()  # likewise


def wrap_step(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``DistributedOptimizer.step_with_ready_grads``: starts the gathers at its end."""

    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> bool:
        groups = _find_groups(self)
        for group in groups:  # of modules that no forward has called since: the step writes into what a gather reads
            _finish(group)
            _wait_for_handle(group)
        done = original(self)
        for group in groups:
            group.start_param_sync()
            if group.param_gather_handle is None:  # one rank
                continue
            gather = _GATHERS[group] = ParamGather(group)
            gather.mark(_OWNERS.setdefault(group, [sys.maxsize] * len(group.params)))
            COUNTERS.gathers += 1
        return done

    return step_with_ready_grads


def wrap_start(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_param_sync``: a gather that a step has started is not started again, unless it is forced."""

    @functools.wraps(original)
    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        if self not in _GATHERS:
            original(self, force_sync=force_sync)
        elif force_sync:
            # Megatron gathers again if it has waited for the last gather, which may differ from rank to rank here.
            _finish(self)
            original(self, force_sync=True)

    return start_param_sync


def wrap_finish(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_param_sync``, which Megatron's forward pre-hooks call: readers pass from then on."""

    @functools.wraps(original)
    def finish_param_sync(self: Any, skip_next_bucket_dispatch: bool = False) -> None:
        gather = _GATHERS.get(self)
        if gather is None:
            original(self, skip_next_bucket_dispatch=skip_next_bucket_dispatch)
            return
        original(self, skip_next_bucket_dispatch=True)  # the next one has been started as well
        with _LOCK:
            gather.settle()

    return finish_param_sync


def wrap_finish_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_grad_sync``, at which Megatron forgets that a group was gathered."""

    @functools.wraps(original)
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _finish(self)

    return finish_grad_sync


def finish_all() -> None:
    """Wait for all gathers, and forget them."""
    for group in list_bucket_groups():
        _finish(group)


def _finish(group: Any) -> None:
    gather = _GATHERS.pop(group, None)
    if gather is None:
        return
    _wait_for_handle(group)
    with _LOCK:
        gather.settle()


def _wait_for_handle(group: Any) -> None:
    if group.param_gather_handle is not None:
        group.param_gather_handle.wait()
        group.param_gather_handle = None


def _find_groups(optimizer: Any) -> list[Any]:
    """Return the bucket groups that an optimizer steps, in the order in which Megatron gathers them."""
    config = getattr(optimizer, "ddp_config", None)
    if config is None or not config.overlap_param_gather or config.use_megatron_fsdp:
        return []
    if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        return []  # the gathered values would lie where gradients are
    buffers = getattr(optimizer, "buffers", ())  # none, where a rank has nothing to train
    stepped = {id(bucket) for buffer in buffers for bucket in buffer.buckets}
    found = []
    for model in optimizer.model_chunks:
        for groups in (model.bucket_groups, model.expert_parallel_bucket_groups):
            mine = [group for group in groups if any(id(bucket) in stepped for bucket in group.buckets)]
            found += [group for group in reversed(mine) if find_place(group) is not None]
    return found
