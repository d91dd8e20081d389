"""The format of values between pytest and its workers: pickles, with every tensor by value and on the CPU.

Shared memory would be faster, but its file descriptors outlive a killed worker, and a CUDA tensor sent by handle dies
with the sender. Gradients are often views of a large bucket. They are cloned, so the bucket is not sent.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any, Final

import torch

#: Types of elements that are bytes and nothing else.
_PLAIN: Final = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


def dumps(value: Any) -> bytes:
    """Pickle ``value``; tensors lose device, ``requires_grad``, subclass and aliasing, nothing else."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        plain = _make_plain(obj)
        return (_rebuild, _read(plain)) if _is_dense(plain) else (_decode, (_encode(plain),))


def _make_plain(tensor: torch.Tensor) -> torch.Tensor:
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise TypeError(
            "a DTensor cannot leave its process group; return .full_tensor() or .to_local()"
        )
    plain = tensor.detach().to("cpu").clone()
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory has each element once and nothing else, as the memory of most clones does."""
    if (
        tensor.layout is not torch.strided
        or tensor.dtype not in _PLAIN
        or tensor.is_neg()
        or tensor.storage_offset()
    ):
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _read(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]:
    """Return the arguments for :func:`_rebuild`, in a tenth of the time of ``torch.save``: tests send thousands."""
    memory = ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), memory


def _rebuild(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], memory: bytes
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    ctypes.memmove(tensor.data_ptr(), memory, len(memory))
    return tensor


def _encode(plain: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def _decode(data: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
