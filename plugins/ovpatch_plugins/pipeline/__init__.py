"""Feature ``pipeline``: schedules of ``torch.distributed.pipelining`` with less bubble, and plain models as stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ovpatch_plugins.pipeline.cutting.block_stack import CutError as CutError
    from ovpatch_plugins.pipeline.cutting.cut_schedule import cut as cut
    from ovpatch_plugins.pipeline.variants.weight_stash import attach_optimizer as attach_optimizer

__all__ = ["CutError", "attach_optimizer", "cut"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because the feature's package is imported without torch."""
    if name == "cut":
        from ovpatch_plugins.pipeline.cutting.cut_schedule import cut

        return cut
    if name == "CutError":
        from ovpatch_plugins.pipeline.cutting.block_stack import CutError

        return CutError
    if name == "attach_optimizer":
        from ovpatch_plugins.pipeline.variants.weight_stash import attach_optimizer

        return attach_optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
