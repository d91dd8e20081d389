"""All-gather and product in one launch: rows are pushed to the others, and tiles are multiplied as rows arrive.

[Note: push, not pull] Stores to another rank wait for no answer, so that 8 programs fill the links, where 32 that load
do not. They go into the workspace, which all ranks know; what is to be kept of them is copied by whoever has nothing
else to do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ovpatch.overlap.symmetric.signals import (
    DONE,
    SEQUENCE,
    TICKET,
    add_there,
    before_descriptors,
    clear_flags,
    finish,
    flags_of,
    half_of,
    is_last_out,
    signals_of,
    wait_for,
    wait_for_all,
)
from ovpatch_plugins.tp_linear.kernels.tiles import store_by_rank, tile, tile_in, weight_descriptor


@triton.jit(do_not_specialize=["rank", "m"])
def gather_gemm_kernel(
    x, whole, peers, state, w0, w1, w2, bias0, bias1, bias2, out0, out1, out2, rank, m, K, n0, n1, n2, half_bytes,
    COUNT: tl.constexpr, KN: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    PUSHERS: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    """Push this rank's rows with the first programs, and multiply all ranks' with the others, own rows first.

    Args:
        x: This rank's rows, ``[m, K]``.
        whole: All rows, ``[world * m, K]``, to be filled; None if nobody wants them.
        peers: Addresses of all ranks' buffers, of which a half holds all rows.
        state: What only this rank sees.
        w0: A weight, ``[n, K]`` or ``[K, n]``.
        w1: A further one, or None, as what follows of it.
        w2: A further one, or None.
        bias0: ``[n]``, or None, as the others then.
        bias1: Of the second weight.
        bias2: Of the third.
        out0: A product, ``[world * m, n]``.
        out1: Of the second weight.
        out2: Of the third.
        rank: This rank.
        m: Rows of a rank.
        K: Features of the input, a multiple of 8.
        n0: Features of an output, a multiple of 8.
        n1: Of the second one, or 0.
        n2: Of the third one, or 0.
        half_bytes: Bytes of one half of a buffer.
        COUNT: Number of weights; 0 to gather only.
        KN: Whether weights are ``[K, n]``.
        WORLD: Number of ranks.
        BM: Rows of a tile.
        BN: Columns of a tile.
        BK: Features that are multiplied at a time.
        GROUP: Blocks of rows whose tiles take turns.
        SPLIT: Whether tiles are stored in halves, for which less memory is kept.
        PUSHERS: Programs that push rows.
        PC: Columns that are pushed at a time.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    sequence = tl.load(state + SEQUENCE)
    staged = half_of(peers, rank, sequence, half_bytes, x)
    flags = flags_of(peers, rank, sequence)
    if pid < PUSHERS:
        _push(x, peers, sequence, rank, m, K, half_bytes, WORLD, BM, PC, PUSHERS)
    elif COUNT:
        x_d = tl.make_tensor_descriptor(x, [1, m, K], [tl.cast(m, tl.int64) * K, K, 1], [1, BM, BK])
        staged_d = tl.make_tensor_descriptor(staged, [WORLD, m, K], [tl.cast(m, tl.int64) * K, K, 1], [1, BM, BK])
        across = tl.cdiv(n0, BN) + tl.cdiv(n1, BN) + tl.cdiv(n2, BN)
        tiles = tl.cdiv(m, BM) * across
        first, step = pid - PUSHERS, programs - PUSHERS
        _multiply(
            x_d, flags, w0, w1, w2, bias0, bias1, bias2, out0, out1, out2, rank, m, K, n0, n1, n2,
            first, tiles, step, True, COUNT, KN, WORLD, BM, BN, BK, GROUP, SPLIT, PC,
        )  # fmt: skip
        _multiply(
            staged_d, flags, w0, w1, w2, bias0, bias1, bias2, out0, out1, out2, rank, m, K, n0, n1, n2,
            first + tl.cdiv(tl.maximum(tiles - first, 0), step) * step, WORLD * tiles, step, False,
            COUNT, KN, WORLD, BM, BN, BK, GROUP, SPLIT, PC,
        )  # fmt: skip
    if whole is not None:
        _copy(x, staged, whole, flags, state, rank, m, K, WORLD, BM, PC)
    if is_last_out(state, programs):
        clear_flags(flags, WORLD * tl.cdiv(m, BM))
        finish(peers, state, rank, sequence, WORLD)


