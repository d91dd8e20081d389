"""Full gradients that are freed while the backward computes: same values, less memory, and an error for a reader."""

from __future__ import annotations

import gc
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import ovpatch
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from tests.plugins.ddp.arms import Record, counted, data
from tests.plugins.dist_optimizer.checks import (
    SMALL,
    all_cases,
    apply,
    both,
    check_all,
    ddp,
    params,
    some,
)
from tests.plugins.dist_optimizer.test_loop_styles import SMALL_BUCKETS, STYLES, train
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.support.equality import compare
from tests.support.errors import error_of

AT_ONCE = {"grads_in_flight_mb": 1 / 2**20}
ONE_BUCKET = {"grads_in_flight_mb": 300 / 2**20}


@pytest.mark.parametrize(("world", "options"), [(2, AT_ONCE), (3, AT_ONCE), (2, ONE_BUCKET)])
def test_styles(ranks, world, options):
    cases = {style: {"style": style, "wrap": "small buckets, plain"} for style in STYLES}
    if world == 3:
        cases = some(some(cases))
    check_all(
        ranks(world)(
            all_cases, train, cases if options is AT_ONCE else some(cases, 2), options=options
        )
    )


@pytest.mark.parametrize("wrap", ["small buckets, unused"])
def test_styles_under_options_of_ddp(ranks, wrap):
    check_all(
        ranks(2)(
            all_cases,
            train,
            some({s: {"style": s, "wrap": wrap} for s in STYLES}, 1),
            options=AT_ONCE,
        )
    )


def loop(kind: str) -> list[Record]:
    """Train with a hook, bf16, clipping, a static graph or recomputation, each of which changes the backward."""
    half = kind == "half"
    raw = net().to(torch.bfloat16) if half else net()
    model = ddp(raw, static_graph=kind == "static", **SMALL_BUCKETS)
    opt = OPTIMIZERS["adamw"](model.parameters())
    seen: list[torch.Tensor] = []
    if kind == "hook":
        raw[0].register_full_backward_hook(lambda *_: seen.append(raw[2].weight.grad.norm()))
    records: list[Any] = []
    for step in range(8):
        opt.zero_grad()
        x = data(step, 5, 6).to(raw[0].weight.dtype).requires_grad_()
        if kind == "checkpoint":
            loss = (
                model(x).square().mean()
                + checkpoint_sequential(nn.Sequential(nn.Tanh()), 1, x).sum()
            )
        else:
            loss = model(x).square().mean()
        loss.backward()
        norm = (
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if kind == "clip"
            else torch.zeros(())
        )
        opt.step()
        records.append(
            {"loss": loss.detach(), "norm": norm, "param": params(model), "count": len(seen)}
        )
    return records


@pytest.mark.parametrize("kind", ["clip", "static", "hook", "checkpoint", "half"])
def test_kinds_of_loops(ranks, kind):
    reduced = {"ddp": {"grad_reduce_in_fp32": True}} if kind == "half" else {}
    for window in (AT_ONCE, ONE_BUCKET):
        results = ranks(2)(arms, kind, window, reduced)
        for result in results:
            compared = compare(result["stock"], result["patched"])
            (compared.assert_equal if kind == "clip" else compared.assert_bitwise)()
            assert result["by parts"] > 0


def arms(kind: str, window: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Run with a window, and stock, or with all gradients kept if ``more`` changes the dtype of the sums."""
    if not more:
        found = both(loop, kind, options=window)
        return {
            "stock": found["stock"],
            "patched": found["patched"],
            "by parts": found["counters"]["grads_sharded"],
        }
    found = []
    for options in ({"grads_in_flight_mb": 0.0}, window):
        with ovpatch.applied(
            "ddp", "dist_optimizer", options={"dist_optimizer": SMALL | options, **more}
        ):
            found.append(counted(loop, kind))
    stock, patched = (result["patched"] for result in found)
    return {"stock": stock, "patched": patched, "by parts": found[1]["counters"]["grads_sharded"]}


class Look(torch.autograd.Function):
    """An identity that calls a function while the backward computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Any) -> torch.Tensor:
        ctx.look = look
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.look()
        return grad, None


