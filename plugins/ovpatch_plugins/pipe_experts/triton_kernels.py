"""Triton kernels that sum a token's rows, and that send rows over symmetric memory.

Modules import this one only if Triton can be imported.

Each kernel that sums reads a row once and writes its result once. torch's own operations scatter the
rows by token, weight them in a second pass, and sum them in a third.

In the kernel that sends, a program is a channel. It stores its units of rows into its peers' memory. It
also fetches the units that the programs of its number store into this rank's memory. Each pair of ranks
has a ring of slots per channel, so memory does not depend on the number of rows. Units are numbered from
call to call. A slot is reused once its reader has signalled the number of the unit in it. Nothing is
reset, and ranks need not know each other's addresses of rows: the numbers depend only on how many rows
go between a pair, which both ends know.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ovpatch.overlap.kernels.workspace_kernels import RANKS, signals_of, wait_for

# The number of features per program and pass.
_BLOCK = 1024


@triton.jit
def weighted_sum_kernel(
    rows, weights, row_of_slot, out, features, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (t, b): block b of the features of token t; without ``weights`` each row counts once."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(row_of_slot + token * K + slot)
        # A dropped slot has row -1, and loads nothing.
        held = columns < tl.where(row >= 0, features, 0)
        value = tl.load(rows + row * features + columns, mask=held, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + token * K + slot).to(tl.float32)
        total += value
    tl.store(out + token.to(tl.int64) * features + columns, total, mask=inside)


@triton.jit
def weighted_sum_backward_kernel(
    rows,
    weights,
    order,
    grad,
    drows,
    dweights,
    FEATURES: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program r: the gradients of row r and of its weight; ``drows`` or ``dweights`` may be None."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row)
    weight = tl.load(weights + slot).to(tl.float32)
    dot = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, FEATURES, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < FEATURES
        given = tl.load(grad + slot // K * FEATURES + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        if drows is not None:
            tl.store(drows + row * FEATURES + columns, given * weight, mask=inside)
        if dweights is not None:
            dot += given * tl.load(rows + row * FEATURES + columns, mask=inside, other=0.0).to(
                tl.float32
            )
    if dweights is not None:
        tl.store(dweights + slot, tl.sum(dot, 0))


def weighted_sum(
    rows: Tensor, weights: Tensor | None, row_of_slot: Tensor, top_k: int, dtype: torch.dtype
) -> Tensor:
    """Return each token's sum of its contiguous rows: ``[rows, h]``, ``[tokens, k]`` -> ``[tokens, h]``.

    Args:
        rows: ``[rows, h]``, contiguous.
        weights: ``[tokens, k]``. Default: 1 for each row.
        row_of_slot: The row of each slot, ``[tokens * k]`` of int64; -1 for none.
        top_k: Number of slots of a token.
        dtype: Dtype of the result; sums are in float32 and rounded at the end.
    """
    features = rows.shape[1]
    out = rows.new_empty((len(row_of_slot) // top_k, features), dtype=dtype)
    if out.numel():
        grid = len(out), triton.cdiv(features, _BLOCK)
        # Triton launches on the current device.
        with torch.cuda.device_of(rows):
            weighted_sum_kernel[grid](rows, weights, row_of_slot, out, features, top_k, _BLOCK)
    return out


def weighted_sum_backward(
    rows: Tensor,
    weights: Tensor,
    order: Tensor,
    grad: Tensor,
    *,
    rows_grad: bool,
    weights_grad: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of rows and of weights that are needed.

    Args:
        rows: ``[rows, h]``; all tensors are contiguous.
        weights: ``[tokens, k]``.
        order: The slot of each row, ``[rows]`` of int64.
        grad: The gradient of the sums, ``[tokens, h]``.
        rows_grad: Whether the gradient of ``rows`` is needed.
        weights_grad: Whether the gradient of ``weights`` is needed.
    """
    drows = torch.empty_like(rows) if rows_grad else None
    dweights = torch.zeros_like(weights) if weights_grad else None
    if rows.numel() and (rows_grad or weights_grad):
        args = rows, weights, order, grad, drows, dweights, rows.shape[1], weights.shape[1], _BLOCK
        with torch.cuda.device_of(rows):
            weighted_sum_backward_kernel[(len(rows),)](*args)
    return drows, dweights


