"""All optimizers in this process: which of them update by parts, and which stay stock, and why."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ovpatch.overlap.comm import step_communicator
from ovpatch.overlap.comm.group_state import is_exiting_by_error
from ovpatch.overlap.copy_engine import registry as copies
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.tensors import lazy_tensor, pending_param
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch_plugins.dist_optimizer import param_all_gather, sharded_grads, supported_optimizers
from ovpatch_plugins.dist_optimizer.main_params import load_in_fp32
from ovpatch_plugins.dist_optimizer.param_all_gather import ParamAllGathers
from ovpatch_plugins.dist_optimizer.param_broadcast import ParamBroadcasts
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_optimizer import ElementwiseOptimizer, OwnedParamOptimizer, ShardedOptimizer
from ovpatch_plugins.dist_optimizer.supported_optimizers import Kind, Named, kind_of, unsupported_reason

# The end of a process group, of which others may still need something.

_log = logging.getLogger("ovpatch.dist_optimizer")


def wrap_destroy(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``destroy_process_group``: parameters arrive, and peers get what they still ask for, before it is gone.

    A rank that has finished waits for one that still saves a checkpoint, as it does at its own exit. Not if an
    exception ends it: its peers may wait for it in a collective.
    """

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        try:
            pending_param.settle_all()
        except RuntimeError as error:
            _log.warning("parameters did not arrive, and who reads them will be told again: %s", error)
        ending = None if group is dist.group.WORLD else group
        leaving = not is_exiting_by_error()
        if leaving:
            copies.finish(ending)
            PeerRpc.shutdown_all(ending)
            step_communicator.close_communicators(ending)
        original(group)
        if leaving:
            copies.forget(ending)  # not before: to give memory back is to wait for whatever runs on the device

    return destroy_process_group


_HANDED_MB = 64.0  # at a time, of parameters that one rank updates for all: a flat copy takes as much, twice

_BY_PARTS = "_ovpatch_by_parts"  # an attribute of an optimizer, for Dynamo can look at nothing else

COMPILED = "its step is compiled by now, and a graph reads memory, which whole state and gradients have"

_live: weakref.WeakKeyDictionary[Optimizer, ShardedOptimizer | None] = weakref.WeakKeyDictionary()
_remarks: list[str] = []
_strangers: set[str] = set()  # classes of optimizers that stepped and had no parameter of ours