class Watched(nn.Module):
    """A chain of linears. The backward calls ``look`` once it has computed the gradients of all but the first."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.look = nn.Linear(20, 20), look
        self.rest = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(Look.apply(self.first(x), self.look))


def memory(window: float) -> list[int]:
    """Return the bytes of full gradients shortly before each backward ends."""
    found = []

    def look() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(
            sum(g.nelement() * g.element_size() for g in grads if not isinstance(g, LazyTensor))
        )

    options = SMALL | {"grads_in_flight_mb": window}
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": options}):
        model = ddp(Watched(look), bucket_cap_mb=1e-4)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            opt.zero_grad()
            model(data(step, 5, 20)).square().mean().backward()
            opt.step()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_memory(ranks, world):
    grad_bytes = 20 * 20 * 4
    for window, expected in (
        (0.0, 6 * grad_bytes),
        (2.5 * grad_bytes / 2**20, 2 * grad_bytes),
        (1 / 2**20, grad_bytes),
    ):
        for found in ranks(world)(memory, window):
            # No optimizer has requested shards before the first step.
            assert found[0] == 6 * grad_bytes
            assert found[-1] == expected


def failing(reads: bool) -> tuple[list[str], list[str], Any]:
    """Read a gradient in the middle of two backwards, or fail there; continue without these steps.

    Returns:
        The errors of these backwards, the errors of gradients that the script kept, and the final parameters.
    """
    raised: list[str] = []
    held_errors: list[str] = []
    fails = [False]

    def look() -> None:
        if fails[0] and not reads:
            raise ValueError("not really")
        if fails[0]:
            model.module.rest[3].weight.grad.norm()

    with apply(AT_ONCE):
        model = ddp(Watched(look), bucket_cap_mb=1e-4)
        opt = OPTIMIZERS["adamw"](model.parameters())
        for step in range(9):
            opt.zero_grad(set_to_none=False)
            held = model.module.rest[3].weight.grad
            fails[0] = step in (4, 5)
            try:
                backward_of(model, step)
            except (RuntimeError, ValueError) as error:
                raised.append(str(error))
                assert not reads or all(p.grad is None for p in model.module.rest.parameters())
                held_errors += [error_of(held.sum)] if held is not None else []
                continue
            opt.step()
        del held
        gc.collect()
        dist.barrier()
        return raised, held_errors, params(model)


def backward_of(model: nn.Module, step: int) -> None:
    model(data(step, 5, 20)).square().mean().backward()


def without_failed_steps(steps: tuple[int, ...]) -> Any:
    model = ddp(Watched(lambda: None), bucket_cap_mb=1e-4)
    opt = OPTIMIZERS["adamw"](model.parameters())
    for step in steps:
        opt.zero_grad(set_to_none=False)
        backward_of(model, step)
        opt.step()
    return params(model)


@pytest.mark.parametrize("reads", [True, False])
def test_an_early_read_raises_and_a_gradient_freed_by_a_failed_backward_cannot_be_read(
    ranks, reads
):
    wanted = ranks(2)(without_failed_steps, (0, 1, 2, 3, 6, 7, 8))
    for (raised, held_errors, found), want in zip(ranks(2)(failing, reads), wanted, strict=True):
        assert len(raised) == 2, raised
        for text in raised if reads else ():
            assert "parameter 'rest.3.weight' was read, or added to" in text
            assert "OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0" in text
        assert held_errors
        for text in held_errors:
            assert "'rest.3.weight' was reduced and freed by a backward that then failed" in text
        compare(want, found).assert_bitwise()


def used_by_turns(window: dict[str, Any]) -> list[Record]:
    """Train two parts of a model by optimizers of which the second steps, without zeroing, after every second backward.

    Each backward adds to its gradients, which must be full by then, except for one that the script has cleared.
    """
    model = ddp(Watched(lambda: None), bucket_cap_mb=1e-4)
    body = OPTIMIZERS["adamw"](model.module.first.parameters())
    head = OPTIMIZERS["sgd"](model.module.rest.parameters())
    early, late = model.module.rest[0].weight, model.module.rest[5].weight
    records = []
    for step in range(8):
        body.zero_grad()
        (late if step % 4 < 2 else early).grad = None
        backward_of(model, step)
        body.step()
        if step % 2:
            head.step()
        records.append(params(model))
    return records


def test_a_backward_that_adds_to_some_gradients_and_creates_others(ranks):
    for world, options in ((2, AT_ONCE), (2, {"grads_in_flight_mb": 0.004}), (3, AT_ONCE)):
        cases = {"": {"window": options}}
        check_all(ranks(world)(all_cases, used_by_turns, cases, options=options))


def taken() -> list[Any]:
    """Keep a gradient that was freed while the backward computes, and clear it on the parameter."""
    takes, held = [False], []

    def look() -> None:
        if takes[0]:
            weight = model.module.rest[3].weight
            held.append(weight.grad)
            weight.grad = None

    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | AT_ONCE}):
        model = ddp(Watched(look), bucket_cap_mb=1e-4)
        opt = OPTIMIZERS["adamw"](model.parameters())
        for step in range(8):
            opt.zero_grad()
            takes[0] = step == 5
            backward_of(model, step)
            opt.step()
        with pytest.raises(RuntimeError, match="taken from the parameter"):
            held[0].sum()
        return [isinstance(held[0], LazyTensor), params(model)]


def test_a_freed_gradient_that_a_script_kept_never_shows_another_step(ranks):
    wanted = ranks(2)(without_failed_steps, tuple(range(8)))
    for (was_given_up, found), want in zip(ranks(2)(taken), wanted, strict=True):
        assert was_given_up
        compare(want, found).assert_bitwise()


def interrupted() -> list[Any]:
    """Interrupt rank 0 while it waits for a bucket that rank 1 has not reached."""
    slow = [False]

    def look() -> None:
        if slow[0] and dist.get_rank() == 1:
            time.sleep(1)

    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | AT_ONCE}):
        model = ddp(Watched(look), bucket_cap_mb=1e-4)
        opt = OPTIMIZERS["adamw"](model.parameters())
        caught = 0
        for step in range(8):
            opt.zero_grad()
            slow[0] = step == 5
            loss = model(data(step, 5, 20)).square().mean()
            if slow[0] and dist.get_rank() == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                loss.backward()
            except InterruptedError:
                caught += 1
            if step != 5:
                opt.step()
        dist.barrier()
        return [caught, params(model)]


def test_a_rank_that_is_interrupted_while_it_waits_continues_with_its_peers(ranks):
    wanted = ranks(2)(without_failed_steps, (0, 1, 2, 3, 4, 6, 7))
    for rank, ((caught, found), want) in enumerate(zip(ranks(2)(alarmed), wanted, strict=True)):
        assert caught == (rank == 0)
        compare(want, found).assert_bitwise()


def alarmed() -> list[Any]:
    def alarm(*_: Any) -> None:
        raise InterruptedError("not really")

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        return interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)


def sparse() -> list[Record]:
    """Train a sparse embedding and dense weights. The sparse gradient is never sharded."""
    torch.manual_seed(1)
    model = ddp(
        nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 3)),
        **SMALL_BUCKETS,
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    for step in range(6):
        opt.zero_grad()
        words = torch.randint(
            0, 40, (5,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        model(words).square().mean().backward()
        opt.step()
        records.append(params(model))
    return records


def test_sparse_gradients(ranks):
    for world in (2, 3):
        check_all(ranks(world)(all_cases, sparse, {"": {}}, options=AT_ONCE))
