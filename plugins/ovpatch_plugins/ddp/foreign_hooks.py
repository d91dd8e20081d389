"""Who may read or change gradients while backward runs, besides the reducer and the autograd engine.

[Note: foreign hands] What hooks of the script or a second wrapper around the same parameters do to ``p.grad`` while
backward runs must not reach a reduction. There each gradient is copied in its own hook, as under stock. No foreign one
is the hook that torch puts on parameters below DTensors, for ``device_mesh=``: it only waits for a gradient. Hooks on
the parameters' AccumulateGrad nodes are seen beside our own there (``GradientHooks.foreign``).
"""

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

    def present(self) -> bool:
        """Tell whether there are any hooks now. Asked once per backward."""
        if self._changes != _changes.count:
            self._changes = _changes.count
            self._tables = _tables(self._model() if self._model is not None else None)
        if self.shared or any(self._tables):
            return True
        with torch._C.DisableTorchFunctionSubclass():  # which a parameter may be that waits for a reader
            hooked = [hooks for hooks in map(_TENSOR_HOOKS, self._params) if hooks]
            return any(map(_ACCUMULATION_HOOKS, self._params)) or not all(map(_only_wait, hooked))


def _only_wait(hooks: Mapping[int, Any]) -> bool:
    utilities = sys.modules.get("torch.distributed.tensor.parallel._data_parallel_utils")
    waits = getattr(utilities, "sync_grad_hook", None)
    return waits is not None and all(getattr(hook, "func", None) is waits for hook in hooks.values())


def _tables(model: torch.nn.Module | None) -> list[Any]:
    tables: list[Any] = [nn_module._global_backward_hooks, nn_module._global_backward_pre_hooks]
    parts: Iterable[torch.nn.Module] = () if model is None else model.modules()
    for part in parts:
        tables += [part._backward_hooks, part._backward_pre_hooks]
    return tables


class _Changes:
    """Counts modules that are put into others, anywhere; walking every model before every backward would cost more."""

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
