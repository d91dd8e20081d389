"""Scripts that compile: Dynamo compiles what it compiles in stock PyTorch, as often, and computes the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import ovpatch
from tests.plugins import compiled
from tests.plugins.compiled import train
from tests.plugins.ddp.arms import all_both

CASES = {
    **{f"sliced, {way.__name__}": {"program": train, "way": way, "kind": "sliced"} for way in compiled.WAYS},
    **{f"{kind}": {"program": train, "way": compiled.around, "kind": kind} for kind in ("checkpoint", "broken", "batch norm", "autograd function", "transforms", "collective", "parameter")},
    **{f"{kind}, inside": {"program": train, "way": compiled.inside, "kind": kind} for kind in ("checkpoint", "broken", "batch norm", "autograd function", "transforms", "collective", "parameter")},
    **{
        f"{kind}, {way.__name__}": {"program": train, "way": way, "kind": kind}
        for kind in ("submodule", "buffer")
        for way in (compiled.around, compiled.inside)
    },
    "batches of two sizes": {"program": train, "way": compiled.around, "rows": (4, 6, 3)},
    "batches of two sizes, inside": {"program": train, "way": compiled.inside, "rows": (4, 6, 3)},
    "dynamic": {"program": train, "way": compiled.around, "rows": (4, 6, 3), "dynamic": True},
    "evaluates": {"program": train, "way": compiled.around, "evaluates": True},
    "evaluates, blocks": {"program": train, "way": compiled.blocks, "evaluates": True},
    "accumulates": {"program": train, "way": compiled.around, "accumulates": True},
    "accumulates, inside": {"program": train, "way": compiled.inside, "accumulates": True},
    "hooked": {"program": train, "way": compiled.around, "hooked": True},
    "hooked, inside": {"program": train, "way": compiled.inside, "hooked": True},
    "hooked, blocks": {"program": train, "way": compiled.blocks, "hooked": True},
    "compiled step": {"program": train, "way": compiled.around, "step": "compiled"},
    "train step": {"program": compiled.train_step_compiled},
    "train step, clips": {"program": compiled.train_step_compiled, "clips": True},
    "train step, reads": {"program": compiled.train_step_compiled, "reads": True},
    "train step, compiled autograd": {"program": compiled.train_step_compiled, "compiled_autograd": True},
    **{what: {"program": compiled.train_and_compile_what_follows, "what": what} for what in ("clips", "reads gradients", "reads parameters")},
    "compiled autograd": {"program": compiled.train_with_compiled_autograd},
    "one after the other": {"program": compiled.train_one_after_the_other},
}

FEATURES = {
    "recompute": partial(ovpatch.applied, "ddp", "recompute"),
    "all": partial(ovpatch.applied, "all", options={"dist_optimizer": {"min_param_numel": 1}}),
    "ddp": partial(ovpatch.applied, "ddp"),
    "plain": partial(ovpatch.applied),
    "dist_optimizer": partial(
        ovpatch.applied, "ddp", "dist_optimizer", options={"dist_optimizer": {"min_param_numel": 1}}
    ),
}


def run(program: Any, **kwargs: Any) -> Any:
    return program(**kwargs)


def in_all_ways(feature: str, names: list[str]) -> Any:
    return all_both(run, {name: CASES[name] for name in names}, apply=FEATURES[feature])
