"""GEMMs with an all-gather or a reduce-scatter, in two launches each, and the tiles that both compute.

For an all-gather, a rank stages its rows for its peers, and tiles follow the rows that arrive. For a reduce-scatter,
kernels store tiles to their owners, and each owner sums the terms. Groups of tiles go to the owners in turn. Otherwise
the links would be idle while a rank computes the tiles that it keeps, and would be the bottleneck before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ovpatch.overlap.kernels.workspace_kernels import (
    DONE,
    FIRST_OUT,
    READY,
    SECOND_OUT,
    SEQUENCE,
    add_here,
    after_descriptors,
    before_descriptors,
    half_of,
    is_last_out,
    signals_of,
    tell_all,
    wait_for,
    wait_for_signals,
    wait_here,
)


@triton.jit
def find_tile(t, blocks, across, GROUP: tl.constexpr):
    """Return row and column of the ``t``-th of ``blocks * across`` tiles.

    Tiles go down ``GROUP`` rows, then to the right.
    """
    group = t // (GROUP * across)
    rows = min(blocks - group * GROUP, GROUP)
    is_inside = t % (GROUP * across)
    return group * GROUP + is_inside % rows, is_inside // rows


@triton.jit
def find_tile_by_owner(t, rank, blocks, across, GROUP: tl.constexpr, WORLD: tl.constexpr):
    """Return owner, row and column of the ``t``-th tile.

    In each group of rows, the tiles of the next rank come first, and this rank's own tiles last.
    """
    group = t // (WORLD * GROUP * across)
    rows = min(blocks - group * GROUP, GROUP)
    is_inside = t % (WORLD * GROUP * across)
    owner = (rank + 1 + is_inside // (rows * across)) % WORLD
    is_inside = is_inside % (rows * across)
    return owner, group * GROUP + is_inside % rows, is_inside // rows


@triton.jit
def make_weight_descriptor(weight, n, K, KN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return a descriptor that loads tiles of a weight, ``[n, K]`` or, with ``KN``, ``[K, n]``."""
    if KN:
        return tl.make_tensor_descriptor(weight, [K, n], [n, 1], [BK, BN])
    else:
        return tl.make_tensor_descriptor(weight, [n, K], [K, 1], [BN, BK])


