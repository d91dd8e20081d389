"""Wrappers and looks that several test files use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ovpatch.patching import PatchManager, PatchStatus


def tag(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrap function whose wrappers put ``name`` in front of a result."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return f"{name}({original(*args, **kwargs)})"

        return wrapper

    return wrap


def patch(pm: PatchManager, module: Any, path: str, *args: Any, **kwargs: Any) -> None:
    """Declare one patch, of something in a module, and apply it."""
    pm.register_patch(f"{module.__name__}.{path}", *args, **kwargs)
    pm.apply()


def only(pm: PatchManager) -> PatchStatus:
    """Return the one status of a manager."""
    (status,) = pm.statuses()
    return status


def states(pm: PatchManager) -> list[str]:
    return [status.state.value for status in pm.statuses()]


def snapshot(owner: Any) -> dict[str, Any]:
    """Return what an owner holds; compare with :func:`same`."""
    return dict(vars(owner))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two snapshots hold the very same objects."""
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)


def plus(amount: float) -> Callable[[Any], Any]:
    """Return a wrap function whose wrapper adds to a result."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) + amount

        return wrapper

    return wrap
