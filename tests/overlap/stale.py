"""Parameters with stale memory, for tests that no code reads them before their values arrive."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.tensors.pending_param import is_pending, mark_pending, mark_ready
from ovpatch.overlap.tensors.read_hooks import (
    APPLIES_IN_C,
    ARGUMENT_HOOKS,
    READ_HOOKS,
    ContextHook,
    ModuleHook,
)
from ovpatch.patching import PatchManager

GARBAGE = 1e4


class Stale:
    """The true values of some parameters, as peers would send them, while the parameters contain garbage."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.settled = 0
        self._lock = threading.Lock()
        # The runtime holds the nodes of pending parameters in the same way.
        self.nodes = [
            torch.autograd.graph.get_gradient_edge(p).node for p in params if p.requires_grad
        ]
        self.values = [param.detach().clone() for param in params]

    def mark(self) -> Stale:
        for param in self.params:
            param.data.fill_(GARBAGE if param.is_floating_point() else 0)
            assert not mark_pending([param], self.settle)
        return self

    def settle(self) -> None:
        with self._lock:
            if not any(is_pending(param) for param in self.params):
                return
            with outside_modes():
                for param, value in zip(self.params, self.values, strict=True):
                    param.data.copy_(value)
            for param in self.params:
                mark_ready([param])
            self.settled += 1


def find_reason_against(param: Tensor) -> str:
    """Return the reason why a parameter cannot be pending now, or ""."""
    reason = mark_pending([param], lambda: None)
    mark_ready([param])
    return reason


def stale(model: nn.Module) -> Stale:
    """Make all parameters of a model stale."""
    return Stale(list(dict.fromkeys(model.parameters()))).mark()


@contextlib.contextmanager
def entrances() -> Iterator[None]:
    """Install the hooks that wait before reads, like a feature."""
    patches = PatchManager()
    for entrance in (*ARGUMENT_HOOKS, *READ_HOOKS):
        patches.register_patch(
            entrance.target,
            wrap=entrance.wrap,
            feature="pending",
            why=entrance.why,
            optional=entrance.optional,
        )
    with patches.applied("pending"), contextlib.ExitStack() as stack:
        stack.callback(ModuleHook().remove)
        if APPLIES_IN_C:
            stack.callback(ContextHook().remove)
        yield


def tensors(result: Any) -> list[Any]:
    """Return the result of a reader in a form that can be compared and sent."""
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def same(left: list[Any], right: list[Any]) -> bool:
    """Return whether two results have the same bits."""
    return len(left) == len(right) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )
