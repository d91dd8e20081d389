"""Optimizers that need full parameters: each rank updates some and keeps their state, which user code cannot see."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import ovpatch
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch_plugins.dist_optimizer.sharded_state import ShardedState
from tests.plugins.ddp.arms import Record, data
from tests.plugins.ddp.checks import same_bits
from tests.plugins.dist_optimizer import (
    test_hooks_and_failures,
    test_loop_styles,
    test_models,
    test_scaler,
)
from tests.plugins.dist_optimizer.checks import (
    SMALL,
    all_cases,
    both,
    check_all,
    ddp,
    params,
    some,
    versions,
)
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.plugins.dist_optimizer.test_state import on_cpu
from tests.support.equality import compare


class Lamb(Optimizer):
    """The optimizer LAMB as in many scripts: a Python number counts steps, and each full parameter has a trust ratio.

    After a few steps its state has more keys: a tensor with gaps, and many values that are no tensors.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6, "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "step": 0,
                        "m": torch.zeros_like(p),
                        "v": torch.zeros_like(p),
                        "seen": [],
                    }
                    state |= {
                        "on": True,
                        "shape": p.shape,
                        "scale": 0.1,
                        "nested": {7: (), "a": ({}, [1, (2.5,)])},
                    }
                state["step"] += 1
                if state["step"] == 4:
                    state["slow"], state["norms"] = (
                        p.clone().flatten()[::2],
                        {"last": (None, torch.ones(2)), 7: float("inf")},
                    )
                state["m"].lerp_(p.grad, 1 - first)
                state["v"].lerp_(p.grad.square(), 1 - second)
                update = state["m"] / (state["v"].sqrt() + group["eps"]) + group["decay"] * p
                ratio = float(p.norm() / (update.norm() + 1e-6))
                state["seen"] = [*state["seen"][-2:], ratio]
                p.sub_(update, alpha=group["lr"] * ratio)
        return loss


NAMED = {"per_parameter": f"{__name__}.Lamb"}


def muon(model: nn.Module) -> list[Optimizer]:
    """Return Muon for matrices, and AdamW for the rest, as the documentation of Muon advises."""
    return [
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01),
    ]


MAKERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "muon": muon,
    "adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.01, weight_decay=0.1)],
    "adafactor, foreach": lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.01, foreach=True)],
    "lamb": lambda m: [Lamb(m.parameters())],
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=0.01)],
}
KINDS = ["muon", "adafactor", "lamb"]
STEPS = 7


def build(kind: str) -> tuple[nn.Module, list[Optimizer]]:
    model = ddp(net())
    return model, MAKERS[kind](model)


def step(model: nn.Module, opts: list[Optimizer], number: int) -> None:
    for opt in opts:
        opt.zero_grad()
    model(data(number, 5, 6)).square().mean().backward()
    for opt in opts:
        opt.step()


def train(kind: str, states: bool = False) -> list[Record]:
    model, opts = build(kind)
    records = []
    for number in range(STEPS):
        step(model, opts, number)
        records += [versions(model), params(model)]
        if states or number == STEPS - 1:
            records.append(
                {str(i): copy.deepcopy(on_cpu(opt.state_dict())) for i, opt in enumerate(opts)}
            )
    return records


def check(results: list[dict[str, Any]], *, steps: int = STEPS, stock: int = 0) -> None:
    """Demand the values of stock PyTorch, and that each rank updated its share of the parameters and no more."""
    for result in same_bits(results):
        assert result["counters"]["steps"] >= steps
        assert result["counters"]["stock_optimizers"] == stock
    owned = [result["counters"]["params_owned"] for result in results]
    assert sum(owned) > 0
    assert max(owned) < sum(owned) <= results[0]["counters"]["params_updated"], owned


