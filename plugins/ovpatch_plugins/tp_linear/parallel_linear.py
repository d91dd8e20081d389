"""A linear that the operators of tensor parallelism compute, and the settings that all of these linears read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.style import ColwiseParallel, RowwiseParallel

from ovpatch.hookspecs import note_failures, refuse_option
from ovpatch.overlap.comm.consensus import check_consistent_once
from ovpatch.overlap.tensor_parallel import tp_group
from ovpatch.overlap.tensor_parallel.layout import PLAIN, is_recorded
from ovpatch.overlap.tensor_parallel.operators import (
    OPERATORS,
    accumulate_weight_grad,
    multiply_weight_grad,
)
from ovpatch.overlap.tensor_parallel.schedule_table import DEFAULT_SCHEDULE
from ovpatch.overlap.tensor_parallel.schedules import find_schedule, find_schedule_objection
from ovpatch.overlap.tensor_parallel.tp_autograd import OpContext, TPConfig, run_operator
from ovpatch_plugins.tp_linear.linear_plan import FEATURES, OpPlan, ShardedLinear, Style
from ovpatch_plugins.tp_linear.precomputed import claim_output
from ovpatch_plugins.tp_linear.tp_linear_options import OPTIONS
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

_REMEDY = (
    "Either ovpatch is not active there, or that rank does not build the same model. Call ovpatch.apply() with the "
    "same arguments on every rank before parallelize_module, and give every rank the same OVPATCH variables; or set "
    "OVPATCH_TP_LINEAR=0 on all ranks to have stock PyTorch compute linears."
)


@dataclasses.dataclass
class State:
    """The settings that modules read at every call.

    Attributes:
        is_on: Whether the feature is on. Otherwise modules and their copies compute as stock PyTorch.
        config: The settings of operators.
        shares_gathers: Whether one gather for several linears is computed together with their GEMMs.
        terms: All options, which must be the same on all ranks.
    """

    is_on: bool = False
    config: TPConfig = dataclasses.field(
        default_factory=lambda: TPConfig(find_schedule(DEFAULT_SCHEDULE, 4))
    )
    shares_gathers: bool = True
    terms: dict[str, Any] = dataclasses.field(default_factory=dict)

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Set all attributes from the feature's options."""
        schedule = find_schedule(
            options["schedule"], options["chunks"], regathers=options["regather"]
        )
        fuses = options["gradient_accumulation_fusion"]
        self.config = TPConfig(
            schedule, accumulate_weight_grad if fuses else multiply_weight_grad, options["regather"]
        )
        self.terms = dict(options)
        self.shares_gathers = options["shared_gather"]
        self.is_on = True


STATE = State()


def agree_on_terms(mesh: DeviceMesh) -> None:
    """Make the ranks of a mesh agree on the settings, once per :func:`.tp_group.get_generation`.

    They agree when ``parallelize_module`` first shards a linear over the group, because stock PyTorch needs all ranks
    there as well. Models that were parallelized before ``ovpatch.apply()`` agree in their first forward.

    Raises:
        RankMismatchError: The settings of ranks differ.
        OptionError: The ranks cannot run the schedule that the user has chosen.
    """
    group = mesh.get_group()
    check_consistent_once(
        group, "tp_linear", tp_group.get_generation(), lambda: STATE.terms, remedy=_REMEDY
    )
    schedule = STATE.terms["schedule"]
    if reason := find_schedule_objection(schedule, group, mesh.device_type):
        refuse_option("tp_linear", OPTIONS, "schedule", schedule, reason)
    tp_group.record_agreement(group)


