"""The tensors that ``state_dict()`` returns are fetched when they are read, by the rank that reads."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from tests.plugins.ddp.arms import data
from tests.plugins.ddp.checks import same_bits
from tests.plugins.dist_optimizer.checks import both, ddp
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.plugins.dist_optimizer.test_state import build, step, trained
from tests.plugins.dist_optimizer.test_whole_parameters import instead
from tests.support.equality import compare
from tests.support.gloo import destroy_group

ALL = {"min_param_numel": 1}


def count_pulled() -> int:
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

    return COUNTERS.bytes_pulled


def count_unread(state_dict: dict[str, Any]) -> int:
    return sum(
        isinstance(value, LazyTensor)
        for state in state_dict["state"].values()
        for value in state.values()
    )


def save(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["state"]


READERS: dict[str, Callable[[Any], Any]] = {
    "save": save,
    "deepcopy": lambda found: copy.deepcopy(found)["state"],
    "pickle": lambda found: pickle.loads(pickle.dumps(found))["state"],
    "cpu": lambda found: {
        n: {k: v.cpu().clone() for k, v in s.items()} for n, s in found["state"].items()
    },
    "numpy": lambda found: {
        n: {k: torch.tensor(v.numpy()) for k, v in s.items()} for n, s in found["state"].items()
    },
    "equal": lambda found: {
        "all": torch.tensor(
            [torch.equal(v, v.clone()) for s in found["state"].values() for v in s.values()]
        ),
        "copies": copy.deepcopy(found)["state"],
    },
    "backwards": lambda found: {
        n: {k: s[k].clone() for k in reversed(s)} for n, s in reversed(found["state"].items())
    },
}


def one_reader(reader: str, steps_before_read: int = 0) -> list[Any]:
    """Call ``state_dict()`` on all ranks and keep the result; read it on rank 0 alone."""
    model, opt = build()
    records = []
    for number in range(4):
        step(model, opt, number)
        found = opt.state_dict()
        for later in range(steps_before_read):
            step(model, opt, 100 * number + later)
        dist.barrier()
        if dist.get_rank() == 0:
            records.append(READERS[reader](found))
        dist.barrier()
    return records


# On three ranks two readers are enough, because fetches from two peers do not depend on the use of the values.
@pytest.mark.parametrize(
    ("reader", "world"), [*((reader, 2) for reader in READERS), ("save", 3), ("backwards", 3)]
)
def test_the_reader_alone_fetches(ranks, world, reader):
    for rank, result in enumerate(ranks(world)(both, one_reader, reader, options=ALL)):
        if rank == 0:
            compare(result["stock"], result["patched"]).assert_equal()
        counters = result["counters"]
        assert counters["steps"] == 4
        assert (counters["bytes_pulled"] > 0) == (rank == 0)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_unread_state_dict_shows_the_live_state(ranks, steps):
    for rank, result in enumerate(ranks(2)(both, one_reader, "save", steps, options=ALL)):
        if rank == 0:
            compare(result["stock"], result["patched"]).assert_bitwise()
        assert (result["counters"]["bytes_pulled"] > 0) == (rank == 0)


def read_in_part() -> None:
    """Read a part of a state dict, step, and read the rest, which must have the values of the first read."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": ALL}):
        model, opt = trained(3)
        wanted = copy.deepcopy(opt.state_dict())
        before = count_pulled()
        found = opt.state_dict()
        if dist.get_rank() == 0:
            last = max(found["state"])
            assert torch.equal(found["state"][last]["exp_avg"], wanted["state"][last]["exp_avg"])
            assert 0 < count_unread(found) < count_unread(opt.state_dict())
        step(model, opt, 3)
        assert (count_unread(found) > 0) == (dist.get_rank() > 0)
        assert (count_pulled() > before) == (dist.get_rank() == 0)
        if dist.get_rank() == 0:
            compare([found["state"]], [wanted["state"]]).assert_bitwise()
        dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_a_partly_read_state_dict_keeps_the_values_of_one_moment(ranks, world):
    ranks(world)(read_in_part)


