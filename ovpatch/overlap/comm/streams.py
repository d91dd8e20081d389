"""CUDA streams: those on which work was produced, so that a collective starts after all of it, and the script's own.

The autograd engine runs a gradient's hook on the stream of the forward operation. A collective launched from one hook
is ordered behind that hook's stream only; gradients of the same bucket that came from other streams need a wait. A
side stream of the script may read parameters that another stream has waited for.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

# --- labels ---


def profiler_label(feature: str, phase: str, name: str = "") -> str:
    """Return ``ovpatch::<feature>::<phase> (<name>)``; the phase is a verb or a collective, the name an object's."""
    return f"ovpatch::{feature}::{phase} ({name})" if name else f"ovpatch::{feature}::{phase}"


_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


def profiler_span(text: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows ``text``, made by :func:`profiler_label`, as a range in torch's profiler.

    Without a profiler it does nothing: an idle ``record_function`` costs more than the launch of a collective.
    """
    return torch.autograd.profiler.record_function(text) if torch.autograd._profiler_enabled() else _NOTHING


# --- frames ---


def hide_frames(*functions: Any) -> None:
    """Have Dynamo run Python functions, those defined in them and all that they call, as they are.

    A compiled function may break its graph at ``loss.backward()`` or at a wrapped module. Dynamo
    then examines all Python frames below it, also those of hooks that the engine calls. It would compile the
    reducer frame by frame, guard on its counters, and fail in the middle of a backward at the first collective.
    ``torch.compiler.disable`` costs each call some microseconds. Marked code objects cost a call nothing.

    Args:
        functions: Functions, which may be called already. They are marked for the rest of the process.
    """
    from torch._dynamo import eval_frame

    # Versions without it compile what they can of these frames.
    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return
    skip = eval_frame.FrameAction.SKIP
    for function in functions:
        for code in _list_codes(function.__code__):
            eval_frame.set_code_exec_strategy(code, eval_frame.FrameExecStrategy(skip, skip))


def _list_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_codes(constant)


# --- streams ---


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class ProducerStreams:
    """The CUDA streams that produced gradients since the last :meth:`clear`, per device."""

    def __init__(self) -> None:
        self._streams: dict[int, dict[int, torch.cuda.Stream]] = {}

    def record_current(self, device: int) -> None:
        """Record the current stream of a CUDA device. Cheap if it is recorded already: called for every gradient."""
        raw = torch._C._cuda_getCurrentRawStream(device)
        if raw not in self._streams.get(device, ()):
            self._streams.setdefault(device, {})[raw] = torch.cuda.current_stream(device)

    def wait_for_producers(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        """Make the device's current stream wait for all recorded ones; nothing is done without streams.

        The current stream is going to read the tensors; their memory is kept until it has.
        """
        streams = self._streams.get(device.index) if device.type == "cuda" else None
        if not streams or (len(streams) == 1 and torch._C._cuda_getCurrentRawStream(device.index) in streams):
            return  # the usual case, without making a Stream object
        current = torch.cuda.current_stream(device)
        others = [stream for stream in streams.values() if stream != current]
        for stream in others:
            current.wait_stream(stream)
        if others:
            for tensor in tensors:
                tensor.record_stream(current)

    def clear(self) -> None:
        """Drop all recorded streams."""
        self._streams.clear()


# --- the script's own streams ---


class Transfer(Protocol):
    """A transfer that some stream has waited for, and that may still be in flight."""

    def follow(self, stream: Any) -> bool:
        """Make one more stream wait; return whether it waits now."""


class _ThreadStreams(dict[int, Any]):
    """The streams that a thread has made current, by the device's index; on other devices it has the default one."""


class _DeviceTransfers:
    """The transfers to a device, and the streams that follow them."""

    def __init__(self) -> None:
        self.arriving: weakref.WeakValueDictionary[int, Transfer] = weakref.WeakValueDictionary()
        self.count = 0  # of transfers so far; not less than any count in `seen`
        self.streams: dict[int, Any] = {}  # by handle
        self.seen: dict[int, int] = {}  # the count at a stream's last switch, by handle


class SideStreams:
    """The streams that are current in some thread.

    [Note: streams that have not waited] Under stock, parameters are complete for all work after a step. Here the step's
    stream goes on while all-gathers run, and a pending parameter becomes a plain one as soon as one stream has waited
    for it; another stream, ordered behind the step alone, would read it too early. A stream that reads is the current
    one of some thread. So all current streams wait when a parameter becomes a plain one, and a stream that is made
    current later waits then. Our own streams on which no parameters are read do not (:class:`unwatched_stream`): peers'
    calls are answered on one, and an all-gather may wait for such an answer.
    """

    def __init__(self) -> None:
        # Whether record_switch() is called for every switch; otherwise unknown streams may be in use.
        self.is_watched = False
        self._local = threading.local()
        self._threads: weakref.WeakValueDictionary[int, _ThreadStreams] = weakref.WeakValueDictionary()
        self._devices: dict[int, _DeviceTransfers] = {}

    def record_switch(self, device: int) -> None:
        """Record that this thread has another current stream, and make that stream wait for transfers in flight."""
        if self.is_unwatched:
            return
        known, handle = self._devices.setdefault(device, _DeviceTransfers()), torch._C._cuda_getCurrentRawStream(device)
        stream = known.streams.get(handle)
        if stream is None:
            stream = known.streams[handle] = torch.cuda.current_stream(device)
        own = getattr(self._local, "own", None)
        if own is None:
            own = self._local.own = self._threads[threading.get_ident()] = _ThreadStreams()
        own[device] = stream  # first: a transfer that is added now sees it, or is seen below
        count = known.count
        if known.seen.get(handle) != count:
            arriving = [reference() for reference in known.arriving.valuerefs()]  # a list: other threads add to it
            followed = [one.follow(stream) for one in arriving if one is not None]
            if all(followed):
                known.seen[handle] = count

    def add_transfer(self, one: Transfer, launched: Any) -> list[Any]:
        """Make streams that become current from now on follow a transfer, which the stream ``launched`` has waited for.

        It is referenced weakly, until :meth:`remove_transfer`. Returns the streams that are current now, which the
        caller makes follow.
        """
        device = launched.device_index
        known = self._devices.setdefault(device, _DeviceTransfers())
        known.arriving[id(one)] = one
        known.count += 1  # last: a thread that sees the count sees the transfer
        threads = [reference() for reference in self._threads.valuerefs()]
        found = [own[device] for own in threads if own is not None and device in own]
        if launched.stream_id:
            found.append(torch.cuda.default_stream(device))  # of threads that have not switched
        return found

    def remove_transfer(self, one: Transfer, device: int) -> None:
        """Undo :meth:`add_transfer`."""
        if device in self._devices:
            self._devices[device].arriving.pop(id(one), None)

    def is_used(self, device: torch.device) -> bool:
        """Return whether tensors may have been allocated on another stream than the default one."""
        if device.type != "cuda" or not self.is_watched:
            return device.type == "cuda"
        known = self._devices.get(device.index)
        return known is not None and any(known.streams)  # whose handle is not 0

    @property
    def is_unwatched(self) -> bool:
        """Whether this thread's switches are not recorded, since it reads no parameters."""
        return getattr(self._local, "quiet", False)

    @is_unwatched.setter
    def is_unwatched(self, value: bool) -> None:
        self._local.quiet = value


side_streams = SideStreams()


class unwatched_stream:  # used like a function
    """Run a block with a current stream on which no parameters are read, and which follows no all-gather."""

    __slots__ = ("_before", "_context")

    def __init__(self, stream: Any) -> None:
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._before, side_streams.is_unwatched = side_streams.is_unwatched, True
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        side_streams.is_unwatched = self._before


def record_streams(tensors: Iterable[Tensor | None], device: torch.device) -> None:
    """Keep the memory of tensors that are about to be dropped until the current stream's work so far is done.

    The allocator returns memory to the stream that it was allocated on as soon as the host drops it. That may be the
    stream of a forward, which has not waited for the collectives that read its gradients; the device's current stream
    has. Only plain tensors own memory.
    """
    if side_streams.is_used(device):
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if type(tensor) is Tensor:
                tensor.record_stream(stream)


def record_numbered_switches(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function that makes a stream current and takes the stream as numbers."""
    side_streams.is_watched = True

    def switch(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        side_streams.record_switch(kwargs["device_index"] if "device_index" in kwargs else args[1])

    return switch


def record_switches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes its first argument, a stream, current or makes it current no longer."""

    def switch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # The parameter is called ``self`` in some of these functions and ``stream`` in others.
        stream = args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Stream))
        if stream.device.type == "cuda":
            side_streams.record_switch(stream.device_index)
        return result

    return switch


# --- work under a backward's waits ---


@dataclass
class BackwardWaits:
    """What may be launched under a communication that a backward waits for.

    Features that communicate in backward call these slots between the start of a transfer and its wait; a feature that
    has work which needs nothing of that transfer fills them. An empty slot costs the test for None. Ranks call them in
    one order, as the work may communicate itself.
    """

    launch_inside: Callable[[], None] | None = None  # called inside a backward, before it waits for a collective
    # Called with the autograd nodes of a graph's outputs, before their gradients are waited for.
    launch_before: Callable[[Sequence[Any]], None] | None = None


BACKWARD_WAITS: Final = BackwardWaits()
