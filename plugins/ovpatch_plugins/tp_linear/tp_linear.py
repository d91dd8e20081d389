"""How a linear is cut, which operator computes an input, and one all-gather for several linears.

That all-gather is computed together with the products of these linears.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel.style import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from ovpatch.hookspecs import note_failures, refuse_option
from ovpatch.overlap.comm.consensus import check_consistent_once
from ovpatch.overlap.tensor_parallel import operators, tp_group
from ovpatch.overlap.tensor_parallel.layout import PLAIN, find_sequence_dim, get_local, is_traced
from ovpatch.overlap.tensor_parallel.operators import OPERATORS, accumulate_weight_grad, multiply_weight_grad
from ovpatch.overlap.tensor_parallel.schedule_table import DEFAULT_SCHEDULE
from ovpatch.overlap.tensor_parallel.schedules import find_schedule
from ovpatch.overlap.tensor_parallel.schedules.autotuned import Auto
from ovpatch.overlap.tensor_parallel.schedules.fused import Fused, find_fused_objection
from ovpatch.overlap.tensor_parallel.tp_autograd import OpContext, TPConfig, run_operator
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup
from ovpatch.overlap.tensors.linear_ops import autocast_dtype
from ovpatch_plugins.tp_linear.precomputed import (
    PRECOMPUTED,
    GatherGuard,
    LaterOperands,
    PrecomputedOutputs,
    claim_output,
)
from ovpatch_plugins.tp_linear.tp_linear_options import OPTIONS
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

Style = ColwiseParallel | RowwiseParallel

_FEATURES = Shard(-1)

_REMEDY = (
    "Either ovpatch is not active there, or that rank does not build the same model. Call ovpatch.apply() with the "
    "same arguments on every rank before parallelize_module, and give every rank the same OVPATCH variables; "
    "OVPATCH_TP_LINEAR=0 on all ranks leaves linears to stock."
)


@dataclasses.dataclass
class State:
    """Settings that modules look up at every call."""

    on: bool = False  # whether the feature is on; if not, modules and their copies compute as stock
    config: TPConfig = dataclasses.field(
        default_factory=lambda: TPConfig(find_schedule(DEFAULT_SCHEDULE, 4))
    )  # how operators are computed
    shares: bool = True  # whether one gather for several linears is computed with their products
    compiles: bool = False  # whether compiled graphs contain the feature's operators
    terms: dict[str, Any] = dataclasses.field(default_factory=dict)  # all options, which must be the same on all ranks

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Set everything by the feature's options."""
        schedule = find_schedule(options["schedule"], options["chunks"], anew=options["regather"])
        fuse = options["gradient_accumulation_fusion"]
        self.config = TPConfig(schedule, accumulate_weight_grad if fuse else multiply_weight_grad, options["regather"])
        self.terms = dict(options)
        self.shares, self.compiles, self.on = options["shared_gather"], options["compiled"], True


STATE = State()


def agree_on_terms(mesh: DeviceMesh) -> None:
    """Have the ranks of a mesh agree on how linears compute, once per :func:`.tp_group.get_generation`.

    They do so when ``parallelize_module`` first cuts a linear over the group, where stock, too, needs all ranks; for
    models that were made parallel before ``ovpatch.apply()``, in the first forward. RankMismatchError if ranks differ;
    OptionError if they cannot use the kernels that the user wants.
    """
    group = mesh.get_group()
    check_consistent_once(group, "tp_linear", tp_group.get_generation(), lambda: STATE.terms, remedy=_REMEDY)
    schedule = STATE.terms.get("schedule")
    if schedule == Fused.name and (reason := find_fused_objection(group, mesh.device_type)):
        refuse_option("tp_linear", OPTIONS, "schedule", schedule, reason)


