"""Fresh reports for the next case of a worker: counters and remarks of features start over."""

from __future__ import annotations

import sys
from typing import Final

# The containers that hold lines of the report. A feature's other remarks end with revert().
_REMARKS: Final = {
    "ovpatch_plugins.ddp.ddp_report": ("REMARKS",),
    "ovpatch_plugins.dist_optimizer.dist_optimizer_report": ("_remarks", "_unmanaged"),
    "ovpatch_plugins.megatron.megatron_report": ("_FALLBACKS",),
    "ovpatch_plugins.pipe_experts.all_to_all": ("_unsupported_reasons",),
    "ovpatch_plugins.pipeline.pipeline_report": ("_schedules", "_stock_reasons"),
    "ovpatch_plugins.recompute.recompute_report": ("_fallbacks", "_models", "_notes"),
    "ovpatch_plugins.tp_linear.tp_linear_attach": ("STOCK_REASONS",),
}


def list_containers() -> set[str]:
    """Return the containers that are emptied, as ``module:name``."""
    return {f"{module}:{name}" for module, names in _REMARKS.items() for name in names}


def reset() -> None:
    """Set the counters of all imported features to 0, and forget their remarks.

    Objects of the case that live on must not change a counter, so this comes after their collection.
    """
    for name in [name for name in sys.modules if name.startswith("ovpatch_plugins.")]:
        module = sys.modules[name]
        if name.endswith(("_report", "_counters")):
            # The defaults of the counters are attributes of their class.
            vars(module.COUNTERS).clear()
        for container in _REMARKS.get(name, ()):
            getattr(module, container).clear()
