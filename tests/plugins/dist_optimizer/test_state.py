"""Optimizer state as user code sees it: full, readable on any rank alone, and in the layout of stock PyTorch."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ovpatch
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_state import ElementwiseState
from tests.plugins.ddp.arms import all_both, table
from tests.plugins.ddp.checks import check_all, same_bits
from tests.plugins.dist_optimizer.checks import SMALL, apply, both, params
from tests.plugins.dist_optimizer.checks import train_step as step
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.support import signs
from tests.support.equality import compare
from tests.support.errors import error_of


def build(optimizer: str = "adamw") -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(net())
    return model, OPTIMIZERS[optimizer](model.parameters())


def trained(steps: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model, opt = build()
    for number in range(steps):
        step(model, opt, number)
    return model, opt


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": {
            k: {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in s.items()}
            for k, s in state["state"].items()
        },
        "param_groups": state["param_groups"],
    }


def all_ranks(optimizer: str) -> list[dict[str, Any]]:
    model, opt = build(optimizer)
    records = []
    for number in range(6):
        step(model, opt, number)
        records.append(copy.deepcopy(on_cpu(opt.state_dict())))
    return records


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_dict_equals_the_one_of_stock_pytorch(ranks, world, optimizer):
    for result in same_bits(ranks(world)(both, all_ranks, optimizer)):
        counters = result["counters"]
        assert counters["state_reads"] > 0
        share = (
            counters["state_bytes"] / counters["state_bytes_whole"]
            if optimizer != "sgd"
            else 1 / world
        )
        assert 0.8 / world < share < 1.2 / world, counters


def one_rank(reader: str, rank: int) -> list[dict[str, Any]]:
    model, opt = build()
    records = []
    for number in range(5):
        step(model, opt, number)
        if dist.get_rank() == rank:
            records.append(READERS[reader](opt, next(model.parameters())))
    dist.barrier()
    return records


def saved(opt: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def pickled(opt: torch.optim.Optimizer) -> Any:
    text = pickle.dumps(opt)
    assert b"ovpatch" not in text
    return pickle.loads(text).state_dict()["state"]


READERS: dict[str, Any] = {
    "state_dict": lambda opt, p: copy.deepcopy(on_cpu(opt.state_dict())),
    "save": lambda opt, p: saved(opt),
    "pickle": lambda opt, p: pickled(opt),
    "deepcopy": lambda opt, p: on_cpu(copy.deepcopy(opt).state_dict())["state"],
    "state": lambda opt, p: {
        n: v.clone() if torch.is_tensor(v) else v for n, v in opt.state[p].items()
    },
}


def check_reader(results: list[dict[str, Any]], rank: int) -> None:
    compare(results[rank]["stock"], results[rank]["patched"]).assert_bitwise()
    assert len(results[rank]["patched"]) == 5
    assert results[rank]["counters"]["state_reads"] >= 5
    assert results[1 - rank]["counters"]["state_reads"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_reads_the_state(ranks, rank):
    results = ranks(2)(all_both, one_rank, table(reader=READERS, rank=[rank]), apply=apply)
    check_all(results, check=check_reader, rank=rank)


def loaded_sequentially(first: int) -> list[Any]:
    """Load on rank ``first`` and read the loaded state, while its peer still reads the old state."""
    model, opt = build()
    step(model, opt, 0)
    old = copy.deepcopy(on_cpu(opt.state_dict()))
    for number in range(1, 4):
        step(model, opt, number)
    dist.barrier()
    seen = []
    if dist.get_rank() != first:
        time.sleep(0.3)
        seen.append(copy.deepcopy(on_cpu(opt.state_dict())))
        time.sleep(0.3)
    opt.load_state_dict(old)
    seen.append(copy.deepcopy(on_cpu(opt.state_dict())))
    for number in range(4, 7):
        step(model, opt, number)
    return [*seen, copy.deepcopy(on_cpu(opt.state_dict())), params(model)]


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_load_sequentially_read_the_same_as_in_stock_pytorch(ranks, first):
    same_bits(ranks(2)(both, loaded_sequentially, first))


def loaded_on_one_rank_alone() -> list[Any]:
    model, opt = build()
    step(model, opt, 0)
    old = copy.deepcopy(on_cpu(opt.state_dict()))
    if dist.get_rank() == 0:
        opt.load_state_dict(old)
    for number in range(1, 4):
        step(model, opt, number)
    return [copy.deepcopy(on_cpu(opt.state_dict()))]


def test_a_rank_that_loads_alone_finds_its_peers_after_the_next_step(ranks):
    first, second = ranks(2)(both, loaded_on_one_rank_alone)
    compare(first["patched"], second["patched"]).assert_bitwise()


def handed_over(first_patched: bool) -> list[dict[str, torch.Tensor]]:
    """Train four steps stock or patched, save, and train four steps the other way; return it, and all steps stock."""

    def part(patched: bool, checkpoint: Any, numbers: range) -> Any:
        with apply() if patched else contextlib.nullcontext():
            model, opt = build()
            if checkpoint is not None:
                model.load_state_dict(checkpoint[0])
                opt.load_state_dict(checkpoint[1])
            for number in numbers:
                step(model, opt, number)
            found = copy.deepcopy((model.state_dict(), opt.state_dict()))
            dist.barrier()
            return found

    half = part(first_patched, None, range(4))
    mixed = part(not first_patched, half, range(4, 8))
    stock = part(False, part(False, None, range(4)), range(4, 8))
    return [mixed[0], stock[0]]


def _replace(opt: torch.optim.Optimizer, states: list[dict[str, Any]]) -> None:
    for param in list(opt.state)[:2]:
        opt.state[param] = {name: value.clone() for name, value in opt.state[param].items()}


# The changes that a script may make to the state between two steps.
EDITS: dict[str, Callable[[torch.optim.Optimizer, list[dict[str, Any]]], Any]] = {
    "read": lambda opt, states: [value.sum() for value in states[1].values()],
    "value": lambda opt, states: states[1].update(exp_avg=torch.ones_like(states[1]["exp_avg"])),
    "in place": lambda opt, states: states[1]["exp_avg_sq"].mul_(2),
    "number of steps": lambda opt, states: states[1].update(step=torch.tensor(1.0)),
    "added": lambda opt, states: states[1].update(note=torch.ones_like(states[1]["exp_avg"])),
    "replaced": _replace,
    "dropped": lambda opt, states: opt.state.pop(next(iter(opt.state))),
    "loaded": lambda opt, states: opt.load_state_dict(copy.deepcopy(opt.state_dict())),
    "less groups": lambda opt, states: opt.param_groups[0]["params"].pop(),
}


def edited(edit: str, again: bool) -> list[dict[str, Any]]:
    """Change the state by hand after steps that did not read it, once or before two successive steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    records = []
    for number in range(6):
        step(model, opt, number)
        if number == 3 or (again and number == 4):
            EDITS[edit](opt, list(opt.state.values()))
        records.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return [
        *records,
        *({name: value.clone() for name, value in state.items()} for state in opt.state.values()),
    ]


