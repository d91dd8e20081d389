"""The patches of feature ``megatron``, and the reasons for their places."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from ovpatch.hookspecs import Feature, Package, Registrar, make_feature_hooks
from ovpatch_plugins.megatron.megatron_options import OPTIONS
from ovpatch_plugins.megatron.megatron_report import COUNTERS, list_fallbacks

_LAYERS: Final = "megatron.core.tensor_parallel.layers"
_PIPELINE: Final = "megatron.core.pipeline_parallel"
_GROUP: Final = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_MESSAGES: Final = (
    "recv_forward",
    "recv_backward",
    "send_forward",
    "send_backward",
    "send_forward_recv_backward",
    "send_backward_recv_forward",
)

FEATURE: Final = Feature(
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


# --- the patches ---


class MegatronPatch(NamedTuple):
    """A patch of one function of Megatron-Core.

    Attributes:
        target: Dotted path of the function.
        wrap: ``module.function`` below this package.
        options: The patch is registered if one of these options is on.
        why: The reason for this place.
    """

    target: str
    wrap: str
    options: tuple[str, ...]
    why: str


_LINEARS: Final = ("linears",)
_DELAYS: Final = ("pipeline_schedule",)
_ORDER: Final = ("ordered_grad_reduce",)
_GATHER: Final = ("early_param_gather",)

#: All patches, in the order of registration. Of two patches of one target, the later one is the outer one.
PATCHES: Final = (
    # - Tensor-parallel linears
    MegatronPatch(
        f"{_LAYERS}.linear_with_grad_accumulation_and_async_allreduce",
        "linears.wrap_column",
        _LINEARS,
        "gathers and multiplies for column-parallel linears and for all other callers",
    ),
    MegatronPatch(
        f"{_LAYERS}.linear_with_frozen_weight",
        "linears.wrap_column",
        _LINEARS,
        "does so for a frozen weight",
    ),
    MegatronPatch(
        f"{_LAYERS}.RowParallelLinear.forward",
        "linears.wrap_row",
        _LINEARS,
        "multiplies, and scatters the result: a patch of either function alone could not overlap them",
    ),
    # - Pipelines
    MegatronPatch(
        f"{_PIPELINE}.schedules.forward_backward_pipelining_without_interleaving",
        "megatron_pipeline.wrap_schedule",
        _DELAYS,
        "is a step of a pipeline; Megatron's own function still computes it",
    ),
    MegatronPatch(
        f"{_PIPELINE}.schedules.forward_backward_pipelining_with_interleaving",
        "megatron_pipeline.wrap_interleaving",
        _DELAYS,
        "is a step of a pipeline that Megatron runs, as the report shows",
    ),
    MegatronPatch(
        f"{_PIPELINE}.schedules.backward_step",
        "megatron_pipeline.wrap_backward",
        _DELAYS,
        "is a microbatch's backward",
    ),
    *(
        MegatronPatch(
            f"{_PIPELINE}.p2p_communication.P2PCommunicator.{method}",
            "megatron_pipeline.wrap_message",
            _DELAYS,
            "is a stage's message",
        )
        for method in _MESSAGES
    ),
    MegatronPatch(
        f"{_LAYERS}.linear_with_grad_accumulation_and_async_allreduce",
        "megatron_pipeline.wrap_linear",
        _DELAYS,
        "computes the weight gradients of linears without sequence parallelism; Megatron-Core delays only the weight "
        "gradients of Transformer Engine",
    ),
    MegatronPatch(
        f"{_GROUP}.register_grad_ready",
        "megatron_pipeline.wrap_register",
        _DELAYS,
        "counts a gradient, which it must not do while the GEMM of the weight's gradient is due",
    ),
    # - Reductions in one order
    MegatronPatch(
        "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel.__init__",
        "bucket_order.wrap_init",
        (*_ORDER, *_GATHER),
        "is where a model gets its buckets; Megatron has no hook for that",
    ),
    MegatronPatch(
        f"{_GROUP}.register_grad_ready",
        "bucket_order.wrap_register",
        _ORDER,
        "counts a gradient, and starts the reduction of a complete group",
    ),
    MegatronPatch(
        f"{_GROUP}.start_grad_sync",
        "bucket_order.wrap_start_grad_sync",
        _ORDER,
        "starts the reduction of a group, whose place in the order is known by then",
    ),
    MegatronPatch(
        f"{_GROUP}.finish_grad_sync",
        "bucket_order.wrap_finish_grad_sync",
        _ORDER,
        "is where a step's reductions end",
    ),
    MegatronPatch(
        f"{_GROUP}.reset",
        "bucket_order.wrap_reset",
        _ORDER,
        "is where a step begins, also after a backward that failed",
    ),
    # - Gathers of parameters from the end of step() on
    MegatronPatch(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.step_with_ready_grads",
        "early_param_gather.wrap_step",
        _GATHER,
        "is where each optimizer of a chain has changed its parameters",
    ),
    MegatronPatch(
        f"{_GROUP}.start_param_sync",
        "early_param_gather.wrap_start_param_sync",
        _GATHER,
        "would start a gather again that the step has started",
    ),
    MegatronPatch(
        f"{_GROUP}.finish_param_sync",
        "early_param_gather.wrap_finish_param_sync",
        _GATHER,
        "is where Megatron's hooks wait for a gather",
    ),
    MegatronPatch(
        f"{_GROUP}.finish_grad_sync",
        "early_param_gather.wrap_finish_grads",
        _GATHER,
        "is where Megatron requires a new gather",
    ),
)


def fits(names: Collection[str], counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return the remark that the script uses Megatron-Core; "" if it does not."""
    is_used = any(name == "megatron.core" or name.startswith("megatron.core.") for name in names)
    return "uses megatron.core" if is_used else ""


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches. They wait until the script imports ``megatron.core``."""
    delays_weight_grads = options["pipeline_schedule"] != "stock"
    is_on = {**options, "pipeline_schedule": delays_weight_grads}

    # The wrappers of one apply() share these objects, which have the settings on which ranks have agreed.
    @functools.cache
    def find_owner(module: str) -> Any:
        found: Any = importlib.import_module(f"ovpatch_plugins.megatron.{module}")
        if module == "megatron_pipeline":
            return found.PipelinePatches(options)
        if module == "linears":
            return found.LinearPatches(
                options, find_owner("megatron_pipeline").queue if delays_weight_grads else None
            )
        return found

    # No module of the feature is imported before the script imports a target.
    def wrap_late(original: Callable[..., Any], wrap: str) -> Callable[..., Any]:
        module, _, function = wrap.partition(".")
        wrapper: Callable[..., Any] = getattr(find_owner(module), function)(original)
        return wrapper

    for patch in PATCHES:
        if any(is_on[option] for option in patch.options):
            wrap = functools.partial(wrap_late, wrap=patch.wrap)
            patches.register_patch(patch.target, wrap=wrap, optional=True, why=patch.why)
    if delays_weight_grads:
        from ovpatch.overlap.pipelining.group_end import wrap_destroy_process_group

        patches.register_patch(
            "torch.distributed.distributed_c10d.destroy_process_group",
            wrap=wrap_destroy_process_group,
            why="ends the groups whose pipelines have separate NCCL communicators for their edges",
        )


# --- life cycle ---


def activate(options: Mapping[str, Any]) -> None:
    """Attach to the models that were wrapped before."""
    if "megatron.core" in sys.modules and (
        options["ordered_grad_reduce"] or options["early_param_gather"]
    ):
        from ovpatch_plugins.megatron.bucket_order import attach_to_all

        attach_to_all()


def deactivate() -> None:
    """Detach from all models."""
    early_param_gather = sys.modules.get("ovpatch_plugins.megatron.early_param_gather")
    if early_param_gather is not None:
        early_param_gather.finish_all()
    pipeline = sys.modules.get("ovpatch_plugins.megatron.megatron_pipeline")
    if pipeline is not None:
        pipeline.close_all()
    bucket_order = sys.modules.get("ovpatch_plugins.megatron.bucket_order")
    if bucket_order is not None:
        bucket_order.detach_all()


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters=COUNTERS,
    activate=activate,
    deactivate=deactivate,
    remarks=list_fallbacks,
    fits=fits,
)
