"""Counters of the feature in this process."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Totals since the process started.

    Attributes:
        linears: Linears whose forward was taken over.
        gathers: Gathers for several linears (PrepareModuleInput) that were taken over.
        calls: Forward passes through taken-over linears that our operators computed.
        shared_calls: Those of them whose product was computed together with a gather for several.
        compiled_calls: Those that were part of a compiled graph.
        fused: Products that kernels of schedule ``fused`` computed, forward and backward.
        stock_calls: Forward passes through taken-over linears that were left to stock.
        unused: Products computed together with a gather that no linear asked for.
    """

    linears: int = 0
    gathers: int = 0
    calls: int = 0
    shared_calls: int = 0
    compiled_calls: int = 0
    fused: int = 0
    stock_calls: int = 0
    unused: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


COUNTERS = Counters()
