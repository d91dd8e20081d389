"""Gradients of parameters that are kept in bf16, which copies between ranks carry before they are cast to fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import ovpatch
from ovpatch.insight.equality import compare
from ovpatch.overlap import gate, half_wire
from ovpatch.overlap.copies.engine import Engine
from ovpatch.overlap.half_wire import HalfWire
from tests.plugins.ddp.arms import Record, data, device
from tests.plugins.dist_optimizer import test_gpu
from tests.plugins.dist_optimizer.arms import SMALL
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params
from tests.plugins.dist_optimizer.test_copy_engines import BY_COPIES, in_files, on_cpus
from tests.plugins.dist_optimizer.test_gpu import NCCL
from tests.plugins.dist_optimizer.test_half_wire import interrupt
from tests.plugins.dist_optimizer.test_param_dtype import MODELS, STYLES, check_kept, modelled, styled
from tests.plugins.dist_optimizer.test_param_dtype_gpu import WIDE as ON_STREAMS
from tests.plugins.dist_optimizer.under_autocast import OPTIONS, autocast

STEPS = 12
FIRST = 3  # step in which gradients are by parts and parameters in bf16

Sent = list[set[torch.dtype]]


class Mixture(nn.Module):
    """Linears, one of them used twice, and what stays in fp32."""

    def __init__(self, style: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.style, self.seen = style, None
        self.embed = nn.Embedding(7, 12)
        self.first, self.twice, self.other = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm, self.last = nn.LayerNorm(12), nn.Linear(12, 5)
        self.to(device())

    def forward(self, x: Tensor, other: bool = True) -> Tensor:
        with autocast(cache_enabled=self.style != "without a cache"):
            x = self.embed(x)
            for layer in (self.first, self.twice, self.twice):
                if self.style.startswith("checkpointed"):
                    x = checkpoint(layer, x, use_reentrant="reentrant" in self.style).relu()
                else:
                    x = layer(x).relu()
                if self.seen is not None and layer is self.first:
                    x.register_hook(self.seen)
            if other:
                x = x + self.other(x)
            out: Tensor = self.last(self.norm(x))
            return out.float()


class Recomputed(Mixture):
    """The same, all inside of checkpoints, so that each has a backward of its own: with one Linear in two of them."""

    def forward(self, x: Tensor, other: bool = True) -> Tensor:
        del other
        x = nn.functional.one_hot(x % 4, 4).flatten(1).float().requires_grad_()
        with autocast():
            x = checkpoint(lambda y: self.twice(y).relu(), x, use_reentrant=True)
            out: Tensor = checkpoint(lambda y: self.norm(self.other(self.twice(y).relu())), x, use_reentrant=True)
            return out.float()


def inputs(number: int, micro: int = 0) -> Tensor:
    return (data(number, 9, 3, micro=micro) * 10).long() % 7


def doubled(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


class Steps:
    """A training loop in one of several styles."""

    def __init__(self, style: str) -> None:
        self.style = style
        buckets = {"bucket_cap_mb": 1e-4} if "one bucket" not in style else {}
        static = {"static_graph": True} if style in ("checkpointed, reentrant", "recomputed") else {}
        mixture = (Recomputed if style == "recomputed" else Mixture)(style)
        if style.startswith("node"):
            self.node: Any = get_gradient_edge(mixture.other.weight).node
        if style == "node hooked":
            self.node.register_hook(lambda _, given: doubled(mixture.other.weight))
        if style == "node hooked before":
            self.node.register_prehook(lambda given: (given[0] * 2,))
        self.model: Any = ddp(mixture, find_unused_parameters=style == "unused", **buckets, **static)
        self.opt = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.records: list[Record] = []
        module = self.model.module
        if style == "hooked":
            module.other.weight.register_hook(lambda grad: grad * 2)
        if style == "hooked afterwards":
            module.other.weight.register_post_accumulate_grad_hook(doubled)
        if style == "node hooked afterwards":
            self.node.register_hook(lambda _, given: doubled(module.other.weight))

    def look(self, _grad: Tensor) -> None:
        """Look at gradients while backward computes, one of them as autograd made it and one that is not there yet."""
        module = self.model.module
        self.records.append({"last": module.last.weight.grad.clone(), "first": module.first.weight.grad is None})

    def come_late(self, _grad: Tensor) -> None:
        """Register a hook on a parameter that backward has not come to."""
        weight = self.model.module.first.weight
        factor = 1.0 if self.style == "hooked on the way" else 1.1
        self.handle = weight.register_hook(lambda grad: self.records.append({"late": grad.clone()}) or grad * factor)

    def write(self, _grad: Tensor) -> None:
        """Make a gradient to which backward will add, when ranks have agreed that there is none."""
        weight = self.model.module.first.weight
        weight.grad = torch.full_like(weight, 0.1)

    def forward(self, number: int, micro: int = 0) -> Tensor:
        seen = {
            "looked at": self.look,
            "interrupted": interrupt if number == 6 and dist.get_rank() == 0 else None,
            "interrupted everywhere": interrupt if number == 6 else None,
            "hooked on the way": self.come_late if number == 6 else None,
            "changed on the way, one bucket": self.come_late if number == 6 else None,
            "written": self.write if number == 6 else None,
        }
        self.model.module.seen = seen.get(self.style) if number >= FIRST else None
        out: Tensor = self.model(inputs(number, micro), other=self.style != "unused" or number % 2 == 0)
        return out

    def loss(self, number: int, micro: int = 0) -> Tensor:
        out = self.forward(number, micro)
        if self.style == "penalty" and number % 2:
            x = torch.ones(2, 12, device=device(), requires_grad=True)
            with autocast():
                inner = self.model.module.other(x).float().square().sum()
            found = torch.autograd.grad(inner, [self.model.module.other.weight])
            self.records.append({"penalty": found})
        if self.style == "nested":
            weight = self.model.module.other.weight

            def nested(_grad: Tensor) -> None:
                x = torch.ones(2, 12, device=device())
                with torch.enable_grad(), autocast():
                    inner = self.model.module.other(x).float().square().sum()
                    self.records.append({"nested": torch.autograd.grad(inner, [weight])})

            out.register_hook(nested)
        if self.style == "two forwards":
            return out.square().mean() + self.forward(number, 1).square().mean()
        if self.style == "three forwards":  # whose sum has other bits in another order
            weights = (3e-5, 5e-5)
            return sum(
                (w * self.forward(number, i + 1).square().mean() for i, w in enumerate(weights)), out.square().mean()
            )
        return out.square().mean()

    def run(self, sent: Sent) -> list[Record]:
        for number in range(STEPS):
            sent.append(set())
            self.opt.zero_grad(set_to_none=self.style != "zeroed")
            if self.style == "one zeroed":
                first = self.model.module.first.weight
                first.grad = torch.zeros_like(first)
            micros = 3 if self.style == "accumulated" else 1
            if self.style == "accumulated on one rank" and number == 7 and dist.get_rank() == 1:
                micros = 2
            interrupted = self.style.startswith("interrupted") and number == 6
            for micro in range(micros):
                with contextlib.nullcontext() if micro == micros - 1 else self.model.no_sync():
                    loss = self.loss(number, micro)
                    if self.style == "read on one rank" and number == 7 and dist.get_rank() == 1:
                        self.records.append({"sum": self.model.module.other.weight.detach().sum()})
                    # The rank that is interrupted says so, the other one hears of it.
                    with pytest.raises(RuntimeError) if interrupted else contextlib.nullcontext():
                        loss.backward(create_graph=self.style == "with a graph" and number == STEPS - 1)
            if interrupted:
                if self.style == "interrupted everywhere":
                    self.records.append({name: p.grad is None for name, p in self.model.named_parameters()})
                continue
            if "on the way" in self.style and number == 6:
                self.handle.remove()
            if self.style == "clipped":
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
            self.opt.step()
        return [*self.records, params(self.model)]


@contextlib.contextmanager
def watched(sent: Sent) -> Iterator[None]:
    """Note the dtypes of what is reduced in the last of steps; hosts meet as those of GPUs do."""
    real = Engine.scatter

    def scatter(self: Engine, outputs: Any, inputs: Any, *, average: bool) -> Any:
        assert {output.dtype for output in outputs} == {torch.float32}
        assert len({one.dtype for one in inputs}) == 1
        sent[-1].update(one.dtype for one in inputs)
        return real(self, outputs, inputs, average=average)

    with mock.patch.object(Engine, "scatter", scatter), mock.patch.object(gate, "needed", return_value=True):
        yield


def arms(style: str) -> dict[str, tuple[list[Record], Sent]]:
    """Train stock, with gradients that are cast before they are sent, and with such as are taken."""
    in_flight = {"grads_in_flight_mb": 1e-4} if style == "in flight" else {}
    options = {
        "ddp": {"overlap_grad_reduce": style != "late"},
        "dist_optimizer": SMALL | OPTIONS | BY_COPIES | in_flight,
    }
    found = {}
    for name in ("cast", "taken") if style in ONLY_OURS else ("stock", "cast", "taken"):
        sent: Sent = []
        with contextlib.ExitStack() as stack:
            if name != "stock":
                stack.enter_context(watched(sent))
                if dist.get_backend() == "gloo":
                    stack.enter_context(in_files())
                stack.enter_context(ovpatch.applied("ddp", "dist_optimizer", options=options))
            if name == "cast":
                stack.enter_context(mock.patch.object(HalfWire, "take", return_value=False))
                stack.enter_context(mock.patch.object(HalfWire, "meet", autospec=True))
            torch.manual_seed(0)
            found[name] = Steps(style).run(sent), sent
    return found


BOTH, WIDE = {torch.float32, torch.bfloat16}, {torch.float32}
EVERY = set(range(STEPS))

ONLY_OURS = ("interrupted", "interrupted everywhere", "with a graph")  # stock waits for ever, or refuses
NOT_STOCK = ("clipped", *ONLY_OURS)  # a norm of parts has other bits

#: In which steps gradients are cast before they are sent.
CAST: dict[str, set[int]] = {
    "plain": set(),
    "one bucket": set(),
    "checkpointed": set(),
    "clipped": set(),
    "in flight": set(),
    "interrupted": set(),
    "interrupted everywhere": set(),
    "late": set(),
    "looked at": set(),
    "nested": set(),
    "penalty": {3},  # it reads the weight, which is not kept in bf16 from the second time on
    "accumulated": EVERY,
    "accumulated on one rank": {7},
    "checkpointed, reentrant": EVERY,
    "hooked": EVERY,
    "hooked afterwards": EVERY,
    "changed on the way, one bucket": {6},
    "hooked on the way": set(),  # it sees a cast, which is sent as what it was
    "node hooked": EVERY,
    "node hooked afterwards": EVERY,
    "node hooked before": EVERY,
    "one zeroed": EVERY,
    "read on one rank": {7},
    "recomputed": EVERY,
    "two forwards": EVERY,
    "three forwards": EVERY,
    "with a graph": {STEPS - 1},
    "without a cache": EVERY,
    "unused": set(range(1, STEPS, 2)),
    "zeroed": EVERY,
}


def check(results: list[dict[str, tuple[list[Record], Sent]]], style: str) -> None:
    """Demand stock's bits on two ranks, and in any case those of gradients that were cast before they were sent."""
    for result in results:
        ours, sent = result["taken"]
        # Who looks while backward computes sees what stock shows, where a gradient that is cast is divided already.
        arms = {"cast"} if style in NOT_STOCK else {"stock"} if style == "looked at" else {"stock", "cast"}
        for arm in arms if len(results) == 2 else {"cast"}:
            compared = compare(result[arm][0], ours)
            compared.assert_bitwise() if len(results) == 2 else compared.assert_equal()
        whole = [number for number in range(FIRST, STEPS) if number != 6 or not style.startswith("interrupted")]
        assert [result["cast"][1][number] for number in whole] == [WIDE] * len(whole)
        assert [sent[number] for number in whole] == [WIDE if number in CAST[style] else BOTH for number in whole], sent


