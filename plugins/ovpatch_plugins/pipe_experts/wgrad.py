"""Weight gradients that are computed while a part's rows are on their way back.

[Note: weight gradients behind the launch] A product's backward computes the gradient of its rows, which others wait
for, and leaves that of its weight to a node that is made just before the part's rows are waited for. So in backward
that node runs right after their gradient's all-to-all was launched, and hides it. All parts of a layer add to one
gradient per weight, which a node that is made before all parts hands on to autograd, once.

[Note: sums of half precision] Where every part uses every weight, a gradient of half precision that is added up part by
part is rounded in each, and errs by a quarter more after eight parts. It is added up in float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.overlap.data_parallel.grad_hooks import apply_function, executes
from ovpatch_plugins.pipe_experts.grouped_gemm import Groups, add_weight_grads, grouped, grouped_back


class DelayedWeightGrads:
    """The experts' weights in one call of a layer.

    The graph must not refer to it, since it refers to the graph, and no garbage collector sees cycles through nodes.

    Args:
        weights: ``[e, n, k]`` each, in the dtype in which is computed.
        delays: Compute their gradients behind the launch of a part's all-to-all; else with those of the rows.
        reused: Several parts use the same experts' weights; see [Note: sums of half precision].
    """

    def __init__(self, weights: Sequence[Tensor], *, delays: bool = True, reused: bool = False) -> None:
        self._gradients = _Gradients(weights, delays, reused)
        self._trained = [weight.requires_grad for weight in weights]
        self._whole: tuple[Tensor, ...] = apply_function(_Collect, self._gradients, *weights)
        self._part, self._of_part = 0, self._whole

    @property
    def trained(self) -> bool:
        """Whether any weight needs a gradient."""
        return any(self._trained)

    def begin(self, part: int) -> None:
        """Be told that a part's rows will be waited for next."""
        self._part, self._of_part = part, apply_function(_Behind, self._gradients, part, *self._whole)

    def product(self, which: int, x: Tensor, experts: range, groups: Groups) -> Tensor:
        """Return each expert's rows times its weight, transposed: ``[rows, k]`` -> ``[rows, n]``.

        Args:
            which: Which of the weights.
            x: Rows, by expert.
            experts: Whose rows.
            groups: How many each has.
        """
        place = _Place(self._gradients, self._part, which, experts, groups, self._trained[which])
        found: Tensor = apply_function(_Product, place, x, self._of_part[which])
        return found


class _Gradients:
    """What backward knows of the weights: no tensor that has a graph."""

    def __init__(self, weights: Sequence[Tensor], delays: bool, reused: bool) -> None:
        self._delays = delays
        self.totals = [_Total(weight, reused) for weight in weights]
        self._task = -1
        self._deferred: dict[int, list[Callable[[], None]]] = {}

    def take(self, part: int, compute: Callable[[], None]) -> None:
        """Compute a part of a weight's gradient, now or behind the launch."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what is there is of a backward that an exception ended
            self._task, self._deferred = task, {}
            for total in self.totals:
                total.clear()
        if self._delays:
            self._deferred.setdefault(part, []).append(compute)
        else:
            compute()

    def compute_deferred(self, part: int) -> None:
        """Compute what was left of a part."""
        for compute in self._deferred.pop(part, ()):
            compute()


class _Place(NamedTuple):
    """Where a product is in its layer."""

    gradients: _Gradients
    part: int
    which: int
    experts: range
    groups: Groups
    trained: bool

    @property
    def here(self) -> slice:
        """Which of the weight's experts."""
        return slice(self.experts.start, self.experts.stop)


class _Total:
    """The gradient of a weight, ``[e, n, k]``, to which parts add."""

    def __init__(self, like: Tensor, reused: bool) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._of_sums = torch.promote_types(like.dtype, torch.float32) if reused else like.dtype
        self.clear()

    def clear(self) -> None:
        self._sum: Tensor | None = None
        self._fresh = [True] * self._shape[0]

    def add(self, grad: Tensor, x: Tensor, here: slice, groups: Groups) -> None:
        fresh = self._fresh[here]
        if self._sum is None and len(fresh) == len(self._fresh) and self._of_sums == self._dtype:
            self._sum = add_weight_grads(None, grad, x, groups, fresh)
        else:
            if self._sum is None:
                self._sum = torch.empty(self._shape, dtype=self._of_sums, device=self._device)
            add_weight_grads(self._sum[here], grad, x, groups, fresh)
        self._fresh[here] = [False] * len(fresh)

    def taken(self) -> Tensor | None:
        """Return the gradient; None if nothing was added, zero for experts to which nothing was."""
        found = self._sum
        for expert, is_fresh in enumerate(self._fresh):
            if is_fresh and found is not None:
                found[expert].zero_()
        self.clear()
        return None if found is None else found.to(self._dtype)


class _Collect(torch.autograd.Function):
    """The weights; hands their gradients on."""

    @staticmethod
    def forward(ctx: Any, gradients: _Gradients, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        totals = zip(ctx.needs_input_grad[1:], ctx.gradients.totals, strict=True)
        return None, *[total.taken() if needed else None for needed, total in totals]


class _Behind(torch.autograd.Function):
    """The weights as one part uses them; computes what was left of their gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: _Gradients, part: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.part, ctx.count = gradients, part, len(tensors)
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        ctx.gradients.compute_deferred(ctx.part)
        return None, None, *[None] * ctx.count


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: _Place, x: Tensor, weight: Tensor) -> Tensor:
        ctx.place = place
        ctx.save_for_backward(x if place.trained else None, weight if x.requires_grad else None)
        return grouped(x, weight[place.here], place.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        place: _Place = ctx.place
        x, weight = ctx.saved_tensors
        grad, dx = grad.contiguous(), None
        if weight is not None:
            dx = grouped_back(grad, weight[place.here], place.groups)
        if x is not None and executes(ctx.next_functions[1][0]):
            total = place.gradients.totals[place.which]
            place.gradients.take(place.part, lambda: total.add(grad, x, place.here, place.groups))
        return None, dx, None
