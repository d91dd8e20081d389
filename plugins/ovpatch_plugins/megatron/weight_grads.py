"""Weight gradients of a stage's linears, computed after the backward that left them out.

A backward then yields the gradient of the stage's input and the gradients of all parameters but the linears' weights.
For each of those it keeps input and output gradient, of which the product is made behind the send.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.kept_state import weak_key
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.data_parallel.reducer import Due, accumulate_products
from ovpatch_plugins.megatron.report import COUNTERS
from ovpatch_plugins.megatron.takeover import note_left

WeightGrad: TypeAlias = Callable[[Tensor, Tensor, Tensor], "Tensor | None"]
"""Computes a weight's gradient, from the weight, the output's gradient ``[M, n]`` and the input ``[M, k]``."""

_REMEDY = "Set OVPATCH_MEGATRON_PIPELINE_SCHEDULE=stock"


class _Watch:
    """Whether a weight's gradients all come from its linear."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.product: Tensor | None = None  # what its linear has returned to autograd
        self.is_computed = False
        self.is_alone = True
        self.hook = weight.register_hook(self._compare)

    def _compare(self, grad: Tensor) -> None:
        # A sum with other contributions is another tensor: the product is held here, so that none is added to it.
        self.is_alone &= grad is self.product
        self.product = None

    def show(self, compute: WeightGrad, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
        """Compute a gradient that goes to the weight by autograd."""
        self.product, self.is_computed = compute(weight, grad, x), True
        return self.product


class WeightGradQueue:
    """The weight gradients that are due on a stage, by microbatch.

    Products are made of the operands of Megatron's backward and given to the weight through the engine, which calls all
    hooks, in the order of the microbatches: all bits are Megatron's. A weight that is also read elsewhere gets a sum,
    which would round otherwise. So its first step shows whether it has one contribution; until then, and for good if
    not, its gradient is computed in the backward.
    """

    def __init__(self) -> None:
        self.is_active = False  # whether the stage runs a step in which weight gradients are delayed
        self._due: deque[list[Due]] = deque()
        self._recorded: list[Due] | None = None  # of the backward that is running
        self._watched: dict[int, _Watch] = {}
        self._delays: dict[int, tuple[weakref.ref[Tensor], bool]] = {}  # what first steps have shown, by the weight

    def __len__(self) -> int:
        """Return the number of microbatches whose weight gradients are due."""
        return len(self._due)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a step inside the ``with`` block.

        Raises:
            RuntimeError: At its end weight gradients are due.
        """
        self.is_active = True
        try:
            yield
            if any(self._due):
                raise RuntimeError(
                    "ovpatch: Megatron's pipeline schedule has ended before the weight gradients of all microbatches "
                    f"were computed, so that the gradients of this step are wrong. {_REMEDY}"
                )
            for key, watch in self._watched.items():
                if watch.is_computed:
                    self._delays[key] = weak_key(watch.weight, self._delays), watch.is_alone
                    if not watch.is_alone:
                        note_left("weight gradients of weights that are read more than once: they stay in the backward")
        finally:
            self.is_active, self._recorded = False, None
            self._due.clear()
            for watch in self._watched.values():
                watch.hook.remove()
            self._watched.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what is due of the backward inside the ``with`` block."""
        self._recorded = []
        try:
            yield
            self._due.append(self._recorded)
        finally:
            self._recorded = None

    def enter(self, weight: Tensor, compute: WeightGrad) -> tuple[Tensor, WeightGrad]:
        """Return the tensor that enters the graph for a weight, and what its linear's backward calls with it."""
        key = id(weight)
        if not self.is_active or not torch.is_grad_enabled() or not weight.requires_grad or not weight.is_leaf:
            return weight, compute
        known = self._delays.get(key)
        if known is None or known[0]() is not weight:
            watch = self._watched.get(key) or self._watched.setdefault(key, _Watch(weight))
            return weight, functools.partial(watch.show, compute)
        if not known[1]:
            return weight, compute
        return weight.detach().requires_grad_(), functools.partial(self._add, weight, compute)

    def _add(self, weight: Tensor, compute: WeightGrad, _detached: Tensor, grad: Tensor, x: Tensor) -> None:
        if self._recorded is None or torch.is_grad_enabled():
            raise RuntimeError(
                "ovpatch: a stage takes gradients inside its forward, or of its gradients, through a linear whose "
                f"weight gradient is computed later. {_REMEDY}"
            )
        self._recorded.append(([weight], lambda: [compute(weight, grad, x)]))

    def compute(self, microbatches: int) -> int:
        """Compute and accumulate the weight gradients of the oldest ``microbatches`` that are due; return how many."""
        before = COUNTERS.weight_grads
        for _ in range(microbatches):
            products = self._due.popleft()
            with profiler_span(profiler_label("megatron", "weight_grads", f"{len(products)} linears")):
                COUNTERS.weight_grads += len(products)
                accumulate_products(products)
        return COUNTERS.weight_grads - before


def multiply(_weight: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Compute a weight's gradient as Megatron does."""
    return grad.t().matmul(x)


class Linear(torch.autograd.Function):
    """Megatron's linear without sequence parallelism, whose backward lets ``compute`` make the weight's gradient.

    Input and output are ``[s, b, k]`` and ``[s, b, n]``. The input's gradient is summed over ``group``, if it is given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: WeightGrad,
        group: dist.ProcessGroup | None,
        prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return the output."""
        ctx.save_for_backward(x, weight)
        ctx.compute, ctx.group, ctx.prepare, ctx.has_bias = compute, group, prepare, bias is not None
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of input, weight and bias."""
        x, weight = ctx.saved_tensors
        dx = grads[0].matmul(weight)
        grad, x = ctx.prepare(grads[0], x)
        work = None if ctx.group is None else dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = ctx.compute(weight, grad, x)
        db = grad.sum(dim=0) if ctx.has_bias else None
        if work is not None:
            work.wait()
        return dx, dw, db, None, None, None
