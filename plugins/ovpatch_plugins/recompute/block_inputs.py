"""The arguments of a block's call, kept for its recomputation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ovpatch_plugins.recompute.report import note


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)


class _Save(torch.autograd.Function):
    """Saves tensors as an operation does: autograd notices when they are changed in place, and hooks may move them."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("this node is in no graph")


class BlockInputs:
    """Arguments of a call.

    Args:
        args: Arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        tensors: list[Tensor] = []
        self._args = [_keep(item, tensors) for item in args]
        self._kwargs = {key: _keep(item, tensors) for key, item in kwargs.items()}
        token = torch.empty(0, requires_grad=True)
        # Torch 2.11 releases what a node saved as soon as no output of it is left.
        self._output: Any = _Save.apply(token, *tensors)  # type: ignore[no-untyped-call]  # torch's apply()

    def read(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments.

        Raises:
            RuntimeError: A tensor was changed in place since.
        """
        tensors = self._output.grad_fn.saved_tensors
        return [_restore(item, tensors) for item in self._args], {
            key: _restore(item, tensors) for key, item in self._kwargs.items()
        }


class _Place:
    """Stands for a tensor."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Cache:
    """A cache of keys and values as it was before a forward that adds to it."""

    def __init__(self, cache: Any) -> None:
        self._before = _copy_cache(cache)

    def copy(self) -> Any:
        """Return a cache for a recomputation."""
        return _copy_cache(self._before)


def is_cache(value: Any) -> bool:
    """Tell whether an argument is a cache of keys and values of transformers."""
    return any(cls.__name__ == "Cache" and cls.__module__.startswith("transformers.") for cls in type(value).__mro__)


def _copy_cache(cache: Any) -> Any:
    """Copy a cache and its layers, which get new tensors where they grow, but not the tensors."""
    made = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(made, name, [copy.copy(item) if hasattr(item, "__dict__") else item for item in value])
    return made


def _keep(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value with places for its tensors, and with copies of what a forward might change."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, tuple):
        items = [_keep(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_keep(item, tensors) for item in value]
    if type(value) is dict:
        return {key: _keep(item, tensors) for key, item in value.items()}
    if not is_cache(value):
        return value
    note("blocks get a key-value cache, which keeps keys and values of all of them: use_cache=False saves that memory")
    return _Cache(value)


def _restore(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, _Cache):
        return value.copy()
    if isinstance(value, tuple):
        items = [_restore(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_restore(item, tensors) for item in value]
    if type(value) is dict:
        return {key: _restore(item, tensors) for key, item in value.items()}
    return value
