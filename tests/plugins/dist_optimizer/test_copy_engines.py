"""Training with gathers and reduce-scatters by copies between ranks, on the CPU and on GPUs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ovpatch
from ovpatch.overlap.comm.step_communicators import step_communicator
from ovpatch.overlap.kernels import copy_choice as selection
from ovpatch.overlap.kernels.copy_collectives import Engine
from ovpatch_plugins.dist_optimizer import optimizer_attach
from ovpatch_plugins.dist_optimizer.param_all_gather import ParamAllGather
from tests.plugins.ddp.arms import data
from tests.plugins.dist_optimizer import test_loop_styles, test_loops, test_main_params
from tests.plugins.dist_optimizer.checks import SMALL, all_cases, check_all, on, some
from tests.plugins.dist_optimizer.test_gpu import NCCL, WIDE, named, wide
from tests.support import patience, windows

BY_COPIES = {"copy_engines": "on"}


@contextmanager
def in_files() -> Iterator[None]:
    """Have ranks on CPUs copy through files that they share."""

    def choose(group: Any, device: torch.device, mode: str, **_: Any) -> None:
        chosen = selection.get_choice(group, device)
        if mode == "on" and chosen.engine is None:
            chosen.engine = Engine(group, device, allocate=windows.allocate, slot_bytes=512)
            chosen.gathers = chosen.scatters = True

    with mock.patch.object(selection, "choose", choose):
        yield


def on_cpus(loop: Any, cases: Any, **options: Any) -> dict[str, Any]:
    with in_files():
        return all_cases(loop, cases, **options)


def check_copied(results: list[Any], **demands: Any) -> None:
    check_all(results, **demands)
    for result in results:
        for name, case in result.items():
            counters = case["counters"]
            assert counters["gathers_copied"] == counters["gathers"] > 0, name


@pytest.mark.parametrize("world", [2, 3])
def test_loops_on_cpus(ranks, world):
    styles = some(named("style", test_loop_styles.STYLES))
    check_copied(
        ranks(world)(on_cpus, test_loop_styles.train, on(world, styles), options=BY_COPIES)
    )
    cases = {"adamw": {"optimizer": "adamw", "steps": 8}}
    check_copied(ranks(world)(on_cpus, test_loops.train, cases, options=BY_COPIES), steps=8)


def attended() -> list[Any]:
    """Train three steps; return what was attended, by steps and by backwards."""
    calls: list[Any] = []

    def attend(group: Any, device: torch.device, communicator: Any = None) -> None:
        if communicator is None:
            return  # at the end of a backward
        beside = communicator is step_communicator(group, device) is not group
        calls.append(
            (
                group is dist.group.WORLD,
                str(device),
                selection.find_gatherer(group, device) is not None,
                beside,
            )
        )

    with mock.patch.object(selection, "attend", attend):
        on_cpus(test_loops.train, {"adamw": {"optimizer": "adamw", "steps": 3}}, options=BY_COPIES)
    return calls


def test_what_a_step_gathers_is_attended(ranks):
    for calls in ranks(2)(attended):
        assert calls == [(True, "cpu", True, True)] * 3


def order_of_a_step() -> list[str]:
    """Return which of two calls each step makes first, and which next."""
    calls: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    with in_files():
        choose = noting("choose", selection.choose)
        update = noting("update", ParamAllGather.begin_update)
        with (
            mock.patch.object(selection, "choose", choose),
            mock.patch.object(ParamAllGather, "begin_update", update),
        ):
            all_cases(
                test_loops.train, {"adamw": {"optimizer": "adamw", "steps": 3}}, options=BY_COPIES
            )
    return calls


def test_ranks_choose_the_transport_before_they_update(ranks):
    """The first kernel of an update may wait for a collective that a peer launches after its own step."""
    assert ranks(2)(order_of_a_step) == [["choose", "update"] * 3] * 2


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("where", "noticed"),
    [
        ("forward", "not all ranks reached the same collective"),
        ("end of backward", "Watchdog caught collective operation timeout"),
        # The host has launched its copies, and waits for them outside of Python.
        ("step", "Watchdog caught collective operation timeout"),
    ],
)
def test_a_rank_that_stays_away_is_noticed(where, noticed):
    """By its peers' hosts, or where those have gone on, by the backend, on which their streams do not wait."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.plugins.dist_optimizer.missing_rank", where]
    # The process ends at once, and not after what it had under way has been written down and torn down.
    env = {**os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience.scale(120), env=env
    )
    said = done.stdout + done.stderr
    assert done.returncode, said
    assert "rank 0 has ended step 2" in said, said
    assert noticed in said, said


