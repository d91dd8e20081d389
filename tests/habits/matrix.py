"""Cells: habits under features on some ranks, and how stock PyTorch judges them."""

from __future__ import annotations

import gc
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ovpatch
from ovpatch.insight.equality import FLOOR, Verdict
from tests.habits.delays import delayed
from tests.habits.expected import Expected, find_expected
from tests.habits.loop import Loop, combine, count_variants, family_of, load_habits
from tests.support import patience
from tests.support.equality import Comparison, compare
from tests.support.failures import RankFailure
from tests.support.pool import Pool
from tests.support.worker import freeze_remainder

#: The counter of each feature that advances whenever it does its work.
WORK: Final = {"ddp": "backwards", "dist_optimizer": "steps"}

#: The number of cells that run under one apply(), and the seconds that one cell may take.
_ROW_CELLS: Final = 60
# The shortest limit that grows with the load of the machine.
_CELL_TIMEOUT_S: Final = patience.SHORTEST_S

#: Has the place of ``ovpatch`` in stock runs.
_STOCK: Final = types.SimpleNamespace(apply=lambda *_, **__: None, revert=lambda: None)

# torch reports its own defects by these words. There is nothing to compare then, and further runs may hang.
_DEFECTS_OF_STOCK: Final = (
    "This indicates a bug in DDP implementation",
    "please report a bug to PyTorch",
)

# A failure has these words about a rank that a signal has ended.
_SIGNAL: Final = "died by SIG"

# The number of runs in which memory that stock PyTorch spoils should end a rank.
_STOCK_RUNS: Final = 4

# The end of the text of a cell that has delays.
_DELAYED: Final = "/delayed"


