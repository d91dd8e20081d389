"""Triton kernel that adds up what several ranks gave; imported only where Triton is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import triton
import triton.language as tl

from ovpatch.overlap.copies.spans import Span

_BLOCK: Final = 8192
_GRID: Final = (64, 1, 1)  # no more: they share the GPU with products, and memory is what they wait for


@triton.jit
def add_up_kernel(
    a, b, c, d, e, f, g, h, out, n, scale, COUNT: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program p of P: blocks p, p + P, ...: the sum of the first COUNT tensors, in that order."""
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        total = _loaded(a, at, inside, EXACT)
        if COUNT > 1:
            total += _loaded(b, at, inside, EXACT)
        if COUNT > 2:
            total += _loaded(c, at, inside, EXACT)
        if COUNT > 3:
            total += _loaded(d, at, inside, EXACT)
        if COUNT > 4:
            total += _loaded(e, at, inside, EXACT)
        if COUNT > 5:
            total += _loaded(f, at, inside, EXACT)
        if COUNT > 6:
            total += _loaded(g, at, inside, EXACT)
        if COUNT > 7:
            total += _loaded(h, at, inside, EXACT)
        tl.store(out + at, total * scale, mask=inside)


@triton.jit
def _loaded(given, at, inside, EXACT: tl.constexpr):
    value = tl.load(given + at, mask=inside, other=0.0)
    return value.to(tl.float64) if EXACT else value.to(tl.float32)


MOST: Final = 8  # tensors

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def add_up(out: Span, given: Sequence[Span], scale: float, stream: int) -> None:
    """See :func:`ovpatch.overlap.copies.sums.add_up`; at most :data:`MOST` terms."""
    size, dtype, device = out.numel, given[0].memory.dtype, out.memory.device
    exact = dtype == torch.float64
    addresses = [*[span.address for span in given], *[None] * (MOST - len(given)), out.address]
    rest = (size, 1.0 if exact else scale, len(given), exact, _BLOCK)
    # All that Triton would ask of the arguments; asking each of them anew is most of what a launch costs the host.
    aligned = [address is not None and address % 16 == 0 for address in addresses]
    key = (device, dtype, out.memory.dtype, len(given), size % 16 == 0, size == 1, *aligned)
    known = _compiled.get(key)
    with torch.cuda.device(device):  # Triton launches on the current one
        if known is not None:
            known(*addresses, *rest, stream=stream)
        else:
            tensors = [*[span.tensor() for span in given], *[None] * (MOST - len(given)), out.tensor()]
            with _on(stream, device):
                found = add_up_kernel[_GRID](*tensors, *rest, num_warps=8)
            if found is not None:  # else it is interpreted
                _compiled[key] = found[_GRID]
    if exact and scale != 1:  # Triton takes numbers as float32
        with _on(stream, device):
            out.tensor().mul_(scale)


def _on(stream: int, device: torch.device) -> AbstractContextManager[None]:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))
