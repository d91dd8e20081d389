"""The module: refused arguments, copies, checkpoints and compiled calls; and the lines of the report."""

from __future__ import annotations

import copy
import io
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ovpatch
from ovpatch_plugins import pipe_experts
from ovpatch_plugins.pipe_experts import ExpertParallelFFN, MoEConfig, run_experts
from tests.support.equality import compare

TOKENS, HIDDEN = 6, 4


def made(**kwargs: Any) -> ExpertParallelFFN:
    torch.manual_seed(dist.get_rank())
    return ExpertParallelFFN(
        HIDDEN, 3, 2 * dist.get_world_size(), config=MoEConfig("experts"), **kwargs
    )


def routing() -> tuple[Tensor, Tensor]:
    return torch.arange(2 * TOKENS).view(TOKENS, 2) % (2 * dist.get_world_size()), torch.rand(
        TOKENS, 2
    )


def copied() -> list[bool]:
    layer, (index, top) = made(shared=nn.Linear(HIDDEN, HIDDEN)), routing()
    x = torch.randn(2, TOKENS // 2, HIDDEN)
    index, top = index.view(2, -1, 2), top.view(2, -1, 2)
    right = layer(x, index, top)
    assert right.shape == x.shape
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = [
        copy.deepcopy(layer),
        torch.load(buffer, weights_only=False),
        made(shared=nn.Linear(HIDDEN, HIDDEN)),
    ]
    twins[2].load_state_dict(layer.state_dict())
    assert sorted(layer.state_dict()) == ["down", "shared.bias", "shared.weight", "up"]
    return [torch.equal(right, twin(x, index, top)) for twin in twins]


def test_copies_pickles_and_checkpoints(ranks):
    for found in ranks(2)(copied):
        assert found == [True, True, True]


def capacity() -> list[Tensor]:
    """Send all tokens to one expert, which takes two of them."""
    layer = made(capacity_factor=1.0, activation="relu")
    x, index = torch.ones(8, HIDDEN), torch.zeros(8, 1, dtype=torch.long)
    out = layer(x, index, torch.ones(8, 1))
    return [out.abs().sum(1) > 0, layer(x[:0], index[:0], torch.ones(0, 1))]


def test_capacity_factor(ranks):
    for kept, none in ranks(2)(capacity):
        assert kept.tolist() == [True] * 2 + [False] * 6
        assert none.shape == (0, HIDDEN)


def compiled() -> list[Any]:
    """Train a compiled model with the layer in it, and an eager one."""
    results = []
    for compiles in (False, True):
        torch.manual_seed(7)
        layer, (index, top) = made(), routing()
        model: Any = lambda x: layer(x.tanh(), index, top).sin()  # noqa: E731, B023
        if compiles:
            torch._dynamo.reset()
            model = torch.compile(model, backend="aot_eager")
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        out = model(x)
        out.sum().backward()
        results.append({"out": out.detach(), "x": x.grad, "up": layer.up.grad})
    return results


def test_a_compiled_call_equals_an_eager_one(ranks):
    for eager, graph in ranks(2)(compiled):
        compare(eager, graph).assert_equal()


def refused() -> list[str]:
    found = []
    for kwargs in ({"experts": 3}, {"experts": 4, "activation": "swish"}):
        with pytest.raises(ValueError, match="Choose") as caught:
            ExpertParallelFFN(HIDDEN, 3, **kwargs)
        found.append(str(caught.value))
    return found


def test_bad_arguments_are_refused(ranks):
    for shared, activation in ranks(2)(refused):
        assert "3 experts cannot be shared evenly by 2 ranks" in shared
        assert "Choose one of swiglu, gelu, relu, silu" in activation
    with pytest.raises(ValueError, match="init_process_group"):
        ExpertParallelFFN(HIDDEN, 3, 2)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pipe_experts.nonsense


def use_groups() -> tuple[bool, list[str]]:
    """Compare no group with the default group, and return the errors of a rank that is not in the group."""
    index, top = routing()
    x, experts = torch.randn(TOKENS, HIDDEN), [nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
    outs = [run_experts(experts, x, index, top, group) for group in (None, dist.group.WORLD)]
    group, found = dist.new_group([0]), []
    for call in (
        lambda: ExpertParallelFFN(HIDDEN, 3, 2, group),
        lambda: run_experts(experts, x, index, top, group),
    ):
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="is not in the group") as caught:
                call()
            found.append(str(caught.value))
    return torch.equal(*outs), found


def test_the_default_group_and_a_group_without_this_rank(ranks):
    (same, _), (also_same, texts) = ranks(2)(use_groups)
    assert same
    assert also_same
    assert len(texts) == 2
    assert all(
        text.startswith("ovpatch: rank 1")
        and text.endswith("Give the layer the group that this rank is in.")
        for text in texts
    )
    with pytest.raises(ValueError, match="init_process_group"):
        run_experts(
            [], torch.randn(2, HIDDEN), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1), None
        )


def reported() -> dict[str, int]:
    with ovpatch.applied("pipe_experts"):
        before = ovpatch.report()["pipe_experts"].counters
        layer, (index, top) = made(), routing()
        layer(torch.randn(TOKENS, HIDDEN), index, top)
        after = ovpatch.report()["pipe_experts"].counters
    return {name: value - before[name] for name, value in after.items()}


def test_the_report(ranks):
    for found in ranks(2)(reported):
        zeros = {"taken_over": 0, "library_experts": 0, "symmetric": 0}
        assert found == {"calls": 1, "parts": 2, "stacked_calls": 1, **zeros}


def test_the_report_says_why_the_feature_had_no_effect(monkeypatch):
    from ovpatch_plugins.pipe_experts import pipe_experts_feature
    from ovpatch_plugins.pipe_experts import pipe_experts_options as options
    from ovpatch_plugins.pipe_experts import pipe_experts_report as report

    monkeypatch.setattr(report, "COUNTERS", report.Counters())
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert not pipe_experts_feature.list_remarks(), "no library is loaded that could have layers"
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    (remark,) = pipe_experts_feature.list_remarks()
    assert "no expert-parallel layer was found" in remark
    assert "run_experts()" in remark
    report.COUNTERS.calls = report.COUNTERS.parts = report.COUNTERS.taken_over = 4
    (remark,) = pipe_experts_feature.list_remarks()
    assert "try cut=experts" in remark
    monkeypatch.setattr(options.STATE, "config", MoEConfig("none"))
    assert not pipe_experts_feature.list_remarks(), "the user chose cut=none"
    monkeypatch.setattr(options.STATE, "config", MoEConfig())
    report.COUNTERS.stacked_calls = 1
    assert not pipe_experts_feature.list_remarks()
    report.COUNTERS.library_experts = 3
    (remark,) = pipe_experts_feature.list_remarks()
    assert "in 3 of 4 calls transformers computed its experts itself" in remark


def without_its_group() -> str:
    group = dist.new_group([0, 1])
    layer = ExpertParallelFFN(HIDDEN, 3, 4, group)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="create a new layer") as caught:
        layer(torch.randn(2, HIDDEN), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))
    return str(caught.value)


def test_a_layer_whose_group_was_destroyed(ranks):
    assert all("does not exist here" in text for text in ranks(2)(without_its_group))
