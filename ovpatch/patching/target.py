"""Targets: the slots that dotted paths name, found without an import, and calls after a later import.

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

# The raw value of an attribute that a namespace does not have. None is a value like any other.
ABSENT: Final[Any] = type("Absent", (), {"__repr__": lambda self: "<absent>"})()


@dataclass(frozen=True, eq=False)
class Slot:
    """An existing attribute of a module or class."""

    # The module or class whose ``__dict__`` holds the attribute, or will hold it if the owner inherits it now.
    owner: Owner
    # The name of the attribute.
    name: str
    # The value in the ``__dict__``: the descriptor itself, not the function that it returns.
    raw: Any
    # The class that defines ``raw``; None if the owner does.
    inherited_from: type | None = None

    @property
    def path(self) -> str:
        """The dotted path, by the owner's own name."""
        return f"{format_owner(self.owner)}.{self.name}"

    def is_same(self, slot: Slot) -> bool:
        """Return whether both are one attribute of one owner."""
        return self.owner is slot.owner and self.name == slot.name


class PendingTarget(NamedTuple):
    """A target in a module that is not imported yet."""

    # The modules whose import may define the target.
    modules: tuple[str, ...]
    # The import that the target waits for, for the status of the patch.
    reason: str


class MissingTarget(NamedTuple):
    """A target that does not exist."""

    # The missing part of the path, for the status of an optional patch.
    reason: str
    # The reason with the target and a remedy, for the error of a required patch.
    error: str
    # The modules whose import may define the target nevertheless. It is often empty.
    modules: tuple[str, ...] = ()


def format_owner(owner: Owner) -> str:
    """Return the dotted path of a module or class."""
    return owner.__name__ if is_module(owner) else f"{owner.__module__}.{owner.__qualname__}"


def is_module(value: object) -> bool:
    """Return whether a value is a real module, by its type, because a proxy fakes ``__class__``."""
    return issubclass(type(value), types.ModuleType)


def is_class(value: object) -> bool:
    """Return whether a value is a real class, by its type, because a proxy fakes ``__class__``."""
    return issubclass(type(value), type)


def get_namespace(owner: Owner) -> dict[str, Any]:
    """Return the ``__dict__`` of a module or class without running its own attribute access."""
    if is_module(owner):
        found: dict[str, Any] = types.ModuleType.__getattribute__(owner, "__dict__")
        return found
    found = type.__dict__["__dict__"].__get__(owner)
    return found


def resolve_target(target: str, finished: str = "") -> Slot | PendingTarget | MissingTarget:
    """Return the slot of a dotted path, or the reason for its absence.

    Args:
        target: The dotted path.
        finished: A module that counts as imported although Python still marks it as initializing, because its
            import hook runs now.

    Raises:
        IncompatiblePatchError: A part of the path is neither a module nor a class.
    """
    parts = target.split(".")
    # The longest prefix in sys.modules is the module: a package may have an attribute of its submodule's name.
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None and is_module(module):
            found = _walk_namespaces(target, module, parts, length)
            is_initializing = getattr(get_namespace(module).get("__spec__"), "_initializing", False)
            # A module that is half imported may define the attribute further down.
            if isinstance(found, MissingTarget) and is_initializing and module.__name__ != finished:
                return PendingTarget(
                    (), f"{module.__name__} is still being imported: call apply() again after that"
                )
            return found
    return _explain_absent_package(target, parts)


def _explain_absent_package(target: str, parts: list[str]) -> PendingTarget | MissingTarget:
    modules = _select_not_imported(_list_prefixes(parts))
    top = parts[0]
    found = sys.modules.get(top)
    # A library may replace its module in sys.modules by an object.
    if found is not None and not is_module(found):
        raise IncompatiblePatchError(_explain_object_in_path(target, parts, 0, found))
    # None in sys.modules forbids the import.
    if sys.modules.get(top, ABSENT) is None or not _is_importable(top):
        reason = f"there is no package {top!r}"
        remedy = "install it, correct the target, or register the patch with optional=True"
        return MissingTarget(reason, f"{reason} for {target}: {remedy}", modules)
    return PendingTarget(modules, f"{top} is not imported yet")


def _walk_namespaces(
    target: str, module: types.ModuleType, parts: list[str], start: int
) -> Slot | PendingTarget | MissingTarget:
    """Follow ``parts`` from ``start`` through the namespaces of modules and classes."""
    owner: Owner = module
    # The name under which Python knows the owner if it is a module; an alias in the path has another name.
    imported = ".".join(parts[:start])
    for index in range(start, len(parts) - 1):
        value = _look_up(owner, parts[index])[0]
        if value is ABSENT:
            return _explain_absence(target, owner, parts, index, imported)
        if not is_module(value) and not is_class(value):
            raise IncompatiblePatchError(_explain_object_in_path(target, parts, index, value))
        owner = value
        imported = value.__name__ if is_module(value) else ""
    raw, holder = _look_up(owner, parts[-1])
    if raw is ABSENT:
        return _explain_absence(target, owner, parts, len(parts) - 1, imported)
    return Slot(owner, parts[-1], raw, None if holder is owner else holder)


