"""Random combinations of habits: draws cells, and makes those that fail smaller."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from tests.habits.loop import (
    FIRST_RANDOM_SEED,
    Loop,
    changed_places,
    draw,
    family_of,
    load_habits,
    replaced_places,
)
from tests.habits.matrix import Cell, Outcome, run_cells
from tests.support.pool import Pool

#: The number of habits that a cell has of a kind: the weights of 0, 1, 2 ...
_NUMBERS: Final[Mapping[str, tuple[float, ...]]] = {
    "layer": (0, 3, 4, 3),
    "argument": (4, 4, 3, 1),
    "optimizer": (2, 8),
    "other": (0, 1, 3, 5, 5, 4, 3, 2),
}


def make_cell(seed: int, world: int, word: str = "") -> Cell:
    """Return the cell of a seed.

    Args:
        seed: Decides everything.
        world: The number of ranks.
        word: The cell has a habit whose name holds it.

    Raises:
        ValueError: No habit is called so.
    """
    habits, rng = load_habits(), random.Random(seed)
    by_kind: dict[str, list[str]] = {kind: [] for kind in _NUMBERS}
    for name, loop in habits.items():
        by_kind[kind_of(loop)].append(name)
    wanted = [name for name in habits if word in name]
    if not wanted:
        raise ValueError(
            f"no habit has {word!r} in its name; `python -m tests.habits --list` prints all of them"
        )
    names = [rng.choice(wanted)] if word else []
    for kind, weights in _NUMBERS.items():
        names += rng.sample(by_kind[kind], rng.choices(range(len(weights)), weights)[0])
    # Small seeds count through the alternatives of each habit instead of drawing them.
    drawn = FIRST_RANDOM_SEED + draw(seed, "cell") % 1_000_000
    return Cell(
        tuple(choose_compatible(names)), world=world, seed=drawn, has_delays=rng.random() < 0.5
    )


def kind_of(loop: type[Loop]) -> str:
    """Return which of the numbers counts a habit: of a layer, an argument of the wrapper, an optimizer, or another."""
    own = {name for name in vars(loop) if name in vars(Loop)} - {"__doc__", "__module__"}
    if family_of(loop) == "layers":
        return "layer"
    if own - {"without", "__init__"} == {"kwargs"}:
        return "argument"
    return "optimizer" if own - {"without", "__init__"} == {"optimizer"} else "other"


def choose_compatible(names: Iterable[str]) -> Iterator[str]:
    """Leave out habits whose exclusive place another one has, and habits that exclude each other."""
    habits = load_habits()
    chosen: list[str] = []
    for name in names:
        if name in chosen:
            continue
        if all(_fit(habits[name], habits[former]) for former in chosen):
            chosen.append(name)
            yield name


def _fit(loop: type[Loop], former: type[Loop]) -> bool:
    """Return whether two habits may be in one loop.

    A habit that adds to an exclusive place acts before one that replaces it. So it must not replace anything itself.
    """
    for adding, replacing in ((loop, former), (former, loop)):
        if replaced_places(adding) and changed_places(adding) & replaced_places(replacing):
            return False
    return not (_excludes(loop, former) or _excludes(former, loop))


def _excludes(loop: type[Loop], former: type[Loop]) -> bool:
    """Return whether a habit, or one that it derives from, excludes another one or one that that derives from."""
    return bool(loop.without & {base.__name__ for base in former.__mro__})


@dataclass
class Tally:
    """The number of cells that a habit took part in, by outcome."""

    cells: int = 0
    raised: int = 0
    reduced: int = 0
    sharded: int = 0
    failed: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a cell."""
        self.cells += 1
        self.raised += bool(outcome.error)
        self.reduced += outcome.counters.get("backwards", 0) > 0
        self.sharded += outcome.counters.get("steps", 0) > 0
        self.failed += bool(outcome.difference)


@dataclass
class Findings:
    """The results of random cells.

    Attributes:
        tallies: One for each habit, and "all".
        errors: How often stock PyTorch raised each exception.
        failures: A message for each failure, with the smallest cell.
    """

    tallies: dict[str, Tally] = field(default_factory=lambda: {"all": Tally()})
    errors: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Return a line for each habit."""
        head = ("habit", "cells", "stock raises", "reduced by us", "sharded", "failed")
        rows = [
            (n, t.cells, t.raised, t.reduced, t.sharded, t.failed)
            for n, t in sorted(self.tallies.items())
        ]
        return "\n".join("{:48}{:>7}{:>14}{:>15}{:>9}{:>8}".format(*row) for row in (head, *rows))


def fuzz(
    pool: Pool, seeds: Iterable[int], world: int = 2, word: str = "", row: int = 1
) -> Findings:
    """Run the cells of some seeds.

    Args:
        pool: Has the ranks.
        seeds: Of the cells.
        world: The number of ranks.
        word: Each cell has a habit whose name holds it.
        row: The number of cells in a job, which share one ``apply()``. Cells of a row share a process group, too: what
            fails there runs again alone.
    """
    found, left = Findings(), iter(seeds)
    while cells := [make_cell(seed, world, word) for seed in islice(left, row)]:
        for cell, outcome in zip(cells, run_cells(pool, cells), strict=True):
            found.errors[outcome.error[:110]] += bool(outcome.error)
            for name in ("all", *cell.habits):
                found.tallies.setdefault(name, Tally()).add(outcome)
            if outcome.difference:
                found.failures.append(_explain(pool, cell, outcome.difference))
                print(found.failures[-1], flush=True)
    return found


def _explain(pool: Pool, cell: Cell, difference: str) -> str:
    smallest = shrink(cell, lambda smaller: bool(run_cells(pool, [smaller])[0].difference))
    again = run_cells(pool, [smallest])[0].difference
    if not again:
        # Perhaps it fails now and then.
        smallest, again = cell, f"{difference}\n\nIt did not fail again."
    return f"==== python -m tests.habits {smallest}\n\n{again}"


def shrink(cell: Cell, fails: Callable[[Cell], bool], seconds: float = 60) -> Cell:
    """Take habits out of a cell as long as it fails and there is time."""
    has_shrunk, end = True, time.monotonic() + seconds
    while has_shrunk:
        has_shrunk = False
        for index in range(len(cell.habits) if len(cell.habits) > 1 else 0):
            if time.monotonic() > end:
                return cell
            smaller = replace(cell, habits=cell.habits[:index] + cell.habits[index + 1 :])
            if fails(smaller):
                cell, has_shrunk = smaller, True
                break
    return cell


def count_seeds(seconds: float, first: int) -> Iterator[int]:
    """Count on from a first seed for some seconds."""
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end:
        yield seed
        seed += 1
