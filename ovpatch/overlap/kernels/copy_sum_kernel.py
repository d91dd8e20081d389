"""A Triton kernel that adds the terms of several ranks. It is imported only if Triton is installed.

A launch costs the host more than a small sum costs the device, so one launch computes several sums.
Triton compiles a kernel for each combination of numbers that are multiples of 16. One launch
computes only sums whose numbers all are multiples, and any other sum gets its own launch, so that
there are few kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import triton
import triton.language as tl

from ovpatch.overlap.comm.streams import unwatched_stream
from ovpatch.overlap.kernels.copy_window import Addend, Span

_BLOCK: Final = 8192
# Sums are bound by memory, so few programs suffice, and they leave the GPU to concurrent GEMMs.
_GRID: Final = (64, 1, 1)


@triton.jit
def add_up_kernel(
    a, b, c, d, e, f, g, h,
    own0, own1, own2, own3, own4, own5, own6, own7,
    out0, out1, out2, out3, out4, out5, out6, out7,
    at0, at1, at2, at3, at4, at5, at6, at7,
    n0, n1, n2, n3, n4, n5, n6, n7,
    scale, RANK: tl.constexpr, COUNT: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute up to eight sums of the terms of COUNT ranks.

    Sum i adds the terms at ``at_i`` of the slots a to h, and ``own_i`` as the term of rank RANK.
    """
    slots, owns = (a, b, c, d, e, f, g, h), (own0, own1, own2, own3, own4, own5, own6, own7)
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    places, sizes = (at0, at1, at2, at3, at4, at5, at6, at7), (n0, n1, n2, n3, n4, n5, n6, n7)
    first = tl.program_id(0)
    for i in tl.static_range(8):
        first = _sum(
            slots, owns[i], outs[i], places[i], sizes[i], first, scale, RANK, COUNT, EXACT, BLOCK
        )


@triton.jit
def _sum(
    slots, own, out, place, n, first, scale,
    RANK: tl.constexpr, COUNT: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add this program's blocks of one sum; return its first block of the next sum.

    The next sum starts with the next program, which balances the programs.
    """
    programs = tl.num_programs(0)
    blocks = tl.cdiv(n, BLOCK)
    for block in range(first, blocks, programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        mine = _load_wide(own + at, inside, EXACT)
        total = mine if RANK == 0 else _load_wide(slots[0] + place + at, inside, EXACT)
        for rank in tl.static_range(1, COUNT):
            total += mine if rank == RANK else _load_wide(slots[rank] + place + at, inside, EXACT)
        tl.store(out + at, total * scale, mask=inside)
    return (first + programs - blocks % programs) % programs


@triton.jit
def _load_wide(at, inside, EXACT: tl.constexpr):
    value = tl.load(at, mask=inside, other=0.0)
    return value.to(tl.float64) if EXACT else value.to(tl.float32)


#: The largest number of ranks that the kernel supports.
MOST: Final = 8
# The number of sums that one launch computes.
_SUMS_PER_LAUNCH: Final = 8

# The compiled kernels by everything that makes Triton compile another. A call of a compiled kernel
# skips Triton's inspection of the arguments, which takes the host longer than the launch.
_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def launch_sum(
    slots: Sequence[Span | None], addends: Sequence[Addend], scale: float, stream: int
) -> None:
    """Launch the sums of :func:`.copy_collectives.add_slots` on the current device.

    There are at most :data:`MOST` ranks.
    """
    first = addends[0]
    dtypes, device = (first.own.memory.dtype, first.out.memory.dtype), first.out.memory.device
    rank, exact = slots.index(None), dtypes[0] == torch.float64
    rest = (1.0 if exact else scale, rank, len(slots), exact, _BLOCK)
    none = [None] * (MOST - len(slots))
    bases = [None if slot is None else slot.address for slot in slots] + none
    for batch, aligned in _launches(addends):
        num_empty = _SUMS_PER_LAUNCH - len(batch)
        own = [addend.own.address for addend in batch]
        out = [addend.out.address for addend in batch]
        places = [addend.at for addend in batch] + [0] * num_empty
        sizes = [addend.own.numel for addend in batch] + [0] * num_empty
        key = (device, *dtypes, rank, len(slots), aligned)
        compiled = _compiled.get(key)
        if compiled is not None:
            # Sums of length 0 fill the launch. Their addresses must be multiples of 16 as well.
            own += [first.own.address & -16] * num_empty
            out += [first.out.address & -16] * num_empty
            compiled(*bases, *own, *out, *places, *sizes, *rest, stream=stream)
            continue
        tensors = [None if slot is None else slot.tensor() for slot in slots] + none
        unused = (
            torch.empty(16, dtype=dtypes[0], device=device),
            torch.empty(16, dtype=dtypes[1], device=device),
        )
        owns = [addend.own.tensor() for addend in batch]
        outs = [addend.out.tensor() for addend in batch]
        with _use_stream(stream, device):
            found = add_up_kernel[_GRID](
                *tensors,
                *owns,
                *[unused[0]] * num_empty,
                *outs,
                *[unused[1]] * num_empty,
                *places,
                *sizes,
                *rest,
                num_warps=8,
            )
        # The result is None if Triton interprets the kernel.
        if found is not None:
            _compiled[key] = found[_GRID]
    # Triton passes numbers as float32, which would round the factor of a sum in float64.
    if exact and scale != 1:
        with _use_stream(stream, device):
            for addend in addends:
                addend.out.tensor().mul_(scale)


def _launches(addends: Sequence[Addend]) -> Iterator[tuple[Sequence[Addend], tuple[bool, ...]]]:
    """Yield the addends of each launch, with the properties that select the kernel.

    The properties are empty if all numbers are multiples of 16.
    """
    batch: list[Addend] = []
    for addend in addends:
        numel = addend.own.numel
        # Triton checks whether each of these is a multiple of 16, and whether a number is 1.
        are_multiples = addend.own.address % 16 == 0, addend.out.address % 16 == 0, numel % 16 == 0
        if not all(are_multiples):
            yield [addend], (*are_multiples, numel == 1)
        else:
            batch.append(addend)
            if len(batch) == _SUMS_PER_LAUNCH:
                yield batch, ()
                batch = []
    if batch:
        yield batch, ()


def _use_stream(stream: int, device: torch.device) -> AbstractContextManager[None]:
    return unwatched_stream(torch.cuda.ExternalStream(stream, device))
