"""The benchmark of all overlaps on a mesh: what it counts, that its arms train the same model, and its table."""

from __future__ import annotations

import argparse
import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import ablation, tables
from benchmarks.decoders import SIZES, Decoder, alone, flops_per_step, parameters
from tests.support.rarely import RARELY

SHORT = ["--size=tiny", "--tp=2", "--dtype=fp32", "--rounds=1", "--warmup=3", "--steps=1"]
ARMS = ["limit", "stock", "ovpatch, no overlap", "ovpatch, grad reduce", "ovpatch, all"]


def products(model: Decoder, tokens: torch.Tensor) -> int:
    """Return the FLOPs of the matrix products of a forward and backward."""
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return counter.get_flop_counts()["Global"][torch.ops.aten.mm]


@pytest.mark.parametrize("size", ["tiny", "tiny-gpt"])
def test_flops_are_those_of_the_products_and_of_half_of_the_scores(size):
    shape = SIZES[size]
    tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.context))
    counted = products(Decoder(shape), tokens)
    # Attention has two GEMMs, each in the forward and twice in the backward.
    scores = 12 * shape.layers * shape.context * shape.width * tokens.numel()
    assert flops_per_step(shape, tokens.numel()) == counted + scores / 2


@pytest.mark.parametrize("size", ["tiny", "tiny-gpt"])
def test_the_limit_computes_one_ranks_share(size):
    shape = SIZES[size]
    tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.context))
    model = Decoder(shape)
    uncut = products(model, tokens)
    alone(model, 4)
    assert products(model, tokens) == uncut / 4
    assert model(tokens).shape == (shape.batch, shape.context, shape.vocabulary // 4)
    norms = sum(param.numel() for name, param in model.named_parameters() if "norm" in name)
    assert (
        sum(param.numel() for param in model.parameters())
        == (parameters(shape) - norms) // 4 + norms
    )


def test_the_models_are_those_of_their_names():
    # Meta-Llama-3-8B has this number of parameters.
    assert parameters(SIZES["8b"]) == 8_030_261_248
    assert round(parameters(SIZES["3.8b"]) / 1e9, 1) == 3.9


def parse(*more: str) -> argparse.Namespace:
    return ablation.parser().parse_args([*SHORT, *more])


def test_a_model_that_cannot_be_cut_is_refused():
    assert not ablation.objection(parse(), 4)
    assert ablation.objection(parse(), 3).endswith(
        "does not divide 3 processes; start a multiple of it"
    )
    assert "the model's heads, groups, vocabulary, context;" in ablation.objection(
        parse("--tp=3"), 3
    )
    shape = ablation.shape_of(parse("--layers=5", "--batch=7"))
    assert shape == dataclasses.replace(SIZES["tiny"], layers=5, batch=7)


def run(file: str) -> list[dict[str, Any]]:
    """Run some arms once, as ``main`` does but for the process group."""
    args = parse(f"--json={file}", "--arms", *ARMS)
    ablation.describe(args)
    mesh = ablation.mesh_of(args)
    rows: list[dict[str, Any]] = []

    def measured(name: str) -> dict[str, Any]:
        rows.append(ablation.measure(name, args, mesh))
        return rows[-1]

    ablation.alternate("ablation", args.arms, measured, args)
    alive = sum(type(value) is Decoder for value in gc.get_objects())
    return [*rows, {"shown": ablation.compared(rows, args), "alive": alive}]


@RARELY
def test_arms_train_the_same_model_and_overlap_what_they_say(ranks, tmp_path, monkeypatch):
    small = {
        "OVPATCH_DIST_OPTIMIZER_MIN_PARAM_NUMEL": "64",
        "OVPATCH_DDP_BUCKET_GRANULARITY": "layer",
    }
    file: Path = tmp_path / "ablation.jsonl"
    *rows, shown = ranks(4)(run, str(file), env=small)[0]
    found = {row["arm"]: row for row in rows}
    assert list(found) == ARMS, "an arm failed"
    losses = {row["loss"] for name, row in found.items() if name != "limit"}
    assert max(losses) - min(losses) < 2e-3, losses

    serial, grads, everything = (found[name]["features"] for name in ARMS[2:])
    assert all(
        feature["state"] == "applied"
        for arm in (serial, grads, everything)
        for feature in arm.values()
    )
    hidden, reduced = "collectives_in_backward", "collectives"
    assert serial["ddp"]["counters"][hidden] == 0
    # No gradient hides the last bucket of a backward.
    assert 0 < grads["ddp"]["counters"][hidden] < grads["ddp"]["counters"][reduced]
    for arm in (serial, grads, everything):
        assert arm["ddp"]["counters"]["models"] == 1, "each arm's own"
        assert arm["dist_optimizer"]["counters"]["grads_sharded"] > 0
        assert arm["tp_linear"]["counters"]["stock_calls"] == 0
        # Five linears of each layer share a gather, in five steps.
        assert arm["tp_linear"]["counters"]["shared_calls"] == 5 * SIZES["tiny"].layers * 5

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = tables.ablation().splitlines()
    assert len({line.count("|") for line in lines[: 2 + len(ARMS)]}) == 1
    assert [line.split(" | ")[2] for line in lines[2 : 2 + len(ARMS)]] == ARMS
    assert lines[3].startswith(
        "| Llama 0.0B, 2 layers, fp32 weights, autocast | DP 2 x TP 2, 4 cpu, "
    )
    assert lines[3].split(" | ")[6] == "1.00", "over itself"
    assert "gradients 0%" in lines[4]
    assert "gradients 0%" not in lines[5]
    assert ("parameters 0%" in lines[5], "parameters 100%" in lines[6]) == (True, True)
    assert "limit" in shown["shown"]
    assert shown["alive"] == 0, "an arm's memory would be in the next one's peak"
