"""The patches of feature ``recompute``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ovpatch.hookspecs import Feature, Registrar, hookimpl, make_counters_hook
from ovpatch_plugins.recompute.options import OPTIONS

# Names in a script that checkpoints activations.
_CHECKPOINTING = (
    "torch.utils.checkpoint",
    "checkpoint_wrapper",
    "gradient_checkpointing_enable",
    "gradient_checkpointing",
)


@hookimpl
def ovpatch_feature() -> Feature:
    """Describe the feature."""
    return Feature(
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


@hookimpl
def ovpatch_fits(names: Collection[str], counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return the way in which the script checkpoints activations itself."""
    used = [name for name in _CHECKPOINTING if name in names]
    return f"uses {used[0]}" if used else ""


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches."""
    patches.register_patch(
        "torch.optim.optimizer.Optimizer.__init__",
        wrap=functools.partial(_wrap_init, options=options),
        why="is where a script hands over the parameters that it is going to train, whatever trains them; no hook of "
        "torch is called before the first forward, which would keep all activations",
    )
    patches.register_patch(
        "torch.nn.modules.module.Module.__setstate__",
        wrap=_wrap_setstate,
        why="gives children to a module that is copied or loaded, for which torch calls no registration hook",
    )


@hookimpl
def ovpatch_activate(options: Mapping[str, Any]) -> Sequence[str]:
    """Take over the models of optimizers that exist, and fill the waits of other features."""
    from ovpatch_plugins.recompute import takeover
    from ovpatch_plugins.recompute.recomputation import CHECKS

    CHECKS.when = options["check"]
    takeover.fill_backward_waits(options["ahead"])
    takeover.take_over_living_models(options)
    return []


@hookimpl
def ovpatch_deactivate() -> None:
    """Give all blocks back to stock."""
    takeover = sys.modules.get("ovpatch_plugins.recompute.takeover")
    if takeover is not None:
        takeover.give_back_all()


ovpatch_counters = make_counters_hook("ovpatch_plugins.recompute.report")


@hookimpl
def ovpatch_remarks() -> Sequence[str]:
    """Return which blocks are recomputed, which are not, and why."""
    from ovpatch_plugins.recompute.report import write_remarks

    return write_remarks()


def _wrap_setstate(original: Callable[..., None]) -> Callable[..., None]:
    from ovpatch_plugins.recompute.takeover import wrap_setstate

    return wrap_setstate(original)


def _wrap_init(original: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., None]:
    from ovpatch_plugins.recompute.takeover import wrap_optimizer_init

    return wrap_optimizer_init(original, options)
