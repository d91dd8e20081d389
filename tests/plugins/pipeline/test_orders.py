from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from ovpatch.overlap.pipelining.ir import Action, Kind, ScheduleError, list_messages
from ovpatch.overlap.pipelining.order_rules import check_schedule, count_slots
from ovpatch.overlap.pipelining.order_table import ORDERS, TORCH_ORDERS, FixedOrder
from ovpatch.overlap.pipelining.orders import (
    build_order,
    build_placement,
    build_vee_blocks,
    build_vee_order,
    convert_torch_order,
    split_backwards,
)
from ovpatch.planner.simulator import Costs, simulate
from tests.plugins.pipeline.torch_orders import PLACEMENT_OF, BareStage, torch_object, torch_order
from tests.support import patience
from tests.support.environment import clean

SIZES = [(1, 1), (1, 3), (2, 1), (2, 2), (4, 3), (4, 4), (4, 12), (8, 5), (8, 32)]
F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def text(order):
    return " ".join(f"{action.kind.value}{action.microbatch}" for action in order)


def peak(order):
    held = highest = 0
    for action in order:
        held += {F: 1, W: -1, BW: -1}.get(action.kind, 0)
        highest = max(highest, held)
    return highest


# --- fixed orders ---


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ORDERS)
def test_fixed_orders_keep_the_rules_also_with_few_microbatches(name, ranks, microbatches):
    check_schedule(build_order(name, ranks=ranks, microbatches=microbatches), range(ranks))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 12), (8, 32)])
@pytest.mark.parametrize("torch_class", TORCH_ORDERS)
def test_orders_of_a_class_of_torch_are_those_of_the_class(torch_class, ranks, microbatches):
    made = [
        getattr(torch_schedules, torch_class)(
            BareStage(rank, stages=ranks, ranks=ranks, rank=rank),
            microbatches,
            loss_fn=lambda output, target: output,
        )
        for rank in range(ranks)
    ]
    theirs = convert_torch_order(made[0]._get_pipeline_order())
    ours = build_order(TORCH_ORDERS[torch_class], ranks=ranks, microbatches=microbatches)
    assert ours[:-1] == theirs[:-1]
    # torch numbers the Fs of 1F1B's last rank from 1 here, although its runtime starts at 0.
    assert [action.kind for action in ours[-1]] == [action.kind for action in theirs[-1]]


def test_zero_bubble_orders_are_written_out():
    first, *_, last = build_order("zb-h1", ranks=3, microbatches=4)
    assert text(first) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert text(last) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    first, *_, last = build_order("zb-h2", ranks=3, microbatches=6)
    assert text(first) == "F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5"
    assert text(last) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_orders_hold_as_many_activations_as_the_paper_says(ranks):
    for name, most in (("1f1b", ranks), ("zb-h1", ranks), ("zb-h2", 2 * ranks - 1), ("gpipe", 32)):
        orders = build_order(name, ranks=ranks, microbatches=32)
        assert max(map(peak, orders)) == most


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (
            lambda: build_order("zb-h3", ranks=2, microbatches=2),
            f"Choose one of {', '.join(ORDERS)}",
        ),
        (lambda: build_order("1f1b", ranks=2, microbatches=0), "1 or more"),
        (lambda: build_placement("ring", ranks=2), "straight, loop, vee"),
        (lambda: build_placement("straight", ranks=2, chunks=2), "loop or vee"),
        (lambda: build_placement("loop", ranks=0), "1 or more"),
    ],
)
def test_errors_end_with_a_remedy(call, remedy):
    with pytest.raises(ScheduleError, match=remedy):
        call()


def test_placements():
    assert build_placement("straight", ranks=3) == (0, 1, 2)
    assert build_placement("loop", ranks=3, chunks=2) == (0, 1, 2, 0, 1, 2)
    assert build_placement("vee", ranks=3, chunks=2) == (0, 1, 2, 2, 1, 0)
    assert build_placement("vee", ranks=2, chunks=3) == (0, 1, 1, 0, 0, 1)


