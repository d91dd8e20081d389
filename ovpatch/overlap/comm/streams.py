"""CUDA streams on which work was produced or may be read, and labels for profilers.

The autograd engine runs the hook of a gradient on the stream of the forward operation. A collective
that a hook launches follows only that stream, so it must wait for the streams that produced the
other gradients of its bucket. And a side stream of the script may read parameters for which only
another stream has waited.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

# --- labels ---


def profiler_label(feature: str, phase: str, name: str = "") -> str:
    """Return ``ovpatch::<feature>::<phase> (<name>)``.

    Args:
        feature: The name of the feature.
        phase: A verb or a collective.
        name: The name of an object. Default: none.
    """
    return f"ovpatch::{feature}::{phase} ({name})" if name else f"ovpatch::{feature}::{phase}"


_NO_SPAN: AbstractContextManager[Any] = contextlib.nullcontext()


def profiler_span(label: str) -> AbstractContextManager[Any]:
    """Return a context that torch's profiler shows as a range; do nothing without a profiler.

    Args:
        label: A label of :func:`profiler_label`.
    """
    # An idle `record_function` takes longer than the launch of a collective.
    if torch.autograd._profiler_enabled():
        return torch.autograd.profiler.record_function(label)
    return _NO_SPAN


# --- frames ---


def hide_frames(*functions: Any) -> None:
    """Make Dynamo run functions as they are, with those defined in them and all that they call.

    A compiled function may break its graph at ``loss.backward()`` or at a wrapped module. Dynamo
    then examines all Python frames below it, also those of hooks that the engine calls. It would
    compile the reducer frame by frame and guard on its counters. It would fail at the first
    collective, in the middle of a backward.

    Args:
        functions: Python functions, which may run already. They stay marked for the rest of the
            process.
    """
    # Marked code objects cost a call nothing, while `torch.compiler.disable` costs each call some
    # microseconds.
    from torch._dynamo import eval_frame

    # Versions without this function compile as much of the frames as they can.
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


# --- streams of a backward ---


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class ProducerStreams:
    """The CUDA streams that have produced gradients since the last :meth:`clear`, by device."""

    def __init__(self) -> None:
        # By the index of the device, then by the handle of the stream.
        self._streams: dict[int, dict[int, torch.cuda.Stream]] = {}

    def record_current(self, device: int) -> None:
        """Record the current stream of a CUDA device, given its index."""
        # This runs for every gradient, and the handle is much cheaper than a Stream object.
        handle = torch._C._cuda_getCurrentRawStream(device)
        if handle not in self._streams.get(device, ()):
            self._streams.setdefault(device, {})[handle] = torch.cuda.current_stream(device)

    def wait_for_producers(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        """Make the current stream of a device wait for the recorded streams.

        Args:
            device: The device. Without streams, the call does nothing.
            tensors: The tensors that the current stream reads next; their memory is kept until
                then.
        """
        streams = self._streams.get(device.index) if device.type == "cuda" else None
        if not streams:
            return
        # Usually the current stream is the only one, and then no Stream object is needed.
        if len(streams) == 1 and torch._C._cuda_getCurrentRawStream(device.index) in streams:
            return
        current = torch.cuda.current_stream(device)
        producers = [stream for stream in streams.values() if stream != current]
        for stream in producers:
            current.wait_stream(stream)
        if producers:
            for tensor in tensors:
                tensor.record_stream(current)

    def clear(self) -> None:
        """Drop all recorded streams."""
        self._streams.clear()


# --- streams of the script ---


class Transfer(Protocol):
    """A transfer for which some stream has waited, and which may still be in flight."""

    def follow(self, stream: Any) -> bool:
        """Make another stream wait, and return whether it waits now."""


class _ThreadStreams(dict[int, Any]):
    """The streams that a thread has made current, by index of the device.

    On all other devices, the default stream is current.
    """


class _DeviceTransfers:
    """The transfers to one device, and the streams that follow them."""

    def __init__(self) -> None:
        # The transfers that may be in flight, by id().
        self.in_flight: weakref.WeakValueDictionary[int, Transfer] = weakref.WeakValueDictionary()
        # The number of transfers so far; no number in `seen_counts` is larger.
        self.count = 0
        # The streams that have been current, by handle.
        self.streams: dict[int, Any] = {}
        # The count at the last switch to each stream, by handle.
        self.seen_counts: dict[int, int] = {}


class SideStreams:
    """The streams that are current in some thread.

    [Note: streams that have not waited] In stock PyTorch, parameters are complete for all work that
    follows a step. Here, the step's stream continues while all-gathers run. Once one stream has
    waited for a pending parameter, it becomes a plain one. Another stream that follows only the
    step would read it too early. Streams that read are current in some thread. So all current
    streams wait when a parameter becomes a plain one, and later ones wait when they become current.
    Our own streams that read no parameters do not wait (:class:`unwatched_stream`), because peers'
    calls are served on one of them, and an all-gather may wait for such a reply.

    Attributes:
        is_watched: Whether each switch of streams calls :meth:`record_switch`. Otherwise unknown
            streams may be in use.
    """

    def __init__(self) -> None:
        self.is_watched = False
        # Per thread: its streams, and whether its switches are recorded.
        self._local = threading.local()
        # The streams of live threads, by id of the thread.
        self._threads: weakref.WeakValueDictionary[int, _ThreadStreams] = (
            weakref.WeakValueDictionary()
        )
        # The transfers, by index of the device.
        self._devices: dict[int, _DeviceTransfers] = {}

    def record_switch(self, device: int) -> None:
        """Record the new current stream of this thread, and make it wait for transfers in flight.

        Args:
            device: The index of the stream's device.
        """
        if self.is_unwatched:
            return
        transfers = self._devices.setdefault(device, _DeviceTransfers())
        handle = torch._C._cuda_getCurrentRawStream(device)
        stream = transfers.streams.get(handle)
        if stream is None:
            stream = transfers.streams[handle] = torch.cuda.current_stream(device)
        thread_streams = getattr(self._local, "streams", None)
        if thread_streams is None:
            thread_streams = _ThreadStreams()
            self._local.streams = thread_streams
            self._threads[threading.get_ident()] = thread_streams
        # The stream must be recorded before the count is read. Then a concurrent `add_transfer`
        # either finds the stream, or is counted below.
        thread_streams[device] = stream
        count = transfers.count
        if transfers.seen_counts.get(handle) != count:
            # A list, because other threads add transfers.
            in_flight = [reference() for reference in transfers.in_flight.valuerefs()]
            is_following = [
                transfer.follow(stream) for transfer in in_flight if transfer is not None
            ]
            if all(is_following):
                transfers.seen_counts[handle] = count

    def add_transfer(self, transfer: Transfer, launched: Any) -> list[Any]:
        """Make streams follow a transfer when they become current, until :meth:`remove_transfer`.

        Args:
            transfer: The transfer; only a weak reference is stored.
            launched: The stream that has waited for the transfer.

        Returns:
            The streams that are current now. The caller must make them follow the transfer.
        """
        device = launched.device_index
        transfers = self._devices.setdefault(device, _DeviceTransfers())
        transfers.in_flight[id(transfer)] = transfer
        # A thread that reads the new count must find the transfer.
        transfers.count += 1
        threads = [reference() for reference in self._threads.valuerefs()]
        current = [
            streams[device] for streams in threads if streams is not None and device in streams
        ]
        # In threads that have never switched, the default stream is current.
        if launched.stream_id:
            current.append(torch.cuda.default_stream(device))
        return current

    def remove_transfer(self, transfer: Transfer, device: int) -> None:
        """Undo :meth:`add_transfer`."""
        if device in self._devices:
            self._devices[device].in_flight.pop(id(transfer), None)

    def is_used(self, device: torch.device) -> bool:
        """Return whether a tensor may belong to another stream than the default one."""
        if device.type != "cuda" or not self.is_watched:
            return device.type == "cuda"
        transfers = self._devices.get(device.index)
        # The handle of the default stream is 0.
        return transfers is not None and any(transfers.streams)

    @property
    def is_unwatched(self) -> bool:
        """True if switches of this thread are not recorded, because it reads no parameters."""
        return getattr(self._local, "is_unwatched", False)

    @is_unwatched.setter
    def is_unwatched(self, value: bool) -> None:
        self._local.is_unwatched = value


side_streams = SideStreams()


class unwatched_stream:
    """A context with a current stream that reads no parameters, and follows no all-gather."""

    __slots__ = ("_context", "_was_unwatched")

    def __init__(self, stream: Any) -> None:
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._was_unwatched = side_streams.is_unwatched
        side_streams.is_unwatched = True
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        # The switch back is not recorded either.
        self._context.__exit__(*error)
        side_streams.is_unwatched = self._was_unwatched


def record_streams(tensors: Iterable[Tensor | None], device: torch.device) -> None:
    """Keep the memory of tensors until the work so far of the current stream is done.

    The host is about to drop the tensors. The allocator then returns memory to the stream that
    allocated it. That may be the stream of a forward, which does not wait for the collectives that
    read its gradients, while the current stream has.
    """
    if side_streams.is_used(device):
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            # Only plain tensors own memory.
            if type(tensor) is Tensor:
                tensor.record_stream(stream)


def record_numbered_switches(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function that makes a stream current and takes numbers for the stream."""
    side_streams.is_watched = True

    def switch(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        device = kwargs["device_index"] if "device_index" in kwargs else args[1]
        side_streams.record_switch(device)

    return switch


def record_switches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a stream, its first argument, current, or the previous one."""

    def switch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Some of these functions name the parameter ``self``, and some ``stream``.
        stream = args[0] if args else _find_stream(kwargs.values())
        if stream.device.type == "cuda":
            side_streams.record_switch(stream.device_index)
        return result

    return switch


def _find_stream(values: Iterable[Any]) -> Any:
    return next(value for value in values if isinstance(value, torch.Stream))
