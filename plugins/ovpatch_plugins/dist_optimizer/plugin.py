"""What is patched for feature ``dist_optimizer``, and why there."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ovpatch.hookspecs import Feature, Registrar, hookimpl, make_counters_hook
from ovpatch_plugins.dist_optimizer.options import OPTIONS

_CLIP = "torch.nn.utils.clip_grad"


@hookimpl
def ovpatch_feature() -> Feature:
    """Describe the feature."""
    return Feature(
        name="dist_optimizer",
        summary="ZeRO-1: each rank updates its shard of the parameters and keeps that shard's state.",
        options=OPTIONS,
        requires=("ddp",),
        default=False,
        distributed=True,
        work=("steps",),
    )


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from ovpatch.overlap.tensors.pending_param import APPLIES_IN_C, READ_HOOKS, ContextHook, ModuleHook, wrap_unflatten
    from ovpatch_plugins.dist_optimizer.clip_grad import wrap_clip, wrap_clip_grad_norm, wrap_norm, wrap_unscale
    from ovpatch_plugins.dist_optimizer.takeover import StepPatches, list_step_classes, wrap_destroy, wrap_zero_grad

    if options["overlap_param_gather"]:
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
            "torch.distributed.tensor.parallel.ddp._unflatten_tensor",
            wrap=wrap_unflatten,
            optional=True,
            why="makes the DTensors that stand in parameters' places under DistributedDataParallel(device_mesh=)",
        )
        patches.register_patch(
            "torch.optim.optimizer.Optimizer.zero_grad",
            wrap=wrap_zero_grad,
            why="asks each parameter for its grad, mostly while they are pending, whose class answers slowly",
        )
    steps = StepPatches(options)
    patches.register_hook(
        "optimizer step",
        lambda: register_optimizer_step_pre_hook(steps.before_step),
        why="sees optimizers whose step is not patched, which are reported",
    )
    patches.register_patch(
        "torch.optim.optimizer.Optimizer.state_dict",
        wrap=steps.wrap_state_dict,
        why="is called by threads that save in the background, also in the middle of a step; hooks cannot hold that up",
    )
    if options["main_params_in_fp32"]:
        patches.register_patch(
            "torch.optim.optimizer.Optimizer.load_state_dict",
            wrap=steps.wrap_load,
            why="casts fp32 state to the dtype of half-precision parameters",
        )
    for name in list_step_classes(steps.named):
        patches.register_patch(
            f"{name}.step",
            wrap=steps.wrap_step,
            why="is the innermost place: torch's step hooks, official and global, are outside of the script's own "
            "hooks and closures, which would see shards",
        )
    patches.register_patch(
        f"{_CLIP}.clip_grad_norm_",
        wrap=wrap_clip_grad_norm,
        why="is called by all ranks, so that the functions below it may sum norms by a collective",
    )
    patches.register_patch(
        f"{_CLIP}._get_total_norm",
        wrap=wrap_norm,
        why="is what clip_grad_norm_ and get_total_norm call, by whatever name the script imported them",
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


@hookimpl
def ovpatch_activate(options: Mapping[str, Any]) -> Sequence[str]:
    """Shard the gradients of models that are wrapped from now on."""
    from ovpatch.overlap.data_parallel.grad_sharder import register_grad_sharder
    from ovpatch_plugins.dist_optimizer.main_params import min_sharded_numel
    from ovpatch_plugins.dist_optimizer.sharded_grads import make_sharded_grads

    choice = None
    if options["shard"] == "auto":
        from ovpatch_plugins.dist_optimizer.sharding_choice import choose_sharding
        from ovpatch_plugins.dist_optimizer.takeover import note_choice

        choice = functools.partial(choose_sharding, dict(options), note_choice)
    factory = functools.partial(
        make_sharded_grads,
        min_numel=functools.partial(min_sharded_numel, dict(options)),
        max_inflight_bytes=options["grads_in_flight_mb"] * 2**20 or math.inf,
    )
    register_grad_sharder(factory, dict(options), choice)
    return []


@hookimpl
def ovpatch_deactivate() -> None:
    """Make all optimizers stock again."""
    from ovpatch.overlap.data_parallel.grad_sharder import unregister_grad_sharder

    unregister_grad_sharder()
    copies = sys.modules.get("ovpatch.overlap.copy_engine.selection")
    communicators = sys.modules.get("ovpatch.overlap.comm.collectives")
    optimizers = sys.modules.get("ovpatch_plugins.dist_optimizer.takeover")
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
    optimizers = sys.modules.get("ovpatch_plugins.dist_optimizer.takeover")
    autotune = sys.modules.get("ovpatch.overlap.autotune.autotuner")
    remarks = [] if optimizers is None else list(optimizers.remarks())
    return remarks + ([] if autotune is None else autotune.report_lines("dist_optimizer"))
