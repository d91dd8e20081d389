"""Tokens to experts: which rows are sent in which order, and how what comes back is put together again.

[Note: put together by a kernel] A row is written and read several times where torch's operations weight rows and add
them up. On GPUs, where Triton can compile, one kernel does it, and sums are rounded once; elsewhere torch does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.overlap.data_parallel.grad_hooks import apply_function
from ovpatch.overlap.symm_mem.support import triton_unavailable_reason
from ovpatch_plugins.pipe_experts.chunks import ChunkPlan, Counts, Plans, positions_on
from ovpatch_plugins.pipe_experts.exchange import AllToAllTransport, CollectiveAllToAll

DROPPED = -1
"""Stands for an expert in a routing table where a token goes to none."""

_OF_KERNELS = (torch.float32, torch.bfloat16, torch.float16)


def capacity_of(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Return how many tokens of one rank an expert takes: ``factor`` times its share, rounded up."""
    return ceil(factor * tokens * top_k / experts)


def drop_surplus(top_k_index: Tensor, experts: int, capacity: int) -> Tensor:
    """Return a routing table in which no expert gets more than ``capacity`` tokens of this rank; first come stay.

    Args:
        top_k_index: Expert of each token's slots, ``[tokens, k]``; :data:`DROPPED` where there is none.
        experts: How many there are.
        capacity: Most tokens of an expert.
    """
    chosen = top_k_index.reshape(-1)
    held = chosen.where(chosen >= 0, experts)
    ordered, order = held.sort(stable=True)
    begins = torch.searchsorted(ordered, torch.arange(experts + 1, device=chosen.device))
    rank = torch.arange(len(ordered), device=chosen.device) - begins[ordered]
    stays = torch.empty_like(chosen, dtype=torch.bool).index_copy_(0, order, rank < capacity)
    return chosen.where(stays, DROPPED).view_as(top_k_index)


