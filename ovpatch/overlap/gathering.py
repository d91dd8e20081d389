"""All-gathers of parameters after a step in which every rank updated its own slice, hidden under what comes next.

[Note: one bucket settles as one] A bucket is gathered by one launch, whose parts cannot be waited for one by one, and
ranks must launch the same. Whether a parameter can be pending is a question of this rank alone. So the launch is the
same in any case, and if one parameter cannot be pending, this rank waits for the whole bucket at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.collectives import AllGather
from ovpatch.overlap.copies.registry import gathering
from ovpatch.overlap.labels import label, span
from ovpatch.overlap.pending import is_pending, lose, mark, owners_of, plainly, unmark
from ovpatch.overlap.side_streams import quietly_on, side_streams
from ovpatch.overlap.slices import Slice, cut, elements_of, flat
from ovpatch.overlap.works import Unpacked, Work


class _Arrived(NamedTuple):
    """What one stream has waited for, so that others can.

    Attributes:
        works: The collectives.
        event: Behind what was copied out of them, if anything was.
        followers: Streams that have waited, by their number.
    """

    works: Sequence[Work]
    event: torch.cuda.Event | None
    followers: set[int]


class _Padded(NamedTuple):
    """A parameter that does not divide by the number of ranks is gathered elsewhere, and copied out."""

    param: Tensor
    gathered: Tensor


def launch(gathers: Iterable[ParamGather]) -> None:
    """Launch gathers one behind the other; see :meth:`ParamGather.launch`."""
    with plainly():
        for gather in gathers:
            gather._launch()


class ParamGather:
    """Gathers the slices of a bucket's parameters, in the parameters' own memory.

    Use it over and over: :meth:`launch` after each step, :meth:`settle` before the next. Readers in between settle by
    themselves.

    Args:
        params: Dense parameters of one dtype and device, each cut by :func:`ovpatch.overlap.slices.cut`.
        group: The process group, on whose ranks the slices are.
        feature: For labels in profiles.
        name: Of the bucket, for labels in profiles.
        communicator: Over the same ranks, which the backend gathers on; by default the group itself.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        group: dist.ProcessGroup,
        *,
        feature: str = "dist_optimizer",
        name: str = "",
        communicator: dist.ProcessGroup | None = None,
    ) -> None:
        self._params = tuple(params)
        self._group, self._world, self._rank = group, group.size(), group.rank()
        self._device = params[0].device
        self._gather = AllGather(group, self._device, communicator)
        self._labels = label(feature, "all_gather", name), label(feature, "wait", name)
        self._lock = threading.RLock()  # re-entered if a finaliser or a signal handler reads while we settle
        self._works: Sequence[Work] = []
        self._padded: list[_Padded] = []
        self._stream: torch.cuda.Stream | None = None
        self._arrived: _Arrived | None = None
        # Memory that torch cannot resize was made by another library (``from_numpy()``), which may read it. Asked once:
        # a later ``numpy()`` looks alike for ever, though its arrays are counted while there are any.
        self._foreign = any(not param.untyped_storage().resizable() for param in params)
        # [Note: owners of a parameter] With these nodes kept, a tensor has as many owners with a graph as without. Who
        # else is legitimate differs: DDP's C++ reducer is, ours is none, and the former lets go of some after the first
        # step. So the fewest owners that any parameter of the bucket has ever had are normal, and one more is a
        # scripted module, or a graph that is still to be run backward.
        self._owners = sys.maxsize
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in params if p.requires_grad]

    @property
    def is_pending(self) -> bool:
        """Whether a gather has been launched and nobody has waited for it."""
        return bool(self._works)

    @property
    def is_copied(self) -> bool:
        """Whether copy engines gather, instead of the group's backend."""
        return gathering(self._group, self._device) is not None

    def launch(self) -> str:
        """Start gathering: a collective, which all ranks of the group must call in the same order.

        It reads this rank's slices as the current stream leaves them.

        Returns:
            Nothing if the parameters are pending now, else why not: then they are complete, in stream order.

        Raises:
            RuntimeError: The last gather has not been settled, so its results would mix with the slices of now.
        """
        with plainly():
            return self._launch()

    def _launch(self) -> str:
        if self._world == 1:
            return ""
        with self._lock:
            if self._works:
                raise RuntimeError("a gather was launched while the last one was under way; call settle() before step")
            if self._arrived is not None:
                self._arrived = None  # whose works hold the parameters' memory
                side_streams.gone(self, self._device.index)
            reason = self._mark()
            try:
                self._start()
            except BaseException:  # a KeyboardInterrupt, too: nobody would ever bring what is marked
                self._unmark()
                raise
            if reason:
                self.settle()
            return reason

    def settle(self) -> None:
        """Make the caller's stream, launch's and all that are current in some thread wait for the values.

        No collective, so on any rank, by any thread, in any mode.
        """
        with self._lock:
            if not self._works:
                return
            try:
                with plainly(), span(self._labels[1]):
                    self._wait()
            except RuntimeError as error:  # of the collective
                for param in self._params:
                    if is_pending(param):
                        lose(param, self.settle, error)
                raise
            self._unmark()
            self._works = []
            self._padded.clear()

    def _mark(self) -> str:
        if self._foreign:
            return "another library made its memory"
        self._owners = min(self._owners, *map(owners_of, self._params))
        for param in self._params:
            if reason := mark(param, self.settle, owners=self._owners):
                self._unmark()
                return reason
        return ""

    def _unmark(self) -> None:
        for param in self._params:
            unmark(param)

    def _start(self) -> None:
        with span(self._labels[0]):
            pairs = [self._output_and_input(param) for param in self._params]
            device = self._params[0].device
            self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._works = self._gather(*zip(*pairs, strict=True))

    def _output_and_input(self, param: Parameter) -> tuple[Tensor, Tensor]:
        data = param.data
        numel = data.numel()
        part = cut(numel, self._world, self._rank)
        if part.size * self._world == numel:
            return flat(data), elements_of(data, part)
        return self._padded_copy(flat(data), part)

    def _padded_copy(self, elements: Tensor, part: Slice) -> tuple[Tensor, Tensor]:
        gathered = elements.new_empty(part.size * self._world)
        begin = self._rank * part.size
        gathered[begin : begin + part.numel].copy_(elements[part.begin : part.end])
        self._padded.append(_Padded(elements, gathered))
        return gathered, gathered[begin : begin + part.size]

    def _wait(self) -> None:
        if self._stream is None:
            self._take()
            return
        reader = torch.cuda.current_stream(self._device)
        if reader == self._stream:
            self._take()
        else:
            with quietly_on(self._stream):
                self._take()
        copied = self._padded or any(isinstance(work, Unpacked) for work in self._works)  # on launch's stream
        event = self._stream.record_event() if copied else None
        self._arrived = _Arrived(self._works, event, {self._stream.stream_id})
        for stream in (reader, *side_streams.arriving(self, self._stream)):
            self.follow(stream)

    def follow(self, stream: torch.cuda.Stream) -> bool:
        """Make one more stream wait for values that others have waited for; see [Note: streams that have not waited].

        What else was queued on launch's stream is not waited for, unless values were copied there.

        Returns:
            Whether it has waited by now.
        """
        arrived = self._arrived
        if arrived is None or stream.stream_id in arrived.followers:
            return True
        with quietly_on(stream):
            if torch.cuda.is_current_stream_capturing():
                return False  # what is captured has been waited for before
            for work in arrived.works if arrived.event is None else (arrived.event,):
                work.wait()
        arrived.followers.add(stream.stream_id)
        return True

    def _take(self) -> None:
        for work in self._works:
            work.wait()
        for param, gathered in self._padded:
            param.copy_(gathered[: param.numel()])
