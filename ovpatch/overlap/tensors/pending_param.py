"""Parameters whose all-gather is in flight: the first read waits for it.

A parameter's class sees most readers; see [Note: pending by type]. For the others, ``read_hooks`` patches the one
function of torch that they pass through.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.comm.lifetimes import find_param_record, weak_key
from ovpatch.overlap.tensors.lazy_tensor import METADATA, leaves
from ovpatch.overlap.tensors.tensor_memory import count_references_of_one, use_count

#: By ``id()`` of a pending parameter, or of the DTensor over it: a function that returns the tensor of an ``id()``, and
#: the one that waits for its values. The entry keeps the tensor alive unless the values are lost.
PENDING: dict[int, tuple[Callable[[int], Any], Callable[[], None]]] = {}

#: Owners of a parameter's tensor object without DDP: Python, and the AccumulateGrad node.
OWNERS = 2


class PendingParameter(Parameter):
    """The class of a parameter while its all-gather is in flight.

    [Note: pending by type] While its memory is partly stale, a parameter has this class; once the values are there, it
    is a ``torch.nn.Parameter`` again, as after ``UninitializedParameter.materialize``. torch calls
    ``__torch_function__`` of this class for every function that gets the parameter, from Python or C++, also inside
    of lists. Functions that ask for metadata only pass; all others wait first. Other tensors cost nothing.
    :func:`mark_pending` writes the entry in :data:`PENDING` before the class, :func:`mark_ready` deletes it after the
    class has changed. A reader that sees the class therefore finds the entry, or the parameter is ready by now.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for the pending parameters among the arguments, unless ``func`` asks for metadata; then call it."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # torch says that one of the arguments is pending. If none is found, it is in a container of an unknown type.
        if not wait_for_args((args, kwargs)):
            wait_for_all()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Wait, then copy; the copy is a plain parameter."""
        wait_for_param(self)
        return Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Wait, then pickle a plain parameter."""
        wait_for_param(self)
        return Parameter.__reduce_ex__(self, protocol)


# DTensors over parameters. DistributedDataParallel(device_mesh=) trains the local tensors of a model's DTensors, and
# its first forward puts DTensors over them into the module, made by _unflatten_tensor. Forward reads through these
# views, so such a view is pending together with its parameter. DTensor's own methods do not ask __torch_function__, but
# read `_local_tensor`, which waits as well.


@cache
def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor  # only where there is one, so it has been imported

    return DTensor


@cache
def _pending_dtensor() -> Any:
    """Return the class of a DTensor while the parameter below it is pending."""

    class PendingDTensor(_dtensor()):  # type: ignore[misc]  # imported late
        __slots__ = ()
        __torch_function__ = PendingParameter.__dict__["__torch_function__"]

        @property
        def _local_tensor(self) -> Any:
            wait_for_param(self)
            return self._local_tensor  # of the class that it has now

    return PendingDTensor


class _DTensors:
    """Whether there have been DTensors over parameters."""

    seen = False


def find_dtensor(param: Tensor) -> Any:
    """Return the DTensor that stands in a parameter's place, or None."""
    state = find_param_record(param) if _DTensors.seen else None
    return state.dtensor() if state is not None else None


def any_dtensors() -> bool:
    """Return whether there may be DTensors over parameters."""
    return _DTensors.seen


def _reason_of_type(params: Iterable[Tensor]) -> str:
    foreign = {*map(type, params)} - {Parameter}
    return f"it is a {foreign.pop().__name__}" if foreign else ""


def _reason_of_memory(params: Iterable[Tensor], aliases: int, owners: int) -> str:
    references = count_references_of_one() + aliases
    count_references, count, count_owners = torch._C._storage_Use_Count, sys.getrefcount, use_count
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:  # one loop, since there may be thousands
            storage = param.untyped_storage()
            if count_references(storage._cdata) + count(storage) != references:
                return "other tensors share its memory"
            if param.is_cpu and storage.is_shared():  # on other devices this cannot be told
                return "other processes share its memory"
            if count_owners(param) > owners:
                return "a graph or a scripted module holds it"
    return ""


def mark_pending(params: Sequence[Tensor], wait: Callable[[], None], *, aliases: int = 0, owners: int = OWNERS) -> str:
    """Make readers of some parameters call ``wait`` first: of all of them, or of none.

    A parameter cannot be pending where its memory can be read without a call that sees its class: through another
    tensor (a ``detach()``, a view that a live graph keeps, weights that cuDNN flattened), by another process
    (``share_memory_()``), or from C++ (a scripted module, a graph that is still to run backward).

    Args:
        params: The parameters.
        wait: Waits for the values and calls :func:`mark_ready`. Several threads may call it, several times, in any
            mode that a reader can be in.
        aliases: How many other tensors over each parameter's memory the caller keeps.
        owners: How many owners each tensor object may have; DDP's C++ reducer is three of them.

    Returns:
        "" if they are pending now, else the reason; then the caller has to wait at once. It is not to be asked a second
        time: another thread may drop its alias meanwhile.
    """
    _wait_before_forks()
    if reason := _reason_of_type(params):
        return reason
    try:
        _add_entries(params, wait)  # first, see [Note: pending by type]
        for param in params:
            param.__class__ = PendingParameter
        # Once they are marked: an alias that another thread makes from now on waits.
        reason = _mark_dtensors(params, wait, aliases, owners)
    except BaseException:  # a KeyboardInterrupt, too: nothing would wait for them
        mark_ready(params)
        raise
    if reason:
        mark_ready(params)
    return reason


