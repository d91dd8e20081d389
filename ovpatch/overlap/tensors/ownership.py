"""Who shares a tensor's memory, as far as that can be told from counts of references."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

# References that keep nothing alive.


class WeakParams(Sequence[torch.nn.Parameter]):
    """Parameters that are not kept alive.

    A gradient that is a placeholder knows the shards, and belongs to its parameter in a way that Python's garbage
    collector does not see: with the parameters kept here, a model would never be freed.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._references = [weakref.ref(param) for param in params]

    def __getitem__(self, index: Any) -> Any:
        param = self._references[index]()
        if param is None:
            raise RuntimeError("ovpatch: the parameter that is asked for does not exist any more")
        return param

    def __len__(self) -> int:
        return len(self._references)

    def find(self, index: int) -> torch.nn.Parameter | None:
        """Return a parameter, if it still exists."""
        return self._references[index]()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        if target is None:
            raise RuntimeError("what was asked for does not exist any more")
        return target(*args)

    return call


def forget(table: dict[int, Any], key: int, _dead: object) -> None:
    """Drop an entry of what has died, as the callback of a weak reference."""
    table.pop(key, None)


def storage_references(tensor: Tensor) -> int:
    """Count the tensors and Python's storage objects that share this one's memory, plus a constant."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


@functools.cache
def references_of_one() -> int:
    """Return the count for memory that one tensor alone owns.

    Measured, because what Python and torch count for themselves differs between their versions.
    """
    with _plainly():
        return storage_references(torch.zeros(1))


def is_shared(tensor: Tensor) -> bool:
    """Tell whether other processes may look at the memory; on other devices than the CPU nothing tells."""
    return tensor.is_cpu and tensor.untyped_storage().is_shared()


def is_sole_owner(grad: Tensor, given: Tensor | None = None) -> bool:
    """Tell whether nobody but one parameter, and who holds that very Python object, knows the gradient's memory.

    Args:
        grad: A parameter's ``grad``.
        given: The gradient that the running AccumulateGrad node was given, if this is asked from a hook of one. The
            node still holds it, and if ``grad`` was made of it, that is no stranger.
    """
    if handles(grad) != _handles_of_a_gradient():
        return False  # two parameters have the same tensor, or a DLPack capsule holds it
    held = 0
    if given is not None and given.layout is torch.strided and given.data_ptr() == grad.data_ptr():
        held = 1 + _holds_its_base(given)
    return storage_references(grad) == references_of_one() + held


def is_nobody_elses(grad: Tensor) -> bool:
    """Tell whether a parameter's gradient is a plain one, whose memory may be given up."""
    return (
        type(grad) is Tensor
        and grad.layout is torch.strided
        and not grad.requires_grad
        and not (grad.is_conj() or grad.is_neg())
        and is_sole_owner(grad)
    )


def is_unshared(tensor: Tensor) -> bool:
    """Tell whether this is a plain tensor whose memory nobody knows but who holds that very Python object."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and handles(tensor) == 1
        and storage_references(tensor) == references_of_one()
    )


def _holds_its_base(view: Tensor) -> bool:
    """Tell whether this is a view, as a Linear's weight gets one, and its base is nobody else's.

    A base that somebody else holds is the input of another node, which is still to make a gradient of it, or is kept by
    a Function written in Python.
    """
    base = view._base
    return base is not None and (handles(base), sys.getrefcount(base)) == _counts_of_a_base()


def handles(tensor: Any) -> int:
    """Count the owners of the tensor object; all of Python is one."""
    count: int = tensor._use_count()
    return count


@functools.cache
def _handles_of_a_gradient() -> int:
    with _plainly():
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.zeros(1)
        grad = param.grad
        return handles(grad)


@functools.cache
def _counts_of_a_base() -> tuple[int, int]:
    with _plainly():
        view = torch.zeros(2).view(2)
        base = view._base
        assert base is not None
        return handles(base), sys.getrefcount(base)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Measure without modes that might keep tensors."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield


_NOTHING: Final[AbstractContextManager[Any]] = contextlib.nullcontext()


def outside_inference() -> AbstractContextManager[Any]:
    """Return a context whose tensors autograd takes later on; torch's own is not free, and a step asks often."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the tensor fills its memory range exactly once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


def same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Tell whether the tensor lies in memory as ``strides`` say; a dimension of size 1 has no say."""
    return tensor.stride() == strides or all(
        size == 1 or mine == theirs for size, mine, theirs in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )
