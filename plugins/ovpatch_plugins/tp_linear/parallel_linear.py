"""A linear that is computed by the operators of tensor parallelism, and the options that all of them look up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel.style import ColwiseParallel, RowwiseParallel

from ovpatch.hookspecs import note_failures, refuse_option
from ovpatch.overlap.comm.consensus import check_consistent_once
from ovpatch.overlap.tensor_parallel import operators, tp_group
from ovpatch.overlap.tensor_parallel.layout import PLAIN, is_recorded
from ovpatch.overlap.tensor_parallel.operators import (
    OPERATORS,
    accumulate_weight_grad,
    multiply_weight_grad,
)
from ovpatch.overlap.tensor_parallel.schedule_table import DEFAULT_SCHEDULE
from ovpatch.overlap.tensor_parallel.schedules import find_schedule
from ovpatch.overlap.tensor_parallel.schedules.fused import Fused, find_fused_objection
from ovpatch.overlap.tensor_parallel.tp_autograd import OpContext, TPConfig, run_operator
from ovpatch_plugins.tp_linear.linear_plan import FEATURES, OpPlan, ShardedLinear, Style
from ovpatch_plugins.tp_linear.precomputed import claim_output
from ovpatch_plugins.tp_linear.tp_linear_options import OPTIONS
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

_REMEDY = (
    "Either ovpatch is not active there, or that rank does not build the same model. Call "
    "ovpatch.apply() with the "
    "same arguments on every rank before parallelize_module, and give every rank the same OVPATCH "
    "variables; "
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
    terms: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # all options, which must be the same on all ranks

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Set everything by the feature's options."""
        schedule = find_schedule(options["schedule"], options["chunks"], regathers=options["regather"])
        fuse = options["gradient_accumulation_fusion"]
        self.config = TPConfig(
            schedule, accumulate_weight_grad if fuse else multiply_weight_grad, options["regather"]
        )
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
    check_consistent_once(
        group, "tp_linear", tp_group.get_generation(), lambda: STATE.terms, remedy=_REMEDY
    )
    schedule = STATE.terms.get("schedule")
    if schedule == Fused.name and (reason := find_fused_objection(group, mesh.device_type)):
        refuse_option("tp_linear", OPTIONS, "schedule", schedule, reason)


class TPLinear(ShardedLinear):
    """How a style has cut one linear over a mesh of one dimension: by columns, its output features, or by rows.

    Stock gathers in a forward pre-hook and scatters in a forward hook. A linear that is taken over has neither. Where
    no operator applies, its forward calls the hooks' functions around the product of DTensors.
    """

    def __init__(self, column: bool, mesh: DeviceMesh, style: Style) -> None:
        super().__init__(column, mesh, style)
        # The class whose functions prepare inputs and outputs in stock PyTorch.
        self._stock: Any = ColwiseParallel if column else RowwiseParallel
        self._on_cpu = mesh.device_type == "cpu"
        self._group: dist.ProcessGroup | None = None
        self._era = -1  # in which the group has agreed
        self._clear_plans()

    def _clear_plans(self) -> None:
        self._known: Any = (None, None)  # the last layouts of weight and bias that matched
        self._plans: dict[
            int, OpPlan | None
        ] = {}  # for plain tensors, by their number of dimensions
        self._last: tuple[Any, OpPlan | None] = (
            None,
            None,
        )  # the last DTensor's layout and its plan

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Set the process group, whose ranks have agreed."""
        self._group, self._era = group, tp_group.get_generation()

    def __deepcopy__(self, memo: dict[int, Any]) -> TPLinear:
        return self  # it is never changed, and a mesh is not copied either

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_known": (None, None),
            "_group": None,
            "_plans": {},
            "_last": (None, None),
            "_era": -1,
        }

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
        return self._stock._prepare_output_fn(
            self.output_layouts, self.use_local_output, module, output, self.mesh
        )

    def forward(self, linear: nn.Linear, x: Any) -> Any:
        """Compute the linear."""
        if STATE.on:
            output = (
                self._compiled(linear, x)
                if torch.compiler.is_compiling()
                else self._eager(linear, x)
            )
            if output is not None:
                return output
        prepared = self._stock._prepare_input_fn(
            self.input_layouts, self.desired, linear, (x,), self.mesh
        )
        return self.finish_as_stock(
            linear, nn.functional.linear(prepared, linear.weight, linear.bias)
        )

    def _eager(self, linear: nn.Linear, x: Any) -> Any:
        """Return the output; None if stock has to compute it."""
        if (claimed := claim_output(x, linear)) is not None:
            return self._claimed(linear, claimed)
        if self._era != tp_group.get_generation():
            self._clear_plans()
        weight, bias = _params(linear)
        plan = (
            self._find_plan(x)
            if isinstance(x, Tensor) and not is_recorded() and self.matches(weight, bias)
            else None
        )
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
                is_constant=not needs,
                mesh=self.mesh,
                input_grad_placement=plan.given,
                output_placement=plan.returned,
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
            even = (
                spec.mesh == self.mesh
                and spec.placements == (Shard(cut),)
                and spec.shape[cut] % self._world == 0
            )
            if not even or not weight.is_floating_point():  # complex ones are untested
                return False
            along = (Shard(0),) if self.column else (Replicate(),)
            if other is not None and (other.mesh != self.mesh or other.placements != along):
                return False
            if not torch.compiler.is_compiling():
                self._known = spec, other
        return True

    def _takes(self, plan: OpPlan, x: Tensor) -> bool:
        """Return whether the plan's operator can compute a tensor of its layout."""
        if not x.numel() or (plan.operator == "linear_scatter" and x.shape[plan.dim] % self._world):
            return False
        return plan.given is not None or (x.get_device() < 0) is self._on_cpu  # stock moves it

    def _find_plan(self, x: Tensor) -> OpPlan | None:
        """Return the plan for a tensor's layout; None if stock has to compute it."""
        if torch.compiler.is_compiling():  # plans are not kept in a graph
            return self.plan_for_dtensor(x) if isinstance(x, DTensor) else self.plan_for_plain(x)
        if isinstance(x, DTensor):
            if self._last[0] is not x._spec:
                self._last = x._spec, self.plan_for_dtensor(x)
            return self._last[1]
        if type(x) not in PLAIN:
            return None
        dims = x.dim()
        if dims not in self._plans:
            self._plans[dims] = self.plan_for_plain(x)
        return self._plans[dims]

    def _claimed(self, linear: nn.Linear, output: Tensor) -> Any:
        """Return an output that was computed with a gather, as the style says."""
        features = Shard(output.dim() - 1)
        if self.use_local_output and self.output_layouts in ((FEATURES,), (features,)):
            return output
        return self.finish_as_stock(
            linear, DTensor.from_local(output, self.mesh, (features,), run_check=False)
        )


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
