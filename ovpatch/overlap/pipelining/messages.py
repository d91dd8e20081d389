"""Messages between the ranks of a pipeline by ``torch.distributed``.

Messages from one rank to another keep the sender's order, which both ranks know from the schedule. They never wait for
a message of another edge. On gloo a tag per step makes such a queue inside the stage's own group; transfers of torch
have tag 0. On NCCL each directed edge has a communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import Work, backend_name
from ovpatch.overlap.comm.lifetimes import group_state, group_store
from ovpatch.overlap.pipelining.edges import Communicators, connect_edges
from ovpatch.overlap.pipelining.ir import Receive

_MAX_DIMENSIONS: Final = 8
# The tags of steps; after the last one they start over.
_FIRST_TAG: Final = 1 << 20
_TAGS: Final = 1 << 10

_SUPPORTED_BACKENDS: Final = ("gloo", "nccl")

AHEAD: Final = {True: 2, False: 1}
"""The receives to post early, by whether a wait blocks the host."""


def find_group_reason(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the reason against messages of a pipeline over a group, or ""."""
    backend = backend_name(group, device)
    if backend not in _SUPPORTED_BACKENDS:
        return f"its messages are sent by backend {backend}, not by gloo or nccl"
    if group_store(group) is None:
        return "its process group has no store, through which ranks would compare their settings"
    return ""


