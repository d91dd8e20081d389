"""One all-gather for several linears, computed together with their GEMMs."""

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

from ovpatch.overlap.tensor_parallel import tp_group
from ovpatch.overlap.tensor_parallel.layout import find_sequence_dim, get_local, is_recorded
from ovpatch.overlap.tensor_parallel.schedules.autotuned import Auto
from ovpatch.overlap.tensor_parallel.tp_autograd import OpContext, TPConfig, run_operator
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup
from ovpatch.overlap.tensors.linear_ops import autocast_dtype
from ovpatch_plugins.tp_linear.parallel_linear import STATE, TPLinear
from ovpatch_plugins.tp_linear.precomputed import (
    PRECOMPUTED,
    GatherGuard,
    LaterOperands,
    PrecomputedOutputs,
)

_WHOLE = Replicate()


class SharedAllGather:
    """Replaces the forward pre-hook by which ``PrepareModuleInput``, a style, prepares a module's inputs over a mesh.

    [Note: products behind one gather] ``PrepareModuleInput`` gathers the input of an attention or a gated feed-forward
    once, in a forward pre-hook of the parent. The linears that read it are the parent's own children that are cut by
    columns and take a replicated input. Gather and products are one autograd node, whose backward sums their input
    gradients, sends one reduce-scatter, and hides it under the weights' gradients. Its outputs wait until each linear
    is called with that very tensor. A schedule that cuts the gather computes them with it; otherwise they are empty
    until the linear computes into its own.

    [Note: same collectives on all ranks] A hook, a profiler or a counter may be on one rank alone, so no collective
    depends on what is computed ahead. Forward gathers once. Backward sums over the ranks once: the gradients of
    products that were computed ahead, and the terms of linears that computed for themselves, whose DTensors are
    partial. It gathers again if any of the linears, by how they are cut, has a weight to train.
    """

    def __init__(
        self, stock: Callable[..., Any], style: PrepareModuleInput, mesh: DeviceMesh
    ) -> None:
        self.stock, self._style, self._mesh, self._world = stock, style, mesh, mesh.size()
        layouts = style.input_layouts or ()
        self._is_alone = len(layouts) == 1 and is_gather(
            layouts[0], (style.desired_input_layouts or (None,))[0]
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedAllGather:
        return self  # it is never changed

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Prepare the inputs; ``args`` are the positional ones and, if the style wants them, those by keyword."""
        if not STATE.on or not STATE.shares or torch.compiler.is_compiling():
            return self.stock(module, *args)
        if self._is_alone and len(args) == 1 and len(args[0]) == 1:  # the usual case
            layouts: Any = self._style.input_layouts, self._style.desired_input_layouts
            return (self._argument(module, args[0][0], self._mesh, layouts[0][0], layouts[1][0]),)
        style: Any = copy.copy(
            self._style
        )  # stock walks the arguments, and asks this copy for each
        style._prepare_input_arg = functools.partial(self._argument, module)
        prepare = style._prepare_input_kwarg_fn if len(args) > 1 else style._prepare_input_fn
        return prepare(*args, self._mesh)

    def _argument(
        self, module: nn.Module, x: Any, mesh: DeviceMesh, layout: Any, desired: Any
    ) -> Any:
        if is_gather(layout, desired):
            found = self._gathered(module, x, layout)
            if found is not None:
                return found
        return self._style._prepare_input_arg(x, mesh, layout, desired)

    def _gathered(self, module: nn.Module, x: Any, layout: Any) -> Any:
        """Return the gathered input, whose products wait for their linears, or None if stock has to gather."""
        if (
            is_recorded() or torch.is_inference_mode_enabled()
        ):  # where no version tells that a tensor has changed
            return None
        dim = find_sequence_dim(layout, x) if isinstance(x, Tensor) else None
        if dim is None or not x.numel():
            return None
        given = None
        if isinstance(x, DTensor):
            given = Shard(dim)
            if (
                x.device_mesh != self._mesh
                or x.placements != (given,)
                or x.shape[dim] % self._world
            ):
                return None
        elif type(x) is not Tensor or x.device.type != self._mesh.device_type:
            return None
        linears = find_readers(module, self._mesh, x)
        if not linears:
            return None
        ranks = tp_group.get_tp_group(vars(linears[0])["_ovpatch_parallel"].group, x.device)
        how = _how(ranks, linears, x)
        later: list[LaterOperands] | None = None if how.schedule.computes_ahead else []
        ahead = [
            linear
            for linear in linears
            if can_share_node(linear, module if later is None else None)
        ]
        watch = GatherGuard()
        call = OpContext(
            how,
            ranks,
            dim=dim,
            weight_count=len(ahead),
            is_constant=not x.requires_grad,
            mesh=self._mesh,
            input_grad_placement=given,
            gathered_placement=_WHOLE,
            check_backward=watch.check_backward
            if x.requires_grad
            else None,  # else backward reads no weight
            deferred_outputs=later,
            trains_weights=any(linear.weight.requires_grad for linear in linears),
        )
        weights = [linear.weight for linear in ahead]
        *outputs, whole = run_operator(call, x, *weights, *[linear.bias for linear in ahead])
        PRECOMPUTED[id(whole)] = PrecomputedOutputs(whole, ahead, outputs, watch, dim, later)
        return whole


def _how(ranks: TPGroup, linears: Sequence[nn.Linear], x: Tensor) -> TPConfig:
    """Return the config of a gather, chosen by all linears that read it, which are the same on all ranks."""
    here, how = get_local(x), STATE.config
    if not isinstance(how.schedule, Auto):
        return how
    dtype = autocast_dtype(ranks.kind, x.dtype) or x.dtype
    features = [len(get_local(linear.weight)) for linear in linears]
    rows = here.numel() // here.shape[-1]
    schedule = how.schedule.choose_for_gather(
        ranks, here.device, rows, here.shape[-1], features, dtype
    )
    return dataclasses.replace(how, schedule=schedule)


def is_gather(layout: Any, desired: Any) -> bool:
    """Return whether preparing an argument means to gather it."""
    return (
        layout is not None and desired is not None and layout.is_shard() and desired.is_replicate()
    )


def find_readers(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> list[nn.Linear]:
    """Return a module's own linears that read its gathered input: the same on all ranks.

    They are cut by columns, over ``mesh``, and take a replicated input, of the features and the dtype of ``x``.
    """
    casts = autocast_dtype(x.device.type, x.dtype) is not None
    features, found = x.shape[-1], []
    for child in module._modules.values():
        parallel: TPLinear | None = vars(child).get("_ovpatch_parallel")
        if (
            parallel is None
            or not parallel.column
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
        of_dtype = weight.dtype == x.dtype or (casts and weight.dtype != torch.float64)
        if of_dtype and parallel.matches(weight, child.bias):
            found.append(child)
    return found


def _is_parameter(linear: nn.Linear) -> bool:
    """Return whether a weight is a parameter, and not computed at every look or call.

    ``DistributedDataParallel(device_mesh=)`` takes local tensors for parameters, and its first forward puts DTensors of
    them in their places, as plain attributes. These are views of the parameters by a node that keeps nothing, so they
    count as parameters. Another tensor there has been computed, as by ``weight_norm``, and its graph may be gone.
    """
    if "weight" in linear._parameters:
        return True
    weight = vars(linear).get("weight")
    if not isinstance(weight, DTensor):
        return False
    made = weight.grad_fn
    if made is None:  # it is not trained
        return True
    given = (node for node, _ in made.next_functions if node is not None)
    # Of a parameter, whose node is the only kind that has a variable.
    return type(made).__name__ == "_FromTorchTensorBackward" and all(
        hasattr(node, "variable") for node in given
    )


def can_share_node(linear: nn.Linear, parent: nn.Module | None) -> bool:
    """Return whether a linear's product can be one of the gather's node, as far as this rank knows.

    The input of ``parent`` is gathered, if the product is computed ahead; None if it is computed later.
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
    if torch.nn.modules.module._global_forward_pre_hooks or linear._forward_pre_hooks:
        return False
    replaced = (
        parent._backward_hooks or parent._backward_pre_hooks
    )  # the gathered tensor, by a view of it
    return not replaced and isinstance(
        next(reversed(parent._forward_pre_hooks.values())), SharedAllGather
    )
