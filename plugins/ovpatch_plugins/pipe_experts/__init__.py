"""Feature ``pipe_experts``: expert-parallel layers whose all-to-alls hide under their experts.

These stand alone, without ``ovpatch.apply()``, for layers of your own::

    from ovpatch_plugins.pipe_experts import ExpertParallelFFN, expert_data_parallel, expert_parallel_ffn, pipelined
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_HOMES: Final = {
    "ExpertParallelFFN": "module",
    "MoEConfig": "config",
    "all_to_all": "exchange",
    "expert_data_parallel": "data_parallel",
    "expert_parallel_ffn": "layer",
    "pipelined": "pipelined_forward",
    "run_experts": "layer",
    "run_grouped_experts": "layer",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not before somebody asks: describing the feature must stay cheap.
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
