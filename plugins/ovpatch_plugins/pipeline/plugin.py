"""The patches of feature ``pipeline``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ovpatch.hookspecs import Feature, Package, Registrar, hookimpl, make_counters_hook
from ovpatch_plugins.pipeline.options import OPTIONS, ActiveOptions

_SCHEDULES = "torch.distributed.pipelining.schedules"
# Names in a script that runs a pipeline, the most telling first.
_SCRIPT_NAMES = (
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
    "get_schedule_class",
)
_CLASSES = ("ScheduleGPipe", "Schedule1F1B", "PipelineScheduleMulti", "_PipelineScheduleRuntime")


@hookimpl
def ovpatch_feature() -> Feature:
    """Describe the feature."""
    return Feature(
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


@hookimpl
def ovpatch_fits(names: Collection[str], counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return the schedule of torch.distributed.pipelining that the script uses."""
    used = [name for name in _SCRIPT_NAMES if name in names]
    return f"uses {used[0]}" if used else ""


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; they wait for the import of ``torch.distributed.pipelining``."""
    report = sys.modules.get("ovpatch_plugins.pipeline.report")
    if report is not None:
        report.drop_remarks()  # of an earlier apply()
    patches.register_hook(
        "schedules of cut()",
        functools.partial(ActiveOptions, options),
        why="schedules in two directions are no classes of torch, and run by the feature while it is on",
    )
    for owner in _CLASSES:
        patches.register_patch(
            f"{_SCHEDULES}.{owner}._step_microbatches",
            wrap=functools.partial(_wrap_step, owner=owner, options=options),
            why="runs the microbatches of a step, between splitting inputs and merging outputs; keeps its name and "
            "meaning in torch 2.11 to 2.15. dw_builder, the official hook, splits the backward but sends no earlier.",
        )
    patches.register_patch(
        "torch.distributed.distributed_c10d.destroy_process_group",
        wrap=wrap_destroy_process_group,
        why="ends the groups beside which the edges of a pipeline have NCCL communicators or memory of their own",
    )


@hookimpl
def ovpatch_deactivate() -> None:
    """Give all stages back to stock."""
    takeover = sys.modules.get("ovpatch_plugins.pipeline.takeover")
    if takeover is not None:
        takeover.release_all()


ovpatch_counters = make_counters_hook("ovpatch_plugins.pipeline.report")


@hookimpl
def ovpatch_remarks() -> Sequence[str]:
    """Return what ran and what it cost, and why schedules or linears were left to stock."""
    from ovpatch_plugins.pipeline.report import write_remarks

    return write_remarks()


def wrap_destroy_process_group(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``destroy_process_group``: edges of a pipeline end before its group does."""

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        transport = sys.modules.get("ovpatch_plugins.pipeline.transport")
        if transport is not None:
            transport.close_edges(None if group is sys.modules["torch"].distributed.group.WORLD else group)
        original(group)

    return destroy_process_group


def _wrap_step(original: Callable[..., Any], owner: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    from ovpatch_plugins.pipeline.takeover import Takeover

    return Takeover(options).wrap_step(original, owner)


@hookimpl
def ovpatch_plan(question: Mapping[str, Any], progress: Callable[[float], None]) -> Mapping[str, Any]:
    """Answer ``ovpatch pipeline --what-if``."""
    from ovpatch_plugins.pipeline.planning import plan

    return plan(question, progress)
