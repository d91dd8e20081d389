"""What is patched for feature ``tp_linear``, and why there."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ovpatch.hookspecs import Feature, Package, Registrar, make_feature_hooks
from ovpatch_plugins.tp_linear.tp_linear_options import OPTIONS

_STYLE = "torch.distributed.tensor.parallel.style"


FEATURE: Final = Feature(
    name="tp_linear",
    summary="Linears of parallelize_module hide their gathers and reduce-scatters under products.",
    options=OPTIONS,
    reorders_products=True,
    distributed=True,
    packages=(Package("torch.distributed.tensor", "install a build of torch that has it"),),
    work=("calls",),
    gains=(
        "{linears:linear}",
        "{calls:call} with hidden collectives",
    ),
)


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; they wait until the script imports their target, since that import takes long."""
    _settings.clear()
    _settings.update(options)
    for name in ("ColwiseParallel", "RowwiseParallel"):
        patches.register_patch(
            f"{_STYLE}.{name}._apply",
            wrap=functools.partial(_wrap, name="apply_to_linear"),
            why="is where parallelize_module hands a module to its style; keeps its signature in torch 2.11 to 2.15. "
            "F.linear, later, sees an input that is gathered already, and its output is scattered "
            "by a hook.",
        )
    patches.register_patch(
        f"{_STYLE}.PrepareModuleInput._apply",
        wrap=functools.partial(_wrap, name="apply_to_module"),
        why="is where a module gets the hook that gathers its input, for several linears at once",
    )


def attach_cut_modules() -> Sequence[str]:
    """Attach to the modules that are sharded already, and return the remarks on them."""
    return _load_attach().recover_modules() if _has_cut_modules() else []


def list_remarks() -> Sequence[str]:
    """Return the measured choices, the linears that stock computes and why, and products that no linear used."""
    from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

    autotune = sys.modules.get("ovpatch.overlap.kernels.autotuner")
    remarks = [] if autotune is None else autotune.report_lines("tp_linear")
    sharing = sys.modules.get("ovpatch.overlap.tensor_parallel.schedules.fused")
    if sharing is not None:
        remarks += [
            f"schedule fused computes as bulk does: {reason}"
            for reason in sharing.list_objections()
        ]
    attach = sys.modules.get("ovpatch_plugins.tp_linear.tp_linear_attach")
    if attach is not None:
        remarks += [f"{name} is left to stock: {reason}" for name, reason in attach.LEFT.items()]
    if COUNTERS.unused:
        remarks.append(
            f"{COUNTERS.unused} products were computed with a shared gather and never used: "
            "OVPATCH_TP_LINEAR_SHARED_GATHER=0 saves them"
        )
    return remarks


_settings: dict[str, Any] = {}


def _wrap(apply: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a style's ``_apply`` that calls the function of :mod:`.tp_linear_attach` with a name."""

    @functools.wraps(apply)
    def _apply(self: Any, module: Any, device_mesh: Any) -> Any:
        return getattr(_load_attach(), name)(apply, self, module, device_mesh)

    return _apply


def _has_cut_modules() -> bool:
    """Return whether ``parallelize_module`` has cut a module; looks through all objects where it can have."""
    import torch

    if _STYLE not in sys.modules or not torch.distributed.is_initialized():
        return False
    # Not isinstance, which asks objects for their __class__ and so runs foreign code.
    modules = (one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module))
    return any("_distribute_module_applied" in vars(module) for module in modules)


def _load_attach() -> Any:
    """Return :mod:`.tp_linear_attach`; the first call after ``apply()`` sets the options."""
    from ovpatch_plugins.tp_linear import tp_linear_attach
    from ovpatch_plugins.tp_linear.parallel_linear import STATE

    if not STATE.on:
        STATE.turn_on(_settings)
    return tp_linear_attach


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters="ovpatch_plugins.tp_linear.tp_linear_report:COUNTERS",
    activate=attach_cut_modules,
    deactivate="ovpatch_plugins.tp_linear.tp_linear_attach:give_back_modules",
    remarks=list_remarks,
)
