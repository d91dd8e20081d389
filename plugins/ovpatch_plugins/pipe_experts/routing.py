"""Tokens to rows: a layer's chunks, the order in which rows are dispatched, and the sum of returned rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.overlap.autograd import apply_function
from ovpatch.overlap.comm.consensus import name_group_ranks
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.kernels.symmetric_memory import triton_unavailable_reason
from ovpatch_plugins.pipe_experts.all_to_all import AllToAllTransport, CollectiveAllToAll
from ovpatch_plugins.pipe_experts.pipe_experts_options import CUTS, EXCHANGES

DROPPED = -1
"""The expert of a slot that goes to no expert."""

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_EXPERT_GROUPS: Final = 4
# The numbers of chunks that ``auto`` measures.
_MEASURED: Final = (2, 4, 8)


# --- chunks, and how many rows each sends and receives ---


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a layer; the same on all ranks, since each chunk is a pair of collectives.

    A plan depends on options and on facts that all ranks share, never on this rank's tokens. A chunk may
    have no rows.

    Attributes:
        ep_size: Number of ranks.
        expert_groups: Ranges of local experts.
        token_chunks: Number of slices of the tokens; each slice has a chunk for every group of experts.
        symmetric: Whether rows are sent over symmetric memory.
    """

    ep_size: int
    expert_groups: tuple[range, ...]
    token_chunks: int = 1
    symmetric: bool = False

    @property
    def num_local_experts(self) -> int:
        """Number of experts of a rank."""
        return self.expert_groups[-1].stop

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks."""
        return self.ep_size * self.num_local_experts

    @functools.cached_property
    def chunks(self) -> list[tuple[int, range]]:
        """The chunks in the order of their dispatch: the slice of the tokens, and the local experts."""
        return [(i, group) for i in range(self.token_chunks) for group in self.expert_groups]

    def compute_positions(self) -> list[int]:
        """Return each expert's position in the send order of a slice: by expert group, then by rank."""
        local = self.num_local_experts
        order = [
            rank * local + i
            for group in self.expert_groups
            for rank in range(self.ep_size)
            for i in group
        ]
        positions = [0] * self.num_experts
        for position, expert in enumerate(order):
            positions[expert] = position
        return positions


