"""Messages between the ranks of a pipeline, by ``torch.distributed`` or by copy engines.

Messages from one rank to another keep the sender's order, which both sides know from the schedule, and wait behind no
message of another edge. On gloo a tag per step makes such a queue inside the stage's own group; stock's transfers have
tag 0. On NCCL each directed edge has a communicator of its own.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.hookspecs import refuse_option
from ovpatch.overlap.comm.collectives import Work, WorkWithEpilogue, backend_name
from ovpatch.overlap.comm.consensus import agree_on_name, gather_values
from ovpatch.overlap.comm.lifetimes import (
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    register_at_exit,
)
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch_plugins.pipeline.options import COPIES, OPTIONS
from ovpatch_plugins.pipeline.program import Receive, Step
from ovpatch_plugins.pipeline.report import COUNTERS

if TYPE_CHECKING:
    from ovpatch.overlap.kernels.copy_messages import PointToPoint

_log = logging.getLogger("ovpatch.pipeline")

_MOST_DIMENSIONS: Final = 8
_FIRST_TAG: Final = 1 << 20
_TAGS: Final = 1 << 10

_TRIED_BYTES: Final = 4096

_SUPPORTED_BACKENDS: Final = ("gloo", "nccl")

AHEAD: Final = {True: 2, False: 1}
"""Receives posted in advance, where a wait blocks the host and where it does not."""


def find_group_reason(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return why messages of a pipeline cannot travel over a group, or ""."""
    backend = backend_name(group, device)
    if backend not in _SUPPORTED_BACKENDS:
        return f"its messages travel by backend {backend}, not by gloo or nccl"
    if group_store(group) is None:
        return "its process group has no store, through which ranks would compare their settings"
    return ""


def blocks_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the wait for a message blocks the host, as on gloo, or a stream."""
    return backend_name(group, device) == "gloo"


class PeerToPeer:
    """Sends and receives of one rank of a pipeline.

    Args:
        group: The pipeline's group.
        device: Where its stages compute.
        edges: All directed edges ``(sender, receiver)`` of the pipeline, by rank in the group; the same on all ranks,
            which make their transports together.

    Attributes:
        is_open: Whether steps may begin; else all ranks call :meth:`CopiedMessages.open` before.
        remarks: What the report says of it.
    """

    is_open = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, edges: Sequence[tuple[int, int]]) -> None:
        self.remarks: list[str] = []
        self._group = group
        self._rank = dist.get_rank(group)
        self._device = device
        self._tag = 0
        self._sent: dict[int, deque[tuple[list[Work], list[Tensor]]]] = {}
        self._abandoned: list[object] = []  # what steps that ended by an error have sent
        self._steps = group_state(group).get_or_create(("pipeline", "steps"), _Steps)
        self._communicators = _Communicators()
        self._arrived: torch.cuda.Event | None = None
        self._is_arriving = False
        if not blocks_host(group, device):
            if edges:
                self._communicators = _connect(group, edges, device)
            self._arrived = torch.cuda.Event()

    def start_step(self, tell_failure: Callable[[str], object] = str) -> None:
        """Begin the messages of a step. What an interrupted step left unread cannot be taken for one of them.

        Args:
            tell_failure: Tells the other ranks that this one went on without their messages.
        """
        self._steps.count += 1
        self._tag = _FIRST_TAG + self._steps.count % _TAGS
        self._is_arriving = False

    @property
    def step(self) -> int:
        """Number of the step among all of the group."""
        return self._steps.count

    def send(self, tensors: Sequence[Tensor], receiver: int, *, tells_sizes: bool = False) -> None:
        """Send tensors, which are kept until :meth:`release` or :meth:`finish` finds them sent.

        Args:
            tensors: The tensors of one message.
            receiver: Rank of the receiver.
            tells_sizes: Whether it reads their shapes first, by :meth:`receive_sizes`.

        Raises:
            ValueError: A tensor whose shape is told has more than eight dimensions.
        """
        if tells_sizes:
            tensors = [_list_sizes(tensors).to(self._device), *tensors]
        works = self._start_send([_real(tensor) for tensor in tensors], receiver)
        self._sent.setdefault(receiver, deque()).append((works, list(tensors)))

    def _start_send(self, tensors: Sequence[Tensor], receiver: int) -> list[Work]:
        communicator = self._communicators.get((self._rank, receiver))
        if communicator is None:
            return [self._group.send([tensor], receiver, self._tag) for tensor in tensors]
        return [communicator.send([tensor], 1, 0) for tensor in tensors]

    def receive(self, tensors: Sequence[Tensor], sender: int) -> list[Work]:
        """Start to receive into ``tensors``, in the sender's order."""
        communicator = self._communicators.get((sender, self._rank))
        if communicator is None:
            return [self._group.recv([_real(tensor)], sender, self._tag) for tensor in tensors]
        return [communicator.recv([_real(tensor)], 0, 0) for tensor in tensors]

    def receive_sizes(self, count: int, sender: int) -> list[torch.Size]:
        """Return the shapes of the ``count`` tensors that follow. The host waits for them."""
        found = torch.empty(count, 1 + _MOST_DIMENSIONS, dtype=torch.int64, device=self._device)
        self.wait_for(self.receive([found], sender))
        return [torch.Size(sizes[:dimensions]) for dimensions, *sizes in found.tolist()]

    def wait_for(self, works: Sequence[Work]) -> None:
        """Wait for a message: the host on gloo, the current stream on NCCL."""
        for work in works:
            work.wait()
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self._device))
            self._is_arriving = True

    def wait_for_arrivals(self) -> None:
        """Have the host wait until all messages have come that :meth:`wait_for` was called for.

        On NCCL the host is ahead of the device: what senders did before they sent can only be seen from here on.
        """
        if self._arrived is not None and self._is_arriving:
            self._arrived.synchronize()
            self._is_arriving = False

    def release(self, receiver: int, left: int) -> None:
        """Drop the oldest sent messages of an edge, which the receiver has read, until ``left`` are kept."""
        sent = self._sent.get(receiver)
        while sent and len(sent) > left:
            works, _ = sent.popleft()
            for work in works:
                work.wait()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for receiver in self._sent:
            self.release(receiver, 0)
        self._abandoned.clear()

    def abandon(self) -> None:
        """Wait for no message of a step that ended by an error.

        What it has sent is kept until the next step ends, as another rank may still wait for it: gloo cancels what is
        dropped.
        """
        self._abandoned.append(self._sent)
        self._sent = {}


