"""One call of a layer: routed, cut, computed part by part, and put together."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch_plugins.pipe_experts.exchange import Arriving, send
from ovpatch_plugins.pipe_experts.experts import Maker
from ovpatch_plugins.pipe_experts.lanes import Collective, Lane
from ovpatch_plugins.pipe_experts.memory import Memory, cut, join
from ovpatch_plugins.pipe_experts.parts import Plan, Plans
from ovpatch_plugins.pipe_experts.pipeline import pipelined
from ovpatch_plugins.pipe_experts.routing import route
from ovpatch_plugins.pipe_experts.sharing import lane_of


def computed(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    maker: Maker,
    plans: Plans,
    group: dist.ProcessGroup,
    back: dist.ProcessGroup,
    dtype: torch.dtype,
    meanwhile: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, int]:
    """Send tokens to experts, have these computed, and return the weighted sums.

    Args:
        x: This rank's tokens, ``[tokens, h]``.
        top_k_index: Their experts, ``[tokens, k]``.
        top_k_weights: With what each expert's output is weighted, ``[tokens, k]``.
        maker: Makes what computes the parts.
        plans: Into which parts.
        group: The ranks, on the communicator by which rows are sent to experts.
        back: The same, on that by which they are sent back.
        dtype: In which tokens are sent.
        meanwhile: Computes what is added, while the first rows are under way.

    Returns:
        ``[tokens, h]``, and the number of parts.
    """
    lane = lane_of(group, x.device) if plans.symmetric else None
    found = route(top_k_index, plans, group, lane)
    counts, experts, sizes = found.counts, maker(found.plan, found.counts), found.counts.sizes()
    returned, gradient = Memory(sizes), Memory(sizes)
    rows = cut(found.rows(x, dtype), gradient)
    to_experts, to_tokens = _lanes(found.plan, group, back, lane)

    def dispatch(part: int) -> Arriving:
        place = functools.partial(gradient.part, part)
        return send(rows[part], counts.sent[part], counts.received(part), to_experts, place_gradient=place)

    def combine(part: int, outs: Tensor) -> Arriving:
        place = functools.partial(returned.part, part)
        return send(outs, counts.received(part), counts.sent[part], to_tokens, place=place)

    arrived, other = pipelined(
        dispatch, experts, combine, len(sizes), before=experts.begin, meanwhile=meanwhile, trains=experts.trains
    )
    out = found.combined(join(arrived, returned), top_k_weights, x.dtype)
    return (out if other is None else out + other), len(sizes)


def _lanes(plan: Plan, group: dist.ProcessGroup, back: dist.ProcessGroup, lane: Lane | None) -> tuple[Lane, Lane]:
    """Return by what rows travel to experts and back."""
    if plan.symmetric and lane is not None:
        return lane, lane
    return Collective(group), Collective(back)
