"""The sharded optimizers of this process, and the optimizers that fell back to torch."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ovpatch.overlap.comm import hosts, step_communicators
from ovpatch.overlap.comm.lifetimes import (
    attached_values,
    drop_values,
    find_owners,
    group_values,
    is_exiting_by_error,
)
from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.tensors import lazy_tensor, pending_param
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.pending_param import PENDING
from ovpatch_plugins.dist_optimizer import sharded_grads
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS, note_unmanaged, remark
from ovpatch_plugins.dist_optimizer.main_params import MainParamsState, load_in_fp32
from ovpatch_plugins.dist_optimizer.owned_state import NamedOwnedState, OwnedState
from ovpatch_plugins.dist_optimizer.param_all_gather import (
    ParamAllGather,
    dropped_gathers,
    finish_dropped_gathers,
    finish_when_dropped,
)
from ovpatch_plugins.dist_optimizer.param_broadcast import ParamBroadcast
from ovpatch_plugins.dist_optimizer.sharded_optimizer import ShardedOptimizer
from ovpatch_plugins.dist_optimizer.sharded_state import ElementwiseState
from ovpatch_plugins.dist_optimizer.step_patches import (
    Kind,
    NamedClasses,
    find_inner_optimizer,
    find_kind,
    note_sharded,
    unsupported_reason,
)

_log = logging.getLogger("ovpatch.dist_optimizer")

# The MiB of parameters in one broadcast. Its flat buffer takes twice as much memory.
_MAX_BROADCAST_MB: Final = 64.0

_REASON_COMPILED: Final = (
    "its step is compiled, and a compiled step reads full state and gradients in memory"
)

# The key of an optimizer's :class:`ShardedOptimizer`; its value is None once the optimizer has
# fallen back to torch.
_SHARDED: Final = "dist_optimizer"
# The key of the parameters that an optimizer had when none of them had sharded gradients. Such an
# optimizer is not searched again until parameters have got shards.
_UNSHARDED_PARAMS: Final = "dist_optimizer: parameters without shards"


def wrap_destroy(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``destroy_process_group``: finish gathers, and serve peers, while there is a group.

    A rank that has finished waits for a peer that still saves a checkpoint, as it does at its own
    exit. It does not wait if an exception ends it, because its peers may wait for it in a
    collective.
    """

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        try:
            pending_param.wait_for_all()
        except RuntimeError as error:
            _log.warning(
                "parameters did not arrive; each later read of them raises this, too: %s", error
            )
        finish_dropped_gathers()
        # `destroy_process_group(WORLD)` destroys all groups, as it does without an argument.
        ending = None if group is dist.group.WORLD else group
        should_serve = not is_exiting_by_error()
        copies = sys.modules.get("ovpatch.overlap.kernels.copy_choice")
        if should_serve:
            # State dicts that the script has read in part fetch the rest now, because no peer will
            # reply later.
            for owner, _ in group_values(retention.Retention, ending):
                retention.prepare_backward(owner)
            if copies is not None:
                copies.finish(ending)
            PeerRpc.shutdown_all(ending)
            # No peer reads retained tensors after the shutdown.
            drop_values(retention.Retention, ending)
            hosts.close_host_groups(ending)
            step_communicators.close_step_communicators(ending)
        original(group)
        if should_serve and copies is not None:
            # The release of this memory waits for all work on the device, so it comes last.
            copies.forget(ending)

    return destroy_process_group


def wrap_zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Optimizer.zero_grad``: drop gradients without calls of a pending parameter's class."""

    @functools.wraps(original)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        if set_to_none and PENDING:
            with torch._C.DisableTorchFunctionSubclass():
                original(self, set_to_none)
        else:
            original(self, set_to_none)

    return zero_grad