# --- torch's multi-stage classes ---


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PLACEMENT_OF)
def test_orders_of_torch_are_converted_and_keep_the_rules(name, ranks):
    schedule, placement = torch_order(name, ranks=ranks, microbatches=2 * ranks)
    check_schedule(schedule, placement, stock=schedule, keep_forward_order=True)
    assert (
        sum(action.kind is F for order in schedule for action in order)
        == len(placement) * 2 * ranks
    )
    kinds = {action.kind for order in schedule for action in order}
    assert (W in kinds) == (name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 7), (4, 8), (4, 12), (8, 32)])
def test_the_order_of_a_vee_is_the_order_of_torch(ranks, microbatches):
    theirs, _ = torch_order("ZBVZeroBubble", ranks=ranks, microbatches=microbatches)
    assert build_vee_order(ranks=ranks, microbatches=microbatches) == theirs


@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (3, 9), (6, 20)])
def test_orders_of_a_vee_keep_the_rules_and_hold_what_their_names_say(ranks, microbatches):
    placement = build_placement("vee", ranks=ranks, chunks=2)
    full = build_vee_order(ranks=ranks, microbatches=microbatches)
    half = build_vee_blocks("v-half", ranks=ranks, microbatches=microbatches)
    least = build_vee_blocks("v-min", ranks=ranks, microbatches=microbatches)
    for schedule in (full, half, least):
        check_schedule(schedule, placement)
    if ranks >= 4 and microbatches >= 2 * ranks:
        peaks = [max(map(peak, schedule)) for schedule in (full, half, least)]
        assert peaks[0] == 2 * ranks
        assert peaks[2] < peaks[1] < peaks[0]
    with pytest.raises(ScheduleError, match="v-half, v-min"):
        build_vee_blocks("v-none", ranks=2, microbatches=2)


def test_a_lowered_order_has_the_same_computations():
    made = torch_object("ZBVZeroBubble", ranks=2, microbatches=4)
    assert convert_torch_order(made.pipeline_order_with_comms) == convert_torch_order(
        made.pipeline_order
    )


def test_dualpipev_overlaps_are_taken_apart():
    made = torch_object("DualPipeV", ranks=4, microbatches=8)
    assert any(action and action.sub_actions for action in made.pipeline_order[0])
    schedule = convert_torch_order(
        {0: [None, _Action(-1, _ComputationType.OVERLAP_F_B, None, _parts())]}
    )
    assert schedule == [[Action(F, 0, 3), Action(BW, 1, 2)]]


def _parts():
    return _Action(0, _ComputationType.FORWARD, 3), _Action(1, _ComputationType.FULL_BACKWARD, 2)


def test_unknown_parts_of_an_order_are_named():
    class Strange:
        computation_type, stage_index, microbatch_index, sub_actions = "SHUFFLE", 1, 2, None

        def __str__(self):
            return "1SHUFFLE2"

    with pytest.raises(
        ScheduleError,
        match=r"rank 0: action 1SHUFFLE2 of kind SHUFFLE is unknown.*OVPATCH_PIPELINE=0",
    ):
        convert_torch_order({0: [Strange()]})
    with pytest.raises(ScheduleError, match="rank 0 is missing"):
        convert_torch_order({1: []})


def test_full_backwards_are_split():
    schedule = build_order("1f1b", ranks=2, microbatches=3)
    split = split_backwards(schedule)
    assert text(split[1]) == "F0 B0 W0 F1 B1 W1 F2 B2 W2"


# --- rules ---


def two_ranks():
    return [list(order) for order in build_order("zb-h1", ranks=2, microbatches=3)]