def blocks_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the wait for a message blocks the host, as on gloo, instead of a stream."""
    return backend_name(group, device) == "gloo"


class Messages:
    """The sends and receives of one rank of a pipeline.

    Args:
        group: The pipeline's group.
        device: The device on which its stages compute.
        edges: All directed edges ``(sender, receiver)`` of the pipeline, by rank in the group; the same on all ranks,
            which make their messages together.

    Attributes:
        is_open: Whether steps may start. If not, all ranks call :meth:`CopiedMessages.open` before.
        is_copied: Whether copy engines carry the messages.
        remarks: The lines of the report about the transport.
        posted: The receives that this step has started.
        arriving: The posted receives without a wait so far, with their handles and buffers.
    """

    is_open = True
    is_copied = False

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, edges: Sequence[tuple[int, int]]
    ) -> None:
        self.remarks: list[str] = []
        self.posted: Final[set[Receive]] = set()
        self.arriving: Final[dict[Receive, tuple[list[Work], list[Tensor]]]] = {}
        self._group = group
        self._rank = dist.get_rank(group)
        self._device = device
        self._tag = 0
        # Works and tensors of the sent messages by receiver, the oldest first.
        self._sent: dict[int, deque[tuple[list[Work], list[Tensor]]]] = {}
        # Messages of failed steps. gloo cancels a dropped send, and a peer may still wait for it.
        self._abandoned: list[object] = []
        self._steps = group_state(group).get_or_create(("pipeline", "steps"), _StepCount)
        self._communicators = Communicators()
        # The event after the last wait of the stream; None if waits block the host.
        self._arrived: torch.cuda.Event | None = None
        # Whether the host must still wait for that event.
        self._is_arriving = False
        if not blocks_host(group, device):
            if edges:
                self._communicators = connect_edges(group, edges, device)
            self._arrived = torch.cuda.Event()

    def start_step(self, report_failure: Callable[[str], object] = str) -> int:
        """Start the messages of a step, and return its number among all steps of the group.

        The tag changes with each step, so that no rank takes a message of an interrupted step for one of this step.

        Args:
            report_failure: Reports to peers that this rank has continued without their messages.
        """
        del report_failure
        self.posted.clear()
        self.arriving.clear()
        self._steps.count += 1
        self._tag = _FIRST_TAG + self._steps.count % _TAGS
        self._is_arriving = False
        return self._steps.count

    # --- receives ---

    def post(self, receive: Receive, make_buffers: Callable[[Receive], list[Tensor]]) -> None:
        """Start a receive of the step into new buffers."""
        self.posted.add(receive)
        buffers = make_buffers(receive)
        self.arriving[receive] = self.receive(buffers, receive.sender), buffers

    def wait(self, receive: Receive) -> list[Tensor]:
        """Wait for a posted message, and return its tensors. The host waits on gloo, the stream on NCCL."""
        works, buffers = self.arriving.pop(receive)
        self._wait_for(works)
        return buffers

    def drop_receives(self) -> None:
        """Drop all posted receives and their buffers."""
        self.posted.clear()
        self.arriving.clear()

    def receive(self, tensors: Sequence[Tensor], sender: int) -> list[Work]:
        """Start to receive into ``tensors``, in the sender's order."""
        communicator = self._communicators.get((sender, self._rank))
        if communicator is None:
            return [self._group.recv([view_real(tensor)], sender, self._tag) for tensor in tensors]
        return [communicator.recv([view_real(tensor)], 0, 0) for tensor in tensors]

    def receive_sizes(self, count: int, sender: int) -> list[torch.Size]:
        """Receive the shapes of the ``count`` tensors that follow, and return them; the host waits."""
        found = torch.empty(count, 1 + _MAX_DIMENSIONS, dtype=torch.int64, device=self._device)
        self._wait_for(self.receive([found], sender))
        return [torch.Size(sizes[:dimensions]) for dimensions, *sizes in found.tolist()]

    def _wait_for(self, works: Sequence[Work]) -> None:
        for work in works:
            work.wait()
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self._device))
            self._is_arriving = True

    def wait_for_arrivals(self) -> None:
        """Make the host wait until all messages have arrived for which :meth:`wait` was called.

        On NCCL the host is ahead of the device. Only after this call can it observe effects that precede the sends.
        """
        if self._arrived is not None and self._is_arriving:
            self._arrived.synchronize()
            self._is_arriving = False

    # --- sends ---

    def send(self, tensors: Sequence[Tensor], receiver: int, *, with_sizes: bool = False) -> None:
        """Send tensors, and keep them until :meth:`release` or :meth:`finish` finds them sent.

        Args:
            tensors: The tensors of one message.
            receiver: Rank of the receiver.
            with_sizes: Whether the receiver first reads their shapes, by :meth:`receive_sizes`.

        Raises:
            ValueError: A tensor whose shape is sent has more than eight dimensions.
        """
        if with_sizes:
            tensors = [_list_sizes(tensors).to(self._device), *tensors]
        works = self._start_send([view_real(tensor) for tensor in tensors], receiver)
        self._sent.setdefault(receiver, deque()).append((works, list(tensors)))

    def _start_send(self, tensors: Sequence[Tensor], receiver: int) -> list[Work]:
        communicator = self._communicators.get((self._rank, receiver))
        if communicator is None:
            return [self._group.send([tensor], receiver, self._tag) for tensor in tensors]
        return [communicator.send([tensor], 1, 0) for tensor in tensors]

    def release(self, kept: Mapping[int, int]) -> None:
        """Drop the oldest sent messages, which their receivers have read.

        Args:
            kept: The number of messages that stay, by receiver.
        """
        for receiver, left in kept.items():
            sent = self._sent.get(receiver)
            while sent and len(sent) > left:
                works, _ = sent.popleft()
                for work in works:
                    work.wait()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        if self._sent:
            self.release(dict.fromkeys(self._sent, 0))
        self._abandoned.clear()

    def abandon(self) -> None:
        """Stop waiting for the messages of a failed step.

        Its messages are kept until the next step ends, because a peer may still wait for them.
        """
        self._abandoned.append(self._sent)
        self._sent = {}


class _StepCount:
    """The number of steps that ran over a group."""

    def __init__(self) -> None:
        self.count = 0


def _list_sizes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the numbers of dimensions and the sizes, ``[tensors, 1 + 8]``."""
    rows = []
    for tensor in tensors:
        if tensor.dim() > _MAX_DIMENSIONS:
            raise ValueError(
                f"ovpatch: a stage sends a tensor of {tensor.dim()} dimensions, but with "
                f"variable_seq_lengths it may have {_MAX_DIMENSIONS}. Flatten some before the end of the "
                "stage."
            )
        rows.append([tensor.dim(), *tensor.shape, *[0] * (_MAX_DIMENSIONS - tensor.dim())])
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def view_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, which backends can send; return other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