class StepReceives:
    """The receives of one step of a program: each is started once, in front of the computation that reads it.

    Args:
        transport: Carries the messages.

    Attributes:
        posted: Those that have been started.
        arriving: Those of them that nobody has waited for, with their handles and buffers.
    """

    def __init__(self, transport: PeerToPeer) -> None:
        self._transport = transport
        self.posted: Final[set[Receive]] = set()
        self.arriving: Final[dict[Receive, tuple[list[Work], list[Tensor]]]] = {}

    def clear(self) -> None:
        """Begin a step."""
        self.posted.clear()
        self.arriving.clear()

    def post(self, receive: Receive, make_buffers: Callable[[], list[Tensor]]) -> None:
        """Start a receive into new buffers."""
        self.posted.add(receive)
        buffers = make_buffers()
        self.arriving[receive] = self._transport.receive(buffers, receive.sender), buffers

    def wait_for(self, receive: Receive) -> list[Tensor]:
        """Wait for a message; return its tensors."""
        works, buffers = self.arriving.pop(receive)
        self._transport.wait_for(works)
        return buffers

    def release_sent(self, step: Step) -> None:
        """Drop sent messages that were read before the one that ``step`` reads was made."""
        for peer, left in step.kept.items():
            self._transport.release(peer, left)


class CopiedMessages(PeerToPeer):
    """Messages by copy engines, through slots in the receivers' memory. No kernel runs while a rank waits.

    Args:
        group: The pipeline's group, all of whose ranks can reach each other's memory.
        device: Where its stages compute.
        edges: As of :class:`PeerToPeer`.
        slots: Messages that an edge holds.
        is_asked: Whether the script asks for copy engines, so that it is an error where there are none.
    """

    is_open = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        edges: Sequence[tuple[int, int]],
        slots: int,
        *,
        is_asked: bool = True,
    ) -> None:
        super().__init__(group, device, ())
        self.remarks = ["messages are carried by copy engines"]
        self._edges, self._slots, self._bytes, self._is_asked = edges, slots, 0, is_asked
        self._copies: PointToPoint

    def open(self, count_bytes: Callable[[Callable[[int], int]], int]) -> PeerToPeer:
        """Allocate the slots, or take those of an earlier schedule. All ranks of the pipeline call this.

        Args:
            count_bytes: Returns the bytes of the largest message that this rank receives, given a function that rounds
                a tensor's bytes up.

        Returns:
            What carries messages from now on: this one, or ``torch.distributed`` where the script does not ask for
            copy engines and there is too little memory.

        Raises:
            ovpatch.OptionError: There is too little memory, or it cannot be reached; on all ranks.
        """
        from ovpatch.overlap.kernels.copy_choice import make_on_all
        from ovpatch.overlap.kernels.copy_messages import PointToPoint, round_up

        found = gather_values(self._group, "pipeline messages", {"bytes": count_bytes(round_up)})
        self._bytes = max(self._bytes, *(one["bytes"] for one in found))
        opened = group_state(self._group).get_or_create(_Opened, _Opened)
        edges = tuple(sorted(set(self._edges)))
        for known_edges, known in opened:
            if known_edges == edges and known.slots >= self._slots and known.slot_bytes >= self._bytes:
                self._copies, self.is_open = known, True
                return self
        made, reason = make_on_all(
            self._group,
            lambda: PointToPoint(
                self._group,
                self._device,
                edges,
                slots=self._slots,
                slot_bytes=self._bytes,
                timeout_s=group_timeout_s(self._group),
            ),
        )
        if made is None and self._is_asked:
            refuse_copies(reason)
        if made is None:
            self.remarks[:] = [write_c10d_remark(reason)]
            return PeerToPeer(self._group, self._device, self._edges)
        register_at_exit(_free_slots)
        opened.append((edges, made))
        self._copies, self.is_open = made, True
        return self

    def reserve(self, slots: int) -> None:
        """Have at least ``slots`` messages fit into an edge from the next step on. All ranks call this."""
        if slots > self._slots:
            self._slots, self.is_open = slots, False

    def start_step(self, tell_failure: Callable[[str], object] = str) -> None:
        """Begin the messages of a step.

        Raises:
            RuntimeError: Messages of an earlier step are unread, or did not come in time.
        """
        self._copies.begin(tell_failure)
        super().start_step()

    def receive(self, tensors: Sequence[Tensor], sender: int) -> list[Work]:
        """Expect a message in the sender's order. The stream waits for it when the returned handle does."""
        wanted = [_real(tensor) for tensor in tensors]
        into = [one if one.is_contiguous() else one.new_empty(one.shape) for one in wanted]
        work = self._copies.receive(into, sender)
        pairs = [(one, made) for one, made in zip(wanted, into, strict=True) if one is not made]
        if not pairs:
            return [work]
        return [WorkWithEpilogue([work], lambda: [one.copy_(made) for one, made in pairs])]

    def _start_send(self, tensors: Sequence[Tensor], receiver: int) -> list[Work]:
        COUNTERS.copied_messages += 1
        return [self._copies.send([_flat(tensor) for tensor in tensors], receiver)]

    def wait_for_arrivals(self) -> None:
        """Have the host wait until all messages have come.

        Raises:
            RuntimeError: They did not within the group's time-out.
        """
        super().wait_for_arrivals()
        self._copies.check()

    def finish(self) -> None:
        """Wait until all messages are sent, all others having been received."""
        super().finish()
        self._copies.end()


