"""References that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Weakly(Sequence[torch.nn.Parameter]):
    """Parameters that are not kept alive.

    A gradient that is a placeholder knows the shards, and belongs to its parameter in a way that Python's garbage
    collector does not see: with the parameters kept here, a model would never be freed.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._references = [weakref.ref(param) for param in params]

    def __getitem__(self, index: Any) -> Any:
        param = self._references[index]()
        if param is None:
            raise RuntimeError("ovpatch: the parameter that is asked for does not exist any more")
        return param

    def __len__(self) -> int:
        return len(self._references)

    def find(self, index: int) -> torch.nn.Parameter | None:
        """Return a parameter, if it still exists."""
        return self._references[index]()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        if target is None:
            raise RuntimeError("what was asked for does not exist any more")
        return target(*args)

    return call


def forget(table: dict[int, Any], key: int, _dead: object) -> None:
    """Drop an entry of what has died, as the callback of a weak reference."""
    table.pop(key, None)
