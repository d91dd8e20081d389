"""Weights as they come: plain tensors, or DTensors, of which the operators take the local part.

[Note: weights stay DTensors] ``DTensor.to_local()`` costs an autograd node and 20 µs, for every use of every weight.
An autograd function that takes the parameter itself, and looks at the local tensor inside, costs nothing; its
gradient then has to be a DTensor of the same placements, as stock's is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def local(weight: Tensor) -> Tensor:
    """Return a weight's memory on this rank."""
    found: Tensor | None = getattr(weight, "_local_tensor", None)
    return weight if found is None else found


def like(grad: Tensor, weight: Tensor) -> Tensor:
    """Return a local gradient as what the weight is."""
    spec = getattr(weight, "_spec", None)
    if spec is None:
        return grad
    dtensor: Any = sys.modules["torch.distributed.tensor"]
    made: Tensor = dtensor.DTensor(grad, spec, requires_grad=False)
    return made


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
