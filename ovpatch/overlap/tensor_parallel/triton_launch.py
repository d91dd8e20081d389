"""The launches of the kernels, on plain tensors.

The key of a launch has all facts from which its numbers are computed: shapes, dtypes, layouts of weights, tiles. The
numbers of the workspace change only with its memory, and then the workspace drops its launches. See [Note: inspected
once].
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
    """The tiles of a GEMM, and the number of programs that move rows; the numbers were measured on two H200.

    A program computes one tile at a time, so a GEMM takes as many turns as the busiest program has tiles. Wide tiles
    multiply faster. Narrow tiles leave fewer programs idle in the last turn. If rows arrive during the GEMM, the last
    rows take another turn.

    Programs that fetch rows do not multiply. Their share of the programs is the share of all fetches in the time that
    one multiprocessor takes for fetches and GEMMs. More than 32 programs fetch no faster.

    A group's tiles are computed together, so that its rows are read once. With small groups the first tiles of each
    owner come sooner, but weights are read once per group, which costs time if the cache cannot hold them.

    Attributes:
        rows: Rows of a tile.
        columns: Columns of a tile.
        depth: Features that are multiplied at a time.
        warps: Warps of a program.
        stages: Stages of the pipeline of loads.
        group: Blocks of rows whose tiles take turns.
        split: Whether tiles are stored in two halves.
        pullers: Programs that fetch rows.
        width: Columns that are fetched at a time.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    split: bool = False
    pullers: int = 16
    width: int = 256


WIDE: Final = Tiles()
NARROW: Final = Tiles(columns=128, stages=4)
# The relative duration of a turn.
_RELATIVE_TURN_TIMES: Final = {WIDE: 2.0, NARROW: 1.14}

# The speeds of one multiprocessor. A pair is two numbers that are multiplied and added.
_FETCHED_BYTES_PER_S: Final = 10.4e9
_MULTIPLIED_PAIRS_PER_S: Final = 2.8e12
# The limits of the number of programs that fetch rows, and the step between two numbers.
_MIN_PULLERS = 16
_MAX_PULLERS = 32
_PULLERS_STEP = 4

# Weights of this size stay in the cache while other tensors stream through it.
_MAX_CACHED_BYTES: Final = 24 * 2**20


