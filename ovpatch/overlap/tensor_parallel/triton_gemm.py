"""Products with an all-gather or a reduce-scatter, in two launches each, and the tiles that both compute.

With an all-gather own rows are staged for the others, and tiles follow the rows that arrive. With a reduce-scatter
tiles are stored to their owners, and each owner sums the terms. Groups of tiles go to the owners in turn. One owner
after the other would leave the links idle while own tiles are computed, and make them the bottleneck before.
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
def tile_in(t, blocks, across, GROUP: tl.constexpr):
    """Return row and column of the ``t``-th of ``blocks * across`` tiles; down ``GROUP`` rows, then to the right."""
    group = t // (GROUP * across)
    rows = min(blocks - group * GROUP, GROUP)
    inside = t % (GROUP * across)
    return group * GROUP + inside % rows, inside // rows


@triton.jit
def tile_by_owner(t, rank, blocks, across, GROUP: tl.constexpr, WORLD: tl.constexpr):
    """Return owner, row and column of the ``t``-th tile: of each group, those of the next rank first, own ones last."""
    group = t // (WORLD * GROUP * across)
    rows = min(blocks - group * GROUP, GROUP)
    inside = t % (WORLD * GROUP * across)
    owner = (rank + 1 + inside // (rows * across)) % WORLD
    inside = inside % (rows * across)
    return owner, group * GROUP + inside % rows, inside // rows


@triton.jit
def weight_descriptor(weight, n, K, KN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return what loads tiles of a weight, ``[n, K]`` or, with ``KN``, ``[K, n]``."""
    if KN:
        return tl.make_tensor_descriptor(weight, [K, n], [n, 1], [BK, BN])
    else:
        return tl.make_tensor_descriptor(weight, [n, K], [K, 1], [BN, BK])


