"""Scripts that compile: Dynamo compiles what it compiles in stock PyTorch, as often, and computes the same."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

import ovpatch
from tests.plugins import compiled
from tests.plugins.compiled import around, blocks, in_place, inside, searching, train
from tests.plugins.ddp.arms import Cases, Record, all_both
from tests.plugins.ddp.checks import some
from tests.support.equality import compare

SHARDED = {"dist_optimizer": {"min_param_numel": 1}}
FEATURES = {
    "ddp": partial(ovpatch.applied, "ddp"),
    "dist_optimizer": partial(ovpatch.applied, "ddp", "dist_optimizer", options=SHARDED),
    "recompute": partial(ovpatch.applied, "ddp", "recompute"),
    "a plain apply()": ovpatch.applied,
}

# All of these cases, or every third, run with each feature.
CASES: Cases = {
    **{
        f"layers sliced, {way.__name__}": {"way": way, "kind": "sliced"}
        for way in (around, inside, in_place, blocks)
    },
    "a submodule made in the forward": {"way": inside, "kind": "submodule"},
    "a buffer set in the forward": {"way": around, "kind": "buffer"},
    "evaluation between steps": {"way": around, "evaluates": True},
    "accumulation": {"way": around, "accumulates": True},
    "batches of several sizes": {"way": around, "rows": (4, 6, 3)},
    "unused parameters searched": {"way": searching},
    "a compiled step": {"way": inside, "compiles_step": True},
    "a compiled training step": {"program": compiled.train_step, "clips": True},
    "a model that is wrapped after another was compiled": {
        "program": compiled.train_after_compiled_model
    },
}

KINDS = (
    "checkpoint",
    "broken",
    "batch norm",
    "autograd function",
    "transforms",
    "collective",
    "parameter",
)

# A part of these cases runs with ddp, and the rest with dist_optimizer.
MORE: Cases = {
    **{
        f"layers sliced, {way.__name__}": {"way": way, "kind": "sliced"}
        for way in compiled.OTHER_WAYS
    },
    **{
        f"{kind}, {way.__name__}": {"way": way, "kind": kind}
        for kind in KINDS
        for way in (around, inside)
    },
    "a submodule made in the forward, around": {"way": around, "kind": "submodule"},
    "a buffer set in the forward, inside": {"way": inside, "kind": "buffer"},
    "batches of several sizes, inside": {"way": inside, "rows": (4, 6, 3)},
    "dynamic shapes": {"way": around, "rows": (4, 6, 3), "dynamic": True},
    "evaluation between steps, blocks": {"way": blocks, "evaluates": True},
    "accumulation, inside": {"way": inside, "accumulates": True},
    "module hooks": {"way": around, "hooked": True},
    "module hooks, blocks": {"way": blocks, "hooked": True},
    "a compiled step around a compiled wrapper": {"way": around, "compiles_step": True},
    "a compiled training step that returns gradients": {
        "program": compiled.train_step,
        "reads": True,
    },
    "compiled code reads parameters": {"program": compiled.train_and_read, "what": "parameters"},
    "compiled autograd": {
        "program": compiled.train_by_compiled_autograd,
        "optimize_ddp": "python_reducer",
    },
}

# With sharded gradients these cases are compiled twice, because gradients become lazy tensors after the first step.
GRADIENT_READERS: Cases = {
    "compiled clipping": {"program": compiled.train_and_read, "what": "norm"},
    "compiled code reads gradients": {"program": compiled.train_and_read, "what": "gradients"},
}


def run(program: Any = train, **kwargs: Any) -> list[Record]:
    return program(**kwargs)  # type: ignore[no-any-return]


def in_both(feature: str, cases: Cases) -> dict[str, dict[str, Any]]:
    train(around)  # The first compilation of a process examines frames that later ones skip.
    apply: Any = FEATURES[feature]
    return all_both(run, cases, apply=apply)


def check(results: list[dict[str, dict[str, Any]]], *, recomputes: bool = False) -> None:
    """Demand the values of stock PyTorch, bitwise, and that Dynamo did in all cases what it does in stock PyTorch."""
    failures = []
    for name in results[0]:
        for rank, result in enumerate(results):
            stock, patched = (result[name][arm].pop()["dynamo"] for arm in ("stock", "patched"))
            if (
                recomputes
            ):  # The compiler calls torch's checkpoint, and the forward of a class is ours.
                stock, patched = compiled.count_frames(stock), compiled.count_frames(patched)
            failures += [
                f"{name}, rank {rank}: {text}"
                for text in compiled.describe_differences(stock, patched)
            ]
            try:
                compare(result[name]["stock"], result[name]["patched"]).assert_bitwise()
            except AssertionError as error:
                failures.append(f"{name}, rank {rank}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("feature", FEATURES)
def test_dynamo_does_what_it_does_in_stock_pytorch(ranks, feature):
    cases = {
        "ddp": {**CASES, **some(MORE), **GRADIENT_READERS},
        "dist_optimizer": {**CASES, **some(MORE, 1)},
        "recompute": {**some(CASES), "blocks": {"way": blocks}},
        "a plain apply()": some(CASES, 1),
    }
    results = ranks(2)(in_both, feature, cases[feature], timeout=240)
    check(results, recomputes=feature == "recompute")
    for name, case in results[0].items():
        counters = case["counters"]
        assert counters["backwards"] > 0 or name == "compiled autograd", name
        if feature == "dist_optimizer" and "compiled" not in name:
            assert counters["steps"] == compiled.STEPS, name


def test_code_that_works_on_gradients_is_compiled_once_more_where_they_are_sharded(ranks):
    for result in ranks(2)(in_both, "dist_optimizer", GRADIENT_READERS, timeout=120):
        for name, case in result.items():
            stock, patched = (case[arm].pop()["dynamo"] for arm in ("stock", "patched"))
            assert 0 < sum(patched["compiled"].values()) - sum(stock["compiled"].values()) <= 2, (
                name
            )
            compare(case["stock"], case["patched"]).assert_bitwise()
            assert case["counters"]["steps"] == compiled.STEPS


def fails_under_compiled_autograd(feature: str) -> list[str]:
    texts = []
    for apply in (nullcontext, FEATURES[feature]):
        with apply(), pytest.raises(RuntimeError) as caught:
            compiled.train_by_compiled_autograd()
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("feature", ["ddp", "dist_optimizer"])
def test_compiled_autograd_is_an_error_as_with_the_stock_reducer(ranks, feature):
    for texts in ranks(2)(fails_under_compiled_autograd, feature, timeout=120):
        assert all(
            'torch._dynamo.config.optimize_ddp="python_reducer"' in text.replace(" = ", "=")
            for text in texts
        )


# Compiled models whose full forward and full backward are CUDA graphs.
GRAPHS: Cases = {
    f"{way.__name__}{', sliced' if kind else ''}": {
        "way": way,
        "kind": kind,
        "backend": "inductor",
        "mode": "reduce-overhead",
    }
    for way in (around, inside)
    for kind in ("", "sliced")
}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("feature", ["ddp", "dist_optimizer", "a plain apply()"])
def test_cuda_graphs_of_the_compiler_are_those_of_stock_pytorch(ranks, feature):
    results = ranks(2)(in_both, feature, GRAPHS, backend="nccl", timeout=240)
    check(results)
    assert all(case["counters"]["backwards"] > 0 for case in results[0].values())
