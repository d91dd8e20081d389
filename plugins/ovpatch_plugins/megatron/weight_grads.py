"""The weight gradients of a stage's linears, which are computed after the backward that skipped them.

Such a backward computes the gradients of the stage's input and of all parameters except the linears' weights. For each
of these weights it keeps the input and the output's gradient. Their GEMM follows the send of the input's gradient.
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
from ovpatch_plugins.megatron.megatron_report import COUNTERS, note_fallback

WeightGrad: TypeAlias = Callable[[Tensor, Tensor, Tensor], "Tensor | None"]
"""Computes a weight's gradient, from the weight, the output's gradient ``[M, n]`` and the input ``[M, k]``."""

Contribution: TypeAlias = Callable[[], "Tensor | None"]
"""Computes a part of a weight's gradient."""

_Parts: TypeAlias = "dict[tuple[int, int], tuple[Tensor, list[Contribution]]]"
"""The weights and the parts of their gradients, by the weight and by the engine's task, whose end adds a gradient."""

_REMEDY = "Set OVPATCH_MEGATRON_PIPELINE_SCHEDULE=stock"


class _SourceCheck:
    """The check whether all gradients of a weight come from its linear, in the backwards of the pipeline.

    Attributes:
        weight: The weight.
        gradient: The gradient that its linear has returned to autograd, until autograd hands it to the weight.
        is_computed: Whether the linear has computed a gradient.
        has_one_source: Whether no gradient had another source.
        hook_handle: The hook on the weight.
    """

    def __init__(self, weight: Tensor, is_recording: Callable[[], bool]) -> None:
        self.weight = weight
        self.gradient: Tensor | None = None
        self.is_computed = False
        self.has_one_source = True
        self.hook_handle = weight.register_hook(self._compare)
        self._is_recording = is_recording

    def _compare(self, grad: Tensor) -> None:
        # A sum with other contributions is another tensor. The reference in this object keeps autograd from adding
        # them to the gradient in place. A forward that takes gradients of the weight needs the weight in its graph, so
        # a gradient outside of a recorded backward counts as another source.
        self.has_one_source &= grad is self.gradient and self._is_recording()
        self.gradient = None

    def compute_for_autograd(
        self, compute: WeightGrad, weight: Tensor, grad: Tensor, x: Tensor
    ) -> Tensor | None:
        """Compute a gradient that autograd hands to the weight."""
        self.gradient = compute(weight, grad, x)
        self.is_computed = True
        return self.gradient


