"""CUDA streams of a script's own, on which it may read parameters that another stream has waited for.

[Note: streams that have not waited] Under stock, parameters are there for all that comes after a step: behind an event
of its stream, or once the host has waited for one. Here that stream goes on while gathers still run, and a parameter is
a plain one as soon as one stream has waited for it; another stream that is ordered behind the step alone would read it
too early. To read, a stream has to be the current one of some thread. So all wait that are when a parameter becomes a
plain one, and one that is made current later waits then for what was waited for before, as it may still be under way.
Streams of ours on which no parameters are read do not: peers that ask are answered on one, and may be what a gather
waits for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class Arriving(Protocol):
    """What some stream has waited for, and what may still be under way."""

    def follow(self, stream: Any) -> bool:
        """Make one more stream wait; return whether it has, by now."""


class _OfThread:
    """Which streams a thread has made current, by the device's index; on other devices it has the default one."""

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}


class _OfDevice:
    """What arrives on a device, and who has followed."""

    def __init__(self) -> None:
        self.arriving: weakref.WeakValueDictionary[int, Arriving] = weakref.WeakValueDictionary()
        self.count = 0  # of what has come to that; not less than what a stream has seen
        self.streams: dict[int, Any] = {}  # by their handles
        self.seen: dict[int, int] = {}  # the count, by streams' handles


class SideStreams:
    """The streams that are current in some thread.

    Attributes:
        watched: Whether :meth:`switched` is told of them; else some may have been used of which nobody knows.
    """

    def __init__(self) -> None:
        self.watched = False
        self._local = threading.local()
        self._threads: weakref.WeakValueDictionary[int, _OfThread] = weakref.WeakValueDictionary()
        self._devices: dict[int, _OfDevice] = {}

    def switched(self, device: int) -> None:
        """Note that this thread has another current stream.

        Args:
            device: Index of the device.
        """
        if self.quiet:
            return
        known, handle = self._devices.setdefault(device, _OfDevice()), torch._C._cuda_getCurrentRawStream(device)
        stream = known.streams.get(handle)
        if stream is None:
            stream = known.streams[handle] = torch.cuda.current_stream(device)
        own = getattr(self._local, "own", None)
        if own is None:
            own = self._local.own = self._threads[threading.get_ident()] = _OfThread()
        own.streams[device] = stream  # first: whoever settles now sees it, or it sees here what arrives
        count = known.count
        if known.seen.get(handle) != count:
            arriving = [reference() for reference in known.arriving.valuerefs()]  # a list: other threads add to it
            followed = [one.follow(stream) for one in arriving if one is not None]
            if all(followed):
                known.seen[handle] = count

    def arriving(self, one: Arriving, launched: Any) -> list[Any]:
        """Have streams follow that become current from now on; return those that are now, and are to follow now.

        Args:
            one: What they follow; held weakly, until :meth:`gone`.
            launched: The stream that has waited.
        """
        device = launched.device_index
        known = self._devices.setdefault(device, _OfDevice())
        known.arriving[id(one)] = one
        known.count += 1  # afterwards: who sees this sees what has come
        threads = [reference() for reference in self._threads.valuerefs()]
        found = [own.streams[device] for own in threads if own is not None and device in own.streams]
        if launched.stream_id:
            found.append(torch.cuda.default_stream(device))  # of threads that have made none current
        return found

    def gone(self, one: Arriving, device: int) -> None:
        """Undo :meth:`arriving`."""
        if device in self._devices:
            self._devices[device].arriving.pop(id(one), None)

    def used(self, device: torch.device) -> bool:
        """Tell whether tensors may have been allocated on another stream than the default one."""
        if device.type != "cuda" or not self.watched:
            return device.type == "cuda"
        known = self._devices.get(device.index)
        return known is not None and any(known.streams)  # whose handle is not 0

    @property
    def quiet(self) -> bool:
        """Whether this thread tells nobody which stream is current: where none reads parameters."""
        return getattr(self._local, "quiet", False)

    @quiet.setter
    def quiet(self, value: bool) -> None:
        self._local.quiet = value


side_streams = SideStreams()


class quietly_on:  # it is used as a function is
    """Run a block with a stream as the current one on which no parameters are read: it follows no gather.

    Args:
        stream: The stream.
    """

    __slots__ = ("_before", "_context")

    def __init__(self, stream: Any) -> None:
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        """Make the stream current."""
        self._before, side_streams.quiet = side_streams.quiet, True
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Make the one before it current."""
        self._context.__exit__(*error)
        side_streams.quiet = self._before


def outlive(tensors: Iterable[Tensor | None], device: torch.device) -> None:
    """Keep the memory of tensors that are to be dropped until all that the current stream has by now is done.

    The allocator gives memory back to the stream that it came from, as soon as the host lets go of it. That may be the
    stream of a forward, which has not waited for the collectives that read its gradients.

    Args:
        tensors: Of the device; only plain ones have memory.
        device: Where the current stream has waited for those collectives.
    """
    if side_streams.used(device):
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if type(tensor) is Tensor:
                tensor.record_stream(stream)


def noting_numbers(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function that makes a stream current, which is given by its numbers."""
    side_streams.watched = True

    def switch(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        side_streams.switched(kwargs["device_index"] if "device_index" in kwargs else args[1])

    return switch


def noting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose first argument is a stream that it makes current, or that it makes current no longer."""

    def switch(stream: Any, *args: Any) -> Any:
        result = original(stream, *args)
        if stream.device.type == "cuda":
            side_streams.switched(stream.device_index)
        return result

    return switch