@pytest.mark.parametrize("style", CAST)
def test_as_if_they_were_cast(ranks, style):
    check(ranks(2)(arms, style), style)


@pytest.mark.parametrize("style", ["plain", "read on one rank"])
def test_on_three_ranks(ranks, style):
    check(ranks(3)(arms, style), style)


def changed() -> str:
    options = {"dist_optimizer": SMALL | OPTIONS | BY_COPIES}
    sent: Sent = []
    with watched(sent), in_files(), ovpatch.applied("ddp", "dist_optimizer", options=options):
        with pytest.raises(RuntimeError) as caught:
            Steps("written").run(sent)
        assert len(sent) == 7
        return str(caught.value)


def test_what_is_changed_behind_an_agreement_is_an_error(ranks):
    for message in ranks(2)(changed):
        assert "'first.weight'" in message
        assert "has been changed" in message
        assert "OVPATCH_DIST_OPTIMIZER_PARAM_DTYPE" in message


def test_styles_by_copies(ranks):
    with_gates(ranks, styled, {style: {"style": style} for style in STYLES})


def test_models_by_copies(ranks):
    with_gates(ranks, modelled, {case: {"case": case} for case in MODELS}, steps=9)


def with_gates(ranks: Any, loop: Any, cases: dict[str, Any], **demands: Any) -> None:
    results = ranks(2)(by_copies, loop, cases)
    check_all([found for found, _ in results], check=check_kept, **demands)
    for _, taken in results:
        assert taken > len(cases), "hardly any gradient was sent as it is"


def by_copies(loop: Any, cases: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Run cases as elsewhere, by copies, with hosts that meet; count what is sent in half precision."""
    before = half_wire.sent.total
    with watched([set()]):
        return on_cpus(loop, cases, options=OPTIONS | BY_COPIES), half_wire.sent.total - before


@pytest.mark.gpu(2)
@pytest.mark.parametrize("style", [style for style in CAST if not style.startswith("interrupted")])
def test_on_gpus(ranks, style):
    check(ranks(2)(arms, style, **NCCL), style)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_streams(ranks, overlap):
    options = {**OPTIONS, **BY_COPIES, "overlap_param_gather": overlap, "gather_bucket_mb": 3.0}
    results = ranks(2)(all_cases, test_gpu.wide, ON_STREAMS, options=options, **NCCL)
    check_all(results, check=check_kept, steps=12)
    for result in results:
        for name, case in result.items():
            assert case["counters"]["grads_in_half"] > 0, name
