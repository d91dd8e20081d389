"""Values that ovpatch attaches to process groups, parameters and other objects of the script.

The values do not keep their owners alive. Use :func:`group_state` for a process group,
:func:`param_record` for a parameter, :func:`attached_values` for a module or an optimizer, and
:class:`WeakParams` for the parameters of a model.

Only this module handles destroyed groups, forked processes and tables with ``id()`` as the key.
Such a table needs a weak reference per key, because Python may reuse the id of a dead object.
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


# --- modes ---


class outside_modes:
    """A context without modes: torch function, dispatch, functorch, autocast, inference, grad.

    Create tensors in it that outlive the call. Otherwise, a functorch level would leave a wrapper
    that is dead at its first read, and inference mode a tensor that autograd refuses. A device
    context would create the tensor on another device.

    Copies that wait for a parameter run in it too, because they are not part of the reader's
    computation: a mode must neither record them nor refuse them as writes to a captured tensor.

    The default dtype and the filling of new memory belong to the process, so no context can leave
    them. Name the dtype of each tensor, and write its memory before you read it.
    """

    # A generator around torch's context managers would be several times slower than this class.

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
        # Read after the guards: leaving inference mode changes the grad mode.
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_error: object) -> None:
        """Return to the modes from before."""
        torch._C._set_grad_enabled(self._grad)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


class outside_user_modes(outside_modes):
    """Leave all modes but torch functions, by whose classes a block reads pending parameters and lazy tensors."""

    __slots__ = ("_functions",)

    def __enter__(self) -> None:
        """Leave all modes but torch functions."""
        super().__enter__()
        self._functions = torch._C._EnableTorchFunction()
        self._functions.__enter__()

    def __exit__(self, *error: object) -> None:
        """Return to the modes from before."""
        self._functions.__exit__(None, None, None)
        super().__exit__(*error)


# --- process groups ---


class GroupState:
    """Values of one process group, see :func:`group_state`. They live as long as the group object.

    Attributes:
        group: Weak reference to the process group.
        values: The values. A key is a class, or a tuple that starts with a class or a name.
        lock: Guards values that only one thread may create. Do not run a collective under it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weak_key(group, _group_states)
        self.values: dict[Hashable, Any] = {}
        self.lock = threading.RLock()
        reset_after_fork(self, "lock", threading.RLock)
        # A value that references the group would keep it alive, so its key is here, and the value
        # is dropped when the group is destroyed.
        self._keys_keeping_group: set[Hashable] = set()
        # A fork inherits this state, but it is not a rank of the group.
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process that created the state. A fork is no rank of the group."""
        return os.getpid() != self._pid

    def get_or_create(
        self, key: Hashable, make: Callable[[], T], *, keeps_group: bool = False
    ) -> T:
        """Return the value of ``key``; the first call creates it.

        Args:
            key: The key, see :attr:`values`.
            make: Creates the value, possibly with a collective.
            keeps_group: Whether the value references the group, which would keep the group alive
                after ``destroy_process_group()``. Such a value is dropped with the group.
                Default: False.
        """
        if key not in self.values:
            if keeps_group:
                # No hook runs when a group is destroyed, so the next value drops the earlier ones.
                drop_destroyed()
                self._keys_keeping_group.add(key)
            self.values[key] = make()
        value: T = self.values[key]
        return value

    def drop_values_keeping_group(self) -> None:
        """Drop the values that reference the group."""
        while self._keys_keeping_group:
            self.values.pop(self._keys_keeping_group.pop(), None)


def group_state(group: dist.ProcessGroup) -> GroupState:
    """Return the state of a process group, created by the first call."""
    state = _group_states.get(id(group))
    # A dead group may have had the same id.
    if state is None or state.group() is not group:
        with _lock:
            state = _group_states[id(group)] = GroupState(group)
    return state


def group_values(
    kind: type[T], group: dist.ProcessGroup | None = None
) -> list[tuple[dist.ProcessGroup, T]]:
    """Return all values of a class with their process groups.

    Args:
        kind: The class; instances of subclasses are left out.
        group: The group to search. Default: all groups.
    """
    found = []
    # Copy the tables first: a concurrent thread may add to them.
    for state in list(_group_states.values()):
        owner = state.group()
        if owner is not None and group in (None, owner):
            values = list(state.values.values())
            found += [(owner, value) for value in values if type(value) is kind]
    return found


def drop_values(name: Hashable, group: dist.ProcessGroup | None = None) -> None:
    """Drop the values whose key is ``name`` or a tuple that starts with it.

    Args:
        name: A class or a string.
        group: The group to search. Default: all groups.
    """
    for state in list(_group_states.values()):
        if group is None or state.group() is group:
            for key in list(state.values):
                if name == key or (isinstance(key, tuple) and name == key[0]):
                    state.values.pop(key, None)


def drop_destroyed() -> None:
    """Drop the values that keep destroyed process groups alive."""
    for state in list(_group_states.values()):
        group = state.group()
        if group is not None and is_destroyed(group):
            state.drop_values_keeping_group()


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Return whether torch no longer has the process group registered."""
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
    """Return the timeout of a process group, in seconds.

    Args:
        group: The process group.
        device: The device whose backend has the timeout. Default: the first backend with a timeout.
            If there is none, the result is torch's default timeout.
    """
    for device_or_type in group._device_types if device is None else (device,):
        with suppress(AttributeError, RuntimeError):
            backend: Any = group._get_backend(device_or_type)
            return float(backend.options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())


