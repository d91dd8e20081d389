"""An ovpatch plugin: counts calls of clip_grad_norm_."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ovpatch import Feature, FeatureCounters, Registrar, make_feature_hooks


class Counters(FeatureCounters):
    calls: int = 0


COUNTERS = Counters()


def watch(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            COUNTERS.calls += 1
        return original(*args, **kwargs)

    return clip_grad_norm_


def register(patches: Registrar, options: Mapping[str, Any]) -> None:
    patches.register_patch(
        "torch.nn.utils.clip_grad.clip_grad_norm_",
        wrap=watch,
        why="every loop calls it, and torch has no hook there",
    )


hooks = make_feature_hooks(
    Feature("clip_watch", "Counts calls of clip_grad_norm_."), register, counters=COUNTERS
)
