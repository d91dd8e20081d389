"""Feature ``tp_linear``: tensor-parallel linears whose collectives hide under their matrix products.

Two operators on local tensors stand alone, for parallel layers of a script::

    from ovpatch_plugins.tp_linear import all_gather_linear, linear_reduce_scatter
"""

from __future__ import annotations

from typing import Any

__all__ = ["all_gather_linear", "linear_reduce_scatter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ovpatch_plugins.tp_linear import functional

    return getattr(functional, name)