@triton.jit
def store_plain(
    descriptor, acc, row, column, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr
):
    """Store a tile of float32 by a descriptor of ``[rows, columns]``, in two halves with ``SPLIT``."""
    if SPLIT:
        split_acc = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(split_acc)
        descriptor.store([row, column], left.to(descriptor.dtype))
        descriptor.store([row, column + BN // 2], right.to(descriptor.dtype))
    else:
        descriptor.store([row, column], acc.to(descriptor.dtype))


@triton.jit
def store_by_rank(
    descriptor, acc, source, row, column, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr
):
    """Store a tile as :func:`store_plain` does, by a descriptor of ``[ranks, rows, columns]``."""
    if SPLIT:
        split_acc = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(split_acc)
        descriptor.store([source, row, column], left.to(descriptor.dtype).reshape(1, BM, BN // 2))
        descriptor.store(
            [source, row, column + BN // 2], right.to(descriptor.dtype).reshape(1, BM, BN // 2)
        )
    else:
        descriptor.store([source, row, column], acc.to(descriptor.dtype).reshape(1, BM, BN))


@triton.jit
def add_tile(
    acc, a_d, b_d, source, row, column, K, KN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Add a tile of a GEMM to ``acc``; ``a_d`` loads from ``[ranks, rows, K]``."""
    for k in range(0, K, BK):
        a = a_d.load([source, row, k]).reshape(BM, BK)
        if KN:
            b = b_d.load([k, column])
        else:
            b = b_d.load([column, k]).T
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rank", "counts"])
def stage_kernel(
    x,
    gathered,
    peers,
    state,
    arrived,
    counts,
    rank,
    size,
    half_bytes,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stage a rank's rows for its peers, and copy them to their place among the gathered rows.

    - ``x`` has ``size`` numbers, ``gathered`` has ``world * size``.
    - ``peers``, ``state``, ``half_bytes``: see :mod:`ovpatch.overlap.kernels.workspace_kernels`.
    - ``arrived``: the ``counts`` counts of arrived rows, which this kernel resets to 0.
    - ``BLOCK``: the numbers that a program copies at a time.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    sequence = tl.load(state + SEQUENCE)
    # The operator before the last one used the same half. Peers must have read that half before this rank writes to it.
    wait_for_signals(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
    staged = half_of(peers, rank, sequence, half_bytes, x)
    own_rows = gathered + tl.cast(rank, tl.int64) * size
    for block in range(pid, tl.cdiv(size, BLOCK), programs):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        rows = tl.load(x + at, at < size)
        tl.store(staged + at, rows, at < size)
        tl.store(own_rows + at, rows, at < size)
    for first in range(pid * BLOCK, counts, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(arrived + at, tl.zeros_like(at), at < counts)
    # Peers may read the staged rows only after the last program has written its part.
    if is_last_out(state + FIRST_OUT, programs):
        tell_all(peers, READY, rank, sequence, WORLD)


@triton.jit
def _pull(
    gathered, peers, state, arrived, rank, m, K, half_bytes, pullers,
    WORLD: tl.constexpr, BM: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    """Fetch the rows of all peers, block by block; the rows of the next rank come first."""
    pid = tl.program_id(0)
    sequence = tl.load(state + SEQUENCE)
    blocks, columns = tl.cdiv(m, BM), tl.cdiv(K, PC)
    # Each rank begins with another peer. If all began with rank 0, its links would be the bottleneck, while the
    # links of all other ranks were idle. The tiles of gather_gemm_kernel follow the same order.
    for step in range(1, WORLD):
        source = (rank + step) % WORLD
        wait_for(signals_of(peers, rank) + READY + source, sequence)
        staged = half_of(peers, source, sequence, half_bytes, gathered)
        target = gathered + tl.cast(source, tl.int64) * m * K
        for unit in range(pid, blocks * columns, pullers):
            rows = unit // columns * BM + tl.arange(0, BM)[:, None]
            features = unit % columns * PC + tl.arange(0, PC)[None, :]
            at, is_inside = rows.to(tl.int64) * K + features, (rows < m) & (features < K)
            tl.store(target + at, tl.load(staged + at, is_inside), is_inside)
            # Programs that multiply wait until all column blocks of these rows have arrived.
            add_here(arrived + source * blocks + unit // columns)
    # The last program to finish ends the operator: peers may then overwrite the half that this rank has read.
    if is_last_out(state + SECOND_OUT, pullers):
        tl.store(state + SEQUENCE, sequence + 1)
        tell_all(peers, DONE, rank, sequence, WORLD)


@triton.jit(do_not_specialize=["rank", "m", "pullers"])
def gather_gemm_kernel(
    gathered, w0, w1, w2, bias0, bias1, bias2, out0, out1, out2, peers, state, arrived, rank, m, K, n0, n1, n2,
    half_bytes, pullers, COUNT: tl.constexpr, KN: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    """Fetch the peers' rows with the first programs, and multiply with the remaining programs, own rows first.

    - ``gathered``: the rows of all ranks, ``[world * m, K]``. This rank's rows are there already.
    - ``w``, ``bias``, ``out``: ``COUNT`` weights ``[n, K]`` (``[K, n]`` if ``KN``), biases ``[n]`` or all None, and
      outputs ``[world * m, n]``. Unused ones are None and their ``n`` is 0. K and n are multiples of 8.
    - ``peers``, ``state``, ``half_bytes``: see :mod:`ovpatch.overlap.kernels.workspace_kernels`.
    - ``arrived``: the counts of blocks that have arrived, ``[world, blocks of BM rows]``, all 0.
    - ``pullers`` programs fetch rows, ``PC`` columns at a time.
    - A tile has ``BM`` rows and ``BN`` columns, and multiplies ``BK`` features at a time. ``GROUP`` blocks of rows take
      turns.
    - With ``SPLIT``, tiles are stored in two halves, which takes less shared memory.
    """
    if tl.program_id(0) < pullers:
        _pull(gathered, peers, state, arrived, rank, m, K, half_bytes, pullers, WORLD, BM, PC)
    else:
        a_d = tl.make_tensor_descriptor(
            gathered, [WORLD, m, K], [tl.cast(m, tl.int64) * K, K, 1], [1, BM, BK]
        )
        # With one weight, the descriptors are the same for all tiles.
        if COUNT == 1:
            w_d = make_weight_descriptor(w0, n0, K, KN, BN, BK)
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
            # Tiles come in the order in which rows arrive: own rows first, then the rows of the next rank.
            source = (rank + t // tiles) % WORLD
            i, j = find_tile(t % tiles, blocks, across, GROUP)
            if source != rank:
                wait_here(arrived + source * blocks + i, columns)
                before_descriptors()
            if COUNT == 1:
                column, n = j * BN, n0
            else:
                column = (j - _pick(j, end0, end1, 0, end0, end1, COUNT)) * BN
                n = _pick(j, end0, end1, n0, n1, n2, COUNT)
                w_d = make_weight_descriptor(
                    _pick(j, end0, end1, w0, w1, w2, COUNT), n, K, KN, BN, BK
                )
            acc = add_tile(
                tl.zeros((BM, BN), tl.float32), a_d, w_d, source, i * BM, column, K, KN, BM, BN, BK
            )
            if bias0 is not None:
                acc += _load_row(_pick(j, end0, end1, bias0, bias1, bias2, COUNT), column, n, BN)
            if COUNT > 1:
                out = _pick(j, end0, end1, out0, out1, out2, COUNT)
                out_d = tl.make_tensor_descriptor(
                    out, [WORLD, m, n], [tl.cast(m, tl.int64) * n, n, 1], [1, BM, BN // (1 + SPLIT)]
                )  # fmt: skip
            store_by_rank(out_d, acc, source, i * BM, column, BM, BN, SPLIT)


@triton.jit
def _pick(j, end0, end1, of0, of1, of2, COUNT: tl.constexpr):
    """Return the value that belongs to the weight of the ``j``-th column of tiles."""
    found = of0
    if COUNT > 1:
        if j >= end0:
            found = of1
    if COUNT > 2:
        if j >= end1:
            found = of2
    return found


@triton.jit
def _load_row(bias, column, n, BN: tl.constexpr):
    columns = column + tl.arange(0, BN)
    return tl.load(bias + columns, columns < n, 0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rank", "m"])
def gemm_scatter_kernel(
    x0, x1, x2, w0, w1, w2, bias, peers, state, rank, m, n, K0, K1, K2, half_bytes,
    COUNT: tl.constexpr, KN: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Multiply, and store each tile straight to the rank that owns its rows; owners take turns.

    - ``x``, ``w``: ``COUNT`` inputs ``[world * m, K]`` and weights ``[n, K]`` (``[K, n]`` if ``KN``), whose GEMMs are
      added. Unused ones are None and their ``K`` is 0. K and n are multiples of 8.
    - ``bias``: this rank's term of a bias, ``[n]``, or None.
    - ``peers``: the addresses of all ranks' buffers. A half of a buffer holds ``[world, m, n]``, by the rank that
      computes the term.
    - ``state``, ``half_bytes``: see :mod:`ovpatch.overlap.kernels.workspace_kernels`.
    - A tile has ``BM`` rows and ``BN`` columns, and multiplies ``BK`` features at a time. ``GROUP`` blocks of rows take
      turns.
    - With ``SPLIT``, tiles are stored in two halves, which takes less shared memory.
    """
    sequence = tl.load(state + SEQUENCE)
    a0_d = tl.make_tensor_descriptor(
        x0, [WORLD, m, K0], [tl.cast(m, tl.int64) * K0, K0, 1], [1, BM, BK]
    )
    b0_d = make_weight_descriptor(w0, n, K0, KN, BN, BK)
    if COUNT > 1:
        a1_d = tl.make_tensor_descriptor(
            x1, [WORLD, m, K1], [tl.cast(m, tl.int64) * K1, K1, 1], [1, BM, BK]
        )
        b1_d = make_weight_descriptor(w1, n, K1, KN, BN, BK)
    if COUNT > 2:
        a2_d = tl.make_tensor_descriptor(
            x2, [WORLD, m, K2], [tl.cast(m, tl.int64) * K2, K2, 1], [1, BM, BK]
        )
        b2_d = make_weight_descriptor(w2, n, K2, KN, BN, BK)
    blocks, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    # Owners must have read the terms of the operator before the last one, which used the same half.
    wait_for_signals(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
    for t in tl.range(tl.program_id(0), WORLD * blocks * across, tl.num_programs(0)):
        owner, i, j = find_tile_by_owner(t, rank, blocks, across, GROUP, WORLD)
        acc = add_tile(
            tl.zeros((BM, BN), tl.float32), a0_d, b0_d, owner, i * BM, j * BN, K0, KN, BM, BN, BK
        )
        if COUNT > 1:
            acc = add_tile(acc, a1_d, b1_d, owner, i * BM, j * BN, K1, KN, BM, BN, BK)
        if COUNT > 2:
            acc = add_tile(acc, a2_d, b2_d, owner, i * BM, j * BN, K2, KN, BM, BN, BK)
        if bias is not None:
            acc += _load_row(bias, j * BN, n, BN)
        slot = half_of(peers, owner, sequence, half_bytes, x0) + tl.cast(rank, tl.int64) * m * n
        slot_d = tl.make_tensor_descriptor(slot, [m, n], [n, 1], [BM, BN // (1 + SPLIT)])
        store_plain(slot_d, acc, i * BM, j * BN, BM, BN, SPLIT)
    # Descriptors store asynchronously, and owners may read the terms only when all of them are stored.
    after_descriptors()
    if is_last_out(state + FIRST_OUT, tl.num_programs(0)):
        tell_all(peers, READY, rank, sequence, WORLD)


@triton.jit(do_not_specialize=["rank"])
def scatter_kernel(
    x, peers, state, rank, size, half_bytes, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Store existing rows to the ranks that own them, instead of the tiles of a GEMM.

    ``x`` has ``world * size`` numbers, by owner. A program copies ``BLOCK`` numbers at a time.
    """
    sequence = tl.load(state + SEQUENCE)
    wait_for_signals(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
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
    """Wait for the tiles of all peers, and add up the terms of all ranks in float32, in the order of the ranks.

    ``out`` has this rank's rows of the sum, ``size`` numbers. A program adds ``BLOCK`` numbers at a time.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    sequence = tl.load(state + SEQUENCE)
    wait_for_signals(signals_of(peers, rank) + READY, sequence, WORLD)
    slots = half_of(peers, rank, sequence, half_bytes, out)
    # The order of the terms is the same on all ranks and in all runs, so sums have the same bits.
    for block in range(pid, tl.cdiv(size, BLOCK), programs):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.load(slots + at, at < size).to(tl.float32)
        for source in tl.static_range(1, WORLD):
            total += tl.load(slots + tl.cast(size, tl.int64) * source + at, at < size).to(
                tl.float32
            )
        tl.store(out + at, total.to(out.dtype.element_ty), at < size)
    if is_last_out(state + SECOND_OUT, programs):
        tl.store(state + SEQUENCE, sequence + 1)
        tell_all(peers, DONE, rank, sequence, WORLD)
