"""The kernels' launches, on plain tensors.

A launch's key has everything that its numbers are computed from: shapes, dtypes, layouts of weights, tiles. The
workspace's own numbers change only with its memory, and then it drops the launches that it keeps. See [Note:
inspected once].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from ovpatch.overlap.kernels.symmetric_memory import Workspace
from ovpatch.overlap.kernels.workspace_kernels import Prepared
from ovpatch.overlap.tensor_parallel.triton_gemm import (
    gather_gemm_kernel,
    gemm_scatter_kernel,
    reduce_kernel,
    scatter_kernel,
    stage_kernel,
)


@dataclass(frozen=True)
class Tiles:
    """How a product is cut, and how many programs move rows; the numbers are from measurements on two H200.

    A program computes one tile at a time, so a product takes as many turns as the busiest program has tiles. Wide tiles
    multiply faster; narrow ones leave fewer programs idle in the last turn. Where rows arrive meanwhile, there is one
    more turn for the last of them.

    Programs that fetch do not multiply. Their share is that of one multiprocessor's time for all fetches in its time
    for fetches and products; more than 32 fetch no faster.

    The tiles of a group of rows are computed one after the other, so that these rows are read once. With small groups
    the first tiles of each owner come sooner, but weights are read once per group, which costs where the cache cannot
    hold them.
    """

    rows: int = 128  # of a tile
    columns: int = 256  # of a tile
    depth: int = 64  # of what is multiplied at a time
    warps: int = 8  # of a program
    stages: int = 3  # of the pipeline of loads
    group: int = 8  # blocks of rows whose tiles take turns
    split: bool = False  # whether tiles are stored in halves
    pullers: int = 16  # programs that fetch rows
    width: int = 256  # columns that are fetched at a time


WIDE: Final = Tiles()
NARROW: Final = Tiles(columns=128, stages=4)
_TURN: Final = {WIDE: 2.0, NARROW: 1.14}  # how long one lasts

_FETCHED: Final = 10.4e9  # bytes a second, by one multiprocessor
_MULTIPLIED: Final = 2.8e12  # pairs of numbers a second, by one multiprocessor
_FEWEST, _MOST, _STEP = 16, 32, 4  # programs that fetch

_CACHED: Final = (
    24 * 2**20
)  # bytes of weights that stay in the cache beside what streams through it


def gather_tiles(
    m: int, k: int, features: Sequence[int], itemsize: int, world: int, programs: int
) -> Tiles:
    """Return how products of a rank's ``m`` gathered rows of ``k`` features are cut.

    ``features`` are those of each product's output, ``itemsize`` is in bytes, and ``programs`` run at a time.
    """
    fetching = (world - 1) * m * k * itemsize / _FETCHED
    multiplying = world * m * k * sum(features) / _MULTIPLIED
    share = programs * fetching / (fetching + multiplying)
    pullers = min(max(_STEP * math.ceil(share / _STEP), _FEWEST), _MOST)

    def duration(tiles: Tiles) -> float:
        count = world * -(-m // tiles.rows) * sum(-(-n // tiles.columns) for n in features)
        return (1 - -count // max(programs - pullers, 1)) * _TURN[tiles]

    return replace(min(_TURN, key=duration), pullers=pullers)


def scatter_tiles(n: int, k: int, itemsize: int) -> Tiles:
    """Return how products are cut whose tiles are stored to other ranks; ``k`` are the features of all inputs."""
    return replace(WIDE, group=4 if n * k * itemsize <= _CACHED else 8)


MOST = 3  # weights that one kernel takes
_COPIED, _SUMMED = 8192, 4096  # numbers that a program copies, or adds up, at a time
_DENSE = 2  # programs of a multiprocessor, where they copy or add up only
_KEPT = 1024  # launches of a workspace: sequences of ever new lengths must not fill memory

Made = TypeVar("Made")


def gather_linear(
    workspace: Workspace,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    tiles: Tiles | None = None,
) -> tuple[list[Tensor], Tensor] | None:
    """Gather rows ``[m, k]`` over the ranks, and multiply them with weights as they arrive.

    There are at most :data:`MOST` weights, ``[n_i, k]`` each, or none, all contiguous or all transposed; biases are
    ``[n_i]`` or None; ValueError if one does not fit the rows. Returns outputs ``[world * m, n_i]``, and all rows
    ``[world * m, k]``; None if the workspace cannot be made now.
    """
    blocks = -(-x.shape[0] // (tiles or WIDE).rows)
    with _use_device_of(x):
        if not workspace.begin_operator(x.numel() * x.element_size(), workspace.world * blocks):
            return None
        given = [(param.shape, param.dtype) for param in (*weights, *biases) if param is not None]
        key = (
            "gather",
            x.shape,
            x.dtype,
            len(weights),
            *given,
            bool(weights) and _is_transposed(weights[0]),
            tiles,
        )
        launch = _find_launch(
            workspace, key, lambda: _GatherLinear(workspace, x, weights, biases, tiles)
        )
        return launch(x, weights, biases)


def linear_scatter(
    workspace: Workspace,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Tensor | None:
    """Multiply, add up over the ranks, and keep this rank's rows, ``[m, n]``; None if there is no workspace now.

    There are at most :data:`MOST` inputs ``[world * m, k_i]``, contiguous, whose products with weights ``[n, k_i]``,
    all contiguous or all transposed, are added up. ``bias``, ``[n]``, is added on this rank. ValueError if one does not
    fit the others.
    """
    x, n = xs[0], weights[0].shape[0]
    rows = x.shape[0]
    with _use_device_of(x):
        if not workspace.begin_operator(rows * n * x.element_size(), 0):
            return None
        given = [(operand.shape, operand.dtype) for operand in (*xs, *weights)]
        biased = None if bias is None else (bias.shape, bias.dtype)
        key = ("scatter", *given, biased, _is_transposed(weights[0]), tiles)
        launch = _find_launch(
            workspace, key, lambda: _LinearScatter(workspace, xs, weights, bias, tiles)
        )
        return launch(xs, weights, bias)


def scatter(workspace: Workspace, x: Tensor) -> Tensor | None:
    """Sum ``[world * m, n]``, contiguous, over the ranks, and keep this rank's rows, ``[m, n]``.

    To the other ranks this looks like :func:`linear_scatter`. None if the workspace cannot be made now.
    """
    with _use_device_of(x):
        if not workspace.begin_operator(x.numel() * x.element_size(), 0):
            return None
        launch = _find_launch(
            workspace, ("as it is", x.shape, x.dtype), lambda: _Scatter(workspace, x)
        )
        return launch(x)


class _GatherLinear:
    """Launches of one key; the arguments are those of :func:`gather_linear`."""

    def __init__(
        self,
        workspace: Workspace,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        tiles: Tiles | None,
    ) -> None:
        (m, k), world, programs = x.shape, workspace.world, count_programs(x.device)
        for weight, bias in zip(weights, biases, strict=True):
            _check_operand(weight.shape[1] == k and weight.dtype == x.dtype, "a weight", weight, x)
            if bias is not None:
                _check_operand(
                    bias.shape == weight.shape[:1] and bias.dtype == x.dtype, "a bias", bias, weight
                )
        features = [len(weight) for weight in weights]
        cut = tiles or gather_tiles(m, k, features, x.element_size(), world, programs)
        pullers = min(cut.pullers, programs - 1)
        self._biased = any(bias is not None for bias in biases)
        self._whole, self._outs = (world * m, k), [(world * m, n) for n in features]
        shared = (workspace.peers, workspace.state, workspace.counts)
        blocks = world * -(-m // cut.rows)
        staged = (*shared, blocks, workspace.rank, m * k, workspace.half_bytes, world, _COPIED)
        self._stage = Prepared(stage_kernel, _DENSE * programs, None, staged, num_warps=8)
        sizes = (
            *shared, workspace.rank, m, k, *_pad_to_three(features, 0), workspace.half_bytes, pullers,
            max(len(weights), 1), bool(weights) and _is_transposed(weights[0]), world,
            cut.rows, cut.columns, cut.depth, cut.group, cut.split, cut.width,
        )  # fmt: skip
        self._multiply = Prepared(
            gather_gemm_kernel, programs if weights else pullers, workspace.scratch, sizes,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Tensor]:
        whole = x.new_empty(self._whole)
        outs = [x.new_empty(shape) for shape in self._outs]
        self._stage(x, whole)
        if self._biased:
            biases = [
                _align_bias(x.new_zeros(len(w)) if b is None else b)
                for w, b in zip(weights, biases, strict=True)
            ]
        used, made = (weights, outs) if weights else ([whole], [whole])  # which no program touches
        self._multiply(whole, *_pad_to_three(used), *_pad_to_three(biases), *_pad_to_three(made))
        return outs, whole


class _Reduction:
    """The launch that ends both operators: it sums terms of ``[m, n]``."""

    def __init__(self, workspace: Workspace, m: int, n: int, device: torch.device) -> None:
        self._shape = (m, n)
        sizes = (
            workspace.peers, workspace.state, workspace.rank, m * n, workspace.half_bytes, workspace.world, _SUMMED,
        )  # fmt: skip
        self._add_up = Prepared(
            reduce_kernel, _DENSE * count_programs(device), None, sizes, num_warps=8
        )

    def __call__(self, like: Tensor) -> Tensor:
        out = like.new_empty(self._shape)
        self._add_up(out)
        return out


class _LinearScatter:
    """Launches of one key; the arguments are those of :func:`linear_scatter`."""

    def __init__(
        self,
        workspace: Workspace,
        xs: Sequence[Tensor],
        weights: Sequence[Tensor],
        bias: Tensor | None,
        tiles: Tiles | None,
    ) -> None:
        x, n, world = xs[0], len(weights[0]), workspace.world
        m, features = len(x) // world, [given.shape[1] for given in xs]
        for given, weight in zip(xs, weights, strict=True):
            _check_operand(len(given) == world * m and given.dtype == x.dtype, "an input", given, x)
            _check_operand(
                weight.shape == (n, given.shape[1]) and weight.dtype == x.dtype,
                "a weight",
                weight,
                given,
            )
        if bias is not None:
            _check_operand(bias.shape == (n,) and bias.dtype == x.dtype, "a bias", bias, weights[0])
        cut = tiles or scatter_tiles(n, sum(features), x.element_size())
        sizes = (
            workspace.peers, workspace.state, workspace.rank, m, n, *_pad_to_three(features, 0), workspace.half_bytes,
            len(xs), _is_transposed(weights[0]), world, cut.rows, cut.columns, cut.depth, cut.group, cut.split,
        )  # fmt: skip
        self._multiply = Prepared(
            gemm_scatter_kernel, count_programs(x.device), workspace.scratch, sizes,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        self._reduction = _Reduction(workspace, m, n, x.device)

    def __call__(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None
    ) -> Tensor:
        added = None if bias is None else _align_bias(bias)
        self._multiply(*_pad_to_three(xs), *_pad_to_three(weights), added)
        return self._reduction(xs[0])


class _Scatter:
    """Launches of one key; the arguments are those of :func:`scatter`."""

    def __init__(self, workspace: Workspace, x: Tensor) -> None:
        world, programs = workspace.world, count_programs(x.device)
        m, n = len(x) // world, x.shape[1]
        sizes = (
            workspace.peers,
            workspace.state,
            workspace.rank,
            m * n,
            workspace.half_bytes,
            world,
            _COPIED,
        )
        self._store = Prepared(scatter_kernel, programs, None, sizes, num_warps=8)
        self._reduction = _Reduction(workspace, m, n, x.device)

    def __call__(self, x: Tensor) -> Tensor:
        self._store(x)
        return self._reduction(x)


def count_programs(device: torch.device) -> int:
    """Return the number of programs that fill a device."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 3
    )


def _find_launch(workspace: Workspace, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """Return a workspace's launches of a key; they are made once."""
    found: Made | None = workspace.kept.get(key)
    if found is None:
        if len(workspace.kept) >= _KEPT:
            workspace.kept.clear()
        found = workspace.kept[key] = make()
    return found


def _use_device_of(x: Tensor) -> AbstractContextManager[Any]:
    if x.device.type != "cuda" or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(x)


_HERE = contextlib.nullcontext()


def _check_operand(fits: bool, what: str, given: Tensor, other: Tensor) -> None:
    if not fits:
        raise ValueError(
            f"{what} of shape {tuple(given.shape)}, {given.dtype}, does not fit "
            f"{tuple(other.shape)}, {other.dtype}: "
            "give all operands one dtype, and features that match"
        )


def _align_bias(bias: Tensor) -> Tensor:
    return bias.clone() if bias.data_ptr() % 16 else bias


def _pad_to_three(values: Sequence[Any], filler: Any = None) -> list[Any]:
    return [*values, *[filler] * (MOST - len(values))]


def _is_transposed(weight: Tensor) -> bool:
    return weight.stride(1) != 1
