"""Tensors of an optimizer's state that somebody holds over steps: the same objects as under stock, read and written."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.comm.lifetimes import group_values
from ovpatch.overlap.peer_rpc import retention
from ovpatch_plugins.dist_optimizer.optimizer_attach import wrap_destroy
from tests.plugins.ddp.arms import Record, all_both, data, table
from tests.plugins.ddp.checks import same_bits
from tests.plugins.dist_optimizer.checks import apply, both, check_all, params
from tests.plugins.dist_optimizer.test_loops import net
from tests.plugins.dist_optimizer.test_state import on_cpu
from tests.plugins.dist_optimizer.test_whole_parameters import KINDS, NAMED, build, step
from tests.support.equality import compare
from tests.support.rarely import ALL_CASES

ALL = {"min_param_numel": 1}
STEPS = 4


def _first(state: dict[Any, Any]) -> Tensor:
    return next(value for value in state.values() if isinstance(value, Tensor) and value.ndim)


#: What is held, and how its content is reached later.
HOLDERS: dict[str, Callable[[dict[Any, Any]], Callable[[], Tensor]]] = {
    "object": lambda state: (lambda held: lambda: held)(_first(state)),
    "dict": lambda state: lambda: _first(state),
    "view": lambda state: (lambda held: lambda: held)(_first(state).view(-1)[1:]),
    "detached": lambda state: (lambda held: lambda: held)(_first(state).detach()),
    "data": lambda state: (lambda held: lambda: held)(_first(state).data),
    "numpy": lambda state: (lambda held: lambda: torch.from_numpy(held))(_first(state).numpy()),
}


def apply_all() -> AbstractContextManager[Any]:
    return apply(ALL | NAMED)


def held(kind: str, how: str, when: str, write: bool) -> list[Record]:
    """Hold tensors of the state from the first step on; read them each step, or change them too, one rank late."""
    model, opts = build(kind)
    holders: list[Callable[[], Tensor]] = []
    records: list[Record] = []

    def touch() -> None:
        time.sleep(0.01 * dist.get_rank())
        for holder in holders:
            if write:
                holder().mul_(0.5)
        records.append({str(i): holder().clone() for i, holder in enumerate(holders)})

    for number in range(STEPS):
        for opt in opts:
            opt.zero_grad()
        model(data(number, 5, 6)).square().mean().backward()
        if when == "before":
            touch()
        for opt in opts:
            opt.step()
        if not holders:
            holders += [HOLDERS[how](state) for opt in opts for state in opt.state.values()]
        if when == "after":
            touch()
    return [*records, params(model), *(copy.deepcopy(on_cpu(opt.state_dict())) for opt in opts)]


def check_held(results: list[dict[str, Any]]) -> None:
    for case in same_bits(results):
        assert case["counters"]["steps"] >= STEPS


@pytest.mark.parametrize("world", [2, 3])
def test_state_that_is_held_over_steps_is_what_stocks_is(ranks, world):
    cases = dict[str, Any]()
    for kind in ("adamw", *KINDS):
        wanted = list(table(kind=[kind], how=HOLDERS, when=["after", "before"], write=[True, False]).items())
        if kind == "adamw" and world == 2:  # half of them: each holder at both times, and in both ways
            cases |= {name: case for i, (name, case) in enumerate(wanted) if (i + i // 2 + i // 4) % 2 == 0}
        elif kind in ("adamw", "lamb") or ALL_CASES:  # every fifth: most holders, and both ways of reading and writing
            cases |= wanted[::5]
        elif world == 2:  # updated as lamb is
            cases |= wanted[::11]
    results = ranks(world)(all_both, held, cases, apply=apply_all, timeout=120)
    check_all(results, check=check_held)


def none_beside_held(kind: str) -> list[Record]:
    """A script holds a tensor of each state, so that it stays whole, and writes an entry without a value beside it."""
    model, opts = build(kind)
    kept: list[Tensor] = []
    for number in range(4):
        step(model, opts, number)
        for state in [state for opt in opts for state in opt.state.values()]:
            kept.append(_first(state).view(-1)[1:])
            state["note"] = None
    return [params(model), *(on_cpu(opt.state_dict()) for opt in opts)]


@pytest.mark.parametrize("kind", ["adamw", *KINDS])
def test_none_beside_a_held_tensor_stays_none(ranks, kind):
    results = ranks(2)(both, none_beside_held, kind, options=ALL | NAMED)
    for result in same_bits(results):
        assert result["counters"]["steps"] >= 4


def still_held() -> list[Any]:
    """What was replaced keeps its content over a load; after a step without a read in between, an error says so."""
    model, (opt,) = build("adamw")
    step(model, [opt], 0)
    old = copy.deepcopy(opt.state_dict())
    step(model, [opt], 1)
    tensors = [state["exp_avg"] for state in opt.state.values()]
    opt.load_state_dict(old)
    found: list[Any] = [copy.deepcopy([tensor.clone() for tensor in tensors])]
    kept = [state["exp_avg"] for state in opt.state.values()]
    opt.state.clear()
    step(model, [opt], 2)
    try:
        found.append([tensor.clone() for tensor in kept])
    except RuntimeError as error:
        found.append(str(error))
    return [{"loaded": found[0]}, {"cleared": found[1]}]


def test_state_that_was_replaced_keeps_its_content_or_says_that_it_has_not(ranks):
    for result in ranks(2)(both, still_held, options=ALL):
        compare([result["stock"][0]], [result["patched"][0]]).assert_bitwise()
        assert "Read or copy it before the step" in result["patched"][1]["cleared"]


def same_objects(kind: str) -> list[bool]:
    """Whether tensors of the state are the same objects from the first step on, read or unread, loaded or not."""
    model, opts = build(kind)
    step(model, opts, 0)
    opts[0].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    first = [_first(state) for state in opts[0].state.values()]
    same = []
    for number in range(1, 4):
        step(model, opts, number)
        now = [_first(state) for state in opts[0].state.values()]
        same += [one is other for one, other in zip(first, now, strict=True)]
        if number == 2:
            [tensor.sum() for tensor in now]
    return same


def check_same(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["stock"] == result["patched"]
        assert all(result["patched"])
        assert result["counters"]["state_refilled"] == 0


def test_tensors_of_the_state_are_the_same_objects_over_steps(ranks):
    cases = table(kind=["adamw", *KINDS])
    check_all(ranks(2)(all_both, same_objects, cases, apply=apply_all), check=check_same)


def after_the_end() -> tuple[str, float]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": ALL}):
        group = dist.new_group([0, 1])
        model = DistributedDataParallel(net(), process_group=group)
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        step(model, [opt], 0)
        copy.deepcopy(opt.state_dict())  # so the peers' addresses are known
        dist.destroy_process_group(group)
        dist.barrier()
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            copy.deepcopy(opt.state_dict())
        took = time.monotonic() - begin
        dist.barrier()
        return str(caught.value), took


def test_a_state_that_is_read_after_its_group_was_destroyed_is_an_error_at_once(ranks):
    for text, took in ranks(2)(after_the_end):
        assert text.endswith("optimizer.state_dict(), before destroy_process_group().")
        assert took < 30


def kept_for_peers() -> tuple[int, int]:
    """Return how many shards are kept once the feature is off, and how many when the group has gone."""
    group = dist.new_group([0, 1])
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": ALL}):
        model = DistributedDataParallel(net(), process_group=group)
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        step(model, [opt], 0)
        del opt
        gc.collect()
        ended = wrap_destroy(dist.destroy_process_group)  # one that was called before the feature was turned off
    found = [sum(len(kept.retained) for _, kept in group_values(retention.Retention, group))]
    ended(group)
    return found[0], sum(len(kept.retained) for _, kept in group_values(retention.Retention))


def test_shards_that_peers_may_read_go_with_their_group(ranks):
    for kept, left in ranks(2)(kept_for_peers):
        assert kept > 0
        assert left == 0
