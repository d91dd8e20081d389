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
from ovpatch.patching.target import ABSENT, Owner, Slot, is_class, is_module, namespace, owner_path

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


def kind_of(place: Slot) -> SlotKind:
    """Return how the slot is read.

    Raises:
        IncompatiblePatchError: It is nothing that can be patched.
    """
    kind = _kind_in_module(place.raw) if is_module(place.owner) else _kind_in_class(place.raw)
    if kind is None:
        raise IncompatiblePatchError(_refusal(place))
    if place.heir_of is object:
        raise IncompatiblePatchError(
            f"{place.path} is inherited from object, whose methods check whether they were overridden: patch "
            f"a method that {owner_path(place.owner)} or one of its bases defines"
        )
    if not is_writable(place.owner):
        raise IncompatiblePatchError(
            f"{owner_path(place.owner)} is a built-in class and its attributes cannot be set: patch the function that "
            f"calls {place.name!r}, or a Python subclass"
        )
    return kind


def _kind_in_module(raw: Any) -> SlotKind | None:
    return SlotKind.FUNCTION if type(raw) in _CLASS_KINDS and type(raw) not in _DESCRIPTORS else None


def _kind_in_class(raw: Any) -> SlotKind | None:
    kind = _CLASS_KINDS.get(type(raw))
    if kind in (SlotKind.STATIC, SlotKind.CLASSMETHOD, SlotKind.GETTER) and not callable(function_in(raw)):
        return None
    return kind


def _refusal(place: Slot) -> str:
    if is_module(place.raw):
        return f"{place.path} is a module: name a function or method in it"
    if is_class(place.raw):
        return (
            f"{place.path} is a class. Replacing classes breaks isinstance, pickling and super(): patch its methods, "
            f"for example '{place.path}.__init__'"
        )
    cls = type(place.raw)
    named = f"{cls.__module__}.{cls.__qualname__}"
    if callable(place.raw):
        return (
            f"{place.path} is an object of type {named}, not a plain function: patch '{named}.__call__' or its caller"
        )
    return f"{place.path} is {place.raw!r}, not a function or method: patch the functions that read it"


def function_in(raw: Any) -> Any:
    """Return the function inside a class attribute: what the descriptor would call."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def descriptor(place: Slot, kind: SlotKind, function: Function) -> Any:
    """Return what to put into the slot so that reading it works as before and calls ``function``."""
    if kind is SlotKind.STATIC:
        return staticmethod(function)
    if kind is SlotKind.CLASSMETHOD:
        return classmethod(function)
    return place.raw.getter(function) if kind is SlotKind.GETTER else function


def replacement_function(replacement: Any, place: Slot, kind: SlotKind) -> Function:
    """Return the function of a replacement, which may come in the descriptor of its target's kind.

    Raises:
        IncompatiblePatchError: It comes in another descriptor, or brings a setter of its own.
    """
    wanted = {staticmethod: SlotKind.STATIC, classmethod: SlotKind.CLASSMETHOD, property: SlotKind.GETTER}.get(
        type(replacement)
    )
    if wanted not in (None, kind):
        raise IncompatiblePatchError(
            f"{place.path} is a {kind.value} and its replacement is a {type(replacement).__name__}: pass a plain "
            "function, the descriptor is kept"
        )
    if wanted is SlotKind.GETTER and (replacement.fset, replacement.fdel) not in ((None, None), _accessors(place.raw)):
        raise IncompatiblePatchError(
            f"the replacement of property {place.path} brings a setter or deleter, and only the getter of a property "
            "is patched: pass the getter function"
        )
    function: Function = function_in(replacement)
    return function


def _accessors(raw: property) -> tuple[Any, Any]:
    return raw.fset, raw.fdel


def base_of(place: Slot, kind: SlotKind) -> Function:
    """Return what a patch gets as the original.

    An inherited attribute is looked up at each call, as Python would without the patch: its base class may be patched
    later, and in a subclass with several bases the next in line need not be the class it was found in.
    """
    if place.heir_of is None:
        function: Function = function_in(place.raw)
        return function
    builders = {
        SlotKind.METHOD: _inherited_step if _is_unhooked_step(place) else _inherited_method,
        SlotKind.CLASSMETHOD: _inherited_classmethod,
        SlotKind.STATIC: _inherited_static,
        SlotKind.GETTER: _inherited_getter,
    }
    return builders[kind](place.owner, place.name, function_in(place.raw))


def _inherited_method(owner: Any, name: str, found: Any) -> Function:
    def inherited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, owner):
            return found(self, *args, **kwargs)
        return getattr(super(owner, self), name)(*args, **kwargs)

    return inherited


def _is_unhooked_step(place: Slot) -> bool:
    return place.name == "step" and not hasattr(function_in(place.raw), "hooked")


def _inherited_step(owner: Any, name: str, found: Any) -> Function:
    """See the note.

    [Note: optimizers hook their step once per class]
    The first instance of an optimizer class puts profile_hook_step, which runs the step hooks, around what the class
    sees as ``step``, unless that carries ``hooked``. Suppose we patch ``AdamW.step``, inherited from Adam and not
    hooked yet: AdamW then hooks ours. If Adam is hooked later, the lookup finds hooks below us as well, and they would
    run twice in a step; stock AdamW holds the unhooked function. So a hook layer that appeared below is stepped over.
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


