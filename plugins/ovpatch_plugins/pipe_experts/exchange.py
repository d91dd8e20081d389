"""All-to-alls that are launched and waited for apart, forward and backward.

[Note: launch and wait are nodes] An all-to-all is two nodes of the autograd graph: one launches it, one waits for it.
In backward they change places: the node that waited launches the reverse all-to-all, the one that launched waits for
it. What is computed between the two hides the communication, both ways. Of the nodes that are ready, the engine runs
the one first that forward made last, so the order of calls in forward is the order of backward, mirrored, on all ranks
alike. Nothing is differentiated by a nested backward: a weight that several parts use gets one gradient, hooks fire
once, and checkpointing sees an ordinary graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.comm.work import WorkGroup
from ovpatch.overlap.data_parallel.grad_hooks import apply_function

# By what rows travel between the ranks of a group.


class AllToAllTransport(Protocol):
    """Carries rows; one all-to-all behind the other, on all ranks in the same order."""

    def start(self, found: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> WorkGroup:
        """Start to send rows.

        Args:
            found: Where received rows are put, by rank, ``[sum(received), h]``, contiguous.
            rows: ``[sum(sent), h]``, by the rank that is to get them, contiguous.
            received: How many each rank sends.
            sent: How many each rank is to get.

        Returns:
            What to wait for.
        """


@dataclass(frozen=True)
class CollectiveAllToAll:
    """torch.distributed's own all-to-all.

    Attributes:
        group: The ranks.
    """

    group: dist.ProcessGroup

    def start(self, found: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> WorkGroup:
        """See :meth:`AllToAllTransport.start`."""
        with profiler_span(profiler_label("pipe_experts", "all_to_all")):
            work = dist.all_to_all_single(found, rows, list(received), list(sent), group=self.group, async_op=True)
        return WorkGroup((work,), (rows,))


Place = Callable[[Tensor], Tensor]
"""Returns memory for received rows, ``[n, h]``, of the dtype and device of a tensor."""


def all_to_all(
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
    *,
    place: Place | None = None,
    place_gradient: Place | None = None,
) -> Arriving:
    """Start to send rows to the ranks of a group.

    Args:
        rows: ``[sum(sent), h]``, by the rank that is to get them.
        sent: How many each rank is to get.
        received: How many each rank sends; they will lie by rank.
        group: The ranks.
        place: Where received rows are put; fresh memory by default.
        place_gradient: Where the gradient of ``rows`` is put.

    Returns:
        What to wait for.
    """
    return send(rows, sent, received, CollectiveAllToAll(group), place=place, place_gradient=place_gradient)


def send(
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    lane: AllToAllTransport,
    *,
    place: Place | None = None,
    place_gradient: Place | None = None,
) -> Arriving:
    """Do what :func:`all_to_all` does, there and, in backward, back by a lane."""
    transfer = _Transfer(lane, list(sent), list(received), place, place_gradient)
    return Arriving(transfer, apply_function(_Launch, transfer, rows))


class Arriving:
    """Rows on their way."""

    def __init__(self, transfer: _Transfer, rows: Tensor) -> None:
        self._transfer = transfer
        self._rows: Tensor | None = rows

    def wait(self) -> Tensor:
        """Return the rows, ``[sum(received), h]``.

        Raises:
            RuntimeError: They have been returned before.
        """
        rows, self._rows = self._rows, None  # whoever has them now may let go of them
        if rows is None:
            raise RuntimeError("these rows have been waited for: keep what wait() returned the first time")
        found: Tensor = apply_function(_Wait, self._transfer, rows)
        return found


class _Transfer:
    """What the two nodes of an all-to-all share."""

    def __init__(
        self,
        lane: AllToAllTransport,
        sent: list[int],
        received: list[int],
        place: Place | None,
        place_gradient: Place | None,
    ) -> None:
        self._lane, self._sent, self._received = lane, sent, received
        self._place, self._place_gradient = place, place_gradient
        self._forward = WorkGroup(())
        self._backward: tuple[Tensor, WorkGroup] | None = None

    def launch(self, rows: Tensor) -> Tensor:
        """Start; return the memory in which the rows will be."""
        received, self._forward = self._start(rows, self._sent, self._received, self._place)
        return received.data

    def wait(self) -> None:
        """Make the current stream (the host, without streams) wait for the rows."""
        self._forward.wait()

    def launch_back(self, grad: Tensor) -> None:
        """Start to send the received rows' gradient back."""
        self._backward = self._start(grad, self._received, self._sent, self._place_gradient)

    def wait_back(self) -> Tensor:
        """Return the gradient of the rows that were sent."""
        assert self._backward is not None, "the node that waited runs before the one that launched"
        (grad, pending), self._backward = self._backward, None
        pending.wait()
        return grad

    def _start(
        self, rows: Tensor, sent: list[int], received: list[int], place: Place | None
    ) -> tuple[Tensor, WorkGroup]:
        """Start; a backend's thread may keep both tensors for a moment longer, so neither must be one with a graph."""
        rows = rows.data.contiguous()
        found = rows.new_empty((sum(received), *rows.shape[1:])) if place is None else place(rows)
        return found, self._lane.start(found, rows, received, sent)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, rows: Tensor) -> Tensor:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        return transfer.launch(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.transfer.wait_back()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, rows: Tensor) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return rows.data  # no view: experts may compute in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.transfer.launch_back(grad)
        return None, grad  # nobody reads it: what comes back has another shape, and is taken from the transfer


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return rows.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, *[None] * ctx.count


def tie(rows: Tensor, *others: Tensor) -> Tensor:
    """Return rows that depend on other tensors in the graph, though not in value.

    A rank whose part is empty may compute its rows without reading what arrived. Its backward must launch what that of
    the other ranks does.
    """
    found: Tensor = apply_function(_Tie, rows, *others)
    return found