@triton.jit
def store_plain(
    descriptor, acc, row, column, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr
):
    """Store a tile of float32 by a descriptor of ``[rows, columns]``, in halves if the descriptor's are such."""
    if SPLIT:
        halves = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(halves)
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
        halves = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(halves)
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
    """Add a tile of a product; ``a_d`` loads from ``[ranks, rows, K]``."""
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
    whole,
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
    """Stage a rank's rows for the other ranks, and copy them to their place among the gathered rows.

    ``x`` has ``size`` numbers, ``whole`` has ``world * size``. ``peers``, ``state`` and ``half_bytes``: see
    :mod:`ovpatch.overlap.kernels.workspace_kernels`. ``counts`` counts of arrived rows are set back to 0. A program
    copies ``BLOCK`` numbers at a time.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    sequence = tl.load(state + SEQUENCE)
    wait_for_signals(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
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
            rows = unit // columns * BM + tl.arange(0, BM)[:, None]
            features = unit % columns * PC + tl.arange(0, PC)[None, :]
            at, inside = rows.to(tl.int64) * K + features, (rows < m) & (features < K)
            tl.store(target + at, tl.load(staged + at, inside), inside)
            add_here(arrived + source * blocks + unit // columns)
    if is_last_out(state + SECOND_OUT, pullers):
        tl.store(state + SEQUENCE, sequence + 1)
        tell_all(peers, DONE, rank, sequence, WORLD)


@triton.jit(do_not_specialize=["rank", "m", "pullers"])
def gather_gemm_kernel(
    whole, w0, w1, w2, bias0, bias1, bias2, out0, out1, out2, peers, state, arrived, rank, m, K, n0, n1, n2, half_bytes,
    pullers, COUNT: tl.constexpr, KN: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    """Fetch the other ranks' rows with the first programs, and multiply with the others, own rows first.

    - ``whole``: all rows, ``[world * m, K]``; this rank's are there.
    - ``w``, ``bias``, ``out``: ``COUNT`` weights ``[n, K]`` (``[K, n]`` if ``KN``), biases ``[n]`` or all None, and
      products ``[world * m, n]``; the others are None and their ``n`` is 0. K and n are multiples of 8.
    - ``peers``, ``state``, ``half_bytes``: see :mod:`ovpatch.overlap.kernels.workspace_kernels`.
    - ``arrived``: counts of blocks that have arrived, ``[world, blocks of BM rows]``, all 0.
    - ``pullers`` programs fetch rows, ``PC`` columns at a time.
    - A tile has ``BM`` rows and ``BN`` columns, and multiplies ``BK`` features at a time; ``GROUP`` blocks of rows take
      turns. With ``SPLIT`` tiles are stored in halves, for which less memory is kept.
    """
    if tl.program_id(0) < pullers:
        _pull(whole, peers, state, arrived, rank, m, K, half_bytes, pullers, WORLD, BM, PC)
    else:
        a_d = tl.make_tensor_descriptor(
            whole, [WORLD, m, K], [tl.cast(m, tl.int64) * K, K, 1], [1, BM, BK]
        )
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
                column, n = j * BN, n0
            else:
                column = (j - _pick(j, end0, end1, 0, end0, end1, COUNT)) * BN
                n = _pick(j, end0, end1, n0, n1, n2, COUNT)
                w_d = weight_descriptor(_pick(j, end0, end1, w0, w1, w2, COUNT), n, K, KN, BN, BK)
            acc = add_tile(
                tl.zeros((BM, BN), tl.float32), a_d, w_d, source, i * BM, column, K, KN, BM, BN, BK
            )
            if bias0 is not None:
                acc += _row(_pick(j, end0, end1, bias0, bias1, bias2, COUNT), column, n, BN)
            if COUNT > 1:
                out = _pick(j, end0, end1, out0, out1, out2, COUNT)
                out_d = tl.make_tensor_descriptor(
                    out, [WORLD, m, n], [tl.cast(m, tl.int64) * n, n, 1], [1, BM, BN // (1 + SPLIT)]
                )  # fmt: skip
            store_by_rank(out_d, acc, source, i * BM, column, BM, BN, SPLIT)


@triton.jit
def _pick(j, end0, end1, of0, of1, of2, COUNT: tl.constexpr):
    """Return what belongs to the weight of the ``j``-th column of tiles."""
    found = of0
    if COUNT > 1:
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


@triton.jit(do_not_specialize=["rank", "m"])
def gemm_scatter_kernel(
    x0, x1, x2, w0, w1, w2, bias, peers, state, rank, m, n, K0, K1, K2, half_bytes,
    COUNT: tl.constexpr, KN: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Multiply, and store each tile straight to the rank that owns its rows; owners take turns.

    - ``x``, ``w``: ``COUNT`` inputs ``[world * m, K]`` and weights ``[n, K]`` (``[K, n]`` if ``KN``),
      whose products are added; the others are None and their ``K`` is 0. K and n are multiples of 8.
    - ``bias``: this rank's term of a bias, ``[n]``, or None.
    - ``peers``: addresses of all ranks' buffers, of which a half holds ``[world, m, n]``, by the rank it comes from.
    - ``state``, ``half_bytes``: see :mod:`ovpatch.overlap.kernels.workspace_kernels`.
    - A tile has ``BM`` rows and ``BN`` columns, and multiplies ``BK`` features at a time; ``GROUP`` blocks of rows take
      turns. With ``SPLIT`` tiles are stored in halves, for which less memory is kept.
    """
    sequence = tl.load(state + SEQUENCE)
    a0_d = tl.make_tensor_descriptor(
        x0, [WORLD, m, K0], [tl.cast(m, tl.int64) * K0, K0, 1], [1, BM, BK]
    )
    b0_d = weight_descriptor(w0, n, K0, KN, BN, BK)
    if COUNT > 1:
        a1_d = tl.make_tensor_descriptor(
            x1, [WORLD, m, K1], [tl.cast(m, tl.int64) * K1, K1, 1], [1, BM, BK]
        )
        b1_d = weight_descriptor(w1, n, K1, KN, BN, BK)
    if COUNT > 2:
        a2_d = tl.make_tensor_descriptor(
            x2, [WORLD, m, K2], [tl.cast(m, tl.int64) * K2, K2, 1], [1, BM, BK]
        )
        b2_d = weight_descriptor(w2, n, K2, KN, BN, BK)
    blocks, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    wait_for_signals(signals_of(peers, rank) + DONE, sequence - 2, WORLD)
    for t in tl.range(tl.program_id(0), WORLD * blocks * across, tl.num_programs(0)):
        owner, i, j = tile_by_owner(t, rank, blocks, across, GROUP, WORLD)
        acc = add_tile(
            tl.zeros((BM, BN), tl.float32), a0_d, b0_d, owner, i * BM, j * BN, K0, KN, BM, BN, BK
        )
        if COUNT > 1:
            acc = add_tile(acc, a1_d, b1_d, owner, i * BM, j * BN, K1, KN, BM, BN, BK)
        if COUNT > 2:
            acc = add_tile(acc, a2_d, b2_d, owner, i * BM, j * BN, K2, KN, BM, BN, BK)
        if bias is not None:
            acc += _row(bias, j * BN, n, BN)
        slot = half_of(peers, owner, sequence, half_bytes, x0) + tl.cast(rank, tl.int64) * m * n
        slot_d = tl.make_tensor_descriptor(slot, [m, n], [n, 1], [BM, BN // (1 + SPLIT)])
        store_plain(slot_d, acc, i * BM, j * BN, BM, BN, SPLIT)
    after_descriptors()
    if is_last_out(state + FIRST_OUT, tl.num_programs(0)):
        tell_all(peers, READY, rank, sequence, WORLD)


@triton.jit(do_not_specialize=["rank"])
def scatter_kernel(
    x, peers, state, rank, size, half_bytes, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Store rows that are there already to the ranks that own them; in the place of a product.

    ``x`` has ``world * size`` numbers, by owner; a program copies ``BLOCK`` at a time.
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
    """Wait for the others' tiles, and add up all of them in float32, by rank, ``BLOCK`` numbers of a program at a time.

    ``out`` are this rank's rows of the sum, ``size`` numbers.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    sequence = tl.load(state + SEQUENCE)
    wait_for_signals(signals_of(peers, rank) + READY, sequence, WORLD)
    slots = half_of(peers, rank, sequence, half_bytes, out)
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