@dataclass(frozen=True)
class Cell:
    """Habits under features on some ranks; its text is its name and its command.

    Attributes:
        habits: Their names.
        features: The features that are applied.
        world: The number of ranks.
        seed: Of the choices inside habits.
        has_delays: Whether the patched ranks wait for a moment where they meet, see :mod:`.delays`.
    """

    habits: tuple[str, ...]
    features: tuple[str, ...] = ("ddp", "dist_optimizer")
    world: int = 2
    seed: int = 0
    has_delays: bool = False

    def __str__(self) -> str:
        text = "/".join(["+".join(self.habits), "+".join(self.features), f"w{self.world}"])
        return text + f"/{self.seed}" * bool(self.seed) + _DELAYED * self.has_delays

    @staticmethod
    def parse(text: str) -> Cell:
        """Return the cell with a name.

        Raises:
            ValueError: The name is no cell.
        """
        parts = text.removesuffix(_DELAYED).split("/")
        if not 3 <= len(parts) <= 4 or not parts[2].startswith("w"):
            raise ValueError(
                f"{text!r} is no cell; write HABIT+HABIT/FEATURE+FEATURE/wRANKS or .../wRANKS/SEED, and "
                f"perhaps {_DELAYED} at the end"
            )
        habits, features, world, *seed = parts
        names = tuple(name for name in habits.split("+") if name)
        return Cell(
            names,
            tuple(features.split("+")),
            int(world[1:]),
            *map(int, seed),
            has_delays=text.endswith(_DELAYED),
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell on one rank, or on all of them.

    Attributes:
        difference: How the patched run differs; "" if it is as in stock PyTorch.
        error: The exception of stock PyTorch; "" if there is none.
        counters: What the features did.
        needed: The declarations without which the cell would have failed.
    """

    difference: str = ""
    error: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)
    needed: frozenset[Expected] = frozenset()


@dataclass
class _Run:
    """The results of a run: its values, its exception, and the exception as text."""

    records: dict[str, Any]
    error_text: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)


def run_row(cells: Sequence[Cell]) -> list[Outcome]:
    """Run cells of the same features on this rank, all of them under one ``apply()``.

    Loops that turn features on themselves follow after it.
    """
    warnings.simplefilter("ignore")
    loops = [combine(cell.habits) for cell in cells]
    for cell, loop in zip(cells, loops, strict=True):
        if loop.compiles and loop.has_mesh:
            # Some frames of DTensors and meshes are compiled only once per process.
            _run_stock(cell, loop)
    stock = [_run_stock(cell, loop) for cell, loop in zip(cells, loops, strict=True)]
    patched: dict[int, _Run] = {}
    shared = [i for i, loop in enumerate(loops) if not loop.switches]
    with _apply(cells[0].features) if shared else nullcontext():
        for i in shared:
            patched[i] = _run_patched(cells[i], loops[i], _STOCK)
    for i, loop in enumerate(loops):
        if loop.switches:
            patched[i] = _run_patched(cells[i], loop, ovpatch)
    compared = [compare(stock[i].records, patched[i].records, floor=0.0) for i in range(len(cells))]
    is_noisy = [comparison.verdict is not Verdict.BITWISE for comparison in compared]
    outcomes = []
    has_defect = _any_rank(
        [any(text in run.error_text for text in _DEFECTS_OF_STOCK) for run in stock]
    )
    for i, (cell, noisy) in enumerate(zip(cells, _any_rank(is_noisy), strict=True)):
        if has_defect[i]:
            outcomes.append(Outcome("", "torch reports a defect in itself"))
            continue
        noise_runs = []
        if noisy and cell.world > 2:
            # A single sample of the noise is often less than half of the largest one.
            noise_runs = [
                _run_stock(cell, loops[i], noise_run=number).records for number in (1, 2, 3)
            ]
        outcomes.append(_judge(cell, stock[i], patched[i], noise_runs))
    return outcomes


def _apply(features: tuple[str, ...]) -> Any:
    options = Loop(lambda *_: None, _STOCK).options()
    return ovpatch.applied(*features, options={name: options[name] for name in features})


def _any_rank(flags: list[bool]) -> list[bool]:
    """Return the flags that are set on any rank, as all ranks must run the same loops."""
    total = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(total)
    return [bool(flag) for flag in total]


def _run_stock(cell: Cell, loop: type[Loop], noise_run: int = 0) -> _Run:
    """Do what :func:`_record` does; a stock run that hangs or dies has this name in its stack.

    torch's profiler dies now and then where gloo's threads end collectives: "profiler" on three ranks.
    """
    return _record(cell, loop, _STOCK, noise_run=noise_run)


def _run_patched(cell: Cell, loop: type[Loop], package: Any) -> _Run:
    before = _counters()
    with delayed(cell.seed) if cell.has_delays else nullcontext():
        run = _record(cell, loop, package)
    run.counters = {name: value - before[name] for name, value in _counters().items()}
    return run


def _record(cell: Cell, cls: type[Loop], package: Any, *, noise_run: int = 0) -> _Run:
    """Run a loop once."""
    torch.manual_seed(0)
    if cls.compiles:
        # Otherwise the second run would find the code of the first one, and count it.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch._dynamo.utils.clear_compilation_metrics()
    run = _Run({"error": None})

    def see(name: str, value: Any) -> None:
        run.records[f"{len(run.records)} {name}"] = _copy(value)

    loop = cls(see, package, features=cell.features, seed=cell.seed, noise_run=noise_run)
    try:
        loop.run()
    except Exception as error:  # noqa: BLE001 - whatever stock PyTorch raises, the patched run must raise as well
        # Exceptions of ovpatch derive from those of stock PyTorch.
        classes = type(error).__mro__
        run.records["error"] = next(
            c.__name__ for c in classes if not c.__module__.startswith("ovpatch")
        )
        frames = "".join(traceback.format_tb(error.__traceback__, limit=-8))
        run.error_text = f"{type(error).__name__}: {error}\n{frames}"
        # The frames of the traceback hold the model.
        error.__traceback__ = None
    package.revert()
    vars(loop).clear()
    # The next run must not meet the model of this one.
    gc.collect()
    # The habit may have imported much.
    freeze_remainder()
    dist.barrier()
    return run


def _copy(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copy(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(child) for child in value]
    return value


def _counters() -> dict[str, int]:
    from ovpatch_plugins.ddp.ddp_report import COUNTERS
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS as SHARDED
    from ovpatch_plugins.recompute.recompute_report import COUNTERS as RECOMPUTED

    recomputed = {"recomputations": RECOMPUTED.recomputations}
    return COUNTERS.as_dict() | SHARDED.as_dict() | recomputed


# Errors by which the stock reducer refuses some combinations of habits. The reducer of ovpatch needs no such rules:
# layers that are skipped at random in one of several forwards, or backwards of which one leaves a layer out.
_REFUSALS: Final = (
    "Expected to mark a variable ready only once",
    "Expected to have finished reduction in the prior iteration",
    "Expected sparse gradient to be defined",
)
# A recomputed block keeps no tensor that a later forward could change.
_REFUSALS_OF_AUTOGRAD: Final = ("has been modified by an inplace operation",)


def _judge(cell: Cell, stock: _Run, patched: _Run, noise_runs: list[Any]) -> Outcome:
    """Compare two runs by the rule of ``ovpatch.insight``, and the counters with the declarations."""
    refusals = (*_REFUSALS, *(_REFUSALS_OF_AUTOGRAD if "recomputed" in cell.habits else ()))
    is_refused = any(text in stock.error_text for text in refusals)
    # Without the refusal, another habit may raise what torch raises.
    if is_refused and len(cell.habits) > 1 and "ovpatch" not in patched.error_text:
        return Outcome("", stock.error_text.partition("\n")[0], patched.counters)
    needed = set[Expected]()
    declared = find_expected(cell.habits, cell.world)
    floor, units = (FLOOR, 1) if cell.world > 2 else (0.0, 0)
    difference = _describe(
        compare(stock.records, patched.records, reruns=noise_runs, floor=floor, noise_units=units),
        floor,
    )
    if difference:
        for declaration in declared:
            allowed = max(declaration.allow, floor)
            compared = compare(
                stock.records, patched.records, reruns=noise_runs, floor=allowed, noise_units=units
            )
            if declaration.allow and not _describe(compared, allowed):
                needed.add(declaration)
                difference = ""
                break
    if difference:
        difference += f"\n\nstock raises: {stock.error_text or 'nothing'}"
        difference += f"\n\npatched raises: {patched.error_text or 'nothing'}"
    # A combination of habits may leave nothing to do; a single habit must show something.
    for complaint, matches in (
        _find_gaps(cell, stock, patched) if len(cell.habits) == 1 and not difference else ()
    ):
        matching = [declaration for declaration in declared if matches(declaration)]
        needed.update(matching[:1])
        if not matching:
            difference += f"\n{complaint}. Declare that in tests/habits/expected.py, or mend it."
    return Outcome(
        difference.strip(), stock.error_text.partition("\n")[0], patched.counters, frozenset(needed)
    )


def _find_gaps(
    cell: Cell, stock: _Run, patched: _Run
) -> Iterator[tuple[str, Callable[[Expected], bool]]]:
    """Return the gaps of a cell, each with a test of the declarations that allow it."""
    if stock.error_text:
        yield f"stock PyTorch raises {stock.error_text}", lambda declaration: declaration.raises
        return
    for name in cell.features:
        if not patched.counters[WORK[name]]:
            complaint = f"{name} did nothing: its counter '{WORK[name]}' did not advance"
            yield complaint, lambda declaration, name=name: name in declaration.idle


def _describe(compared: Comparison, floor: float) -> str:
    """Return how two runs differ; without a floor, their bits must be the same."""
    try:
        (compared.assert_equal if floor else compared.assert_bitwise)()
    except AssertionError as error:
        return str(error)
    return ""


def _dies_in_stock(pool: Pool, cell: Cell) -> bool:
    """Return whether a cell dies without ovpatch as well: memory that a stock run spoils may end a later run."""
    try:
        pool(cell.world)(run_stock_repeatedly, cell, timeout=_CELL_TIMEOUT_S)
    except RankFailure as failure:
        return _SIGNAL in str(failure)
    return False


def run_stock_repeatedly(cell: Cell) -> None:
    """Run a cell on this rank, stock."""
    loop = combine(cell.habits)
    for _ in range(_STOCK_RUNS):
        _run_stock(cell, loop)


def run_cells(pool: Pool, cells: Sequence[Cell]) -> list[Outcome]:
    """Run cells of the same features and world; a failure of a rank counts for its cell.

    If a rank dies or hangs, each cell runs again alone, which shows the one that did it.
    """
    ranks = pool(cells[0].world)
    try:
        by_rank = ranks(
            run_row, cells, timeout=60 + len(cells) * 2 if len(cells) > 1 else _CELL_TIMEOUT_S
        )
    except RankFailure as failure:
        if len(cells) > 1:
            return [run_cells(pool, [cell])[0] for cell in cells]
        if _run_stock.__name__ in str(failure) or (
            _SIGNAL in str(failure) and _dies_in_stock(pool, cells[0])
        ):
            return [Outcome(error="stock PyTorch hangs or dies")]
        return [Outcome(difference=str(failure))]
    return [_merge(outcomes) for outcomes in zip(*by_rank, strict=True)]


def _merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of rank 0 with the differences of all ranks."""
    differences = [
        f"rank {rank}: {found.difference}"
        for rank, found in enumerate(outcomes)
        if found.difference
    ]
    needed = frozenset[Expected]().union(*(found.needed for found in outcomes))
    return replace(outcomes[0], difference="\n\n".join(differences), needed=needed)


def list_cells(features: tuple[str, ...], world: int, family: str = "") -> list[Cell]:
    """Return a cell for each variant of each habit alone, of all habits or those of a family.

    Habits that turn features on themselves are there only with all features.
    """
    return [
        Cell((name,), features, world, seed)
        for name, loop in load_habits().items()
        if family in ("", family_of(loop)) and (len(features) > 1 or not loop.switches)
        for seed in range(count_variants(loop))
    ]


def split_rows(cells: Sequence[Cell]) -> list[Sequence[Cell]]:
    """Return the cells in rows, of which each is one job of the pool with its own process group."""
    alone = [cell for cell in cells if combine(cell.habits).needs_own_group]
    shared = [cell for cell in cells if cell not in alone]
    rows: list[Sequence[Cell]] = [
        shared[i : i + _ROW_CELLS] for i in range(0, len(shared), _ROW_CELLS)
    ]
    return rows + [[cell] for cell in alone]
