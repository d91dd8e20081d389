"""Other libraries that reduce gradients themselves: why there was nothing for this feature to do.

[Note: cheap evidence] A report is taken at every ``apply()``, and whatever is asked here adds to the start of every
script. So no objects are looked for: there are hundreds of thousands, and walking them costs as much as the rest of
``apply()``. What the script has imported, and the classes that FSDP2 makes of those it shards, tell enough.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_FSDP2 = "FSDP2 (fully_shard)"

# Imported by scripts that train with them and by nobody else: they need an installation of their own.
_ENGINES = {"deepspeed.runtime.engine": "DeepSpeed", "megatron.core.distributed": "Megatron-Core"}

# Imported by other libraries, too, whether or not a model is made parallel by them.
_PERHAPS = ("torch.distributed.fsdp", "torch.distributed.tensor")


def remark() -> str:
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
