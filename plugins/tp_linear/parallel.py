"""What a taken-over linear knows of how it is parallel, and the choice between our operators and stock's path.

[Note: stock's path] Stock gathers in a forward pre-hook and scatters in a forward hook. Taken over, a linear has
neither; where our operators do not apply, its forward calls what the hooks called, in between the product of
DTensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel.style import ColwiseParallel, RowwiseParallel

from ovpatch_plugins.tp_linear import agreed, compiled, operators
from ovpatch_plugins.tp_linear import wires as wires_of
from ovpatch_plugins.tp_linear.counters import COUNTERS
from ovpatch_plugins.tp_linear.layouts import sequence_dim, traced
from ovpatch_plugins.tp_linear.shared import claim
from ovpatch_plugins.tp_linear.state import STATE

Style = ColwiseParallel | RowwiseParallel

_FEATURES = Shard(-1)


class Parallel:
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
        # Comparing placements takes microseconds.
        self.desired: tuple[Placement, ...] = (Replicate(),) if column else (_FEATURES,)
        self.takes_replicated = self.input_layouts == (Replicate(),)
        self._returns_features = self.use_local_output and self.output_layouts == (_FEATURES,)
        self._world = mesh.size()
        self._group: dist.ProcessGroup | None = None
        self._era = -1  # when the group agreed
        self._known: Any = None  # the layout of the weight that was found right last

    def has_agreed(self, group: dist.ProcessGroup) -> None:
        """Be told the ranks over which the linear is cut."""
        self._group, self._era = group, agreed.era()

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        return self  # never changed, and a mesh is not copied either

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None, "_group": None}

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which the linear is cut, which have agreed on how to compute."""
        if self._group is None or self._era != agreed.era():
            group = self.mesh.get_group()
            if torch.compiler.is_compiling():
                return group  # nothing to trace; ranks agreed when the linear was cut, or in an eager forward
            agreed.ensure(group, torch.device(self.mesh.device_type))
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
        if not STATE.on:
            return self.stock(linear, x)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            if (output := claim(x, linear)) is not None:
                return self._finished(linear, output)
            if traced():
                COUNTERS.stock_calls += 1
                return self.stock(linear, x)
        weight = linear.weight
        if not weight.is_floating_point():  # nobody has tested complex ones
            return self.stock(linear, x)
        output = (self._column if self.column else self._row)(weight, linear.bias, x, compiling)
        if output is None:
            if not compiling:
                COUNTERS.stock_calls += 1
            return self.stock(linear, x)
        if not compiling:
            COUNTERS.calls += 1
        return self._finished(linear, output) if self.column else self._handed_out(output)

    def divides(self, weight: Any, cut: int) -> bool:
        """Tell whether a weight is cut evenly, along its dimension ``cut``, as the style left it."""
        spec = getattr(weight, "_spec", None)
        if spec is None:
            return False
        if spec is not self._known:
            even = spec.mesh == self.mesh and spec.placements == (Shard(cut),) and spec.shape[cut] % self._world == 0
            if not even:
                return False
            if not torch.compiler.is_compiling():
                self._known = spec
        return True

    def _is_uneven(self, x: DTensor) -> bool:
        placement = x.placements[0]
        return isinstance(placement, Shard) and x.shape[placement.dim] % self._world != 0

    def _column(self, weight: Any, bias: Any, x: Any, compiling: bool) -> Tensor | None:
        if not self.divides(weight, 0) or not isinstance(x, Tensor) or not x.numel():
            return None
        layout, partial = self.input_layouts[0], False
        if isinstance(x, DTensor):
            if x.device_mesh != self.mesh or x.placements not in (self.input_layouts, self.desired):
                return None
            if x.placements != self.desired and self._is_uneven(x):
                return None
            layout, partial = x.placements[0], x.placements == self.desired
            if partial and self.input_layouts != self.desired:
                return None  # stock takes it for what the style says
            # [Note: a replicated input's gradient] is a term of a sum on each rank. Taken for replicated, it would lose
            # the other ranks' terms, silently.
            x = x.to_local(grad_placements=[Partial()] if partial else None)
        elif type(x) is not Tensor and type(x) is not nn.Parameter and not compiling:
            return None
        group = self.group
        if layout.is_replicate():
            if compiling:
                return compiled.replicated_linear(
                    x, weight.to_local(), _to_local(bias), group, STATE.how.schedule, partial=partial
                )
            return operators.replicated_linear(
                x, weight, bias, wires_of.of(group, x.device), STATE.how, partial=partial
            )
        dim = sequence_dim(layout, x)
        if dim is None:
            return None
        if compiling:
            biases = [] if bias is None else [bias.to_local()]
            return compiled.gather_linear(x, [weight.to_local()], biases, group, dim, STATE.how.schedule)[0]
        return operators.gather_linear(x, (weight,), (bias,), wires_of.of(group, x.device), dim, STATE.how)[0]

    def _row(self, weight: Any, bias: Any, x: Any, compiling: bool) -> Tensor | None:
        if not self.divides(weight, 1) or not isinstance(x, Tensor) or not x.numel():
            return None
        if self.input_layouts != self.desired and self.input_layouts != (Shard(x.dim() - 1),):
            return None
        if isinstance(x, DTensor):
            if x.device_mesh != self.mesh or x.placements != (Shard(x.dim() - 1),):
                return None
            x = x.to_local()
        elif type(x) is not Tensor and type(x) is not nn.Parameter and not compiling:
            return None
        group, layout = self.group, self.output_layouts[0]
        if layout.is_replicate():
            if compiling:
                return compiled.linear_reduce(x, weight.to_local(), _to_local(bias), group, STATE.how.schedule)
            return operators.linear_reduce(x, weight, bias, wires_of.of(group, x.device), STATE.how)
        dim = sequence_dim(layout, x)
        if dim is None or x.shape[dim] % self._world:
            return None
        if compiling:
            return compiled.linear_scatter(x, weight.to_local(), _to_local(bias), group, dim, STATE.how.schedule)
        return operators.linear_scatter(x, weight, bias, wires_of.of(group, x.device), dim, STATE.how)

    def _finished(self, linear: nn.Linear, output: Tensor) -> Any:
        """Return a column's output, of which this rank has some features, as the style says."""
        if self._returns_features:
            return output
        features = (Shard(output.dim() - 1),)
        if self.use_local_output and self.output_layouts == features:
            return output
        return self.stock_output(linear, DTensor.from_local(output, self.mesh, features, run_check=False))

    def _handed_out(self, output: Tensor) -> Any:
        if self.use_local_output:
            return output
        return DTensor.from_local(output, self.mesh, self.output_layouts, run_check=False)


def _to_local(bias: Any) -> Tensor | None:
    return None if bias is None else bias.to_local()
