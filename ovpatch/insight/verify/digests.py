"""A few numbers that stand for all bits of a tensor, computed where the tensor is.

[Note: digests] The bits of element ``i`` are read as an integer ``x[i]``, and a digest is two sums of ``w[i] * x[i]``
modulo ``2**64`` with fixed pseudo-random weights. All weights are odd, so they have an inverse: a change of one
element, by one bit or by many, always changes both sums. That changes of several elements cancel out in both is as good
as impossible. Sums of integers do not depend on their order, so a digest is the same on every device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

#: Elements that are taken at a time; the weights of a chunk take 16 MiB.
CHUNK: Final = 1 << 20

_MODULUS: Final = 1 << 64
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Return a text that is the same for two tensors of one dtype and shape if and only if all their bits are.

    Args:
        tensor: A strided tensor of any dtype, on any device.
    """
    bits = bits_of(tensor)
    weights = _weights(bits.device)
    starts = range(0, bits.numel(), CHUNK)
    parts = [bits[start : start + CHUNK].to(torch.int64) for start in starts]
    sums = torch.stack([(weights[:, : len(part)] * part).sum(1) for part in parts]).tolist() if parts else []
    total = [sum(_odd(2 * chunk + n) * row[n] for chunk, row in enumerate(sums)) % _MODULUS for n in range(2)]
    return f"{total[0]:016x}{total[1]:016x}"


def bits_of(tensor: Tensor) -> Tensor:
    """Return a flat view, or copy, of a tensor as integers of its own width; complex elements are two."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def mix(numbers: Tensor) -> Tensor:
    """Return pseudo-random 64-bit integers, one for each integer: the finaliser of splitmix64."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        high = (numbers >> shift) & ((1 << (64 - shift)) - 1)  # the sign must not come in from the left
        numbers = (numbers ^ high) * factor
    return numbers


def _odd(number: int) -> int:
    """Return the weight of a chunk."""
    seeds = torch.tensor([number * 0x1E3779B97F4A7C15 % (1 << 63)], device="cpu")
    return int(mix(seeds).item()) | 1


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Return two rows of odd weights."""
    numbers = torch.arange(2 * CHUNK, dtype=torch.int64, device=device)
    return (mix(numbers * 0x1E3779B97F4A7C15 + 1) | 1).view(2, CHUNK)
