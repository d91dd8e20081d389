"""The ways in which scripts compile, as short training loops, with the frames that Dynamo compiles for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import utils
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.plugins.ddp.arms import Record, data, device, seen

STEPS = 12

_METRICS_LIMIT = 10_000


class Block(nn.Module):
    """A residual block of the script: Dynamo compiles no module of torch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Double(torch.autograd.Function):
    """An operation of the script."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Net(nn.Module):
    """A model of three blocks. ``kind`` names another operation of its forward.

    Transformers slices its list of layers in each forward, so that a ``ModuleList`` is made and filled there.
    """

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))
        self.last: nn.Module = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3] if self.kind == "sliced" else self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpoint" else block(x)
            if self.kind == "broken":
                torch._dynamo.graph_break()
        if self.kind == "submodule":
            self.last = nn.Tanh()
            x = self.last(x)
        if self.kind == "batch norm":
            x = self.last(x)
        if self.kind == "autograd function":
            x = Double.apply(x)
        if self.kind == "transforms":
            x = x + torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(x)
        if self.kind == "collective":
            mean = x.detach().mean()
            dist.all_reduce(mean)
            x = x * (1 + 0.01 * mean)
        if self.kind == "parameter":
            x = x + nn.Parameter(torch.ones(8))
        if self.kind == "buffer":
            self.calls = self.calls + 1
            x = x * (1 + 0.01 * self.calls)
        return x


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Yield a dictionary that has, after the block, the frames that Dynamo compiled in it and its graph breaks."""
    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(_METRICS_LIMIT)
    found: dict[str, Any] = {}
    try:
        yield found
        frames = Counter(
            f"{metric.co_name} in {Path(metric.co_filename or '').name}{', again' if metric.recompile_reason else ''}"
            for metric in utils.get_compilation_metrics()
            if metric.co_name
            is not None  # Compilers note what they do for a graph, as often as their caches lack it.
        )
        found["compiled"] = dict(frames)
        found["breaks"] = sum(utils.counters["graph_break"].values())
        found["stats"] = dict(utils.counters["stats"])
        found["frames"] = dict(utils.counters["frames"])
        found["autograd"] = dict(utils.counters["compiled_autograd"])
        found["limits"] = dict(utils.counters["recompile_limit"])
    finally:
        torch._dynamo.reset()


def count_frames(found: dict[str, Any]) -> dict[str, int]:
    """Return how often Dynamo compiled a frame, how often again, and how often graphs broke, wherever that was."""
    again = sum(count for name, count in found["compiled"].items() if name.endswith(", again"))
    return {"compiled": sum(found["compiled"].values()), "again": again, "breaks": found["breaks"]}


