"""CUDA graphs over parameters that are gathered: of a whole step, of a forward, and where there can be none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ovpatch.overlap import cuda_graphs
from tests.plugins.ddp.arms import Record, data, device
from tests.plugins.ddp.test_gpu_options import Mixed, loop_graphed
from tests.plugins.dist_optimizer.arms import both
from tests.plugins.dist_optimizer.checks import check_all, ddp
from tests.plugins.dist_optimizer.test_param_dtype_state import made, patched, remarks, train

GPU = {"backend": "nccl", "timeout": 120}


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(data(number, 32, 640)).square().mean().backward()
    optimizer.step()


def loop_of_replays(when: str) -> list[Any]:
    """Steps, between which a graph of the forward is replayed, captured before the first of them or after some."""
    wrapped = ddp(Mixed().to(device()))
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    for number in range(0 if when == "before" else 4):
        step(wrapped, optimizer, number)
    static, graph = data(20, 32, 640), torch.cuda.CUDAGraph()
    with torch.no_grad():
        wrapped.module(static)
    optimizer.zero_grad()
    if when == "behind a step":
        step(wrapped, optimizer, 4)
    with torch.no_grad(), torch.cuda.graph(graph):
        outputs = wrapped.module(static)
    records = []
    for number in range(5, 10):
        step(wrapped, optimizer, number)
        static.copy_(data(number + 20, 32, 640))
        graph.replay()
        records.append(outputs.clone())
    torch.cuda.synchronize()
    del graph
    return records


def loop_of_callables() -> list[Record]:
    """A part of the model whose forward and backward are graphs, made before the model is wrapped."""
    model = Mixed().to(device())
    given = torch.randn(32, 640, device=device(), requires_grad=True)
    model.norm = torch.cuda.make_graphed_callables(model.norm, (given,))
    wrapped = ddp(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    records: list[Any] = []
    for number in range(6):
        step(wrapped, optimizer, number)
        records.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return records


@pytest.mark.gpu(2)
@pytest.mark.parametrize("copy_engines", ["off", "auto"])
def test_a_whole_step(ranks, copy_engines):
    options = {"copy_engines": copy_engines}
    check_all([{"": r} for r in ranks(2)(both, loop_graphed, options=options, **GPU)], steps=12 + 1 + 3)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("when", ["before", "after", "behind a step"])
def test_replays_between_steps(ranks, when):
    for copy_engines in ("off", "auto"):
        options = {"copy_engines": copy_engines}
        check_all([{"": r} for r in ranks(2)(both, loop_of_replays, when, options=options, **GPU)], steps=5)


@pytest.mark.gpu(2)
def test_graphed_callables(ranks):
    check_all([{"": r} for r in ranks(2)(both, loop_of_callables, **GPU)], steps=6)


def captured() -> str:
    """Capture a forward over parameters that are kept in bf16; return what is raised, with what led to it."""
    with patched():
        model, optimizer = made()
        train(model, optimizer, range(4))
        try:
            with pytest.raises(RuntimeError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()), torch.no_grad():
                model.module(data(0, 5, 6))
        finally:
            cuda_graphs.captures.total = 0  # for the tests that come after this one in the process
        raised, texts = caught.value, []
        while raised is not None:  # the last is torch's own, of the capture that ended early
            texts.append(str(raised))
            raised = raised.__context__
        return "\n".join(texts)


@pytest.mark.gpu(2)
def test_parameters_that_are_kept_in_bf16_refuse(ranks):
    for message in ranks(2)(captured, **GPU):
        assert "ovpatch: a CUDA graph cannot be captured" in message


def after_a_capture(first: int) -> set[str]:
    with patched():
        model, optimizer = made()
        train(model, optimizer, range(first))
        cuda_graphs.captures.total = 1
        try:
            train(model, optimizer, range(first, 6))
        finally:
            cuda_graphs.captures.total = 0
        return remarks()


def test_nothing_is_kept_in_bf16_that_a_graph_may_read(ranks):
    reason = "0.weight and 3 more cannot be kept in bfloat16: a CUDA graph was captured, whose replays may read it"
    kept = "{} parameters are kept and gathered in bfloat16"
    assert all(kept.format(4) in told for told in ranks(2)(after_a_capture, 4))
    for first in (0, 1):
        for told in ranks(2)(after_a_capture, first):
            assert told == {kept.format(0), reason}
