"""Where the feature can run, and which linears are left alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

_OURS = ("_prepare_input_fn", "_prepare_output_fn", "_partition_linear_fn")


def reasons_against() -> list[str]:
    """Return why the feature cannot run in this process at all."""
    if not torch.distributed.is_available():
        return ["this build of torch has no torch.distributed"]
    if importlib.util.find_spec("torch.distributed.tensor") is None:
        return ["this build of torch has no torch.distributed.tensor"]
    return []


def objection(style: Any, linear: nn.Linear, dimensions: int) -> str:
    """Return why a linear that a style made parallel is left to stock, or "".

    Args:
        style: The style.
        linear: The linear.
        dimensions: Of the mesh.
    """
    from torch.distributed.tensor.parallel.style import ColwiseParallel, RowwiseParallel

    stock = ColwiseParallel if isinstance(style, ColwiseParallel) else RowwiseParallel
    if type(linear) is not nn.Linear:
        return "a class of its own may have a forward of its own"
    if "forward" in vars(linear):
        return "its forward was replaced by another function"
    if any(getattr(type(style), name) is not getattr(stock, name) for name in _OURS):
        return f"{type(style).__name__} does not do what {stock.__name__} does"
    if dimensions != 1:
        return f"the mesh has {dimensions} dimensions"
    return ""
