"""Norms of gradients of which each rank has parts, and clipping by them.

[Note: which way a norm goes] One rank may ask for a norm alone, to log it; then the peers' threads tell theirs. That
makes the host wait for the other ranks' backward. ``clip_grad_norm_`` changes gradients, so all ranks call it, or they
would drift apart under stock as well: there norms are summed by a collective. All ranks must come to that decision
alike, whatever each has read meanwhile: a gradient counts as one by parts from the backward that delivered it so until
the next, also if this rank has put it together since.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap import grad_shards
from ovpatch.overlap.changing import changing
from ovpatch.overlap.grad_shards import GradShards
from ovpatch.overlap.step_communicator import step_communicator
from ovpatch_plugins.dist_optimizer.counters import COUNTERS

_FRAMES = 4  # how far up the caller may be: other patches put frames of their own between


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
        norm = _norm(given, cut, norm_type, functools.partial(original, foreach=foreach), together=_all_ranks_clip())
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
        if not _all_ranks_clip():  # else the sum of the norms has seen to it
            _meet(total_norm, dict.fromkeys(shards.group for shards, _ in cut.values()))
        with changing(list(cut.values())):
            original([*whole, *holders], max_norm, total_norm, foreach)

    return clip_grads_with_norm_


def _all_ranks_clip() -> bool:
    """Tell whether this is asked on behalf of ``clip_grad_norm_``; see [Note: which way a norm goes]."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame.f_code.co_name == "clip_grad_norm_":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _meet(total_norm: Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Have no part changed that a peer may still ask for."""
    for group in groups:
        dist.all_reduce(torch.zeros_like(total_norm), group=step_communicator(group, total_norm.device))


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
    *,
    together: bool,
) -> Tensor:
    by_model: dict[GradShards, list[int]] = {}
    whole = []
    for tensor, found in zip(given, cut, strict=True):
        if found is not None and (together or found[0].is_pending(found[1])):
            by_model.setdefault(found[0], []).append(found[1])
        else:
            whole.append(tensor)
    norms = [original(whole, norm_type)] if whole else []
    for shards, indices in by_model.items():
        own = original([shards.current_part(index) for index in indices], norm_type)
        if together:
            shards.meet()
            norms.append(_over_ranks(own, step_communicator(shards.group, own.device), norm_type))
        else:
            peers = shards.norms_of_peers(indices, norm_type)
            norms.append(torch.linalg.vector_norm(torch.stack([own, *map(own.new_tensor, peers)]), norm_type))
    COUNTERS.norms += 1
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(given[0].device) for norm in norms]), norm_type)
    return total


def _over_ranks(norm: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """Return the norm of the vector of which each rank has given the norm of its part."""
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    total = norm**norm_type
    dist.all_reduce(total, group=group)
    return total ** (1 / norm_type)
