"""When a difference is claimed, on times that were made up."""

from __future__ import annotations

import random

import pytest

from ovpatch.insight.bench.analysis import (
    FASTER,
    SAME,
    SLOWER,
    UNCLEAR,
    compute_quantile,
    compute_spread,
    format_judgement,
    judge_runs,
)
from ovpatch.insight.bench.rounds import max_over_ranks


def runs(chance, rounds, *, ms=100.0, between=0.01, within=0.02, steps=20):
    """Runs whose medians differ by ``between`` and whose steps differ by ``within``."""

    def run():
        level = ms * (1 + chance.gauss(0, between))
        return [level * (1 + chance.gauss(0, within)) for _ in range(steps)]

    return [run() for _ in range(rounds)]


def claims(rounds, cases, **second):
    """The part of cases in which a difference is claimed."""
    chance = random.Random(rounds)
    verdicts = [
        judge_runs(runs(chance, rounds), runs(chance, rounds, **second)).verdict
        for _ in range(cases)
    ]
    return sum(verdict != SAME for verdict in verdicts) / cases


@pytest.fixture
def quick(monkeypatch):
    """Make hundreds of judgments fast."""
    # Fewer resamples only change the last digits of an interval.
    monkeypatch.setattr("ovpatch.insight.bench.analysis._RESAMPLES", 40)


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_what_differs_by_chance_alone_is_hardly_ever_claimed(quick, rounds):
    # One case in twenty, and a margin for the scatter of 150 cases.
    assert claims(rounds, 150) <= 0.09


@pytest.mark.parametrize("rounds", [2, 3])
def test_the_test_above_would_see_a_rule_that_claims_too_much(quick, monkeypatch, rounds):
    monkeypatch.setattr("ovpatch.insight.bench.analysis._COUNTS", {2: (1.0, 1.0), 3: (0.5, 0.5)})
    assert claims(rounds, 150) > 0.12


def test_five_per_cent_are_found_in_noise_of_one(quick):
    assert claims(3, 100, ms=95.0) > 0.85


def test_a_shift_is_told_with_its_sign_and_size():
    chance = random.Random(0)
    stock, patched = runs(chance, 3, between=0.001), runs(chance, 3, ms=95.0, between=0.001)
    judgement = judge_runs(stock, patched)
    assert judgement.verdict == FASTER
    assert judgement.ratio == pytest.approx(100 / 95, rel=0.02)
    assert min(judgement.pairs) <= judgement.ratio <= max(judgement.pairs)
    back = judge_runs(patched, stock)
    assert (back.verdict, back.ratio) == (SLOWER, pytest.approx(95 / 100, rel=0.02))


def test_identical_runs_are_no_difference():
    run = [[10.0, 11.0, 9.0, 10.0, 10.5]] * 3
    judgement = judge_runs(run, run)
    assert (judgement.verdict, judgement.ratio) == (SAME, 1.0)


def test_one_pair_of_another_sign_is_not_claimed_away():
    steady = [[100.0] * 10] * 3
    patched = [[90.0] * 10, [90.0] * 10, [101.0] * 10]
    assert judge_runs(steady, patched).verdict == SAME
    assert judge_runs(steady, patched[:1] * 3).verdict == FASTER
    stock, patched = [110.0, 110.0, 110.0, 100.0], [99.5, 99.5, 99.5, 101.0]
    judgement = judge_runs([[time] * 9 for time in stock], [[time] * 9 for time in patched])
    assert judgement.ratio - 1 > judgement.threshold
    assert judgement.verdict == SAME


def test_one_run_that_is_far_off_is_noise_even_where_all_signs_agree():
    stock = [[100.0] * 10, [100.0] * 10, [130.0] * 10]
    patched = [[95.0] * 10] * 3
    judgement = judge_runs(stock, patched)
    assert all(pair > 1 for pair in judgement.pairs)
    assert (judgement.verdict, judgement.threshold) == (UNCLEAR, pytest.approx(1.25 * 0.3))


def test_a_drift_that_both_share_hides_nothing():
    levels, gains = [100.0, 110.0, 121.0], [1.05, 1.06, 1.05]
    judgement = judge_runs(
        [[level] * 9 for level in levels],
        [[level / gain] * 9 for level, gain in zip(levels, gains, strict=True)],
    )
    assert judgement.pairs == [pytest.approx(gain) for gain in gains]
    assert (judgement.verdict, judgement.threshold) == (FASTER, pytest.approx(0.02))


