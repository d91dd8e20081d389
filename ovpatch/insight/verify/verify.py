"""Which arms run, in which order, and what follows from what they recorded.

Stock and patched run first. Where every bit is equal, no yardstick is needed. Otherwise stock runs twice more, once as
it was and once with its reductions in another order, and what differs by more than those do is different. Then each
feature in turn is left out: one without which the difference is gone is to blame.

[Note: scripts that do not repeat themselves] Where two stock runs differ and the patched one differs by somewhat more,
that may be chance: two runs tell little of how far such a script strays. All arms run once more then, with
deterministic algorithms, and the answer is theirs. Where not even those repeat themselves, stock runs some more times:
of some thousand values, a few go further than twice what they went in one or two runs.

[Note: noise that is not known] A stock run that is to measure noise may fail. Then nothing can be said of values that
differ, however little or much they do; only that the patched run fails, or hangs, is certain.

[Note: strictly deterministic] torch has two ways of it. If it is only to warn of what has no deterministic form, some
of what has one is not deterministic either, such as the backward of flash attention. So it is to raise an error; a
script that gets one runs again, with warnings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from ovpatch.exit_codes import ExitCode
from ovpatch.insight import arms
from ovpatch.insight.arms import Arm, Outcome
from ovpatch.insight.verify import noise_arms, recording
from ovpatch.insight.verify.compare import ORDER, Compared, Finding, compare
from ovpatch.insight.verify.recording import BACKWARD, Run

# What comes of a verification, and what it says to a shell.


class Verdict(str, Enum):
    """The answer in a few words."""

    BITWISE = "bitwise equal"
    NOISE = "equal within noise"
    DIFFERENT = "different"
    UNDECIDED = "cannot decide"
    NOT_EXERCISED = "not exercised"
    NO_STEP = "nothing to compare"
    SCRIPT_FAILS = "the script itself fails"
    NOT_SEEN = "could not be run"
    INTERRUPTED = "interrupted"

    @property
    def code(self) -> ExitCode:
        """The exit code."""
        known = {
            Verdict.BITWISE: ExitCode.OK,
            Verdict.NOISE: ExitCode.OK,
            Verdict.DIFFERENT: ExitCode.PROBLEM,
            Verdict.INTERRUPTED: ExitCode.INTERRUPTED,
        }
        return known.get(self, ExitCode.UNDECIDED)


@dataclass(frozen=True)
class Result:
    """A verification.

    Attributes:
        verdict: The answer.
        why: The answer's reason, in a sentence.
        compared: What was compared, if anything was.
        outcomes: Every arm that ran, by name.
        blamed: Features without any one of which there is no difference.
        notes: What else the user should know.
        noise: How far each yardstick is from stock, in words.
        measured: Whether noise is known, so that what differs can be told from it.
    """

    verdict: Verdict
    why: str
    compared: Compared = field(default_factory=Compared)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    blamed: Sequence[str] = ()
    notes: Sequence[str] = ()
    noise: Mapping[str, str] = field(default_factory=dict)
    measured: bool = True

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """What each feature that was on counted, over all processes."""
        return self.outcomes["patched"].counters if "patched" in self.outcomes else {}

    @property
    def idle(self) -> dict[str, str]:
        """Features that were on and did no work, of which equal results say nothing, with what they say of it."""
        return self.outcomes["patched"].idle if "patched" in self.outcomes else {}

    @property
    def remarks(self) -> dict[str, list[str]]:
        """What features that did work say besides their counters, such as which optimizer they left to stock."""
        patched = self.outcomes.get("patched")
        return {name: patched.remarks[name] for name in patched.exercised} if patched is not None else {}

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
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
            "arms": {name: _outcome(outcome) for name, outcome in self.outcomes.items()},
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


# Why a command ended, from its log: the script's own traceback, which a launcher buries under one of its own.

_HEAD: Final = re.compile(r"^(\[rank\d+\]: ?)?Traceback \(most recent call last\):$")
_LAUNCHERS: Final = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError")
_LONGEST: Final = 24  # lines


def why(log: str, lines: int = 20) -> str:
    """Return the first traceback that is not a launcher's, shortened, or the last lines of the log if there is none.

    The first, because other ranks fail next, at a collective in which they were left alone.

    Args:
        log: What the command wrote.
        lines: How many lines to return if there is no traceback.
    """
    every = log.splitlines()
    for start, line in enumerate(every):
        if match := _HEAD.match(line):
            found = _traceback(every[start:], match[1] or "")
            if not any(name in found[-1] for name in _LAUNCHERS):
                return "\n".join(_shortened(found))
    return "\n".join(every[-lines:])


def error(log: str) -> str:
    """Return the class of the exception that :func:`why` finds, or nothing if there is none.

    Args:
        log: What the command wrote.
    """
    found = why(log).splitlines()
    match = _HEAD.match(found[0]) if found else None
    return found[-1].removeprefix(match[1] or "").partition(":")[0] if match else ""


def _traceback(lines: list[str], prefix: str) -> list[str]:
    """Return the lines of the traceback that begins here: to the first that is not indented."""
    found = [lines[0]]
    for line in lines[1:]:
        if prefix and not line.startswith(prefix.rstrip()):
            continue  # another rank's, in between
        found.append(line)
        if not line.removeprefix(prefix).startswith(" "):
            break
    return found


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LONGEST else [*lines[:5], "  …", *lines[5 - _LONGEST :]]


WORKER: Final = "ovpatch.insight.verify.probes"

#: How many times what is allowed a difference may be by chance, where another stock run moved anything.
_CHANCE: Final = 100.0

#: How often stock runs once more, as long as chance may explain what differs.
_DRAWS: Final = 4

#: What torch says of an operation, after its name.
_NO_FORM: Final = "does not have a deterministic implementation"


@dataclass(frozen=True)
class Request:
    """What shall be verified.

    Attributes:
        command: Program and arguments.
        out: Folder of the arms.
        steps: After so many steps a run is ended.
        features: What OVPATCH shall say in the patched run; None for what it says now.
        noise: Whether the yardsticks run even where every bit is equal.
        deterministic: Whether torch is told to use deterministic algorithms.
        strict: Whether it then raises an error where it has none; see [Note: strictly deterministic].
        timeout: Seconds without a step after which a run has hung.
    """

    command: Sequence[str]
    out: Path
    steps: int = 5
    features: str | None = None
    noise: bool = False
    deterministic: bool = False
    strict: bool = True
    timeout: float = 600.0

    def arm(self, name: str, features: str | None = arms.STOCK, **details: Any) -> Arm:
        """Return an arm of this verification."""
        variables = {**noise_arms.VARIABLES, **(noise_arms.DETERMINISTIC if self.deterministic else {})}
        how = {"steps": self.steps, "deterministic": self.deterministic, "strict": self.strict}
        return Arm(name, features, {**how, **details}, variables)


class _End(Exception):
    """The answer is known."""

    def __init__(self, verdict: Verdict, why: str) -> None:
        super().__init__(why)
        self.verdict, self.why = verdict, why


class _Unsteady(Exception):
    """The script does not repeat itself, and may with deterministic algorithms."""


@dataclass
class _Verification:
    """One verification under way."""

    request: Request
    progress: Callable[[str, int], None]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    compared: Compared = field(default_factory=Compared)
    yardsticks: dict[str, Run] = field(default_factory=dict)
    blamed: list[str] = field(default_factory=list)
    noise: dict[str, str] = field(default_factory=dict)
    unsteady: str = ""
    noisy: bool = False
    measured: bool = False
    failed: list[str] = field(default_factory=list)  # arms that were to measure noise, and how they ended

    def result(self) -> Result:
        """Run what is needed for the answer."""
        try:
            verdict, why = self._judge()
        except _End as end:
            verdict, why = end.verdict, end.why
        except _Unsteady:
            return self._deterministic()
        measured = self.measured or not self.compared.findings
        return Result(verdict, why, self.compared, self.outcomes, self.blamed, self.notes, self.noise, measured)

    def _judge(self) -> tuple[Verdict, str]:
        stock = self._stock()
        patched = self._patched()
        self.compared = compare(stock, patched)
        outcome = self.outcomes["patched"]
        wrong = _what_went_wrong(self.outcomes["stock"], outcome)
        if self.compared.findings or self.request.noise or (wrong and self.outcomes["stock"].code):
            self._measure_noise(stock, patched)
            wrong = self._unless_stock_does_so_too(wrong)
            if self.unsteady and self._may_be_chance(wrong) and not self.request.deterministic:
                raise _Unsteady
            self._draw_more(stock, patched, wrong)
        was_on = outcome.applied or outcome.exercised
        if was_on and self.failed and self.compared.findings and not wrong:
            return Verdict.UNDECIDED, self._describe_what_is_open()
        if was_on and (self.compared.different or wrong):
            self._find_the_feature(stock)
            if wrong and any(one.row.name == ORDER for one in self.compared.different):
                self.notes.append(f"Afterwards {wrong}: ranks that are out of step do not end together.")
                wrong = ""
            return Verdict.DIFFERENT, self._describe_difference(wrong)
        if not self.compared.steps:
            return Verdict.NO_STEP, self._describe_no_step()
        if self.compared.events.get(BACKWARD) and not self.compared.finite:
            if not self.compared.finite_parameters:
                return Verdict.NO_STEP, (
                    "every loss and every parameter is NaN or infinite, under stock PyTorch too, and NaNs are all alike"
                )
            self._mention_losses()
        self._mention_what_was_not_compared()
        if not outcome.exercised:
            return Verdict.NOT_EXERCISED, _why_not_exercised(outcome)
        if self.compared.steps < self.request.steps:
            self.notes.append(f"The script ended by itself before step {self.request.steps}, for which --steps asks.")
        return (Verdict.NOISE if self.compared.findings else Verdict.BITWISE), self._describe_scope()

    def _may_be_chance(self, wrong: str) -> bool:
        """Tell whether noise, of which too little was seen, may explain all that differs."""
        different = self.compared.different
        return bool(different) and self.noisy and not wrong and all(one.row.excess < _CHANCE for one in different)

    def _draw_more(self, stock: Run, patched: Run, wrong: str) -> None:
        """Run stock again as long as that may show a difference to be noise."""
        for number in range(2, _DRAWS + 2):
            if self.failed or not self._may_be_chance(wrong):
                break
            name, details = ("rerun", {}) if self.unsteady else ("reordered", self._reordering(number))
            again = self._yardstick(f"{name}-{number}", **details)
            self.noise[f"{name} {number}"] = self._measured(f"{name}-{number}", compare(stock, again))
            self.compared = compare(stock, patched, self.yardsticks)

    def _deterministic(self) -> Result:
        """See [Note: scripts that do not repeat themselves]."""
        out = self.request.out / "deterministic"
        out.mkdir()
        again = _Verification(replace(self.request, deterministic=True, out=out), self.progress)
        count = len(self.compared.different)
        again.notes.append(
            f"{self.unsteady} The patched run differed in {count} value{'s' if count > 1 else ''} by more than that, "
            "so all of them ran again with deterministic algorithms. This is the outcome of those."
        )
        return again.result()

    # ---------------------------------------------------------------- arms

    def _run(self, arm: Arm) -> Run:
        outcome = arms.run(
            arm,
            self.request.command,
            WORKER,
            self.request.out,
            timeout=self.request.timeout,
            progress=lambda step: self.progress(arm.name, step),
        )
        self.outcomes[arm.name] = outcome
        if outcome.interrupted:
            raise _End(Verdict.INTERRUPTED, f"while the arm '{arm.name}' ran")
        return recording.read(outcome.folder, cut=outcome.timed_out or outcome.code != 0)

    def _stock(self) -> Run:
        run = self._run(self.request.arm("stock"))
        outcome = self.outcomes["stock"]
        if self.request.deterministic and self.request.strict and outcome.code and outcome.says(_NO_FORM):
            self.request = replace(self.request, strict=False, out=self.request.out / "warned")
            self.request.out.mkdir()
            self.notes.append("Not all is deterministic: the script uses operations of which torch has no such form.")
            return self._stock()
        if outcome.failures:
            raise _End(Verdict.NOT_SEEN, f"a process could not be observed: {outcome.failures[0]['error']}")
        if outcome.timed_out:
            seconds = self.request.timeout
            raise _End(Verdict.SCRIPT_FAILS, f"it hangs under stock PyTorch: no step within {seconds:g} s")
        if outcome.code and not arms.slowest(outcome.folder):
            raise _End(
                Verdict.SCRIPT_FAILS, f"under stock PyTorch it ends with exit code {outcome.code}, without a step"
            )
        return run

    def _patched(self) -> Run:
        run = self._run(self.request.arm("patched", self.request.features))
        outcome, stock = self.outcomes["patched"], self.outcomes["stock"]
        if outcome.failures:
            raise _End(Verdict.NOT_EXERCISED, f"a process was not patched: {outcome.failures[0]['error']}")
        if stock.code and not outcome.code:
            raise _End(Verdict.SCRIPT_FAILS, f"under stock PyTorch it ends with exit code {stock.code}, patched with 0")
        if stock.code:
            self.notes.append(
                f"The script itself fails under stock PyTorch, with exit code {stock.code}, and patched with exit code "
                f"{outcome.code}. What it computed before that was compared."
            )
        return run

    def _measure_noise(self, stock: Run, patched: Run) -> None:
        rerun = self._yardstick("rerun")
        reordered = self._yardstick("reordered", **self._reordering(1))
        itself, otherwise = compare(stock, rerun), compare(stock, reordered)
        self.noise = {
            "rerun": self._measured("rerun", itself),
            "reordered": self._measured("reordered", otherwise),
        }
        self.noisy = bool(itself.findings or otherwise.findings)
        if itself.findings:
            first = min(itself.findings, key=lambda one: (one.step, one.order))
            self.unsteady = (
                f"The script does not repeat itself: two stock runs differ from step {first.step} on, first in "
                f"'{first.row.name}' on {first.process}."
            )
            advice = "seeds" if self.request.deterministic else "seeds, or try --deterministic"
            self.notes.append(f"{self.unsteady} Differences of that size say nothing about ovpatch. Give it {advice}.")
        self.compared = compare(stock, patched, self.yardsticks)
        self.measured = not self.failed

    def _measured(self, name: str, found: Compared) -> str:
        """Say how far a yardstick is from stock; note it if it failed before it had all that was compared."""
        outcome = self.outcomes[name]
        if outcome.code == self.outcomes["stock"].code or found.values >= self.compared.values:
            return _amount(found)
        end = f"hung after step {arms.furthest(outcome.folder)}" if outcome.timed_out else f"failed {_end(outcome)}"
        self.failed.append(f"the arm '{name}' {end}")
        self.measured = False
        return end

    def _reordering(self, number: int) -> dict[str, Any]:
        """Return what the worker of the reordered arm is to do, the ``number``-th time."""
        return {"reorder": number, "pieces": number + 1 if self.outcomes["patched"].reorders_products else 0}

    def _yardstick(self, name: str, **details: Any) -> Run:
        """Run stock once more, and note if it ends otherwise."""
        run = self.yardsticks[name] = self._run(self.request.arm(name, **details))
        if self.outcomes[name].code != self.outcomes["stock"].code:
            self.notes.append(f"The arm '{name}' ended with exit code {self.outcomes[name].code}, stock did not.")
        return run

    def _unless_stock_does_so_too(self, wrong: str) -> str:
        """Return nothing if stock fails now here, now there: another end of the patched run means nothing."""
        stock, patched = self.outcomes["stock"], self.outcomes["patched"]
        others = [self.outcomes[name] for name in self.yardsticks]
        if not (wrong and stock.code and patched.code) or all(_end(one) == _end(stock) for one in others):
            return wrong
        self.notes.append(f"That {wrong} says nothing: other stock runs end elsewhere, too.")
        return ""

    def _find_the_feature(self, stock: Run) -> None:
        patched = self.outcomes["patched"]
        others = arms.leave_one_out(patched.arm, patched.applied, patched.requires)
        for feature, without in others.items():
            run = self._run(without)
            outcome = self.outcomes[without.name]
            found = compare(stock, run, self.yardsticks)
            if not found.different and not _what_went_wrong(self.outcomes["stock"], outcome):
                self.blamed.append(feature)
        if not self.blamed:  # without these it would be stock, which does not differ
            self.blamed = [feature for feature in patched.applied if feature not in others]
        if not self.blamed:
            self.notes.append("No single feature is to blame: leaving out any one of them, the difference stays.")

    # ---------------------------------------------------------------- words

    def _mention_losses(self) -> None:
        finite, every = self.compared.finite_parameters, self.compared.parameters
        self.notes.append(
            f"Every loss is NaN or infinite, under stock PyTorch too. The answer is that of the parameters, of which "
            f"{finite} of {every} are finite."
        )

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
        idle = [f"; {name} did nothing" for name in patched.idle]
        partly = [f"; {name} left some work to stock" for name in patched.left_to_stock]
        return f"{steps}, {ranks}, {compared.values} values{''.join(idle + partly)}"

    def _describe_what_is_open(self) -> str:
        return (
            f"{_amount(self.compared)}, and how much of that is noise is not known, because "
            f"{' and '.join(self.failed)}, and stock did not"
        )

    def _describe_difference(self, wrong: str) -> str:
        first = self.compared.first
        feature = f", because of {' or '.join(self.blamed)}" if self.blamed else ""
        if first is None:
            return wrong + feature
        then = f"; then {wrong}" if wrong else ""
        return f"first in '{first.row.name}' at step {first.step} on {first.process}{feature}{then}"

    def _describe_no_step(self) -> str:
        losses = self.compared.events.get(BACKWARD, 0)
        seen = f"{losses} losses are equal, but " if losses else ""
        return (
            f"{seen}no optimizer of torch.optim made a step in any process. Is this the command that trains? If it "
            "ends before its first step, give it more data or steps; if it updates parameters by itself, nobody saw it."
        )


def verify(request: Request, progress: Callable[[str, int], None] = lambda arm, step: None) -> Result:
    """Run a command stock and patched, and say whether it computes the same.

    Args:
        request: What to verify.
        progress: Called with an arm's name and the last step that all its processes have taken.

    Raises:
        ovpatch.SettingsError: The command cannot be observed.
        ovpatch.insight.launch.NotStartedError: The command could not be started.
    """
    arms.check_autoload()
    progress("stock", 0)
    return _Verification(replace(request, out=request.out.absolute()), progress).result()


def _amount(compared: Compared) -> str:
    """Say how far a stock run is from another."""
    if not compared.findings:
        return "all bits equal"
    sizes = [one.row.max_abs_diff for one in compared.findings if one.row.max_abs_diff is not None]
    return f"{len(compared.findings)} of {compared.values} values moved, by up to {max(sizes, default=0.0):.3g}"


def _what_went_wrong(stock: Outcome, patched: Outcome) -> str:
    """Say how the patched command ended where stock did not."""
    if patched.timed_out:
        return "the patched run hangs, as stock does not"
    if patched.code and not stock.code:
        return f"the patched run fails with exit code {patched.code}, as stock does not"
    if patched.code and _end(patched) != _end(stock):
        return f"the patched run fails {_end(patched)}, stock {_end(stock)}"
    return ""


def _end(outcome: Outcome) -> str:
    """Say where and how a command that failed did so."""
    found = error(outcome.log.read_text(encoding="utf-8", errors="replace"))
    by = f" by {found}" if found else ""
    return f"after step {arms.furthest(outcome.folder)} with exit code {outcome.code}{by}"


def _why_not_exercised(patched: Outcome) -> str:
    if patched.report is None:
        return "no process of the command reported that it is patched; see `ovpatch doctor`"
    if not patched.applied:
        states = ", ".join(f"{one['name']} {one['state']} ({one['reason']})" for one in patched.report["features"])
        return f"no feature was on: {states}"
    reasons = "; ".join(f"{name}: {reason}" if reason else name for name, reason in patched.idle.items())
    return f"the runs are equal, but no feature that was on did any work ({reasons})"
