"""The gathers of parameters after a step of Megatron's distributed optimizer with ``overlap_param_gather``.

Megatron starts them in the next forward, module by module. Until then the peers' shards of each parameter are stale.
state_dict(), an evaluation without Megatron's hooks, and a functional read of a weight do not detect that. Here the
gathers start at the end of the step, in the order of the buckets, and readers wait: [Note: pending by type].
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
from ovpatch_plugins.megatron.megatron_report import COUNTERS, note_fallback

# The value of a bucket group: its gather, from a step to the end of the next backward.
_GATHER_KEY: Final = "megatron: gather"
# The value of an optimizer: the tensors that Megatron keeps.
_KEPT_KEY: Final = "megatron: owners of parameters"
# Readers on other threads wait until all gathers of a step have started.
_GATHER_LOCK: Final = threading.RLock()


class _KeptTensors:
    """The references that Megatron always keeps to the parameters of an optimizer.

    Any other reference may belong to an autograd graph. The references are listed and not counted in a running program,
    because a script may have a graph alive at every step.

    Attributes:
        owner_counts: The number of owners besides Python, by the id of a parameter.
    """

    def __init__(self, optimizer: Any) -> None:
        shard_groups = (*optimizer.shard_float16_groups, *optimizer.shard_fp32_groups)
        shards = [shard for group in shard_groups for shard in group if shard is not None]
        bases = [shard._base for shard in shards if shard._base is not None]
        nodes = [node for model in optimizer.model_chunks for node in model.grad_accs]
        # A bf16 or fp16 shard is a view, and its base is another tensor than the parameter.
        self.owner_counts = Counter(map(id, [*(node.variable for node in nodes), *bases]))
        tensors = [*shards, *bases]
        for buffer in optimizer.buffers:
            tensors += (
                buffer.param_data,
                *buffer.params,
                *(bucket.param_data for bucket in buffer.buckets),
            )
        self._tensor_counts = Counter(
            map(_find_memory, {id(tensor): tensor for tensor in tensors}.values())
        )

    def count_tensors(self, groups: Iterable[Any]) -> Counter[int]:
        """Return the number of tensors that Megatron keeps, by the address of their memory."""
        found = self._tensor_counts.copy()
        # The first gather of a group creates views that later gathers use.
        for group in groups:
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
        # A model may be freed while its parameters are pending, and pending parameters stay alive.
        self._release = weakref.finalize(group, mark_ready, self._params)
        self._release.atexit = False

    def mark(self, owner_counts: Mapping[int, int], tensor_counts: Mapping[int, int]) -> str:
        """Make readers wait, unless a parameter can be read without a call that sees its class.

        Call this before any gather has started, because a gather refers to the memory as well.

        Args:
            owner_counts: The number of owners that Megatron adds to Python, by the id of a parameter.
            tensor_counts: The number of tensors that Megatron keeps, by the address of their memory.

        Returns:
            "", or the reason for which readers do not wait.
        """
        for memory, params in self._buckets:
            for param in params:
                reason = mark_pending(
                    [param],
                    self.wait_for_reader,
                    aliases=tensor_counts[memory] - 1,
                    owners=1 + owner_counts.get(id(param), 0),
                )
                if reason:
                    self.release_readers()
                    return reason
        return ""

    def start(self, group: Any) -> bool:
        """Start the gather; return whether there is one."""
        group.start_param_sync()
        # Megatron drops its reference when it has waited.
        self._handle = group.param_gather_handle
        # A group of one rank starts no gather.
        if self._handle is None:
            self.release_readers()
        return self._handle is not None

    def wait(self) -> None:
        """Make the current stream and the step's stream wait for the values, and release readers."""
        self._handle.wait()
        if self._stream is not None and self._stream != torch.cuda.current_stream(
            self._stream.device
        ):
            with torch.cuda.stream(self._stream):
                self._handle.wait()
        self.release_readers()

    def wait_for_reader(self) -> None:
        """Wait for the values when a reader needs them."""
        with _GATHER_LOCK, outside_modes():
            COUNTERS.reads += 1
            self.wait()

    def release_readers(self) -> None:
        """Release readers, because the values have arrived."""
        self._release.detach()
        mark_ready(self._params)


