"""The kernels' launches, on plain tensors."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ovpatch.overlap.symmetric.workspace import Workspace
from ovpatch_plugins.tp_linear.kernels.gather_gemm import gather_gemm_kernel, stage_kernel
from ovpatch_plugins.tp_linear.kernels.gemm_scatter import gemm_scatter_kernel, reduce_kernel, scatter_kernel
from ovpatch_plugins.tp_linear.kernels.tuning import Tiles, tiles_of

MOST = 3  # weights that one kernel takes
_COPIED, _SUMMED = 8192, 4096  # numbers that a program copies, or adds up, at a time


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
    """
    world, (m, k) = workspace.world, x.shape
    cut = tiles or tiles_of(m, sum(map(len, weights)), k, world)
    blocks = -(-m // cut.rows)
    if not workspace.begin(x.numel() * x.element_size(), world * blocks):
        return None
    whole = x.new_empty((world * m, k))
    outs = [x.new_empty((world * m, len(weight))) for weight in weights]
    programs = _programs(x.device)
    common = (workspace.peers, workspace.state, workspace.counts)
    with torch.cuda.device_of(x):
        stage_kernel[(programs,)](
            x, whole, *common, world * blocks, workspace.rank, x.numel(), workspace.half_bytes, world, _COPIED,
            num_warps=8,
        )  # fmt: skip
        pullers = min(cut.pullers, programs - 1)
        if any(bias is not None for bias in biases):
            biases = [x.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        used, made = (weights, outs) if weights else ([whole], [whole])  # which no program touches
        _with_scratch(
            x.device,
            gather_gemm_kernel[(programs if weights else pullers,)],
            whole, *common, *_three(used), *_three(biases), *_three(made), workspace.rank, m, k,
            *_three([len(weight) for weight in weights], 0), workspace.half_bytes,
            len(used), _is_transposed(used[0]), world, cut.rows, cut.columns, cut.depth, cut.group, cut.split,
            pullers, cut.width, cut.pull_stages,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return outs, whole


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
    """
    world, n, x = workspace.world, len(weights[0]), xs[0]
    m = len(x) // world
    cut = tiles or tiles_of(m, n, sum(x.shape[1] for x in xs), world)
    if not workspace.begin(world * m * n * x.element_size(), 0):
        return None
    with torch.cuda.device_of(x):
        _with_scratch(
            x.device,
            gemm_scatter_kernel[(_programs(x.device),)],
            *_three(xs), *_three(weights), workspace.peers, workspace.state, workspace.rank, m, n,
            *_three([x.shape[1] for x in xs], 0), workspace.half_bytes,
            len(xs), _is_transposed(weights[0]), world, cut.rows, cut.columns, cut.depth, cut.group, cut.split,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        return _reduced(workspace, x.new_empty((m, n)))


def scatter(workspace: Workspace, x: Tensor) -> Tensor | None:
    """Add up over the ranks, and keep this rank's rows; to other ranks this looks as :func:`linear_scatter` does.

    Args:
        workspace: Of the ranks.
        x: ``[world * m, n]``, contiguous.

    Returns:
        ``[m, n]``, or None if the workspace cannot be made now.
    """
    if not workspace.begin(x.numel() * x.element_size(), 0):
        return None
    out = x.new_empty((len(x) // workspace.world, x.shape[1]))
    with torch.cuda.device_of(x):
        scatter_kernel[(_programs(x.device),)](
            x, workspace.peers, workspace.state, workspace.rank, out.numel(), workspace.half_bytes, workspace.world,
            _COPIED, num_warps=8,
        )  # fmt: skip
        return _reduced(workspace, out)


def _reduced(workspace: Workspace, out: Tensor) -> Tensor:
    reduce_kernel[(_programs(out.device),)](
        out, workspace.peers, workspace.state, workspace.rank, out.numel(), workspace.half_bytes, workspace.world,
        _SUMMED, num_warps=8,
    )  # fmt: skip
    return out


def _three(values: Sequence[Any], filler: Any = None) -> list[Any]:
    return [*values, *[filler] * (MOST - len(values))]


def _is_transposed(weight: Tensor) -> bool:
    return weight.stride(1) != 1


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _with_scratch(device: torch.device, launch: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Launch a kernel that needs memory for descriptors, without touching the allocator that the script may have set.

    Triton knows allocators by context, and threads of the autograd engine start with none.
    """
    contextvars.copy_context().run(_launch, device, launch, *args, **kwargs)


def _launch(device: torch.device, launch: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    launch(*args, **kwargs)
