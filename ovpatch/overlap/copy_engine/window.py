"""The staging window of a group, its stream barrier, and the streams on which copies run beside computation.

A copy within a GPU is a kernel, unless the driver is asked to run it beside computation. A batch of copies can ask
that; drivers obey from CUDA 13.1 on. Drivers older than CUDA 13.0 have no batches: there copies are issued one by one.
Torch does not offer these functions of the driver, so they are called through the driver's library.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import Work, WorkGroup
from ovpatch.overlap.comm.streams import unwatched_stream
from ovpatch.overlap.symm_mem import memory

# A step moves hundreds of pieces. Making a tensor for each takes the host longer than the copy takes the device, so
# pieces are addresses, and a tensor is made only where one is needed.


class Batch(NamedTuple):
    """Copies, in any order among themselves."""

    to: list[int]  # addresses to copy to
    of: list[int]  # addresses to copy from
    sizes: list[int]  # bytes


class Span(NamedTuple):
    """A range of elements of a contiguous tensor."""

    memory: Tensor
    begin: int  # index of the first element in ``memory``
    numel: int  # number of elements
    address: int  # address of the first element

    def tensor(self) -> Tensor:
        """Return the range as a tensor, ``[numel]``."""
        return self.memory.view(-1).narrow(0, self.begin, self.numel)


class Addend(NamedTuple):
    """A sum of this rank's term and those in the other ranks' slots."""

    own: Span  # this rank's term
    out: Span  # the output, of the same length
    at: int  # index of the first element of the others' terms in their slots


_AT_LEAST: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares differences, so that numbers may wrap
_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_NO_PEERS: Final = 13010  # CUDA 13.1; from there on, streams write to their own GPU's memory only
_BESIDE_COMPUTE: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the hints, of a type and a number each, are for managed memory."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class Driver:
    """The driver's functions, on streams given by their handles.

    Construction raises OSError if there is no such library, and AttributeError if no stream can wait for memory.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        value = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._write = _function(library, "cuStreamWriteValue32_v2", value)
        self._wait = _function(library, "cuStreamWaitValue32_v2", value)
        version = ctypes.c_int(0)
        _check(library.cuDriverGetVersion(ctypes.byref(version)))
        self.writes_to_peers = version.value < _NO_PEERS  # whether write() reaches other GPUs' memory
        one = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._copy_one = _function(library, "cuMemcpyAsync", one)
        self._copy: Callable[..., int] | None = None
        if hasattr(library, "cuMemcpyBatchAsync_v2"):
            places = ctypes.POINTER(ctypes.c_uint64)
            batch = (places, places, places, ctypes.c_size_t, ctypes.POINTER(_Attributes), places, ctypes.c_size_t)
            self._copy = _function(library, "cuMemcpyBatchAsync_v2", (*batch, ctypes.c_void_p))
        self._attributes = _Attributes(_IN_STREAM_ORDER, (ctypes.c_int * 4)(), _BESIDE_COMPUTE)
        self._first = ctypes.c_uint64(0)  # the copy from which on the attributes hold

    def write(self, address: int, number: int, stream: int) -> None:
        """Write a number of 32 bits after the stream's earlier work is done and visible to other GPUs."""
        _check(self._write(stream, address, number, 0))

    def wait(self, address: int, number: int, stream: int) -> None:
        """Make the stream wait until memory holds a number of 32 bits, or a later one."""
        _check(self._wait(stream, address, number, _AT_LEAST))

    def copy(self, batch: Batch, stream: int) -> None:
        """Copy, in any order. The memory must outlive the copies."""
        if self._copy is None:
            for to, of, size in zip(*batch, strict=True):
                _check(self._copy_one(to, of, size, stream))
            return
        count = len(batch.to)
        numbers = ctypes.c_uint64 * count
        tos, ofs, sizes = (numbers(*given) for given in batch)
        _check(self._copy(tos, ofs, sizes, count, self._attributes, self._first, 1, stream))


