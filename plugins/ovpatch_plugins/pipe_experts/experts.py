"""Experts as a layer calls them: stacked weights, or a script's own modules and functions.

A call of a layer is dispatch, experts and combine, chunk by chunk, each under the other chunks' experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ovpatch_plugins.pipe_experts.all_to_all import (
    AllToAllTransport,
    CollectiveAllToAll,
    PendingRows,
    RowBuffer,
    Transfer,
    depend_on,
    get_transport,
    join_rows,
    split_rows,
)
from ovpatch_plugins.pipe_experts.grouped_gemm import DelayedWeightGrads, GroupSizes
from ovpatch_plugins.pipe_experts.routing import ChunkPlan, PlanCandidates, Splits, route_tokens

Activation = Callable[[Tensor], Tensor]
"""The function between an expert's two GEMMs: ``[rows, n]`` -> ``[rows, k]``, row by row."""


class Experts:
    """The experts of one call of a layer.

    Args:
        plan: The chunks of the layer.
        splits: The numbers of rows in this call.
        trains: Whether the experts have a weight that needs a gradient, the same on all ranks. Experts
            that cannot be inspected count as trained.
    """

    def __init__(self, plan: ChunkPlan, splits: Splits, trains: bool) -> None:
        self._chunks = plan.chunks
        self._splits = splits
        self.trains = trains

    def prepare_chunk(self, chunk: int) -> None:
        """Prepare for a chunk; called before the current stream waits for the chunk's rows."""

    def __call__(self, chunk: int, rows: Tensor) -> Tensor:
        """Return a chunk's outputs: ``[rows, h]`` -> ``[rows, h]``, rows by rank and then by expert."""
        raise NotImplementedError


ExpertFactory = Callable[[ChunkPlan, Splits], Experts]
"""A function that makes the experts of one call."""


def swiglu(h: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``[rows, 2 k]``, whose halves they are."""
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


ACTIVATIONS: Final[dict[str, Activation]] = {
    "swiglu": swiglu,
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
}


class _SortedExperts(Experts):
    """Experts that compute rows in the order of experts; outputs are sorted by rank again."""

    def __call__(self, chunk: int, rows: Tensor) -> Tensor:
        by_rank = self._splits.expert_splits[chunk]
        by_expert = [list(sizes) for sizes in zip(*by_rank, strict=True)]
        sizes = [sum(rank_sizes) for rank_sizes in by_expert]
        outputs = self._compute(transpose_blocks(rows, by_rank), self._chunks[chunk][1], sizes)
        return transpose_blocks(outputs, by_expert)

    def _compute(self, rows: Tensor, experts: range, sizes: list[int]) -> Tensor:
        raise NotImplementedError


class StackedExperts(_SortedExperts):
    """Feed-forward networks with stacked weights ``[e, n, h]`` and ``[e, h, k]``: GEMM, activation, GEMM.

    The weights are in the dtype of the GEMMs; see :class:`DelayedWeightGrads` for ``delay_wgrad``.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        splits: Splits,
        weights: Sequence[Tensor],
        activation: Activation,
        *,
        delay_wgrad: bool,
    ) -> None:
        self._weights = DelayedWeightGrads(
            weights, delay_wgrad=delay_wgrad, reused=plan.token_chunks > 1
        )
        self._activation = activation
        super().__init__(plan, splits, self._weights.trains)

    def prepare_chunk(self, chunk: int) -> None:
        """See :meth:`Experts.prepare_chunk`."""
        self._weights.prepare_chunk(chunk)

    def _compute(self, rows: Tensor, experts: range, sizes: list[int]) -> Tensor:
        groups = GroupSizes(sizes)
        h = self._weights.multiply_rows(0, rows, experts, groups)
        # Autocast computes some activations in float32.
        activated = self._activation(h).to(h.dtype)
        return self._weights.multiply_rows(1, activated, experts, groups)


@dataclass(frozen=True)
class StackedFactory:
    """The factory of :class:`StackedExperts`; its attributes are their arguments."""

    weights: Sequence[Tensor]
    activation: Activation
    delay_wgrad: bool

    def __call__(self, plan: ChunkPlan, splits: Splits) -> Experts:
        """Make the experts of one call."""
        return StackedExperts(
            plan, splits, self.weights, self.activation, delay_wgrad=self.delay_wgrad
        )


