"""Votes of ranks in steps: equal and different subjects, and ranks that leave."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.step_flags import StepVotes


def vote() -> StepVotes:
    return StepVotes.for_group(dist.new_group(), torch.device("cpu"))


def agreed() -> list[bool]:
    votes = vote()
    return [votes.agree(tag) for tag in (1, 2)]


def differed() -> list[bool]:
    votes = vote()
    return [votes.agree(dist.get_rank()), votes.agree(5)]


def left_by_one() -> list[bool]:
    """Rank 0 leaves one vote, without a subject, and takes part in the next one."""
    votes, leaves = vote(), dist.get_rank() == 0
    return [votes.agree(None if leaves else 1, leaves=leaves), votes.agree(2)]


def left_by_one_of_those_that_differ() -> list[bool]:
    """Rank 0 leaves the vote in which its peers find that they differ; none of them votes again."""
    votes, rank = vote(), dist.get_rank()
    return [votes.agree(rank, leaves=rank == 0), votes.agree(5)]


def results() -> list[list[bool]]:
    return [agreed(), differed(), left_by_one(), left_by_one_of_those_that_differ()]


def test_ranks_that_vote(ranks):
    expected = [[True, True], [False, False], [False, True], [False, False]]
    assert ranks(3)(results) == [expected] * 3
