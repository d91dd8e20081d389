"""Some loops of each kind on four ranks. The other files test all forms of them, on two and three ranks."""

from __future__ import annotations

from tests.plugins.dist_optimizer import (
    test_loop_styles,
    test_loops,
    test_optimizer_kinds,
    test_reads_of_gradients,
    test_state,
    test_whole_parameters,
)
from tests.plugins.dist_optimizer.checks import all_cases, check_all
from tests.plugins.dist_optimizer.test_whole_parameters import check_each
from tests.support.equality import compare

STYLES = (
    "zero_before_forward, None: True",
    "accumulated, quiet: True, None: False",
    "skipped",
    "closure",
)
NORMS = tuple(test_reads_of_gradients.NORMS)[:2]


def test_loops_and_optimizers(ranks):
    check_all(
        ranks(4)(all_cases, test_loops.train, {"": {"optimizer": "adamw", "read": True}}),
        steps=8,
        by_parts=False,
    )
    check_all(
        ranks(4)(all_cases, test_loop_styles.train, {style: {"style": style} for style in STYLES})
    )
    kinds = {kind: {"kind": kind} for kind in ("sgd, nesterov", "adam, lr tensor")}
    check_all(
        ranks(4)(all_cases, test_optimizer_kinds.train, kinds), steps=test_optimizer_kinds.STEPS
    )
    check_all(
        ranks(4)(all_cases, test_reads_of_gradients.train, {use: {"use": use} for use in NORMS}),
        bitwise=False,
    )


def test_full_parameters_and_state(ranks):
    check_each(
        ranks(4)(
            all_cases,
            test_whole_parameters.train,
            {"": {"kind": "muon"}},
            options=test_whole_parameters.NAMED,
        )
    )
    results = ranks(4)(all_cases, test_state.one_rank, {"": {"reader": "state_dict", "rank": 0}})
    result = results[0][""]
    compare(result["stock"], result["patched"], reordered=result["reordered"]).assert_equal()
    readers = [case[""]["counters"]["state_reads"] > 0 for case in results]
    assert readers == [True, False, False, False]
