"""Slots: how Python reads them, the function in their descriptor, and writes that can be undone."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from ovpatch.patching.patch import IncompatiblePatchError
from ovpatch.patching.target import (
    ABSENT,
    Owner,
    Slot,
    format_owner,
    get_namespace,
    is_class,
    is_module,
)

Function = Callable[..., Any]


class SlotKind(Enum):
    """How Python reads the attribute."""

    FUNCTION = "function"
    METHOD = "method"
    STATIC = "static method"
    CLASSMETHOD = "class method"
    GETTER = "property"


_CACHED: Final = type(functools.lru_cache(maxsize=None)(lambda: None))
# By the type of the raw value in the namespace of a class.
_CLASS_KINDS: Final[dict[type, SlotKind]] = {
    types.FunctionType: SlotKind.METHOD,
    _CACHED: SlotKind.METHOD,
    types.MethodDescriptorType: SlotKind.METHOD,
    types.WrapperDescriptorType: SlotKind.METHOD,
    types.BuiltinFunctionType: SlotKind.STATIC,
    types.MethodType: SlotKind.STATIC,
    types.MethodWrapperType: SlotKind.STATIC,
    staticmethod: SlotKind.STATIC,
    classmethod: SlotKind.CLASSMETHOD,
    types.ClassMethodDescriptorType: SlotKind.CLASSMETHOD,
    property: SlotKind.GETTER,
}
_DESCRIPTORS: Final = (staticmethod, classmethod, types.ClassMethodDescriptorType, property)


def get_slot_kind(slot: Slot) -> SlotKind:
    """Return how Python reads the slot; raise IncompatiblePatchError if it cannot be patched."""
    kind = _CLASS_KINDS.get(type(slot.raw))
    if is_module(slot.owner):
        kind = (
            SlotKind.FUNCTION if kind is not None and type(slot.raw) not in _DESCRIPTORS else None
        )
    elif not callable(unwrap_descriptor(slot.raw)):
        kind = None
    if kind is None:
        raise IncompatiblePatchError(_refusal(slot))
    if slot.inherited_from is object:
        raise IncompatiblePatchError(
            f"{slot.path} is inherited from object, whose methods check whether they were "
            "overridden: patch "
            f"a method that {format_owner(slot.owner)} or one of its bases defines"
        )
    if not is_writable(slot.owner):
        raise IncompatiblePatchError(
            f"{format_owner(slot.owner)} is a built-in class and its attributes cannot be set: "
            "patch the function that "
            f"calls {slot.name!r}, or a Python subclass"
        )
    return kind


def _refusal(slot: Slot) -> str:
    if is_module(slot.raw):
        return f"{slot.path} is a module: name a function or method in it"
    if is_class(slot.raw):
        return (
            f"{slot.path} is a class. Replacing classes breaks isinstance, pickling and super(): "
            "patch its methods, "
            f"for example '{slot.path}.__init__'"
        )
    cls = type(slot.raw)
    named = f"{cls.__module__}.{cls.__qualname__}"
    if callable(slot.raw):
        return f"{slot.path} is an object of type {named}, not a plain function: patch '{named}.__call__' or its caller"
    return (
        f"{slot.path} is {slot.raw!r}, not a function or method: patch the functions that read it"
    )


def unwrap_descriptor(raw: Any) -> Any:
    """Return the function that a descriptor calls; other values are returned as they are."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def make_descriptor(slot: Slot, kind: SlotKind, function: Function) -> Any:
    """Return ``function`` in a descriptor of the slot's kind."""
    if kind is SlotKind.STATIC:
        return staticmethod(function)
    if kind is SlotKind.CLASSMETHOD:
        return classmethod(function)
    return slot.raw.getter(function) if kind is SlotKind.GETTER else function


def unwrap_replacement(replacement: Any, slot: Slot, kind: SlotKind) -> Function:
    """Return a replacement's function; IncompatiblePatchError for another descriptor, or a property with a setter."""
    wanted = {
        staticmethod: SlotKind.STATIC,
        classmethod: SlotKind.CLASSMETHOD,
        property: SlotKind.GETTER,
    }.get(type(replacement))
    if wanted not in (None, kind):
        raise IncompatiblePatchError(
            f"{slot.path} is a {kind.value} and its replacement is a {type(replacement).__name__}: "
            "pass a plain "
            "function, the descriptor is kept"
        )
    accessors = getattr(slot.raw, "fset", None), getattr(slot.raw, "fdel", None)
    if wanted is SlotKind.GETTER and (replacement.fset, replacement.fdel) not in (
        (None, None),
        accessors,
    ):
        raise IncompatiblePatchError(
            f"the replacement of property {slot.path} brings a setter or deleter, and only the "
            "getter of a property "
            "is patched: pass the getter function"
        )
    function: Function = unwrap_descriptor(replacement)
    return function


