"""Gradient norms, clipping and ``GradScaler`` for gradients of which each rank has a shard."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ovpatch.overlap.comm.collectives import step_communicator
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.shard import shard_view
from ovpatch_plugins.dist_optimizer import optimizer_attach, sharded_grads, step_patches
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_bucket import shard_norms
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads, updating_shards
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, attach_shards, detach_shards, replaced_params
from ovpatch_plugins.dist_optimizer.step_patches import get_dynamo_callback

Place = tuple[ShardedGrads, int]  # the sharded gradients of a model, and the index of a parameter there


class _Clipping(threading.local):
    """The parameters of the ``clip_grad_norm_`` that this thread runs; None outside of one.

    One rank may ask for a norm alone, to log it; then its peers' threads send theirs, and
    the host waits for the other ranks' backward. ``clip_grad_norm_`` changes gradients, so all ranks call it, or they
    would drift apart under stock as well: there norms are summed by a collective. All ranks must agree on what goes
    into it, even if one of them has read a gradient or put a tensor of its own in its place. So a parameter counts from
    the backward that reduced its gradient to shards until the next.
    """

    params: Sequence[Tensor] | None = None


_clipping = _Clipping()


def wrap_clip_grad_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``clip_grad_norm_``: tells the functions that it calls of its parameters."""

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or get_dynamo_callback() is not None:
            if step_patches.is_any_divided:
                parameters = _fill_lazy_grads(parameters)
            return original(parameters, *args, **kwargs)
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not given and isinstance(parameters, GeneratorType):
            return original(parameters, *args, **kwargs)  # warns
        before, _clipping.params = _clipping.params, given
        try:
            return original(given, *args, **kwargs)
        finally:
            _clipping.params = before

    return clip_grad_norm_


