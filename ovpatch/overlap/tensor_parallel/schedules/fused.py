"""Schedule ``fused``: kernels that compute and move rows at the same time, over memory that ranks share.

A rank that chose another way than its peers would leave them waiting. So the choice depends only on facts that are the
same on all ranks: their exchanged answers, dtypes, shapes, and whether a graph is captured. Strides and addresses,
which may differ, are made to fit by a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import WorkGroup
from ovpatch.overlap.comm.lifetimes import drop_values, group_state, group_values
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.symmetric_memory import Workspace
from ovpatch.overlap.tensor_parallel import operator_counts
from ovpatch.overlap.tensor_parallel.schedules.overlapped import Bulk
from ovpatch.overlap.tensor_parallel.schedules.stock import ColumnGrads, WeightGrads, linear
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup


class Fused(Bulk):
    """Tiles are multiplied in the order in which rows arrive, and stored to the ranks that own them.

    Where kernels cannot be used, for a group or for a call's shapes, this is :class:`Bulk`.
    """

    name = "fused"
    ahead = True
    gathers_grad_at_once = False

    def can_run(
        self, ranks: TPGroup, device: torch.device, dtype: torch.dtype, features: Sequence[int]
    ) -> bool:
        return find_workspace(ranks, dtype, device, features) is not None

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_whole: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        found = _gathered(ranks, x, weights, biases)
        return (
            super().gather_linear(ranks, x, weights, biases, needs_whole)
            if found is None
            else found
        )

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        found = _scattered(ranks, [x], [weight], bias)
        return super().linear_scatter(ranks, x, weight, bias) if found is None else found

    def scattered(
        self, ranks: TPGroup, asked: ColumnGrads, dtype: torch.dtype
    ) -> tuple[Tensor, WorkGroup]:
        found = _input_scattered(ranks, asked, dtype)
        return super().scattered(ranks, asked, dtype) if found is None else (found, WorkGroup(()))

    def linear_scatter_backward(
        self,
        ranks: TPGroup,
        grad: Tensor,
        weight: Tensor,
        weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        found = _gathered(ranks, grad, [weight.t()], [None]) if needs_input else None
        if found is None:
            return super().linear_scatter_backward(ranks, grad, weight, weight_grads, needs_input)
        (result,), whole = found
        if weight_grads is not None:
            weight_grads(whole, ())
        return result


@functools.cache
def _launch() -> Any:
    """Return the kernels' launches, which need Triton."""
    from ovpatch.overlap.tensor_parallel import triton_launch as launch

    return launch


