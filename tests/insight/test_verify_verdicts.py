"""Verdicts that follow from the records of variants; the variants here are made up, so no process runs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ovpatch.insight import steps, variants
from ovpatch.insight.variants import Outcome
from ovpatch.insight.verify import verification as verifying
from ovpatch.insight.verify import verify_report
from ovpatch.insight.verify.recording import BACKWARD, SCALE, STEP, EventRecorder, keep_value
from ovpatch.insight.verify.verification import Conclusion, Request
from ovpatch.session.session_report import NEVER_CALLED
from tests.insight.programs import report_ends

STOCK = 1.0
SKIPPED = -1.0  # its second step
REPORT = {"version": "1", "torch": "2", "python": "3", "pid": 1, "rank": 0, "patches": []}


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """``verify(features, value_of_variant, **how_variants_end)`` -> the result and what is printed."""

    def verify(
        features,
        value_of,
        *,
        noise=False,
        ends=None,
        calls=1,
        states=None,
        logs=None,
        beats=None,
        says=None,
    ):
        def run(variant, command, worker, out, *, timeout, progress):
            assert command == ["train"]
            assert worker == verifying.WORKER
            folder, log = out / variant.name, out / f"{variant.name}.log"
            folder.mkdir()
            (folder / "process-7.json").write_text(json.dumps({"pid": 7, "rank": "1"}))
            log.write_text((logs or {}).get(variant.name, "a\nb\nthe last line\n"))
            if variant.patched:
                off = {
                    name
                    for name in features
                    if variant.variables.get(f"OVPATCH_{name.upper()}") == "0"
                }
                _report(
                    folder,
                    [name for name in features if name not in off],
                    calls,
                    states or {},
                    says or {},
                )
            _record(
                folder,
                value_of(
                    f"{variant.name}-deterministic"
                    if variant.details["deterministic"]
                    else variant.name
                ),
            )
            if variant.name in (beats or {}):
                (folder / "beat-1").write_text(str(beats[variant.name]))
            name = (
                f"{variant.name}-strict"
                if variant.details["deterministic"] and variant.details["strict"]
                else variant.name
            )
            return Outcome(
                variant, folder, log, **{"code": 0, "seconds": 1.0, **(ends or {}).get(name, {})}
            )

        monkeypatch.setattr(variants, "run_variant", run)
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        result = verifying.verify(Request(["train"], out, noise=noise))
        printed = io.StringIO()
        verify_report.print_result(result, Console(width=150, file=printed))
        json.dumps(result.to_json())
        return result, printed.getvalue()

    return verify


def _report(folder, features, calls, states, says):
    """Write a report; ``says`` has more of a feature, by its name."""
    common = {
        "reason": "r",
        "remarks": [],
        "options": {},
        "distribution": "d",
        "requires": [],
        "reorders_products": "products" in features,
        "counters": {"calls": calls},
        "work": [],
    }
    listed = [
        {"name": name, "state": states.get(name, "applied"), **common, **says.get(name, {})}
        for name in features
    ]
    (folder / "worker-1.json").write_text(json.dumps({**REPORT, "features": listed}))


def _record(folder, value):
    recorder = EventRecorder(folder)
    if value is SKIPPED:
        recorder.record_event(STEP, {"parameter w": keep_value(torch.zeros(4))}, step=1)
        recorder.record_event(SCALE, {}, step=1)
        recorder.flush_events()
    for step in () if value in (None, SKIPPED) else (1, 2):
        recorder.record_event(
            STEP,
            {"parameter w": keep_value(torch.full((4,), value if step == 2 else 0.0))},
            step=step,
        )
        recorder.flush_events()
    if value is not None:
        (folder / "beat-1").write_text("2")


def values(**given):
    return lambda name: given.get(name.replace("-", "_"), STOCK)


def case(name, verdict, *said, features="a", head="", blamed=None, ran=None, **how):
    """Name a row: the verdict, what is printed, what it begins with, who is blamed, and which variants ran.

    ``how`` has arguments of ``verify()``, and the values of variants.
    """
    more = {
        key: how.pop(key)
        for key in ("noise", "ends", "calls", "states", "logs", "beats")
        if key in how
    }
    return pytest.param(features.split(), how, more, verdict, said, head, blamed, ran, id=name)


NOISE_RUNS = "stock patched rerun reordered"
UNSTEADY = {"patched": 2.0, "rerun": 1.1, "patched_deterministic": 1.5, "rerun_deterministic": 1.1}
RERUNS = "rerun-2 rerun-3"
FAILS = {"code": 3}
HANGS = {"code": 1, "timed_out": True, "stacks": {7: "in f"}}
ALL_FAIL = {name: {"code": 1} for name in NOISE_RUNS.split()}
TRACEBACK = "Traceback (most recent call last):\n  File\n"
OTHER_TRACEBACK = (
    "[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: a.b.OddError: no\n"
)
REST = "SAME: 1 of 2 values of 2 steps on 1 rank have stock's bits, and the rest differs by"
NEAR = f"{REST} no more than runs of stock PyTorch"
AT_END = "after step 2 with exit code 3"
UNTIL = "SCRIPT FAILS: equal up to step 2, where the script itself fails, stock and patched, after step 2"
FRAME = '  File "{}", line 7 in {}\n'
TOOL, SCRIPT = FRAME.format(steps.__file__, "exit_with_peers"), FRAME.format("train.py", "<module>")
IN_TOOL = {"stacks": {7: f"Current thread 0x1 (most recent call first):\n{TOOL}{SCRIPT}"}}
BELOW_TOOL = {
    "stacks": {7: f"Current thread 0x1 (most recent call first):\n{SCRIPT}{TOOL}{SCRIPT}"}
}
IN_W = "DIFFERENT: first in 'parameter w' at step 2 on rank 0"
FAILS_EARLIER = "DIFFERENT: the patched run fails after step 1 with exit code 1, stock after step 2 with exit code 1"

CASES = [
    case("equal bits need no noise run", Conclusion.BITWISE, "calls 1", "ended on its own before step 5",
         head="SAME: all 2 values of 2 steps on 1 rank have stock's bits (a)\n", ran="stock patched"),
    case("within twice the noise run", Conclusion.NOISE, "0.9",
         "allowed 1 value (noise): no more than twice what stock moved", head=NEAR,
         patched=1.9, reordered=1.5, ran=NOISE_RUNS),
    case("within the floor, where stock moves nothing", Conclusion.FLOOR,
         "rerun: all bits equal; reordered: all bits equal", "allowed 1 value (floor): no more than 1e-06",
         head=f"{REST} at most 1e-06; stock repeats all bits (a)\n", patched=1.0 + 5e-7),
    case("within the floor, where stock moves less", Conclusion.NOISE, "allowed 1 value (floor): no more than 1e-06",
         head=f"{NEAR} (a)\n",
         patched=1.0 + 5e-7, reordered=1.0 + 1.2e-7),
    case("beyond it", Conclusion.DIFFERENT, head=f"{IN_W} by 1.1, where 1 is allowed (noise), because of a\n",
         patched=2.1, reordered=1.5, blamed="a", ran=f"{NOISE_RUNS} reordered-2 reordered-3 reordered-4 reordered-5"),
    case("without one feature nothing differs", Conclusion.DIFFERENT, features="a b c",
         patched=2.0, without_a=2.0, without_c=2.0, blamed="b", ran=f"{NOISE_RUNS} without-a without-b without-c"),
    case("two features differ only together", Conclusion.DIFFERENT, features="a b", patched=2.0, blamed="a b"),
    case("no single feature", Conclusion.DIFFERENT, "No single feature is to blame", features="a b",
         patched=2.0, without_a=2.0, without_b=2.0, blamed=""),
    case("a script that does not repeat itself", Conclusion.NOISE, "The script does not repeat itself",
         "'parameter w' on rank 0", patched=1.2, rerun=1.1),
    case("different with deterministic algorithms, too", Conclusion.DIFFERENT,
         patched=2.0, rerun=1.1, patched_deterministic=2.0, blamed="a"),
    case("and not repeated, either", Conclusion.DIFFERENT, "Give it seeds.",
         patched=2.0, rerun=1.1, patched_deterministic=2.0, rerun_deterministic=1.1),
    case("unsteady, no farther than more reruns", Conclusion.NOISE, ran=f"{NOISE_RUNS} {RERUNS}",
         **UNSTEADY, rerun_2_deterministic=1.2, rerun_3_deterministic=1.3),
    case("unsteady, and farther than those go", Conclusion.DIFFERENT, blamed="a",
         ran=f"{NOISE_RUNS} {RERUNS} rerun-4 rerun-5",
         **UNSTEADY, rerun_2_deterministic=1.2, rerun_3_deterministic=1.2),
    case("chance cannot explain it", Conclusion.DIFFERENT, features="products", ran=NOISE_RUNS,
         patched=1.9, reordered=1.001),
    case("nothing was on", Conclusion.NOT_EXERCISED, "no feature was on: a skipped (r)",
         patched=2.0, calls=0, states={"a": "skipped"}),
    case("no counter moved, and all is equal", Conclusion.NOT_EXERCISED, calls=0),
    case("no counter moved, and something differs", Conclusion.DIFFERENT, patched=2.0, calls=0),
    case("comparable only up to an event", Conclusion.NOISE,
         "On rank 0 nothing is compared from 'step 2 of optimizer 0 ()' at step 2 on", patched=SKIPPED, rerun=SKIPPED),
    case("no step", Conclusion.NO_STEP, "no optimizer of torch.optim made a step", stock=None, patched=None),
    case("steps in one run only", Conclusion.DIFFERENT, stock=None, rerun=None, reordered=None),
    # How variants end.
    case("stock is interrupted", Conclusion.INTERRUPTED, "while the run 'stock' ran",
         ends={"stock": {"code": 130, "interrupted": True}}),
    case("stock hangs", Conclusion.SCRIPT_FAILS, "rank 1 (process 7)", ends={"stock": HANGS}),
    case("stock fails", Conclusion.SCRIPT_FAILS, ends={"stock": FAILS},
         head=f"SCRIPT FAILS: in stock PyTorch it fails {AT_END}, patched it does not\n"),
    case("both fail", Conclusion.FAILS_LATER, "fails in stock PyTorch, with exit code 3",
         head=f"{UNTIL} with exit code 3: all 2 values of 2 steps on 1 rank have stock's bits (a)\n",
         ends={"stock": FAILS, "patched": FAILS}),
    case("both fail, within noise", Conclusion.FAILS_LATER, patched=1.9, reordered=1.5,
         head=f"{UNTIL} with exit code 1: {NEAR.removeprefix('SAME: ')} (a)\n", ends=ALL_FAIL),
    case("both are killed", Conclusion.FAILS_LATER, ends={"stock": {"code": 137}, "patched": {"code": 137}},
         head=f"{UNTIL} with exit code 137 by SIGKILL: all"),
    case("stock waits in the tool", Conclusion.NOT_SEEN, ends={"stock": HANGS | IN_TOOL},
         head="COULD NOT RUN: rank 1 (process 7) waits in ovpatch's exit_with_peers() in the run 'stock', so"),
    case("patched waits in the tool", Conclusion.NOT_SEEN, "Give --timeout more seconds",
         ends={"patched": HANGS | IN_TOOL}),
    case("stock hangs below the tool", Conclusion.SCRIPT_FAILS, ends={"stock": HANGS | BELOW_TOOL},
         head="SCRIPT FAILS: it hangs in stock PyTorch: no step within 600 s\n"),
    case("the patched run fails", Conclusion.DIFFERENT,
         "the patched run fails with exit code 3, and stock does not, because of a", ends={"patched": FAILS}),
    case("the patched run hangs", Conclusion.DIFFERENT, "stacks of rank 1",
         "the patched run hangs, and stock does not, because of a", ends={"patched": HANGS}),
    case("the rerun fails", Conclusion.FLOOR, "The run 'rerun' ended with exit code 3",
         patched=1.0 + 1e-7, ends={"rerun": FAILS}),
    case("a difference before a failure comes first", Conclusion.DIFFERENT,
         head=f"{IN_W} by 1, where 1e-06 is allowed (floor), because of a; then the patched run fails with exit code 3",
         patched=2.0, ends={"patched": FAILS}),
    case("ranks out of step do not fail by themselves", Conclusion.DIFFERENT,
         "Afterwards the patched run fails with exit code 1", patched=SKIPPED, ends={"patched": {"code": 1}},
         head="DIFFERENT: first in 'order of events' at step 2 on rank 0, because of a\n"),
    # Variants that were to measure noise.
    case("a noise run hangs", Conclusion.UNDECIDED, "the run 'reordered' hung after step 0",
         patched=1.5, reordered=None, ends={"reordered": {"code": 143, "timed_out": True}}),
    case("equal bits need no noise", Conclusion.BITWISE, "reordered: failed after step 0 with exit code 1",
         reordered=None, ends={"reordered": {"code": 1}}, noise=True),
    case("that the patched run fails needs no noise", Conclusion.DIFFERENT, "noise not measured",
         patched=1.5, reordered=None, ends={"reordered": {"code": 1}, "patched": FAILS}, blamed="a"),
    case("another noise run fails", Conclusion.UNDECIDED, "the run 'reordered-2' failed",
         patched=1.9, reordered=1.1, reordered_2=None, ends={"reordered-2": {"code": 1}}),
    # Both fail.
    case("patched earlier than the script itself", Conclusion.DIFFERENT, head=f"{FAILS_EARLIER}, because of a\n",
         ends=ALL_FAIL, beats={"patched": 1}, blamed="a"),
    case("by the same exception", Conclusion.FAILS_LATER, head=f"{UNTIL} with exit code 1 by ValueError: all",
         ends=ALL_FAIL, logs=dict.fromkeys(ALL_FAIL, f"{TRACEBACK}ValueError: no data: 1\n")),
    case("a rank is a step ahead", Conclusion.FAILS_LATER, head=UNTIL.replace("step 2", "step 1"),
         ends=ALL_FAIL, beats=dict.fromkeys(ALL_FAIL, 1)),
    case("by another exception", Conclusion.DIFFERENT, "with exit code 1 by a.b.OddError, stock",
         ends=ALL_FAIL, logs={"patched": OTHER_TRACEBACK}),
    case("by the same end of a rank", Conclusion.FAILS_LATER, head=f"{UNTIL} with exit code 1 (rank 1: exit code 7): a",
         ends=ALL_FAIL, logs=dict.fromkeys(ALL_FAIL, report_ends(rank1=7))),
    case("two ranks, either of them first", Conclusion.FAILS_LATER, ends=ALL_FAIL, ran="stock patched",
         logs={"stock": report_ends(rank1=7, rank0=9), "patched": report_ends(rank0=9)}),
    case("by another end of a rank", Conclusion.DIFFERENT, "exit code 1 (rank 0: SIGSEGV), stock after step 2 with",
         ends=ALL_FAIL, logs={"patched": report_ends(rank0=-11)} | {
             name: report_ends(rank1=7) for name in ("stock", "rerun", "reordered")}),
    case("only patched, by a rank", Conclusion.DIFFERENT,
         "the patched run fails with exit code 1 (rank 1: exit code 7), and stock does not",
         ends={"patched": {"code": 1}}, logs={"patched": report_ends(rank1=7)}),
    case("now here and now there", Conclusion.FAILS_LATER, "more stock runs end elsewhere, too",
         ends=ALL_FAIL, beats={"patched": 1, "rerun": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("features", "given", "more", "verdict", "said", "head", "blamed", "ran"), CASES
)
def test_the_verdict_follows_from_the_variants(
    verify, features, given, more, verdict, said, head, blamed, ran
):
    result, text = verify(features, values(**given), **more)
    assert result.verdict is verdict
    assert text.startswith(head)
    assert all(part in " ".join(text.split()) for part in said), text
    assert blamed is None or result.blamed == blamed.split()
    assert ran is None or list(result.outcomes) == ran.split()


def test_the_noise_runs_run_when_asked(verify):
    result, text = verify(["a"], values(reordered=1.5), noise=True)
    assert result.verdict is Conclusion.BITWISE
    assert result.noise == {
        "rerun": "all bits equal",
        "reordered": "1 of 2 values moved, by up to 0.5",
    }
    assert "moved, by up to 0.5" in text


def test_a_script_that_does_not_repeat_itself_is_judged_with_deterministic_algorithms(verify):
    result, text = verify(["a"], values(patched=2.0, rerun=1.1))
    assert (result.verdict, list(result.outcomes)) == (Conclusion.BITWISE, ["stock", "patched"])
    assert (
        "The patched run differed in 1 value by more than that, so all of them ran again"
        in " ".join(text.split())
    )
    assert result.outcomes["patched"].folder.parent.name == "deterministic"


def test_matrix_products_are_reordered_for_features_that_reorder_them(verify):
    result, _ = verify(["products"], values(patched=1.9, reordered=1.5))
    assert result.verdict is Conclusion.NOISE
    assert [outcome.variant.details.get("pieces") for outcome in result.outcomes.values()] == [
        None,
        None,
        None,
        2,
    ]
    result, _ = verify(["a"], values(patched=1.9, reordered=1.5))
    assert result.outcomes["reordered"].variant.details["pieces"] == 0
    result, _ = verify(["products"], values(), calls=0)
    assert not result.outcomes["patched"].reorders_products, "it was on, and had nothing to do"


def test_they_are_reordered_more_often_as_long_as_chance_may_explain_a_difference(verify):
    result, _ = verify(
        ["products"], values(patched=1.9, reordered=1.1, reordered_2=1.2, reordered_3=1.5)
    )
    assert (result.verdict, list(result.outcomes)[-1]) == (Conclusion.NOISE, "reordered-3")
    assert not any(outcome.variant.details["deterministic"] for outcome in result.outcomes.values())
    assert list(result.noise) == ["rerun", "reordered", "reordered 2", "reordered 3"]
    pieces = [outcome.variant.details.get("pieces", 0) for outcome in result.outcomes.values()]
    assert pieces == [0, 0, 0, 2, 3, 4]
    result, _ = verify(["products"], values(patched=1.9, reordered=1.1))
    assert (result.verdict, list(result.outcomes)[-1]) == (Conclusion.DIFFERENT, "reordered-5")


def test_other_sums_over_ranks_are_drawn_again_where_they_move_anything(verify):
    result, _ = verify(["a"], values(patched=1.9, reordered=1.1, reordered_2=1.5))
    assert (result.verdict, list(result.outcomes)[-1]) == (Conclusion.NOISE, "reordered-2")
    turns = [outcome.variant.details.get("reorder", 0) for outcome in result.outcomes.values()]
    assert turns == [0, 0, 0, 1, 2]
    result, _ = verify(["a"], values(patched=1.9))
    assert (result.verdict, list(result.outcomes)) == (
        Conclusion.DIFFERENT,
        ["stock", "patched", "rerun", "reordered"],
    )


def test_operations_without_a_deterministic_form_are_warned_of(verify):
    """An error of torch's is the script's own only if it raises under other circumstances, too."""
    logs = {
        "stock": "RuntimeError: cumsum_cuda_kernel does not have a deterministic implementation, but you set"
    }
    ends = {"stock-strict": {"code": 1}}
    result, text = verify(["a"], values(patched=2.0, rerun=1.1), logs=logs, ends=ends)
    assert result.verdict is Conclusion.BITWISE
    assert result.outcomes["patched"].folder.parent.name == "warned"
    assert "operations of which torch has no such form" in " ".join(text.split())
    result, _ = verify(["a"], values(patched=2.0, rerun=1.1), ends=ends)
    assert result.outcomes["stock"].folder.parent.name == "deterministic", (
        "it failed for another reason"
    )


def test_without_a_report_nothing_was_exercised(verify, monkeypatch):
    monkeypatch.setattr(Outcome, "report", None)
    result, text = verify([], values())
    assert result.verdict is Conclusion.NOT_EXERCISED
    assert "ovpatch doctor" in text


# --- variants that were to measure noise ---


@pytest.mark.parametrize("far", [1e-7, 0.5])
@pytest.mark.parametrize("variant", ["rerun", "reordered"])
def test_without_its_noise_a_difference_is_not_decided(verify, far, variant):
    ends, logs = (
        {variant: {"code": 1}},
        {variant: f"{TRACEBACK}AssertionError: First bucket should be smaller\n"},
    )
    result, text = verify(["a"], values(patched=1.0 + far, **{variant: None}), ends=ends, logs=logs)
    assert (result.verdict, result.verdict.code, result.blamed) == (Conclusion.UNDECIDED, 3, [])
    end = f"the run '{variant}' failed after step 0 with exit code 1 by AssertionError, and stock did not"
    assert text.startswith("CANNOT TELL: 1 of 2 values moved, by up to ")
    assert end in text.splitlines()[0]
    assert "1 values are not bitwise equal, noise not measured" in text
    assert "First bucket should be smaller" in text, "how it ended is shown"
    data = result.to_json()
    assert (data["different"], data["not_bitwise"], data["exit_code"]) == (None, 1, 3)
    assert data["worst"][0]["verdict"] is None


@pytest.mark.parametrize("variant", ["rerun", "reordered"])
def test_an_interruption_leaves_the_noise_unmeasured(verify, variant):
    result, text = verify(
        ["a"], values(patched=1.5), ends={variant: {"code": 130, "interrupted": True}}
    )
    assert (result.verdict, result.verdict.code) == (Conclusion.INTERRUPTED, 130)
    assert "1 values are not bitwise equal, noise not measured" in text
    assert "by more than noise" not in text
    assert "noise       not measured" in text


def test_the_json_has_the_values_of_each_role_and_the_time_of_each_run(verify):
    ends = {"patched": {"seconds": 2.25}, "rerun": {"seconds": 3.0004}}
    result, _ = verify(["a"], values(), noise=True, ends=ends)
    data = result.to_json()
    assert (data["values"], data["values_by_role"]) == (2, {"parameter": 2})
    assert {name: run["seconds"] for name, run in data["runs"].items()} == {
        "stock": 1.0, "patched": 2.25, "rerun": 3.0, "reordered": 1.0
    }  # fmt: skip


# --- features that did nothing, or less than all ---


def test_a_feature_that_did_nothing_is_named_with_its_reason(verify):
    said = {
        "remarks": ["Adam had nothing to divide"],
        "counters": {"optimizers": 2, "steps": 0},
        "work": ["steps"],
    }
    result, text = verify(["a", "b"], values(), says={"b": said})
    assert result.verdict is Conclusion.BITWISE
    assert text.startswith("SAME: all 2 values of 2 steps on 1 rank have stock's bits (a)\n")
    assert "\nb           did nothing: Adam had nothing to divide\n" in text
    assert result.to_json()["idle"] == {"b": "Adam had nothing to divide"}
    result, text = verify(["b"], values(), says={"b": said})
    assert result.verdict is Conclusion.NOT_EXERCISED
    assert "no feature that was on did any work (b: Adam had nothing to divide)" in text


def test_what_was_left_to_stock_is_told(verify):
    said = {
        "remarks": ["LBFGS is not split: r"],
        "counters": {"steps": 1, "stock_optimizers": 2},
        "work": ["steps"],
    }
    result, text = verify(["a"], values(patched=1.9, reordered=1.5), says={"a": said})
    assert result.verdict is Conclusion.NOISE
    assert text.splitlines()[0].endswith("by no more than runs of stock PyTorch (a)")
    assert "a           steps 1, stock_optimizers 2, and some work was left to torch\n" in text
    assert "LBFGS is not split: r" in text
    assert result.to_json()["remarks"] == {"a": ["LBFGS is not split: r"]}


def test_that_it_was_not_called_is_said_of_what_has_no_better_words(verify, monkeypatch):
    waiting = {
        "feature": "b",
        "target": "m.f",
        "kind": "wrap",
        "state": "pending",
        "calls": 0,
        "traces": 0,
    }
    monkeypatch.setitem(REPORT, "patches", [waiting])
    said = {
        "remarks": ["m.f is pending: m is not imported yet", NEVER_CALLED],
        "counters": {"calls": 0},
    }
    _, text = verify(["a", "b"], values(), says={"b": said})
    assert f"b           did nothing: {NEVER_CALLED}" in text
    said["remarks"] = ["no model was wrapped", f"{NEVER_CALLED} (rank 0)"]
    _, text = verify(["a", "b"], values(), says={"b": said})
    assert "b           did nothing: no model was wrapped\n" in text


def test_a_process_that_could_not_be_patched(verify, monkeypatch):
    failure = {"pid": 5, "rank": "1", "error": "no such feature"}
    monkeypatch.setattr(
        Outcome, "failures", property(lambda self: [failure] if self.variant.patched else [])
    )
    result, text = verify(["a"], values())
    assert (result.verdict, result.verdict.code) == (Conclusion.NOT_EXERCISED, 3)
    assert "no such feature" in text


NAN = float("nan")


@pytest.mark.parametrize(
    ("loss", "parameter", "verdict"),
    [
        (NAN, NAN, Conclusion.NO_STEP),
        (NAN, 1.0, Conclusion.BITWISE),
        (1.0, 1.0, Conclusion.BITWISE),
    ],
)
def test_losses_that_are_all_nan_tell_nothing(verify, monkeypatch, loss, parameter, verdict):
    def record(folder, value):
        recorder = EventRecorder(folder)
        recorder.record_event(BACKWARD, {"loss": keep_value(loss)}, step=1)
        both = {
            "parameter w": keep_value(torch.tensor([parameter])),
            "parameter v": keep_value(torch.tensor([NAN])),
        }
        recorder.record_event(STEP, {**both, "state w.x": keep_value(object())}, step=1)
        recorder.flush_events()

    monkeypatch.setitem(globals(), "_record", record)
    result, text = verify(["a"], values())
    assert result.verdict is verdict
    assert ("every loss and every parameter is NaN" in text) == (verdict is Conclusion.NO_STEP)
    is_shown = "The verdict rests on the parameters, of which 1 of 2 are finite." in " ".join(
        text.split()
    )
    assert is_shown == (loss != loss and parameter == parameter)
    assert ("cannot be read and were not compared: 'state w.x' (object)." in text) == (
        verdict is Conclusion.BITWISE
    )


def test_the_page_lists_each_verdict_with_its_words_in_json_and_its_exit_code():
    page = Path(__file__).parents[2] / "docs" / "verify.md"
    cells = [line.split("|")[1:-1] for line in page.read_text().splitlines() if line[:3] == "| `"]
    listed = {tuple(cell.strip().strip("`") for cell in row) for row in cells if len(row) == 4}
    listed = {(words, name, code) for words, _, name, code in listed}
    assert listed == {(its.words, its.value, str(int(its.code))) for its in Conclusion}