def _function(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Callable[..., int]:
    function = library[name]
    function.argtypes, function.restype = types, ctypes.c_int
    return function


def _check(status: int) -> None:
    if status:
        raise RuntimeError(
            f"ovpatch: the CUDA driver refused what a stream was to do (CUresult {status}). If it happens again, set "
            "OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off."
        )


# --- rounds ---

_CACHED: Final = 1024  # calls; those of a model's buckets are the same in every step


class Piece(NamedTuple):
    """A range of one tensor's elements in a slot."""

    tensor: int  # index of the tensor
    begin: int  # first element
    end: int  # one past the last element
    at: int  # index of the first element in the slot


@lru_cache(_CACHED)
def rounds(sizes: tuple[int, ...], room: int, grain: int = 1) -> Sequence[Sequence[Piece]]:
    """Return the pieces of each round, which fit into a slot of ``room`` elements, a multiple of ``grain``.

    ``sizes`` are the elements of each tensor that a rank contributes. Pieces begin at multiples of ``grain``.
    """
    cut: list[list[Piece]] = []
    at = room  # in the last round's slot
    for tensor, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if at == room:
                cut.append([])
                at = 0
            end = min(size, begin + room - at)
            cut[-1].append(Piece(tensor, begin, end, at))
            at = min(-(-(at + end - begin) // grain) * grain, room)
            begin = end
    return cut


# --- the window ---

SLOT_BYTES: Final = 64 * 1024 * 1024  # of a half: copies of some MiB each get close to a link's bandwidth


@dataclass(frozen=True)
class Window:
    """The staging memory of all ranks, which each can copy from and to."""

    ranks: list[Tensor]  # all ranks' memory, uint8, by group rank; this rank's among them
    meet: Callable[[int], None]  # makes a stream (the host, without streams) wait until all ranks' streams have arrived
    copy: Callable[[Batch, int], None]  # copies a batch on a stream
    unheard: Callable[[], list[int]] = list  # ranks whose memory fails a trial; called once all have windows
    abort: Callable[[int], None] = lambda _: None  # has streams go on that wait in ``meet`` for missing ranks
    keeps: Any = None  # keeps the memory alive
    driver: Any = None  # a Driver, which makes a stream write a number, or wait for one


AllocateWindow = Callable[[int, dist.ProcessGroup, torch.device], Window]


def allocate_window(size: int, group: dist.ProcessGroup, device: torch.device) -> Window:
    """Allocate the same number of bytes of symmetric memory on all ranks, which call this together.

    RuntimeError if memory cannot be shared, or if streams cannot wait for it.
    """
    found = memory.allocate_on_all(size + BYTES, group, device, lambda own: own[size:].zero_())
    whole = [found.keeps.get_buffer(rank, (size + BYTES,), torch.uint8) for rank in range(group.size())]
    ranks = [one[:size] for one in whole]
    try:
        driver = Driver()
    except (OSError, AttributeError) as error:  # no such library, or function
        raise RuntimeError(f"the CUDA driver's library lacks what is needed: {error}") from error
    meeting = StreamBarrier(driver, [one[size:] for one in whole], group.rank())
    stream = torch.cuda.Stream(device)
    with unwatched_stream(stream):
        meeting.try_out(stream.cuda_stream)
    torch.cuda.synchronize(device)

    def unheard() -> list[int]:
        with unwatched_stream(stream):
            return meeting.unheard(stream.cuda_stream)

    return Window(ranks, meeting, driver.copy, unheard, meeting.abort, found, driver)


# --- the stream barrier ---

BYTES: Final = 4096  # of signals in a window, which are zeros at first
_APART: Final = 128  # bytes between the signals of two ranks
_NUMBER: Final = 4  # bytes
_MINE: Final = BYTES // _APART - 1  # index of the number that is copied to the others
_TRIED: Final = 1


class StreamBarrier:
    """Makes a stream wait until the streams of all ranks, at most ten, have arrived, without a kernel.

    ``signals`` are all ranks' signals, :data:`BYTES` each, by group rank.

    [Note: no kernel] A kernel that waits needs room on a multiprocessor, which it may not find for long while products
    fill the GPU. So streams write numbers to each other's memory, and the driver makes them wait for the numbers.
    Numbers only grow and are never reset. From CUDA 13.1 on, drivers do not support such writes to another GPU's memory
    (https://github.com/NVIDIA/nccl/issues/2052): there a number is written locally and copied, which takes longer. Some
    hosts, with some IOMMUs, offer access to other GPUs' memory through which nothing arrives. A stream would wait for
    ever there, so ranks make a trial first.
    """

    def __init__(self, driver: Driver, signals: Sequence[Tensor], rank: int) -> None:
        self._driver, self._number, self._rank, self._world = driver, 0, rank, len(signals)
        self._signals = signals
        others = [other for other in range(len(signals)) if other != rank]
        self._mine = self._place(rank, _MINE)
        self._told = [self._place(other, rank) for other in others]
        self._awaited = [self._place(rank, other) for other in others]

    def try_out(self, stream: int) -> None:
        """Send a number to all ranks, and wait for that of this rank only; RuntimeError if the driver refuses."""
        world, rank = self._world, self._rank
        places = [self._place(other, world + rank) for other in range(world)]
        tell(self._driver, places, self._mine, _TRIED, stream)
        self._driver.write(self._mine, _TRIED, stream)  # for unheard()
        self._driver.wait(self._place(rank, world + rank), _TRIED, stream)

    def unheard(self, stream: int) -> list[int]:
        """Return the ranks with which numbers cannot be exchanged. The host waits; all have sent theirs before."""
        world, own = self._world, self._signals[self._rank].view(torch.int32).view(-1, _APART // _NUMBER)[:, 0]
        asked = [self._place(self._rank, 2 * world + other) for other in range(world)]
        theirs = [self._place(other, _MINE) for other in range(world)]
        self._driver.copy(Batch(asked, theirs, [_NUMBER] * world), stream)
        found = own[world : 3 * world].view(2, world).tolist()
        return [rank for rank in range(world) if any(numbers[rank] != _TRIED for numbers in found)]

    def __call__(self, stream: int) -> None:
        """Make a stream wait for all ranks' streams."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        tell(self._driver, self._told, self._mine, self._number, stream)
        for address in self._awaited:
            self._driver.wait(address, self._number, stream)

    def abort(self, stream: int) -> None:
        """Let waiting streams of this rank go on, by a stream that does not wait; ranks that still come are ahead."""
        for address in self._awaited:
            self._driver.write(address, self._number, stream)

    def _place(self, rank: int, index: int) -> int:
        """Return the address of a number."""
        return self._signals[rank].data_ptr() + index * _APART


def tell(driver: Driver, places: list[int], mine: int, number: int, stream: int) -> None:
    """Write a number behind a stream's earlier work to addresses in other ranks' memory; see [Note: no kernel].

    ``mine`` is the address of a number in this rank's memory, for calls on one stream only.
    """
    if driver.writes_to_peers:
        for place in places:
            driver.write(place, number, stream)
    else:
        driver.write(mine, number, stream)
        driver.copy(Batch(places, [mine] * len(places), [_NUMBER] * len(places)), stream)


_PAUSE_S: Final = 0.001


class CopyStreams:
    """The streams of copies into slots, and of those out of them after the barrier, given by their handles.

    On devices without streams, each copy is done when it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._exist = device, device.type == "cuda"
        if self._exist:
            # High priority, so that sums find room beside products.
            self._out, self._in = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
            self._begun, self._met, self._laid = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
            self._handles: Final = self._out.cuda_stream, self._in.cuda_stream

    def begin(self) -> Any:
        """Start behind the current stream's work; return that stream."""
        if not self._exist:
            return None
        launched = torch.cuda.current_stream(self._device)
        self._begun.record(launched)
        self._out.wait_event(self._begun)
        self._in.wait_event(self._begun)
        return launched

    def lay_out(self) -> int:
        """Return the stream for copies into slots, behind the last barrier."""
        if not self._exist:
            return 0
        self._out.wait_event(self._met)
        return self._handles[0]

    def take(self) -> int:
        """Return the stream for copies out of slots, behind the last copies into them."""
        if not self._exist:
            return 0
        self._laid.record(self._out)
        self._in.wait_event(self._laid)
        return self._handles[1]

    def met(self) -> None:
        """Record that a barrier has been issued on the stream for copies out of slots."""
        if self._exist:
            self._met.record(self._in)

    def end(self, launched: Any, tensors: Sequence[Tensor]) -> Work:
        """Return a handle that waits for all copies since :meth:`begin`, and keeps their tensors until then."""
        if not self._exist:
            return WorkGroup(())
        done = torch.cuda.Event()
        done.record(self._in)
        return _Copying(self._device, launched, done, tensors)

    def behind(self) -> AbstractContextManager[None]:
        """Run the block's work behind all copies."""
        return unwatched_stream(self._in) if self._exist else nullcontext()

    def on_device(self) -> AbstractContextManager[Any]:
        """Run the block with the streams' device as the current one, which the driver's functions need."""
        return torch.cuda.device(self._device) if self._exist else nullcontext()

    def drain(self, timeout_s: float, abort: Callable[[int], None] | None = None) -> bool:
        """Make the host wait for both streams; return whether they completed in time.

        ``abort`` is called meanwhile, with the handle of another stream.
        """
        if not self._exist or torch.cuda._is_in_bad_fork():  # there, the copies are the parent's
            return True
        deadline = time.monotonic() + timeout_s
        other = None if abort is None else torch.cuda.Stream(self._device)
        while not (self._out.query() and self._in.query()):
            if time.monotonic() > deadline:
                return False
            if abort is not None and other is not None:
                abort(other.cuda_stream)  # again and again: ranks that come write their earlier numbers over it
            time.sleep(_PAUSE_S)
        return True


class _Copying:
    """Copies until an event.

    Without a call of :meth:`wait`, the launching stream waits when this object is dropped: the allocator gives the
    tensors' memory to that stream's next work.
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
