"""What is patched for feature ``tp_linear``, and why there."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ovpatch.hookspecs import Feature, Registrar, hookimpl
from ovpatch_plugins.tp_linear.options import OPTIONS

_STYLE = "torch.distributed.tensor.parallel.style"


@hookimpl
def ovpatch_feature() -> Feature:
    """Describe the feature."""
    return Feature(
        name="tp_linear",
        summary="Linears under parallelize_module whose gathers and reduce-scatters hide under their products.",
        options=OPTIONS,
        default=True,
        reorders_products=True,
        work=("calls",),
    )


@hookimpl
def ovpatch_reasons_against() -> Sequence[str]:
    """Return why the feature cannot run here."""
    import torch

    if not torch.distributed.is_available():
        return ["this build of torch has no torch.distributed"]
    if importlib.util.find_spec("torch.distributed.tensor") is None:
        return ["this build of torch has no torch.distributed.tensor"]
    return []


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches. Their module costs half a second to import; if it is not there, they wait for it."""
    _settings.clear()
    _settings.update(options)
    for name in ("ColwiseParallel", "RowwiseParallel"):
        patches.register_patch(
            f"{_STYLE}.{name}._apply",
            wrap=_wrap_linear,
            why="is where parallelize_module hands a module to its style; keeps its signature in torch 2.11 to 2.15. "
            "F.linear, later, sees an input that is gathered already, and its output is scattered by a hook.",
        )
    patches.register_patch(
        f"{_STYLE}.PrepareModuleInput._apply",
        wrap=_wrap_gather,
        why="is where a module gets the hook that gathers its input, for several linears at once",
    )


@hookimpl
def ovpatch_activate() -> Sequence[str]:
    """Take over what was made parallel before."""
    if _STYLE not in sys.modules:
        return []
    _turned_on()
    from ovpatch_plugins.tp_linear import takeover

    return takeover.recover()


@hookimpl
def ovpatch_deactivate() -> None:
    """Give all modules back to stock."""
    state = sys.modules.get("ovpatch_plugins.tp_linear.config")
    if state is not None:
        state.STATE.on = False
    takeover = sys.modules.get("ovpatch_plugins.tp_linear.takeover")
    if takeover is not None:
        takeover.give_all_back()


@hookimpl
def ovpatch_counters() -> Mapping[str, int]:
    """Return what the feature did so far."""
    from ovpatch_plugins.tp_linear.report import COUNTERS

    return COUNTERS.as_dict()


@hookimpl
def ovpatch_remarks() -> Sequence[str]:
    """Return what was chosen by measurement, what was left to stock, and what was computed for nothing."""
    from ovpatch_plugins.tp_linear.report import COUNTERS

    autotune = sys.modules.get("ovpatch.overlap.autotune")
    remarks = [] if autotune is None else autotune.report_lines("tp_linear")
    sharing = sys.modules.get("ovpatch_plugins.tp_linear.fused_support")
    if sharing is not None:
        remarks += [f"schedule fused computes as bulk does: {reason}" for reason in sharing.objections()]
    takeover = sys.modules.get("ovpatch_plugins.tp_linear.takeover")
    if takeover is not None:
        remarks += [f"{name} is left to stock: {reason}" for name, reason in takeover.left_alone().items()]
    if COUNTERS.unused:
        remarks.append(
            f"{COUNTERS.unused} products were computed with a shared gather and never asked for: "
            "OVPATCH_TP_LINEAR_SHARED_GATHER=0 saves them"
        )
    return remarks


_settings: dict[str, Any] = {}


def _wrap_linear(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def _apply(self: Any, module: Any, device_mesh: Any) -> Any:
        return _turned_on().apply_to_linear(apply, self, module, device_mesh)

    return _apply


def _wrap_gather(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def _apply(self: Any, module: Any, device_mesh: Any) -> Any:
        return _turned_on().apply_to_module(apply, self, module, device_mesh)

    return _apply


def _turned_on() -> Any:
    """Return the module that takes modules over; the first call after ``apply()`` imports it and sets the options."""
    from ovpatch_plugins.tp_linear import takeover
    from ovpatch_plugins.tp_linear.config import STATE

    if not STATE.on:
        STATE.turn_on(_settings)
    return takeover
