"""Verification of a command: the variants that run, their order, and the conclusion."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from ovpatch.exit_codes import ExitCode
from ovpatch.insight import equality, variants
from ovpatch.insight.nodes import Leader, choose_runner
from ovpatch.insight.variants import Outcome, Variant
from ovpatch.insight.verify import noise_runs, recording
from ovpatch.insight.verify.compare import ORDER, Finding, RunComparison, compare_runs
from ovpatch.insight.verify.recording import BACKWARD, RecordedRun
from ovpatch.session.plugins import PluginError, Plugins, find_plugins
from ovpatch.settings.feature_options import list_verified_variables

WORKER: Final = "ovpatch.insight.verify.probes"

# If a difference exceeds its allowance by this factor, chance cannot explain it.
_MAX_CHANCE_FACTOR: Final = 100.0

# The number of further stock runs while chance may explain a difference.
_MAX_NOISE_REPEATS: Final = 4

# The end of torch's error about an operation without a deterministic form.
_NO_DETERMINISTIC_FORM: Final = "does not have a deterministic implementation"


class Conclusion(str, Enum):
    """The conclusion of a verification; the value is its name in JSON."""

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
    def is_equal(self) -> bool:
        """True if the runs are equal and features were exercised."""
        return self in (Conclusion.BITWISE, Conclusion.FLOOR, Conclusion.NOISE)

    @property
    def code(self) -> ExitCode:
        """The exit code."""
        if self.is_equal:
            return ExitCode.OK
        codes = {
            Conclusion.DIFFERENT: ExitCode.PROBLEM,
            Conclusion.INTERRUPTED: ExitCode.INTERRUPTED,
        }
        return codes.get(self, ExitCode.UNDECIDED)

    @property
    def words(self) -> str:
        """The first words of the first line."""
        return "SAME" if self.is_equal else _WORDS[self]


_WORDS: Final = {
    Conclusion.DIFFERENT: "DIFFERENT",
    Conclusion.UNDECIDED: "CANNOT TELL",
    Conclusion.NOT_EXERCISED: "NOT TESTED",
    Conclusion.NO_STEP: "NOTHING TO COMPARE",
    Conclusion.FAILS_LATER: "SCRIPT FAILS",
    Conclusion.SCRIPT_FAILS: "SCRIPT FAILS",
    Conclusion.NOT_SEEN: "COULD NOT RUN",
    Conclusion.INTERRUPTED: "INTERRUPTED",
}


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
        verdict: The conclusion.
        why: Its reason, in a sentence.
        compared: The comparison of both runs.
        outcomes: Every variant that ran, by name.
        blamed: The features that cause the difference: without any one of them there is none.
        notes: Further remarks for the user.
        noise: The difference of each noise run from stock, in words.
        is_noise_known: Whether noise was measured, so that it can be distinguished from a difference.
    """

    verdict: Conclusion
    why: str
    compared: RunComparison = field(default_factory=RunComparison)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    blamed: Sequence[str] = ()
    notes: Sequence[str] = ()
    noise: Mapping[str, str] = field(default_factory=dict)
    is_noise_known: bool = True

    @property
    def headline(self) -> str:
        """The verdict and its reason in one line."""
        return f"{self.verdict.words}: {self.why}"

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """Counters of each feature that was on, summed over the processes."""
        return self._patched.counters if self._patched else {}

    @property
    def left_to_stock(self) -> list[str]:
        """Features that did work and left some of it to torch."""
        return self._patched.left_to_stock if self._patched else []

    @property
    def idle(self) -> dict[str, str]:
        """Remarks of features that were on and idle; equal results prove nothing about them."""
        return self._patched.idle if self._patched else {}

    @property
    def remarks(self) -> dict[str, list[str]]:
        """Remarks of exercised features, such as an optimizer that fell back."""
        if self._patched is None:
            return {}
        return {name: self._patched.remarks[name] for name in self._patched.exercised}

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
            "values_by_role": dict(sorted(compared.values_by_role.items())),
            "events": compared.events,
            "not_bitwise": len(compared.findings),
            "different": len(compared.different) if self.is_noise_known else None,
            "first": None if compared.first is None else self._finding_to_json(compared.first),
            "worst": [self._finding_to_json(finding) for finding in compared.worst(50)],
            "features": list(self.blamed),
            "counters": self.counters,
            "idle": self.idle,
            "remarks": self.remarks,
            "noise": dict(self.noise),
            "notes": list(self.notes),
            "runs": {name: _outcome_to_json(outcome) for name, outcome in self.outcomes.items()},
        }

    def _finding_to_json(self, finding: Finding) -> dict[str, Any]:
        row = finding.row.to_json()
        if not self.is_noise_known:
            row |= {"verdict": None, "allowed": None}
        return {"process": finding.process, "step": finding.step, "event": finding.event, **row}


