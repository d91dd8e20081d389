from __future__ import annotations

from dataclasses import replace

import pytest

from ovpatch.overlap.pipelining.ir import Action, Kind, ScheduleError
from ovpatch.overlap.pipelining.orders import build_order, build_placement, split_backwards
from ovpatch.planner.simulator import Costs, Footprint, peak_memory, simulate
from tests.plugins.pipeline.torch_orders import torch_order

F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW
SIZES = ((4, 8), (4, 12), (4, 32), (8, 12), (8, 32))
# One H200 takes 5.98, 7.32 and 6.25 ms for F, B and W; the published table is of a machine whose microbatch takes
# 21.6 ms.
SCALE = 21.6 / (5.98 + 7.32 + 6.25)

# Excess over m(F+B+W) in percent, of chained steps and, if it differs, of steps that end with a barrier of all ranks.
EXCESS = {
    "gpipe": ("37.9", "25.2", "9.5", "58.9", "22.1"),
    "1f1b": ("38.4", "25.9", "10.1", "59.6", "22.9"),
    "split 1f1b": ("25.9", "17.2", "6.5", "40.2", "15.1"),
    "zb-h1": ("14.4", "9.6", "3.6", "22.4", "8.4"),
    "zb-h2": ("2.9/11.6", "2.0/7.8", "0.7/2.9", "12.2/18.1", "1.7/6.8"),
    "ZBVZeroBubble": ("3.0/7.8", "2.0/5.2", "0.7/1.9", "12.5/12.8", "1.8/4.6"),
    "DualPipeV": ("7.5", "5.0", "1.9", None, "4.8"),
    "Interleaved1F1B": ("19.6", "13.0", "4.9", "29.7", "11.4"),
    "InterleavedZeroBubble": ("7.7", "5.1", "1.9", "11.6", "4.5"),
}
# Peak activations relative to those of 1F1B's first rank.
MEMORY = {
    "gpipe": (2, 3, 8, 1.5, 4),
    "1f1b": (1, 1, 1, 1, 1),
    "zb-h1": (1, 1, 1, 1, 1),
    "zb-h2": (1.75, 1.75, 1.75, 1.5, 1.88),
    "ZBVZeroBubble": (1, 1, 1, 1, 1),
    "DualPipeV": (1.13, 1.13, 1.13, None, 1.06),
    "Interleaved1F1B": (1.38, 1.38, 1.38, 1.5, 1.44),
    "InterleavedZeroBubble": (1, 1, 1, 1.25, 1),
}
CELLS = [
    (name, *size, cell, MEMORY[name][index] if name in MEMORY else None)
    for name, row in EXCESS.items()
    for index, (size, cell) in enumerate(zip(SIZES, row, strict=True))
    if cell is not None
]


def costs_of_h200(ranks, chunks=1):
    return Costs.uniform(
        ranks * chunks,
        forward=5.98 * SCALE / chunks,
        backward=7.32 * SCALE / chunks,
        weight=6.25 * SCALE / chunks,
        send=0.1,
    )


def named(name, ranks, microbatches):
    if name == "split 1f1b":
        return (
            split_backwards(build_order("1f1b", ranks=ranks, microbatches=microbatches)),
            range(ranks),
            1,
        )
    if name.islower():
        return build_order(name, ranks=ranks, microbatches=microbatches), range(ranks), 1
    return *torch_order(name, ranks=ranks, microbatches=microbatches), 2


@pytest.mark.parametrize(("name", "ranks", "microbatches", "cell", "memory"), CELLS)
def test_published_steps_are_reproduced(name, ranks, microbatches, cell, memory):
    schedule, placement, chunks = named(name, ranks, microbatches)
    costs = costs_of_h200(ranks, chunks)
    chained, _, meeting = cell.partition("/")
    steps = simulate(schedule, placement, costs)
    assert 100 * steps.excess == pytest.approx(float(chained), abs=0.11)
    meet = simulate(schedule, placement, costs, chained=False)
    assert 100 * meet.excess == pytest.approx(float(meeting or chained), abs=0.11)
    assert meet.limit == steps.limit == pytest.approx(microbatches * 21.6)
    if memory is not None:
        assert max(steps.peak_memory) / ranks == pytest.approx(memory, abs=0.01)


# --- steps that can be calculated by hand ---


def test_one_rank_never_waits():
    result = simulate(build_order("zb-h1", ranks=1, microbatches=5), (0,), Costs((1,), (2,), (3,)))
    assert result.step == result.limit == 30
    assert result.idle == (0,)
    assert result.bubble == result.excess == 0


def test_1f1b_of_two_ranks_in_numbers():
    schedule = build_order("1f1b", ranks=2, microbatches=2)
    result = simulate(
        schedule, (0, 1), Costs.uniform(2, forward=1, backward=1, weight=1, send=0.5), chained=False
    )
    assert [(str(a), start, end) for a, start, end in result.timeline[0]] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0BW0", 5, 7),
        ("0BW1", 8, 10),
    ]
    assert [(start, end) for _, start, end in result.timeline[1]] == [
        (1.5, 2.5),
        (2.5, 4.5),
        (4.5, 5.5),
        (5.5, 7.5),
    ]
    assert result.step == 10
    assert result.busy == (6, 6)
    assert result.bubble == pytest.approx(0.4)
    assert result.excess == pytest.approx(4 / 6)


