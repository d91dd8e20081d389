"""The operator that computes a linear.

Three facts decide: how the style shards the weight, the layout of the input, and the layout of the output.

=======  ==================  ===============  =================  ====================================================
Weight   Input               Output           Operator           What hides under what
=======  ==================  ===============  =================  ====================================================
columns  sequence sharded    features         gather_linear      The gather under GEMMs, if the schedule splits them.
                                                                 In backward, the reduce-scatter of the input's
                                                                 gradient under the weight's gradient.
columns  replicated, plain   features         replicated_linear  In backward, the all-reduce of the input's gradient
                                                                 under the weight's gradient.
columns  replicated DTensor  features         local_linear       Nothing: the input's gradient stays a term of a sum.
rows     features sharded    sequence         linear_scatter     The reduce-scatter under GEMMs, if the schedule
                                                                 splits them. In backward, the gather under GEMMs.
rows     features sharded    replicated       linear_reduce      The all-reduce under GEMMs, if the schedule splits
                                                                 them.
=======  ==================  ===============  =================  ====================================================

A column-parallel linear with another output layout has the same operator, and stock PyTorch redistributes the output.
Stock PyTorch computes every other input: inputs that it first redistributes, reinterprets or moves, inputs on another
mesh, and sequences that the ranks do not share evenly. It also computes row-parallel linears with another output.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel.style import ColwiseParallel, RowwiseParallel

from ovpatch.overlap.tensor_parallel.layout import find_sequence_dim
from ovpatch.overlap.tensor_parallel.tp_autograd import OpContext

Style = ColwiseParallel | RowwiseParallel

#: The last dimension is sharded.
FEATURES: Final = Shard(-1)


@dataclasses.dataclass(slots=True)
class OpPlan:
    """The computation of inputs of one layout, kept because comparing placements and finding groups takes long.

    Attributes:
        operator: A key of ``OPERATORS``.
        dim: The sequence dimension of the input or output.
        input_grad_placement: The placement of the input's gradient; None if it is a plain tensor.
        output_placement: The placement of the output; None if it is a plain tensor.
        should_redistribute: Whether stock PyTorch must still redistribute the output.
        calls: Contexts of calls, by whether the input needs a gradient.
    """

    operator: str
    dim: int
    input_grad_placement: Placement | None
    output_placement: Placement | None
    should_redistribute: bool
    calls: dict[bool, OpContext] = dataclasses.field(default_factory=dict)


class ShardedLinear:
    """The layouts of one linear that a style has sharded over a mesh of one dimension, by columns or by rows.

    Attributes:
        is_column: Whether the weight is sharded by columns, which are its output features.
        mesh: The mesh.
        input_layouts: The placements of inputs in the style.
        output_layouts: The placements of outputs in the style.
        use_local_output: Whether outputs are local tensors.
        gemm_layouts: The placements of the input in the GEMM of stock PyTorch.
        takes_replicated: Whether the style takes an input that all ranks have.
    """

    def __init__(self, is_column: bool, mesh: DeviceMesh, style: Style) -> None:
        self.is_column = is_column
        self.mesh = mesh
        self.input_layouts: tuple[Placement, ...] = style.input_layouts
        self.output_layouts: tuple[Placement, ...] = style.output_layouts
        self.use_local_output = style.use_local_output
        self.gemm_layouts: tuple[Placement, ...] = (Replicate(),) if is_column else (FEATURES,)
        self.takes_replicated = self.input_layouts == (Replicate(),)
        self._world = mesh.size()

    def plan_for_plain(self, x: Tensor) -> OpPlan | None:
        """Return the plan for a plain tensor, which has the style's layout; None for stock PyTorch."""
        if self.is_column:
            return self._make_column_plan(x, self.input_layouts[0], None)
        # Stock PyTorch redistributes an input with another layout before the GEMM.
        if self.input_layouts != self.gemm_layouts and self.input_layouts != (Shard(x.dim() - 1),):
            return None
        return self._make_row_plan(x, None)

    def plan_for_dtensor(self, x: DTensor) -> OpPlan | None:
        """Return the plan for a DTensor's own layout; None for stock PyTorch."""
        if x.device_mesh != self.mesh:
            return None
        if not self.is_column:
            features = (Shard(x.dim() - 1),)
            as_said = self.input_layouts in (self.gemm_layouts, features)
            return (
                self._make_row_plan(x, features[0])
                if as_said and x.placements == features
                else None
            )
        if x.placements != self.input_layouts:
            # Stock PyTorch reinterprets or redistributes it.
            return None
        # Each rank's gradient of a replicated DTensor is a term of a sum, which autograd reduces later.
        if x.placements == self.gemm_layouts:
            return self._make_column_plan(x, x.placements[0], Partial())
        # Ranks with shards of different sizes cannot gather them in one collective.
        placement = x.placements[0]
        if isinstance(placement, Shard) and x.shape[placement.dim] % self._world:
            return None
        return self._make_column_plan(x, placement, placement)

    def _make_column_plan(
        self, x: Tensor, layout: Placement, input_grad_placement: Placement | None
    ) -> OpPlan | None:
        features = Shard(x.dim() - 1)
        as_computed = self.output_layouts in ((FEATURES,), (features,))
        is_local = as_computed and self.use_local_output
        output_placement, should_redistribute = None if is_local else features, not as_computed
        if layout.is_replicate():
            sums = input_grad_placement is None or not input_grad_placement.is_partial()
            return OpPlan(
                "replicated_linear" if sums else "local_linear",
                0,
                input_grad_placement,
                output_placement,
                should_redistribute,
            )
        dim = find_sequence_dim(layout, x)
        return (
            None
            if dim is None
            else OpPlan(
                "gather_linear", dim, input_grad_placement, output_placement, should_redistribute
            )
        )

    def _make_row_plan(self, x: Tensor, input_grad_placement: Placement | None) -> OpPlan | None:
        layout = self.output_layouts[0]
        if layout.is_replicate():
            return OpPlan(
                "linear_reduce",
                0,
                input_grad_placement,
                None if self.use_local_output else layout,
                False,
            )
        dim = find_sequence_dim(layout, x)
        if dim is None:
            return None
        return OpPlan(
            "linear_scatter",
            dim,
            input_grad_placement,
            None if self.use_local_output else Shard(dim),
            False,
        )
