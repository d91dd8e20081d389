"""Half-precision parameters that are updated in fp32: what a script with main parameters of its own would compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import ovpatch
from ovpatch.overlap.data_parallel.grad_sharder import get_registered_terms
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from tests.plugins.ddp.arms import Record, data, device, table
from tests.plugins.dist_optimizer.checks import (
    SMALL,
    all_cases,
    check_all,
    ddp,
    on,
    params,
    versions,
)
from tests.plugins.dist_optimizer.test_state import on_cpu
from tests.support.equality import compare

IN_FP32 = {"main_params_in_fp32": True, "min_param_numel": 1000}
HALVES = [torch.bfloat16, torch.float16]
STEPS = 6

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1),
    "adamw, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.9, centered=True),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1, fused=True),
}
GPU_ONLY = ("adamw, fused",)  # on the CPU its rounding depends on where an element lies


def net(dtype: torch.dtype) -> nn.Module:
    """No parameter is so small that a rank of three would have no part of it."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 13), nn.LayerNorm(13), nn.Linear(13, 9)]
    return nn.Sequential(*layers).to(device(), dtype)


class ByHand:
    """An optimizer over fp32 copies, as scripts have it without the feature.

    Args:
        make: Makes the optimizer.
        ones: The parameters of half precision.
    """

    def __init__(self, make: Callable[[Any], Optimizer], ones: Any) -> None:
        self._params = list(ones)
        self.mains = [nn.Parameter(p.detach().float()) for p in self._params]
        self.inner = make(self.mains)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param, main in zip(self._params, self.mains, strict=True):
            main.copy_(torch.where(main.to(param.dtype) == param, main, param.float()))
            main.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, main in zip(self._params, self.mains, strict=True):
            if main.grad is not None:
                param.copy_(main)

    def state_dict(self) -> dict[str, Any]:
        whole = copy.deepcopy(self.inner.state_dict())
        for number, main in enumerate(self.mains):
            if main.grad is not None:
                whole["state"].setdefault(number, {})["main_param"] = main.detach().clone()
        return whole


def step(model: nn.Module, opt: Any, number: int, clip: bool = False) -> None:
    opt.zero_grad()
    dtype = next(model.parameters()).dtype
    model(data(number, 5, 6).to(dtype)).square().mean().backward()
    if clip:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    opt.step()


#: What a sum of three bfloat16 gradients of about 0.1 rounds otherwise in another order, over some steps.
HALF_NOISE = 1e-3


def by_hand() -> bool:
    return not get_registered_terms()


def train(kind: str, dtype: torch.dtype, style: str = "plain") -> list[Record]:
    model = ddp(net(dtype), find_unused_parameters=style == "frozen")
    opt: Any = (ByHand if by_hand() else lambda make, ones: make(ones))(
        OPTIMIZERS[kind], model.parameters()
    )
    records: list[Record] = []
    for number in range(STEPS):
        if style == "frozen":
            model.module[0].bias.requires_grad_(not 2 <= number < 5)
        step(model, opt, number, clip=style == "clip")
        if style == "clamp":
            with torch.no_grad():
                model.module[2].weight.clamp_(-0.2, 0.2)
        if (
            dist.get_world_size() == 2
        ):  # on more, sums in another order round one or another parameter otherwise
            records.append(params(model))
        if number in (1, STEPS - 1):
            state = on_cpu(copy.deepcopy(opt.state_dict()))["state"]
            records += [
                {f"{i}.{name}": v for i, ones in sorted(state.items()) for name, v in ones.items()}
            ]
            mains = [ones["main_param"] for _, ones in sorted(state.items())]
            pairs = zip((param.cpu() for param in params(model).values()), mains, strict=True)
            records.append([bool((param == main.to(dtype)).all()) for param, main in pairs])
    return records


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", HALVES)
def test_updates_are_those_of_main_parameters_kept_by_hand(ranks, world, dtype):
    cases = {kind: {"kind": kind, "dtype": dtype} for kind in OPTIMIZERS if kind not in GPU_ONLY}
    check_all(
        ranks(world)(all_cases, train, on(world, cases), options=IN_FP32),
        steps=STEPS,
        floor=HALF_NOISE,
    )


