"""The staging window of a group, its stream barrier, and the streams of copies.

A copy within a GPU is a kernel, unless the driver receives a request to run it concurrently with
computation. A batch of copies can make that request, and drivers obey from CUDA 13.1 on. Drivers
older than CUDA 13.0 have no batches, so copies are issued singly. torch does not offer these
functions of the driver, so this module calls them through the driver's library.
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
from ovpatch.overlap.kernels import symmetric_memory as memory

# A step moves hundreds of pieces. To create a tensor for each takes the host longer than the copy
# takes the device. So pieces are addresses, and tensors are created only if an operation needs one.


class Batch(NamedTuple):
    """Copies that may run in any order.

    Attributes:
        to: The addresses to copy to.
        of: The addresses to copy from.
        sizes: The bytes of each copy.
    """

    to: list[int]
    of: list[int]
    sizes: list[int]


class Span(NamedTuple):
    """A range of elements of a contiguous tensor.

    Attributes:
        memory: The tensor.
        begin: The index of the first element in ``memory``.
        numel: The number of elements.
        address: The address of the first element.
    """

    memory: Tensor
    begin: int
    numel: int
    address: int

    def tensor(self) -> Tensor:
        """Return the range as a tensor, ``[numel]``."""
        return self.memory.view(-1).narrow(0, self.begin, self.numel)


class Addend(NamedTuple):
    """A sum of this rank's term and the terms in the slots of its peers.

    Attributes:
        own: The term of this rank.
        out: The output, of the same length.
        at: The index of the first element of the peers' terms in their slots.
    """

    own: Span
    out: Span
    at: int


# CU_STREAM_WAIT_VALUE_GEQ. The driver compares differences, so numbers may wrap.
_AT_LEAST: Final = 0
# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_IN_STREAM_ORDER: Final = 1
# CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_OVERLAP_COMPUTE: Final = 1
# CUDA 13.1. From this version on, streams cannot write to the memory of other GPUs.
_FIRST_VERSION_WITHOUT_PEER_WRITES: Final = 13010


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The hints, each a type and a number, matter only for managed memory."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class Driver:
    """The functions of the driver, which take streams by their handles.

    Attributes:
        writes_to_peers: Whether :meth:`write` reaches the memory of other GPUs.
    """

    def __init__(self) -> None:
        """Load the driver's library.

        Raises:
            OSError: There is no such library.
            AttributeError: The driver is too old for streams that wait for memory.
        """
        library = ctypes.CDLL("libcuda.so.1")
        value = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._write = _function(library, "cuStreamWriteValue32_v2", value)
        self._wait = _function(library, "cuStreamWaitValue32_v2", value)
        version = ctypes.c_int(0)
        _check(library.cuDriverGetVersion(ctypes.byref(version)))
        self.writes_to_peers = version.value < _FIRST_VERSION_WITHOUT_PEER_WRITES
        single = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._copy_single = _function(library, "cuMemcpyAsync", single)
        # The function for batches, or None if the driver is too old.
        self._copy: Callable[..., int] | None = None
        if hasattr(library, "cuMemcpyBatchAsync_v2"):
            places = ctypes.POINTER(ctypes.c_uint64)
            batch = (
                places,
                places,
                places,
                ctypes.c_size_t,
                ctypes.POINTER(_Attributes),
                places,
                ctypes.c_size_t,
            )
            self._copy = _function(library, "cuMemcpyBatchAsync_v2", (*batch, ctypes.c_void_p))
        self._attributes = _Attributes(_IN_STREAM_ORDER, (ctypes.c_int * 4)(), _OVERLAP_COMPUTE)
        # The index of the first copy of a batch that has these attributes.
        self._first = ctypes.c_uint64(0)

    def write(self, address: int, number: int, stream: int) -> None:
        """Write a 32-bit number once the stream's earlier work is visible to other GPUs."""
        _check(self._write(stream, address, number, 0))

    def wait(self, address: int, number: int, stream: int) -> None:
        """Let the stream wait until memory holds this 32-bit number, or a later one."""
        _check(self._wait(stream, address, number, _AT_LEAST))

    def copy(self, batch: Batch, stream: int) -> None:
        """Start copies, in any order. The memory must outlive them."""
        if self._copy is None:
            for to, of, size in zip(*batch, strict=True):
                _check(self._copy_single(to, of, size, stream))
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
            f"ovpatch: the CUDA driver refused an operation on a stream (CUresult {status}). If it "
            "happens again, set OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off, and another schedule than "
            "copy."
        )


