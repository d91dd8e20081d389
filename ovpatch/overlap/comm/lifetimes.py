"""What ovpatch keeps for process groups, parameters and other objects of the script, without keeping these alive.

This module alone handles groups that are destroyed or collected, processes that are forked, and tables by ``id()``,
which need a weak reference each: an id is given to another object once the first one is gone. Other modules keep values
by :func:`group_state` for a process group, :func:`param_record` for a parameter, :func:`attached_values` for a module
or an optimizer, :class:`WeakParams` for the parameters of a model.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


class outside_modes:  # it is used as a function is
    """Run a block outside of all modes: torch function, dispatch, functorch, autocast, inference and grad.

    Tensors that outlive the call that creates them are created in it. A functorch level would leave a wrapper that is
    dead at the first read, inference mode a tensor that autograd refuses, and a device context one on another device. A
    copy that waits for a parameter is no part of the reader's computation: a mode must not record it, nor refuse it as
    a write to a captured tensor. The default dtype and the filling of new memory belong to the process, so a block
    cannot leave them: whoever creates a tensor names its dtype and writes its memory before reading it.

    A class, since a generator around torch's context managers is several times slower.
    """

    __slots__ = ("_grad", "_guards")

    def __enter__(self) -> None:
        """Leave all modes."""
        self._guards = (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch._C._DisableFuncTorch(),
            torch._C._DisableAutocast(),
            torch._C._InferenceMode(False),
        )
        for guard in self._guards:
            guard.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_error: object) -> None:
        """Return to the modes from before."""
        torch._C._set_grad_enabled(self._grad)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


class GroupState:
    """The values kept for one process group, from :func:`group_state`. They are dropped with the group object."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weak_key(group, _states)
        self.values: dict[Hashable, Any] = {}  # by a class, or by a tuple that begins with a class or a name
        self.lock = threading.RLock()  # For values that only one thread may make. A collective must not run under it.
        renew_in_children(self, "lock", threading.RLock)
        self._pid = os.getpid()
        self.tied: set[Hashable] = set()  # the keys of values that reference the group

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
                self.tied.add(key)
            self.values[key] = make()
        value: T = self.values[key]
        return value


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
            while state.tied:
                state.values.pop(state.tied.pop(), None)


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Return whether a group is not, or no longer, registered with torch."""
    return group not in c10d._world.pg_map


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """Return the store of a process group; None if the group was destroyed."""
    with suppress(KeyError):
        return c10d._get_process_group_store(group)
    return None


def unwrap_store(store: dist.Store | None) -> dist.Store | None:
    """Return the store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def group_timeout_s(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return the process group's time-out in seconds; torch's default for a backend that has none.

    The device's backend is asked; by default the first that has a time-out.
    """
    for one in group._device_types if device is None else (device,):
        with suppress(AttributeError, RuntimeError):
            backend: Any = group._get_backend(one)
            return float(backend.options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())


# By id(): a lookup in a WeakKeyDictionary takes several times as long, and warm steps look up.
_states: dict[int, GroupState] = {}
_lock = threading.Lock()


# --- forks ---


def renew_in_children(owner: object, name: str, make: Callable[[], object]) -> None:
    """Make an attribute anew in every forked child: a lock, which a thread may hold that does not exist there."""
    call_in_children(owner, lambda inherited: setattr(inherited, name, make()))


def call_in_children(owner: T, function: Callable[[T], None]) -> None:
    """Call a function with an object in every forked child in which the object still exists.

    The function must not reference the object, which would live for ever, and must not raise.
    """
    _in_children.setdefault(owner, []).append(function)


def _after_fork() -> None:
    for owner, functions in list(_in_children.items()):
        for function in functions:
            function(owner)


_in_children: weakref.WeakKeyDictionary[Any, list[Callable[[Any], None]]] = weakref.WeakKeyDictionary()
renew_in_children(sys.modules[__name__], "_lock", threading.Lock)

os.register_at_fork(after_in_child=_after_fork)


# --- the end of the process ---


def is_exiting_by_error() -> bool:
    """Return whether this process ends by an exception. Its peers may hang in a collective until it is gone."""
    error = sys.exc_info()[1]  # until Python 3.12, a child of multiprocessing gets here while the exception propagates
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None or getattr(sys, "last_value", None) is not None or _has_failed_in_child()


def _has_failed_in_child() -> bool:
    """Return whether this is a child of multiprocessing that exits by an error.

    From Python 3.13 on, forked children run what is registered at exit when the exception has been handled. Then only
    the function that forked has the exit code.
    """
    frame = sys._getframe() if multiprocessing.parent_process() is not None else None
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "multiprocessing.process" and frame.f_code.co_name == "_bootstrap":
            return False  # it still runs
        if name in ("multiprocessing.popen_fork", "multiprocessing.forkserver") and "code" in frame.f_locals:
            return bool(frame.f_locals["code"])
        frame = frame.f_back
    return False


def register_at_exit(function: Callable[[], None]) -> None:
    """Run a function once, before threads are torn down, if it is this process that exits, not a fork of it.

    A second call for the same function does nothing.
    """
    if _registered.get(function) != os.getpid():
        _registered[function] = os.getpid()
        run = functools.partial(_run_at_exit, function)
        atexit.register(run)
        multiprocessing.util.Finalize(None, run, exitpriority=0)  # forked children skip atexit until Python 3.12


def _run_at_exit(function: Callable[[], None]) -> None:
    if _registered.pop(function, None) == os.getpid():
        function()


_registered: dict[Callable[[], None], int] = {}  # the process that registered it; a fork inherits the table


# --- parameters, and other objects of the script ---


class ParamRecord:
    """What is known of one parameter."""

    __slots__ = ("experts", "local_grad_hook", "param", "reducers", "sharder")

    def __init__(self, param: weakref.ref[Tensor]) -> None:
        self.param = param
        # What shards the parameter's gradient, held weakly, and the parameter's index there.
        self.sharder: tuple[weakref.ref[Any], int] | None = None
        self.local_grad_hook: RemovableHandle | None = None  # notes gradients which are not reduced
        # The reducers that count its gradients, held weakly, and its index there. It may be in several models.
        self.reducers: list[tuple[weakref.ref[Any], int]] = []
        self.experts: Callable[[], Any] = lambda: None  # what averages its gradient as an expert's


def param_record(param: Tensor) -> ParamRecord:
    """Return the state of a parameter, made at the first call; it goes with the parameter."""
    known = _param_states.get(id(param))
    if known is None or known.param() is not param:
        known = _param_states[id(param)] = ParamRecord(weak_key(param, _param_states))
    return known


def find_param_record(param: Tensor) -> ParamRecord | None:
    """Return the state of a parameter if :func:`param_record` has made one."""
    known = _param_states.get(id(param)) if _param_states else None
    return known if known is not None and known.param() is param else None


def weak_key(owner: T, table: dict[int, Any]) -> weakref.ref[T]:
    """Return a weak reference that drops the entry ``id(owner)`` of a table when the owner dies."""
    return weakref.ref(owner, functools.partial(drop_entry, table, id(owner)))


def drop_entry(table: dict[int, Any], key: int, _dead: object) -> None:
    """Drop an entry of what has died, as the callback of a weak reference."""
    table.pop(key, None)


_param_states: dict[int, ParamRecord] = {}


def attached_values(owner: object) -> dict[Hashable, Any]:
    """Return what is kept for a module, an optimizer or another object, by name; it goes with the object.

    No value may reference the owner.
    """
    known = _kept.get(id(owner))
    if known is None or known[0]() is not owner:
        known = _kept[id(owner)] = (weak_key(owner, _kept), {})
    return known[1]


def find_owners(name: Hashable) -> list[tuple[Any, Any]]:
    """Return the objects for which a value of this name is kept, each with the value."""
    found = []
    for reference, values in list(_kept.values()):  # other threads may add to it
        owner = reference()
        if owner is not None and name in values:
            found.append((owner, values[name]))
    return found


_kept: dict[int, tuple[weakref.ref[Any], dict[Hashable, Any]]] = {}


class WeakParams(Sequence[torch.nn.Parameter]):
    """Parameters that are not kept alive.

    A lazy gradient knows the sharded gradients of its model, and its parameter owns it in C++, where Python's garbage
    collector does not look. If those kept the parameters, a model would never be freed.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.references = [weakref.ref(param) for param in params]

    def __getitem__(self, index: Any) -> Any:
        param = self.references[index]()
        if param is None:
            raise RuntimeError(
                "ovpatch: a parameter does not exist any more, but its gradient or state is read. Keep the model as "
                "long as its optimizer."
            )
        return param

    def __len__(self) -> int:
        return len(self.references)

    def find(self, index: int) -> torch.nn.Parameter | None:
        """Return a parameter if it still exists."""
        return self.references[index]()


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object alive; RuntimeError once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        if target is None:
            raise RuntimeError("ovpatch: the object that answers this call does not exist any more")
        return target(*args)

    return call