def one_tensor_each() -> list[int]:
    """Read some tensors on each rank alone, as each rank of torch.distributed.checkpoint saves some."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": ALL}):
        model, opt = build()
        step(model, opt, 0)
        found, before = opt.state_dict()["state"], count_pulled()
        for number, state in found.items():
            if number % 2 == dist.get_rank():
                state["exp_avg"].clone()
        dist.barrier()
        return [count_pulled() - before, sum(v.nbytes for s in found.values() for v in s.values())]


def test_unread_tensors_are_not_fetched(ranks):
    for pulled, total in ranks(2)(one_tensor_each):
        # Half of the bytes are on this rank, and it reads about half of the tensors.
        assert 0 < pulled < 0.35 * total


def loaded(same: bool) -> list[Any]:
    model, opt = trained(3)
    found = opt.state_dict()
    target = opt if same else torch.optim.AdamW(model.parameters(), 0.02)
    if not same:
        step(model, target, 9)
    target.load_state_dict(found)
    records = [copy.deepcopy(target.state_dict()["state"])]
    step(model, target, 4)
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return [*records, copy.deepcopy(target.state_dict()["state"]), params]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_an_unread_state_dict_can_be_loaded(ranks, world, same):
    for result in ranks(world)(both, loaded, same, options=ALL):
        compare(result["stock"], result["patched"]).assert_equal()
        assert result["counters"]["steps"] > 0


def held_while_other_state_is_loaded() -> list[Any]:
    model, opt = build()
    step(model, opt, 0)
    checkpoint = copy.deepcopy(opt.state_dict())
    step(model, opt, 1)
    found = opt.state_dict()
    opt.load_state_dict(checkpoint)
    return [copy.deepcopy(found["state"]), copy.deepcopy(opt.state_dict()["state"])]


def test_a_state_dict_keeps_its_content_while_other_state_is_loaded(ranks):
    same_bits(ranks(2)(both, held_while_other_state_is_loaded, options=ALL))


def optimizer_deleted() -> list[Any]:
    """Drop the optimizer, and step a second one, whose backward makes the ranks drop the first state."""
    model, opt = trained(3)
    found = opt.state_dict()
    del opt
    gc.collect()
    second = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3, 6):
        step(model, second, number)
    dist.barrier()
    records = [copy.deepcopy(found["state"])] if dist.get_rank() == 0 else []
    dist.barrier()
    return records


def test_a_state_dict_survives_its_optimizer(ranks):
    result, _ = ranks(2)(both, optimizer_deleted, options=ALL)
    compare(result["stock"], result["patched"]).assert_bitwise()


def reverted(read_before: bool) -> list[Any]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": ALL}):
        model, opt = trained(3)
        wanted, found = copy.deepcopy(opt.state_dict()["state"]), opt.state_dict()
        if read_before:
            found["state"][2]["exp_avg"].clone()
        dist.barrier()
    if read_before:
        step(model, opt, 4)
    else:
        dist.barrier()
    return [wanted, found["state"]]


@pytest.mark.parametrize("read_before", [True, False])
def test_a_state_dict_survives_a_revert(ranks, read_before):
    for wanted, found in ranks(2)(reverted, read_before):
        assert len(wanted) > 1
        compare([wanted], [found]).assert_bitwise()


def fallen_back() -> list[Any]:
    model, opt = trained(3)
    found = opt.state_dict()
    with model.no_sync():
        model(data(7, 5, 6)).square().mean().backward()
    # After a step on local gradients the optimizer falls back.
    opt.step()
    return [copy.deepcopy(found["state"])]


def test_a_state_dict_survives_the_fallback_of_its_optimizer(ranks):
    for result in same_bits(ranks(2)(both, fallen_back, options=ALL)):
        assert result["counters"]["stock_optimizers"] == 1


def destroyed_half_read() -> list[Any]:
    mine = dist.new_group()
    model = DistributedDataParallel(net(), process_group=mine)
    opt = OPTIMIZERS["adamw"](model.parameters())
    step(model, opt, 0)
    found = opt.state_dict()
    if dist.get_rank() == 0:
        found["state"][2]["exp_avg"].clone()
    destroy_group(mine)
    return [copy.deepcopy(found["state"])] if dist.get_rank() == 0 else []


def test_the_rest_of_a_partly_read_state_dict_is_fetched_before_the_group_is_destroyed(ranks):
    result, _ = ranks(2)(both, destroyed_half_read, options=ALL)
    compare(result["stock"], result["patched"]).assert_bitwise()
    assert len(result["patched"][0]) > 1


def in_a_thread() -> list[Any]:
    """Save a state dict on a thread while the main thread continues to train."""
    model, opt = trained(3)
    found, begun, saved = opt.state_dict(), threading.Event(), list[Any]()
    wanted = copy.deepcopy(opt.state_dict()["state"])

    def save_slowly() -> None:
        for number, state in found["state"].items():
            saved.append((number, {name: value.clone() for name, value in state.items()}))
            begun.set()

    thread = threading.Thread(target=save_slowly)
    thread.start()
    begun.wait()
    for number in range(3, 8):
        step(model, opt, number)
    thread.join()
    return [wanted, dict(saved)]


def test_a_thread_that_saves_during_training_gets_the_values_of_one_moment(ranks):
    for wanted, saved in ranks(2)(patched, in_a_thread):
        compare([wanted], [saved]).assert_bitwise()


def too_late() -> str:
    """Read on rank 0 for the first time after a backward, when its peer is already in its step, as on GPUs."""
    from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads

    model, opt = trained(3)
    found = opt.state_dict()
    opt.zero_grad()
    model(data(3, 5, 6)).square().mean().backward()
    with mock.patch.object(ShardedGrads, "has_step_votes", False):
        if dist.get_rank() == 0:
            time.sleep(1)
            with pytest.raises(RuntimeError) as raised:
                found["state"][0]["exp_avg"].sum()
        opt.step()
    return str(raised.value) if dist.get_rank() == 0 else ""


def test_a_read_that_is_too_late_is_an_error_with_the_remedy(ranks):
    text, *_ = ranks(2)(patched, too_late, timeout=60)
    assert "copy.deepcopy(optimizer.state_dict())" in text


def patched(function: Callable[[], Any]) -> Any:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": ALL}):
        found = function()
        dist.barrier()
        return found


def test_state_of_full_parameters(ranks):
    for rank, result in enumerate(
        ranks(2)(both, instead, "adafactor", one_reader, "save", 1, options=ALL)
    ):
        if rank == 0:
            compare(result["stock"], result["patched"]).assert_bitwise()
        assert (result["counters"]["bytes_pulled"] > 0) == (rank == 0)


class WithSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6, sparse=True)
        self.linear = nn.Linear(6, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.embedding((x[:, 0].detach().abs() * 3).long() % 9)
        return self.linear(x + rows)


def copies_with_sparse_momentum() -> list[Any]:
    model = ddp(WithSparse())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    records = []
    for number in range(3):
        opt.zero_grad()
        model(data(number, 5, 6)).square().mean().backward()
        opt.step()
        state = copy.deepcopy(opt.state_dict())["state"]
        records.append(
            {"state": {key: value["momentum_buffer"].to_dense() for key, value in state.items()}}
        )
    return records


def test_sparse_state_is_returned_sparse(ranks):
    for result in same_bits(ranks(2)(both, copies_with_sparse_momentum)):
        assert result["counters"]["grads_sharded"] > 0
