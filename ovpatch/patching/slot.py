"""What a slot holds: taking the function out of its descriptor, and building the same descriptor around another."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from ovpatch.patching.patch import IncompatiblePatchError
from ovpatch.patching.target import ABSENT, Owner, Slot, format_owner, get_namespace, is_class, is_module

Function = Callable[..., Any]


class SlotKind(Enum):
    """How Python reads the attribute."""

    FUNCTION = "function"
    METHOD = "method"
    STATIC = "static method"
    CLASSMETHOD = "class method"
    GETTER = "property"


_CACHED: Final = type(functools.lru_cache(maxsize=None)(lambda: None))
# What an attribute is, by the type of the object in the class's namespace.
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
    """Return how the slot is read.

    Raises:
        IncompatiblePatchError: It is nothing that can be patched.
    """
    kind = _kind_in_module(slot.raw) if is_module(slot.owner) else _kind_in_class(slot.raw)
    if kind is None:
        raise IncompatiblePatchError(_refusal(slot))
    if slot.inherited_from is object:
        raise IncompatiblePatchError(
            f"{slot.path} is inherited from object, whose methods check whether they were overridden: patch "
            f"a method that {format_owner(slot.owner)} or one of its bases defines"
        )
    if not is_writable(slot.owner):
        raise IncompatiblePatchError(
            f"{format_owner(slot.owner)} is a built-in class and its attributes cannot be set: patch the function that "
            f"calls {slot.name!r}, or a Python subclass"
        )
    return kind


def _kind_in_module(raw: Any) -> SlotKind | None:
    return SlotKind.FUNCTION if type(raw) in _CLASS_KINDS and type(raw) not in _DESCRIPTORS else None


def _kind_in_class(raw: Any) -> SlotKind | None:
    kind = _CLASS_KINDS.get(type(raw))
    if kind in (SlotKind.STATIC, SlotKind.CLASSMETHOD, SlotKind.GETTER) and not callable(unwrap_descriptor(raw)):
        return None
    return kind


def _refusal(slot: Slot) -> str:
    if is_module(slot.raw):
        return f"{slot.path} is a module: name a function or method in it"
    if is_class(slot.raw):
        return (
            f"{slot.path} is a class. Replacing classes breaks isinstance, pickling and super(): patch its methods, "
            f"for example '{slot.path}.__init__'"
        )
    cls = type(slot.raw)
    named = f"{cls.__module__}.{cls.__qualname__}"
    if callable(slot.raw):
        return f"{slot.path} is an object of type {named}, not a plain function: patch '{named}.__call__' or its caller"
    return f"{slot.path} is {slot.raw!r}, not a function or method: patch the functions that read it"


def unwrap_descriptor(raw: Any) -> Any:
    """Return the function inside a class attribute: what the descriptor would call."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def make_descriptor(slot: Slot, kind: SlotKind, function: Function) -> Any:
    """Return what to put into the slot so that reading it works as before and calls ``function``."""
    if kind is SlotKind.STATIC:
        return staticmethod(function)
    if kind is SlotKind.CLASSMETHOD:
        return classmethod(function)
    return slot.raw.getter(function) if kind is SlotKind.GETTER else function


def unwrap_replacement(replacement: Any, slot: Slot, kind: SlotKind) -> Function:
    """Return the function of a replacement, which may come in the descriptor of its target's kind.

    Raises:
        IncompatiblePatchError: It comes in another descriptor, or brings a setter of its own.
    """
    wanted = {staticmethod: SlotKind.STATIC, classmethod: SlotKind.CLASSMETHOD, property: SlotKind.GETTER}.get(
        type(replacement)
    )
    if wanted not in (None, kind):
        raise IncompatiblePatchError(
            f"{slot.path} is a {kind.value} and its replacement is a {type(replacement).__name__}: pass a plain "
            "function, the descriptor is kept"
        )
    if wanted is SlotKind.GETTER and (replacement.fset, replacement.fdel) not in ((None, None), _accessors(slot.raw)):
        raise IncompatiblePatchError(
            f"the replacement of property {slot.path} brings a setter or deleter, and only the getter of a property "
            "is patched: pass the getter function"
        )
    function: Function = unwrap_descriptor(replacement)
    return function


def _accessors(raw: property) -> tuple[Any, Any]:
    return raw.fset, raw.fdel


def make_base(slot: Slot, kind: SlotKind) -> Function:
    """Return what a patch gets as the original.

    An inherited attribute is looked up at each call, as Python would without the patch: its base class may be patched
    later, and in a subclass with several bases the next in line need not be the class it was found in.
    """
    if slot.inherited_from is None:
        function: Function = unwrap_descriptor(slot.raw)
        return function
    builders = {
        SlotKind.METHOD: _inherited_step if _is_unhooked_step(slot) else _inherited_method,
        SlotKind.CLASSMETHOD: _inherited_classmethod,
        SlotKind.STATIC: _inherited_static,
        SlotKind.GETTER: _inherited_getter,
    }
    return builders[kind](slot.owner, slot.name, unwrap_descriptor(slot.raw))


def _inherited_method(owner: Any, name: str, found: Any) -> Function:
    def inherited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, owner):
            return found(self, *args, **kwargs)
        return getattr(super(owner, self), name)(*args, **kwargs)

    return inherited


def _is_unhooked_step(slot: Slot) -> bool:
    return slot.name == "step" and not hasattr(unwrap_descriptor(slot.raw), "hooked")