def _outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "exit_code": outcome.code,
        "seconds": round(outcome.seconds, 3),
        "timed_out": outcome.timed_out,
        "stacks": {str(pid): text for pid, text in outcome.stacks.items()},
        "failures": outcome.failures,
    }


@dataclass(frozen=True)
class Request:
    """The verification that the user wants.

    Attributes:
        command: Program and arguments.
        out: Folder of the variants.
        steps: Number of steps after which a run is ended.
        features: Value of ``OVPATCH`` in the patched run; None for the value of the environment.
        noise: Whether noise is measured even if all bits are equal.
        deterministic: Whether torch uses deterministic algorithms.
        strict: Whether torch then raises if it has no such algorithm. With mere warnings, the
            backward of flash attention and other operations do not use the deterministic form
            that they have. A script that gets an error runs again with warnings.
        timeout: Seconds without a step after which a run counts as hung.
        nodes: Runs the variants on all nodes. Default: the command runs on this node alone.
        must_see_all_ranks: Whether ranks on other nodes are an error if there are no ``nodes``. Default: False.
    """

    command: Sequence[str]
    out: Path
    steps: int = 5
    features: str | None = None
    noise: bool = False
    deterministic: bool = False
    strict: bool = True
    timeout: float = 600.0
    nodes: Leader | None = None
    must_see_all_ranks: bool = False

    def make_variant(
        self, name: str, features: str | None = variants.STOCK, **details: Any
    ) -> Variant:
        """Return a variant of this verification."""
        variables = dict(noise_runs.VARIABLES)
        if self.deterministic:
            variables |= noise_runs.DETERMINISTIC
        if features != variants.STOCK:
            variables |= _read_verified_variables()
        shared = {
            "steps": self.steps,
            "deterministic": self.deterministic,
            "strict": self.strict,
        }
        return Variant(name, features, {**shared, **details}, variables)


def _read_verified_variables() -> dict[str, str]:
    """Return the variables of options by which features check themselves more than in training."""
    plugins = Plugins()
    variables: dict[str, str] = {}
    for found in find_plugins().values():
        # The patched run reports a plugin that cannot be loaded.
        with suppress(PluginError):
            variables |= list_verified_variables(plugins.load_feature(found), os.environ)
    return variables


class _Answer(NamedTuple):
    """A conclusion and its reason."""

    verdict: Conclusion
    why: str


# Stock runs differ from each other, so all variants must run again.
_UNSTEADY: Final = _Answer(Conclusion.UNDECIDED, "the script does not repeat itself")


