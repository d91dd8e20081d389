"""The progress bar of a bench on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ovpatch.insight.bench.measured import Measured
from ovpatch.insight.bench.rounds import Plan


class Bar:
    """Shows ``round 2/3, patched: step 12/40`` and, above it, what earlier runs measured."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=plan.warmup + plan.steps)
        self._name = ""

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, kind: str, round: int) -> None:
        """A run begins."""
        self._name = f"round {round}/{self._plan.rounds}, {kind}"
        self._progress.reset(self._task, description=f"{self._name}: starting")

    def step(self, number: int) -> None:
        """Its slowest rank has taken this many steps."""
        words = f"{self._name}: step {number}/{self._plan.warmup + self._plan.steps}"
        self._progress.update(self._task, completed=number, description=words)

    def end(self, measured: Measured) -> None:
        """The run has been measured."""
        self._progress.print(f"{self._name}: {measured.in_words()}", highlight=False)
