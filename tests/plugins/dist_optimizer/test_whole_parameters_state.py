"""Optimizer state as user code reads and saves it, of optimizers that need full parameters, and of AdamW."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch_plugins.dist_optimizer.sharded_optimizer import ShardedOptimizer
from tests.plugins.ddp.arms import Record, all_both, table
from tests.plugins.ddp.checks import check_all, same_bits, some
from tests.plugins.dist_optimizer import test_state
from tests.plugins.dist_optimizer.checks import SMALL, apply, ddp, params
from tests.plugins.dist_optimizer.test_loops import net
from tests.plugins.dist_optimizer.test_state import READERS, on_cpu
from tests.plugins.dist_optimizer.test_whole_parameters import (
    KINDS,
    MAKERS,
    NAMED,
    build,
    instead,
    step,
)
from tests.support.equality import compare

# AdamW updates shards, and the owners of full parameters update the remaining kinds.
EVERY = ["adamw", *KINDS]
each_kind = pytest.mark.parametrize("kind", EVERY)


def apply_named() -> AbstractContextManager[Any]:
    return apply(NAMED)


def one_rank(kind: str, **how: Any) -> list[Record]:
    return instead(kind, test_state.one_rank, **how)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_reads_the_state(ranks, rank):
    cases = table(kind=KINDS, reader=READERS, rank=[rank])
    cases = cases if rank == 0 else some(cases)
    results = ranks(2)(all_both, one_rank, cases, apply=apply_named, timeout=120)
    check_all(results, check=test_state.check_reader, rank=rank)
    assert all(case["counters"]["params_owned"] > 0 for case in results[1 - rank].values())


def layouts(kind: str) -> list[Any]:
    """Return shapes, dtypes and representations of the state, without a read of its tensors."""
    model, opts = build(kind)
    records: list[Any] = []
    for number in range(6):
        step(model, opts, number)
        for opt in opts:
            for param, state in opt.state.items():
                records.append(tuple(param.shape))
                for name, value in state.items():
                    is_tensor = isinstance(value, torch.Tensor)
                    assert not isinstance(value, LazyTensor) or value.numel() < 100
                    records.append(
                        [name, (tuple(value.shape), str(value.dtype)) if is_tensor else repr(value)]
                    )
    return records


@pytest.mark.parametrize("world", [2, 3])
def test_unread_state_has_the_layout_of_stock_pytorch(ranks, world):
    for results in ranks(world)(all_both, layouts, table(kind=KINDS), apply=apply_named):
        for kind, result in results.items():
            texts = [[str(record) for record in result[arm]] for arm in ("stock", "patched")]
            # The state of LAMB has ratios as numbers, whose last bits are noise on three ranks.
            if "lamb" in kind and world > 2:
                texts = [[text for text in arm if "seen" not in text] for arm in texts]
            assert texts[0] == texts[1], kind
            assert result["counters"]["state_reads"] == 0


def changed_by_hand(kind: str) -> list[Record]:
    """Change the state on all ranks in turn, and clear a part of it."""
    model, opts = build(kind)
    records = []
    for number in range(6):
        step(model, opts, number)
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                for state in opts[0].state.values():
                    for name in ("momentum_buffer", "row_var", "m"):
                        if name in state:
                            state[name].mul_(0.5)
                if number == 4:
                    for state in list(opts[0].state.values())[:2]:
                        state.clear()
                records.append(copy.deepcopy(on_cpu(opts[0].state_dict())["state"]))
            dist.barrier()
        records.append(params(model))
    return records


def check(results: list[dict[str, Any]], steps: int = 0) -> None:
    for result in same_bits(results):
        assert result["counters"]["steps"] >= steps


def check_owned(results: list[dict[str, dict[str, Any]]], **more: Any) -> None:
    """Check each case, and demand owners of the parameters if the optimizer needs full parameters."""
    check_all(results, **{"check": check, **more})
    for name, case in ((name, case) for result in results for name, case in result.items()):
        assert (case["counters"]["params_owned"] > 0) == ("adamw" not in name), name


def test_a_state_that_is_changed_by_hand(ranks):
    check_owned(ranks(2)(all_both, changed_by_hand, table(kind=KINDS), apply=apply_named), steps=6)


# --- checkpoints ---


def resumed(kind: str, load_before_wrap: bool) -> list[Record]:
    model, opts = build(kind)
    for number in range(5):
        step(model, opts, number)
    checkpoint = copy.deepcopy((model.module.state_dict(), [opt.state_dict() for opt in opts]))
    raw = net()
    raw.load_state_dict(checkpoint[0])
    second = MAKERS[kind](raw)
    if load_before_wrap:
        for opt, state in zip(second, checkpoint[1], strict=True):
            opt.load_state_dict(state)
        again = DistributedDataParallel(raw)
    else:
        again = DistributedDataParallel(raw)
        step(again, second, 99)
        raw.load_state_dict(checkpoint[0])
        for opt, state in zip(second, checkpoint[1], strict=True):
            opt.load_state_dict(state)
    records = [copy.deepcopy(on_cpu(second[0].state_dict()))]
    for number in range(5, 9):
        step(model, opts, number)
        step(again, second, number)
        records.append({"first": params(model), "second": params(again)})
        keys = [list(state) for state in opts[0].state.values()]
        assert keys == [list(state) for state in second[0].state.values()]
    return records


def check_resumed(results: list[dict[str, Any]]) -> None:
    check(results)
    for record in (record for result in results for record in result["patched"][1:]):
        compare(
            [{n.removeprefix("module."): p for n, p in record["first"].items()}],
            [{n.removeprefix("module."): p for n, p in record["second"].items()}],
        ).assert_bitwise()


def test_a_resumed_run_continues(ranks):
    cases = table(kind=EVERY, load_before_wrap=[True, False])
    check_owned(
        ranks(2)(all_both, resumed, cases, apply=apply_named, timeout=120), check=check_resumed
    )


def dropped_at_once(kind: str) -> None:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | NAMED}):
        model, opts = build(kind)
        for number in range(3):
            step(model, opts, number)
        opts[0].load_state_dict(copy.deepcopy(opts[0].state_dict()))
        for param, state in opts[0].state.items():
            for value in state.values():
                assert (
                    param.numel() < 8
                    or not isinstance(value, torch.Tensor)
                    or isinstance(value, LazyTensor)
                )
        dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_state_is_dropped_at_once(ranks, kind):
    ranks(2)(dropped_at_once, kind)


@pytest.mark.parametrize("first_patched", [True, False])
@each_kind
def test_checkpoints_go_between_stock_and_patched(ranks, kind, first_patched):
    for mixed, stock in ranks(2)(instead, kind, test_state.handed_over, first_patched):
        compare([mixed], [stock]).assert_bitwise()


def by_dcp(kind: str, full: bool, fresh: bool) -> list[Record]:
    options = dcp.StateDictOptions(full_state_dict=full, cpu_offload=full)
    model, opts = build(kind)
    for number in range(4):
        step(model, opts, number)
    found = dcp.get_optimizer_state_dict(model, opts, options=options)
    # The loaded optimizer trains with the tensors of the dictionary, so the record needs copies.
    kept = copy.deepcopy(found)
    weights = copy.deepcopy(dcp.get_model_state_dict(model, options=options))
    new_model, new_opts = build(kind)
    if not fresh:
        step(new_model, new_opts, 77)
    given = dcp.StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
    dcp.set_model_state_dict(new_model, weights, options=given)
    dcp.set_optimizer_state_dict(new_model, new_opts, found, options=given)
    for number in range(4, 7):
        step(new_model, new_opts, number)
    return [{"state": kept, "weights": weights, "after": params(new_model)}]


@pytest.mark.parametrize("full", [False, True])
def test_dcp_functions_return_and_load_the_dictionaries_of_stock_pytorch(ranks, full):
    results = ranks(2)(
        all_both, by_dcp, table(kind=EVERY[:3], full=[full], fresh=[False, True]), apply=apply_named
    )
    check_owned(results)
    for rank, result in enumerate(results):
        assert all(
            case["counters"]["state_reads"] > 0 or (full and rank) for case in result.values()
        )


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_a_rank_that_has_finished_waits_for_one_that_still_saves(ranks, kind):
    found, nothing = ranks(2)(instead, kind, test_state.saved_last)
    assert nothing is None
    compare([ranks(2)(instead, kind, test_state.saved_by_stock)[0]], [found]).assert_bitwise()


# --- revert ---


def reverted(kind: str, patched: bool) -> list[Record]:
    if patched:
        ovpatch.apply("ddp", "dist_optimizer", options={"dist_optimizer": SMALL | NAMED})
    torch.manual_seed(0)
    model, opts = build(kind)
    records: list[Record] = []
    for number in range(9):
        if number == 5 and patched:
            ovpatch.revert()
            assert not any(
                isinstance(v, LazyTensor)
                for opt in opts
                for s in opt.state.values()
                for v in s.values()
            )
        if number == 5:
            records.append(
                {str(i): copy.deepcopy(on_cpu(opt.state_dict())) for i, opt in enumerate(opts)}
            )
        step(model, opts, number)
        records.append(params(model))
    dist.barrier()
    return records


@each_kind
def test_revert_in_mid_training(ranks, kind):
    for stock, patched in zip(
        ranks(2)(reverted, kind, False), ranks(2)(reverted, kind, True), strict=True
    ):
        compare(stock, patched).assert_bitwise()


# --- state that cannot be sent ---


class Hoarder(torch.optim.SGD):
    """An optimizer whose state contains an object that cannot be sent."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["lock"] = object()
        return result


