"""Megatron's sequence-parallel linears, computed by the operators of ``tp_linear``.

A column-parallel linear gathers the sequence and multiplies. A row-parallel linear multiplies and scatters. In backward
each does the opposite. In forward, Megatron runs GEMM and collective sequentially. In backward, it hides the gather
under the input's gradient, and the scatter under the weight's gradient. The operators follow a schedule in both.
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
from ovpatch.overlap.tensor_parallel.schedules import find_schedule_objection
from ovpatch.overlap.tensors.pending_param import wait_for_param
from ovpatch_plugins.megatron.megatron_options import OPTIONS
from ovpatch_plugins.megatron.megatron_report import COUNTERS, note_fallback
from ovpatch_plugins.megatron.weight_grads import WeightGrad, WeightGradQueue, multiply

_LAYERS: Final = "megatron.core.tensor_parallel.layers"
_COLUMN: Final = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
# The functions of a row-parallel linear that one operator replaces.
_REPLACED_FUNCTIONS: Final = (*_COLUMN, "reduce_scatter_to_sequence_parallel_region")
# The arguments of a column-parallel linear that an operator may ignore. Other arguments, such as the buffer for a
# deferred weight gradient, need Megatron's own function.
_IGNORED_ARGUMENTS: Final = ("tp_group", "wgrad_deferral_limit", "async_grad_allreduce")
# Returns Dynamo's callback for the frames that its caller calls, None outside of compiled functions. If Dynamo cannot
# trace a frame, it compiles each function that the frame calls by itself.
_get_dynamo_callback: Final = torch._C._dynamo.eval_frame.get_eval_frame_callback
_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_REMEDY: Final = (
    "Call ovpatch.apply() with the same arguments on every rank before the first forward, and give every rank the same "
    "OVPATCH variables and CUDA_DEVICE_MAX_CONNECTIONS; or set OVPATCH_MEGATRON_LINEARS=0 on all ranks to have "
    "Megatron compute linears."
)


class LinearPatches:
    """The wrappers of Megatron's functions, for one set of options.

    Args:
        options: The options of the feature.
        queue: Delays weight gradients in steps of a pipeline; None if no weight gradient is delayed.
    """

    def __init__(self, options: Mapping[str, Any], queue: WeightGradQueue | None = None) -> None:
        # A queued weight gradient is computed from operands that must outlive the backward.
        self._queue = queue if get_schedule_info(options["schedule"]).keeps_operands else None
        self._schedule_options = {name: options[name] for name in ("schedule", "chunks")}
        self._regathers: bool = options["regather"]
        self._min_flop: float = options["min_linear_gflop"] * 1e9
        self._terms = dict(options)
        # A weak reference to the last group whose ranks have agreed.
        self._agreed_group: Callable[[], Any] = lambda: None
        # Megatron's functions when they were last inspected, and the reason against replacing them.
        self._foreign_function: tuple[list[Any], str] = ([], "")

    def wrap_column(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a function of :data:`_COLUMN`."""
        return wrap_function(
            original, functools.partial(self._compute_column, find_wrapped(original))
        )

    def wrap_row(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``RowParallelLinear.forward``, which calls both the GEMM and the scatter after it."""
        patches = self
        foreign_reason = find_wrapped(original)

        @functools.wraps(original)
        def forward(self: Any, input_: Tensor) -> Any:
            scatters = (
                self.sequence_parallel and self.input_is_parallel and not self.explicit_expert_comm
            )
            if not scatters or torch.compiler.is_compiling() or _get_dynamo_callback() is not None:
                return original(self, input_)
            output = patches._compute_row(foreign_reason, self, input_)
            if output is None:
                return original(self, input_)
            if self.skip_bias_add:
                return output, self.bias
            return (output if self.bias is None else output + self.bias), None

        return forward

    def _compute_column(
        self,
        foreign_reason: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fuses: bool,
        _should_reduce: bool,
        sequence_parallel: bool,
        extra_args: Mapping[str, Any],
    ) -> Tensor | None:
        """Return the output ``[world * s, b, n]`` of ``x``, ``[s, b, k]``; None if Megatron must compute it."""
        if not sequence_parallel:
            return None
        group, reason = extra_args.get("tp_group"), foreign_reason
        if group is None:
            group = _get_layers().get_tensor_model_parallel_group_if_none(None)
        # An operator must not ignore an argument that it does not know.
        for name, value in extra_args.items():
            if value is not None and name not in _IGNORED_ARGUMENTS:
                reason = f"an operator does not support {name}"
        entered = self._enter(x, weight, fuses, group, "column", reason)
        if entered is None:
            return None
        output: Tensor
        weight, compute = entered
        (output,) = all_gather_linear(
            x,
            [weight],
            group,
            regather=self._regathers,
            weight_grad=compute,
            **self._schedule_options,
        )
        return output if bias is None else output + bias

    def _compute_row(self, foreign_reason: str, linear: Any, x: Tensor) -> Tensor | None:
        """Return the output ``[s / world, b, n]`` of ``x``, ``[s, b, k]``; None if Megatron must compute it."""
        weight, fuses, group = linear.weight, linear.gradient_accumulation_fusion, linear.tp_group
        reason = foreign_reason or self._find_foreign_function(linear)
        # Megatron raises its own error for such a sequence.
        if group.size() > 1 and x.shape[0] % group.size():
            reason = "its sequence does not divide by the number of ranks"
        offloading = linear.config._cpu_offloading_context
        if offloading is not None and offloading.inside_context:
            reason = "its input is offloaded to the CPU"
        entered = self._enter(x, weight, fuses, group, "row", reason)
        if entered is None:
            return None
        weight, compute = entered
        output: Tensor = linear_reduce_scatter(
            x, weight, group, weight_grad=compute, **self._schedule_options
        )
        return output

    def _enter(
        self, x: Tensor, weight: Any, fuses: bool, group: Any, kind: str, reason: str
    ) -> tuple[Tensor, WeightGrad] | None:
        """Return the tensor that enters the graph for a weight, and the function that computes its gradient.

        Returns None if Megatron computes the linear. This decision is the same on all ranks.
        """
        if group.size() == 1:
            return None
        # The parameter may still be pending after a step that gathers early.
        if type(weight) is not torch.nn.Parameter:
            wait_for_param(weight)
        reason = reason or find_unsupported(x, weight, fuses)
        # Ranks agree also for linears without a gain, because the agreed settings decide about the gain.
        if not reason and self._agreed_group() is not group:
            with note_failures("megatron", f"the first {kind}-parallel linear"):
                self._agree(group, x)
            self._agreed_group = weakref.ref(group)
        # A delayed weight gradient gains by its place after the send, even if the GEMM is small.
        is_delayed = self._queue is not None and self._queue.is_active
        if x.is_cuda and not reason and not is_delayed:
            rows = x.numel() // x.shape[-1] * (group.size() if kind == "column" else 1)
            reason = _find_no_gain_reason(
                self._schedule_options["schedule"], 2 * rows * weight.numel(), self._min_flop
            )
        if reason:
            note_fallback(f"a {kind}-parallel linear: {reason}")
            COUNTERS.stock_calls += 1
            return None
        COUNTERS.calls += 1
        compute = find_weight_grad(weight) if fuses else multiply
        return (weight, compute) if self._queue is None else self._queue.enter(weight, compute)

    def _agree(self, group: Any, x: Tensor) -> None:
        check_consistent_once(
            group, "megatron", self, lambda: _list_terms(self._terms, x), remedy=_REMEDY
        )
        schedule = self._schedule_options["schedule"]
        if reason := find_schedule_objection(schedule, group, x.device.type):
            refuse_option("megatron", OPTIONS, "schedule", schedule, reason)

    def _find_foreign_function(self, linear: Any) -> str:
        """Return :func:`_read_foreign_function`, which is called again only if a function has changed."""
        layers = _get_layers()
        current: list[Any] = []
        for name in _REPLACED_FUNCTIONS:
            function = getattr(layers, name, None)
            mark = getattr(function, "__ovpatch__", None)
            current += (function, None if mark is None else mark.patches)
        current.append(getattr(getattr(linear, "_forward_impl", None), "__func__", None))
        # The inspection is slow, and functions rarely change.
        if current != self._foreign_function[0]:
            self._foreign_function = current, _read_foreign_function(linear)
        return self._foreign_function[1]


def wrap_function(
    original: Callable[..., Tensor], compute: Callable[..., Tensor | None]
) -> Callable[..., Tensor]:
    """Wrap a function of Megatron that computes a linear; its last parameters differ between versions of Megatron.

    Args:
        original: The function.
        compute: Called with input, weight, bias, ``gradient_accumulation_fusion``, ``allreduce_dgrad``,
            ``sequence_parallel`` and the remaining arguments by name. Returns the output, or None if Megatron must
            compute it. Megatron does so under a compiler, which would recompile for values that change between steps.
    """
    # Callers may pass the last arguments by position.
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
        linear_args = (
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
        )
        found = None
        if not torch.compiler.is_compiling() and _get_dynamo_callback() is None:
            named = kwargs if not args else dict(zip(names, args, strict=False)) | kwargs
            found = compute(*linear_args, named)
        return original(*linear_args, *args, **kwargs) if found is None else found

    return linear


def find_unsupported(x: Tensor, weight: Any, fuses: bool) -> str:
    """Return the reason for which only Megatron can compute a linear; "" if there is none."""
    if type(weight) not in (Tensor, torch.nn.Parameter) or hasattr(weight, "__fsdp_param__"):
        return "its weight belongs to another library"
    if x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return "its input has another dtype, or autocast is on"
    if fuses and weight.requires_grad and getattr(weight, "main_grad", None) is None:
        return "gradient_accumulation_fusion without main_grad"
    return "" if x.numel() else "its input is empty"


def _list_terms(options: Mapping[str, Any], x: Tensor) -> Mapping[str, Any]:
    """Return the settings that decide which linears our operators compute, for an input like ``x``."""
    return {**options, _CONNECTIONS: os.environ.get(_CONNECTIONS)} if x.is_cuda else options


def _find_no_gain_reason(schedule: str, flop: int, min_flop: float) -> str:
    """Return the reason for which Megatron's linear is as fast on a GPU; "" if there is none.

    Our linears take more host time, so they must gain device time.

    Args:
        schedule: The value of option ``schedule``.
        flop: The operations of the GEMM on this rank.
        min_flop: The limit of option ``min_linear_gflop``.
    """
    if schedule == "bulk" and os.environ.get(_CONNECTIONS) == "1":
        return "with CUDA_DEVICE_MAX_CONNECTIONS=1 Megatron overlaps the collectives of schedule bulk itself"
    return "its GEMM is smaller than min_linear_gflop" if flop < min_flop else ""


def _read_foreign_function(linear: Any) -> str:
    """Return the remark that another library has patched a function that our operator replaces; "" if none has."""
    layers = _get_layers()
    functions = {name: getattr(layers, name, None) for name in _REPLACED_FUNCTIONS}
    functions["_forward_impl"] = getattr(getattr(linear, "_forward_impl", None), "__func__", None)
    for name, function in functions.items():
        if not _is_megatrons_own(function):
            return f"another library has replaced {name}"
    return ""


def find_wrapped(original: Any) -> str:
    """Return the remark that our operator would skip an earlier patch of another library; "" if there is none."""
    return (
        "" if _is_megatrons_own(original) else f"another library has replaced {original.__name__}"
    )


def _is_megatrons_own(function: Any) -> bool:
    # Only functions that the patch manager installs are unwrapped. Other functions with a __wrapped__ are foreign.
    while "_ovpatch_target" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
        mark = getattr(function, "__ovpatch__", None)
        if mark is not None and any(patch.feature != "megatron" for patch in mark.patches):
            return False
        function = function.__wrapped__
    code, module_name = (
        getattr(function, "__code__", None),
        getattr(function, "__module__", None) or "",
    )
    if code is None or not module_name.startswith("megatron.core."):
        return False
    # A wrapper by functools.wraps has Megatron's names, but the code of another file.
    return bool(code.co_filename == sys.modules[module_name].__file__)


def find_weight_grad(weight: Any) -> WeightGrad:
    """Return the function that computes a weight's gradient with ``gradient_accumulation_fusion``."""
    return (
        functools.partial(_accumulate, main_grad=weight.main_grad)
        if weight.requires_grad
        else multiply
    )


def _accumulate(weight: Any, grad: Tensor, x: Tensor, *, main_grad: Tensor) -> Tensor | None:
    """Add a weight's gradient to ``main_grad`` by Megatron's kernel; return the tensor that Megatron returns instead.

    The kernels belong to Apex. If DistributedDataParallel counts gradients, autograd gets a dummy gradient, so that the
    hook is called on the thread of the backward.
    """
    layers = _get_layers()
    # Hooks for saved tensors, such as those of an offload to the CPU, make another tensor object of the saved weight,
    # which lacks the attribute. Megatron sets it here as well.
    weight.main_grad = main_grad
    kernels = layers.fused_weight_gradient_mlp_cuda
    if main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(x, grad, main_grad)
    elif main_grad.dtype in (torch.float16, torch.bfloat16):
        kernels.wgrad_gemm_accum_fp16(x, grad, main_grad)
    else:
        raise RuntimeError(
            f"ovpatch: gradient_accumulation_fusion cannot add to a main_grad of {main_grad.dtype}: use float32, "
            "float16 or bfloat16, or turn gradient_accumulation_fusion off"
        )
    # Without this attribute no hook waits for a gradient from autograd.
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    should_zero = bool(getattr(weight, "zero_out_wgrad", False))
    if layers.HAVE_TE:
        dummy: Tensor = layers.get_dummy_wgrad(list(main_grad.shape), x.dtype, zero=should_zero)
        return dummy
    return (x.new_zeros if should_zero else x.new_empty)(main_grad.shape)


def _get_layers() -> Any:
    return sys.modules[_LAYERS]
