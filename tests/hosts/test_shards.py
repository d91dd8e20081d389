"""Each host keeps all shards: ``dist_optimizer`` on ranks of one machine that count as hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import ovpatch
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch_plugins.dist_optimizer import sharding_choice
from tests.plugins.ddp.arms import Cases, data
from tests.plugins.ddp.checks import same_bits
from tests.plugins.dist_optimizer import (
    test_loop_styles,
    test_loops,
    test_optimizer_kinds,
    test_reads_of_gradients,
    test_scaler,
    test_state,
    test_whole_parameters,
)
from tests.plugins.dist_optimizer.checks import all_cases, apply, check_all, ddp
from tests.support.equality import compare
from tests.support.hosts import fake_hosts

HOSTS = (0, 0, 1, 1)
STYLES = ("accumulated, quiet: True, None: False", "closure")


def on_hosts(
    hosts: tuple[int, ...], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function in which each host keeps all shards of a model, at least of one."""
    choose, layouts = sharding_choice.choose_shard_layout, []

    def note_layout(*facts: Any) -> Any:
        layouts.append(choose(*facts))
        return layouts[-1]

    with (
        fake_hosts(hosts),
        mock.patch.object(sharding_choice, "choose_shard_layout", note_layout),
    ):
        result = function(*args, **kwargs)
    # Otherwise the function has tested shards over all ranks.
    assert any(layouts)
    return result


def check_replicas(results: list[Any]) -> None:
    """Demand that all ranks, of all hosts, have the same bits."""
    for result in results:
        for name, case in result.items():
            for own, first in zip(case["patched"], results[0][name]["patched"], strict=True):
                if isinstance(own, dict) and "param" in own:
                    compare(first["param"], own["param"]).assert_bitwise()


def run(
    ranks: Any, loop: Callable[..., Any], cases: Cases, options: dict[str, Any] | None = None
) -> list[Any]:
    results: list[Any] = ranks(4)(on_hosts, HOSTS, all_cases, loop, cases, options=options)
    check_replicas(results)
    return results


def test_loops_read_full_values(ranks):
    check_all(
        run(ranks, test_loops.train, {"": {"optimizer": "adamw", "read": True}}),
        steps=8,
        by_parts=False,
    )
    check_all(run(ranks, test_loop_styles.train, {style: {"style": style} for style in STYLES}))
    kinds = {kind: {"kind": kind} for kind in ("sgd, nesterov", "adam, lr tensor")}
    check_all(run(ranks, test_optimizer_kinds.train, kinds), steps=test_optimizer_kinds.STEPS)


def test_norms_count_the_shards_of_one_host(ranks):
    norms = {use: {"use": use} for use in tuple(test_reads_of_gradients.NORMS)[::2]}
    check_all(run(ranks, test_reads_of_gradients.train, norms), bitwise=False)


def test_an_owner_on_each_host_updates_whole_parameters(ranks):
    cases = {kind: {"kind": kind} for kind in ("muon", "lamb")}
    results = run(ranks, test_whole_parameters.train, cases, test_whole_parameters.NAMED)
    for name in cases:
        counters = [
            result["counters"] for result in same_bits([result[name] for result in results])
        ]
        for host in (counters[:2], counters[2:]):
            owned = [counted["params_owned"] for counted in host]
            assert max(owned) < sum(owned) <= host[0]["params_updated"], owned


@pytest.mark.parametrize("rank", [0, 3])
def test_one_rank_reads_the_state_from_its_host_alone(ranks, rank):
    replies = ranks(4)(on_hosts, HOSTS, called, rank)
    result = replies[rank][0]
    compare(result["stock"], result["patched"], reordered=result["reordered"]).assert_equal()
    assert [ranks for _, ranks in replies] == [
        {rank ^ 1} if own == rank else set() for own in range(4)
    ]


def called(rank: int) -> tuple[dict[str, Any], set[int]]:
    """Return what a rank that reads the state finds, and the ranks that it calls for that."""
    call, found = PeerRpc.call, set()

    def note(self: Any, topic: str, arguments: Any, ranks: Any = None, *rest: Any) -> Any:
        if "entries" in arguments:
            found.update(range(4) if ranks is None else ranks)
        return call(self, topic, arguments, ranks, *rest)

    with mock.patch.object(PeerRpc, "call", note):
        return all_cases(test_state.one_rank, {"": {"reader": "state_dict", "rank": rank}})[
            ""
        ], found


def state_per_rank(shard_over: str) -> tuple[float, list[str], dict[str, Any]]:
    """Train, save and load under another layout; return the share of the state of a rank, the report and the state."""
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS, list_remarks

    with apply({"shard_over": shard_over}):
        model = ddp(test_loops.net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            model(data(step, 5, 6)).square().mean().backward()
            optimizer.step()
        share = COUNTERS.state_bytes / COUNTERS.state_bytes_whole
        saved = {key: value.clone() for key, value in optimizer.state_dict()["state"][0].items()}
        report = list(list_remarks())
        return share, report, saved


def layouts() -> list[Any]:
    return [state_per_rank("world"), state_per_rank("auto")]


def test_state_is_kept_once_per_host_and_the_report_has_what_that_saves(ranks):
    for world, host in ranks(4)(on_hosts, HOSTS, layouts):
        assert world[0] < 0.35 < 0.45 < host[0] < 0.6
        assert "each of 2 hosts keeps all state, over its 2 ranks (shard_over=auto)" in host[1][-1]
        assert "MiB less over the link of each host" in host[1][-1]
        compare(world[2], host[2]).assert_equal()


def refused(hosts: tuple[int, ...]) -> list[str]:
    with fake_hosts(hosts):
        try:
            state_per_rank("host")
            named = "no error"
        except ValueError as error:
            named = str(error)
        return [named, *state_per_rank("auto")[1][-1:]]


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ((0, 0, 1), "hosts have different numbers of ranks (2 on host0, 1 on host1)"),
        ((0, 1, 2), "each host has one rank, which would keep all state"),
    ],
)
def test_hosts_that_cannot_keep_all_state_are_an_error_if_named_and_a_remark_otherwise(
    ranks, hosts, reason
):
    for error, remark in ranks(3)(refused, hosts):
        assert reason in error
        assert "OVPATCH_DIST_OPTIMIZER_SHARD_OVER=auto" in error
        assert reason in remark
        assert "MiB of parameters over the link of each host (shard=auto" in remark


def scaled() -> Any:
    return all_cases(
        test_scaler.train, {"": {"unscale": True, "clip": True, "fused": False, "culprit": 3}}
    )


def test_an_infinity_on_one_host_skips_the_step_of_all(ranks):
    results = ranks(4)(on_hosts, HOSTS, scaled)
    for result in results:
        case = result[""]
        compare(case["stock"], case["patched"], reordered=case["reordered"]).assert_equal()


def turned_off() -> bool:
    """Turn the features off after a few steps: state is gathered within each host, and training continues."""
    with ovpatch.applied(
        "ddp", "dist_optimizer", options={"dist_optimizer": {"min_param_numel": 8}}
    ):
        model = ddp(test_loops.net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            model(data(step, 5, 6)).square().mean().backward()
            optimizer.step()
    optimizer.zero_grad()
    model(data(9, 5, 6)).square().mean().backward()
    optimizer.step()
    return all(
        type(value) is torch.Tensor
        for state in optimizer.state.values()
        for value in state.values()
    )


def test_state_becomes_full_on_every_host(ranks):
    assert ranks(4)(on_hosts, HOSTS, turned_off) == [True] * 4
