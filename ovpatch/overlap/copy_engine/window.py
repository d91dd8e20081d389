"""Streams on which copies run beside what computes; without streams, where there are none."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.side_streams import quietly_on
from ovpatch.overlap.comm.work import Work, WorkGroup
from ovpatch.overlap.copy_engine.driver import Batch, Driver
from ovpatch.overlap.symm_mem import memory

# How what is to be moved is cut, so that each round fits into a slot.

_KEPT: Final = 1024  # calls of a model's buckets, which are the same in every step


class Piece(NamedTuple):
    """A part of a tensor's part.

    Attributes:
        tensor: Which tensor.
        begin: First element.
        end: One past the last element.
        at: Where it lies in the slot.
    """

    tensor: int
    begin: int
    end: int
    at: int


@lru_cache(_KEPT)
def rounds(sizes: tuple[int, ...], room: int, grain: int = 1) -> Sequence[Sequence[Piece]]:
    """Return the pieces of each round.

    Args:
        sizes: Elements of each tensor that a rank contributes.
        room: Elements that a slot holds; a multiple of ``grain``.
        grain: Pieces begin at multiples of so many elements.
    """
    return tuple(map(tuple, _cut(sizes, room, grain)))


def _cut(sizes: Sequence[int], room: int, grain: int) -> Iterator[list[Piece]]:
    pieces: list[Piece] = []
    at = 0
    for tensor, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if at == room:
                yield pieces
                pieces, at = [], 0
            end = min(size, begin + room - at)
            pieces.append(Piece(tensor, begin, end, at))
            at = min(-(-(at + end - begin) // grain) * grain, room)
            begin = end
    if pieces:
        yield pieces


# Memory of each rank that the others can copy from and to.

SLOT_BYTES: Final = 64 * 1024 * 1024  # of a half: copies of some MiB each come near to a link's rate


@dataclass(frozen=True)
class Window:
    """One allocation on every rank.

    Attributes:
        ranks: All ranks' memory, bytes, by group rank; the own one among them.
        meet: Makes a stream (the host, without streams) wait until all ranks' are here.
        copy: Copies, on a stream.
        unheard: Returns the ranks whose memory cannot be used, by trial; called once all ranks have windows.
        keeps: What keeps the memory.
    """

    ranks: list[Tensor]
    meet: Callable[[int], None]
    copy: Callable[[Batch, int], None]
    unheard: Callable[[], list[int]] = list
    keeps: Any = None


Allocate = Callable[[int, dist.ProcessGroup, torch.device], Window]


def allocate(size: int, group: dist.ProcessGroup, device: torch.device) -> Window:
    """Allocate symmetric memory on all ranks, which call this together.

    Args:
        size: Bytes, the same on all ranks.
        group: The ranks.
        device: Where.

    Raises:
        RuntimeError: Memory cannot be shared, or streams cannot wait for it.
    """
    found = memory.allocate_on_all(size + BYTES, group, device, lambda own: _clear(own[size:]))
    whole = [found.keeps.get_buffer(rank, (size + BYTES,), torch.uint8) for rank in range(group.size())]
    ranks = [one[:size] for one in whole]
    try:
        driver = Driver()
    except (OSError, AttributeError) as error:  # no such library, or function
        raise RuntimeError(f"the CUDA driver's library lacks what is needed: {error}") from error
    meeting = Meeting(driver, [one[size:] for one in whole], group.rank())
    stream = torch.cuda.Stream(device)
    with quietly_on(stream):
        meeting.try_out(stream.cuda_stream)
    torch.cuda.synchronize(device)

    def unheard() -> list[int]:
        with quietly_on(stream):
            return meeting.unheard(stream.cuda_stream)

    return Window(ranks, meeting, driver.copy, unheard, found)


def _clear(signals: Tensor) -> None:
    signals.zero_()


# Meetings of all ranks in stream order, without a kernel.
#
# [Note: no kernel] A kernel that waits needs room on a multiprocessor, and finds none for a tenth of a millisecond
# while products fill the GPU. So streams write numbers to each other's memory, and the driver has them wait for
# numbers that come. Numbers only grow, and nobody resets what others read. From CUDA 13.1 on drivers do not support
# such writes to another GPU's memory (https://github.com/NVIDIA/nccl/issues/2052). There a number is written at home
# and copied, which took longer on two H200: a step of 210 ms without communication took 227 with writes, one of 212
# took 237 with copies.
#
# [Note: tried out] Hosts may offer access to other GPUs' memory through which nothing arrives, or something else, as
# with some IOMMUs. A stream that waits for a number from there would wait for ever, so ranks try it out before they
# meet.

BYTES: Final = 4096  # of signals in a window; zeros at first
_APART: Final = 128  # bytes between the signals of two ranks
_NUMBER: Final = 4  # bytes
_MINE: Final = BYTES // _APART - 1  # the place of the number that others get
_TRIED: Final = 1


class Meeting:
    """Makes a stream wait until those of all ranks are here.

    Args:
        driver: Of the device.
        signals: All ranks' signals, :data:`BYTES` each, by group rank; at most ten.
        rank: This rank.
    """

    def __init__(self, driver: Driver, signals: Sequence[Tensor], rank: int) -> None:
        self._driver, self._number, self._rank, self._world = driver, 0, rank, len(signals)
        self._signals = signals
        others = [other for other in range(len(signals)) if other != rank]
        self._mine = self._place(rank, _MINE)
        self._told = [self._place(other, rank) for other in others]
        self._awaited = [self._place(rank, other) for other in others]

    def try_out(self, stream: int) -> None:
        """Send a number to everybody, and wait for what this rank sent to itself: no rank waits for another.

        Raises:
            RuntimeError: The driver refuses.
        """
        world, rank = self._world, self._rank
        self._tell([self._place(other, world + rank) for other in range(world)], _TRIED, stream)
        self._driver.write(self._mine, _TRIED, stream)  # for :meth:`unheard`
        self._driver.wait(self._place(rank, world + rank), _TRIED, stream)

    def unheard(self, stream: int) -> list[int]:
        """Return the ranks with which numbers cannot be exchanged. The host waits; all have tried out before.

        Args:
            stream: The current stream.
        """
        world, own = self._world, self._signals[self._rank].view(torch.int32).view(-1, _APART // _NUMBER)[:, 0]
        asked = [self._place(self._rank, 2 * world + other) for other in range(world)]
        theirs = [self._place(other, _MINE) for other in range(world)]
        self._driver.copy(Batch(asked, theirs, [_NUMBER] * world), stream)
        found = own[world : 3 * world].view(2, world).tolist()
        return [rank for rank in range(world) if any(numbers[rank] != _TRIED for numbers in found)]

    def __call__(self, stream: int) -> None:
        """Meet; see the class."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._tell(self._told, self._number, stream)
        for address in self._awaited:
            self._driver.wait(address, self._number, stream)

    def _place(self, rank: int, index: int) -> int:
        """Return the address of a number."""
        return self._signals[rank].data_ptr() + index * _APART

    def _tell(self, places: list[int], number: int, stream: int) -> None:
        """Bring a number to places in all ranks' memory."""
        if self._driver.writes_to_peers:
            for place in places:
                self._driver.write(place, number, stream)
        else:
            self._driver.write(self._mine, number, stream)
            self._driver.copy(Batch(places, [self._mine] * len(places), [_NUMBER] * len(places)), stream)


