"""Product and reduce-scatter in two launches: tiles are stored to their owners, and each owner sums the terms.

Groups of tiles go to the owners in turn. One owner after the other would leave the links idle while own tiles are
computed, and make them the bottleneck before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ovpatch.overlap.symm_mem.signals import (
    DONE,
    FIRST_OUT,
    READY,
    SECOND_OUT,
    SEQUENCE,
    after_descriptors,
    half_of,
    is_last_out,
    signals_of,
    tell_all,
    wait_for_all,
)
from ovpatch_plugins.tp_linear.kernels.tiles import add_tile, store_plain, tile_by_owner, weight_descriptor


@triton.jit(do_not_specialize=["rank", "m"])
def gemm_scatter_kernel(
    x0, x1, x2, w0, w1, w2, peers, state, rank, m, n, K0, K1, K2, half_bytes,
    COUNT: tl.constexpr, KN: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Multiply, and store each tile straight to the rank that owns its rows; owners take turns.

    - ``x``, ``w``: ``COUNT`` inputs ``[world * m, K]`` and weights ``[n, K]`` (``[K, n]`` if ``KN``),
      whose products are added; the others are None and their ``K`` is 0. K and n are multiples of 8.
    - ``peers``: addresses of all ranks' buffers, of which a half holds ``[world, m, n]``, by the rank it comes from.
    - ``state``, ``half_bytes``: see :mod:`ovpatch.overlap.symm_mem.signals`.
    - A tile has ``BM`` rows and ``BN`` columns, and multiplies ``BK`` features at a time; ``GROUP`` blocks of rows take
      turns. With ``SPLIT`` tiles are stored in halves, for which less memory is kept.
    """
    sequence = tl.load(state + SEQUENCE)
    a0_d = tl.make_tensor_descriptor(x0, [WORLD, m, K0], [tl.cast(m, tl.int64) * K0, K0, 1], [1, BM, BK])
    b0_d = weight_descriptor(w0, n, K0, KN, BN, BK)
    if COUNT > 1:
        a1_d = tl.make_tensor_descriptor(x1, [WORLD, m, K1], [tl.cast(m, tl.int64) * K1, K1, 1], [1, BM, BK])
        b1_d = weight_descriptor(w1, n, K1, KN, BN, BK)
    if COUNT > 2:
        a2_d = tl.make_tensor_descriptor(x2, [WORLD, m, K2], [tl.cast(m, tl.int64) * K2, K2, 1], [1, BM, BK])
        b2_d = weight_descriptor(w2, n, K2, KN, BN, BK)
    blocks, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    wait_for_all(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
    for t in tl.range(tl.program_id(0), WORLD * blocks * across, tl.num_programs(0)):
        owner, i, j = tile_by_owner(t, rank, blocks, across, GROUP, WORLD)
        acc = tl.zeros((BM, BN), tl.float32)
        acc = add_tile(acc, a0_d, b0_d, owner, i * BM, j * BN, K0, KN, BM, BN, BK)
        if COUNT > 1:
            acc = add_tile(acc, a1_d, b1_d, owner, i * BM, j * BN, K1, KN, BM, BN, BK)
        if COUNT > 2:
            acc = add_tile(acc, a2_d, b2_d, owner, i * BM, j * BN, K2, KN, BM, BN, BK)
        slot = half_of(peers, owner, sequence, half_bytes, x0) + tl.cast(rank, tl.int64) * m * n
        slot_d = tl.make_tensor_descriptor(slot, [m, n], [n, 1], [BM, BN // (1 + SPLIT)])
        store_plain(slot_d, acc, i * BM, j * BN, BM, BN, SPLIT)
    after_descriptors()
    if is_last_out(state + FIRST_OUT, tl.num_programs(0)):
        tell_all(peers, READY, rank, sequence, WORLD)


@triton.jit(do_not_specialize=["rank"])
def scatter_kernel(x, peers, state, rank, size, half_bytes, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows that are there already to the ranks that own them; in the place of a product.

    ``x`` has ``world * size`` numbers, by owner, of which a program copies ``BLOCK`` at a time.
    """
    sequence = tl.load(state + SEQUENCE)
    wait_for_all(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
    for step in range(WORLD):
        owner = (rank + 1 + step) % WORLD
        rows = x + tl.cast(owner, tl.int64) * size
        slot = half_of(peers, owner, sequence, half_bytes, x) + tl.cast(rank, tl.int64) * size
        for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(slot + at, tl.load(rows + at, at < size), at < size)
    if is_last_out(state + FIRST_OUT, tl.num_programs(0)):
        tell_all(peers, READY, rank, sequence, WORLD)


@triton.jit(do_not_specialize=["rank"])
def reduce_kernel(
    out, peers, state, rank, size, half_bytes, WORLD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Wait for the others' tiles, and add up all of them in float32, by rank, ``BLOCK`` numbers of a program at a time.

    ``out`` are this rank's rows of the sum, ``size`` numbers.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    sequence = tl.load(state + SEQUENCE)
    wait_for_all(signals_of(peers, rank) + READY, sequence, WORLD)
    slots = half_of(peers, rank, sequence, half_bytes, out)
    for block in range(pid, tl.cdiv(size, BLOCK), programs):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.load(slots + at, at < size).to(tl.float32)
        for source in tl.static_range(1, WORLD):
            total += tl.load(slots + tl.cast(size, tl.int64) * source + at, at < size).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), at < size)
    if is_last_out(state + SECOND_OUT, programs):
        tl.store(state + SEQUENCE, sequence + 1)
        tell_all(peers, DONE, rank, sequence, WORLD)
