"""Schedule ``fused``: kernels that compute and move rows at the same time, over memory that ranks share.

A rank that does not run the kernels would leave its peers waiting. So the choice depends only on facts that are the
same on all ranks: the objections that they have exchanged, dtypes, shapes, and whether a graph is captured. Strides and
addresses may differ between ranks. A copy makes them fit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.autograd import is_in_backward
from ovpatch.overlap.comm.collectives import WorkGroup
from ovpatch.overlap.comm.lifetimes import drop_values, group_state, group_values
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.symmetric_memory import Workspace
from ovpatch.overlap.tensor_parallel import operator_counts
from ovpatch.overlap.tensor_parallel.schedules.overlapped import Bulk
from ovpatch.overlap.tensor_parallel.schedules.stock import (
    ColumnGrads,
    SentRows,
    WeightGrads,
    linear,
)
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup


class Fused(Bulk):
    """The schedule whose kernels multiply tiles in the order in which rows arrive, and store tiles to their owners.

    If the kernels cannot be used for a group or for the shapes of a call, this schedule computes as :class:`Bulk`.
    """

    name = "fused"
    computes_ahead = True
    # The kernel of the backward gathers the gradient itself, tile by tile.
    starts_grad_gather_early = False

    def can_run(
        self,
        ranks: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        features: Sequence[int],
        sent: SentRows | None,
    ) -> bool:
        return find_workspace(ranks, dtype, device, features) is not None

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        found = _try_gather_linear(ranks, x, weights, biases)
        return (
            super().gather_linear(ranks, x, weights, biases, needs_gathered)
            if found is None
            else found
        )

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        found = _try_linear_scatter(ranks, [x], [weight], bias)
        return super().linear_scatter(ranks, x, weight, bias) if found is None else found

    def start_input_grad_scatter(
        self, ranks: TPGroup, request: ColumnGrads, dtype: torch.dtype
    ) -> tuple[Tensor, WorkGroup]:
        found = _try_input_grad_scatter(ranks, request, dtype)
        return (
            super().start_input_grad_scatter(ranks, request, dtype)
            if found is None
            else (found, WorkGroup(()))
        )

    def linear_scatter_backward(
        self,
        ranks: TPGroup,
        grad: Tensor,
        weight: Tensor,
        compute_weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        # The input's gradient is ``grad @ weight``, which is a linear with the transposed weight.
        found = _try_gather_linear(ranks, grad, [weight.t()], [None]) if needs_input else None
        if found is None:
            return super().linear_scatter_backward(
                ranks, grad, weight, compute_weight_grads, needs_input
            )
        (result,), gathered = found
        if compute_weight_grads is not None:
            compute_weight_grads(gathered, ())
        return result


@functools.cache
def _import_launch() -> Any:
    """Return the module of the kernels' launches, which imports Triton."""
    from ovpatch.overlap.tensor_parallel import triton_launch as launch

    return launch


