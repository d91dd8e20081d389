"""Agreement between ranks by the store."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ovpatch.overlap.comm.consensus import RankMismatchError, check_consistent
from tests.overlap.test_collectives import group


def agree_many(times: int) -> list[str]:
    return [check_consistent(group(), "topic", {"a": 1, "round": i}) for i in range(times)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equal_terms_agree_in_every_round(ranks, world):
    assert ranks(world)(agree_many, 3) == [[""] * 3] * world


def test_groups_of_different_sizes_share_a_store(ranks):
    for world in (3, 2, 3, 2):
        assert ranks(world)(agree_many, 1) == [[""]] * world


def differing(terms: list[dict[str, Any]]) -> str:
    try:
        return check_consistent(group(), "topic", terms[dist.get_rank()])
    except RankMismatchError as error:
        return str(error)


def test_a_difference_names_the_term_the_values_and_the_ranks(ranks):
    terms = [{"size": 1, "same": 0}, {"size": 2, "same": 0}, {"size": 1, "same": 0, "extra": True}]
    for text in ranks(3)(differing, terms):
        assert "size is 1 on rank 0, 2 but 2 on rank 1" in text
        assert "extra is null on rank 0, 1 but true on rank 2" in text
        assert "same is" not in text
        assert text.endswith("the same arguments of ovpatch.apply().")


def objecting() -> str:
    return check_consistent(
        group(), "topic", {}, objection="" if dist.get_rank() == 0 else "no room"
    )


def test_objections_reach_every_rank(ranks):
    assert ranks(3)(objecting) == ["no room (rank 1, 2)"] * 3


def absent(who: int) -> tuple[str, float]:
    # A rank that begins late would be missing as well.
    dist.barrier()
    begin = time.monotonic()
    try:
        text = (
            "absent"
            if dist.get_rank() == who
            else check_consistent(group(), "topic", {}, timeout_s=1.0)  # expires
        )
    except RankMismatchError as error:
        text = str(error)
    dist.barrier()
    return text, time.monotonic() - begin


@pytest.mark.parametrize("who", [0, 1])
def test_a_missing_rank_is_named_in_time(ranks, who):
    for rank, (text, seconds) in enumerate(ranks(3)(absent, who)):
        if rank != who:
            # On a busy machine, the other peer may be late as well.
            assert re.search(rf"no reply from rank (\d, )*{who}(, \d)* within 1 s", text)
            assert seconds < 30


def in_subgroups() -> str:
    pair, rest = dist.new_group([0, 2]), dist.new_group([1])
    try:
        text = check_consistent(
            rest if dist.get_rank() == 1 else pair, "topic", {"rank": dist.get_rank()}
        )
    except RankMismatchError as error:
        text = str(error)
    dist.barrier()
    return text


def test_subgroups_name_global_ranks(ranks):
    first, alone, second = ranks(3)(in_subgroups)
    assert alone == ""
    assert first == second
    assert "rank is 0 on rank 0 but 2 on rank 2" in first


def in_other_orders() -> list[str]:
    """Agree in two groups, on two threads of rank 0 and sequentially on rank 1."""
    first, second = dist.new_group(), dist.new_group()
    if dist.get_rank() == 1:
        return [check_consistent(pair, "topic", {}, timeout_s=100) for pair in (second, first)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(check_consistent, first, "topic", {}, timeout_s=100)
        time.sleep(0.1)
        return [check_consistent(second, "topic", {}, timeout_s=100), waiting.result()]


def test_a_thread_that_waits_does_not_block_another_thread(ranks):
    assert ranks(2)(in_other_orders) == [["", ""]] * 2
