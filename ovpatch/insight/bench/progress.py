"""How far a bench is, on stderr: a bar on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ovpatch.insight.bench.measured import Measured
from ovpatch.insight.bench.rounds import Plan, Progress


class _Lines:
    """For logs: one line as a run begins, and its result."""

    def __init__(self, plan: Plan) -> None:
        self._rounds = plan.rounds

    def begin(self, kind: str, round: int) -> None:
        self._name = f"round {round}/{self._rounds}, {kind}"
        self._say(f"{self._name}: running")

    def step(self, number: int) -> None:
        pass

    def end(self, measured: Measured) -> None:
        self._say(f"{self._name}: {measured.in_words()}")

    def _say(self, message: str) -> None:
        print(f"ovpatch bench: {message}", file=sys.stderr, flush=True)


@contextmanager
def shown(plan: Plan) -> Iterator[Progress]:
    """Show progress while the block runs."""
    if not sys.stderr.isatty():
        yield _Lines(plan)
        return
    from ovpatch.insight.bench.bar import Bar

    with Bar(plan) as bar:
        yield bar