@pytest.mark.parametrize("world", [2, 3])
def test_what_scripts_do_between_steps(ranks, world):
    cases = table(kind=["adamw"], dtype=[torch.bfloat16], style=["clamp", "clip", "frozen"])
    check_all(
        ranks(world)(all_cases, train, cases, options=IN_FP32),
        steps=STEPS,
        by_parts=None,
        floor=HALF_NOISE,
    )


# --- where the gradients' sums are fp32, too ---


def summed_in_fp32(micros: int) -> list[dict[int, Tensor]]:
    """Return what each step adds to the main parameters, with gradients that have been reduced and scattered."""
    model = ddp(net(torch.bfloat16))
    opt: Any = (ByHand if by_hand() else lambda make, ones: make(ones))(
        OPTIMIZERS["sgd"], model.parameters()
    )
    updates = []
    for number in range(STEPS):
        model.module.load_state_dict(
            net(torch.bfloat16).state_dict()
        )  # all ranks and arms begin at the same numbers
        if not by_hand():
            opt.state.clear()  # else main parameters stay what these are the roundings of
            opt.zero_grad()
            for micro in range(micros):
                with nullcontext() if micro == micros - 1 else model.no_sync():
                    backward(model, number, micro)
            opt.step()
            updates.append(
                {
                    i: state["main_param"]
                    for i, state in copy.deepcopy(opt.state_dict())["state"].items()
                }
            )
        else:
            sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
            for micro in range(micros):
                model.zero_grad()
                with model.no_sync():
                    backward(model, number, micro)
                for total, p in zip(sums, model.parameters(), strict=True):
                    total.add_(p.grad)
            for total in sums:
                total.div_(dist.get_world_size())
                dist.all_reduce(total)
            ones = enumerate(zip(model.parameters(), sums, strict=True))
            updates.append(
                {i: param.detach().float().add(total, alpha=-0.01) for i, (param, total) in ones}
            )
    return updates


def backward(model: nn.Module, number: int, micro: int) -> None:
    model(data(number, 5, 6, micro=micro).bfloat16()).square().mean().backward()


def both_in_fp32(micros: int) -> tuple[list[Record], list[Record]]:
    expected = summed_in_fp32(micros)
    in_fp32 = {"grad_reduce_in_fp32": True, "grad_accumulate_in_fp32": True}
    options = {"ddp": in_fp32, "dist_optimizer": SMALL | IN_FP32}
    with ovpatch.applied("ddp", "dist_optimizer", options=options):
        return expected, summed_in_fp32(micros)


@pytest.mark.parametrize("micros", [1, 4])
def test_sums_in_fp32_are_not_rounded_before_the_update(ranks, micros):
    for expected, ours in ranks(2)(both_in_fp32, micros):
        compare(
            expected[4:], ours[4:]
        ).assert_bitwise()  # gradients are whole before, which is the parameters' dtype


def writes_per_step() -> list[dict[str, int]]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        model = ddp(net(torch.bfloat16))
        opt, seen = OPTIMIZERS["sgd"](model.parameters()), []
        for number in range(STEPS):
            before = versions(model)
            step(model, opt, number)
            seen.append({name: version - before[name] for name, version in versions(model).items()})
        return seen


def test_autograd_sees_the_updates_alone_as_writes(ranks):
    for seen in ranks(2)(writes_per_step):
        assert all(set(step.values()) == {1} for step in seen), seen


# --- saving and loading ---


def in_pieces(kind: str, stop: int, *, own_dtype: bool) -> list[Record]:
    """Train, and in the middle go on with a new model and optimizer that load what the old ones saved."""
    model = ddp(net(torch.bfloat16))
    opt = OPTIMIZERS[kind](model.parameters())
    records = []
    for number in range(STEPS):
        if number == stop:
            saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
            dist.barrier()
            model = ddp(net(torch.bfloat16))
            opt = OPTIMIZERS[kind](model.parameters())
            if not own_dtype:
                step(model, opt, 50)  # a model and state that are known already
            model.load_state_dict(saved[0])
            opt.load_state_dict(saved[1])
        step(model, opt, number)
        records.append(params(model))
    return [*records, on_cpu(copy.deepcopy(opt.state_dict()))["state"]]


