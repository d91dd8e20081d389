"""What the autograd engine is about to do."""

from __future__ import annotations

from typing import Any

import torch


def executes(node: Any) -> bool:
    """Tell whether the backward that runs wants the gradient that a node takes."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() returns this very gradient
        return True


def apply_function(function: Any, *args: Any) -> Any:
    """Apply a ``torch.autograd.Function``, whose own ``apply`` has no types.

    Args:
        function: The class.
        *args: What its ``forward`` takes behind the context.
    """
    return function.apply(*args)
