"""What stock's placements say about an activation, and whether single operations are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def sequence_dim(layout: Placement, x: Tensor) -> int | None:
    """Return along which dimension of ``x`` a layout cuts, unless that is the last one, or none."""
    if type(layout) is not Shard:
        return None
    dim = layout.dim + x.dim() if layout.dim < 0 else layout.dim
    return dim if 0 <= dim < x.dim() - 1 else None


def traced() -> bool:
    """Tell whether single operations are recorded, to be kept, changed or repeated: there stock's have to be seen.

    Selective checkpointing does so, torch.func, and whatever traces graphs; not so modes that only watch, as those that
    count: they may be on one rank alone, which must not issue other collectives then.
    """
    if torch._C._len_torch_dispatch_stack() and any(map(_records, _get_current_dispatch_mode_stack())):
        return True
    return is_transformed() or bool(torch._C._is_tracing())


def is_transformed() -> bool:
    """Tell whether torch.func sees operations first."""
    return bool(torch._C._are_functorch_transforms_active())


def _records(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None or type(mode).__module__ == "torch.utils.checkpoint"
