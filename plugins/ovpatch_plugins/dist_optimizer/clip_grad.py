"""Norms of gradients of which each rank has parts, and clipping by them.

[Note: which way a norm goes] One rank may ask for a norm alone, to log it; then the peers' threads tell theirs, which
makes the host wait for the other ranks' backward. ``clip_grad_norm_`` changes gradients, so all ranks call it, or they
would drift apart under stock as well: there norms are summed by a collective. All ranks must agree on what goes into
it, even if one of them has read a gradient or put a tensor of its own in its place. So a parameter counts from the
backward that delivered its gradient by parts until the next.

[Note: as stock rounds] Stock takes the norm of each gradient, rounded to the gradient's dtype, and the norm of these.
Here ranks sum one power per gradient, in float32 at least, in which half precision does not overflow. Each root is then
rounded to the gradient's dtype. All ranks add in the order of ranks, so all get the same bits.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ovpatch.overlap.comm.step_communicator import step_communicator
from ovpatch.overlap.tensors.shard import shard_view
from ovpatch_plugins.dist_optimizer import sharded_grads, takeover
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.shard_peers import part_norms
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads, changing
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, standing_in

_FRAMES = 4  # how far up the caller may be: other patches put frames of their own between

Place = tuple[ShardedGrads, int]


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
        clipped = _clipped_by_all()
        if norm_type <= 0:
            return original(given, norm_type, error_if_nonfinite, foreach)
        if clipped is None:
            places = [sharded_grads.delivered(tensor) for tensor in given]
            norms = _norms_of_this_rank(given, places, norm_type, foreach) if any(places) else None
        else:
            norms = _norms_of_all(given, clipped, norm_type, foreach)
        if norms is None or not given:
            return original(given, norm_type, error_if_nonfinite, foreach)
        COUNTERS.norms += 1
        norm: Tensor = torch.linalg.vector_norm(torch.stack([one.to(given[0].device) for one in norms]), norm_type)
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
        by_hand = _clipped_by_all() is None
        if by_hand:  # else the sum of the norms has seen to it
            _tell_if_local(given)
        cut = _places(given)
        if not cut:
            original(given, max_norm, total_norm, foreach)
            return
        unread = {key: place for key, place in cut.items() if not _is_whole(place)}
        holders = [_Holder(shards.part_of(index)) for shards, index in unread.values()]
        whole = [param for param in given if id(param) not in unread]
        if by_hand:
            _meet(total_norm, dict.fromkeys(shards.group for shards, _ in cut.values()))
        with changing(list(cut.values())):
            original([*whole, *holders], max_norm, total_norm, foreach)

    return clip_grads_with_norm_


def _clipped_by_all() -> Sequence[Tensor] | None:
    """Return the parameters if this runs inside of ``clip_grad_norm_``; see [Note: which way a norm goes]."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame.f_code.co_name == "clip_grad_norm_":
            found = frame.f_locals.get("parameters")
            return [found] if isinstance(found, Tensor) else list(found or ())
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _meet(total_norm: Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Have no part changed that a peer may still ask for."""
    for group in groups:
        dist.all_reduce(torch.zeros_like(total_norm), group=step_communicator(group, total_norm.device))


class _Holder:
    """Looks like a parameter to torch's function, which asks for nothing but the gradient."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _tell_if_local(params: Iterable[Tensor]) -> None:
    """Have ranks tell each other whether gradients are local by now, so that all take the same way."""
    places = [place for param in params if (place := sharded_grads.find(param)) is not None]
    for shards in dict.fromkeys(shards for shards, index in places if shards.last_delivered(index)):
        shards.tell_if_local()


def _places(params: Iterable[Tensor]) -> dict[int, Place]:
    """Return, by ``id``, where the parts are of parameters whose gradients the last backward delivered by parts."""
    found = {}
    for param in params:
        place = sharded_grads.find(param)
        if place is not None and place[0].was_delivered(place[1]):
            found[id(param)] = place
    return found


def _is_whole(place: Place) -> bool:
    """Tell whether this rank's ``p.grad`` is a whole tensor, which its part has to follow."""
    shards, index = place
    return shards.has_grad(index) and not shards.is_pending(index)


def _norms_of_all(
    given: Sequence[Tensor], params: Sequence[Tensor], order: float, foreach: bool | None
) -> list[Tensor] | None:
    """Return the norm of each gradient, whose parts all ranks sum up together; None if there are no parts."""
    _tell_if_local(params)
    places = _places(params)
    if not places:
        return None
    by_model: dict[ShardedGrads, list[int]] = {}
    for shards, index in places.values():
        by_model.setdefault(shards, []).append(index)
    norms: dict[Place, Tensor] = {}
    for shards, indices in by_model.items():
        shards.meet()
        parts = [
            shards.current_part(index) if _is_whole((shards, index)) else shards.part_of(index) for index in indices
        ]
        own = part_norms(parts, order)
        summed = _over_ranks(own, step_communicator(shards.group, own.device), order)
        for index, norm in zip(indices, summed, strict=True):
            norms[shards, index] = norm
    place_of = {
        id(grad): places[id(param)] for param in params if id(param) in places and (grad := param.grad) is not None
    }
    return _in_order(given, [place_of.get(id(grad)) for grad in given], norms, order, foreach)


def _norms_of_this_rank(
    given: Sequence[Tensor], places: Sequence[Place | None], order: float, foreach: bool | None
) -> list[Tensor]:
    """Return the norm of each gradient; peers tell those of their parts, and take no part."""
    by_model: dict[ShardedGrads, list[int]] = {}
    norms: dict[Place, Tensor] = {}
    for grad, place in zip(given, places, strict=True):
        if place is None:
            continue
        shards, index = place
        if shards.is_pending(index):
            by_model.setdefault(shards, []).append(index)
        else:  # in the same steps as the peers, which may not have put it together
            flat = shards.in_param_layout(index, grad)
            cuts = [part_norms([shard_view(flat, own)], order) for own in shards.slices(index)]
            norms[place] = _combined(torch.stack(cuts), order)[0]
    for shards, indices in by_model.items():
        own = part_norms([shards.part_of(index) for index in indices], order)
        told = shards.norms_of_peers(indices, order)
        ranks = [told.get(rank) for rank in range(shards.group.size())]
        stacked = torch.stack([own if one is None else own.new_tensor(one) for one in ranks])
        for index, norm in zip(indices, _combined(stacked, order), strict=True):
            norms[shards, index] = norm
    return _in_order(given, places, norms, order, foreach)


def _in_order(
    given: Sequence[Tensor],
    places: Sequence[Place | None],
    norms: Mapping[Place, Tensor],
    order: float,
    foreach: bool | None,
) -> list[Tensor]:
    """Return the norm of each gradient, rounded to its dtype; see [Note: as stock rounds]."""
    whole = [grad for grad, place in zip(given, places, strict=True) if place is None]
    if foreach is False:
        rest = iter([torch.linalg.vector_norm(grad, order) for grad in whole])
    else:
        rest = iter(torch._foreach_norm(whole, order) if whole else ())
    return [
        next(rest) if place is None else norms[place].to(grad.dtype) for grad, place in zip(given, places, strict=True)
    ]


def _over_ranks(norms: Tensor, group: dist.ProcessGroup, order: float) -> Tensor:
    """Return the norm of each gradient, of which this rank has given the norm of its part."""
    if math.isinf(order):
        found = torch.stack(
            [norms, norms.isnan().to(norms.dtype)]
        )  # backends differ in what is larger, NaN or a number
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return torch.where(found[1] > 0, math.nan, found[0])
    powers = norms**order
    dist.all_reduce(powers, group=group)
    return powers ** (1 / order)


def _combined(norms: Tensor, order: float) -> Tensor:
    """Return the norm of each gradient from those of its parts, ``[ranks, gradients]``."""
    if math.isinf(order):
        return norms.amax(0)
    return (norms**order).sum(0) ** (1 / order)


# ``GradScaler`` over gradients of which each rank has parts.
#
# [Note: look, agree, then scale] An infinity is seen only by the rank that has its part, and all must skip the step.
# Ranks agree first and change their parts afterwards: then no peer has changed a part that this rank may still be
# reading.

Unscale = Callable[..., dict[torch.device, Tensor]]


def wrap_unscale(original: Unscale) -> Unscale:
    """Wrap ``GradScaler._unscale_grads_``: works on parts, and finds infinities for all ranks."""

    @functools.wraps(original)
    def unscale_grads(
        scaler: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        sharded = takeover.sharded(optimizer)
        all_parts = sharded.parts(optimizer) if sharded is not None else []
        for shards in dict.fromkeys(part.shards for part in all_parts if part.shards.last_delivered(part.index)):
            shards.tell_if_local()
        parts = [part for part in all_parts if part.delivered]
        if not parts:
            return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        with _pending_as_parts(optimizer, parts):
            looked = original(scaler, optimizer, torch.ones_like(inv_scale), found_inf.clone(), allow_fp16)
        for group in dict.fromkeys(part.shards.group for part in parts):
            for seen in looked.values():
                dist.all_reduce(seen, dist.ReduceOp.MAX, group=step_communicator(group, seen.device))
        with changing([(part.shards, part.index) for part in parts]), _pending_as_parts(optimizer, parts):
            found = original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        for device, seen in looked.items():
            found[device].copy_(seen)
        return found

    return unscale_grads


@contextmanager
def _pending_as_parts(optimizer: Optimizer, parts: Sequence[ShardedParam]) -> Iterator[None]:
    """Show the parts of gradients that nobody has put together; what was put together is scaled whole."""
    pending = [part for part in parts if part.shards.is_pending(part.index)]
    with standing_in(optimizer, pending) as stand_ins:
        yield
        for part in pending:
            reduced, shown = part.shards.part_of(part.index), stand_ins[id(part.param)].grad
            if shown is not None and shown.dtype != reduced.dtype:  # then it was a copy
                reduced.copy_(shown)
