"""One call of a layer: dispatch, experts and combine, chunk by chunk, each under the other chunks' experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch_plugins.pipe_experts.all_to_all import (
    AllToAllTransport,
    CollectiveAllToAll,
    PendingRows,
    RowBuffer,
    depend_on,
    join_rows,
    send_rows,
    split_rows,
)
from ovpatch_plugins.pipe_experts.chunks import ChunkPlan, PlanCandidates
from ovpatch_plugins.pipe_experts.experts import ExpertFactory
from ovpatch_plugins.pipe_experts.routing import route_tokens
from ovpatch_plugins.pipe_experts.symm_all_to_all import get_transport

T = TypeVar("T")


class Awaitable(Protocol):
    """Rows in flight, such as :func:`ovpatch_plugins.pipe_experts.start_all_to_all` returns."""

    def wait(self) -> Tensor:
        """Return the rows."""


@torch._disable_dynamo
def run_pipelined(
    dispatch: Callable[[int], Awaitable],
    experts: Callable[[int, Tensor], Tensor],
    combine: Callable[[int, Tensor], Awaitable],
    num_chunks: int,
    *,
    before_wait: Callable[[int], object] | None = None,
    shared_experts: Callable[[], T] | None = None,
    trains: bool = False,
) -> tuple[list[Tensor], T | None]:
    """Run the chunks of an expert-parallel layer so that their communication hides under their experts.

    All dispatches are launched first. Each chunk's experts run once its rows are there, and their output is combined
    under the next chunk's experts. Backward is the mirror image; see [Note: launch and wait are nodes].

    Args:
        dispatch: Starts to send a chunk's rows to their experts' ranks.
        experts: Computes a chunk: received rows ``[rows, h]`` -> ``[rows, h]``. May ignore rows if there are none.
        combine: Starts to send a chunk's outputs back.
        num_chunks: Number of chunks.
        before_wait: Called with a chunk before its rows are waited for. Nodes that it makes run, in backward, while the
            gradients of the chunk's rows are in flight: weight gradients belong there.
        shared_experts: Computed while the first rows are in flight.
        trains: Whether the experts have a weight that needs a gradient, the same on all ranks. If so, every chunk takes
            part in backward, also one whose tokens need no gradient and which used no weight for want of rows.

    Returns:
        The combined rows of each chunk, and the output of ``shared_experts``.
    """
    anchor = torch.empty(0, requires_grad=trains and torch.is_grad_enabled())
    dispatched = [dispatch(chunk) for chunk in range(num_chunks)]
    shared = None if shared_experts is None else shared_experts()
    combined = []
    for chunk, pending in enumerate(dispatched):
        if before_wait is not None:
            before_wait(chunk)
        rows = pending.wait()
        combined.append(combine(chunk, depend_on(experts(chunk, rows), rows, anchor)))
    return [pending.wait() for pending in combined], shared


def run_forward(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    factory: ExpertFactory,
    plans: PlanCandidates,
    group: dist.ProcessGroup,
    combine_group: dist.ProcessGroup,
    dtype: torch.dtype,
    shared_experts: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, int]:
    """Dispatch tokens, compute their experts, and return the weighted sums, ``[tokens, h]``, and the number of chunks.

    ``group`` are the ranks on the communicator of the dispatch, ``combine_group`` on that of the combine. Dispatched
    rows are in ``dtype``.
    """
    symmetric = get_transport(group, x.device) if plans.finest.symmetric else None
    route = route_tokens(top_k_index, plans, group, symmetric)
    splits, experts, sizes = route.splits, factory(route.plan, route.splits), route.splits.chunk_sizes()
    outputs, grads = RowBuffer(sizes), RowBuffer(sizes)
    rows = split_rows(route.gather_rows(x, dtype), grads)
    to_experts, to_tokens = _choose_transports(route.plan, group, combine_group, symmetric)

    def dispatch(chunk: int) -> PendingRows:
        allocate_grad = functools.partial(grads.get_chunk, chunk)
        input_splits, output_splits = splits.input_splits[chunk], splits.output_splits(chunk)
        return send_rows(rows[chunk], input_splits, output_splits, to_experts, allocate_grad=allocate_grad)

    def combine(chunk: int, outs: Tensor) -> PendingRows:
        allocate = functools.partial(outputs.get_chunk, chunk)
        return send_rows(outs, splits.output_splits(chunk), splits.input_splits[chunk], to_tokens, allocate=allocate)

    returned, shared = run_pipelined(
        dispatch,
        experts,
        combine,
        len(sizes),
        before_wait=experts.prepare_chunk,
        shared_experts=shared_experts,
        trains=experts.trains,
    )
    out = route.combine_rows(join_rows(returned, outputs), top_k_weights, x.dtype)
    return (out if shared is None else out + shared), len(sizes)


def _choose_transports(
    plan: ChunkPlan, group: dist.ProcessGroup, combine_group: dist.ProcessGroup, symmetric: AllToAllTransport | None
) -> tuple[AllToAllTransport, AllToAllTransport]:
    """Return the transports of dispatch and combine."""
    if plan.symmetric and symmetric is not None:
        return symmetric, symmetric
    return CollectiveAllToAll(group), CollectiveAllToAll(combine_group)
