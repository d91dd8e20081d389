"""What the feature did in this process, and what the report says of it.

Every ``apply()`` makes a report, so nothing here walks over all objects, which would cost as much as the rest of
``apply()``: imported modules, and the classes that FSDP2 makes of those it shards, show enough.
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from ovpatch.hookspecs import FeatureCounters
from ovpatch_plugins.ddp import errors


@dataclass
class Counters(FeatureCounters):
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


COUNTERS = Counters()


_FSDP2 = "FSDP2 (fully_shard)"

# Imported only by scripts that train with them: they need an installation of their own.
_ENGINES = {"deepspeed.runtime.engine": "DeepSpeed", "megatron.core.distributed": "Megatron-Core"}

# Imported by other libraries, too, whether or not a model is made parallel by them.
_PERHAPS = ("torch.distributed.fsdp", "torch.distributed.tensor")


def other_reducers_remark() -> str:
    """Return what reduces gradients in place of this feature, or "" if nothing is known to."""
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
    """Return whether FSDP2 has sharded a module: it makes a class of its own of each class of modules."""
    base = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return isinstance(base, type) and any(issubclass(made, nn.Module) for made in _descendants(base))


def _descendants(base: type[Any]) -> list[type[Any]]:
    direct = base.__subclasses__()
    return direct + [below for cls in direct for below in _descendants(cls)]


_log = logging.getLogger("ovpatch.ddp")

REMARKS: Final[list[str]] = []
"""What the report says besides the counters: each text once, in order of time."""


def remark(text: str) -> None:
    """Add a text to the report and, the first time, to the log."""
    if text not in REMARKS:
        REMARKS.append(text)
        _log.warning("%s", text)


@functools.cache
def warn_of_create_graph() -> None:
    """Log once, as stock does, that higher-order gradients are not reduced."""
    _log.warning("%s", errors.CREATE_GRAPH)
