"""The outcome of a verification as text: the verdict in one line, then its evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ovpatch.insight import arms
from ovpatch.insight.arms import Outcome
from ovpatch.insight.verify.compare import Finding, RunComparison
from ovpatch.insight.verify.verify import Conclusion, Verification, find_failure

_ROWS: Final = 10
_COLOURS: Final = {Conclusion.BITWISE: "green", Conclusion.NOISE: "green", Conclusion.DIFFERENT: "red"}


def print_result(result: Verification, console: Console) -> None:
    """Print a result."""
    style = f"bold {_COLOURS.get(result.verdict, 'yellow')}"
    console.print(Text(f"{result.verdict.value}: {result.why}", style=style), soft_wrap=True)
    for line in _lines(result):
        console.print(Text(line), soft_wrap=True)
    if result.compared.findings:
        console.print(_table(result.compared, result.measured))
    for outcome in _telling(result):
        _show_end(outcome, console)


def _lines(result: Verification) -> Iterator[str]:
    compared = result.compared
    if compared.processes:
        yield f"compared    {_scope(compared)}"
        yield f"bits        {_bits(result)}"
        yield f"yardstick   {_yardstick(result)}"
    if result.blamed:
        yield f"because of  {', '.join(result.blamed)}"
    for feature, counters in result.counters.items():
        if feature in result.idle:
            yield f"{feature:<11} did nothing: {result.idle[feature] or 'it counts nothing'}"
            continue
        yield f"{feature:<11} {', '.join(f'{name} {count}' for name, count in counters.items())}"
        for remark in result.remarks[feature]:
            yield f"{'':<11} {remark}"
    yield f"arms        {', '.join(f'{name} {outcome.seconds:.1f} s' for name, outcome in result.outcomes.items())}"
    for note in result.notes:
        yield f"note        {note}"


def _scope(compared: RunComparison) -> str:
    counts = {"backward": "losses", "step": "optimizer steps", "scale": "loss scales", "checkpoint": "checkpoints"}
    events = ", ".join(f"{compared.events.get(kind, 0)} {name}" for kind, name in counts.items() if kind != "scale")
    return f"{compared.values} values on {', '.join(compared.processes)}, to step {compared.steps}: {events}"


def _bits(result: Verification) -> str:
    compared = result.compared
    if not compared.findings:
        return "all equal"
    of_them = f"{len(compared.different)} of them by more than noise" if result.measured else "noise not measured"
    return f"{len(compared.findings)} values are not bitwise equal, {of_them}"


def _yardstick(result: Verification) -> str:
    if result.noise:
        measured = "; ".join(f"{name}: {amount}" for name, amount in result.noise.items())
        return f"stock against itself, {measured}. Allowed is twice what its like moved, one element four times"
    if result.compared.findings:
        return "not measured"
    return "not needed: nothing differs (--noise measures it)"


def _table(compared: RunComparison, measured: bool) -> Table:
    first = compared.first
    shown = [*filter(None, [first]), *(one for one in compared.worst(_ROWS) if one is not first)][:_ROWS]
    title = "not bitwise equal"
    if len(compared.findings) > _ROWS:
        title += f": {'the first, then ' if first else ''}the worst of {len(compared.findings)}"
    table = Table("step", "process", "value", "|diff|", "allowed", "what", title=title, title_justify="left")
    for finding in shown:
        table.add_row(*map(Text, _cells(finding, measured)), style=None if finding.different else "dim")
    return table


def _cells(finding: Finding, measured: bool) -> tuple[str, ...]:
    row = finding.row
    return (
        str(finding.step),
        finding.process,
        row.name,
        "" if row.max_abs_diff is None else f"{row.max_abs_diff:.3g}",
        "" if row.allowed is None or not measured else f"{row.allowed:.3g}",
        row.note,
    )


def _telling(result: Verification) -> list[Outcome]:
    """Return the arms whose end is shown."""
    unhappy = [outcome for outcome in result.outcomes.values() if outcome.code or outcome.timed_out or outcome.failures]
    telling = None if result.verdict is Conclusion.UNDECIDED else ("stock", "patched")
    return [outcome for outcome in unhappy if telling is None or outcome.arm.name in telling]


def _show_end(outcome: Outcome, console: Console) -> None:
    ranks = arms.read_ranks(outcome.folder)
    for pid, stacks in outcome.stacks.items():
        process = f"rank {ranks[pid]} (process {pid})" if pid in ranks else f"process {pid}"
        console.print(Text(f"\nstacks of {process} in the arm '{outcome.arm.name}':\n{stacks}"), soft_wrap=True)
    for failure in outcome.failures:
        console.print(Text(f"\nprocess {failure['pid']} (rank {failure['rank']}): {failure['error']}"), soft_wrap=True)
    log = outcome.log.read_text(encoding="utf-8", errors="replace")
    console.print(Text(f"\nhow the arm '{outcome.arm.name}' ended:\n{find_failure(log)}\n"), soft_wrap=True)
