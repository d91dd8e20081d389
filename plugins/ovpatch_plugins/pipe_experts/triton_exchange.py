"""The kernel that sends rows over symmetric memory; imported only where Triton is there.

[Note: channels] A program is a channel, one of a few: it stores its units of rows into the other ranks' memory, and
fetches what the programs of its number store into this rank's. For each pair of ranks it has a ring of slots there, so
that memory does not depend on how many rows there are. Units are numbered through, from operator to operator; a slot
is stored to again when its reader has signalled the number of the unit that lay in it, see [Note: sequence numbers] of
:mod:`ovpatch.overlap.symm_mem.signals`. Nothing is reset, and ranks need not know where others put their rows: both
ends of a pair know how many rows go between them, which is all that the numbers depend on.

[Note: level by level] Unlike other kernels on symmetric memory, this one waits for kernels that run at the same time:
a program for those of its own number, on other ranks. At level ``l`` it stores its units ``l`` and fetches those of
level ``l - 1``. What is fetched at a level was stored at the one before; what is stored takes the slot of a unit that
was fetched at a level before, since a ring has two slots or more. So of all programs of a number, those at the lowest
level never wait: some rank can always go on, though a device may have room for a single program at a time. Kernels
that fill a device need not take turns with this one: they go on with whatever multiprocessors it leaves them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ovpatch.overlap.symm_mem.signals import RANKS, signals_of, wait_for

MOST = tl.constexpr(32)  # channels
STORED = tl.constexpr(0)  # offsets in a rank's signals and in its state: how many units have come from a rank,
FETCHED = tl.constexpr(MOST.value * RANKS.value)  # and how many of those for a rank have been fetched by it
HEADER = tl.constexpr(8 * 2 * MOST.value * RANKS.value)  # bytes of signals in front of the rings


@triton.jit
def _of(rank, counts, WORLD: tl.constexpr):
    """Return a rank's count of a tuple."""
    found = tl.cast(counts[0], tl.int64)
    for i in tl.static_range(1, WORLD):
        found = tl.where(rank == i, counts[i], found)
    return found


@triton.jit
def _before(rank, counts, WORLD: tl.constexpr):
    """Return the sum of the counts of the ranks in front of one."""
    found = tl.cast(0, tl.int64)
    for i in tl.static_range(WORLD - 1):
        found += tl.where(rank > i, counts[i], 0)
    return found