def hoarding() -> str:
    options = {"dist_optimizer": SMALL | {"per_parameter": f"{__name__}.Hoarder"}}
    with ovpatch.applied("ddp", "dist_optimizer", options=options):
        model = DistributedDataParallel(net())
        opt = Hoarder(model.parameters(), lr=0.1)
        try:
            step(model, [opt], 0)
        except RuntimeError as error:
            return f"{error} {error.__cause__}"
        finally:
            dist.barrier()
    return ""


def test_a_state_that_cannot_be_sent_is_an_error_with_the_remedy(ranks):
    for text in ranks(2)(hoarding):
        assert "has a object in its state, which cannot be sent to peers" in text
        assert "OVPATCH_DIST_OPTIMIZER_PER_PARAMETER" in text


def continued_behind_a_peer(kind: str) -> list[Record]:
    """Continue with copies that load unread state, which rank 1 has moved and dropped before rank 0 reads it."""
    store = dist.distributed_c10d._get_default_store()
    add_model = ShardedOptimizer._add_model

    def add_in_turns(self: ShardedOptimizer, *args: Any) -> None:
        if dist.get_rank() == 0:
            store.wait([f"moved, {kind}"])
        add_model(self, *args)
        gc.collect()
        store.set(f"moved, {kind}", "")

    model, opts = build(kind)
    records = []
    for number in range(4):
        if number == 2:
            old = [opt.state_dict() for opt in opts]
            module = copy.deepcopy(model.module)
            model = ddp(module)
            opts = MAKERS[kind](module)
            for opt, state in zip(opts, old, strict=True):
                opt.load_state_dict(state)
            del old, opt, state
        turns = mock.patch.object(ShardedOptimizer, "_add_model", add_in_turns)
        with turns if number == 2 else contextlib.nullcontext():
            step(model, opts, number)
        records.append(params(model))
    return records


def test_a_rank_keeps_dropped_state_until_its_peers_have_moved_theirs(ranks):
    results = ranks(2)(all_both, continued_behind_a_peer, table(kind=EVERY), apply=apply_named)
    for result in results:
        for case in same_bits([*result.values()]):
            assert case["counters"]["state_reads"] > 0
