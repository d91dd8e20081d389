"""Tensor-parallel linears on local tensors, with gradients, for scripts that write parallel layers themselves.

An activation is ``[.., s, .., k]``. One of its dimensions is the sequence, which the ranks of a process group shard
evenly. A weight is a rank's shard of a linear's weight, in the layout of ``nn.Linear``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.tensor_parallel import tp_group
from ovpatch.overlap.tensor_parallel.operators import (
    LinearScatterThenBias,
    WeightGrad,
    multiply_weight_grad,
)
from ovpatch.overlap.tensor_parallel.schedule_table import DEFAULT_SCHEDULE, SCHEDULE_NAMES
from ovpatch.overlap.tensor_parallel.schedules import Schedule, find_schedule
from ovpatch.overlap.tensor_parallel.tp_autograd import OpContext, TPConfig, run_operator

# The default number of chunks of schedule `chunk`.
CHUNKS = 4

_get_dtype = operator.attrgetter("dtype")
# The bias is the same on all ranks here, so it is added once, after the sum.
_LINEAR_SCATTER = LinearScatterThenBias()


def all_gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Sequence[Tensor | None] | None = None,
    dim: int = 0,
    schedule: str = DEFAULT_SCHEDULE,
    chunks: int = CHUNKS,
    regather: bool = False,
    weight_grad: WeightGrad = multiply_weight_grad,
) -> tuple[Tensor, ...]:
    """Gather a sequence over the ranks, and feed it to several linears whose output features are sharded.

    All linears share one gather. In backward, one reduce-scatter sums their input gradients.

    Args:
        x: This rank's shard of the sequence, ``[.., s, .., k]``.
        weights: This rank's rows of each weight, ``[n_i, k]``.
        group: The process group.
        biases: This rank's shard of each bias, ``[n_i]``, or None for a linear without a bias. Default: no biases.
        dim: The sequence dimension of ``x``.
        schedule: A name of :data:`.schedule_table.SCHEDULES`. ``auto`` measures, and needs the same shapes on all
            ranks.
        chunks: The number of chunks of schedule ``chunk``.
        regather: Whether backward keeps this rank's shard of ``x`` and gathers it again. Otherwise the gathered input
            is kept.
        weight_grad: Computes a weight's gradient in backward, under the collectives. Its arguments are the weight, the
            output's gradient ``[M, n]`` and the gathered rows ``[M, k]``. It may add the gradient to another tensor
            and return None.

    Returns:
        An output ``[.., world * s, .., n_i]`` for each weight.

    Raises:
        ValueError: The schedule, the dimension, or the number of biases is wrong, or a tensor is complex.
    """
    bias_list = list(biases) if biases is not None else [None] * len(weights)
    if len(bias_list) != len(weights):
        raise ValueError(
            f"got {len(weights)} weights and {len(bias_list)} biases: give one bias, or None, for each weight"
        )
    resolved, dim = _resolve_schedule(
        schedule, chunks, regather, dim, x.shape, x.dtype, *map(_get_dtype, weights)
    )
    call = OpContext(
        TPConfig(resolved, weight_grad, regather),
        tp_group.get_tp_group(group, x.device),
        dim=dim,
        weight_count=len(weights),
        # The backward for an input without a gradient sends nothing, so this input is kept gathered.
        is_constant=not x.requires_grad,
    )
    results: tuple[Tensor, ...] = run_operator(call, x, *weights, *bias_list)
    return results


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup,
    *,
    bias: Tensor | None = None,
    dim: int = 0,
    schedule: str = DEFAULT_SCHEDULE,
    chunks: int = CHUNKS,
    weight_grad: WeightGrad = multiply_weight_grad,
) -> Tensor:
    """Apply a linear whose input features are sharded, and give each rank its shard of the sequence.

    Args:
        x: This rank's features, ``[.., world * s, .., k]``.
        weight: This rank's columns of the weight, ``[n, k]``.
        group: The process group.
        bias: The full bias, ``[n]``, the same on all ranks. It is added once. Default: no bias.
        dim: The sequence dimension of ``x``.
        schedule: See :func:`all_gather_linear`.
        chunks: See :func:`all_gather_linear`.
        weight_grad: See :func:`all_gather_linear`.

    Returns:
        This rank's shard of the output, ``[.., s, .., n]``.

    Raises:
        ValueError: The schedule or the dimension is wrong, a tensor is complex, or the sequence does not divide by the
            number of ranks.
    """
    # Forward does not gather the input, so backward does not gather it again.
    resolved, dim = _resolve_schedule(schedule, chunks, False, dim, x.shape, x.dtype, weight.dtype)
    ranks = tp_group.get_tp_group(group, x.device)
    if x.shape[dim] % ranks.world:
        raise ValueError(
            f"dimension {dim} of the input has size {x.shape[dim]}, which does not divide by "
            f"{ranks.world} ranks: pad the sequence"
        )
    call = OpContext(TPConfig(resolved, weight_grad), ranks, _LINEAR_SCATTER, dim)
    result: Tensor = run_operator(call, x, weight, bias)
    return result


# The cache replies from C, so that a repeated call runs no Python function.
@functools.lru_cache
def _resolve_schedule(
    name: str, chunks: int, regathers: bool, dim: int, shape: torch.Size, *dtypes: torch.dtype
) -> tuple[Schedule, int]:
    """Return the schedule, and the sequence dimension counted from the front, for an input of ``shape``.

    Raises:
        ValueError: The schedule or the dimension is wrong, or a dtype is complex.
    """
    for dtype in dtypes:
        if dtype.is_complex:
            raise ValueError(
                f"complex numbers ({dtype}) are not supported: compute on real and imaginary parts"
            )
    if name not in SCHEDULE_NAMES or chunks < 1:
        expected = f"{', '.join(SCHEDULE_NAMES[:-1])} or {SCHEDULE_NAMES[-1]}"
        raise ValueError(
            f"schedule={name!r} with chunks={chunks}: choose {expected}, and 1 or more chunks"
        )
    dims = len(shape)
    if not -dims <= dim < dims or dim % dims == dims - 1:
        raise ValueError(
            f"dim={dim} is no sequence dimension of an input of shape {tuple(shape)}: choose a dimension before the "
            "last one, which holds features"
        )
    return find_schedule(name, chunks, regathers=regathers), dim % dims
