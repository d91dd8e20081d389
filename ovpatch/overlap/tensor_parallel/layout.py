"""Activations as rows, and DTensors with the local tensors in them.

``DTensor.from_local()`` and ``to_local()`` are autograd nodes that take much host time. An autograd function may take
and return DTensors itself. It reads the local tensors, and wraps its results and the gradients of parameters in a
cached layout.
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

# - Activations as rows of a matrix
#
# The dimension that ranks shard comes first. A collective concatenates the rows of all ranks, so a gathered matrix has
# its rows in order. Mostly the rows are a view. If a batch dimension comes before the sequence, the small tensors are
# copied: the shard before it is gathered, and the output, which has a part of the features.


def to_rows(x: Tensor, dim: int) -> Tensor:
    """Return ``[.., s, .., k]`` as contiguous ``[s * .., k]``, dimension ``dim`` first."""
    if x.dim() != 2:
        if dim and not _has_only_ones_before(x.shape, dim):
            x = x.movedim(dim, 0)
        x = x.reshape(-1, x.shape[-1])
    return x.contiguous()


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Return rows ``[s * .., n]``, dimension ``dim`` first, as a contiguous activation.

    Only dimension ``dim`` and the last dimension of the activation may have other sizes than in ``shape``.

    Args:
        rows: The rows, ``[s * .., n]``.
        shape: The shape of an activation with the same dimensions.
        dim: The dimension that comes first in the rows.
    """
    if len(shape) == 2:
        return rows
    if len(shape) == 1:
        return rows.view(rows.shape[-1])
    before, after = shape[:dim], shape[dim + 1 : -1]
    length = rows.shape[0] // max(prod(before) * prod(after), 1)
    if not dim or _has_only_ones_before(shape, dim):
        return rows.view(*before, length, *after, rows.shape[-1])
    return rows.view(length, *before, *after, rows.shape[-1]).movedim(0, dim).contiguous()


def make_result(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Return fresh rows as a linear's output that is no view; for the arguments see :func:`from_rows`.

    The output of ``F.linear`` is no view either. Autograd refuses in-place writes to a view that a custom function has
    returned, and Megatron's cross-entropy writes in place.
    """
    result = from_rows(rows, shape, dim)
    # Autograd does not treat the result of _unsafe_view as a view. The rows are fresh, so no other tensor shares them.
    if result._is_view():
        result = torch.ops.aten._unsafe_view.default(rows, result.shape)
    return result


def make_output(rows: Tensor, features: int, shape: torch.Size, dim: int) -> Tensor:
    """Return memory for a linear's output, a contiguous activation with ``features`` features."""
    rows_per_index = prod(shape[:dim]) * prod(shape[dim + 1 : -1])
    return rows.new_empty(
        (*shape[:dim], len(rows) // max(rows_per_index, 1), *shape[dim + 1 : -1], features)
    )


def fill_output(
    activation: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, dim: int
) -> None:
    """Compute a linear of ``rows`` into an activation, whose dimension ``dim`` comes first in the rows."""
    if not dim or _has_only_ones_before(activation.shape, dim):
        linear(rows, weight, bias, out=activation.view(-1, activation.shape[-1]))
    else:
        activation.copy_(from_rows(linear(rows, weight, bias), activation.shape, dim))


def _has_only_ones_before(shape: torch.Size, dim: int) -> bool:
    return all(size == 1 for size in shape[:dim])


# - Placements of an activation, and modes that record operations


def find_sequence_dim(placement: Placement, x: Tensor) -> int | None:
    """Return the dimension of ``x`` that a placement shards; None if it shards the last one or none."""
    # A _StridedShard is no Shard, and no operator supports it.
    if not isinstance(placement, Shard):
        return None
    dim = placement.dim + x.dim() if placement.dim < 0 else placement.dim
    return dim if 0 <= dim < x.dim() - 1 else None


def is_recorded() -> bool:
    """Return whether a mode or transform records single operations to keep, change or repeat them.

    Such a recorder must see the operations of stock PyTorch. Selective checkpointing, torch.func and tracers record.
    A mode that only counts does not: it may be on one rank alone, and that rank must issue the same collectives as its
    peers. A checkpoint whose policy keeps no collective (``repeats_collectives``) does not record either.
    """
    if torch._C._len_torch_dispatch_stack() and any(
        map(_has_to_see_operations, _get_current_dispatch_mode_stack())
    ):
        return True
    return bool(torch._C._are_functorch_transforms_active() or torch._C._is_tracing())


def _has_to_see_operations(mode: Any) -> bool:
    is_torch_checkpoint = type(mode).__module__ == "torch.utils.checkpoint"
    return getattr(mode, "_mode_key", None) is not None or not getattr(
        mode, "repeats_collectives", not is_torch_checkpoint
    )


# The limit keeps batches of ever new lengths from filling memory.
_MAX_SPECS = 1024

# The layouts of DTensors by mesh, placement, local shape and dtype.
SPECS: dict[Any, Any] = {}

PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""The classes of local tensors that no collective is still writing."""


def get_local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or the tensor itself."""
    local: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def wait_for_collective(x: Tensor) -> Tensor:
    """Return a tensor after its functional collective, if any, has written it."""
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def wrap_grad(grad: Tensor, tensor: Tensor) -> Tensor:
    """Return a local gradient as a DTensor if the parameter is one."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return grad
    return _make_dtensor(grad, spec)


def wrap_local(tensor: Tensor, mesh: Any, placement: Any) -> Tensor:
    """Return the DTensor that ``DTensor.from_local`` would return, outside of autograd.

    Args:
        tensor: A contiguous local tensor, of the same shape on all ranks.
        mesh: A mesh of one dimension.
        placement: The placement over the mesh.
    """
    key = mesh, placement, tensor.shape, tensor.dtype
    spec = SPECS.get(key)
    if spec is None:
        if len(SPECS) >= _MAX_SPECS:
            SPECS.clear()
        with torch.no_grad():
            spec = SPECS[key] = DTensor.from_local(
                tensor, mesh, (placement,), run_check=False
            )._spec
    return _make_dtensor(tensor, spec)


def _make_dtensor(local: Tensor, spec: Any) -> Tensor:
    # DTensor.__init__ does nothing outside of torch.export, but three calls that hide it from Dynamo take host time.
    dtensor: Tensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return dtensor


def unwrap_grad(grad: Any, placement: Any) -> Tensor:
    """Return the local part of an output's gradient.

    Args:
        grad: The gradient, which may have another placement than the output.
        placement: The output's placement; None if the output was no DTensor.
    """
    if placement is None or not isinstance(grad, DTensor):
        return wait_for_collective(grad)
    # Autograd may add up gradients of several readers in another placement.
    if grad._spec.placements != (placement,):
        grad = grad.redistribute(placements=(placement,))
    return wait_for_collective(grad._local_tensor)


def is_partial(tensor: Any) -> bool:
    """Return whether a DTensor holds this rank's term of a sum over the ranks."""
    return bool(tensor._spec.placements[0].is_partial())
