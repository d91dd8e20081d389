"""Grouped GEMM of rows by expert, and weight gradients that hide a chunk's all-to-all in backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.overlap.autograd import apply_function, will_execute
from ovpatch.overlap.comm.lifetimes import outside_modes

# The grouped kernel requires this alignment of every row, in bytes.
_ALIGNMENT = 16


class GroupSizes:
    """The number of rows of each expert."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._offsets: Tensor | None = None

    def get_offsets(self, device: torch.device) -> Tensor:
        """Return the end of each expert's rows, ``[e]`` of int32; the first call copies it to the device."""
        if self._offsets is None:
            ends = list(itertools.accumulate(self.sizes))
            with outside_modes():
                offsets = torch.tensor(ends, dtype=torch.int32, device="cpu")
                self._offsets = offsets.pin_memory().to(device, non_blocking=True)
        return self._offsets


def grouped_linear(x: Tensor, weight: Tensor, groups: GroupSizes) -> Tensor:
    """Return each expert's rows times its transposed weight: ``[rows, k]``, ``[e, n, k]`` -> ``[rows, n]``."""
    return _grouped_mm(x, weight.transpose(-2, -1), groups)


def grouped_dgrad(grad: Tensor, weight: Tensor, groups: GroupSizes) -> Tensor:
    """Return the gradient of the input of :func:`grouped_linear`: ``[rows, n]``, ``[e, n, k]`` -> ``[rows, k]``."""
    return _grouped_mm(grad, weight, groups)


def accumulate_wgrad(
    total: Tensor | None, grad: Tensor, x: Tensor, groups: GroupSizes, fresh: Sequence[bool]
) -> Tensor:
    """Add the weights' gradients to an accumulator and return it, ``[e, n, k]``.

    Args:
        total: The accumulator, in the rows' dtype or float32; None to allocate it.
        grad: The gradient of the output of :func:`grouped_linear`, ``[rows, n]``.
        x: The input of :func:`grouped_linear`, ``[rows, k]``.
        groups: The number of rows of each expert.
        fresh: Whether each expert's accumulator is undefined, and must be written instead of read.
    """
    if total is None:
        if min(groups.sizes) and _has_kernel(grad, x, groups):
            return torch.nn.functional.grouped_mm(grad.t(), x, offs=groups.get_offsets(x.device))
        total = x.new_empty((len(groups.sizes), grad.shape[1], x.shape[1]))
    by_expert = zip(grad.split(groups.sizes), x.split(groups.sizes), total, fresh, strict=True)
    for expert_grad, rows, out, is_fresh in by_expert:
        if not len(rows):
            if is_fresh:
                out.zero_()
        elif out.dtype != rows.dtype:
            (out.copy_ if is_fresh else out.add_)(_multiply_wide(expert_grad.t(), rows, out.dtype))
        elif is_fresh:
            torch.mm(expert_grad.t(), rows, out=out)
        else:
            out.addmm_(expert_grad.t(), rows)
    return total


