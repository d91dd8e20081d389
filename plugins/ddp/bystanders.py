"""Other libraries that reduce gradients themselves: why there was nothing for this feature to do."""

from __future__ import annotations

import gc
import sys

_OTHERS = "FSDP, tensor parallelism and engines of their own"
_DTENSOR = "parallelism by DTensor"

# Module, class, and what users call it. Looked up only where the script has imported the module.
_ENGINES = (
    ("torch.distributed.fsdp", "FSDPModule", "FSDP2 (fully_shard)"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDP"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "DeepSpeed"),
    ("megatron.core.distributed", "DistributedDataParallel", "Megatron-Core"),
    ("torch.distributed.tensor", "DTensor", _DTENSOR),
)


def remark() -> str:
    """Return why no model came to this feature, as far as that can be told, or ""."""
    classes = {
        found: called
        for module, name, called in _ENGINES
        if isinstance(found := getattr(sys.modules.get(module), name, None), type)
    }
    # Not isinstance, which asks objects for their __class__ and so runs foreign code.
    held = {called for one in gc.get_objects() for found, called in classes.items() if issubclass(type(one), found)}
    if held:
        return f"gradients are left to {_list(held)}: no model is wrapped in DistributedDataParallel"
    if classes:  # imported, perhaps by another library, and by now without a model
        return f"no model was wrapped in DistributedDataParallel; {_OTHERS} reduce gradients themselves"
    return ""


def _list(names: set[str]) -> str:
    # The engines are made of DTensors themselves.
    return " and ".join(sorted(names - {_DTENSOR} or names))