def resumed(kind: str, stops: list[int], own_dtype: bool) -> list[list[Record]]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        return [in_pieces(kind, stop, own_dtype=own_dtype) for stop in stops]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_resumed_run_goes_on_as_one_that_was_not_interrupted(ranks, kind, fresh):
    for whole, *pieces in ranks(2)(resumed, kind, [STEPS, 1, 4], fresh):
        for piece in pieces:
            compare(whole, piece).assert_bitwise()


def by_stock() -> tuple[Any, dict[str, Any]]:
    """Return a model that has stepped under stock, and its optimizer's state."""
    model = ddp(net(torch.bfloat16))
    opt = OPTIMIZERS["adamw"](model.parameters())
    step(model, opt, 0)
    return model, copy.deepcopy(opt.state_dict())


def across() -> dict[str, Any]:
    """Go from stock to the feature and back."""
    model, stock = by_stock()
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        model = ddp(model.module)
        opt = OPTIMIZERS["adamw"](model.parameters())
        opt.load_state_dict(stock)
        step(model, opt, 1)
        step(model, opt, 2)
        first = next(iter(model.parameters()))
        assert isinstance(opt.state[first]["exp_avg"], LazyTensor)
        ours = copy.deepcopy(opt.state_dict())
        live = copy.deepcopy(opt).state_dict()
        dist.barrier()
    reverted = {name: value.dtype for name, value in opt.state[first].items()}
    step(model, opt, 3)
    model = ddp(model.module)
    opt = OPTIMIZERS["adamw"](model.parameters())
    opt.load_state_dict(copy.deepcopy(ours))
    step(model, opt, 4)
    back = {name: value.dtype for name, value in opt.state_dict()["state"][0].items()}
    return {"stock": stock, "ours": ours, "live": live, "reverted": reverted, "back": back}


def test_from_stock_and_back(ranks):
    wide, low = torch.float32, torch.bfloat16
    moments = ("exp_avg", "exp_avg_sq")
    for result in ranks(2)(across):
        assert [result["stock"]["state"][0][name].dtype for name in moments] == [low, low]
        state = result["ours"]["state"][0]
        assert {state[name].dtype for name in (*moments, "main_param")} == {wide}
        assert state["main_param"].shape == state["exp_avg"].shape == (10, 6)
        compare(result["ours"], result["live"]).assert_bitwise()
        assert result["reverted"] == {"step": wide, "exp_avg": low, "exp_avg_sq": low}
        assert {name: result["back"][name] for name in moments} == {
            "exp_avg": low,
            "exp_avg_sq": low,
        }


def raising() -> list[Record]:
    model = ddp(net(torch.bfloat16))
    opt = OPTIMIZERS["adamw"](model.parameters())
    records = []
    for number in range(STEPS):
        if number == 3:
            kept, opt.param_groups[0]["betas"] = opt.param_groups[0]["betas"], None
            with pytest.raises(TypeError):
                step(model, opt, number)
            opt.param_groups[0]["betas"] = kept
        else:
            step(model, opt, number)
        records.append(params(model))
    return [*records, on_cpu(copy.deepcopy(opt.state_dict()))["state"]]


def raising_with_the_feature() -> list[Record]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        return raising()


def test_a_step_that_raises_leaves_everything_whole(ranks):
    first, second = ranks(2)(raising_with_the_feature)
    compare(first, second).assert_bitwise()
    compare([first[2]], [first[3]]).assert_bitwise()
    assert all(
        value.dtype == torch.bfloat16 for value in first[-2].values() if isinstance(value, Tensor)
    )


