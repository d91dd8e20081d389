"""Contributions that are declared and marked, by modules that work in chunks, each with its own backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ovpatch
from ovpatch.overlap.data_parallel.grad_sync import expect_gradients, mark_gradient
from tests.plugins.ddp.arms import Cases, Record, counted, data, seen, table
from tests.plugins.ddp.checks import check_all, on
from tests.plugins.ddp.test_failures import Bomb
from tests.support.equality import compare
from tests.support.errors import error_of

WORLDS = [2, 3]
STEPS, CHUNKS = 4, 4
# Each parameter is a bucket, whose collective starts when its gradient is complete.
TINY = {"bucket_cap_mb": 0.0001}


class Chunked(torch.autograd.Function):
    """A module in chunks, with a backward that runs one backward per chunk. The weights are no inputs of it."""

    @staticmethod
    def forward(ctx: Any, owner: InChunks, x: torch.Tensor) -> torch.Tensor:
        ctx.owner = owner
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([owner.inner(chunk) for chunk in x.tensor_split(CHUNKS)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        owner: InChunks = ctx.owner
        owner.marks.declare(CHUNKS)
        grads = []
        for number, (chunk, above) in enumerate(
            zip(x.tensor_split(CHUNKS), grad.tensor_split(CHUNKS), strict=True)
        ):
            chunk = chunk.detach().requires_grad_()
            # An empty chunk runs nothing, but is marked.
            if len(chunk):
                with torch.enable_grad():
                    owner.inner(chunk).backward(above)
            owner.marks.mark(number)
            grads.append(chunk.grad if len(chunk) else torch.empty_like(chunk))
        return None, torch.cat(grads)


class Marks:
    """Declarations and marks of the contributions of a module in chunks, with faults to test the consequences.

    Args:
        params: The parameters.
        is_declared: Whether contributions are declared and marked at all.
        surplus: The number of marks beyond the declared ones; negative if marks are missing.
    """

    def __init__(
        self, params: list[nn.Parameter], is_declared: bool = True, surplus: int = 0
    ) -> None:
        self.params, self.is_declared, self.surplus = params, is_declared, surplus

    def declare(self, chunks: int) -> None:
        for param in self.params if self.is_declared else ():
            expect_gradients(param, chunks)

    def mark(self, number: int) -> None:
        times = 1 + (self.surplus if number == CHUNKS - 1 else 0)
        for param in self.params if self.is_declared else ():
            for _ in range(times):
                mark_gradient(param, f"chunk {number}")


class InChunks(nn.Module):
    function: type[torch.autograd.Function] = Chunked

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.marks = inner, Marks(list(inner.parameters()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self, x)


class Deferred(torch.autograd.Function):
    """A linear layer that adds to the gradients of its weights itself, without any call of their hooks."""

    @staticmethod
    def forward(ctx: Any, owner: InChunks, x: torch.Tensor) -> torch.Tensor:
        ctx.owner = owner
        ctx.save_for_backward(x)
        return owner.inner(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,), owner = ctx.saved_tensors, ctx.owner
        linear: nn.Linear = owner.inner
        owner.marks.declare(CHUNKS)
        for number, (chunk, above) in enumerate(
            zip(x.tensor_split(CHUNKS), grad.tensor_split(CHUNKS), strict=True)
        ):
            for param, piece in ((linear.weight, above.t() @ chunk), (linear.bias, above.sum(0))):
                param.grad = piece if param.grad is None else param.grad + piece
            owner.marks.mark(number)
        return None, grad @ linear.weight


class Plain(nn.Module):
    """A module without declarations: in one chunk, or in several that autograd sees, for another order of sums."""

    def __init__(self, inner: nn.Module, chunks: int) -> None:
        super().__init__()
        self.inner, self.chunks = inner, chunks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner(chunk) for chunk in x.tensor_split(self.chunks)])


class Net(nn.Module):
    """A dense layer, a module in chunks, a dense layer, and another module in chunks that may be left out.

    Args:
        chunked: Whether both modules work in declared chunks. Otherwise they are ``Plain`` with ``chunks``.
        reentrant: The kind of checkpoint around the first module in chunks. None: there is no checkpoint.
        bomb: Whether this module can fail.
    """

    def __init__(
        self, *, chunked: bool, chunks: int = 1, reentrant: bool | None = None, bomb: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        inner = [nn.Linear(8, 12), Mine() if bomb else nn.Tanh(), nn.Linear(12, 8)]
        middle, spare = nn.Sequential(*inner), nn.Linear(8, 8)
        self.middle = InChunks(middle) if chunked else Plain(middle, chunks)
        self.last = nn.Linear(8, 3)
        self.spare = InChunks(spare) if chunked else Plain(spare, chunks)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        h = self.first(x)
        h = (
            self.middle(h)
            if self.reentrant is None
            else checkpoint(self.middle, h, use_reentrant=self.reentrant)
        )
        return self.last(self.spare(h) if spare else h)


class Mine(nn.Tanh):
    """A function that makes the backward of the second non-empty chunk fail while it is armed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Mine.calls += 1
        return (
            Bomb.apply(super().forward(x))
            if torch.is_grad_enabled() and Mine.calls % 4 == 3
            else super().forward(x)
        )

    calls = 0


