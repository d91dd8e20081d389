"""Scripts that compile: Dynamo compiles what it compiles in stock PyTorch, as often, and computes the same."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import ovpatch
from tests.plugins import compiled
from tests.plugins.compiled import around, blocks, in_place, inside, searching, train
from tests.plugins.ddp.arms import Cases, Record, all_both, both
from tests.plugins.ddp.checks import some
from tests.support.equality import compare
from tests.support.rarely import ALL_CASES, RARELY

SHARDED = {"dist_optimizer": {"min_param_numel": 1}}
FEATURES = {
    "ddp": partial(ovpatch.applied, "ddp"),
    "dist_optimizer": partial(ovpatch.applied, "ddp", "dist_optimizer", options=SHARDED),
    "recompute": partial(ovpatch.applied, "ddp", "recompute"),
    "a plain apply()": ovpatch.applied,
}

# Every third of these cases runs with each feature.
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

# A few of these cases run with ddp, and others with dist_optimizer.
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
}

# With sharded gradients these cases are compiled twice, because gradients become lazy tensors after the first step.
GRADIENT_READERS: Cases = {
    "compiled clipping": {"program": compiled.train_and_read, "what": "norm"},
    "compiled code reads gradients": {"program": compiled.train_and_read, "what": "gradients"},
}


def run(program: Any = train, **kwargs: Any) -> list[Record]:
    return program(**kwargs)  # type: ignore[no-any-return]


def warm_up() -> None:
    train(around)
    compiled.freeze_survivors()


def in_both(feature: str, cases: Cases) -> dict[str, dict[str, Any]]:
    # The first compilation of a process examines frames that later ones skip.
    warm_up()
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
        # Gradients are reduced by ddp in all cases of dist_optimizer, and of recompute.
        "ddp": {**some(CASES, 2), **some(some(MORE), 2), **GRADIENT_READERS},
        "dist_optimizer": {**some(CASES, 1), **some(some(MORE, 1))},
        "recompute": {**some(CASES), "blocks": {"way": blocks}},
        "a plain apply()": some(some(CASES, 1)),
    }
    results = ranks(2)(in_both, feature, cases[feature], timeout=240)
    check(results, recomputes=feature == "recompute")
    for name, case in results[0].items():
        counters = case["counters"]
        assert counters["backwards"] > 0, name
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


@RARELY
@pytest.mark.parametrize("feature", ["ddp", "dist_optimizer"])
def test_backwards_are_compiled_with_the_python_reducer(ranks, feature):
    case = {"program": compiled.train_by_compiled_autograd, "optimize_ddp": "python_reducer"}
    # In a process that has compiled a backward so, stock PyTorch fails to compile others.
    ranks.close()
    try:
        check(ranks(2)(in_both, feature, {"compiled autograd": case}, timeout=120))
    finally:
        ranks.close()


# --- pipelines, experts and Megatron ---

PIPELINES: Cases = {
    "blocks": {"way": compiled.compile_blocks},
    "replaced blocks": {"way": compiled.replace_blocks},
    "a stage": {"way": compiled.compile_stage},
    "two stages on a rank": {"way": compiled.compile_blocks, "schedule": "ScheduleInterleaved1F1B"},
    "blocks of a cut model": {"way": compiled.compile_blocks, "is_cut": True},
    "replaced blocks of a cut model": {"way": compiled.replace_blocks, "is_cut": True},
    "a stage of a cut model": {"way": compiled.compile_stage, "is_cut": True},
}
MEGATRON: Cases = {
    way: {"program": compiled.train_megatron, "way": way, "num_layers": 1}
    for way in (("layers", "linears") if ALL_CASES else ("linears",))
}


def pipelines_in_both() -> dict[str, dict[str, Any]]:
    from tests.plugins.pipeline.cases import counters

    warm_up()
    apply = partial(ovpatch.applied, "pipeline", options={"pipeline": {"schedule": "zb-h1"}})
    cases = {name: {"program": compiled.train_pipeline, **case} for name, case in PIPELINES.items()}
    return all_both(run, cases, apply=apply, counters=counters)


def test_compiled_stages_are_compiled_as_in_stock_pytorch(ranks):
    results = ranks(2)(pipelines_in_both, timeout=180)
    for result in results:
        for name, case in result.items():
            assert case["counters"]["steps"] == compiled.STEPS, name
            assert case["stock"][-1]["dynamo"]["breaks"] == 0, name
            # The linear outside of compiled code is deferred.
            if name == "blocks":
                assert case["counters"]["weight_grads"] > 0, name
    check(results)


def megatron_in_both() -> dict[str, dict[str, Any]]:
    from ovpatch_plugins.megatron.megatron_report import COUNTERS

    warm_up()
    apply = partial(ovpatch.applied, "megatron")
    return all_both(run, MEGATRON, apply=apply, counters=COUNTERS.as_dict)


def test_compiled_layers_of_megatron_are_compiled_as_in_stock_pytorch(ranks):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    # Without this variable, Megatron warns once in each process, from other frames.
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    results = ranks(2)(megatron_in_both, timeout=180, env=env)
    assert all(case["counters"]["calls"] for result in results for case in result.values())
    check(results)


def experts_in_both(path: str) -> dict[str, Any]:
    from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS

    warm_up()
    apply = partial(ovpatch.applied, "pipe_experts")
    return both(
        compiled.train_experts, path, "tensor", "experts", apply=apply, counters=COUNTERS.as_dict
    )


def test_compiled_experts_are_compiled_at_most_as_often_as_in_stock_pytorch(ranks, tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.plugins.pipe_experts.test_huggingface import MODELS, TINY

    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **TINY | {"num_hidden_layers": 1}, **MODELS["mixtral"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for result in ranks(2)(experts_in_both, str(tmp_path), timeout=180):
        found = [result[arm].pop()["dynamo"] for arm in ("stock", "patched")]
        # Counters in compiled code would compile it again in each step.
        assert not [name for name in found[1]["compiled"] if "huggingface_experts" in name]
        stock, patched = map(compiled.count_frames, found)
        # Code that dispatches tokens is compiled in stock PyTorch, and skipped here.
        assert all(patched[name] <= stock[name] for name in stock), (stock, patched)
        compare(result["stock"], result["patched"], floor=1e-9).assert_equal()
        assert result["counters"]["taken_over"] == result["counters"]["calls"] > 0


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
