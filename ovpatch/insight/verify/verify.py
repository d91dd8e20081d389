"""Verification of a command: which variants run, in which order, the conclusion from their records, and it as text."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ovpatch.exit_codes import ExitCode
from ovpatch.insight import equality, variants
from ovpatch.insight.variants import Outcome, Variant
from ovpatch.insight.verify import noise_runs, recording
from ovpatch.insight.verify.compare import BY_FLOOR, ORDER, RULES, Finding, RunComparison, compare_runs
from ovpatch.insight.verify.recording import BACKWARD, RecordedRun
from ovpatch.session.plugins import PluginError, Plugins, find_plugins
from ovpatch.settings.options import list_verified_variables


class Conclusion(str, Enum):
    """The conclusion of a verification."""

    BITWISE = "bitwise equal"
    FLOOR = "equal up to 1e-6; stock repeats all bits"
    NOISE = "equal within noise"
    DIFFERENT = "different"
    UNDECIDED = "cannot decide"
    NOT_EXERCISED = "not exercised"
    NO_STEP = "nothing to compare"
    FAILS_LATER = "equal until the script itself fails"
    SCRIPT_FAILS = "the script itself fails"
    NOT_SEEN = "could not be run"
    INTERRUPTED = "interrupted"

    @property
    def code(self) -> ExitCode:
        """The exit code."""
        if self in (Conclusion.BITWISE, Conclusion.FLOOR, Conclusion.NOISE):
            return ExitCode.OK
        known = {Conclusion.DIFFERENT: ExitCode.PROBLEM, Conclusion.INTERRUPTED: ExitCode.INTERRUPTED}
        return known.get(self, ExitCode.UNDECIDED)


@dataclass(frozen=True)
class Verification:
    """The result of a verification."""

    verdict: Conclusion
    why: str  # its reason, in a sentence
    compared: RunComparison = field(default_factory=RunComparison)  # the comparison of stock and patched
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)  # every variant that ran, by name
    blamed: Sequence[str] = ()  # features that cause the difference: without any one of them there is none
    notes: Sequence[str] = ()  # further remarks for the user
    noise: Mapping[str, str] = field(default_factory=dict)  # the difference of each noise run from stock, in words
    measured: bool = True  # whether the noise is known, so that differences can be told from it

    @property
    def headline(self) -> str:
        """The verdict and its reason in one line."""
        return self.why if self.verdict is Conclusion.FAILS_LATER else f"{self.verdict.value}: {self.why}"

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """Counters of each feature that was on, summed over the processes."""
        return self._patched.counters if self._patched else {}

    @property
    def idle(self) -> dict[str, str]:
        """Features that were on and did no work, with their remarks; equal results prove nothing about them."""
        return self._patched.idle if self._patched else {}

    @property
    def remarks(self) -> dict[str, list[str]]:
        """Remarks of exercised features, such as an optimizer left to stock."""
        return {name: self._patched.remarks[name] for name in self._patched.exercised} if self._patched else {}

    @property
    def _patched(self) -> Outcome | None:
        return self.outcomes.get("patched")

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        compared = self.compared
        return {
            "verdict": self.verdict.value,
            "exit_code": self.verdict.code,
            "why": self.why,
            "steps": compared.steps,
            "processes": compared.processes,
            "values": compared.values,
            "events": compared.events,
            "not_bitwise": len(compared.findings),
            "different": len(compared.different) if self.measured else None,
            "first": None if compared.first is None else self._finding(compared.first),
            "worst": [self._finding(finding) for finding in compared.worst(50)],
            "features": list(self.blamed),
            "counters": self.counters,
            "idle": self.idle,
            "remarks": self.remarks,
            "noise": dict(self.noise),
            "notes": list(self.notes),
            "runs": {name: _outcome(outcome) for name, outcome in self.outcomes.items()},
        }

    def _finding(self, finding: Finding) -> dict[str, Any]:
        row = finding.row.to_json() | ({} if self.measured else {"verdict": None, "allowed": None})
        return {"process": finding.process, "step": finding.step, "event": finding.event, **row}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "exit_code": outcome.code,
        "seconds": round(outcome.seconds, 3),
        "timed_out": outcome.timed_out,
        "stacks": {str(pid): text for pid, text in outcome.stacks.items()},
        "failures": outcome.failures,
    }


WORKER: Final = "ovpatch.insight.verify.probes"

#: Most that a difference may exceed its allowance by chance, where another stock run moved anything.
_CHANCE: Final = 100.0

#: Most further stock runs while chance may explain a difference.
_DRAWS: Final = 4

#: torch's error about an operation, after its name.
_NO_FORM: Final = "does not have a deterministic implementation"


@dataclass(frozen=True)
class Request:
    """What to verify."""

    command: Sequence[str]  # program and arguments
    out: Path  # folder of the variants
    steps: int = 5  # number of steps after which a run is ended
    features: str | None = None  # value of ``OVPATCH`` in the patched run; None for that of the environment
    noise: bool = False  # whether stock's noise is measured even where every bit is equal
    deterministic: bool = False  # whether torch uses deterministic algorithms
    # Whether torch then raises where it has none. With mere warnings some operations that have a deterministic form do
    # not use it, such as the backward of flash attention; a script that gets an error runs again with warnings.
    strict: bool = True
    timeout: float = 600.0  # seconds without a step after which a run counts as hung

    def make_variant(self, name: str, features: str | None = variants.STOCK, **details: Any) -> Variant:
        """Return a variant of this verification."""
        variables = {**noise_runs.VARIABLES, **(noise_runs.DETERMINISTIC if self.deterministic else {})}
        if features != variants.STOCK:
            variables |= _read_verified_variables()
        shared = {"steps": self.steps, "deterministic": self.deterministic, "strict": self.strict}
        return Variant(name, features, {**shared, **details}, variables)


def _read_verified_variables() -> dict[str, str]:
    """Return the variables of options by which features check themselves more often than in training."""
    plugins = Plugins()
    variables: dict[str, str] = {}
    for found in find_plugins().values():
        # The patched run reports a plugin that cannot be loaded.
        with suppress(PluginError):
            variables |= list_verified_variables(plugins.load_feature(found), os.environ)
    return variables


class _Decided(Exception):
    """The conclusion is known."""

    def __init__(self, verdict: Conclusion, why: str) -> None:
        super().__init__(why)
        self.verdict, self.why = verdict, why


class _Unsteady(Exception):
    """The script does not repeat itself; it may with deterministic algorithms."""


@dataclass
class _Verifier:
    """A running verification.

    Stock and patched run first. Unless every bit is equal, stock runs twice more, once as it was and once with its
    reductions reordered; a difference beyond theirs counts. Then each feature is left out in turn: without the one to
    blame there is no difference. If a stock run that measures noise fails, nothing is concluded about differing values.

    [Note: scripts that do not repeat themselves] Where two stock runs differ and the patched run differs by somewhat
    more, that may be chance. All variants run again with deterministic algorithms, and their conclusion counts. If
    those do not repeat themselves either, stock runs some more times: of thousands of values, a few move more than
    twice as far as in one or two runs.
    """

    request: Request
    progress: Callable[[str, int], None]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    compared: RunComparison = field(default_factory=RunComparison)
    noise_runs: dict[str, RecordedRun] = field(default_factory=dict)
    blamed: list[str] = field(default_factory=list)
    noise: dict[str, str] = field(default_factory=dict)
    unsteady: str = ""
    noisy: bool = False
    measured: bool = False
    failed: list[str] = field(default_factory=list)  # noise runs that failed, and how they ended

    def verify(self) -> Verification:
        """Run the variants that the conclusion needs."""
        try:
            verdict, why = self._judge()
        except _Decided as end:
            verdict, why = end.verdict, end.why
        except _Unsteady:
            return self._deterministic()
        measured = self.measured or not self.compared.findings
        return Verification(verdict, why, self.compared, self.outcomes, self.blamed, self.notes, self.noise, measured)

    def _judge(self) -> tuple[Conclusion, str]:
        stock = self._stock()
        patched = self._patched()
        self.compared = compare_runs(stock, patched)
        outcome = self.outcomes["patched"]
        wrong = _describe_failure(self.outcomes["stock"], outcome)
        if self.compared.findings or self.request.noise or (wrong and self.outcomes["stock"].code):
            self._measure_noise(stock, patched)
            wrong = self._unless_stock_does_so_too(wrong)
            if self.unsteady and self._may_be_chance(wrong) and not self.request.deterministic:
                raise _Unsteady
            self._draw_more(stock, patched, wrong)
        was_on = outcome.applied or outcome.exercised
        if was_on and self.failed and self.compared.findings and not wrong:
            amount, failed = _describe_amount(self.compared), " and ".join(self.failed)
            why = f"{amount}, and how much of that is noise is not known, because {failed}, and stock did not"
            return Conclusion.UNDECIDED, why
        if was_on and (self.compared.different or wrong):
            self._find_the_feature(stock)
            if wrong and any(one.row.name == ORDER for one in self.compared.different):
                self.notes.append(f"Afterwards {wrong}: ranks that are out of step do not end together.")
                wrong = ""
            return Conclusion.DIFFERENT, self._describe_difference(wrong)
        if not self.compared.steps:
            return Conclusion.NO_STEP, self._describe_no_step()
        if self.compared.events.get(BACKWARD) and not self.compared.finite:
            if not self.compared.finite_parameters:
                return Conclusion.NO_STEP, (
                    "every loss and every parameter is NaN or infinite, under stock PyTorch too, and NaNs are all alike"
                )
            share = f"{self.compared.finite_parameters} of {self.compared.parameters}"
            told = "Every loss is NaN or infinite, under stock PyTorch too. The answer is that of the parameters"
            self.notes.append(f"{told}, of which {share} are finite.")
        self._mention_what_was_not_compared()
        if self.outcomes["stock"].code:
            return Conclusion.FAILS_LATER, self._describe_common_end()
        if not outcome.exercised:
            return Conclusion.NOT_EXERCISED, _why_not_exercised(outcome)
        if self.compared.steps < self.request.steps:
            self.notes.append(f"The script ended by itself before step {self.request.steps}, for which --steps asks.")
        return self._find_equality(), self._describe_scope()

    def _find_equality(self) -> Conclusion:
        """Return how the runs are equal, where no value differs by more than noise."""
        if not self.compared.findings:
            return Conclusion.BITWISE
        return Conclusion.NOISE if self.noisy else Conclusion.FLOOR

    def _may_be_chance(self, wrong: str) -> bool:
        """Return whether noise, undersampled so far, may explain all differences."""
        different = self.compared.different
        return bool(different) and self.noisy and not wrong and all(one.row.excess < _CHANCE for one in different)

    def _draw_more(self, stock: RecordedRun, patched: RecordedRun, wrong: str) -> None:
        """Run stock again while that may show a difference to be noise."""
        for number in range(2, _DRAWS + 2):
            if self.failed or not self._may_be_chance(wrong):
                break
            name, details = ("rerun", {}) if self.unsteady else ("reordered", self._reordering(number))
            again = self._noise_run(f"{name}-{number}", **details)
            self.noise[f"{name} {number}"] = self._measured(f"{name}-{number}", compare_runs(stock, again))
            self.compared = compare_runs(stock, patched, self.noise_runs)

    def _deterministic(self) -> Verification:
        """Run everything with deterministic algorithms; see [Note: scripts that do not repeat themselves]."""
        out = self.request.out / "deterministic"
        out.mkdir()
        again = _Verifier(replace(self.request, deterministic=True, out=out), self.progress)
        count = len(self.compared.different)
        again.notes.append(
            f"{self.unsteady} The patched run differed in {count} value{'s' if count > 1 else ''} by more than that, "
            "so all of them ran again with deterministic algorithms. This is the outcome of those."
        )
        return again.verify()

    # ---------------------------------------------------------------- variants

    def _run(self, variant: Variant) -> RecordedRun:
        outcome = variants.run_variant(
            variant,
            self.request.command,
            WORKER,
            self.request.out,
            timeout=self.request.timeout,
            progress=lambda step: self.progress(variant.name, step),
        )
        self.outcomes[variant.name] = outcome
        if outcome.interrupted:
            raise _Decided(Conclusion.INTERRUPTED, f"while the run '{variant.name}' ran")
        return recording.read_recorded(outcome.folder, cut=outcome.timed_out or outcome.code != 0)

    def _stock(self) -> RecordedRun:
        run = self._run(self.request.make_variant("stock"))
        outcome = self.outcomes["stock"]
        if self.request.deterministic and self.request.strict and outcome.code and _NO_FORM in outcome.read_log():
            self.request = replace(self.request, strict=False, out=self.request.out / "warned")
            self.request.out.mkdir()
            self.notes.append("Not all is deterministic: the script uses operations of which torch has no such form.")
            return self._stock()
        if outcome.failures:
            raise _Decided(Conclusion.NOT_SEEN, f"a process could not be observed: {outcome.failures[0]['error']}")
        if outcome.timed_out:
            self._blame_no_script(outcome)
            seconds = self.request.timeout
            raise _Decided(Conclusion.SCRIPT_FAILS, f"it hangs under stock PyTorch: no step within {seconds:g} s")
        if outcome.code and not variants.read_slowest_step(outcome.folder):
            raise _Decided(Conclusion.SCRIPT_FAILS, f"under stock PyTorch it fails {_describe_end(outcome)}")
        return run

    def _patched(self) -> RecordedRun:
        run = self._run(self.request.make_variant("patched", self.request.features))
        outcome, stock = self.outcomes["patched"], self.outcomes["stock"]
        if outcome.failures:
            raise _Decided(Conclusion.NOT_EXERCISED, f"a process was not patched: {outcome.failures[0]['error']}")
        self._blame_no_script(outcome)
        if stock.code and not outcome.code:
            raise _Decided(
                Conclusion.SCRIPT_FAILS, f"under stock PyTorch it fails {_describe_end(stock)}, patched it does not"
            )
        if stock.code:
            self.notes.append(
                f"The script itself fails under stock PyTorch, with {stock.describe_exit()}, and patched with "
                f"{outcome.describe_exit()}. What it computed before that was compared."
            )
        return run

    def _blame_no_script(self, outcome: Outcome) -> None:
        """Conclude that a run was not observed if it hung while a process was in ovpatch's own code."""
        if outcome.waits_in_tool:
            raise _Decided(
                Conclusion.NOT_SEEN,
                f"{outcome.waits_in_tool} in the run '{outcome.variant.name}', so no step within "
                f"{self.request.timeout:g} s is no hang of the script. Give --timeout more seconds",
            )

    def _measure_noise(self, stock: RecordedRun, patched: RecordedRun) -> None:
        rerun = self._noise_run("rerun")
        reordered = self._noise_run("reordered", **self._reordering(1))
        itself, otherwise = compare_runs(stock, rerun), compare_runs(stock, reordered)
        self.noise = {"rerun": self._measured("rerun", itself), "reordered": self._measured("reordered", otherwise)}
        self.noisy = bool(itself.findings or otherwise.findings)
        if itself.findings:
            first = min(itself.findings, key=lambda one: (one.step, one.order))
            self.unsteady = (
                f"The script does not repeat itself: two stock runs differ from step {first.step} on, first in "
                f"'{first.row.name}' on {first.process}."
            )
            advice = "seeds" if self.request.deterministic else "seeds, or try --deterministic"
            self.notes.append(f"{self.unsteady} Differences of that size say nothing about ovpatch. Give it {advice}.")
        self.compared = compare_runs(stock, patched, self.noise_runs)
        self.measured = not self.failed

    def _measured(self, name: str, found: RunComparison) -> str:
        """Return the difference of a noise run from stock in words; note a failure before all values were recorded."""
        outcome = self.outcomes[name]
        if outcome.code == self.outcomes["stock"].code or found.values >= self.compared.values:
            return _describe_amount(found)
        end = (
            f"hung after step {variants.read_furthest_step(outcome.folder)}"
            if outcome.timed_out
            else f"failed {_describe_end(outcome)}"
        )
        self.failed.append(f"the run '{name}' {end}")
        self.measured = False
        return end

    def _reordering(self, number: int) -> dict[str, Any]:
        """Return the orders for the worker of the ``number``-th reordered variant."""
        return {"reorder": number, "pieces": number + 1 if self.outcomes["patched"].reorders_products else 0}

    def _noise_run(self, name: str, **details: Any) -> RecordedRun:
        """Run stock once more, and note a different end."""
        run = self.noise_runs[name] = self._run(self.request.make_variant(name, **details))
        if self.outcomes[name].code != self.outcomes["stock"].code:
            self.notes.append(f"The run '{name}' ended with {self.outcomes[name].describe_exit()}, stock did not.")
        return run

    def _unless_stock_does_so_too(self, wrong: str) -> str:
        """Return nothing if stock fails now here, now there: another end of the patched run means nothing."""
        stock, patched = self.outcomes["stock"], self.outcomes["patched"]
        is_steady = all(_end_alike(self.outcomes[name], stock) for name in self.noise_runs)
        if not (wrong and stock.code and patched.code) or is_steady:
            return wrong
        self.notes.append(f"That {wrong} says nothing: other stock runs end elsewhere, too.")
        return ""

    def _find_the_feature(self, stock: RecordedRun) -> None:
        patched = self.outcomes["patched"]
        others = variants.leave_one_out(patched.variant, patched.applied, patched.requires)
        for feature, without in others.items():
            run = self._run(without)
            outcome = self.outcomes[without.name]
            found = compare_runs(stock, run, self.noise_runs)
            if not found.different and not _describe_failure(self.outcomes["stock"], outcome):
                self.blamed.append(feature)
        if not self.blamed:  # no variant was run for these: without them it would be stock
            self.blamed = [feature for feature in patched.applied if feature not in others]
        if not self.blamed:
            self.notes.append("No single feature is to blame: leaving out any one of them, the difference stays.")

    # ---------------------------------------------------------------- words

    def _mention_what_was_not_compared(self) -> None:
        for one in [finding for finding in self.compared.findings if finding.row.name == ORDER]:
            self.notes.append(
                f"On {one.process} nothing is compared from '{one.event}' at step {one.step} on: what happens there is "
                "in another order in each stock run."
            )
        unread = [f"'{name}' ({kind})" for name, kind in self.compared.unread.items()]
        if unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            self.notes.append(f"These values cannot be read and were not compared: {', '.join(unread[:3])}{more}.")

    def _describe_scope(self) -> str:
        compared = self.compared
        ranks = f"{len(compared.processes)} rank{'s' if len(compared.processes) != 1 else ''}"
        steps = f"{compared.steps} step{'s' if compared.steps != 1 else ''}"
        patched = self.outcomes["patched"]
        node = variants.describe_node(patched.folder)
        more = [f"; {node}"] if node else []
        if self.noisy and (floor := compared.count_rules().get(BY_FLOOR)):
            more.append(f"; {floor} of them by {equality.FLOOR:g}, as stock moves less")
        more += [f"; {name} did nothing" for name in patched.idle]
        more += [f"; {name} left some work to stock" for name in patched.left_to_stock]
        return f"{steps}, {ranks}, {compared.values} values{''.join(more)}"

    def _describe_common_end(self) -> str:
        """Return how far the runs are equal that both fail, and how they fail."""
        equal = self._find_equality().value
        end = _describe_end(self.outcomes["stock"])
        return (
            f"equal up to step {self.compared.steps}, where the script itself fails, stock and patched, {end} "
            f"({equal}: {self._describe_scope()})"
        )

    def _describe_difference(self, wrong: str) -> str:
        first = self.compared.first
        feature = f", because of {' or '.join(self.blamed)}" if self.blamed else ""
        if first is None:
            return wrong + feature
        then = f"; then {wrong}" if wrong else ""
        row = first.row
        far = ""
        if row.allowed is not None and row.max_abs_diff is not None and self.measured:
            far = f" by {row.max_abs_diff:.3g}, where {row.allowed:.3g} is allowed ({row.rule})"
        return f"first in '{row.name}' at step {first.step} on {first.process}{far}{feature}{then}"

    def _describe_no_step(self) -> str:
        losses = self.compared.events.get(BACKWARD, 0)
        seen = f"{losses} losses are equal, but " if losses else ""
        return (
            f"{seen}no optimizer of torch.optim made a step in any process. Is this the command that trains? If it "
            "ends before its first step, give it more data or steps. If it updates parameters by itself, it is unseen."
        )