def wrap_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``_get_total_norm``: norms of shards are summed over the ranks."""

    @functools.wraps(original)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if torch.compiler.is_compiling() or get_dynamo_callback() is not None:
            if step_patches.is_any_divided:
                tensors = _fill_lazy_grads(tensors)
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm_type = float(norm_type)
        clipped = _clipping.params
        if norm_type <= 0:
            return original(given, norm_type, error_if_nonfinite, foreach)
        if clipped is None:
            places = sharded_grads.find_by_grad(given)
            norms = _norms_by_pulling(given, places, norm_type, foreach) if any(places) else None
        else:
            norms = _norms_by_all_reduce(given, clipped, norm_type, foreach)
        if norms is None or not given:
            return original(given, norm_type, error_if_nonfinite, foreach)
        COUNTERS.norms += 1
        norm: Tensor = torch.linalg.vector_norm(torch.stack([one.to(given[0].device) for one in norms]), norm_type)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            return original([norm], norm_type, True)  # raises as stock does
        return norm

    return get_total_norm


def wrap_clip(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_clip_grads_with_norm_``: of a lazy gradient this rank's shard is scaled."""

    @functools.wraps(original)
    def clip_grads_with_norm_(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        if torch.compiler.is_compiling() or get_dynamo_callback() is not None:
            if step_patches.is_any_divided:
                parameters = _fill_lazy_grads(parameters)
            original(parameters, max_norm, total_norm, foreach)
            return
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        by_hand = _clipping.params is None  # otherwise the sum of the norms has made all ranks meet
        if by_hand:
            _agree_on_clip("scale", given)
        places = _sharded_places(given)
        if not places:
            original(given, max_norm, total_norm, foreach)
            return
        lazy = {key: place for key, place in places.items() if not _is_whole(place)}
        holders = [_GradHolder(shards.reduced_shard(index)) for shards, index in lazy.values()]
        whole = [param for param in given if id(param) not in lazy]
        if by_hand:
            _meet(total_norm, dict.fromkeys(s.group for s in sharded_grads.sort_models(s for s, _ in places.values())))
        with updating_shards(list(places.values())):
            original([*whole, *holders], max_norm, total_norm, foreach)

    return clip_grads_with_norm_


@torch._disable_dynamo
def _fill_lazy_grads(tensors: Tensor | Iterable[Tensor]) -> Sequence[Tensor]:
    """Make gradients full that a compiled function works on: its graph reads memory, and lazy tensors have none.

    Args:
        tensors: Parameters or gradients.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    with torch._C.DisableTorchFunctionSubclass():
        lazy_tensor.materialize([*given, *(tensor.grad for tensor in given if tensor.is_leaf)])
    return given


def _meet(total_norm: Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Have all ranks come here before a shard changes that a peer may still ask for."""
    for group in groups:
        dist.all_reduce(torch.zeros_like(total_norm), group=step_communicator(group, total_norm.device))


class _GradHolder:
    """Stands in for a parameter in torch's function, which reads its gradient only."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _agree_on_clip(kind: str, params: Iterable[Tensor]) -> None:
    """Have ranks agree whether gradients are local by now and which ones change, so that all take the same way."""
    places = [(param, *place) for param in params if (place := sharded_grads.find(param)) is not None]
    sharded_grads.materialize_moved(places)  # while peers may be called
    sharded_grads.vote(kind, [(shards, index) for _, shards, index in places if shards.was_sharded(index)])


def _sharded_places(params: Iterable[Tensor]) -> dict[int, Place]:
    """Return, by ``id``, the places of parameters whose gradients the last backward has reduced to shards."""
    found = {}
    for param in params:
        place = sharded_grads.find(param)
        if place is not None and place[0].is_sharded(place[1]):
            found[id(param)] = place
    return found


def _is_whole(place: Place) -> bool:
    """Return whether this rank's ``p.grad`` is a whole tensor, which its shard has to follow."""
    shards, index = place
    return shards.has_grad(index) and not shards.is_lazy(index)


def _norms_by_all_reduce(
    given: Sequence[Tensor], params: Sequence[Tensor], order: float, foreach: bool | None
) -> list[Tensor] | None:
    """Return the norm of each gradient, summed over the shards of all ranks; None if there are no shards."""
    _agree_on_clip("clip", params)
    places = _sharded_places(params)
    if not places:
        return None
    by_model: dict[ShardedGrads, list[int]] = {}
    for shards, index in places.values():
        by_model.setdefault(shards, []).append(index)
    norms: dict[Place, Tensor] = {}
    for shards in sharded_grads.sort_models(by_model):
        indices = sorted(by_model[shards])
        shards.wait_for_hosts()
        local = [
            shards.local_shard(index) if _is_whole((shards, index)) else shards.reduced_shard(index)
            for index in indices
        ]
        own = shard_norms(local, order)
        summed = _all_reduce_norms(own, step_communicator(shards.group, own.device), order)
        for index, norm in zip(indices, summed, strict=True):
            norms[shards, index] = norm
    place_of = {
        id(grad): places[id(param)] for param in params if id(param) in places and (grad := param.grad) is not None
    }
    return _round_norms(given, [place_of.get(id(grad)) for grad in given], norms, order, foreach)


def _norms_by_pulling(
    given: Sequence[Tensor], places: Sequence[Place | None], order: float, foreach: bool | None
) -> list[Tensor]:
    """Return the norm of each gradient; the peers' threads send those of their shards, and no other rank takes part."""
    by_model: dict[ShardedGrads, list[int]] = {}
    norms: dict[Place, Tensor] = {}
    for grad, place in zip(given, places, strict=True):
        if place is None:
            continue
        shards, index = place
        if type(grad) is LazyTensor:
            by_model.setdefault(shards, []).append(index)
        else:  # by shards, as the peers do, which may not have read it
            whole = shards.in_param_layout(index, grad)
            of_shards = [shard_norms([shard_view(whole, own)], order) for own in shards.ranges(index)]
            norms[place] = _combine(torch.stack(of_shards), order)[0]
    for shards, indices in by_model.items():
        own = shard_norms([shards.reduced_shard(index) for index in indices], order)
        sent = shards.norms_of_peers(indices, order)
        ranks = [sent.get(rank) for rank in range(shards.group.size())]
        stacked = torch.stack([own if one is None else own.new_tensor(one) for one in ranks])
        for index, norm in zip(indices, _combine(stacked, order), strict=True):
            norms[shards, index] = norm
    return _round_norms(given, places, norms, order, foreach)


def _round_norms(
    given: Sequence[Tensor],
    places: Sequence[Place | None],
    norms: Mapping[Place, Tensor],
    order: float,
    foreach: bool | None,
) -> list[Tensor]:
    """Return the norm of each gradient, rounded to its dtype, as stock rounds it.

    Ranks sum one power per gradient, in float32 at least, in which half precision does not overflow, in the order of
    ranks, so that all get the same bits.
    """
    whole = [grad for grad, place in zip(given, places, strict=True) if place is None]
    if foreach is False:
        rest = iter([torch.linalg.vector_norm(grad, order) for grad in whole])
    else:
        rest = iter(torch._foreach_norm(whole, order) if whole else ())
    return [
        next(rest) if place is None else norms[place].to(grad.dtype) for grad, place in zip(given, places, strict=True)
    ]


def _all_reduce_norms(norms: Tensor, group: dist.ProcessGroup, order: float) -> Tensor:
    """Return the norm of each gradient from those of this rank's shards."""
    if math.isinf(order):
        # Backends differ in whether NaN or a number is larger.
        found = torch.stack([norms, norms.isnan().to(norms.dtype)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return torch.where(found[1] > 0, math.nan, found[0])
    powers = norms**order
    dist.all_reduce(powers, group=group)
    return powers ** (1 / order)


def _combine(norms: Tensor, order: float) -> Tensor:
    """Return the norm of each gradient from those of its shards, ``[ranks, gradients]``."""
    if math.isinf(order):
        return norms.amax(0)
    return (norms**order).sum(0) ** (1 / order)


Unscale = Callable[..., dict[torch.device, Tensor]]


def wrap_unscale(original: Unscale) -> Unscale:
    """Wrap ``GradScaler._unscale_grads_``: works on shards, and finds infinities for all ranks.

    An infinity is seen by the rank only that has its shard, and all must skip the step. Ranks agree first and change
    their shards afterwards: no peer changes a shard that this rank may still be reading.
    """

    @functools.wraps(original)
    def unscale_grads(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        sharded = optimizer_attach.find_sharded(optimizer)
        stepped = sharded.params_to_step(optimizer) if sharded is not None else ()
        sharded_grads.materialize_moved([(one.param, one.shards, one.index) for one in stepped])
        places = [(one.shards, one.index) for one in stepped]
        sharded_grads.vote("unscale", [place for place in places if place[0].was_sharded(place[1])])
        params = [one for one in stepped if one.shards.is_sharded(one.index)]
        if not params:
            return original(self, optimizer, inv_scale, found_inf, allow_fp16)
        with _lazy_as_shards(optimizer, params):
            looked = original(self, optimizer, torch.ones_like(inv_scale), found_inf.clone(), allow_fp16)
        for group in dict.fromkeys(s.group for s in sharded_grads.sort_models(one.shards for one in params)):
            for seen in looked.values():
                dist.all_reduce(seen, dist.ReduceOp.MAX, group=step_communicator(group, seen.device))
        with updating_shards([(one.shards, one.index) for one in params]), _lazy_as_shards(optimizer, params):
            found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        for device, seen in looked.items():
            found[device].copy_(seen)
        return found

    return unscale_grads


@contextmanager
def _lazy_as_shards(optimizer: Optimizer, params: Sequence[ShardedParam]) -> Iterator[None]:
    """Show an optimizer this rank's shards of lazy gradients; those that were read are scaled whole."""
    lazy = [one for one in params if one.shards.is_lazy(one.index)]
    try:
        attach_shards(lazy)
        with replaced_params(optimizer, {id(one.param): one.shard_param for one in lazy}):
            yield
            for one in lazy:
                reduced, grad = one.shards.reduced_shard(one.index), one.shard_param.grad
                if grad is not None and grad.dtype != reduced.dtype:  # then it was a copy
                    reduced.copy_(grad)
    finally:
        detach_shards(lazy)
