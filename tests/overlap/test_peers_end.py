"""Ranks that exit at different times, or with an error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import scripts
from tests.support.environment import free_port

SCRIPT = Path(__file__).with_name("leaving_ranks.py")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> scripts.Result:
    argv = [sys.executable, SCRIPT, str(free_port()), tmp_path_factory.mktemp("stores")]
    return scripts.run(argv, timeout=100).check()


@pytest.fixture
def ends(done) -> dict[str, list[tuple[int, float]]]:
    """Return the exit code of each rank, and its time in s, by case."""
    return json.loads(done.stdout)


def test_only_the_rank_that_crashes_prints_at_exit(done):
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "the one that crashes" in done.stderr


@pytest.mark.parametrize("case", ["last_is_0", "last_is_2", "two_groups", "children"])
def test_a_finished_rank_still_serves_the_last_rank(ends, case):
    assert [code for code, _ in ends[case]] == [0, 0, 0]


def test_a_rank_serves_its_peers_before_the_group_is_destroyed(ends):
    assert [code for code, _ in ends["before_destruction"]] == [0, 0, 0]


def test_so_it_does_if_the_group_was_destroyed_before(ends):
    assert [code for code, _ in ends["destroyed_first"]] == [0, 0, 0]
    # It does not wait once nothing is left to read.
    assert max(seconds for _, seconds in ends["destroyed_first"]) < 30


# The limit is far below the five minutes that a rank waits for a live peer, and far above the usual time.
@pytest.mark.parametrize(
    ("case", "codes"),
    [("one_raises", [0, 1, 0]), ("one_is_killed", [0, -9, 0]), ("first_is_gone", [0, 0, 0])],
)
def test_no_rank_waits_for_a_dead_rank(ends, case, codes):
    assert [code for code, _ in ends[case]] == codes
    assert max(seconds for _, seconds in ends[case]) < 30


def test_no_rank_waits_if_no_call_was_made(ends):
    first, sleeper, last = (seconds for _, seconds in ends["never_used"])
    assert max(first, last) < sleeper
