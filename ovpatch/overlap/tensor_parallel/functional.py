"""Tensor-parallel linears on local tensors, with gradients, for scripts with parallel layers of their own.

Activations are ``[.., s, .., k]``, of which one dimension is the sequence, cut evenly over the ranks of a process
group; weights are a rank's part of a linear's weight, laid out as ``nn.Linear``'s.
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

CHUNKS = 4

_DTYPE = operator.attrgetter("dtype")
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
    """Gather a sequence over the ranks, and feed it to several linears, whose features are cut over the ranks.

    One gather for all of them; in backward, one reduce-scatter of the sum of their input gradients.

    Args:
        x: This rank's part of the sequence, ``[.., s, .., k]``.
        weights: This rank's rows of each weight, ``[n_i, k]``.
        group: The ranks.
        biases: This rank's part of each bias, ``[n_i]``, or None.
        dim: Which dimension of ``x`` is the sequence.
        schedule: A name of :data:`.schedule_table.SCHEDULES`. ``auto`` measures, and needs the same shapes on all
            ranks.
        chunks: Into how many parts ``chunk`` cuts.
        regather: Keep this rank's part of ``x`` for backward, and gather it anew there; else it is kept gathered.
        weight_grad: Computes a weight's gradient in backward, under the collectives: from the weight, its output's
            gradient ``[M, n]`` and the gathered rows ``[M, k]``. May add it to a tensor of its own and return None.

    Returns:
        An output ``[.., world * s, .., n_i]`` for each weight.

    Raises:
        ValueError: The schedule, the dimension, or the number of biases is wrong, or a tensor is complex.
    """
    given = list(biases) if biases is not None else [None] * len(weights)
    if len(given) != len(weights):
        raise ValueError(
            f"got {len(weights)} weights and {len(given)} biases: give one bias, or None, for each "
            "weight"
        )
    how, dim = _check(schedule, chunks, regather, dim, x.shape, x.dtype, *map(_DTYPE, weights))
    call = OpContext(
        TPConfig(how, weight_grad, regather),
        tp_group.get_tp_group(group, x.device),
        dim=dim,
        count=len(weights),
        constant=not x.requires_grad,
    )
    results: tuple[Tensor, ...] = run_operator(call, x, *weights, *given)
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
    """Apply a linear whose input features are cut over the ranks, and give each rank its part of the sequence.

    Args:
        x: This rank's features, ``[.., world * s, .., k]``.
        weight: This rank's columns of the weight, ``[n, k]``.
        group: The ranks.
        bias: The whole bias, ``[n]``, the same on all ranks; added once.
        dim: Which dimension of ``x`` is the sequence.
        schedule: As of :func:`all_gather_linear`.
        chunks: As of :func:`all_gather_linear`.
        weight_grad: As of :func:`all_gather_linear`.

    Returns:
        ``[.., s, .., n]``.

    Raises:
        ValueError: The schedule or the dimension is wrong, a tensor is complex, or the sequence does not divide by the
            number of ranks.
    """
    how, dim = _check(schedule, chunks, False, dim, x.shape, x.dtype, weight.dtype)
    ranks = tp_group.get_tp_group(group, x.device)
    if x.shape[dim] % ranks.world:
        raise ValueError(
            f"dimension {dim} of the input has size {x.shape[dim]}, which does not divide by "
            f"{ranks.world} ranks: pad "
            "the sequence"
        )
    call = OpContext(TPConfig(how, weight_grad), ranks, _LINEAR_SCATTER, dim)
    result: Tensor = run_operator(call, x, weight, bias)
    return result


@functools.lru_cache  # which answers without a call of Python
def _check(
    name: str, chunks: int, anew: bool, dim: int, shape: torch.Size, *dtypes: torch.dtype
) -> tuple[Schedule, int]:
    """Return the schedule, and the dimension from the front, of an input of this shape; ValueError if one is wrong."""
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
            f"dim={dim} is no sequence dimension of an input of shape {tuple(shape)}: choose "
            "another than the last "
            "one, which holds features"
        )
    return find_schedule(name, chunks, anew=anew), dim % dims