class _Verifier:
    """A running verification.

    Stock and patched run first. Unless every bit is equal, stock runs twice more, once unchanged
    and once with its reductions reordered; a difference beyond theirs counts. Then each feature
    is left out in turn: without the feature to blame there is no difference. If a stock run that
    measures noise fails, nothing is concluded from values that differ.

    [Note: scripts that do not repeat themselves] If two stock runs differ and the patched run
    differs by somewhat more, that may be chance. All variants run again with deterministic
    algorithms, and their conclusion counts. If even these runs do not repeat themselves, stock
    runs a few more times: a few of thousands of values move more than twice the distance that one or
    two runs show.
    """

    def __init__(self, request: Request, progress: Callable[[str, int], None]) -> None:
        self._request = request
        self._progress = progress

        # - Runs, by name
        self._outcomes: dict[str, Outcome] = {}
        self._stock = RecordedRun({})
        self._patched = RecordedRun({})
        self._noise_runs: dict[str, RecordedRun] = {}
        # The hosts of the ranks; {} if there is one.
        self._hosts: dict[int, str] = {}

        # - Results
        self.notes: list[str] = []
        self._compared = RunComparison()
        self._blamed: list[str] = []

        # - Noise
        # The difference of each noise run from stock, in words.
        self._noise: dict[str, str] = {}
        # The sentence that two stock runs differ, "" if they do not.
        self._unsteady = ""
        # Whether any noise run moved any value.
        self._is_noisy = False
        self._is_noise_known = False
        # The noise runs that failed, with their ends.
        self._failed: list[str] = []

    def verify(self) -> Verification:
        """Run the variants that the conclusion needs."""
        answer = self._judge()
        if answer is _UNSTEADY:
            return self._repeat_deterministically()
        return Verification(
            answer.verdict,
            answer.why,
            self._compared,
            self._outcomes,
            self._blamed,
            self.notes,
            self._noise,
            self._is_noise_known or not self._compared.findings,
        )

    def _judge(self) -> _Answer:
        if answer := self._run_stock() or self._run_patched():
            return answer
        self._compared = compare_runs(self._stock, self._patched)
        stock, patched = self._outcomes["stock"], self._outcomes["patched"]
        wrong = _describe_failure(stock, patched)
        if self._compared.findings or self._request.noise or (wrong and stock.code):
            if answer := self._measure_noise():
                return answer
            wrong = self._drop_common_failure(wrong)
            may_repeat = not self._request.deterministic
            if self._unsteady and self._may_be_chance(wrong) and may_repeat:
                return _UNSTEADY
            if answer := self._repeat_noise_runs(wrong):
                return answer
        was_on = patched.applied or patched.exercised
        if was_on and self._failed and self._compared.findings and not wrong:
            return _Answer(
                Conclusion.UNDECIDED,
                f"{_describe_amount(self._compared)}, and how much of that is noise is not known, "
                f"because {' and '.join(self._failed)}, and stock did not",
            )
        if was_on and (self._compared.different or wrong):
            return self._blame_features(wrong)
        return self._judge_equal_runs()

    def _judge_equal_runs(self) -> _Answer:
        """Return the conclusion from runs without a difference that counts."""
        compared, patched = self._compared, self._outcomes["patched"]
        if not compared.steps:
            return _Answer(Conclusion.NO_STEP, self._describe_no_step())
        if compared.events.get(BACKWARD) and not compared.finite:
            if not compared.finite_parameters:
                return _Answer(
                    Conclusion.NO_STEP,
                    "every loss and every parameter is NaN or infinite, also in stock PyTorch, and "
                    "all NaNs are equal",
                )
            self.notes.append(
                "Every loss is NaN or infinite, also in stock PyTorch. The verdict rests on the "
                f"parameters, of which {compared.finite_parameters} of {compared.parameters} are "
                "finite."
            )
        self._note_values_without_comparison()
        if self._outcomes["stock"].code:
            return _Answer(Conclusion.FAILS_LATER, self._describe_common_end())
        if not patched.exercised:
            return _Answer(Conclusion.NOT_EXERCISED, _explain_no_exercise(patched))
        if compared.steps < self._request.steps:
            self.notes.append(
                f"The script ended on its own before step {self._request.steps} of --steps."
            )
        return _Answer(self._find_equality(), self._describe_scope())

    def _find_equality(self) -> Conclusion:
        """Return how the runs are equal if no value differs by more than noise."""
        if not self._compared.findings:
            return Conclusion.BITWISE
        return Conclusion.NOISE if self._is_noisy else Conclusion.FLOOR

    def _may_be_chance(self, wrong: str) -> bool:
        """Return whether noise that was measured too seldom may explain all differences."""
        different = self._compared.different
        is_small = all(finding.row.excess < _MAX_CHANCE_FACTOR for finding in different)
        return bool(different) and self._is_noisy and not wrong and is_small

    # ---------------------------------------------------------------- variants

    def _run(self, variant: Variant) -> RecordedRun | _Answer:
        """Run a variant; return its records, or the conclusion if a signal interrupted it."""
        request = self._request
        run_variant = choose_runner(request.nodes, must_see_all_ranks=request.must_see_all_ranks)
        outcome = run_variant(
            variant,
            self._request.command,
            WORKER,
            self._request.out,
            timeout=self._request.timeout,
            progress=lambda step: self._progress(variant.name, step),
        )
        self._outcomes[variant.name] = outcome
        if outcome.interrupted:
            return _Answer(Conclusion.INTERRUPTED, f"while the run '{variant.name}' ran")
        # Ranks have the same hosts in all runs, so the names of processes do not differ.
        self._hosts = self._hosts or variants.read_hosts(outcome.folder)
        has_failed = outcome.timed_out or outcome.code != 0
        return recording.read_recorded(outcome.folder, cut=has_failed, hosts=self._hosts)

    def _run_stock(self) -> _Answer | None:
        """Run stock; return the conclusion if it cannot be compared with anything."""
        run = self._run(self._request.make_variant("stock"))
        if isinstance(run, _Answer):
            return run
        self._stock = run
        outcome, request = self._outcomes["stock"], self._request
        should_warn = request.deterministic and request.strict and outcome.code
        if should_warn and _NO_DETERMINISTIC_FORM in outcome.read_log():
            self._request = replace(request, strict=False, out=request.out / "warned")
            self._request.out.mkdir()
            self.notes.append(
                "Not all is deterministic: the script uses operations of which torch has no such "
                "form."
            )
            return self._run_stock()
        if outcome.failures:
            error = outcome.failures[0]["error"]
            return _Answer(Conclusion.NOT_SEEN, f"a process could not be observed: {error}")
        if outcome.timed_out:
            return self._find_hang_in_tool(outcome) or _Answer(
                Conclusion.SCRIPT_FAILS,
                f"it hangs in stock PyTorch: no step within {request.timeout:g} s",
            )
        if outcome.code and not variants.read_slowest_step(outcome.folder):
            return _Answer(
                Conclusion.SCRIPT_FAILS, f"in stock PyTorch it fails {_describe_end(outcome)}"
            )
        return None

    def _run_patched(self) -> _Answer | None:
        """Run patched; return the conclusion if the run says nothing about the features."""
        run = self._run(self._request.make_variant("patched", self._request.features))
        if isinstance(run, _Answer):
            return run
        self._patched = run
        outcome, stock = self._outcomes["patched"], self._outcomes["stock"]
        if outcome.failures:
            error = outcome.failures[0]["error"]
            return _Answer(Conclusion.NOT_EXERCISED, f"a process was not patched: {error}")
        if answer := self._find_hang_in_tool(outcome):
            return answer
        if stock.code and not outcome.code:
            return _Answer(
                Conclusion.SCRIPT_FAILS,
                f"in stock PyTorch it fails {_describe_end(stock)}, patched it does not",
            )
        if stock.code:
            self.notes.append(
                f"The script itself fails in stock PyTorch, with {stock.describe_exit()}, and "
                f"patched with {outcome.describe_exit()}. All values before that were compared."
            )
        return None

    def _find_hang_in_tool(self, outcome: Outcome) -> _Answer | None:
        """Return the conclusion if a run hung while a process was in ovpatch's own code."""
        if not outcome.waits_in_tool:
            return None
        return _Answer(
            Conclusion.NOT_SEEN,
            f"{outcome.waits_in_tool} in the run '{outcome.variant.name}', so no step within "
            f"{self._request.timeout:g} s is no hang of the script. Give --timeout more seconds",
        )

    def _measure_noise(self) -> _Answer | None:
        """Run stock unchanged and reordered, and compare stock and patched again."""
        if answer := self._run_noise("rerun") or self._run_noise(
            "reordered", **self._make_reordering(1)
        ):
            return answer
        itself = compare_runs(self._stock, self._noise_runs["rerun"])
        reordered = compare_runs(self._stock, self._noise_runs["reordered"])
        self._noise = {
            "rerun": self._describe_noise("rerun", itself),
            "reordered": self._describe_noise("reordered", reordered),
        }
        self._is_noisy = bool(itself.findings or reordered.findings)
        if itself.findings:
            first = min(itself.findings, key=lambda finding: (finding.step, finding.order))
            self._unsteady = (
                f"The script does not repeat itself: two stock runs differ from step {first.step} "
                f"on, first in '{first.row.name}' on {first.process}."
            )
            advice = "seeds" if self._request.deterministic else "seeds, or try --deterministic"
            self.notes.append(
                f"{self._unsteady} Differences of that size prove nothing about ovpatch. Give it "
                f"{advice}."
            )
        self._compared = compare_runs(self._stock, self._patched, self._noise_runs)
        self._is_noise_known = not self._failed
        return None

    def _repeat_noise_runs(self, wrong: str) -> _Answer | None:
        """Run stock again while that may show a difference to be noise."""
        for number in range(2, _MAX_NOISE_REPEATS + 2):
            if self._failed or not self._may_be_chance(wrong):
                break
            repeat = "rerun" if self._unsteady else "reordered"
            details = {} if self._unsteady else self._make_reordering(number)
            name = f"{repeat}-{number}"
            if answer := self._run_noise(name, **details):
                return answer
            found = compare_runs(self._stock, self._noise_runs[name])
            self._noise[f"{repeat} {number}"] = self._describe_noise(name, found)
            self._compared = compare_runs(self._stock, self._patched, self._noise_runs)
        return None

    def _run_noise(self, name: str, **details: Any) -> _Answer | None:
        """Run stock once more, and note a different end."""
        run = self._run(self._request.make_variant(name, **details))
        if isinstance(run, _Answer):
            return run
        self._noise_runs[name] = run
        outcome = self._outcomes[name]
        if outcome.code != self._outcomes["stock"].code:
            self.notes.append(
                f"The run '{name}' ended with {outcome.describe_exit()}, stock did not."
            )
        return None

    def _make_reordering(self, number: int) -> dict[str, Any]:
        """Return the orders for the worker of the reordered variant with this number."""
        reorders = self._outcomes["patched"].reorders_products
        return {"reorder": number, "pieces": number + 1 if reorders else 0}

    def _describe_noise(self, name: str, found: RunComparison) -> str:
        """Return the difference of a noise run from stock in words; keep an early failure."""
        outcome = self._outcomes[name]
        has_all_values = found.values >= self._compared.values
        if outcome.code == self._outcomes["stock"].code or has_all_values:
            return _describe_amount(found)
        end = f"failed {_describe_end(outcome)}"
        if outcome.timed_out:
            end = f"hung after step {variants.read_furthest_step(outcome.folder)}"
        self._failed.append(f"the run '{name}' {end}")
        self._is_noise_known = False
        return end

    def _drop_common_failure(self, wrong: str) -> str:
        """Return "" if stock runs fail at several places, as another end then proves nothing."""
        stock, patched = self._outcomes["stock"], self._outcomes["patched"]
        is_steady = all(_have_same_end(self._outcomes[name], stock) for name in self._noise_runs)
        if not (wrong and stock.code and patched.code) or is_steady:
            return wrong
        self.notes.append(f"That {wrong} proves nothing: more stock runs end elsewhere, too.")
        return ""

    def _blame_features(self, wrong: str) -> _Answer:
        """Run without each feature in turn, and return the conclusion from a difference."""
        patched = self._outcomes["patched"]
        reduced = variants.leave_one_out(patched.variant, patched.applied, patched.requires)
        for feature, variant in reduced.items():
            run = self._run(variant)
            if isinstance(run, _Answer):
                return run
            found = compare_runs(self._stock, run, self._noise_runs)
            failure = _describe_failure(self._outcomes["stock"], self._outcomes[variant.name])
            if not found.different and not failure:
                self._blamed.append(feature)
        if not self._blamed:
            # A feature that all features require has no variant: without it, nothing would be patched.
            self._blamed = [feature for feature in patched.applied if feature not in reduced]
        if not self._blamed:
            self.notes.append(
                "No single feature is to blame: without any one of them, the difference remains."
            )
        if wrong and any(finding.row.name == ORDER for finding in self._compared.different):
            self.notes.append(
                f"Afterwards {wrong}: ranks that are out of step do not end together."
            )
            wrong = ""
        return _Answer(Conclusion.DIFFERENT, self._describe_difference(wrong))

    def _repeat_deterministically(self) -> Verification:
        """Run all variants again; see [Note: scripts that do not repeat themselves]."""
        out = self._request.out / "deterministic"
        out.mkdir()
        again = _Verifier(
            replace(self._request, deterministic=True, out=out),
            lambda name, step: self._progress(f"{name}, deterministic", step),
        )
        count = len(self._compared.different)
        again.notes.append(
            f"{self._unsteady} The patched run differed in {_count(count, 'value')} by more than "
            "that, so all of them ran again with deterministic algorithms. This is the result of "
            "these runs."
        )
        return again.verify()

    # ---------------------------------------------------------------- words

    def _note_values_without_comparison(self) -> None:
        for finding in self._compared.findings:
            if finding.row.name == ORDER:
                self.notes.append(
                    f"On {finding.process} nothing is compared from '{finding.event}' at step "
                    f"{finding.step} on, because the order of events there differs between stock "
                    "runs."
                )
        unread = [f"'{name}' ({class_name})" for name, class_name in self._compared.unread.items()]
        if unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            self.notes.append(
                f"These values cannot be read and were not compared: {', '.join(unread[:3])}{more}."
            )

    def _describe_scope(self) -> str:
        """Return how many values are equal, and how, with the features that did work."""
        compared, patched = self._compared, self._outcomes["patched"]
        conclusion = self._find_equality()
        unequal = sum(finding.row.name != ORDER for finding in compared.findings)
        steps, ranks = _count(compared.steps, "step"), _count(len(compared.processes), "rank")
        scope = f"{_count(compared.values, 'value')} of {steps} on {ranks}"
        if conclusion is Conclusion.BITWISE:
            text = f"all {scope} have stock's bits"
        elif conclusion is Conclusion.FLOOR:
            text = (
                f"{compared.values - unequal} of {scope} have stock's bits, and the rest differs "
                f"by at most {equality.FLOOR:g}; stock repeats all bits"
            )
        else:
            text = (
                f"{compared.values - unequal} of {scope} have stock's bits, and the rest differs "
                "by no more than runs of stock PyTorch"
            )
        exercised = ", ".join(patched.exercised)
        answer = f"{text} ({exercised})" if exercised else text
        node = variants.describe_node(patched.folder)
        return f"{answer}; {node}" if node else answer

    def _describe_common_end(self) -> str:
        """Return up to which step runs are equal that both fail, and their common end."""
        stock = self._outcomes["stock"]
        # Some ranks may have made one step more.
        steps = min(self._compared.steps, variants.read_slowest_step(stock.folder))
        return (
            f"equal up to step {steps}, where the script itself fails, stock and "
            f"patched, {_describe_end(stock)}: {self._describe_scope()}"
        )

    def _describe_difference(self, wrong: str) -> str:
        first = self._compared.first
        feature = f", because of {' or '.join(self._blamed)}" if self._blamed else ""
        if first is None:
            return wrong + feature
        row = first.row
        amount = ""
        if row.allowed is not None and row.max_abs_diff is not None and self._is_noise_known:
            amount = f" by {row.max_abs_diff:.3g}, where {row.allowed:.3g} is allowed ({row.rule})"
        end = f"; then {wrong}" if wrong else ""
        place = f"first in '{row.name}' at step {first.step} on {first.process}"
        return f"{place}{amount}{feature}{end}"

    def _describe_no_step(self) -> str:
        losses = self._compared.events.get(BACKWARD, 0)
        seen = f"{losses} losses are equal, but " if losses else ""
        return (
            f"{seen}no optimizer of torch.optim made a step in any process. Is this the command "
            "that trains? If it ends before its first step, give it more data or steps. If it "
            "updates parameters by itself, verify cannot see that."
        )


