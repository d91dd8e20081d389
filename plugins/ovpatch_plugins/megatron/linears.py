"""Megatron's sequence-parallel linears, computed by the operators of ``tp_linear``.

A column-parallel linear gathers the sequence and multiplies, a row-parallel one multiplies and scatters; in backward it
is the other way round. Megatron launches one after the other in forward, and in backward hides the gather under the
input's gradient and the scatter under the weight's. The operators do each in the order of a schedule.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.hookspecs import note_failures, refuse_option
from ovpatch.overlap.comm.consensus import check_consistent_once
from ovpatch.overlap.tensor_parallel.functional import all_gather_linear, linear_reduce_scatter
from ovpatch.overlap.tensor_parallel.schedule_table import get_schedule_info
from ovpatch.overlap.tensor_parallel.schedules.fused import find_fused_objection
from ovpatch.overlap.tensors.pending_param import wait_for_param
from ovpatch_plugins.megatron.megatron_options import OPTIONS
from ovpatch_plugins.megatron.megatron_report import COUNTERS, note_left
from ovpatch_plugins.megatron.weight_grads import WeightGrad, WeightGradQueue, multiply

_LAYERS: Final = "megatron.core.tensor_parallel.layers"
_COLUMN: Final = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
_REPLACED: Final = (
    *_COLUMN,
    "reduce_scatter_to_sequence_parallel_region",
)  # by one operator in row-parallel linears
# Arguments of a column-parallel linear that change nothing here; others, as where its weight gradient is deferred, do.
_IGNORED: Final = ("tp_group", "wgrad_deferral_limit", "async_grad_allreduce")
_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_REMEDY: Final = (
    "Call ovpatch.apply() with the same arguments on every rank before the first forward, and give "
    "every rank the same "
    "OVPATCH variables and CUDA_DEVICE_MAX_CONNECTIONS; OVPATCH_MEGATRON_LINEARS=0 on all ranks "
    "leaves linears to "
    "Megatron."
)


class LinearPatches:
    """The wrappers of Megatron's functions, for one set of options.

    Args:
        options: The feature's.
        queue: What delays weight gradients in steps of a pipeline, if anything does.
    """

    def __init__(self, options: Mapping[str, Any], queue: WeightGradQueue | None = None) -> None:
        # A queued weight gradient is computed from operands that must outlive the backward.
        self._queue = queue if get_schedule_info(options["schedule"]).keeps_operands else None
        self._how = {name: options[name] for name in ("schedule", "chunks")}
        self._regather: bool = options["regather"]
        self._least_flop: float = options["min_linear_gflop"] * 1e9
        self._terms = dict(options)
        self._agreed: Callable[[], Any] = lambda: (
            None
        )  # the last group, whose ranks have agreed; held weakly
        self._found: tuple[list[Any], str] = (
            [],
            "",
        )  # what stands in the place of Megatron's functions, and why not

    def wrap_column(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a function of :data:`_COLUMN`."""
        return wrap_function(
            original, functools.partial(self._compute_column, find_wrapped(original))
        )

    def wrap_row(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``RowParallelLinear.forward``, where the product and the scatter behind it meet."""
        linears = self
        foreign = find_wrapped(original)

        @functools.wraps(original)
        def forward(self: Any, input_: Tensor) -> Any:
            scatters = (
                self.sequence_parallel and self.input_is_parallel and not self.explicit_expert_comm
            )
            if not scatters or torch.compiler.is_compiling():
                return original(self, input_)
            output = linears._compute_row(foreign, self, input_)
            if output is None:
                return original(self, input_)
            if self.skip_bias_add:
                return output, self.bias
            return (output if self.bias is None else output + self.bias), None

        return forward

    def _compute_column(
        self,
        foreign: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fuse: bool,
        _reduces: bool,
        sequence_parallel: bool,
        further: Mapping[str, Any],
    ) -> Tensor | None:
        """Return the output ``[world * s, b, n]`` of ``x``, ``[s, b, k]``; None if Megatron has to compute it."""
        if not sequence_parallel or torch.compiler.is_compiling():
            return None
        group, reason = further.get("tp_group"), foreign
        if group is None:
            group = _layers().get_tensor_model_parallel_group_if_none(None)
        for name, value in further.items():
            if value is not None and name not in _IGNORED:
                reason = f"{name} asks for more"
        entering = self._enter(x, weight, fuse, group, "column", reason)
        if entering is None:
            return None
        output: Tensor
        weight, compute = entering
        (output,) = all_gather_linear(
            x, [weight], group, regather=self._regather, weight_grad=compute, **self._how
        )
        return output if bias is None else output + bias

    def _compute_row(self, foreign: str, linear: Any, x: Tensor) -> Tensor | None:
        """Return the output ``[s / world, b, n]`` of ``x``, ``[s, b, k]``; None if Megatron has to compute it."""
        weight, fuse, group = linear.weight, linear.gradient_accumulation_fusion, linear.tp_group
        reason = foreign or self._find_foreign_function(linear)
        if group.size() > 1 and x.shape[0] % group.size():
            reason = "its sequence does not divide by the number of ranks"
        offloading = linear.config._cpu_offloading_context
        if offloading is not None and offloading.inside_context:
            reason = "its input is offloaded to the CPU"
        entering = self._enter(x, weight, fuse, group, "row", reason)
        if entering is None:
            return None
        weight, compute = entering
        output: Tensor = linear_reduce_scatter(x, weight, group, weight_grad=compute, **self._how)
        return output

    def _enter(
        self, x: Tensor, weight: Any, fuse: bool, group: Any, kind: str, reason: str
    ) -> tuple[Tensor, WeightGrad] | None:
        """Return what enters the graph for a weight, and what computes its gradient.

        None if Megatron computes the linear, which is the same on all ranks.
        """
        if group.size() == 1:
            return None
        if type(weight) is not torch.nn.Parameter:
            wait_for_param(weight)
        reason = reason or find_unsupported(x, weight, fuse)
        if (
            not reason and self._agreed() is not group
        ):  # also for linears without a gain, which the terms decide
            with note_failures("megatron", f"the first {kind}-parallel linear"):
                self._agree(group, x)
            self._agreed = weakref.ref(group)
        delays = self._queue is not None and self._queue.is_active
        if x.is_cuda and not reason and not delays:
            rows = x.numel() // x.shape[-1] * (group.size() if kind == "column" else 1)
            reason = _find_nil_gain(
                self._how["schedule"], 2 * rows * weight.numel(), self._least_flop
            )
        if reason:
            note_left(f"a {kind}-parallel linear: {reason}")
            COUNTERS.stock_calls += 1
            return None
        COUNTERS.calls += 1
        compute = find_weight_grad(weight) if fuse else multiply
        return (weight, compute) if self._queue is None else self._queue.enter(weight, compute)

    def _agree(self, group: Any, x: Tensor) -> None:
        check_consistent_once(
            group, "megatron", self, lambda: _list_terms(self._terms, x), remedy=_REMEDY
        )
        schedule = self._how["schedule"]
        if schedule == "fused" and (reason := find_fused_objection(group, x.device.type)):
            refuse_option("megatron", OPTIONS, "schedule", schedule, reason)

    def _find_foreign_function(self, linear: Any) -> str:
        """Return :func:`_read_foreign_function`, which is read again only if a function has changed."""
        layers = _layers()
        now: list[Any] = []
        for name in _REPLACED:
            function = getattr(layers, name, None)
            mark = getattr(function, "__ovpatch__", None)
            now += (function, None if mark is None else mark.patches)
        now.append(getattr(getattr(linear, "_forward_impl", None), "__func__", None))
        if now != self._found[0]:
            self._found = now, _read_foreign_function(linear)
        return self._found[1]


def wrap_function(
    original: Callable[..., Tensor], compute: Callable[..., Tensor | None]
) -> Callable[..., Tensor]:
    """Wrap one of Megatron's functions that compute a linear; further parameters differ between its versions.

    Args:
        original: The function.
        compute: Called with input, weight, bias, ``gradient_accumulation_fusion``, ``allreduce_dgrad``,
            ``sequence_parallel`` and the further arguments by name; returns the output, or None if Megatron has to
            compute it, as under a compiler, which would compile again for what differs from step to step.
    """
    names = list(inspect.signature(original).parameters)[6:]

    @functools.wraps(original)
    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        given = (
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
        )
        found = compute(
            *given, kwargs if not args else dict(zip(names, args, strict=False)) | kwargs
        )
        return original(*given, *args, **kwargs) if found is None else found

    return linear


def find_unsupported(x: Tensor, weight: Any, fuse: bool) -> str:
    """Return why only Megatron can compute a linear, or ""."""
    if type(weight) not in (Tensor, torch.nn.Parameter) or hasattr(weight, "__fsdp_param__"):
        return "its weight belongs to another library"
    if x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return "its input has another dtype, or autocast is on"
    if fuse and weight.requires_grad and getattr(weight, "main_grad", None) is None:
        return "gradient_accumulation_fusion without main_grad"
    return "" if x.numel() else "its input is empty"


def _list_terms(options: Mapping[str, Any], x: Tensor) -> Mapping[str, Any]:
    """Return what decides on all ranks whose linears are computed, for an input like ``x``."""
    return {**options, _CONNECTIONS: os.environ.get(_CONNECTIONS)} if x.is_cuda else options


def _find_nil_gain(schedule: str, flop: int, least_flop: float) -> str:
    """Return why Megatron's own linear is as fast on a GPU, or ""; the host takes longer for ours.

    Args:
        schedule: The option's.
        flop: Operations of the product on this rank.
        least_flop: The option's limit.
    """
    if schedule == "bulk" and os.environ.get(_CONNECTIONS) == "1":
        return "with CUDA_DEVICE_MAX_CONNECTIONS=1 it hides what schedule bulk hides"
    return "its product is below min_linear_gflop" if flop < least_flop else ""


def _read_foreign_function(linear: Any) -> str:
    """Return the name of a function that our operator replaces and another library has patched, or ""."""
    layers = _layers()
    functions = {name: getattr(layers, name, None) for name in _REPLACED}
    functions["_forward_impl"] = getattr(getattr(linear, "_forward_impl", None), "__func__", None)
    for name, function in functions.items():
        if not _is_megatrons_own(function):
            return f"{name} is another library's"
    return ""


def find_wrapped(original: Any) -> str:
    """Return which library's function one of our operators would leave out, or "": it was there before ours."""
    return "" if _is_megatrons_own(original) else f"{original.__name__} is another library's"


def _is_megatrons_own(function: Any) -> bool:
    # Only functions that the patch manager installs are looked through, not others with a __wrapped__.
    while "_ovpatch_target" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
        mark = getattr(function, "__ovpatch__", None)
        if mark is not None and any(patch.feature != "megatron" for patch in mark.patches):
            return False
        function = function.__wrapped__
    code, home = getattr(function, "__code__", None), getattr(function, "__module__", None) or ""
    if code is None or not home.startswith("megatron.core."):
        return False
    return bool(
        code.co_filename == sys.modules[home].__file__
    )  # a copy by functools.wraps has another's code


def find_weight_grad(weight: Any) -> WeightGrad:
    """Return what computes a weight's gradient with ``gradient_accumulation_fusion``."""
    return (
        functools.partial(_accumulate, main_grad=weight.main_grad)
        if weight.requires_grad
        else multiply
    )


def _accumulate(weight: Any, grad: Tensor, x: Tensor, *, main_grad: Tensor) -> Tensor | None:
    """Add a weight's gradient to ``main_grad`` by Megatron's kernel; return what Megatron returns in its place.

    The kernels belong to Apex. Where DistributedDataParallel counts gradients, autograd gets a dummy, so that its hook
    is called, on the thread of the backward.
    """
    layers, weight.main_grad = _layers(), main_grad
    kernels = layers.fused_weight_gradient_mlp_cuda
    if main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(x, grad, main_grad)
    elif main_grad.dtype in (torch.float16, torch.bfloat16):
        kernels.wgrad_gemm_accum_fp16(x, grad, main_grad)
    else:
        raise RuntimeError(
            "ovpatch: gradient_accumulation_fusion cannot add to a main_grad of "
            f"{main_grad.dtype}: use float32, "
            "float16 or bfloat16, or turn gradient_accumulation_fusion off"
        )
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zero = bool(getattr(weight, "zero_out_wgrad", False))
    if layers.HAVE_TE:
        dummy: Tensor = layers.get_dummy_wgrad(list(main_grad.shape), x.dtype, zero=zero)
        return dummy
    return (x.new_zeros if zero else x.new_empty)(main_grad.shape)


def _layers() -> Any:
    return sys.modules[_LAYERS]