@dataclasses.dataclass(slots=True)
class _OpPlan:
    """How inputs of one layout are computed, decided once: to compare placements and find groups takes long."""

    operator: str  # a name of OPERATORS, which compilers understand better than an object
    dim: int  # the sequence dimension of input or output
    given: Placement | None  # the placement of the input's gradient if it is a DTensor
    returned: Placement | None  # the placement of the output if it is a DTensor
    finish: bool  # whether stock still has to redistribute the output
    calls: dict[bool, OpContext] = dataclasses.field(default_factory=dict)  # by whether the input needs a gradient


class TPLinear:
    """How a style has cut one linear over a mesh of one dimension: by columns, its output features, or by rows.

    Stock gathers in a forward pre-hook and scatters in a forward hook. A linear that is taken over has neither. Where
    no operator applies, its forward calls the hooks' functions around the product of DTensors.
    """

    def __init__(self, column: bool, mesh: DeviceMesh, style: Style) -> None:
        self.column, self.mesh = column, mesh
        self.input_layouts: tuple[Placement, ...] = style.input_layouts
        self.output_layouts: tuple[Placement, ...] = style.output_layouts
        self.use_local_output = style.use_local_output
        # The placements of the input in stock's product.
        self.desired: tuple[Placement, ...] = (Replicate(),) if column else (_FEATURES,)
        # Whether the style takes an input that all ranks have.
        self.takes_replicated = self.input_layouts == (Replicate(),)
        self._stock: Any = ColwiseParallel if column else RowwiseParallel  # whose functions are stock's
        self._world, self._on_cpu = mesh.size(), mesh.device_type == "cpu"
        self._group: dist.ProcessGroup | None = None
        self._era = -1  # in which the group has agreed
        self._clear_plans()

    def _clear_plans(self) -> None:
        self._known: Any = (None, None)  # the last layouts of weight and bias that matched
        self._plans: dict[int, _OpPlan | None] = {}  # for plain tensors, by their number of dimensions
        self._last: tuple[Any, _OpPlan | None] = (None, None)  # the last DTensor's layout and its plan

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Set the process group, whose ranks have agreed."""
        self._group, self._era = group, tp_group.get_generation()

    def __deepcopy__(self, memo: dict[int, Any]) -> TPLinear:
        return self  # it is never changed, and a mesh is not copied either

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": (None, None), "_group": None, "_plans": {}, "_last": (None, None), "_era": -1}

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which the linear is cut, which have agreed on how to compute."""
        if torch.compiler.is_compiling():
            # The ranks agree when the linear is cut, or in an eager forward. A graph would write the generation.
            return self.mesh.get_group() if self._group is None else self._group
        if self._group is None or self._era != tp_group.get_generation():
            with note_failures("tp_linear", "the first forward of a parallel linear"):
                agree_on_terms(self.mesh)
            group = self.mesh.get_group()
            self.set_group(group)
            return group
        return self._group

    def finish_as_stock(self, module: nn.Module, output: Any) -> Any:
        """Redistribute the output as stock's forward hook does."""
        return self._stock._prepare_output_fn(self.output_layouts, self.use_local_output, module, output, self.mesh)

    def forward(self, linear: nn.Linear, x: Any) -> Any:
        """Compute the linear."""
        if STATE.on:
            output = self._compiled(linear, x) if torch.compiler.is_compiling() else self._eager(linear, x)
            if output is not None:
                return output
        prepared = self._stock._prepare_input_fn(self.input_layouts, self.desired, linear, (x,), self.mesh)
        return self.finish_as_stock(linear, nn.functional.linear(prepared, linear.weight, linear.bias))

    def _eager(self, linear: nn.Linear, x: Any) -> Any:
        """Return the output; None if stock has to compute it."""
        if (claimed := claim_output(x, linear)) is not None:
            return self._claimed(linear, claimed)
        if self._era != tp_group.get_generation():
            self._clear_plans()
        weight, bias = _params(linear)
        plan = self._find_plan(x) if isinstance(x, Tensor) and not is_traced() and self.matches(weight, bias) else None
        if plan is None or not self._takes(plan, x):
            COUNTERS.stock_calls += 1
            return None
        needs = x.requires_grad
        call = plan.calls.get(needs)
        if call is None:
            call = plan.calls[needs] = OpContext(
                STATE.config,
                tp_group.get_tp_group(self.group, x.device),
                OPERATORS[plan.operator],
                plan.dim,
                constant=not needs,
                mesh=self.mesh,
                given=plan.given,
                returned=plan.returned,
            )
        COUNTERS.calls += 1
        output = run_operator(call, x, weight, bias)
        if plan.operator == "gather_linear":
            output = output[0]
        return self.finish_as_stock(linear, output) if plan.finish else output

    def _compiled(self, linear: Any, x: Any) -> Any:
        """Return the output, as part of a graph, or None if stock has to compute it."""
        weight, bias = linear.weight, linear.bias
        if not STATE.compiles or not isinstance(x, Tensor) or not self.matches(weight, bias):
            return None
        plan = self._find_plan(x)
        if plan is None or not self._takes(plan, x):
            return None
        if self.column and plan.returned is not None:
            return None  # as a graph's output, torch 2.13 fails to compile it for a second shape
        if isinstance(x, DTensor):
            # A replicated input's gradient is a term of a sum on each rank. Taken for replicated, it would lose the
            # other ranks' terms, silently.
            x = x.to_local(grad_placements=[Partial()] if plan.operator == "local_linear" else None)
        output = operators.compute_linear(
            plan.operator,
            x,
            weight.to_local(),
            None if bias is None else bias.to_local(),
            self.group,
            plan.dim,
            STATE.config.schedule,
        )
        if plan.returned is not None:
            output = DTensor.from_local(output, self.mesh, (plan.returned,), run_check=False)
        return self.finish_as_stock(linear, output) if plan.finish else output

    def matches(self, weight: Any, bias: Any) -> bool:
        """Return whether weight and bias are as the style has left them, and cut evenly."""
        spec, other = getattr(weight, "_spec", None), getattr(bias, "_spec", None)
        if spec is None or (bias is None) is not (other is None):
            return False
        if spec is not self._known[0] or other is not self._known[1]:
            cut = 0 if self.column else 1
            even = spec.mesh == self.mesh and spec.placements == (Shard(cut),) and spec.shape[cut] % self._world == 0
            if not even or not weight.is_floating_point():  # complex ones are untested
                return False
            along = (Shard(0),) if self.column else (Replicate(),)
            if other is not None and (other.mesh != self.mesh or other.placements != along):
                return False
            if not torch.compiler.is_compiling():
                self._known = spec, other
        return True

    def _takes(self, plan: _OpPlan, x: Tensor) -> bool:
        """Return whether the plan's operator can compute a tensor of its layout."""
        if not x.numel() or (plan.operator == "linear_scatter" and x.shape[plan.dim] % self._world):
            return False
        return plan.given is not None or (x.get_device() < 0) is self._on_cpu  # stock moves it

    def _find_plan(self, x: Tensor) -> _OpPlan | None:
        """Return the plan for a tensor's layout; None if stock has to compute it."""
        if torch.compiler.is_compiling():  # plans are not kept in a graph
            return self._plan_for_dtensor(x) if isinstance(x, DTensor) else self._plan_for_plain(x)
        if isinstance(x, DTensor):
            if self._last[0] is not x._spec:
                self._last = x._spec, self._plan_for_dtensor(x)
            return self._last[1]
        if type(x) not in PLAIN:
            return None
        dims = x.dim()
        if dims not in self._plans:
            self._plans[dims] = self._plan_for_plain(x)
        return self._plans[dims]

    def _plan_for_plain(self, x: Tensor) -> _OpPlan | None:
        if self.column:
            return self._column_plan(x, self.input_layouts[0], None)
        if self.input_layouts != self.desired and self.input_layouts != (Shard(x.dim() - 1),):
            return None
        return self._row_plan(x, None)

    def _plan_for_dtensor(self, x: DTensor) -> _OpPlan | None:
        if x.device_mesh != self.mesh:
            return None
        if not self.column:
            features = (Shard(x.dim() - 1),)
            as_said = self.input_layouts in (self.desired, features)
            return self._row_plan(x, features[0]) if as_said and x.placements == features else None
        if x.placements != self.input_layouts:
            return None  # stock reinterprets or redistributes it
        if x.placements == self.desired:
            return self._column_plan(x, x.placements[0], Partial())
        placement = x.placements[0]
        if isinstance(placement, Shard) and x.shape[placement.dim] % self._world:
            return None
        return self._column_plan(x, placement, placement)

    def _column_plan(self, x: Tensor, layout: Placement, given: Placement | None) -> _OpPlan | None:
        features = Shard(x.dim() - 1)
        as_computed = self.output_layouts in ((_FEATURES,), (features,))
        local = as_computed and self.use_local_output
        returned, finish = None if local else features, not as_computed
        if layout.is_replicate():
            sums = given is None or not given.is_partial()
            return _OpPlan("replicated_linear" if sums else "local_linear", 0, given, returned, finish)
        dim = find_sequence_dim(layout, x)
        return None if dim is None else _OpPlan("gather_linear", dim, given, returned, finish)

    def _row_plan(self, x: Tensor, given: Placement | None) -> _OpPlan | None:
        layout = self.output_layouts[0]
        if layout.is_replicate():
            return _OpPlan("linear_reduce", 0, given, None if self.use_local_output else layout, False)
        dim = find_sequence_dim(layout, x)
        if dim is None:
            return None
        return _OpPlan("linear_scatter", dim, given, None if self.use_local_output else Shard(dim), False)

    def _claimed(self, linear: nn.Linear, output: Tensor) -> Any:
        """Return an output that was computed with a gather, as the style says."""
        features = Shard(output.dim() - 1)
        if self.use_local_output and self.output_layouts in ((_FEATURES,), (features,)):
            return output
        return self.finish_as_stock(linear, DTensor.from_local(output, self.mesh, (features,), run_check=False))


