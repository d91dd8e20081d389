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
    """

    verdict: Verdict
    why: str
    compared: Compared = field(default_factory=Compared)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    blamed: Sequence[str] = ()
    notes: Sequence[str] = ()
    noise: Mapping[str, str] = field(default_factory=dict)

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """What each feature that was on counted, over all processes."""
        return self.outcomes["patched"].counters if "patched" in self.outcomes else {}

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
            "different": len(compared.different),
            "first": None if compared.first is None else _finding(compared.first),
            "worst": [_finding(finding) for finding in compared.worst(50)],
            "features": list(self.blamed),
            "counters": self.counters,
            "noise": dict(self.noise),
            "notes": list(self.notes),
            "arms": {name: _outcome(outcome) for name, outcome in self.outcomes.items()},
        }


def _finding(finding: Finding) -> dict[str, Any]:
    return {"process": finding.process, "step": finding.step, "event": finding.event, **finding.row.to_json()}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "exit_code": outcome.code,
        "seconds": round(outcome.seconds, 3),
        "timed_out": outcome.timed_out,
        "stacks": {str(pid): text for pid, text in outcome.stacks.items()},
        "failures": outcome.failures,
    }
