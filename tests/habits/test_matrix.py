"""Each habit alone, under each set of features: a cell that differs from stock PyTorch prints its command."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.habits.expected import EXPECTED, Expected
from tests.habits.loop import FAMILIES, HABITS, Loop, habit, load_habits
from tests.habits.matrix import Cell, list_cells, run_cells, split_rows
from tests.support.rarely import ALL_CASES

BOTH = ("ddp", "dist_optimizer")

#: The rows, and of how many cells a row runs one unless ALL_CASES is set.
ROWS = {(BOTH, 2): 1, (BOTH, 3): 6, (("ddp",), 2): 3} | ({(("ddp",), 3): 1} if ALL_CASES else {})

#: The families whose rows on two ranks have run, and the declarations that any cell needed.
_finished = set[str]()
_needed = set[Expected]()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("features", "world"),
    ROWS,
    ids=lambda value: value if isinstance(value, int) else "+".join(value),
)
def test_cells(ranks, family, features, world):
    cells = list_cells(features, world, family)[:: 1 if ALL_CASES else ROWS[features, world]]
    failures = []
    for row in split_rows(cells):
        for cell, outcome in zip(row, run_cells(ranks, row), strict=True):
            _needed.update(outcome.needed)
            if outcome.difference:
                failures.append(f"python -m tests.habits {cell}\n{outcome.difference}")
    assert not failures, "\n\n".join(failures)
    if (features, world) == (BOTH, 2):
        _finished.add(family)


def test_each_declaration_is_needed():
    if _finished != set(FAMILIES):
        pytest.skip("not all families have run on two ranks")
    unused = [
        declaration
        for declaration in EXPECTED
        if not declaration.is_rare and declaration not in _needed
    ]
    assert not unused, (
        f"no cell needs these declarations; remove them from tests/habits/expected.py: {unused}"
    )


def test_declarations_and_exclusions_name_habits():
    habits = load_habits()
    named = {name for declaration in EXPECTED for name in declaration.habits} | {
        n for loop in habits.values() for n in loop.without
    }
    assert named <= habits.keys()
    assert all(loop.__doc__ and loop.__doc__ != Loop.__doc__ for loop in habits.values())


def test_two_habits_do_not_have_one_name():
    name = next(iter(load_habits()))
    with pytest.raises(ValueError, match=f"two habits are called {name}"):
        habit()(type(name, (Loop,), {}))
    assert HABITS[name].__module__ != __name__


class differs(Loop):
    """The patched run shows another value."""

    switches = True

    def last(self):
        self.see("value", hasattr(self.package, "report"))


class raises(Loop):
    """The patched run raises."""

    switches = True

    def ready(self):
        if hasattr(self.package, "report"):
            raise ValueError("by ovpatch alone")


class shows_more(Loop):
    """The patched run shows one value more."""

    switches = True

    def last(self):
        if hasattr(self.package, "report"):
            self.see("more", 1)


class idles(Loop):
    """Nothing is reduced."""

    def backward(self, step):
        pass


class both_raise(Loop):
    """Both runs raise."""

    def backward(self, step):
        raise ValueError("by both")


def test_a_difference_is_found(ranks):
    loops = {
        differs: "0 became 1",
        raises: "by ovpatch alone",
        shows_more: "extra: stock has no such value",
    }
    loops |= {idles: "ddp did nothing", both_raise: "stock PyTorch raises ValueError: by both"}
    cells = [Cell((f"{__name__}:{loop.__name__}",)) for loop in loops]
    for outcome, said in zip(run_cells(ranks, cells), loops.values(), strict=True):
        assert said in outcome.difference


class dies(Loop):
    """A rank of the patched run dies."""

    switches = True

    def last(self):
        if hasattr(self.package, "report") and torch.distributed.get_rank():
            os._exit(3)


def test_a_rank_that_dies_is_that_of_its_cell(ranks):
    outcomes = run_cells(ranks, [Cell(("accumulate",)), Cell((f"{__name__}:dies",))])
    assert not outcomes[0].difference
    assert "exit code 3" in outcomes[1].difference


_runs: list[str] = []


class dies_the_second_time(Loop):
    """A rank dies in its second run, whoever computes it."""

    switches = True

    def last(self):
        _runs.append("run")
        if len(_runs) > 1:
            os.kill(os.getpid(), signal.SIGABRT)


def test_a_cell_that_dies_in_stock_as_well_is_no_failure(ranks):
    (outcome,) = run_cells(ranks, [Cell((f"{__name__}:dies_the_second_time",))])
    assert (outcome.difference, outcome.error) == ("", "stock PyTorch hangs or dies")


def test_what_stock_raises_is_no_failure_of_a_combination(ranks):
    outcome = run_cells(ranks, [Cell(("accumulate", f"{__name__}:both_raise"))])[0]
    assert (outcome.difference, outcome.error) == ("", "ValueError: by both")


def test_the_text_of_a_cell_names_it():
    for cell in (
        Cell(("a", "b"), ("ddp",), 3, 7),
        Cell((), BOTH, 2),
        Cell(("a",), has_delays=True),
    ):
        assert Cell.parse(str(cell)) == cell
    assert str(Cell(("a", "b"), ("ddp",), 3, 7)) == "a+b/ddp/w3/7"
    with pytest.raises(ValueError, match="is no cell; write"):
        Cell.parse("a/ddp/3")
