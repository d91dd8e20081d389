"""Which groups and which calls the kernels of schedule ``fused`` can serve.

A rank that chose another way than its peers would leave them waiting. So the choice depends only on facts that are the
same on all ranks: their exchanged answers, dtypes, shapes, and whether a graph is captured. Strides and addresses,
which may differ, are made to fit by a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.group_state import drop_values, group_state, group_values
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.symm_mem import support, workspace
from ovpatch.overlap.symm_mem.workspace import Workspace
from ovpatch_plugins.tp_linear.tp_group import TPGroup

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
    return None if _objection(ranks.group, device) else workspace.workspace_for(ranks.group, device)


def is_supported(dtype: torch.dtype, features: int) -> bool:
    """Tell whether kernels can load rows of a dtype and a number of features."""
    return dtype in DTYPES and features * dtype.itemsize % _ALIGNED == 0


def _objection(group: dist.ProcessGroup, device: torch.device) -> str:
    state = group_state(group)
    if _Objection not in state.values and is_capturing(device):
        return "a graph is captured before any eager call"  # ranks cannot ask each other now
    return state.get_or_create(_Objection, lambda: _Objection(support.unsupported_reason(group, device)))


def list_objections() -> list[str]:
    """Return why groups that asked for kernels cannot use them."""
    return sorted({objection for _, objection in group_values(_Objection) if objection})


def forget() -> None:
    """Let go of all groups."""
    drop_values(_Objection)
    workspace.drop_workspaces()


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
    """Tell whether the elements along a dimension are adjacent, without gaps along the other one."""
    dense = weight.is_contiguous() if dim == 1 else weight.stride() == (1, weight.shape[0])
    return dense and weight.data_ptr() % _ALIGNED == 0
