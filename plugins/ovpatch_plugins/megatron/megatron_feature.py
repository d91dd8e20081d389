"""What is patched for feature ``megatron``, and why there."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from ovpatch.hookspecs import Feature, Package, Registrar, make_feature_hooks
from ovpatch_plugins.megatron.megatron_options import OPTIONS
from ovpatch_plugins.megatron.megatron_report import COUNTERS, list_left

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


# --- what is patched ---


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

#: All patches, in the order of registration: of two on one target, the later one is the outer one.
PATCHES: Final = (
    # - Tensor-parallel linears
    MegatronPatch(
        f"{_LAYERS}.linear_with_grad_accumulation_and_async_allreduce",
        "linears.wrap_column",
        _LINEARS,
        "gathers and multiplies for column-parallel linears and for all others that call it",
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
        "multiplies, and scatters the product: a patch of either function alone could not overlap "
        "them",
    ),
    # - Pipelines
    MegatronPatch(
        f"{_PIPELINE}.schedules.forward_backward_pipelining_without_interleaving",
        "megatron_pipeline.wrap_schedule",
        _DELAYS,
        "is a step of a pipeline; the function stays Megatron's, and computes",
    ),
    MegatronPatch(
        f"{_PIPELINE}.schedules.forward_backward_pipelining_with_interleaving",
        "megatron_pipeline.wrap_interleaving",
        _DELAYS,
        "is a step of a pipeline that stays Megatron's, which the report says",
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
        "computes the weight gradients of linears without sequence parallelism; Megatron-Core "
        "delays those of "
        "Transformer Engine alone",
    ),
    MegatronPatch(
        f"{_GROUP}.register_grad_ready",
        "megatron_pipeline.wrap_register",
        _DELAYS,
        "counts a gradient, which it must not if the weight's product is still due",
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
        "is where parameters have changed, of each of a chain of optimizers",
    ),
    MegatronPatch(
        f"{_GROUP}.start_param_sync",
        "early_param_gather.wrap_start_param_sync",
        _GATHER,
        "starts a gather that the step has started",
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
        "is where a gather loses its validity",
    ),
)


def fits(names: Collection[str], counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return that the script uses Megatron-Core."""
    is_used = any(name == "megatron.core" or name.startswith("megatron.core.") for name in names)
    return "uses megatron.core" if is_used else ""


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; they wait for the import of ``megatron.core``."""
    delays = options["pipeline_schedule"] != "stock"
    is_on = {**options, "pipeline_schedule": delays}

    # The wrappers of one apply() share these objects, which hold what ranks have agreed on.
    @functools.cache
    def find_owner(module: str) -> Any:
        found: Any = importlib.import_module(f"ovpatch_plugins.megatron.{module}")
        if module == "megatron_pipeline":
            return found.PipelinePatches(options)
        if module == "linears":
            return found.LinearPatches(
                options, find_owner("megatron_pipeline").queue if delays else None
            )
        return found

    # Nothing of the feature is imported before a target is there.
    def wrap_late(original: Callable[..., Any], wrap: str) -> Callable[..., Any]:
        module, _, function = wrap.partition(".")
        wrapper: Callable[..., Any] = getattr(find_owner(module), function)(original)
        return wrapper

    for patch in PATCHES:
        if any(is_on[option] for option in patch.options):
            wrap = functools.partial(wrap_late, wrap=patch.wrap)
            patches.register_patch(patch.target, wrap=wrap, optional=True, why=patch.why)
    if delays:
        from ovpatch.overlap.pipelining.group_end import wrap_destroy_process_group

        patches.register_patch(
            "torch.distributed.distributed_c10d.destroy_process_group",
            wrap=wrap_destroy_process_group,
            why="ends the groups beside which the edges of a pipeline have NCCL communicators of their own",
        )


# --- life cycle ---


def activate(options: Mapping[str, Any]) -> None:
    """Attach to the models that are wrapped already."""
    if "megatron.core" in sys.modules and (
        options["ordered_grad_reduce"] or options["early_param_gather"]
    ):
        from ovpatch_plugins.megatron.bucket_order import take_over_all

        take_over_all()


def deactivate() -> None:
    """Leave all models to Megatron."""
    param_sync = sys.modules.get("ovpatch_plugins.megatron.early_param_gather")
    if param_sync is not None:
        param_sync.finish_all()
    pipeline = sys.modules.get("ovpatch_plugins.megatron.megatron_pipeline")
    if pipeline is not None:
        pipeline.close_all()
    takeover = sys.modules.get("ovpatch_plugins.megatron.bucket_order")
    if takeover is not None:
        takeover.give_back_all()


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters=COUNTERS,
    activate=activate,
    deactivate=deactivate,
    remarks=list_left,
    fits=fits,
)