class WithSmall(nn.Module):
    """One parameter has too few elements to be cut, and one is not the wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16, device=device()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def with_a_gradient(ones: list[nn.Parameter], other: nn.Parameter) -> Optimizer:
    opt = OPTIMIZERS["adamw"](ones)
    opt.register_step_pre_hook(lambda *_: setattr(other, "grad", torch.ones_like(other)))
    return opt


def loaded_and_left(how: str) -> list[Any]:
    """Load into an optimizer that then goes on as stock, or has parameters without main ones."""
    said: list[Any] = []
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        torch.manual_seed(0)
        model = ddp(WithSmall())
        other = nn.Parameter(torch.ones(7, dtype=torch.bfloat16, device=device()))
        ones = [*model.parameters(), other]
        opt = with_a_gradient(ones, other)
        step(model, opt, 0)
        step(model, opt, 1)
        saved = copy.deepcopy(opt.state_dict())
        said.append(sorted(i for i, state in saved["state"].items() if "main_param" in state))
        dist.barrier()
        if how.startswith("fresh"):
            opt = with_a_gradient(ones, other)
        if how == "local, then loaded":
            local_step(model, opt)
        opt.load_state_dict(saved)
        if how == "fresh, local":
            local_step(model, opt)
        elif how != "fresh, reverted":
            step(model, opt, 2)
            step(model, opt, 3)
        dist.barrier()
    step(model, opt, 4)
    said.append(
        {
            str(v.dtype)
            for state in opt.state_dict()["state"].values()
            for n, v in state.items()
            if n != "step"
        }
    )
    said.append(any("main_param" in state for state in opt.state_dict()["state"].values()))
    return said


def emptied(opt: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a user's hook changes it: the first moments are zero."""
    del opt
    state = {
        i: one | {"exp_avg": torch.zeros_like(one["exp_avg"])}
        for i, one in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def local_step(model: nn.Module, opt: Optimizer) -> None:
    opt.zero_grad()
    with model.no_sync():
        model(data(5, 5, 6).bfloat16()).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("how", ["known", "fresh, local", "fresh, reverted", "local, then loaded"])
def test_what_has_no_main_parameter_goes_on_as_stock(ranks, how):
    for mains, dtypes, any_main in ranks(2)(loaded_and_left, how):
        assert mains == list(range(1, 9))  # not the scale, which is the first, nor the stranger
        assert dtypes == {"torch.bfloat16"}
        assert any_main == (
            how == "local, then loaded"
        )  # as under stock, which keeps what it does not know


def hooked() -> list[float]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        model = ddp(net(torch.bfloat16))
        opt = OPTIMIZERS["adamw"](model.parameters())
        step(model, opt, 0)
        saved = copy.deepcopy(opt.state_dict())
        dist.barrier()
        opt.register_load_state_dict_pre_hook(emptied)
        opt.load_state_dict(saved)
        left = [float(state["exp_avg"].abs().max()) for state in opt.state_dict()["state"].values()]
        dist.barrier()
    return left


def test_hooks_of_the_script_decide_what_is_loaded(ranks):
    assert ranks(2)(hooked) == [[0.0] * 8] * 2


def stocks_checkpoint() -> set[str]:
    """Load what stock saved into an optimizer that has stepped, and revert."""
    model, stock = by_stock()
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        model = ddp(model.module)
        opt = OPTIMIZERS["adamw"](model.parameters())
        step(model, opt, 1)
        opt.load_state_dict(stock)
    step(model, opt, 2)
    return {
        str(v.dtype)
        for state in opt.state_dict()["state"].values()
        for n, v in state.items()
        if n != "step"
    }


def test_a_stock_checkpoint_and_revert(ranks):
    assert ranks(2)(stocks_checkpoint) == [{"torch.bfloat16"}] * 2


def of_full_precision() -> dict[str, torch.dtype]:
    with ovpatch.applied(
        "ddp",
        "dist_optimizer",
        options={"dist_optimizer": SMALL | IN_FP32 | {"min_param_numel": 8}},
    ):
        model = ddp(net(torch.float32))
        opt = OPTIMIZERS["momentum"](model.parameters())
        step(model, opt, 0)
        step(model, opt, 1)
        state = {name: value.dtype for name, value in opt.state_dict()["state"][0].items()}
        dist.barrier()
    return state


def test_fp32_parameters_have_none(ranks):
    assert ranks(2)(of_full_precision) == [{"momentum_buffer": torch.float32}] * 2
