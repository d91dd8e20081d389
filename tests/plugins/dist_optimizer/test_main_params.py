"""Parameters in bf16 or fp16 with updates in fp32: the same values as in a script that keeps main parameters itself."""

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
LOW_PRECISION_DTYPES = [torch.bfloat16, torch.float16]
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
# On the CPU, the rounding of this kind depends on the position of an element.
GPU_ONLY = ("adamw, fused",)


def net(dtype: torch.dtype) -> nn.Module:
    """Return a model whose smallest parameter still has a shard on each of three ranks."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 13), nn.LayerNorm(13), nn.Linear(13, 9)]
    return nn.Sequential(*layers).to(device(), dtype)


class ByHand:
    """An optimizer over fp32 copies, as scripts write it without the feature.

    Args:
        make: Makes the optimizer.
        params: The parameters in bf16 or fp16.
    """

    def __init__(self, make: Callable[[Any], Optimizer], params: Any) -> None:
        self._params = list(params)
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
        found = copy.deepcopy(self.inner.state_dict())
        for number, main in enumerate(self.mains):
            if main.grad is not None:
                found["state"].setdefault(number, {})["main_param"] = main.detach().clone()
        return found


def step(model: nn.Module, opt: Any, number: int, clip: bool = False) -> None:
    opt.zero_grad()
    dtype = next(model.parameters()).dtype
    model(data(number, 5, 6).to(dtype)).square().mean().backward()
    if clip:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    opt.step()


# The difference, after some steps, between sums of three bfloat16 gradients of about 0.1 in two orders.
LOW_PRECISION_NOISE = 1e-3


def by_hand() -> bool:
    return not get_registered_terms()


def make_optimizer(kind: str, model: nn.Module) -> Any:
    """Return an optimizer that keeps main parameters: by the feature in the patched arm, by hand in the stock arm."""
    make = OPTIMIZERS[kind]
    return ByHand(make, model.parameters()) if by_hand() else make(model.parameters())


def train(kind: str, dtype: torch.dtype, style: str = "plain") -> list[Record]:
    model = ddp(net(dtype), find_unused_parameters=style == "frozen")
    opt = make_optimizer(kind, model)
    records: list[Record] = []
    for number in range(STEPS):
        if style == "frozen":
            model.module[0].bias.requires_grad_(not 2 <= number < 5)
        step(model, opt, number, clip=style == "clip")
        if style == "clamp":
            with torch.no_grad():
                model.module[2].weight.clamp_(-0.2, 0.2)
        # On more ranks, another order of sums rounds some parameters in another way.
        if dist.get_world_size() == 2:
            records.append(params(model))
        if number in (1, STEPS - 1):
            state = on_cpu(copy.deepcopy(opt.state_dict()))["state"]
            records += [
                {
                    f"{i}.{name}": value
                    for i, values in sorted(state.items())
                    for name, value in values.items()
                }
            ]
            mains = [values["main_param"] for _, values in sorted(state.items())]
            pairs = zip((param.cpu() for param in params(model).values()), mains, strict=True)
            records.append([bool((param == main.to(dtype)).all()) for param, main in pairs])
    return records


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", LOW_PRECISION_DTYPES)
def test_updates_are_those_of_main_parameters_kept_by_hand(ranks, world, dtype):
    cases = {kind: {"kind": kind, "dtype": dtype} for kind in OPTIMIZERS if kind not in GPU_ONLY}
    check_all(
        ranks(world)(all_cases, train, on(world, cases), options=IN_FP32),
        steps=STEPS,
        floor=LOW_PRECISION_NOISE,
    )


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_clamped_clipped_or_frozen_between_steps(ranks, world):
    cases = table(kind=["adamw"], dtype=[torch.bfloat16], style=["clamp", "clip", "frozen"])
    check_all(
        ranks(world)(all_cases, train, cases, options=IN_FP32),
        steps=STEPS,
        by_parts=None,
        floor=LOW_PRECISION_NOISE,
    )


# --- gradients that are summed in fp32 as well ---


def summed_in_fp32(micros: int) -> list[dict[int, Tensor]]:
    """Return the main parameters after each step, each of which starts from the same bf16 parameters."""
    model = ddp(net(torch.bfloat16))
    opt = make_optimizer("sgd", model)
    updates = []
    for number in range(STEPS):
        # All ranks and arms start each step from the same values.
        model.module.load_state_dict(net(torch.bfloat16).state_dict())
        if not by_hand():
            # Otherwise the main parameters would keep the bits that bf16 has rounded away.
            opt.state.clear()
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
            pairs = enumerate(zip(model.parameters(), sums, strict=True))
            updates.append(
                {i: param.detach().float().add(total, alpha=-0.01) for i, (param, total) in pairs}
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
        # Gradients of earlier steps are full, so they have the dtype of the parameters.
        compare(expected[4:], ours[4:]).assert_bitwise()


def writes_per_step() -> list[dict[str, int]]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        model = ddp(net(torch.bfloat16))
        opt, seen = OPTIMIZERS["sgd"](model.parameters()), []
        for number in range(STEPS):
            before = versions(model)
            step(model, opt, number)
            seen.append({name: version - before[name] for name, version in versions(model).items()})
        return seen


def test_autograd_counts_only_the_updates_as_writes(ranks):
    for seen in ranks(2)(writes_per_step):
        assert all(set(step.values()) == {1} for step in seen), seen


# --- saving and loading ---


def train_resumed(kind: str, stop: int, *, is_fresh: bool) -> list[Record]:
    """Train, and before step ``stop`` continue with a new model and optimizer that load the state of the old ones.

    Args:
        kind: A key of :data:`OPTIMIZERS`.
        stop: The step; with :data:`STEPS`, training is not interrupted.
        is_fresh: Load before the first step of the new optimizer, and not after a step.
    """
    model = ddp(net(torch.bfloat16))
    opt = OPTIMIZERS[kind](model.parameters())
    records = []
    for number in range(STEPS):
        if number == stop:
            saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
            dist.barrier()
            model = ddp(net(torch.bfloat16))
            opt = OPTIMIZERS[kind](model.parameters())
            # After this step, ranks have agreed on the model, and the optimizer has state.
            if not is_fresh:
                step(model, opt, 50)
            model.load_state_dict(saved[0])
            opt.load_state_dict(saved[1])
        step(model, opt, number)
        records.append(params(model))
    return [*records, on_cpu(copy.deepcopy(opt.state_dict()))["state"]]


def resumed(kind: str, stops: list[int], is_fresh: bool) -> list[list[Record]]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        return [train_resumed(kind, stop, is_fresh=is_fresh) for stop in stops]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_resumed_run_continues_as_if_it_had_not_been_interrupted(ranks, kind, fresh):
    for uninterrupted, *continued in ranks(2)(resumed, kind, [STEPS, 1, 4], fresh):
        for records in continued:
            compare(uninterrupted, records).assert_bitwise()


def by_stock() -> tuple[Any, dict[str, Any]]:
    """Return a model that has stepped in stock PyTorch, and the state of its optimizer."""
    model = ddp(net(torch.bfloat16))
    opt = OPTIMIZERS["adamw"](model.parameters())
    step(model, opt, 0)
    return model, copy.deepcopy(opt.state_dict())


def across() -> dict[str, Any]:
    """Carry a checkpoint from stock PyTorch to the feature and back."""
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


def test_a_step_that_raises_leaves_full_parameters_and_state(ranks):
    first, second = ranks(2)(raising_with_the_feature)
    compare(first, second).assert_bitwise()
    compare([first[2]], [first[3]]).assert_bitwise()
    assert all(
        value.dtype == torch.bfloat16 for value in first[-2].values() if isinstance(value, Tensor)
    )


class WithSmall(nn.Module):
    """A model with a parameter that has too few elements to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16, device=device()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def with_a_gradient(parameters: list[nn.Parameter], unwrapped: nn.Parameter) -> Optimizer:
    """Return an optimizer that gives a parameter of no wrapper a gradient before each step."""
    opt = OPTIMIZERS["adamw"](parameters)
    opt.register_step_pre_hook(lambda *_: setattr(unwrapped, "grad", torch.ones_like(unwrapped)))
    return opt