class TPLinear(ShardedLinear):
    """The computation of one linear that a style has sharded over a mesh of one dimension, by columns or by rows.

    Stock PyTorch gathers in a forward pre-hook and scatters in a forward hook. An attached linear has neither hook. If
    no operator applies, its forward calls the functions of these hooks around the GEMM of DTensors.
    """

    def __init__(self, is_column: bool, mesh: DeviceMesh, style: Style) -> None:
        super().__init__(is_column, mesh, style)
        # The class whose functions prepare inputs and outputs in stock PyTorch.
        self._style_class: Any = ColwiseParallel if is_column else RowwiseParallel
        self._is_on_cpu = mesh.device_type == "cpu"
        self._group: dist.ProcessGroup | None = None
        # The generation in which the ranks of the group agreed.
        self._generation = -1
        self._clear_plans()

    def _clear_plans(self) -> None:
        # The last layouts of weight and bias that matched.
        self._matched_specs: Any = (None, None)
        # The plans for plain tensors, by the number of dimensions.
        self._plans_by_dims: dict[int, OpPlan | None] = {}
        # The layout of the last DTensor, and its plan.
        self._last_dtensor_plan: tuple[Any, OpPlan | None] = (None, None)

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Set the process group, whose ranks have agreed."""
        self._group = group
        self._generation = tp_group.get_generation()

    def __deepcopy__(self, memo: dict[int, Any]) -> TPLinear:
        # The layouts never change, and a copied module stays on the same mesh.
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be pickled, and plans refer to them.
        return self.__dict__ | {
            "_matched_specs": (None, None),
            "_group": None,
            "_plans_by_dims": {},
            "_last_dtensor_plan": (None, None),
            "_generation": -1,
        }

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which the linear is sharded, after they have agreed on the settings."""
        if self._group is None or self._generation != tp_group.get_generation():
            with note_failures("tp_linear", "the first forward of a parallel linear"):
                agree_on_terms(self.mesh)
            group = self.mesh.get_group()
            self.set_group(group)
            return group
        return self._group

    def finish_as_stock(self, module: nn.Module, output: Any) -> Any:
        """Redistribute the output as the forward hook of stock PyTorch does."""
        return self._style_class._prepare_output_fn(
            self.output_layouts, self.use_local_output, module, output, self.mesh
        )

    def forward(self, linear: nn.Linear, x: Any) -> Any:
        """Compute the linear."""
        # A compiler gets the operations of stock PyTorch. With option `compiled`, a pass fuses them in its graph.
        if STATE.is_on and not torch.compiler.is_compiling():
            output = self._compute_eager(linear, x)
            if output is not None:
                return output
        prepared = self._style_class._prepare_input_fn(
            self.input_layouts, self.gemm_layouts, linear, (x,), self.mesh
        )
        return self.finish_as_stock(
            linear, nn.functional.linear(prepared, linear.weight, linear.bias)
        )

    def _compute_eager(self, linear: nn.Linear, x: Any) -> Any:
        """Return the output; None if stock PyTorch must compute it."""
        if (claimed := claim_output(x, linear)) is not None:
            return self._finish_claimed(linear, claimed)
        # The contexts of plans have the settings and the process group.
        if self._generation != tp_group.get_generation():
            self._clear_plans()
        weight, bias = _read_params(linear)
        plan = (
            self._find_plan(x)
            if isinstance(x, Tensor) and not is_recorded() and self.matches(weight, bias)
            else None
        )
        if plan is None or not self._can_compute(plan, x):
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
                input_grad_placement=plan.input_grad_placement,
                output_placement=plan.output_placement,
            )
        COUNTERS.calls += 1
        output = run_operator(call, x, weight, bias)
        # This operator returns an output for each of its linears.
        if plan.operator == "gather_linear":
            output = output[0]
        return self.finish_as_stock(linear, output) if plan.should_redistribute else output

    def matches(self, weight: Any, bias: Any) -> bool:
        """Return whether weight and bias are as the style has left them, and evenly sharded."""
        weight_spec, bias_spec = getattr(weight, "_spec", None), getattr(bias, "_spec", None)
        if weight_spec is None or (bias is None) is not (bias_spec is None):
            return False
        if weight_spec is not self._matched_specs[0] or bias_spec is not self._matched_specs[1]:
            sharded_dim = 0 if self.is_column else 1
            is_even = (
                weight_spec.mesh == self.mesh
                and weight_spec.placements == (Shard(sharded_dim),)
                and weight_spec.shape[sharded_dim] % self._world == 0
            )
            # The operators are not tested with complex numbers.
            if not is_even or not weight.is_floating_point():
                return False
            bias_placements = (Shard(0),) if self.is_column else (Replicate(),)
            if bias_spec is not None and (
                bias_spec.mesh != self.mesh or bias_spec.placements != bias_placements
            ):
                return False
            self._matched_specs = weight_spec, bias_spec
        return True

    def _can_compute(self, plan: OpPlan, x: Tensor) -> bool:
        """Return whether the plan's operator can compute a tensor of its layout."""
        # Ranks cannot share the rows of an empty or an uneven sequence.
        if not x.numel() or (plan.operator == "linear_scatter" and x.shape[plan.dim] % self._world):
            return False
        # Stock PyTorch moves a plain tensor on another device.
        return plan.input_grad_placement is not None or (x.get_device() < 0) is self._is_on_cpu

    def _find_plan(self, x: Tensor) -> OpPlan | None:
        """Return the plan for a tensor's layout; None if stock PyTorch must compute it."""
        if isinstance(x, DTensor):
            if self._last_dtensor_plan[0] is not x._spec:
                self._last_dtensor_plan = x._spec, self.plan_for_dtensor(x)
            return self._last_dtensor_plan[1]
        if type(x) not in PLAIN:
            return None
        dims = x.dim()
        if dims not in self._plans_by_dims:
            self._plans_by_dims[dims] = self.plan_for_plain(x)
        return self._plans_by_dims[dims]

    def _finish_claimed(self, linear: nn.Linear, output: Tensor) -> Any:
        """Return an output that was computed with a gather, in the layout of the style."""
        features = Shard(output.dim() - 1)
        if self.use_local_output and self.output_layouts in ((FEATURES,), (features,)):
            return output
        return self.finish_as_stock(
            linear, DTensor.from_local(output, self.mesh, (features,), run_check=False)
        )


class Linear(nn.Linear):
    """The class of an attached ``nn.Linear``, as long as the feature is on.

    An instance attribute ``forward`` would break copying and pickling. A patch of ``nn.Linear.forward`` would affect
    every linear. A class of the same name, in a module, preserves ``isinstance``, ``repr``, ``deepcopy``, pickling and
    FSDP2's own change of classes.
    """

    _ovpatch_parallel: TPLinear
    # The attribute that DELAYS_WGRAD names: operators offer the GEMMs of weight gradients to pipelines.
    _ovpatch_delays_wgrad = True
    # The attribute that GRADS_ARE_SHARDS names. Linears that stock PyTorch computes get shards, too.
    _ovpatch_grads_are_shards = True

    def forward(self, input: Tensor) -> Any:
        """Return the output of stock PyTorch: a local tensor, or a DTensor if the style wants one."""
        return self._ovpatch_parallel.forward(self, input)

    # inspect.signature() must show the annotations of nn.Linear.
    forward.__annotations__ = dict(nn.Linear.forward.__annotations__)


def _read_params(linear: nn.Linear) -> tuple[Any, Any]:
    params = linear._parameters
    # A read through nn.Module.__getattr__ takes more host time.
    if "weight" in params and "bias" in params:
        return params["weight"], params["bias"]
    return linear.weight, linear.bias
