"""Tensor-parallel linears on local tensors, with gradients, for scripts with parallel layers of their own.

Activations are ``[.., s, .., k]``, of which one dimension is the sequence, cut evenly over the ranks of a process
group; weights are a rank's part of a linear's weight, laid out as ``nn.Linear``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ovpatch_plugins.tp_linear import tp_group
from ovpatch_plugins.tp_linear.autograd import run_operator
from ovpatch_plugins.tp_linear.config import OpContext, TPConfig
from ovpatch_plugins.tp_linear.operators import OPERATORS, WeightGrad, multiply_weight_grad
from ovpatch_plugins.tp_linear.options import DEFAULT, SCHEDULES
from ovpatch_plugins.tp_linear.schedules import Schedule, find_schedule

CHUNKS = 4


def all_gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Sequence[Tensor | None] | None = None,
    dim: int = 0,
    schedule: str = DEFAULT,
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
        schedule: ``stock``, ``bulk``, ``ring``, ``chunk``, ``fused`` or ``auto``, which measures, and needs the same
            shapes on all ranks.
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
        raise ValueError(f"got {len(weights)} weights and {len(given)} biases: give one bias, or None, for each weight")
    _refuse_complex(x, *weights)
    call = OpContext(
        TPConfig(_schedule(schedule, chunks, anew=regather), weight_grad, regather),
        tp_group.get_tp_group(group, x.device),
        dim=_dim(x, dim),
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
    schedule: str = DEFAULT,
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
        schedule: ``stock``, ``bulk``, ``ring``, ``chunk``, ``fused`` or ``auto``, which measures, and needs the same
            shapes on all ranks.
        chunks: Into how many parts ``chunk`` cuts.
        weight_grad: As of :func:`all_gather_linear`.

    Returns:
        ``[.., s, .., n]``.

    Raises:
        ValueError: The schedule or the dimension is wrong, a tensor is complex, or the sequence does not divide by the
            number of ranks.
    """
    how = TPConfig(_schedule(schedule, chunks), weight_grad)
    _refuse_complex(x, weight)
    dim, ranks = _dim(x, dim), tp_group.get_tp_group(group, x.device)
    if x.shape[dim] % ranks.world:
        raise ValueError(
            f"dimension {dim} of the input has size {x.shape[dim]}, which does not divide by {ranks.world} ranks: pad "
            "the sequence"
        )
    result: Tensor = run_operator(OpContext(how, ranks, OPERATORS["linear_scatter"], dim), x, weight, bias)
    return result


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise ValueError(
            f"dim={dim} is no sequence dimension of an input of shape {tuple(x.shape)}: the last one holds features"
        )
    return dim % x.dim()


def _refuse_complex(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.is_complex():
            raise ValueError(f"complex numbers ({tensor.dtype}) are not supported: compute on real and imaginary parts")


def _schedule(name: str, chunks: int, *, anew: bool = False) -> Schedule:
    if name not in SCHEDULES or chunks < 1:
        expected = f"{', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}"
        raise ValueError(f"schedule={name!r} with chunks={chunks}: expected {expected}, and 1 or more")
    return find_schedule(name, chunks, anew=anew)