def _try_gather_linear(
    ranks: TPGroup, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[list[Tensor], Tensor] | None:
    """Return the outputs and the gathered rows; None if kernels cannot be used.

    The linears that are computed with a gather may differ between ranks, so their weights do not decide whether kernels
    are used. A GEMM that the kernel does not support follows the kernel.
    """
    # The features of the input are the same on all ranks, and those of the outputs may differ.
    workspace = find_workspace(ranks, x.dtype, x.device, [x.shape[1]])
    if workspace is None:
        return None
    launch = _import_launch()
    supported = [i for i, weight in enumerate(weights) if is_supported(x.dtype, weight.shape[0])]
    fused_indices = supported[: launch.MAX_WEIGHTS]
    fused_weights = match_layouts([weights[i] for i in fused_indices])
    fused_biases = [biases[i] for i in fused_indices]
    rows = align_rows(x)
    found: tuple[list[Tensor], Tensor] | None = launch.gather_linear(
        workspace, rows, fused_weights, fused_biases
    )
    if found is None:
        return None
    operator_counts.counts.fused += len(fused_indices)
    if len(fused_indices) == len(weights):
        return found
    outs, gathered = dict(zip(fused_indices, found[0], strict=True)), found[1]
    all_params = enumerate(zip(weights, biases, strict=True))
    return [
        outs[i] if i in outs else linear(gathered, *params) for i, params in all_params
    ], gathered


def _try_linear_scatter(
    ranks: TPGroup, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor | None:
    """Return this rank's rows of a sum of GEMMs and biases over the ranks; None if kernels cannot be used."""
    features = [weights[0].shape[0], *[x.shape[1] for x in xs]]
    workspace = find_workspace(ranks, xs[0].dtype, xs[0].device, features)
    if workspace is None:
        return None
    rows = [align_rows(x) for x in xs]
    found: Tensor | None = _import_launch().linear_scatter(
        workspace, rows, match_layouts(weights), bias
    )
    operator_counts.counts.fused += found is not None
    return found


def _try_input_grad_scatter(
    ranks: TPGroup, request: ColumnGrads, dtype: torch.dtype
) -> Tensor | None:
    """Return this rank's rows of an input's gradient; None if kernels cannot be used.

    The linears with gradients, and the terms of other readers of a gathered input, may differ between ranks as well.
    Peers cannot distinguish rows that this rank stores without a GEMM from the tiles of a GEMM.
    """
    operands = [
        (grad, weight)
        for grad, weight in zip(request.output_grads, request.weights, strict=True)
        if grad is not None
    ]
    # Without a gradient of an output, the other term shows the features of the input.
    like = operands[0][1] if request.extra_term is None else request.extra_term
    workspace = find_workspace(ranks, dtype, like.device, [like.shape[1]])
    if workspace is None:
        return None
    launch = _import_launch()
    are_all_supported = all(
        is_supported(dtype, grad.shape[1]) and weight.dtype == dtype for grad, weight in operands
    )
    # Peers take part in a kernel, whatever this rank computes. So if no kernel supports its GEMMs, it computes them
    # first, and a kernel stores the result.
    if (
        request.extra_term is not None
        or not are_all_supported
        or len(operands) > launch.MAX_WEIGHTS
    ):
        found: Tensor | None = launch.scatter(
            workspace, align_rows(request.compute_input_grad(dtype))
        )
        return found
    return _try_linear_scatter(
        ranks, [grad for grad, _ in operands], [weight.t() for _, weight in operands]
    )


DTYPES: Final = (torch.bfloat16, torch.float16)
# Tensor memory accelerators need addresses and rows at multiples of this number.
_ALIGNMENT_BYTES: Final = 16


class _Objection(str):
    """The reason against the kernels for a group, the same string on all ranks; empty if there is none."""

    __slots__ = ()


def find_workspace(
    ranks: TPGroup, dtype: torch.dtype, device: torch.device, features: Sequence[int]
) -> Workspace | None:
    """Return the workspace in which kernels can compute a call; None if they cannot.

    Args:
        ranks: The ranks.
        dtype: The dtype of the operands.
        device: Their device.
        features: The numbers of features that must suit the kernels, the same on all ranks.
    """
    for count in features:
        if not is_supported(dtype, count):
            return None
    return (
        None if _find_objection(ranks.group, device) else memory.get_workspace(ranks.group, device)
    )


def is_supported(dtype: torch.dtype, features: int) -> bool:
    """Return whether kernels can load rows of a dtype and a number of features."""
    return dtype in DTYPES and features * dtype.itemsize % _ALIGNMENT_BYTES == 0


def find_fused_objection(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the reason against the kernels for a group on a device; "" if there is none.

    This is a collective. All ranks get the same result.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return ""
    return _find_objection(group, device)


def _find_objection(group: dist.ProcessGroup, device: torch.device) -> str:
    state = group_state(group)
    # Every operator calls this function, and a read of the dictionary takes fewer calls than get_or_create().
    found: _Objection | None = state.values.get(_Objection)
    if found is not None:
        return found
    # Ranks compare their objections in an eager forward, which all of them run. Nothing is kept here, because a later
    # call can compare.
    if is_capturing(device):
        return "a graph is captured before any eager call"
    if is_in_backward():
        return "a backward runs after its forward's kernels were dropped"
    return state.get_or_create(
        _Objection, lambda: _Objection(memory.unsupported_reason(group, device))
    )


def list_fused_objections() -> list[str]:
    """Return the reasons for which groups with this schedule cannot use the kernels."""
    return sorted({objection for _, objection in group_values(_Objection) if objection})


def drop_fused_support() -> None:
    """Drop the objections and the workspaces of all groups."""
    drop_values(_Objection)
    drop_values(Workspace)


def align_rows(rows: Tensor) -> Tensor:
    """Return contiguous rows at an address that kernels can read, by a copy if necessary."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % _ALIGNMENT_BYTES else rows


def match_layouts(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return weights that are all contiguous or all transposed, by copies if necessary."""
    # One kernel loads the tiles of all weights by the same layout.
    for packed in (1, 0):
        if all(_is_dense_along(weight, packed) for weight in weights):
            return list(weights)
    return [align_rows(weight) for weight in weights]


def _is_dense_along(weight: Tensor, dim: int) -> bool:
    """Return whether elements along a dimension are adjacent, with no gap along the other dimension."""
    dense = weight.is_contiguous() if dim == 1 else weight.stride() == (1, weight.shape[0])
    return dense and weight.data_ptr() % _ALIGNMENT_BYTES == 0
