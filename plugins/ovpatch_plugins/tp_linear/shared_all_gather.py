"""One all-gather for several linears, which is computed together with their GEMMs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.style import PrepareModuleInput

from ovpatch.overlap.autograd import find_local_param
from ovpatch.overlap.tensor_parallel import tp_group
from ovpatch.overlap.tensor_parallel.layout import find_sequence_dim, get_local, is_recorded
from ovpatch.overlap.tensor_parallel.schedules.autotuned import Auto
from ovpatch.overlap.tensor_parallel.tp_autograd import OpContext, TPConfig, run_operator
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup
from ovpatch.overlap.tensors.linear_ops import autocast_dtype
from ovpatch_plugins.tp_linear.parallel_linear import STATE, TPLinear
from ovpatch_plugins.tp_linear.precomputed import (
    PRECOMPUTED,
    DeferredOperands,
    GatherGuard,
    PrecomputedOutputs,
)

_REPLICATED = Replicate()


class SharedAllGather:
    """The forward pre-hook that replaces ``PrepareModuleInput``'s, which prepares a module's inputs over a mesh.

    [Note: GEMMs of one gather] ``PrepareModuleInput`` gathers the input of an attention or a gated feed-forward once,
    in a forward pre-hook of the parent. The linears that read it are children of the parent, sharded by columns, with a
    replicated input. The gather and their GEMMs are one autograd node. Its backward sums the input gradients, sends
    one reduce-scatter, and hides it under the weights' gradients. An output waits until its linear is called with the
    very tensor. If the schedule splits the gather, the output is computed with it. Otherwise the output is empty
    memory until the linear computes into it.

    [Note: same collectives on all ranks] A hook, a profiler or a counter may be on one rank alone, so no collective
    depends on the linears that are computed ahead. Forward gathers once. Backward sums over the ranks once: the
    gradients of GEMMs that were computed ahead, and the terms of linears that computed themselves, whose DTensors are
    partial. Backward gathers again if any reader of the gathered input has a weight to train.

    Args:
        stock_hook: The hook of stock PyTorch.
        style: The style that registered it.
        mesh: The mesh of the style.
    """

    def __init__(
        self, stock_hook: Callable[..., Any], style: PrepareModuleInput, mesh: DeviceMesh
    ) -> None:
        self.stock_hook = stock_hook
        self._style = style
        self._mesh = mesh
        self._world = mesh.size()
        layouts = style.input_layouts or ()
        # Whether the style prepares one positional input, and gathers it. This usual case visits no arguments.
        self._has_single_input = len(layouts) == 1 and is_gather(
            layouts[0], (style.desired_input_layouts or (None,))[0]
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedAllGather:
        # A copy of the module can use this object, because it never changes.
        return self

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Prepare the inputs of a module.

        Args:
            module: The module.
            *args: The positional inputs, and a dictionary of the inputs by keyword if the style prepares them.
        """
        if not STATE.is_on or not STATE.shares_gathers or torch.compiler.is_compiling():
            return self.stock_hook(module, *args)
        if self._has_single_input and len(args) == 1 and len(args[0]) == 1:
            layouts: Any = self._style.input_layouts, self._style.desired_input_layouts
            return (
                self._prepare_argument(
                    module, args[0][0], self._mesh, layouts[0][0], layouts[1][0]
                ),
            )
        # The functions of stock PyTorch visit all arguments, and call this method of the copy for each one.
        style: Any = copy.copy(self._style)
        style._prepare_input_arg = functools.partial(self._prepare_argument, module)
        prepare = style._prepare_input_kwarg_fn if len(args) > 1 else style._prepare_input_fn
        return prepare(*args, self._mesh)

    def _prepare_argument(
        self, module: nn.Module, x: Any, mesh: DeviceMesh, layout: Any, desired: Any
    ) -> Any:
        if is_gather(layout, desired):
            found = self._try_gather(module, x, layout)
            if found is not None:
                return found
        return self._style._prepare_input_arg(x, mesh, layout, desired)

    def _try_gather(self, module: nn.Module, x: Any, layout: Any) -> Any:
        """Return the gathered input, whose outputs wait for their linears; None if stock PyTorch must gather."""
        # In inference mode tensors have no versions, so a change of a tensor since the gather would not be detected.
        if is_recorded() or torch.is_inference_mode_enabled():
            return None
        dim = find_sequence_dim(layout, x) if isinstance(x, Tensor) else None
        if dim is None or not x.numel():
            return None
        input_grad_placement = None
        if isinstance(x, DTensor):
            input_grad_placement = Shard(dim)
            if (
                x.device_mesh != self._mesh
                or x.placements != (input_grad_placement,)
                or x.shape[dim] % self._world
            ):
                return None
        elif type(x) is not Tensor or x.device.type != self._mesh.device_type:
            return None
        linears = find_readers(module, self._mesh, x)
        if not linears:
            return None
        # The ranks agree on the settings when they first use this group.
        ranks = tp_group.get_tp_group(vars(linears[0])["_ovpatch_parallel"].group, x.device)
        config = _choose_config(ranks, linears, x)
        deferred: list[DeferredOperands] | None = None if config.schedule.computes_ahead else []
        node_linears = [
            linear
            for linear in linears
            if can_share_node(linear, module if deferred is None else None)
        ]
        guard = GatherGuard()
        call = OpContext(
            config,
            ranks,
            dim=dim,
            weight_count=len(node_linears),
            is_constant=not x.requires_grad,
            mesh=self._mesh,
            input_grad_placement=input_grad_placement,
            gathered_placement=_REPLICATED,
            # Without a gradient of the input, backward reads no weight.
            check_backward=guard.check_backward if x.requires_grad else None,
            deferred_outputs=deferred,
            # This fact decides about a collective in backward. All readers are the same on all ranks, but the linears
            # in the node may differ.
            trains_weights=any(linear.weight.requires_grad for linear in linears),
        )
        weights = [linear.weight for linear in node_linears]
        biases = [linear.bias for linear in node_linears]
        *outputs, gathered = run_operator(call, x, *weights, *biases)
        PRECOMPUTED[id(gathered)] = PrecomputedOutputs(
            gathered, node_linears, outputs, guard, dim, deferred
        )
        return gathered