class Steps:
    """The patches of ``step`` functions, made for one set of options.

    Args:
        options: Resolved options of the feature.

    Attributes:
        named: Classes that the user has named.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self.named = Named.of(options)

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the ``step`` of a class of optimizers, inside of torch's own wrapper that calls step hooks."""
        inner = getattr(original, "__wrapped__", original) if getattr(original, "hooked", False) else original

        @functools.wraps(inner)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                if getattr(optimizer, _BY_PARTS, False):  # a constant of the graph, which is compiled anew later
                    _make_whole(optimizer)
                return inner(optimizer, *args, **kwargs)
            param_all_gather.settle()
            sharded = self._find(optimizer)
            if sharded is None:
                return inner(optimizer, *args, **kwargs)
            return sharded.step(inner, *args, **kwargs)

        if inner is original:
            return step
        hooked: Any = Optimizer.profile_hook_step(step)
        hooked.hooked = True
        return hooked  # type: ignore[no-any-return]

    def wrap_load(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``Optimizer.load_state_dict``: state that was saved in fp32 stays so where parameters have main ones."""

        @functools.wraps(original)
        def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            load = functools.partial(original, optimizer, *args, **kwargs)
            if isinstance(self._find(optimizer), ElementwiseOptimizer):
                load_in_fp32(optimizer, load)
            else:
                load()

        return load_state_dict

    def wrap_state_dict(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Wrap ``Optimizer.state_dict``: a step in another thread, as of a script that saves beside it, ends before."""

        @functools.wraps(original)
        def state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            one = sharded(optimizer)
            if one is None:
                return original(optimizer, *args, **kwargs)
            with one.undivided():
                return original(optimizer, *args, **kwargs)

        return state_dict

    def notice(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look at an optimizer before its step, as a global step hook: those whose step is not patched are reported."""
        if torch.compiler.is_compiling():
            return
        inner = supported_optimizers.recognised(optimizer)
        if inner is not None and inner not in _live and _has_parts(inner):
            _leave(inner, f"it is inside a {type(optimizer).__name__}, which shares the work out itself")
        self._find(optimizer)

    def _find(self, optimizer: Optimizer) -> ShardedOptimizer | None:
        if optimizer not in _live:
            if not _has_parts(optimizer):
                _strangers.add(type(optimizer).__name__)
                return None  # not now; a model may be wrapped later
            reason = unsupported_reason(optimizer, self.named)
            if reason:
                _leave(optimizer, reason)
            else:
                self._say_if_idle(optimizer)
                setattr(optimizer, _BY_PARTS, True)
                _live[optimizer] = self._sharded(optimizer)
        return _live[optimizer]

    def _say_if_idle(self, optimizer: Optimizer) -> None:
        """Remark that an optimizer has no parameter that can be cut, if so: its steps are stock's."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        entries = [entry for entry in map(sharded_grads.find, params) if entry is not None]
        if not any(shards.can_be_sharded(index) for shards, index in entries):
            minimum, largest = self._options["min_param_numel"], max(param.numel() for param in params)
            _remark(
                f"{type(optimizer).__name__} had nothing to divide at its first step: none of its {len(params)} "
                f"parameters is dense and has min_param_numel={minimum} elements (the largest has {largest})"
            )

    def _sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        options = self._options
        bucket_mb = options["gather_bucket_mb"]
        kind = kind_of(type(optimizer), self.named)
        if kind in (Kind.SLICES, Kind.SLICES_NAMED):
            gathers = ParamAllGathers(
                overlap=options["overlap_param_gather"],
                granularity=options["gather_granularity"],
                bucket_mb=bucket_mb,
                copy_engines=options["copy_engines"],
            )
            param_all_gather.after(optimizer, gathers)
            return ElementwiseOptimizer(
                optimizer,
                gathers,
                stand_down=_leave,
                quiet=kind is Kind.SLICES,
                in_fp32=options["main_params_in_fp32"],
            )
        return OwnedParamOptimizer(
            optimizer, ParamBroadcasts(min(bucket_mb, _HANDED_MB)), stand_down=_leave, steady=kind is Kind.WHOLE
        )


def sharded(optimizer: Optimizer) -> ShardedOptimizer | None:
    """Return what the feature knows of an optimizer that updates by parts, else None."""
    return _live.get(optimizer)


def release_all() -> None:
    """Make every optimizer in this process stock again, its state whole."""
    for optimizer, one in list(_live.items()):
        vars(optimizer).pop(_BY_PARTS, None)
        if one is not None:
            one.release()
    _live.clear()
    param_all_gather.settle()


def remarks() -> list[str]:
    """Return which optimizers were left stock, or had nothing to divide."""
    found = list(_remarks)
    if _strangers and not (_remarks or COUNTERS.optimizers):
        names = ", ".join(sorted(_strangers))
        found.append(f"{names} had nothing to divide: no parameter of a model whose gradients feature ddp reduces")
    return found


@torch._disable_dynamo
def _make_whole(optimizer: Optimizer) -> None:
    """Make an optimizer stock whose step is compiled; a graph reads memory, of which placeholders have none."""
    one = _live.get(optimizer)
    if one is not None:
        one.release()
        _leave(optimizer, COMPILED)
    with torch._C.DisableTorchFunctionSubclass():
        grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    pending = [grad for grad in grads if isinstance(grad, LazyTensor)]
    lazy_tensor.settle(pending)  # until all ranks have heard that nobody wants gradients by parts any more
    if one is None and not pending:
        vars(optimizer).pop(_BY_PARTS, None)


def _has_parts(optimizer: Optimizer) -> bool:
    return any(sharded_grads.find(param) is not None for group in optimizer.param_groups for param in group["params"])


def _leave(optimizer: Optimizer, reason: str) -> None:
    _live[optimizer] = None
    COUNTERS.stock_optimizers += 1
    text = f"{type(optimizer).__name__} stays stock: {reason}"
    if _remark(text):
        _log.warning("%s", text)


def _remark(text: str) -> bool:
    """Keep a remark, each once; return whether it is new."""
    new = text not in _remarks
    if new:
        _remarks.append(text)
    return new
