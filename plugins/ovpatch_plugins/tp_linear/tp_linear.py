"""What a taken-over linear knows of how it is parallel, and the choice between our operators and stock's path.

[Note: stock's path] Stock gathers in a forward pre-hook and scatters in a forward hook. Taken over, a linear has
neither; where our operators do not apply, its forward calls what the hooks called, in between the product of
DTensors.

[Note: decided once] Comparing placements, and looking up groups, takes microseconds. So what follows from an input's
layout is decided once and kept as a :class:`_OpPlan`; what depends on the very tensors is asked at each call.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel.style import ColwiseParallel, RowwiseParallel

from ovpatch.overlap.comm.consensus import check_consistent_once
from ovpatch_plugins.tp_linear import custom_ops
from ovpatch_plugins.tp_linear import tp_group as wires_of
from ovpatch_plugins.tp_linear.autograd import FUNCTIONS, run
from ovpatch_plugins.tp_linear.config import STATE, OpContext
from ovpatch_plugins.tp_linear.layout import sequence_dim, traced
from ovpatch_plugins.tp_linear.report import COUNTERS
from ovpatch_plugins.tp_linear.shared_all_gather import claim

Style = ColwiseParallel | RowwiseParallel

_FEATURES = Shard(-1)
_PLAIN = (Tensor, nn.Parameter)

_REMEDY = (
    "Either ovpatch is not active there, or that rank does not build the same model. Call ovpatch.apply() with the "
    "same arguments on every rank before parallelize_module, and give every rank the same OVPATCH variables; "
    "OVPATCH_TP_LINEAR=0 on all ranks leaves linears to stock."
)


def agree_on_terms(group: dist.ProcessGroup) -> None:
    """Have the ranks of a group agree on how linears compute, once per :func:`.tp_group.generation`.

    They do so when ``parallelize_module`` first cuts a linear over the group, where stock, too, needs all ranks; for
    models that were made parallel before ``ovpatch.apply()``, in the first forward.

    Raises:
        RankMismatchError: Ranks differ, or a rank did not answer in time.
    """
    check_consistent_once(group, "tp_linear", wires_of.generation(), _terms, remedy=_REMEDY)


def _terms() -> dict[str, Any]:
    return {"version of ovpatch": importlib.metadata.version("ovpatch"), **STATE.terms}


class _OpPlan:
    """How inputs of one layout are computed.

    Args:
        operator: Its name, which compilers understand better than a function: see :data:`FUNCTIONS`.
        dim: Which dimension of the input, or of the output, is the sequence.
        given: How the gradient of an input is laid out that is a DTensor.
        returned: How the operator's output is laid out, if it is to be a DTensor.
        finish: Whether stock still has to lay the output out.
    """

    __slots__ = ("calls", "dim", "finish", "given", "operator", "returned")

    def __init__(
        self, operator: str, dim: int, given: Placement | None, returned: Placement | None, finish: bool
    ) -> None:
        self.operator, self.dim, self.given, self.returned, self.finish = operator, dim, given, returned, finish
        self.calls: dict[bool, OpContext] = {}  # by whether the input needs a gradient

    @property
    def partial(self) -> bool:
        """Whether the input's gradient is this rank's term of a sum."""
        return self.given is not None and self.given.is_partial()


class TPLinear:
    """How one linear is cut.

    Args:
        column: Whether its output features are cut; else its input features are.
        mesh: Over which it is cut, of one dimension.
        style: The style that cut it.

    Attributes:
        desired: How stock lays the input out for the product.
        takes_replicated: Whether the style takes an input that all ranks have.
    """

    def __init__(self, column: bool, mesh: DeviceMesh, style: Style) -> None:
        self.column, self.mesh = column, mesh
        self.input_layouts: tuple[Placement, ...] = style.input_layouts
        self.output_layouts: tuple[Placement, ...] = style.output_layouts
        self.use_local_output = style.use_local_output
        self.desired: tuple[Placement, ...] = (Replicate(),) if column else (_FEATURES,)
        self.takes_replicated = self.input_layouts == (Replicate(),)
        self._world, self._on_cpu = mesh.size(), mesh.device_type == "cpu"
        self._group: dist.ProcessGroup | None = None
        self._era = -1  # when the group agreed
        self._forget()

    def _forget(self) -> None:
        self._known: Any = (None, None)  # the layouts of weight and bias that were found right last
        self._ways: dict[int, _OpPlan | None] = {}  # of plain tensors, by their number of dimensions
        self._last: tuple[Any, _OpPlan | None] = (None, None)  # the last DTensor's layout, and its way

    def has_agreed(self, group: dist.ProcessGroup) -> None:
        """Be told the ranks over which the linear is cut."""
        self._group, self._era = group, wires_of.generation()

    def __deepcopy__(self, memo: dict[int, Any]) -> TPLinear:
        return self  # never changed, and a mesh is not copied either

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": (None, None), "_group": None, "_ways": {}, "_last": (None, None), "_era": -1}

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which the linear is cut, which have agreed on how to compute."""
        if self._group is None or self._era != wires_of.generation():
            group = self.mesh.get_group()
            if torch.compiler.is_compiling():
                return group  # nothing to trace; ranks agreed when the linear was cut, or in an eager forward
            agree_on_terms(group)
            self.has_agreed(group)
            return group
        return self._group

    # ---------------------------------------------------------------- stock

    def stock_input(self, module: nn.Module, inputs: Any) -> Any:
        """Do what stock's forward pre-hook does."""
        style: Any = ColwiseParallel if self.column else RowwiseParallel
        return style._prepare_input_fn(self.input_layouts, self.desired, module, inputs, self.mesh)

    def stock_output(self, module: nn.Module, output: Any) -> Any:
        """Do what stock's forward hook does."""
        style: Any = ColwiseParallel if self.column else RowwiseParallel
        return style._prepare_output_fn(self.output_layouts, self.use_local_output, module, output, self.mesh)

    def stock(self, linear: nn.Linear, x: Any) -> Any:
        """Compute the linear as stock does."""
        prepared = self.stock_input(linear, (x,))
        return self.stock_output(linear, nn.functional.linear(prepared, linear.weight, linear.bias))

    # ---------------------------------------------------------------- ours

    def forward(self, linear: nn.Linear, x: Any) -> Any:
        """Compute the linear."""
        if STATE.on:
            output = self._compiled(linear, x) if torch.compiler.is_compiling() else self._eager(linear, x)
            if output is not None:
                return output
        return self.stock(linear, x)

    def _eager(self, linear: nn.Linear, x: Any) -> Any:
        """Return the output, or None if stock has to compute it."""
        if (claimed := claim(x, linear)) is not None:
            return self._claimed(linear, claimed)
        if self._era != wires_of.generation():
            self._forget()
        weight, bias = _params(linear)
        way = self._way(x) if isinstance(x, Tensor) and not traced() and self.fits(weight, bias) else None
        if way is None or not self._takes(way, x):
            COUNTERS.stock_calls += 1
            return None
        needs = x.requires_grad
        call = way.calls.get(needs)
        if call is None:
            call = way.calls[needs] = OpContext(
                STATE.how,
                wires_of.of(self.group, x.device),
                way.dim,
                constant=not needs,
                mesh=self.mesh,
                given=way.given,
                returned=way.returned,
            )
        COUNTERS.calls += 1
        output = run(FUNCTIONS[way.operator], call, x, weight, bias)
        if way.operator == "gather_linear":
            output = output[0]
        return self.stock_output(linear, output) if way.finish else output

    def _compiled(self, linear: Any, x: Any) -> Any:
        """Return the output, as part of a graph, or None if stock has to compute it."""
        weight, bias = linear.weight, linear.bias
        if not STATE.compiles or not isinstance(x, Tensor) or not self.fits(weight, bias):
            return None
        way = self._way(x)
        if way is None or not self._takes(way, x):
            return None
        if self.column and way.returned is not None:
            return None  # torch 2.13 fails to compile it for a second shape if it is an output of the graph
        if isinstance(x, DTensor):
            # [Note: a replicated input's gradient] is a term of a sum on each rank. Taken for replicated, it would lose
            # the other ranks' terms, silently.
            x = x.to_local(grad_placements=[Partial()] if way.partial else None)
        output = custom_ops.run(
            way.operator,
            x,
            weight.to_local(),
            None if bias is None else bias.to_local(),
            self.group,
            way.dim,
            STATE.how.schedule,
            partial=way.partial,
        )
        if way.returned is not None:
            output = DTensor.from_local(output, self.mesh, (way.returned,), run_check=False)
        return self.stock_output(linear, output) if way.finish else output

    def fits(self, weight: Any, bias: Any) -> bool:
        """Tell whether weight and bias are as the style left them, cut evenly."""
        spec, other = getattr(weight, "_spec", None), getattr(bias, "_spec", None)
        if spec is None or (bias is None) is not (other is None):
            return False
        if spec is not self._known[0] or other is not self._known[1]:
            cut = 0 if self.column else 1
            even = spec.mesh == self.mesh and spec.placements == (Shard(cut),) and spec.shape[cut] % self._world == 0
            if not even or not weight.is_floating_point():  # nobody has tested complex ones
                return False
            along = (Shard(0),) if self.column else (Replicate(),)
            if other is not None and (other.mesh != self.mesh or other.placements != along):
                return False
            if not torch.compiler.is_compiling():
                self._known = spec, other
        return True

    def _takes(self, way: _OpPlan, x: Tensor) -> bool:
        """Tell whether a tensor of a known layout can be computed."""
        if not x.numel() or (way.operator == "linear_scatter" and x.shape[way.dim] % self._world):
            return False
        return way.given is not None or (x.get_device() < 0) is self._on_cpu  # stock moves it

    def _way(self, x: Tensor) -> _OpPlan | None:
        """Return how a tensor's layout is computed, or None if stock has to."""
        if torch.compiler.is_compiling():  # where nothing is to be kept
            return self._way_of_dtensor(x) if isinstance(x, DTensor) else self._way_of_plain(x)
        if isinstance(x, DTensor):
            if self._last[0] is not x._spec:
                self._last = x._spec, self._way_of_dtensor(x)
            return self._last[1]
        if type(x) not in _PLAIN:
            return None
        dims = x.dim()
        if dims not in self._ways:
            self._ways[dims] = self._way_of_plain(x)
        return self._ways[dims]

    def _way_of_plain(self, x: Tensor) -> _OpPlan | None:
        if self.column:
            return self._column_way(x, self.input_layouts[0], None)
        if self.input_layouts != self.desired and self.input_layouts != (Shard(x.dim() - 1),):
            return None
        return self._row_way(x, None)

    def _way_of_dtensor(self, x: DTensor) -> _OpPlan | None:
        if x.device_mesh != self.mesh:
            return None
        if not self.column:
            features = (Shard(x.dim() - 1),)
            as_said = self.input_layouts in (self.desired, features)
            return self._row_way(x, features[0]) if as_said and x.placements == features else None
        if x.placements != self.input_layouts:
            return None  # stock takes it for what the style says, or moves it
        if x.placements == self.desired:
            return self._column_way(x, x.placements[0], Partial())
        placement = x.placements[0]
        if isinstance(placement, Shard) and x.shape[placement.dim] % self._world:
            return None
        return self._column_way(x, placement, placement)

    def _column_way(self, x: Tensor, layout: Placement, given: Placement | None) -> _OpPlan | None:
        features = Shard(x.dim() - 1)
        as_computed = self.output_layouts in ((_FEATURES,), (features,))
        local = as_computed and self.use_local_output
        returned, finish = None if local else features, not as_computed
        if layout.is_replicate():
            return _OpPlan("replicated_linear", 0, given, returned, finish)
        dim = sequence_dim(layout, x)
        return None if dim is None else _OpPlan("gather_linear", dim, given, returned, finish)

    def _row_way(self, x: Tensor, given: Placement | None) -> _OpPlan | None:
        layout = self.output_layouts[0]
        if layout.is_replicate():
            return _OpPlan("linear_reduce", 0, given, None if self.use_local_output else layout, False)
        dim = sequence_dim(layout, x)
        if dim is None:
            return None
        return _OpPlan("linear_scatter", dim, given, None if self.use_local_output else Shard(dim), False)

    def _claimed(self, linear: nn.Linear, output: Tensor) -> Any:
        """Return an output that was computed with a gather, as the style says."""
        features = Shard(output.dim() - 1)
        if self.use_local_output and self.output_layouts in ((_FEATURES,), (features,)):
            return output
        return self.stock_output(linear, DTensor.from_local(output, self.mesh, (features,), run_check=False))


def _params(linear: nn.Linear) -> tuple[Any, Any]:
    params = linear._parameters
    if "weight" in params and "bias" in params:  # spares nn.Module.__getattr__
        return params["weight"], params["bias"]
    return linear.weight, linear.bias
