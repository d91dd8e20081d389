"""The users of a tensor's memory, found by reference counts, and its layout."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import outside_modes

#: Returns how many owners a tensor object has; all of Python is one.
use_count: Final[Callable[[Any], int]] = torch.Tensor._use_count  # type: ignore[attr-defined]  # no stub


def count_storage_references(tensor: Tensor) -> int:
    """Return how many tensors and Python storage objects share this one's memory, plus a constant."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


@functools.cache
def count_references_of_one() -> int:
    """Return :func:`count_storage_references` of memory that one tensor alone owns.

    Measured, because the counts that Python and torch add differ between their versions.
    """
    with outside_modes():
        return count_storage_references(torch.zeros(1, dtype=torch.float32, device="cpu"))


def is_shared(tensor: Tensor) -> bool:
    """Return whether other processes may read the memory; on other devices than the CPU this cannot be told."""
    return tensor.is_cpu and tensor.untyped_storage().is_shared()


def is_sole_owner(grad: Tensor, given: Tensor | None = None) -> bool:
    """Return whether the gradient's storage is referenced only through ``param.grad``, so that it may be overwritten.

    Args:
        grad: A parameter's ``grad``.
        given: In a hook of an AccumulateGrad node, the gradient that the node was given. The node still holds it, which
            does not count if ``grad`` was made of it.
    """
    if use_count(grad) != count_grad_owners():
        return False  # two parameters have the same tensor, or a DLPack capsule holds it
    held = 0
    if given is not None and given.layout is torch.strided and given.data_ptr() == grad.data_ptr():
        held = 1 + _holds_its_base(given)
    return count_storage_references(grad) == count_references_of_one() + held


def is_unshared(tensor: Tensor) -> bool:
    """Return whether this is a plain tensor whose memory is referenced only through this Python object."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and use_count(tensor) == 1
        and count_storage_references(tensor) == count_references_of_one()
    )


def _holds_its_base(view: Tensor) -> bool:
    """Return whether this is a view, as the gradient of a Linear's weight is, and alone holds its base.

    A base with more owners is the input of another node, which is still to make a gradient of it, or a Function written
    in Python keeps it.
    """
    base = view._base
    return base is not None and (use_count(base), sys.getrefcount(base)) == _counts_of_a_base()


@functools.cache
def count_grad_owners() -> int:
    """Return :data:`use_count` of a gradient that only its parameter and one Python object know."""
    with outside_modes():
        param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        param.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
        return use_count(param.grad)


@functools.cache
def _counts_of_a_base() -> tuple[int, int]:
    with outside_modes():
        view = torch.zeros(2, dtype=torch.float32, device="cpu").view(2)
        base = view._base
        assert base is not None
        return use_count(base), sys.getrefcount(base)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor fills its memory range exactly once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