def rows(step: int, micro: int = 0) -> int:
    """Return a batch size that differs by step and rank. Some batches have fewer rows than there are chunks."""
    return [8, 3, 5, 1, 7][(step + micro + dist.get_rank()) % 5]


SPARE = {
    "always": lambda step, rank: True,
    "never": lambda step, rank: False,
    "by step": lambda step, rank: step != 1,
    "by rank": lambda step, rank: step == 0 or (step + rank) % 2 == 0,
}


def train(
    chunked: bool,
    ddp: dict[str, Any],
    *,
    reentrant: bool | None = None,
    spare: str = "always",
    micro: int = 1,
    keep: bool = False,
    prepare: Callable[[Net], None] = lambda net: None,
    chunks: int = 1,
) -> list[Record]:
    """Train some steps of ``micro`` microbatches, of which the last is reduced; with ``keep``, never zero gradients."""
    torch.manual_seed(0)
    net = Net(chunked=chunked, chunks=chunks, reentrant=reentrant)
    prepare(net)
    # Of several buckets, all but the last one start while other gradients are still to come.
    wrapped = DDP(net, **TINY | ddp)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.05, momentum=0.9)
    records = []
    for step in range(STEPS):
        for number in range(micro):
            with wrapped.no_sync() if number < micro - 1 else contextlib.nullcontext():
                out = wrapped(
                    data(step, rows(step, number), 6, micro=number),
                    SPARE[spare](step, dist.get_rank()),
                )
                loss = out.square().mean()
                loss.backward()
        records.append({"out": out.detach().clone(), **seen(net, loss)})
        optimizer.step()
        if not keep:
            optimizer.zero_grad()
    return [
        {**record, **{key: _named(record[key]) for key in ("grad", "param")}} for record in records
    ]


def _named(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("inner.", ""): value for name, value in values.items()}


def both(cases: Cases, features: tuple[str, ...] = ("ddp",)) -> dict[str, dict[str, Any]]:
    """Train stock without chunks, stock with sums in another order, and patched with chunks."""
    results = {}
    for name, kwargs in cases.items():
        plain = {key: value for key, value in kwargs.items() if key != "prepare"}
        stock, reordered = (train(False, **plain, chunks=chunks) for chunks in (1, CHUNKS))
        results[name] = {"stock": stock, "reordered": reordered}
    options = {"dist_optimizer": {"min_param_numel": 8}} if "dist_optimizer" in features else {}
    with ovpatch.applied(*features, options=options):
        for name, kwargs in cases.items():
            results[name] |= counted(train, True, **kwargs)
    return results


def check_cases(
    run: Any, cases: Cases, *features: str, early: bool | None = True
) -> list[dict[str, dict[str, Any]]]:
    results = run(both, on(run.world, cases), ("ddp", *features), timeout=120)
    check_all(results, check=check, early=early)
    return results


def check(results: list[dict[str, Any]], *, early: bool | None = True) -> None:
    """Demand the values of stock PyTorch, equal parameters on all ranks, and collectives that start in the backward."""
    for result in results:
        compare(result["stock"], result["patched"], reordered=result["reordered"]).assert_equal()
        compare(
            [r["param"] for r in results[0]["patched"]], [r["param"] for r in result["patched"]]
        ).assert_bitwise()
        counters = result["counters"]
        assert early is None or (counters["collectives_in_backward"] > 0) == early
        assert counters["models"] == 1
        assert counters["stock_models"] == counters["recovered"] == 0


MODES = {
    "plain": {},
    "small buckets": TINY,
    "search": {"find_unused_parameters": True, **TINY},
    "static": {"static_graph": True, **TINY},
}


