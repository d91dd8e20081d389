"""Gathers of parameters after a step of Megatron's distributed optimizer with ``overlap_param_gather``.

Megatron starts them in the next forward, module by module. Until then other ranks' shards of each parameter are stale,
which state_dict(), an evaluation without its hooks, or a functional read of a weight do not notice. Here they start at
the end of the step, in the order of the buckets, and readers wait: [Note: pending by type].
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from ovpatch.overlap.comm.lifetimes import attached_values, outside_modes
from ovpatch.overlap.tensors.pending_param import mark_pending, mark_ready
from ovpatch_plugins.megatron.bucket_order import find_place, list_bucket_groups
from ovpatch_plugins.megatron.megatron_report import COUNTERS, note_left

_GATHER: Final = (
    "megatron: gather"  # of a bucket group, from a step to the end of the next backward
)
_OWNERS: Final = "megatron: owners of parameters"  # of an optimizer
_LOCK: Final = threading.RLock()


class _Kept:
    """What Megatron keeps for good of the parameters that an optimizer steps; whatever is beyond it may be a graph's.

    It is listed, not measured: a script may have a graph alive at every step.
    """

    def __init__(self, optimizer: Any) -> None:
        listed = (*optimizer.shard_float16_groups, *optimizer.shard_fp32_groups)
        shards = [shard for group in listed for shard in group if shard is not None]
        bases = [shard._base for shard in shards if shard._base is not None]
        nodes = [node for model in optimizer.model_chunks for node in model.grad_accs]
        # By the id of a parameter, beside Python. A shard of 16 bits is a view of a tensor of its own.
        self.owners = Counter(map(id, [*(node.variable for node in nodes), *bases]))
        tensors = [*shards, *bases]
        for buffer in optimizer.buffers:
            tensors += (
                buffer.param_data,
                *buffer.params,
                *(bucket.param_data for bucket in buffer.buckets),
            )
        self._tensors = Counter(map(_find_memory, {id(one): one for one in tensors}.values()))

    def count_tensors(self, groups: Iterable[Any]) -> Counter[int]:
        """Return how many tensors there are, by the address of their memory."""
        found = self._tensors.copy()
        for group in groups:  # whose views for the gather are made by its first one
            for views in group.cached_param_buffer_shard_list:
                found.update(map(_find_memory, views or ()))
        return found


def _find_memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class ParamGather:
    """The gather of one bucket group's parameters, from the end of a step to the end of the next backward."""

    def __init__(self, group: Any) -> None:
        self._handle: Any = None
        self._buckets = [
            (_find_memory(bucket.param_data), bucket.params_list) for bucket in group.buckets
        ]
        self._params = [param for _, params in self._buckets for param in params]
        device = group.buckets[0].param_data.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # A model may go while its parameters are pending, which keeps them.
        self._release = weakref.finalize(group, mark_ready, self._params)
        self._release.atexit = False

    def mark(self, owners: Mapping[int, int], tensors: Mapping[int, int]) -> str:
        """Have readers wait, unless a parameter can be read without a call that sees its class.

        It is called before any gather has started, which would hold memory, too.

        Args:
            owners: How many owners Megatron adds to Python, by the id of a parameter.
            tensors: How many tensors Megatron keeps, by the address of their memory.

        Returns:
            "", or the reason why readers do not wait.
        """
        for memory, params in self._buckets:
            for param in params:
                reason = mark_pending(
                    [param],
                    self.wait_for_reader,
                    aliases=tensors[memory] - 1,
                    owners=1 + owners.get(id(param), 0),
                )
                if reason:
                    self.release_readers()
                    return reason
        return ""

    def start(self, group: Any) -> bool:
        """Start the gather; return whether there is one."""
        group.start_param_sync()
        self._handle = group.param_gather_handle  # which Megatron drops when it has waited
        if self._handle is None:  # one rank
            self.release_readers()
        return self._handle is not None

    def wait(self) -> None:
        """Wait for the values, on the current stream and on that of the step, and let readers pass."""
        self._handle.wait()
        if self._stream is not None and self._stream != torch.cuda.current_stream(
            self._stream.device
        ):
            with torch.cuda.stream(self._stream):
                self._handle.wait()
        self.release_readers()

    def wait_for_reader(self) -> None:
        """Wait for the values as a reader does."""
        with _LOCK, outside_modes():
            COUNTERS.reads += 1
            self.wait()

    def release_readers(self) -> None:
        """Let readers pass: the values are there."""
        self._release.detach()
        mark_ready(self._params)


def wrap_step(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``DistributedOptimizer.step_with_ready_grads``: starts the gathers at its end."""

    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> bool:
        groups = _find_groups(self)
        for group in (
            groups
        ):  # of modules that no forward has called since: the step writes into what a gather reads
            _finish(group)
            _wait_for_handle(group)
        done = original(self)
        if groups:
            with _LOCK:  # a reader on another thread waits until all have started
                _start(self, groups)
        return done

    return step_with_ready_grads


def _start(optimizer: Any, groups: Sequence[Any]) -> None:
    kept = attached_values(optimizer).get(_OWNERS)
    if kept is None:
        kept = attached_values(optimizer)[_OWNERS] = _Kept(optimizer)
    tensors = kept.count_tensors(groups)
    gathers = [ParamGather(group) for group in groups]
    try:
        reasons = [gather.mark(kept.owners, tensors) for gather in gathers]
        for group, gather in zip(groups, gathers, strict=True):
            if gather.start(group):
                attached_values(group)[_GATHER] = gather
                COUNTERS.gathers += 1
    except BaseException:  # a KeyboardInterrupt, too: nothing would ever arrive
        for gather in gathers:
            gather.release_readers()
        raise
    for group, reason in zip(groups, reasons, strict=True):
        started = _find_gather(group)
        if reason and started is not None:
            note_left(f"gathers of parameters, for which step() waits: {reason}")
            started.wait()


def wrap_start_param_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_param_sync``: a gather that a step has started is not started again, unless it is forced."""

    @functools.wraps(original)
    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        if _find_gather(self) is None:
            original(self, force_sync=force_sync)
        elif force_sync:
            # Megatron gathers again if it has waited for the last gather, which may differ from rank to rank here.
            _finish(self)
            original(self, force_sync=True)

    return start_param_sync


def wrap_finish_param_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_param_sync``, which Megatron's forward pre-hooks call: readers pass from then on."""

    @functools.wraps(original)
    def finish_param_sync(self: Any, skip_next_bucket_dispatch: bool = False) -> None:
        gather = _find_gather(self)
        if gather is None:
            original(self, skip_next_bucket_dispatch=skip_next_bucket_dispatch)
            return
        original(self, skip_next_bucket_dispatch=True)  # the next one has been started as well
        with _LOCK:
            gather.release_readers()

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


def _find_gather(group: Any) -> ParamGather | None:
    return attached_values(group).get(_GATHER)


def _finish(group: Any) -> None:
    gather = attached_values(group).pop(_GATHER, None)
    if gather is None:
        return
    _wait_for_handle(group)
    with _LOCK:
        gather.release_readers()


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
            mine = [
                group for group in groups if any(id(bucket) in stepped for bucket in group.buckets)
            ]
            found += [group for group in reversed(mine) if find_place(group) is not None]
    return found
