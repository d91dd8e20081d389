"""Parameters whose uses are watched, to see whether autocast casts in all of them.

[Note: watched by type] As long as nobody has read a watched parameter other than through autocast's cast, its class is
:class:`WatchedParameter`, a parameter with all its values. At the first other read it is a plain one again, at no cost.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.autocast import casts_operands
from ovpatch.overlap.metadata import LIKE, METADATA
from ovpatch.overlap.mixed import name_of
from ovpatch.overlap.nested import leaves
from ovpatch.overlap.pending import DERIVED, PendingParameter, reduce_between_processes

_UNSEEN: Final = "code that does not ask for its class"


@dataclass(eq=False)
class Uses:
    """What was seen of a parameter's uses.

    Attributes:
        dtype: What autocast should cast it to.
        casts: In how many uses it did.
        reader: Who read it otherwise, which ended the watch; "" if nobody did.
        thread: On which thread.
    """

    dtype: torch.dtype
    casts: int = 0
    reader: str = ""
    thread: int = 0


class WatchedParameter(PendingParameter):
    """The class of a parameter that is watched."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note what ``func`` is, then call it."""
        kwargs = kwargs or {}
        if func in METADATA or func in LIKE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        ones = [value for value in leaves((args, kwargs)) if type(value) is WatchedParameter]
        if ones and all(_is_cast(one, func, kwargs) for one in ones):
            return _noted(ones, func, args, kwargs)
        # If torch says that there is one, it may be in a container that we do not know.
        for key in [id(one) for one in ones] or list(_watched):
            _end(key, name_of(func))
        return func(*args, **kwargs)

    def _bring(self) -> None:
        _end(id(self), _UNSEEN)


def watch(param: Parameter, dtype: torch.dtype) -> Uses:
    """Begin to watch a plain parameter; return where its uses are noted, until :func:`unwatch`."""
    key, uses = id(param), Uses(dtype)
    _watched[key] = (weakref.ref(param, partial(_forget, key)), uses)
    DERIVED.add(key)
    param.__class__ = WatchedParameter
    return uses


def unwatch(param: Tensor) -> None:
    """Make a parameter a plain one again, if it is watched."""
    if is_watched(param):
        _end(id(param), "")


def is_watched(param: Any) -> bool:
    """Tell whether this is a parameter that is watched, and has not been read otherwise."""
    return type(param) is WatchedParameter


def peek(param: Tensor) -> Tensor:
    """Return a parameter, in a form that may be read while it is watched, and is not noted."""
    if not is_watched(param):
        return param
    with torch._C.DisableTorchFunctionSubclass():
        return param.detach()


_watched: dict[int, tuple[weakref.ref[Parameter], Uses]] = {}  # by id() of the parameter


def _is_cast(param: Tensor, func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    entry = _watched.get(id(param))
    return entry is not None and casts_operands(func, kwargs, param.device.type, entry[1].dtype)


def _noted(ones: Sequence[Tensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with plain parameters, which are watched again afterwards."""
    for one in ones:
        one.__class__ = Parameter
    try:
        return func(*args, **kwargs)
    finally:
        for one in ones:
            entry = _watched.get(id(one))
            if entry is not None:
                entry[1].casts += 1
                one.__class__ = WatchedParameter


def _end(key: int, reader: str) -> None:
    entry = _watched.get(key)
    if entry is None:  # another thread has just done it
        return
    param = entry[0]()
    if is_watched(param):
        param.__class__ = Parameter
    entry[1].reader, entry[1].thread = reader, threading.get_ident()
    _forget(key)


def _forget(key: int, _dead: object = None) -> None:
    _watched.pop(key, None)
    DERIVED.discard(key)


ForkingPickler.register(WatchedParameter, reduce_between_processes)