MAX_CHANNELS = tl.constexpr(32)
# Offsets in a rank's signals and in its state: the units that a rank has stored here, and has fetched from here.
STORED = tl.constexpr(0)
FETCHED = tl.constexpr(MAX_CHANNELS.value * RANKS.value)
# The bytes of signals before the rings.
HEADER = tl.constexpr(8 * 2 * MAX_CHANNELS.value * RANKS.value)


@triton.jit
def _count_of(rank, counts, WORLD: tl.constexpr):
    """Return a rank's element of a tuple."""
    found = tl.cast(counts[0], tl.int64)
    for i in tl.static_range(1, WORLD):
        found = tl.where(rank == i, counts[i], found)
    return found


@triton.jit
def _rows_before(rank, counts, WORLD: tl.constexpr):
    """Return the sum of a tuple's elements before a rank's."""
    found = tl.cast(0, tl.int64)
    for i in tl.static_range(WORLD - 1):
        found += tl.where(rank > i, counts[i], 0)
    return found


@triton.jit
def _unit_size(words, CHANNELS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of words of a unit; few words are spread over the channels as well."""
    return tl.minimum(tl.maximum(tl.cdiv(tl.cdiv(words, CHANNELS), BLOCK), 1) * BLOCK, SLOT)


@triton.jit
def _count_units(words, channel, CHANNELS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return a channel's number of units of a transfer of ``words``."""
    count = tl.cdiv(words, _unit_size(words, CHANNELS, SLOT, BLOCK))
    return tl.maximum(count - channel + CHANNELS - 1, 0) // CHANNELS


@triton.jit
def _unit_start(
    words, channel, index, CHANNELS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the first word of a channel's unit."""
    return (channel + index * CHANNELS) * _unit_size(words, CHANNELS, SLOT, BLOCK)


@triton.jit
def _words_of_unit(
    words, channel, index, CHANNELS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the number of words of a channel's unit; 0 if it has none of that index."""
    left = words - _unit_start(words, channel, index, CHANNELS, SLOT, BLOCK)
    held = tl.minimum(tl.maximum(left, 0), _unit_size(words, CHANNELS, SLOT, BLOCK))
    return tl.where(index < 0, 0, held)


@triton.jit
def _slot_address(
    peers,
    owner,
    source,
    channel,
    number,
    like,
    WORLD: tl.constexpr,
    SLOT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the address of a unit's slot in its owner's memory."""
    index = (channel * WORLD + source) * DEPTH + number % DEPTH
    size: tl.constexpr = SLOT * (like.dtype.element_ty.primitive_bitwidth // 8)
    return tl.multiple_of((tl.load(peers + owner) + HEADER + index * size).to(like.dtype), 16)


@triton.jit(
    do_not_specialize=[
        "rank", "width", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7",
    ],
    do_not_specialize_on_alignment=["rows", "out"],
)  # fmt: skip
def symm_all_to_all_kernel(
    rows, out, s0, s1, s2, s3, s4, s5, s6, s7, r0, r1, r2, r3, r4, r5, r6, r7, width, peers, state, rank,
    WORLD: tl.constexpr, CHANNELS: tl.constexpr, SLOT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Send rows to peers and fetch theirs; the kernel leaves a rank's rows to itself alone.

    [Note: level by level] This kernel waits for kernels that run at the same time: a program waits for
    the programs of its number on peers. At level ``l`` it stores its units ``l`` and fetches units
    ``l - 1``. A unit to fetch was stored at the level before. A unit to store takes the slot of a unit
    that was fetched at an earlier level, since a ring has two slots or more. So the programs of a number
    that are at the lowest level never wait. Some rank always continues, even if a device has room for a
    single program at a time.

    - ``rows`` to send and memory ``out`` for received rows, by rank, in words; a row has ``width`` words.
    - ``s<n>``, ``r<n>``: numbers of rows to and from rank n.
    - ``peers``: addresses of all ranks' symmetric memory. ``state``: numbers of units so far, to and
      from each rank; local to this rank.
    - ``CHANNELS`` programs have rings of ``DEPTH`` slots, 2 or more, of ``SLOT`` words. ``SLOT`` is a
      multiple of ``BLOCK``, the words moved at a time.
    - ``ALIGNED``: whether rows and memory start at multiples of 16 bytes.
    """
    sending, receiving = (s0, s1, s2, s3, s4, s5, s6, s7), (r0, r1, r2, r3, r4, r5, r6, r7)
    channel = tl.program_id(0)
    # The offset of this channel's numbers.
    own = channel * RANKS
    signals, wide, block = signals_of(peers, rank), tl.cast(width, tl.int64), tl.arange(0, BLOCK)
    # The number of levels: units to store, and one level more than units to fetch.
    levels = tl.cast(0, tl.int64)
    for step in range(1, WORLD):
        to, source = (rank + step) % WORLD, (rank + WORLD - step) % WORLD
        stored = _count_units(_count_of(to, sending, WORLD) * wide, channel, CHANNELS, SLOT, BLOCK)
        fetched = _count_units(
            _count_of(source, receiving, WORLD) * wide, channel, CHANNELS, SLOT, BLOCK
        )
        levels = tl.maximum(levels, tl.maximum(stored, tl.where(fetched > 0, fetched + 1, 0)))
    for level in range(0, levels):
        for step in range(1, WORLD):
            to, source = (rank + step) % WORLD, (rank + WORLD - step) % WORLD
            sent, received = (
                _count_of(to, sending, WORLD) * wide,
                _count_of(source, receiving, WORLD) * wide,
            )
            stored = _words_of_unit(sent, channel, level, CHANNELS, SLOT, BLOCK).to(tl.int32)
            fetched = _words_of_unit(received, channel, level - 1, CHANNELS, SLOT, BLOCK).to(
                tl.int32
            )
            number = tl.load(state + STORED + own + to) + level
            expected = tl.load(state + FETCHED + own + source) + level - 1
            theirs = _slot_address(peers, to, rank, channel, number, rows, WORLD, SLOT, DEPTH)
            ours = _slot_address(
                peers, rank, source, channel, tl.maximum(expected, 0), out, WORLD, SLOT, DEPTH
            )
            leaving = rows + (
                _rows_before(to, sending, WORLD) * wide
                + _unit_start(sent, channel, level, CHANNELS, SLOT, BLOCK)
            )
            put = _unit_start(received, channel, level - 1, CHANNELS, SLOT, BLOCK)
            coming = out + (_rows_before(source, receiving, WORLD) * wide + put)
            # The hints must be here: Triton loses hints inside of a called function.
            if ALIGNED:
                leaving, coming = tl.multiple_of(leaving, 16), tl.multiple_of(coming, 16)
                stored, fetched = tl.multiple_of(stored, 4), tl.multiple_of(fetched, 4)
            if stored > 0:
                wait_for(signals + FETCHED + own + to, number + 1 - DEPTH)
            if fetched > 0:
                wait_for(signals + STORED + own + source, expected + 1)
            # The first words of both directions, before the loop that always loads one step ahead.
            leaves = tl.load(leaving + block, block < stored)
            # These loads bypass the L1 cache, because peers store to the slots.
            comes = tl.load(ours + block, block < fetched, cache_modifier=".cg")
            for first in range(0, tl.maximum(stored, fetched), BLOCK):
                here, ahead = first + block, first + BLOCK + block
                # The next words are in flight while the kernel stores the current ones.
                next_leaves = tl.load(leaving + ahead, ahead < stored)
                next_comes = tl.load(ours + ahead, ahead < fetched, cache_modifier=".cg")
                tl.store(theirs + here, leaves, here < stored)
                tl.store(coming + here, comes, here < fetched)
                leaves, comes = next_leaves, next_comes
            # All threads of the program must have stored their words before the signal.
            tl.debug_barrier()
            if stored > 0:
                tl.atomic_xchg(
                    signals_of(peers, to) + STORED + own + rank,
                    number + 1,
                    sem="release",
                    scope="sys",
                )
            if fetched > 0:
                tl.atomic_xchg(
                    signals_of(peers, source) + FETCHED + own + rank,
                    expected + 1,
                    sem="release",
                    scope="sys",
                )
    for step in range(1, WORLD):
        to, source = (rank + step) % WORLD, (rank + WORLD - step) % WORLD
        stored = _count_units(_count_of(to, sending, WORLD) * wide, channel, CHANNELS, SLOT, BLOCK)
        fetched = _count_units(
            _count_of(source, receiving, WORLD) * wide, channel, CHANNELS, SLOT, BLOCK
        )
        # The next call continues the numbering of units.
        tl.store(state + STORED + own + to, tl.load(state + STORED + own + to) + stored)
        tl.store(state + FETCHED + own + source, tl.load(state + FETCHED + own + source) + fetched)