def modes(*left_out: str, **axes: Any) -> Cases:
    return table(ddp=[ddp for mode, ddp in MODES.items() if mode not in left_out], **axes)


@pytest.mark.parametrize("world", WORLDS)
def test_chunks_compute_the_same_as_stock_pytorch_without_chunks(ranks, world):
    check_cases(
        ranks(world),
        {**modes(), **table(ddp=[MODES["search"]], spare=["never", "by step", "by rank"])},
    )


def test_inside_checkpoints_and_with_microbatches_under_no_sync(ranks):
    # Stock PyTorch cannot search inside reentrant checkpoints.
    checkpoints = {**modes(reentrant=[False]), **modes("search", reentrant=[True])}
    # Stock PyTorch does not allow no_sync() in the first step of a static graph.
    check_cases(ranks(2), {**checkpoints, **modes("static", micro=[2], keep=[False, True])})


@pytest.mark.parametrize("world", WORLDS)
def test_with_a_sharded_optimizer(ranks, world):
    for result in check_cases(ranks(world), modes("static", micro=[1, 2]), "dist_optimizer"):
        assert all(case["counters"]["steps"] == STEPS for case in result.values())


def deferred(net: Net) -> None:
    net.spare.function = Deferred  # type: ignore[assignment]
    # A hook of the user makes the reducer copy every gradient instead of reducing it in place.
    net.first.weight.register_hook(lambda grad: grad)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_that_autograd_does_not_see(ranks, world):
    once, kept = (
        modes(prepare=[deferred]),
        modes("static", prepare=[deferred], keep=[True], micro=[2]),
    )
    check_cases(
        ranks(world),
        {**once, **kept, **table(ddp=[MODES["static"]], prepare=[deferred], keep=[True])},
    )


