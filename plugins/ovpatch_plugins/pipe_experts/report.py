"""What the feature did in this process."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Totals since the process started.

    Attributes:
        calls: Forward passes of expert-parallel layers.
        parts: Parts in which they were computed.
        stacked_calls: Those of them whose experts' products are the feature's, with delayed weight gradients.
        taken_over: Those that a library's layer made, transformers' for one.
        library_experts: Those of them whose experts the library computed itself, part by part.
        symmetric: All-to-alls over symmetric memory, those of measurements included.
    """

    calls: int = 0
    parts: int = 0
    stacked_calls: int = 0
    taken_over: int = 0
    library_experts: int = 0
    symmetric: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


COUNTERS = Counters()
