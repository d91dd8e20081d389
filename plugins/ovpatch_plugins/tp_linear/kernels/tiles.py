"""One tile of a product, and in which order tiles are taken."""

from __future__ import annotations

import triton
import triton.language as tl


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
def store_plain(descriptor, acc, row, column, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Store a tile of float32 by a descriptor of ``[rows, columns]``, in halves if the descriptor's are such."""
    if SPLIT:
        halves = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        descriptor.store([row, column], left.to(descriptor.dtype))
        descriptor.store([row, column + BN // 2], right.to(descriptor.dtype))
    else:
        descriptor.store([row, column], acc.to(descriptor.dtype))


@triton.jit
def store_by_rank(descriptor, acc, source, row, column, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Store a tile as :func:`store_plain` does, by a descriptor of ``[ranks, rows, columns]``."""
    if SPLIT:
        halves = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        descriptor.store([source, row, column], left.to(descriptor.dtype).reshape(1, BM, BN // 2))
        descriptor.store([source, row, column + BN // 2], right.to(descriptor.dtype).reshape(1, BM, BN // 2))
    else:
        descriptor.store([source, row, column], acc.to(descriptor.dtype).reshape(1, BM, BN))


@triton.jit
def tile(
    a_d, b_d, source, row, column, K, KN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Return a tile of a product, in float32."""
    return add_tile(tl.zeros((BM, BN), tl.float32), a_d, b_d, source, row, column, K, KN, BM, BN, BK)


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