def _inherited_step(owner: Any, name: str, found: Any) -> Function:
    """See the note.

    [Note: optimizers hook their step once per class]
    The first instance of an optimizer class puts profile_hook_step, which runs the step hooks, around what the class
    sees as ``step``, unless that carries ``hooked``. Suppose we patch ``AdamW.step``, inherited from Adam and not
    hooked yet: AdamW then hooks ours. If Adam is hooked later, the lookup finds hooks below us as well, and they would
    run twice in a step; stock AdamW holds the unhooked function. So a hook wrapper that appeared below is stepped over.
    """

    def inherited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, owner):
            return found(self, *args, **kwargs)
        below = getattr(super(owner, self), name)
        if hasattr(below, "hooked"):
            return below.__wrapped__(self, *args, **kwargs)
        return below(*args, **kwargs)

    return inherited


def _inherited_classmethod(owner: Any, name: str, found: Any) -> Function:
    def inherited(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, cls), name)(*args, **kwargs)

    return inherited


def _inherited_static(owner: Any, name: str, found: Any) -> Function:
    def inherited(*args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, owner), name)(*args, **kwargs)

    return inherited


def _inherited_getter(owner: Any, name: str, found: Any) -> Function:
    def inherited(self: Any, /) -> Any:
        return getattr(super(owner, self), name)

    return inherited


def set_picklable_name(function: Any, slot: Slot, away: Callable[[types.ModuleType], bool]) -> None:
    """Make an installed function picklable where the original was: its qualified name must lead to it.

    Args:
        function: The installed function, named like the original.
        slot: Where it is installed.
        away: Whether references in a module keep the original.
    """
    if is_class(slot.owner):
        if slot.inherited_from is not None:
            function.__module__, function.__qualname__ = slot.owner.__module__, _qualname(slot)
        return
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is None or home is slot.owner or not is_module(home):
        return
    if get_namespace(home).get(function.__qualname__) is slot.raw and away(home):
        function.__module__, function.__qualname__ = slot.owner.__name__, slot.name


def _qualname(slot: Slot) -> str:
    return f"{slot.owner.__qualname__}.{slot.name}"


# Every write, with its undo.
#
# [Note: one write lock]
# All managers of the process share one lock, since two of them may patch the same slot. Under it run only dictionary
# operations of this package: no wrap function, no hook installation, no import. So whoever holds it never waits for
# anybody, and code that a callback starts, imports included, cannot deadlock with it.

WRITE_LOCK: Final = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child has only the thread that forked: a lock that another thread held would stay locked there for ever.
    os.register_at_fork(
        before=WRITE_LOCK.acquire, after_in_parent=WRITE_LOCK.release, after_in_child=WRITE_LOCK.release
    )

_HEAP_TYPE: Final = 1 << 9
_IMMUTABLE_TYPE: Final = 1 << 8


def is_writable(owner: Owner) -> bool:
    """Whether Python lets attributes of ``owner`` be set; those of classes written in C cannot."""
    if is_module(owner):
        return True
    flags = owner.__flags__
    return bool(flags & _HEAP_TYPE) and not flags & _IMMUTABLE_TYPE


def read_slot(owner: Owner, name: str) -> Any:
    """Return what the owner itself holds under a name, or ``ABSENT``."""
    return get_namespace(owner).get(name, ABSENT)


def write_slot(owner: Owner, name: str, value: Any) -> None:
    """Set or, for ``ABSENT``, delete an attribute.

    Neither a module's nor a metaclass's own ``__setattr__`` is asked: what they would do besides could not be undone.
    A metaclass written in C must be, as that of classes made by pybind11, such as ``torch.cuda.CUDAGraph``.
    """
    if isinstance(owner, types.ModuleType):
        if value is ABSENT:
            get_namespace(owner).pop(name, None)
        else:
            get_namespace(owner)[name] = value
    elif value is not ABSENT:
        _of_c(owner, "__setattr__")(owner, name, value)
    elif name in get_namespace(owner):
        _of_c(owner, "__delattr__")(owner, name)


def _of_c(owner: type, method: str) -> Callable[..., None]:
    """Return a method of the nearest metaclass that has it in C; ``type`` itself has those that are asked for."""
    methods = (vars(meta).get(method) for meta in inspect.getmro(type(owner)))
    return next(found for found in methods if isinstance(found, types.WrapperDescriptorType))


@dataclass(frozen=True, eq=False)
class SlotWrite:
    """One attribute that was written.

    Attributes:
        owner: Module or class.
        name: Attribute.
        old: What lay there, ``ABSENT`` if the owner inherited it.
        new: What was put there.
    """

    owner: Owner
    name: str
    old: Any
    new: Any

    def undo(self) -> bool:
        """Put the old value back; returns False, and does nothing, if something else lies there by now."""
        if read_slot(self.owner, self.name) is not self.new:
            return False
        write_slot(self.owner, self.name, self.old)
        return True


class Journal:
    """What one call has done so far, so that it can be taken back if the rest fails."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []

    def write(self, owner: Owner, name: str, new: Any) -> SlotWrite:
        """Write an attribute and remember what was there."""
        done = SlotWrite(owner, name, read_slot(owner, name), new)
        write_slot(owner, name, new)
        self._undos.append(done.undo)
        return done

    def add_undo(self, undo: Callable[[], object]) -> None:
        """Remember how to take back something that was done elsewhere."""
        self._undos.append(undo)

    def roll_back(self) -> None:
        """Take everything back, the last first."""
        while self._undos:
            self._undos.pop()()
