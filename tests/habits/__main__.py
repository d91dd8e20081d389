"""Runs cells of the matrix, or random ones.

$ python -m tests.habits accumulate/ddp+dist_optimizer/w2        # one cell, as a failure names it
$ python -m tests.habits --list                                  # all habits
$ python -m tests.habits --fuzz 300                              # random combinations for five minutes
"""

from __future__ import annotations

import argparse
import sys

from tests.habits.fuzz import count_seeds, fuzz
from tests.habits.loop import family_of, load_habits
from tests.habits.matrix import Cell, run_cells
from tests.support.pool import Pool


def main() -> int:
    """Run the cells of the command line; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description="Run cells of the matrix of habits, or random combinations."
    )
    parser.add_argument(
        "cells", nargs="*", help="HABIT+HABIT/FEATURE+FEATURE/wRANKS[/SEED][/delayed]"
    )
    parser.add_argument("--list", action="store_true", help="print all habits")
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="run random combinations")
    parser.add_argument("--seed", type=int, default=1, help="of the first random combination")
    parser.add_argument(
        "--ranks", type=int, default=2, help="on how many ranks random combinations run"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="WORD",
        help="a habit whose name holds it is in each combination",
    )
    options = parser.parse_args()
    if options.list:
        for name, loop in load_habits().items():
            print(f"{family_of(loop):14}{name:48}{(loop.__doc__ or '').strip()}")
        return 0
    pool = Pool()
    try:
        if options.fuzz:
            return run_random_cells(pool, options.fuzz, options.seed, options.ranks, options.only)
        return max(
            map(int, [print_cell(pool, Cell.parse(text)) for text in options.cells]), default=0
        )
    finally:
        pool.close()


def print_cell(pool: Pool, cell: Cell) -> bool:
    """Run a cell and print what became of it; return whether it failed."""
    outcome = run_cells(pool, [cell])[0]
    print(f"{cell}: {outcome.difference or 'as in stock PyTorch'}")
    for declaration in outcome.needed:
        print(f"    declared: {declaration.why}")
    if outcome.error:
        print(f"    stock PyTorch raises {outcome.error}")
    print("   ", ", ".join(f"{name} {count}" for name, count in outcome.counters.items() if count))
    return bool(outcome.difference)


def run_random_cells(pool: Pool, seconds: float, seed: int, world: int, word: str) -> int:
    """Run random combinations and print a table of habits; return 1 if one failed."""
    found = fuzz(pool, count_seeds(seconds, seed), world, word)
    print(found.table())
    print(
        "\nstock raised:",
        *(f"{count:6} {error}" for error, count in found.errors.most_common(20) if count),
        sep="\n",
    )
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
