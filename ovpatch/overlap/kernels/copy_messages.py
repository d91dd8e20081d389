"""Messages from one rank of a group to another, by copies into slots of the receiver's memory."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import Work, WorkGroup
from ovpatch.overlap.kernels.copy_window import (
    AllocateWindow,
    Batch,
    Window,
    allocate_window,
    rounds,
    tell,
)

# Pieces begin at multiples of this number of bytes, and numbers are as far apart.
_GRAIN: Final = 128
# Numbers have 32 bits.
_NUMBER_MASK: Final = 0xFFFFFFFF
# Seconds between two queries of streams.
_PAUSE_S: Final = 0.001
# Seconds between two checks by the watch.
_WATCH_INTERVAL_S: Final = 1.0
# Limit for joining a watch, which may be inside a call of the driver.
_JOIN_TIMEOUT_S: Final = 10.0
# The kinds of numbers between two ranks. A stream waits for a FULL or FREE number of its peer. The
# OWN numbers are the local sources from which a driver without peer writes copies.
_NUM_KINDS: Final = 4
_FULL, _FREE, _OWN_FULL, _OWN_FREE = range(_NUM_KINDS)


def round_up(size: int) -> int:
    """Return the bytes that a tensor occupies in a slot."""
    return -(-size // _GRAIN) * _GRAIN


class PointToPoint:
    """The messages along directed edges of a group whose ranks are all on one host.

    Each edge has slots in the memory of its receiver. A message occupies one slot. A larger message
    occupies several, sequentially. Each end of an edge has a stream. The stream of the sender waits
    until the slot is free, copies the message into it, and signals to the receiver that it is full.
    The stream of the receiver waits for the signal, copies the message out, and signals to the
    sender that the slot is free again. Signals are numbers, as in :class:`~.copy_window.StreamBarrier`.
    They count the slots that an edge has used and are never reset. No kernel runs while a stream
    waits.

    If streams share a queue of the device, a waiting stream delays the remaining ones. So an edge
    needs enough slots that steps end even if a rank stops at each message that finds no free slot.

    A stream would wait forever for a dead rank, and no backend would detect it. So a thread, the
    watch, checks whether messages arrive in time. If they do not, it reports the failure to peers,
    and only then writes the numbers that this rank's streams wait for. The streams then read data
    that is no message, so all later calls are refused.

    It does not keep the group alive.

    Attributes:
        slots: The number of slots of each edge.
        slot_bytes: The bytes of a slot.
        timeout_s: The seconds in which messages must arrive, from the last call of a step on. A
            backend counts its timeout in the same way.
        failure: The reason for refusing calls, or "".
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        edges: Iterable[tuple[int, int]],
        *,
        slots: int,
        slot_bytes: int,
        timeout_s: float,
        allocate: AllocateWindow = allocate_window,
    ) -> None:
        """Allocate the slots; all ranks call this together.

        Args:
            group: The process group.
            device: The device of the messages.
            edges: The edges ``(sender, receiver)``, the same on all ranks.
            slots: The number of slots of each edge.
            slot_bytes: The bytes of a slot, which are rounded up.
            timeout_s: The seconds in which messages must arrive.
            allocate: Allocates the memory on all ranks.
        """
        self.slots = slots
        self.slot_bytes = max(round_up(slot_bytes), _GRAIN)
        self.timeout_s = timeout_s
        self.failure = ""
        self._world = group.size()
        self._rank = group.rank()
        self._device = device

        # - Memory: numbers first, then the slots of each incoming edge
        senders: dict[int, list[int]] = {rank: [] for rank in range(self._world)}
        for sender, receiver in sorted(set(edges)):
            senders[receiver].append(sender)
        # The offset of the first slot.
        self._slots_offset = _NUM_KINDS * self._world * _GRAIN
        # All ranks allocate the same size, so the rank with the most incoming edges decides.
        most = max(map(len, senders.values()))
        size = self._slots_offset + most * slots * self.slot_bytes
        self._window: Window = allocate(size, group, device)
        self._window.ranks[self._rank][: self._slots_offset].zero_()
        self._streams = _Streams(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        # - Edges of this rank, by peer
        self._out = {
            receiver: self._make_edge(self._rank, receiver, found.index(self._rank))
            for receiver, found in senders.items()
            if self._rank in found
        }
        self._in = {
            sender: self._make_edge(sender, self._rank, index)
            for index, sender in enumerate(senders[self._rank])
        }
        # Messages that `receive` has returned and no stream has received yet, by sender.
        self._arrivals: dict[int, deque[_Arrival]] = {sender: deque() for sender in self._in}

        # - The running step and its watch
        # Whether a step has begun and not ended.
        self._is_within_step = False
        self._deadline = math.inf
        # The last deadline after which no stream waited. Streams are not queried again for it,
        # because a query may disturb the capture of a graph.
        self._checked_deadline = math.nan
        self._report_failure: Callable[[str], object] = str
        # An event has a lock, which a thread may hold while the garbage collector stops the watch.
        self._closed: queue.SimpleQueue[None] = queue.SimpleQueue()
        watched = (weakref.ref(self), self._closed, _WATCH_INTERVAL_S)
        self._watch = threading.Thread(
            target=_watch, args=watched, name="ovpatch messages", daemon=True
        )
        self._watch.start()
        # This also runs at exit, since threads do not survive the interpreter.
        weakref.finalize(self, _stop, self._closed, self._watch)

    def _make_edge(self, sender: int, receiver: int, index: int) -> _Edge:
        """Return this rank's end of an edge, the ``index``-th of the receiver."""
        memory = [memory.data_ptr() for memory in self._window.ranks]
        slots = [
            memory[receiver] + self._slots_offset + (index * self.slots + slot) * self.slot_bytes
            for slot in range(self.slots)
        ]

        def place(rank: int, kind: int, peer: int) -> int:
            return memory[rank] + (kind * self._world + peer) * _GRAIN

        # Each number is in the memory of the rank whose stream waits for it. Its peer writes
        # it, if necessary by a copy from its own memory.
        awaited = {_FULL: place(receiver, _FULL, sender), _FREE: place(sender, _FREE, receiver)}
        sources = {
            _FULL: place(sender, _OWN_FULL, receiver),
            _FREE: place(receiver, _OWN_FREE, sender),
        }
        return _Edge(self._window.driver, slots, awaited, sources)

    def unheard(self) -> list[int]:
        """Return the ranks whose memory fails a trial. Call this once all ranks have allocated."""
        return self._window.unheard()

    # --- a step ---

    def begin(self, tell_failure: Callable[[str], object]) -> None:
        """Begin a step.

        Args:
            tell_failure: Called in a thread with the reason why this rank continues without the
                messages of its peers. It reports the reason to them.

        Raises:
            RuntimeError: An earlier step did not end, or has failed.
        """
        self.check()
        if self._is_within_step:
            self.failure = _ERROR_INTERRUPTED
            self.check()
        self._is_within_step = True
        self._report_failure = tell_failure
        self._extend_deadline()

    def end(self) -> None:
        """End a step whose messages have all been sent and received."""
        self._streams.mark()
        self._is_within_step = False

    def check(self) -> None:
        """Raise RuntimeError if messages cannot be trusted."""
        if self.failure:
            raise RuntimeError(self.failure)

    def _extend_deadline(self) -> None:
        self._deadline = time.monotonic() + self.timeout_s

    # --- messages ---

    def send(self, tensors: Sequence[Tensor], receiver: int) -> Work:
        """Start to send a message to a rank, after the work of the current stream.

        Args:
            tensors: The contiguous tensors of the message.
            receiver: The rank that receives it.

        Returns:
            A handle that keeps the tensors until its ``wait()``, which lets the current stream wait
            for their copies.
        """
        self.check()
        self._extend_deadline()
        edge = self._out[receiver]
        with self._streams.on_device():
            stream = self._streams.begin((self._rank, receiver))
            for pieces in rounds(
                tuple(tensor.nbytes for tensor in tensors), self.slot_bytes, _GRAIN
            ):
                slot = edge.take_number()
                # The slot was last used this many numbers ago.
                edge.wait(_FREE, edge.number - self.slots, stream)
                of = [tensors[piece.tensor].data_ptr() + piece.begin for piece in pieces]
                sizes = [piece.end - piece.begin for piece in pieces]
                self._window.copy(Batch([slot + piece.at for piece in pieces], of, sizes), stream)
                edge.signal(_FULL, stream)
            return WorkGroup(self._streams.end((self._rank, receiver)), tuple(tensors))

    def receive(self, tensors: Sequence[Tensor], sender: int) -> Work:
        """Return a handle of the next message from a rank, in the order of calls.

        Args:
            tensors: The contiguous tensors that the message is copied into. They have its sizes.
            sender: The rank that sends it.

        Returns:
            A handle whose ``wait()`` receives the message.
        """
        arrival = _Arrival(self, sender, tensors)
        self._arrivals[sender].append(arrival)
        return arrival

    def _take_next(self, sender: int) -> None:
        """Receive the next message on the current stream."""
        self.check()
        self._extend_deadline()
        arrival = self._arrivals[sender].popleft()
        edge = self._in[sender]
        tensors = arrival.tensors
        arrival.is_taken = True
        with self._streams.on_device():
            stream = self._streams.begin((sender, self._rank))
            for pieces in rounds(
                tuple(tensor.nbytes for tensor in tensors), self.slot_bytes, _GRAIN
            ):
                slot = edge.take_number()
                edge.wait(_FULL, edge.number, stream)
                to = [tensors[piece.tensor].data_ptr() + piece.begin for piece in pieces]
                sizes = [piece.end - piece.begin for piece in pieces]
                self._window.copy(Batch(to, [slot + piece.at for piece in pieces], sizes), stream)
                edge.signal(_FREE, stream)
            for work in self._streams.end((sender, self._rank)):
                work.wait()

    # --- the end ---

    def drain(self) -> bool:
        """Let the host wait for all messages in flight; return whether they completed in time."""
        self._closed.put(None)
        self._streams.mark()
        deadline = time.monotonic() + self.timeout_s
        while not self._streams.is_idle():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    def look(self) -> None:
        """Release this rank's streams if messages are late. The watch calls this."""
        deadline = self._deadline
        if time.monotonic() < deadline or deadline == self._checked_deadline:
            return
        if not self._streams.may_wait(self._is_within_step):
            self._checked_deadline = deadline
            return
        if not self.failure:
            failure = _ERROR_LATE.format(self.timeout_s)
            # The store may no longer exist. The streams must be released nevertheless.
            with suppress(RuntimeError):
                self._report_failure(failure)
            self.failure = failure
        with self._streams.on_device():
            stream = self._streams.rescue()
            for edge in self._in.values():
                edge.pretend(_FULL, edge.number, stream)
            for edge in self._out.values():
                edge.pretend(_FREE, edge.number - self.slots, stream)


class _Arrival:
    """A message to receive."""

    def __init__(self, owner: PointToPoint, sender: int, tensors: Sequence[Tensor]) -> None:
        self._owner = owner
        self._sender = sender
        self.tensors = tensors
        # Whether a stream receives the message.
        self.is_taken = False

    def wait(self) -> None:
        """Receive the message on the current stream, after all earlier messages of the sender."""
        while not self.is_taken:
            self._owner._take_next(self._sender)


class _Edge:
    """One end of a directed edge.

    Attributes:
        number: The count of slots that the edge has used, in 32 bits.
    """

    def __init__(
        self,
        driver: Any,
        slots: Sequence[int],
        awaited: Mapping[int, int],
        sources: Mapping[int, int],
    ) -> None:
        self.number = 0
        # The same count without a limit, since the number of slots need not divide 2**32.
        self._count = 0
        self._driver = driver
        # Addresses: of the slots, and by kind of the numbers that a stream waits for and of their
        # sources.
        self._slots = slots
        self._awaited = awaited
        self._sources = sources

    def take_number(self) -> int:
        """Use the next slot; return its address."""
        slot = self._slots[self._count % len(self._slots)]
        self._count += 1
        self.number = self._count & _NUMBER_MASK
        return slot

    def wait(self, kind: int, number: int, stream: int) -> None:
        self._driver.wait(self._awaited[kind], number & _NUMBER_MASK, stream)

    def signal(self, kind: int, stream: int) -> None:
        tell(self._driver, [self._awaited[kind]], self._sources[kind], self.number, stream)

    def pretend(self, kind: int, number: int, stream: int) -> None:
        """Write the number that the peer has not written."""
        self._driver.write(self._awaited[kind], number & _NUMBER_MASK, stream)


class _Streams:
    """A stream for each edge. On devices without streams, the host waits and copies.

    The streams of the script are no substitute, because the driver copies no batches on the default
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Whether the device has streams.
        self._exist = device.type == "cuda"
        self._streams_by_edge: dict[tuple[int, int], Any] = {}
        if self._exist:
            # Events: the script's work before a message, and all work so far.
            self._begun = torch.cuda.Event()
            self._marked = torch.cuda.Event()
            # torch has 32 streams of each priority and hands them out repeatedly. The waiting
            # streams have their own priority, so that the script gets none of them. This stream
            # must not wait, so it has another priority.
            self._rescue = torch.cuda.Stream(device, priority=-3)

    def begin(self, edge: tuple[int, int]) -> int:
        """Return the stream of an edge, after the work of the current stream."""
        if not self._exist:
            return 0
        if edge not in self._streams_by_edge:
            self._streams_by_edge[edge] = torch.cuda.Stream(self._device, priority=-2)
        stream = self._streams_by_edge[edge]
        self._begun.record(torch.cuda.current_stream(self._device))
        stream.wait_event(self._begun)
        handle: int = stream.cuda_stream
        return handle

    def end(self, edge: tuple[int, int]) -> Sequence[Work]:
        """Return handles that wait for the copies on the edge's stream."""
        if not self._exist:
            return ()
        return (_Copying(self._device, self._streams_by_edge[edge]),)

    def rescue(self) -> int:
        """Return a stream that waits for nothing."""
        handle: int = self._rescue.cuda_stream if self._exist else 0
        return handle

    def on_device(self) -> AbstractContextManager[Any]:
        """Run the block on the streams' device, which the functions of the driver need."""
        return torch.cuda.device(self._device) if self._exist else nullcontext()

    def mark(self) -> None:
        """Record the work so far of the current stream."""
        if self._exist:
            self._marked.record(torch.cuda.current_stream(self._device))

    def is_idle(self) -> bool:
        """Return whether the recorded work and the work of all edges is done."""
        # In a forked child, the messages belong to the parent.
        if not self._exist or torch.cuda._is_in_bad_fork():
            return True
        return self._marked.query() and all(
            stream.query() for stream in list(self._streams_by_edge.values())
        )

    def may_wait(self, within: bool) -> bool:
        """Return whether a stream waits.

        On devices without streams, the host may wait, but only ``within`` a step.
        """
        return not self.is_idle() if self._exist else within


class _Copying:
    """A message in flight until its stream has copied it."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


def _watch(
    owner: weakref.ref[PointToPoint], closed: queue.SimpleQueue[None], pause_s: float
) -> None:
    while True:
        with suppress(queue.Empty):
            closed.get(timeout=pause_s)
            return
        messages = owner()
        if messages is None:
            return
        messages.look()
        # The watch must not keep the object alive while it sleeps.
        del messages


def _stop(closed: queue.SimpleQueue[None], watch: threading.Thread) -> None:
    closed.put(None)
    # The watch itself may have dropped the last reference.
    if watch is not threading.current_thread() and watch.is_alive():
        watch.join(_JOIN_TIMEOUT_S)


_ERROR_LATE: Final = (
    "messages of a step have not come from peers, or could not be sent to them, within {:g} s, so "
    "this rank stops waiting. Look for the first error in the output of all ranks and start the "
    "job again. If computations take longer, give init_process_group() a longer timeout"
)

_ERROR_INTERRUPTED: Final = (
    "messages between ranks were interrupted in the middle of a step, by Ctrl-C or by an earlier "
    "error, and peers would mistake the next messages for the rest of it. Start the job again"
)
