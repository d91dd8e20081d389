"""Random programs by tools/fuzz.py: some of them run, and the tool notices what it is there to notice."""

from __future__ import annotations

import random

import pytest

from tests.support.rarely import ALL_CASES
from tools import fuzz
from tools.fuzz_programs import PRELUDE, Program, make_program, read_kinds

KINDS = read_kinds()


def test_random_programs_are_as_under_stock(ranks):
    tallies, _, failures = fuzz.fuzz(fuzz.Runner(ranks, 2), iter(range(200 if ALL_CASES else 8)))
    assert not failures, "\n\n".join(failures)
    assert tallies["all"].reduced > 3
    assert tallies["all"].sharded > 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see('value', hasattr(ovpatch, 'report'))", "0 became 1"),
        ("if hasattr(ovpatch, 'report'): raise ValueError", "ValueError"),
        ("if hasattr(ovpatch, 'report'): see('more', 1)", "extra: stock has no such value"),
        ("if hasattr(ovpatch, 'report') and dist.get_rank(): import os; os._exit(3)", "exit code 3"),
    ],
)
def test_a_difference_is_found(ranks, text, said):
    assert said in fuzz.Runner(ranks, 2).run_text(text).failure


def test_what_stock_raises_is_no_failure(ranks):
    result = fuzz.Runner(ranks, 2).run_text("raise ValueError('by both')")
    assert (result.failure, result.error) == ("", "ValueError: by both")


def test_a_failing_program_is_made_smaller():
    program = make_program(KINDS, random.Random(3), "clamp")
    small = fuzz.shrink(program, lambda one: "habit clamp" in one.names and one.steps > 1)
    assert (small.names, small.steps) == (("habit clamp",), 2)
    assert len(program.kinds) > 1


def test_each_kind_makes_a_program():
    names = {kind.name for kind in KINDS} | {"find unused"}
    for kind in KINDS:
        for seed in range(3):
            program = Program((kind.chosen(random.Random(seed)),), 3)
            compile(PRELUDE + program.text(), kind.name, "exec")
        assert kind.without <= names, kind.name
    assert len({(kind.family, kind.name) for kind in KINDS}) == len(KINDS)
