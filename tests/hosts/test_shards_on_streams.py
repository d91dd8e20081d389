"""Each host keeps all shards, and streams wait between the stages of a reduction: NCCL on four GPUs of one machine.

On the CPU the same loops run with gloo, whose waits stop the host instead of a stream.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ovpatch
from ovpatch.overlap.comm import collectives, hosts
from ovpatch.overlap.comm.hosts import HostGroups, HostLayout, close_host_groups, find_host_groups
from ovpatch.overlap.comm.lifetimes import group_values
from ovpatch.overlap.comm.step_communicators import abort_step_communicators, step_communicator
from tests.hosts import test_checkpoints, test_cluster, test_shards
from tests.hosts.test_shards import check_replicas, on_hosts
from tests.plugins.ddp.arms import Cases, Record, data, device
from tests.plugins.ddp.test_gpu import loop_memory_of_another_stream
from tests.plugins.dist_optimizer import (
    test_loop_styles,
    test_loops,
    test_main_params,
    test_optimizer_kinds,
    test_reads_of_gradients,
    test_scaler,
    test_whole_parameters,
)
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, params
from tests.plugins.dist_optimizer.test_gpu import NCCL, wide
from tests.support import scripts
from tests.support.equality import compare
from tests.support.hosts import fake_hosts

HOSTS = (0, 0, 1, 1)
# The ranks of a host need not be neighbors.
LAYOUTS = (HOSTS, (0, 1, 0, 1))
CPU = torch.device("cpu")


class Uneven(nn.Module):
    """Weights of which two ranks get shards of different sizes, coalesced and separate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        # The second weight has more elements than coalesced gradients have, and an odd number.
        self.layers = nn.Sequential(
            nn.Linear(33, 511), nn.ReLU(), nn.Linear(511, 515), nn.LayerNorm(515), nn.Linear(515, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def train(
    read: str = "", clip: float = 0.0, micros: int = 1, quiet: bool = True, **wrap: Any
) -> list[Record]:
    """Train with several microbatches, reads of gradients, clips, evaluation and the state at the end."""
    raw = Uneven().to(device())
    model = ddp(raw, **{"bucket_cap_mb": 0.1} | wrap)
    # Adam would make a large difference of the last bit of a norm.
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
    records = []
    for step in range(7):
        record: Record = {}
        for micro in range(micros):
            is_last = micro == micros - 1
            with model.no_sync() if quiet and not is_last else contextlib.nullcontext():
                # Norms below 1 and a short way keep the rounding of sums below the smallest bound.
                loss = 0.01 * model(data(step, 8, 33, micro=micro)).square().mean()
                loss.backward()
        # A rank alone may read, and its peers do not know.
        if read == "all" or (read == "one" and dist.get_rank() == 2 and step == 5):
            record["grad"] = {name: p.grad.clone() for name, p in raw.named_parameters()}
        if clip:
            record["norm"] = nn.utils.clip_grad_norm_(raw.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            raw.eval()
            with torch.no_grad():
                record["evaluated"] = model(data(100, 8, 33)).clone()
            raw.train()
            record["param"] = params(raw)
        records.append(record | {"loss": loss.detach().clone()})
    state = copy.deepcopy(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else {}
    return [*records, {str(key): value for key, value in state.items()}]


TRAINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradients read by all ranks": {"read": "all"},
    "gradients read by one rank": {"read": "one"},
    "microbatches, no_sync": {"micros": 3},
    "microbatches, reduced each": {"micros": 2, "quiet": False},
    "clipped": {"clip": 0.02},
    "clipped, microbatches, views": {"clip": 0.02, "micros": 2, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters are searched": {"find_unused_parameters": True},
}
STYLES = (
    "accumulated, quiet: True, None: True",
    "accumulated, quiet: False, None: False",
    "closure",
    "group_added",
    "skipped",
    "two_forwards",
)


# --- on the CPU: the stages of streams, without streams ---


@contextlib.contextmanager
def as_on_streams() -> Iterator[None]:
    """Launch the stages of reductions on gloo as on NCCL; the host waits where a stream would."""
    objection = "NCCL chooses its ways between hosts itself"
    with (
        mock.patch.object(HostGroups, "has_streams", True),
        mock.patch.object(HostGroups, "_find_stream", return_value=None),
        mock.patch.object(hosts, "unwatched_stream", return_value=contextlib.nullcontext()),
        mock.patch.object(hosts, "find_hierarchy_objection", return_value=objection),
        mock.patch.object(
            HostGroups, "start", side_effect=AssertionError("a reduction in steps of the host")
        ),
    ):
        yield


def cases_as_on_streams(
    layout: tuple[int, ...],
    loop: Callable[..., Any],
    cases: Cases,
    options: dict[str, Any] | None = None,
) -> Any:
    with as_on_streams():
        return on_hosts(layout, all_cases, loop, cases, options=options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stages_of_streams_compute_the_same_on_the_cpu(ranks, layout):
    cases = dict(list(TRAINED.items())[2:7:2] if layout == HOSTS else [("", {"clip": 0.02})])
    results = ranks(4)(cases_as_on_streams, layout, train, cases)
    check_replicas(results)
    check_all(results, by_parts=None)


def test_loops_on_the_cpu(ranks):
    cases = {style: {"style": style} for style in STYLES[:3]}
    results = ranks(4)(cases_as_on_streams, HOSTS, test_loop_styles.train, cases)
    check_replicas(results)
    check_all(results)
    kinds = {kind: {"kind": kind} for kind in ("muon", "lamb")}
    check_replicas(
        ranks(4)(
            cases_as_on_streams,
            HOSTS,
            test_whole_parameters.train,
            kinds,
            options=test_whole_parameters.NAMED,
        )
    )


# --- communicators ---


def closed(aborts: bool) -> tuple[list[int], list[str]]:
    """Connect the communicators of two groups, and close those of the first one."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    found = []
    for group in reversed(groups):
        layout = HostLayout.of(["a", "b"], dist.get_rank())
        made = find_host_groups(group, CPU, layout)
        assert made is find_host_groups(group, CPU, layout)
        made.connect(CPU)
        assert made.across is not None
        found += [made.within.size(), made.across.size(), made.steps.size(), made.across.rank()]
    calls: list[str] = []
    step_communicator(groups[0], CPU)
    if aborts:
        abort_step_communicators(groups[0])

    def note(_communicator: Any, device_type: str, *, aborts: bool) -> None:
        calls.append(f"{device_type}, aborts: {aborts}")

    with mock.patch.object(hosts, "close_communicator", note):
        close_host_groups(groups[0])
    assert not group_values(HostGroups, groups[0])
    assert group_values(HostGroups, groups[1])
    return found, calls


@pytest.mark.parametrize("aborts", [False, True])
def test_communicators_of_a_group_are_closed_with_it_and_aborted_if_a_rank_is_missing(
    ranks, aborts
):
    for rank, (found, calls) in enumerate(ranks(2)(closed, aborts)):
        assert found == [1, 2, 1, rank] * 2
        assert calls == [f"cpu, aborts: {aborts}"] * 4


def destroyed() -> tuple[int, int]:
    """Train on two hosts, and destroy the group; return how many groups had communicators before and after."""
    group = dist.new_group()
    options = {"dist_optimizer": {"min_param_numel": 8}}
    with fake_hosts(HOSTS), ovpatch.applied("ddp", "dist_optimizer", options=options):
        model = nn.parallel.DistributedDataParallel(test_loops.net(), process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            model(data(step, 5, 6)).square().mean().backward()
            optimizer.step()
        before = len(group_values(HostGroups, group))
        model.state_dict()
        dist.destroy_process_group(group)
        return before, len(group_values(HostGroups, group))


def test_the_end_of_a_group_closes_its_communicators(ranks):
    assert ranks(4)(destroyed) == [(1, 0)] * 4


def gather_over_one_rank() -> list[float]:
    """Gather over one rank, while copy engines serve the group of two."""
    group = dist.group.WORLD
    alone = find_host_groups(group, CPU, HostLayout.of(["a", "b"], dist.get_rank())).steps

    def refuse(*_: Any) -> Any:
        raise AssertionError("a transport of the group must not gather over fewer ranks")

    transports = collectives.Transports(refuse, refuse, refuse, refuse)
    with mock.patch.object(collectives, "_transports", transports):
        output = torch.zeros(3)
        for work in collectives.AllGather(group, CPU, alone)([output], [torch.arange(3.0)]):
            work.wait()
        with pytest.raises(AssertionError, match="must not gather"):
            collectives.AllGather(group, CPU)([torch.zeros(6)], [output])
    return output.tolist()


def test_transports_of_a_group_do_not_serve_a_part_of_it(ranks):
    assert ranks(2)(gather_over_one_rank) == [[0.0, 1.0, 2.0]] * 2


# --- on GPUs ---


def run(
    ranks: Any,
    loop: Callable[..., Any],
    cases: Cases,
    options: dict[str, Any] | None = None,
    layout: tuple[int, ...] = HOSTS,
    timeout: float = 180,
) -> list[Any]:
    nccl = NCCL | {"timeout": timeout}
    results: list[Any] = ranks(4)(on_hosts, layout, all_cases, loop, cases, options=options, **nccl)
    check_replicas(results)
    return results


@pytest.mark.gpu(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_flight_mb", [1.0, 1024.0])
def test_values_on_gpus(ranks, layout, in_flight_mb):
    options = {"grads_in_flight_mb": in_flight_mb}
    check_all(run(ranks, train, TRAINED, options, layout), by_parts=None)


@pytest.mark.gpu(4)
def test_loops_on_gpus(ranks):
    check_all(
        run(ranks, test_loops.train, {"": {"optimizer": "adamw", "read": True}}),
        steps=8,
        by_parts=False,
    )
    check_all(run(ranks, test_loop_styles.train, {style: {"style": style} for style in STYLES}))
    small = {"": {"style": STYLES[0], "wrap": "small buckets, unused"}}
    check_all(run(ranks, test_loop_styles.train, small))
    kinds = {kind: {"kind": kind} for kind in ("sgd, nesterov", "adam, lr tensor")}
    check_all(run(ranks, test_optimizer_kinds.train, kinds), steps=test_optimizer_kinds.STEPS)
    norms = {use: {"use": use} for use in tuple(test_reads_of_gradients.NORMS)[::2]}
    check_all(run(ranks, test_reads_of_gradients.train, norms), bitwise=False)


@pytest.mark.gpu(4)
def test_whole_parameters_on_gpus(ranks):
    cases = {kind: {"kind": kind} for kind in ("muon", "lamb")}
    for result in run(ranks, test_whole_parameters.train, cases, test_whole_parameters.NAMED):
        for case in result.values():
            compare(case["stock"], case["patched"], reordered=case["reordered"]).assert_equal()
            assert case["counters"]["params_owned"] > 0


@pytest.mark.gpu(4)
def test_low_precision_on_gpus(ranks):
    # A momentum would be compared as well. It is as large as the gradients, whose sums in bf16 depend on the order: at
    # 0.3 their spacing is 2e-3.
    kinds = {kind: {"kind": kind, "dtype": torch.bfloat16} for kind in ("sgd", "adamw, fused")}
    results = run(ranks, test_main_params.train, kinds, test_main_params.IN_FP32)
    # A gradient near 0.05 has a spacing of 2.4e-4 in bf16. A sum in another order moves it by that, and the one other
    # order that measures the noise of stock PyTorch does not show it for each value.
    check_all(results, steps=test_main_params.STEPS, floor=2.5e-4)
    # Copy engines would add them in fp32, but serve no part of a group.
    assert not any(case["counters"]["grads_in_half"] for case in results[0].values())


@pytest.mark.gpu(4)
@pytest.mark.parametrize("overlap", [False, True])
def test_streams_on_gpus(ranks, overlap):
    options = {"overlap_param_gather": overlap, "gather_bucket_mb": 3.0}
    cases = {side: {"clip": 0.01, "side": side} for side in ("", "all", "step", "forward")}
    check_all(run(ranks, wide, cases, options), steps=12, bitwise=False)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("in_flight_mb", [1.0, 1024.0])
def test_memory_is_not_released_before_the_stages_have_read_it(ranks, hooks, in_flight_mb):
    options = {"grads_in_flight_mb": in_flight_mb}
    cases = {"": {"hooks": hooks, "wrap": ddp}}
    check_all(run(ranks, loop_memory_of_another_stream, cases, options), steps=8)


@pytest.mark.gpu(4)
def test_an_infinity_on_one_host_skips_the_step_of_all_on_gpus(ranks):
    cases = {"": {"unscale": True, "clip": True, "fused": True, "culprit": 3}}
    for result in run(ranks, test_scaler.train, cases):
        case = result[""]
        compare(case["stock"], case["patched"], reordered=case["reordered"]).assert_equal()


@pytest.mark.gpu(4)
@pytest.mark.parametrize("rank", [0, 3])
def test_one_rank_reads_the_state_from_its_host_alone_on_gpus(ranks, rank):
    replies = ranks(4)(on_hosts, HOSTS, test_shards.called, rank, **NCCL)
    result = replies[rank][0]
    compare(result["stock"], result["patched"], reordered=result["reordered"]).assert_equal()
    assert [called for _, called in replies] == [
        {rank ^ 1} if own == rank else set() for own in range(4)
    ]


@pytest.mark.gpu(4)
def test_state_is_kept_once_per_host_on_gpus(ranks):
    for world, host in ranks(4)(on_hosts, HOSTS, test_shards.layouts, **NCCL):
        assert world[0] < 0.35 < 0.45 < host[0] < 0.6
        assert "each of 2 hosts keeps all state, over its 2 ranks (shard_over=auto)" in host[1][-1]
        compare(world[2], host[2]).assert_equal()


@pytest.mark.gpu(4)
def test_state_becomes_full_on_every_host_with_gpus(ranks):
    assert ranks(4)(on_hosts, HOSTS, test_shards.turned_off, **NCCL) == [True] * 4


@pytest.mark.gpu(4)
def test_the_end_of_a_group_closes_its_communicators_on_gpus(ranks):
    assert ranks(4)(destroyed, **NCCL) == [(1, 0)] * 4


@pytest.mark.gpu(4)
def test_a_checkpoint_of_any_layout_is_read_by_any_other_one_on_gpus(ranks, tmp_path):
    results = ranks(4)(test_checkpoints.read_all, tmp_path, **NCCL | {"timeout": 300})
    test_checkpoints.check_table(results)


# --- on GPUs, over a network ---


@pytest.mark.gpu(2)
def test_hosts_on_a_network_over_nccl():
    nbytes = 4 * sum(param.numel() for param in test_cluster.model().parameters())
    script = Path(__file__).with_name("nccl_hosts.py")
    env = {"PYTHONPATH": str(script.parents[2])}
    done = scripts.torchrun(4, script, env=env, timeout=200).check()
    sent = int(done.stdout.split("bytes ")[1])
    # Each of two hosts sends as many bytes as the gradients have.
    assert nbytes <= sent <= 2 * (nbytes + test_cluster.FRAMING_BYTES), (nbytes, sent)