# The key is the id() of the group, because every step looks up groups, and a lookup in a
# WeakKeyDictionary takes several times as long.
_group_states: dict[int, GroupState] = {}
_lock = threading.Lock()


# --- forks ---


def reset_after_fork(owner: object, name: str, make: Callable[[], object]) -> None:
    """Replace an attribute of ``owner`` by ``make()`` in every forked child.

    Use it for locks: a thread that does not exist in the child may hold the inherited lock.
    """
    call_after_fork(owner, lambda inherited: setattr(inherited, name, make()))


def call_after_fork(owner: T, function: Callable[[T], None]) -> None:
    """Call ``function(owner)`` in every forked child in which ``owner`` still exists.

    The function must not raise, and must not reference ``owner``, which would never be freed.
    """
    _after_fork_functions.setdefault(owner, []).append(function)


def _run_after_fork() -> None:
    for owner, functions in list(_after_fork_functions.items()):
        for function in functions:
            function(owner)


_after_fork_functions: weakref.WeakKeyDictionary[Any, list[Callable[[Any], None]]] = (
    weakref.WeakKeyDictionary()
)
reset_after_fork(sys.modules[__name__], "_lock", threading.Lock)

os.register_at_fork(after_in_child=_run_after_fork)


# --- the end of the process ---


def is_exiting_by_error() -> bool:
    """Return whether an exception ends this process.

    Peers may then hang in a collective until the process has exited, so do not wait for them.
    """
    # Before Python 3.13, a child of multiprocessing calls this while the exception propagates.
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return bool(error.code)
    has_error = error is not None or getattr(sys, "last_value", None) is not None
    return has_error or _has_failed_in_child()


def _has_failed_in_child() -> bool:
    """Return whether this is a child of multiprocessing that exits with an error.

    Since Python 3.13, a forked child runs its exit handlers after it has handled the exception.
    Only a local variable of the forking function still has the exit code then.
    """
    frame = sys._getframe() if multiprocessing.parent_process() is not None else None
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "multiprocessing.process" and frame.f_code.co_name == "_bootstrap":
            # The child still runs.
            return False
        is_forking = module in ("multiprocessing.popen_fork", "multiprocessing.forkserver")
        if is_forking and "code" in frame.f_locals:
            return bool(frame.f_locals["code"])
        frame = frame.f_back
    return False


def register_at_exit(function: Callable[[], None]) -> None:
    """Run a function once at exit of this process, before its threads stop, but not in a fork.

    A second call for the same function does nothing.
    """
    if _exit_function_pids.get(function) != os.getpid():
        _exit_function_pids[function] = os.getpid()
        run = functools.partial(_run_at_exit, function)
        atexit.register(run)
        # Before Python 3.13, forked children skip atexit.
        multiprocessing.util.Finalize(None, run, exitpriority=0)


def _run_at_exit(function: Callable[[], None]) -> None:
    if _exit_function_pids.pop(function, None) == os.getpid():
        function()


