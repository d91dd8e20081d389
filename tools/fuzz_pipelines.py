"""Run random pipelines stock and patched, and report where feature ``pipeline`` differs in a bit.

    $ python -m tools.fuzz_pipelines --seconds 300 --seed 1      # pipelines of seeds 1, 2, 3 ... for five minutes
    $ python -m tools.fuzz_pipelines --seed 41 --seconds 0       # one of them

A seed makes the class of the schedule, its order, the modules of its stages, and what the loop does between steps. What
stock cannot run is left out. The program ends with 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Final

from tests.support.failures import RankFailure
from tests.support.pool import Pool
from tools.random_pipelines import make_pipeline, run_both, run_stock

_TIMEOUT_S: Final = 60.0


def fuzz(pool: Pool, seed: int) -> tuple[str, str]:
    """Run the pipeline of a seed; return its outcome (stock raises, equal, failed) and how it failed."""
    world = make_pipeline(seed).world
    try:
        pool(world)(run_stock, seed, timeout=_TIMEOUT_S)
    except RankFailure:
        return "stock raises", ""
    try:
        outcomes = pool(world)(run_both, seed, timeout=2 * _TIMEOUT_S)
    except RankFailure as failure:
        return "failed", str(failure)
    wrong = [f"rank {rank}: {found}" for rank, (found, _) in enumerate(outcomes) if found]
    wrong += ["the feature ran no step"] if not any(steps for _, steps in outcomes) else []
    return ("failed", "\n".join(wrong)) if wrong else ("equal", "")


def main() -> int:
    """Run pipelines, print failures and how many there were of each class."""
    parser = argparse.ArgumentParser(description="Run random pipelines stock and patched.")
    parser.add_argument(
        "--seconds", type=float, default=60, help="for how long; one pipeline at least"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first pipeline")
    given = parser.parse_args()
    pool, end, seed, tally = (
        Pool(),
        time.monotonic() + given.seconds,
        given.seed,
        Counter[tuple[str, str]](),
    )
    try:
        while seed == given.seed or time.monotonic() < end:
            became, text = fuzz(pool, seed)
            pipeline = make_pipeline(seed)
            tally[pipeline.case.schedule, became] += 1
            if text:
                print(f"==== {pipeline}\n\n{text}\n", flush=True)
            seed += 1
    finally:
        pool.close()
    for (name, became), count in sorted(tally.items()):
        print(f"{name:32} {became:14} {count:6}")
    return int(any(became == "failed" for _, became in tally))


if __name__ == "__main__":
    sys.exit(main())
