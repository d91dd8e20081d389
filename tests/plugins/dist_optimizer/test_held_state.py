"""Tensors of optimizer state that a script keeps over steps: the objects stay live, but views of them do not."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.comm.lifetimes import group_values
from ovpatch.overlap.peer_rpc import retention
from ovpatch_plugins.dist_optimizer import dist_optimizer_report as report
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


# How a script holds state and later reaches the content. Both ways stay live.
HOLDERS: dict[str, Callable[[dict[Any, Any]], Callable[[], Tensor]]] = {
    "object": lambda state: (lambda held: lambda: held)(_first(state)),
    "dict": lambda state: lambda: _first(state),
}

# Other tensors and arrays over the memory of a tensor.
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda tensor: tensor.view(-1)[1:],
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "numpy": lambda tensor: tensor.numpy(),
    "capsule": lambda tensor: tensor.__dlpack__(),
    "graph": lambda tensor: tensor * torch.ones_like(tensor, requires_grad=True),
}


def apply_all() -> AbstractContextManager[Any]:
    return apply(ALL | NAMED)


def held(kind: str, how: str, when: str, write: bool) -> list[Record]:
    """Hold tensors of the state from the first step on; read or change them in each step, on one rank late."""
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
def test_state_that_is_held_over_steps_equals_that_of_stock_pytorch(ranks, world):
    cases = dict[str, Any]()
    for kind in ("adamw", *KINDS):
        wanted = list(
            table(kind=[kind], how=HOLDERS, when=["after", "before"], write=[True, False]).items()
        )
        if kind == "adamw" and world == 2:
            # These are half of the cases: each holder at both times, and reading as well as writing.
            cases |= {
                name: case
                for i, (name, case) in enumerate(wanted)
                if (i + i // 2 + i // 4) % 2 == 0
            }
        elif kind in ("adamw", "lamb") or ALL_CASES:
            # Every third case still has both holders and both times, and reads as well as writes.
            cases |= wanted[::3]
        elif world == 2:
            # The remaining kinds update like lamb.
            cases |= wanted[::7]
    results = ranks(world)(all_both, held, cases, apply=apply_all, timeout=120)
    check_all(results, check=check_held)


def viewed(kind: str, how: str) -> dict[str, Any]:
    """Hold views of the state over steps; return the contents of the views and of the state."""
    model, opts = build(kind)
    step(model, opts, 0)
    # A smaller parameter does not have a shard on each rank, so torch keeps its state.
    states = [state for opt in opts for state in opt.state.values() if _first(state).numel() >= 4]
    tensors = [_first(state) for state in states]
    old = [tensor.clone() for tensor in tensors]
    views = [VIEWS[how](tensor) for tensor in tensors]
    for number in (1, 2):
        step(model, opts, number)
    now = [_first(state) for state in states]
    return {
        "params": params(model),
        "old": old,
        "views": [plain(view, like) for view, like in zip(views, old, strict=True)],
        "state": [tensor.clone() for tensor in now],
        "live": [tensor is new for tensor, new in zip(tensors, now, strict=True)],
        "remarks": [
            text for text in report.list_remarks() if "shares the memory of optimizer state" in text
        ],
    }


def plain(view: Any, like: Tensor) -> Tensor | None:
    """Return the content of a view, padded at the start to the shape of its tensor ``like``; None if torch raises."""
    if isinstance(view, Tensor) and view.requires_grad:
        try:
            view.sum().backward()
        except RuntimeError:
            # The step of stock PyTorch has updated a tensor that the graph saved.
            return None
        return view.grad_fn.next_functions[1][0].variable.grad
    if not isinstance(view, Tensor):
        view = torch.from_numpy(view) if isinstance(view, np.ndarray) else torch.from_dlpack(view)
    pad = like.numel() - view.numel()
    return torch.cat([like.view(-1)[:pad], view.reshape(-1)]).view(like.shape)


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_views_of_state_keep_their_old_values(ranks, kind):
    results = ranks(2)(all_both, viewed, table(kind=[kind], how=VIEWS), apply=apply_all)
    for cases in results:
        for name, case in cases.items():
            stock, patched = case["stock"], case["patched"]
            compare(stock["params"], patched["params"]).assert_bitwise()
            compare(stock["state"], patched["state"]).assert_bitwise()
            # In stock PyTorch a view shows the new state. Here it shows the old state, whose memory its tensor keeps.
            compare(
                {f"{name}: views": patched["old"]}, {f"{name}: views": patched["views"]}
            ).assert_bitwise()
            # torch keeps no reference from these views to the tensor object, so the object may get other memory.
            assert set(patched["live"]) == {
                name.rpartition("how ")[2] in ("detached", "data", "numpy")
            }, name
            [text] = patched["remarks"]
            assert text.endswith("again after each step.")


def none_in_state(kind: str) -> list[Record]:
    """Add a key with the value None to each state."""
    model, opts = build(kind)
    for number in range(4):
        step(model, opts, number)
        for state in [state for opt in opts for state in opt.state.values()]:
            _first(state).sum()
            state["note"] = None
    return [params(model), *(on_cpu(opt.state_dict()) for opt in opts)]


@pytest.mark.parametrize("kind", ["adamw", *KINDS])
def test_none_in_a_state_stays_none(ranks, kind):
    results = ranks(2)(both, none_in_state, kind, options=ALL | NAMED)
    for result in same_bits(results):
        assert result["counters"]["steps"] >= 4


def still_held() -> list[Any]:
    """Return tensors of a state that a load replaced, and the error for tensors that a step made unreadable."""
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


def test_state_that_was_replaced_keeps_its_content_or_raises(ranks):
    for result in ranks(2)(both, still_held, options=ALL):
        compare([result["stock"][0]], [result["patched"][0]]).assert_bitwise()
        assert "Read or copy it before the step" in result["patched"][1]["cleared"]


def same_objects(kind: str) -> list[bool]:
    """Return whether tensors of the state stay the same objects over steps with and without loads and reads."""
    model, opts = build(kind)
    step(model, opts, 0)
    opts[0].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    first = [_first(state) for state in opts[0].state.values()]
    same = []
    for number in range(1, 4):
        step(model, opts, number)
        now = [_first(state) for state in opts[0].state.values()]
        same += [old is new for old, new in zip(first, now, strict=True)]
        if number == 2:
            [tensor.sum() for tensor in now]
    return same


def check_same(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["stock"] == result["patched"]
        assert all(result["patched"])


def test_tensors_of_the_state_are_the_same_objects_over_steps(ranks):
    cases = table(kind=["adamw", *KINDS])
    check_all(ranks(2)(all_both, same_objects, cases, apply=apply_all), check=check_same)


def after_the_end() -> tuple[str, float]:
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": ALL}):
        group = dist.new_group([0, 1])
        model = DistributedDataParallel(net(), process_group=group)
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        step(model, [opt], 0)
        # The first read looks up the addresses of the peers.
        copy.deepcopy(opt.state_dict())
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
    """Return the number of shards that are kept once the feature is off, and the number once the group is destroyed."""
    group = dist.new_group([0, 1])
    with ovpatch.applied("ddp", "dist_optimizer", options={"dist_optimizer": ALL}):
        model = DistributedDataParallel(net(), process_group=group)
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        step(model, [opt], 0)
        del opt
        gc.collect()
        # A script may have called this function before the feature was turned off.
        ended = wrap_destroy(dist.destroy_process_group)
    found = [sum(len(kept.retained) for _, kept in group_values(retention.Retention, group))]
    ended(group)
    return found[0], sum(len(kept.retained) for _, kept in group_values(retention.Retention))


def test_shards_that_peers_may_read_are_freed_with_their_group(ranks):
    for kept, left in ranks(2)(kept_for_peers):
        assert kept > 0
        assert left == 0
