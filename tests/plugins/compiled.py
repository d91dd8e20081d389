"""The ways in which scripts compile, each one short training loop, and a count of what Dynamo does meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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

REASONS = {}
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
    """Three blocks; ``kind`` names what else its forward does.

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
    """Yield a dictionary that has, at the end, which frames Dynamo compiled meanwhile and how often graphs broke."""
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
        )
        found["compiled"] = dict(frames)
        found["breaks"] = sum(utils.counters["graph_break"].values())
        found["stats"] = dict(utils.counters["stats"])
        REASONS.update(utils.counters["graph_break"])
        found["frames"] = dict(utils.counters["frames"])
        found["autograd"] = dict(utils.counters["compiled_autograd"])
        found["limits"] = dict(utils.counters["recompile_limit"])
    finally:
        torch._dynamo.reset()


def ddp(model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **kwargs)


# --- the ways: each returns the wrapper and what the loop calls ---

Made = tuple[DistributedDataParallel, Callable[..., Tensor]]


def around(model: nn.Module, backend: Any, **kwargs: Any) -> Made:
    wrapped = ddp(model)
    return wrapped, torch.compile(wrapped, backend=backend, **kwargs)


def inside(model: nn.Module, backend: Any, **kwargs: Any) -> Made:
    wrapped = ddp(torch.compile(model, backend=backend, **kwargs))
    return wrapped, wrapped


def in_place(model: nn.Module, backend: Any, **kwargs: Any) -> Made:
    model.compile(backend=backend, **kwargs)
    wrapped = ddp(model)
    return wrapped, wrapped


def wrapper_in_place(model: nn.Module, backend: Any, **kwargs: Any) -> Made:
    wrapped = ddp(model)
    wrapped.compile(backend=backend, **kwargs)
    return wrapped, wrapped


def blocks(model: Any, backend: Any, **kwargs: Any) -> Made:
    for block in model.blocks:
        block.compile(backend=backend, **kwargs)
    wrapped = ddp(model)
    return wrapped, wrapped


def wrapped_blocks(model: Any, backend: Any, **kwargs: Any) -> Made:
    model.blocks = nn.ModuleList(torch.compile(block, backend=backend, **kwargs) for block in model.blocks)
    wrapped = ddp(model)
    return wrapped, wrapped


def static(model: nn.Module, backend: Any, **kwargs: Any) -> Made:
    wrapped = ddp(model, static_graph=True)
    return wrapped, torch.compile(wrapped, backend=backend, **kwargs)


def searching(model: nn.Module, backend: Any, **kwargs: Any) -> Made:
    wrapped = ddp(model, find_unused_parameters=True)
    return wrapped, torch.compile(wrapped, backend=backend, **kwargs)


def function(model: nn.Module, backend: Any, **kwargs: Any) -> Made:
    wrapped = ddp(model)
    return wrapped, torch.compile(lambda x: wrapped(x), backend=backend, **kwargs)


WAYS = (around, inside, in_place, wrapper_in_place, blocks, wrapped_blocks, static, searching, function)


def train(way: Callable[..., Made], kind: str = "", backend: str = "eager", **how: Any) -> list[Record]:
    """Train by a compiled model for :data:`STEPS` steps.

    Args:
        way: What is compiled.
        kind: Of :class:`Net`.
        backend: Of ``torch.compile``.
        how: ``rows`` for batches of several sizes; ``evaluates`` and ``accumulates`` with what loops do besides;
            ``step`` with what is compiled of the optimizer; all else is for ``torch.compile``.
    """
    rows, step_kind = how.pop("rows", (4,)), how.pop("step", "")
    evaluates, accumulates, hooked = (how.pop(name, False) for name in ("evaluates", "accumulates", "hooked"))
    torch.manual_seed(1)
    records: list[Record] = []
    with watched() as found:
        model = Net(kind).to(device())
        wrapped, called = way(model, backend, **how)
        opt = torch.optim.AdamW(wrapped.parameters(), 1e-2)
        step, zero_grad = opt.step, opt.zero_grad
        if step_kind:
            step = torch.compile(opt.step, backend=backend)
        if step_kind == "with zero_grad":
            zero_grad = torch.compile(opt.zero_grad, backend=backend)
        seen_by_hooks = []
        if hooked:
            model.register_forward_hook(lambda *args: seen_by_hooks.append(1))
            model.blocks[0].register_full_backward_hook(lambda *args: None)
        for number in range(STEPS):
            zero_grad()
            if accumulates:
                with wrapped.no_sync():
                    called(data(number, 4, 8, micro=1)).square().mean().backward()
            loss = called(data(number, rows[number % len(rows)], 8)).square().mean()
            loss.backward()
            records.append({"grad": seen(wrapped)["grad"]} if number % 4 == 0 else {})
            step()
            if evaluates and number % 3 == 1:
                wrapped.eval()
                with torch.no_grad():
                    records.append({"evaluated": called(data(number, 4, 8)).clone()})
                wrapped.train()
            records.append({"loss": loss.detach().clone()})
        records.append({"param": seen(wrapped)["param"], "hooks": len(seen_by_hooks)})
    return [*records, {"dynamo": found}]


