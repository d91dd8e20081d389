"""Schedule ``fused``: kernels that compute and move rows at the same time, over memory that ranks share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ovpatch.overlap.comm.work import WorkGroup
from ovpatch_plugins.tp_linear import fused_support
from ovpatch_plugins.tp_linear.gemm import linear
from ovpatch_plugins.tp_linear.report import COUNTERS
from ovpatch_plugins.tp_linear.schedules.bulk import Bulk
from ovpatch_plugins.tp_linear.schedules.stock import ColumnGrads, WeightGrads
from ovpatch_plugins.tp_linear.tp_group import TPGroup


class Fused(Bulk):
    """Tiles are multiplied in the order in which rows arrive, and stored to the ranks that own them.

    Where kernels cannot be used, for a group or for the shapes of a call, this is :class:`Bulk`.
    """

    name = "fused"
    ahead = True

    def serves(self, wires: TPGroup, device: torch.device, dtype: torch.dtype, features: Sequence[int]) -> bool:
        """See :meth:`Schedule.serves`."""
        return fused_support.workspace_of(wires, dtype, device, features) is not None

    def gather_linear(
        self, wires: TPGroup, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], needs_whole: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """See :meth:`Schedule.gather_linear`."""
        found = _gathered(wires, x, weights, biases)
        return super().gather_linear(wires, x, weights, biases, needs_whole) if found is None else found

    def linear_scatter(self, wires: TPGroup, x: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Schedule.linear_scatter`."""
        found = _scattered(wires, [x], [weight])
        return super().linear_scatter(wires, x, weight) if found is None else found

    def scattered(self, wires: TPGroup, asked: ColumnGrads, dtype: torch.dtype) -> tuple[Tensor, WorkGroup]:
        """See :meth:`Bulk.scattered`."""
        found = _input_scattered(wires, asked, dtype)
        return super().scattered(wires, asked, dtype) if found is None else (found, WorkGroup(()))

    def linear_scatter_backward(
        self, wires: TPGroup, grad: Tensor, weight: Tensor, weight_grads: WeightGrads | None, needs_input: bool
    ) -> Tensor | None:
        """See :meth:`Schedule.linear_scatter_backward`."""
        found = _gathered(wires, grad, [weight.t()], [None]) if needs_input else None
        if found is None:
            return super().linear_scatter_backward(wires, grad, weight, weight_grads, needs_input)
        (result,), whole = found
        if weight_grads is not None:
            weight_grads(whole, ())
        return result


@functools.cache
def _launch() -> Any:
    """Return the kernels' launches, which need Triton."""
    from ovpatch_plugins.tp_linear.kernels import launch

    return launch


def _gathered(
    wires: TPGroup, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[list[Tensor], Tensor] | None:
    """Return outputs and all rows; None where kernels cannot be used.

    Which linears are computed with a gather may differ between ranks, so that their weights do not decide either: what
    the kernel does not take is computed behind it.
    """
    workspace = fused_support.workspace_of(wires, x.dtype, x.device, [x.shape[1]])
    if workspace is None:
        return None
    launch = _launch()
    taken = [i for i, weight in enumerate(weights) if fused_support.suits(x.dtype, weight.shape[0])][: launch.MOST]
    used = fused_support.laid_out([weights[i] for i in taken])
    added = [biases[i] for i in taken]
    found: tuple[list[Tensor], Tensor] | None = launch.gather_linear(workspace, fused_support.aligned(x), used, added)
    if found is None:
        return None
    COUNTERS.fused += len(taken)
    if len(taken) == len(weights):
        return found
    outs, whole = dict(zip(taken, found[0], strict=True)), found[1]
    every = enumerate(zip(weights, biases, strict=True))
    return [outs[i] if i in outs else linear(whole, *params) for i, params in every], whole


def _scattered(wires: TPGroup, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor | None:
    """Return this rank's rows of a sum of products; None where kernels cannot be used."""
    features = [weights[0].shape[0], *[x.shape[1] for x in xs]]
    workspace = fused_support.workspace_of(wires, xs[0].dtype, xs[0].device, features)
    if workspace is None:
        return None
    found: Tensor | None = _launch().linear_scatter(
        workspace, [fused_support.aligned(x) for x in xs], fused_support.laid_out(weights)
    )
    COUNTERS.fused += found is not None
    return found


def _input_scattered(wires: TPGroup, asked: ColumnGrads, dtype: torch.dtype) -> Tensor | None:
    """Return this rank's rows of an input's gradient; None where kernels cannot be used.

    Which linears have gradients, and whether other readers of a gathered input add a term, may differ between ranks,
    too. To the others, rows that are stored as they are look like a product.
    """
    used = [(grad, weight) for grad, weight in zip(asked.grads, asked.weights, strict=True) if grad is not None]
    like = used[0][1] if asked.extra is None else asked.extra
    workspace = fused_support.workspace_of(wires, dtype, like.device, [like.shape[1]])
    if workspace is None:
        return None
    launch = _launch()
    alike = all(fused_support.suits(dtype, grad.shape[1]) and weight.dtype == dtype for grad, weight in used)
    if asked.extra is not None or not alike or len(used) > launch.MOST:
        found: Tensor | None = launch.scatter(workspace, fused_support.aligned(asked.of_input(dtype)))
        return found
    return _scattered(wires, [grad for grad, _ in used], [weight.t() for _, weight in used])
