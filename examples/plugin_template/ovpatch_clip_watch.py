"""An ovpatch plugin: counts how often gradients were clipped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ovpatch import Feature, Option, Registrar, hookimpl

COUNTERS = {"calls": 0, "clipped": 0}


@hookimpl
def ovpatch_feature() -> Feature:
    return Feature(
        name="clip_watch",
        summary="Counts calls of clip_grad_norm_, and how many of them changed the gradients.",
        options=(Option("count_clipped", default=False, help="Count real clipping too; this waits for the GPU."),),
        default=True,
        torch=">=2.11,<2.16",
    )


@hookimpl
def ovpatch_reasons_against(options: Mapping[str, Any]) -> Sequence[str]:
    # Not at the top, because the module of a plugin is imported even if the feature stays off.
    import torch

    needs_gpu = options["count_clipped"] and torch.version.hip is not None
    return ["count_clipped was never tried on ROCm; set OVPATCH_CLIP_WATCH_COUNT_CLIPPED=0"] if needs_gpu else []


@hookimpl
def ovpatch_register(patches: Registrar, options: Mapping[str, Any]) -> None:
    patches.register_patch(
        "torch.nn.utils.clip_grad.clip_grad_norm_",
        wrap=functools.partial(watch, count_clipped=options["count_clipped"]),
        why="the function every training loop calls; torch has no hook around it",
    )


def watch(original: Callable[..., Any], count_clipped: bool) -> Callable[..., Any]:
    """Return the function that takes the place of ``original``: a plain function with the same signature."""

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        norm = original(parameters, max_norm, *args, **kwargs)
        COUNTERS["calls"] += 1
        if count_clipped:
            COUNTERS["clipped"] += int(norm > max_norm)
        return norm

    return clip_grad_norm_


@hookimpl
def ovpatch_counters() -> Mapping[str, int]:
    return dict(COUNTERS)
