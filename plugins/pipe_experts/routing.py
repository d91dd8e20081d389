"""Tokens to experts: which rows are sent in which order, and how what comes back is put together again."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.overlap.engine import apply_function
from ovpatch_plugins.pipe_experts.parts import Counts, Plan, positions_on

DROPPED = -1
"""Stands for an expert in a routing table where a token goes to none."""


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
    """

    order: Tensor
    slots: int
    top_k: int
    counts: Counts

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is sent, in a dtype: tokens ``[tokens, h]`` -> ``[rows, h]``."""
        found: Tensor = apply_function(_Rows, self, x, dtype)
        return found

    def combined(self, rows: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what came back: ``[rows, h]``, ``[tokens, k]`` -> ``[tokens, h]``."""
        slots = self.spread(rows).view(*top_k_weights.shape, rows.shape[1])
        return (slots * top_k_weights.unsqueeze(-1)).sum(dim=1)

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
        route: Route = ctx.route  # each token's slots are added up in one order, which an index_add would not promise
        dx = route.spread(grad).view(-1, route.top_k, grad.shape[1]).sum(dim=1, dtype=ctx.dtype)
        return None, dx, None


def route(top_k_index: Tensor, plan: Plan, group: dist.ProcessGroup) -> Route:
    """Agree with the other ranks on what is sent. The host waits for the counts, once.

    Args:
        top_k_index: Expert of each token's slots, ``[tokens, k]``, numbered over all ranks, those of a rank one behind
            the other; :data:`DROPPED` where a slot goes to none.
        plan: Into which parts.
        group: The ranks.

    Raises:
        ValueError: An expert that no rank has; on all ranks.
    """
    tokens, top_k = top_k_index.shape
    chosen, experts = top_k_index.reshape(-1).long(), plan.experts
    bins = plan.chunks * experts
    chunk: Tensor | int = 0
    if plan.chunks > 1:
        token = torch.arange(tokens * top_k, device=chosen.device) // top_k
        chunk = token * plan.chunks // max(tokens, 1) * experts
    nowhere = chosen < 0
    of_expert = (chosen + chunk).masked_fill(nowhere, bins)
    place = chosen if len(plan.groups) == 1 else positions_on(plan, chosen.device)[chosen.clamp(0, experts - 1)]
    order = (place + chunk).masked_fill(nowhere, bins).argsort(stable=True)
    counts = torch.zeros(bins + 1, dtype=torch.long, device=chosen.device)
    counts.scatter_add_(0, of_expert.clamp(max=bins), torch.ones_like(of_expert))
    sent = counts[:bins].view(plan.chunks, plan.world, plan.local).transpose(0, 1).reshape(plan.world, -1)
    sent = torch.cat([sent, _wrong(chosen, experts).expand(plan.world, 1)], dim=1)  # all ranks are to raise
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=group)
    table = torch.stack([sent, arriving]).tolist()
    for rank, row in enumerate(table[1]):
        if row[-1]:
            raise ValueError(
                f"rank {rank} of the group routes a token to expert {row[-1]}, but {plan.world} ranks with "
                f"{plan.local} experts each have {experts}: route to 0 to {experts - 1}, or {DROPPED} for none"
            )
    found = Counts.of(plan, *[[_by_chunk(row, plan) for row in rows] for rows in table])
    return Route(order[: sum(found.sizes())], tokens * top_k, top_k, found)


def _by_chunk(row: list[int], plan: Plan) -> list[list[int]]:
    """Return ``[chunk][local expert]``."""
    return [row[chunk * plan.local :][: plan.local] for chunk in range(plan.chunks)]


def _wrong(chosen: Tensor, experts: int) -> Tensor:
    """Return an expert that is none, or 0 if all are some, as a tensor of one element."""
    if not len(chosen):
        return chosen.new_zeros(1)
    low, high = chosen.aminmax()
    return torch.where(high >= experts, high, torch.where(low < DROPPED, low, 0)).view(1)
