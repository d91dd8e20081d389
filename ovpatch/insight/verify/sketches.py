"""A small stand-in for a large tensor, of which differences still mean something.

[Note: sketches] Keeping every large tensor of every step would fill a disk. So it is folded: element ``i`` goes, with a
fixed pseudo-random sign, into bucket ``i mod BUCKETS``, and a bucket is the sum of what came into it, divided by the
square root of how many those are. That is linear: the difference of two sketches is the sketch of the difference, so
the yardstick of noise, which is such a difference too, keeps its meaning. Noise of size e in every element is about e
in every bucket. A difference d of one element alone is d divided by that root: the floor of what is always allowed is
higher for it. No difference is lost altogether, because the digest is of all bits. NaNs and infinities would swallow
their bucket; they count as 0 in it, and where they are has a digest of its own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from ovpatch.insight.verify.digests import CHUNK, digest, mix

#: Sums that are kept of a large tensor.
BUCKETS: Final = 1 << 12


@torch.no_grad()
def sketch(tensor: Tensor) -> Tensor:
    """Return a tensor folded into ``BUCKETS`` float64 sums, on its own device.

    Args:
        tensor: A real, strided tensor of any dtype.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    for number, start in enumerate(range(0, flat.numel(), CHUNK)):
        part = flat[start : start + CHUNK].to(torch.float64)
        part = torch.where(part.isfinite(), part, 0.0)
        part = torch.nn.functional.pad(part, (0, -len(part) % BUCKETS)).view(-1, BUCKETS)
        total += (part * _signs(flat.device)[: len(part)]).sum(0) * _chunk_signs(flat.device, number)
    return total / math.sqrt(max(1, -(-flat.numel() // BUCKETS)))


@torch.no_grad()
def not_finite(tensor: Tensor) -> str:
    """Return how many NaNs and infinities there are, with a digest of where; nothing if there are none.

    Args:
        tensor: A strided tensor of any dtype.
    """
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return ""
    tensor = tensor.detach()
    kinds = tensor.isnan() * 1 + tensor.isposinf() * 2 + tensor.isneginf() * 3
    return f"{int((kinds != 0).sum())} not finite, {digest(kinds.to(torch.uint8))}"


@lru_cache(maxsize=16)
def _signs(device: torch.device) -> Tensor:
    return _sign(torch.arange(CHUNK, device=device) + (1 << 40)).view(-1, BUCKETS)


def _chunk_signs(device: torch.device, number: int) -> Tensor:
    return _sign(torch.arange(BUCKETS, device=device) + ((number + 1) << 42))


def _sign(numbers: Tensor) -> Tensor:
    """Return plus or minus one for each integer."""
    return ((mix(numbers) & 1) * 2 - 1).to(torch.float64)
