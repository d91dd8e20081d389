"""Runs cells of the matrix, or random ones.

$ python -m tests.habits accumulate/ddp+dist_optimizer/w2        # one cell, as a failure names it
$ python -m tests.habits --fuzz 300                              # random combinations for five minutes
$ python -m tests.habits --list                                  # all habits
"""

from __future__ import annotations

import argparse
import sys

from tests.habits.loop import load_habits
from tests.habits.matrix import Cell, run_cells
from tests.support.pool import Pool


def main() -> int:
    parser = argparse.ArgumentParser(description="Run cells of the matrix of habits.")
    parser.add_argument("cells", nargs="*", help="HABIT+HABIT/FEATURE+FEATURE/wRANKS[/SEED]")
    parser.add_argument("--list", action="store_true", help="print all habits")
    options = parser.parse_args()
    if options.list:
        for name, loop in load_habits().items():
            print(f"{name:40} {(loop.__doc__ or '').partition(chr(10))[0]}")
        return 0
    has_failed = False
    pool = Pool()
    try:
        for cell in map(Cell.parse, options.cells):
            outcome = run_cells(pool, [cell])[0]
            has_failed |= bool(outcome.difference)
            print(f"{cell}: {outcome.difference or 'as in stock PyTorch'}")
            print({name: count for name, count in outcome.counters.items() if count}, outcome.error)
    finally:
        pool.close()
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
