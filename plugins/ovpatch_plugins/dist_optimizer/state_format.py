"""The format of a parameter's state, sent to ranks that do not have it.

Messages between ranks are data that cannot run code, so what an optimizer keeps besides tensors has to be numbers,
texts and the like, in lists, tuples and dicts. Tensors inside of those travel along whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ovpatch.overlap.tensors.lazy_tensor import TensorMeta


def pack(state: Mapping[Any, Any]) -> tuple[Any, list[Tensor]]:
    """Return a state as JSON values, and the tensors inside of it. Its keys may be numbers, too.

    Raises:
        TypeError: Something in it cannot be sent.
    """
    tensors: list[Tensor] = []
    return _packed(dict(state), tensors), tensors


def unpack(packed: Any, tensors: Sequence[Tensor], device: torch.device) -> dict[Any, Any]:
    """Return what :func:`pack` was given.

    Args:
        packed: JSON values.
        tensors: The tensors inside, on the CPU.
        device: The device of tensors that were not on the CPU.
    """
    state = _unpacked(packed, tensors, device)
    assert isinstance(state, dict)
    return state


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(one, tensors) for one in value]}
    if type(value) is dict:
        return {"dict": [[_packed(key, tensors), _packed(one, tensors)] for key, one in value.items()]}
    if type(value) is torch.Size:
        return {"size": list(value)}
    if type(value) is TensorMeta:
        return {"meta": [list(value.shape), list(value.strides), _name(value.dtype), value.device.type == "cpu"]}
    if type(value) is Tensor and value.layout is torch.strided:
        tensors.append(value.detach())
        return {"tensor": [len(tensors) - 1, value.device.type == "cpu"]}
    raise TypeError(
        f"ovpatch: an optimizer keeps a {type(value).__name__} in its state, which cannot be sent to other ranks; "
        "take its class out of OVPATCH_DIST_OPTIMIZER_PER_PARAMETER"
    )


def _unpacked(packed: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    if kind == "dict":
        return {_unpacked(key, tensors, device): _unpacked(one, tensors, device) for key, one in content}
    if kind == "size":
        return torch.Size(content)
    if kind == "meta":
        shape, strides, dtype, on_cpu = content
        where = torch.device("cpu") if on_cpu else device
        return TensorMeta(torch.Size(shape), tuple(strides), getattr(torch, dtype), where)
    if kind == "tensor":
        number, on_cpu = content
        return tensors[number] if on_cpu else tensors[number].to(device)
    items = [_unpacked(one, tensors, device) for one in content]
    return tuple(items) if kind == "tuple" else items


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
