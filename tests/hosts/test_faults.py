"""Faults of hosts and links: training ends as stock PyTorch ends it, or with an error that names ranks.

The process groups have short timeouts, so that the test finds a dead host soon. A busy machine exceeds them, so these
tests need ``ALL_CASES=1``.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS
from tests.support.equality import compare
from tests.support.hosts import Cluster, hosts, reason_to_skip
from tests.support.rarely import RARELY

pytestmark = RARELY

TIMEOUT_S = 20.0  # expires
FEATURES = ("ddp", "dist_optimizer")
OPTIONS = {"dist_optimizer": {"min_param_numel": 8}}
# The last step before which each fault comes, or ends.
SLOW, DOWN, DEAD = 6, 8, 10
# The time for which a link is down that comes back.
PAUSE_S = 5.0


# The features of a job, and the options of dist_optimizer; none for stock PyTorch.
JOBS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "stock": ((), {}),
    "ddp": (("ddp",), {}),
    "by host": (FEATURES, {"shard_over": "host"}),
    "world": (FEATURES, {"shard_over": "world"}),
}


# On two ranks these have the bits of stock PyTorch.
PAUSED = ("stock", "ddp", "world")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    with hosts(2, rate="200mbit") as made:
        yield made


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"nothing has made {path.name}"
        time.sleep(0.02)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 500), nn.Tanh(), nn.Linear(500, 30))


def make_data(step: int) -> torch.Tensor:
    return torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(make_data(step)).square().mean().backward()
    optimizer.step()


def train_through_faults(folder: Path) -> dict[str, Any]:
    """Train until the other host is dead; report what happened and how long the last step took."""
    clock = time.monotonic
    if os.environ["RANK"] in ("2", "3"):
        # The clocks of this host are ahead.
        for name in ("time", "monotonic"):
            original = getattr(time, name)
            setattr(time, name, lambda original=original: original() + 3600.0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    reference = make_model()
    stock = DistributedDataParallel(reference)
    stock_optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-3)
    ovpatch.apply(*FEATURES, options=OPTIONS)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(DEAD):
        if step in (SLOW, DOWN):
            wait_for(folder / f"go {step}")
        train(stock, stock_optimizer, step)
        train(model, optimizer, step)
        if step + 1 in (SLOW, DOWN, DEAD):
            (folder / f"done {step + 1} {rank}").touch()
    values = [param.detach().clone() for param in model.parameters()]
    difference = max(
        float((own - other).abs().max())
        for own, other in zip(values, reference.parameters(), strict=True)
    )
    wait_for(folder / "go dead")
    begin = clock()
    error = "no error"
    try:
        train(model, optimizer, DEAD)
        [float(param.sum()) for param in model.parameters()]
        train(model, optimizer, DEAD + 1)
    except Exception as failure:  # noqa: BLE001 - the test judges it
        error = f"{type(failure).__name__}: {failure}"
    return {"difference": difference, "error": error, "seconds": clock() - begin}


def test_a_slow_host_and_a_pause_only_cost_time_and_a_dead_host_ends_the_step(cluster, tmp_path):
    def wait_for_all(step: int) -> None:
        for rank in range(4):
            wait_for(tmp_path / f"done {step} {rank}")

    with cluster.ranks(2, train_through_faults, tmp_path) as job:
        wait_for_all(SLOW)
        cluster.limit(1, "20mbit")
        (tmp_path / f"go {SLOW}").touch()
        wait_for_all(DOWN)
        cluster.set_link(1, up=False)
        (tmp_path / f"go {DOWN}").touch()
        # The links come back before the timeout of the group.
        time.sleep(PAUSE_S)
        cluster.set_link(1, up=True)
        wait_for_all(DEAD)
        cluster.kill(1)
        (tmp_path / "go dead").touch()
        results = job.results(TIMEOUT_S + 60)
    assert results[2:] == [None, None], "the host has lost its power"
    for result in results[:2]:
        assert isinstance(result, dict), result
        assert result["difference"] <= 1e-5
        assert result["error"] != "no error"
        assert result["seconds"] <= TIMEOUT_S + 10, result


# --- a link that comes back ---


def train_through_a_pause(folder: Path) -> int:
    """Train stock and patched models, whose links are down when a step begins; return the sharded gradients.

    Raises:
        AssertionError: The models have other values.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    values: dict[str, Any] = {}
    for name in PAUSED:
        features, options = JOBS[name]
        options = {"dist_optimizer": {"min_param_numel": 8} | options}
        with ovpatch.applied(*features, options=options) if features else nullcontext():
            model = DistributedDataParallel(make_model())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(DEAD):
                if step == DOWN:
                    (folder / f"done {name} {dist.get_rank()}").touch()
                    wait_for(folder / f"go {name}")
                train(model, optimizer, step)
            values[name] = [param.detach().clone() for param in model.parameters()]
    for name in PAUSED[1:]:
        compare(values["stock"], values[name]).assert_bitwise()
    return COUNTERS.grads_sharded


def test_a_link_that_is_down_for_seconds_leaves_the_values_of_stock(cluster, tmp_path):
    with cluster.ranks(1, train_through_a_pause, tmp_path) as job:
        for name in PAUSED:
            for rank in range(2):
                wait_for(tmp_path / f"done {name} {rank}")
            cluster.set_link(1, up=False)
            (tmp_path / f"go {name}").touch()
            time.sleep(PAUSE_S)
            cluster.set_link(1, up=True)
        for sharded in job.results():
            assert isinstance(sharded, int), sharded
            assert sharded > 0