class _Opened(list[tuple[tuple[tuple[int, int], ...], "PointToPoint"]]):
    """The slots of a group's edges, which its schedules share as they run one after the other."""

    def close(self, timeout_s: float) -> None:
        """Free them once all messages are where they belong."""
        for _, copies in self:
            if not copies.drain():
                _log.warning(_STUCK_TEXT, timeout_s)
                _stuck.append(copies)
        self.clear()


def _free_slots(group: dist.ProcessGroup | None = None) -> None:
    if not is_exiting_by_error():
        for owner, opened in group_values(_Opened, group):
            opened.close(group_timeout_s(owner))


_stuck: list[PointToPoint] = []  # their memory is never freed, which would wait for their streams, too

_STUCK_TEXT: Final = (
    "messages of a pipeline have not arrived in %g s and are not waited for any longer: look at the output of the "
    "other ranks, one of which may have died"
)


def find_reason_against_copies(
    group: dist.ProcessGroup, devices: Sequence[torch.device], *, varies: bool, is_asked: bool
) -> str:
    """Return why copy engines do not carry the messages of a group, or "". All its ranks call this, and agree.

    Args:
        group: The pipeline's group.
        devices: Where this rank's stages compute.
        varies: The option ``variable_seq_lengths``.
        is_asked: Whether the script asks for them. Else they are only for ranks with a GPU each: of ranks that take
            turns on one it is not known what is faster.
    """
    if varies:
        return "variable_seq_lengths is on, and slots are made for messages of one size"
    check = functools.partial(_reason_against_copies, group, devices)
    reason = memory.unsupported_reason(group, devices[0], check, shares_devices=is_asked)
    return reason or _try_copies(group, devices[0])


def _reason_against_copies(group: dist.ProcessGroup, devices: Sequence[torch.device], device: torch.device) -> str:
    if reason := memory.memory_unsupported_reason(device):
        return reason
    from ovpatch.overlap.kernels.copy_choice import reason_against  # where there may be some

    if len(set(devices)) > 1:
        return "its stages are on several devices"
    if device.type == "cuda" and blocks_host(group, device):
        return "the backend of its group is gloo, on which waits block the host"
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return "with CUDA_DEVICE_MAX_CONNECTIONS=1 a stream that waits holds up all others of the GPU"
    return reason_against(device)


