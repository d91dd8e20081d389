"""Gradient norms, clipping and ``GradScaler`` for gradients of which each rank has a shard."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import GeneratorType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ovpatch.overlap.comm.step_communicators import step_communicator
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.shard import shard_view
from ovpatch_plugins.dist_optimizer import optimizer_attach, sharded_grads, step_patches
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_bucket import shard_norms
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import (
    ShardedParam,
    attach_shards,
    call_with_params,
    detach_shards,
    updating_shards,
)
from ovpatch_plugins.dist_optimizer.step_patches import get_dynamo_callback
from ovpatch_plugins.dist_optimizer.vote_tags import vote

_T = TypeVar("_T")

#: The sharded gradients of a model, and the index of a parameter there.
Place = tuple[ShardedGrads, int]

# --- clipping ---


class _Clipping(threading.local):
    """The parameters of the ``clip_grad_norm_`` that this thread runs; None outside of one.

    One rank alone may read a norm, to log it. Then the threads of its peers send their norms, and
    the host waits until the peers' backward has ended. All ranks call ``clip_grad_norm_``, because
    it changes gradients, and stock models would drift apart, too, if one rank did not. There a
    collective sums the norms. All ranks must agree on the gradients that it covers, even if one
    rank has read a gradient or replaced it by another tensor. So a parameter counts from the
    backward that reduced its gradient to shards until the next backward.
    """

    params: Sequence[Tensor] | None = None


_clipping = _Clipping()


def wrap_clip_grad_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``clip_grad_norm_``: note its parameters for the functions that it calls."""

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        # A compiled function must trace the original, and its graph cannot read shards.
        if torch.compiler.is_compiling() or get_dynamo_callback() is not None:
            if step_patches.is_any_sharded:
                parameters = _fill_lazy_grads(parameters)
            return original(parameters, *args, **kwargs)
        # The functions below read the parameters again, which a generator allows only once.
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # An empty generator makes the original warn.
        if not given and isinstance(parameters, GeneratorType):
            return original(parameters, *args, **kwargs)
        outer = _clipping.params
        _clipping.params = given
        try:
            return original(given, *args, **kwargs)
        finally:
            _clipping.params = outer

    return clip_grad_norm_


def wrap_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``_get_total_norm``: sum the norms of shards over the ranks."""

    @functools.wraps(original)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if torch.compiler.is_compiling() or get_dynamo_callback() is not None:
            if step_patches.is_any_sharded:
                tensors = _fill_lazy_grads(tensors)
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm_type = float(norm_type)
        clipped = _clipping.params
        # For other orders the norms of shards do not give the norm of the gradient.
        if norm_type <= 0:
            return original(given, norm_type, error_if_nonfinite, foreach)
        # Outside of clip_grad_norm_ this rank may be alone; see _Clipping.
        if clipped is None:
            places = sharded_grads.find_by_grad(given)
            norms = _norms_by_pulling(given, places, norm_type, foreach) if any(places) else None
        else:
            norms = _norms_by_all_reduce(given, clipped, norm_type, foreach)
        if norms is None or not given:
            return original(given, norm_type, error_if_nonfinite, foreach)
        COUNTERS.norms += 1
        stacked = torch.stack([norm.to(given[0].device) for norm in norms])
        total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
        if error_if_nonfinite and not math.isfinite(total.item()):
            # The original raises the error of stock PyTorch.
            return original([total], norm_type, True)
        return total

    return get_total_norm


def wrap_clip(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_clip_grads_with_norm_``: scale this rank's shards of lazy gradients."""

    @functools.wraps(original)
    def clip_grads_with_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        total_norm: Tensor,
        foreach: bool | None = None,
    ) -> None:
        if torch.compiler.is_compiling() or get_dynamo_callback() is not None:
            if step_patches.is_any_sharded:
                parameters = _fill_lazy_grads(parameters)
            original(parameters, max_norm, total_norm, foreach)
            return
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # Within clip_grad_norm_, the sum of the norms has already made all ranks agree and meet.
        is_called_by_script = _clipping.params is None
        if is_called_by_script:
            _agree_on_clip("scale", given)
        places = _sharded_places(given)
        if not places:
            original(given, max_norm, total_norm, foreach)
            return
        # updating_shards() makes the shards of full gradients follow, so these are scaled in full.
        lazy = {key: place for key, place in places.items() if not _has_full_grad(place)}
        holders = [_GradHolder(shards.reduced_shard(index)) for shards, index in lazy.values()]
        full = [param for param in given if id(param) not in lazy]
        if is_called_by_script:
            models = sharded_grads.sort_models(shards for shards, _ in places.values())
            _meet(total_norm, dict.fromkeys(shards.group for shards in models))
        with updating_shards(list(places.values())):
            original([*full, *holders], max_norm, total_norm, foreach)

    return clip_grads_with_norm_


