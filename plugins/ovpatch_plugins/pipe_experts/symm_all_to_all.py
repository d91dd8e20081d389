"""All-to-alls over memory that the ranks of one host share, by one kernel of a few programs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.group_state import group_state
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.comm.work import WorkGroup
from ovpatch.overlap.symm_mem import memory
from ovpatch_plugins.pipe_experts.config import MoEConfig
from ovpatch_plugins.pipe_experts.report import COUNTERS

CHANNELS: Final = 16  # programs; each takes a multiprocessor
_SLOT: Final = 512 * 1024  # bytes
_DEPTH: Final = 2
_BLOCK: Final = 8192  # words that a program moves at a time
_WARPS: Final = 16
_WORDS: Final = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
_ALIGNED: Final = 16  # bytes


class SymmAllToAll:
    """A transport over symmetric memory, for one group on one device; see [Note: level by level] of the kernel.

    Rows that stay on this rank are copied on the current stream. The host waits for nothing. Construction is a
    collective. A ring has ``depth`` slots of ``slot`` bytes; a program moves ``block`` words at a time. The number of
    programs, ``channels``, may be lowered, on all ranks between the same two calls.

    Raises:
        LackingError: Some ranks have no memory for it; raised on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        channels: int = CHANNELS,
        slot: int = _SLOT,
        depth: int = _DEPTH,
        block: int = _BLOCK,
    ) -> None:
        from ovpatch.overlap.symm_mem.signals import RANKS
        from ovpatch_plugins.pipe_experts.triton_exchange import HEADER

        self._world, self._rank, self._device = group.size(), group.rank(), device
        self.channels, self._slot, self._depth, self._block = channels, slot, depth, block
        size = HEADER.value + channels * self._world * depth * slot
        self._memory = memory.allocate_on_all(size, group, device, lambda own: own[: HEADER.value].zero_())
        self._peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(HEADER.value // 8, dtype=torch.int64, device=device)
        self._padding = [0] * (RANKS.value - self._world)  # splits of ranks that do not exist
        self._kernels: dict[tuple[torch.dtype, bool, int], _Kernel] = {}
        self._in_flight: collections.deque[_KernelWork] = collections.deque()
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self._stream is not None:
            torch.cuda.synchronize(device)  # the new stream reads what the current one has written

    def start_transfer(
        self, output: Tensor, rows: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> WorkGroup:
        """See :meth:`ovpatch_plugins.pipe_experts.all_to_all.AllToAllTransport.start_transfer`."""
        while self._in_flight and self._in_flight[0].is_done():
            self._in_flight.popleft()
        COUNTERS.symmetric += 1
        row, own = rows.shape[1:].numel() * rows.element_size(), input_splits[self._rank]
        aligned = row % _ALIGNED == 0
        size, word = next((size, word) for size, word in _WORDS if row % size == 0)
        alignment = _ALIGNED if aligned else size
        if rows.data_ptr() % alignment:
            rows = rows.clone()  # an expert may return any view
        if output.data_ptr() % alignment:
            raise ValueError(
                f"memory for received rows begins at no multiple of {alignment} bytes: give memory that does"
            )
        work = _KernelWork(output, rows, self._stream)
        with profiler_span(profiler_label("pipe_experts", "all_to_all")):
            if sum(input_splits) + sum(output_splits) > 2 * own:
                kernel = self._kernels.get((word, aligned, self.channels)) or self._make_kernel(word, aligned)
                args = *input_splits, *self._padding, *output_splits, *self._padding, row // size
                work.launch_kernel(kernel, output, rows, args)
                self._in_flight.append(work)
            if own:  # on the current stream, beside the kernel
                source, target = sum(input_splits[: self._rank]), sum(output_splits[: self._rank])
                output[target : target + own].copy_(rows[source : source + own])
        return WorkGroup((work,))

    def _make_kernel(self, word: torch.dtype, aligned: bool) -> _Kernel:
        fixed = (
            self._peers, self._state, self._rank,
            self._world, self.channels, self._slot // word.itemsize, self._depth, self._block, aligned,
        )  # fmt: skip
        kernel = self._kernels[word, aligned, self.channels] = _Kernel(self.channels, word, fixed)
        return kernel


class _Kernel:
    """The kernel with its fixed arguments, the last ones; launches after the first skip Triton's specialization."""

    def __init__(self, programs: int, word: torch.dtype, fixed: tuple[Any, ...]) -> None:
        self._grid, self._word, self._fixed = (programs, 1, 1), word, fixed
        self._fixed_args = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in fixed]
        self._run: Callable[..., None] | None = None

    def __call__(self, stream: torch.cuda.Stream | None, output: Tensor, rows: Tensor, args: Sequence[int]) -> None:
        """Launch on a stream; the caller keeps the tensors alive."""
        with torch.cuda.device_of(rows):
            if self._run is not None and stream is not None:
                self._run(rows.data_ptr(), output.data_ptr(), *args, *self._fixed_args, stream=stream.cuda_stream)
                return
            from ovpatch_plugins.pipe_experts.triton_exchange import symm_all_to_all_kernel

            with torch.cuda.stream(stream):
                compiled = symm_all_to_all_kernel[self._grid](
                    rows.view(self._word), output.view(self._word), *args, *self._fixed, num_warps=_WARPS
                )
        if compiled is not None:  # None under the interpreter
            self._run = compiled[self._grid]


class _KernelWork:
    """An all-to-all in flight on the kernel's stream; without streams it is done once it is launched.

    The allocator reuses freed memory in the order of the stream that allocated it, here the stream of the launch. That
    stream waits for the kernel before the rows are read, so tensors freed after the wait are safe. Tensors of a work
    that is never waited for, after an exception, are kept until the kernel has ended.
    """

    def __init__(self, output: Tensor, rows: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._tensors: tuple[Tensor, ...] = (output, rows)
        self._stream, self._end = stream, None if stream is None else torch.cuda.Event()
        self._launch_stream = None if stream is None else torch.cuda.current_stream(rows.device)

    def launch_kernel(self, kernel: _Kernel, output: Tensor, rows: Tensor, args: Sequence[int]) -> None:
        """Launch after the current stream's work so far."""
        if self._stream is not None and self._end is not None and self._launch_stream is not None:
            self._stream.wait_stream(self._launch_stream)
            kernel(self._stream, output, rows, args)
            self._end.record(self._stream)
        else:
            kernel(None, output, rows, args)

    def wait(self) -> None:
        """Make the current stream wait for the kernel, and for the copy on the stream of the launch."""
        if self._launch_stream is not None and self._end is not None:
            current = torch.cuda.current_stream(self._launch_stream.device)
            current.wait_event(self._end)
            if current != self._launch_stream:  # the sent rows are about to be freed to that stream
                self._launch_stream.wait_event(self._end)
                current.wait_stream(self._launch_stream)
        self._tensors = ()

    def is_done(self) -> bool:
        """Tell whether the tensors may be freed."""
        return not self._tensors or self._end is None or self._end.query()


_unsupported_reasons: dict[str, None] = {}  # kept for the report after the group is gone


def get_transport(group: dist.ProcessGroup, device: torch.device) -> SymmAllToAll | None:
    """Return the transport of a group; None if it is unsupported, which is the same on all ranks.

    A collective in the first call for a group and device; later calls allocate nothing.
    """
    return group_state(group).get_or_create((SymmAllToAll, device), lambda: _make_transport(group, device))


def _make_transport(group: dist.ProcessGroup, device: torch.device) -> SymmAllToAll | None:
    reason = memory.unsupported_reason(group, device)
    if not reason:
        try:
            return SymmAllToAll(group, device)
        except memory.LackingError as error:
            reason = str(error)
    _unsupported_reasons[reason] = None
    return None


def resolve_exchange(config: MoEConfig, group: dist.ProcessGroup, device: torch.device) -> MoEConfig:
    """Return the config, with c10d's all-to-alls where symmetric memory is unsupported or cannot be chosen."""
    if config.exchange == "c10d":
        return config
    is_wanted = group.size() > 1 and (config.exchange == "symmetric" or config.cut == "auto")
    if is_wanted and get_transport(group, device) is not None:
        return config
    return dataclasses.replace(config, exchange="c10d")


def list_unsupported_reasons() -> list[str]:
    """Return why groups do without symmetric memory."""
    return list(_unsupported_reasons)
