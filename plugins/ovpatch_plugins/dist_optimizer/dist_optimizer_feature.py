"""The description, the patches and the life cycle of feature ``dist_optimizer``."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ovpatch.hookspecs import Feature, Registrar, make_feature_hooks
from ovpatch_plugins.dist_optimizer.dist_optimizer_options import OPTIONS

if TYPE_CHECKING:
    from ovpatch.overlap.data_parallel.grad_sharder import GradSharder
    from ovpatch_plugins.dist_optimizer.step_patches import NamedClasses, StepPatches

_CLIP: Final = "torch.nn.utils.clip_grad"

# Gradients of this size belong to a model whose optimizer state is worth sharding.
_LARGE_GRADS_BYTES: Final = 2**30


FEATURE: Final = Feature(
    name="dist_optimizer",
    summary="ZeRO-1: each rank updates its shard of the parameters and keeps that shard's state.",
    options=OPTIONS,
    requires=("ddp",),
    distributed=True,
    work=("steps",),
    gains=(
        "{optimizers:optimizer}",
        "{gathers_overlapped} of {gathers:gather} hidden under the next forward",
        "{state_bytes_whole-state_bytes:bytes} less memory a rank",
    ),
)


def fits(names: Collection[str], counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return the reason if each rank keeps the full optimizer state of a large model."""
    ddp = counters.get("ddp", {})
    grad_bytes = ddp.get("bytes_reduced", 0) // max(ddp.get("backwards", 0), 1)
    if grad_bytes < _LARGE_GRADS_BYTES:
        return ""
    size = f"{grad_bytes / 2**30:.1f} GiB"
    return f"keeps the full optimizer state for {size} of gradients on each rank"


# --- registration ---


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches.

    If each model is chosen, the patches that only sharded models need follow with the first one.
    """
    from ovpatch_plugins.dist_optimizer.step_patches import NamedClasses, StepPatches

    named = NamedClasses.from_options(options)
    steps = StepPatches(named)
    steps.register(patches)
    if _is_chosen_by_model(options):
        apply = functools.partial(_register_late, patches, options, named, steps)
        _Registration.late = _LatePatches(apply)
    else:
        _Registration.late = _LatePatches()
        _register_work(patches, options, named, steps)


def _is_chosen_by_model(options: Mapping[str, Any]) -> bool:
    # A parameter with a main parameter is sharded in any case, and a script may load its state
    # before it wraps the model.
    return options["shard"] == "auto" and not options["main_params_in_fp32"]


class _LatePatches:
    """The patches of one registration that wait for the first sharded model.

    Args:
        apply: Registers and applies the patches; None if they are applied already.
    """

    def __init__(self, apply: Callable[[], None] | None = None) -> None:
        self._apply = apply
        # The reason why the patches could not be applied, or "".
        self._refusal = ""
        # Another thread that wraps a model must wait until the patches are there.
        self._lock = threading.Lock()

    def prepare(self) -> str:
        """Apply the patches at the first call; return the reason for a failure, or ""."""
        with self._lock:
            if self._apply is not None:
                try:
                    self._apply()
                except Exception as error:  # noqa: BLE001 - whatever failed
                    # All ranks must learn it and leave the model unsharded.
                    self._refusal = str(error) or repr(error)
                self._apply = None
            return self._refusal


class _Registration:
    """The values that the newest :func:`register` has left for :func:`activate`."""

    late = _LatePatches()


def _register_late(
    patches: Registrar, options: Mapping[str, Any], named: NamedClasses, steps: StepPatches
) -> None:
    _register_work(patches, options, named, steps)
    patches.apply()


def _register_work(
    patches: Registrar, options: Mapping[str, Any], named: NamedClasses, steps: StepPatches
) -> None:
    """Register the patches that sharded models need, apart from those of optimizers' steps."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from ovpatch.overlap.tensors.read_hooks import ARGUMENT_HOOKS
    from ovpatch_plugins.dist_optimizer.clip_grad import (
        wrap_clip,
        wrap_clip_grad_norm,
        wrap_norm,
        wrap_unscale,
    )
    from ovpatch_plugins.dist_optimizer.optimizer_attach import OptimizerAttachment, wrap_destroy

    optimizers = OptimizerAttachment(options, named)
    for target, wrap, why, optional in ARGUMENT_HOOKS:
        patches.register_patch(target, wrap=wrap, optional=optional, why=why)
    # Without overlap no parameter is pending when step() returns.
    if options["overlap_param_gather"]:
        _register_readers(patches)
    patches.register_hook(
        "optimizer step",
        lambda: register_optimizer_step_pre_hook(optimizers.before_step),
        why="sees optimizers whose step is not patched, for the report",
    )
    patches.register_patch(
        "torch.optim.optimizer.Optimizer.state_dict",
        wrap=optimizers.wrap_state_dict,
        why="threads that save in the background call it, also during a step, and no hook can make them wait",
    )
    if options["main_params_in_fp32"]:
        patches.register_patch(
            "torch.optim.optimizer.Optimizer.load_state_dict",
            wrap=optimizers.wrap_load,
            why="casts fp32 state to the dtype of bf16 and fp16 parameters",
        )
    patches.register_patch(
        f"{_CLIP}.clip_grad_norm_",
        wrap=wrap_clip_grad_norm,
        why="all ranks call it, so the functions that it calls may sum norms by a collective",
    )
    patches.register_patch(
        f"{_CLIP}._get_total_norm",
        wrap=wrap_norm,
        why="clip_grad_norm_ calls it, under whatever name the script imported that, and so does get_total_norm",
    )
    patches.register_patch(
        f"{_CLIP}._clip_grads_with_norm_", wrap=wrap_clip, why="see _get_total_norm"
    )
    patches.register_patch(
        "torch.distributed.distributed_c10d.destroy_process_group",
        wrap=wrap_destroy,
        why="a rank that has finished calls it, and peers may still need its shards",
    )
    patches.register_patch(
        "torch.amp.grad_scaler.GradScaler._unscale_grads_",
        wrap=wrap_unscale,
        why="finds infinities in this rank's gradients only, and thus decides whether this rank steps",
    )
    # From here on the patched steps are sharded.
    steps.attachment = optimizers


