"""Hooks on the AccumulateGrad nodes of parameters.

[Note: node hook] Stock DDP's reducer is a post-hook of the node, so hooks that users put on the parameter
(``register_hook``, ``register_post_accumulate_grad_hook``) have all run before it, and what they wrote into the
gradient is what gets reduced. ``register_post_accumulate_grad_hook`` would run in registration order among theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """Who wants to know."""

    def gradient_accumulated(self, index: int) -> None:
        """A gradient has been added to ``grad`` of parameter ``index``."""


class GradientHooks:
    """One hook per parameter.

    The nodes are kept alive here: a parameter holds its node weakly, and a hook is lost with it. The nodes hold the
    listener weakly, because Python's garbage collector does not see cycles that pass through them.

    Args:
        params: The parameters.
        listener: Told of every accumulated gradient.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], listener: Listener) -> None:
        self._kinds = [(param.dtype, param.device) for param in params]
        self._params = params
        self.nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []
        reference = weakref.ref(listener)
        for index, param in enumerate(params):
            node = _accumulate_node(param)
            self.nodes.append(node)
            self._handles.append(node.register_hook(_hook(reference, index)))

    def lost(self) -> bool:
        """Tell whether a parameter was cast or moved, which gives it a new node without our hook."""
        return [(param.dtype, param.device) for param in self._params] != self._kinds

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.nodes.clear()


def _accumulate_node(param: torch.nn.Parameter) -> Node:
    wanted = param.requires_grad
    with torch.enable_grad(), torch.inference_mode(False):
        # A parameter frozen since the wrap has a node, too, and gets gradients again once it is thawed.
        alias = param.requires_grad_().view_as(param)
    param.requires_grad_(wanted)
    assert alias.grad_fn is not None
    node = alias.grad_fn.next_functions[0][0]
    assert node is not None
    return node


def _hook(reference: weakref.ref[Listener], index: int) -> Any:
    def fire(*_gradients: Any) -> None:
        listener = reference()
        if listener is not None:
            listener.gradient_accumulated(index)

    return fire
