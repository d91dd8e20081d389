"""What ovpatch keeps for each parameter, without keeping the parameter alive.

Tables by ``id(param)`` need a weak reference each: an id is given to another object once the first one is gone. They
are here, and nowhere else: :func:`param_state` for single values, :class:`WeakParams` for the parameters of a model.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class ParamState:
    """What is known of one parameter."""

    __slots__ = ("dtensor", "local_grad_hook", "param", "sharder")

    def __init__(self, param: weakref.ref[Tensor]) -> None:
        self.param = param
        # The DTensor that stands in the parameter's place in its module, if there is one.
        self.dtensor: Callable[[], Any] = lambda: None
        # What shards the parameter's gradient, held weakly, and the parameter's index there.
        self.sharder: tuple[weakref.ref[Any], int] | None = None
        self.local_grad_hook: RemovableHandle | None = None  # notes gradients which are not reduced


def param_state(param: Tensor) -> ParamState:
    """Return the state of a parameter, made at the first call; it goes with the parameter."""
    known = _states.get(id(param))
    if known is None or known.param() is not param:
        known = _states[id(param)] = ParamState(weak_key(param, _states))
    return known


def find_param_state(param: Tensor) -> ParamState | None:
    """Return the state of a parameter if :func:`param_state` has made one."""
    known = _states.get(id(param)) if _states else None
    return known if known is not None and known.param() is param else None


def weak_key(tensor: Tensor, table: dict[int, Any]) -> weakref.ref[Tensor]:
    """Return a weak reference that drops the entry ``id(tensor)`` of a table when the tensor dies."""
    return weakref.ref(tensor, functools.partial(drop_entry, table, id(tensor)))


def drop_entry(table: dict[int, Any], key: int, _dead: object) -> None:
    """Drop an entry of what has died, as the callback of a weak reference."""
    table.pop(key, None)


_states: dict[int, ParamState] = {}


class WeakParams(Sequence[torch.nn.Parameter]):
    """Parameters that are not kept alive.

    A lazy gradient knows the sharded gradients of its model, and its parameter owns it in C++, where Python's garbage
    collector does not look. If those kept the parameters, a model would never be freed.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.references = [weakref.ref(param) for param in params]

    def __getitem__(self, index: Any) -> Any:
        param = self.references[index]()
        if param is None:
            raise RuntimeError(
                "ovpatch: a parameter does not exist any more, but its gradient or state is read. Keep the model as "
                "long as its optimizer."
            )
        return param

    def __len__(self) -> int:
        return len(self.references)

    def find(self, index: int) -> torch.nn.Parameter | None:
        """Return a parameter if it still exists."""
        return self.references[index]()


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object alive.

    Raises:
        RuntimeError: From that function, when the object is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        if target is None:
            raise RuntimeError("ovpatch: the object that answers this call does not exist any more")
        return target(*args)

    return call
