"""Random models under tensor parallelism: some of them are trained."""

from __future__ import annotations

from collections import Counter

from tests.support.rarely import ALL_CASES
from tools.fuzz_tensor_parallel import KIND
from tools.random_runs import run_seed


def test_random_models_train_as_in_stock_pytorch(ranks):
    outcomes = [run_seed(ranks, KIND, seed) for seed in range(60 if ALL_CASES else 5)]
    failures = [text for outcome, text in outcomes if outcome == "failed"]
    assert not failures, "\n\n".join(failures)
    assert Counter(outcome for outcome, _ in outcomes)["equal"] >= 4
