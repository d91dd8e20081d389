"""The test bed itself, and the bytes that training sends over the links of real hosts."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
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
from ovpatch_plugins.dist_optimizer.sharding_choice import MIN_SAVED_NUMEL
from tests.support import patience
from tests.support.hosts import find_processes_in, hosts, read_sent_bytes, reason_to_skip
from tests.support.rarely import RARELY

# Packets have headers, ranks agree on settings, and small all-reduces follow each backward.
FRAMING_BYTES = 300_000


# --- the test bed ---


@pytest.mark.parametrize(
    "rate", ["", "fast", "0mbit", "-1mbit", "200", "200 mbit", "9999999gbit", 200]
)
def test_a_rate_that_tc_does_not_understand_is_an_error(rate):
    with pytest.raises(ValueError, match="200mbit"), hosts(1, rate=rate):
        pass


@pytest.mark.parametrize("count", [0, 255])
def test_a_number_of_hosts_that_the_network_has_not_is_an_error(count):
    with pytest.raises(ValueError, match="1 to 254 hosts"), hosts(count):
        pass


def test_hosts_have_their_own_names_addresses_and_memory(cluster):
    command = "sh -c 'hostname; touch /dev/shm/{host}; ls /dev/shm; cat /sys/class/net/lo/operstate; exit {host}'"
    results = cluster.run(command)
    assert [result.stdout.split()[:2] for result in results] == [["host0", "0"], ["host1", "1"]]
    assert [result.rc for result in results] == [0, 1]
    for use_link in (
        lambda: cluster.limit(2, "1mbit"),
        lambda: cluster.set_link(2, up=False),
        lambda: cluster.kill(-1),
    ):
        with pytest.raises(ValueError, match="only hosts 0 to 1"):
            use_link()


def test_queues_hold_each_link_to_its_rate_in_both_directions(cluster):
    # In bytes per second.
    rates = {"1gbit": 125_000_000, "20mbit": 2_500_000, "300kbit": 37_500}
    for rate, expected in rates.items():
        cluster.limit(1, rate)
        assert [(queue["kind"], queue["options"]["rate"]) for queue in cluster.queues(1)] == [
            ("tbf", expected)
        ] * 2
    assert [queue["options"]["rate"] for queue in cluster.queues(0)] == [rates["1gbit"]] * 2
    cluster.limit(1, "1gbit")


def test_all_bytes_of_a_slow_link_wait_in_its_queues(cluster):
    cluster.limit(1, "20mbit")
    before = cluster.queues(1)
    with cluster.ranks(1, exchange, 300_000) as job:
        assert job.results() == [("host0", 1.0, "0"), ("host1", 1.0, "0")]
    for then, now in zip(before, cluster.queues(1), strict=True):
        assert now["bytes"] - then["bytes"] >= 1_200_000
        # More came than the rate allows, so the queue held packets back.
        assert now["overlimits"] > then["overlimits"]
    cluster.limit(1, "1gbit")


LACKS = {
    "only Linux has": mock.patch.object(sys, "platform", "darwin"),
    "need root": mock.patch.object(os, "geteuid", return_value=1000),
    "the commands ip, tc, unshare, nsenter, setpriv, mount": mock.patch.object(
        shutil, "which", return_value=None
    ),
    "forbidden here: no permission": mock.patch.object(
        subprocess, "run", return_value=mock.Mock(returncode=1, stderr="no permission\n")
    ),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_machine_that_can_have_no_hosts_is_told_why(cluster, lack):
    del cluster
    find_reason = reason_to_skip.__wrapped__
    assert find_reason() == ""
    with LACKS[lack]:
        assert lack in find_reason()


# The server of these ranks does not need torch.
KILLED = """
import multiprocessing, os, signal, time
from unittest import mock
from tests.support import hosts
from tests.support.hosts import find_processes_in, read_namespace

