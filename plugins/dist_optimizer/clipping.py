"""Norms of gradients of which each rank has parts, and clipping by them.

[Note: which way a norm goes] All ranks must come to the same decision whether a norm is computed together, whatever each
of them has read meanwhile. So a gradient counts as one by parts from the backward that delivered it so until the next,
also if this rank has put it together since.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap import grad_shards
from ovpatch.overlap.grad_shards import GradShards
from ovpatch_plugins.dist_optimizer.counters import COUNTERS


def wrap_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``_get_total_norm``: parts of gradients are summed up over the ranks."""

    @functools.wraps(original)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm_type = float(norm_type)
        cut = [grad_shards.delivered(tensor) for tensor in given]
        if not any(cut) or norm_type <= 0:
            return original(given, norm_type, error_if_nonfinite, foreach)
        norm = _norm(given, cut, norm_type, functools.partial(original, foreach=foreach))
        if error_if_nonfinite and not math.isfinite(norm.item()):
            return original([norm], norm_type, True)  # raises as stock does
        return norm

    return get_total_norm


def wrap_clip(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_clip_grads_with_norm_``: a gradient by parts has this rank's part scaled."""

    @functools.wraps(original)
    def clip_grads_with_norm_(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        cut = {id(param): found for param in given if (found := _cut(param)) is not None}
        if not cut:
            original(given, max_norm, total_norm, foreach)
            return
        holders = [_Holder(shards.part_of(index)) for shards, index in cut.values() if shards.is_pending(index)]
        whole = [
            param for param in given if id(param) not in cut or not cut[id(param)][0].is_pending(cut[id(param)][1])
        ]
        with grad_shards.changing(shards for shards, _ in cut.values()):
            original([*whole, *holders], max_norm, total_norm, foreach)  # type: ignore[list-item]

    return clip_grads_with_norm_


class _Holder:
    """Looks like a parameter to torch's function, which asks for nothing but the gradient."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _cut(param: Tensor) -> tuple[GradShards, int] | None:
    return None if param.grad is None else grad_shards.delivered(param.grad)


def _norm(
    given: Sequence[Tensor],
    cut: Sequence[tuple[GradShards, int] | None],
    norm_type: float,
    original: Callable[..., Tensor],
) -> Tensor:
    device = given[0].device
    whole = [tensor for tensor, found in zip(given, cut, strict=True) if found is None]
    norms = [original(whole, norm_type).to(device)] if whole else []
    groups: dict[dist.ProcessGroup, list[Tensor]] = {}
    for found in cut:
        if found is not None:
            groups.setdefault(found[0].group, []).append(found[0].current_part(found[1]))
    for group, parts in groups.items():
        norms.append(_over_ranks(original(parts, norm_type), group, norm_type).to(device))
    COUNTERS.norms += 1
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _over_ranks(norm: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """Return the norm of the vector of which each rank has given the norm of its part."""
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    total = norm.double() ** norm_type if norm.device.type == "cpu" else norm.float() ** norm_type
    dist.all_reduce(total, group=group)
    return (total ** (1 / norm_type)).to(norm.dtype)