class WeightGradQueue:
    """The weight gradients that are due on a stage, by microbatch.

    A GEMM gets the operands of Megatron's backward. The engine hands its result to the weight and calls Megatron's
    hook, in the order of the microbatches, so all bits are Megatron's. A weight that is also read elsewhere gets a sum,
    which delayed parts would round differently. So the first step shows whether the weight has one contribution. In
    that step its gradient is computed in the backward, and forever if there are several contributions. The same holds
    for a weight with hooks of the script.

    A later step may bring other contributions. In that step they are held until the GEMM is due, and then the weight
    gets the sum as one gradient. In the steps after that one, its gradient is computed in the backward.

    Attributes:
        is_active: Whether the stage runs a step in which weight gradients are delayed.
    """

    def __init__(self) -> None:
        self.is_active = False
        # The gradients that are due, by microbatch, and by call of the engine.
        self._due_microbatches: deque[list[list[DeferredGrads]]] = deque()
        # The parts that the running backward has skipped; None outside of a recorded backward.
        self._parts_of_backward: _Parts | None = None
        # The checks of weights in their first step.
        self._checks: dict[int, _SourceCheck] = {}
        # The hooks of the weights whose gradients this step delays.
        self._hold_handles: dict[int, RemovableHandle] = {}
        # Whether the due gradients are being computed.
        self._is_computing = False
        # Whether each weight has one source of gradients, as steps have shown.
        self._known_weights: dict[int, tuple[weakref.ref[Tensor], bool]] = {}

    def __len__(self) -> int:
        """Return the number of microbatches whose weight gradients are due."""
        return len(self._due_microbatches)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a step inside the ``with`` block.

        Raises:
            RuntimeError: Weight gradients are still due at the end of the step.
        """
        self.is_active = True
        try:
            yield
            if any(self._due_microbatches):
                raise RuntimeError(
                    "ovpatch: Megatron's pipeline schedule has ended before the weight gradients of all microbatches "
                    f"were computed, so the gradients of this step are wrong. {_REMEDY}"
                )
            for check in self._checks.values():
                if check.is_computed:
                    self._record_sources(check.weight, has_one_source=check.has_one_source)
        finally:
            self.is_active = False
            self._parts_of_backward = None
            self._due_microbatches.clear()
            for hook_handle in (
                *self._hold_handles.values(),
                *[check.hook_handle for check in self._checks.values()],
            ):
                hook_handle.remove()
            self._hold_handles.clear()
            self._checks.clear()

    def _record_sources(self, weight: Tensor, *, has_one_source: bool) -> None:
        """Record whether all gradients of a weight come from its linear."""
        self._known_weights[id(weight)] = weak_key(weight, self._known_weights), has_one_source
        if not has_one_source:
            note_fallback(
                "weight gradients of weights that are read more than once: the backward computes them"
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the gradients that the backward inside the ``with`` block skips."""
        self._parts_of_backward = {}
        try:
            yield
            self._due_microbatches.append(_split_by_call(self._parts_of_backward))
        finally:
            self._parts_of_backward = None

    def enter(self, weight: Tensor, compute: WeightGrad) -> tuple[Tensor, WeightGrad]:
        """Return the tensor that enters the graph instead of a weight, and the function that its backward calls."""
        key = id(weight)
        if (
            not self.is_active
            or not torch.is_grad_enabled()
            or not weight.requires_grad
            or not weight.is_leaf
        ):
            return weight, compute
        # A weight gets its hook at its first use in a step. Its later uses are held as well.
        if key not in self._hold_handles:
            known = self._known_weights.get(key)
            if known is None or known[0]() is not weight:
                check = self._checks.get(key) or self._checks.setdefault(
                    key, _SourceCheck(weight, self._is_recording)
                )
                return weight, functools.partial(check.compute_for_autograd, compute)
            if not known[1]:
                return weight, compute
            # Hooks of the script would be called for each held part, and again for the sum.
            if _count_hooks(weight):
                note_fallback(
                    "weight gradients of weights that have hooks: the backward computes them"
                )
                return weight, compute
            self._hold_handles[key] = weight.register_hook(
                functools.partial(self._hold_grad, weight)
            )
        # With a detached tensor in the graph, this backward hands no gradient to the weight.
        return weight.detach().requires_grad_(), functools.partial(
            self._queue_part, weight, compute
        )

    def _is_recording(self) -> bool:
        return self._parts_of_backward is not None

    def holds(self, weight: Tensor) -> bool:
        """Return whether the gradient that a weight gets now represents the sum that it gets later."""
        return self._parts_of_backward is not None and id(weight) in self._hold_handles

    def _queue_part(
        self, weight: Tensor, compute: WeightGrad, _detached: Tensor, grad: Tensor, x: Tensor
    ) -> None:
        if self._parts_of_backward is None or torch.is_grad_enabled():
            raise RuntimeError(
                "ovpatch: a stage takes gradients inside its forward, or of its gradients, through a linear whose "
                f"weight gradient is computed later. {_REMEDY}"
            )
        self._record(weight, self._parts_of_backward, lambda: compute(weight, grad, x))

    def _hold_grad(self, weight: Tensor, grad: Tensor | None) -> Tensor | None:
        """Hold a gradient from another source than the linear; return a gradient that changes no bit of a sum."""
        # The due gradient itself passes this hook as well.
        if self._is_computing:
            return None
        self._record_sources(weight, has_one_source=False)
        # Megatron adds the gradient of a backward inside a forward immediately.
        if self._parts_of_backward is None:
            return None
        if _count_hooks(weight) > 1:
            raise RuntimeError(
                f"ovpatch: a weight of shape {tuple(weight.shape)} is read more than once in this step, and the script "
                f"added a hook in the step, which would be called for each part of its gradient. {_REMEDY}"
            )
        if grad is None:
            # Megatron's hook requires a gradient. Adding -0.0 changes no bit.
            if weight.grad is None and hasattr(weight, "grad_added_to_main_grad"):
                weight.grad = torch.full_like(weight, -0.0)
            return None
        self._record(weight, self._parts_of_backward, lambda: grad)
        # A hook must not make a sparse gradient dense.
        return torch.zeros_like(grad) if grad.is_sparse else torch.full_like(grad, -0.0)

    def _record(self, weight: Tensor, recorded: _Parts, part: Contribution) -> None:
        parts = recorded.setdefault((id(weight), torch._C._current_graph_task_id()), (weight, []))[
            1
        ]
        parts.append(part)
        if len(parts) > 1:
            self._record_sources(weight, has_one_source=False)

    def compute(self, microbatches: int) -> int:
        """Compute and accumulate the due weight gradients of the oldest ``microbatches``; return their number."""
        before, self._is_computing = COUNTERS.weight_grads, True
        try:
            for _ in range(microbatches):
                for due_grads in self._due_microbatches.popleft():
                    with profiler_span(
                        profiler_label("megatron", "weight_grads", f"{len(due_grads)} linears")
                    ):
                        COUNTERS.weight_grads += len(due_grads)
                        accumulate_deferred(due_grads)
        finally:
            self._is_computing = False
        return COUNTERS.weight_grads - before


def _count_hooks(weight: Tensor) -> int:
    return len(weight._backward_hooks or ()) + len(
        getattr(weight, "_post_accumulate_grad_hooks", None) or ()
    )


def _split_by_call(recorded: _Parts) -> list[list[DeferredGrads]]:
    """Return the due gradients by call of the engine.

    A call gets at most one gradient of each weight, because the engine would add up two gradients before the hook.
    """
    calls: list[dict[int, DeferredGrads]] = []
    for (key, _), (weight, parts) in recorded.items():
        call = next((call for call in calls if key not in call), None)
        if call is None:
            calls.append(call := {})
        call[key] = [weight], functools.partial(_add_up, parts)
    return [list(call.values()) for call in calls]


def _add_up(parts: list[Contribution]) -> list[Tensor | None]:
    """Return the sum of a gradient's parts, added as the engine adds them."""
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
    """Megatron's linear without sequence parallelism, whose backward calls ``compute`` for the weight's gradient.

    Input and output are ``[s, b, k]`` and ``[s, b, n]``. Backward sums the input's gradient over ``group``, if there is
    a group.
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
        ctx.compute = compute
        ctx.group = group
        ctx.prepare = prepare
        ctx.has_bias = bias is not None
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of input, weight and bias."""
        x, weight = ctx.saved_tensors
        dx = grads[0].matmul(weight)
        grad, x = ctx.prepare(grads[0], x)
        # The all-reduce hides under the weight's gradient.
        work = None if ctx.group is None else dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = ctx.compute(weight, grad, x)
        db = grad.sum(dim=0) if ctx.has_bias else None
        if work is not None:
            work.wait()
        return dx, dw, db, None, None, None
