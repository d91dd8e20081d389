"""Slots: their kinds, the functions in their descriptors, and writes that can be undone."""

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
    """The ways in which Python reads an attribute."""

    FUNCTION = "function"
    METHOD = "method"
    STATIC = "static method"
    CLASSMETHOD = "class method"
    GETTER = "property"


# The type of functools.lru_cache() is written in C and has no public name.
_CACHED_TYPE: Final = type(functools.lru_cache(maxsize=None)(lambda: None))
# The kinds by the type of the raw value in the namespace of a class. A type that is missing here cannot be patched.
_CLASS_KINDS: Final[dict[type, SlotKind]] = {
    types.FunctionType: SlotKind.METHOD,
    _CACHED_TYPE: SlotKind.METHOD,
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
        # Modules bind nothing, so a descriptor in a module is an object that Python does not call.
        kind = (
            SlotKind.FUNCTION if kind is not None and type(slot.raw) not in _DESCRIPTORS else None
        )
    elif not callable(unwrap_descriptor(slot.raw)):
        kind = None
    if kind is None:
        raise IncompatiblePatchError(_explain_refusal(slot))
    if slot.inherited_from is object:
        raise IncompatiblePatchError(
            f"{slot.path} is inherited from object, whose methods check whether they were "
            f"overridden: patch a method that {format_owner(slot.owner)} or one of its bases defines"
        )
    if not is_writable(slot.owner):
        raise IncompatiblePatchError(
            f"{format_owner(slot.owner)} is a built-in class and its attributes cannot be set: "
            f"patch the function that calls {slot.name!r}, or a Python subclass"
        )
    return kind


def _explain_refusal(slot: Slot) -> str:
    if is_module(slot.raw):
        return f"{slot.path} is a module: name a function or method in it"
    if is_class(slot.raw):
        return (
            f"{slot.path} is a class. Replacing classes breaks isinstance, pickling and super(): "
            f"patch its methods, for example '{slot.path}.__init__'"
        )
    cls = type(slot.raw)
    type_name = f"{cls.__module__}.{cls.__qualname__}"
    if callable(slot.raw):
        return (
            f"{slot.path} is an object of type {type_name}, not a plain function: "
            f"patch '{type_name}.__call__' or its caller"
        )
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
    # getter() keeps the setter, the deleter and the class of the property.
    return slot.raw.getter(function) if kind is SlotKind.GETTER else function


def unwrap_replacement(replacement: Any, slot: Slot, kind: SlotKind) -> Function:
    """Return the function of a replacement.

    Raises:
        IncompatiblePatchError: The replacement is a descriptor of another kind, or a property with a setter.
    """
    wanted = {
        staticmethod: SlotKind.STATIC,
        classmethod: SlotKind.CLASSMETHOD,
        property: SlotKind.GETTER,
    }.get(type(replacement))
    if wanted not in (None, kind):
        raise IncompatiblePatchError(
            f"{slot.path} is a {kind.value} and its replacement is a {type(replacement).__name__}: "
            "pass a plain function, the descriptor is kept"
        )
    # The original's own setter and deleter are harmless, as in a property made by original.getter().
    accessors = getattr(slot.raw, "fset", None), getattr(slot.raw, "fdel", None)
    if wanted is SlotKind.GETTER and (replacement.fset, replacement.fdel) not in (
        (None, None),
        accessors,
    ):
        raise IncompatiblePatchError(
            f"the replacement of property {slot.path} brings a setter or deleter, and only the "
            "getter of a property is patched: pass the getter function"
        )
    function: Function = unwrap_descriptor(replacement)
    return function


def make_base(slot: Slot, kind: SlotKind) -> Function:
    """Return the function that the innermost wrapper gets as the original.

    This function looks an inherited attribute up at each call, as Python does without the patch. The base class may
    be patched later, and with several bases the next class in the method resolution order depends on the instance.
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

    def call_inherited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Python allows Class.method(object) with any object; super() would reject it.
        if is_method and not isinstance(self, owner):
            return found(self, *args, **kwargs)
        below = getattr(super(owner, self), name)
        if is_unhooked_step and hasattr(below, "hooked"):
            return below.__wrapped__(self, *args, **kwargs)
        return below(*args, **kwargs)

    return call_inherited


def set_picklable_name(
    function: Any, slot: Slot, is_left_alone: Callable[[types.ModuleType], bool]
) -> None:
    """Name an installed function so that pickle finds it by that name.

    Args:
        function: The installed function, which has the original's name.
        slot: The slot that will hold it.
        is_left_alone: Returns whether a module keeps the original, so that pickle would find the original there.
    """
    if is_class(slot.owner):
        if slot.inherited_from is not None:
            function.__module__ = slot.owner.__module__
            function.__qualname__ = f"{slot.owner.__qualname__}.{slot.name}"
        return
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is None or home is slot.owner or not is_module(home):
        return
    if get_namespace(home).get(function.__qualname__) is slot.raw and is_left_alone(home):
        function.__module__, function.__qualname__ = slot.owner.__name__, slot.name


# --- writes and their undo ---

# All managers of the process share the write lock, because two managers may patch one slot. Only dictionary operations
# run under it: no wrap function, no hook installation, no import. So its holder never waits for another thread.

WRITE_LOCK: Final = threading.RLock()
# A forked child has only the thread that forked: a lock held by another thread would stay locked.
os.register_at_fork(
    before=WRITE_LOCK.acquire, after_in_parent=WRITE_LOCK.release, after_in_child=WRITE_LOCK.release
)

# Flags of CPython's types, Py_TPFLAGS_HEAPTYPE and Py_TPFLAGS_IMMUTABLETYPE.
_HEAP_TYPE: Final = 1 << 9
_IMMUTABLE_TYPE: Final = 1 << 8


def is_writable(owner: Owner) -> bool:
    """Return whether attributes of ``owner`` can be set. Static types, which are written in C, reject that."""
    if is_module(owner):
        return True
    flags = owner.__flags__
    return bool(flags & _HEAP_TYPE) and not flags & _IMMUTABLE_TYPE


def read_slot(owner: Owner, name: str) -> Any:
    """Return the raw value in the owner's own namespace, or ``ABSENT``."""
    return get_namespace(owner).get(name, ABSENT)


def write_slot(owner: Owner, name: str, value: Any) -> None:
    """Set or, for ``ABSENT``, delete an attribute.

    A ``__setattr__`` of a module or metaclass is bypassed if it is written in Python, because its side effects could
    not be undone. It is called if it is written in C, as in pybind11 classes such as ``torch.cuda.CUDAGraph``.
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
    """Return a method of the nearest metaclass that defines it in C; ``type`` always does."""
    methods = (vars(meta).get(method) for meta in inspect.getmro(type(owner)))
    return next(found for found in methods if isinstance(found, types.WrapperDescriptorType))


@dataclass(frozen=True, eq=False)
class SlotWrite:
    """One written attribute."""

    # The module or class.
    owner: Owner
    # The name of the attribute.
    name: str
    # The raw value before the write; ``ABSENT`` if the owner had inherited the attribute.
    old: Any
    # The raw value that was written.
    new: Any

    def undo(self) -> bool:
        """Write the old value back. Return False, and write nothing, if the slot was overwritten since."""
        if read_slot(self.owner, self.name) is not self.new:
            return False
        write_slot(self.owner, self.name, self.old)
        return True


def write_reversibly(owner: Owner, name: str, new: Any, undo: ExitStack) -> SlotWrite:
    """Write an attribute; ``undo`` writes the old value back when it is closed."""
    slot_write = SlotWrite(owner, name, read_slot(owner, name), new)
    write_slot(owner, name, new)
    undo.callback(slot_write.undo)
    return slot_write
