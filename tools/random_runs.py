"""Runs random programs of one kind stock and patched, and reports those that differ."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.support.failures import RankFailure
from tests.support.pool import Pool

_TIMEOUT_S: Final = 60.0

# The largest share of programs that may fail in stock PyTorch. A broken generator makes all of them fail.
_MAX_RAISING_SHARE: Final = 0.5


@dataclass(frozen=True)
class Kind:
    """A kind of random programs.

    Attributes:
        noun: What one of them is called.
        make: Returns the program of a seed, whose ``world`` is its number of ranks.
        name: Returns the name under which a program is counted.
        run_stock: Runs the program of a seed on a rank, stock.
        run_both: Runs it stock and patched. Returns how it differs, which is empty if it does not, and how much the
            feature has done.
    """

    noun: str
    make: Callable[[int], Any]
    name: Callable[[Any], str]
    run_stock: Callable[[int], object]
    run_both: Callable[[int], tuple[str | list[str], int]]


def run_seed(pool: Pool, kind: Kind, seed: int) -> tuple[str, str]:
    """Run the program of a seed; return its outcome (stock raises, equal, failed) and the reason."""
    world = kind.make(seed).world
    try:
        pool(world)(kind.run_stock, seed, timeout=_TIMEOUT_S)
    except RankFailure as failure:
        return "stock raises", str(failure).partition("\n")[0]
    try:
        outcomes = pool(world)(kind.run_both, seed, timeout=2 * _TIMEOUT_S)
    except RankFailure as failure:
        return "failed", str(failure)
    wrong = [f"rank {rank}: {found}" for rank, (found, _) in enumerate(outcomes) if found]
    wrong += ["the feature has done nothing"] if not any(work for _, work in outcomes) else []
    return ("failed", "\n".join(wrong)) if wrong else ("equal", "")


def main(kind: Kind) -> int:
    """Run programs for the time on the command line; print failures and counts, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=f"Run each random {kind.noun} stock and patched.")
    parser.add_argument(
        "--seconds", type=float, default=60, help=f"for how long; one {kind.noun} at least"
    )
    parser.add_argument("--seed", type=int, default=1, help=f"of the first {kind.noun}")
    given = parser.parse_args()
    pool, end, seed = Pool(), time.monotonic() + given.seconds, given.seed
    tally = Counter[tuple[str, str, str]]()
    try:
        while seed == given.seed or time.monotonic() < end:
            outcome, reason = run_seed(pool, kind, seed)
            program = kind.make(seed)
            raised = reason if outcome == "stock raises" else ""
            tally[kind.name(program), outcome, raised] += 1
            if outcome == "failed":
                print(f"==== {program}\n\n{reason}\n", flush=True)
            seed += 1
    finally:
        pool.close()
    for (name, outcome, raised), count in sorted(tally.items()):
        print(f"{name:32} {outcome:14} {count:6}  {raised[:120]}".rstrip())
    num_raising = sum(
        count for (_, outcome, _), count in tally.items() if outcome == "stock raises"
    )
    if num_raising > _MAX_RAISING_SHARE * tally.total() > 0:
        print(
            f"{num_raising} of {tally.total()} fail in stock PyTorch: the programs themselves seem to be broken"
        )
        return 1
    return int(any(outcome == "failed" for _, outcome, _ in tally))