# --- rounds ---

# Calls of `rounds` whose results are cached. The calls of a model's buckets repeat in every step.
_NUM_CACHED_CALLS: Final = 1024


class Piece(NamedTuple):
    """A range of one tensor's elements in a slot.

    Attributes:
        tensor: The index of the tensor.
        begin: The first element.
        end: The element after the last one.
        at: The index of the first element in the slot.
    """

    tensor: int
    begin: int
    end: int
    at: int


@lru_cache(_NUM_CACHED_CALLS)
def rounds(sizes: tuple[int, ...], room: int, grain: int = 1) -> Sequence[Sequence[Piece]]:
    """Return the pieces of each round, which together fit into a slot.

    Args:
        sizes: The number of elements of each tensor that a rank contributes.
        room: The number of elements of a slot, a multiple of ``grain``.
        grain: Pieces begin at multiples of this number of elements. Default: 1.
    """
    cut: list[list[Piece]] = []
    # The first free element in the slot of the last round. A full slot starts a new round.
    at = room
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

#: Bytes of a half of the window. Copies of some MiB each get close to the bandwidth of a link.
SLOT_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True)
class Window:
    """The staging memory of all ranks, from and to which each rank can copy.

    Attributes:
        ranks: The memory of all ranks, this one included, uint8, by group rank.
        meet: Lets a stream wait until the streams of all ranks have arrived. Without streams, the
            host waits.
        copy: Copies a batch on a stream.
        unheard: Returns the ranks whose memory fails a trial. Call it once all ranks have windows.
        abort: Releases streams that wait in ``meet`` for missing ranks.
        keeps: Keeps the memory alive.
        driver: A :class:`Driver`, by which a stream writes a number or waits for it.
    """

    ranks: list[Tensor]
    meet: Callable[[int], None]
    copy: Callable[[Batch, int], None]
    unheard: Callable[[], list[int]] = list
    abort: Callable[[int], None] = lambda _: None
    keeps: Any = None
    driver: Any = None


AllocateWindow = Callable[[int, dist.ProcessGroup, torch.device], Window]


def allocate_window(size: int, group: dist.ProcessGroup, device: torch.device) -> Window:
    """Allocate the same number of bytes of symmetric memory on all ranks, which call this together.

    Raises:
        RuntimeError: Memory cannot be shared, or streams cannot wait for it.
    """
    # The signals of the stream barrier follow the staging memory. No rank may signal before all
    # signals are zero, so they are zeroed before any peer can reach them.
    found = memory.allocate_on_all(size + BYTES, group, device, lambda own: own[size:].zero_())
    buffers = [
        found.keeps.get_buffer(rank, (size + BYTES,), torch.uint8) for rank in range(group.size())
    ]
    ranks = [buffer[:size] for buffer in buffers]
    try:
        driver = Driver()
    except (OSError, AttributeError) as error:
        message = f"the CUDA driver's library lacks a required function: {error}"
        raise RuntimeError(message) from error
    barrier = StreamBarrier(driver, [buffer[size:] for buffer in buffers], group.rank())
    stream = torch.cuda.Stream(device)
    with unwatched_stream(stream):
        barrier.try_out(stream.cuda_stream)
    torch.cuda.synchronize(device)

    def unheard() -> list[int]:
        with unwatched_stream(stream):
            return barrier.unheard(stream.cuda_stream)

    return Window(ranks, barrier, driver.copy, unheard, barrier.abort, found, driver)


# --- the stream barrier ---

#: Bytes of the signals in a window, which are zeros at first.
BYTES: Final = 4096
# Bytes between the signals of two ranks, and bytes of a signal.
_SIGNAL_STRIDE_BYTES: Final = 128
_SIGNAL_BYTES: Final = 4
# Index of this rank's number, from which it is copied to peers.
_OWN_INDEX: Final = BYTES // _SIGNAL_STRIDE_BYTES - 1
# The number that ranks send in the trial.
_TRIAL_NUMBER: Final = 1


