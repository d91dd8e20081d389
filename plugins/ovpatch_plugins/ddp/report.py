"""Other libraries that reduce gradients themselves: why there was nothing for this feature to do.

[Note: cheap evidence] A report is taken at every ``apply()``, and whatever is asked here adds to the start of every
script. So no objects are looked for: there are hundreds of thousands, and walking them costs as much as the rest of
``apply()``. What the script has imported, and the classes that FSDP2 makes of those it shards, tell enough.
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from ovpatch_plugins.ddp import errors

if TYPE_CHECKING:
    from ovpatch.overlap.data_parallel.grad_sync import Bucket


# What the feature did in this process.


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
    """

    models: int = 0
    stock_models: int = 0
    backwards: int = 0
    collectives: int = 0
    collectives_in_backward: int = 0
    bytes_reduced: int = 0
    late_backwards: int = 0
    recovered: int = 0

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


_FSDP2 = "FSDP2 (fully_shard)"

# Imported by scripts that train with them and by nobody else: they need an installation of their own.
_ENGINES = {"deepspeed.runtime.engine": "DeepSpeed", "megatron.core.distributed": "Megatron-Core"}

# Imported by other libraries, too, whether or not a model is made parallel by them.
_PERHAPS = ("torch.distributed.fsdp", "torch.distributed.tensor")


def other_reducers_remark() -> str:
    """Return why no model came to this feature, as far as that can be told, or ""."""
    used = [called for module, called in _ENGINES.items() if module in sys.modules]
    if _shards_modules():
        used.append(_FSDP2)
    if used:
        return f"gradients are left to {' and '.join(used)}: no model is wrapped in DistributedDataParallel"
    if any(module in sys.modules for module in _PERHAPS):
        return (
            "no model was wrapped in DistributedDataParallel; FSDP, tensor parallelism and engines of their own reduce "
            "gradients themselves"
        )
    return ""


def _shards_modules() -> bool:
    """Tell whether FSDP2 has sharded a module: it makes a class of its own of each class of modules."""
    base = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return isinstance(base, type) and any(issubclass(made, nn.Module) for made in _descendants(base))


def _descendants(base: type[Any]) -> list[type[Any]]:
    direct = base.__subclasses__()
    return direct + [below for cls in direct for below in _descendants(cls)]


# What the report says of the feature besides its counters.

_log = logging.getLogger("ovpatch.ddp")

REMARKS: Final[list[str]] = []
"""Each text once, in the order in which they came."""


def remark(text: str) -> None:
    """Say something in the report and, the first time, in the log."""
    if text not in REMARKS:
        REMARKS.append(text)
        _log.warning("%s", text)


@functools.cache
def warn_of_create_graph() -> None:
    """Say once, as stock does, that higher-order gradients are not reduced."""
    _log.warning("%s", errors.CREATE_GRAPH)
