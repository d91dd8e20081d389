"""Which optimizers of this process divide their steps among the ranks, and which stay stock, and why."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ovpatch.overlap.comm import collectives
from ovpatch.overlap.comm.lifetimes import attached_values, drop_values, find_owners, group_values, is_exiting_by_error
from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.tensors import lazy_tensor, pending_param
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.pending_param import PENDING
from ovpatch_plugins.dist_optimizer import sharded_grads
from ovpatch_plugins.dist_optimizer.elementwise_state import ElementwiseState
from ovpatch_plugins.dist_optimizer.main_params import MainParamsState, load_in_fp32
from ovpatch_plugins.dist_optimizer.owned_state import NamedOwnedState, OwnedState
from ovpatch_plugins.dist_optimizer.param_all_gather import (
    ParamAllGather,
    dropped_gathers,
    finish_dropped_gathers,
    finish_when_dropped,
)
from ovpatch_plugins.dist_optimizer.param_broadcast import ParamBroadcast
from ovpatch_plugins.dist_optimizer.report import COUNTERS, note_unmanaged, remark
from ovpatch_plugins.dist_optimizer.sharded_optimizer import ShardedOptimizer
from ovpatch_plugins.dist_optimizer.step_patches import (
    Kind,
    NamedClasses,
    find_inner_optimizer,
    find_kind,
    note_sharded,
    unsupported_reason,
)

_log = logging.getLogger("ovpatch.dist_optimizer")

_BROADCAST_MB = 64.0  # at a time, of parameters that one rank updates for all: a flat buffer takes as much, twice

COMPILED = "its step is compiled by now, and a compiled step reads whole state and gradients in memory"

# What is kept for each optimizer that this feature knows: what divides its steps; None if it is stock.
_SHARDED: Final = "dist_optimizer"
# What is kept for each optimizer that had nothing to divide at its last step: by what that was found.
_SEEN: Final = "dist_optimizer: seen"


def wrap_destroy(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``destroy_process_group``: parameters arrive, and peers get what they still ask for, before it is gone.

    A rank that has finished waits for one that still saves a checkpoint, as it does at its own exit; not if an
    exception ends it, as its peers may wait for it in a collective.
    """

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        try:
            pending_param.wait_for_all()
        except RuntimeError as error:
            _log.warning("parameters did not arrive; each later read of them raises this, too: %s", error)
        finish_dropped_gathers()
        ending = None if group is dist.group.WORLD else group
        leaving = not is_exiting_by_error()
        copies = sys.modules.get("ovpatch.overlap.copy_engine.selection")
        if leaving:
            for owner, _ in group_values(retention.Retention, ending):
                # What was read in part is fetched now, because there will be no other time.
                retention.prepare_backward(owner)
            if copies is not None:
                copies.finish(ending)
            PeerRpc.shutdown_all(ending)
            drop_values(retention.Retention, ending)  # no peer reads it any more
            collectives.close_step_communicators(ending)
        original(group)
        if leaving and copies is not None:
            copies.forget(ending)  # not before: to give memory back is to wait for all that runs on the device

    return destroy_process_group


