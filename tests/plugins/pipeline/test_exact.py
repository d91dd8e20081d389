"""Losses, outputs, gradients and parameters have the bits of stock PyTorch for each class, order and model."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ovpatch
from ovpatch.overlap.pipelining.order_table import ORDERS
from tests.plugins.pipeline.cases import Case, Outcome, make_schedule, train, train_both
from tests.plugins.pipeline.models import ROWS, VARIANTS, WIDTH, Autocast, Block, Part, Raw, Variant
from tests.support.rarely import ALL_CASES, RARELY

EIGHT: dict[str, Any] = {"microbatches": 8, "chunks": 2}
CLASSES = {
    "Schedule1F1B": Case(steps=3),
    "ScheduleGPipe": Case("ScheduleGPipe"),
    "fewer microbatches than ranks": Case("ScheduleGPipe", microbatches=1),
    "ScheduleInterleaved1F1B": Case("ScheduleInterleaved1F1B", **EIGHT),
    "ScheduleInterleavedZeroBubble": Case("ScheduleInterleavedZeroBubble", **EIGHT),
    "ScheduleLoopedBFS": Case("ScheduleLoopedBFS", chunks=2),
    "ScheduleZBVZeroBubble": Case("ScheduleZBVZeroBubble", vee=True, **EIGHT),
    "ScheduleDualPipeV": Case("ScheduleDualPipeV", vee=True, **EIGHT),
}
_EXAMPLE = torch.zeros(ROWS, 2, WIDTH, requires_grad=True)


def _blocks(*args: Any) -> Any:
    return lambda _index: Part(Block(*args), Block(*args))


def _under_autocast(*args: Any, **options: Any) -> Any:
    return lambda _index: Autocast(Part(Block(*args), Block(*args)), **options)


MODELS = {
    "bf16": Case(dtype=torch.bfloat16),
    "autocast": Case(part=_under_autocast()),
    "autocast without cache": Case(part=_under_autocast(cache_enabled=False)),
    "autocast around the step": Case(context=lambda: torch.autocast("cpu", torch.bfloat16)),
    "checkpoint": Case(part=_blocks(0.0, False)),
    "checkpoint, autocast": Case(part=_under_autocast(0.0, False)),
    "reentrant checkpoint": Case(
        part=_blocks(0.0, True), stage={"input_args": (_EXAMPLE,), "output_args": (_EXAMPLE,)}
    ),
    "dropout": Case(part=_blocks(0.2)),
    "dropout, checkpoint": Case(part=_blocks(0.2, False)),
    "several steps before the optimizer's": Case(pieces=2),
    "summed loss": Case(options={"scale_grads": False}),
    "raw input": Case(part=lambda _index: Raw()),
    **{
        kind: Case(part=lambda _index, kind=kind: nn.Sequential(Variant(kind), Variant(kind)))
        for kind in VARIANTS
    },
    "called twice, autocast": Case(part=lambda _index: Autocast(Variant("called twice"))),
    "read elsewhere, autocast": Case(part=lambda _index: Autocast(Variant("read elsewhere"))),
}


def _list_orders() -> tuple[str, ...]:
    """Return all orders; on more than two ranks, return the orders that differ most."""
    every = ("as-given", *ORDERS)
    return every if dist.get_world_size() == 2 or ALL_CASES else ("as-given", "1f1b", "zb-h2")


def _run_classes(names: list[str]) -> dict[str, Outcome]:
    found = {}
    for name in names:
        case = CLASSES[name]
        if case.chunks > 1:
            case = replace(case, microbatches=min(case.microbatches, 2 * dist.get_world_size()))
        stock = train(case)
        for order in _list_orders() if case.chunks == 1 else ("as-given",):
            found[f"{name}, {order}"] = train_both(case, order, stock=stock)
    return found


def _run_models(names: list[str], order: str) -> dict[str, Outcome]:
    return {name: train_both(MODELS[name], order) for name in names}


def _assert_equal(by_rank: list[dict[str, Outcome]]) -> None:
    for rank, outcomes in enumerate(by_rank):
        for name, outcome in outcomes.items():
            assert not outcome.differences, f"rank {rank}, {name}: {outcome.differences[:4]}"
            assert outcome.counters["steps"], name
            assert not outcome.counters["stock_steps"], name


PARTS = {"one stage": slice(0, 3), "loops": slice(3, 6), "vees": slice(6, 8)}


@pytest.mark.parametrize(
    ("world", "part"),
    [
        pytest.param(world, part, id=f"{name}-{world}", marks=RARELY if is_rare else [])
        for name, part in PARTS.items()
        for world, is_rare in ((2, False), (4, name != "one stage"))
    ],
)
def test_each_class_and_each_order(ranks: Any, world: int, part: slice) -> None:
    found = ranks(world)(_run_classes, list(CLASSES)[part])
    _assert_equal(found)
    for rank, outcomes in enumerate(found):
        for name, outcome in outcomes.items():
            kind, _, order = name.rpartition(", ")
            has_ws = order in ORDERS and ORDERS[order].count_lag is not None
            # Without Ws in the order, a stage defers weight gradients if a rank waits for its input gradient. A first
            # rank with several stages has such a stage as well.
            is_deferred = rank > 0 or CLASSES[kind].chunks > 1 or has_ws
            assert bool(outcome.counters["weight_grads"]) == is_deferred, f"rank {rank}, {name}"


@pytest.mark.parametrize("order", ["as-given", "zb-h1"])
@pytest.mark.parametrize("part", range(3))
def test_each_model(ranks: Any, order: str, part: int) -> None:
    names = list(MODELS)[part::3]
    # Both orders defer the weight gradient of a linear by the same mechanism.
    if order == "as-given" and not ALL_CASES:
        names = names[::2]
    found = ranks(2)(_run_models, names, order)
    _assert_equal(found)
    assert all(outcome.counters["weight_grads"] for outcome in found[1].values())


def _run_backwards_in_reverse(names: list[str]) -> dict[str, Outcome]:
    cases = {
        name: replace(MODELS[name], schedule="ScheduleLoopedBFS", microbatches=4) for name in names
    }
    return {name: train_both(case, delay_wgrad_compute="on") for name, case in cases.items()}


def test_models_whose_first_forward_has_the_last_backward(ranks: Any) -> None:
    names = [
        "read elsewhere",
        "called twice",
        "checkpoint",
        "reentrant checkpoint",
        "dropout, checkpoint",
        "frozen",
    ]
    found = ranks(2)(_run_backwards_in_reverse, names)
    _assert_equal(found)
    for name, outcome in found[1].items():
        assert outcome.counters["weight_grads"], name


def _run_hidden_reads() -> dict[str, Outcome]:
    sizes = {"input_args": (_EXAMPLE,), "output_args": (_EXAMPLE,)}
    part = lambda _index: Variant("read in a reentrant checkpoint")  # noqa: E731
    return {
        order: train_both(Case(part=part, stage=sizes, steps=3), order)
        for order in ("as-given", "zb-h1")
    }


def test_weights_that_a_reentrant_checkpoint_reads(ranks: Any) -> None:
    _assert_equal(ranks(2)(_run_hidden_reads))


def test_models_on_four_ranks(ranks: Any) -> None:
    _assert_equal(
        ranks(4)(_run_models, ["bf16", "autocast", "dropout, checkpoint", "batch norm"], "zb-h2")
    )


def _run_dropout() -> dict[str, Outcome]:
    cases = {
        "vee": Case("ScheduleZBVZeroBubble", vee=True, part=_blocks(0.2), microbatches=4, chunks=2),
        "loop": Case(
            "ScheduleInterleavedZeroBubble", part=_blocks(0.2, False), microbatches=4, chunks=2
        ),
    }
    return {name: train_both(case) for name, case in cases.items()}


def test_dropout_with_several_stages_a_rank(ranks: Any) -> None:
    _assert_equal(ranks(2)(_run_dropout))


def _run_options() -> dict[str, Outcome]:
    changes: list[dict[str, Any]] = [
        {"delay_wgrad_compute": "off"},
        {"delay_wgrad_compute": "on"},
        {"overlap_p2p_comm": False},
        {"gradient_accumulation_fusion": True},
    ]
    stock = train(Case())
    return {str(change): train_both(Case(), "zb-h1", stock=stock, **change) for change in changes}


def test_options_keep_the_bits_in_fp32(ranks: Any) -> None:
    found = ranks(2)(_run_options)
    fused = "{'gradient_accumulation_fusion': True}"
    for outcomes in found:
        assert (
            max(float(text.split(": ")[1]) for text in [*outcomes.pop(fused).differences, ": 0"])
            < 1e-6
        )
    _assert_equal(found)
    assert found[1]["{'delay_wgrad_compute': 'off'}"].counters["weight_grads"] == 0
    assert found[1]["{'overlap_p2p_comm': False}"].counters["weight_grads"] > 0


def _run_compiled() -> dict[str, Outcome]:
    outer = Case(
        part=lambda _index: torch.compile(nn.Sequential(Raw(), Raw()), backend="aot_eager")
    )
    inner = Case(part=lambda _index: Variant("compiled inside"))
    return {"outer": train_both(outer, "zb-h1"), "inner": train_both(inner, "zb-h1")}


def test_compiled_modules_stay_in_the_backward(ranks: Any) -> None:
    found = ranks(2)(_run_compiled, timeout=120)
    _assert_equal(found)
    for outcomes in found:
        assert outcomes["outer"].counters["weight_grads"] == 0
        assert any(
            "4 linears in B: inside a compiled module" in text for text in outcomes["outer"].remarks
        )
        assert outcomes["inner"].counters["weight_grads"] == 2 * (6 * 2 - 1), (
            "the first microbatch leaves all in B"
        )


def _count_recomputations(reentrant: bool) -> tuple[int, int, list[str]]:
    case = MODELS["reentrant checkpoint" if reentrant else "checkpoint"]
    counts, untrained = [], []
    for patched in (False, True):
        if patched:
            ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
        schedule, (part,) = make_schedule(case)
        rows = torch.randn(ROWS * 6, 2, WIDTH)
        for _ in range(2):
            for block in part.blocks:  # type: ignore[union-attr]
                block.runs = 0
            schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows)
        counts.append(sum(block.runs for block in part.blocks))  # type: ignore[union-attr]
        untrained += [
            name
            for name, param in part.named_parameters()
            if param.grad is None or not param.grad.any()
        ]
    return counts[0], counts[1], untrained


@pytest.mark.parametrize("reentrant", [False, True])
def test_each_checkpointed_layer_is_recomputed_once_and_trained(
    ranks: Any, reentrant: bool
) -> None:
    for rank, (stock, patched, untrained) in enumerate(ranks(2)(_count_recomputations, reentrant)):
        # Inputs of the first stage's reentrant checkpoints need no gradient, so torch warns and does not train them.
        is_torchs_gap = reentrant and rank == 0
        blocks, microbatches, runs = 2, 6, 1 if is_torchs_gap else 2  # forward and recomputation
        assert stock == patched == blocks * microbatches * runs
        assert bool(untrained) == is_torchs_gap


def _count_hooks() -> list[dict[str, int]]:
    found = []
    for patched in (False, True):
        if patched:
            ovpatch.apply("pipeline", options={"pipeline": {"schedule": "zb-h1"}})
        schedule, (part,) = make_schedule(Case())
        counts = {"tensor": 0, "post-accumulate": 0, "node": 0}
        kept = []

        def count(name: str, counts: dict[str, int] = counts) -> None:
            counts[name] += 1

        rows = torch.randn(ROWS * 6, 2, WIDTH)
        inputs = (rows,) if dist.get_rank() == 0 else ()
        schedule.step(*inputs, target=rows)
        for param in part.parameters():
            param.register_hook(lambda grad: count("tensor"))
            param.register_post_accumulate_grad_hook(lambda param: count("post-accumulate"))
            node = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            kept.append(node)
            node.register_hook(lambda *grads: count("node"))
        schedule.step(*inputs, target=rows)
        found.append(counts)
    return found


def test_hooks_of_parameters_fire_as_often(ranks: Any) -> None:
    for stock, patched in ranks(2)(_count_hooks):
        assert stock == patched
        assert stock["tensor"] == 2 * 5 * 6  # blocks, parameters, microbatches


def _keep_losses(order: str, fuse: bool) -> tuple[int, int]:
    """Return the number of inputs of a rank's linears in a step, and how many of them live as long as its losses."""
    ovpatch.apply(
        "pipeline", options={"pipeline": {"schedule": order, "gradient_accumulation_fusion": fuse}}
    )
    schedule, (part,) = make_schedule(Case())
    seen: list[weakref.ref[torch.Tensor]] = []
    for module in part.modules():
        if type(module) is nn.Linear:
            module.register_forward_pre_hook(
                lambda _module, args: seen.append(weakref.ref(args[0]))
            )
    rows = torch.randn(6 * ROWS, 2, WIDTH)
    # Torch infers shapes in the first step. In the second one, gradients exist that W can add to.
    for _ in range(2):
        seen.clear()
        losses: list[torch.Tensor] = []
        schedule.step(*((rows,) if dist.get_rank() == 0 else ()), target=rows, losses=losses)
    return len(seen), sum(reference() is not None for reference in seen)


@pytest.mark.parametrize(
    ("order", "fuse"), [("as-given", False), ("zb-h2", False), ("zb-h1", True)]
)
def test_a_loss_that_is_kept_keeps_no_activations(ranks: Any, order: str, fuse: bool) -> None:
    made, left = ranks(2)(_keep_losses, order, fuse)[1]
    assert made >= 12
    assert not left