class ModuleListExperts(_SortedExperts):
    """Experts that are a module or a function each: ``[rows, h]`` -> ``[rows, h]``.

    An expert without rows is called with an empty tensor, so that its parameters have a gradient on
    every rank.
    """

    def __init__(
        self, plan: ChunkPlan, splits: Splits, modules: Sequence[Callable[[Tensor], Tensor]]
    ) -> None:
        super().__init__(plan, splits, any(_has_trainable(module) for module in modules))
        self._modules = modules

    def _compute(self, rows: Tensor, experts: range, sizes: list[int]) -> Tensor:
        by_expert = split_rows(rows, RowBuffer(sizes))
        return torch.cat([self._modules[i](own) for i, own in zip(experts, by_expert, strict=True)])


class GroupedExperts(_SortedExperts):
    """Experts that one function computes from sorted rows and the number of rows of each expert.

    torchtitan's experts are such a function. It maps rows by expert, ``[rows, h]``, and the number of
    rows of each of this rank's experts, ``[e]``, to ``[rows, h]``. It is called in every chunk, also
    without rows.
    """

    def __init__(
        self, plan: ChunkPlan, splits: Splits, function: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__(plan, splits, _has_trainable(function))
        self._function = function
        self._num_local_experts = plan.num_local_experts

    def _compute(self, rows: Tensor, experts: range, sizes: list[int]) -> Tensor:
        all_sizes = [0] * self._num_local_experts
        all_sizes[experts.start : experts.stop] = sizes
        return self._function(rows, torch.tensor(all_sizes, dtype=torch.int64, device=rows.device))


class IndexedExperts(Experts):
    """Experts that one function computes from rows and each row's expert.

    The function maps ``[rows, h]`` and local experts ``[rows]`` to ``[rows, h]``. An empty chunk does
    not call it, unless all chunks are empty. Its output is cast to the rows' dtype, because ranks that
    do not call it return rows in that dtype.
    """

    def __init__(
        self, plan: ChunkPlan, splits: Splits, function: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__(plan, splits, _has_trainable(function))
        self._function = function
        # Whether this rank has no row in any chunk.
        self._has_no_rows = not any(
            sum(splits.output_splits(chunk)) for chunk in range(len(self._chunks))
        )

    def __call__(self, chunk: int, rows: Tensor) -> Tensor:
        """See :meth:`Experts.__call__`."""
        if not len(rows):
            return self._compute_nothing(chunk, rows)
        by_rank, experts = self._splits.expert_splits[chunk], self._chunks[chunk][1]
        index = torch.arange(
            experts.start, experts.stop, dtype=torch.int64, device=rows.device
        ).repeat(len(by_rank))
        sizes = torch.tensor(by_rank, dtype=torch.int64, device=rows.device).view(-1)
        return self._function(rows, index.repeat_interleave(sizes, output_size=len(rows))).to(
            rows.dtype
        )

    def _compute_nothing(self, chunk: int, rows: Tensor) -> Tensor:
        """Return no rows, ``[0, h]``.

        If this rank has no rows in any chunk, compute them from one row without effect, so that its
        parameters get gradients.
        """
        if chunk or not self._has_no_rows:
            return rows
        zero = rows.sum(dim=0, keepdim=True)
        return self._function(zero, torch.zeros(1, dtype=torch.long, device=rows.device))[:0].to(
            rows.dtype
        )


def _has_trainable(function: Any) -> bool:
    """Return whether a module, or a module's method, has a trainable parameter.

    Other functions cannot be inspected and count as trainable.
    """
    while isinstance(function, functools.partial):
        function = function.args[0] if function.args else function.func
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return not isinstance(module, nn.Module) or any(
        param.requires_grad for param in module.parameters()
    )


def transpose_blocks(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Return blocks of rows in transposed order.

    Args:
        rows: The blocks, ordered by the first index of ``sizes`` and then by the second.
        sizes: Number of rows of each block.
    """
    first, second = len(sizes), len(sizes[0])
    if first == 1 or second == 1:
        return rows
    blocks = rows.split([size for row in sizes for size in row])
    return torch.cat([blocks[i * second + j] for j in range(second) for i in range(first)])


T = TypeVar("T")


class Awaitable(Protocol):
    """Rows in flight, such as the result of :func:`ovpatch_plugins.pipe_experts.start_all_to_all`."""

    def wait(self) -> Tensor:
        """Make the current stream wait for the rows and return them."""


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
        experts: Computes a chunk: received rows ``[rows, h]`` -> ``[rows, h]``. It may ignore rows if
            there are none.
        combine: Starts to send a chunk's outputs back.
        num_chunks: Number of chunks.
        before_wait: Called with a chunk before the current stream waits for the chunk's rows. In
            backward, nodes that it makes run while the gradients of these rows are in flight, so they
            may compute weight gradients.
        shared_experts: Computed while the first rows are in flight.
        trains: Whether the experts have a weight that needs a gradient, the same on all ranks. If so,
            every chunk takes part in backward, even if its tokens need no gradient and it used no
            weight because it has no rows.

    Returns:
        The combined rows of each chunk, and the output of ``shared_experts``.
    """
    # Each chunk's output depends on the anchor. Without it, the backward of a chunk whose tokens need no
    # gradient would launch no collectives, and peers would wait for them.
    has_anchor = trains and torch.is_grad_enabled()
    anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=has_anchor)
    dispatched = [dispatch(chunk) for chunk in range(num_chunks)]
    shared = None if shared_experts is None else shared_experts()
    combined = []
    for chunk, pending in enumerate(dispatched):
        if before_wait is not None:
            before_wait(chunk)
        rows = pending.wait()
        combined.append(combine(chunk, depend_on(experts(chunk, rows), rows, anchor)))
    return [pending.wait() for pending in combined], shared


# A layer of three chunks. Time runs to the right; D: dispatch, E: experts, C: combine.
#
#   forward    communicator   D0  D1  D2  C0  C1  C2
#              compute        shared  E0  E1  E2      weighted sum
#
# All dispatches are launched first, so that chunk 0 waits for the first dispatch alone. Each combine runs
# under the experts of the next chunk. On one communicator, C0 queues up after D2. With multi_stream,
# combines have their own communicator:
#
#   forward    dispatches     D0  D1  D2
#              combines               C0  C1  C2
#              compute        shared  E0  E1  E2  weighted sum
#
# Backward is the mirror image: the gradients of all combines (c) are launched first. Then each chunk
# computes the gradient of its rows (e) and launches the gradient of its dispatch (d). The weights'
# gradients (w) of a chunk need no rows of peers, so delay_wgrad computes them while d is in flight:
#
#   backward   communicator   c2  c1  c0  d2  d1  d0
#              compute            e2  w2  e1  w1  e0  w0


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
    splits, experts, sizes = (
        route.splits,
        factory(route.plan, route.splits),
        route.splits.chunk_sizes(),
    )
    outputs, grads = RowBuffer(sizes), RowBuffer(sizes)
    rows = split_rows(route.gather_rows(x, dtype), grads)
    to_experts: AllToAllTransport = CollectiveAllToAll(group)
    to_tokens: AllToAllTransport = CollectiveAllToAll(combine_group)
    if route.plan.symmetric and symmetric is not None:
        to_experts = to_tokens = symmetric

    def dispatch(chunk: int) -> PendingRows:
        allocate_grad = functools.partial(grads.get_chunk, chunk)
        input_splits, output_splits = splits.input_splits[chunk], splits.output_splits(chunk)
        return PendingRows(
            Transfer(to_experts, input_splits, output_splits, None, allocate_grad), rows[chunk]
        )

    def combine(chunk: int, outs: Tensor) -> PendingRows:
        allocate = functools.partial(outputs.get_chunk, chunk)
        return PendingRows(
            Transfer(to_tokens, splits.output_splits(chunk), splits.input_splits[chunk], allocate),
            outs,
        )

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