def _multiply_wide(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply low-precision matrices with the result in ``dtype``."""
    # The CPU has no such kernel. On GPUs this is no addmm, because only newer versions of torch let addmm
    # with out_dtype add to float32 in place.
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def _grouped_mm(x: Tensor, weight: Tensor, groups: GroupSizes) -> Tensor:
    """Return each expert's rows times its matrix: ``[rows, k]``, ``[e, k, n]`` -> ``[rows, n]``."""
    if _has_kernel(x, weight, groups):
        return torch.nn.functional.grouped_mm(x, weight, offs=groups.get_offsets(x.device))
    out = x.new_empty((len(x), weight.shape[2]))
    for rows, matrix, into in zip(
        x.split(groups.sizes), weight, out.split(groups.sizes), strict=True
    ):
        if len(rows):
            torch.mm(rows, matrix, out=into)
    return out


def _has_kernel(x: Tensor, factor: Tensor, groups: GroupSizes) -> bool:
    """Return whether torch's grouped kernel takes two factors; a single expert needs no grouped GEMM."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or len(groups.sizes) == 1 or not len(x):
        return False
    return _is_aligned(x) and _is_aligned(factor) and hasattr(torch.nn.functional, "grouped_mm")


def _is_aligned(factor: Tensor) -> bool:
    """Return whether all rows, or columns, start at an aligned address; an activation may return any view."""
    strides = sorted(factor.stride())
    return strides[0] == 1 and all(
        place % _ALIGNMENT == 0
        for place in (factor.data_ptr(), *(n * factor.element_size() for n in strides[1:]))
    )


class DelayedWeightGrads:
    """The experts' weights, ``[e, n, k]`` each in the dtype of the GEMMs, in one call of a layer.

    [Note: delayed weight gradients] The backward of a GEMM computes the gradient of its rows, because
    peers wait for it. It defers the gradient of its weight to a node that was made just before the
    forward waited for the chunk's rows. In backward that node runs right after the launch of the
    gradient's all-to-all, and hides it. All chunks add to one gradient per weight; a node made before
    all chunks hands it to autograd, once.

    The graph must not refer to this object. This object refers to the graph, and no garbage collector
    sees cycles through nodes.

    Args:
        weights: The weights.
        delay_wgrad: Whether weight gradients are deferred.
        reused: Whether several chunks use the same weights. A low-precision sum would then be rounded
            in every chunk, so it is kept in float32 and rounded once.

    Attributes:
        trains: Whether any weight needs a gradient.
    """

    def __init__(
        self, weights: Sequence[Tensor], *, delay_wgrad: bool = True, reused: bool = False
    ) -> None:
        self._grads = _WeightGrads(weights, delay_wgrad, reused)
        self._requires_grad = [weight.requires_grad for weight in weights]
        self.trains = any(self._requires_grad)
        # The weights for all chunks; the node that made them hands their gradients to autograd.
        self._collected: tuple[Tensor, ...] = apply_function(_Weights, self._grads, None, *weights)
        # The current chunk, and the weights as it uses them.
        self._chunk = 0
        self._chunk_weights = self._collected

    def prepare_chunk(self, chunk: int) -> None:
        """Make the node of a chunk's deferred gradients.

        The layer calls this before the current stream waits for the chunk's rows.
        """
        self._chunk = chunk
        self._chunk_weights = apply_function(_Weights, self._grads, chunk, *self._collected)

    def multiply_rows(self, index: int, x: Tensor, experts: range, groups: GroupSizes) -> Tensor:
        """Multiply each expert's rows, in the order of experts, by its transposed weight.

        Args:
            index: The weight's index in the list of weights.
            x: ``[rows, k]``.
            experts: The chunk's local experts.
            groups: The number of rows of each.

        Returns:
            ``[rows, n]``.
        """
        used = slice(experts.start, experts.stop)
        call = _Call(self._grads, self._chunk, index, used, groups, self._requires_grad[index])
        out: Tensor = apply_function(_GroupedLinear, call, x, self._chunk_weights[index])
        return out


class _WeightGrads:
    """The state of the weights in backward; no tensor in it has a graph."""

    def __init__(self, weights: Sequence[Tensor], delay_wgrad: bool, reused: bool) -> None:
        self._delay_wgrad = delay_wgrad
        self.accumulators = [_Accumulator(weight, reused) for weight in weights]
        # The backward of `_deferred` and of the accumulators' sums.
        self._graph_task = -1
        # The deferred contributions by chunk.
        self._deferred: dict[int, list[Callable[[], None]]] = {}

    def add_contribution(self, chunk: int, compute: Callable[[], None]) -> None:
        """Compute a chunk's contribution to a weight's gradient, now or after the launch."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            # An exception may have ended an earlier backward; what it left must not reach this one.
            self._graph_task = graph_task
            self._deferred = {}
            for accumulator in self.accumulators:
                accumulator.reset()
        if self._delay_wgrad:
            self._deferred.setdefault(chunk, []).append(compute)
        else:
            compute()

    def compute_deferred(self, chunk: int) -> None:
        """Compute the deferred contributions of a chunk."""
        for compute in self._deferred.pop(chunk, ()):
            compute()


class _Call(NamedTuple):
    """One GEMM of a layer.

    Attributes:
        grads: The gradients of the layer's weights.
        chunk: The chunk.
        weight_index: The weight's index in the list of weights.
        experts: The chunk's experts in the weight.
        groups: The number of rows of each of these experts.
        requires_grad: Whether the weight needs a gradient.
    """

    grads: _WeightGrads
    chunk: int
    weight_index: int
    experts: slice
    groups: GroupSizes
    requires_grad: bool


class _Accumulator:
    """The gradient of a weight, ``[e, n, k]``, to which chunks add."""

    def __init__(self, like: Tensor, reused: bool) -> None:
        self._shape = like.shape
        self._dtype = like.dtype
        self._device = like.device
        # A sum over several chunks is rounded once, at its end.
        self._sum_dtype = torch.promote_types(like.dtype, torch.float32) if reused else like.dtype
        self.reset()

    def reset(self) -> None:
        # None before the first contribution.
        self._sum: Tensor | None = None
        # Whether no chunk has written an expert's part of the sum, whose memory is then undefined.
        self._fresh = [True] * self._shape[0]

    def add_product(self, grad: Tensor, x: Tensor, experts: slice, groups: GroupSizes) -> None:
        fresh = self._fresh[experts]
        if self._sum is None and len(fresh) == len(self._fresh) and self._sum_dtype == self._dtype:
            self._sum = accumulate_wgrad(None, grad, x, groups, fresh)
        else:
            if self._sum is None:
                with outside_modes():
                    self._sum = torch.empty(self._shape, dtype=self._sum_dtype, device=self._device)
            accumulate_wgrad(self._sum[experts], grad, x, groups, fresh)
        self._fresh[experts] = [False] * len(fresh)

    def pop_grad(self) -> Tensor | None:
        """Return the gradient and reset.

        It is None if nothing was added, and zero for experts without a contribution.
        """
        total = self._sum
        for expert, is_fresh in enumerate(self._fresh):
            if is_fresh and total is not None:
                total[expert].zero_()
        self.reset()
        return None if total is None else total.to(self._dtype)


class _Weights(torch.autograd.Function):
    """The weights as one chunk uses them; in backward, the node computes the chunk's deferred gradients.

    Without a chunk, the node makes the weights that the chunks' nodes take, and hands their gradients
    to autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, grads: _WeightGrads, chunk: int | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.grads, ctx.chunk = grads, chunk
        ctx.set_materialize_grads(False)
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        if ctx.chunk is not None:
            ctx.grads.compute_deferred(ctx.chunk)
            return None, None, *[None] * len(ctx.grads.accumulators)
        accumulators = zip(ctx.needs_input_grad[2:], ctx.grads.accumulators, strict=True)
        return (
            None,
            None,
            *[accumulator.pop_grad() if needed else None for needed, accumulator in accumulators],
        )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, weight: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(
            x if call.requires_grad else None, weight if x.requires_grad else None
        )
        return grouped_linear(x, weight[call.experts], call.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        x, weight = ctx.saved_tensors
        grad, dgrad = grad.contiguous(), None
        if weight is not None:
            dgrad = grouped_dgrad(grad, weight[call.experts], call.groups)
        if x is not None and will_execute(ctx.next_functions[1][0]):
            accumulator = call.grads.accumulators[call.weight_index]
            add = functools.partial(accumulator.add_product, grad, x, call.experts, call.groups)
            call.grads.add_contribution(call.chunk, add)
        return None, dgrad, None
