"""What is patched for feature ``pipe_experts``, and why there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ovpatch.hookspecs import Feature, Registrar, hookimpl
from ovpatch_plugins.pipe_experts.options import OPTIONS

_EP = "transformers.distributed.expert_parallel"


@hookimpl
def ovpatch_feature() -> Feature:
    """Describe the feature."""
    return Feature(
        name="pipe_experts",
        summary="Expert-parallel layers in parts, whose all-to-alls hide under their experts.",
        options=OPTIONS,
        reorders_products=True,
        work=("calls",),
    )


@hookimpl
def ovpatch_reasons_against() -> Sequence[str]:
    """Return why the feature cannot run here."""
    import torch

    return [] if torch.distributed.is_available() else ["this build of torch has no torch.distributed"]


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; they wait until somebody imports transformers' expert parallelism."""
    patches.register_patch(
        f"{_EP}.AllToAllEP.__call__",
        wrap=_wrap_call,
        optional=True,
        why="is where an experts module's tokens are sent, computed and brought back, whatever the model; the registry "
        "alone would ask scripts to name an implementation",
    )
    patches.register_patch(
        f"{_EP}.EpDispatchExpertsParallel.install_forward",
        wrap=_wrap_install,
        optional=True,
        why="looks the implementation's name up; 'ovpatch' becomes one of the registry's by then",
    )


@hookimpl
def ovpatch_activate(options: Mapping[str, Any]) -> Sequence[str]:
    """Compute as the options say."""
    from ovpatch_plugins.pipe_experts.config import STATE

    STATE.turn_on(options)
    return []


@hookimpl
def ovpatch_deactivate() -> None:
    """Give all layers back to their library."""
    from ovpatch_plugins.pipe_experts.config import STATE

    STATE.on = False


@hookimpl
def ovpatch_counters() -> Mapping[str, int]:
    """Return what the feature did so far."""
    from ovpatch_plugins.pipe_experts.report import COUNTERS

    return COUNTERS.as_dict()


@hookimpl
def ovpatch_remarks() -> Sequence[str]:
    """Say what was chosen by measurement, what stood down, and if less than all was taken over, or nothing."""
    from ovpatch_plugins.pipe_experts.report import COUNTERS

    autotune = sys.modules.get("ovpatch.overlap.autotune")
    chosen = [] if autotune is None else autotune.report_lines("pipe_experts")
    sharing = sys.modules.get("ovpatch_plugins.pipe_experts.symm_all_to_all")
    problems = [] if sharing is None else sharing.objections()
    chosen += [f"rows travel by c10d's all-to-alls, not over symmetric memory: {problem}" for problem in problems]
    if COUNTERS.library_experts:
        return [
            *chosen,
            f"in {COUNTERS.library_experts} of {COUNTERS.taken_over} calls transformers computed its experts itself, "
            "part by part: they are not two products of stacked weights, or a script has put something in their place",
        ]
    if COUNTERS.calls:
        return [*chosen, *_whole()]
    if "transformers" not in sys.modules:
        return chosen
    where = "" if _EP in sys.modules else " (transformers' expert parallelism was not imported)"
    return [
        f"no expert-parallel layer was found{where}: for layers of your own, call "
        "ovpatch_plugins.pipe_experts.run_experts() or expert_parallel_ffn()"
    ]


def _whole() -> list[str]:
    """Say so if nothing was computed in parts since nobody has said in which."""
    from ovpatch_plugins.pipe_experts.config import STATE
    from ovpatch_plugins.pipe_experts.report import COUNTERS

    if STATE.how.cut != "auto" or COUNTERS.stacked_calls or COUNTERS.parts != COUNTERS.calls:
        return []
    return ["layers were not cut: cut=auto measures experts with stacked weights only; for others try cut=experts"]


def _wrap_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def __call__(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        from ovpatch_plugins.pipe_experts import takeover
        from ovpatch_plugins.pipe_experts.config import STATE

        compute = takeover.compute if STATE.on and takeover.is_stock(self) else call
        return compute(self, hidden_states, top_k_index, top_k_weights)

    return __call__


def _wrap_install(install: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(install)
    def install_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from ovpatch_plugins.pipe_experts import takeover

        takeover.register()
        return install(self, *args, **kwargs)

    return install_forward
