"""The patches of feature ``tp_linear``, and the reasons for their places."""

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
    summary="Linears of parallelize_module hide their gathers and reduce-scatters under GEMMs.",
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
    """Register the patches. They wait until the script imports their target, because that import takes long."""
    _settings.clear()
    _settings.update(options)
    _Registration.patches = patches
    for name in ("ColwiseParallel", "RowwiseParallel"):
        patches.register_patch(
            f"{_STYLE}.{name}._apply",
            wrap=functools.partial(_wrap, name="apply_to_linear"),
            why="is where parallelize_module hands a module to its style; keeps its signature in torch 2.11 to 2.15. "
            "F.linear, later, gets a gathered input, and a hook scatters its output.",
        )
    patches.register_patch(
        f"{_STYLE}.PrepareModuleInput._apply",
        wrap=functools.partial(_wrap, name="apply_to_module"),
        why="is where a module gets the hook that gathers its input, for several linears at once",
    )


def attach_existing_modules() -> Sequence[str]:
    """Attach to the modules that were parallelized before, and return the remarks on them."""
    return _load_attach().recover_modules() if _has_parallel_modules() else []


def list_remarks() -> Sequence[str]:
    """Return the measured choices, the linears that stock PyTorch computes, and the number of unused GEMMs."""
    from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

    # A module that the job has not imported has nothing to report, and a report must not import it.
    autotune = sys.modules.get("ovpatch.overlap.kernels.autotuner")
    remarks = [] if autotune is None else autotune.report_lines("tp_linear")
    schedules = sys.modules.get("ovpatch.overlap.tensor_parallel.schedules")
    if schedules is not None:
        remarks += schedules.list_schedule_objections()
    attach = sys.modules.get("ovpatch_plugins.tp_linear.tp_linear_attach")
    if attach is not None:
        remarks += [
            f"stock PyTorch computes {name}: {reason}"
            for name, reason in attach.STOCK_REASONS.items()
        ]
    if COUNTERS.unused:
        remarks.append(
            f"{COUNTERS.unused} GEMMs were computed with a shared gather but not used: set "
            "OVPATCH_TP_LINEAR_SHARED_GATHER=0 to avoid them"
        )
    return remarks


# The options, until the first parallel module needs them.
_settings: dict[str, Any] = {}


class _Registration:
    """The patch manager of the newest :func:`register`, until the first parallel module needs it."""

    patches: Registrar


def _wrap(apply_style: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a style's ``_apply`` that calls the function ``name`` of :mod:`.tp_linear_attach`."""

    @functools.wraps(apply_style)
    def _apply(self: Any, module: Any, device_mesh: Any) -> Any:
        # The function is looked up at the call: transformers imports the styles in every script, and few apply them.
        return getattr(_load_attach(), name)(apply_style, self, module, device_mesh)

    return _apply


def _has_parallel_modules() -> bool:
    """Return whether ``parallelize_module`` has changed a module."""
    import torch

    # The search visits all objects, so it runs only if the script can have called parallelize_module.
    if _STYLE not in sys.modules or not torch.distributed.is_initialized():
        return False
    # isinstance() would read the __class__ of objects, and so run foreign code.
    modules = (
        candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.nn.Module)
    )
    return any("_distribute_module_applied" in vars(module) for module in modules)


def _load_attach() -> Any:
    """Return :mod:`.tp_linear_attach`, after the first call since ``apply()`` has set the options."""
    from ovpatch_plugins.tp_linear import tp_linear_attach
    from ovpatch_plugins.tp_linear.parallel_linear import STATE

    if not STATE.is_on:
        STATE.turn_on(_settings)
        if _settings["compiled"]:
            _add_graph_pass(STATE.config.schedule.name)
    return tp_linear_attach


def _add_graph_pass(schedule: str) -> None:
    """Add the pass to Inductor. This is not done by ``register``, because Inductor takes a second to import."""
    from ovpatch.overlap.tensor_parallel.graph_pass import InstalledPass

    patches = _Registration.patches
    patches.register_hook(
        "Inductor's pass post_grad_custom_pre_pass",
        functools.partial(InstalledPass, schedule),
        why="fuses collectives with their GEMMs in compiled graphs",
    )
    patches.apply()


hooks = make_feature_hooks(
    FEATURE,
    register,
    counters="ovpatch_plugins.tp_linear.tp_linear_report:COUNTERS",
    activate=attach_existing_modules,
    deactivate="ovpatch_plugins.tp_linear.tp_linear_attach:detach_all",
    remarks=list_remarks,
)
