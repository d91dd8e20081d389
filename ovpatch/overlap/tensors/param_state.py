"""What ovpatch keeps for objects of the script, without keeping these alive.

Tables by ``id()`` need a weak reference each: an id is given to another object once the first one is gone. They are
here, and nowhere else: :func:`param_state` for a parameter, :func:`kept_values` for a module or an optimizer,
:class:`WeakParams` for the parameters of a model.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


class ParamState:
    """What is known of one parameter."""

    __slots__ = ("dtensor", "experts", "local_grad_hook", "param", "reducers", "sharder")

    def __init__(self, param: weakref.ref[Tensor]) -> None:
        self.param = param
        # The DTensor that stands in the parameter's place in its module, if there is one.
        self.dtensor: Callable[[], Any] = lambda: None
        # What shards the parameter's gradient, held weakly, and the parameter's index there.
        self.sharder: tuple[weakref.ref[Any], int] | None = None
        self.local_grad_hook: RemovableHandle | None = None  # notes gradients which are not reduced
        # The reducers that count its gradients, held weakly, and its index there. It may be in several models.
        self.reducers: list[tuple[weakref.ref[Any], int]] = []
        self.experts: Callable[[], Any] = lambda: None  # what averages its gradient as an expert's


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


def weak_key(owner: T, table: dict[int, Any]) -> weakref.ref[T]:
    """Return a weak reference that drops the entry ``id(owner)`` of a table when the owner dies."""
    return weakref.ref(owner, functools.partial(drop_entry, table, id(owner)))


def drop_entry(table: dict[int, Any], key: int, _dead: object) -> None:
    """Drop an entry of what has died, as the callback of a weak reference."""
    table.pop(key, None)


_states: dict[int, ParamState] = {}


def kept_values(owner: object) -> dict[Hashable, Any]:
    """Return what is kept for a module, an optimizer or another object, by name; it goes with the object.

    No value may reference the owner.
    """
    known = _kept.get(id(owner))
    if known is None or known[0]() is not owner:
        known = _kept[id(owner)] = (weak_key(owner, _kept), {})
    return known[1]


def find_owners(name: Hashable) -> list[tuple[Any, Any]]:
    """Return the objects for which a value of this name is kept, each with the value."""
    found = []
    for reference, values in list(_kept.values()):  # other threads may add to it
        owner = reference()
        if owner is not None and name in values:
            found.append((owner, values[name]))
    return found


_kept: dict[int, tuple[weakref.ref[Any], dict[Hashable, Any]]] = {}


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