def _choose_config(ranks: TPGroup, linears: Sequence[nn.Linear], x: Tensor) -> TPConfig:
    """Return the config of a gather.

    All linears that read the gather determine the schedule, because these linears are the same on all ranks.
    """
    local, config = get_local(x), STATE.config
    if not isinstance(config.schedule, Auto):
        return config
    dtype = autocast_dtype(ranks.kind, x.dtype) or x.dtype
    features = [len(get_local(linear.weight)) for linear in linears]
    rows = local.numel() // local.shape[-1]
    # Autocast rounds the gathered input, because other readers than linears get it unrounded.
    can_split = dtype is x.dtype
    schedule = config.schedule.choose_for_gather(
        ranks, local.device, rows, local.shape[-1], features, dtype, can_split=can_split
    )
    return dataclasses.replace(config, schedule=schedule)


def is_gather(layout: Any, desired: Any) -> bool:
    """Return whether the preparation of an argument gathers it."""
    return (
        layout is not None and desired is not None and layout.is_shard() and desired.is_replicate()
    )


def find_readers(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> list[nn.Linear]:
    """Return the children of a module that read its gathered input, the same on all ranks.

    These are linears that are sharded by columns over ``mesh``, and that take a replicated input with the features and
    the dtype of ``x``.
    """
    is_cast = autocast_dtype(x.device.type, x.dtype) is not None
    features, found = x.shape[-1], []
    for child in module._modules.values():
        parallel: TPLinear | None = vars(child).get("_ovpatch_parallel")
        if (
            parallel is None
            or not parallel.is_column
            or not parallel.takes_replicated
            or parallel.mesh != mesh
        ):
            continue
        if (
            not isinstance(child, nn.Linear)
            or not _is_parameter(child)
            or child.in_features != features
        ):
            continue
        weight = child.weight
        has_gemm_dtype = weight.dtype == x.dtype or (is_cast and weight.dtype != torch.float64)
        if has_gemm_dtype and parallel.matches(weight, child.bias):
            found.append(child)
    return found


def _is_parameter(linear: nn.Linear) -> bool:
    """Return whether a weight is a parameter, and is not computed at every read or call.

    ``DistributedDataParallel(device_mesh=)`` makes parameters of local tensors, and its first forward replaces them by
    plain attributes, which are DTensors. These are views of the parameters by a node that saves no tensor, so they
    count as parameters. Any other attribute was computed, as by ``weight_norm``, and its graph may have been freed.
    """
    if "weight" in linear._parameters:
        return True
    weight = vars(linear).get("weight")
    if not isinstance(weight, DTensor):
        return False
    # A DTensor without a node is not trained.
    return weight.grad_fn is None or find_local_param(weight) is not None


def can_share_node(linear: nn.Linear, parent: nn.Module | None) -> bool:
    """Return whether this rank may compute a linear's GEMM in the autograd node of the gather.

    Args:
        linear: The linear.
        parent: The module whose input is gathered, if the GEMM is computed ahead. None if it is computed when the
            linear is called.
    """
    weight, bias = linear.weight, linear.bias
    if (
        weight.is_inference()
        or weight._backward_hooks
        or (bias is not None and bias._backward_hooks)
    ):
        return False
    if parent is None:
        return True
    # These hooks run after the gather and before the linear, and may change the weight or the input.
    if torch.nn.modules.module._global_forward_pre_hooks or linear._forward_pre_hooks:
        return False
    # Backward hooks of a module replace its inputs by views of them.
    replaces_gathered = parent._backward_hooks or parent._backward_pre_hooks
    # A pre-hook of the parent that runs after this one may change weights or the input, too.
    return not replaces_gathered and isinstance(
        next(reversed(parent._forward_pre_hooks.values())), SharedAllGather
    )