check_each = functools.partial(check_all, check=check)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers(ranks, world, kind):
    kinds = {kind: {"kind": kind}, "states": {"kind": kind, "states": True}}
    if world == 3 and kind != "lamb":
        # On three ranks, LAMB alone tests state that no rank reads.
        del kinds[kind]
    elif kind == "adafactor":
        kinds["foreach"] = {"kind": "adafactor, foreach", "states": True}
    check_each(ranks(world)(all_cases, train, kinds, options=NAMED))


@pytest.mark.parametrize(("bucket_mb", "buckets"), [(0.0, 4), (4e-4, 2)])
def test_parameters_alone_and_in_buckets(ranks, bucket_mb, buckets):
    results = ranks(2)(
        all_cases, train, {"": {"kind": "lamb"}}, options=NAMED | {"gather_bucket_mb": bucket_mb}
    )
    check_each(results)
    counters = results[0][""]["counters"]
    assert counters["gathers"] == buckets * STEPS
    assert counters["bytes_gathered"] == STEPS * 4 * (60 + 10 + 70 + 21)


# --- the share of each rank ---


def shares(kind: str) -> tuple[list[int], int]:
    """Return the number of state elements on this rank, and on all ranks."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | NAMED}):
        torch.manual_seed(1)
        model = ddp(nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))))
        opt = MAKERS[kind](model)[0]
        for number in range(5):
            opt.zero_grad()
            model(data(number, 5, 16)).square().mean().backward()
            opt.step()
        values = [
            v for state in opt.state.values() for v in state.values() if isinstance(v, Tensor)
        ]
        assert all(isinstance(value, LazyTensor) for value in values)
        (source,) = {value.source for value in values}
        kept, everything = (
            sum(part.numel() for part in source._local.values()),
            sum(v.numel() for v in values),
        )
        dist.barrier()
        assert everything == sum(
            v.numel()
            for s in opt.state_dict()["state"].values()
            for v in s.values()
            if isinstance(v, Tensor)
        )
        dist.barrier()
    return kept, everything


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_keeps_its_share_of_the_state(ranks, world, kind):
    results = ranks(world)(shares, kind)
    assert sum(kept for kept, _ in results) == results[0][1]
    for kept, everything in results:
        assert kept == pytest.approx(everything / world, rel=0.1)


def owned_numels(numels: list[int]) -> list[int]:
    """Return the number of elements that each rank owns if each parameter has its own optimizer."""
    from ovpatch_plugins.dist_optimizer.optimizer_attach import find_sharded

    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | NAMED}):
        model = ddp(nn.ParameterList(torch.ones(numel) for numel in numels))
        model.forward = lambda: sum(p.sum() for p in model.module)  # type: ignore[method-assign]
        opts = [Lamb([p]) for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for opt in opts:
            opt.step()
        loads = [0] * dist.get_world_size()
        for opt in opts:
            for part in find_sharded(opt).params_to_step(opt):
                (owner,) = find_sharded(opt)._states[part.shards].owners_of([part.index])
                loads[owner] += part.param.numel()
        dist.barrier()
    return loads


def test_parameters_with_one_optimizer_each_are_balanced_like_those_of_one_optimizer(ranks):
    first, second = ranks(2)(owned_numels, [50, 40, 30, 20, 10])
    assert first == second == [80, 70]


# --- the loops, models and reads of the other files ---

SINGLE_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": OPTIMIZERS["adamw"],
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.02),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "lamb": lambda ps: Lamb(ps),
}


def instead(kind: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a loop of another file with this kind of optimizer instead of AdamW."""
    with (
        mock.patch.dict(OPTIMIZERS, {"adamw": SINGLE_OPTIMIZERS[kind]}),
        mock.patch.dict(SMALL, NAMED),
    ):
        return run(*args, **kwargs)


