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
    """Make ranks on CPUs copy through files that they share."""

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
    """Train three steps; return the arguments of the calls of ``attend`` at their ends."""
    calls: list[Any] = []

    def attend(group: Any, device: torch.device, communicator: Any = None) -> None:
        # The call at the end of a backward has no communicator.
        if communicator is None:
            return
        is_step_communicator = communicator is step_communicator(group, device) is not group
        calls.append(
            (
                group is dist.group.WORLD,
                str(device),
                selection.find_gatherer(group, device) is not None,
                is_step_communicator,
            )
        )

    with mock.patch.object(selection, "attend", attend):
        on_cpus(test_loops.train, {"adamw": {"optimizer": "adamw", "steps": 3}}, options=BY_COPIES)
    return calls


def test_the_gathers_of_each_step_are_attended(ranks):
    for calls in ranks(2)(attended):
        assert calls == [(True, "cpu", True, True)] * 3


def order_of_a_step() -> list[str]:
    """Return the calls of all steps that choose the transport or begin the update, in order."""
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
    """Check the order of two calls: an update may wait for a collective that a peer launches after its own step."""
    assert ranks(2)(order_of_a_step) == [["choose", "update"] * 3] * 2


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("forward", "not all ranks reached the same collective"),
        ("end of backward", "Watchdog caught collective operation timeout"),
        # The host has launched its copies, and waits for them outside of Python.
        ("step", "Watchdog caught collective operation timeout"),
    ],
)
def test_a_missing_rank_is_an_error(where, message):
    """Check that the hosts of its peers raise, or the backend if the hosts have already continued.

    In the second case streams wait for copies, and not for the backend.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.plugins.dist_optimizer.missing_rank", where]
    # The process ends immediately, instead of first dumping and tearing down the work that was in flight.
    env = {**os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience.scale(120), env=env
    )
    output = done.stdout + done.stderr
    assert done.returncode, output
    assert "rank 0 has ended step 2" in output, output
    assert message in output, output


def test_the_copy_engine_of_a_group_is_released_after_the_group_is_destroyed(monkeypatch):
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
    cases = {name: {"kind": name, "dtype": torch.bfloat16} for name in test_main_params.OPTIMIZERS}
    results = ranks(2)(
        all_cases,
        test_main_params.train,
        cases,
        options=BY_COPIES | test_main_params.IN_FP32,
        **NCCL,
    )
    check_copied(results, steps=test_main_params.STEPS)


def many(repetitions: int) -> list[int]:
    """Move random tensors while ranks and streams are late at random; return the repetitions with wrong results."""
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
        gathered = [torch.empty(size * world, device=device) for size in sizes]
        spread = [torch.cat([given[rank][i] + r for r in range(world)]) for i in range(len(sizes))]
        sums = [torch.empty(size, device=device) for size in sizes]
        stream = torch.cuda.Stream() if late.random() < 0.3 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            works = [
                *engine.gather(gathered, given[rank]),
                *engine.scatter(sums, spread, average=False),
            ]
        for work in works:
            work.wait()
        torch.cuda.current_stream().wait_stream(stream)
        for i in range(len(sizes)):
            total = sum(tensors[i] for tensors in given) + world * rank
            right = torch.equal(
                gathered[i], torch.cat([tensors[i] for tensors in given])
            ) and torch.equal(sums[i], total)
            wrong += [] if right else [repetition]
    assert engine.drain(timeout_s=60)
    return wrong


def test_late_ranks_and_streams(ranks, gpus):
    assert ranks(gpus)(many, 300, **NCCL) == [[]] * gpus


def chosen() -> dict[str, Any]:
    """Let copy engines race the backend, then drop the model while no rank waits for its gather."""
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
