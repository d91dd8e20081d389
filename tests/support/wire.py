"""How values cross between pytest and its workers: pickled, with every tensor by value and on the CPU.

Shared memory would be faster, but its file descriptors outlive a killed worker, and a CUDA tensor sent by handle dies
with the sender. Gradients are often views of a large bucket: they are cloned, so the bucket does not travel.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def dumps(value: Any) -> bytes:
    """Pickle ``value``; tensors lose device, ``requires_grad``, subclass and aliasing, nothing else."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _decode, (_encode(obj),)
        return NotImplemented


def _encode(tensor: torch.Tensor) -> bytes:
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise TypeError("a DTensor cannot leave its process group; return .full_tensor() or .to_local()")
    plain = tensor.detach().to("cpu").clone()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def _decode(data: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