def cases(
    kind: str, run: Callable[..., Any], run_cases: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return cases of :func:`instead` from the cases of a loop."""
    return {name: {"kind": kind, "run": run, **kwargs} for name, kwargs in run_cases.items()}


def styles(kind: str) -> dict[str, dict[str, Any]]:
    found = {
        s: {"style": s} for s in test_loop_styles.STYLES if s != "group_added" or kind != "muon"
    }
    return cases(
        kind, test_loop_styles.train, found | {"early": {"style": "closure", "early": True}}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_styles(ranks, kind):
    """Run a third of the styles. The three kinds together run all styles."""
    third = some(styles("lamb"), KINDS.index(kind))
    wanted = {name: case for name, case in styles(kind).items() if name in third}
    check_each(ranks(2)(all_cases, instead, wanted, options=NAMED), steps=5)


def test_styles_on_three_ranks(ranks):
    check_each(ranks(3)(all_cases, instead, some(some(styles("lamb"))), options=NAMED), steps=5)


def frozen_for_a_while(kind: str) -> list[Record]:
    model = ddp(net(), find_unused_parameters=True)
    opt = SINGLE_OPTIMIZERS[kind](model.parameters())
    records = []
    for number in range(9):
        model.module[0].weight.requires_grad_(not 3 <= number < 6)
        step(model, [opt], number)
        records += [params(model), copy.deepcopy(on_cpu(opt.state_dict()))]
    return records


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_frozen_for_a_while(ranks, kind):
    check_each(
        ranks(2)(all_cases, frozen_for_a_while, {"": {"kind": kind}}, options=NAMED), steps=9
    )


def two_dtypes(eps: float | None) -> list[Record]:
    torch.manual_seed(0)
    module = net()
    # fp64 has another epsilon than fp32.
    module[2].double()
    module[2].register_forward_pre_hook(lambda _, args: args[0].double())
    module[2].register_forward_hook(lambda _, args, out: out.float())
    model = ddp(module)
    opt = torch.optim.Adafactor(
        [*module[2].parameters(), *module[0].parameters()], lr=0.01, eps=(eps, 1e-3)
    )
    records = []
    for number in range(3):
        step(model, [opt], number)
        records.append(params(model))
    return records


def test_an_optimizer_with_the_default_epsilon_over_two_dtypes_falls_back(ranks):
    check_all(ranks(2)(all_cases, two_dtypes, {"": {"eps": None}}), steps=0, stock=1, by_parts=None)
    check_all(ranks(2)(all_cases, two_dtypes, {"": {"eps": 1e-7}}), steps=3, by_parts=None)


@pytest.mark.parametrize("kind", ["adafactor", "lamb"])
def test_kinds_of_models(ranks, kind):
    wanted = {
        "unused",
        "unused by rank, gradients stay",
        "frozen",
        "static graph",
        "double",
        "checkpointed, reentrant",
    }
    # Adafactor divides by the number of elements, and "odd" has an empty parameter.
    wanted |= {"odd"} if kind == "lamb" else {"bfloat16"}
    owners = {"owners": owners_of[kind]}
    loops = {name: kwargs | owners for name, kwargs in test_models.CASES.items() if name in wanted}
    check_each(
        ranks(2)(all_cases, test_models.train, loops, options=NAMED), steps=test_models.STEPS
    )


def by_groups(kind: str, model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.03}, {"params": []}]
    return [SINGLE_OPTIMIZERS[kind](groups)]


def disjoint(kind: str, model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [
        SINGLE_OPTIMIZERS[kind](parameters[:2]),
        torch.optim.AdamW(parameters[2:4]),
        SINGLE_OPTIMIZERS[kind](parameters[4:]),
    ]


def shared(kind: str, model: nn.Module) -> list[Optimizer]:
    return [
        SINGLE_OPTIMIZERS[kind](model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.01),
    ]


owners_of = {kind: functools.partial(by_groups, kind) for kind in SINGLE_OPTIMIZERS}


@pytest.mark.parametrize("kind", ["adafactor", "lamb"])
def test_several_optimizers(ranks, kind):
    loops = {f.__name__: {"owners": functools.partial(f, kind)} for f in (disjoint, shared)}
    check_each(
        ranks(2)(all_cases, test_models.train, loops, options=NAMED), steps=test_models.STEPS
    )


def test_hooks_see_all_parameters(ranks):
    loops = cases(
        "adafactor",
        test_hooks_and_failures.hooked,
        {"look": {"look": True}, "glance": {"look": False}},
    )
    check_each(ranks(2)(all_cases, instead, loops), steps=8)


@pytest.mark.parametrize("where", ["pre-hook", "post-hook", "step", "closure"])
def test_after_a_step_that_raises_all_tensors_are_full(ranks, where):
    loops = cases("lamb", test_hooks_and_failures.raising, {where: {"where": where}})
    check_each(ranks(2)(all_cases, instead, loops, options=NAMED), steps=8)


LOCAL = ["all", "begins", "ends", "average"]


# The fallback does not depend on the kind, so one style is enough for the second kind.
@pytest.mark.parametrize(
    ("kind", "style"), [*(("lamb", style) for style in LOCAL), ("adafactor", "begins")]
)
def test_steps_on_local_gradients_fall_back(ranks, style, kind):
    loops = cases(kind, test_hooks_and_failures.local_steps, {style: {"style": style}})
    steps = 0 if style in ("all", "ends") else 1
    check_all(
        ranks(2)(all_cases, instead, loops, options=NAMED), steps=steps, stock=1, by_parts=False
    )


# --- one rank raises ---


class Picky(Lamb):
    """An optimizer that raises for one parameter if its flag is set."""

    bad = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if self.bad and p.shape == (7, 10):
                    raise ValueError("not really")
        return super().step(closure)


def raising_alone() -> list[Record]:
    model = ddp(net())
    opt = Picky(model.parameters())
    records, raised = [], 0
    for number in range(8):
        opt.bad = number == 4
        try:
            step(model, [opt], number)
        except ValueError:
            raised += 1
        # Smaller parameters have no owner.
        records.append({name: p for name, p in params(model).items() if p.numel() >= 8})
    raised_by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(raised_by_rank, raised)
    return [records, raised_by_rank]


def test_an_error_on_one_rank_leaves_the_parameters_the_same_on_all(ranks):
    first, second = ranks(2)(both, raising_alone, options={"per_parameter": f"{__name__}.Picky"})
    assert sorted(first["patched"][1]) == [0, 1]
    compare(first["patched"][0], second["patched"][0]).assert_bitwise()


# --- scalers ---


def scaled(kind: str) -> dict[str, dict[str, Any]]:
    once = {"fused": False, "culprit": 0}
    return cases(
        kind,
        test_scaler.train,
        {f"{on}": {"unscale": on, "clip": on, **once} for on in (False, True)},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scalers(ranks, kind):
    results = ranks(2)(all_cases, instead, scaled(kind), options=NAMED)
    check_each(results, steps=8)
    for case in results[0].values():
        assert len({record["scale"] for record in case["patched"]}) > 1, "no step was skipped"


def waits_at_second_wrapper() -> list[bool]:
    """Return ``was_read`` at each wait for readers, in a step whose two parameters have different wrappers."""
    layers = nn.Sequential(nn.Linear(6, 6))
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        model = ddp(layers)
        opt = torch.optim.Adafactor(model.parameters())
        model(data(0, 5, 6)).square().mean().backward()
        opt.step()
        # The gradient and the state of this parameter stay with the first wrapper.
        layers[0].weight.requires_grad_(False)
        layers.append(nn.Linear(6, 6))
        opt.add_param_group({"params": [*layers[1].parameters()]})
        model = ddp(layers)
        model(data(1, 5, 6)).square().mean().backward()
        found = []
        wait = ShardedState.wait_for_readers

        def wait_for_readers(state: ShardedState) -> None:
            found.append(state.was_read)
            wait(state)

        with mock.patch.object(ShardedState, "wait_for_readers", wait_for_readers):
            opt.step()
        return found


def test_a_rank_that_owns_all_moved_state_waits_for_its_readers(ranks):
    """Check the rank that owns the bias and reads nothing: it once began a version while its peer read the last one."""
    assert ranks(2)(waits_at_second_wrapper) == [[True, False]] * 2
