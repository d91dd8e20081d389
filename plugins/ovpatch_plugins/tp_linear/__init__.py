"""Feature ``tp_linear``: tensor-parallel linears whose collectives hide under their GEMMs.

A script may call two operators on local tensors directly, for parallel layers that it writes itself::

    from ovpatch_plugins.tp_linear import all_gather_linear, linear_reduce_scatter
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_HOMES: Final = {
    "all_gather_linear": "ovpatch.overlap.tensor_parallel.functional",
    "find_fused_objection": "ovpatch.overlap.tensor_parallel.schedules.fused",
    "linear_reduce_scatter": "ovpatch.overlap.tensor_parallel.functional",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A module is loaded at its first use, because a description of the feature must not import torch.
    return getattr(importlib.import_module(_HOMES[name]), name)
