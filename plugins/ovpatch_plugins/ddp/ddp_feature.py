"""The patches of feature ``ddp``, with the reason for each place."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ovpatch.hookspecs import Feature, Registrar, list_failures, make_feature_hooks
from ovpatch_plugins.ddp.ddp_options import OPTIONS, REMOVED_OPTIONS

_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"

# This method exists since torch 2.15.
_FINALIZES = "_check_manual_backward_finalization_supported"

# Methods that need the C++ reducer, each with the reason that the report shows.
_NEEDS_STOCK = {
    "register_comm_hook": "a communication hook is registered, which reduces buckets of the C++ reducer",
    "_register_builtin_comm_hook": "a communication hook is registered, which reduces buckets of the C++ reducer",
    "_register_fused_optim": "an optimizer is fused into the reduction",
    "_set_sparse_metadata": "sparse metadata is set, which the C++ reducer uses",
    _FINALIZES: "the script finalizes its backwards, which takes the C++ reducer",
    "join": "join() shadows the collectives of the C++ reducer",
    "join_hook": "Join([...]) shadows the collectives of the C++ reducer",
}


FEATURE: Final = Feature(
    name="ddp",
    summary="DistributedDataParallel reduces gradients where they are, while backward computes.",
    options=OPTIONS,
    removed_options=REMOVED_OPTIONS,
    distributed=True,
    work=("backwards",),
    gains=(
        "{models:model}",
        "{collectives_in_backward} of {collectives:bucket} reduced during backward",
        "{saved_bytes:bytes} less memory a rank",
    ),
)


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; all of them are methods of the stock class, which itself stays."""
    from torch.nn.parallel import DistributedDataParallel

    from ovpatch_plugins.ddp.ddp_attach import DDPAttachment

    attachment = DDPAttachment(options)
    patches.register_patch(
        f"{_DDP}.__init__",
        wrap=attachment.wrap_init,
        why="distinguishes construction, in which all ranks take part, from unpickling and copying",
    )
    patches.register_patch(
        f"{_DDP}._ddp_init_helper",
        wrap=attachment.wrap_init_helper,
        why="builds the reducer for the constructor and for unpickling; keeps its name and signature in torch 2.11 to "
        "2.15, while the arguments of dist.Reducer differ in each. register_comm_hook, the "
        "official way, offers one slot that scripts use themselves.",
    )
    patches.register_patch(
        f"{_DDP}._post_forward",
        wrap=attachment.wrap_post_forward,
        why="knows the outputs, which every backward passes first; the stock class shows them to its reducer only "
        "if it searches unused parameters",
    )
    patches.register_patch(
        "torch.distributed.autograd.context.__enter__",
        wrap=attachment.wrap_autograd_context,
        optional=True,
        why="in such a context the engine gives gradients to the context instead of the parameters, which only the C++ "
        "reducer can follow; there is no hook for its beginning",
    )
    for name, reason in _NEEDS_STOCK.items():
        if name == _FINALIZES and not hasattr(DistributedDataParallel, name):
            continue
        patches.register_patch(
            f"{_DDP}.{name}",
            wrap=functools.partial(attachment.wrap_needs_stock, reason=reason),
            optional=name.startswith("_"),
            why="accepts or uses a C++ reducer only, so the stock reducer is restored before",
        )


def list_early_models() -> Sequence[str]:
    """Return the models that were wrapped too early."""
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    torch = sys.modules.get("torch")
    # Without a process group no model can have been wrapped, and the walk over all objects is not
    # needed.
    if (
        distributed is None
        or torch is None
        or not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
    ):
        return []
    early = [
        type(ddp.module).__name__
        for ddp in _list_instances(distributed.DistributedDataParallel)
        if _has_stock_reducer(ddp)
    ]
    return [
        f"{name} was wrapped in DistributedDataParallel before ovpatch.apply() and keeps the "
        "stock reducer: move the line ovpatch.apply() above the line that wraps it"
        for name in early
    ]


def _list_instances(wanted: type) -> Sequence[Any]:
    """Return the objects of a class in this process.

    Each class is checked once, because there may be a million objects. isinstance() would read the ``__class__`` of
    foreign objects, and a set of classes would hash them, which may run their code.
    """
    objects = gc.get_objects()
    # The list keeps the classes alive, so each id() belongs to one class.
    classes = list(map(type, objects))
    by_id = dict(zip(map(id, classes), classes, strict=True))
    matching = {key for key, cls in by_id.items() if issubclass(cls, wanted)}
    pairs = zip(classes, objects, strict=True) if matching else ()
    return [found for cls, found in pairs if id(cls) in matching]


def list_remarks() -> Sequence[str]:
    """Return the models with the stock reducer and its reasons, or the reason for no model."""
    from ovpatch_plugins.ddp import ddp_report as report
    from ovpatch_plugins.ddp.ddp_report import COUNTERS

    if not (COUNTERS.models or COUNTERS.stock_models or report.REMARKS):
        # The report shows the error itself if wrapping a model has failed.
        reason = "" if list_failures("ddp") else report.describe_other_reducers()
        return [reason] if reason else []
    return list(report.REMARKS)


def _has_stock_reducer(ddp: Any) -> bool:
    # The first model with our reducer imports it.
    ours = sys.modules.get("ovpatch_plugins.ddp.reducer_stub")
    reducer = vars(ddp).get("reducer")
    is_stock = reducer is not None and (ours is None or not isinstance(reducer, ours.ReducerStub))
    return is_stock and ddp.process_group.size() > 1


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters="ovpatch_plugins.ddp.ddp_report:COUNTERS",
    activate=list_early_models,
    deactivate="ovpatch_plugins.ddp.ddp_attach:restore_all",
    remarks=list_remarks,
)