def check_edited(results: list[dict[str, Any]]) -> None:
    for result in same_bits(results):
        assert result["counters"]["steps"] >= 6


def test_the_next_step_uses_state_that_was_changed_between_steps(ranks):
    results = ranks(2)(all_both, edited, table(edit=EDITS, again=[False, True]), apply=apply_all)
    check_all(results, check=check_edited)


def misplaced() -> str:
    """Swap the unread state of two parameters; return the error of the next step."""
    with apply_all():
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(3):
            step(model, opt, number)
        first, second = (s for s in opt.state.values() if s["exp_avg"].dim() == 2)
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
        with pytest.raises(RuntimeError) as caught:
            step(model, opt, 3)
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
        step(model, opt, 4)
        dist.barrier()
    return str(caught.value)


def test_state_of_another_parameter_is_an_error(ranks):
    for message in ranks(2)(misplaced):
        assert "'exp_avg'" in message
        assert "tensor.clone()" in message


def apply_all() -> Any:
    return apply({"min_param_numel": 1})


def moved() -> list[Any]:
    """Give a parameter new memory in each step; return whether the old memory was freed, and the new values."""
    model, opt = build()
    records: list[Any] = []
    for number in range(5):
        step(model, opt, number)
        param = next(model.parameters())
        param.sum()
        storage = weakref.ref(param.untyped_storage())
        param.data = param.data.clone() * 2
        records.append({"freed": torch.tensor(storage() is None), "param": param.detach().clone()})
    return records


def test_memory_of_a_parameter_that_moves_is_freed(ranks):
    for result in same_bits(ranks(2)(both, moved)):
        assert all(record["freed"] for record in result["patched"])
        assert result["counters"]["gathers_overlapped"] >= 4


def unreadable() -> list[bool]:
    """Raise at the end of a step; return whether the state can be read.

    The step must end its version, because peers would wait for the end.
    """
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        model, opt = trained(4)
        (source,) = {
            v.source for s in opt.state.values() for v in s.values() if isinstance(v, LazyTensor)
        }
        keep, raising = source._write_back_param, [True]

        def keep_made(*args: Any) -> None:
            keep(*args)
            if raising:
                raising.pop()
                raise MemoryError("not really")

        source._write_back_param = keep_made
        # The next step writes state back that was read.
        for state in opt.state.values():
            state["exp_avg"].sum()
        with pytest.raises(MemoryError):
            step(model, opt, 4)
        del source._write_back_param
        found = [v.clone() for s in opt.state.values() for v in s.values()]
        step(model, opt, 5)
        dist.barrier()
    return [bool(value.isfinite().all()) for value in found]


