"""Rounds: the command runs stock and patched in turn, and its processes' files are merged over the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from ovpatch.insight import variants
from ovpatch.insight.nodes import Leader, choose_runner
from ovpatch.insight.variants import Outcome, Variant
from ovpatch.session import worker_reports

WORKER: Final = "ovpatch.insight.bench.bench_worker"
STOCK: Final = "stock"
PATCHED: Final = "patched"
# The peers by name, each with the variables by which Trainer and accelerate turn it on. Variables
# of the user win.
PEERS: Final = {
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    }
}
# The stock run for predictions, and its number of steps.
FACTS: Final = "facts"
_FACT_STEPS: Final = 10
# A median of fewer steps would be noise.
MIN_STEPS: Final = 5
# The number of steps. Operations are counted in the last of them.
MIN_WARMUP: Final = 3


def max_over_ranks(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of the slowest rank for each step that all ranks have."""
    return [max(times) for times in zip(*ranks, strict=False)]


@dataclass(frozen=True)
class Measured:
    """The measurements of one run, merged over the ranks."""

    # Time of each measured step in ms, of the slowest rank.
    times: list[float] = field(default_factory=list)
    # Steps that all ranks have taken, warm-up included.
    taken: int = 0
    # Kind of clock.
    clock: str = ""
    # Bytes of each peak, of the rank with most.
    memory: Mapping[str, int] = field(default_factory=dict)
    # Samples per step over all ranks, None if unknown.
    samples: float | None = None
    # Tokens per step over all ranks, None if unknown.
    tokens: float | None = None
    # Calls of the model per step, and the class of the model.
    batches: tuple[float, str] = (0, "")
    # Operations per step and rank by dtype, if counted.
    flops: Mapping[str, float] = field(default_factory=dict)
    # Operations among these that activation checkpointing recomputed.
    flops_again: float = 0
    # The reason for missing counts.
    flops_reason: str = ""
    # Names of the devices, each once.
    devices: Sequence[str] = ()
    # Clocks of the devices at the end, where known.
    clocks_mhz: Sequence[int] = ()
    # Version of torch.
    torch: str = ""
    # Whether FSDP2 sharded a model.
    has_fsdp2: bool = False
    # Number of ranks.
    world: int = 0
    # Ranks without a file.
    missing: Sequence[int] = ()

    def describe(self) -> str:
        """Return the measured times in a few words."""
        return f"{median(self.times):.4g} ms a step, worst {max(self.times):.4g}"


def read_measured(folder: Path) -> Measured:
    """Merge the files of a variant's processes; without files, no step was taken."""
    ranks = _one_each(worker_reports.read_reports(folder, "bench"))
    if not ranks:
        return Measured()
    flops, reason = _flops([rank["flops"] for rank in ranks])
    clocks = {rank["clock"] for rank in ranks if rank["clock"]}
    # Times of different clocks cannot be compared.
    column = "ms" if len(clocks) == 1 else "host_ms"
    first = ranks[0]
    missing = sorted(set(range(first["world"])) - {rank["rank"] for rank in ranks})
    return Measured(
        times=max_over_ranks([rank[column] for rank in ranks]),
        taken=min(rank["steps"] for rank in ranks),
        clock=clocks.pop() if len(clocks) == 1 else "host clock",
        memory={
            peak: max(rank["memory"].get(peak, 0) for rank in ranks) for peak in first["memory"]
        },
        samples=None if missing else _sum([rank["batch"]["samples"] for rank in ranks]),
        tokens=None if missing else _sum([rank["batch"]["tokens"] for rank in ranks]),
        batches=(first["batch"]["calls"], first["batch"]["module"]),
        flops=flops,
        flops_again=fmean(rank["flops"]["again"] for rank in ranks) if flops else 0,
        flops_reason=reason,
        devices=list(dict.fromkeys(rank["device"] for rank in ranks)),
        clocks_mhz=[rank["clock_mhz"] for rank in ranks if rank["clock_mhz"]],
        torch=first["torch"],
        has_fsdp2=first["has_fsdp2"],
        world=first["world"],
        missing=missing,
    )


