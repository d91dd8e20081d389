"""Layers with experts, in one process and over several, and the records of their training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ovpatch_plugins.pipe_experts import experts
from ovpatch_plugins.pipe_experts.experts import ACTIVATIONS
from ovpatch_plugins.pipe_experts.layer import (
    ExpertParallelFFN,
    run_experts,
    run_grouped_experts,
    run_layer,
)
from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig
from ovpatch_plugins.pipe_experts.routing import drop_over_capacity
from tests.plugins.ddp.arms import named
from tests.support.equality import compare

DOUBLE = torch.float64
Record = dict[str, Any]


def device() -> torch.device:
    """Return the device of this rank; a process without ranks computes on the CPU."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A layer with experts and its training.

    Attributes:
        local: Experts of a rank.
        top_k: Experts of a token.
        tokens: Tokens of each rank; ranks beyond the last number start over.
        favourites: Tokens of every rank go to these experts only; to any expert if it is empty.
        activation: The activation between the GEMMs.
        shared: Whether there are shared experts.
        capacity: Tokens of a rank that an expert takes; None for any number.
        frozen: Parameters whose names begin so are frozen; ``x`` is the input.
        module: The kind of the layer: ``stacked`` weights, or one of :data:`KINDS`.
        steps: Steps of the optimizer.
        seed: The seed of weights and inputs.
        sizes: Features of a token, and features between the two GEMMs of an expert.
    """

    local: int = 2
    top_k: int = 2
    tokens: tuple[int, ...] = (7, 4, 9)
    favourites: tuple[int, ...] = ()
    activation: str = "swiglu"
    shared: bool = False
    capacity: int | None = None
    frozen: tuple[str, ...] = ()
    module: str = "stacked"
    steps: int = 2
    seed: int = 0
    config: MoEConfig = field(default_factory=MoEConfig)
    sizes: tuple[int, int] = (6, 5)

    def tokens_of(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def weights(self, world: int) -> dict[str, Tensor]:
        """Return all weights: of all experts, of the router, of shared experts."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden, ffn = self.sizes
        count, wide = world * self.local, ffn * (2 if self.activation == "swiglu" else 1)
        shapes = {
            "up": (count, wide, hidden),
            "down": (count, hidden, ffn),
            "router": (count, hidden),
            "shared": (hidden, hidden),
        }
        drawn = {
            name: torch.randn(shape, generator=generator, dtype=DOUBLE)
            for name, shape in shapes.items()
        }
        return {name: weight.to(device()) for name, weight in drawn.items()}

    def x(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + 100 * step + rank)
        return torch.randn(
            self.tokens_of(rank), self.sizes[0], generator=generator, dtype=DOUBLE
        ).to(device())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer.

        Some lazy experts have no gradient instead of zero, so their optimizer must treat both the same.
        """
        return torch.optim.AdamW(
            model.parameters(),
            0.01,
            foreach=False,
            weight_decay=0.0 if self.module == "lazy" else 0.01,
        )

    def routed(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, ``[tokens, k]`` both."""
        logits = x @ router.t()
        if self.favourites:
            masked = torch.ones(len(router), dtype=torch.bool, device=x.device)
            masked[list(self.favourites)] = False
            logits = logits.masked_fill(masked, -1e9)
        probabilities, index = logits.softmax(-1).topk(self.top_k, dim=-1)
        return index, probabilities


class OneProcess(nn.Module):
    """All experts on all tokens, computed sequentially."""

    def __init__(self, case: Case, world: int) -> None:
        super().__init__()
        self.case, self.world = case, world
        for name, weight in case.weights(world).items():
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        index, weights = self.case.routed(x, self.router)
        if self.case.capacity is not None:
            index = drop_over_capacity(index, len(self.router), self.case.capacity)
        out = torch.zeros_like(x)
        for expert in range(len(self.router)):
            token, slot = torch.where(index == expert)
            h = (
                ACTIVATIONS[self.case.activation](x[token] @ self.up[expert].t())
                @ self.down[expert].t()
            )
            out = out.index_add(0, token, h * weights[token, slot, None])
        return out + x @ self.shared.t() if self.case.shared else out


