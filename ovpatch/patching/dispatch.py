"""The function that is installed: a plain Python function that counts, can be switched, and survives torch.compile.

[Note: plain functions]
Dynamo, the LR schedulers (``step.__func__``), pickle and ``inspect`` treat functions specially and see through
proxies to the original, silently. So what is installed is a function, and everything that changes lives in its
closure: Dynamo guards on the identity of ``target``, hence a switch recompiles and nothing else does. The counter
must not be touched in traced code, where a changing int would be guarded on and recompile at each call; there, a
function that Dynamo evaluates once while tracing notes that the patch is part of the graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol

from ovpatch.patching.late import watch

Function = Callable[..., Any]

# What functools.wraps copies and must not be: they tell Dynamo to trace, or not to trace, the function they belong to.
_DYNAMO_KEYS: Final = ("_torchdynamo", "get_compiler_config")
_CACHE_METHODS: Final = ("cache_info", "cache_clear", "cache_parameters")


class Mark(Protocol):
    """What ``__ovpatch__`` of an installed function tells."""

    @property
    def target(self) -> str:
        """Where the function was installed."""

    @property
    def patches(self) -> tuple[Any, ...]:
        """Patches that a call runs through, closest to the original first."""


def _never() -> bool:
    return False


# Rebound to torch's once that is imported. A global and not an import: patches may be installed before torch is.
_is_traced: Callable[[], bool] = _never


def _torch_is_here(_module: str) -> None:
    global _is_traced
    _is_traced = getattr(sys.modules["torch.compiler"], "is_dynamo_compiling", _never)


def learn_about_torch() -> None:
    """Make sure that calls in traced code are recognised, now or as soon as torch is imported."""
    if _is_traced is not _never:
        return
    if "torch.compiler" in sys.modules:
        _torch_is_here("torch.compiler")
    else:
        watch("torch.compiler", _torch_is_here)


class Dispatcher:
    """One installed function and the hold on it.

    Attributes:
        function: What is installed.
        switch: Makes calls go to another function from now on.
    """

    __slots__ = ("_credited", "_read", "function", "switch")

    def __init__(self, target: Function, like: Function) -> None:
        self.function, self.switch, self._read = _build(target)
        self._credited = (0, 0)
        _disguise(self.function, like)

    def take(self) -> tuple[int, int]:
        """Return the calls and the traces since this was asked last."""
        now, last = self._read(), self._credited
        self._credited = now
        return now[0] - last[0], now[1] - last[1]


def _build(target: Function) -> tuple[Function, Callable[[Function], None], Callable[[], tuple[int, int]]]:
    calls = traces = 0

    def note_trace() -> bool:
        nonlocal traces
        traces += 1
        return True

    note_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if _is_traced():
            note_trace()
        else:
            calls += 1
        return target(*args, **kwargs)

    def switch(new: Function) -> None:
        nonlocal target
        target = new

    return dispatch, switch, lambda: (calls, traces)


def _disguise(function: Function, like: Function) -> None:
    """Give an installed function the name, signature and attributes of the original."""
    functools.update_wrapper(function, like)
    attributes = vars(function)
    for key in [key for key in attributes if key.startswith(_DYNAMO_KEYS) or key == "__ovpatch__"]:
        del attributes[key]
    for name in _CACHE_METHODS:
        if hasattr(like, name) and name not in attributes:
            attributes[name] = getattr(like, name)
