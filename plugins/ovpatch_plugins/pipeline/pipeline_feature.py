"""The patches of feature ``pipeline``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from ovpatch.hookspecs import Feature, Package, Registrar, make_feature_hooks
from ovpatch.overlap.pipelining.group_end import wrap_destroy_process_group
from ovpatch.overlap.pipelining.order_table import TORCH_ORDERS
from ovpatch_plugins.pipeline.options import OPTIONS

_SCHEDULES = "torch.distributed.pipelining.schedules"
# Torch's classes that define their own _step_microbatches. All others inherit one of these.
_CLASSES = (
    *((_SCHEDULES, name) for name in TORCH_ORDERS),
    (_SCHEDULES, "PipelineScheduleMulti"),
    (_SCHEDULES, "_PipelineScheduleRuntime"),
    ("ovpatch_plugins.pipeline.variants.bidirectional", "ScheduleBidirectional"),
)


FEATURE: Final = Feature(
    name="pipeline",
    summary="torch.distributed.pipelining: early sends, and weight gradients in the bubbles.",
    options=OPTIONS,
    default=False,
    distributed=True,
    packages=(Package("torch.distributed.pipelining", "install a build of torch that has it"),),
    work=("steps",),
    gains=(
        "{schedules:schedule}",
        "{steps:step}",
        "{early_sends:input gradient} sent early",
        "{weight_grads:weight gradient} computed in bubbles",
    ),
)


# Names in a script that runs a pipeline. The report shows the first that it finds.
_SCRIPT_NAMES: Final = (
    *TORCH_ORDERS,
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
    "get_schedule_class",
)


def fits(names: Collection[str], counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return the schedule of torch.distributed.pipelining that the script uses."""
    used = [name for name in _SCRIPT_NAMES if name in names]
    return f"uses {used[0]}" if used else ""


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; they wait for the import of ``torch.distributed.pipelining``."""
    # Remarks of an earlier apply() must not appear in the new report.
    report = sys.modules.get("ovpatch_plugins.pipeline.pipeline_report")
    if report is not None:
        report.drop_remarks()
    for module, owner in _CLASSES:
        patches.register_patch(
            f"{module}.{owner}._step_microbatches",
            wrap=functools.partial(_wrap_step, owner=owner, options=options),
            why="runs the microbatches of a step, between splitting inputs and merging outputs; keeps its name and "
            "meaning in torch 2.11 to 2.15. dw_builder, the official hook, splits the backward but "
            "sends no earlier.",
        )
    patches.register_patch(
        "torch.distributed.distributed_c10d.destroy_process_group",
        wrap=wrap_destroy_process_group,
        why="ends the groups for which the edges of a pipeline have their own NCCL communicators or memory",
    )


def _wrap_step(
    original: Callable[..., Any], owner: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    # The manager wraps a method once the script has imported its class, so apply() itself imports no runtime.
    from ovpatch_plugins.pipeline.pipeline_attach import SchedulePatches

    return SchedulePatches(options).wrap_step(original, owner)


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters="ovpatch_plugins.pipeline.pipeline_counters:COUNTERS",
    deactivate="ovpatch_plugins.pipeline.pipeline_attach:release_all",
    remarks="ovpatch_plugins.pipeline.pipeline_report:write_remarks",
    fits=fits,
)
