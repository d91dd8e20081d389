"""Messages between the ranks of a pipeline by copy engines, through slots in the receivers' memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import Work, WorkWithEpilogue
from ovpatch.overlap.comm.consensus import gather_values
from ovpatch.overlap.comm.lifetimes import group_state, group_timeout_s
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.pipelining.edges import find_slots
from ovpatch.overlap.pipelining.messages import Messages, blocks_host, view_real

if TYPE_CHECKING:
    from ovpatch.overlap.kernels.copy_messages import PointToPoint

# The size of the memory by which a rank tries whether its peers can reach it.
_TRIAL_BYTES: Final = 4096


class CopiedMessages(Messages):
    """Messages by copy engines, with which no kernel runs while a rank waits.

    Args:
        group: The pipeline's group, all of whose ranks can reach each other's memory.
        device: The device on which its stages compute.
        edges: See :class:`Messages`.
        slots: Number of messages that an edge holds.
        refuse: Raises an error with the given reason if there are no slots. None if torch may carry the messages
            instead.
    """

    is_open = False
    is_copied = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        edges: Sequence[tuple[int, int]],
        slots: int,
        *,
        refuse: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(group, device, ())
        self.remarks = ["messages are carried by copy engines"]
        self._edges = edges
        self._slots = slots
        # Bytes of the largest message so far.
        self._bytes = 0
        self._refuse = refuse
        self._copies: PointToPoint

    def open(self, count_bytes: Callable[[Callable[[int], int]], int]) -> Messages:
        """Allocate the slots, or use the slots of an earlier schedule. All ranks of the pipeline call this.

        Args:
            count_bytes: Returns the bytes of the largest message that this rank receives, given a function that rounds
                a tensor's bytes up.

        Returns:
            The messages of the next steps: these, or those of ``torch.distributed`` if there is too little memory and
            no ``refuse``.

        Raises:
            Exception: ``refuse`` raised, because there is too little memory or peers cannot reach it; on all ranks.
        """
        from ovpatch.overlap.kernels.copy_choice import make_on_all
        from ovpatch.overlap.kernels.copy_messages import PointToPoint, round_up

        found = gather_values(self._group, "pipeline messages", {"bytes": count_bytes(round_up)})
        self._bytes = max(self._bytes, *(values["bytes"] for values in found))
        opened = find_slots(self._group)
        edges = tuple(sorted(set(self._edges)))
        for known_edges, known in opened:
            if (
                known_edges == edges
                and known.slots >= self._slots
                and known.slot_bytes >= self._bytes
            ):
                self._copies = known
                self.is_open = True
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
        if made is None:
            if self._refuse is not None:
                self._refuse(reason)
            # The report holds this list, so it changes in place.
            self.remarks[:] = [write_c10d_remark(reason)]
            return Messages(self._group, self._device, self._edges)
        opened.add(edges, made)
        self._copies = made
        self.is_open = True
        return self

    def reserve(self, slots: int) -> None:
        """Make room for at least ``slots`` messages on an edge from the next step on. All ranks call this."""
        if slots > self._slots:
            self._slots = slots
            self.is_open = False

    def start_step(self, report_failure: Callable[[str], object] = str) -> int:
        """Start the messages of a step.

        Raises:
            RuntimeError: Messages of an earlier step are unread, or did not arrive in time.
        """
        self._copies.begin(report_failure)
        return super().start_step()

    def receive(self, tensors: Sequence[Tensor], sender: int) -> list[Work]:
        """Expect a message in the sender's order; the stream waits for it when the returned handle waits."""
        wanted = [view_real(tensor) for tensor in tensors]
        # Copy engines write contiguous memory alone.
        into = [
            tensor if tensor.is_contiguous() else tensor.new_empty(tensor.shape)
            for tensor in wanted
        ]
        work = self._copies.receive(into, sender)
        pairs = [
            (tensor, made) for tensor, made in zip(wanted, into, strict=True) if tensor is not made
        ]
        if not pairs:
            return [work]
        return [WorkWithEpilogue([work], lambda: [tensor.copy_(made) for tensor, made in pairs])]

    def _start_send(self, tensors: Sequence[Tensor], receiver: int) -> list[Work]:
        return [self._copies.send([_flatten(tensor) for tensor in tensors], receiver)]

    def wait_for_arrivals(self) -> None:
        """Make the host wait until all messages have arrived.

        Raises:
            RuntimeError: They did not arrive within the group's timeout.
        """
        super().wait_for_arrivals()
        self._copies.check()

    def finish(self) -> None:
        """Wait until all messages are sent, after this rank has received all messages for it."""
        super().finish()
        self._copies.end()


def _flatten(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of torch's own class, whose memory can be copied."""
    plain = tensor.detach()
    # The tensor of a functional collective waits only when a computation reads it, and a copy is no computation.
    if type(plain) is not Tensor:
        plain = plain.clone()
    return plain.contiguous()


# --- reasons against copies ---


def find_reason_against_copies(
    group: dist.ProcessGroup, devices: Sequence[torch.device], *, varies: bool, is_asked: bool
) -> str:
    """Return the reason against copy engines for the messages of a group, or ""; all ranks call this, and agree.

    Args:
        group: The pipeline's group.
        devices: The devices of this rank's stages.
        varies: The option ``variable_seq_lengths``.
        is_asked: Whether the user wants copies. Otherwise they need a GPU for each rank, because it is unknown which
            transport is faster for ranks that share a GPU.
    """
    if varies:
        return "variable_seq_lengths is on, and slots are made for messages of one size"
    check = functools.partial(_find_local_reason, group, devices)
    reason = memory.unsupported_reason(group, devices[0], check, shares_devices=is_asked)
    return reason or _try_copies(group, devices[0])


def _find_local_reason(
    group: dist.ProcessGroup, devices: Sequence[torch.device], device: torch.device
) -> str:
    if reason := memory.memory_unsupported_reason(device):
        return reason
    from ovpatch.overlap.kernels.copy_choice import reason_against

    if len(set(devices)) > 1:
        return "its stages are on several devices"
    if device.type == "cuda" and blocks_host(group, device):
        return "the backend of its group is gloo, on which waits block the host"
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return "with CUDA_DEVICE_MAX_CONNECTIONS=1 a waiting stream blocks all other streams of the GPU"
    return reason_against(device)


def _try_copies(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the reason for which ranks cannot reach each other's memory, as in some containers; tried once a group."""
    from ovpatch.overlap.kernels import copy_choice as selection
    from ovpatch.overlap.kernels import copy_window as window

    def attempt() -> str:
        return selection.make_on_all(
            group, lambda: window.allocate_window(_TRIAL_BYTES, group, device)
        )[1]

    return group_state(group).get_or_create(("pipeline", "copies"), attempt)


def write_c10d_remark(reason: str) -> str:
    """Return the line of the report for messages by ``torch.distributed`` instead of copies."""
    return f"messages are carried by torch.distributed, not by copy engines: {reason}"