def verify(request: Request, progress: Callable[[str, int], None] = lambda variant, step: None) -> Verification:
    """Run a command stock and patched, and conclude whether it computes the same.

    ``progress`` is called with a variant's name and the last step that all its processes have taken. Raises
    SettingsError if the command cannot be observed, and NotStartedError if it cannot be started.
    """
    variants.check_autoload()
    progress("stock", 0)
    return _Verifier(replace(request, out=request.out.absolute()), progress).verify()


def _describe_amount(compared: RunComparison) -> str:
    if not compared.findings:
        return "all bits equal"
    sizes = [one.row.max_abs_diff for one in compared.findings if one.row.max_abs_diff is not None]
    return f"{len(compared.findings)} of {compared.values} values moved, by up to {max(sizes, default=0.0):.3g}"


def _describe_failure(stock: Outcome, patched: Outcome) -> str:
    """Return how the patched command failed where stock did not, "" if it did not."""
    if patched.timed_out:
        return "the patched run hangs, as stock does not"
    if patched.code and not stock.code:
        return f"the patched run fails with {patched.describe_exit()}, as stock does not"
    if patched.code and not _end_alike(patched, stock):
        return f"the patched run fails {_describe_end(patched)}, stock {_describe_end(stock)}"
    return ""


def _end_alike(outcome: Outcome, stock: Outcome) -> bool:
    """Return whether two runs fail in the same way.

    If several ranks fail, the launcher may name another rank in each run. So one common end of a rank is enough.
    """
    ends, stock_ends = set(outcome.rank_ends.values()), set(stock.rank_ends.values())
    if ends and stock_ends and not ends & stock_ends:
        return False
    return (_find_end(outcome), outcome.code) == (_find_end(stock), stock.code)