def wrap_step(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``DistributedOptimizer.step_with_ready_grads``, to start the gathers at its end."""

    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> bool:
        groups = _find_groups(self)
        # If no forward has called some modules since the last step, their gathers still read the memory that this step
        # writes.
        for group in groups:
            _finish(group)
            _wait_for_handle(group)
        is_stepped = original(self)
        if groups:
            # A reader on another thread waits until all gathers have started.
            with _GATHER_LOCK:
                _start(self, groups)
        return is_stepped

    return step_with_ready_grads


def _start(optimizer: Any, groups: Sequence[Any]) -> None:
    kept = attached_values(optimizer).get(_KEPT_KEY)
    if kept is None:
        kept = attached_values(optimizer)[_KEPT_KEY] = _KeptTensors(optimizer)
    tensor_counts = kept.count_tensors(groups)
    gathers = [ParamGather(group) for group in groups]
    try:
        reasons = [gather.mark(kept.owner_counts, tensor_counts) for gather in gathers]
        for group, gather in zip(groups, gathers, strict=True):
            if gather.start(group):
                attached_values(group)[_GATHER_KEY] = gather
                COUNTERS.gathers += 1
    # After any exception, a KeyboardInterrupt included, readers would wait forever for gathers that never start.
    except BaseException:
        for gather in gathers:
            gather.release_readers()
        raise
    for group, reason in zip(groups, reasons, strict=True):
        started = _find_gather(group)
        if reason and started is not None:
            note_fallback(f"gathers of parameters, for which step() waits: {reason}")
            started.wait()


def wrap_start_param_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_param_sync``, so that a gather of a step does not start again unless it is forced."""

    @functools.wraps(original)
    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        if _find_gather(self) is None:
            original(self, force_sync=force_sync)
        elif force_sync:
            # Megatron gathers again only if it has waited for the last gather. Here this may differ between ranks, so
            # all ranks wait and gather again.
            _finish(self)
            original(self, force_sync=True)

    return start_param_sync


def wrap_finish_param_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_param_sync``, which Megatron's forward pre-hooks call, to release readers."""

    @functools.wraps(original)
    def finish_param_sync(self: Any, skip_next_bucket_dispatch: bool = False) -> None:
        gather = _find_gather(self)
        if gather is None:
            original(self, skip_next_bucket_dispatch=skip_next_bucket_dispatch)
            return
        # The step has started the next gather as well.
        original(self, skip_next_bucket_dispatch=True)
        with _GATHER_LOCK:
            gather.release_readers()

    return finish_param_sync


def wrap_finish_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finish_grad_sync``, after which Megatron gathers a group again."""

    @functools.wraps(original)
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _finish(self)

    return finish_grad_sync


def finish_all() -> None:
    """Wait for all gathers, and drop them."""
    for group in list_bucket_groups():
        _finish(group)


def _find_gather(group: Any) -> ParamGather | None:
    return attached_values(group).get(_GATHER_KEY)


def _finish(group: Any) -> None:
    gather = attached_values(group).pop(_GATHER_KEY, None)
    if gather is None:
        return
    _wait_for_handle(group)
    with _GATHER_LOCK:
        gather.release_readers()


def _wait_for_handle(group: Any) -> None:
    if group.param_gather_handle is not None:
        group.param_gather_handle.wait()
        group.param_gather_handle = None


def _find_groups(optimizer: Any) -> list[Any]:
    """Return the bucket groups of an optimizer's parameters, in the order in which Megatron gathers them."""
    config = getattr(optimizer, "ddp_config", None)
    if config is None or not config.overlap_param_gather or config.use_megatron_fsdp:
        return []
    # With this setting, the memory of gradients receives the gathered values.
    if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        return []
    # A rank without parameters to train has no buffers.
    buffers = getattr(optimizer, "buffers", ())
    stepped = {id(bucket) for buffer in buffers for bucket in buffer.buckets}
    found = []
    for model in optimizer.model_chunks:
        for groups in (model.bucket_groups, model.expert_parallel_bucket_groups):
            stepped_groups = [
                group for group in groups if any(id(bucket) in stepped for bucket in group.buckets)
            ]
            found += [group for group in reversed(stepped_groups) if find_place(group) is not None]
    return found
