"""Compiled code reads new values, and is compiled as often as without pending parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ovpatch.overlap.tensors.pending_param import is_pending, wait_for_all
from tests.overlap.stale import GARBAGE, Stale, entrances
from tests.plugins.compiled import watched

X = torch.linspace(-1, 1, 12).view(3, 4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
    )


def compiled_model(model: nn.Sequential, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def full_graph(model: nn.Sequential, backend: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


class Block(nn.Module):
    """A user's module. torch does not compile its own modules alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def in_place(model: nn.Sequential, backend: Any) -> Any:
    compiled = Block(model)
    compiled.compile(backend=backend)
    return compiled


def blocks(model: nn.Sequential, backend: Any) -> Any:
    for i in (0, 2, 4):
        model[i] = Block(model[i])
        model[i].compile(backend=backend)
    return model


def wrapped_blocks(model: nn.Sequential, backend: Any) -> Any:
    for i in (0, 2, 4):
        model[i] = torch.compile(Block(model[i]), backend=backend)
    return model


class OwnCall(Block):
    """A module whose call Dynamo traces into ``Module._call_impl``. Of other modules it traces ``forward`` directly."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


def own_calls(model: nn.Sequential, backend: Any) -> Any:
    return full_graph(nn.Sequential(*map(OwnCall, model)), backend)


def function(model: nn.Sequential, backend: Any) -> Any:
    return torch.compile(lambda x: model(x), backend=backend)


def broken(model: nn.Sequential, backend: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model[:2](x)
        torch._dynamo.graph_break()
        return model[2:](x)

    return torch.compile(forward, backend=backend)


WAYS = [(compiled_model, "aot_eager")] + [
    (way, "eager")
    for way in (full_graph, own_calls, in_place, blocks, wrapped_blocks, function, broken)
]


def train(way: Callable[..., Any], backend: str, *, pending: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, counter = network(), CompileCounterWithBackend(backend)
    params = list(model.parameters())
    compiled, losses = way(model, counter), []
    for _ in range(3):
        losses += step(compiled, model)
        if pending:
            decay_late(params)
        for param in params if not pending else ():
            param.data.mul_(0.9)
    wait_for_all()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return {
        "losses": losses,
        "graphs": counter.frame_count,
        "ops": counter.op_count,
        "breaks": breaks,
    }


def step(compiled: Any, model: nn.Module) -> list[float]:
    with torch.no_grad():
        quiet_loss = compiled(X).square().sum().item()
    loss = compiled(X).square().sum()
    loss.backward()
    model.zero_grad()
    return [quiet_loss, loss.item()]


def decay_late(params: list[nn.Parameter]) -> None:
    holder = Stale(params)
    holder.values = [value * 0.9 for value in holder.values]
    holder.mark()


@pytest.mark.parametrize(
    ("way", "backend"), WAYS, ids=lambda value: getattr(value, "__name__", value)
)
def test_compiled_code_equals_that_of_stock_pytorch(way, backend):
    stock = train(way, backend, pending=False)
    with entrances(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks.*")
        assert train(way, backend, pending=True) == stock
    assert stock["graphs"] > 0


def test_code_compiled_before_the_read_hooks_waits_as_well():
    torch._dynamo.reset()
    model = network()
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    with entrances():
        decay_late(list(model.parameters()))
        found = compiled(X)
    assert torch.equal(found, model(X))


def test_a_compiled_block_leaves_other_blocks_pending():
    torch._dynamo.reset()
    model = blocks(network(), "eager")
    with entrances():
        first, last = (
            Stale(list(model[0].parameters())).mark(),
            Stale(list(model[4].parameters())).mark(),
        )
        model[0](X)
        assert (first.settled, last.settled) == (1, 0)
        assert is_pending(model[4].inner.weight)
        wait_for_all()


class Borrows(nn.Module):
    """A module that reads a parameter of a module that is not its submodule."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.lenders = [lender]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.lenders[0].weight


def test_a_compiled_block_reads_new_values_of_a_parameter_of_another_module():
    torch._dynamo.reset()
    lender = nn.Linear(4, 4)
    model = Borrows(lender)
    model.compile(backend="eager")
    with entrances():
        for _ in range(3):
            decay_late(list(lender.parameters()))
            found = model(X)
            assert torch.equal(found, X @ lender.weight)
    assert not (lender.weight == GARBAGE).any()


# With one thread Inductor compiles in this process, and not in processes that would import torch first.
@pytest.mark.slow
@torch._inductor.config.patch(compile_threads=1)
def test_inductor_reads_new_values():
    stock = train(compiled_model, "inductor", pending=False)
    with entrances():
        assert train(compiled_model, "inductor", pending=True) == stock


class _BlockWithHook(nn.Module):
    """A block whose backward hook has torch call an autograd.Function between its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_full_backward_hook(lambda *_: None)
        self.compile(backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _count_compiled_frames(pending: nn.Module | None) -> dict[str, int]:
    """Train a compiled block while parameters of another module are pending; return the compiled frames."""
    torch.manual_seed(0)
    block = _BlockWithHook()
    with watched() as found:
        for _ in range(3):
            if pending is not None:
                Stale(list(pending.parameters())).mark()
            block(torch.ones(2, 4, requires_grad=True)).sum().backward()
            wait_for_all()
    return found["compiled"]


def test_dynamo_compiles_no_frame_of_a_wait():
    """Arguments of an autograd.Function are searched where Dynamo examines all frames."""
    expected = _count_compiled_frames(None)
    with entrances():
        assert _count_compiled_frames(nn.Linear(4, 4)) == expected
