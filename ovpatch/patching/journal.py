"""Every write, with its undo.

[Note: one write lock]
All managers of the process share one lock, since two of them may patch the same slot. Under it run only dictionary
operations of this package: no wrap function, no hook installation, no import. So whoever holds it never waits for
anybody, and code that a callback starts, imports included, cannot deadlock with it.
"""

from __future__ import annotations

import inspect
import os
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ovpatch.patching.targets import ABSENT, Owner, is_module, namespace

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
