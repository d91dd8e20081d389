"""The script's hooks, which may read or change gradients while backward runs."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

_TENSOR_HOOKS = operator.attrgetter("_backward_hooks")
_ACCUMULATION_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


class ForeignHooks:
    """Hooks of the script on one model.

    [Note: foreign hooks] What hooks of the script or a second wrapper around the same parameters do to ``p.grad`` while
    backward runs must not reach a reduction. So with any of them, each gradient is copied in its own hook, as under
    stock. The hook that torch puts on parameters below DTensors, for ``device_mesh=``, is not foreign: it only waits
    for a gradient. Hooks on the parameters' AccumulateGrad nodes are found by ``GradHooks.has_foreign``.

    Args:
        params: The model's parameters.

    Attributes:
        shared: Whether another reducer reads gradients of these parameters.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.shared = False
        self._params = params
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._tables: list[Any] = []
        self._changes = -1

    def watch(self, model: torch.nn.Module) -> None:
        """Look at the backward hooks of ``model`` and of all modules in it, now or later."""
        self._model = weakref.ref(model)
        _changes.watch()

    def has_any(self) -> bool:
        """Return whether there are any hooks now. Called once per backward."""
        if self._changes != _changes.count:
            self._changes = _changes.count
            self._tables = _tables(self._model() if self._model is not None else None)
        if self.shared or any(self._tables):
            return True
        with torch._C.DisableTorchFunctionSubclass():  # as a pending parameter is
            hooked = [hooks for hooks in map(_TENSOR_HOOKS, self._params) if hooks]
            return any(map(_ACCUMULATION_HOOKS, self._params)) or not all(map(_only_wait, hooked))


def _only_wait(hooks: Mapping[int, Any]) -> bool:
    utilities = sys.modules.get("torch.distributed.tensor.parallel._data_parallel_utils")
    waits = getattr(utilities, "sync_grad_hook", None)
    return waits is not None and all(getattr(hook, "func", None) is waits for hook in hooks.values())


def _tables(model: torch.nn.Module | None) -> list[Any]:
    tables: list[Any] = [nn_module._global_backward_hooks, nn_module._global_backward_pre_hooks]
    modules: Iterable[torch.nn.Module] = () if model is None else model.modules()
    for module in modules:
        tables += [module._backward_hooks, module._backward_pre_hooks]
    return tables


class _Changes:
    """Counts the modules that are put into others, anywhere, so that models are walked only after a change."""

    def __init__(self) -> None:
        self.count = 0
        self._handle: RemovableHandle | None = None

    def watch(self) -> None:
        if self._handle is None:
            self._handle = nn_module.register_module_module_registration_hook(self._changed)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _changed(self, *_registration: Any) -> None:
        self.count += 1


_changes = _Changes()


def stop_watching() -> None:
    """Take the hook on torch's modules away."""
    _changes.stop()
