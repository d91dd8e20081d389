"""Train random models under tensor parallelism, stock and patched, and report where feature ``tp_linear`` differs.

    $ python -m tools.fuzz_tensor_parallel --seconds 300 --seed 1    # models of seeds 1, 2, 3 ... for five minutes
    $ python -m tools.fuzz_tensor_parallel --seed 41 --seconds 0     # one of them

A seed makes the branches of the model, its plan, the options of the feature, and what the loop does. What stock PyTorch
cannot run is left out. The program ends with 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Final

from tests.support.failures import RankFailure
from tests.support.pool import Pool
from tools.random_tensor_parallel import make_model, run_both, run_stock

_TIMEOUT_S: Final = 60.0


def fuzz(pool: Pool, seed: int) -> tuple[str, str]:
    """Train the model of a seed; return its outcome (stock raises, equal, failed) and how it failed."""
    world = make_model(seed).world
    try:
        pool(world)(run_stock, seed, timeout=_TIMEOUT_S)
    except RankFailure as failure:
        return "stock raises", str(failure).partition("\n")[0]
    try:
        outcomes = pool(world)(run_both, seed, timeout=2 * _TIMEOUT_S)
    except RankFailure as failure:
        return "failed", str(failure)
    wrong = [f"rank {rank}: {found}" for rank, (found, _) in enumerate(outcomes) if found]
    wrong += ["the feature computed nothing"] if not any(c["calls"] for _, c in outcomes) else []
    return ("failed", "\n".join(wrong)) if wrong else ("equal", "")


def main() -> int:
    """Train models, print failures and the number of each outcome."""
    parser = argparse.ArgumentParser(description="Train random models stock and patched.")
    parser.add_argument(
        "--seconds", type=float, default=60, help="for how long; one model at least"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first model")
    given = parser.parse_args()
    pool, end, seed = Pool(), time.monotonic() + given.seconds, given.seed
    tally = Counter[tuple[str, str]]()
    try:
        while seed == given.seed or time.monotonic() < end:
            became, text = fuzz(pool, seed)
            tally[became, text if became == "stock raises" else ""] += 1
            if became == "failed":
                print(f"==== {make_model(seed)}\n\n{text}\n", flush=True)
            seed += 1
    finally:
        pool.close()
    for (became, text), count in sorted(tally.items()):
        print(f"{became:14}{count:6}  {text[:150]}")
    return int(any(became == "failed" for became, _ in tally))


if __name__ == "__main__":
    sys.exit(main())