@triton.jit
def _unit(words, CHANNELS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many words a unit has; few words are shared out among the channels, too."""
    return tl.minimum(tl.maximum(tl.cdiv(tl.cdiv(words, CHANNELS), BLOCK), 1) * BLOCK, SLOT)


@triton.jit
def _units(words, channel, CHANNELS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many units of so many words are a channel's."""
    count = tl.cdiv(words, _unit(words, CHANNELS, SLOT, BLOCK))
    return tl.maximum(count - channel + CHANNELS - 1, 0) // CHANNELS


@triton.jit
def _begin(words, channel, index, CHANNELS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a channel's unit begins."""
    return (channel + index * CHANNELS) * _unit(words, CHANNELS, SLOT, BLOCK)


@triton.jit
def _size(words, channel, index, CHANNELS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many words a channel's unit has, 0 if there is none of that index."""
    left = words - _begin(words, channel, index, CHANNELS, SLOT, BLOCK)
    held = tl.minimum(tl.maximum(left, 0), _unit(words, CHANNELS, SLOT, BLOCK))
    return tl.where(index < 0, 0, held)


@triton.jit
def _slot(peers, owner, source, channel, number, like, WORLD: tl.constexpr, SLOT: tl.constexpr, DEPTH: tl.constexpr):
    """Return the address of the slot in which a unit from one rank lies in its owner's memory."""
    index = (channel * WORLD + source) * DEPTH + number % DEPTH
    size: tl.constexpr = SLOT * (like.dtype.element_ty.primitive_bitwidth // 8)
    return tl.multiple_of((tl.load(peers + owner) + HEADER + index * size).to(like.dtype), 16)


@triton.jit(
    do_not_specialize=[
        "rank", "width", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7",
    ],
    do_not_specialize_on_alignment=["rows", "out"],
)  # fmt: skip
def symm_all_to_all_kernel(  # noqa: D417
    rows, out, s0, s1, s2, s3, s4, s5, s6, s7, r0, r1, r2, r3, r4, r5, r6, r7, width, peers, state, rank,
    WORLD: tl.constexpr, CHANNELS: tl.constexpr, SLOT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Send rows to the other ranks, and fetch theirs; see [Note: level by level]. Own rows are left alone.

    Args:
        rows: What is sent, by rank, in words of a row's bytes.
        out: Where what comes is put, by rank, in the same words.
        s0: How many rows are sent to the first rank; the next ones' follow.
        r0: How many rows come from the first rank; the next ones' follow.
        width: Words of a row.
        peers: Addresses of all ranks' memory.
        state: Numbers of units so far, to and from each rank; only this rank sees them.
        rank: This rank.
        WORLD: Number of ranks.
        CHANNELS: Number of programs.
        SLOT: Words of a slot, a multiple of ``BLOCK``.
        DEPTH: Slots of a ring, 2 or more.
        BLOCK: Words that are moved at a time.
        ALIGNED: Whether rows and memory begin at multiples of 16 bytes.
    """
    sending, receiving = (s0, s1, s2, s3, s4, s5, s6, s7), (r0, r1, r2, r3, r4, r5, r6, r7)
    channel = tl.program_id(0)
    own = channel * RANKS  # of the numbers that are this channel's
    signals, wide, block = signals_of(peers, rank), tl.cast(width, tl.int64), tl.arange(0, BLOCK)
    levels = tl.cast(0, tl.int64)
    for step in range(1, WORLD):
        to, source = (rank + step) % WORLD, (rank + WORLD - step) % WORLD
        stored = _units(_of(to, sending, WORLD) * wide, channel, CHANNELS, SLOT, BLOCK)
        fetched = _units(_of(source, receiving, WORLD) * wide, channel, CHANNELS, SLOT, BLOCK)
        levels = tl.maximum(levels, tl.maximum(stored, tl.where(fetched > 0, fetched + 1, 0)))
    for level in range(0, levels):
        for step in range(1, WORLD):
            to, source = (rank + step) % WORLD, (rank + WORLD - step) % WORLD
            sent, received = _of(to, sending, WORLD) * wide, _of(source, receiving, WORLD) * wide
            stored = _size(sent, channel, level, CHANNELS, SLOT, BLOCK).to(tl.int32)
            fetched = _size(received, channel, level - 1, CHANNELS, SLOT, BLOCK).to(tl.int32)
            number = tl.load(state + STORED + own + to) + level
            other = tl.load(state + FETCHED + own + source) + level - 1
            theirs = _slot(peers, to, rank, channel, number, rows, WORLD, SLOT, DEPTH)
            ours = _slot(peers, rank, source, channel, tl.maximum(other, 0), out, WORLD, SLOT, DEPTH)
            leaving = rows + (_before(to, sending, WORLD) * wide + _begin(sent, channel, level, CHANNELS, SLOT, BLOCK))
            put = _begin(received, channel, level - 1, CHANNELS, SLOT, BLOCK)
            coming = out + (_before(source, receiving, WORLD) * wide + put)
            if ALIGNED:  # said here, since what a function says of its arguments is lost
                leaving, coming = tl.multiple_of(leaving, 16), tl.multiple_of(coming, 16)
                stored, fetched = tl.multiple_of(stored, 4), tl.multiple_of(fetched, 4)
            if stored > 0:
                wait_for(signals + FETCHED + own + to, number + 1 - DEPTH)
            if fetched > 0:
                wait_for(signals + STORED + own + source, other + 1)
            leaves = tl.load(leaving + block, block < stored)
            comes = tl.load(ours + block, block < fetched, cache_modifier=".cg")  # slots are stored to by others
            for first in range(0, tl.maximum(stored, fetched), BLOCK):
                here, ahead = first + block, first + BLOCK + block
                next_leaves = tl.load(leaving + ahead, ahead < stored)  # under way while these are stored
                next_comes = tl.load(ours + ahead, ahead < fetched, cache_modifier=".cg")
                tl.store(theirs + here, leaves, here < stored)
                tl.store(coming + here, comes, here < fetched)
                leaves, comes = next_leaves, next_comes
            tl.debug_barrier()
            if stored > 0:
                tl.atomic_xchg(signals_of(peers, to) + STORED + own + rank, number + 1, sem="release", scope="sys")
            if fetched > 0:
                tl.atomic_xchg(signals_of(peers, source) + FETCHED + own + rank, other + 1, sem="release", scope="sys")
    for step in range(1, WORLD):
        to, source = (rank + step) % WORLD, (rank + WORLD - step) % WORLD
        stored = _units(_of(to, sending, WORLD) * wide, channel, CHANNELS, SLOT, BLOCK)
        fetched = _units(_of(source, receiving, WORLD) * wide, channel, CHANNELS, SLOT, BLOCK)
        tl.store(state + STORED + own + to, tl.load(state + STORED + own + to) + stored)
        tl.store(state + FETCHED + own + source, tl.load(state + FETCHED + own + source) + fetched)