_PAUSE_S: Final = 0.001


class Lanes(Protocol):
    """Two lanes: what a rank lays out, and what it takes once all have met. Streams are named by their handles."""

    def begin(self) -> Any:
        """Start behind what the current stream has, and return that stream."""

    def lay_out(self) -> int:
        """Return the stream to lay something out in, behind the last meeting."""

    def take(self) -> int:
        """Return the stream to take something in, behind what was laid out last."""

    def met(self) -> None:
        """Note that a meeting has been issued in the lane for taking."""

    def end(self, launched: Any, tensors: Sequence[Tensor]) -> Work:
        """Return what waits for all of it, and keeps tensors until then; ``launched`` is what has launched it."""

    def behind(self) -> AbstractContextManager[None]:
        """Run the block behind all of it."""

    def on_device(self) -> AbstractContextManager[Any]:
        """Run the block with the lanes' device as the current one, as the driver's functions want it."""

    def drain(self, timeout_s: float) -> bool:
        """Have the host wait for both lanes; return whether they came to their ends in time."""


class Streams:
    """Lanes of a GPU.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of high priority: sums are to find room beside products.
        self._out, self._in = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
        self._begun, self._met, self._laid = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
        self._handles: Final = self._out.cuda_stream, self._in.cuda_stream

    def begin(self) -> Any:
        """See :class:`Lanes`."""
        launched = torch.cuda.current_stream(self._device)
        self._begun.record(launched)
        self._out.wait_event(self._begun)
        self._in.wait_event(self._begun)
        return launched

    def lay_out(self) -> int:
        """See :class:`Lanes`."""
        self._out.wait_event(self._met)
        return self._handles[0]

    def take(self) -> int:
        """See :class:`Lanes`."""
        self._laid.record(self._out)
        self._in.wait_event(self._laid)
        return self._handles[1]

    def met(self) -> None:
        """See :class:`Lanes`."""
        self._met.record(self._in)

    def end(self, launched: Any, tensors: Sequence[Tensor]) -> Work:
        """See :class:`Lanes`."""
        done = torch.cuda.Event()
        done.record(self._in)
        return _Copying(self._device, launched, done, tensors)

    def behind(self) -> AbstractContextManager[None]:
        """See :class:`Lanes`."""
        return quietly_on(self._in)

    def on_device(self) -> AbstractContextManager[Any]:
        """See :class:`Lanes`."""
        return torch.cuda.device(self._device)

    def drain(self, timeout_s: float) -> bool:
        """See :class:`Lanes`."""
        if torch.cuda._is_in_bad_fork():  # what is under way is the parent's
            return True
        deadline = time.monotonic() + timeout_s
        while not (self._out.query() and self._in.query()):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


class _Copying:
    """Copies until an event.

    If nobody ever waits, the stream that launched them does when this is let go of: the allocator gives memory that
    was a tensor's to whatever runs there next.
    """

    def __init__(
        self, device: torch.device, launched: torch.cuda.Stream, done: torch.cuda.Event, tensors: Sequence[Tensor]
    ) -> None:
        self._device, self._launched, self._done, self._tensors = device, launched, done, tensors
        self._late = weakref.finalize(self, launched.wait_event, done)
        self._late.atexit = False

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._done)
        if current == self._launched:
            self._late.detach()
            self._tensors = ()


class NoStreams:
    """Lanes of a device without streams: all is done when it is called."""

    def begin(self) -> None:
        """See :class:`Lanes`."""

    def lay_out(self) -> int:
        """See :class:`Lanes`."""
        return 0

    def take(self) -> int:
        """See :class:`Lanes`."""
        return 0

    def met(self) -> None:
        """See :class:`Lanes`."""

    def end(self, launched: None, tensors: Sequence[Tensor]) -> Work:
        """See :class:`Lanes`."""
        del launched, tensors
        return WorkGroup(())

    def behind(self) -> AbstractContextManager[None]:
        """See :class:`Lanes`."""
        return nullcontext()

    def on_device(self) -> AbstractContextManager[Any]:
        """See :class:`Lanes`."""
        return nullcontext()

    def drain(self, timeout_s: float) -> bool:
        """See :class:`Lanes`."""
        del timeout_s
        return True
