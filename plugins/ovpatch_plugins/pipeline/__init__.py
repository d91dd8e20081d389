"""Feature ``pipeline``: schedules of ``torch.distributed.pipelining`` with less bubble, and plain models as stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ovpatch_plugins.pipeline.block_stack import CutError as CutError
    from ovpatch_plugins.pipeline.cut_schedule import cut as cut
    from ovpatch_plugins.pipeline.loop_engine import LoopEngine as LoopEngine
    from ovpatch_plugins.pipeline.loop_engine import LoopError as LoopError
    from ovpatch_plugins.pipeline.pipeline_feature import wrap_destroy_process_group as wrap_destroy_process_group
    from ovpatch_plugins.pipeline.transport import find_group_reason as find_group_reason
    from ovpatch_plugins.pipeline.weight_stash import attach_optimizer as attach_optimizer

__all__ = ["CutError", "attach_optimizer", "cut"]


def __getattr__(name: str) -> Any:
    """Import what is public when it is first used: the feature's package is imported without torch."""
    if name == "cut":
        from ovpatch_plugins.pipeline.cut_schedule import cut

        return cut
    if name == "CutError":
        from ovpatch_plugins.pipeline.block_stack import CutError

        return CutError
    if name == "attach_optimizer":
        from ovpatch_plugins.pipeline.weight_stash import attach_optimizer

        return attach_optimizer
    if name in ("LoopEngine", "LoopError"):  # for other features, as what follows
        from ovpatch_plugins.pipeline import loop_engine

        return getattr(loop_engine, name)
    if name == "find_group_reason":
        from ovpatch_plugins.pipeline.transport import find_group_reason

        return find_group_reason
    if name == "wrap_destroy_process_group":
        from ovpatch_plugins.pipeline.pipeline_feature import wrap_destroy_process_group

        return wrap_destroy_process_group
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
