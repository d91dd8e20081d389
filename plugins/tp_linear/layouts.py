"""What stock's placements say about an activation, and whether anybody looks at single operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard


def sequence_dim(layout: Placement, x: Tensor) -> int | None:
    """Return along which dimension of ``x`` a layout cuts, unless that is the last one, or none."""
    if type(layout) is not Shard:
        return None
    dim = layout.dim + x.dim() if layout.dim < 0 else layout.dim
    return dim if 0 <= dim < x.dim() - 1 else None


def traced() -> bool:
    """Tell whether somebody looks at single operations: a mode, as selective checkpointing is, or torch.func."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
    )
