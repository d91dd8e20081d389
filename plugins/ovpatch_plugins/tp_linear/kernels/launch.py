"""The kernels' launches, on plain tensors.

[Note: keys of launches] All that numbers of a launch are computed from is in its key: shapes, dtypes, how weights lie,
how products are cut. What is the workspace's own changes with its memory alone, with which the launches that it keeps
go, too. See [Note: asked once].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ovpatch.overlap.symm_mem.workspace import Workspace
from ovpatch_plugins.tp_linear.kernels.gather_gemm import gather_gemm_kernel, stage_kernel
from ovpatch_plugins.tp_linear.kernels.gemm_scatter import gemm_scatter_kernel, reduce_kernel, scatter_kernel
from ovpatch_plugins.tp_linear.kernels.prepared import Prepared
from ovpatch_plugins.tp_linear.kernels.tuning import WIDE, Tiles, gather_tiles, scatter_tiles

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
    """Gather rows over the ranks, and multiply them with weights as they arrive.

    Args:
        workspace: Of the ranks.
        x: This rank's rows, ``[m, k]``, contiguous.
        weights: ``[n_i, k]`` each, at most :data:`MOST`, or none; all contiguous or all transposed.
        biases: ``[n_i]`` each, or None.
        tiles: How the products are cut.

    Returns:
        Outputs ``[world * m, n_i]``, and all rows ``[world * m, k]``; None if the workspace cannot be made now.

    Raises:
        ValueError: A weight or bias does not fit the rows.
    """
    blocks = -(-x.shape[0] // (tiles or WIDE).rows)
    with _on_device_of(x):
        if not workspace.begin_operator(x.numel() * x.element_size(), workspace.world * blocks):
            return None
        given = [(param.shape, param.dtype) for param in (*weights, *biases) if param is not None]
        key = ("gather", x.shape, x.dtype, len(weights), *given, bool(weights) and _is_transposed(weights[0]), tiles)
        launch = _kept(workspace, key, lambda: _Gather(workspace, x, weights, biases, tiles))
        return launch(x, weights, biases)


def linear_scatter(
    workspace: Workspace, xs: Sequence[Tensor], weights: Sequence[Tensor], *, tiles: Tiles | None = None
) -> Tensor | None:
    """Multiply, add up over the ranks, and keep this rank's rows.

    Args:
        workspace: Of the ranks.
        xs: ``[world * m, k_i]`` each, at most :data:`MOST`, contiguous; their products are added up.
        weights: ``[n, k_i]`` each, all contiguous or all transposed.
        tiles: How the products are cut.

    Returns:
        ``[m, n]``, or None if the workspace cannot be made now.

    Raises:
        ValueError: An input or a weight does not fit the others.
    """
    x, n = xs[0], weights[0].shape[0]
    rows = x.shape[0]
    with _on_device_of(x):
        if not workspace.begin_operator(rows * n * x.element_size(), 0):
            return None
        given = [(operand.shape, operand.dtype) for operand in (*xs, *weights)]
        key = ("scatter", *given, _is_transposed(weights[0]), tiles)
        return _kept(workspace, key, lambda: _Product(workspace, xs, weights, tiles))(xs, weights)


def scatter(workspace: Workspace, x: Tensor) -> Tensor | None:
    """Add up over the ranks, and keep this rank's rows; to other ranks this looks as :func:`linear_scatter` does.

    Args:
        workspace: Of the ranks.
        x: ``[world * m, n]``, contiguous.

    Returns:
        ``[m, n]``, or None if the workspace cannot be made now.
    """
    with _on_device_of(x):
        if not workspace.begin_operator(x.numel() * x.element_size(), 0):
            return None
        launch = _kept(workspace, ("as it is", x.shape, x.dtype), lambda: _AsItIs(workspace, x))
        return launch(x)


class _Gather:
    """Launches of one key; the arguments are those of :func:`gather_linear`."""

    def __init__(
        self,
        workspace: Workspace,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        tiles: Tiles | None,
    ) -> None:
        (m, k), world, programs = x.shape, workspace.world, programs_of(x.device)
        for weight, bias in zip(weights, biases, strict=True):
            _demand(weight.shape[1] == k and weight.dtype == x.dtype, "a weight", weight, x)
            if bias is not None:
                _demand(bias.shape == weight.shape[:1] and bias.dtype == x.dtype, "a bias", bias, weight)
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
            *shared, workspace.rank, m, k, *_three(features, 0), workspace.half_bytes, pullers,
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
            biases = [_aligned(x.new_zeros(len(w)) if b is None else b) for w, b in zip(weights, biases, strict=True)]
        used, made = (weights, outs) if weights else ([whole], [whole])  # which no program touches
        self._multiply(whole, *_three(used), *_three(biases), *_three(made))
        return outs, whole


class _Reduction:
    """The launch that ends both operators; what it adds up is ``[m, n]`` on each rank."""

    def __init__(self, workspace: Workspace, m: int, n: int, device: torch.device) -> None:
        self._shape = (m, n)
        sizes = (
            workspace.peers, workspace.state, workspace.rank, m * n, workspace.half_bytes, workspace.world, _SUMMED,
        )  # fmt: skip
        self._add_up = Prepared(reduce_kernel, _DENSE * programs_of(device), None, sizes, num_warps=8)

    def __call__(self, like: Tensor) -> Tensor:
        out = like.new_empty(self._shape)
        self._add_up(out)
        return out


class _Product:
    """Launches of one key; the arguments are those of :func:`linear_scatter`."""

    def __init__(
        self, workspace: Workspace, xs: Sequence[Tensor], weights: Sequence[Tensor], tiles: Tiles | None
    ) -> None:
        x, n, world = xs[0], len(weights[0]), workspace.world
        m, features = len(x) // world, [given.shape[1] for given in xs]
        for given, weight in zip(xs, weights, strict=True):
            _demand(len(given) == world * m and given.dtype == x.dtype, "an input", given, x)
            _demand(weight.shape == (n, given.shape[1]) and weight.dtype == x.dtype, "a weight", weight, given)
        cut = tiles or scatter_tiles(n, sum(features), x.element_size())
        sizes = (
            workspace.peers, workspace.state, workspace.rank, m, n, *_three(features, 0), workspace.half_bytes,
            len(xs), _is_transposed(weights[0]), world, cut.rows, cut.columns, cut.depth, cut.group, cut.split,
        )  # fmt: skip
        self._multiply = Prepared(
            gemm_scatter_kernel, programs_of(x.device), workspace.scratch, sizes,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        self._reduction = _Reduction(workspace, m, n, x.device)

    def __call__(self, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        self._multiply(*_three(xs), *_three(weights))
        return self._reduction(xs[0])


class _AsItIs:
    """Launches of one key; the arguments are those of :func:`scatter`."""

    def __init__(self, workspace: Workspace, x: Tensor) -> None:
        world, programs = workspace.world, programs_of(x.device)
        m, n = len(x) // world, x.shape[1]
        sizes = (workspace.peers, workspace.state, workspace.rank, m * n, workspace.half_bytes, world, _COPIED)
        self._store = Prepared(scatter_kernel, programs, None, sizes, num_warps=8)
        self._reduction = _Reduction(workspace, m, n, x.device)

    def __call__(self, x: Tensor) -> Tensor:
        self._store(x)
        return self._reduction(x)


def programs_of(device: torch.device) -> int:
    """Return how many programs fill a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _kept(workspace: Workspace, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """Return a workspace's launches of a key."""
    found: Made | None = workspace.kept.get(key)
    if found is None:
        if len(workspace.kept) >= _KEPT:
            workspace.kept.clear()
        found = workspace.kept[key] = make()
    return found


def _on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    if x.device.type != "cuda" or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(x)


_HERE = contextlib.nullcontext()


def _demand(fits: bool, what: str, given: Tensor, other: Tensor) -> None:
    if not fits:
        raise ValueError(
            f"{what} of shape {tuple(given.shape)}, {given.dtype}, does not fit {tuple(other.shape)}, {other.dtype}: "
            "give all operands one dtype, and features that match"
        )


def _aligned(bias: Tensor) -> Tensor:
    return bias.clone() if bias.data_ptr() % 16 else bias


def _three(values: Sequence[Any], filler: Any = None) -> list[Any]:
    return [*values, *[filler] * (MOST - len(values))]


def _is_transposed(weight: Tensor) -> bool:
    return weight.stride(1) != 1
