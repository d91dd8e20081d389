"""Runs random combinations of habits stock and patched, and prints a small one for each that differs.

    $ python -m tools.fuzz --seconds 300 --seed 1      # those of seeds 1, 2, 3 ... for five minutes, on two ranks
    $ python -m tools.fuzz --only batch_norm           # each with a habit whose name holds this

``tests/habits`` has the habits. A failure is printed as a cell that ``python -m tests.habits`` runs. The
program ends with 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys

from tests.habits.__main__ import run_random_cells
from tests.support.pool import Pool


def main() -> int:
    """Run random combinations, and print failures and what each habit took part in."""
    parser = argparse.ArgumentParser(
        description="Run random combinations of habits stock and patched."
    )
    parser.add_argument("--seconds", type=float, default=60, help="for how long")
    parser.add_argument("--seed", type=int, default=1, help="of the first combination")
    parser.add_argument("--ranks", type=int, default=2, help="on how many ranks")
    parser.add_argument(
        "--only",
        default="",
        metavar="WORD",
        help="a habit whose name holds it is in each combination",
    )
    options = parser.parse_args()
    pool = Pool()
    try:
        return run_random_cells(pool, options.seconds, options.seed, options.ranks, options.only)
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