def describe_differences(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    """Return a line for each number of :func:`watched` that differs."""
    return [
        f"{name}: {stock[name]} became {patched[name]}"
        for name in stock
        if stock[name] != patched[name]
    ]


# --- the ways: each returns the wrapper and what the loop calls ---

Made = tuple[DistributedDataParallel, Callable[..., Tensor]]


def around(model: nn.Module, **how: Any) -> Made:
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.compile(wrapped, **how)


def inside(model: nn.Module, **how: Any) -> Made:
    wrapped = DistributedDataParallel(torch.compile(model, **how))
    return wrapped, wrapped


def in_place(model: nn.Module, **how: Any) -> Made:
    model.compile(**how)
    wrapped = DistributedDataParallel(model)
    return wrapped, wrapped


def wrapper_in_place(model: nn.Module, **how: Any) -> Made:
    wrapped = DistributedDataParallel(model)
    wrapped.compile(**how)
    return wrapped, wrapped


def blocks(model: Any, **how: Any) -> Made:
    for block in model.blocks:
        block.compile(**how)
    wrapped = DistributedDataParallel(model)
    return wrapped, wrapped


def wrapped_blocks(model: Any, **how: Any) -> Made:
    model.blocks = nn.ModuleList(torch.compile(block, **how) for block in model.blocks)
    wrapped = DistributedDataParallel(model)
    return wrapped, wrapped


def static(model: nn.Module, **how: Any) -> Made:
    wrapped = DistributedDataParallel(model, static_graph=True)
    return wrapped, torch.compile(wrapped, **how)


def searching(model: nn.Module, **how: Any) -> Made:
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return wrapped, torch.compile(wrapped, **how)


def function(model: nn.Module, **how: Any) -> Made:
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.compile(lambda x: wrapped(x), **how)


OTHER_WAYS = (wrapper_in_place, wrapped_blocks, static, function)

# --- the programs ---


def train(
    way: Callable[..., Made],
    kind: str = "",
    backend: str = "eager",
    rows: Sequence[int] = (4,),
    *,
    evaluates: bool = False,
    accumulates: bool = False,
    hooked: bool = False,
    compiles_step: bool = False,
    **how: Any,
) -> list[Record]:
    """Train by a compiled model for :data:`STEPS` steps.

    Args:
        way: What is compiled.
        kind: Of :class:`Net`.
        backend: Of ``torch.compile``.
        rows: Sizes of batches, in turn.
        evaluates: Evaluate after every third step.
        accumulates: Accumulate two microbatches.
        hooked: Put hooks on modules.
        compiles_step: Compile the optimizer's step.
        how: Other arguments of ``torch.compile``, or of the way.
    """
    torch.manual_seed(1)
    records: list[Record] = []
    with watched() as found:
        model = Net(kind).to(device())
        wrapped, called = way(model, backend=backend, **how)
        opt = torch.optim.AdamW(wrapped.parameters(), 1e-2)
        step = torch.compile(opt.step, backend=backend) if compiles_step else opt.step
        calls: list[int] = []
        if hooked:
            model.register_forward_hook(lambda *_: calls.append(1))
            model.blocks[0].register_full_backward_hook(lambda *_: None)
        for number in range(STEPS):
            opt.zero_grad()
            if accumulates:
                with wrapped.no_sync():
                    called(data(number, 4, 8, micro=1)).square().mean().backward()
            loss = called(data(number, rows[number % len(rows)], 8)).square().mean()
            loss.backward()
            records.append(
                {
                    "loss": loss.detach().clone(),
                    "grad": seen(wrapped)["grad"] if number % 4 == 0 else None,
                }
            )
            step()
            if evaluates and number % 3 == 1:
                wrapped.eval()
                with torch.no_grad():
                    records.append({"evaluated": called(data(number, 4, 8)).clone()})
                wrapped.train()
        records.append({"param": seen(wrapped)["param"], "calls": len(calls)})
    return [*records, {"dynamo": found}]


def train_step(*, clips: bool = False, reads: bool = False) -> list[Record]:
    """Compile a function that has all of a step: forward, backward, clipping and the optimizer's step.

    Args:
        clips: Clip the gradients' norm.
        reads: Return all gradients.
    """
    torch.manual_seed(1)
    with watched() as found:
        model = Net().to(device())
        wrapped = DistributedDataParallel(model)
        opt = torch.optim.SGD(wrapped.parameters(), 1e-1, momentum=0.9)

        @torch.compile(backend="eager")
        def step(x: Tensor) -> Any:
            opt.zero_grad()
            loss = wrapped(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1) if clips else None
            opt.step()
            return (
                loss.detach(),
                norm,
                [p.grad * 1 for p in wrapped.parameters()] if reads else None,
            )

        losses = [step(data(number, 4, 8)) for number in range(STEPS)]
    return [{"loss": losses, "param": seen(wrapped)["param"]}, {"dynamo": found}]


def train_and_read(what: str) -> list[Record]:
    """Compile a function that reads parameters or gradients between eager steps."""
    torch.manual_seed(1)
    records: list[Record] = []
    with watched() as found:
        wrapped = DistributedDataParallel(Net().to(device()))
        opt = torch.optim.AdamW(wrapped.parameters(), 1e-2)
        params = list(wrapped.parameters())
        functions = {
            "norm": lambda: nn.utils.clip_grad_norm_(params, 0.1),
            "gradients": lambda: [param.grad * 1 for param in params],
            "parameters": lambda: [param * 1 for param in params],
        }
        read = torch.compile(functions[what], backend="eager")
        for number in range(STEPS):
            opt.zero_grad()
            wrapped(data(number, 4, 8)).square().mean().backward()
            records.append({"read": read()})
            opt.step()
        records.append({"param": seen(wrapped)["param"]})
    return [*records, {"dynamo": found}]


def train_by_compiled_autograd(**config: Any) -> list[Record]:
    """Compile the backwards of an eager model; ``config`` is Dynamo's."""
    from torch._dynamo import compiled_autograd

    torch.manual_seed(1)
    records: list[Record] = []
    with watched() as found, torch._dynamo.config.patch(**config) if config else nullcontext():
        wrapped = DistributedDataParallel(Net().to(device()))
        opt = torch.optim.SGD(wrapped.parameters(), 1e-1)
        for number in range(STEPS):
            opt.zero_grad()
            loss = wrapped(data(number, 4, 8)).square().mean()
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            records.append({"grad": seen(wrapped)["grad"]})
            opt.step()
        records.append({"param": seen(wrapped)["param"]})
    return [*records, {"dynamo": found}]


def train_after_compiled_model() -> list[Record]:
    """Compile a model and train it, alone, before and while another one is wrapped: what is compiled must stay."""
    torch.manual_seed(1)
    records: list[Record] = []
    with watched() as found:
        alone = torch.compile(Net("sliced").to(device()), backend="eager")
        for number in range(2 * STEPS):
            alone(data(number, 4, 8)).square().mean().backward()
            if number == STEPS:
                wrapped, called = inside(Net("sliced").to(device()), backend="eager")
                opt = torch.optim.SGD(wrapped.parameters(), 1e-1)
            if number >= STEPS:
                called(data(number, 4, 8)).square().mean().backward()
                opt.step()
        records.append({"param": seen(wrapped)["param"], "grad": seen(alone)["grad"]})
    return [*records, {"dynamo": found}]
