"""Hosts meet at the gate, as often as they come, and nobody goes on before the last is there."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from ovpatch.overlap import gate
from ovpatch.overlap.gate import Gate
from ovpatch.overlap.peers import Peers
from tests.plugins.dist_optimizer import test_loop_styles, test_reads_of_gradients
from tests.plugins.dist_optimizer.checks import all_cases, check_all


def meetings(late: int) -> list[float]:
    group = dist.group.WORLD
    found = []
    for number in range(6):
        if dist.get_rank() == late and number in (2, 4):
            time.sleep(0.2)
        arrived = time.time()
        Gate.of(group).meet()
        found.append((arrived, time.time()))
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("late", [0, 1])
def test_nobody_leaves_before_the_last_has_come(ranks, world, late):
    results = ranks(world)(meetings, late)
    for meeting in zip(*results, strict=True):
        assert min(left for _, left in meeting) >= max(came for came, _ in meeting)
    assert max(came for came, _ in (result[2] for result in results)) > results[1 - late][2][0] + 0.1, "nobody was late"


def told(flags: list[list[bool]]) -> list[bool]:
    return [Gate.of(dist.group.WORLD).meet(mine[dist.get_rank()]) for mine in flags]


def test_all_ranks_hear_what_any_of_them_tells(ranks):
    flags = [[False] * 3, [True, False, False], [False, False, True], [True] * 3, [False] * 3]
    assert ranks(3)(told, flags) == 3 * [[False, True, True, True, False]]


def hurried(meetings: int) -> list[bool]:
    """Nobody waits between meetings, so the fastest raises its next flag while others still look for the last."""
    one, rank = Gate.of(dist.group.WORLD), dist.get_rank()
    return [one.meet(number % 4 == rank) for number in range(meetings)]


def test_a_flag_is_of_its_meeting(ranks):
    assert ranks(3)(hurried, 400) == 3 * [[number % 4 < 3 for number in range(400)]]


def keys_left() -> int:
    store = dist.distributed_c10d._get_default_store()
    one = Gate.of(dist.group.WORLD)
    one.meet()
    before = store.num_keys()
    for number in range(50):
        one.meet()
        one.meet(number % 3 == dist.get_rank())
    dist.barrier()
    return store.num_keys() - before


def test_it_leaves_no_keys_behind(ranks):
    assert max(ranks(2)(keys_left)) < 20


def groups() -> None:
    """Gates of several groups, and of one that is made anew, know nothing of each other."""
    pair = dist.new_group([0, 1])
    for _ in range(3):
        Gate.of(dist.group.WORLD).meet()
    if dist.get_rank() < 2:
        Gate.of(pair).meet()
    Gate.of(dist.group.WORLD).meet()
    assert Gate.of(dist.group.WORLD)._key() != (Gate.of(pair)._key() if dist.get_rank() < 2 else "")
    Peers.of(dist.group.WORLD).drain()


def test_groups_have_gates_of_their_own(ranks):
    ranks(3)(groups)


def absent() -> str:
    one = Gate.of(dist.group.WORLD)
    one.meet()
    one._timeout_s = 0.3
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as raised:
            one.meet()
        text = str(raised.value)
    dist.barrier()
    return text


def test_a_rank_that_does_not_come_is_an_error(ranks):
    text, _ = ranks(2)(absent)
    assert "not all ranks came" in text
    assert "within 0.3 s" in text


def gated(loop: Any, cases: Any, steps: int) -> Any:
    """Run training loops on the CPU with gates, as on a device that hosts run ahead of."""
    met = []
    kept, meet = gate.needed, Gate.meet
    gate.needed = lambda device: True
    Gate.meet = lambda self: (met.append(1), meet(self))
    try:
        results = all_cases(loop, cases)
    finally:
        gate.needed, Gate.meet = kept, meet
    assert len(met) > 2 * steps * len(cases), "hosts did not meet"
    return results


def test_training_with_gates(ranks):
    styles = {style: {"style": style} for style in test_loop_styles.STYLES}
    check_all(ranks(2)(gated, test_loop_styles.train, styles, 8))
    uses = {use: {"use": use} for use in ("rank 0 logs", "rank 0 logs one", "clip by value")}
    check_all(ranks(2)(gated, test_reads_of_gradients.train, uses, 6))
