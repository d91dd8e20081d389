"""One call of a layer: routed, cut, computed part by part, and put together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch_plugins.pipe_experts.chunks import ChunkPlan, Plans
from ovpatch_plugins.pipe_experts.exchange import AllToAllTransport, Arriving, CollectiveAllToAll, send, tie
from ovpatch_plugins.pipe_experts.experts import Maker
from ovpatch_plugins.pipe_experts.routing import route
from ovpatch_plugins.pipe_experts.row_buffer import RowBuffer, cut, join
from ovpatch_plugins.pipe_experts.symm_all_to_all import lane_of

# Dispatch, experts and combine of several parts, each part's communication under other parts' experts.

T = TypeVar("T")


class Awaitable(Protocol):
    """Rows on their way, such as :func:`ovpatch_plugins.pipe_experts.exchange` returns."""

    def wait(self) -> Tensor:
        """Return the rows."""


@torch._disable_dynamo
def pipelined(
    dispatch: Callable[[int], Awaitable],
    experts: Callable[[int, Tensor], Tensor],
    combine: Callable[[int, Tensor], Awaitable],
    parts: int,
    *,
    before: Callable[[int], object] | None = None,
    meanwhile: Callable[[], T] | None = None,
    trains: bool = False,
) -> tuple[list[Tensor], T | None]:
    """Run the parts of an expert-parallel layer so that their communication hides under their experts.

    All dispatches are launched first. Then each part's experts run as soon as its rows are there, and what they return
    is sent back under the next part's. Backward is the mirror image, by the order in which nodes were made; see
    [Note: launch and wait are nodes].

    Args:
        dispatch: Starts to send a part's rows to their experts' ranks.
        experts: Computes a part: what arrived, ``[rows, h]`` -> ``[rows, h]``. May ignore rows if there are none.
        combine: Starts to send back what a part's experts returned.
        parts: How many.
        before: Called with a part before its rows are waited for. The nodes that it makes run, in backward, while the
            gradients of the part's rows are on their way: weight gradients belong there.
        meanwhile: Computed while the first rows are on their way, such as shared experts.
        trains: Whether the experts have a weight that needs a gradient, the same on all ranks. Then every part takes
            part in backward, also one of tokens that need no gradient, in which no weight was used for want of rows.

    Returns:
        What came back of each part, and what ``meanwhile`` returned.
    """
    anchor = torch.empty(0, requires_grad=trains and torch.is_grad_enabled())
    under_way = [dispatch(part) for part in range(parts)]
    other = None if meanwhile is None else meanwhile()
    leaving = []
    for part, arriving in enumerate(under_way):
        if before is not None:
            before(part)
        rows = arriving.wait()
        leaving.append(combine(part, tie(experts(part, rows), rows, anchor)))
    return [rows.wait() for rows in leaving], other


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
    returned, gradient = RowBuffer(sizes), RowBuffer(sizes)
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


def _lanes(
    plan: ChunkPlan, group: dist.ProcessGroup, back: dist.ProcessGroup, lane: AllToAllTransport | None
) -> tuple[AllToAllTransport, AllToAllTransport]:
    """Return by what rows travel to experts and back."""
    if plan.symmetric and lane is not None:
        return lane, lane
    return CollectiveAllToAll(group), CollectiveAllToAll(back)
