"""Votes of ranks in steps: equal and different tags, and ranks that leave."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ovpatch_plugins.dist_optimizer.agreement import StepVotes, Vote


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
    """Rank 0 leaves one vote, and takes part in the next one."""
    return [vote(1, leaves=dist.get_rank() == 0), vote(2)]


def left_by_one_of_those_that_differ(vote: Callable[..., bool]) -> list[bool]:
    """Rank 0 leaves the vote in which its peers find that they differ; none of them votes again."""
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
    assert ranks(3)(results, True) == [expected] * 3
    assert ranks(3)(results, False) == [expected] * 3