def swap(order, first, second):
    order[first], order[second] = order[second], order[first]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda s: s.pop(), "has 1 ranks and the placement 2"),
        (lambda s: s[0].remove(Action(W, 0, 1)), "W of stage 0 and microbatch 1 is there 0 times"),
        (lambda s: s[1].append(Action(BW, 1, 2)), "B of stage 1 and microbatch 2 is there 2 times"),
        (lambda s: s[0].append(Action(F, 1, 0)), "is of stage 1, which rank 1 holds"),
        (lambda s: s[0].append(Action(F, 2, 0)), "is of stage 2, which does not exist"),
        (lambda s: swap(s[1], 0, 1), "1B0 runs before 1F0"),
        (lambda s: swap(s[0], 2, 3), "0W0 runs before 0B0"),
        (lambda s: swap(s[0], 0, 1), "F number 0 of stage 0 is of microbatch 1, not 0"),
        (lambda s: swap(s[1], -1, -2), "W number 1 of stage 1 is of microbatch 2, not 1"),
    ],
)
def test_the_rule_that_is_broken_is_named(fault, message):
    schedule = two_ranks()
    check_schedule(schedule, (0, 1))
    fault(schedule)
    with pytest.raises(ScheduleError, match=message):
        check_schedule(schedule, (0, 1))


def test_descending_microbatches_are_right_only_if_torch_has_them():
    schedule, placement = torch_order("LoopedBFS", ranks=2, microbatches=3)
    check_schedule(schedule, placement, stock=schedule)
    with pytest.raises(ScheduleError, match="B number 0 of stage 2 is of microbatch 2, not 0"):
        check_schedule(schedule, placement)


def test_fs_of_a_rank_keep_their_sequence_if_random_numbers_are_drawn():
    stock, placement = torch_order("ZBVZeroBubble", ranks=2, microbatches=4)
    changed = [list(order) for order in stock]
    fs = [index for index, action in enumerate(changed[1]) if action.kind is F]
    pairs = itertools.pairwise(fs)
    first, second = next(
        (i, j) for i, j in pairs if changed[1][i].stage == 2 and changed[1][j].stage == 1
    )
    changed[1].insert(first, changed[1].pop(second))
    check_schedule(changed, placement, stock=stock)
    with pytest.raises(ScheduleError, match=r"rank 1: .* runs where stock runs .* random numbers"):
        check_schedule(changed, placement, stock=stock, keep_forward_order=True)
    with pytest.raises(ScheduleError, match="Give the stock schedule"):
        check_schedule(changed, placement, keep_forward_order=True)


def test_a_deadlock_names_the_waiting_actions():
    orders = [
        [Action(F, 0, 0), Action(BW, 0, 0), Action(F, 0, 1), Action(BW, 0, 1)],
        [Action(F, 1, 0), Action(F, 1, 1), Action(BW, 1, 0), Action(BW, 1, 1)],
    ]
    with pytest.raises(
        ScheduleError, match="rank 0: deadlock, 0BW0 waits for 1B0, and 1B0 waits as well"
    ):
        check_schedule(orders, (0, 1))


def test_slots_that_are_too_few_are_a_deadlock():
    """On a V the edge from rank 1 to rank 0 has Fs of the way up and Bs of the way down, read in another sequence."""
    schedule, placement = torch_order("ZBVZeroBubble", ranks=2, microbatches=4)
    check_schedule(schedule, placement, slots=8)
    edge = list_messages(schedule, placement)[1, 0]
    assert {message.kind for message in edge} == {F, B}
    orders = [
        [Action(F, 0, 0), Action(F, 0, 1), Action(F, 2, 1), Action(F, 2, 0)],
        [Action(F, 1, 0), Action(F, 1, 1)],
    ]
    orders[0] += [Action(BW, 2, 0), Action(BW, 2, 1), Action(BW, 0, 0), Action(BW, 0, 1)]
    orders[1] += [Action(BW, 1, 0), Action(BW, 1, 1)]
    stock = [list(orders[0]), orders[1]]
    check_schedule(orders, (0, 1, 0), stock=stock, slots=2)
    with pytest.raises(ScheduleError, match="rank 0: deadlock, 2F1 waits for 1F1, and all 1 slots"):
        check_schedule(orders, (0, 1, 0), stock=stock, slots=1)
    with pytest.raises(ScheduleError, match="0 slots"):
        check_schedule(orders, (0, 1, 0), slots=0)


