"""What is patched for feature ``megatron``, and why there."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ovpatch.hookspecs import Feature, Package, Registrar, hookimpl, make_counters_hook
from ovpatch_plugins.megatron.options import OPTIONS

_LAYERS = "megatron.core.tensor_parallel.layers"
_PIPELINE = "megatron.core.pipeline_parallel"
_GROUP = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_MESSAGES = (
    "recv_forward",
    "recv_backward",
    "send_forward",
    "send_backward",
    "send_forward_recv_backward",
    "send_backward_recv_forward",
)


@hookimpl
def ovpatch_feature() -> Feature:
    """Describe the feature."""
    return Feature(
        name="megatron",
        summary="Megatron-Core: linears hide collectives, stages send early, no late or stale values.",
        options=OPTIONS,
        default=False,
        reorders_products=True,
        distributed=True,
        packages=(Package("megatron.core", "pip install 'ovpatch[megatron]'"),),
        work=("calls", "reductions", "gathers", "pipeline_steps"),
        gains=(
            "{models:model}",
            "{calls:linear call} with hidden collectives",
            "{reductions:bucket} reduced during backward",
            "{gathers:bucket} gathered early",
            "{early_sends:early send}",
        ),
    )


@hookimpl
def ovpatch_fits(names: Collection[str], counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return that the script uses Megatron-Core."""
    is_used = any(name == "megatron.core" or name.startswith("megatron.core.") for name in names)
    return "uses megatron.core" if is_used else ""


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; they wait for the import of ``megatron.core``."""
    delays = options["pipeline_schedule"] != "stock"

    @functools.cache
    def find(module: str) -> Any:  # the linears' wrappers, of one apply(), share what ranks have agreed on
        found: Any = importlib.import_module(f"ovpatch_plugins.megatron.{module}")
        if module == "pipeline":
            return found.PipelinePatches(options)
        if module == "linears":
            return found.LinearPatches(options, find("pipeline").queue if delays else None)
        return found

    def patch(target: str, module: str, wrap: str, why: str) -> None:
        # Until a target is there, nothing of the feature is imported.
        patches.register_patch(
            target, wrap=lambda original: getattr(find(module), wrap)(original), optional=True, why=why
        )

    if options["linears"]:
        patch(
            f"{_LAYERS}.linear_with_grad_accumulation_and_async_allreduce",
            "linears",
            "wrap_column",
            "gathers and multiplies for column-parallel linears and for all others that call it",
        )
        patch(f"{_LAYERS}.linear_with_frozen_weight", "linears", "wrap_column", "does so for a frozen weight")
        patch(
            f"{_LAYERS}.RowParallelLinear.forward",
            "linears",
            "wrap_row",
            "multiplies, and scatters the product: a patch of either function alone could not overlap them",
        )
    if delays:
        from ovpatch_plugins.pipeline import wrap_destroy_process_group

        patch(
            f"{_PIPELINE}.schedules.forward_backward_pipelining_without_interleaving",
            "pipeline",
            "wrap_schedule",
            "is a step of a pipeline; the function stays Megatron's, and computes",
        )
        patch(
            f"{_PIPELINE}.schedules.forward_backward_pipelining_with_interleaving",
            "pipeline",
            "wrap_interleaving",
            "is a step of a pipeline that stays Megatron's, which the report says",
        )
        patch(f"{_PIPELINE}.schedules.backward_step", "pipeline", "wrap_backward", "is a microbatch's backward")
        for method in _MESSAGES:
            patch(
                f"{_PIPELINE}.p2p_communication.P2PCommunicator.{method}",
                "pipeline",
                "wrap_message",
                "is a stage's message",
            )
        patches.register_patch(
            "torch.distributed.distributed_c10d.destroy_process_group",
            wrap=wrap_destroy_process_group,
            why="ends the groups beside which the edges of a pipeline have NCCL communicators of their own",
        )
        patch(
            f"{_LAYERS}.linear_with_grad_accumulation_and_async_allreduce",
            "pipeline",
            "wrap_linear",
            "computes the weight gradients of linears without sequence parallelism; Megatron-Core delays those of "
            "Transformer Engine alone",
        )
        patch(
            f"{_GROUP}.register_grad_ready",
            "pipeline",
            "wrap_register",
            "counts a gradient, which it must not if the weight's product is still due",
        )
    if options["ordered_grad_reduce"] or options["early_param_gather"]:
        patch(
            "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel.__init__",
            "takeover",
            "wrap_init",
            "is where a model gets its buckets; Megatron has no hook for that",
        )
    if options["ordered_grad_reduce"]:
        patch(
            f"{_GROUP}.register_grad_ready",
            "takeover",
            "wrap_register",
            "counts a gradient, and starts the reduction of a complete group",
        )
        patch(
            f"{_GROUP}.start_grad_sync",
            "takeover",
            "wrap_start_grad_sync",
            "starts the reduction of a group, whose place in the order is known by then",
        )
        patch(f"{_GROUP}.finish_grad_sync", "takeover", "wrap_finish_grad_sync", "is where a step's reductions end")
        patch(f"{_GROUP}.reset", "takeover", "wrap_reset", "is where a step begins, also after a backward that failed")
    if options["early_param_gather"]:
        patch(
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.step_with_ready_grads",
            "param_sync",
            "wrap_step",
            "is where parameters have changed, of each of a chain of optimizers",
        )
        patch(
            f"{_GROUP}.start_param_sync",
            "param_sync",
            "wrap_start_param_sync",
            "starts a gather that the step has started",
        )
        patch(
            f"{_GROUP}.finish_param_sync",
            "param_sync",
            "wrap_finish_param_sync",
            "is where Megatron's hooks wait for a gather",
        )
        patch(f"{_GROUP}.finish_grad_sync", "param_sync", "wrap_finish_grads", "is where a gather loses its validity")


@hookimpl
def ovpatch_activate(options: Mapping[str, Any]) -> None:
    """Take over the models that are wrapped already."""
    if "megatron.core" in sys.modules and (options["ordered_grad_reduce"] or options["early_param_gather"]):
        from ovpatch_plugins.megatron.takeover import take_over_all

        take_over_all()


@hookimpl
def ovpatch_deactivate() -> None:
    """Give all models back to Megatron."""
    param_sync = sys.modules.get("ovpatch_plugins.megatron.param_sync")
    if param_sync is not None:
        param_sync.finish_all()
    pipeline = sys.modules.get("ovpatch_plugins.megatron.pipeline")
    if pipeline is not None:
        pipeline.close_all()
    takeover = sys.modules.get("ovpatch_plugins.megatron.takeover")
    if takeover is not None:
        takeover.give_back_all()


ovpatch_counters = make_counters_hook("ovpatch_plugins.megatron.report")


@hookimpl
def ovpatch_remarks() -> Sequence[str]:
    """Return what is left to Megatron, and why."""
    takeover = sys.modules.get("ovpatch_plugins.megatron.takeover")
    return [] if takeover is None else list(takeover.list_left())