def _find_end(outcome: Outcome) -> tuple[int, str]:
    """Return the step after which a run failed, and the exception or the signal that ended it, "" if unknown."""
    found = variants.find_exception_name(outcome.read_log())
    # A code above 128 may also be the script's own.
    with suppress(ValueError):
        found = found or signal.Signals(outcome.code - 128).name
    return variants.read_furthest_step(outcome.folder), found


def _describe_end(outcome: Outcome) -> str:
    step, found = _find_end(outcome)
    return f"after step {step} with {outcome.describe_exit(found)}"


def _why_not_exercised(patched: Outcome) -> str:
    if patched.report is None:
        return "no process of the command reported that it is patched; see `ovpatch doctor`"
    if not patched.applied:
        states = ", ".join(f"{one['name']} {one['state']} ({one['reason']})" for one in patched.report["features"])
        return f"no feature was on: {states}"
    reasons = "; ".join(f"{name}: {reason}" if reason else name for name, reason in patched.idle.items())
    return f"the runs are equal, but no feature that was on did any work ({reasons})"


_ROWS: Final = 10
_COLOURS: Final = {
    **dict.fromkeys((Conclusion.BITWISE, Conclusion.FLOOR, Conclusion.NOISE), "green"),
    Conclusion.DIFFERENT: "red",
}


