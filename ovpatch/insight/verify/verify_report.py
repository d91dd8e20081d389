"""The report of ``ovpatch verify`` as text: the first line is the verdict, and details follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.text import Text

from ovpatch.insight import variants
from ovpatch.insight.variants import Outcome
from ovpatch.insight.verify.compare import RULES, Finding, RunComparison
from ovpatch.insight.verify.verification import Conclusion, Verification
from ovpatch.session.report_table import render_table

# The number of rows of the table.
_MAX_ROWS: Final = 10
_HEADS: Final = ("value", "step", "process", "|diff|", "allowed", "rule", "where", "what")


def print_result(result: Verification, console: Console, command: str = "") -> None:
    """Print a result, and the next command for the user if ``command`` was verified."""
    style = {Conclusion.DIFFERENT: "red"}.get(result.verdict, "yellow")
    style = "green" if result.verdict.is_equal else style
    console.print(Text(result.headline, style=f"bold {style}"), soft_wrap=True)
    for line in _list_details(result):
        console.print(Text(line), soft_wrap=True)
    if result.compared.findings:
        text = _render_worst(result.compared, console, is_noise_known=result.is_noise_known)
        console.print(Text(text), soft_wrap=True)
    for name, outcome in result.outcomes.items():
        is_cause = result.verdict is Conclusion.UNDECIDED or name in ("stock", "patched")
        if is_cause and (outcome.code or outcome.timed_out or outcome.failures):
            _print_end(outcome, console)
    if command:
        console.print(Text(f"next        {_choose_next(result, command)}"), soft_wrap=True)


def _choose_next(result: Verification, command: str) -> str:
    """Return the command that a user needs after this verdict."""
    if result.verdict.is_equal:
        return f"ovpatch bench -- {command}"
    if result.verdict is Conclusion.DIFFERENT:
        names = ",".join(f"-{name}" for name in result.blamed)
        remedy = f"turn it off by OVPATCH={names}, and report it: " if names else "report it: "
        return f"{remedy}ovpatch verify --out DIR -- {command}   # keeps the logs of all runs"
    if result.verdict is Conclusion.NOT_EXERCISED:
        return f"ovpatch run --full -- {command}"
    return f"ovpatch verify --out DIR -- {command}   # keeps the logs of all runs"


def _list_details(result: Verification) -> Iterator[str]:
    compared = result.compared
    if compared.processes:
        yield f"compared    {_describe_values(compared)}"
        yield f"bits        {_describe_bits(result)}"
        yield f"noise       {_describe_noise(result)}"
        for rule, count in compared.count_rules().items() if result.is_noise_known else ():
            values = f"{count} value{'s' if count > 1 else ''}"
            yield f"{'allowed':<11} {values} ({rule}): no more than {RULES[rule]}"
    if result.blamed:
        yield f"because of  {', '.join(result.blamed)}"
    for feature, counters in result.counters.items():
        if feature in result.idle:
            yield f"{feature:<11} did nothing: {result.idle[feature] or 'it counts nothing'}"
            continue
        counts = [f"{name} {count}" for name, count in counters.items() if count]
        if feature in result.left_to_stock:
            counts.append("and some work was left to torch")
        yield f"{feature:<11} {', '.join(counts)}"
        for remark in result.remarks[feature]:
            yield f"{'':<11} {remark}"
    seconds = [f"{name} {outcome.seconds:.1f} s" for name, outcome in result.outcomes.items()]
    yield f"runs        {', '.join(seconds)}"
    for note in result.notes:
        yield f"note        {note}"


def _describe_values(compared: RunComparison) -> str:
    event_types = {"backward": "losses", "step": "optimizer steps", "checkpoint": "checkpoints"}
    events = ", ".join(
        f"{compared.events.get(event, 0)} {name}" for event, name in event_types.items()
    )
    processes = ", ".join(compared.processes)
    return f"{compared.values} values on {processes}, to step {compared.steps}: {events}"


def _describe_bits(result: Verification) -> str:
    compared = result.compared
    if not compared.findings:
        return "all equal"
    details = "noise not measured"
    if result.is_noise_known:
        details = f"{len(compared.different)} of them by more than is allowed"
    return f"{len(compared.findings)} values are not bitwise equal, {details}"


def _describe_noise(result: Verification) -> str:
    if result.noise:
        runs = "; ".join(f"{name}: {amount}" for name, amount in result.noise.items())
        return f"stock against itself, {runs}"
    if result.compared.findings:
        return "not measured"
    return "not needed: nothing differs (--noise measures it)"


def _render_worst(compared: RunComparison, console: Console, *, is_noise_known: bool) -> str:
    """Return the table of unequal values: one row a name, the first difference on top."""
    # One late parameter differs on all ranks and in all later steps, which would fill the table.
    first = compared.first
    findings = compared.worst(len(compared.findings))
    ordered = [first, *findings] if first is not None else findings
    by_name: dict[str, Finding] = {}
    for finding in ordered:
        by_name.setdefault(finding.row.name, finding)
    places = Counter(finding.row.name for finding in findings)
    rows = [
        _make_row(finding, places[name], is_noise_known=is_noise_known)
        for name, finding in list(by_name.items())[:_MAX_ROWS]
    ]
    title = "not bitwise equal"
    if len(by_name) > _MAX_ROWS:
        order = "the first, then " if first is not None else ""
        title += f": {order}the worst of {len(by_name)} names"
    return render_table(title, _HEADS, rows, colour=False, width=console.width)


def _make_row(finding: Finding, places: int, *, is_noise_known: bool) -> tuple[str, ...]:
    row = finding.row
    has_allowed = row.allowed is not None and is_noise_known
    return (
        row.name,
        str(finding.step),
        finding.process,
        "" if row.max_abs_diff is None else f"{row.max_abs_diff:.3g}",
        f"{row.allowed:.3g}" if has_allowed else "",
        row.rule if is_noise_known else "",
        f"and {places - 1} more places" if places > 1 else "only there",
        row.note,
    )


def _print_end(outcome: Outcome, console: Console) -> None:
    name, ranks = outcome.variant.name, variants.read_ranks(outcome.folder)
    for pid, stacks in outcome.stacks.items():
        process = variants.name_process(pid, ranks)
        _print_block(console, f"stacks of {process} in the run '{name}':\n{stacks}")
    for failure in outcome.failures:
        process = f"process {failure['pid']} (rank {failure['rank']})"
        _print_block(console, f"{process}: {failure['error']}")
    _print_block(console, f"the end of the run '{name}':\n{outcome.read_failure()}\n")


def _print_block(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}"), soft_wrap=True)
