"""Random combinations of habits: some of them run, and those that fail get smaller."""

from __future__ import annotations

import pytest

from tests.habits.fuzz import choose_compatible, fuzz, make_cell, shrink
from tests.habits.loop import Loop, call_in_thread, combine, family_of, load_habits
from tests.habits.matrix import Cell, run_cells
from tests.support.rarely import ALL_CASES


def test_random_cells_are_as_in_stock_pytorch(ranks):
    found = fuzz(ranks, range(200 if ALL_CASES else 8))
    assert not found.failures, "\n\n".join(found.failures)
    assert found.tallies["all"].reduced > 3
    assert found.tallies["all"].sharded > 2


#: Cells that differed before a defect was mended.
FOUND = (
    "wrap_after_deletion+freeze_for_a_while/ddp+dist_optimizer/w2/101533",
    "sparse_embedding+embedding+same_gradient_for_two/ddp+dist_optimizer/w2/993296",
    "weight_norm+adagrad+over_a_mesh+early_optimizer+state_at_the_end/ddp+dist_optimizer/w2/5",
    "fused+scaler+keep_gradients/ddp+dist_optimizer/w2/1",
    "fused+scaler+gradients_by_numpy+freeze_with_its_gradient/ddp+dist_optimizer/w2/651405",
)


def test_cells_that_random_runs_found_are_as_in_stock_pytorch(ranks):
    outcomes = run_cells(ranks, [Cell.parse(text) for text in FOUND])
    assert [outcome.difference for outcome in outcomes] == [""] * len(FOUND)
    assert all(outcome.counters["steps"] for outcome in outcomes)


def test_recomputed_blocks_with_state_are_as_in_stock_pytorch(ranks):
    stateful = [
        name
        for name, loop in load_habits().items()
        if family_of(loop) == "stateful" and name != "recomputed"
    ]
    cells = [Cell((name, "recomputed"), seed=seed) for name in stateful for seed in (0, 1)]
    for cell, outcome in zip(cells, run_cells(ranks, cells), strict=True):
        assert outcome.difference == "", cell
        assert outcome.error == "", cell
        assert outcome.counters["recomputations"], cell


def test_a_failing_cell_gets_smaller():
    cell = make_cell(3, 2, "clamp")
    assert len(cell.habits) > 1
    small = shrink(cell, lambda smaller: "clamp" in smaller.habits)
    assert (small.habits, small.seed) == (("clamp",), cell.seed)


def test_a_word_without_a_habit_is_an_error():
    with pytest.raises(ValueError, match="no habit has 'wings' in its name"):
        make_cell(1, 2, "wings")


def test_all_habits_are_drawn_and_combinations_can_be_inherited():
    drawn = set[str]()
    for seed in range(1000):
        cell = make_cell(seed, 2)
        combine(cell.habits)
        drawn |= set(cell.habits)
    assert drawn == set(load_habits())


def test_habits_that_exclude_each_other_are_not_combined():
    assert [*choose_compatible(["views", "swap_gradients", "swap_gradients", "noise"])] == [
        "views",
        "noise",
    ]
    # A habit that derives from one that is excluded is excluded as well.
    assert [*choose_compatible(["penalty", "unused_at_times"])] == ["penalty"]
    # Both replace the start of a step.
    assert [*choose_compatible(["never_zero", "zero_by_hand"])] == ["never_zero"]


def test_a_habit_that_adds_to_a_place_is_not_skipped_by_one_that_replaces_it():
    for names in (["zero_by_hand", "hooks_come_and_go"], ["hooks_come_and_go", "zero_by_hand"]):
        loop = combine(choose_compatible(names))
        assert [base.__name__ for base in loop.__mro__ if "start" in vars(base)] == [
            "hooks_come_and_go",
            "zero_by_hand",
            Loop.__name__,
        ]


def test_a_choice_does_not_depend_on_the_other_habits():
    cell = make_cell(5, 2, "clip_norm")

    def choices(names):
        loop = combine(names)(lambda *_: None, None, seed=cell.seed)
        return [
            value
            for name, value in sorted(
                (n, getattr(loop, n)) for n in dir(loop) if "_clip_norm__" in n
            )
        ]

    assert choices(cell.habits) == choices(["clip_norm"])


def test_what_a_thread_raises_is_not_lost():
    with pytest.raises(ZeroDivisionError):
        call_in_thread(lambda: 1 / 0)