def loaded_and_left(how: str) -> list[Any]:
    """Load into an optimizer that then falls back to torch, or has parameters without main parameters."""
    found: list[Any] = []
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | IN_FP32}):
        torch.manual_seed(0)
        model = ddp(WithSmall())
        unwrapped = nn.Parameter(torch.ones(7, dtype=torch.bfloat16, device=device()))
        parameters = [*model.parameters(), unwrapped]
        opt = with_a_gradient(parameters, unwrapped)
        step(model, opt, 0)
        step(model, opt, 1)
        saved = copy.deepcopy(opt.state_dict())
        found.append(sorted(i for i, state in saved["state"].items() if "main_param" in state))
        dist.barrier()
        if how.startswith("fresh"):
            opt = with_a_gradient(parameters, unwrapped)
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
    found.append(
        {
            str(v.dtype)
            for state in opt.state_dict()["state"].values()
            for n, v in state.items()
            if n != "step"
        }
    )
    found.append(any("main_param" in state for state in opt.state_dict()["state"].values()))
    return found


def emptied(opt: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with first moments of zero, as a user's hook."""
    del opt
    state = {
        i: values | {"exp_avg": torch.zeros_like(values["exp_avg"])}
        for i, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def local_step(model: nn.Module, opt: Optimizer) -> None:
    opt.zero_grad()
    with model.no_sync():
        model(data(5, 5, 6).bfloat16()).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("how", ["known", "fresh, local", "fresh, reverted", "local, then loaded"])
def test_parameters_without_main_parameters_continue_as_in_torch(ranks, how):
    for mains, dtypes, has_main in ranks(2)(loaded_and_left, how):
        # The scale, which is the first, and the parameter of no wrapper have no main parameter.
        assert mains == list(range(1, 9))
        assert dtypes == {"torch.bfloat16"}
        # A stock optimizer keeps a key of a state_dict() that it does not know.
        assert has_main == (how == "local, then loaded")


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


def stock_checkpoint() -> set[str]:
    """Load a checkpoint of stock PyTorch into an optimizer that has stepped, and revert."""
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
    assert ranks(2)(stock_checkpoint) == [{"torch.bfloat16"}] * 2


def state_in_fp32() -> dict[str, torch.dtype]:
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


def test_fp32_parameters_have_no_main_parameters(ranks):
    assert ranks(2)(state_in_fp32) == [{"momentum_buffer": torch.float32}] * 2
