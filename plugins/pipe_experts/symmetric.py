"""All-to-alls over memory that the ranks of one host share, by a few programs of one kernel.

[Note: kept while it is read] Memory that is given back is used again in the order of the stream on which it was
allocated. That stream waits for rows before they are read, and what they were sent from is given back after that. Rows
that are never waited for, after an exception, are kept until the kernel has ended.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.labels import label, span
from ovpatch.overlap.symmetric import memory
from ovpatch.overlap.works import Pending
from ovpatch_plugins.pipe_experts.counters import COUNTERS

CHANNELS: Final = 16  # programs, each of which takes a multiprocessor
_SLOT: Final = 128 * 1024  # bytes; see [Note: channels] of the kernel
_DEPTH: Final = 4
_BLOCK: Final = 8192  # words that a program moves at a time
_WARPS: Final = 8
_TABLES: Final = 64
_WORDS: Final = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
_ALIGNED: Final = 16  # bytes

Counts = Sequence[int]


class LackingError(RuntimeError):
    """Ranks have no memory for what all of them need."""


class Symmetric:
    """A lane over symmetric memory, for one group on one device; see [Note: channels] of the kernel.

    Rows that stay on this rank are copied beside it. The host waits for nothing.

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
        from ovpatch_plugins.pipe_experts.kernels_symmetric import HEADER

        self._world, self._rank, self._device = group.size(), group.rank(), device
        self.channels, self._slot, self._depth, self._block = channels, slot, depth, block
        size = HEADER.value + channels * self._world * depth * slot
        self._memory = _allocated(size, HEADER.value, group, device)
        self._peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(HEADER.value // 8, dtype=torch.int64, device=device)
        self._tables: collections.OrderedDict[tuple[Counts, Counts], Tensor] = collections.OrderedDict()
        self._under_way: collections.deque[_Work] = collections.deque()
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)]
            torch.cuda.synchronize(device)  # these are going to read what the current one has written

    def start(self, found: Tensor, rows: Tensor, received: Counts, sent: Counts) -> Pending:
        """See :meth:`ovpatch_plugins.pipe_experts.lanes.Lane.start`."""
        while self._under_way and self._under_way[0].is_over():
            self._under_way.popleft()
        size, word = _word(rows)
        rows = rows if rows.data_ptr() % size == 0 else rows.clone()  # an expert may return any view
        if found.data_ptr() % size:
            raise ValueError(f"memory for received rows begins at no multiple of {size} bytes: give fresh memory")
        work = _Work(self._device, (found, rows))
        with span(label("pipe_experts", "all_to_all")):
            if sum(sent) + sum(received) > 2 * sent[self._rank]:
                work.run(self._streams[:1], lambda: self._launch(found, rows, received, sent, word, size == _ALIGNED))
            if sent[self._rank]:
                work.run(self._streams[1:], lambda: self._copy_own(found, rows, received, sent))
        self._under_way.append(work)
        COUNTERS.symmetric += 1
        return Pending((work,))

    def _copy_own(self, found: Tensor, rows: Tensor, received: Counts, sent: Counts) -> None:
        begin, put, count = sum(sent[: self._rank]), sum(received[: self._rank]), sent[self._rank]
        found[put : put + count].copy_(rows[begin : begin + count])

    def _launch(
        self, found: Tensor, rows: Tensor, received: Counts, sent: Counts, word: torch.dtype, aligned: bool
    ) -> None:
        from ovpatch_plugins.pipe_experts.kernels_symmetric import symm_all_to_all_kernel

        slot = self._slot // word.itemsize
        width = rows[:0].view(word).shape[1:].numel()
        with torch.cuda.device_of(rows):  # Triton launches on the current one
            symm_all_to_all_kernel[(self.channels,)](
                rows.view(word), found.view(word), self._table(received, sent), self._peers, self._state, self._rank,
                width, self._world, self.channels, slot, self._depth, self._block, aligned, num_warps=_WARPS,
            )  # fmt: skip

    def _table(self, received: Counts, sent: Counts) -> Tensor:
        """Return counts as the kernel reads them, made on its stream; those of the way back are at hand then, too."""
        key = tuple(sent), tuple(received)
        if key not in self._tables:
            there, back = ([*counts, *itertools.accumulate(counts[:-1], initial=0)] for counts in key)
            pinned = torch.tensor([*there, *back, *there], device="cpu", pin_memory=self._device.type == "cuda")
            both = pinned.to(self._device, non_blocking=True)
            self._tables[key[::-1]], self._tables[key] = both[len(there) :], both[: 2 * len(there)]
            while len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        return self._tables[key]


class _Work:
    """An all-to-all under way on streams of its own; without streams it is over.

    Args:
        device: Where.
        tensors: What it reads and writes; see [Note: kept while it is read].
    """

    def __init__(self, device: torch.device, tensors: tuple[Tensor, ...]) -> None:
        self._device, self._tensors = device, tensors
        self._current = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._begin = None if self._current is None else self._current.record_event()
        self._ends: list[torch.cuda.Event] = []

    def run(self, stream: Sequence[torch.cuda.Stream], launch: Callable[[], None]) -> None:
        """Launch on a stream, if there is one, behind what the current one had to do when this was made."""
        if self._begin is None:
            launch()
            return
        stream[0].wait_event(self._begin)
        with torch.cuda.stream(stream[0]):
            launch()
            self._ends.append(stream[0].record_event())

    def wait(self) -> None:
        """Make the current stream wait."""
        if self._ends:
            stream = torch.cuda.current_stream(self._device)
            for end in self._ends:
                stream.wait_event(end)
        self._tensors = ()

    def is_over(self) -> bool:
        """Tell whether the tensors need not be kept any more."""
        return not self._tensors or all(end.query() for end in self._ends)


def _word(rows: Tensor) -> tuple[int, torch.dtype]:
    """Return of how many bytes addresses have to be multiples, and in what rows are moved."""
    row = rows.shape[1:].numel() * rows.element_size()
    if row % _ALIGNED == 0:
        return _ALIGNED, torch.int32
    return next((size, word) for size, word in _WORDS if row % size == 0)


def _allocated(size: int, header: int, group: dist.ProcessGroup, device: torch.device) -> memory.Memory:
    """Allocate on all ranks, or on none.

    Raises:
        LackingError: A rank could not; on all ranks.
    """
    asked: list[bool] = []

    def prepare(own: Tensor) -> None:
        asked.append(True)
        own[:header].zero_()
        _agree("", group)

    try:
        return memory.allocate(size, group, device, prepare)
    except RuntimeError as error:  # torch has no class of its own for what the driver refuses
        if not asked:
            _agree(f"{size / 2**20:.0f} MiB of symmetric memory: {str(error).splitlines()[0]}", group)
        raise


def _agree(problem: str, group: dist.ProcessGroup) -> None:
    found: list[str] = [""] * group.size()
    dist.all_gather_object(found, problem, group=group)
    told = [f"{text} (rank {dist.get_global_rank(group, i)})" for i, text in enumerate(found) if text]
    if told:
        raise LackingError("; ".join(told))
