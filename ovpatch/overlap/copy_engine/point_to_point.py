"""Messages from one rank of a group to another, by copies into slots of the receiver's memory."""

from __future__ import annotations

import math
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
from ovpatch.overlap.copy_engine.window import AllocateWindow, Batch, Window, allocate_window, rounds, tell

_GRAIN: Final = 128  # bytes; pieces begin at multiples, and numbers are as far apart
_WRAP: Final = 0xFFFFFFFF
_PAUSE_S: Final = 0.001
_LOOK_S: Final = 1.0  # between two looks of the watch
_JOIN_S: Final = 10.0  # for a watch that may be in the driver
_KINDS: Final = 4  # of numbers between two ranks
_FULL, _FREE, _MY_FULL, _MY_FREE = range(_KINDS)


def round_up(size: int) -> int:
    """Return the bytes that a tensor takes in a slot."""
    return -(-size // _GRAIN) * _GRAIN


class PointToPoint:
    """Moves messages along directed edges of a group, all of whose ranks are on one host.

    Each edge has slots in its receiver's memory. A message takes one, or if it is larger several, one after the other.
    Both ends have a stream for it. The sender's waits until the slot is free, copies the message in, and tells the
    receiver that it is full. The receiver's waits for that, copies the message out, and tells the sender that it is
    free again. Streams tell and wait as in :class:`~.window.StreamBarrier`: by numbers, which count the slots that an
    edge has used and are never reset. No kernel runs while a stream waits.

    Where streams share a queue of the device, one that waits holds up the others. So an edge needs so many slots that
    steps end even if a rank stopped at each message that finds none free.

    A stream that waits for a rank that is gone would wait for ever, which no backend notices. So a thread looks whether
    messages come in time. If they do not, it tells the other ranks, and only then writes the numbers that this rank's
    streams wait for. What they read then is no message. All later calls are refused.

    All ranks make this together, with the same ``edges``, ``(sender, receiver)``. It does not keep the group alive.
    Messages may take ``timeout_s`` seconds from the last call of a step on, as those of a backend may from theirs.
    ``failure`` tells why calls are refused, or is "".
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
        self.slots, self.slot_bytes = slots, max(round_up(slot_bytes), _GRAIN)
        self.timeout_s, self.failure = timeout_s, ""
        self._world, self._rank, self._device = group.size(), group.rank(), device
        senders: dict[int, list[int]] = {rank: [] for rank in range(self._world)}
        for sender, receiver in sorted(set(edges)):
            senders[receiver].append(sender)
        self._first = _KINDS * self._world * _GRAIN  # numbers come first
        most = max(map(len, senders.values()))
        self._window: Window = allocate(self._first + most * slots * self.slot_bytes, group, device)
        self._window.ranks[self._rank][: self._first].zero_()
        self._streams = _Streams(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._out = {
            receiver: self._make_edge(self._rank, receiver, found.index(self._rank))
            for receiver, found in senders.items()
            if self._rank in found
        }
        self._in = {
            sender: self._make_edge(sender, self._rank, index) for index, sender in enumerate(senders[self._rank])
        }
        self._arriving: dict[int, deque[_Arrival]] = {sender: deque() for sender in self._in}
        self._within, self._deadline = False, math.inf
        self._seen = math.nan  # the deadline behind which nothing waited: to ask streams again may disturb a capture
        self._tell_failure: Callable[[str], object] = str
        self._closed = threading.Event()
        watched = (weakref.ref(self), self._closed, _LOOK_S)
        watch = threading.Thread(target=_watch, args=watched, name="ovpatch messages", daemon=True)
        watch.start()
        weakref.finalize(self, _stop, self._closed, watch)  # also at exit: threads do not survive the interpreter

    def _make_edge(self, sender: int, receiver: int, index: int) -> _Edge:
        """Return this rank's end of an edge, the ``index``-th of the receiver."""
        memory = [memory.data_ptr() for memory in self._window.ranks]
        slots = [
            memory[receiver] + self._first + (index * self.slots + slot) * self.slot_bytes for slot in range(self.slots)
        ]

        def place(rank: int, kind: int, peer: int) -> int:
            return memory[rank] + (kind * self._world + peer) * _GRAIN

        # Each number is in the memory of the rank whose stream waits for it, and is told from the other's.
        awaited = {_FULL: place(receiver, _FULL, sender), _FREE: place(sender, _FREE, receiver)}
        told = {_FULL: place(sender, _MY_FULL, receiver), _FREE: place(receiver, _MY_FREE, sender)}
        return _Edge(self._window.driver, slots, awaited, told)

    def unheard(self) -> list[int]:
        """Return the ranks whose memory fails a trial; called once all ranks have made theirs."""
        return self._window.unheard()

    # --- a step ---

    def begin(self, tell_failure: Callable[[str], object]) -> None:
        """Begin a step; RuntimeError if an earlier one did not end.

        ``tell_failure`` tells the other ranks, in a thread, that this one goes on without their messages.
        """
        self.check()
        if self._within:
            self.failure = _INTERRUPTED
            self.check()
        self._within, self._tell_failure = True, tell_failure
        self._give_time()

    def end(self) -> None:
        """End a step, all of whose messages have been sent and received."""
        self._streams.mark()
        self._within = False

    def check(self) -> None:
        """Raise RuntimeError if messages cannot be trusted."""
        if self.failure:
            raise RuntimeError(self.failure)

    def _give_time(self) -> None:
        self._deadline = time.monotonic() + self.timeout_s

    # --- messages ---

    def send(self, tensors: Sequence[Tensor], receiver: int) -> Work:
        """Start to send a message of contiguous tensors to a rank, behind the current stream's work.

        The returned handle keeps them until its ``wait()``, which makes the current stream wait for their copies.
        """
        self.check()
        self._give_time()
        edge = self._out[receiver]
        with self._streams.on_device():
            stream = self._streams.begin((self._rank, receiver))
            for pieces in rounds(tuple(tensor.nbytes for tensor in tensors), self.slot_bytes, _GRAIN):
                slot = edge.take_number()
                edge.wait(_FREE, edge.number - self.slots, stream)
                of = [tensors[piece.tensor].data_ptr() + piece.begin for piece in pieces]
                sizes = [piece.end - piece.begin for piece in pieces]
                self._window.copy(Batch([slot + piece.at for piece in pieces], of, sizes), stream)
                edge.tell(_FULL, stream)
            return WorkGroup(self._streams.end((self._rank, receiver)), tuple(tensors))

    def receive(self, tensors: Sequence[Tensor], sender: int) -> Work:
        """Return the message that comes next from a rank, in the order of calls; its ``wait()`` receives it.

        It is received into the tensors, which are contiguous and of the sizes of the message.
        """
        made = _Arrival(self, sender, tensors)
        self._arriving[sender].append(made)
        return made

    def _take_next(self, sender: int) -> None:
        """Receive the next message on the current stream."""
        self.check()
        self._give_time()
        arrival = self._arriving[sender].popleft()
        edge, tensors = self._in[sender], arrival.tensors
        arrival.is_taken = True
        with self._streams.on_device():
            stream = self._streams.begin((sender, self._rank))
            for pieces in rounds(tuple(tensor.nbytes for tensor in tensors), self.slot_bytes, _GRAIN):
                slot = edge.take_number()
                edge.wait(_FULL, edge.number, stream)
                to = [tensors[piece.tensor].data_ptr() + piece.begin for piece in pieces]
                sizes = [piece.end - piece.begin for piece in pieces]
                self._window.copy(Batch(to, [slot + piece.at for piece in pieces], sizes), stream)
                edge.tell(_FREE, stream)
            for work in self._streams.end((sender, self._rank)):
                work.wait()

    # --- the end ---

    def drain(self) -> bool:
        """Make the host wait for all that was started, at most for the time-out; return whether it completed."""
        self._closed.set()
        self._streams.mark()
        deadline = time.monotonic() + self.timeout_s
        while not self._streams.is_idle():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    def look(self) -> None:
        """Let this rank's streams go on if its messages have not come in time. Called by the watch."""
        deadline = self._deadline
        if time.monotonic() < deadline or deadline == self._seen:
            return
        if not self._streams.may_wait(self._within):
            self._seen = deadline
            return
        if not self.failure:
            failure = _LATE.format(self.timeout_s)
            with suppress(RuntimeError):  # of a store that is gone; the streams have to go on all the same
                self._tell_failure(failure)
            self.failure = failure
        with self._streams.on_device():
            stream = self._streams.rescue()
            for edge in self._in.values():
                edge.pretend(_FULL, edge.number, stream)
            for edge in self._out.values():
                edge.pretend(_FREE, edge.number - self.slots, stream)


class _Arrival:
    """A message that is to be received."""

    def __init__(self, owner: PointToPoint, sender: int, tensors: Sequence[Tensor]) -> None:
        self._owner, self._sender, self.tensors, self.is_taken = owner, sender, tensors, False

    def wait(self) -> None:
        """Receive on the current stream, and before that what the sender has sent before."""
        while not self.is_taken:
            self._owner._take_next(self._sender)


class _Edge:
    """One end of a directed edge; ``number`` is how many slots it has used, in 32 bits."""

    def __init__(self, driver: Any, slots: Sequence[int], awaited: Mapping[int, int], told: Mapping[int, int]) -> None:
        self.number, self._count = 0, 0
        self._driver, self._slots, self._awaited, self._told = driver, slots, awaited, told

    def take_number(self) -> int:
        """Use the next slot; return its address."""
        slot = self._slots[self._count % len(self._slots)]
        self._count += 1
        self.number = self._count & _WRAP
        return slot

    def wait(self, kind: int, number: int, stream: int) -> None:
        self._driver.wait(self._awaited[kind], number & _WRAP, stream)

    def tell(self, kind: int, stream: int) -> None:
        tell(self._driver, [self._awaited[kind]], self._told[kind], self.number, stream)

    def pretend(self, kind: int, number: int, stream: int) -> None:
        """Write what the peer has not told."""
        self._driver.write(self._awaited[kind], number & _WRAP, stream)


class _Streams:
    """A stream for each edge; on devices without streams, the host waits and copies.

    The script's streams would not do: the driver copies no batches on the default one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._exist = device, device.type == "cuda"
        self._of: dict[tuple[int, int], Any] = {}
        if self._exist:
            self._begun, self._marked = torch.cuda.Event(), torch.cuda.Event()
            # Torch has 32 streams of each priority, which it hands out again and again. Those that wait, and this one,
            # which must not, are of priorities of their own, so that they are none of the script's.
            self._rescue = torch.cuda.Stream(device, priority=-3)

    def begin(self, edge: tuple[int, int]) -> int:
        """Return the stream of an edge, behind the current one."""
        if not self._exist:
            return 0
        if edge not in self._of:
            self._of[edge] = torch.cuda.Stream(self._device, priority=-2)
        stream = self._of[edge]
        self._begun.record(torch.cuda.current_stream(self._device))
        stream.wait_event(self._begun)
        handle: int = stream.cuda_stream
        return handle

    def end(self, edge: tuple[int, int]) -> Sequence[Work]:
        """Return handles that wait for what the edge's stream was given."""
        return (_Copying(self._device, self._of[edge]),) if self._exist else ()

    def rescue(self) -> int:
        """Return a stream that waits for nothing."""
        handle: int = self._rescue.cuda_stream if self._exist else 0
        return handle

    def on_device(self) -> AbstractContextManager[Any]:
        """Run the block with the streams' device as the current one, which the driver's functions need."""
        return torch.cuda.device(self._device) if self._exist else nullcontext()

    def mark(self) -> None:
        """Note the work so far of the current stream and of those of edges."""
        if self._exist:
            self._marked.record(torch.cuda.current_stream(self._device))

    def is_idle(self) -> bool:
        """Return whether that work is done."""
        if not self._exist or torch.cuda._is_in_bad_fork():  # there, the messages are the parent's
            return True
        return self._marked.query() and all(stream.query() for stream in list(self._of.values()))

    def may_wait(self, within: bool) -> bool:
        """Return whether something waits: a stream, or on devices without streams the host ``within`` a step."""
        return not self.is_idle() if self._exist else within


class _Copying:
    """A message until its stream has copied it."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device, self._done = device, torch.cuda.Event()
        self._done.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


def _watch(owner: weakref.ref[PointToPoint], closed: threading.Event, pause_s: float) -> None:
    while not closed.wait(pause_s):
        one = owner()
        if one is None:
            return
        one.look()
        del one


def _stop(closed: threading.Event, watch: threading.Thread) -> None:
    closed.set()
    if watch is not threading.current_thread() and watch.is_alive():
        watch.join(_JOIN_S)


_LATE: Final = (
    "messages of a step have not come from other ranks, or could not be sent to them, within {:g} s, and are not "
    "waited for any longer. Look for the first error in the output of the other ranks and start the job again; if "
    "computations take longer, give init_process_group() a longer timeout"
)

_INTERRUPTED: Final = (
    "messages between ranks were interrupted in the middle of a step, by Ctrl-C or by an error before this one, and "
    "what comes next would be taken for the rest of it. Start the job again"
)
