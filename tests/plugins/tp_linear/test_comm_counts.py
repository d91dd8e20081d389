"""The counts of ``CommDebugMode`` in programs with all styles, in stock PyTorch and patched, and their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import ovpatch
from ovpatch.overlap.tensor_parallel import tp_group
from tests.plugins.ddp.checks import on
from tests.plugins.tp_linear.arms import Record, all_both, copy_full, draw, layout, mesh, seen
from tests.plugins.tp_linear.models import MLP, WIDTH, Attention, Llama, parallel_llama
from tests.plugins.tp_linear.training import equal
from tests.support.rarely import RARELY

CUT, REPLICATED, FEATURES = Shard(0), Replicate(), Shard(-1)
LENGTH = 12  # divides by 2, 3 and 4
WORDS = 48

Plan = dict[str, Any]
Made = tuple[nn.Module, Callable[[nn.Module], Any]]


def counts(mode: CommDebugMode) -> Record:
    """Return the counts of a mode so far: all of them, and those of each module."""
    by_module = {
        (module, direction): {str(name): number for name, number in found.items()}
        for module, directions in mode.comm_module_counts.items()
        for direction, found in directions.items()
        if found
    }
    return {
        "all": {str(name): number for name, number in mode.get_comm_counts().items() if number},
        "by_module": by_module,
    }


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def watched(
    make: Callable[[], Made], watch: Callable[[], Any] = CommDebugMode, alone: bool = False
) -> Record:
    """Take one step in modes; with ``alone``, only the first rank enters them."""
    torch.manual_seed(0)
    watches = not alone or dist.get_rank() == 0
    modes = [watch() if watches else contextlib.nullcontext() for _ in range(3)]
    found = []

    def count(mode: Any) -> None:
        if isinstance(mode, CommDebugMode):
            found.append(counts(mode))

    with modes[0]:
        model, run = make()
    count(modes[0])
    # AdamW would divide gradients of zero by noise.
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=False)
    with modes[1], loss_parallel():
        output, *inputs = run(model)
        count(modes[1])
        local(output).square().sum().backward()
    count(modes[1])
    with modes[2]:
        optimizer.step()
    count(modes[2])
    return {
        "output": copy_full(local(output)),
        "layout": layout(output),
        "inputs": [(layout(x.grad), copy_full(x.grad)) for x in inputs],
        **seen(model),
        "counts": found,
    }


# ---------------------------------------------------------------- programs


def given(*shape: int, cut: Any = None, dtensor: bool = False, needs_grad: bool = True) -> Tensor:
    """Return an input: the part of this rank, or a replicated one; as a plain tensor, or as a DTensor."""
    x = draw(*shape, seed=1, dtype=torch.float64)
    if dtensor:
        return distribute_tensor(x, mesh(), [cut or REPLICATED]).requires_grad_(needs_grad)
    if cut is not None:
        x = x.chunk(dist.get_world_size(), cut.dim)[dist.get_rank()].contiguous()
    return x.requires_grad_(needs_grad)


def cut_model(model: nn.Module, style: Any, shape: Sequence[int], **how: Any) -> Made:
    parallelize_module(model.double(), mesh(), style)

    def run(model: nn.Module) -> Any:
        x = given(*shape, **how)
        return model(x), x

    return model, run


def linear(style: Any, *shape: int, **how: Any) -> Callable[[], Made]:
    return lambda: cut_model(nn.Linear(WIDTH, 48), style, shape or (LENGTH, WIDTH), **how)


def mlp(plan: Plan, *shape: int, **how: Any) -> Callable[[], Made]:
    return lambda: cut_model(MLP(), plan, shape or (LENGTH, WIDTH), **how)


def attention(use_local_output: bool) -> Made:
    plan = {
        "": PrepareModuleInput(
            input_layouts=Shard(1),
            desired_input_layouts=REPLICATED,
            use_local_output=use_local_output,
        ),
        **{name: ColwiseParallel() for name in "qkv"},
        "out": RowwiseParallel(output_layouts=Shard(1)),
    }
    return cut_model(Attention(WIDTH, 12, True), plan, (2, LENGTH, WIDTH), cut=Shard(1))


class Named(nn.Module):
    """A model with keyword inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48)

    def forward(self, *, x: Any, y: Any) -> Any:
        return self.a(x) * 2 + self.b(y)


def by_name() -> Made:
    prepare = PrepareModuleInput(
        input_kwarg_layouts={"x": CUT, "y": CUT},
        desired_input_kwarg_layouts={"x": REPLICATED, "y": REPLICATED},
    )
    model = Named().double()
    column = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh(), {"": prepare, "a": column, "b": column})

    def run(model: nn.Module) -> Any:
        x, y = given(LENGTH, WIDTH, cut=CUT), given(LENGTH, WIDTH, cut=CUT, needs_grad=False)
        return model(x=x, y=y), x

    return model, run