def train_step_compiled(clips: bool = False, reads: bool = False, **config: Any) -> list[Record]:
    """Compile a function that has all of a step: forward, backward, clipping and the optimizer's step.

    Args:
        clips: Clip the gradients' norm.
        reads: Return a gradient.
        config: Of Dynamo.
    """
    torch.manual_seed(1)
    with watched() as found, torch._dynamo.config.patch(**config) if config else nullcontext():
        model = Net().to(device())
        wrapped = ddp(model)
        opt = torch.optim.SGD(wrapped.parameters(), 1e-1, momentum=0.9)

        @torch.compile(backend="eager")
        def step(x: Tensor) -> Any:
            opt.zero_grad()
            loss = wrapped(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1) if clips else None
            opt.step()
            return loss.detach(), norm, [p.grad * 1 for p in wrapped.parameters()] if reads else None

        losses = [step(data(number, 4, 8)) for number in range(STEPS)]
    return [{"loss": losses, "param": seen(wrapped)["param"]}, {"dynamo": found}]


def train_and_compile_what_follows(what: str) -> list[Record]:
    """Compile a function that reads parameters or gradients between eager steps."""
    torch.manual_seed(1)
    records: list[Record] = []
    with watched() as found:
        wrapped = ddp(Net().to(device()))
        opt = torch.optim.AdamW(wrapped.parameters(), 1e-2)
        params = list(wrapped.parameters())
        clip = torch.compile(lambda: nn.utils.clip_grad_norm_(params, 0.1), backend="eager")
        means = torch.compile(lambda: [p * 1 for p in params], backend="eager")
        norms = torch.compile(lambda: [p.grad * 1 for p in params], backend="eager")
        for number in range(STEPS):
            opt.zero_grad()
            wrapped(data(number, 4, 8)).square().mean().backward()
            if what == "clips":
                clip()
            if what == "reads gradients":
                records.append({"grad": norms()})
            opt.step()
            if what == "reads parameters":
                records.append({"param": means()})
        records.append({"param": seen(wrapped)["param"]})
    return [*records, {"dynamo": found}]


def train_with_compiled_autograd(static_graph: bool = False) -> list[Record]:
    """Run backwards under compiled autograd, around an eager model, as a script does that turns it on by itself."""
    from torch._dynamo import compiled_autograd

    torch.manual_seed(1)
    records: list[Record] = []
    with watched() as found:
        wrapped = ddp(Net().to(device()), static_graph=static_graph)
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


def train_one_after_the_other(backend: str = "eager") -> list[Record]:
    """Compile one model, and train it, before another one is wrapped: what is compiled must stay."""
    torch.manual_seed(1)
    records: list[Record] = []
    with watched() as found:
        alone = Net("sliced").to(device())
        frozen = torch.compile(alone, backend=backend)
        for number in range(STEPS):
            frozen(data(number, 4, 8)).square().mean().backward()
            if number % 4 == 1:
                model = Net("sliced").to(device())
                wrapped, called = inside(model, backend)
                opt = torch.optim.SGD(wrapped.parameters(), 1e-1)
            if number > 0:
                called(data(number, 4, 8)).square().mean().backward()
                opt.step()
                records.append({"param": seen(wrapped)["param"]})
    return [*records, {"dynamo": found}]
