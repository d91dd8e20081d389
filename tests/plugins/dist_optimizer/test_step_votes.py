"""Votes of ranks in steps: equal and different tags, and ranks that leave."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from ovpatch_plugins.dist_optimizer import agreement
from ovpatch_plugins.dist_optimizer.agreement import _REASON_MISSING, _REASON_ORDER, StepVotes, Vote
from tests.support import signs
from tests.test_error_texts import has_remedy


def voter(*, is_connected: bool) -> Callable[..., bool]:
    """Return a function that casts a vote of this rank in a new group.

    Args:
        is_connected: Whether votes are all-reduces. Otherwise ranks call each other until they first agree.
    """
    votes = StepVotes.for_group(dist.new_group(), torch.device("cpu"))
    if is_connected:
        assert votes.agree(Vote(7, "first step"), waits=True)
        # A peer still calls for the first vote of this rank, which may end the group below.
        dist.barrier()

    def vote(tag: int, *, leaves: bool = False) -> bool:
        return votes.agree(Vote(tag, outcome=int(leaves)), waits=True)

    return vote


def agreed(vote: Callable[..., bool]) -> list[bool]:
    return [vote(tag) for tag in (1, 2)]


def differed(vote: Callable[..., bool]) -> list[bool]:
    return [vote(dist.get_rank()), vote(5)]


def left_by_one(vote: Callable[..., bool]) -> list[bool]:
    """Leave one vote on rank 0, and take part in the next one."""
    return [vote(1, leaves=dist.get_rank() == 0), vote(2)]


def left_by_one_of_those_that_differ(vote: Callable[..., bool]) -> list[bool]:
    """Leave a vote on rank 0 in which its peers find that they differ. No rank votes again."""
    return [vote(dist.get_rank(), leaves=dist.get_rank() == 0), vote(5)]


CASES = (agreed, differed, left_by_one, left_by_one_of_those_that_differ)


def results(is_connected: bool) -> list[list[bool]]:
    found = []
    for case in CASES:
        found.append(case(voter(is_connected=is_connected)))
        dist.barrier()
    return found


def test_ranks_that_vote(ranks):
    expected = [[True, True], [False, False], [False, True], [False, False]]
    for is_connected in (True, False):
        assert ranks(3)(results, is_connected, timeout=30) == [expected] * 3


def end(is_connected: bool, differs: bool) -> tuple[bool, str]:
    """Vote once after rank 2 has promised to end that vote; return whether ranks agree, and the reason against it."""
    votes = StepVotes.for_group(dist.new_group(), torch.device("cpu"))
    number = 1
    if is_connected:
        assert votes.agree(Vote(7, "first step"), waits=True)
        number = 2
    dist.barrier()
    rank = dist.get_rank()
    if rank == 2:
        assert votes._reply({"end": number})[0] == {"is promised": True}
    return votes.agree(Vote(rank if differs else 5, "the step"), waits=True), votes.reason


def differ_at_first() -> str:
    """Return the reason after ranks have voted on the first steps of optimizers that differ."""
    votes = StepVotes.for_group(dist.new_group(), torch.device("cpu"))
    rank = dist.get_rank()
    assert not votes.agree(Vote(rank, f"optimizer {rank}"), waits=True)
    return votes.reason


def test_the_reason_names_the_optimizers_and_has_no_remedy(ranks):
    text = "ranks step different optimizers, as scripts that shard the work themselves do: "
    text += "optimizer 0 on rank 0 but optimizer 1 on rank 1"
    assert ranks(2)(differ_at_first) == [text] * 2


def lose_peer() -> tuple[str, list[str]]:
    """Vote on rank 0 while a peer cannot reply; return the reason, and the warnings of rank 0."""
    votes = StepVotes.for_group(dist.new_group(), torch.device("cpu"))
    dist.barrier()
    if dist.get_rank():
        with mock.patch.object(StepVotes, "_reply_vote", side_effect=ValueError("no vote")):
            signs.await_rank(0, "voted")
        return "", []
    with mock.patch.object(agreement._log, "warning") as warning:
        assert not votes.agree(Vote(1, "first step"), waits=True)
    signs.give("voted")
    return votes.reason, [str(call.args[1]) for call in warning.mock_calls]


def test_a_vote_without_a_reply_warns_with_the_remedy_and_gives_the_fact_as_the_reason(ranks):
    (reason, warnings), _ = ranks(2)(lose_peer)
    assert reason == "not all of rank 1 replied in a vote"
    (warning,) = warnings
    assert "ValueError: no vote" in warning
    assert has_remedy(warning)


def reasons() -> dict[tuple[bool, bool], tuple[bool, str]]:
    found = {}
    for is_connected in (False, True):
        for differs in (False, True):
            found[is_connected, differs] = end(is_connected, differs)
            dist.barrier()
    return found


def test_ranks_report_that_one_was_missing(ranks):
    for rank, found in enumerate(ranks(3)(reasons)):
        for (is_connected, differs), result in found.items():
            # Votes by all-reduce have the tags of all ranks, and a call to the rank that ends has none.
            is_order = is_connected and differs and rank < 2
            assert result == (False, _REASON_ORDER if is_order else _REASON_MISSING), (
                rank,
                is_connected,
                differs,
            )
