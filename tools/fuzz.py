"""Run random training programs stock and patched, and report where ``ddp`` or ``dist_optimizer`` differs.

    $ python -m tools.fuzz --seconds 300 --seed 1      # programs of seeds 1, 2, 3 ... for five minutes, on two ranks
    $ python -m tools.fuzz --only "batch norm"         # each with a kind whose name holds these words
    $ python -m tools.fuzz --program failed.py         # one program, as it was printed for a failure

A program consists of habits of scripts (``tools/fuzz_kinds.txt``) by its seed. Both runs must show the same bits
and raise the same exceptions. One that fails is made smaller as long as it fails, and printed. The program ends with 1
if one failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.support.failures import RankFailure
from tests.support.pool import Pool
from tools.fuzz_arms import Outcome, run_both, run_stock
from tools.fuzz_programs import PRELUDE, Program, make_program, read_kinds

#: Seconds until a program counts as hanging.
_TIMEOUT_S: Final = 20.0


@dataclass
class Tally:
    """The numbers of programs that a kind took part in."""

    programs: int = 0
    raised: int = 0
    reduced: int = 0
    sharded: int = 0
    failed: int = 0

    def add(self, result: Result) -> None:
        """Count one program."""
        self.programs += 1
        self.raised += bool(result.error)
        self.reduced += result.counters.get("backwards", 0) > 0
        self.sharded += result.counters.get("steps", 0) > 0
        self.failed += bool(result.failure)


@dataclass(frozen=True)
class Result:
    """The outcome of a program.

    Attributes:
        failure: How it differs, crashed or hung; "" if both runs are equal.
        error: The exception of the stock run on rank 0, or "".
        counters: What the features did, on rank 0.
    """

    failure: str = ""
    error: str = ""
    counters: dict[str, int] = field(default_factory=dict)


class Runner:
    """Runs programs on a pool of ranks.

    Args:
        pool: The ranks.
        world: How many of them.
    """

    def __init__(self, pool: Pool, world: int) -> None:
        self._ranks = pool(world)

    def run(self, program: Program) -> Result:
        """Run a program in both ways and compare."""
        return self.run_text(program.text(), program.floor)

    def run_text(self, text: str, floor: float = 0.0) -> Result:
        """Run a program that is there as text."""
        try:
            outcomes: list[Outcome] = self._ranks(run_both, PRELUDE + text, floor, timeout=_TIMEOUT_S)
        except RankFailure as failure:
            # A program that fails in stock PyTorch is no failure, and its ranks may hang or die as well.
            is_stock = run_stock.__name__ in str(failure)
            return Result(error="stock hangs or dies") if is_stock else Result(failure=str(failure))
        failures = [f"rank {rank}: {outcome.difference}" for rank, outcome in enumerate(outcomes) if outcome.difference]
        return Result("\n\n".join(failures), outcomes[0].error, dict(outcomes[0].counters))


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 60) -> Program:
    """Take kinds and steps out of a program as long as it fails and there is time."""
    shrunk, end = True, time.monotonic() + seconds
    while shrunk:
        shrunk = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                return program
            if fails(smaller):
                program, shrunk = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for index in range(len(program.kinds)):
        yield replace(program, kinds=program.kinds[:index] + program.kinds[index + 1 :])
    for steps in range(1, program.steps):
        yield replace(program, steps=steps)


def fuzz(runner: Runner, seeds: Iterator[int], only: str = "") -> tuple[dict[str, Tally], Counter[str], list[str]]:
    """Run the programs of some seeds.

    Args:
        runner: Runs them.
        seeds: Of the programs.
        only: A kind whose name holds this is in each.

    Returns:
        The tally of each kind, "all" for all programs; the exceptions of stock PyTorch; for each failure, a
        message with the smallest program.
    """
    kinds, tallies, errors, failures = read_kinds(), {"all": Tally()}, Counter[str](), list[str]()
    for seed in seeds:
        program = make_program(kinds, random.Random(seed), only)
        result = runner.run(program)
        errors[result.error[:110]] += bool(result.error)
        for name in ("all", *program.names):
            tallies.setdefault(name, Tally()).add(result)
        if result.failure:
            failures.append(_explain(runner, seed, program, result.failure))
            print(failures[-1], flush=True)
    return tallies, errors, failures


def _explain(runner: Runner, seed: int, program: Program, failure: str) -> str:
    smallest = shrink(program, lambda smaller: bool(runner.run(smaller).failure))
    again = runner.run(smallest).failure
    if not again:  # now and then, perhaps
        smallest, again = program, f"{failure}\n\nIt did not fail again."
    return f"==== seed {seed}: {', '.join(smallest.names)}\n\n{again}\n\n---- the program:\n\n{smallest.text()}"


def seeds_for(seconds: float, first: int) -> Iterator[int]:
    """Count on from a first seed for some seconds."""
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end:
        yield seed
        seed += 1


def table(tallies: dict[str, Tally]) -> str:
    """Return a line for each kind."""
    head = ("kind", "programs", "stock raises", "reduced by us", "sharded", "failed")
    rows = [(n, t.programs, t.raised, t.reduced, t.sharded, t.failed) for n, t in sorted(tallies.items())]
    return "\n".join("{:34}{:>9}{:>14}{:>15}{:>9}{:>8}".format(*row) for row in (head, *rows))


def main() -> int:
    """Run programs, print failures and what each kind took part in."""
    parser = argparse.ArgumentParser(description="Run random training programs stock and patched.")
    parser.add_argument("--seconds", type=float, default=60, help="for how long")
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--ranks", type=int, default=2, help="on how many ranks")
    parser.add_argument("--only", default="", metavar="WORDS", help="a kind whose name holds them is in each program")
    parser.add_argument("--program", type=Path, help="run this program instead")
    options = parser.parse_args()
    pool = Pool()
    runner = Runner(pool, options.ranks)
    try:
        if options.program:
            failure = runner.run_text(options.program.read_text()).failure
            print(failure or "as stock")
            return int(bool(failure))
        tallies, errors, failures = fuzz(runner, seeds_for(options.seconds, options.seed), options.only)
    finally:
        pool.close()
    print(table(tallies))
    print("\nstock raised:", *(f"{count:6} {error}" for error, count in errors.most_common(20) if count), sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