def _gathered(
    ranks: TPGroup, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[list[Tensor], Tensor] | None:
    """Return outputs and all rows; None where kernels cannot be used.

    The linears that are computed with a gather may differ between ranks, so their weights do not decide whether kernels
    are used. A product that the kernel does not support is computed behind it.
    """
    workspace = find_workspace(ranks, x.dtype, x.device, [x.shape[1]])
    if workspace is None:
        return None
    launch = _launch()
    supported = [i for i, weight in enumerate(weights) if is_supported(x.dtype, weight.shape[0])]
    taken = supported[: launch.MOST]
    used = match_layouts([weights[i] for i in taken])
    added = [biases[i] for i in taken]
    rows = align_rows(x)
    found: tuple[list[Tensor], Tensor] | None = launch.gather_linear(workspace, rows, used, added)
    if found is None:
        return None
    operator_counts.counts.fused += len(taken)
    if len(taken) == len(weights):
        return found
    outs, whole = dict(zip(taken, found[0], strict=True)), found[1]
    every = enumerate(zip(weights, biases, strict=True))
    return [outs[i] if i in outs else linear(whole, *params) for i, params in every], whole


def _scattered(
    ranks: TPGroup, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor | None:
    """Return this rank's rows of a sum of products and biases; None where kernels cannot be used."""
    features = [weights[0].shape[0], *[x.shape[1] for x in xs]]
    workspace = find_workspace(ranks, xs[0].dtype, xs[0].device, features)
    if workspace is None:
        return None
    rows = [align_rows(x) for x in xs]
    found: Tensor | None = _launch().linear_scatter(workspace, rows, match_layouts(weights), bias)
    operator_counts.counts.fused += found is not None
    return found


def _input_scattered(ranks: TPGroup, asked: ColumnGrads, dtype: torch.dtype) -> Tensor | None:
    """Return this rank's rows of an input's gradient; None where kernels cannot be used.

    The linears with gradients, and terms of other readers of a gathered input, may differ between ranks as well. To the
    other ranks, rows that are stored unchanged look like a product.
    """
    used = [
        (grad, weight)
        for grad, weight in zip(asked.grads, asked.weights, strict=True)
        if grad is not None
    ]
    like = used[0][1] if asked.extra is None else asked.extra
    workspace = find_workspace(ranks, dtype, like.device, [like.shape[1]])
    if workspace is None:
        return None
    launch = _launch()
    alike = all(
        is_supported(dtype, grad.shape[1]) and weight.dtype == dtype for grad, weight in used
    )
    if asked.extra is not None or not alike or len(used) > launch.MOST:
        found: Tensor | None = launch.scatter(
            workspace, align_rows(asked.compute_input_grad(dtype))
        )
        return found
    return _scattered(ranks, [grad for grad, _ in used], [weight.t() for _, weight in used])


DTYPES: Final = (torch.bfloat16, torch.float16)
_ALIGNED: Final = 16  # bytes, of addresses and rows, as tensor memory accelerators want them


class _Objection(str):
    """Why a group does without kernels, the same text on all ranks; empty if nothing speaks against them."""

    __slots__ = ()


def find_workspace(
    ranks: TPGroup, dtype: torch.dtype, device: torch.device, features: Sequence[int]
) -> Workspace | None:
    """Return the workspace in which kernels can compute a call, or None if they cannot.

    The ranks have to agree on all numbers of features.
    """
    for count in features:
        if not is_supported(dtype, count):
            return None
    return None if _objection(ranks.group, device) else memory.get_workspace(ranks.group, device)


def is_supported(dtype: torch.dtype, features: int) -> bool:
    """Return whether kernels can load rows of a dtype and a number of features."""
    return dtype in DTYPES and features * dtype.itemsize % _ALIGNED == 0


def find_fused_objection(group: dist.ProcessGroup, kind: str) -> str:
    """Return the reason against the kernels for a group on a kind of device, or "", on all ranks; a collective."""
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return ""
    return _objection(
        group,
        torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind),
    )


def _objection(group: dist.ProcessGroup, device: torch.device) -> str:
    state = group_state(group)
    if _Objection not in state.values and is_capturing(device):
        return "a graph is captured before any eager call"  # ranks cannot ask each other now
    return state.get_or_create(
        _Objection, lambda: _Objection(memory.unsupported_reason(group, device))
    )


def list_objections() -> list[str]:
    """Return why groups that asked for kernels cannot use them."""
    return sorted({objection for _, objection in group_values(_Objection) if objection})


def drop_fused_support() -> None:
    """Drop what is known of groups, and their workspaces."""
    drop_values(_Objection)
    drop_values(Workspace)


def align_rows(rows: Tensor) -> Tensor:
    """Return rows that are contiguous, at an address that kernels can read."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % _ALIGNED else rows


def match_layouts(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights, either all contiguous or all transposed."""
    for packed in (1, 0):
        if all(_is_packed(weight, packed) for weight in weights):
            return list(weights)
    return [align_rows(weight) for weight in weights]


def _is_packed(weight: Tensor, dim: int) -> bool:
    """Return whether the elements along a dimension are adjacent, without gaps along the other one."""
    dense = weight.is_contiguous() if dim == 1 else weight.stride() == (1, weight.shape[0])
    return dense and weight.data_ptr() % _ALIGNED == 0
