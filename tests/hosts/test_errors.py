"""Errors that name ranks name their hosts as well, if there are several."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ovpatch.overlap.comm import consensus
from ovpatch.overlap.comm.consensus import (
    RankMismatchError,
    check_consistent,
    describe_missing,
    known_hosts,
    name_ranks,
)
from ovpatch.overlap.comm.hosts import find_host_layout
from ovpatch.overlap.peer_rpc.client import Endpoint, Endpoints
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc, Shutdown
from tests.support.hosts import fake_hosts

ROOT = Path(__file__).parents[2]


def test_ranks_are_listed_with_the_hosts_that_are_known():
    hosts = {1: "a", 2: "a", 5: "b"}
    assert name_ranks([1, 2, 5, 6], hosts) == "1, 2 (host a), 5 (host b), 6"
    assert name_ranks([1, 2], {}) == "1, 2"
    assert name_ranks(list(range(20)), {}) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_a_missing_rank_has_one_text_whatever_is_known_of_it():
    hosts = {1: "a", 5: "b"}
    for missing, text in (
        ([], "not all ranks reached a step within 0.5 s"),
        ([2], "rank 2 did not reach a step within 0.5 s"),
        ([1, 2, 5], "rank 1 (host a), 2, 5 (host b) did not reach a step within 0.5 s"),
    ):
        assert describe_missing("a step", 0.5, missing, hosts) == text
    assert describe_missing("a step", 300.0, [1]) == "rank 1 did not reach a step within 300 s"


def test_a_rank_that_does_not_finish_is_named_with_its_host(caplog):
    hosts, server = {4: "a", 7: "b"}, mock.Mock(last_call_time=0.0)
    shutdown = Shutdown(1, [4, 7], mock.Mock(), server, hosts, lambda: [0])
    with mock.patch("ovpatch.overlap.peer_rpc.rpc.Request") as request:
        request.return_value.list_pending.return_value = {0: "does not reply"}
        request.return_value.deadline = 0.0
        shutdown.wait(60.0)
    assert "rank 4 (host a) did not reach its end within 60 s" in caplog.text


def agree(group, terms, **options):
    try:
        return check_consistent(group, "topic", terms, **options)
    except RankMismatchError as error:
        return str(error)


def call_peer(group):
    try:
        PeerRpc.for_group(group).call("unknown", {}, timeout_s=0.1)  # expires
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
        texts.append(agree(group, {}, timeout_s=0.1) if rank == 0 else "")  # expires
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
        assert voted.endswith(f"optimizer 0 on {first} but optimizer 1 on {second}")
        assert f": {second if rank == 0 else first} cannot be reached: Connection" in unreachable
        assert ("has a route from here" in unreachable) == (hosts[1] == 1)
        if missing:
            assert f"got no reply from {second} within" in missing
            # A busy machine may not even reply that it does not serve the topic.
            assert f": {second} " in silent
    assert results[0][2]


def miss_all_peers(present):
    """Return the error of one rank that is alone at the first agreement of a group."""
    group = dist.new_group()
    with fake_hosts((0, 0, 1)), mock.patch.object(consensus, "_REPORT_S", 0.0):
        text = agree(group, {}, timeout_s=0.1) if dist.get_rank() == present else ""  # expires
    dist.barrier()
    return text


def test_a_rank_that_misses_the_first_agreement_is_named_with_its_host_if_a_rank_of_that_host_replies(
    ranks,
):
    assert "no reply from rank 1 (host host0), 2 within" in ranks(3)(miss_all_peers, 0)[0]
    assert "no reply from rank 0 (host host0) within" in ranks(3)(miss_all_peers, 1)[1]
    assert "no reply from rank 0 within" in ranks(3)(miss_all_peers, 2)[2]


def exchange_hosts():
    """Return the identifiers that this rank has sent by rounds, the hosts, and the layouts of two groups."""
    sent = []
    first, second = dist.new_group(), dist.new_group()
    with (
        fake_hosts((0, 1)),
        mock.patch.object(consensus, "identify_host", side_effect=consensus.identify_host) as own,
    ):
        for agreement in range(3):
            assert agree(first, {"": agreement}) == ""
            sent.append(own.call_count)
        layouts = [find_host_layout(group) for group in (first, second)]
        sent.append(own.call_count)
    return sent, dict(known_hosts(first)), [layout.ranks for layout in layouts]


def test_ranks_exchange_their_hosts_once(ranks):
    # The second group has not agreed on anything before.
    expected = [1, 1, 1, 2], {0: "host0", 1: "host1"}, [((0,), (1,))] * 2
    assert ranks(2)(exchange_hosts) == [expected] * 2


# --- all errors about peers ---

# Functions that name ranks with their hosts.
NAMED = ("name_ranks(", "name_group_ranks(")
# The packages whose errors are about peers, and messages that are stock PyTorch's.
ABOUT_PEERS = ("ovpatch/overlap/comm", "ovpatch/overlap/peer_rpc", "plugins/ovpatch_plugins")
STOCK_TEXT = "did not receive grad for rank "
# The report of a rank is about the rank itself.
UNNAMED = ("/pipeline_report.py",)


def find_unnamed_ranks(source: str) -> list[int]:
    """Return the lines of messages in which the word "rank" comes before a number without its host."""
    found = []
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and re.search(r"\brank (?:%[sd]|\{\})", node.value):
            found.append(node.lineno)
        if not isinstance(node, ast.JoinedStr):
            continue
        for text, value in zip(node.values, node.values[1:], strict=False):
            is_rank = isinstance(text, ast.Constant) and str(text.value).endswith("rank ")
            if is_rank and isinstance(value, ast.FormattedValue) and STOCK_TEXT not in text.value:
                name = ast.unparse(value.value)
                # A rank that is in no group has no peers.
                if not name.startswith((*NAMED, "missing", "dist.get_rank()")):
                    found.append(node.lineno)
    return found


def test_no_error_about_peers_names_a_rank_without_its_host():
    assert find_unnamed_ranks('f"on rank {rank} of"') == [1]
    assert not find_unnamed_ranks('f"on rank {name_ranks([rank], hosts)} of"')
    assert find_unnamed_ranks('log("rank %s is late", rank)') == [1]
    assert find_unnamed_ranks('"rank {} is late".format(rank)') == [1]
    files = [path for folder in ABOUT_PEERS for path in (ROOT / folder).rglob("*.py")]
    lines = {
        str(path.relative_to(ROOT)): find_unnamed_ranks(path.read_text())
        for path in files
        if not any(part in str(path) for part in UNNAMED)
    }
    assert not {name: numbers for name, numbers in lines.items() if numbers}
