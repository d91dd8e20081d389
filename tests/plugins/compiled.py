"""The ways in which scripts compile, as short training loops, with the frames that Dynamo compiles for them."""

from __future__ import annotations

import gc
import re
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
    """A model of two blocks. ``kind`` names another operation of its forward.

    Transformers slices its list of layers in each forward, so that a ``ModuleList`` is made and filled there.
    """

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))
        self.last: nn.Module = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2] if self.kind == "sliced" else self.blocks:
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
    # A finalizer of an earlier case that ran inside of compiled code would be one more frame.
    gc.collect()
    gc.disable()
    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(_METRICS_LIMIT)
    found: dict[str, Any] = {}
    try:
        yield found
        frames = Counter(
            f"{_name_frame(metric)}{', again' if metric.recompile_reason else ''}"
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
        gc.enable()
        torch._dynamo.reset()


def _name_frame(metric: Any) -> str:
    # Files of generated code, such as "<eval_with_key>.2", have running numbers.
    file = re.sub(r"(?<=>)\.\d+$", "", Path(metric.co_filename or "").name)
    return f"{metric.co_name} in {file}"


def freeze_survivors() -> None:
    """Exclude what is alive now from later collections of garbage, of which each program has four.

    After the first compilation, most of these objects belong to Dynamo. Each collection would read them for 40 ms.
    """
    gc.collect()
    gc.freeze()


def count_frames(found: dict[str, Any]) -> dict[str, int]:
    """Return how often Dynamo compiled a frame, how often again, and how often graphs broke, wherever that was."""
    again = sum(count for name, count in found["compiled"].items() if name.endswith(", again"))
    return {"compiled": sum(found["compiled"].values()), "again": again, "breaks": found["breaks"]}


def describe_differences(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    """Return a line for each number of :func:`watched` that differs.

    The stock run comes first, so Dynamo may inspect a frame there that it skips later.
    """
    return [
        f"{name}: {stock[name]} became {patched[name]}"
        for name in stock
        if stock[name] != patched[name]
        and not (name == "frames" and patched[name]["total"] < stock[name]["total"])
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


# --- pipelines, experts and Megatron ---


class Part(nn.Module):
    """A stage of a pipeline, or a model that ``cut()`` splits: blocks, and a linear that no script compiles."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def compile_blocks(part: Any) -> nn.Module:
    """Compile the blocks of a stage in place; blocks of other stages have no parameters."""
    for block in part.blocks:
        if next(block.parameters(), None) is not None:
            block.compile(backend="eager")
    return part  # type: ignore[no-any-return]


def replace_blocks(part: Any) -> nn.Module:
    """Replace the blocks of a stage by compiled ones."""
    for index, block in enumerate(part.blocks):
        if next(block.parameters(), None) is not None:
            part.blocks[index] = torch.compile(block, backend="eager")
    return part  # type: ignore[no-any-return]


def compile_stage(part: nn.Module) -> nn.Module:
    """Compile a stage."""
    part.compile(backend="eager")
    return part


def train_pipeline(
    way: Callable[[Any], nn.Module], schedule: str = "Schedule1F1B", *, is_cut: bool = False
) -> list[Record]:
    """Train a pipeline of two stages for :data:`STEPS` steps.

    Args:
        way: Compiles a stage.
        schedule: Its class.
        is_cut: Whether ``cut()`` makes the stages.
    """
    from torch.distributed.pipelining import PipelineStage, schedules

    from ovpatch_plugins.pipeline import cut

    records: list[Record] = []
    rank, loss_fn = dist.get_rank(), nn.functional.mse_loss
    is_single = schedule in ("Schedule1F1B", "ScheduleGPipe")
    with watched() as found:
        if is_cut:
            torch.manual_seed(1)
            made = cut(
                Part(4),
                dist.group.WORLD,  # type: ignore[arg-type]
                (torch.ones(4, 8),),
                n_microbatches=4,
                loss_fn=loss_fn,
                balance="count",
                wrap=way,
            )
            parts, is_last = made.model_parts, made.has_last_stage
        else:
            parts = []
            for index in [rank] if is_single else [rank, rank + 2]:
                torch.manual_seed(index)
                parts.append(way(Part()))
            count = 2 * len(parts)
            stages = [
                PipelineStage(part, rank + 2 * index, count, torch.device("cpu"))
                for index, part in enumerate(parts)
            ]
            given: Any = stages[0] if is_single else stages
            made, is_last = getattr(schedules, schedule)(given, 4, loss_fn=loss_fn), rank == 1
        params = [
            (f"{index}.{name}", param)
            for index, part in enumerate(parts)
            for name, param in part.named_parameters()
        ]
        opt = torch.optim.AdamW([param for _, param in params], 1e-2)
        # All ranks of a pipeline have the same batches.
        draw = torch.Generator().manual_seed(3)
        for _ in range(STEPS):
            opt.zero_grad()
            x, y = (torch.randn(16, 8, generator=draw) for _ in range(2))
            losses: list[Tensor] = []
            made.step(*((x,) if is_cut or rank == 0 else ()), target=y, losses=losses)
            records.append(
                {
                    "losses": [loss.detach().clone() for loss in losses] if is_last else [],
                    "grad": {name: param.grad.clone() for name, param in params},  # type: ignore[union-attr]
                }
            )
            opt.step()
        records.append({"param": {name: param.detach().clone() for name, param in params}})
    return [*records, {"dynamo": found}]


def train_experts(path: str, over: str, way: str) -> list[Record]:
    """Train an expert-parallel model of transformers.

    Args:
        path: Folder of the model.
        over: Of ``tests.plugins.pipe_experts.test_huggingface``.
        way: What is compiled: ``layers``, ``experts`` or ``model``.
    """
    from tests.plugins.pipe_experts import test_huggingface as huggingface

    torch.manual_seed(1)
    with watched() as found:
        model: Any = huggingface.loaded(path, over)
        parts = {
            "layers": model.model.layers,
            "experts": [layer.mlp.experts for layer in model.model.layers],
            "model": [model],
        }
        for part in parts[way]:
            part.compile(backend="eager")
        opt = torch.optim.SGD(model.parameters(), 0.01)
        records = [huggingface.step(model, opt, number, over) for number in range(STEPS)]
    return [*records, {"dynamo": found}]


def train_megatron(way: str, **config: Any) -> list[Record]:
    """Train a GPT of Megatron-Core whose layers are compiled.

    Args:
        way: What is compiled: ``layers`` or ``linears``.
        config: Of ``tests.plugins.megatron.models.train_gpt``.
    """
    from unittest import mock

    from tests.plugins.megatron import models

    def prepare(model: Any) -> None:
        for layer in model.decoder.layers:
            for part in [layer] if way == "layers" else [layer.self_attention, layer.mlp]:
                part.compile(backend="eager")

    torch.manual_seed(1)
    with watched() as found, mock.patch.object(models, "compile_parts", prepare, create=True):
        records = models.train_gpt(steps=STEPS, prepare="compile_parts", config=config)
    return [*records, {"dynamo": found}]