def _register_readers(patches: Registrar) -> None:
    """Register the functions through which readers of pending parameters pass."""
    from ovpatch.overlap.tensors.read_hooks import (
        APPLIES_IN_C,
        READ_HOOKS,
        ContextHook,
        ModuleHook,
        wrap_unflatten,
    )
    from ovpatch_plugins.dist_optimizer.optimizer_attach import wrap_zero_grad

    for target, wrap, why, optional in READ_HOOKS:
        patches.register_patch(target, wrap=wrap, optional=optional, why=why)
    patches.register_hook(
        "module call",
        ModuleHook,
        why="every module's call is looked up there. Scripted functions and extensions read the "
        "memory of the module's parameters; a global hook makes compiled modules warn, and a "
        "wrapper adds frames",
    )
    # Otherwise READ_HOOKS has a Python function that apply() calls.
    if APPLIES_IN_C:
        patches.register_hook(
            "autograd function",
            ContextHook,
            why="sees calls of an autograd.Function whose apply() a script took before the patch",
        )
    patches.register_patch(
        "torch.distributed.tensor.parallel.ddp._unflatten_tensor",
        wrap=wrap_unflatten,
        optional=True,
        why="makes the DTensors in the places of parameters under DistributedDataParallel(device_mesh=)",
    )
    patches.register_patch(
        "torch.optim.optimizer.Optimizer.zero_grad",
        wrap=wrap_zero_grad,
        why="reads the grad of each parameter, mostly while they are pending, and reads through their class are slow",
    )


# --- activation ---


def activate(options: Mapping[str, Any]) -> None:
    """Shard the gradients of models that the script wraps after this call."""
    from ovpatch.overlap.data_parallel.grad_sharder import register_grad_sharder

    # All ranks must have the same options, and they are compared in messages of plain dictionaries.
    terms = dict(options)
    choice = None
    if options["shard"] == "auto":
        choice = functools.partial(_choose_sharding, terms, _Registration.late.prepare)
    register_grad_sharder(functools.partial(_make_sharder, terms), terms, choice)


def _choose_sharding(
    options: Mapping[str, Any], prepare: Callable[[], str], *model: Any, **facts: Any
) -> bool:
    """Return whether a model is sharded: a ``ShardingChoice``."""
    from ovpatch_plugins.dist_optimizer.sharding_choice import choose_sharding

    return choose_sharding(options, prepare, *model, **facts)


def _make_sharder(
    options: Mapping[str, Any],
    params: Sequence[Any],
    names: Sequence[str],
    group: Any,
    *,
    layout: Any,
    **facts: Any,
) -> GradSharder:
    """Return the sharder of a model: a ``GradSharderFactory``."""
    from ovpatch_plugins.dist_optimizer.sharded_grads import make_sharded_grads
    from ovpatch_plugins.dist_optimizer.sharding_choice import (
        choose_shard_layout,
        get_min_sharded_numel,
    )

    return make_sharded_grads(
        params,
        names,
        group,
        choose_shard_layout(options, params, group, layout),
        **facts,
        min_numel=functools.partial(get_min_sharded_numel, options),
        # 0 means no limit.
        max_inflight_bytes=options["grads_in_flight_mb"] * 2**20 or math.inf,
    )


def deactivate() -> None:
    """Leave all optimizers to torch."""
    from ovpatch.overlap.data_parallel.grad_sharder import unregister_grad_sharder

    # First, so that no thread wraps another sharded model.
    unregister_grad_sharder()
    # Modules that were not imported have nothing to release.
    copies = sys.modules.get("ovpatch.overlap.kernels.copy_choice")
    communicators = sys.modules.get("ovpatch.overlap.comm.step_communicators")
    optimizers = sys.modules.get("ovpatch_plugins.dist_optimizer.optimizer_attach")
    # Optimizers first, because their last gathers need the other two.
    if optimizers is not None:
        optimizers.release_all()
    if communicators is not None:
        communicators.close_step_communicators()
    if copies is not None:
        copies.forget()


# --- the report ---


def report_remarks() -> Sequence[str]:
    """Return the models that are sharded, the optimizers that fell back, and measurements."""
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import list_remarks

    autotune = sys.modules.get("ovpatch.overlap.kernels.autotuner")
    measured = [] if autotune is None else autotune.report_lines("dist_optimizer")
    return [*list_remarks(), *measured]


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters="ovpatch_plugins.dist_optimizer.dist_optimizer_report:COUNTERS",
    activate=activate,
    deactivate=deactivate,
    remarks=report_remarks,
    fits=fits,
)
