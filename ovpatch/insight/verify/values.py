"""What is kept of one value of a run: enough to tell whether it is equal, and by how much it differs."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ovpatch.overlap.tensors import lazy_tensor

# A few numbers that stand for all bits of a tensor, computed where the tensor is.
#
# [Note: digests] The bits of element ``i`` are read as an integer ``x[i]``, and a digest is two sums of ``w[i] *
# x[i]`` modulo ``2**64`` with fixed pseudo-random weights. All weights are odd, so they have an inverse: a change of
# one element, by one bit or by many, always changes both sums. That changes of several elements cancel out in both is
# as good as impossible. Sums of integers do not depend on their order, so a digest is the same on every device.

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


# A small stand-in for a large tensor, of which differences still mean something.
#
# [Note: sketches] Keeping every large tensor of every step would fill a disk. So it is folded: element ``i`` goes,
# with a fixed pseudo-random sign, into bucket ``i mod BUCKETS``, and a bucket is the sum of what came into it,
# divided by the square root of how many those are. That is linear: the difference of two sketches is the sketch of
# the difference, so the yardstick of noise, which is such a difference too, keeps its meaning. Noise of size e in
# every element is about e in every bucket. A difference d of one element alone is d divided by that root: the floor
# of what is always allowed is higher for it. No difference is lost altogether, because the digest is of all bits.
# NaNs and infinities would swallow their bucket; they count as 0 in it, and where they are has a digest of its own.

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


#: Tensors with at most so many elements are kept as they are.
WHOLE: Final = 1 << 14

#: Form of a value that cannot be read, such as a tensor on the meta device; its digest is its class.
UNREAD: Final = "unread"

_SCALARS: Final = (bool, int, float, complex)


class Kept(NamedTuple):
    """One value, as it is stored.

    Attributes:
        form: What it is, for example ``float32 [3, 4]``, ``float``, ``text`` or ``none``.
        digest: Stands for all its bits.
        values: The value itself, or the sketch of a large tensor; None if the digest says it all.
        folded: Whether it is a sketch.
        not_finite: For a sketch, how many NaNs and infinities there are and where.
    """

    form: str
    digest: str
    values: Any = None
    folded: bool = False
    not_finite: str = ""


def text(value: str) -> Kept:
    """Keep a text, such as the digest of something."""
    return Kept("text", value)


@torch.no_grad()
def keep(value: Any) -> Kept:
    """Keep a value as it is now; of one that cannot be read, only that there is one.

    Args:
        value: A tensor, a number, a text or None. Of a DTensor this rank's part is kept.
    """
    if isinstance(value, Tensor):
        return _tensor(lazy_tensor.peek(value))
    if value is None:
        return Kept("none", "")
    if isinstance(value, str):
        return text(value)
    return Kept(type(value).__name__, repr(value), value) if type(value) in _SCALARS else _unread(value)


def _unread(value: Any) -> Kept:
    return Kept(UNREAD, type(value).__name__)


def _tensor(tensor: Tensor) -> Kept:
    # By name: importing DTensor takes half a second, and a torch without torch.distributed has none.
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        tensor = tensor.to_local()  # type: ignore[attr-defined]  # DTensor's; mypy knows only of a Tensor
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return _unread(tensor)
    try:
        return _of(tensor.to_dense() if tensor.layout is not torch.strided else tensor)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # what torch raises where there are no values:
        # not initialised yet, or of a class that has no plain ones. There is no way to ask for either beforehand.
        return _unread(tensor)


def _of(tensor: Tensor) -> Kept:
    form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    bits = digest(tensor)
    if tensor.numel() <= WHOLE:
        return Kept(form, bits, tensor.detach().to("cpu", copy=True).contiguous())
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if real.is_floating_point() and real.element_size() == 1:
        real = real.to(torch.float32)  # float8 has next to no functions
    return Kept(form, bits, sketch(real).cpu(), True, not_finite(real))