def _look_up(owner: Owner, name: str) -> tuple[Any, Any]:
    """Return the raw value of an attribute and the module or class that defines it."""
    for holder in _list_holders(owner):
        raw = get_namespace(holder).get(name, ABSENT)
        if raw is not ABSENT:
            return raw, holder
    return ABSENT, None


def _list_holders(owner: Owner) -> Iterable[Any]:
    """Return the owners of all namespaces that Python searches, without the ``mro`` of a metaclass."""
    return (owner,) if is_module(owner) else type.__dict__["__mro__"].__get__(owner)


def _explain_absence(
    target: str, owner: Owner, parts: list[str], index: int, imported: str
) -> PendingTarget | MissingTarget:
    name = parts[index]
    submodule = f"{imported}.{name}"
    if is_module(owner) and "__path__" in get_namespace(owner) and _is_importable(submodule):
        # An aliased module imports its submodules under its own name, not under the target's.
        below = [submodule, *(f"{submodule}.{rest}" for rest in _list_prefixes(parts[index + 1 :]))]
        return PendingTarget(_select_not_imported(below), f"{submodule} is not imported yet")
    kind = "module" if is_module(owner) else "class"
    reason = f"{kind} {format_owner(owner)} has no {name!r}"
    names = {
        key
        for holder in _list_holders(owner)
        for key in list(get_namespace(holder))
        if isinstance(key, str)
    }
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    is_lazy = is_module(owner) and "__getattr__" in get_namespace(owner)
    remedy = (
        "name the module that defines it (this one makes its attributes on demand)"
        if is_lazy
        else "correct it"
    )
    error = (
        f"{target} does not exist: {reason.rstrip('.')}.{hint} Nothing was created; {remedy}, or "
        "register the patch with optional=True"
    )
    return MissingTarget(
        f"{reason}, and makes its attributes on demand" if is_lazy else reason, error
    )


def _explain_object_in_path(target: str, parts: list[str], index: int, value: object) -> str:
    cls = type(value)
    return (
        f"{target} cannot be patched: {'.'.join(parts[: index + 1])} is an object of type "
        f"{cls.__name__}, neither a module nor a class. Patch the method on its class, "
        f"{cls.__module__}.{cls.__qualname__}"
    )


def _list_prefixes(parts: list[str]) -> Iterable[str]:
    """Yield the dotted paths that may be modules: all proper prefixes."""
    return (".".join(parts[:length]) for length in range(1, len(parts)))


def _select_not_imported(modules: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in modules if name not in sys.modules)


def _is_importable(module: str) -> bool:
    """Return whether a module can be imported. Its parents are imported, so ``find_spec`` imports nothing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        # A finder that fails to import another module does not prove that this module is missing.
        missing = error.name or ""
        return not (module == missing or module.startswith(missing + "."))
    except (ImportError, ValueError, AttributeError):
        return False


# --- later imports ---

# wrapt neither removes nor de-duplicates its import hooks, and an exception in a hook breaks the user's import. So
# the process registers a single hook per module, which calls all listeners.
_listeners_lock: Final = threading.Lock()
# A forked child has only the thread that forked: a lock held by another thread would stay locked.
os.register_at_fork(
    before=_listeners_lock.acquire,
    after_in_parent=_listeners_lock.release,
    after_in_child=_listeners_lock.release,
)
# By name of the module: functions that return a listener, or None if its manager was freed.
_listeners: Final[dict[str, list[Callable[[], Listener | None]]]] = {}


def call_after_import(module: str, listener: Listener) -> None:
    """Call ``listener(module)`` once, after the next import of a module that is not imported now.

    A bound method is held weakly, so that it keeps no manager alive. A repeated registration counts once.
    """
    if module in sys.modules:
        return
    reference = (
        weakref.WeakMethod(listener) if isinstance(listener, types.MethodType) else lambda: listener
    )
    with _listeners_lock:
        is_first = module not in _listeners
        references = _listeners.setdefault(module, [])
        if not any(known() == listener for known in references):
            references.append(reference)
    if is_first:
        # wrapt is slow to import, so it is imported only when a patch waits for a module.
        from wrapt import register_post_import_hook

        register_post_import_hook(_call_listeners, module)


def _call_listeners(module: types.ModuleType) -> None:
    name = module.__name__
    # Listeners run without the lock: they import modules and register further listeners.
    with _listeners_lock:
        references = _listeners.pop(name, [])
    for reference in references:
        listener = reference()
        if listener is None:
            continue
        try:
            listener(name)
        # An error of a patch must not break the user's import.
        except Exception:
            _logger.exception("a patch that waited for %s failed", name)