def prepared_output() -> Made:
    plan = {
        "": PrepareModuleOutput(output_layouts=REPLICATED, desired_output_layouts=CUT),
        "up": ColwiseParallel(input_layouts=CUT),
        "down": RowwiseParallel(),
    }
    return cut_model(MLP(), plan, (LENGTH, WIDTH), cut=CUT)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(WIDTH), MLP(), nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        return self.drop(self.mlp(self.norm(x)))


def sequence() -> Made:
    plan = {
        "norm": SequenceParallel(),
        "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "drop": SequenceParallel(),
    }
    return cut_model(Normed(), plan, (2, LENGTH, WIDTH), cut=Shard(1))


class Words(nn.Module):
    """A model of an embedding and a head, which may share their weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.words(x))


def embedding(words: Any, head: Any, tied: bool = False) -> Callable[[], Made]:
    def make() -> Made:
        model = Words(tied).double()
        parallelize_module(model, mesh(), {"words": words, "head": head})
        tokens = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        return model, lambda model: (model(tokens),)

    return make


def llama(frozen: str = "", trained: str = "", losses_cut: bool = True, layers: int = 1) -> Made:
    model = parallel_llama(Llama(layers=layers).double(), mesh(), loss_parallel=losses_cut)
    for name, param in model.named_parameters():
        param.requires_grad_(not (frozen and frozen in name) and trained in name)
    tokens = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))

    def run(model: nn.Module) -> Any:
        logits = model(tokens)
        return (nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()),)

    return model, run


# The input is not laid out as the GEMM needs it, or a collective of torch is still writing it.
STOCK_CASES = ("row, replicated input", "words", "words, cut", "words, tied")

CASES: dict[str, Callable[[], Made]] = {
    "column": linear(ColwiseParallel()),
    "column, input cut": linear(ColwiseParallel(input_layouts=CUT), cut=CUT),
    "column, input cut, needs no gradient": linear(
        ColwiseParallel(input_layouts=CUT), cut=CUT, needs_grad=False
    ),
    "column, sequence cut, replicated output": linear(
        ColwiseParallel(input_layouts=Shard(1), output_layouts=REPLICATED),
        2,
        LENGTH,
        WIDTH,
        cut=Shard(1),
    ),
    "column, returns a DTensor": linear(
        ColwiseParallel(input_layouts=CUT, use_local_output=False), cut=CUT
    ),
    "column, DTensor input": linear(ColwiseParallel(input_layouts=CUT), cut=CUT, dtensor=True),
    "column, replicated DTensor": linear(ColwiseParallel(use_local_output=False), dtensor=True),
    "row": linear(RowwiseParallel(), cut=Shard(1)),
    "row, output cut": linear(RowwiseParallel(output_layouts=CUT), cut=Shard(1)),
    "row, sequence cut": linear(
        RowwiseParallel(output_layouts=Shard(1)), 2, LENGTH, WIDTH, cut=Shard(2)
    ),
    "row, returns a DTensor": linear(
        RowwiseParallel(output_layouts=CUT, use_local_output=False), cut=Shard(1), dtensor=True
    ),
    "row, replicated input": linear(RowwiseParallel(input_layouts=REPLICATED)),
    "MLP": mlp({"up": ColwiseParallel(), "down": RowwiseParallel()}),
    "MLP, sequence": mlp(
        {"up": ColwiseParallel(input_layouts=CUT), "down": RowwiseParallel(output_layouts=CUT)},
        cut=CUT,
    ),
    "attention": lambda: attention(False),
    "attention, local": lambda: attention(True),
    "by name": by_name,
    "prepared output": prepared_output,
    "norm and dropout": sequence,
    "words": embedding(RowwiseParallel(input_layouts=REPLICATED), ColwiseParallel()),
    "words, cut": embedding(
        RowwiseParallel(input_layouts=REPLICATED, output_layouts=Shard(1)),
        ColwiseParallel(input_layouts=Shard(1), output_layouts=REPLICATED),
    ),
    "words by features": embedding(ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))),
    "words, tied": embedding(
        RowwiseParallel(input_layouts=REPLICATED), ColwiseParallel(), tied=True
    ),
    "model": lambda: llama(layers=2),
    "model, replicated losses": lambda: llama(losses_cut=False),
    "model, frozen attention": lambda: llama(frozen="attention"),
    "model, frozen words": lambda: llama(frozen="words"),
    "model, only its head": lambda: llama(trained="head"),
    "model, only one norm": lambda: llama(trained="layers.0.norm2"),
    "model, only one weight": lambda: llama(trained="layers.0.attention.v.weight"),
}


def counted(
    names: Sequence[str], options: dict[str, Any] | None = None, **how: Any
) -> dict[str, Record]:
    results = all_both(
        watched, {name: {"make": CASES[name], **how} for name in names}, options=options
    )
    for name, result in results.items():
        result["counts"] = [result[arm].pop("counts") for arm in ("stock", "patched")]
        try:
            equal([result["stock"]], [result["patched"]])
        except AssertionError as error:
            raise AssertionError(f"case {name}: {error}") from None
    return results


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=RARELY)])
def test_counts_are_the_counts_of_torch(ranks, world):
    for results in ranks(world)(counted, list(on(world, CASES)), timeout=120):
        for name, result in results.items():
            stock, ours = result["counts"]
            assert ours == stock, name
            assert any(step["all"] for step in stock), name
            assert (result["counters"]["calls"] > 0) is (name not in STOCK_CASES), name


@pytest.mark.parametrize("world", [2, 3])
def test_the_wire_is_the_same_on_ranks_that_do_not_watch(ranks, world):
    names = ("MLP", "MLP, sequence", "attention", "model")
    first, *unwatched = ranks(world)(counted, names, alone=True)
    for name in names:
        assert first[name]["counts"][0] == first[name]["counts"][1] != []
        assert not any(part for results in unwatched for part in results[name]["counts"])


def test_each_chunk_is_counted(ranks):
    for result in ranks(2)(counted, ["MLP, sequence"], {"schedule": "chunk", "chunks": 3}):
        (_, _, once, _), (_, _, ours, _) = result["MLP, sequence"]["counts"]
        assert ours["all"].keys() == once["all"].keys()
        assert all(
            once["all"][name] < number <= 3 * once["all"][name]
            for name, number in ours["all"].items()
        )


# ---------------------------------------------------------------- other modes


class Logging(TorchDispatchMode):
    """A mode that notes the collectives that it sees."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.endswith(("c10d", "c10d_functional")):
            self.seen.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Copying(TorchDispatchMode):
    """A mode that returns copies of the outputs of operators, before a collective has written them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return (
            out.clone()
            if func.namespace == "_c10d_functional" and "wait" not in func.name()
            else out
        )


def copying() -> Record:
    """Compare with a mode that is on only if patched, because stock PyTorch would return tensors before they arrive."""
    stock = watched(CASES["MLP, sequence"], contextlib.nullcontext)
    with ovpatch.applied("tp_linear"):
        return {"stock": stock, "patched": watched(CASES["MLP, sequence"], Copying)}


def test_a_mode_that_returns_copies(ranks):
    for result in ranks(2)(copying):
        equal([result["stock"]], [result["patched"]])


def stack() -> list[Any]:
    return list(_get_current_dispatch_mode_stack())


def test_modes_see_one_functional_operator_in_their_order():
    outer, inner, started = [], [], []

    def start(rows: Tensor) -> Any:
        started.append(stack())
        return rows.new_ones(4, 3), ()

    with Logging(outer) as outer_mode, Logging(inner) as inner_mode:
        rows, works = tp_group.dispatch(
            "all_gather_into_tensor", (torch.zeros(2, 3), 2, "no group"), start
        )
        assert stack() == [outer_mode, inner_mode]
    assert outer == inner == ["all_gather_into_tensor"]
    assert started == [[]], "modes must not see the collective that replaces the operator"
    assert torch.equal(rows, torch.ones(4, 3))
    assert not works


def test_a_mode_that_returns_its_own_result():
    class Simulating(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "_c10d_functional":
                return args[0].new_full((1, 3), 7.0)
            return func(*args, **(kwargs or {}))

    with Simulating():
        part, works = tp_group.dispatch(
            "reduce_scatter_tensor", (torch.zeros(2, 3), "sum", 2, "no group"), pytest.fail
        )
    assert torch.equal(part, torch.full((1, 3), 7.0))
    assert not works


def test_an_all_reduce_writes_its_input_when_the_sum_has_arrived():
    rows, total = torch.ones(2, 3), torch.zeros(2, 3)

    class Late:
        def wait(self) -> None:
            total.fill_(5.0)

    with Logging([]):
        ranks: Any = tp_group.TPGroup.__new__(tp_group.TPGroup)
        ranks._name, ranks._start_reduce = "no group", lambda rows: (total, [Late()])
        pending = ranks.all_reduce(rows)
        assert torch.equal(rows, torch.ones(2, 3))
        pending.wait()
    assert torch.equal(rows, torch.full((2, 3), 5.0))


@pytest.mark.parametrize("place", ["mode", "start"])
def test_an_exception_leaves_the_stack_as_it_was(place):
    class Raising(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if place == "mode":
                raise KeyError(place)
            return func(*args, **(kwargs or {}))

    def start(rows: Tensor) -> Any:
        raise KeyError(place)

    rows = torch.zeros(2, 3)
    with Logging([]) as logging, Raising() as raising:
        with pytest.raises(KeyError, match=place):
            tp_group.dispatch("all_gather_into_tensor", (rows, 2, "no group"), start)
        assert stack() == [logging, raising]
    assert stack() == []


def test_a_mode_of_torch_stays_below():
    with FakeTensorMode() as fake:
        rows = torch.zeros(2, 3)
        with Logging(seen := []) as logging:
            gathered, _ = tp_group.dispatch(
                "all_gather_into_tensor",
                (rows, 2, "no group"),
                lambda rows: (rows.new_empty(4, 3), ()),
            )
            assert stack() == [fake, logging]
    assert seen == ["all_gather_into_tensor"]
    assert isinstance(gathered, FakeTensor)
