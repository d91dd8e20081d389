"""Parameters whose all-gather is in flight, and whose first reader waits for it.

[Note: pending by type] explains which readers the class of a parameter detects. The functions of
torch through which the remaining readers pass are in :mod:`.read_hooks`.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.comm.lifetimes import find_param_record, param_record, weak_key
from ovpatch.overlap.tensors.lazy_tensor import METADATA, iterate_leaves
from ovpatch.overlap.tensors.tensor_memory import count_sole_references, use_count

#: The pending parameters, and the DTensors over them, by ``id()``. Each value has a function that
#: returns the tensor of an ``id()``, and the function that waits for its values. The first one keeps
#: the tensor alive, unless the values are lost.
PENDING: dict[int, tuple[Callable[[int], Any], Callable[[], None]]] = {}

#: Number of owners of a parameter's tensor object without DDP: Python, and the AccumulateGrad node.
NUM_OWNERS: Final = 2


class PendingParameter(Parameter):
    """A parameter while its all-gather is in flight.

    [Note: pending by type] While the memory of a parameter is partly stale, the parameter has this
    class. Once the values have arrived, it is a ``torch.nn.Parameter`` again, as after
    ``UninitializedParameter.materialize``. torch calls ``__torch_function__`` of this class for
    every function that receives the parameter, from Python or C++, also inside of lists. Functions
    that only read metadata pass, and all others wait first. Other tensors cost nothing.
    :func:`mark_pending` writes to :data:`PENDING` before it sets the class, and :func:`mark_ready`
    deletes from it after it has reset the class. So a reader that sees the class finds the
    parameter in :data:`PENDING`, or the parameter is ready by then.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, after the pending arguments are ready unless it only reads metadata."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # torch has found a pending argument. If this search finds none, the parameter is inside of
        # an unknown container.
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


@cache
def _get_dtensor_class() -> Any:
    # A DTensor exists wherever this is called, so this imports nothing new.
    from torch.distributed.tensor import DTensor

    return DTensor


@cache
def _get_pending_dtensor_class() -> Any:
    """Return the class of a DTensor while the parameter below it is pending.

    [Note: DTensors over parameters] ``DistributedDataParallel(device_mesh=)`` trains the local
    tensors of a model's DTensors. Its first forward puts new DTensors over them into the module,
    and forward reads the parameters through these. So such a DTensor is pending together with its
    parameter. DTensor's own methods do not ask ``__torch_function__``, but they read
    ``_local_tensor``, which waits as well.
    """

    class PendingDTensor(_get_dtensor_class()):  # type: ignore[misc]
        __slots__ = ()
        __torch_function__ = PendingParameter.__dict__["__torch_function__"]

        @property
        def _local_tensor(self) -> Any:
            wait_for_param(self)
            # The DTensor has its usual class again, in which this is an attribute.
            return self._local_tensor

    return PendingDTensor


class _DTensorUse:
    # Whether a parameter has ever had a DTensor over it. Most programs have none, and pay nothing.
    has_begun = False


def register_dtensor(param: Tensor, dtensor: Any) -> None:
    """Note that ``dtensor`` is in the place of ``param`` in its module; hold it weakly."""
    param_record(param).dtensor = weakref.ref(dtensor)
    _DTensorUse.has_begun = True


def has_dtensors() -> bool:
    """Return whether any parameter of this process has ever had a DTensor in its place."""
    return _DTensorUse.has_begun


def find_dtensor(param: Tensor) -> Any:
    """Return the DTensor in the place of a parameter, or None."""
    record = find_param_record(param) if _DTensorUse.has_begun else None
    return None if record is None else record.dtensor()


def _explain_shared_memory(params: Iterable[Tensor], aliases: int, owners: int) -> str:
    references = count_sole_references() + aliases
    # One loop with local names, because there may be thousands of parameters.
    count_references = torch._C._storage_Use_Count
    count = sys.getrefcount
    count_owners = use_count
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:
            storage = param.untyped_storage()
            if count_references(storage._cdata) + count(storage) != references:
                return "other tensors share its memory"
            # Only storages on the CPU know whether other processes share them.
            if param.is_cpu and storage.is_shared():
                return "other processes share its memory"
            if count_owners(param) > owners:
                return "a graph or a scripted module holds it"
    return ""


def mark_pending(
    params: Sequence[Tensor],
    wait: Callable[[], None],
    *,
    aliases: int = 0,
    owners: int = NUM_OWNERS,
) -> str:
    """Make readers of the parameters call ``wait`` first: readers of all parameters, or of none.

    A parameter cannot be pending if its memory can be read without a call that sees its class.
    Another tensor may read it: a ``detach()``, a view that a live graph keeps, weights that cuDNN
    flattened. Another process may (``share_memory_()``), or C++: a scripted module, a graph that
    must still run backward.

    Args:
        params: The parameters.
        wait: Waits for the values and calls :func:`mark_ready`. Several threads may call it,
            repeatedly, in any mode of their reader.
        aliases: The number of other tensors over each parameter's memory that the caller keeps.
            Default: 0.
        owners: The number of owners that each tensor object may have. DDP's C++ reducer counts as
            three. Default: :data:`NUM_OWNERS`.

    Returns:
        "" if the parameters are pending now, otherwise the reason. Then the caller must wait
        immediately, and must not try again: another thread may drop its alias in between.
    """
    _register_fork_hook()
    if foreign_types := {*map(type, params)} - {Parameter}:
        return f"it is a {foreign_types.pop().__name__}"
    try:
        # Before the class, see [Note: pending by type].
        params_by_id = {id(param): param for param in params}
        PENDING.update(dict.fromkeys(params_by_id, (params_by_id.get, wait)))
        for param in params:
            param.__class__ = PendingParameter
        # Aliases are counted after the class is set. An alias that another thread creates later
        # waits, so the count cannot miss one.
        reason = (
            _mark_with_dtensors(params, wait, aliases, owners)
            if _DTensorUse.has_begun
            else _explain_shared_memory(params, aliases, owners)
        )
    except BaseException:
        # The caller never learns that the parameters are pending, even after a KeyboardInterrupt,
        # so no reader could wait for them.
        mark_ready(params)
        raise
    if reason:
        mark_ready(params)
    return reason


