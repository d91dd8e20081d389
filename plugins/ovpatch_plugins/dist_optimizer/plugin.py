"""What is patched for feature ``dist_optimizer``, and why there."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ovpatch.hookspecs import Feature, Registrar, hookimpl, make_counters_hook
from ovpatch_plugins.dist_optimizer.options import OPTIONS

if TYPE_CHECKING:
    from ovpatch.overlap.data_parallel.grad_sharder import GradSharder
    from ovpatch_plugins.dist_optimizer.step_patches import NamedClasses, StepPatches

_CLIP = "torch.nn.utils.clip_grad"


@hookimpl
def ovpatch_feature() -> Feature:
    """Describe the feature."""
    return Feature(
        name="dist_optimizer",
        summary="ZeRO-1: each rank updates its shard of the parameters and keeps that shard's state.",
        options=OPTIONS,
        requires=("ddp",),
        distributed=True,
        work=("steps",),
    )


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; those of a model's steps once a model is sharded, if that is chosen."""
    from ovpatch_plugins.dist_optimizer.step_patches import NamedClasses, StepPatches

    named = NamedClasses.from_options(options)
    steps = StepPatches(named)
    steps.register(patches)
    if _is_chosen_by_model(options):
        _Registration.late = _LatePatches(functools.partial(_register_late, patches, options, named, steps))
    else:
        _Registration.late = _LatePatches()
        _register_work(patches, options, named, steps)


def _is_chosen_by_model(options: Mapping[str, Any]) -> bool:
    # A parameter that has a main one is sharded in any case, and its state may be loaded before its model is wrapped.
    return options["shard"] == "auto" and not options["main_params_in_fp32"]


class _LatePatches:
    """The patches of one registration that wait for the first sharded model.

    Args:
        apply: Registers and applies them; None if that is done.
    """

    def __init__(self, apply: Callable[[], None] | None = None) -> None:
        self._apply, self._refusal = apply, ""
        self._lock = threading.Lock()  # another model waits for the thread that applies

    def prepare(self) -> str:
        """Apply the patches, if they are not; return why that failed, or ""."""
        with self._lock:
            if self._apply is not None:
                try:
                    self._apply()
                except Exception as error:  # noqa: BLE001 - whatever it is, all ranks are told, and leave the model whole
                    self._refusal = str(error) or repr(error)
                self._apply = None
            return self._refusal


class _Registration:
    """What the newest ``ovpatch_register`` has left for ``ovpatch_activate``."""

    late = _LatePatches()


def _register_late(patches: Registrar, options: Mapping[str, Any], named: NamedClasses, steps: StepPatches) -> None:
    _register_work(patches, options, named, steps)
    patches.apply()


