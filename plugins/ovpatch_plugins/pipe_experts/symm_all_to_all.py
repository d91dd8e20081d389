"""All-to-alls over memory that the ranks of one host share, by a few programs of one kernel.

[Note: kept while it is read] Memory that is given back is used again in the order of the stream on which it was
allocated, for which the stream of the start stands. That one waits for rows before they are read, and what they were
sent from is given back after that. Rows that are never waited for, after an exception, are kept until the kernel ends.
"""

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
from ovpatch.overlap.symm_mem import memory, support
from ovpatch_plugins.pipe_experts.config import MoEConfig
from ovpatch_plugins.pipe_experts.report import COUNTERS

CHANNELS: Final = 16  # programs, each of which takes a multiprocessor
_SLOT: Final = 512 * 1024  # bytes; see [Note: channels] of the kernel
_DEPTH: Final = 2
_BLOCK: Final = 8192  # words that a program moves at a time
_WARPS: Final = 16
_WORDS: Final = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
_ALIGNED: Final = 16  # bytes

Counts = Sequence[int]


class SymmAllToAll:
    """A lane over symmetric memory, for one group on one device; see [Note: channels] of the kernel.

    Rows that stay on this rank are copied beside the kernel. The host waits for nothing.

    Args:
        group: The ranks, which make this together.
        device: Where.
        channels: Number of programs.
        slot: Bytes of a slot.
        depth: Slots of a ring.
        block: Words that a program moves at a time.

    Attributes:
        channels: Number of programs. It may be lowered, between the same calls on all ranks.

    Raises:
        LackingError: Some ranks have no memory for it; on all ranks.
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
        self._memory = memory.allocate_on_all(size, group, device, lambda own: _clear(own[: HEADER.value]))
        self._peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(HEADER.value // 8, dtype=torch.int64, device=device)
        self._others = [0] * (RANKS.value - self._world)  # counts of ranks that do not exist
        self._kernels: dict[tuple[torch.dtype, bool, int], _Kernel] = {}
        self._under_way: collections.deque[_Work] = collections.deque()
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self._stream is not None:
            torch.cuda.synchronize(device)  # it is going to read what the current one has written

    def start(self, found: Tensor, rows: Tensor, received: Counts, sent: Counts) -> WorkGroup:
        """See :meth:`ovpatch_plugins.pipe_experts.exchange.AllToAllTransport.start`."""
        while self._under_way and self._under_way[0].is_over():
            self._under_way.popleft()
        COUNTERS.symmetric += 1
        row, own = rows.shape[1:].numel() * rows.element_size(), sent[self._rank]
        aligned = row % _ALIGNED == 0
        size, word = next((size, word) for size, word in _WORDS if row % size == 0)
        by = _ALIGNED if aligned else size
        if rows.data_ptr() % by:
            rows = rows.clone()  # an expert may return any view
        if found.data_ptr() % by:
            raise ValueError(f"memory for received rows begins at no multiple of {by} bytes: give memory that does")
        work = _Work(found, rows, self._stream)
        with profiler_span(profiler_label("pipe_experts", "all_to_all")):
            if sum(sent) + sum(received) > 2 * own:
                kernel = self._kernels.get((word, aligned, self.channels)) or self._made(word, aligned)
                args = *sent, *self._others, *received, *self._others, row // size
                work.launch(kernel, found, rows, args)
                self._under_way.append(work)
            if own:  # on the current stream: the kernel need not wait for it, nor be longer
                begin, put = sum(sent[: self._rank]), sum(received[: self._rank])
                found[put : put + own].copy_(rows[begin : begin + own])
        return WorkGroup((work,))

    def _made(self, word: torch.dtype, aligned: bool) -> _Kernel:
        fixed = (
            self._peers, self._state, self._rank,
            self._world, self.channels, self._slot // word.itemsize, self._depth, self._block, aligned,
        )  # fmt: skip
        made = self._kernels[word, aligned, self.channels] = _Kernel(self.channels, word, fixed)
        return made


class _Kernel:
    """The kernel with arguments that do not change, launched without asking Triton about each anew.

    Args:
        programs: How many.
        word: In what rows are moved.
        fixed: The kernel's last arguments.
    """

    def __init__(self, programs: int, word: torch.dtype, fixed: tuple[Any, ...]) -> None:
        self._grid, self._word, self._fixed = (programs, 1, 1), word, fixed
        self._addressed = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in fixed]
        self._run: Callable[..., None] | None = None

    def __call__(self, stream: torch.cuda.Stream | None, found: Tensor, rows: Tensor, args: Sequence[int]) -> None:
        """Launch on a stream; whoever launches keeps the tensors."""
        with torch.cuda.device_of(rows):
            if self._run is not None and stream is not None:
                self._run(rows.data_ptr(), found.data_ptr(), *args, *self._addressed, stream=stream.cuda_stream)
                return
            from ovpatch_plugins.pipe_experts.triton_exchange import symm_all_to_all_kernel

            with torch.cuda.stream(stream):
                compiled = symm_all_to_all_kernel[self._grid](
                    rows.view(self._word), found.view(self._word), *args, *self._fixed, num_warps=_WARPS
                )
        if compiled is not None:  # else it is interpreted
            self._run = compiled[self._grid]


class _Work:
    """An all-to-all under way on a stream of its own; without streams it is over once it is launched.

    Args:
        found: What it writes.
        rows: What it reads; see [Note: kept while it is read].
        stream: Where it runs.
    """

    def __init__(self, found: Tensor, rows: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._tensors: tuple[Tensor, ...] = (found, rows)
        self._stream, self._end = stream, None if stream is None else torch.cuda.Event()
        self._begun = None if stream is None else torch.cuda.current_stream(rows.device)

    def launch(self, kernel: _Kernel, found: Tensor, rows: Tensor, args: Sequence[int]) -> None:
        """Launch behind what the current stream has to do."""
        if self._stream is not None and self._end is not None and self._begun is not None:
            self._stream.wait_stream(self._begun)
            kernel(self._stream, found, rows, args)
            self._end.record(self._stream)
        else:
            kernel(None, found, rows, args)

    def wait(self) -> None:
        """Make the current stream wait, for the kernel and for what the stream of the start copied itself."""
        if self._begun is not None and self._end is not None:
            current = torch.cuda.current_stream(self._begun.device)
            current.wait_event(self._end)
            if current != self._begun:  # that one's memory was sent, too, and is about to be given back to it
                self._begun.wait_event(self._end)
                current.wait_stream(self._begun)
        self._tensors = ()

    def is_over(self) -> bool:
        """Tell whether the tensors need not be kept any more."""
        return not self._tensors or self._end is None or self._end.query()


def _clear(header: Tensor) -> None:
    header.zero_()


# Which groups have a lane over symmetric memory.

_objections: dict[str, None] = {}  # they outlive groups, for the report


def lane_of(group: dist.ProcessGroup, device: torch.device) -> SymmAllToAll | None:
    """Return the lane of a group; None if it can have none, which is the same on all ranks.

    A collective when it is first called for a group and device; no memory is taken after that.

    Args:
        group: The ranks.
        device: Where this rank's tensors are.
    """
    return group_state(group).get_or_create((SymmAllToAll, device), lambda: _made(group, device))


def _made(group: dist.ProcessGroup, device: torch.device) -> SymmAllToAll | None:
    problem = support.unsupported_reason(group, device)
    if not problem:
        try:
            return SymmAllToAll(group, device)
        except memory.LackingError as error:
            problem = str(error)
    _objections[problem] = None
    return None


def possible(how: MoEConfig, group: dist.ProcessGroup, device: torch.device) -> MoEConfig:
    """Return how can be computed what is to be computed so: with c10d's all-to-alls where there is no other lane."""
    if how.exchange == "c10d":
        return how
    is_asked = group.size() > 1 and (how.exchange == "symmetric" or how.cut == "auto")  # else nothing is measured
    return how if is_asked and lane_of(group, device) is not None else dataclasses.replace(how, exchange="c10d")


def objections() -> list[str]:
    """Return why groups that were to have a lane do without."""
    return list(_objections)