class StreamBarrier:
    """A barrier that lets a stream wait for the streams of all ranks, without a kernel.

    There are at most ten ranks.

    [Note: no kernel] A kernel that waits needs room on a multiprocessor. It may not find room for
    long while GEMMs fill the GPU. So streams write numbers to each other's memory, and the driver
    makes them wait for the numbers. Numbers only grow and are never reset. From CUDA 13.1 on,
    drivers do not support such writes to the memory of another GPU
    (https://github.com/NVIDIA/nccl/issues/2052). There a number is written locally and copied,
    which takes longer. Some hosts, with some IOMMUs, offer access to the memory of other GPUs, but
    data never arrives. Streams would wait forever there, so ranks make a trial first.
    """

    def __init__(self, driver: Driver, signals: Sequence[Tensor], rank: int) -> None:
        """Compute the addresses of signals.

        Args:
            driver: The driver.
            signals: The signals of all ranks, :data:`BYTES` each, by group rank.
            rank: The rank of this process in the group.
        """
        self._driver = driver
        # The number of barriers so far, in 32 bits.
        self._number = 0
        self._rank = rank
        self._world = len(signals)
        self._signals = signals
        peers = [peer for peer in range(len(signals)) if peer != rank]
        # Addresses: of this rank's number, of this rank's signals in the memory of peers, and of
        # the peers' signals in this rank's memory.
        self._own_place = self._get_address(rank, _OWN_INDEX)
        self._peer_places = [self._get_address(peer, rank) for peer in peers]
        self._awaited_places = [self._get_address(rank, peer) for peer in peers]

    def try_out(self, stream: int) -> None:
        """Send a number to all ranks, and wait only for the number of this rank.

        Raises:
            RuntimeError: The driver refuses it.
        """
        world, rank = self._world, self._rank
        # Signals below `world` belong to the barrier, and those from `world` on to the trial.
        places = [self._get_address(peer, world + rank) for peer in range(world)]
        tell(self._driver, places, self._own_place, _TRIAL_NUMBER, stream)
        # Peers read it in `unheard`.
        self._driver.write(self._own_place, _TRIAL_NUMBER, stream)
        self._driver.wait(self._get_address(rank, world + rank), _TRIAL_NUMBER, stream)

    def unheard(self, stream: int) -> list[int]:
        """Return the ranks with which numbers cannot be exchanged.

        All ranks have made :meth:`try_out` before. The host waits for the copies.
        """
        world = self._world
        signals = self._signals[self._rank].view(torch.int32)
        own = signals.view(-1, _SIGNAL_STRIDE_BYTES // _SIGNAL_BYTES)[:, 0]
        # Copies read the numbers of peers, and writes have brought them here. Both must work.
        copied = [self._get_address(self._rank, 2 * world + peer) for peer in range(world)]
        peer_numbers = [self._get_address(peer, _OWN_INDEX) for peer in range(world)]
        self._driver.copy(Batch(copied, peer_numbers, [_SIGNAL_BYTES] * world), stream)
        found = own[world : 3 * world].view(2, world).tolist()
        return [
            rank
            for rank in range(world)
            if any(numbers[rank] != _TRIAL_NUMBER for numbers in found)
        ]

    def __call__(self, stream: int) -> None:
        """Let a stream wait for the streams of all ranks."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        tell(self._driver, self._peer_places, self._own_place, self._number, stream)
        for address in self._awaited_places:
            self._driver.wait(address, self._number, stream)

    def abort(self, stream: int) -> None:
        """Release waiting streams of this rank, by a stream that does not wait.

        Ranks that still arrive are then ahead.
        """
        for address in self._awaited_places:
            self._driver.write(address, self._number, stream)

    def _get_address(self, rank: int, index: int) -> int:
        return self._signals[rank].data_ptr() + index * _SIGNAL_STRIDE_BYTES


def tell(driver: Driver, places: list[int], mine: int, number: int, stream: int) -> None:
    """Write a number to the memory of peers after a stream's earlier work; see [Note: no kernel].

    Args:
        driver: The driver.
        places: The addresses in the memory of peers.
        mine: The address of a number in this rank's memory. Only calls on one stream may use it.
        number: The number.
        stream: The handle of the stream.
    """
    if driver.writes_to_peers:
        for place in places:
            driver.write(place, number, stream)
    else:
        driver.write(mine, number, stream)
        driver.copy(Batch(places, [mine] * len(places), [_SIGNAL_BYTES] * len(places)), stream)


# Seconds between two queries of streams.
_PAUSE_S: Final = 0.001


class CopyStreams:
    """The streams of copies into slots, and of copies out of them after the barrier.

    Methods return them as handles. On devices without streams, each copy ends before it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Whether the device has streams.
        self._exist = device.type == "cuda"
        if self._exist:
            # The priority is high, so that sums find room on the GPU concurrently with GEMMs.
            self._out = torch.cuda.Stream(device, priority=-1)
            self._in = torch.cuda.Stream(device, priority=-1)
            # Events: a call begins, a barrier has been issued, a round has been copied into slots.
            self._begun = torch.cuda.Event()
            self._met = torch.cuda.Event()
            self._laid = torch.cuda.Event()
            self._handles: Final = self._out.cuda_stream, self._in.cuda_stream

    def begin(self) -> Any:
        """Start after the work of the current stream; return that stream."""
        if not self._exist:
            return None
        launched = torch.cuda.current_stream(self._device)
        self._begun.record(launched)
        self._out.wait_event(self._begun)
        self._in.wait_event(self._begun)
        return launched

    def lay_out(self) -> int:
        """Return the stream for copies into slots, which follow the last barrier."""
        if not self._exist:
            return 0
        self._out.wait_event(self._met)
        return self._handles[0]

    def take(self) -> int:
        """Return the stream for copies out of slots, which follow the last copies into them."""
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
        """Return a handle that waits for all copies since :meth:`begin` and holds their tensors."""
        if not self._exist:
            return WorkGroup(())
        done = torch.cuda.Event()
        done.record(self._in)
        return _Copying(self._device, launched, done, tensors)

    def behind(self) -> AbstractContextManager[None]:
        """Run the block's work after all copies, in stream order."""
        return unwatched_stream(self._in) if self._exist else nullcontext()

    def on_device(self) -> AbstractContextManager[Any]:
        """Run the block on the streams' device, which the functions of the driver need."""
        return torch.cuda.device(self._device) if self._exist else nullcontext()

    def drain(self, timeout_s: float, abort: Callable[[int], None] | None = None) -> bool:
        """Let the host wait for both streams; return whether they completed in time.

        Args:
            timeout_s: The limit in seconds.
            abort: Called repeatedly while the host waits, with the handle of another stream.
                Default: None.
        """
        # In a forked child, the copies belong to the parent.
        if not self._exist or torch.cuda._is_in_bad_fork():
            return True
        deadline = time.monotonic() + timeout_s
        abort_stream = None if abort is None else torch.cuda.Stream(self._device)
        while not (self._out.query() and self._in.query()):
            if time.monotonic() > deadline:
                return False
            if abort is not None and abort_stream is not None:
                # Ranks that still arrive overwrite the numbers with their earlier ones, so one call
                # does not suffice.
                abort(abort_stream.cuda_stream)
            time.sleep(_PAUSE_S)
        return True


class _Copying:
    """Copies in flight until an event.

    If :meth:`wait` is never called, the launching stream waits when this object is dropped. The
    allocator then gives the memory of the tensors to the next work of that stream.
    """

    def __init__(
        self,
        device: torch.device,
        launched: torch.cuda.Stream,
        done: torch.cuda.Event,
        tensors: Sequence[Tensor],
    ) -> None:
        self._device = device
        self._launched = launched
        self._done = done
        self._tensors = tensors
        self._wait_when_dropped = weakref.finalize(self, launched.wait_event, done)
        self._wait_when_dropped.atexit = False

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._done)
        if current == self._launched:
            # The launching stream waits now, so the tensors are safe.
            self._wait_when_dropped.detach()
            self._tensors = ()