@dataclass(frozen=True)
class Route:
    """What is sent in one call of a layer.

    Attributes:
        order: Slots, ``token * k + which``, in the order in which they are sent, ``[rows]``.
        slots: Number of slots, ``tokens * k``; those that go nowhere are not in ``order``.
        top_k: Slots of a token, k.
        counts: Rows by part, rank and expert.
        plan: Into which parts.
    """

    order: Tensor
    slots: int
    top_k: int
    counts: Counts
    plan: ChunkPlan

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is sent, in a dtype: tokens ``[tokens, h]`` -> ``[rows, h]``."""
        found: Tensor = apply_function(_Rows, self, x, dtype)
        return found

    def combined(self, rows: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum of what came back, taken for ``dtype``: ``[rows, h]`` -> ``[tokens, h]``."""
        if _by_kernel(rows, top_k_weights):
            found: Tensor = apply_function(_WeightedSum, self, rows, top_k_weights, dtype)
            return found
        slots = self.spread(rows.to(dtype)).view(*top_k_weights.shape, rows.shape[1])
        return (slots * top_k_weights.unsqueeze(-1)).sum(dim=1)

    def summed(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of each token's rows: ``[rows, h]`` -> ``[tokens, h]``, always in the same order."""
        if _by_kernel(rows):
            from ovpatch_plugins.pipe_experts.triton_combine import weighted_sum

            return weighted_sum(rows.contiguous(), None, self.place, self.top_k, dtype)
        return self.spread(rows).view(-1, self.top_k, rows.shape[1]).sum(dim=1, dtype=dtype)

    @functools.cached_property
    def place(self) -> Tensor:
        """The row of each slot, ``[slots]``; -1 where none was sent."""
        place = torch.full((self.slots,), -1, device=self.order.device)
        return place.index_copy_(0, self.order, torch.arange(len(self.order), device=self.order.device))

    def spread(self, rows: Tensor) -> Tensor:
        """Return rows by slot, ``[slots, h]``; zero where none was sent."""
        make = rows.new_empty if len(rows) == self.slots else rows.new_zeros
        return make((self.slots, rows.shape[1])).index_copy_(0, self.order, rows)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.route, ctx.dtype = route, x.dtype
        return x.to(dtype).index_select(0, route.order // route.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.route.summed(grad, ctx.dtype), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        from ovpatch_plugins.pipe_experts.triton_combine import weighted_sum

        ctx.route = route
        ctx.save_for_backward(rows, weights)
        promoted = torch.promote_types(dtype, weights.dtype)
        return weighted_sum(rows.contiguous(), weights.contiguous(), route.place, route.top_k, promoted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        from ovpatch_plugins.pipe_experts.triton_combine import weighted_sum_back

        rows, weights = (saved.contiguous() for saved in ctx.saved_tensors)
        _, of_rows, of_weights, _ = ctx.needs_input_grad
        grads = weighted_sum_back(
            rows, weights, ctx.route.order, grad.contiguous(), of_rows=of_rows, of_weights=of_weights
        )
        return None, *grads, None


def _by_kernel(*tensors: Tensor) -> bool:
    """Tell whether our kernels can read tensors; see [Note: put together by a kernel]."""
    return all(t.is_cuda and t.dtype in _OF_KERNELS for t in tensors) and not triton_unavailable_reason()


def route(top_k_index: Tensor, plans: Plans, group: dist.ProcessGroup, lane: AllToAllTransport | None = None) -> Route:
    """Agree with the other ranks on what is sent, and in which parts. The host waits for the counts, once.

    [Note: sorted ahead] Which plan is chosen may depend on what the counts tell. They are exchanged so finely that they
    are any plan's, and slots are sorted meanwhile as is expected: once more only if another plan is chosen.

    Args:
        top_k_index: Expert of each token's slots, ``[tokens, k]``, numbered over all ranks, those of a rank one behind
            the other; :data:`DROPPED` where a slot goes to none.
        plans: Into which parts.
        group: The ranks.
        lane: By what they tell each other; c10d's all-to-all by default.

    Raises:
        ValueError: An expert that no rank has; on all ranks.
    """
    tokens, top_k = top_k_index.shape
    chosen, expected = top_k_index.reshape(-1).long(), plans.expected
    order = _order(chosen, expected, tokens)
    sent, arriving = _exchanged(chosen, plans, tokens, lane or CollectiveAllToAll(group))
    _check(arriving, expected)
    most, trains = divmod(int(arriving[:, -1].max()), 2)
    plan = plans.chosen(group, most, bool(trains))
    if plan != expected:
        order = _order(chosen, plan, tokens)
    found = Counts.of(plan, *[_by_chunk(counts, plan) for counts in (sent, arriving)])
    return Route(order[: sum(found.sizes())], tokens * top_k, top_k, found, plan)


def _order(chosen: Tensor, plan: ChunkPlan, tokens: int) -> Tensor:
    """Return slots in the order in which a plan sends them, ``[slots]``; those that go nowhere come last."""
    place = chosen
    if len(plan.groups) > 1:
        place = positions_on(plan, chosen.device)[chosen.clamp(0, plan.experts - 1)]
    place = place + _chunk(chosen, plan.chunks, tokens) * plan.experts
    return place.masked_fill(chosen < 0, plan.chunks * plan.experts).argsort(stable=True)


def _chunk(chosen: Tensor, chunks: int, tokens: int) -> Tensor | int:
    """Return in which chunk each slot's token is."""
    if chunks == 1 or not len(chosen):
        return 0
    return torch.arange(len(chosen), device=chosen.device) // (len(chosen) // tokens) * chunks // tokens


def _exchanged(chosen: Tensor, plans: Plans, tokens: int, lane: AllToAllTransport) -> tuple[Tensor, Tensor]:
    """Return how many rows are sent to each rank, and come from it, ``[rank, chunk * local expert]``.

    Behind that are two more columns: an expert that is none, or 0; and twice the rank's tokens, plus 1 if gradients are
    on there.
    """
    experts, world = plans.world * plans.local, plans.world
    bins = plans.chunks * experts
    of_expert = (chosen + _chunk(chosen, plans.chunks, tokens) * experts).masked_fill(chosen < 0, bins).clamp(max=bins)
    counts = torch.zeros(bins + 1, dtype=torch.long, device=chosen.device)
    counts.scatter_add_(0, of_expert, torch.ones_like(of_expert))
    by_rank = counts[:bins].view(plans.chunks, world, plans.local).transpose(0, 1).reshape(world, -1)
    facts = chosen.new_full((1,), 2 * tokens + torch.is_grad_enabled())
    more = [fact.expand(world, 1) for fact in (_wrong(chosen, experts), facts)]  # all ranks are to raise
    sent = torch.cat([by_rank, *more], dim=1)
    arriving = torch.empty_like(sent)
    lane.start(arriving, sent, [1] * world, [1] * world).wait()
    here = torch.stack([sent, arriving]).cpu()
    return here[0], here[1]


def _check(arriving: Tensor, plan: ChunkPlan) -> None:
    for rank, expert in enumerate(arriving[:, -2].tolist()):
        if expert:
            raise ValueError(
                f"rank {rank} of the group routes a token to expert {expert}, but {plan.world} ranks with "
                f"{plan.local} experts each have {plan.experts}: route to 0 to {plan.experts - 1}, or {DROPPED} for "
                "none"
            )


def _by_chunk(counts: Tensor, plan: ChunkPlan) -> list[list[list[int]]]:
    """Return ``[rank][chunk of the plan][local expert]``."""
    found: list[list[list[int]]] = counts[:, :-2].view(plan.world, plan.chunks, -1, plan.local).sum(dim=2).tolist()
    return found


def _wrong(chosen: Tensor, experts: int) -> Tensor:
    """Return an expert that is none, or 0 if all are some, as a tensor of one element."""
    if not len(chosen):
        return chosen.new_zeros(1)
    low, high = chosen.aminmax()
    return torch.where(high >= experts, high, torch.where(low < DROPPED, low, 0)).view(1)
