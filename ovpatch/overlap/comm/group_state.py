"""What ovpatch keeps per process group, and what it knows of a group's end and of the process's.

This module alone handles groups that are destroyed or collected, and processes that are forked. Other modules keep one
value per group by :meth:`GroupState.get_or_create`.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")


class GroupState:
    """The values kept for one process group, from :func:`group_state`. They are dropped with the group object."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group, functools.partial(_drop_collected, id(group)))
        self.values: dict[Hashable, Any] = {}  # by a class, or by a tuple that begins with a class or a name
        self.lock = threading.RLock()  # For values that only one thread may make. A collective must not run under it.
        renew_in_children(self, "lock", threading.RLock)
        self._pid = os.getpid()
        self._tied: set[Hashable] = set()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made the state. A fork is no rank of the group."""
        return os.getpid() != self._pid

    def get_or_create(self, key: Hashable, make: Callable[[], T], *, keeps_group: bool = False) -> T:
        """Return the value of a key, see :attr:`values`; the first call makes it, perhaps by a collective.

        ``keeps_group`` tells that the value references the group, and so would keep it alive after
        ``destroy_process_group()``. Such a value is dropped once the group is destroyed.
        """
        if key not in self.values:
            if keeps_group:
                drop_destroyed()
                self._tied.add(key)
            self.values[key] = make()
        value: T = self.values[key]
        return value

    def drop_tied(self) -> None:
        """Drop the values that reference the group."""
        for key in self._tied:
            self.values.pop(key, None)
        self._tied.clear()


def group_state(group: dist.ProcessGroup) -> GroupState:
    """Return the state of a group; made once."""
    state = _states.get(id(group))
    if state is None or state.group() is not group:
        with _lock:
            state = _states[id(group)] = GroupState(group)
    return state


def group_values(kind: type[T], group: dist.ProcessGroup | None = None) -> list[tuple[dist.ProcessGroup, T]]:
    """Return the groups, or one group, that have values of a class, with each value; derived classes are not meant."""
    found = []
    for state in list(_states.values()):
        owner = state.group()
        if owner is not None and group in (None, owner):
            found += [(owner, value) for value in list(state.values.values()) if type(value) is kind]
    return found


def drop_values(name: Hashable, group: dist.ProcessGroup | None = None) -> None:
    """Drop the values whose key is ``name``, or a tuple that begins with it, of one group or of all."""
    for state in list(_states.values()):
        if group is None or state.group() is group:
            for key in [key for key in state.values if name in (key, key[0] if isinstance(key, tuple) else None)]:
                state.values.pop(key, None)


def drop_destroyed() -> None:
    """Drop the values that keep destroyed groups alive."""
    for state in list(_states.values()):
        group = state.group()
        if group is not None and is_destroyed(group):
            state.drop_tied()


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Return whether a group is not, or no longer, registered with torch."""
    return group not in c10d._world.pg_map


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """Return the store of a process group; None if the group was destroyed."""
    with suppress(KeyError):
        return c10d._get_process_group_store(group)
    return None


def group_timeout_s(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return the process group's time-out in seconds; torch's default for a backend that has none.

    The device's backend is asked; by default the first that has a time-out.
    """
    for one in group._device_types if device is None else (device,):
        with suppress(AttributeError, RuntimeError):
            backend: Any = group._get_backend(one)
            return float(backend.options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())


def _drop_collected(key: int, reference: weakref.ref[dist.ProcessGroup]) -> None:
    state = _states.get(key)
    if state is not None and state.group is reference:
        del _states[key]


# By id(): a lookup in a WeakKeyDictionary takes several times as long, and warm steps look up.
_states: dict[int, GroupState] = {}
_lock = threading.Lock()


# --- forks ---


def renew_in_children(owner: object, name: str, make: Callable[[], object]) -> None:
    """Make an attribute anew in every forked child: a lock, which a thread may hold that does not exist there."""
    call_in_children(owner, lambda inherited: setattr(inherited, name, make()))


def call_in_children(owner: T, function: Callable[[T], None]) -> None:
    """Call a function with an object in every forked child in which the object still exists."""
    _in_children.setdefault(owner, []).append(function)


def _after_fork() -> None:
    for owner, functions in list(_in_children.items()):
        for function in functions:
            function(owner)


_in_children: weakref.WeakKeyDictionary[Any, list[Callable[[Any], None]]] = weakref.WeakKeyDictionary()
renew_in_children(sys.modules[__name__], "_lock", threading.Lock)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- the end of the process ---


def is_exiting_by_error() -> bool:
    """Return whether this process ends by an exception. Its peers may hang in a collective until it is gone."""
    error = sys.exc_info()[1]  # set in a child of multiprocessing, which gets here while the exception propagates
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None or getattr(sys, "last_value", None) is not None


def register_at_exit(function: Callable[[], None]) -> None:
    """Run a function before threads are torn down, also in children of multiprocessing, which skip atexit.

    A second call for the same function does nothing.
    """
    if _registered.get(function) != os.getpid():
        _registered[function] = os.getpid()
        atexit.unregister(function)  # a fork inherits it
        atexit.register(function)
        multiprocessing.util.Finalize(None, function, exitpriority=0)


_registered: dict[Callable[[], None], int] = {}  # the process that registered it; a fork inherits the table