multiprocessing.set_forkserver_preload(["tests.support.hosts"])
with hosts.hosts(2) as cluster, mock.patch.object(hosts, "start_server"):
    with cluster.ranks(1, time.sleep, 600):
        cluster.start(0, "sleep 600")
        namespaces = [read_namespace(holder.pid) for holder in cluster._holders]
        counts = [1, 3, 2]
        while [len(find_processes_in(namespace)) for namespace in namespaces] != counts:
            time.sleep(0.05)
        print(*namespaces, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_of_the_hosts_outlives_a_killed_test(cluster):
    del cluster
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True
    ) as test:
        assert test.stdout is not None
        namespaces = test.stdout.readline().split()
    assert test.returncode == -signal.SIGKILL
    assert len(namespaces) == 3
    deadline = time.monotonic() + patience.scale(60)
    while left := [pid for namespace in namespaces for pid in find_processes_in(namespace)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def exchange(numel: int) -> Any:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    tensor = torch.full((numel,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    return socket.gethostname(), float(tensor[-1]), os.environ["LOCAL_RANK"]


def test_links_count_bytes(cluster):
    before = cluster.bytes_sent()
    with cluster.ranks(1, exchange, 1_000_000) as job:
        assert job.results() == [("host0", 1.0, "0"), ("host1", 1.0, "0")]
    sent = [now - then for now, then in zip(cluster.bytes_sent(), before, strict=True)]
    assert all(4_000_000 <= count <= 4_000_000 + FRAMING_BYTES for count in sent), sent


def identify(_: int) -> str:
    from ovpatch.overlap.comm.consensus import identify_host

    return identify_host()


def test_hosts_are_told_apart_by_name_and_containers_of_one_machine_too(cluster):
    with cluster.ranks(2, identify, 0) as job:
        names = job.results()
    assert names[0] == names[1] != names[2] == names[3]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert {name.split()[1] for name in names} == {boot}


# --- bytes ---


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(700, 1000), nn.Tanh(), nn.Linear(1000, 400), nn.Tanh(), nn.Linear(400, 3)
    )


def train(features: tuple[str, ...], options: dict[str, Any], steps: int = 2) -> list[float]:
    """Return the bytes that this host sends in a late step, the sharded gradients and sums of parameters.

    A busy machine may let TCP send packets twice, which the counter of the link counts. So the least of the later half
    of the steps is what the program sends.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return train_in_group(features, options, steps)


def train_in_group(
    features: tuple[str, ...],
    options: dict[str, Any],
    steps: int,
    device: str = "cpu",
    interface: str = "eth0",
) -> list[float]:
    """Do the same in the default group."""
    # The host is the limit of a model as small as this one, which must not decide.
    least = mock.patch.dict(MIN_SAVED_NUMEL, {("gloo", "cpu"): 1})
    with least, ovpatch.applied(*features, options=options):
        wrapped = DistributedDataParallel(model().to(device))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        sent = []
        for step in range(steps):
            dist.barrier()
            sent.append(read_sent_bytes(interface=interface))
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            given = torch.randn(8, 700, generator=generator).to(device)
            wrapped(given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            [param.sum().item() for param in wrapped.parameters()]
            dist.barrier()
        sent.append(read_sent_bytes(interface=interface))
        from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

        return [
            min(after - before for before, after in itertools.pairwise(sent[steps // 2 :])),
            COUNTERS.grads_sharded,
            *[param.sum().item() for param in wrapped.parameters()],
        ]


def test_dist_optimizer_sends_two_sums_over_each_link_at_most(cluster):
    nbytes = 4 * sum(param.numel() for param in model().parameters())
    options = {"dist_optimizer": {"min_param_numel": 8}}
    # The first backwards are not sharded yet.
    with cluster.ranks(2, train, ("ddp", "dist_optimizer"), options, 5) as job:
        results = job.results()
    assert all(result[0] <= 2 * nbytes * (2 - 1) / 2 + FRAMING_BYTES for result in results), (
        nbytes,
        results,
    )
    assert all(result[1] > 0 for result in results), "no step was sharded"
    assert results[0][2:] == results[1][2:] == results[2][2:] == results[3][2:]


@pytest.mark.parametrize(("per_host", "shards"), [(2, True), (1, False), ([2, 1], False)], ids=str)
def test_features_chosen_by_default_send_two_sums_over_each_link_at_most(cluster, per_host, shards):
    """Check that models are left to ddp where hosts cannot keep all state each."""
    nbytes = 4 * sum(param.numel() for param in model().parameters())
    options = {"dist_optimizer": {"min_param_numel": 8, "shard": "auto"}}
    with cluster.ranks(per_host, train, ("ddp", "dist_optimizer"), options, 5) as job:
        results = job.results()
    for result in results:
        assert result[0] <= 2 * nbytes * (2 - 1) / 2 + FRAMING_BYTES, (nbytes, results)
        assert (result[1] > 0) == shards
        assert result[2:] == results[0][2:]


# Hosts, ranks of each, and the limit in units of the gradients' bytes.
LAYOUTS = {
    "by host, 4 ranks": (2, 4, 2 * 1 / 2),
    "by host, 3 hosts": (3, 2, 2 * 2 / 3),
    "3 hosts of one rank": (3, 1, 2 * 2 / 3),
    "4 hosts of one rank": (4, 1, 2 * 3 / 4),
    # A host of two ranks sends two thirds of the terms, and then of the parameters.
    "uneven": (2, [2, 1], 2 * 2 / 3),
}
DEFAULT = "3 hosts of one rank"


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == DEFAULT else RARELY) for name in LAYOUTS]
)
def test_dist_optimizer_that_is_named_sends_two_sums_whatever_the_layout(cluster, layout):
    del cluster
    count, per_host, limit = LAYOUTS[layout]
    nbytes = 4 * sum(param.numel() for param in model().parameters())
    options = {"dist_optimizer": {"min_param_numel": 8, "shard": "always"}}
    with (
        hosts(count, rate="1gbit") as made,
        made.ranks(per_host, train, ("ddp", "dist_optimizer"), options, 5) as job,
    ):
        results = job.results()
    for result in results:
        assert result[0] <= limit * nbytes + FRAMING_BYTES, (nbytes, results)
        assert result[1] > 0, "no step was sharded"
        assert result[2:] == results[0][2:]


@pytest.mark.parametrize("per_host", [2, pytest.param(4, marks=RARELY)])
def test_ddp_sends_two_sums_over_each_link_at_most(cluster, per_host):
    nbytes = 4 * sum(param.numel() for param in model().parameters())
    with cluster.ranks(per_host, train, ("ddp",), {}) as job:
        results = job.results()
    assert all(result[0] <= 2 * nbytes * (2 - 1) / 2 + FRAMING_BYTES for result in results), (
        nbytes,
        results,
    )
    if per_host == 4:
        with cluster.ranks(per_host, train, ("ddp",), {"ddp": {"hierarchical": "off"}}) as job:
            flat = job.results()
        assert all(result[0] > 1.5 * nbytes for result in flat), (nbytes, flat)


# --- the end ---


def fail_on_one_rank(features: tuple[str, ...], bad: int) -> int:
    """Raise in a backward of one rank, which ends its program."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if features:
        ovpatch.apply(*features, options={"dist_optimizer": {"min_param_numel": 8}})
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for step in range(6):
        optimizer.zero_grad()
        hidden = wrapped(torch.ones(2, 700))
        if step == 4 and dist.get_rank() == bad:
            hidden.register_hook(lambda grad: int("not a number"))
        hidden.square().mean().backward()
        optimizer.step()
    return step


@pytest.mark.parametrize(
    "features",
    [
        pytest.param((), marks=RARELY),
        pytest.param(("ddp",), marks=RARELY),
        ("ddp", "dist_optimizer"),
    ],
    ids=str,
)
def test_an_exception_on_one_rank_ends_the_programs_of_all_hosts(cluster, features):
    with cluster.ranks(2, fail_on_one_rank, features, 3) as job:
        results = job.results()
    # A rank that hangs has the result None.
    assert all(isinstance(result, str) for result in results), results
    assert results[3].startswith("ValueError: invalid literal"), results
    for peer in results[:3]:
        assert peer.startswith(("RuntimeError", "DistBackendError")), results


def outlive_the_feature(late: int) -> list[bool]:
    """Turn the feature off on one rank when all others have returned; return which state is full."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    options = {"dist_optimizer": {"min_param_numel": 8, "shard_over": "world"}}
    with ovpatch.applied("ddp", "dist_optimizer", options=options):
        wrapped = DistributedDataParallel(model())
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(torch.ones(2, 700) * (rank + 1)).square().mean().backward()
            optimizer.step()
        if rank == late:
            store.wait([f"off {peer}" for peer in range(4) if peer != late])
    store.set(f"off {rank}", "")
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [type(tensor) is torch.Tensor and bool(tensor.isfinite().all()) for tensor in tensors]


def test_a_late_rank_reads_from_ranks_whose_programs_have_ended(cluster):
    with cluster.ranks(2, outlive_the_feature, 3) as job:
        assert job.results() == [[True] * 18] * 4