def test_slots_that_suffice_for_ranks_that_stop_at_each_message():
    for name in ORDERS:
        assert count_slots(build_order(name, ranks=4, microbatches=8), range(4)) == 1
    found = {
        name: count_slots(*torch_order(name, ranks=4, microbatches=8)) for name in PLACEMENT_OF
    }
    assert found["Interleaved1F1B"] == 1
    assert {slots for name, slots in found.items() if name != "Interleaved1F1B"} == {2}
    assert count_slots(*torch_order("InterleavedZeroBubble", ranks=8, microbatches=16)) == 4

    # Rank 0 sends four Fs before it reads one.
    orders = [
        [
            Action(kind, stage, number)
            for kind, stage in ((F, 0), (F, 2), (BW, 2), (BW, 0))
            for number in range(4)
        ],
        [Action(kind, 1, number) for kind in (F, BW) for number in range(4)],
    ]
    assert count_slots(orders, (0, 1, 0)) == 2, (
        "with one, 0F3 waits for rank 1, which waits to send 1F1"
    )


# --- a new order ---

NEW_ROW = """
import json, sys
from ovpatch.overlap.pipelining import order_table

lag = (lambda stage: stage) if sys.argv[1] == "split" else None
order_table.ORDERS["new"] = order_table.FixedOrder(
    lambda stage, ranks, microbatches: ranks - stage + 1, count_lag=lag, is_experimental=True, help="takes much memory."
)
from ovpatch.cli.pipeline_command import parse_question
from ovpatch.planner import solver, what_if
from ovpatch_plugins.pipeline.options import OPTIONS

solver.solve.__kwdefaults__["effort"] = 1000
question = parse_question("p=3,m=6,memory=2x,placement=straight")
print(json.dumps([what_if.plan(question, lambda done: None)["rows"], vars(OPTIONS[0])], default=str))
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("backwards", ["full", "split"])
def test_a_row_of_the_table_is_an_order_of_the_option_and_of_the_planner(backwards, monkeypatch):
    done = subprocess.run(
        [sys.executable, "-c", NEW_ROW, backwards],
        env=clean(os.environ),
        capture_output=True,
        text=True,
        timeout=patience.scale(120),
    )
    assert done.returncode == 0, done.stderr
    result, imports_torch = done.stdout.splitlines()
    assert imports_torch == "False"
    rows, option = json.loads(result)
    assert option["name"] == "schedule"
    assert option["choices"][-1] == "new"
    assert option["experimental"][-1] == "new"
    assert "new takes much memory." in option["help"]

    lag = (lambda stage: stage) if backwards == "split" else None
    new = FixedOrder(lambda stage, ranks, microbatches: ranks - stage + 1, count_lag=lag)
    monkeypatch.setitem(ORDERS, "new", new)
    schedule = build_order("new", ranks=3, microbatches=6)
    costs = Costs.uniform(3, forward=1, backward=1.22, weight=1.04, send=0.02)
    row = next(row for row in rows if row["order"] == "new")
    variables = {"OVPATCH_PIPELINE": "1", "OVPATCH_PIPELINE_SCHEDULE": "new"}
    assert row["setting"] == variables
    # Torch lacks the order, so the engine runs it and sends input gradients early.
    own = simulate(split_backwards(schedule), range(3), costs)
    assert row["step"] * 6 * (1 + 1.22 + 1.04) == pytest.approx(own.step)
    if backwards == "full":
        assert own.step < simulate(schedule, range(3), costs).step