def test_two_rounds_ask_for_more_than_three():
    two = judge_runs([[100.0] * 9, [102.0] * 9], [[96.0] * 9, [98.0] * 9])
    three = judge_runs(
        [[100.0] * 9, [102.0] * 9, [101.0] * 9], [[96.0] * 9, [98.0] * 9, [97.0] * 9]
    )
    assert (two.verdict, three.verdict) == (SAME, FASTER)


def test_steps_that_scatter_are_noise_though_the_medians_agree():
    wide = [60.0, 140.0, 70.0, 130.0, 100.0, 65.0, 135.0, 75.0, 125.0, 101.0]
    judgement = judge_runs([wide, wide, wide], [[time - 4 for time in wide]] * 3)
    assert judgement.ratio > 1.03
    assert (judgement.verdict, judgement.threshold > 0.05) == (SAME, True)


def test_one_round_claims_by_its_steps_and_says_so():
    chance = random.Random(1)
    (stock,), (patched,) = runs(chance, 1), runs(chance, 1, ms=80.0)
    judgement = judge_runs([stock], [patched])
    assert judgement.verdict == FASTER
    low, high = judgement.interval
    assert 1 < low < judgement.ratio < high
    judgement = judge_runs([stock], [[time * 1.001 for time in stock]])
    assert judgement.verdict == SAME
    assert judge_runs([stock] * 2, [patched] * 2).interval is None


WIDE = [60.0, 140.0, 70.0, 130.0, 100.0, 65.0, 135.0, 75.0, 125.0, 101.0]
LEVELS = [[100.0] * 9, [110.0] * 9, [121.0] * 9]


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        (LEVELS, [LEVELS[0], LEVELS[1], [120.0] * 9], "2 times the 0.8% by which pairs differ"),
        ([WIDE] * 3, [[time - 4 for time in WIDE]] * 3, "half the 95% interval within the runs"),
        (
            [[100.0] * 9] * 4,
            [[90.0] * 9] * 3 + [[101.0] * 9],
            "more than 12.1% counts, the 12.1% by which pairs",
        ),
        (
            [[110.0] * 9] * 3 + [[100.0] * 9],
            [[99.5] * 9] * 3 + [[101.0] * 9],
            "pairs disagree on which is faster",
        ),
    ],
)
def test_the_rule_that_decided_is_named(first, second, rule):
    judgement = judge_runs(first, second)
    assert rule in judgement.rule
    assert rule in format_judgement(judgement)
    share = f"{judgement.threshold:.1%}"
    assert judgement.rule.startswith((f"more than {share} counts, ", "pairs disagree"))


@pytest.mark.parametrize(
    ("stock", "patched", "reason"),
    [
        ([[100.0] * 9, [100.0] * 9, [219.0] * 9], [[95.0] * 9] * 3, "equal runs differ by 119%"),
        ([[50.0, 400.0] * 5], [[60.0, 300.0] * 5], "% wide to each side"),
    ],
)
def test_a_busy_machine_cannot_tell(stock, patched, reason):
    judgement = judge_runs(stock, patched)
    assert judgement.verdict == UNCLEAR
    text = format_judgement(judgement)
    assert text.startswith("cannot tell: this machine is too busy (")
    assert reason in text
    assert text.endswith("Stop other programs, or give --steps and --rounds more")


def test_pairs_are_needed():
    with pytest.raises(ValueError, match="no pairs"):
        judge_runs([], [])
    with pytest.raises(ValueError, match="1 and 2 runs"):
        judge_runs([[1.0]], [[1.0], [1.0]])


def test_the_slowest_rank_of_each_step_counts():
    assert max_over_ranks([[1.0, 5.0, 3.0], [2.0, 4.0]]) == [2.0, 5.0]


def test_spread():
    found = compute_spread([float(n) for n in range(11)])
    assert (found.median, found.p10, found.p90, found.worst) == (5.0, 1.0, 9.0, 10.0)
    assert compute_quantile([1.0, 2.0], 0.5) == 1.5
    with pytest.raises(ValueError, match="no times"):
        compute_spread([])