# --- a link that stays down ---


def train_until_the_link_is_down(name: str, folder: Path) -> dict[str, Any]:
    """Train until a step fails; report its error, and the error of a read of the state after it."""
    features, options = JOBS[name]
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    if features:
        ovpatch.apply(*features, options={"dist_optimizer": {"min_param_numel": 8} | options})
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(DOWN):
        train(model, optimizer, step)
    (folder / f"done {name} {rank}").touch()
    wait_for(folder / f"go {name}")
    found: dict[str, Any] = {}

    def attempt(what: str, action: Callable[[], object]) -> None:
        begin, error = time.monotonic(), "no error"
        try:
            action()
        except Exception as failure:  # noqa: BLE001 - the test judges it
            error = f"{type(failure).__name__}: {failure}"
        found[what] = error, time.monotonic() - begin

    def take_steps() -> None:
        for step in range(DOWN, DOWN + 2):
            train(model, optimizer, step)
            [float(param.sum()) for param in model.parameters()]

    attempt("step", take_steps)
    attempt("state", lambda: copy.deepcopy(optimizer.state_dict()))
    return found


@pytest.mark.parametrize("name", JOBS)
def test_a_link_that_stays_down_ends_the_step_of_every_rank(cluster, tmp_path, name):
    with cluster.ranks(2, train_until_the_link_is_down, name, tmp_path) as job:
        for rank in range(4):
            wait_for(tmp_path / f"done {name} {rank}")
        cluster.set_link(1, up=False)
        (tmp_path / f"go {name}").touch()
        results = job.results(3 * TIMEOUT_S + 60)
    for rank, result in enumerate(results):
        assert isinstance(result, dict), (rank, result)
        error, seconds = result["step"]
        assert error != "no error", (rank, result)
        assert seconds <= TIMEOUT_S + 10, (rank, result)
        # A host has all state that it needs, unless state is sharded over all hosts.
        error, seconds = result["state"]
        assert seconds <= TIMEOUT_S + 10, (rank, result)
        if name != "world":
            assert error == "no error", (rank, result)
        else:
            assert "(host host" in error, (rank, result)


DIFFERENCES = ("hierarchical", "shard_over", "version of ovpatch")


def differ(what: str, group: dist.ProcessGroup) -> str:
    is_second = dist.get_rank() == 1
    options = dict(OPTIONS)
    if is_second and what == "hierarchical":
        options["ddp"] = {"hierarchical": "off"}
    if is_second and what == "shard_over":
        options["dist_optimizer"] = {**OPTIONS["dist_optimizer"], "shard_over": "world"}
    other = mock.patch("ovpatch.overlap.comm.consensus.get_version", return_value="0.0.1")
    with ovpatch.applied(*FEATURES, options=options):
        if is_second and what == "version of ovpatch":
            other.start()
        try:
            DistributedDataParallel(make_model(), process_group=group)
        except RuntimeError as error:
            return str(error)
        finally:
            with suppress(RuntimeError):
                other.stop()
    return "no error"


def all_differences() -> list[str]:
    # A second default group would need the port before the first one has released it.
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    return [differ(what, dist.new_group()) for what in DIFFERENCES]


def test_hosts_with_other_settings_are_named(cluster):
    with cluster.ranks(1, all_differences) as job:
        for errors in job.results():
            assert isinstance(errors, list), errors
            for error, what in zip(errors, DIFFERENCES, strict=True):
                assert what in error
                assert "on rank 0 (host host0) but" in error
                assert "on rank 1" in error


PROGRAM = Path(__file__).with_name("resumed.py")


def test_torchrun_restarts_all_hosts_and_training_resumes(cluster, tmp_path):
    command = (
        "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d --rdzv-id 1 "
        f"--rdzv-endpoint {{master}}:29401 {PROGRAM} {tmp_path}"
    )
    results = cluster.run(
        command, env={"OVPATCH_AUTO": "1", "OVPATCH": "ddp,dist_optimizer"}, timeout=150
    )
    for result in results:
        result.check()
        assert "resumed at step 3 of 5, 2 ranks" in result.stdout, result.describe()


def test_torchrun_restarts_after_a_host_was_lost_and_training_resumes_on_a_new_one(tmp_path):
    if reason := reason_to_skip():
        pytest.skip(reason)
    command = (
        "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d --rdzv-id 1 "
        "--rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=5 --monitor-interval 0.1 "
        f"--rdzv-endpoint 10.77.0.1:29401 {PROGRAM} {tmp_path}"
    )
    env = {"OVPATCH_AUTO": "1", "OVPATCH": "ddp,dist_optimizer", "LOST_AT": "2", "TIMEOUT_S": "8"}
    # Without it, node 0 of torch 2.13 does not publish the address of its store for a node that joins a later round.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with hosts(3, rate="200mbit") as cluster:
        first, lost = (cluster.start(host, command, env=env) for host in range(2))
        wait_for(tmp_path / "waits 1")
        cluster.kill(1)
        (tmp_path / "go").touch()
        new = cluster.start(2, command, env=env)
        deadline = time.monotonic() + 150
        results = [cluster.finish(host, tool, deadline) for host, tool in ((0, first), (2, new))]
        lost.wait(60)
    for result in results:
        result.check()
        assert "resumed at step 2 of 5, 2 ranks" in result.stdout, result.describe()
