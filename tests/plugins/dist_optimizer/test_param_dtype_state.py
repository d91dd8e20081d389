"""What there is of parameters that are kept in bf16, who decides that, and how it ends."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor

import ovpatch
from ovpatch.insight.equality import compare
from ovpatch.overlap import farewell, main_shards, mixed
from ovpatch.settings.selection import SettingsError
from tests.plugins.ddp.arms import Record, data
from tests.plugins.ddp.test_compile import loop_compiled
from tests.plugins.dist_optimizer import test_scaler
from tests.plugins.dist_optimizer.arms import SMALL, both
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS
from tests.plugins.dist_optimizer.test_param_dtype import check_kept
from tests.plugins.dist_optimizer.under_autocast import OPTIONS, autocast, cast_net

KEPT = "{} parameters are kept and gathered in bfloat16"
FEATURE = {"dist_optimizer": SMALL | OPTIONS}


def patched(on: bool = True) -> Any:
    return ovpatch.applied("ddp", "dist_optimizer", options=FEATURE) if on else contextlib.nullcontext()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ddp(cast_net())
    return model, OPTIMIZERS["adamw"](model.parameters())


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        opt.zero_grad()
        loss = model(data(step, 5, 6)).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


def reverted(first: int) -> list[list[Any]]:
    arms = []
    for on in (False, True):
        torch.manual_seed(0)
        with patched(on):
            model, opt = made()
            records: list[Any] = train(model, opt, range(first))
        assert not any(mixed.find(p) for p in model.parameters())
        records += [*train(model, opt, range(first, 9)), params(model)]
        arms.append([*records, {str(k): v for k, v in opt.state_dict()["state"].items()}])
    return arms


def test_turned_off_in_the_middle(ranks):
    for first in (1, 2, 5):
        for stock, ours in ranks(2)(reverted, first):
            compare(stock, ours).assert_bitwise()


def remarks() -> set[str]:
    """Return what the report says of the models there are; those of earlier tests of the process are dropped first."""
    gc.collect()
    return {remark for remark in ovpatch.report()["dist_optimizer"].remarks if " kept " in remark}


def form() -> dict[str, Any]:
    """Look at a parameter as code does that does not read its elements."""
    with patched():
        model, opt = made()
        plain = copy.deepcopy(model.module[0].weight)
        before, reads = model.module[0].weight, main_shards.reads.total
        train(model, opt, range(5))
        weight = model.module[0].weight
        kept = mixed.find(weight)
        assert kept is not None
        same = [
            weight is before, isinstance(weight, nn.Parameter), weight.is_leaf, weight.requires_grad,
            weight.shape == plain.shape, weight.dtype == torch.float32 == weight.grad.dtype,
            weight.stride() == plain.stride(), weight.is_contiguous(), weight.storage_offset() == 0,
            weight.nbytes == plain.nbytes, dict(model.named_parameters())["module.0.weight"] is weight,
            opt.param_groups[0]["params"][0] is weight, weight in opt.state, weight.grad.shape == weight.shape,
            torch.zeros_like(weight).equal(torch.zeros(10, 6)), torch.empty_like(weight).stride() == (6, 1),
            weight.new_ones(2).equal(torch.ones(2)), weight.new_zeros(1, dtype=torch.int8).dtype == torch.int8,
            torch.empty_like(weight, device="meta").is_meta, not torch.empty_like(weight).requires_grad,
            main_shards.reads.total == reads,
        ]  # fmt: skip
        assert all(same), same
        with torch._C.DisableTorchFunctionSubclass():
            held = weight.untyped_storage().nbytes() + kept.copy.nbytes + kept.source.main(kept.index).nbytes
        assert held == 4 + 60 * 2 + 60 * 4 / 2
        assert mixed.find(model.module[3].weight) is None  # LayerNorm's
        return {"text": repr(weight), "reads": main_shards.reads.total - reads, "remarks": remarks()}


def test_the_form_of_a_parameter_is_known_without_its_elements(ranks):
    for result in ranks(2)(form):
        assert result["text"].startswith("Parameter containing:")
        assert "nan" not in result["text"]
        assert result["reads"] == 1
        assert result["remarks"] == {KEPT.format(4)}


def read_by_one(at: tuple[int, ...]) -> list[Any]:
    """Rank 0 alone reads the first weight; return which ranks keep the weights in bf16 before and afterwards."""
    with patched():
        model, opt = made()
        found: list[Any] = []
        for step in range(9):
            train(model, opt, range(step, step + 1))
            if step in at and dist.get_rank() == 0:
                model.module[0].weight.sum()
            if step in (3, 8):
                found.append([mixed.find(model.module[i].weight) is not None for i in (0, 2)])
        return [*found, remarks()]


def test_ranks_agree_on_what_is_kept(ranks):
    assert ranks(2)(read_by_one, (4,)) == 2 * [[[True, True], [True, True], {KEPT.format(4)}]]
    assert ranks(2)(read_by_one, (4, 5)) == [
        [[True, True], [False, True], {KEPT.format(3), "0.weight cannot be kept in bfloat16: read by sum"}],
        [[True, True], [False, True], {KEPT.format(3)}],
    ]


def read_by_a_thread() -> list[Record]:
    """What a thread reads stays in fp32 from then on."""
    model, opt = made()
    wanted, wrong, stop = params(model), [], threading.Event()
    losses = train(model, opt, range(4))

    def read() -> None:
        for how in itertools.cycle(
            (lambda: list(params(model).values()), lambda: copy.deepcopy([*model.parameters()]))
        ):
            if stop.is_set():
                return
            found = how()
            if not all(p.shape == q.shape and q.isfinite().all() for p, q in zip(wanted.values(), found, strict=True)):
                wrong.append(found)
            del found
            time.sleep(0.002)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    losses += train(model, opt, range(4, 40))
    stop.set()
    thread.join(20)
    assert not wrong, wrong[0]
    assert not any(mixed.find(p) for p in model.parameters())
    return [{"losses": losses}, params(model)]


def test_a_thread_reads_while_training_goes_on(ranks):
    check_all(ranks(2)(all_cases, read_by_a_thread, {"": {}}, options=OPTIONS), check=check_kept)


def scaled() -> list[Record]:
    with mock.patch.object(test_scaler, "net", cast_net):
        return test_scaler.train(True, False, False, culprit=0)


def test_skipped_steps(ranks):
    for result in ranks(2)(both, scaled, options=OPTIONS):
        compare(result["stock"], result["patched"]).assert_bitwise()


def graph_kept_over_a_step() -> list[Record]:
    """It has the values from before the step."""
    torch.manual_seed(1)
    model = ddp(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    opt = OPTIMIZERS["adamw"](model.parameters())
    records: list[Record] = []
    for step in range(8):
        x = data(step, 5, 6).requires_grad_()
        with autocast():
            loss = model(x).float().square().mean()
        opt.zero_grad()
        loss.backward(retain_graph=True)
        opt.step()
        records.append({"loss": loss.detach(), "grad": torch.autograd.grad(loss, x, retain_graph=step % 3 == 0)[0]})
    return [*records, params(model)]


def test_a_graph_that_is_kept_over_a_step(ranks):
    check_all(ranks(2)(all_cases, graph_kept_over_a_step, {"": {}}, options=OPTIONS), check=check_kept)


def autocast_for_a_while() -> list[Record]:
    """Training that goes on without autocast, and with it again."""
    torch.manual_seed(1)
    model = ddp(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    opt = OPTIMIZERS["adamw"](model.parameters())
    records: list[Record] = []
    for step in range(12):
        with autocast(enabled=not 5 <= step < 8):
            loss = model(data(step, 5, 6)).float().square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        records.append({"loss": loss.detach()})
    return [*records, params(model)]


def test_without_autocast_for_a_while(ranks):
    check_all(ranks(2)(all_cases, autocast_for_a_while, {"": {}}, options=OPTIONS), check=check_kept)


def stored(*, but: set[int]) -> dict[int, int]:
    """Return the bytes of all storages of tensors that Python knows, by address."""
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for one in gc.get_objects():
            if not issubclass(type(one), torch.Tensor) or issubclass(type(one), FakeTensor):
                continue
            if one.layout is torch.strided and not one.is_meta:
                storage = one.untyped_storage()
                with contextlib.suppress(RuntimeError):  # what an earlier test has traced has a storage without memory
                    found[storage.data_ptr()] = storage.nbytes()
    return {address: nbytes for address, nbytes in found.items() if address not in but}


def made_of_linears() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = ddp(nn.Sequential(*(nn.Linear(60, 60, bias=False) for _ in range(5))))
    return model, OPTIMIZERS["adamw"](model.parameters())


def train_linears(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for step in range(6):
        with autocast():
            loss = model(data(step, 5, 60)).float().square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()


def memory(options: dict[str, Any]) -> tuple[float, float]:
    """Return what is stored between steps, and once the model is gone and another has gone on; per element."""
    gc.collect()
    before = set(stored(but=set()))
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | options}):
        model, opt = made_of_linears()
        gc.collect()
        gc.disable()
        train_linears(model, opt)
        between = sum(stored(but=before).values()) / (5 * 60 * 60)
        del model, opt
        other = ddp(nn.Linear(6, 6))
        others = OPTIMIZERS["adamw"](other.parameters())
        for _ in range(2):
            other(data(0, 5, 6)).sum().backward()
            others.step()
        after = sum(nbytes for nbytes in stored(but=before).values() if nbytes > 1000) / (5 * 60 * 60)
        gc.enable()
        return between, after


@pytest.mark.parametrize("world", [2, 3])
def test_memory(ranks, world):
    """No more than without the option, and nothing of a model that is gone, without the garbage collector."""
    for without, kept in zip(ranks(world)(memory, {}), ranks(world)(memory, OPTIONS), strict=True):
        assert kept[0] <= without[0] + 0.1
        assert (without[1], kept[1]) == (0, 0)


def turned_off() -> float:
    """Return what is stored once a model is gone, the feature is off, and ranks have met; in bytes."""
    gc.collect()
    before = set(stored(but=set()))
    gc.disable()
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | OPTIONS}):
        model, opt = made_of_linears()
        train_linears(model, opt)
        assert mixed.find(model.module[0].weight) is not None
        del model, opt
    dist.barrier()
    farewell.met(dist.group.WORLD)
    after = sum(nbytes for nbytes in stored(but=before).values() if nbytes > 1000)
    gc.enable()
    return after


def test_nothing_is_left_once_it_is_off(ranks):
    """Without the garbage collector, which may not come for long."""
    assert ranks(2)(turned_off) == [0, 0]


def destroyed() -> bool:
    """Parameters are whole after their process group is gone, and a model that is dropped leaves nothing."""
    with patched():
        group = dist.new_group([0, 1])
        model, opt = made()
        model = ddp(cast_net(), process_group=group)
        opt = OPTIMIZERS["adamw"](model.parameters())
        train(model, opt, range(4))
        held = model.module[0].weight
        assert mixed.find(held) is not None
        expected = held.detach().clone()
        train(model, opt, range(4, 5))
        assert mixed.find(held) is not None
        dist.destroy_process_group(group)
        assert mixed.find(held) is None
        assert not torch.equal(held, expected)
        del model, opt, held
        gc.collect()
        return not mixed._mixed


def test_parameters_are_whole_once_their_process_group_is_destroyed(ranks):
    assert ranks(2)(destroyed) == [True, True]


def test_compiled_models_stay_in_fp32(ranks):
    for result in ranks(2)(both, compiled, options=OPTIONS, timeout=120):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["params_in_param_dtype"] == 0
        assert result["counters"]["params_read_whole"] == 0


def compiled() -> list[Record]:
    with autocast():
        return loop_compiled(False, "eager")


def compiled_beside(how: str) -> list[Record]:
    """Train a model that is not compiled beside a function that is, and that may read a weight of it."""
    torch._dynamo.reset()
    model, opt = made()
    weight, layers = model.module[0].weight, {"first": model.module[0]}

    def closure(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight).float().sin()

    def container(x: torch.Tensor) -> torch.Tensor:
        return layers["first"](x).float().sin()

    def nothing(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    function = torch.compile({f.__name__: f for f in (closure, container, nothing)}[how], backend="aot_eager")
    records: list[Record] = []
    for step in range(9):
        opt.zero_grad()
        y = model(data(step, 5, 6)).square().mean()
        if step > 3:  # for the first time when the weight is kept in bf16
            with autocast():
                y = y + function(data(step, 5, 6)).mean()
        y.backward()
        opt.step()
        records.append({"loss": y.detach()})
    kept = mixed.find(weight) is not None
    assert kept == (how == "nothing" and bool(mixed._mixed))
    return [*records, params(model)]


def test_compiled_functions(ranks):
    cases = {how: {"how": how} for how in ("closure", "container", "nothing")}
    check_all(ranks(2)(all_cases, compiled_beside, cases, options=OPTIONS, timeout=120), check=check_kept)


def test_other_dtypes_are_refused():
    with pytest.raises(SettingsError, match="bf16"):
        ovpatch.apply("ddp", "dist_optimizer", options={"dist_optimizer": {"param_dtype": "fp8"}})