def verify(
    request: Request, progress: Callable[[str, int], None] = lambda variant, step: None
) -> Verification:
    """Run a command stock and patched, and conclude whether it computes the same.

    Args:
        request: The verification that the user wants.
        progress: Called with a variant's name and the last step that all its processes have taken.

    Raises:
        SettingsError: The command cannot be observed.
        NotStartedError: The command cannot be started.
    """
    variants.check_autoload()
    progress("stock", 0)
    return _Verifier(replace(request, out=request.out.absolute()), progress).verify()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_amount(compared: RunComparison) -> str:
    if not compared.findings:
        return "all bits equal"
    distances = [finding.row.max_abs_diff for finding in compared.findings]
    largest = max((size for size in distances if size is not None), default=0.0)
    return f"{len(distances)} of {compared.values} values moved, by up to {largest:.3g}"


def _describe_failure(stock: Outcome, patched: Outcome) -> str:
    """Return the failure of the patched command if stock did not fail in that way, "" otherwise."""
    if patched.timed_out:
        return "the patched run hangs, and stock does not"
    if patched.code and not stock.code:
        return f"the patched run fails with {patched.describe_exit()}, and stock does not"
    if patched.code and not _have_same_end(patched, stock):
        return f"the patched run fails {_describe_end(patched)}, stock {_describe_end(stock)}"
    return ""