def make_base(slot: Slot, kind: SlotKind) -> Function:
    """Return the function that the innermost wrapper gets as the original.

    An inherited attribute is looked up at each call, as Python does without the patch: the base class may be patched
    later, and with several bases the next class in the method resolution order depends on the instance.
    """
    found: Function = unwrap_descriptor(slot.raw)
    owner: Any = slot.owner
    name = slot.name
    if slot.inherited_from is None:
        return found
    if kind is SlotKind.STATIC:
        return lambda *args, **kwargs: getattr(super(owner, owner), name)(*args, **kwargs)
    if kind is SlotKind.GETTER:
        return lambda self, /: getattr(super(owner, self), name)
    is_method = kind is SlotKind.METHOD
    # The first instance of an optimizer class wraps `step` of the class in `profile_hook_step`, which runs the step
    # hooks, unless `step` carries the mark `hooked`. A patched `AdamW.step`, inherited from `Adam`, is wrapped that
    # way. When `Adam.step` is wrapped later, the look-up would find a second wrapper and run the hooks twice; stock
    # `AdamW` keeps the bare function. So the look-up unwraps a `step` that carries the mark.
    is_unhooked_step = is_method and name == "step" and not hasattr(found, "hooked")

    def inherited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_method and not isinstance(self, owner):
            return found(self, *args, **kwargs)
        below = getattr(super(owner, self), name)
        if is_unhooked_step and hasattr(below, "hooked"):
            return below.__wrapped__(self, *args, **kwargs)
        return below(*args, **kwargs)

    return inherited


def set_picklable_name(function: Any, slot: Slot, away: Callable[[types.ModuleType], bool]) -> None:
    """Name a function so that pickle finds it by that name; a module that is ``away`` keeps the original."""
    if is_class(slot.owner):
        if slot.inherited_from is not None:
            function.__module__ = slot.owner.__module__
            function.__qualname__ = f"{slot.owner.__qualname__}.{slot.name}"
        return
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is None or home is slot.owner or not is_module(home):
        return
    if get_namespace(home).get(function.__qualname__) is slot.raw and away(home):
        function.__module__, function.__qualname__ = slot.owner.__name__, slot.name


# --- writes and their undo ---

# All managers of the process share the write lock, since two of them may patch one slot. Only dictionary operations
# run under it: no wrap function, no hook installation, no import. So its holder never waits for another thread.

WRITE_LOCK: Final = threading.RLock()
# A forked child has only the thread that forked: a lock held by another thread would stay locked.
os.register_at_fork(
    before=WRITE_LOCK.acquire, after_in_parent=WRITE_LOCK.release, after_in_child=WRITE_LOCK.release
)

_HEAP_TYPE: Final = 1 << 9
_IMMUTABLE_TYPE: Final = 1 << 8


def is_writable(owner: Owner) -> bool:
    """Whether attributes of ``owner`` can be set; those of static types, written in C, cannot."""
    if is_module(owner):
        return True
    flags = owner.__flags__
    return bool(flags & _HEAP_TYPE) and not flags & _IMMUTABLE_TYPE


def read_slot(owner: Owner, name: str) -> Any:
    """Return the raw value in the owner's own namespace, or ``ABSENT``."""
    return get_namespace(owner).get(name, ABSENT)


def write_slot(owner: Owner, name: str, value: Any) -> None:
    """Set or, for ``ABSENT``, delete an attribute.

    A ``__setattr__`` written in Python, of a module or metaclass, is bypassed: its side effects could not be undone.
    One written in C is called, as that of pybind11 classes such as ``torch.cuda.CUDAGraph``.
    """
    if isinstance(owner, types.ModuleType):
        if value is ABSENT:
            get_namespace(owner).pop(name, None)
        else:
            get_namespace(owner)[name] = value
    elif value is not ABSENT:
        _get_c_method(owner, "__setattr__")(owner, name, value)
    elif name in get_namespace(owner):
        _get_c_method(owner, "__delattr__")(owner, name)


def _get_c_method(owner: type, method: str) -> Callable[..., None]:
    """Return a method of the nearest metaclass that defines it in C, at last of ``type``."""
    methods = (vars(meta).get(method) for meta in inspect.getmro(type(owner)))
    return next(found for found in methods if isinstance(found, types.WrapperDescriptorType))


@dataclass(frozen=True, eq=False)
class SlotWrite:
    """One written attribute."""

    owner: Owner  # module or class
    name: str  # attribute
    old: Any  # raw value before, ``ABSENT`` if the owner inherited it
    new: Any  # raw value after

    def undo(self) -> bool:
        """Write the old value back; returns False, and writes nothing, if the slot was overwritten since."""
        if read_slot(self.owner, self.name) is not self.new:
            return False
        write_slot(self.owner, self.name, self.old)
        return True


def write_reversibly(owner: Owner, name: str, new: Any, undo: ExitStack) -> SlotWrite:
    """Write an attribute; ``undo`` writes the old value back when it is closed."""
    done = SlotWrite(owner, name, read_slot(owner, name), new)
    write_slot(owner, name, new)
    undo.callback(done.undo)
    return done