@triton.jit
def _push(
    x, peers, sequence, rank, m, K, half_bytes,
    WORLD: tl.constexpr, BM: tl.constexpr, PC: tl.constexpr, PUSHERS: tl.constexpr,
):  # fmt: skip
    """Store a rank's rows to all others, to whom it needs them first first; no two ranks to the same at a time."""
    blocks, columns = tl.cdiv(m, BM), tl.cdiv(K, PC)
    wait_for_all(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
    for step in range(1, WORLD):
        to = (rank + WORLD - step) % WORLD
        target = half_of(peers, to, sequence, half_bytes, x) + tl.cast(rank, tl.int64) * m * K
        flags = flags_of(peers, to, sequence) + rank * blocks
        for unit in range(tl.program_id(0), blocks * columns, PUSHERS):
            row, column = unit // columns * BM, unit % columns * PC
            _put(target, _get(x, row, column, m, K, BM, PC), row, column, m, K, BM, PC)
            add_there(flags + unit // columns)


@triton.jit
def _get(source, row, column, m, K, BM: tl.constexpr, PC: tl.constexpr):
    rows, columns = row + tl.arange(0, BM)[:, None], column + tl.arange(0, PC)[None, :]
    return tl.load(source + rows.to(tl.int64) * K + columns, (rows < m) & (columns < K))


@triton.jit
def _put(target, values, row, column, m, K, BM: tl.constexpr, PC: tl.constexpr):
    rows, columns = row + tl.arange(0, BM)[:, None], column + tl.arange(0, PC)[None, :]
    tl.store(target + rows.to(tl.int64) * K + columns, values, (rows < m) & (columns < K))


@triton.jit
def _copy(
    x, staged, whole, flags, state, rank, m, K, WORLD: tl.constexpr, BM: tl.constexpr, PC: tl.constexpr
):  # fmt: skip
    """Copy rows to where they are kept, as they arrive, for as long as there are any that no other program took."""
    blocks, columns = tl.cdiv(m, BM), tl.cdiv(K, PC)
    unit = tl.atomic_add(state + TICKET, 1, sem="relaxed", scope="gpu")
    while unit < WORLD * blocks * columns:
        source = (rank + (unit // (blocks * columns)).to(tl.int32)) % WORLD
        inside = (unit % (blocks * columns)).to(tl.int32)
        row, column = inside // columns * BM, inside % columns * PC
        rows = x
        if source != rank:
            wait_for(flags + source * blocks + inside // columns, columns)
            rows = staged + tl.cast(source, tl.int64) * m * K
        target = whole + tl.cast(source, tl.int64) * m * K
        _put(target, _get(tl.multiple_of(rows, 16), row, column, m, K, BM, PC), row, column, m, K, BM, PC)
        unit = tl.atomic_add(state + TICKET, 1, sem="relaxed", scope="gpu")


@triton.jit
def _multiply(
    a_d, flags, w0, w1, w2, bias0, bias1, bias2, out0, out1, out2, rank, m, K, n0, n1, n2,
    begin, end, step, OWN: tl.constexpr, COUNT: tl.constexpr, KN: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    """Compute a program's tiles of own rows, or of those that arrive."""
    if COUNT == 1:
        w_d = weight_descriptor(w0, n0, K, KN, BN, BK)
        out_d = _out_descriptor(out0, m, n0, WORLD, BM, BN, SPLIT)
    blocks, columns = tl.cdiv(m, BM), tl.cdiv(K, PC)
    end0 = tl.cdiv(n0, BN)
    end1 = end0 + tl.cdiv(n1, BN)
    across = end1 + tl.cdiv(n2, BN)
    for t in tl.range(begin, end, step):
        source = (rank + t // (blocks * across)) % WORLD
        i, j = tile_in(t % (blocks * across), blocks, across, GROUP)
        at = source
        if OWN:
            at = 0
        else:
            wait_for(flags + source * blocks + i, columns)
            before_descriptors()
        if COUNT == 1:
            column = j * BN
            acc = tile(a_d, w_d, at, i * BM, column, K, KN, BM, BN, BK)
            if bias0 is not None:
                acc += _row(bias0, column, n0, BN)
            store_by_rank(out_d, acc, source, i * BM, column, BM, BN, SPLIT)
        else:
            column = (j - _pick(j, end0, end1, 0, end0, end1, COUNT)) * BN
            n = _pick(j, end0, end1, n0, n1, n2, COUNT)
            one_w_d = weight_descriptor(_pick(j, end0, end1, w0, w1, w2, COUNT), n, K, KN, BN, BK)
            acc = tile(a_d, one_w_d, at, i * BM, column, K, KN, BM, BN, BK)
            if bias0 is not None:
                acc += _row(_pick(j, end0, end1, bias0, bias1, bias2, COUNT), column, n, BN)
            one_out_d = _out_descriptor(_pick(j, end0, end1, out0, out1, out2, COUNT), m, n, WORLD, BM, BN, SPLIT)
            store_by_rank(one_out_d, acc, source, i * BM, column, BM, BN, SPLIT)


@triton.jit
def _out_descriptor(out, m, n, WORLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    return tl.make_tensor_descriptor(
        out, [WORLD, m, n], [tl.cast(m, tl.int64) * n, n, 1], [1, BM, BN // (1 + SPLIT)]
    )  # fmt: skip


@triton.jit
def _pick(j, end0, end1, of0, of1, of2, COUNT: tl.constexpr):
    """Return what belongs to the weight of the ``j``-th column of tiles."""
    found = of0
    if j >= end0:
        found = of1
    if COUNT > 2:
        if j >= end1:
            found = of2
    return found


@triton.jit
def _row(bias, column, n, BN: tl.constexpr):
    columns = column + tl.arange(0, BN)
    return tl.load(bias + columns, columns < n, 0.0).to(tl.float32)[None, :]