def print_result(result: Verification, console: Console) -> None:
    """Print a result."""
    style = f"bold {_COLOURS.get(result.verdict, 'yellow')}"
    console.print(Text(result.headline, style=style), soft_wrap=True)
    for line in _lines(result):
        console.print(Text(line), soft_wrap=True)
    if result.compared.findings:
        console.print(_table(result.compared, result.measured))
    for name, outcome in result.outcomes.items():
        telling = result.verdict is Conclusion.UNDECIDED or name in ("stock", "patched")
        if telling and (outcome.code or outcome.timed_out or outcome.failures):
            _show_end(outcome, console)


def _lines(result: Verification) -> Iterator[str]:
    compared = result.compared
    if compared.processes:
        yield f"compared    {_scope(compared)}"
        yield f"bits        {_bits(result)}"
        yield f"noise       {_describe_noise(result)}"
        for rule, count in compared.count_rules().items() if result.measured else ():
            yield f"{'allowed':<11} {count} value{'s' if count > 1 else ''} ({rule}): no more than {RULES[rule]}"
    if result.blamed:
        yield f"because of  {', '.join(result.blamed)}"
    for feature, counters in result.counters.items():
        if feature in result.idle:
            yield f"{feature:<11} did nothing: {result.idle[feature] or 'it counts nothing'}"
            continue
        yield f"{feature:<11} {', '.join(f'{name} {count}' for name, count in counters.items())}"
        for remark in result.remarks[feature]:
            yield f"{'':<11} {remark}"
    yield f"runs        {', '.join(f'{name} {outcome.seconds:.1f} s' for name, outcome in result.outcomes.items())}"
    for note in result.notes:
        yield f"note        {note}"