def test_a_group_that_is_destroyed_gives_its_memory_back_afterwards(monkeypatch):
    calls: list[str] = []
    for owner, name in ((optimizer_attach.pending_param, "wait_for_all"), (selection, "finish")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(
        optimizer_attach.PeerRpc, "shutdown_all", lambda group: calls.append("drain")
    )
    monkeypatch.setattr(selection, "forget", lambda group: calls.append(f"forget {group}"))
    destroy = optimizer_attach.wrap_destroy(lambda group: calls.append("destroy"))
    destroy("one")
    assert calls == ["wait_for_all", "finish", "drain", "destroy", "forget one"]
    calls.clear()
    monkeypatch.setattr(optimizer_attach, "is_exiting_by_error", lambda: True)
    destroy("one")
    assert calls == ["wait_for_all", "destroy"], "peers may wait for this process in a collective"


@pytest.mark.gpu(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_streams(ranks, overlap):
    options = {**BY_COPIES, "overlap_param_gather": overlap, "gather_bucket_mb": 3.0}
    check_copied(ranks(2)(all_cases, wide, WIDE, options=options, **NCCL), steps=12)


@pytest.mark.parametrize("overlap", [False, True])
def test_clipped(ranks, gpus, overlap):
    options = {**BY_COPIES, "overlap_param_gather": overlap, "gather_bucket_mb": 3.0}
    results = ranks(gpus)(all_cases, wide, {"": {"clip": 0.01}}, options=options, **NCCL)
    check_copied(results, steps=12, bitwise=False)


@pytest.mark.gpu(2)
def test_loops_on_gpus(ranks):
    styles = named("style", test_loop_styles.STYLES)
    check_copied(ranks(2)(all_cases, test_loop_styles.train, styles, options=BY_COPIES, **NCCL))
    halves = {name: {"kind": name, "dtype": torch.bfloat16} for name in test_main_params.OPTIMIZERS}
    results = ranks(2)(
        all_cases,
        test_main_params.train,
        halves,
        options=BY_COPIES | test_main_params.IN_FP32,
        **NCCL,
    )
    check_copied(results, steps=test_main_params.STEPS)


def many(repetitions: int) -> list[int]:
    """Move random tensors with ranks and streams that are late at random; return what came out wrong."""
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device())
    engine = Engine(group, device, slot_bytes=1 << 20)
    late, same = random.Random(rank), random.Random(7)
    wrong = []
    for repetition in range(repetitions):
        sizes = [same.randint(1, 400_000) for _ in range(same.randint(1, 5))]
        given = [
            [
                torch.full((size,), float(r + i + repetition % 50), device=device)
                for i, size in enumerate(sizes)
            ]
            for r in range(world)
        ]
        if late.random() < 0.3:
            time.sleep(late.random() * 2e-3)
        if late.random() < 0.5:
            torch.cuda._sleep(int(late.random() * 2e6))
        wholes = [torch.empty(size * world, device=device) for size in sizes]
        spread = [torch.cat([given[rank][i] + r for r in range(world)]) for i in range(len(sizes))]
        sums = [torch.empty(size, device=device) for size in sizes]
        stream = torch.cuda.Stream() if late.random() < 0.3 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            works = [
                *engine.gather(wholes, given[rank]),
                *engine.scatter(sums, spread, average=False),
            ]
        for work in works:
            work.wait()
        torch.cuda.current_stream().wait_stream(stream)
        for i in range(len(sizes)):
            total = sum(one[i] for one in given) + world * rank
            right = torch.equal(wholes[i], torch.cat([one[i] for one in given])) and torch.equal(
                sums[i], total
            )
            wrong += [] if right else [repetition]
    assert engine.drain(timeout_s=60)
    return wrong


def test_late_ranks_and_streams(ranks, gpus):
    assert ranks(gpus)(many, 300, **NCCL) == [[]] * gpus


def chosen() -> dict[str, Any]:
    """Let copy engines race the backend, and let go of a model whose gather nobody waits for."""
    options = {"dist_optimizer": SMALL | {"copy_engines": "auto"}}
    with ovpatch.applied("ddp", "dist_optimizer", options=options):
        model = torch.nn.parallel.DistributedDataParallel(test_loops.net())
        opt = torch.optim.AdamW(model.parameters())
        for step in range(3):
            model(data(step, 5, 6)).square().mean().backward()
            opt.step()
        lines = [
            line for line in ovpatch.report()["dist_optimizer"].remarks if "beside products" in line
        ]
        del model, opt
    return {"lines": lines}


@pytest.mark.gpu(2)
def test_all_ranks_choose_by_measurement(ranks):
    first, second = ranks(2)(chosen, **NCCL)
    assert first == second
    # Lines outlive groups, so there may be those of an earlier test's group.
    assert {line.split(" of ")[0] for line in first["lines"]} == {"gather", "reduce-scatter"}, first
