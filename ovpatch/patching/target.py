"""Targets: from a dotted path to the slot it names, without an import, and what to do after a later import.

Attributes are read from ``__dict__`` only. ``getattr`` would bind class and static methods, would run the
``__getattr__`` of lazy modules and would hide whether a class defines an attribute or inherits it.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ovpatch.patching.patch import IncompatiblePatchError

Owner = types.ModuleType | type
Listener = Callable[[str], None]

_logger: Final = logging.getLogger("ovpatch.patching")

ABSENT: Final[Any] = type("Absent", (), {"__repr__": lambda self: "<absent>"})()


@dataclass(frozen=True, eq=False)
class Slot:
    """An existing attribute of a module or class."""

    owner: Owner  # module or class whose ``__dict__`` holds the attribute, or will hold it if it is inherited
    name: str  # attribute
    raw: Any  # the raw value, such as the descriptor itself
    inherited_from: type | None = None  # class that defines ``raw``, if the owner inherits it

    @property
    def path(self) -> str:
        """Dotted path, by the owner's own name."""
        return f"{format_owner(self.owner)}.{self.name}"

    def is_same(self, other: Slot) -> bool:
        """Whether both are one attribute of one owner."""
        return self.owner is other.owner and self.name == other.name


class PendingTarget(NamedTuple):
    """A target in a module that is not imported yet."""

    modules: tuple[str, ...]  # modules whose import may bring it
    reason: str  # what it waits for


class MissingTarget(NamedTuple):
    """A target that does not exist."""

    reason: str  # what is missing, for the status of an optional patch
    error: str  # the same with target and remedy, for the error of a required patch
    modules: tuple[str, ...] = ()  # modules whose import may bring it all the same; often none


def format_owner(owner: Owner) -> str:
    """Return the dotted path of a module or class."""
    return owner.__name__ if is_module(owner) else f"{owner.__module__}.{owner.__qualname__}"


def is_module(value: object) -> bool:
    """Whether a value is a real module, by its type: a proxy fakes ``__class__``."""
    return issubclass(type(value), types.ModuleType)


def is_class(value: object) -> bool:
    """Whether a value is a real class."""
    return issubclass(type(value), type)


def get_namespace(owner: Owner) -> dict[str, Any]:
    """Return the ``__dict__`` of a module or class, read without code of its own."""
    if is_module(owner):
        found: dict[str, Any] = types.ModuleType.__getattribute__(owner, "__dict__")
        return found
    found = type.__dict__["__dict__"].__get__(owner)
    return found


def resolve_target(target: str, finished: str = "") -> Slot | PendingTarget | MissingTarget:
    """Find the slot of a dotted path; raise IncompatiblePatchError if a part of it is neither module nor class.

    The module ``finished`` is executed although Python still marks it as initializing, as in its import hook.
    """
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None and is_module(module):
            found = _walk(target, module, parts, length)
            unfinished = getattr(get_namespace(module).get("__spec__"), "_initializing", False)
            if isinstance(found, MissingTarget) and unfinished and module.__name__ != finished:
                return PendingTarget(
                    (), f"{module.__name__} is still being imported: call apply() again after that"
                )
            return found
    return _absent_package(target, parts)


def _absent_package(target: str, parts: list[str]) -> PendingTarget | MissingTarget:
    modules = _not_imported(_prefixes(parts))
    top = parts[0]
    held = sys.modules.get(top)
    if held is not None and not is_module(held):
        raise IncompatiblePatchError(_through_an_object(target, parts, 0, held))
    if sys.modules.get(top, ABSENT) is None or not _can_be_found(top):
        reason = f"there is no package {top!r}"
        remedy = "install it, correct the target, or register the patch with optional=True"
        return MissingTarget(reason, f"{reason} for {target}: {remedy}", modules)
    return PendingTarget(modules, f"{top} is not imported yet")


def _walk(
    target: str, module: types.ModuleType, parts: list[str], at: int
) -> Slot | PendingTarget | MissingTarget:
    owner: Owner = module
    imported = ".".join(parts[:at])
    for index in range(at, len(parts) - 1):
        value = _lookup(owner, parts[index])[0]
        if value is ABSENT:
            return _absent(target, owner, parts, index, imported)
        if not is_module(value) and not is_class(value):
            raise IncompatiblePatchError(_through_an_object(target, parts, index, value))
        owner = value
        imported = value.__name__ if is_module(value) else ""
    raw, holder = _lookup(owner, parts[-1])
    if raw is ABSENT:
        return _absent(target, owner, parts, len(parts) - 1, imported)
    return Slot(owner, parts[-1], raw, None if holder is owner else holder)