def _mark_with_dtensors(
    params: Sequence[Tensor], wait: Callable[[], None], aliases: int, owners: int
) -> str:
    """Mark the DTensors over marked parameters; return the reason if the parameters cannot be pending.

    See [Note: DTensors over parameters].
    """
    dtensors = {id(param): find_dtensor(param) for param in params}
    covered = [param for param in params if dtensors[id(param)] is not None]
    plain = [param for param in params if dtensors[id(param)] is None]
    if not all(_is_sole_dtensor(dtensors[id(param)], param) for param in covered):
        return "a graph holds the DTensor in its place"
    # The local tensor of a DTensor is one more alias, and it holds the parameter as its base.
    reason = _explain_shared_memory(plain, aliases, owners) or _explain_shared_memory(
        covered, aliases + 1, owners + 1
    )
    if not reason:
        for param in covered:
            dtensor = dtensors[id(param)]
            PENDING[id(dtensor)] = ({id(dtensor): dtensor}.get, wait)
            dtensor.__class__ = _get_pending_dtensor_class()
    return reason


def _is_sole_dtensor(dtensor: Any, param: Tensor) -> bool:
    """Return whether Python alone holds a DTensor and its local tensor, a view of the parameter."""
    local = dtensor._local_tensor
    return use_count(dtensor) == use_count(local) == 1 and local._base is param


def mark_ready(params: Iterable[Tensor]) -> None:
    """Make the parameters plain again, once their values have arrived."""
    for param in params:
        if type(param) is PendingParameter:
            # mypy has narrowed the type to PendingParameter here.
            param.__class__ = Parameter  # type: ignore[assignment]
        PENDING.pop(id(param), None)
        dtensor = find_dtensor(param) if _DTensorUse.has_begun else None
        if dtensor is not None and type(dtensor) is _get_pending_dtensor_class():
            dtensor.__class__ = _get_dtensor_class()
            PENDING.pop(id(dtensor), None)


def mark_lost(params: Iterable[Tensor], wait: Callable[[], None], error: Exception) -> None:
    """Stop keeping pending parameters alive whose values did not arrive.

    Their readers get an error.

    Args:
        params: The parameters. Those that are not pending stay unchanged.
        wait: The bound method that :func:`mark_pending` received. Readers call it again while its
            object exists.
        error: The reason why the values did not arrive.
    """
    # Keep only the text. The error holds the frames that it passed, and they hold the model.
    message = (
        f"ovpatch: the values of this parameter did not arrive after optimizer.step(): {error}"
    )
    method = weakref.WeakMethod(wait)

    def wait_or_fail() -> None:
        retry = method()
        if retry is None:
            raise RuntimeError(message)
        retry()

    for param in params:
        if type(param) is not PendingParameter:
            continue
        for tensor in (param, find_dtensor(param)):
            if tensor is not None:
                find = functools.partial(_dereference, weak_key(tensor, PENDING))
                PENDING[id(tensor)] = (find, wait_or_fail)


def _dereference(reference: weakref.ref[Tensor], _key: int) -> Tensor | None:
    return reference()


def is_pending(param: Tensor) -> bool:
    """Return whether the parameter's all-gather is in flight."""
    return type(param) is PendingParameter


def wait_for_param(param: Tensor) -> None:
    """Wait for the values of a parameter, or of a DTensor over one, if it is pending."""
    pending = PENDING.get(id(param))
    # A lost parameter is referenced weakly, so its id may belong to another tensor by now.
    if pending is not None and pending[0](id(param)) is param:
        pending[1]()


def wait_for_all() -> None:
    """Wait for the values of every pending parameter of this process.

    Raises:
        RuntimeError: The values of a parameter did not arrive; those of all others did.
    """
    failures = []
    for key, (find, wait) in list(PENDING.items()):
        # One call waits for a bucket, so it may have made later parameters of this list ready.
        if find(key) is not None and key in PENDING:
            try:
                wait()
            except RuntimeError as error:
                # The collectives of other buckets must still be completed.
                failures.append(error)
    if failures:
        raise failures[0]


def wait_for_args(values: Any) -> bool:
    """Wait for the pending parameters in nested containers; return whether there were any.

    Args:
        values: Tuples, lists and mappings of any values.
    """
    found = [value for value in iterate_leaves(values) if _has_pending_class(value)]
    for param in found:
        wait_for_param(param)
    return bool(found)


def _has_pending_class(value: Any) -> bool:
    # The values may have arrived a moment ago.
    if type(value) is PendingParameter:
        return True
    return _DTensorUse.has_begun and type(value) is _get_pending_dtensor_class()


@cache
def _register_fork_hook() -> None:
    """Wait for all parameters before every fork.

    A child has none of the communicator's threads. A lock that another thread holds during the fork
    is never released in the child.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=wait_for_all)


def reduce_for_other_process(param: Parameter) -> Any:
    """Wait, then return the form in which torch sends a plain parameter to another process."""
    from torch.multiprocessing.reductions import reduce_tensor

    wait_for_param(param)
    return reduce_tensor(param)


# torch registers the reductions of tensors by exact type.
ForkingPickler.register(PendingParameter, reduce_for_other_process)