def _have_same_end(outcome: Outcome, stock: Outcome) -> bool:
    """Return whether two runs fail in the same way.

    If several ranks fail, the launcher may name another rank in each run. So one common end of a
    rank is enough.
    """
    ends, stock_ends = set(outcome.rank_ends.values()), set(stock.rank_ends.values())
    if ends and stock_ends and not ends & stock_ends:
        return False
    return (_find_end(outcome), outcome.code) == (_find_end(stock), stock.code)


def _find_end(outcome: Outcome) -> tuple[int, str]:
    """Return the last step before a failure, and the exception or signal, "" if unknown."""
    found = variants.find_exception_name(outcome.read_log())
    # A code above 128 may also be the script's own.
    with suppress(ValueError):
        found = found or signal.Signals(outcome.code - 128).name
    return variants.read_furthest_step(outcome.folder), found


def _describe_end(outcome: Outcome) -> str:
    step, found = _find_end(outcome)
    return f"after step {step} with {outcome.describe_exit(found)}"


def _explain_no_exercise(patched: Outcome) -> str:
    if patched.report is None:
        return "no process of the command reported that it is patched; see `ovpatch doctor`"
    if not patched.applied:
        features = patched.report["features"]
        states = [
            f"{feature['name']} {feature['state']} ({feature['reason']})" for feature in features
        ]
        return f"no feature was on: {', '.join(states)}"
    idle = [f"{name}: {reason}" if reason else name for name, reason in patched.idle.items()]
    return f"the runs are equal, but no feature that was on did any work ({'; '.join(idle)})"