def _lookup(owner: Owner, name: str) -> tuple[Any, Any]:
    """Return the raw value of an attribute and the namespace's owner."""
    for holder in _holders(owner):
        raw = get_namespace(holder).get(name, ABSENT)
        if raw is not ABSENT:
            return raw, holder
    return ABSENT, None


def _holders(owner: Owner) -> Iterable[Any]:
    return (owner,) if is_module(owner) else type.__dict__["__mro__"].__get__(owner)


def _absent(
    target: str, owner: Owner, parts: list[str], index: int, imported: str
) -> PendingTarget | MissingTarget:
    name = parts[index]
    submodule = f"{imported}.{name}"
    if is_module(owner) and "__path__" in get_namespace(owner) and _can_be_found(submodule):
        # An aliased module imports its submodules under its own name, not under the target's.
        below = [submodule, *(f"{submodule}.{rest}" for rest in _prefixes(parts[index + 1 :]))]
        return PendingTarget(_not_imported(below), f"{submodule} is not imported yet")
    kind = "module" if is_module(owner) else "class"
    reason = f"{kind} {format_owner(owner)} has no {name!r}"
    names = {
        key
        for holder in _holders(owner)
        for key in list(get_namespace(holder))
        if isinstance(key, str)
    }
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    lazy = is_module(owner) and "__getattr__" in get_namespace(owner)
    remedy = (
        "name the module that defines it (this one makes its attributes on demand)"
        if lazy
        else "correct it"
    )
    error = (
        f"{target} does not exist: {reason.rstrip('.')}.{hint} Nothing was created; {remedy}, or "
        "register the patch "
        "with optional=True"
    )
    return MissingTarget(f"{reason}, and makes its attributes on demand" if lazy else reason, error)


def _through_an_object(target: str, parts: list[str], index: int, value: object) -> str:
    cls = type(value)
    return (
        f"{target} cannot be patched: {'.'.join(parts[: index + 1])} is an object of type "
        f"{cls.__name__}, neither a "
        f"module nor a class. Patch the method on its class, {cls.__module__}.{cls.__qualname__}"
    )


def _prefixes(parts: list[str]) -> Iterable[str]:
    """Yield the dotted paths that may be modules: all proper prefixes."""
    return (".".join(parts[:length]) for length in range(1, len(parts)))


def _not_imported(modules: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in modules if name not in sys.modules)


def _can_be_found(module: str) -> bool:
    """Whether a module can be imported. Its parents are imported, so ``find_spec`` imports nothing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        # A finder that fails to import another module says nothing about this one.
        missing = error.name or ""
        return not (module == missing or module.startswith(missing + "."))
    except (ImportError, ValueError, AttributeError):
        return False


# --- later imports ---

# wrapt neither removes nor de-duplicates its import hooks, and an exception in one breaks the user's import. So one
# listener per module is registered for the whole process.
_lock: Final = threading.Lock()
# As for the write lock, see ovpatch.patching.slot.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
_listeners: Final[dict[str, list[Callable[[], Listener | None]]]] = {}


def call_after_import(module: str, listener: Listener) -> None:
    """Call ``listener(module)`` once, after the next import of a module that is not imported now.

    A bound method is held weakly, so that it keeps no manager alive.
    """
    if module in sys.modules:
        return
    held = (
        weakref.WeakMethod(listener) if isinstance(listener, types.MethodType) else lambda: listener
    )
    with _lock:
        first = module not in _listeners
        known = _listeners.setdefault(module, [])
        if not any(one() == listener for one in known):
            known.append(held)
    if first:
        # wrapt is slow to import, so it is imported only when a patch waits for a module.
        from wrapt import register_post_import_hook

        register_post_import_hook(_imported, module)


def _imported(module: types.ModuleType) -> None:
    name = module.__name__
    with _lock:
        listeners = _listeners.pop(name, [])
    for held in listeners:
        listener = held()
        if listener is None:
            continue
        try:
            listener(name)
        except Exception:  # any error here would break the user's import
            _logger.exception("a patch that waited for %s failed", name)
