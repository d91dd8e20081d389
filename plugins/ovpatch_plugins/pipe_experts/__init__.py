"""Feature ``pipe_experts``: expert-parallel layers whose all-to-alls hide under their experts.

The feature is for layers of transformers. For layers of your own, call these functions, which need no
``ovpatch.apply()``::

    from ovpatch_plugins.pipe_experts import (
        ExpertParallelFFN,
        expert_data_parallel,
        expert_parallel_ffn,
        run_pipelined,
    )
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_HOMES: Final = {
    "ExpertParallelFFN": "layer",
    "MoEConfig": "pipe_experts_options",
    "expert_data_parallel": "expert_grads",
    "expert_parallel_ffn": "layer",
    "run_experts": "layer",
    "run_grouped_experts": "layer",
    "run_pipelined": "experts",
    "start_all_to_all": "all_to_all",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The module is loaded at the first use, because the description of the feature must stay cheap.
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