def _try_copies(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return why ranks cannot reach each other's memory, as it may be in containers; tried once for a group."""
    from ovpatch.overlap.kernels import copy_choice as selection
    from ovpatch.overlap.kernels import copy_window as window

    def attempt() -> str:
        return selection.make_on_all(group, lambda: window.allocate_window(_TRIED_BYTES, group, device))[1]

    return group_state(group).get_or_create(("pipeline", "copies"), attempt)


def refuse_copies(reason: str) -> None:
    """Raise OptionError: the user wants copy engines to carry messages, and they cannot."""
    refuse_option("pipeline", OPTIONS, "p2p_transport", COPIES, reason)


def write_c10d_remark(reason: str) -> str:
    """Return what the report says where copy engines were not asked for and do not carry messages."""
    return f"messages are carried by torch.distributed, not by copy engines: {reason}"


class _Steps:
    """Number of steps that ran over a group."""

    def __init__(self) -> None:
        self.count = 0


def _list_sizes(tensors: Sequence[Tensor]) -> Tensor:
    """Return numbers of dimensions and sizes, ``[tensors, 1 + 8]``."""
    rows = []
    for tensor in tensors:
        if tensor.dim() > _MOST_DIMENSIONS:
            raise ValueError(
                f"a stage sends a tensor of {tensor.dim()} dimensions; with variable_seq_lengths it may have "
                f"{_MOST_DIMENSIONS}. Flatten some before the end of the stage."
            )
        rows.append([tensor.dim(), *tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())])
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of torch's own class, whose memory can be copied."""
    plain = tensor.detach()
    if type(plain) is not Tensor:  # as of a functional collective, which waits where it is computed with
        plain = plain.clone()
    return plain.contiguous()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# --- communicators of NCCL ---


class _Communicators(dict[tuple[int, int], dist.ProcessGroup]):
    """The communicators of this rank's directed edges ``(sender, receiver)``. The sender is rank 0 of each.

    [Note: a communicator per directed edge] A communicator runs its transfers one after the other, so a receive that
    waits would stall the sends behind it. Each has one thread block: a waiting kernel slows the products beside it by
    the blocks that it takes. They are connected before the first step, in one order on all ranks, as a lazy connection
    blocks the host until the peer calls, too. Torch does not register them: where the default group has a device, it
    would split them off that, which takes all ranks of the job.
    """


def _connect(group: dist.ProcessGroup, edges: Iterable[tuple[int, int]], device: torch.device) -> _Communicators:
    """Return the communicators of a group, with those of all edges of this rank connected. All ranks call this."""
    made = group_state(group).get_or_create(_Communicators, _Communicators)
    name = agree_on_name(group, "pipeline edges", timeout_s=group_timeout_s(group))
    for edge in sorted(set(edges)):
        if dist.get_rank(group) in edge and edge not in made:
            made[edge] = _make_communicator(group, edge, f"ovpatch/{name}/{edge[0]}-{edge[1]}", device)
    return made


def _make_communicator(
    group: dist.ProcessGroup, edge: tuple[int, int], name: str, device: torch.device
) -> dist.ProcessGroup:
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    backend: Any = group._get_backend(device)
    options._timeout = getattr(backend, "wrapped_pg", backend).options._timeout
    options.global_ranks_in_group = [dist.get_global_rank(group, rank) for rank in edge]
    options.group_name = name
    store, rank = group_store(group), edge.index(dist.get_rank(group))
    assert store is not None
    store = dist.PrefixStore(name, store)
    made = dist.ProcessGroup(store, rank, 2)
    kind = dist.ProcessGroup.BackendType.NCCL
    made._set_default_backend(kind)
    with torch.cuda.device(device):
        made._register_backend(torch.device("cuda"), kind, dist.ProcessGroupNCCL(store, rank, 2, options))
        token = torch.zeros(1, dtype=torch.float32, device=device)
        with warnings.catch_warnings():  # that a transfer connects lazily is what is wanted here
            warnings.filterwarnings("ignore", message="An unbatched P2P op")
            (made.send([token], 1, 0) if rank == 0 else made.recv([token], 0, 0)).wait()
        torch.cuda.synchronize(device)
    return made


def close_edges(group: dist.ProcessGroup | None = None) -> None:
    """Shut down the communicators of one group, or of all, behind their transfers, and free slots. All ranks call this.

    Does nothing if an exception ends this process: transfers in flight may wait for peers that are gone.

    Args:
        group: The pipeline's process group; all by default.
    """
    if is_exiting_by_error():
        return
    for _, made in group_values(_Communicators, group):
        for edge in sorted(made):
            made[edge].shutdown()
        made.clear()
    _free_slots(group)