# The process that registered each function; a fork inherits the table.
_exit_function_pids: dict[Callable[[], None], int] = {}


# --- parameters and other objects of the script ---


class ParamRecord:
    """State of one parameter.

    Attributes:
        param: Weak reference to the parameter.
        dtensor: Returns the DTensor that replaces the parameter in its module; None without one.
        sharder: Weak reference to the ``GradSharder`` of the parameter's gradient, and the index of
            the parameter there.
        local_grad_hook: Handle of the hook that detects gradients that are not reduced.
        reducers: Weak references to the reducers that count its gradients, each with the index of
            the parameter there. There are several if several models contain the parameter.
        experts: Returns the object that averages its gradient as an expert's; None without one.
    """

    __slots__ = ("dtensor", "experts", "local_grad_hook", "param", "reducers", "sharder")

    def __init__(self, param: weakref.ref[Tensor]) -> None:
        self.param = param
        self.dtensor: Callable[[], Any] = lambda: None
        self.sharder: tuple[weakref.ref[Any], int] | None = None
        self.local_grad_hook: RemovableHandle | None = None
        self.reducers: list[tuple[weakref.ref[Any], int]] = []
        self.experts: Callable[[], Any] = lambda: None


def param_record(param: Tensor) -> ParamRecord:
    """Return the state of a parameter, created by the first call and dropped with it."""
    state = _param_records.get(id(param))
    if state is None or state.param() is not param:
        state = _param_records[id(param)] = ParamRecord(weak_key(param, _param_records))
    return state


def find_param_record(param: Tensor) -> ParamRecord | None:
    """Return the state of a parameter; None if :func:`param_record` has not created one."""
    state = _param_records.get(id(param)) if _param_records else None
    return state if state is not None and state.param() is param else None


def weak_key(owner: T, table: dict[int, Any]) -> weakref.ref[T]:
    """Return a weak reference that removes the key ``id(owner)`` from a table with the owner."""
    return weakref.ref(owner, functools.partial(remove_dead_key, table, id(owner)))


def remove_dead_key(table: dict[int, Any], key: int, _dead: object) -> None:
    """Remove the key of a dead object; the callback of a weak reference."""
    table.pop(key, None)


_param_records: dict[int, ParamRecord] = {}


def attached_values(owner: object) -> dict[Hashable, Any]:
    """Return the values attached to a module, an optimizer or another object, by name.

    They are dropped with ``owner``. No value may reference ``owner``.
    """
    reference_and_values = _object_values.get(id(owner))
    if reference_and_values is None or reference_and_values[0]() is not owner:
        reference_and_values = (weak_key(owner, _object_values), {})
        _object_values[id(owner)] = reference_and_values
    return reference_and_values[1]


def find_owners(name: Hashable) -> list[tuple[Any, Any]]:
    """Return the objects that have a value ``name`` attached, each with the value."""
    found = []
    # Copy the table first: a concurrent thread may add to it.
    for reference, values in list(_object_values.values()):
        owner = reference()
        if owner is not None and name in values:
            found.append((owner, values[name]))
    return found


_object_values: dict[int, tuple[weakref.ref[Any], dict[Hashable, Any]]] = {}


class WeakParams(Sequence[torch.nn.Parameter]):
    """A sequence of parameters that it does not keep alive.

    A lazy gradient references the sharded gradients of its model. Its parameter owns it in C++,
    where Python's garbage collector cannot follow. If the sharded gradients kept the parameters
    alive, a model would never be freed.

    Args:
        params: The parameters.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.references = [weakref.ref(param) for param in params]

    def __getitem__(self, index: Any) -> Any:
        param = self.references[index]()
        if param is None:
            raise RuntimeError(
                "ovpatch: the gradient or state of a parameter was read after the parameter was "
                "freed. Keep the model as long as its optimizer."
            )
        return param

    def __len__(self) -> int:
        return len(self.references)

    def find(self, index: int) -> torch.nn.Parameter | None:
        """Return a parameter; None if it was freed."""
        return self.references[index]()


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object alive.

    The function raises ``RuntimeError`` after the object was freed.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        if target is None:
            raise RuntimeError(
                "ovpatch: a peer or a hook called an object that this rank has already freed. Keep "
                "models and optimizers until all ranks have finished."
            )
        return target(*args)

    return call
