"""Errors that name ranks name their hosts as well, if there are several."""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.comm.consensus import RankMismatchError, check_consistent, name_ranks
from ovpatch.overlap.comm.hosts import find_host_layout
from ovpatch.overlap.peer_rpc.client import Endpoint, Endpoints
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc
from tests.support.hosts import fake_hosts

ROOT = Path(__file__).parents[2]


def test_ranks_are_listed_with_the_hosts_that_are_known():
    hosts = {1: "a", 2: "a", 5: "b"}
    assert name_ranks([1, 2, 5, 6], hosts) == "1, 2 (host a), 5 (host b), 6"
    assert name_ranks([1, 2], {}) == "1, 2"
    assert name_ranks(list(range(20)), {}) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def agree(group, terms, **options):
    try:
        return check_consistent(group, "topic", terms, **options)
    except RankMismatchError as error:
        return str(error)


def call_peer(group):
    try:
        PeerRpc.for_group(group).call("unknown", {}, timeout_s=0.1)
    except PeerError as error:
        return str(error)
    return "no error"


def step_another_optimizer(group):
    from ovpatch_plugins.dist_optimizer.agreement import StepVotes, Vote

    votes = StepVotes.for_group(group, torch.device("cpu"))
    votes._judge(group, {rank: Vote(tag=rank, text=f"optimizer {rank}") for rank in range(2)})
    return votes.reason


def all_errors(hosts):
    with fake_hosts(hosts):
        group = dist.group.WORLD
        rank = dist.get_rank()
        texts = [
            agree(group, {"size": rank}),
            agree(group, {}, objection="" if rank == 0 else "no room"),
        ]
        find_host_layout(group)
        dist.barrier()
        # Rank 1 does not take part.
        texts.append(agree(group, {}, timeout_s=0.1) if rank == 0 else "")
        dist.barrier()
        PeerRpc.for_group(group)
        dist.barrier()
        texts += [call_peer(group) if rank == 0 else "", step_another_optimizer(group)]
        dist.barrier()
        # No server listens at this port.
        nowhere = Endpoint("00", "elsewhere", ["127.0.0.1"], 1)
        PeerRpc.for_group(group)._endpoints.verified.clear()
        with mock.patch.object(Endpoints, "look_up", return_value=nowhere):
            texts.append(call_peer(group))
        dist.barrier()
        return texts


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0)])
def test_errors_name_the_host_of_a_rank_if_there_are_several(ranks, hosts):
    first, second = [f"rank {rank}" + f" (host host{rank})" * hosts[1] for rank in range(2)]
    results = ranks(2)(all_errors, hosts)
    for rank, (different, objection, missing, silent, voted, unreachable) in enumerate(results):
        assert f"size is 0 on {first} but 1 on {second}." in different
        assert objection == f"no room ({second})"
        assert f"optimizer 0 on {first} but optimizer 1 on {second}." in voted
        assert f": {second if rank == 0 else first} cannot be reached: Connection" in unreachable
        assert ("has a route from here" in unreachable) == (hosts[1] == 1)
        if missing:
            assert f"got no reply from {second} within" in missing
            assert f": {second} does not serve this topic." in silent
    assert results[0][2]


# --- all errors about peers ---

# The packages whose errors are about peers, and messages that are stock PyTorch's.
ABOUT_PEERS = ("ovpatch/overlap/comm", "ovpatch/overlap/peer_rpc", "plugins/ovpatch_plugins")
STOCK_TEXT = "did not receive grad for rank "
# Orders and experts are within hosts, or of no process yet.
UNNAMED = ("/pipeline/", "/pipe_experts/")


def find_unnamed_ranks(source: str) -> list[int]:
    """Return the lines of messages in which the word "rank" comes before a number without its host."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for text, value in zip(node.values, node.values[1:], strict=False):
            is_rank = isinstance(text, ast.Constant) and str(text.value).endswith("rank ")
            if is_rank and isinstance(value, ast.FormattedValue) and STOCK_TEXT not in text.value:
                name = ast.unparse(value.value)
                if not name.startswith(("name_ranks(", "missing")):
                    found.append(node.lineno)
    return found


def test_no_error_about_peers_names_a_rank_without_its_host():
    assert find_unnamed_ranks('f"on rank {rank} of"') == [1]
    assert not find_unnamed_ranks('f"on rank {name_ranks([rank], hosts)} of"')
    files = [path for folder in ABOUT_PEERS for path in (ROOT / folder).rglob("*.py")]
    lines = {
        str(path.relative_to(ROOT)): find_unnamed_ranks(path.read_text())
        for path in files
        if not any(part in str(path) for part in UNNAMED)
    }
    assert not {name: numbers for name, numbers in lines.items() if numbers}
