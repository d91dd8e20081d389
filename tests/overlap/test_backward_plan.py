"""The table of backward plans, over all facts."""

from __future__ import annotations

import itertools

import pytest

from ovpatch.overlap.data_parallel.backward_plan import (
    BackwardKind,
    BackwardPlan,
    Expected,
    PlanFacts,
    plan_backward,
)

ALL_FACTS = [
    PlanFacts(*values) for values in itertools.product([False, True], repeat=len(PlanFacts._fields))
]
ALL_PLANS = [
    (facts, copies, plan_backward(facts, copies)) for facts in ALL_FACTS for copies in (False, True)
]

KINDS = [
    (PlanFacts(), BackwardKind.FIRST),
    (PlanFacts(has_order=True, has_reduced=True), BackwardKind.PLAIN),
    (PlanFacts(finds_unused=True), BackwardKind.SEARCHED),
    (PlanFacts(finds_unused=True, has_order=True), BackwardKind.SEARCHED),
    (PlanFacts(is_static=True, finds_unused=True), BackwardKind.STATIC_FIRST),
    (PlanFacts(is_static=True, has_learned=True), BackwardKind.STATIC),
    (PlanFacts(has_experts=True), BackwardKind.EXPERTS),
]


@pytest.mark.parametrize(("facts", "kind"), KINDS, ids=str)
def test_the_facts_decide_the_kind(facts, kind):
    assert plan_backward(facts, False).kind is kind


def test_a_warm_step_finds_its_plan_in_a_cache():
    assert plan_backward(PlanFacts(has_order=True), False) is plan_backward(
        PlanFacts(has_order=True), False
    )


def overlaps(facts: PlanFacts, plan: BackwardPlan) -> bool:
    """Return whether buckets start early, which they do unless ranks may reduce different parameters."""
    if plan.kind is BackwardKind.STATIC_FIRST or not facts.should_overlap:
        return False
    return plan.kind is not BackwardKind.SEARCHED or facts.has_reduced


def test_each_plan_follows_the_table():
    expected = {BackwardKind.STATIC_FIRST: Expected.UNKNOWN, BackwardKind.STATIC: Expected.LEARNED}
    for facts, copies, plan in ALL_PLANS:
        kind, where = plan.kind, (facts, copies)
        assert plan.copies_grads is copies, where
        assert plan.expected is expected.get(kind, Expected.SINGLE), where
        assert plan.searches_unused is (kind is BackwardKind.SEARCHED), where
        assert plan.skips_frozen is (kind is BackwardKind.EXPERTS), where
        assert plan.shares_usage is (kind in (BackwardKind.SEARCHED, BackwardKind.STATIC_FIRST)), (
            where
        )
        assert plan.overlaps is overlaps(facts, plan), where
        assert plan.ends_with_task is (kind in (BackwardKind.SEARCHED, BackwardKind.EXPERTS)), where
        may_record = kind in (BackwardKind.FIRST, BackwardKind.STATIC)
        assert plan.records_order is (may_record and not facts.has_order), where
        does_more = copies or plan.records_order or plan.shares_usage
        assert plan.only_counts is not does_more, where
