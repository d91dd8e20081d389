"""The function that is installed: a plain Python function that counts, can be switched, and survives torch.compile.

[Note: plain functions]
Dynamo, the LR schedulers (``step.__func__``), pickle and ``inspect`` treat functions specially and see through
proxies to the original, silently. So what is installed is a function, and everything that changes lives in its
closure: Dynamo guards on the identity of ``target``, hence a switch recompiles and nothing else does. The counter
must not be touched in traced code, where a changing int would be guarded on and recompile at each call; there, a
function that Dynamo evaluates once while tracing notes that the patch is part of the graph.

[Note: skipped frames]
Where Dynamo does not trace a caller, as ``Module._call_impl``, it looks at every Python function that is called below
it. Stock has a builtin there, or one function; a frame of ours would be compiled by itself, looked up at each call, and
all installed functions would share one code object's cache. So that frame is skipped, and what it calls is not.

[Note: the original's globals]
TorchScript compiles the source of the original, which it finds by ``__wrapped__``, with the names that the installed
function sees: its globals, and over them what its closure holds. So it is given the original's globals, and all that
it needs is in its closure, under names that no script has.
"""

from __future__ import annotations

import functools
import sys
import types
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


class _Tracing:
    """Whether a call is being traced. Asks torch once that is imported: patches may be installed before it is."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: Callable[[], bool] = _never


_tracing: Final = _Tracing()


def _torch_is_here(_module: str) -> None:
    _tracing.now = getattr(sys.modules["torch.compiler"], "is_dynamo_compiling", _never)


def _dynamo_is_here(module: str) -> None:
    skip = getattr(sys.modules[module], "skip_code", None)
    if skip is not None:  # [Note: skipped frames]
        skip(_build(_never, _never)[0].__code__)  # all installed functions have the same


def learn_about_torch() -> None:
    """Make sure that calls in traced code are recognised, now or as soon as torch is imported."""
    if _tracing.now is not _never:
        return
    for module, is_here in (("torch.compiler", _torch_is_here), ("torch._dynamo.eval_frame", _dynamo_is_here)):
        if module in sys.modules:
            is_here(module)
        else:
            watch(module, is_here)


class Dispatcher:
    """One installed function and the hold on it.

    Attributes:
        function: What is installed.
        switch: Makes calls go to another function from now on.
    """

    __slots__ = ("_credited", "_read", "function", "switch")

    def __init__(self, target: Function, like: Function) -> None:
        self.function, self.switch, self._read = _build(target, like)
        self._credited = (0, 0)
        _disguise(self.function, like)

    def take(self) -> tuple[int, int]:
        """Return the calls and the traces since this was asked last."""
        now, last = self._read(), self._credited
        self._credited = now
        return now[0] - last[0], now[1] - last[1]


def _build(
    target: Function, like: Function
) -> tuple[Function, Callable[[Function], None], Callable[[], tuple[int, int]]]:
    _ovpatch_target, _ovpatch_tracing = target, _tracing
    _ovpatch_calls = traces = 0

    def _ovpatch_note_trace() -> bool:
        nonlocal traces
        traces += 1
        return True

    # As torch.compiler.assume_constant_result marks it.
    _ovpatch_note_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        nonlocal _ovpatch_calls
        if _ovpatch_tracing.now():
            _ovpatch_note_trace()
        else:
            _ovpatch_calls += 1
        return _ovpatch_target(*args, **kwargs)

    def switch(new: Function) -> None:
        nonlocal _ovpatch_target
        _ovpatch_target = new

    # See [Note: the original's globals]; what is not written in Python has none.
    names = getattr(like, "__globals__", dispatch.__globals__)
    installed = types.FunctionType(dispatch.__code__, names, dispatch.__name__, None, dispatch.__closure__)
    return installed, switch, lambda: (_ovpatch_calls, traces)


def _disguise(function: Function, like: Function) -> None:
    """Give an installed function the name, signature and attributes of the original."""
    functools.update_wrapper(function, like)
    attributes = vars(function)
    for key in [key for key in attributes if key.startswith(_DYNAMO_KEYS) or key == "__ovpatch__"]:
        del attributes[key]
    for name in _CACHE_METHODS:
        if hasattr(like, name) and name not in attributes:
            attributes[name] = getattr(like, name)