class Linear(nn.Linear):
    """The class of an ``nn.Linear`` that is taken over, as long as the feature is on.

    An instance attribute ``forward`` would break copying and pickling; a patch of ``nn.Linear.forward`` would concern
    every linear. A class of the same name, in a module, keeps ``isinstance``, ``repr``, ``deepcopy``, pickling and
    FSDP2's own change of classes.
    """

    _ovpatch_parallel: TPLinear
    _ovpatch_delays_wgrad = True  # DELAYS_WGRAD

    def forward(self, input: Tensor) -> Any:
        """Return what stock returns: a local tensor, or a DTensor if the style says so."""
        return self._ovpatch_parallel.forward(self, input)

    forward.__annotations__ = dict(nn.Linear.forward.__annotations__)  # for inspect.signature


def _params(linear: nn.Linear) -> tuple[Any, Any]:
    params = linear._parameters
    if "weight" in params and "bias" in params:  # spares nn.Module.__getattr__
        return params["weight"], params["bias"]
    return linear.weight, linear.bias


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

    def __init__(self, stock: Callable[..., Any], style: PrepareModuleInput, mesh: DeviceMesh) -> None:
        self.stock, self._style, self._mesh, self._world = stock, style, mesh, mesh.size()
        layouts = style.input_layouts or ()
        self._is_alone = len(layouts) == 1 and is_gather(layouts[0], (style.desired_input_layouts or (None,))[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedAllGather:
        return self  # it is never changed

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Prepare the inputs; ``args`` are the positional ones and, if the style wants them, those by keyword."""
        if not STATE.on or not STATE.shares or torch.compiler.is_compiling():
            return self.stock(module, *args)
        if self._is_alone and len(args) == 1 and len(args[0]) == 1:  # the usual case
            layouts: Any = self._style.input_layouts, self._style.desired_input_layouts
            return (self._argument(module, args[0][0], self._mesh, layouts[0][0], layouts[1][0]),)
        style: Any = copy.copy(self._style)  # stock walks the arguments, and asks this copy for each
        style._prepare_input_arg = functools.partial(self._argument, module)
        prepare = style._prepare_input_kwarg_fn if len(args) > 1 else style._prepare_input_fn
        return prepare(*args, self._mesh)

    def _argument(self, module: nn.Module, x: Any, mesh: DeviceMesh, layout: Any, desired: Any) -> Any:
        if is_gather(layout, desired):
            found = self._gathered(module, x, layout)
            if found is not None:
                return found
        return self._style._prepare_input_arg(x, mesh, layout, desired)

    def _gathered(self, module: nn.Module, x: Any, layout: Any) -> Any:
        """Return the gathered input, whose products wait for their linears, or None if stock has to gather."""
        if is_traced() or torch.is_inference_mode_enabled():  # where no version tells that a tensor has changed
            return None
        dim = find_sequence_dim(layout, x) if isinstance(x, Tensor) else None
        if dim is None or not x.numel():
            return None
        given = None
        if isinstance(x, DTensor):
            given = Shard(dim)
            if x.device_mesh != self._mesh or x.placements != (given,) or x.shape[dim] % self._world:
                return None
        elif type(x) is not Tensor or x.device.type != self._mesh.device_type:
            return None
        linears = find_readers(module, self._mesh, x)
        if not linears:
            return None
        ranks = tp_group.get_tp_group(vars(linears[0])["_ovpatch_parallel"].group, x.device)
        how = _how(ranks, linears, x)
        later: list[LaterOperands] | None = None if how.schedule.ahead else []
        ahead = [linear for linear in linears if can_share_node(linear, module if later is None else None)]
        watch = GatherGuard()
        call = OpContext(
            how,
            ranks,
            dim=dim,
            count=len(ahead),
            constant=not x.requires_grad,
            mesh=self._mesh,
            given=given,
            whole=_WHOLE,
            check=watch.check_backward if x.requires_grad else None,  # else backward reads no weight
            later=later,
            trains=any(linear.weight.requires_grad for linear in linears),
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
    schedule = how.schedule.choose_for_gather(ranks, here.device, rows, here.shape[-1], features, dtype)
    return dataclasses.replace(how, schedule=schedule)


def is_gather(layout: Any, desired: Any) -> bool:
    """Return whether preparing an argument means to gather it."""
    return layout is not None and desired is not None and layout.is_shard() and desired.is_replicate()


def find_readers(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> list[nn.Linear]:
    """Return a module's own linears that read its gathered input: the same on all ranks.

    They are cut by columns, over ``mesh``, and take a replicated input, of the features and the dtype of ``x``.
    """
    casts = autocast_dtype(x.device.type, x.dtype) is not None
    features, found = x.shape[-1], []
    for child in module._modules.values():
        parallel: TPLinear | None = vars(child).get("_ovpatch_parallel")
        if parallel is None or not parallel.column or not parallel.takes_replicated or parallel.mesh != mesh:
            continue
        if not isinstance(child, nn.Linear) or not _is_parameter(child) or child.in_features != features:
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
    return type(made).__name__ == "_FromTorchTensorBackward" and all(hasattr(node, "variable") for node in given)


def can_share_node(linear: nn.Linear, parent: nn.Module | None) -> bool:
    """Return whether a linear's product can be one of the gather's node, as far as this rank knows.

    The input of ``parent`` is gathered, if the product is computed ahead; None if it is computed later.
    """
    weight, bias = linear.weight, linear.bias
    if weight.is_inference() or weight._backward_hooks or (bias is not None and bias._backward_hooks):
        return False
    if parent is None:
        return True
    if torch.nn.modules.module._global_forward_pre_hooks or linear._forward_pre_hooks:
        return False
    replaced = parent._backward_hooks or parent._backward_pre_hooks  # the gathered tensor, by a view of it
    return not replaced and isinstance(next(reversed(parent._forward_pre_hooks.values())), SharedAllGather)
