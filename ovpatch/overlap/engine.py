"""What the autograd engine is about to do, and is told to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node


def executes(node: Any) -> bool:
    """Tell whether the backward that runs wants the gradient that a node takes."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() returns this very gradient
        return True


def executed(nodes: Sequence[Node]) -> list[bool]:
    """Tell which AccumulateGrad nodes the running backward will reach. Only valid inside a backward.

    Nodes inside reentrant checkpoints belong to a backward of their own and show as not reached.
    """
    return [torch._C._will_engine_execute_node(node) for node in nodes]


def accumulates(nodes: Iterable[Node]) -> bool:
    """Tell whether the running backward adds to any parameter's ``grad``, which ``torch.autograd.grad`` does not.

    Only valid inside a backward.
    """
    try:
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return False  # torch refuses to answer for a parameter whose gradient is asked for


def apply_function(function: Any, *args: Any) -> Any:
    """Apply a ``torch.autograd.Function``, whose own ``apply`` has no types.

    Args:
        function: The class.
        *args: What its ``forward`` takes behind the context.
    """
    return function.apply(*args)
