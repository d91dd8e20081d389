"""The users of a tensor's memory, found by reference counts, and its layout."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import outside_modes

#: Returns the number of owners of a tensor object. All references from Python count as one owner.
use_count: Final[Callable[[Any], int]] = torch.Tensor._use_count  # type: ignore[attr-defined]


def count_storage_references(tensor: Tensor) -> int:
    """Return the number of tensors and Python storages over this memory, plus a constant."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


@functools.cache
def count_sole_references() -> int:
    """Return :func:`count_storage_references` of memory that only one tensor uses.

    The number is measured, because the counts that Python and torch add differ between versions.
    """
    with outside_modes():
        return count_storage_references(torch.zeros(1, dtype=torch.float32, device="cpu"))


def is_in_shared_memory(tensor: Tensor) -> bool:
    """Return whether other processes may read the memory.

    Only storages on the CPU know it. The result is false for all others.
    """
    return tensor.is_cpu and tensor.untyped_storage().is_shared()


def is_sole_owner(grad: Tensor, node_grad: Tensor | None = None) -> bool:
    """Return whether only ``param.grad`` refers to the gradient's memory, so it may be overwritten.

    Args:
        grad: The ``grad`` of a parameter.
        node_grad: In a hook of an AccumulateGrad node, the gradient that the node received. The
            node still holds it. If ``grad`` was made of it, this does not count as use. Default:
            None.
    """
    # Two parameters have the same tensor, or a DLPack capsule holds it.
    if use_count(grad) != count_grad_owners():
        return False
    node_references = 0
    if (
        node_grad is not None
        and node_grad.layout is torch.strided
        and node_grad.data_ptr() == grad.data_ptr()
    ):
        # The node's tensor is one reference to the memory. If it is a view, its base is another.
        node_references = 1 + _is_sole_owner_of_base(node_grad)
    return count_storage_references(grad) == count_sole_references() + node_references


def is_unshared(tensor: Tensor) -> bool:
    """Return whether this is a plain tensor whose memory only this Python object uses."""
    return has_sole_object(tensor) and count_storage_references(tensor) == count_sole_references()


def has_sole_object(tensor: Tensor) -> bool:
    """Return whether this is a plain tensor that C++ does not hold.

    The memory of such a tensor may be replaced.
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (
            tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg()
        )
        and use_count(tensor) == 1
    )


def _is_sole_owner_of_base(view: Tensor) -> bool:
    """Return whether this is a view that alone holds its base.

    The gradient of a Linear's weight is such a view. A base with more owners has another use:
    another node receives it and must still compute a gradient from it, or a Function written in
    Python keeps it.
    """
    base = view._base
    return base is not None and (use_count(base), sys.getrefcount(base)) == _measure_sole_base()


@functools.cache
def count_grad_owners() -> int:
    """Return :data:`use_count` of a gradient that only its parameter and one Python object hold."""
    with outside_modes():
        param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        param.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
        return use_count(param.grad)


@functools.cache
def _measure_sole_base() -> tuple[int, int]:
    """Return the counts of a base that only one view holds, with the same references as above."""
    with outside_modes():
        view = torch.zeros(2, dtype=torch.float32, device="cpu").view(2)
        base = view._base
        assert base is not None
        return use_count(base), sys.getrefcount(base)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor fills its memory range exactly once, in any order of dimensions."""
    # Sorted by stride, the stride of each dimension is the number of elements of all dimensions
    # before it. Dimensions of size 1 have arbitrary strides.
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
