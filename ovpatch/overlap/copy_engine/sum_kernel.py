"""Triton kernel that adds several ranks' terms; imported only where Triton is installed.

A launch costs the host more than a small sum costs the device, so one launch makes several sums. Triton compiles a
kernel for each combination of numbers that are multiples of 16. One launch makes the sums whose numbers all are; any
other sum is launched alone, so that there are few kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import triton
import triton.language as tl

from ovpatch.overlap.comm.streams import unwatched_stream
from ovpatch.overlap.copy_engine.window import Addend, Span

_BLOCK: Final = 8192
_GRID: Final = (64, 1, 1)  # few programs: they are bound by memory and share the GPU with products


@triton.jit
def add_up_kernel(
    a, b, c, d, e, f, g, h,
    own0, own1, own2, own3, own4, own5, own6, own7,
    out0, out1, out2, out3, out4, out5, out6, out7,
    at0, at1, at2, at3, at4, at5, at6, at7,
    n0, n1, n2, n3, n4, n5, n6, n7,
    scale, RANK: tl.constexpr, COUNT: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum i: the terms of the first COUNT ranks, at ``at_i`` of their slots a to h, and ``own_i`` for rank RANK."""
    slots, owns = (a, b, c, d, e, f, g, h), (own0, own1, own2, own3, own4, own5, own6, own7)
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    places, sizes = (at0, at1, at2, at3, at4, at5, at6, at7), (n0, n1, n2, n3, n4, n5, n6, n7)
    first = tl.program_id(0)
    for i in tl.static_range(8):
        first = _sum(slots, owns[i], outs[i], places[i], sizes[i], first, scale, RANK, COUNT, EXACT, BLOCK)


@triton.jit
def _sum(
    slots, own, out, place, n, first, scale,
    RANK: tl.constexpr, COUNT: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add this program's blocks of one sum; return its first block of the next sum, which balances the programs."""
    programs = tl.num_programs(0)
    blocks = tl.cdiv(n, BLOCK)
    for block in range(first, blocks, programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        mine = _loaded(own + at, inside, EXACT)
        total = mine if RANK == 0 else _loaded(slots[0] + place + at, inside, EXACT)
        for rank in tl.static_range(1, COUNT):
            total += mine if rank == RANK else _loaded(slots[rank] + place + at, inside, EXACT)
        tl.store(out + at, total * scale, mask=inside)
    return (first + programs - blocks % programs) % programs


@triton.jit
def _loaded(at, inside, EXACT: tl.constexpr):
    value = tl.load(at, mask=inside, other=0.0)
    return value.to(tl.float64) if EXACT else value.to(tl.float32)


MOST: Final = 8  # ranks
_TOGETHER: Final = 8  # sums of a launch

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def launch_sum(slots: Sequence[Span | None], addends: Sequence[Addend], scale: float, stream: int) -> None:
    """See :func:`.collectives.add_slots`; at most :data:`MOST` ranks, on the current device."""
    first = addends[0]
    dtypes, device = (first.own.memory.dtype, first.out.memory.dtype), first.out.memory.device
    rank, exact = slots.index(None), dtypes[0] == torch.float64
    rest = (1.0 if exact else scale, rank, len(slots), exact, _BLOCK)
    none = [None] * (MOST - len(slots))
    bases = [None if slot is None else slot.address for slot in slots] + none
    for ones, aligned in _launches(addends):
        left = _TOGETHER - len(ones)
        own, out = [one.own.address for one in ones], [one.out.address for one in ones]
        places = [one.at for one in ones] + [0] * left
        sizes = [one.own.numel for one in ones] + [0] * left
        key = (device, *dtypes, rank, len(slots), aligned)
        known = _compiled.get(key)
        if known is not None:
            own, out = own + [first.own.address & -16] * left, out + [first.out.address & -16] * left
            known(*bases, *own, *out, *places, *sizes, *rest, stream=stream)
            continue
        tensors = [None if slot is None else slot.tensor() for slot in slots] + none
        spare = torch.empty(16, dtype=dtypes[0], device=device), torch.empty(16, dtype=dtypes[1], device=device)
        owns, outs = [one.own.tensor() for one in ones], [one.out.tensor() for one in ones]
        with _on(stream, device):
            found = add_up_kernel[_GRID](
                *tensors, *owns, *[spare[0]] * left, *outs, *[spare[1]] * left, *places, *sizes, *rest, num_warps=8
            )
        if found is not None:  # else it is interpreted
            _compiled[key] = found[_GRID]
    if exact and scale != 1:  # Triton takes numbers as float32
        with _on(stream, device):
            for one in addends:
                one.out.tensor().mul_(scale)


def _launches(addends: Sequence[Addend]) -> Iterator[tuple[Sequence[Addend], tuple[bool, ...]]]:
    """Yield the addends of each launch, and which of their numbers are multiples of 16 if not all are."""
    ones: list[Addend] = []
    for one in addends:
        numel = one.own.numel
        asked = one.own.address % 16 == 0, one.out.address % 16 == 0, numel % 16 == 0
        if not all(asked):
            yield [one], (*asked, numel == 1)
        else:
            ones.append(one)
            if len(ones) == _TOGETHER:
                yield ones, ()
                ones = []
    if ones:
        yield ones, ()


def _on(stream: int, device: torch.device) -> AbstractContextManager[None]:
    return unwatched_stream(torch.cuda.ExternalStream(stream, device))