class _GradHolder:
    """A replacement for a parameter in torch's function, which reads only its gradient."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


@torch._disable_dynamo
def _fill_lazy_grads(tensors: Tensor | Iterable[Tensor]) -> Sequence[Tensor]:
    """Make the gradients of a compiled function full, since its graph reads their memory.

    Args:
        tensors: Parameters or gradients.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    with torch._C.DisableTorchFunctionSubclass():
        grads = [tensor.grad for tensor in given if tensor.is_leaf]
        lazy_tensor.materialize([*given, *grads])
    return given


def _meet(total_norm: Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Wait for all ranks, because a peer may still read a shard that changes next."""
    for group in groups:
        communicator = step_communicator(group, total_norm.device)
        dist.all_reduce(torch.zeros_like(total_norm), group=communicator)


def _agree_on_clip(kind: str, params: Iterable[Tensor]) -> None:
    """Agree with peers on the gradients that change, and on whether gradients are local by now."""
    places = [
        (param, *place) for param in params if (place := sharded_grads.find(param)) is not None
    ]
    # Before the vote, as long as peers can be called.
    sharded_grads.materialize_moved(places)
    was_sharded = [(shards, index) for _, shards, index in places if shards.was_sharded(index)]
    vote(kind, was_sharded)


def _sharded_places(params: Iterable[Tensor]) -> dict[int, Place]:
    """Return the places of parameters with gradients in shards, by ``id()`` of a parameter."""
    places = {}
    for param in params:
        place = sharded_grads.find(param)
        if place is not None and place[0].is_sharded(place[1]):
            places[id(param)] = place
    return places


def _has_full_grad(place: Place) -> bool:
    """Return whether this rank's ``p.grad`` is a full tensor, which its shard must follow."""
    shards, index = place
    return shards.has_grad(index) and not shards.is_lazy(index)


# --- norms ---


def _norms_by_all_reduce(
    given: Sequence[Tensor], params: Sequence[Tensor], order: float, foreach: bool | None
) -> list[Tensor] | None:
    """Return the norm of each gradient, summed over all ranks; None if there are no shards."""
    _agree_on_clip("clip", params)
    places = _sharded_places(params)
    if not places:
        return None
    indices_by_model: dict[ShardedGrads, list[int]] = {}
    for shards, index in places.values():
        indices_by_model.setdefault(shards, []).append(index)
    norms: dict[Place, Tensor] = {}
    # Ranks pair these collectives by position, so the order must not depend on the arguments.
    for shards in sharded_grads.sort_models(indices_by_model):
        indices = sorted(indices_by_model[shards])
        # A stream waits for the collective below; see [Note: hosts before devices].
        if shards.step_barrier is not None and shards.votes is not None:
            shards.step_barrier.wait(tag=shards.votes.digest)
        local = [
            shards.local_shard(index)
            if _has_full_grad((shards, index))
            else shards.reduced_shard(index)
            for index in indices
        ]
        own = shard_norms(local, order)
        # Each host has all shards, and a sum over the group counts those of one host. So all ranks
        # get the same bits, which sums within hosts do not promise.
        if not shards.holders.is_first:
            own.zero_()
        summed = _all_reduce_norms(own, step_communicator(shards.group, own.device), order)
        for index, norm in zip(indices, summed, strict=True):
            norms[shards, index] = norm
    place_of_grad = {
        id(grad): places[id(param)]
        for param in params
        if id(param) in places and (grad := param.grad) is not None
    }
    grad_places = [place_of_grad.get(id(grad)) for grad in given]
    return _round_norms(given, grad_places, norms, order, foreach)


def _norms_by_pulling(
    given: Sequence[Tensor], places: Sequence[Place | None], order: float, foreach: bool | None
) -> list[Tensor]:
    """Return the norm of each gradient, even if no peer makes this call.

    The serving threads of peers send the norms of their shards.
    """
    indices_by_model: dict[ShardedGrads, list[int]] = {}
    norms: dict[Place, Tensor] = {}
    for grad, place in zip(given, places, strict=True):
        if place is None:
            continue
        shards, index = place
        if type(grad) is LazyTensor:
            indices_by_model.setdefault(shards, []).append(index)
        else:
            # A peer may not have read this gradient. It sums by shards, so this rank does, too.
            full = shards.in_param_layout(index, grad)
            norm_of_shards = torch.stack(
                [shard_norms([shard_view(full, own)], order) for own in shards.ranges(index)]
            )
            norms[place] = _combine(norm_of_shards, order)[0]
    for shards, indices in indices_by_model.items():
        own = shard_norms([shards.reduced_shard(index) for index in indices], order)
        sent = shards.norms_of_peers(indices, order)
        by_place = [sent.get(place) for place in range(len(shards.holders))]
        # Only this rank has sent nothing.
        stacked = torch.stack([own if norm is None else own.new_tensor(norm) for norm in by_place])
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
    """Return the norm of each gradient in the gradient's dtype, to which stock PyTorch rounds it.

    Ranks sum one power per gradient in fp32 at least, in which bf16 and fp16 gradients do not
    overflow. They sum in the order of ranks, so all ranks get the same bits.
    """
    unsharded = [grad for grad, place in zip(given, places, strict=True) if place is None]
    # The same functions as the original calls, for the same bits.
    if foreach is False:
        rest = iter([torch.linalg.vector_norm(grad, order) for grad in unsharded])
    else:
        rest = iter(torch._foreach_norm(unsharded, order) if unsharded else ())
    return [
        next(rest) if place is None else norms[place].to(grad.dtype)
        for grad, place in zip(given, places, strict=True)
    ]


def _all_reduce_norms(norms: Tensor, group: dist.ProcessGroup, order: float) -> Tensor:
    """Return the norm of each gradient from those of this rank's shards."""
    if math.isinf(order):
        # Backends differ in whether NaN or a number is larger.
        maxima = torch.stack([norms, norms.isnan().to(norms.dtype)])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        return torch.where(maxima[1] > 0, math.nan, maxima[0])
    # The powers of norms add up over shards, the norms do not.
    powers = norms**order
    dist.all_reduce(powers, group=group)
    return powers ** (1 / order)


def _combine(norms: Tensor, order: float) -> Tensor:
    """Return the norm of each gradient from the norms of its shards, ``[ranks, gradients]``."""
    if math.isinf(order):
        return norms.amax(0)
    return (norms**order).sum(0) ** (1 / order)


# --- GradScaler ---

Unscale = Callable[..., dict[torch.device, Tensor]]


def wrap_unscale(original: Unscale) -> Unscale:
    """Wrap ``GradScaler._unscale_grads_``: unscale shards, and find infinities for all ranks.

    Only the rank that has its shard detects an infinity, and all ranks must skip the step. Ranks
    agree first and change their shards afterwards, because a peer may still read a shard.
    """

    @functools.wraps(original)
    def unscale_grads(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        sharded_optimizer = optimizer_attach.find_sharded(optimizer)
        stepped: Sequence[ShardedParam] = ()
        if sharded_optimizer is not None:
            stepped = sharded_optimizer.params_to_step(optimizer)
        # Before the vote, as long as peers can be called.
        sharded_grads.materialize_moved(
            [(sharded.param, sharded.shards, sharded.index) for sharded in stepped]
        )
        places = [(sharded.shards, sharded.index) for sharded in stepped]
        was_sharded = [place for place in places if place[0].was_sharded(place[1])]
        vote("unscale", was_sharded)
        params = [sharded for sharded in stepped if sharded.shards.is_sharded(sharded.index)]
        if not params:
            return original(self, optimizer, inv_scale, found_inf, allow_fp16)
        # A scale of one finds infinities and changes no gradient.
        no_scale = torch.ones_like(inv_scale)
        find_infs = functools.partial(
            original, self, optimizer, no_scale, found_inf.clone(), allow_fp16
        )
        seen_infs = _call_with_shards(optimizer, params, find_infs)
        models = sharded_grads.sort_models(sharded.shards for sharded in params)
        for shards in {shards.group: shards for shards in models}.values():
            # A single optimizer has no other order, and its next step compares the digest.
            if (
                shards.step_barrier is not None
                and shards.votes is not None
                and shards.votes.num_optimizers > 1
            ):
                shards.step_barrier.wait(tag=shards.votes.digest)
        for group in dict.fromkeys(shards.group for shards in models):
            for seen in seen_infs.values():
                communicator = step_communicator(group, seen.device)
                dist.all_reduce(seen, dist.ReduceOp.MAX, group=communicator)
        changed = [(sharded.shards, sharded.index) for sharded in params]
        unscale = functools.partial(original, self, optimizer, inv_scale, found_inf, allow_fp16)
        with updating_shards(changed):
            found = _call_with_shards(optimizer, params, unscale)
        # The call above has found only the infinities of this rank's shards.
        for device, seen in seen_infs.items():
            found[device].copy_(seen)
        return found

    return unscale_grads


def _call_with_shards(
    optimizer: Optimizer, params: Sequence[ShardedParam], function: Callable[[], _T]
) -> _T:
    """Call a function while an optimizer has this rank's shards instead of lazy gradients.

    Full gradients stay.
    """
    lazy = [sharded for sharded in params if sharded.shards.is_lazy(sharded.index)]
    try:
        attach_shards(lazy)
        shard_params = {id(sharded.param): sharded.shard_param for sharded in lazy}
        result: _T = call_with_params(optimizer, shard_params, function)
        for sharded in lazy:
            reduced = sharded.shards.reduced_shard(sharded.index)
            grad = sharded.shard_param.grad
            # attach_shards() has made a copy in the parameter's dtype.
            if grad is not None and grad.dtype != reduced.dtype:
                reduced.copy_(grad)
        return result
    finally:
        detach_shards(lazy)