def test_a_step_that_raises_at_its_end_ends_its_version(ranks):
    for result in ranks(2)(unreadable):
        assert result
        assert all(result)


def read_inside_of_a_step() -> dict[str, Any]:
    """Read the state on another thread, and in the update itself, while an optimizer updates."""
    model, opt = build()
    # Dynamo gives each class its own function.
    cls = type(opt)
    init_group, found = cls._init_group, dict[str, Any](failed="")

    def init_and_read(optimizer: torch.optim.Adam, *args: Any) -> Any:
        result = init_group(optimizer, *args)
        thread = threading.Thread(
            target=lambda: found.update(other=copy.deepcopy(opt.state_dict()))
        )
        thread.start()
        thread.join(0.5)  # expires
        try:
            found["own"] = sorted(opt.state_dict()["state"])
        except RuntimeError as error:
            found["failed"] = str(error)
        found["thread"] = thread
        return result

    for number in range(3):
        step(model, opt, number)
    with mock.patch.object(cls, "_init_group", init_and_read):
        step(model, opt, 3)
    found.pop("thread").join(30)
    after = on_cpu(opt.state_dict())
    dist.barrier()
    return {
        "shapes": {key: value["exp_avg"].shape for key, value in found["other"]["state"].items()},
        **found,
        "after": after,
    }


@pytest.mark.parametrize("world", [2, 3])
def test_state_dict_in_the_middle_of_a_step_waits_on_another_thread_and_else_raises(ranks, world):
    for result in ranks(world)(both, read_inside_of_a_step):
        stock, patched = result["stock"], result["patched"]
        assert stock["shapes"] == patched["shapes"]
        assert not stock["failed"]
        assert "Call it after step()" in patched["failed"]
        compare(patched["after"], on_cpu(patched["other"])).assert_bitwise()
        compared = compare(stock["after"], patched["after"])
        (compared.assert_bitwise if world == 2 else compared.assert_equal)()


def in_child(read: Callable[[], Any]) -> Any:
    """Return the result of a function, or the text of its error, from a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                found = read()
            except RuntimeError as error:
                found = str(error)
            with open(writer, "wb") as file:
                torch.save(found, file)
        finally:
            # The child must not continue as a worker of the pool, even after an error.
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return torch.load(io.BytesIO(data))


class StateReader(Dataset):
    """A data set that reads the state of the training that uses it."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.read()


READS = {
    "state": lambda model, opt: [
        {n: v.clone() for n, v in opt.state[p].items()} for p in model.parameters()
    ],
    "state_dict": lambda model, opt: on_cpu(opt.state_dict()),
    "grads": lambda model, opt: [p.grad.clone() for p in model.parameters()],
}


def forked(what: str, optimizer: str, loader: bool) -> list[Any]:
    """Return the reads of a child, or its error, of its parent, and of a second child, and the state at the end."""
    # A forked child does not have the threads of OpenMP.
    torch.set_num_threads(1)
    model = DistributedDataParallel(net())
    opt = FORKED_OPTIMIZERS[optimizer](model.parameters())
    for number in range(3):
        step(model, opt, number)
    read = partial(READS[what], model, opt)
    if loader:
        try:
            found = list(
                DataLoader(
                    StateReader(read),
                    batch_size=None,
                    num_workers=1,
                    multiprocessing_context="fork",
                )
            )
        except PeerError as error:
            found = str(error)
    else:
        found = in_child(read)
    own = copy.deepcopy(read())
    again = own if what == "state_dict" else in_child(read)
    # No rank may step before all children have read.
    dist.barrier()
    step(model, opt, 3)
    return [found, own, again, copy.deepcopy(on_cpu(opt.state_dict()))]


# AdamW keeps state by shards, and Adafactor by owners of full parameters.
FORKED_OPTIMIZERS = {"adamw": OPTIMIZERS["adamw"], "adafactor": torch.optim.Adafactor}
FORKED = table(what=READS, optimizer=["adamw"], loader=[False, True]) | table(
    what=["state"], optimizer=["adafactor"], loader=[False]
)


def all_forked() -> dict[str, Any]:
    return all_both(forked, FORKED, apply=apply)


def test_a_forked_child_that_reads_shards_gets_an_error_and_leaves_its_parent_alone(ranks):
    check_all(ranks(2)(all_forked), check=check_forked)


