"""The description, the patches and the life cycle of feature ``recompute``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from ovpatch.hookspecs import Feature, Registrar, make_feature_hooks
from ovpatch_plugins.recompute.recompute_options import OPTIONS
from ovpatch_plugins.recompute.recompute_report import COUNTERS, write_remarks

_ATTACH: Final = "ovpatch_plugins.recompute.recompute_attach"

FEATURE: Final = Feature(
    name="recompute",
    summary="Blocks are computed again in backward instead of kept, while it waits for a gradient.",
    options=OPTIONS,
    default=False,
    work=("calls", "compiled_calls"),
    gains=(
        "{blocks:block}",
        "{recomputations:forward} computed again, {launched_ahead} of them under a wait",
    ),
)


# Names in a script that checkpoints activations.
_CHECKPOINTING: Final = (
    "torch.utils.checkpoint",
    "checkpoint_wrapper",
    "gradient_checkpointing_enable",
    "gradient_checkpointing",
)


def fits(names: Collection[str], counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return the way in which the script checkpoints activations itself."""
    used = [name for name in _CHECKPOINTING if name in names]
    return f"uses {used[0]}" if used else ""


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches."""
    patches.register_patch(
        "torch.optim.optimizer.Optimizer.__init__",
        wrap=f"{_ATTACH}:wrap_optimizer_init",
        why="is where a script passes the parameters that it is going to train, for any trainer; no hook of "
        "torch is called before the first forward, which would keep all activations",
    )
    patches.register_patch(
        "torch.nn.modules.module.Module.__setstate__",
        wrap=f"{_ATTACH}:wrap_setstate",
        why="gives children to a module that is copied or loaded, for which torch calls no registration hook",
    )


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters=COUNTERS,
    activate=f"{_ATTACH}:attach_all",
    deactivate=f"{_ATTACH}:detach_all",
    remarks=write_remarks,
    fits=fits,
)
