"""DTensors and the local tensors in them.

[Note: DTensors without their API] ``DTensor.from_local()`` and ``to_local()`` are autograd nodes, of 40 µs in forward
and more in backward. An autograd function may take and return DTensors itself: inside, it looks at the local tensors
and wraps what it returns, gradients of parameters among it, in a layout that was made once.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

_KEPT = 1024  # layouts; batches of ever new lengths must not fill the memory

_specs: dict[Any, Any] = {}


def local(tensor: Tensor) -> Tensor:
    """Return a tensor's memory on this rank."""
    found: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if found is None else found


def arrived(x: Tensor) -> Tensor:
    """Return a tensor that one of torch's functional collectives writes, when it is there."""
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def like(grad: Tensor, tensor: Tensor) -> Tensor:
    """Return a local gradient as what a parameter is."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return grad
    made: Tensor = _dtensor()(grad, spec, requires_grad=False)
    return made


def wrapped(tensor: Tensor, mesh: Any, placement: Any) -> Tensor:
    """Return a DTensor of a contiguous local tensor, as ``DTensor.from_local`` would, outside of autograd.

    Args:
        tensor: This rank's part; all ranks' are of the same shape.
        mesh: Of one dimension.
        placement: Over it.
    """
    key = mesh, placement, tensor.shape, tensor.dtype
    spec = _specs.get(key)
    kind = _dtensor()
    if spec is None:
        if len(_specs) >= _KEPT:
            _specs.clear()
        with torch.no_grad():
            spec = _specs[key] = kind.from_local(tensor, mesh, (placement,), run_check=False)._spec
    made: Tensor = kind(tensor, spec, requires_grad=False)
    return made


def unwrapped(grad: Any, placement: Any) -> Tensor:
    """Return the local part of a gradient, laid out as a tensor of this placement was.

    Args:
        grad: Of a tensor that was handed out: a DTensor if that was one.
        placement: Of the tensor; None if it was none.
    """
    if placement is None or not isinstance(grad, _dtensor()):
        return arrived(grad)
    if grad._spec.placements != (placement,):
        grad = grad.redistribute(placements=(placement,))
    return arrived(grad._local_tensor)


def is_partial(tensor: Any) -> bool:
    """Tell whether a DTensor is this rank's term of a sum."""
    return bool(tensor._spec.placements[0].is_partial())


def forget() -> None:
    """Let go of all meshes."""
    _specs.clear()


def _dtensor() -> Any:
    return sys.modules["torch.distributed.tensor"].DTensor
