"""Captures and replays of CUDA graphs use the new values of parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ovpatch.overlap.tensors.pending_param import PENDING, wait_for_all
from tests.overlap.stale import entrances, stale


@pytest.fixture(autouse=True)
def _entrances():
    with entrances():
        yield


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


GRAPHS = [
    torch.cuda.CUDAGraph,
    *([torch.accelerator.Graph] if hasattr(torch.accelerator, "Graph") else []),
]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ["capture_begin", "replay"])
def test_captures_and_replays_wait_for_all_parameters_first(name, graph):
    model = network()
    expected = copy.deepcopy(model.state_dict())
    holder = stale(model)
    # torch itself raises, because None is no graph.
    with pytest.raises((TypeError, AttributeError)):
        getattr(graph, name)(None)
    assert holder.settled == 1
    assert not PENDING
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["capture_begin", "replay"])
def test_captures_and_replays_of_inductor_do_not_wait(name):
    """Check that code which Inductor compiles separately keeps its overlap, because it waits for its own inputs."""
    holder = stale(network())
    called = f"def call(graph):\n    graph.{name}(None)"
    inductor: dict[str, Any] = {"__name__": "torch._inductor.cudagraph_trees"}
    exec(called, inductor)
    with pytest.raises((TypeError, AttributeError)):
        inductor["call"](torch.cuda.CUDAGraph)
    assert holder.settled == 0
    wait_for_all()


@pytest.mark.gpu(1)
def test_a_graph_reads_gathered_parameters():
    model = network().cuda()
    x, graph = torch.randn(3, 4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad():
        expected = model(x)
        torch.cuda.synchronize()
        holder = stale(model)
        with torch.cuda.graph(graph):
            outputs = model(x)
        assert holder.settled == 1
        for scale in (0.5, 3.0):
            holder.values = [value * scale for value in holder.values]
            for param, value in zip(holder.params, holder.values, strict=True):
                param.copy_(value)
            expected = model(x)
            holder.mark()
            graph.replay()
            assert torch.equal(outputs, expected)
    assert holder.settled == 3