def settle_name(function: Any, place: Slot, away: Callable[[types.ModuleType], bool]) -> None:
    """Make an installed function picklable where the original was: its qualified name must lead to it.

    Args:
        function: The installed function, named like the original.
        place: Where it is installed.
        away: Whether references in a module keep the original.
    """
    if is_class(place.owner):
        if place.heir_of is not None:
            function.__module__, function.__qualname__ = place.owner.__module__, _qualname(place)
        return
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is None or home is place.owner or not is_module(home):
        return
    if namespace(home).get(function.__qualname__) is place.raw and away(home):
        function.__module__, function.__qualname__ = place.owner.__name__, place.name


def _qualname(place: Slot) -> str:
    return f"{place.owner.__qualname__}.{place.name}"


# Every write, with its undo.
#
# [Note: one write lock]
# All managers of the process share one lock, since two of them may patch the same slot. Under it run only dictionary
# operations of this package: no wrap function, no hook installation, no import. So whoever holds it never waits for
# anybody, and code that a callback starts, imports included, cannot deadlock with it.

LOCK: Final = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child has only the thread that forked: a lock that another thread held would stay locked there for ever.
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)

_HEAP_TYPE: Final = 1 << 9
_IMMUTABLE_TYPE: Final = 1 << 8


def is_writable(owner: Owner) -> bool:
    """Whether Python lets attributes of ``owner`` be set; those of classes written in C cannot."""
    if is_module(owner):
        return True
    flags = owner.__flags__
    return bool(flags & _HEAP_TYPE) and not flags & _IMMUTABLE_TYPE


def current(owner: Owner, name: str) -> Any:
    """Return what the owner itself holds under a name, or ``ABSENT``."""
    return namespace(owner).get(name, ABSENT)


def put(owner: Owner, name: str, value: Any) -> None:
    """Set or, for ``ABSENT``, delete an attribute.

    Neither a module's nor a metaclass's own ``__setattr__`` is asked: what they would do besides could not be undone.
    A metaclass written in C must be, as that of classes made by pybind11, such as ``torch.cuda.CUDAGraph``.
    """
    if isinstance(owner, types.ModuleType):
        if value is ABSENT:
            namespace(owner).pop(name, None)
        else:
            namespace(owner)[name] = value
    elif value is not ABSENT:
        _of_c(owner, "__setattr__")(owner, name, value)
    elif name in namespace(owner):
        _of_c(owner, "__delattr__")(owner, name)


def _of_c(owner: type, method: str) -> Callable[..., None]:
    """Return a method of the nearest metaclass that has it in C; ``type`` itself has those that are asked for."""
    methods = (vars(meta).get(method) for meta in inspect.getmro(type(owner)))
    return next(found for found in methods if isinstance(found, types.WrapperDescriptorType))


@dataclass(frozen=True, eq=False)
class Write:
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
        if current(self.owner, self.name) is not self.new:
            return False
        put(self.owner, self.name, self.old)
        return True


class Journal:
    """What one call has done so far, so that it can be taken back if the rest fails."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []

    def write(self, owner: Owner, name: str, new: Any) -> Write:
        """Write an attribute and remember what was there."""
        done = Write(owner, name, current(owner, name), new)
        put(owner, name, new)
        self._undos.append(done.undo)
        return done

    def note(self, undo: Callable[[], object]) -> None:
        """Remember how to take back something that was done elsewhere."""
        self._undos.append(undo)

    def roll_back(self) -> None:
        """Take everything back, the last first."""
        while self._undos:
            self._undos.pop()()