def _register_work(patches: Registrar, options: Mapping[str, Any], named: NamedClasses, steps: StepPatches) -> None:
    """Register the patches that sharded models need, beside those of optimizers' steps."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from ovpatch_plugins.dist_optimizer.clip_grad import wrap_clip, wrap_clip_grad_norm, wrap_norm, wrap_unscale
    from ovpatch_plugins.dist_optimizer.optimizer_attach import OptimizerAttachment, wrap_destroy

    optimizers = OptimizerAttachment(options, named)
    if options["overlap_param_gather"]:
        _register_readers(patches)
    patches.register_hook(
        "optimizer step",
        lambda: register_optimizer_step_pre_hook(optimizers.before_step),
        why="sees optimizers whose step is not patched, which are reported",
    )
    patches.register_patch(
        "torch.optim.optimizer.Optimizer.state_dict",
        wrap=optimizers.wrap_state_dict,
        why="is called by threads that save in the background, also in the middle of a step; hooks cannot hold that up",
    )
    if options["main_params_in_fp32"]:
        patches.register_patch(
            "torch.optim.optimizer.Optimizer.load_state_dict",
            wrap=optimizers.wrap_load,
            why="casts fp32 state to the dtype of half-precision parameters",
        )
    patches.register_patch(
        f"{_CLIP}.clip_grad_norm_",
        wrap=wrap_clip_grad_norm,
        why="is called by all ranks, so that the functions below it may sum norms by a collective",
    )
    patches.register_patch(
        f"{_CLIP}._get_total_norm",
        wrap=wrap_norm,
        why="is what clip_grad_norm_ calls, by whatever name the script took that, and get_total_norm itself",
    )
    patches.register_patch(f"{_CLIP}._clip_grads_with_norm_", wrap=wrap_clip, why="as _get_total_norm")
    patches.register_patch(
        "torch.distributed.distributed_c10d.destroy_process_group",
        wrap=wrap_destroy,
        why="is called by a rank that has finished, whose shards others may still need",
    )
    patches.register_patch(
        "torch.amp.grad_scaler.GradScaler._unscale_grads_",
        wrap=wrap_unscale,
        why="looks for infinities in this rank's gradients only, and decides by that whether this rank steps",
    )
    steps.divider = optimizers


def _register_readers(patches: Registrar) -> None:
    """Register what readers of a parameter whose all-gather is in flight go through."""
    from ovpatch.overlap.tensors.read_hooks import APPLIES_IN_C, READ_HOOKS, ContextHook, ModuleHook
    from ovpatch_plugins.dist_optimizer.optimizer_attach import wrap_zero_grad

    for target, wrap, why, optional in READ_HOOKS:
        patches.register_patch(target, wrap=wrap, optional=optional, why=why)
    patches.register_hook(
        "module call",
        ModuleHook,
        why="is where every module's call is looked up; scripted functions and extensions read the memory of the "
        "module's parameters, a global hook makes compiled modules warn, and a wrapper adds frames",
    )
    if APPLIES_IN_C:
        patches.register_hook(
            "autograd function",
            ContextHook,
            why="sees calls of autograd.Function whose apply() a script took before it was patched",
        )
    patches.register_patch(
        "torch.optim.optimizer.Optimizer.zero_grad",
        wrap=wrap_zero_grad,
        why="asks each parameter for its grad, mostly while they are pending, whose class answers slowly",
    )


@hookimpl
def ovpatch_activate(options: Mapping[str, Any]) -> Sequence[str]:
    """Shard the gradients of models that are wrapped from now on."""
    from ovpatch.overlap.data_parallel.grad_sharder import register_grad_sharder

    terms = dict(options)
    prepare = _Registration.late.prepare
    choice = functools.partial(_choose_sharding, terms, prepare) if options["shard"] == "auto" else None
    register_grad_sharder(functools.partial(_make_sharder, terms), terms, choice)
    return []


def _choose_sharding(options: Mapping[str, Any], prepare: Callable[[], str], *model: Any, **facts: Any) -> bool:
    """Return whether a model is sharded: a ``ShardingChoice``."""
    from ovpatch_plugins.dist_optimizer.sharding_choice import choose_sharding

    return choose_sharding(options, prepare, *model, **facts)


def _make_sharder(options: Mapping[str, Any], *model: Any, **facts: Any) -> GradSharder:
    """Return the sharder of a model: a ``GradSharderFactory``."""
    from ovpatch_plugins.dist_optimizer.sharded_grads import make_sharded_grads
    from ovpatch_plugins.dist_optimizer.sharding_choice import get_min_sharded_numel

    return make_sharded_grads(
        *model,
        **facts,
        min_numel=functools.partial(get_min_sharded_numel, options),
        max_inflight_bytes=options["grads_in_flight_mb"] * 2**20 or math.inf,
    )


@hookimpl
def ovpatch_deactivate() -> None:
    """Make all optimizers stock again."""
    from ovpatch.overlap.data_parallel.grad_sharder import unregister_grad_sharder

    unregister_grad_sharder()
    copies = sys.modules.get("ovpatch.overlap.copy_engine.selection")
    communicators = sys.modules.get("ovpatch.overlap.comm.collectives")
    optimizers = sys.modules.get("ovpatch_plugins.dist_optimizer.optimizer_attach")
    if optimizers is not None:
        optimizers.release_all()
    if communicators is not None:
        communicators.close_step_communicators()
    if copies is not None:
        copies.forget()


ovpatch_counters = make_counters_hook("ovpatch_plugins.dist_optimizer.report")


@hookimpl
def ovpatch_remarks() -> Sequence[str]:
    """Return which models are sharded and which optimizers were left stock, and why, and what was measured."""
    from ovpatch_plugins.dist_optimizer.report import list_remarks

    autotune = sys.modules.get("ovpatch.overlap.autotune.autotuner")
    return [*list_remarks(), *([] if autotune is None else autotune.report_lines("dist_optimizer"))]