class PlanCandidates:
    """One or more plans, of which one is chosen once all ranks know the number of tokens.

    Attributes:
        expected: The plan that is probably chosen. Ranks may expect different plans.
        finest: A plan whose slices of tokens are parts of every plan's slices. It is symmetric if any
            plan is.
    """

    def __init__(self, plan: ChunkPlan) -> None:
        self.expected = plan
        self.finest = plan

    def choose_plan(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> ChunkPlan:
        """Return a plan, the same on all ranks, which all call this.

        Args:
            group: The ranks.
            tokens: The tokens of the rank that has the most.
            trains: Whether gradients are on at that rank.
        """
        return self.expected


@functools.lru_cache(maxsize=64)
def make_plan(
    ep_size: int, num_local_experts: int, cut: str = "auto", parts: int = 0, exchange: str = "c10d"
) -> ChunkPlan:
    """Return the plan of a layer on ``ep_size`` ranks.

    Groups of experts use each weight once, and a group of one expert needs no sorting of its rows.
    Slices of tokens use every weight in every chunk.

    Args:
        ep_size: Number of ranks.
        num_local_experts: Number of experts of a rank.
        cut: An element of :data:`.pipe_experts_options.CUTS`. ``auto`` without measurement is ``none``,
            since a chunk costs the host more than it hides unless layers are large.
        parts: Number of chunks, 0 for the default of ``cut``. There are never more groups than experts.
        exchange: An element of :data:`.pipe_experts_options.EXCHANGES`. ``auto`` without measurement is
            ``c10d``.

    Raises:
        ValueError: An unknown name or a negative number.
    """
    if cut not in CUTS:
        raise ValueError(f"ovpatch: cut={cut!r} is unknown. Choose one of {', '.join(CUTS)}.")
    if exchange not in EXCHANGES:
        raise ValueError(
            f"ovpatch: exchange={exchange!r} is unknown. Choose one of {', '.join(EXCHANGES)}."
        )
    if parts < 0:
        raise ValueError(
            f"ovpatch: parts={parts} is negative. Give a number of parts, or 0 for the default of the cut."
        )
    symmetric = exchange == "symmetric" and ep_size > 1
    if cut == "tokens":
        return ChunkPlan(ep_size, (range(num_local_experts),), parts or 2, symmetric)
    count = min(parts or _MAX_EXPERT_GROUPS, num_local_experts) if cut == "experts" else 1
    bounds = [num_local_experts * i // count for i in range(count + 1)]
    groups = tuple(range(bounds[i], bounds[i + 1]) for i in range(count))
    return ChunkPlan(ep_size, groups, symmetric=symmetric)


def list_candidates(
    ep_size: int, num_local_experts: int, parts: int = 0, exchange: str = "c10d"
) -> dict[str, ChunkPlan]:
    """Return the plans to choose from, each once, by name; the uncut one comes first.

    ``parts`` is the number of chunks, 0 for 2, 4 and 8. The exchange ``auto`` lists plans of both ways.
    """
    names: dict[ChunkPlan, str] = {}
    for way in ("c10d", "symmetric") if exchange == "auto" else (exchange,):
        suffix = ", symmetric" if way == "symmetric" else ""
        names.setdefault(
            make_plan(ep_size, num_local_experts, "none", exchange=way), f"none{suffix}"
        )
        for cut in ("experts", "tokens"):
            for count in (parts,) if parts else _MEASURED:
                plan = make_plan(ep_size, num_local_experts, cut, count, way)
                names.setdefault(plan, f"{cut} {len(plan.chunks)}{suffix}")
    return {name: plan for plan, name in names.items()}


@functools.lru_cache(maxsize=64)
def get_positions_on(plan: ChunkPlan, device: torch.device) -> torch.Tensor:
    """Return :meth:`ChunkPlan.compute_positions` as a tensor on a device, ``[experts]``."""
    # A cache outlives the modes of the script that made its first entry.
    with outside_modes():
        return torch.tensor(plan.compute_positions(), dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Splits:
    """Numbers of rows in one call of a layer on one rank.

    Attributes:
        input_splits: Rows that this rank dispatches, ``[chunk][rank]``.
        expert_splits: Rows that this rank receives, ``[chunk][rank][expert of the chunk's group]``.
    """

    input_splits: list[list[int]]
    expert_splits: list[list[list[int]]]

    @classmethod
    def from_counts(
        cls,
        plan: ChunkPlan,
        sent: Sequence[Sequence[Sequence[int]]],
        arriving: Sequence[Sequence[Sequence[int]]],
    ) -> Splits:
        """Group ``[rank][slice of tokens][local expert]`` by chunk."""
        return cls(
            [
                [sum(by_rank[i][expert] for expert in group) for by_rank in sent]
                for i, group in plan.chunks
            ],
            [
                [[by_rank[i][expert] for expert in group] for by_rank in arriving]
                for i, group in plan.chunks
            ],
        )

    def output_splits(self, chunk: int) -> list[int]:
        """Return the number of rows of a chunk that each rank dispatches to this rank."""
        return [sum(by_expert) for by_expert in self.expert_splits[chunk]]

    def chunk_sizes(self) -> list[int]:
        """Return the number of rows that this rank dispatches in each chunk."""
        return [sum(by_rank) for by_rank in self.input_splits]


# --- rows ---


def compute_capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Return the number of one rank's tokens that an expert takes: ``factor`` times its share, rounded up."""
    return ceil(factor * tokens * top_k / experts)


def drop_over_capacity(top_k_index: Tensor, experts: int, capacity: int) -> Tensor:
    """Return the experts of slots, ``[tokens, k]``, with :data:`DROPPED` for no expert.

    Each expert keeps its first ``capacity`` tokens of this rank.
    """
    chosen = top_k_index.reshape(-1)
    keys = chosen.where(chosen >= 0, experts)
    # A stable sort keeps the order of tokens, so that the first tokens of an expert stay.
    ordered, order = keys.sort(stable=True)
    starts = torch.searchsorted(
        ordered, torch.arange(experts + 1, dtype=torch.int64, device=chosen.device)
    )
    rank = torch.arange(len(ordered), dtype=torch.int64, device=chosen.device) - starts[ordered]
    kept = torch.empty_like(chosen, dtype=torch.bool).index_copy_(0, order, rank < capacity)
    return chosen.where(kept, DROPPED).view_as(top_k_index)


@dataclass(frozen=True)
class Route:
    """The rows of one call of a layer.

    On GPUs one Triton kernel weights rows and sums them, with one rounding. If Triton cannot compile,
    torch's operations do so; they write each row several times.

    Attributes:
        order: Slots, ``token * k + i``, in the order of their dispatch, ``[rows]``.
        slots: Number of slots, ``tokens * k``; dropped slots are not in ``order``.
        top_k: Number of slots of a token, k.
        splits: Rows by chunk, rank and expert.
        plan: The chunks.
    """

    order: Tensor
    slots: int
    top_k: int
    splits: Splits
    plan: ChunkPlan

    def gather_rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows to dispatch, in a dtype: tokens ``[tokens, h]`` -> ``[rows, h]``."""
        rows: Tensor = apply_function(_GatherRows, self, x, dtype)
        return rows

    def combine_rows(self, rows: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum of the combined rows, read as ``dtype``: ``[rows, h]`` -> ``[tokens, h]``."""
        if _has_kernel(rows, top_k_weights):
            out: Tensor = apply_function(_WeightedSum, self, rows, top_k_weights, dtype)
            return out
        slots = self.scatter_rows(rows.to(dtype)).view(*top_k_weights.shape, rows.shape[1])
        return (slots * top_k_weights.unsqueeze(-1)).sum(dim=1)

    def sum_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of each token's rows, in a fixed order: ``[rows, h]`` -> ``[tokens, h]``."""
        if _has_kernel(rows):
            from ovpatch_plugins.pipe_experts.triton_kernels import weighted_sum

            return weighted_sum(rows.contiguous(), None, self.row_of_slot, self.top_k, dtype)
        return self.scatter_rows(rows).view(-1, self.top_k, rows.shape[1]).sum(dim=1, dtype=dtype)

    @functools.cached_property
    def row_of_slot(self) -> Tensor:
        """The row of each slot, ``[slots]``; -1 for dropped slots."""
        device = self.order.device
        row_of_slot = torch.full((self.slots,), -1, dtype=torch.int64, device=device)
        rows = torch.arange(len(self.order), dtype=torch.int64, device=device)
        return row_of_slot.index_copy_(0, self.order, rows)

    def scatter_rows(self, rows: Tensor) -> Tensor:
        """Return rows by slot, ``[slots, h]``; zero for dropped slots."""
        allocate = rows.new_empty if len(rows) == self.slots else rows.new_zeros
        return allocate((self.slots, rows.shape[1])).index_copy_(0, self.order, rows)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.route, ctx.dtype = route, x.dtype
        return x.to(dtype).index_select(0, route.order // route.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.route.sum_rows(grad, ctx.dtype), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, route: Route, rows: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> Tensor:
        from ovpatch_plugins.pipe_experts.triton_kernels import weighted_sum

        ctx.route = route
        ctx.save_for_backward(rows, weights)
        promoted = torch.promote_types(dtype, weights.dtype)
        return weighted_sum(
            rows.contiguous(), weights.contiguous(), route.row_of_slot, route.top_k, promoted
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        from ovpatch_plugins.pipe_experts.triton_kernels import weighted_sum_backward

        rows, weights = (saved.contiguous() for saved in ctx.saved_tensors)
        _, rows_grad, weights_grad, _ = ctx.needs_input_grad
        grads = weighted_sum_backward(
            rows,
            weights,
            ctx.route.order,
            grad.contiguous(),
            rows_grad=rows_grad,
            weights_grad=weights_grad,
        )
        return None, *grads, None


def _has_kernel(*tensors: Tensor) -> bool:
    """Return whether the Triton kernels take these tensors."""
    return (
        all(t.is_cuda and t.dtype in _KERNEL_DTYPES for t in tensors)
        and not triton_unavailable_reason()
    )


def route_tokens(
    top_k_index: Tensor,
    plans: PlanCandidates,
    group: dist.ProcessGroup,
    transport: AllToAllTransport | None = None,
) -> Route:
    """Exchange the numbers of rows with peers and choose the plan; the host waits for the counts, once.

    The choice may depend on the counts, so ranks exchange them as finely as any plan needs. Slots are
    sorted for the expected plan while the counts are in flight, and again only if another plan is
    chosen.

    Args:
        top_k_index: The expert of each slot, numbered over all ranks by rank, ``[tokens, k]``;
            :data:`DROPPED` for none.
        plans: The plans to choose from.
        group: The ranks.
        transport: Sends the counts. Default: c10d's all-to-all.

    Raises:
        ValueError: A token is routed to an expert that does not exist; raised on all ranks.
    """
    tokens, top_k = top_k_index.shape
    chosen, expected = top_k_index.reshape(-1).long(), plans.expected
    order = _sort_slots(chosen, expected, tokens)
    sent, arriving = _exchange_counts(
        chosen, plans.finest, tokens, transport or CollectiveAllToAll(group)
    )
    _check_experts(arriving, expected, group)
    # The last column has twice the rank's tokens, plus 1 if gradients are on there.
    most, trains = divmod(int(arriving[:, -1].max()), 2)
    plan = plans.choose_plan(group, most, bool(trains))
    if plan != expected:
        order = _sort_slots(chosen, plan, tokens)
    shape = plan.ep_size, plan.token_chunks, -1, plan.num_local_experts
    splits = Splits.from_counts(
        plan, *[counts[:, :-2].view(shape).sum(dim=2).tolist() for counts in (sent, arriving)]
    )
    return Route(order[: sum(splits.chunk_sizes())], tokens * top_k, top_k, splits, plan)


def _sort_slots(chosen: Tensor, plan: ChunkPlan, tokens: int) -> Tensor:
    """Return slots in a plan's order of dispatch, ``[slots]``; dropped slots come last."""
    position = chosen
    if len(plan.expert_groups) > 1:
        position = get_positions_on(plan, chosen.device)[chosen.clamp(0, plan.num_experts - 1)]
    # Slots are sorted by slice of tokens, then by expert group, rank and expert.
    position = position + _token_slice(chosen, plan.token_chunks, tokens) * plan.num_experts
    return position.masked_fill(chosen < 0, plan.token_chunks * plan.num_experts).argsort(
        stable=True
    )


def _token_slice(chosen: Tensor, token_chunks: int, tokens: int) -> Tensor | int:
    """Return the index of the slice that has each slot's token."""
    if token_chunks == 1 or not len(chosen):
        return 0
    slots = torch.arange(len(chosen), dtype=torch.int64, device=chosen.device)
    return slots // (len(chosen) // tokens) * token_chunks // tokens


def _exchange_counts(
    chosen: Tensor, plan: ChunkPlan, tokens: int, transport: AllToAllTransport
) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows to and from each rank, ``[rank, slice * local expert]``, on the host.

    Two more columns follow. The first has an expert that does not exist, or 0. The second has twice the
    rank's tokens, plus 1 if gradients are on there.
    """
    experts, ep_size = plan.num_experts, plan.ep_size
    bins = plan.token_chunks * experts
    keys = chosen + _token_slice(chosen, plan.token_chunks, tokens) * experts
    # Dropped slots are counted in an extra bin, which is not sent. The clamp keeps invalid experts
    # inside of the counts.
    keys = keys.masked_fill(chosen < 0, bins).clamp(max=bins)
    counts = torch.zeros(bins + 1, dtype=torch.long, device=chosen.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    by_rank = counts[:bins].view(plan.token_chunks, ep_size, plan.num_local_experts).transpose(0, 1)
    mode = chosen.new_full((1,), 2 * tokens + torch.is_grad_enabled())
    # Peers also receive the invalid expert, so that all ranks raise.
    more = [fact.expand(ep_size, 1) for fact in (_find_invalid_expert(chosen, experts), mode)]
    sent = torch.cat([by_rank.reshape(ep_size, -1), *more], dim=1)
    arriving = torch.empty_like(sent)
    transport.start_transfer(arriving, sent, [1] * ep_size, [1] * ep_size).wait()
    # One copy to the host, because each copy waits for the device.
    on_host = torch.stack([sent, arriving]).cpu()
    return on_host[0], on_host[1]


def _check_experts(arriving: Tensor, plan: ChunkPlan, group: dist.ProcessGroup) -> None:
    for rank, expert in enumerate(arriving[:, -2].tolist()):
        if expert:
            raise ValueError(
                f"ovpatch: rank {name_group_ranks(group, [rank])} routes a token to expert {expert}, but "
                f"{plan.ep_size} ranks with {plan.num_local_experts} experts each have "
                f"{plan.num_experts}. Give the layer as many experts as the router has, or route to 0 "
                f"to {plan.num_experts - 1}, or {DROPPED} for none."
            )


def _find_invalid_expert(chosen: Tensor, experts: int) -> Tensor:
    """Return an expert that does not exist, or 0 if all do, ``[1]``."""
    if not len(chosen):
        return chosen.new_zeros(1)
    # The check stays on the device; the host reads its result with the counts.
    low, high = chosen.aminmax()
    return torch.where(high >= experts, high, torch.where(low < DROPPED, low, 0)).view(1)
