"""Feature ``recompute``: blocks that are computed again in backward instead of being kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ovpatch_plugins.recompute.recomputation import RecomputeError as RecomputeError
    from ovpatch_plugins.recompute.recompute_attach import recompute as recompute

__all__ = ["RecomputeError", "recompute"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because the feature's package is imported without torch."""
    if name == "recompute":
        from ovpatch_plugins.recompute.recompute_attach import recompute

        return recompute
    if name == "RecomputeError":
        from ovpatch_plugins.recompute.recomputation import RecomputeError

        return RecomputeError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
