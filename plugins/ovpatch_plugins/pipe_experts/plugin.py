"""The patches of feature ``pipe_experts``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ovpatch.hookspecs import Feature, Package, Registrar, hookimpl, make_counters_hook
from ovpatch_plugins.pipe_experts.options import OPTIONS, STATE, MoEConfig

_EP = "transformers.distributed.expert_parallel"


@hookimpl
def ovpatch_feature() -> Feature:
    """Describe the feature."""
    return Feature(
        name="pipe_experts",
        summary="Expert-parallel layers run in chunks, and all-to-alls hide under the experts.",
        options=OPTIONS,
        reorders_products=True,
        distributed=True,
        packages=(Package(_EP, "pip install -U transformers"),),
        work=("calls",),
        gains=("{calls:expert layer call} in {parts:chunk}",),
    )


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    """Register the patches; they wait for the import of transformers' expert parallelism."""
    patches.register_patch(
        f"{_EP}.AllToAllEP.__call__",
        wrap=_wrap_call,
        optional=True,
        why="dispatches, computes and combines an experts module's tokens, whatever the model; with the registry alone "
        "scripts would have to name an implementation",
    )
    patches.register_patch(
        f"{_EP}.EpDispatchExpertsParallel.install_forward",
        wrap=_wrap_install,
        optional=True,
        why="looks the implementation's name up; 'ovpatch' is registered before that",
    )


@hookimpl
def ovpatch_activate(options: Mapping[str, Any]) -> Sequence[str]:
    """Switch the feature on."""
    STATE.on, STATE.config = True, MoEConfig(**options)
    return []


@hookimpl
def ovpatch_deactivate() -> None:
    """Give all layers back to their library."""
    STATE.on = False


ovpatch_counters = make_counters_hook("ovpatch_plugins.pipe_experts.report")


@hookimpl
def ovpatch_remarks() -> Sequence[str]:
    """Return what was chosen by measurement, what stayed stock, and why layers were left alone or not cut."""
    from ovpatch_plugins.pipe_experts.report import write_remarks

    return write_remarks(_EP)


def _wrap_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def __call__(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        from ovpatch_plugins.pipe_experts import takeover

        compute = takeover.compute_experts if STATE.on and takeover.is_stock_implementation(self) else call
        return compute(self, hidden_states, top_k_index, top_k_weights)

    return __call__


def _wrap_install(install: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(install)
    def install_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from ovpatch_plugins.pipe_experts import takeover

        takeover.register_implementation()
        return install(self, *args, **kwargs)

    return install_forward