def choose_gather_tiles(
    m: int, k: int, features: Sequence[int], itemsize: int, world: int, programs: int
) -> Tiles:
    """Return the tiles for GEMMs of gathered rows.

    Args:
        m: The number of rows of each rank.
        k: The number of input features.
        features: The number of output features of each GEMM.
        itemsize: Bytes of a number.
        world: The number of ranks.
        programs: The number of programs that run at a time.
    """
    fetching = (world - 1) * m * k * itemsize / _FETCHED_BYTES_PER_S
    multiplying = world * m * k * sum(features) / _MULTIPLIED_PAIRS_PER_S
    share = programs * fetching / (fetching + multiplying)
    pullers = min(max(_PULLERS_STEP * math.ceil(share / _PULLERS_STEP), _MIN_PULLERS), _MAX_PULLERS)

    # The last rows to arrive take one more turn.
    def estimate_duration(tiles: Tiles) -> float:
        count = world * -(-m // tiles.rows) * sum(-(-n // tiles.columns) for n in features)
        return (1 - -count // max(programs - pullers, 1)) * _RELATIVE_TURN_TIMES[tiles]

    return replace(min(_RELATIVE_TURN_TIMES, key=estimate_duration), pullers=pullers)


def choose_scatter_tiles(n: int, k: int, itemsize: int) -> Tiles:
    """Return the tiles for GEMMs whose results are stored to their owners.

    Args:
        n: The number of output features.
        k: The number of features of all inputs.
        itemsize: Bytes of a number.
    """
    return replace(WIDE, group=4 if n * k * itemsize <= _MAX_CACHED_BYTES else 8)


# The kernels have parameters for this many weights.
MAX_WEIGHTS = 3
# A program copies or adds up this number of numbers at a time.
_COPY_BLOCK = 8192
_SUM_BLOCK = 4096
# The programs per multiprocessor, for kernels that only copy or add up.
_PROGRAMS_PER_SM = 2
# The limit of a workspace's launches keeps sequences of ever new lengths from filling memory.
_MAX_LAUNCHES = 1024

Launch = TypeVar("Launch")


def gather_linear(
    workspace: Workspace,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    tiles: Tiles | None = None,
) -> tuple[list[Tensor], Tensor] | None:
    """Gather rows over the ranks, and multiply them with weights as they arrive.

    Args:
        workspace: The memory that ranks share.
        x: This rank's rows, ``[m, k]``.
        weights: At most :data:`MAX_WEIGHTS` weights, ``[n_i, k]`` each, all contiguous or all transposed.
        biases: The biases, ``[n_i]`` or None.
        tiles: The tiles. Default: :func:`choose_gather_tiles` chooses them.

    Returns:
        The outputs, ``[world * m, n_i]`` each, and the gathered rows, ``[world * m, k]``. None if the workspace cannot
        be allocated now.

    Raises:
        ValueError: A weight or bias does not fit the rows.
    """
    # All tiles that choose_gather_tiles() chooses have the same number of rows.
    blocks = -(-x.shape[0] // (tiles or WIDE).rows)
    with _use_device_of(x):
        if not workspace.begin_operator(x.numel() * x.element_size(), workspace.world * blocks):
            return None
        param_types = [
            (param.shape, param.dtype) for param in (*weights, *biases) if param is not None
        ]
        key = (
            "gather",
            x.shape,
            x.dtype,
            len(weights),
            *param_types,
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
    """Multiply inputs with weights, add up the results, also over the ranks, and keep this rank's rows.

    Args:
        workspace: The memory that ranks share.
        xs: At most :data:`MAX_WEIGHTS` contiguous inputs, ``[world * m, k_i]`` each.
        weights: Their weights, ``[n, k_i]`` each, all contiguous or all transposed.
        bias: This rank's term of the bias, ``[n]``. Default: none.
        tiles: The tiles. Default: :func:`choose_scatter_tiles` chooses them.

    Returns:
        This rank's rows, ``[m, n]``. None if the workspace cannot be allocated now.

    Raises:
        ValueError: An input, a weight or the bias does not fit the other operands.
    """
    x, n = xs[0], weights[0].shape[0]
    rows = x.shape[0]
    with _use_device_of(x):
        if not workspace.begin_operator(rows * n * x.element_size(), 0):
            return None
        operand_types = [(operand.shape, operand.dtype) for operand in (*xs, *weights)]
        biased = None if bias is None else (bias.shape, bias.dtype)
        key = ("scatter", *operand_types, biased, _is_transposed(weights[0]), tiles)
        launch = _find_launch(
            workspace, key, lambda: _LinearScatter(workspace, xs, weights, bias, tiles)
        )
        return launch(xs, weights, bias)


def scatter(workspace: Workspace, x: Tensor) -> Tensor | None:
    """Sum ``[world * m, n]``, contiguous, over the ranks, and keep this rank's rows, ``[m, n]``.

    Peers cannot distinguish this call from :func:`linear_scatter`. Returns None if the workspace cannot be allocated
    now.
    """
    with _use_device_of(x):
        if not workspace.begin_operator(x.numel() * x.element_size(), 0):
            return None
        launch = _find_launch(
            workspace, ("as it is", x.shape, x.dtype), lambda: _Scatter(workspace, x)
        )
        return launch(x)


class _GatherLinear:
    """The launches of one key of :func:`gather_linear`, with the same arguments."""

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
        tiling = tiles or choose_gather_tiles(m, k, features, x.element_size(), world, programs)
        # At least one program must multiply.
        pullers = min(tiling.pullers, programs - 1)
        self._has_bias = any(bias is not None for bias in biases)
        self._gathered_shape = (world * m, k)
        self._output_shapes = [(world * m, n) for n in features]
        shared = (workspace.peers, workspace.state, workspace.counts)
        blocks = world * -(-m // tiling.rows)
        staged = (*shared, blocks, workspace.rank, m * k, workspace.half_bytes, world, _COPY_BLOCK)
        self._stage = Prepared(stage_kernel, _PROGRAMS_PER_SM * programs, None, staged, num_warps=8)
        sizes = (
            *shared, workspace.rank, m, k, *_pad_to_three(features, 0), workspace.half_bytes, pullers,
            max(len(weights), 1), bool(weights) and _is_transposed(weights[0]), world,
            tiling.rows, tiling.columns, tiling.depth, tiling.group, tiling.split, tiling.width,
        )  # fmt: skip
        self._multiply = Prepared(
            gather_gemm_kernel, programs if weights else pullers, workspace.scratch, sizes,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Tensor]:
        gathered = x.new_empty(self._gathered_shape)
        outs = [x.new_empty(shape) for shape in self._output_shapes]
        self._stage(x, gathered)
        # The kernel adds biases to all outputs or to none.
        if self._has_bias:
            biases = [
                _align_bias(x.new_zeros(len(w)) if b is None else b)
                for w, b in zip(weights, biases, strict=True)
            ]
        # Without weights all programs fetch rows, and no program reads these operands.
        used_weights, used_outs = (weights, outs) if weights else ([gathered], [gathered])
        self._multiply(
            gathered,
            *_pad_to_three(used_weights),
            *_pad_to_three(biases),
            *_pad_to_three(used_outs),
        )
        return outs, gathered


class _Reduction:
    """The launch that ends both operators of a reduce-scatter: it sums the terms of ``[m, n]``."""

    def __init__(self, workspace: Workspace, m: int, n: int, device: torch.device) -> None:
        self._shape = (m, n)
        sizes = (
            workspace.peers, workspace.state, workspace.rank, m * n, workspace.half_bytes, workspace.world, _SUM_BLOCK,
        )  # fmt: skip
        self._add_up = Prepared(
            reduce_kernel, _PROGRAMS_PER_SM * count_programs(device), None, sizes, num_warps=8
        )

    def __call__(self, like: Tensor) -> Tensor:
        out = like.new_empty(self._shape)
        self._add_up(out)
        return out


class _LinearScatter:
    """The launches of one key of :func:`linear_scatter`, with the same arguments."""

    def __init__(
        self,
        workspace: Workspace,
        xs: Sequence[Tensor],
        weights: Sequence[Tensor],
        bias: Tensor | None,
        tiles: Tiles | None,
    ) -> None:
        x, n, world = xs[0], len(weights[0]), workspace.world
        m, features = len(x) // world, [operand.shape[1] for operand in xs]
        for operand, weight in zip(xs, weights, strict=True):
            _check_operand(
                len(operand) == world * m and operand.dtype == x.dtype, "an input", operand, x
            )
            _check_operand(
                weight.shape == (n, operand.shape[1]) and weight.dtype == x.dtype,
                "a weight",
                weight,
                operand,
            )
        if bias is not None:
            _check_operand(bias.shape == (n,) and bias.dtype == x.dtype, "a bias", bias, weights[0])
        tiling = tiles or choose_scatter_tiles(n, sum(features), x.element_size())
        sizes = (
            workspace.peers, workspace.state, workspace.rank, m, n, *_pad_to_three(features, 0), workspace.half_bytes,
            len(xs), _is_transposed(weights[0]), world,
            tiling.rows, tiling.columns, tiling.depth, tiling.group, tiling.split,
        )  # fmt: skip
        self._multiply = Prepared(
            gemm_scatter_kernel, count_programs(x.device), workspace.scratch, sizes,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
        self._reduction = _Reduction(workspace, m, n, x.device)

    def __call__(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None
    ) -> Tensor:
        added = None if bias is None else _align_bias(bias)
        self._multiply(*_pad_to_three(xs), *_pad_to_three(weights), added)
        return self._reduction(xs[0])


class _Scatter:
    """The launches of one key of :func:`scatter`, with the same arguments."""

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
            _COPY_BLOCK,
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


def _find_launch(workspace: Workspace, key: tuple[Any, ...], make: Callable[[], Launch]) -> Launch:
    """Return a workspace's launches of a key, created by the first call."""
    found: Launch | None = workspace.kept.get(key)
    if found is None:
        if len(workspace.kept) >= _MAX_LAUNCHES:
            workspace.kept.clear()
        found = workspace.kept[key] = make()
    return found


def _use_device_of(x: Tensor) -> AbstractContextManager[Any]:
    # torch.cuda.device_of() takes host time, even if the device is the current one.
    if x.device.type != "cuda" or x.get_device() == torch.cuda.current_device():
        return _CURRENT_DEVICE
    return torch.cuda.device_of(x)


_CURRENT_DEVICE = contextlib.nullcontext()


def _check_operand(does_fit: bool, operand_name: str, operand: Tensor, expected: Tensor) -> None:
    if not does_fit:
        raise ValueError(
            f"{operand_name} of shape {tuple(operand.shape)}, {operand.dtype}, does not fit "
            f"{tuple(expected.shape)}, {expected.dtype}: give all operands one dtype, and features that match"
        )


def _align_bias(bias: Tensor) -> Tensor:
    # The kept kernel was compiled for addresses that are multiples of 16, and never inspects an address again; see
    # [Note: inspected once]. A bias that is a slice of a larger tensor may begin anywhere.
    return bias.clone() if bias.data_ptr() % 16 else bias


def _pad_to_three(values: Sequence[Any], filler: Any = None) -> list[Any]:
    return [*values, *[filler] * (MAX_WEIGHTS - len(values))]


def _is_transposed(weight: Tensor) -> bool:
    return weight.stride(1) != 1
