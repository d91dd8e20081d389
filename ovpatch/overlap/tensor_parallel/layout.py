"""Activations as rows, and DTensors with the local tensors in them.

``DTensor.from_local()`` and ``to_local()`` are autograd nodes, with much host time of their own. An autograd function
may take and return DTensors itself: it reads the local tensors, and wraps its results, gradients of parameters among
them, in a layout that is made once.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ovpatch.overlap.tensor_parallel.schedules.stock import linear

# Activations as rows of a matrix, the dimension that is cut over the ranks first: a collective puts the ranks' rows one
# behind the other, so a gathered matrix has its rows in order. Mostly the rows are a view. With a batch in front of the
# sequence, the small tensors are copied: the shard before it is gathered, and the output, a part of the features.


def to_rows(x: Tensor, dim: int) -> Tensor:
    """Return ``[.., s, .., k]`` as contiguous ``[s * .., k]``, dimension ``dim`` first."""
    if x.dim() != 2:
        if dim and not _in_front(x.shape, dim):
            x = x.movedim(dim, 0)
        x = x.reshape(-1, x.shape[-1])
    return x.contiguous()


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Return rows ``[s * .., n]``, dimension ``dim`` first, as a contiguous activation.

    Only dimension ``dim`` and the last of the activation may have other sizes than in ``shape``.
    """
    if len(shape) == 2:
        return rows
    if len(shape) == 1:
        return rows.view(rows.shape[-1])
    before, behind = shape[:dim], shape[dim + 1 : -1]
    first = rows.shape[0] // max(prod(before) * prod(behind), 1)
    if not dim or _in_front(shape, dim):
        return rows.view(*before, first, *behind, rows.shape[-1])
    return rows.view(first, *before, *behind, rows.shape[-1]).movedim(0, dim).contiguous()


def make_result(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Return fresh rows as a linear's output that is no view, as F.linear's is none; arguments as of :func:`from_rows`.

    Autograd refuses to write into a view that a function has returned, as Megatron's cross-entropy does.
    """
    result = from_rows(rows, shape, dim)
    if result._is_view():
        result = torch.ops.aten._unsafe_view.default(rows, result.shape)
    return result


def make_output(rows: Tensor, features: int, shape: torch.Size, dim: int) -> Tensor:
    """Return memory for a linear's output, a contiguous activation; arguments as of :func:`from_rows`."""
    others = prod(shape[:dim]) * prod(shape[dim + 1 : -1])
    return rows.new_empty(
        (*shape[:dim], len(rows) // max(others, 1), *shape[dim + 1 : -1], features)
    )


def fill_output(
    activation: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, dim: int
) -> None:
    """Compute a linear of rows into an activation."""
    if not dim or _in_front(activation.shape, dim):
        linear(rows, weight, bias, out=activation.view(-1, activation.shape[-1]))
    else:
        activation.copy_(from_rows(linear(rows, weight, bias), activation.shape, dim))


def _in_front(shape: torch.Size, dim: int) -> bool:
    return all(size == 1 for size in shape[:dim])


# Placements of an activation, and modes that record operations.


def find_sequence_dim(layout: Placement, x: Tensor) -> int | None:
    """Return the dimension of ``x`` along which a layout cuts; None if it is the last one, or none."""
    if not isinstance(layout, Shard):  # a _StridedShard is none
        return None
    dim = layout.dim + x.dim() if layout.dim < 0 else layout.dim
    return dim if 0 <= dim < x.dim() - 1 else None


def is_traced() -> bool:
    """Return whether single operations are recorded, to be kept, changed or repeated: stock's have to be seen then.

    Selective checkpointing, torch.func and tracers record. Modes that only count do not: they may be on one rank alone,
    which must not issue other collectives then. A checkpoint whose policy keeps no collective
    (``repeats_collectives``) does not record either.
    """
    if torch._C._len_torch_dispatch_stack() and any(
        map(_records, _get_current_dispatch_mode_stack())
    ):
        return True
    return bool(torch._C._are_functorch_transforms_active() or torch._C._is_tracing())


def _records(mode: Any) -> bool:
    is_stocks = type(mode).__module__ == "torch.utils.checkpoint"
    return getattr(mode, "_mode_key", None) is not None or not getattr(
        mode, "repeats_collectives", not is_stocks
    )


_KEPT = 1024  # layouts; batches of ever new lengths must not fill memory

SPECS: dict[Any, Any] = {}  # of meshes

PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Classes of tensors that are local and need not be waited for."""


def get_local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or the tensor itself."""
    found: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if found is None else found


def wait_for_collective(x: Tensor) -> Tensor:
    """Return a tensor, after waiting for the functional collective that writes it, if one does."""
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def wrap_grad(grad: Tensor, tensor: Tensor) -> Tensor:
    """Return a local gradient as a DTensor if the parameter is one."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return grad
    return _make_dtensor(grad, spec)


def wrap_local(tensor: Tensor, mesh: Any, placement: Any) -> Tensor:
    """Return a DTensor of a contiguous local tensor, as ``DTensor.from_local`` would, outside of autograd.

    The tensor has the same shape on all ranks, and the mesh has one dimension.
    """
    key = mesh, placement, tensor.shape, tensor.dtype
    spec = SPECS.get(key)
    if spec is None:
        if len(SPECS) >= _KEPT:
            SPECS.clear()
        with torch.no_grad():
            spec = SPECS[key] = DTensor.from_local(
                tensor, mesh, (placement,), run_check=False
            )._spec
    return _make_dtensor(tensor, spec)


def _make_dtensor(local: Tensor, spec: Any) -> Tensor:
    # Not by DTensor(): outside of torch.export its __init__ does nothing, in three calls that hide it from Dynamo.
    made: Tensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def unwrap_grad(grad: Any, placement: Any) -> Tensor:
    """Return the local part of an output's gradient, in the output's placement, None if it was no DTensor."""
    if placement is None or not isinstance(grad, DTensor):
        return wait_for_collective(grad)
    if grad._spec.placements != (placement,):
        grad = grad.redistribute(placements=(placement,))
    return wait_for_collective(grad._local_tensor)


def is_partial(tensor: Any) -> bool:
    """Return whether a DTensor is this rank's term of a sum."""
    return bool(tensor._spec.placements[0].is_partial())
