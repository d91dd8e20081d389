"""Weights to whose gradients an operator can add."""

from __future__ import annotations

import torch
from torch import Tensor

from ovpatch_plugins.tp_linear.dtensors import local


def accumulates(weight: Tensor) -> Tensor | None:
    """Return where the weight's gradient can be added to behind autograd's back, or None.

    That is ``weight.main_grad``, as Megatron calls it, or else the gradient that earlier microbatches left, unless
    somebody wants to be told of every gradient: hooks of the weight would not be called.
    """
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None and (not weight.is_leaf or weight.grad is None):
        return None
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    if not _is_accumulated(weight):
        return None
    target = weight.grad if main is None else main
    assert target is not None
    return local(target)


def _is_accumulated(weight: Tensor) -> bool:
    """Whether the backward that runs adds to the weight's gradient: with ``inputs`` given, it adds to theirs alone."""
    if not weight.is_leaf:
        return True
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() returns this very gradient
        return False
