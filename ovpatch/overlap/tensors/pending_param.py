"""Parameters that are still being gathered, and whose readers must wait.

[Note: pending by type] While a parameter's memory is partly stale, its class is :class:`PendingParameter`; settled, it
is ``torch.nn.Parameter`` again, as ``UninitializedParameter`` becomes one. torch asks ``__torch_function__`` of that
class whenever a function is called on it, from Python or from the parsers of C++ functions, wherever among the
arguments the parameter is: in a list of a foreach operation, among an RNN's flat weights. What only asks for metadata
passes; everything else settles first. Other tensors cost nothing more than they did.

[Note: order of class and entry] ``mark`` writes the entry first and the class last; ``unmark`` puts the class back
first and drops the entry last. So whoever sees the class finds the entry, or the parameter has been settled since.
The other way round, a reader between the two would call the function again with a parameter that is still marked, and
again, until the interpreter's recursion limit.

A DTensor that stands in a parameter's place is pending with it (mesh_views.py, [Note: DTensors over parameters]).

[Note: who else reads] Not marked, so gathered at once, is what can be read without any of this: a parameter whose
memory other tensors share (``detach()``, a view kept by a live graph, weights that cuDNN flattened) or other processes
(``share_memory_()``), and one whose tensor C++ holds (a scripted or traced module, a graph that is to be run backward).
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.tensors.metadata_ops import METADATA, leaves
from ovpatch.overlap.tensors.ownership import forget, handles, is_shared, references_of_one, storage_references

# DTensors in the places of parameters that are their local tensors.
#
# [Note: DTensors over parameters] ``DistributedDataParallel(device_mesh=)`` takes the local tensors of a model's
# DTensors for parameters. In the first forward it puts DTensors of them in the module, made by ``_unflatten_tensor``,
# and there they stay: views of the parameters' memory, through which all of forward reads. Such a view can be pending
# with its parameter (pending.py, [Note: pending by type]): torch asks its class as well, and who goes round that, as
# DTensor's own methods do, looks at ``_local_tensor``. Any other view of the memory is one too many, as ever, and so
# is a graph that holds this one, or its local tensor.

_views: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Any]]] = {}  # by id() of the parameter


def noting_views(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's ``_unflatten_tensor``: notes of which parameter a DTensor is a view."""

    @functools.wraps(original)
    def unflatten(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        view = original(tensor, *args, **kwargs)
        _views[id(tensor)] = (
            weakref.ref(tensor, functools.partial(forget, _views, id(tensor))),
            weakref.ref(view),
        )
        return view

    return unflatten


def view_of(param: Tensor) -> Any:
    """Return the DTensor that stands in a parameter's place, or None."""
    entry = _views.get(id(param))
    return entry[1]() if entry is not None and entry[0]() is param else None


def any_views() -> bool:
    """Tell whether there may be such DTensors."""
    return bool(_views)


def is_sole(view: Any, param: Tensor) -> bool:
    """Tell whether a view that is not pending is its parameter's, and Python alone holds it and its local tensor."""
    local = view._local_tensor
    return handles(view) == handles(local) == 1 and local._base is param


# By id(): the parameter, which is thereby kept alive unless its values are lost, and what settles it.
_PENDING: dict[int, tuple[Callable[[], Parameter | None], Callable[[], None]]] = {}

# By id() of a pending parameter: the DTensor that is pending with it.
_VIEWS: dict[int, Callable[[], Any]] = {}

# Owners of a parameter's tensor without DDP: all of Python, and the AccumulateGrad node.
OWNERS = 2


class PendingParameter(Parameter):
    """The class of a parameter while its values are on their way; see [Note: pending by type]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Settle what is pending among the arguments, unless ``func`` asks for metadata only, then call ``func``."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        settle_within((args, kwargs))
        return func(*args, **kwargs)

    def _bring(self) -> None:
        """Bring the values, and make the parameter a plain one."""
        entry = _PENDING.get(id(self))
        if entry is not None:  # else another thread has just done it
            entry[1]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the settled parameter; the copy is a plain one."""
        settle(self)
        return Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the settled parameter, as a plain one."""
        settle(self)
        return Parameter.__reduce_ex__(self, protocol)


@cache
def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor  # only where there is one, so it has been imported

    return DTensor


@cache
def _pending_dtensor() -> Any:
    """Return the class of a DTensor while the values of the parameter below it are on their way."""

    class PendingDTensor(_dtensor()):  # type: ignore[misc]  # imported late
        __slots__ = ()
        __torch_function__ = PendingParameter.__dict__["__torch_function__"]
        _bring = PendingParameter._bring

        @property
        def _local_tensor(self) -> Any:
            settle(self)
            return self._local_tensor  # of the class that it has now

    return PendingDTensor


def refusal(param: Tensor, *, aliases: int = 0, owners: int = OWNERS) -> str:
    """Return why a parameter cannot be pending, or nothing if it can.

    Args:
        param: The parameter.
        aliases: Number of tensors over the parameter's memory that the caller itself keeps.
        owners: How many may hold the parameter's tensor object, by the count of
            :func:`ovpatch.overlap.tensors.ownership.handles`; a C++ reducer of DDP is three of them.
    """
    if type(param) is not Parameter:
        return f"it is a {type(param).__name__}"
    if storage_references(param) != references_of_one() + aliases:
        return "other tensors share its memory"
    if is_shared(param):
        return "other processes share its memory"
    if handles(param) > owners:
        return "a graph or a scripted module holds it"
    return ""


def mark(param: Tensor, settle: Callable[[], None], *, aliases: int = 0, owners: int = OWNERS) -> str:
    """Make readers of a parameter call ``settle`` first.

    Args:
        param: The parameter.
        settle: Brings the values and calls :func:`unmark`. It may be called several times, from any thread, and
            in any mode that a reader can be in.
        aliases: See :func:`refusal`.
        owners: Likewise.

    Returns:
        Nothing if it is pending now, else why not: then the caller has to bring the values at once. Another thread may
        let go of the parameter at any time, so :func:`refusal` may say otherwise a moment later.
    """
    view = view_of(param)
    if view is not None and not is_sole(view, param):
        return "a graph holds the DTensor in its place"
    seen = view is not None  # its local tensor is an alias, and knows what it is a view of
    if reason := refusal(param, aliases=aliases + seen, owners=owners + seen):
        return reason
    assert isinstance(param, Parameter)
    _settle_before_forks()
    _PENDING[id(param)] = (lambda: param, settle)  # [Note: order of class and entry]
    param.__class__ = PendingParameter
    if view is not None:
        _VIEWS[id(param)] = weakref.ref(view)
        _PENDING[id(view)] = (lambda: view, settle)
        view.__class__ = _pending_dtensor()
    return ""


def owners_of(param: Tensor) -> int:
    """Count who holds a parameter's tensor, but for the DTensor in its place."""
    return handles(param) - (view_of(param) is not None)


def _gone() -> None:
    """Return what a reference to a DTensor that there is not would return."""


def unmark(param: Tensor) -> None:
    """Make a parameter a plain one again: its values are there."""
    if is_pending(param):
        param.__class__ = Parameter
    _PENDING.pop(id(param), None)
    view = _VIEWS.pop(id(param), _gone)()
    if view is not None:
        view.__class__ = _dtensor()
        _PENDING.pop(id(view), None)


def lose(param: Tensor, settle: Callable[[], None], error: Exception) -> None:
    """Keep a pending parameter alive no longer: its values did not come, and who reads it is told so.

    Args:
        param: The parameter.
        settle: The bound method that was given to :func:`mark`. It is tried again as long as its object exists.
        error: Why they did not come.
    """
    assert isinstance(param, Parameter)
    # Only the text: an error holds the frames that it went through, and they hold the model.
    message = f"ovpatch: the values of this parameter did not arrive after optimizer.step(): {error}"
    method = weakref.WeakMethod(settle)

    def settle_or_fail() -> None:
        again = method()
        if again is None:
            raise RuntimeError(message)
        again()

    for one in filter(lambda one: one is not None, (param, _VIEWS.get(id(param), _gone)())):
        _PENDING[id(one)] = (weakref.ref(one, partial(forget, _PENDING, id(one))), settle_or_fail)


def is_pending(param: Tensor) -> bool:
    """Tell whether the parameter's values are still on their way."""
    return type(param) is PendingParameter


def _brings(value: Any) -> bool:
    return hasattr(type(value), "_bring")


def any_pending() -> bool:
    """Tell whether any parameter's values are."""
    return bool(_PENDING)


def settle(param: Tensor) -> None:
    """Bring a parameter's values, if they are not there."""
    if _brings(param):
        param._bring()  # type: ignore[attr-defined]  # as was just asked


def settle_all() -> None:
    """Bring the values of everything that is pending in this process.

    Raises:
        RuntimeError: Some did not come; all others did.
    """
    failures = []
    for reference, _ in list(_PENDING.values()):
        param = reference()
        if param is not None:
            try:
                settle(param)
            except RuntimeError as error:  # of its collective
                failures.append(error)
    if failures:
        raise failures[0]


def settle_within(values: Any, *, otherwise_all: bool = True) -> None:
    """Settle the pending parameters in nested tuples, lists and dictionaries.

    Args:
        values: Where to look.
        otherwise_all: Settle everything if there are none. If torch says that there is one, it is in a container that
            we do not know, and torch would ask again and again.
    """
    found = [value for value in leaves(values) if _brings(value)]
    if not found and otherwise_all:
        settle_all()
    for param in found:
        settle(param)


class plainly:  # it is used as a function is
    """Work on tensors as if the reader were in no mode: of torch functions, of dispatch, of functorch or of inference.

    A copy that settles a parameter is no part of what the reader computes: it must not be recorded, nor be refused as
    a write to a captured tensor. Written out, since a generator around torch's own context managers takes several times
    as long, and a step enters it for each of its buckets.
    """

    __slots__ = ("_grad", "_guards")

    def __enter__(self) -> None:
        """Leave all modes."""
        self._guards = (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch._C._DisableFuncTorch(),
            torch._C._InferenceMode(False),
        )
        for guard in self._guards:
            guard.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_error: object) -> None:
        """Be in the same modes as before."""
        torch._C._set_grad_enabled(self._grad)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


@cache
def _settle_before_forks() -> None:
    """A forked child has neither the communicator's threads nor, perhaps, a lock that is free."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=settle_all)


def reduce_between_processes(param: Parameter) -> Any:
    """Return how a parameter travels to another process: settled, as the plain one that it is then."""
    from torch.multiprocessing.reductions import reduce_tensor

    settle(param)
    return reduce_tensor(param)


# torch registers how tensors travel to other processes by exact type.
ForkingPickler.register(PendingParameter, reduce_between_processes)
