"""What the feature did in this process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ovpatch.overlap.reduction import Bucket


@dataclass
class Counters:
    """Totals since the process started.

    Attributes:
        models: Models whose gradients our reducer took over.
        stock_models: Models that fell back to the stock reducer.
        backwards: Backward passes whose gradients were reduced.
        collectives: Gradient buckets that were all-reduced.
        collectives_in_backward: Those of them that were launched while backward was still computing.
        bytes_reduced: Size of all reduced buckets, in bytes.
        late_backwards: Further backward passes through a forward whose first one had been reduced; reduced as well.
        recovered: Backward passes that an exception cut short and whose collectives were completed later.
        shortfalls: Backward passes in which fewer contributions to a gradient were marked than were declared; reduced
            at their end.
    """

    models: int = 0
    stock_models: int = 0
    backwards: int = 0
    collectives: int = 0
    collectives_in_backward: int = 0
    bytes_reduced: int = 0
    late_backwards: int = 0
    recovered: int = 0
    shortfalls: int = 0

    def launched(self, bucket: Bucket) -> None:
        """Count a bucket that is being reduced."""
        self.collectives += 1
        self.bytes_reduced += bucket.nbytes

    def launched_early(self, bucket: Bucket) -> None:
        """Count a bucket that is being reduced while backward still computes."""
        self.launched(bucket)
        self.collectives_in_backward += 1

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


COUNTERS = Counters()