def _scope(compared: RunComparison) -> str:
    counts = {"backward": "losses", "step": "optimizer steps", "checkpoint": "checkpoints"}
    events = ", ".join(f"{compared.events.get(kind, 0)} {name}" for kind, name in counts.items())
    return f"{compared.values} values on {', '.join(compared.processes)}, to step {compared.steps}: {events}"


def _bits(result: Verification) -> str:
    compared = result.compared
    if not compared.findings:
        return "all equal"
    of_them = f"{len(compared.different)} of them by more than noise" if result.measured else "noise not measured"
    return f"{len(compared.findings)} values are not bitwise equal, {of_them}"


def _describe_noise(result: Verification) -> str:
    if result.noise:
        return f"stock against itself, {'; '.join(f'{name}: {amount}' for name, amount in result.noise.items())}"
    if result.compared.findings:
        return "not measured"
    return "not needed: nothing differs (--noise measures it)"


def _table(compared: RunComparison, measured: bool) -> Table:
    first = compared.first
    shown = [*filter(None, [first]), *(one for one in compared.worst(_ROWS) if one is not first)][:_ROWS]
    title = "not bitwise equal"
    if len(compared.findings) > _ROWS:
        title += f": {'the first, then ' if first else ''}the worst of {len(compared.findings)}"
    table = Table("step", "process", "value", "|diff|", "allowed", "rule", "what", title=title, title_justify="left")
    for finding in shown:
        row = finding.row
        far = "" if row.max_abs_diff is None else f"{row.max_abs_diff:.3g}"
        allowed = "" if row.allowed is None or not measured else f"{row.allowed:.3g}"
        rule = row.rule if measured else ""
        cells = (str(finding.step), finding.process, row.name, far, allowed, rule, row.note)
        table.add_row(*map(Text, cells), style=None if finding.different else "dim")
    return table


def _show_end(outcome: Outcome, console: Console) -> None:
    ranks = variants.read_ranks(outcome.folder)
    for pid, stacks in outcome.stacks.items():
        process = variants.name_process(pid, ranks)
        console.print(Text(f"\nstacks of {process} in the run '{outcome.variant.name}':\n{stacks}"), soft_wrap=True)
    for failure in outcome.failures:
        console.print(Text(f"\nprocess {failure['pid']} (rank {failure['rank']}): {failure['error']}"), soft_wrap=True)
    console.print(Text(f"\nhow the run '{outcome.variant.name}' ended:\n{outcome.read_failure()}\n"), soft_wrap=True)
