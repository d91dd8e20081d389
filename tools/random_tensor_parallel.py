"""Models under tensor parallelism made by a seed, and how a rank trains them, stock and patched."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ovpatch
from tests.plugins.tp_linear.arms import Record, copy_full, counters, draw, mesh, seen
from tests.support.equality import compare

_WIDTH: Final = 24
# The sequence is the second dimension of activations.
_SEQUENCE: Final = Shard(1)
# Sums over ranks have another order; under autocast, values are rounded to bfloat16.
_FLOORS: Final = {False: 1e-9, True: 0.1}

BRANCHES: Final = ("mlp", "gated", "attention", "one reader twice", "reader of the gather", "tied")
HABITS: Final = (
    "accumulates",
    "evaluates",
    "freezes",
    "freezes biases",
    "clips",
    "copies",
    "loads",
    "reads gradients by autograd.grad",
    "keeps the graph",
    "hooks on linears",
    "hooks on weights",
    "writes weights in the forward",
    "drops a branch at times",
    "another length",
    "one sequence",
    "zeroes in place",
)
_CHECKPOINTS: Final = ("", "", "", "reentrant", "not reentrant")


@dataclass(frozen=True)
class RandomModel:
    """A model of a seed, and its training.

    Attributes:
        seed: The seed.
        world: On how many ranks.
        replicas: The number of ranks of data parallelism; the remaining ones share a model.
        branches: The kinds of its branches, each with a norm and a residual connection.
        is_sequence_parallel: Whether activations between branches are sharded along the sequence.
        prepares: Whether ``PrepareModuleInput`` gathers for a branch, instead of each of its linears.
        keeps_dtensors: Whether row-parallel linears return DTensors.
        has_bias: Whether linears have a bias.
        checkpoints: The kind of the checkpoint around a branch, or "".
        uses_autocast: Whether linears compute in bfloat16.
        options: The options of the feature.
        habits: What the loop does besides.
    """

    seed: int
    world: int
    replicas: int
    branches: tuple[str, ...]
    is_sequence_parallel: bool
    prepares: bool
    keeps_dtensors: bool
    has_bias: bool
    checkpoints: str
    uses_autocast: bool
    options: dict[str, Any]
    habits: frozenset[str]

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.world // self.replicas} x {self.replicas} ranks, {', '.join(self.branches)}; "
            f"sequence {self.is_sequence_parallel}, prepares {self.prepares}, DTensors {self.keeps_dtensors}, "
            f"bias {self.has_bias}, checkpoint {self.checkpoints!r}, autocast {self.uses_autocast}; {self.options}; "
            f"{', '.join(sorted(self.habits))}"
        )


def make_model(seed: int) -> RandomModel:
    """Return the model of a seed."""
    rng = random.Random(seed)
    world = rng.choice([2, 2, 2, 3, 4, 4])
    is_sequence_parallel = rng.random() < 0.8
    return RandomModel(
        seed=seed,
        world=world,
        replicas=2 if world == 4 and rng.random() < 0.7 else 1,
        branches=tuple(rng.choices(BRANCHES, k=rng.randint(1, 3))),
        is_sequence_parallel=is_sequence_parallel,
        prepares=is_sequence_parallel and rng.random() < 0.7,
        keeps_dtensors=is_sequence_parallel and rng.random() < 0.5,
        has_bias=rng.random() < 0.5,
        checkpoints=rng.choice(_CHECKPOINTS),
        uses_autocast=rng.random() < 0.15,
        options={
            "schedule": rng.choice(["stock", "bulk", "bulk", "ring", "chunk"]),
            "chunks": rng.choice([2, 3, 4]),
            "regather": rng.random() < 0.3,
            "shared_gather": rng.random() < 0.8,
        },
        habits=frozenset(habit for habit in HABITS if rng.random() < 0.2),
    )


# --- the model ---


class Branch(nn.Module):
    """A norm and some linears, of which the last one is parallel by rows."""

    def __init__(self, kind: str, has_bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.inner = Inner(kind, has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        result: Tensor = self.inner(self.norm(x))
        return result


class Inner(nn.Module):
    """The linears of a branch."""

    a: nn.Linear
    b: nn.Linear
    c: nn.Linear

    def __init__(self, kind: str, has_bias: bool) -> None:
        super().__init__()
        self.kind = kind
        # Whether the forward writes to a weight between the calls of two linears.
        self.writes_weights = False
        names = {"mlp": ("a",), "attention": ("a", "b", "c")}.get(kind, ("a", "b"))
        for name in names:
            self.add_module(name, nn.Linear(_WIDTH, 2 * _WIDTH, bias=has_bias))
        self.out = nn.Linear(2 * _WIDTH, _WIDTH, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        a: Tensor = self.a(x)
        if self.writes_weights and self.kind not in ("mlp", "tied"):
            with torch.no_grad():
                self.b.weight.mul_(1.01)
        if self.kind == "mlp":
            y = F.gelu(a)
        elif self.kind == "attention":
            y = a * torch.sigmoid(self.b(x)) + self.c(x)
        elif self.kind == "one reader twice":
            y = F.silu(a) * self.b(x) + torch.tanh(self.a(x))
        elif self.kind == "reader of the gather":
            local = x.to_local() if isinstance(x, DTensor) else x
            y = F.silu(a) * self.b(x) + local.mean()
        else:
            y = F.silu(a) * self.b(x)
        result: Tensor = self.out(y)
        return result


class Model(nn.Module):
    """Branches with residual connections."""

    def __init__(self, made: RandomModel) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(kind, made.has_bias) for kind in made.branches)
        self.checkpoints = made.checkpoints
        # The index of a branch that this forward leaves out, or None.
        self.dropped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map activations to the same shape."""
        for i, branch in enumerate(self.branches):
            if i == self.dropped:
                continue
            if self.checkpoints and self.training:
                y = checkpoint(branch, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                y = branch(x)
            x = x + y
        return x


def build(made: RandomModel, meshes: DeviceMesh) -> Model:
    """Return the model of a seed, sharded over the dimension ``tp`` of a mesh."""
    torch.manual_seed(made.seed)
    model = Model(made).to(torch.float32 if made.uses_autocast else torch.float64)
    between = _SEQUENCE if made.is_sequence_parallel else Replicate()
    for branch in model.branches:
        assert isinstance(branch, Branch)
        if branch.inner.kind == "tied":
            branch.inner.b.weight = branch.inner.a.weight
        names = [name for name, _ in branch.inner.named_children() if name != "out"]
        reader = (
            ColwiseParallel()
            if made.prepares or not made.is_sequence_parallel
            else ColwiseParallel(input_layouts=_SEQUENCE)
        )
        plan: dict[str, Any] = {f"inner.{name}": reader for name in names}
        plan["inner.out"] = RowwiseParallel(
            output_layouts=between, use_local_output=not made.keeps_dtensors
        )
        if made.is_sequence_parallel:
            plan["norm"] = SequenceParallel(use_local_output=not made.keeps_dtensors)
        if made.prepares:
            plan["inner"] = PrepareModuleInput(
                input_layouts=(_SEQUENCE,), desired_input_layouts=(Replicate(),)
            )
        parallelize_module(branch, meshes["tp"], plan)
    return model


# --- the training ---


def train(made: RandomModel) -> list[Record]:
    """Return the records of the loop on this rank."""
    meshes = mesh(made.replicas, made.world // made.replicas, names=("dp", "tp"))
    model = build(made, meshes)
    wrapped: Any = (
        DistributedDataParallel(
            model,
            device_mesh=meshes["dp"],
            find_unused_parameters="freezes biases" in made.habits,
        )
        if made.replicas > 1
        else model
    )
    loop = _Loop(made, meshes, model, wrapped)
    return [loop.step(number) for number in range(4)]


class _Loop:
    """The training of a model."""

    def __init__(
        self, made: RandomModel, meshes: DeviceMesh, model: Model, wrapped: nn.Module
    ) -> None:
        self._made, self._meshes, self._model, self._wrapped = made, meshes, model, wrapped
        self._habits = made.habits
        # The tensors that hooks have seen in this step.
        self._seen: list[Tensor] = []
        inners = [branch.inner for branch in model.branches if isinstance(branch, Branch)]
        for inner in inners:
            # A checkpoint repeats the write in the backward. There it is an error, where stock PyTorch computes from
            # the written weight: tp_linear-reference.md, "Differences".
            inner.writes_weights = (
                "writes weights in the forward" in self._habits and not made.checkpoints
            )
        params = list(model.parameters())
        if "freezes" in self._habits:
            params[1].requires_grad_(False)
        if "hooks on linears" in self._habits:
            inners[0].a.register_forward_hook(self._see)
        if "hooks on weights" in self._habits:
            # Under DistributedDataParallel the first forward makes the DTensors.
            params[-1].register_hook(self._see_grad)
        self._optimizer = torch.optim.AdamW(wrapped.parameters(), 0.01, foreach=False)

    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._seen.append(output.detach().clone())

    def _see_grad(self, grad: Tensor) -> None:
        self._seen.append(grad.detach().clone())

    def step(self, number: int) -> Record:
        """Train a step, and return all values that a script can see."""
        habits, record = self._habits, Record()
        if "freezes biases" in habits:
            for name, param in self._model.named_parameters():
                if name.endswith("out.bias"):
                    param.requires_grad_(number % 2 == 0)
        if "drops a branch at times" in habits and self._made.replicas == 1:
            self._model.dropped = 0 if number % 2 else None
        for micro in range(2 if "accumulates" in habits else 1):
            loss = self._loss(number, micro)
            record[f"loss {micro}"] = copy_full(loss)
            if "reads gradients by autograd.grad" in habits and loss.requires_grad:
                params = [p for p in self._model.parameters() if p.requires_grad][-2:]
                found = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
                record[f"grads {micro}"] = [copy_full(grad) for grad in found]
            if "keeps the graph" in habits and loss.requires_grad:
                loss.backward(retain_graph=True)
            if loss.requires_grad:
                loss.backward()
        if "clips" in habits:
            norm = nn.utils.clip_grad_norm_(self._wrapped.parameters(), 0.5, foreach=False)
            record["norm"] = copy_full(norm)
        record["model"] = seen(self._model)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none="zeroes in place" not in habits)
        record["hooks"] = [copy_full(value) for value in self._seen]
        self._seen.clear()
        if "evaluates" in habits:
            self._model.eval()
            with torch.no_grad():
                record["evaluated"] = copy_full(self._loss(number, 5))
            self._model.train()
        if "loads" in habits:
            state = {name: copy.deepcopy(value) for name, value in self._model.state_dict().items()}
            self._model.load_state_dict(state)
        if "copies" in habits and self._made.replicas == 1:
            with torch.no_grad():
                copied = copy.deepcopy(self._model)
                record["copy"] = copy_full(copied(self._input(number, 7)).sum())
        return record

    def _input(self, number: int, micro: int) -> Tensor:
        """Return activations, as plain tensors or DTensors."""
        made, world = self._made, self._meshes["tp"].size()
        length = 2 + (number if "another length" in self._habits else 0)
        batch = 1 if "one sequence" in self._habits else 2
        seed = 100 * number + 10 * micro
        # Replicas have other data; ranks that share a model have other parts of the sequence, or the same data.
        seed += 1000 * self._meshes["dp"].get_local_rank()
        seed += self._meshes["tp"].get_local_rank() if made.is_sequence_parallel else 0
        dtype = torch.float32 if made.uses_autocast else torch.float64
        local = draw(
            batch,
            length if made.is_sequence_parallel else length * world,
            _WIDTH,
            seed=seed,
            dtype=dtype,
        )
        if not made.keeps_dtensors:
            return local
        return DTensor.from_local(local, self._meshes["tp"], [_SEQUENCE], run_check=False)

    def _loss(self, number: int, micro: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._made.uses_autocast):
            y = self._wrapped(self._input(number, micro))
        loss: Tensor = (y.to_local() if isinstance(y, DTensor) else y).float().square().mean()
        return loss


# --- stock and patched ---


def run_stock(seed: int) -> None:
    """Train the model of a seed on this rank, stock."""
    train(make_model(seed))


def run_both(seed: int) -> tuple[str, int]:
    """Train it stock and patched; return where the results differ, and how many operators the feature ran."""
    made = make_model(seed)
    stock = train(made)
    dist.barrier()
    features = ("tp_linear", "ddp") if made.replicas > 1 else ("tp_linear",)
    with ovpatch.applied(*features, options={"tp_linear": made.options}):
        before = counters()["calls"]
        patched = train(made)
        calls = counters()["calls"] - before
    try:
        compare(stock, patched, floor=_FLOORS[made.uses_autocast]).assert_equal()
    except AssertionError as error:
        return str(error), calls
    return "", calls