def wrap_zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Optimizer.zero_grad``: the class of a pending parameter is not asked for each ``grad`` that is dropped."""

    @functools.wraps(original)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        if set_to_none and PENDING:
            with torch._C.DisableTorchFunctionSubclass():
                original(self, set_to_none)
        else:
            original(self, set_to_none)

    return zero_grad


class OptimizerAttachment:
    """Divides the steps of optimizers whose parameters' gradients are sharded, for one set of options.

    Args:
        options: Resolved options of the feature.
        named: Classes that the user has named.
    """

    def __init__(self, options: Mapping[str, Any], named: NamedClasses) -> None:
        self._options = options
        self._named = named

    def step(self, inner: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer; ``inner`` is the stock function of its class."""
        if dropped_gathers:
            finish_dropped_gathers()
        kept = attached_values(optimizer)
        sharded = kept.get(_SHARDED) or self._attach(optimizer)
        if sharded is None:
            return inner(optimizer, *args, **kwargs)
        return sharded.step(inner, *args, **kwargs)

    def unshard_for_compile(self, optimizer: Optimizer) -> None:
        """Make an optimizer stock whose step is compiled; a graph reads memory, and lazy tensors have none."""
        sharded = find_sharded(optimizer)
        if sharded is not None:
            sharded.unshard()
            _fall_back(optimizer, COMPILED)
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
        lazy = [grad for grad in grads if isinstance(grad, LazyTensor)]
        lazy_tensor.materialize(lazy)  # until all ranks know that no rank wants sharded gradients any more
        _note_sharded(lazy=sharded is not None or bool(lazy))

    def wrap_load(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``Optimizer.load_state_dict``: state that was saved in fp32 stays so where parameters have main ones."""
        optimizers = self

        @functools.wraps(original)
        def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            load = functools.partial(original, self, *args, **kwargs)
            sharded = optimizers._attach(self)
            if sharded is not None and sharded.is_elementwise:
                load_in_fp32(self, load)
            else:
                load()

        return load_state_dict

    def wrap_state_dict(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Wrap ``Optimizer.state_dict``: a step in another thread, as of a script that saves beside it, ends before."""

        @functools.wraps(original)
        def state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            sharded = find_sharded(self)
            if sharded is None:
                return original(self, *args, **kwargs)
            with sharded.pause_steps():
                return original(self, *args, **kwargs)

        return state_dict

    def before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look at an optimizer before its step, as a global step hook: those whose step is not patched are reported."""
        if torch.compiler.is_compiling() or attached_values(optimizer).get(_SHARDED) is not None:
            return
        inner = find_inner_optimizer(optimizer)
        if inner is not None and _SHARDED not in attached_values(inner) and _has_sharded_grads(inner):
            _fall_back(inner, f"it is inside a {type(optimizer).__name__}, which divides the work itself")
        self._attach(optimizer)

    def _attach(self, optimizer: Optimizer) -> ShardedOptimizer | None:
        """Return what divides an optimizer's steps, made at the first call; None if it is stock."""
        kept = attached_values(optimizer)
        if _SHARDED not in kept:
            seen = sharded_grads.get_generation(), [list(map(id, group["params"])) for group in optimizer.param_groups]
            if kept.get(_SEEN) == seen:  # no parameter has got shards since
                return None
            if not _has_sharded_grads(optimizer):
                kept[_SEEN] = seen
                note_unmanaged(type(optimizer).__name__)
                return None  # not now; a model may be wrapped later
            reason = unsupported_reason(optimizer, self._named)
            if reason:
                _fall_back(optimizer, reason)
            else:
                self._remark_if_idle(optimizer)
                kept[_SHARDED] = self._make(optimizer)
                _note_sharded(lazy=False)
        return kept[_SHARDED]  # type: ignore[no-any-return]

    def _remark_if_idle(self, optimizer: Optimizer) -> None:
        """Remark that an optimizer has no parameter that can be sharded, if so: its steps are stock's."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        entries = [entry for entry in map(sharded_grads.find, params) if entry is not None]
        if not any(shards.can_be_sharded(index) for shards, index in entries):
            minimum, largest = self._options["min_param_numel"], max(param.numel() for param in params)
            remark(
                f"{type(optimizer).__name__} had nothing to divide at its first step: none of its {len(params)} "
                f"parameters is dense and has min_param_numel={minimum} elements (the largest has {largest})"
            )

    def _make(self, optimizer: Optimizer) -> ShardedOptimizer:
        options = self._options
        bucket_mb = options["gather_bucket_mb"]
        kind = find_kind(type(optimizer), self._named)
        if kind in (Kind.ELEMENT_WISE, Kind.ELEMENT_WISE_NAMED):
            gather = ParamAllGather(
                overlap=options["overlap_param_gather"],
                granularity=options["gather_granularity"],
                bucket_mb=bucket_mb,
                copy_engines=options["copy_engines"],
            )
            state_type = MainParamsState if options["main_params_in_fp32"] else ElementwiseState
            quiet = kind is Kind.ELEMENT_WISE
            sharded = ShardedOptimizer(optimizer, gather, state_type, _fall_back, calls_no_peers=quiet)
            sharded.finalizers.append(finish_when_dropped(optimizer, gather))
            return sharded
        broadcast = ParamBroadcast(min(bucket_mb, _BROADCAST_MB))
        owned = OwnedState if kind is Kind.PER_PARAMETER else NamedOwnedState
        return ShardedOptimizer(optimizer, broadcast, owned, _fall_back)


def find_sharded(optimizer: Optimizer) -> ShardedOptimizer | None:
    """Return what divides an optimizer's steps; None if it is stock."""
    return attached_values(optimizer).get(_SHARDED)


def release_all() -> None:
    """Make every optimizer in this process stock again, its state whole."""
    for _, one in find_owners(_SHARDED):
        if one is not None:
            one.unshard()
    for name in (_SHARDED, _SEEN):
        for optimizer, _ in find_owners(name):
            del attached_values(optimizer)[name]
    _note_sharded(lazy=False)
    finish_dropped_gathers()


def _note_sharded(*, lazy: bool) -> None:
    """Note whether compiled steps have something to make whole: sharded optimizers, or lazy gradients."""
    note_sharded(is_any=lazy or any(one is not None for _, one in find_owners(_SHARDED)))


def _has_sharded_grads(optimizer: Optimizer) -> bool:
    return any(sharded_grads.find(param) is not None for group in optimizer.param_groups for param in group["params"])


def _fall_back(optimizer: Optimizer, reason: str) -> None:
    attached_values(optimizer)[_SHARDED] = None
    COUNTERS.stock_optimizers += 1
    text = f"{type(optimizer).__name__} stays stock: {reason}"
    if remark(text):
        _log.warning("%s", text)