def _add_entries(tensors: Iterable[Tensor], wait: Callable[[], None]) -> None:
    held = {id(tensor): tensor for tensor in tensors}
    PENDING.update(dict.fromkeys(held, (held.get, wait)))


def _mark_dtensors(params: Sequence[Tensor], wait: Callable[[], None], aliases: int, owners: int) -> str:
    """Return why marked parameters cannot be pending; if they can, mark the DTensors over them as well."""
    over = [(find_dtensor(param), param) for param in params] if _DTensors.seen else []
    seen = {id(param): dtensor for dtensor, param in over if dtensor is not None}
    if not all(_is_sole_dtensor(dtensor, param) for dtensor, param in over if dtensor is not None):
        return "a graph holds the DTensor in its place"
    below = [param for param in params if id(param) in seen] if seen else []
    others = [param for param in params if id(param) not in seen] if seen else params
    # The local tensor of a DTensor is an alias, and holds the parameter as its base.
    reason = _reason_of_memory(others, aliases, owners) or _reason_of_memory(below, aliases + 1, owners + 1)
    for dtensor in () if reason else seen.values():
        _add_entries([dtensor], wait)
        dtensor.__class__ = _pending_dtensor()
    return reason


def mark_ready(params: Iterable[Tensor]) -> None:
    """Make parameters plain ones again: their values are there."""
    for param in params:
        if type(param) is PendingParameter:
            param.__class__ = Parameter  # type: ignore[assignment]  # which is narrowed to PendingParameter here
        PENDING.pop(id(param), None)
        dtensor = find_dtensor(param) if _DTensors.seen else None
        if dtensor is not None and type(dtensor) is _pending_dtensor():
            dtensor.__class__ = _dtensor()
            PENDING.pop(id(dtensor), None)


def mark_lost(params: Iterable[Tensor], wait: Callable[[], None], error: Exception) -> None:
    """Stop keeping pending parameters alive: their values did not arrive, and their readers get an error.

    Args:
        params: The parameters; those that are not pending are left alone.
        wait: The bound method that was given to :func:`mark_pending`. It is tried again as long as its object exists.
        error: Why the values did not arrive.
    """
    # Only the text: an error holds the frames that it went through, and they hold the model.
    message = f"ovpatch: the values of this parameter did not arrive after optimizer.step(): {error}"
    method = weakref.WeakMethod(wait)

    def wait_or_fail() -> None:
        again = method()
        if again is None:
            raise RuntimeError(message)
        again()

    for param in params:
        for tensor in (param, find_dtensor(param)) if type(param) is PendingParameter else ():
            if tensor is not None:
                PENDING[id(tensor)] = (functools.partial(_find, weak_key(tensor, PENDING)), wait_or_fail)


def _is_sole_dtensor(dtensor: Any, param: Tensor) -> bool:
    """Return whether Python alone holds a DTensor and its local tensor, which is a view of the parameter."""
    local = dtensor._local_tensor
    return use_count(dtensor) == use_count(local) == 1 and local._base is param


def _find(reference: weakref.ref[Tensor], _key: int) -> Tensor | None:
    return reference()


def is_pending(param: Tensor) -> bool:
    """Return whether the parameter's all-gather is in flight."""
    return type(param) is PendingParameter


def wait_for_param(param: Tensor) -> None:
    """Wait for the values of a parameter, or of a DTensor over one, if it is pending."""
    entry = PENDING.get(id(param))
    if entry is not None and entry[0](id(param)) is param:
        entry[1]()


def wait_for_all() -> None:
    """Wait for the values of everything that is pending in this process.

    Raises:
        RuntimeError: Some values did not arrive; all others did.
    """
    failures = []
    for key, (find, wait) in list(PENDING.items()):
        if find(key) is not None and key in PENDING:
            try:
                wait()
            except RuntimeError as error:  # of the collective
                failures.append(error)
    if failures:
        raise failures[0]


def wait_for_args(values: Any) -> bool:
    """Wait for the pending parameters in nested tuples, lists and mappings; return whether there were any."""
    found = [value for value in leaves(values) if _is_marked(value)]
    for param in found:
        wait_for_param(param)
    return bool(found)


def _is_marked(value: Any) -> bool:
    """Return whether this has a pending class; its values may have arrived a moment ago."""
    return type(value) is PendingParameter or (_DTensors.seen and type(value) is _pending_dtensor())


@cache
def _wait_before_forks() -> None:
    """Wait before every fork: a child has neither the communicator's threads nor, perhaps, a lock that is free."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=wait_for_all)


def reduce_between_processes(param: Parameter) -> Any:
    """Return how a parameter travels to another process: ready, as a plain one."""
    from torch.multiprocessing.reductions import reduce_tensor

    wait_for_param(param)
    return reduce_tensor(param)


# torch registers how tensors travel to other processes by exact type.
ForkingPickler.register(PendingParameter, reduce_between_processes)
