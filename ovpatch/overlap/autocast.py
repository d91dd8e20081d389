"""In which dtype autocast has a product computed, and of what it casts the operands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch

_KEYS: Final = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

# Functions, and the operators that they are to the dispatcher. What they return is never a view of an operand.
_PRODUCTS: Final = {
    "linear": "linear",
    "matmul": "matmul",
    "mm": "mm",
    "mv": "mv",
    "bmm": "bmm",
    "addmm": "addmm",
    "addmv": "addmv",
    "addbmm": "addbmm",
    "baddbmm": "baddbmm",
    "conv1d": "conv1d",
    "conv2d": "conv2d",
    "conv3d": "conv3d",
    "conv_transpose1d": "conv_transpose1d",
    "conv_transpose2d": "conv_transpose2d.input",
    "conv_transpose3d": "conv_transpose3d.input",
}


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return in which dtype a product of something of ``dtype`` is computed; None if autocast leaves it alone.

    Args:
        kind: Type of the device.
        dtype: Of the input.
    """
    if not torch.is_autocast_enabled(kind) or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def casts_operands(func: Any, kwargs: Mapping[str, Any], kind: str, dtype: torch.dtype) -> bool:
    """Tell whether autocast, as it is now, casts every fp32 operand of a function, whole, before anything else.

    Args:
        func: What ``__torch_function__`` is given.
        kwargs: Its keyword arguments.
        kind: Type of the operands' device.
        dtype: What it should cast to.
    """
    return (
        func in _casting(kind)
        and torch.is_autocast_enabled(kind)
        and torch.get_autocast_dtype(kind) == dtype
        and "out" not in kwargs  # autocast leaves these variants alone
    )


@cache
def _casting(kind: str) -> frozenset[Any]:
    key = _KEYS.get(kind)
    found = [name for name, operator in _PRODUCTS.items() if key and _has_kernel(operator, key)]
    owners = (torch, torch.Tensor, torch.nn.functional)
    return frozenset(getattr(owner, name) for name in found for owner in owners if hasattr(owner, name))


def _has_kernel(operator: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key))
