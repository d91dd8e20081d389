"""Weight gradients of a stage's linears, computed after the backward that left them out.

A backward then yields the gradient of the stage's input and the gradients of all parameters but the linears' weights.
For each of those it keeps input and output gradient; their product is made behind the send.
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
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.autograd import DeferredGrads, accumulate_deferred
from ovpatch.overlap.comm.lifetimes import weak_key
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch_plugins.megatron.megatron_report import COUNTERS, note_left

WeightGrad: TypeAlias = Callable[[Tensor, Tensor, Tensor], "Tensor | None"]
"""Computes a weight's gradient, from the weight, the output's gradient ``[M, n]`` and the input ``[M, k]``."""

Contribution: TypeAlias = Callable[[], "Tensor | None"]
"""Computes a part of a weight's gradient."""

_Recorded: TypeAlias = "dict[tuple[int, int], tuple[Tensor, list[Contribution]]]"
"""Weights and what their gradients are sums of, by the weight and the engine's task, whose end adds a gradient."""

_REMEDY = "Set OVPATCH_MEGATRON_PIPELINE_SCHEDULE=stock"


class _Watch:
    """Whether a weight's gradients all come from its linear, in the backwards of the pipeline."""

    def __init__(self, weight: Tensor, is_recording: Callable[[], bool]) -> None:
        self.weight = weight
        self.product: Tensor | None = None  # what its linear has returned to autograd
        self.is_computed = False
        self.is_alone = True
        self.hook = weight.register_hook(self._compare)
        self._is_recording = is_recording

    def _compare(self, grad: Tensor) -> None:
        # A sum with other contributions is another tensor: the product is held here, so that none is added to it.
        # A forward that takes gradients of the weight needs the weight in its graph.
        self.is_alone &= grad is self.product and self._is_recording()
        self.product = None

    def show(self, compute: WeightGrad, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
        """Compute a gradient that goes to the weight by autograd."""
        self.product, self.is_computed = compute(weight, grad, x), True
        return self.product


class WeightGradQueue:
    """The weight gradients that are due on a stage, by microbatch.

    Products are made of the operands of Megatron's backward and given to the weight through the engine, which calls
    Megatron's hook, in the order of the microbatches: all bits are Megatron's. A weight that is also read elsewhere
    gets a sum, which would round otherwise. So its first step shows whether it has one contribution; until then, and
    for good if not, its gradient is computed in the backward. The same holds for a weight with hooks of the script.

    A later step may bring further contributions. In that step they are held until the product is due, and the weight
    gets the sum then, as one gradient; from the next step on its gradient is computed in the backward.
    """

    def __init__(self) -> None:
        self.is_active = (
            False  # whether the stage runs a step in which weight gradients are delayed
        )
        self._due: deque[list[list[DeferredGrads]]] = (
            deque()
        )  # of each microbatch, by call of the engine
        self._recorded: _Recorded | None = None  # of the backward that is running
        self._watched: dict[int, _Watch] = {}
        self._held: dict[int, RemovableHandle] = {}  # the hooks of this step's delayed weights
        self._is_computing = False
        self._delays: dict[
            int, tuple[weakref.ref[Tensor], bool]
        ] = {}  # what steps have shown, by the weight

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
                    "ovpatch: Megatron's pipeline schedule has ended before the weight gradients "
                    "of all microbatches "
                    f"were computed, so that the gradients of this step are wrong. {_REMEDY}"
                )
            for watch in self._watched.values():
                if watch.is_computed:
                    self._learn(watch.weight, is_alone=watch.is_alone)
        finally:
            self.is_active, self._recorded = False, None
            self._due.clear()
            for hook in (*self._held.values(), *[watch.hook for watch in self._watched.values()]):
                hook.remove()
            self._held.clear()
            self._watched.clear()

    def _learn(self, weight: Tensor, *, is_alone: bool) -> None:
        """Note whether a weight's gradients all come from its linear."""
        self._delays[id(weight)] = weak_key(weight, self._delays), is_alone
        if not is_alone:
            note_left(
                "weight gradients of weights that are read more than once: they stay in the "
                "backward"
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what is due of the backward inside the ``with`` block."""
        self._recorded = {}
        try:
            yield
            self._due.append(_split_by_call(self._recorded))
        finally:
            self._recorded = None

    def enter(self, weight: Tensor, compute: WeightGrad) -> tuple[Tensor, WeightGrad]:
        """Return the tensor that enters the graph for a weight, and what its linear's backward calls with it."""
        key = id(weight)
        if (
            not self.is_active
            or not torch.is_grad_enabled()
            or not weight.requires_grad
            or not weight.is_leaf
        ):
            return weight, compute
        if key not in self._held:
            known = self._delays.get(key)
            if known is None or known[0]() is not weight:
                watch = self._watched.get(key) or self._watched.setdefault(
                    key, _Watch(weight, self._is_recording)
                )
                return weight, functools.partial(watch.show, compute)
            if not known[1]:
                return weight, compute
            if _count_hooks(
                weight
            ):  # which would be called for what is held, and again for the sum
                note_left("weight gradients of weights that have hooks: they stay in the backward")
                return weight, compute
            self._held[key] = weight.register_hook(functools.partial(self._hold, weight))
        return weight.detach().requires_grad_(), functools.partial(self._add, weight, compute)

    def _is_recording(self) -> bool:
        return self._recorded is not None

    def holds(self, weight: Tensor) -> bool:
        """Return whether what a weight gets now stands for a gradient that it gets when its product is due."""
        return self._recorded is not None and id(weight) in self._held

    def _add(
        self, weight: Tensor, compute: WeightGrad, _detached: Tensor, grad: Tensor, x: Tensor
    ) -> None:
        if self._recorded is None or torch.is_grad_enabled():
            raise RuntimeError(
                "ovpatch: a stage takes gradients inside its forward, or of its gradients, through "
                "a linear whose "
                f"weight gradient is computed later. {_REMEDY}"
            )
        self._record(weight, self._recorded, lambda: compute(weight, grad, x))

    def _hold(self, weight: Tensor, grad: Tensor | None) -> Tensor | None:
        """Keep a gradient that does not come from the weight's linear; return what changes no bit of a sum."""
        if self._is_computing:
            return None
        self._learn(weight, is_alone=False)
        if self._recorded is None:  # Megatron adds at once what a backward inside a forward brings
            return None
        if _count_hooks(weight) > 1:
            raise RuntimeError(
                f"ovpatch: a weight of shape {tuple(weight.shape)} is read more than once from "
                "this step on, and has "
                "got a hook inside the step, which would be called for each part of its gradient. "
                f"{_REMEDY}"
            )
        if grad is None:
            if weight.grad is None and hasattr(
                weight, "grad_added_to_main_grad"
            ):  # Megatron's hook asks for one
                weight.grad = torch.full_like(weight, -0.0)
            return None
        self._record(weight, self._recorded, lambda: grad)
        # A hook must not make it dense.
        return torch.zeros_like(grad) if grad.is_sparse else torch.full_like(grad, -0.0)

    def _record(self, weight: Tensor, recorded: _Recorded, part: Contribution) -> None:
        parts = recorded.setdefault((id(weight), torch._C._current_graph_task_id()), (weight, []))[
            1
        ]
        parts.append(part)
        if len(parts) > 1:
            self._learn(weight, is_alone=False)

    def compute(self, microbatches: int) -> int:
        """Compute and accumulate the weight gradients of the oldest ``microbatches`` that are due; return how many."""
        before, self._is_computing = COUNTERS.weight_grads, True
        try:
            for _ in range(microbatches):
                for products in self._due.popleft():
                    with profiler_span(
                        profiler_label("megatron", "weight_grads", f"{len(products)} linears")
                    ):
                        COUNTERS.weight_grads += len(products)
                        accumulate_deferred(products)
        finally:
            self._is_computing = False
        return COUNTERS.weight_grads - before


def _count_hooks(weight: Tensor) -> int:
    return len(weight._backward_hooks or ()) + len(
        getattr(weight, "_post_accumulate_grad_hooks", None) or ()
    )


def _split_by_call(recorded: _Recorded) -> list[list[DeferredGrads]]:
    """Return what is due by call of the engine, which would add up two gradients of one weight."""
    calls: list[dict[int, DeferredGrads]] = []
    for (key, _), (weight, parts) in recorded.items():
        call = next((call for call in calls if key not in call), None)
        if call is None:
            calls.append(call := {})
        call[key] = [weight], functools.partial(_add_up, parts)
    return [list(call.values()) for call in calls]


def _add_up(parts: list[Contribution]) -> list[Tensor | None]:
    """Return the sum of a gradient's parts, as the engine adds them."""
    total: Tensor | None = None
    for compute in parts:
        part = compute()
        if total is not None and part is not None:
            part = part + total if total.is_sparse else total + part
        total = total if part is None else part
    return [total]


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
        ctx.compute, ctx.group, ctx.prepare, ctx.has_bias = (
            compute,
            group,
            prepare,
            bias is not None,
        )
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
