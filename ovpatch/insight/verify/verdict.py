"""What comes of a verification, and what it says to a shell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ovpatch.exit_codes import ExitCode
from ovpatch.insight.arms import Outcome
from ovpatch.insight.verify.comparing import Compared, Finding


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
