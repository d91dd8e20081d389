"""All-gather and product in two launches: own rows are staged for the others, and tiles follow the rows that arrive."""

from __future__ import annotations

import triton
import triton.language as tl

from ovpatch.overlap.symm_mem.signals import (
    DONE,
    FIRST_OUT,
    READY,
    SECOND_OUT,
    SEQUENCE,
    add_here,
    before_descriptors,
    half_of,
    is_last_out,
    signals_of,
    tell_all,
    wait_for,
    wait_for_all,
    wait_here,
)
from ovpatch_plugins.tp_linear.kernels.tiles import store_by_rank, tile, tile_in, weight_descriptor


@triton.jit(do_not_specialize=["rank", "counts"])
def stage_kernel(
    x, whole, peers, state, arrived, counts, rank, size, half_bytes, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Stage a rank's rows for the other ranks, and copy them to their place among the gathered rows.

    ``x`` has ``size`` numbers, ``whole`` has ``world * size``. ``peers``, ``state`` and ``half_bytes``: see
    :mod:`ovpatch.overlap.symm_mem.signals`. ``counts`` counts of arrived rows are set back to 0. A program copies
    ``BLOCK`` numbers at a time.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    sequence = tl.load(state + SEQUENCE)
    wait_for_all(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
    staged = half_of(peers, rank, sequence, half_bytes, x)
    own = whole + tl.cast(rank, tl.int64) * size
    for block in range(pid, tl.cdiv(size, BLOCK), programs):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        rows = tl.load(x + at, at < size)
        tl.store(staged + at, rows, at < size)
        tl.store(own + at, rows, at < size)
    for first in range(pid * BLOCK, counts, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(arrived + at, tl.zeros_like(at), at < counts)
    if is_last_out(state + FIRST_OUT, programs):
        tell_all(peers, READY, rank, sequence, WORLD)


@triton.jit
def _pull(
    whole, peers, state, arrived, rank, m, K, half_bytes, pullers,
    WORLD: tl.constexpr, BM: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    """Fetch the other ranks' rows, block by block; all ranks' first, the next rank's first."""
    pid = tl.program_id(0)
    sequence = tl.load(state + SEQUENCE)
    blocks, columns = tl.cdiv(m, BM), tl.cdiv(K, PC)
    for step in range(1, WORLD):
        source = (rank + step) % WORLD
        wait_for(signals_of(peers, rank) + READY + source, sequence)
        staged = half_of(peers, source, sequence, half_bytes, whole)
        target = whole + tl.cast(source, tl.int64) * m * K
        for unit in range(pid, blocks * columns, pullers):
            row, column = unit // columns * BM, unit % columns * PC
            rows = _get(staged, row, column, m, K, BM, PC)
            _put(target, rows, row, column, m, K, BM, PC)
            add_here(arrived + source * blocks + unit // columns)
    if is_last_out(state + SECOND_OUT, pullers):
        tl.store(state + SEQUENCE, sequence + 1)
        tell_all(peers, DONE, rank, sequence, WORLD)


@triton.jit
def _get(source, row, column, m, K, BM: tl.constexpr, PC: tl.constexpr):
    rows, columns = row + tl.arange(0, BM)[:, None], column + tl.arange(0, PC)[None, :]
    return tl.load(source + rows.to(tl.int64) * K + columns, (rows < m) & (columns < K))


@triton.jit
def _put(target, values, row, column, m, K, BM: tl.constexpr, PC: tl.constexpr):
    rows, columns = row + tl.arange(0, BM)[:, None], column + tl.arange(0, PC)[None, :]
    tl.store(target + rows.to(tl.int64) * K + columns, values, (rows < m) & (columns < K))


@triton.jit(do_not_specialize=["rank", "m", "pullers"])
def gather_gemm_kernel(
    whole, w0, w1, w2, bias0, bias1, bias2, out0, out1, out2, peers, state, arrived, rank, m, K, n0, n1, n2, half_bytes,
    pullers, COUNT: tl.constexpr, KN: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    """Fetch the other ranks' rows with the first programs, and multiply with the others, own rows first.

    - ``whole``: all rows, ``[world * m, K]``, of which this rank's are there.
    - ``w``, ``bias``, ``out``: ``COUNT`` weights ``[n, K]`` (``[K, n]`` if ``KN``), biases ``[n]`` or all None, and
      products ``[world * m, n]``; the others are None and their ``n`` is 0. K and n are multiples of 8.
    - ``peers``, ``state``, ``half_bytes``: see :mod:`ovpatch.overlap.symm_mem.signals`.
    - ``arrived``: counts of blocks that have arrived, ``[world, blocks of BM rows]``, all 0.
    - ``pullers`` programs fetch rows, ``PC`` columns at a time.
    - A tile has ``BM`` rows and ``BN`` columns, and multiplies ``BK`` features at a time; ``GROUP`` blocks of rows take
      turns. With ``SPLIT`` tiles are stored in halves, for which less memory is kept.
    """
    if tl.program_id(0) < pullers:
        _pull(whole, peers, state, arrived, rank, m, K, half_bytes, pullers, WORLD, BM, PC)
    else:
        a_d = tl.make_tensor_descriptor(whole, [WORLD, m, K], [tl.cast(m, tl.int64) * K, K, 1], [1, BM, BK])
        if COUNT == 1:
            w_d = weight_descriptor(w0, n0, K, KN, BN, BK)
            out_d = tl.make_tensor_descriptor(
                out0, [WORLD, m, n0], [tl.cast(m, tl.int64) * n0, n0, 1], [1, BM, BN // (1 + SPLIT)]
            )
        blocks, columns = tl.cdiv(m, BM), tl.cdiv(K, PC)
        end0 = tl.cdiv(n0, BN)
        end1 = end0 + tl.cdiv(n1, BN)
        across = end1 + tl.cdiv(n2, BN)
        tiles = blocks * across
        first, step = tl.program_id(0) - pullers, tl.num_programs(0) - pullers
        for t in tl.range(first, WORLD * tiles, step):
            source = (rank + t // tiles) % WORLD
            i, j = tile_in(t % tiles, blocks, across, GROUP)
            if source != rank:
                wait_here(arrived + source * blocks + i, columns)
                before_descriptors()
            if COUNT == 1:
                column = j * BN
                acc = tile(a_d, w_d, source, i * BM, column, K, KN, BM, BN, BK)
                if bias0 is not None:
                    acc += _row(bias0, column, n0, BN)
                store_by_rank(out_d, acc, source, i * BM, column, BM, BN, SPLIT)
            else:
                column = (j - _pick(j, end0, end1, 0, end0, end1, COUNT)) * BN
                n = _pick(j, end0, end1, n0, n1, n2, COUNT)
                one_w_d = weight_descriptor(_pick(j, end0, end1, w0, w1, w2, COUNT), n, K, KN, BN, BK)
                acc = tile(a_d, one_w_d, source, i * BM, column, K, KN, BM, BN, BK)
                if bias0 is not None:
                    acc += _row(_pick(j, end0, end1, bias0, bias1, bias2, COUNT), column, n, BN)
                out = _pick(j, end0, end1, out0, out1, out2, COUNT)
                one_out_d = tl.make_tensor_descriptor(
                    out, [WORLD, m, n], [tl.cast(m, tl.int64) * n, n, 1], [1, BM, BN // (1 + SPLIT)]
                )  # fmt: skip
                store_by_rank(one_out_d, acc, source, i * BM, column, BM, BN, SPLIT)


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
