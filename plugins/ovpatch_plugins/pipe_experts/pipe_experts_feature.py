"""The description, the patches and the life cycle of feature ``pipe_experts``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ovpatch.hookspecs import Feature, Package, Registrar, make_feature_hooks
from ovpatch_plugins.pipe_experts.pipe_experts_options import OPTIONS, STATE, MoEConfig
from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS, write_remarks

_EP: Final = "transformers.distributed.expert_parallel"
_ATTACH: Final = "ovpatch_plugins.pipe_experts.huggingface_experts"

FEATURE: Final = Feature(
    name="pipe_experts",
    summary="Expert-parallel layers run in chunks, and all-to-alls hide under the experts.",
    options=OPTIONS,
    reorders_products=True,
    distributed=True,
    packages=(Package(_EP, "pip install -U transformers"),),
    work=("calls",),
    gains=("{calls:expert layer call} in {parts:chunk}",),
)


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; they wait for the import of transformers' expert parallelism."""
    patches.register_patch(
        f"{_EP}.AllToAllEP.__call__",
        wrap=f"{_ATTACH}:wrap_call",
        optional=True,
        why="dispatches, computes and combines an experts module's tokens, for any model; with the registry alone "
        "scripts would have to name an implementation",
    )
    patches.register_patch(
        f"{_EP}.EpDispatchExpertsParallel.install_forward",
        wrap=f"{_ATTACH}:wrap_install",
        optional=True,
        why="looks up the implementation's name; 'ovpatch' is registered before that",
    )


def activate(options: Mapping[str, Any]) -> None:
    """Let layers compute by these options."""
    STATE.is_on = True
    STATE.config = MoEConfig(**options)


def deactivate() -> None:
    """Leave all layers to their library."""
    STATE.is_on = False


def list_remarks() -> Sequence[str]:
    """Return the measurements, the fallbacks, and the reasons for layers that were not split."""
    return write_remarks(_EP)


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters=COUNTERS,
    activate=activate,
    deactivate=deactivate,
    remarks=list_remarks,
)