class OptimizerAttachment:
    """Shards the steps of optimizers over sharded gradients, for one set of options.

    Args:
        options: Resolved options of the feature.
        named: Classes that the user has named.
    """

    def __init__(self, options: Mapping[str, Any], named: NamedClasses) -> None:
        self._options = options
        self._named = named

    def step(
        self, inner: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Step an optimizer.

        Args:
            inner: The stock ``step`` function of its class.
            optimizer: The optimizer.
            *args: Positional arguments of ``inner``.
            **kwargs: Keyword arguments of ``inner``.
        """
        # The parameters of a freed optimizer may belong to this one, and be in flight.
        if dropped_gathers:
            finish_dropped_gathers()
        sharded = attached_values(optimizer).get(_SHARDED) or self._attach(optimizer)
        if sharded is None:
            return inner(optimizer, *args, **kwargs)
        return sharded.step(inner, *args, **kwargs)

    def unshard_for_compile(self, optimizer: Optimizer) -> None:
        """Make state and gradients full, because a compiled step reads memory that shards lack."""
        sharded = find_sharded(optimizer)
        if sharded is not None:
            sharded.unshard()
            _fall_back(optimizer, _REASON_COMPILED)
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
        # Backwards leave lazy gradients until all ranks know that no rank requests shards.
        lazy = [grad for grad in grads if isinstance(grad, LazyTensor)]
        lazy_tensor.materialize(lazy)
        _update_is_any_sharded(has_lazy_grads=sharded is not None or bool(lazy))

    def wrap_load(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``Optimizer.load_state_dict``: main parameters keep state that was saved in fp32."""
        attachment = self

        @functools.wraps(original)
        def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            load = functools.partial(original, self, *args, **kwargs)
            sharded = attachment._attach(self)
            if sharded is not None and sharded.is_elementwise:
                load_in_fp32(self, load)
            else:
                load()

        return load_state_dict

    def wrap_state_dict(
        self, original: Callable[..., dict[str, Any]]
    ) -> Callable[..., dict[str, Any]]:
        """Wrap ``Optimizer.state_dict``: wait for a step in another thread.

        A script may save a checkpoint in a thread while it trains. During a step the optimizer's
        state consists of shards.
        """

        @functools.wraps(original)
        def state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            sharded = find_sharded(self)
            if sharded is None:
                return original(self, *args, **kwargs)
            with sharded.pause_steps():
                return original(self, *args, **kwargs)

        return state_dict

    def before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Attach to an optimizer before its first step, or report why torch runs its steps.

        This is a global hook, which torch calls for all optimizers, also for those whose ``step`` no
        patch covers.
        """
        if torch.compiler.is_compiling() or attached_values(optimizer).get(_SHARDED) is not None:
            return
        inner = find_inner_optimizer(optimizer)
        if (
            inner is not None
            and _SHARDED not in attached_values(inner)
            and _has_sharded_grads(inner)
        ):
            _fall_back(
                inner, f"it is inside a {type(optimizer).__name__}, which shards the work itself"
            )
        self._attach(optimizer)

    def _attach(self, optimizer: Optimizer) -> ShardedOptimizer | None:
        """Return the sharded optimizer, created by the first call; None if torch runs the step."""
        values = attached_values(optimizer)
        if _SHARDED in values:
            return values[_SHARDED]  # type: ignore[no-any-return]
        # The search below visits all parameters. It can find something new only if parameters have
        # got shards since the last one.
        param_ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        key = sharded_grads.Generation.number, param_ids
        if values.get(_UNSHARDED_PARAMS) == key:
            return None
        # This is not final, because a model may be wrapped later.
        if not _has_sharded_grads(optimizer):
            values[_UNSHARDED_PARAMS] = key
            note_unmanaged(type(optimizer).__name__)
            return None
        if reason := unsupported_reason(optimizer, self._named):
            _fall_back(optimizer, reason)
            return None
        self._remark_if_idle(optimizer)
        sharded = self._make(optimizer)
        values[_SHARDED] = sharded
        _update_is_any_sharded(has_lazy_grads=False)
        return sharded

    def _remark_if_idle(self, optimizer: Optimizer) -> None:
        """Remark that torch does all the work of an optimizer, if no parameter can be sharded."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        places = [place for place in map(sharded_grads.find, params) if place is not None]
        if not any(shards.can_be_sharded(index) for shards, index in places):
            minimum = self._options["min_param_numel"]
            largest = max(param.numel() for param in params)
            remark(
                f"{type(optimizer).__name__} had nothing to shard at its first step: each of its "
                f"{len(params)} parameters is sparse, or has fewer than min_param_numel={minimum} "
                f"elements (the largest has {largest})"
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
            sharded = ShardedOptimizer(
                optimizer,
                gather,
                state_type,
                _fall_back,
                # The step of a class that the user has named may do anything.
                calls_no_peers=kind is Kind.ELEMENT_WISE,
            )
            sharded.finalizers.append(finish_when_dropped(optimizer, gather))
            return sharded
        broadcast = ParamBroadcast(min(bucket_mb, _MAX_BROADCAST_MB))
        owned = OwnedState if kind is Kind.PER_PARAMETER else NamedOwnedState
        return ShardedOptimizer(optimizer, broadcast, owned, _fall_back)


def find_sharded(optimizer: Optimizer) -> ShardedOptimizer | None:
    """Return the sharded optimizer of an optimizer; None if torch runs its steps."""
    return attached_values(optimizer).get(_SHARDED)


def release_all() -> None:
    """Detach from every optimizer in this process; its state becomes full."""
    for _, sharded in find_owners(_SHARDED):
        if sharded is not None:
            sharded.unshard()
    for key in (_SHARDED, _UNSHARDED_PARAMS):
        for optimizer, _ in find_owners(key):
            del attached_values(optimizer)[key]
    _update_is_any_sharded(has_lazy_grads=False)
    finish_dropped_gathers()


def _update_is_any_sharded(*, has_lazy_grads: bool) -> None:
    has_optimizers = any(sharded is not None for _, sharded in find_owners(_SHARDED))
    note_sharded(is_any=has_lazy_grads or has_optimizers)


def _has_sharded_grads(optimizer: Optimizer) -> bool:
    return any(
        sharded_grads.find(param) is not None
        for group in optimizer.param_groups
        for param in group["params"]
    )


def _fall_back(optimizer: Optimizer, reason: str) -> None:
    attached_values(optimizer)[_SHARDED] = None
    COUNTERS.stock_optimizers += 1
    text = f"{type(optimizer).__name__} falls back to torch: {reason}"
    # A script that creates an optimizer per epoch would fill the log with the same line.
    if remark(text):
        _log.warning("%s", text)
