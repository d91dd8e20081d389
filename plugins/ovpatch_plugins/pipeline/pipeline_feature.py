"""The patches of feature ``pipeline``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from ovpatch.hookspecs import Feature, Package, Registrar, hookimpl, make_feature_hooks
from ovpatch_plugins.pipeline.options import OPTIONS, ActiveOptions

_SCHEDULES = "torch.distributed.pipelining.schedules"
_CLASSES = ("ScheduleGPipe", "Schedule1F1B", "PipelineScheduleMulti", "_PipelineScheduleRuntime")


FEATURE: Final = Feature(
    name="pipeline",
    summary="torch.distributed.pipelining: early sends, and weight gradients in the bubbles.",
    options=OPTIONS,
    default=False,
    distributed=True,
    packages=(Package("torch.distributed.pipelining", "install a build of torch that has it"),),
    work=("steps",),
)


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
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


def plan_pipeline(question: Mapping[str, Any], progress: Callable[[float], None]) -> Mapping[str, Any]:
    """Answer ``ovpatch pipeline --what-if``."""
    from ovpatch_plugins.pipeline.planning import plan

    return plan(question, progress)


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters="ovpatch_plugins.pipeline.report:COUNTERS",
    deactivate="ovpatch_plugins.pipeline.takeover:release_all",
    remarks="ovpatch_plugins.pipeline.report:write_remarks",
)
# No other feature answers this hook, so make_feature_hooks() has no argument for it.
vars(hooks)["ovpatch_plan"] = hookimpl(plan_pipeline)