def test_a_split_backward_sends_before_its_w():
    costs = Costs.uniform(2, forward=1, backward=1, weight=1)
    full = build_order("1f1b", ranks=2, microbatches=2)
    assert simulate(full, (0, 1), costs, chained=False).step == 9
    assert simulate(split_backwards(full), (0, 1), costs, chained=False).step == 8


def test_steps_chain_without_a_barrier():
    """Rank 1 begins late and ends late: its next step starts while it would wait for the barrier."""
    orders = [
        [Action(F, 0, 0), Action(B, 0, 0), Action(W, 0, 0)],
        [Action(F, 1, 0), Action(B, 1, 0), Action(W, 1, 0)],
    ]
    costs = Costs((1, 1), (1, 1), (1, 4))
    assert simulate(orders, (0, 1), costs, chained=False).step == 7
    chained = simulate(orders, (0, 1), costs)
    assert chained.step == chained.limit == 6
    assert min(start for line in chained.timeline for _, start, _ in line) == 0


def test_a_slow_stage_is_the_limit():
    costs = Costs((1, 1, 2), (1, 1, 2), (1, 1, 2))
    result = simulate(build_order("zb-h2", ranks=3, microbatches=8), (0, 1, 2), costs)
    assert result.limit == 48
    assert result.busy == (24, 24, 48)
    assert result.idle[:2] == (result.step - 24, result.step - 24)


def test_costs_of_edges():
    schedule = build_order("1f1b", ranks=2, microbatches=1)
    costs = Costs((1, 1), (1, 1), (1, 1), {(0, 1): 10})
    assert simulate(schedule, (0, 1), costs, chained=False).step == 1 + 10 + 1 + 2 + 2
    assert costs.send_time(1, 0) == costs.send_time(1, 1) == 0


def forward_starts(orders, costs, slots=None):
    line = simulate(orders, (0, 1), costs, slots=slots, chained=False).timeline[1]
    return [start for action, start, _ in line if action.kind is F]


def test_overhead_of_a_rank_is_spread_over_its_computations():
    orders = build_order("1f1b", ranks=2, microbatches=4)
    costs = Costs.uniform(2, forward=1, backward=1, weight=1)
    plain = simulate(orders, (0, 1), costs, chained=False)
    slower = simulate(orders, (0, 1), replace(costs, overhead=(0.0, 0.8)), chained=False)
    assert slower.busy == plain.busy
    # A tenth follows each of the eight computations of rank 1; only the next step waits for the last one.
    assert slower.step == pytest.approx(plain.step + 0.7)


def test_an_edge_carries_one_message_at_a_time():
    orders = build_order("1f1b", ranks=2, microbatches=3)
    orders = [build_order("gpipe", ranks=2, microbatches=3)[0], orders[1]]
    assert forward_starts(orders, Costs((1, 1), (1, 0), (0, 0), 3)) == [4, 7, 10]
    assert forward_starts(orders, Costs((4, 1), (1, 0), (0, 0), 3)) == [7, 11, 15]


def test_a_message_waits_for_a_slot_until_an_earlier_one_is_read():
    first = build_order("gpipe", ranks=2, microbatches=3)[0]
    second = [
        Action(kind, 1, index)
        for kind, index in ((F, 0), (BW, 0), (F, 1), (F, 2), (BW, 1), (BW, 2))
    ]
    costs = Costs((1, 1), (1, 10), (0, 0), 3)
    assert forward_starts([first, second], costs) == [4, 15, 16]
    assert forward_starts([first, second], costs, slots=2) == [4, 15, 16]
    assert forward_starts([first, second], costs, slots=1) == [4, 15, 18]


def test_a_schedule_that_deadlocks_is_refused():
    orders = [
        [Action(F, 0, 0), Action(BW, 0, 0), Action(F, 0, 1), Action(BW, 0, 1)],
        [Action(F, 1, 0), Action(F, 1, 1), Action(BW, 1, 0), Action(BW, 1, 1)],
    ]
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(orders, (0, 1), Costs.uniform(2, forward=1, backward=1, weight=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs((1, 1), (1,), (1, 1)), "Give each stage one of each"),
        (lambda: Costs((1,), (-1,), (1,)), "at least 0"),
    ],
)
def test_costs_that_cannot_be(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


# --- memory ---


def test_memory_has_activations_until_b_and_separately_the_inputs_of_w():
    schedule = build_order("zb-h1", ranks=4, microbatches=8)
    costs = Costs.uniform(4, forward=1, backward=1, weight=1)
    result = simulate(schedule, range(4), costs)
    assert result.peak_memory == (4, 4, 4, 4)
    assert result.peak_activations == (4, 3, 2, 1)
    assert result.peak_deferred == (1, 2, 3, 4)


def test_checkpointed_stages_hold_more_after_b_than_after_f():
    order = build_order("zb-h1", ranks=2, microbatches=3)[1]
    assert peak_memory(order, Footprint((1.0, 1.0), (14.0, 14.0))) == 28
    assert peak_memory(split_backwards([order])[0], Footprint((1.0, 1.0), (0.0, 0.0))) == 1
    full = build_order("1f1b", ranks=2, microbatches=3)[0]
    assert peak_memory(full, Footprint((3.0, 1.0), (0.5, 0.5))) == 6


def test_stages_of_one_rank_share_its_unit_of_memory():
    footprint = Footprint.from_placement(build_placement("vee", ranks=2, chunks=2), deferred=0.5)
    assert footprint.activations == (0.5,) * 4
    assert footprint.deferred == (0.25,) * 4