class Opaque:
    """An output in which the wrapper finds no tensors, so that only parameters announce the backward."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class LastInChunks(nn.Module):
    def __init__(self, chunked: bool) -> None:
        super().__init__()
        inner = nn.Linear(8, 3)
        self.first, self.second = nn.Linear(6, 8), InChunks(inner) if chunked else Plain(inner, 1)

    def forward(self, x: torch.Tensor) -> Opaque:
        return Opaque(self.second(self.first(x)))


def opaque(search: bool) -> list[Any]:
    records = []
    for chunked in (False, True):
        with ovpatch.applied("ddp") if chunked else contextlib.nullcontext():
            torch.manual_seed(0)
            model = LastInChunks(chunked)
            wrapped = DDP(model, find_unused_parameters=search and chunked, **TINY)
            for step in range(3):
                wrapped(data(step, 8, 6)).value.square().mean().backward()
                records.append(_named(seen(model)["grad"]))
                wrapped.zero_grad()
    return records


@pytest.mark.parametrize("search", [False, True])
def test_a_backward_that_begins_in_a_chunk(ranks, search):
    for records in ranks(2)(opaque, search):
        compare(records[:3], records[3:]).assert_equal()


# --- missing and early marks ---


def silent(net: Net) -> None:
    net.middle.marks.is_declared = False


def test_without_a_declaration_the_second_chunk_is_an_error(ranks):
    for text in ranks(2)(error_of, both, {"": {"ddp": TINY, "prepare": silent}}):
        assert "ready only once" in text
        assert "middle." in text


def one_mark(net: Net) -> None:
    """Declare a single contribution and mark it after the first chunk, so that its collective starts immediately."""
    marks = net.middle.marks
    marks.declare = lambda chunks: [expect_gradients(param, 1) for param in marks.params]  # type: ignore[method-assign]
    marks.mark = lambda number: None if number else [mark_gradient(p, "all") for p in marks.params]  # type: ignore


def test_marks_that_come_before_the_gradient_is_complete_are_an_error(ranks):
    for text in ranks(2)(error_of, both, {"": {"ddp": TINY, "prepare": one_mark}}):
        assert "contribution 2 (its autograd hook)" in text
        assert "1 were declared" in text


# --- wrong counts, and failures ---


def short(net: Net) -> None:
    net.middle.marks.surplus = -1


def short_on_one_rank(net: Net) -> None:
    net.middle.marks.surplus = -dist.get_rank()


def test_too_few_marks_are_reduced_at_the_end(ranks):
    check_cases(ranks(2), modes(prepare=[short, short_on_one_rank]), early=None)


def steps_around(
    ddp: dict[str, Any], fault: Callable[[Net, bool], None], expected: str
) -> dict[str, Any]:
    """Run two clean steps, a faulty one that is skipped, and two clean steps. The stock arm has no faulty step."""

    def run(chunked: bool) -> tuple[list[Record], str]:
        torch.manual_seed(0)
        net = Net(chunked=chunked, bomb=True)
        wrapped = DDP(net, **ddp)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
        records, text = [], "no error"
        for step in range(5):
            optimizer.zero_grad()
            faulty = chunked and step == 2
            if step == 2 and not chunked:
                continue
            Mine.calls = 0
            fault(net, faulty)
            try:
                wrapped(data(step, 8, 6)).square().mean().backward()
            except RuntimeError as error:
                if not faulty or not any(part in str(error) for part in expected.split("|")):
                    raise
                text = f"{type(error).__name__}: {error}"
                continue
            finally:
                fault(net, False)
            optimizer.step()
            records.append(seen(net))
        return [
            {**r, "grad": _named(r["grad"]), "param": _named(r["param"])} for r in records
        ], text

    stock, _ = run(False)
    with ovpatch.applied("ddp"):
        patched, text = run(True)
    return {"stock": stock, "patched": patched, "text": text}


def bomb(net: Net, armed: bool) -> None:
    Bomb.armed = armed


def surplus_everywhere(net: Net, armed: bool) -> None:
    if isinstance(net.middle, InChunks):
        net.middle.marks.surplus = int(armed)


def surplus_on_rank_1(net: Net, armed: bool) -> None:
    surplus_everywhere(net, armed and dist.get_rank() == 1)


def check_steps(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["patched"]) == len(result["stock"]) == 4
        for mine, stock in zip(result["patched"], result["stock"], strict=True):
            for kind in ("grad", "param"):
                torch.testing.assert_close(mine[kind], stock[kind], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_an_exception_in_a_chunk_and_a_clean_step_after_it(ranks, world):
    results = ranks(world)(all_steps_around, bomb, "not really")
    check_all(results, check=check_steps)
    assert all("not really" in case["text"] for result in results for case in result.values())


def test_a_surplus_on_all_ranks(ranks):
    results = ranks(2)(all_steps_around, surplus_everywhere, "were declared")
    check_all(results, check=check_steps)
    for case in (case for result in results for case in result.values()):
        assert case["text"].startswith("SurplusGradientError: ovpatch: parameter 'middle.inner.")
        assert f"contribution {CHUNKS + 1} (chunk {CHUNKS - 1})" in case["text"]
        assert case["text"].endswith("or turn that way of working off.")
        assert "checkpoint" not in case["text"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_surplus_on_one_rank_is_an_error_on_all(ranks, world):
    results = ranks(world)(
        all_steps_around, surplus_on_rank_1, "were declared|ended the backward of"
    )
    check_all(results, check=check_steps)
    for rank, result in enumerate(results):
        wanted = (
            "SurplusGradientError" if rank == 1 else "ended the backward of step 2 on another rank"
        )
        assert all(wanted in case["text"] for case in result.values()), rank


def all_steps_around(
    fault: Callable[[Net, bool], None], expected: str
) -> dict[str, dict[str, Any]]:
    return {mode: steps_around(ddp, fault, expected) for mode, ddp in MODES.items()}


def left_out_at_first() -> None:
    """Use a module in chunks for the first time in a later step, before modules whose collectives have started."""
    with ovpatch.applied("ddp"):
        wrapped = DDP(Net(chunked=True), find_unused_parameters=True, **TINY)
        for step in range(3):
            wrapped(data(step, 8, 6), step == 2).square().mean().backward()


def test_a_gradient_that_comes_after_its_parameter_counted_as_unused_is_an_error(ranks):
    for text in ranks(2)(error_of, left_out_at_first):
        assert "'spare.inner.weight'" in text or "'spare.inner.bias'" in text
        assert text.endswith("OVPATCH_DDP_OVERLAP_GRAD_REDUCE=0.")


def twice_through_one_forward() -> dict[str, Any]:
    """Run two backwards through one forward. The second stays local, although it declares and marks."""
    records = {}
    with ovpatch.applied("ddp"):
        for chunked in (False, True):
            torch.manual_seed(0)
            net = Net(chunked=chunked)
            wrapped = DDP(net, **TINY)
            loss = wrapped(data(0, 5, 6)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            records[chunked] = _named(seen(net)["grad"])
    return records


def test_a_second_backward_through_one_forward(ranks):
    for result in ranks(2)(twice_through_one_forward):
        torch.testing.assert_close(result[True], result[False], rtol=1e-4, atol=1e-6)