class Separate(nn.Module):
    """A module with a list of experts, as home-made layers have."""

    def __init__(self, case: Case, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.case = case
        self.experts = nn.ModuleList(
            _Expert(case.activation, a, b) for a, b in zip(up, down, strict=True)
        )

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return run_experts(self.experts, x, index, weights, dist.group.WORLD, self.case.config)


class Lazy(Separate):
    """Separate experts that return their input if it has no rows."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        lazy = [_Lazy(expert) for expert in self.experts]
        return run_experts(lazy, x, index, weights, dist.group.WORLD, self.case.config)


class _Lazy(nn.Module):
    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, rows: Tensor) -> Tensor:
        return self.expert(rows) if len(rows) else rows


class _Expert(nn.Module):
    def __init__(self, activation: str, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.activation = activation
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, rows: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](rows @ self.up.t()) @ self.down.t()


class Grouped(nn.Module):
    """Experts that one function computes from rows sorted by expert and the number of rows of each."""

    def __init__(self, case: Case, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.case = case
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def compute(self, rows: Tensor, numbers: Tensor) -> Tensor:
        assert len(numbers) == self.case.local
        split = rows.split(numbers.tolist())
        parts = [
            ACTIVATIONS[self.case.activation](some @ up.t()) @ down.t()
            for some, up, down in zip(split, self.up, self.down, strict=True)
        ]
        return torch.cat(parts)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return run_grouped_experts(
            self.compute, self.case.local, x, index, weights, dist.group.WORLD, self.case.config
        )


class Numbered(nn.Module):
    """Experts that one function computes from the number of each row's expert; it skips experts without rows."""

    def __init__(self, case: Case, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.case = case
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def compute(self, rows: Tensor, numbers: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in numbers.unique().tolist():
            (here,) = torch.where(numbers == expert)
            h = (
                ACTIVATIONS[self.case.activation](rows[here] @ self.up[expert].t())
                @ self.down[expert].t()
            )
            out = out.index_add(0, here, h)
        return out

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        factory = functools.partial(experts.IndexedExperts, function=self.compute)
        return run_layer(
            x, index, weights, factory, self.case.local, dist.group.WORLD, self.case.config
        )


KINDS: dict[str, Callable[[Case, Tensor, Tensor], nn.Module]] = {
    "separate": Separate,
    "lazy": Lazy,
    "grouped": Grouped,
    "numbered": Numbered,
}


class OverRanks(nn.Module):
    """The model of :class:`OneProcess` over ranks; each rank has its own tokens and experts."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        world, rank = dist.get_world_size(), dist.get_rank()
        weights = case.weights(world)
        own = slice(rank * case.local, (rank + 1) * case.local)
        self.router = nn.Parameter(weights["router"])
        self.shared = nn.Parameter(weights["shared"])
        if case.module != "stacked":
            self.layer: nn.Module = KINDS[case.module](
                case, weights["up"][own], weights["down"][own]
            )
        else:
            self.layer = made_layer(case, world)
            with torch.no_grad():
                self.layer.up.copy_(weights["up"][own])
                self.layer.down.copy_(weights["down"][own])

    def forward(self, x: Tensor) -> Tensor:
        index, weights = self.case.routed(x, self.router)
        if self.case.capacity is not None:
            index = drop_over_capacity(index, len(self.router), self.case.capacity)
        return self.layer(x, index, weights)

    def stacked(self, name: str, of: Callable[[nn.Parameter], Tensor | None]) -> Tensor | None:
        """Return a value of the parameters of this rank's experts, stacked."""
        if self.case.module not in ("separate", "lazy"):
            return of(getattr(self.layer, name))
        params = [getattr(expert, name) for expert in self.layer.experts]
        found = [of(param) for param in params]
        if all(value is None for value in found) and not params[0].requires_grad:
            return None
        return torch.stack(
            [
                torch.zeros_like(param) if value is None else value
                for value, param in zip(found, params, strict=True)
            ]
        )


class _Shared(nn.Module):
    """A linear whose weight belongs to another module."""

    def __init__(self, owner: list[nn.Module]) -> None:
        super().__init__()
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.owner[0].shared.t()


def made_layer(case: Case, world: int) -> ExpertParallelFFN:
    arguments = {
        "activation": case.activation,
        "config": case.config,
        "dtype": DOUBLE,
        "device": device(),
    }
    return ExpertParallelFFN(*case.sizes, world * case.local, **arguments)


def train(
    case: Case, *, forward: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> list[Record]:
    """Train over the ranks, with summed gradients of dense parameters; return the records of this rank."""
    model = OverRanks(case)
    if case.shared and case.module == "stacked":
        model.layer.shared = _Shared([model])
    for name, param in model.named_parameters():
        param.requires_grad_(not name.split(".")[-1].startswith(case.frozen or "-"))
    optimizer = case.optimizer(model)
    records = []
    for step in range(case.steps):
        x = case.x(dist.get_rank(), step).requires_grad_("x" not in case.frozen)
        out = (forward or nn.Module.__call__)(model, x)
        out.square().sum().backward()
        for dense in (model.router, model.shared):
            if dense.grad is not None:
                dist.all_reduce(dense.grad)
        records.append(_on_cpu({"out": out.detach(), "x": x.grad, **_gradients(model)}))
        optimizer.step()
        optimizer.zero_grad()
    params = {
        name: model.stacked(name, lambda param: param.detach().clone()) for name in ("up", "down")
    }
    return [*records, _on_cpu(params)]


def train_all(cases: Mapping[str, Case], **kwargs: Any) -> dict[str, list[Record]]:
    """Call :func:`train` for every case; an exception names its case."""
    found = {}
    for name, case in cases.items():
        with named(name):
            found[name] = train(case, **kwargs)
    return found


def check(ranks: Any, cases: Mapping[str, Case], **kwargs: Any) -> None:
    """Train all cases in one call of ``ranks``, which is ``ranks(world)``, and compare with one process."""
    found, failures = ranks(train_all, cases, **kwargs), []
    for name, case in cases.items():
        right = expected(replace(case, config=MoEConfig()), ranks.world)
        for rank in range(ranks.world):
            try:
                compare(right[rank], found[rank][name], floor=1e-10).assert_equal()
            except AssertionError as error:
                failures.append(f"case {name}, rank {rank}: {error}")
    assert not failures, "\n\n".join(failures)


def _on_cpu(record: Record) -> Record:
    return {name: None if value is None else value.cpu() for name, value in record.items()}


def _gradients(model: OverRanks) -> Record:
    found = {
        name: model.stacked(name, lambda p: None if p.grad is None else p.grad.clone())
        for name in ("up", "down")
    }
    return {**found, "router": model.router.grad.clone() if model.router.grad is not None else None}


@functools.lru_cache
def expected(case: Case, world: int) -> list[list[Record]]:
    """Train in one process on the tokens of all ranks; return the records that each rank should have."""
    model = OneProcess(case, world)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(case.frozen or "-"))
    optimizer = case.optimizer(model)
    records: list[list[Record]] = [[] for _ in range(world)]
    own = [slice(rank * case.local, (rank + 1) * case.local) for rank in range(world)]
    for step in range(case.steps):
        xs = [case.x(rank, step).requires_grad_("x" not in case.frozen) for rank in range(world)]
        # The capacity counts the tokens of one rank.
        outs = [model(x) for x in xs]
        torch.cat(outs).square().sum().backward()
        for rank in range(world):
            grads = {name: _of(getattr(model, name).grad, own[rank]) for name in ("up", "down")}
            router = None if model.router.grad is None else model.router.grad.clone()
            records[rank].append(
                {"out": outs[rank].detach(), "x": xs[rank].grad, **grads, "router": router}
            )
        optimizer.step()
        optimizer.zero_grad()
    for rank in range(world):
        records[rank].append(
            {name: getattr(model, name).detach()[own[rank]].clone() for name in ("up", "down")}
        )
    return records


def _of(grad: Tensor | None, own: slice) -> Tensor | None:
    return None if grad is None else grad[own].clone()


def one_by_one(
    x: Tensor, index: Tensor, top: Tensor, up: Tensor, down: Tensor, activation: Any
) -> Tensor:
    """Return the output of a layer, computed in one process by linears, sequentially by expert."""
    linear = nn.functional.linear
    slots = x.new_zeros(*index.shape, x.shape[1])
    for expert in range(len(up)):
        token, slot = torch.where(index == expert)
        rows = linear(activation(linear(x[token], up[expert])), down[expert])
        slots = slots.index_put((token, slot), rows.to(x.dtype))
    return (slots * top.unsqueeze(-1)).sum(1)


def differentiated(
    out: Tensor, x: Tensor, up: Tensor, down: Tensor, own: slice | None = None
) -> Record:
    """Return the output and gradients of a layer; with ``own``, these experts of gradients summed over ranks."""
    out.square().sum().backward()
    grads = {"up": up.grad, "down": down.grad}
    if own is not None:
        for grad in grads.values():
            dist.all_reduce(grad)
        grads = {name: grad[own] for name, grad in grads.items()}
    return {"out": out.detach(), "x": x.grad, **grads}