def _one_each(files: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one file for each rank of the last elastic restart: that of the process with most steps.

    A restart may have fewer ranks; earlier ranks beyond them are left out.
    """
    by_rank: dict[int, Mapping[str, Any]] = {}

    def order(file: Mapping[str, Any]) -> tuple[int, int]:
        return file["restart"], file["steps"]

    for file in sorted(files, key=order):
        by_rank[file["rank"]] = file
    world = max(by_rank.values(), key=order)["world"] if by_rank else 0
    return [by_rank[rank] for rank in sorted(by_rank) if rank < world]


def _sum(values: list[Any]) -> float | None:
    return None if None in values else sum(values)


def _flops(ranks: Sequence[Mapping[str, Any] | None]) -> tuple[dict[str, float], str]:
    """Return the mean over ranks of the operations by dtype, or why there is none."""
    counted = [rank for rank in ranks if rank is not None]
    reasons = [rank["reason"] for rank in counted if rank["reason"]]
    if reasons or not counted:
        return {}, next(iter(reasons), "they are counted in the first stock run only")
    dtypes = dict.fromkeys(dtype for rank in counted for dtype in rank["by_dtype"])
    return {
        dtype: sum(rank["by_dtype"].get(dtype, 0) for rank in counted) / len(counted)
        for dtype in dtypes
    }, ""


@dataclass(frozen=True)
class BenchPlan:
    """The runs that the user wants."""

    # Program and arguments.
    command: Sequence[str]
    # Folder for logs and files of the processes. It must be empty.
    out: Path
    # Steps to measure.
    steps: int = 30
    # Steps of warm-up before them, at least MIN_WARMUP.
    warmup: int = 10
    # Runs of each kind.
    rounds: int = 3
    # Value of ``OVPATCH`` in patched runs; None for the value in the environment.
    features: str | None = None
    # Seconds without a step after which a run has hung.
    timeout: float = 600.0
    # Whether to run without each feature, too; None: if more than one did something.
    leave_one_out: bool | None = None
    # The name of a peer, from PEERS, to run as well.
    against: str | None = None
    # Runs the command on all nodes; None: it runs on this node alone.
    nodes: Leader | None = None
    # Whether ranks on other nodes are an error if there are no ``nodes``.
    must_see_all_ranks: bool = False


@dataclass(frozen=True)
class BenchRun:
    """One run that was measured."""

    # ``stock``, ``patched`` or ``without-<feature>``.
    kind: str
    # The number of the round, from 1.
    round: int
    # Duration from start to end.
    seconds: float
    # The measurements, merged over the ranks.
    measured: Measured


@dataclass
class BenchRuns:
    """All runs of a bench; only the first round if no feature was exercised."""

    # The runs in order.
    done: list[BenchRun] = field(default_factory=list)
    # Features that were exercised in the first patched run.
    exercised: list[str] = field(default_factory=list)
    # Ovpatch's report of that run, merged over its processes, if any reported.
    report: dict[str, Any] | None = None
    # Further remarks for the reader.
    notes: list[str] = field(default_factory=list)

    def list_measured(self, kind: str) -> list[Measured]:
        """Return the measurements of one kind, by rounds."""
        return [
            run.measured for run in sorted(self.done, key=lambda run: run.round) if run.kind == kind
        ]

    @property
    def kinds(self) -> list[str]:
        """The kinds that ran; stock and patched first."""
        return list(dict.fromkeys(run.kind for run in self.done))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the runs as plain data."""
        return [asdict(run) for run in self.done]


class FailedError(Exception):
    """A run could not be measured."""

    def __init__(self, message: str, kind: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.kind, self.outcome = kind, outcome


class StoppedError(Exception):
    """A signal ended the bench."""


class Progress:
    """Progress of a bench on stderr.

    On a terminal that is a bar, ``round 2/3, patched: step 12/40``, below the results of earlier runs. In a log it is a
    line at the start of a run, and one with its result.
    """

    def __init__(self, plan: BenchPlan) -> None:
        self._plan, self._name = plan, ""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        console, on_terminal = Console(stderr=True), sys.stderr.isatty()
        self.bar = rich_progress.Progress(
            *columns, console=console, transient=True, disable=not on_terminal
        )
        self._task = self.bar.add_task("", total=plan.warmup + plan.steps)

    def start_run(self, kind: str, round: int) -> None:
        """Show the start of a run."""
        self._name = f"round {round}/{self._plan.rounds}, {kind}"
        self.bar.reset(self._task, description=f"{self._name}: starting")
        if self.bar.disable:
            self._print_line("running")

    def show_step(self, number: int) -> None:
        """Show the steps that its slowest rank has taken."""
        words = f"{self._name}: step {number}/{self._plan.warmup + self._plan.steps}"
        self.bar.update(self._task, completed=number, description=words)

    def finish_run(self, measured: Measured) -> None:
        """Show the measurements of the run."""
        if self.bar.disable:
            self._print_line(measured.describe())
        else:
            self.bar.print(f"{self._name}: {measured.describe()}", highlight=False)

    def _print_line(self, message: str) -> None:
        print(f"ovpatch bench: {self._name}: {message}", file=sys.stderr, flush=True)


def run_rounds(plan: BenchPlan, progress: Progress) -> BenchRuns:
    """Run all rounds.

    A round runs every kind once. Odd rounds run stock first, even rounds last (A B, B A, A B), so
    that steady changes, such as a machine that warms up, affect both equally. The features to leave
    out are known after the first patched run; the runs without them follow it, and precede it in
    even rounds. Raises FailedError if a run failed, hung or took too
    few steps, StoppedError if a signal ended it, and NotStartedError if the command cannot be started.
    """
    return _Rounds(plan, progress).run_all()


def measure_facts(plan: BenchPlan, progress: Progress) -> list[Mapping[str, Any]]:
    """Run the command once in stock PyTorch, and return the facts of a step by rank, for predictions.

    Raises FailedError and StoppedError as :func:`run_rounds`.
    """
    steps = min(plan.steps, _FACT_STEPS)
    details = {"warmup": plan.warmup, "steps": steps, "records_facts": True}
    progress.start_run(FACTS, 1)
    outcome = _run_variant(plan, progress, STOCK, Variant(FACTS, variants.STOCK, details))
    ranks = _one_each(worker_reports.read_reports(outcome.folder, FACTS))
    if not ranks or len(ranks) < ranks[0]["world"]:
        raise FailedError(
            f"{FACTS}: {len(ranks)} ranks took {plan.warmup + steps} steps, and the prediction needs all ranks. "
            "Let the script take more steps, or lower --warmup",
            STOCK,
            outcome,
        )
    return ranks


class _Rounds:
    def __init__(self, plan: BenchPlan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._runs = BenchRuns()
        self._details = {"warmup": plan.warmup, "steps": plan.steps, "count_flops": False}
        self._kinds = {
            STOCK: Variant(STOCK, variants.STOCK, self._details),
            PATCHED: Variant(PATCHED, plan.features, self._details),
        }

    def run_all(self) -> BenchRuns:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        # A busy host is the most common cause of noise.
        if load > cores / 2:
            self._runs.notes.append(
                f"the host was busy before the first run: load {load:.1f} on {cores} cores"
            )
        self._first_round()
        if not self._runs.exercised:
            return self._runs
        for number in range(2, self._plan.rounds + 1):
            for kind in list(self._kinds) if number % 2 else list(reversed(self._kinds)):
                self._run(kind, number)
        return self._runs

    def _first_round(self) -> None:
        self._run_counted()
        outcome = self._run(PATCHED, 1)
        if self._plan.against is not None:
            self._run_peer(self._plan.against)
        self._runs.exercised, self._runs.report = outcome.exercised, outcome.report
        if self._plan.leave_one_out is False:
            return
        for variant in variants.leave_one_out(
            self._kinds[PATCHED], outcome.exercised, outcome.requires
        ).values():
            self._kinds[variant.name] = variant
            self._run(variant.name, 1)

    def _run_peer(self, name: str) -> None:
        """Run the peer for the first time; raise FailedError if the script has no such switch."""
        variables = {key: value for key, value in PEERS[name].items() if key not in os.environ}
        self._kinds[name] = Variant(name, variants.STOCK, self._details, variables)
        outcome = self._run(name, 1)
        if not self._runs.done[-1].measured.has_fsdp2:
            raise FailedError(
                f"--against {name}: no model was sharded, so this run is stock PyTorch. The switch "
                "works "
                "for HF Trainer and accelerate, on GPUs. Give --against only for such scripts",
                name,
                outcome,
            )

    def _run_counted(self) -> None:
        """Run stock and count its operations; if it fails in a counted step, run it once more without counting."""
        counting = Variant(STOCK, variants.STOCK, {**self._details, "count_flops": True})
        try:
            self._run(STOCK, 1, counting)
        except FailedError as error:
            counted = range(max(self._plan.warmup - 3, 1), self._plan.warmup)
            if (
                not error.outcome.code
                or variants.read_slowest_step(error.outcome.folder) not in counted
            ):
                raise
            self._run(STOCK, 1, name="stock-1-uncounted")
            run = self._runs.done.pop()
            why = "the script failed while its operations were counted, and did not without that"
            self._runs.done.append(replace(run, measured=replace(run.measured, flops_reason=why)))

    def _run(
        self, kind: str, number: int, variant: Variant | None = None, name: str | None = None
    ) -> Outcome:
        variant = replace(variant or self._kinds[kind], name=name or f"{kind}-{number}")
        plan = self._plan
        self._progress.start_run(kind, number)
        outcome = _run_variant(plan, self._progress, kind, variant)
        measured = read_measured(outcome.folder)
        if problem := _describe_too_few(measured, plan):
            raise FailedError(f"{variant.name}: {problem}", kind, outcome)
        self._runs.done.append(BenchRun(kind, number, outcome.seconds, measured))
        if len(measured.times) < plan.steps:
            self._runs.notes.append(
                f"{variant.name}: the script ended after {measured.taken} steps"
            )
        node = variants.describe_node(outcome.folder)
        if node and node not in self._runs.notes:
            self._runs.notes.append(node)
        if measured.missing and not node:
            ranks = ", ".join(map(str, measured.missing))
            self._runs.notes.append(
                f"{variant.name}: nothing is known of rank {ranks}: no step was seen there, or its "
                "end"
            )
        self._progress.finish_run(measured)
        return outcome


def _run_variant(plan: BenchPlan, progress: Progress, kind: str, variant: Variant) -> Outcome:
    """Run a variant once; raise StoppedError or FailedError, as a run of this kind, if that failed."""
    run_variant = choose_runner(plan.nodes, must_see_all_ranks=plan.must_see_all_ranks)
    outcome = run_variant(
        variant,
        plan.command,
        WORKER,
        plan.out,
        timeout=plan.timeout,
        progress=progress.show_step,
    )
    if outcome.interrupted:
        raise StoppedError
    if problem := _describe_problem(outcome, plan.timeout):
        raise FailedError(f"{variant.name}: {problem}", kind, outcome)
    return outcome


def _describe_problem(outcome: Outcome, timeout: float) -> str:
    if outcome.waits_in_tool:
        return f"{outcome.waits_in_tool}, so no step within {timeout:g} s is no hang of the script. Give --timeout more"
    if outcome.timed_out:
        return f"no process took a step for {timeout:g} s, so it was ended. If it is that slow, give --timeout"
    if outcome.failures:
        whose = "; ".join(dict.fromkeys(failure["error"] for failure in outcome.failures))
        return f"ovpatch could not do its work in a process: {whose}"
    return f"the command failed with {outcome.describe_exit()}" if outcome.code else ""


def _describe_too_few(measured: Measured, plan: BenchPlan) -> str:
    found = len(measured.times)
    if found >= MIN_STEPS:
        return ""
    if not measured.taken:
        return (
            "no process took a step of a torch optimizer, or all called os._exit before the step was "
            "over. bench counts calls of torch.optim.Optimizer.step(): let the script take more "
            "steps"
        )
    needed = plan.warmup + MIN_STEPS
    return (
        f"the script took {measured.taken} steps, of which {plan.warmup} are warm-up, so {found} "
        "could be measured; "
        f"the least is {MIN_STEPS}. Let it take {needed} or more (better "
        f"{plan.warmup + plan.steps}), or lower --warmup"
    )