def check_forked(results: list[dict[str, Any]]) -> None:
    for result in results:
        text, *patched = result["patched"]
        assert "a forked process is not a rank of its parent's process group" in text
        assert "Read it before the fork, or in the parent." in text
        compare(result["stock"][1:], patched).assert_bitwise()
        assert result["counters"]["steps"] == 4


# --- checkpoints by functions of torch.distributed.checkpoint, and by one rank after its peers have finished ---


def into_several() -> list[dict[str, Any]]:
    """Load into optimizers that never stepped, of models that never ran. For the load, torch makes them step."""
    model, opt = trained(4)
    found = copy.deepcopy(dcp.get_optimizer_state_dict(model, opt))
    new = [build() for _ in range(2)]
    for new_model, new_opt in new:
        dcp.set_optimizer_state_dict(new_model, new_opt, copy.deepcopy(found))
    records = []
    for new_model, new_opt in new:
        step(new_model, new_opt, 5)
        state = copy.deepcopy(dcp.get_optimizer_state_dict(new_model, new_opt))
        records.append({"state": state, "after": params(new_model)})
    return records


def test_dcp_functions_load_into_several_new_models(ranks):
    for result in same_bits(ranks(2)(both, into_several)):
        assert result["counters"]["optimizers"] == 3


def loaded_in_place(folder: Path) -> list[dict[str, Any]]:
    """Load a distributed checkpoint, which writes into the tensors of a state dict that it reads as well."""
    model, opt = trained(3)
    names = ("model", "opt")
    saved = dict(zip(names, dcp.get_state_dict(model, opt), strict=True))
    checkpoint.save(saved, checkpoint_id=folder)
    model, opt = build()
    states = dict(zip(names, dcp.get_state_dict(model, opt), strict=True))
    checkpoint.load(states, checkpoint_id=folder)
    loaded = copy.deepcopy(states["opt"])
    dcp.set_state_dict(model, opt, model_state_dict=states["model"], optim_state_dict=states["opt"])
    step(model, opt, 3)
    return [loaded, copy.deepcopy(opt.state_dict())]


def test_a_distributed_checkpoint_is_loaded_into_the_tensors_of_a_state_dict(ranks, tmp_path):
    for result in same_bits(ranks(2)(both, loaded_in_place, tmp_path)):
        assert {float(state["step"]) for state in result["patched"][1]["state"].values()} == {4.0}


def saved_last() -> Any:
    """Destroy the group of rank 1 before rank 0 saves."""
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL}):
        _model, opt = trained(4)
        found = None
        if dist.get_rank() == 0:
            time.sleep(0.5)
            found = copy.deepcopy(opt.state_dict())
        dist.destroy_process_group()
    return found


def saved_by_stock() -> Any:
    _model, opt = trained(4)
    return copy.deepcopy(opt.state_dict())


def read_as_the_peer_steps() -> dict[str, Any]:
    """Read before a step, on rank 1 only once rank 0 waits for it in its own step, or has ended that step."""
    # On GPUs, no vote makes ranks wait for each other before a step changes anything.
    with apply(), mock.patch.object(ShardedGrads, "has_step_votes", False):
        model, opt = trained(3)
        opt.zero_grad()
        model(torch.ones(5, 6)).square().mean().backward()
        if dist.get_rank():
            signs.await_others("it steps")
        read = on_cpu(copy.deepcopy(opt.state_dict()))
        original = PeerRpc.call

        def call(self: PeerRpc, topic: str, arguments: Any, *args: Any, **kwargs: Any) -> Any:
            if "next step" in arguments:
                signs.give("it steps")
            return original(self, topic, arguments, *args, **kwargs)

        opt.register_step_post_hook(lambda *_: signs.give("it steps"))
        with mock.patch.object(PeerRpc, "call", call):
            opt.step()
        return read


def test_a_rank_that_has_read_waits_until_its_peers_have_read_as_well(ranks):
    first, second = ranks(2)(read_as_the_peer_steps)
    compare([first], [second]).assert_bitwise()


def fail_to_write_back() -> tuple[str, bool]:
    """Return the error of a step whose shards cannot be written back, and whether its version of state ends."""
    with apply():
        model, opt = trained(2)
        with mock.patch.object(ElementwiseState, "_write_back", autospec=True) as write_back:
            write_back.side_effect = RuntimeError("shards cannot be written back")
            error = error_of(lambda: step(model, opt, 2))
        state: ElementwiseState = write_back.call_args.args[0]
        return error, not state._has_begun_version


def test_a_version_of_state_ends_whatever_error_ended_its_step(ranks):
    """Peers that read the state would wait for the end forever."""
    assert ranks(2)(fail_to_write_back) == [("shards cannot be written back", True)] * 2
