"""What follows from what the variants recorded; the variants here are made up, so no process runs."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from ovpatch.insight import variants
from ovpatch.insight.variants import Outcome
from ovpatch.insight.verify import verify as verifying
from ovpatch.insight.verify.recording import BACKWARD, SCALE, STEP, EventRecorder, keep_value
from ovpatch.insight.verify.verify import Conclusion, Request
from ovpatch.session.report import NEVER_CALLED

STOCK = 1.0
SKIPPED = -1.0  # its second step
REPORT = {"version": "1", "torch": "2", "python": "3", "pid": 1, "rank": 0, "patches": []}


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """``verify(features, value_of_variant, **how_variants_end)`` -> the result and what is printed."""

    def verify(features, value_of, *, noise=False, ends=None, calls=1, states=None, logs=None, beats=None, says=None):
        def run(variant, command, worker, out, *, timeout, progress):
            assert command == ["train"]
            assert worker == verifying.WORKER
            folder, log = out / variant.name, out / f"{variant.name}.log"
            folder.mkdir()
            (folder / "process-7.json").write_text(json.dumps({"pid": 7, "rank": "1"}))
            log.write_text((logs or {}).get(variant.name, "a\nb\nthe last line\n"))
            if variant.patched:
                off = {name for name in features if variant.variables.get(f"OVPATCH_{name.upper()}") == "0"}
                _report(folder, [name for name in features if name not in off], calls, states or {}, says or {})
            _record(
                folder, value_of(f"{variant.name}-deterministic" if variant.details["deterministic"] else variant.name)
            )
            if variant.name in (beats or {}):
                (folder / "beat-1").write_text(str(beats[variant.name]))
            name = (
                f"{variant.name}-strict"
                if variant.details["deterministic"] and variant.details["strict"]
                else variant.name
            )
            return Outcome(variant, folder, log, **{"code": 0, "seconds": 1.0, **(ends or {}).get(name, {})})

        monkeypatch.setattr(variants, "run_variant", run)
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        result = verifying.verify(Request(["train"], out, noise=noise))
        printed = io.StringIO()
        verifying.print_result(result, Console(width=150, file=printed))
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
    listed = [{"name": name, "state": states.get(name, "applied"), **common, **says.get(name, {})} for name in features]
    (folder / "worker-1.json").write_text(json.dumps({**REPORT, "features": listed}))


def _record(folder, value):
    recorder = EventRecorder(folder)
    if value is SKIPPED:
        recorder.record_event(STEP, {"parameter w": keep_value(torch.zeros(4))}, step=1)
        recorder.record_event(SCALE, {}, step=1)
        recorder.flush_events()
    for step in () if value in (None, SKIPPED) else (1, 2):
        recorder.record_event(
            STEP, {"parameter w": keep_value(torch.full((4,), value if step == 2 else 0.0))}, step=step
        )
        recorder.flush_events()
    if value is not None:
        (folder / "beat-1").write_text("2")


def values(**given):
    return lambda name: given.get(name.replace("-", "_"), STOCK)


def test_bitwise_equal_needs_no_noise_run(verify):
    result, text = verify(["a"], values())
    assert (result.verdict, list(result.outcomes)) == (Conclusion.BITWISE, ["stock", "patched"])
    assert text.startswith("bitwise equal: 2 steps, 1 rank, 2 values\n")
    assert "calls 1" in text
    assert "ended by itself before step 5" in text


def test_the_noise_runs_run_when_asked(verify):
    result, text = verify(["a"], values(reordered=1.5), noise=True)
    assert result.verdict is Conclusion.BITWISE
    assert result.noise == {"rerun": "all bits equal", "reordered": "1 of 2 values moved, by up to 0.5"}
    assert "moved, by up to 0.5" in text


def test_within_twice_the_noise_run_it_is_noise(verify):
    result, text = verify(["a"], values(patched=1.9, reordered=1.5))
    assert (result.verdict, result.verdict.code) == (Conclusion.NOISE, 0)
    assert list(result.outcomes) == ["stock", "patched", "rerun", "reordered"]
    assert text.startswith("equal within noise: 2 steps")
    assert "0.9" in text


def test_beyond_it_is_different_and_one_feature_alone_is_to_blame(verify):
    result, text = verify(["a"], values(patched=2.1, reordered=1.5))
    assert (result.verdict, result.blamed) == (Conclusion.DIFFERENT, ["a"])
    assert "rerun" in result.outcomes
    assert text.startswith("different: first in 'parameter w' at step 2 on rank 0, because of a\n")


def test_the_feature_without_which_the_difference_is_gone(verify):
    result, _ = verify(["a", "b", "c"], values(patched=2.0, without_a=2.0, without_c=2.0))
    assert result.blamed == ["b"]
    assert set(result.outcomes) == {"stock", "patched", "rerun", "reordered", "without-a", "without-b", "without-c"}


def test_two_features_that_differ_only_together_are_both_named(verify):
    assert verify(["a", "b"], values(patched=2.0))[0].blamed == ["a", "b"]


def test_no_single_feature(verify):
    result, text = verify(["a", "b"], values(patched=2.0, without_a=2.0, without_b=2.0))
    assert (result.verdict, result.blamed) == (Conclusion.DIFFERENT, [])
    assert "No single feature is to blame" in text


def test_a_script_that_does_not_repeat_itself_is_told_so(verify):
    result, text = verify(["a"], values(patched=1.2, rerun=1.1))
    assert result.verdict is Conclusion.NOISE
    assert "The script does not repeat itself" in text
    assert "'parameter w' on rank 0" in text


def test_a_script_that_does_not_repeat_itself_is_judged_with_deterministic_algorithms(verify):
    result, text = verify(["a"], values(patched=2.0, rerun=1.1))
    assert (result.verdict, list(result.outcomes)) == (Conclusion.BITWISE, ["stock", "patched"])
    assert "The patched run differed in 1 value by more than that, so all of them ran again" in " ".join(text.split())
    assert result.outcomes["patched"].folder.parent.name == "deterministic"


def test_what_differs_with_deterministic_algorithms_too_is_different(verify):
    result, text = verify(["a"], values(patched=2.0, rerun=1.1, patched_deterministic=2.0))
    assert (result.verdict, result.blamed) == (Conclusion.DIFFERENT, ["a"])
    result, text = verify(["a"], values(patched=2.0, rerun=1.1, patched_deterministic=2.0, rerun_deterministic=1.1))
    assert result.verdict is Conclusion.DIFFERENT
    assert "Give it seeds." in " ".join(text.split())


def test_what_stays_unsteady_is_judged_by_more_stock_runs(verify):
    moving = {"patched": 2.0, "rerun": 1.1, "patched_deterministic": 1.5, "rerun_deterministic": 1.1}
    result, _ = verify(["a"], values(**moving, rerun_2_deterministic=1.2, rerun_3_deterministic=1.3))
    assert result.verdict is Conclusion.NOISE
    assert list(result.outcomes) == ["stock", "patched", "rerun", "reordered", "rerun-2", "rerun-3"]
    result, _ = verify(["a"], values(**moving, rerun_2_deterministic=1.2, rerun_3_deterministic=1.2))
    assert (result.verdict, result.blamed) == (Conclusion.DIFFERENT, ["a"])
    assert [name for name in result.outcomes if name.startswith("rerun")] == [
        f"rerun{n}" for n in ("", *("-2", "-3", "-4", "-5"))
    ]


def test_matrix_products_are_reordered_for_features_that_reorder_them(verify):
    result, _ = verify(["products"], values(patched=1.9, reordered=1.5))
    assert result.verdict is Conclusion.NOISE
    assert [outcome.variant.details.get("pieces") for outcome in result.outcomes.values()] == [None, None, None, 2]
    result, _ = verify(["a"], values(patched=1.9, reordered=1.5))
    assert result.outcomes["reordered"].variant.details["pieces"] == 0
    result, _ = verify(["products"], values(), calls=0)
    assert not result.outcomes["patched"].reorders_products, "it was on, and had nothing to do"


def test_they_are_reordered_more_often_as_long_as_chance_may_explain_a_difference(verify):
    result, _ = verify(["products"], values(patched=1.9, reordered=1.1, reordered_2=1.2, reordered_3=1.5))
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
    assert (result.verdict, list(result.outcomes)) == (Conclusion.DIFFERENT, ["stock", "patched", "rerun", "reordered"])


def test_a_difference_that_chance_cannot_explain_needs_no_more_runs(verify):
    result, _ = verify(["products"], values(patched=1.9, reordered=1.001))
    assert (result.verdict, list(result.outcomes)[-1]) == (Conclusion.DIFFERENT, "reordered")


def test_operations_without_a_deterministic_form_are_warned_of(verify):
    """An error of torch's is the script's own only if it raises under other circumstances, too."""
    logs = {"stock": "RuntimeError: cumsum_cuda_kernel does not have a deterministic implementation, but you set"}
    ends = {"stock-strict": {"code": 1}}
    result, text = verify(["a"], values(patched=2.0, rerun=1.1), logs=logs, ends=ends)
    assert result.verdict is Conclusion.BITWISE
    assert result.outcomes["patched"].folder.parent.name == "warned"
    assert "operations of which torch has no such form" in " ".join(text.split())
    result, _ = verify(["a"], values(patched=2.0, rerun=1.1), ends=ends)
    assert result.outcomes["stock"].folder.parent.name == "deterministic", "it failed for another reason"


def test_nothing_that_was_on_means_not_exercised_whatever_differs(verify):
    result, text = verify(["a"], values(patched=2.0), calls=0, states={"a": "skipped"})
    assert result.verdict is Conclusion.NOT_EXERCISED
    assert "no feature was on: a skipped (r)" in text


def test_a_counter_that_did_not_move_means_not_exercised_only_if_all_is_equal(verify):
    assert verify(["a"], values(), calls=0)[0].verdict is Conclusion.NOT_EXERCISED


def test_a_difference_counts_more_than_a_counter(verify):
    assert verify(["a"], values(patched=2.0), calls=0)[0].verdict is Conclusion.DIFFERENT


def test_without_a_report_nothing_was_exercised(verify, monkeypatch):
    monkeypatch.setattr(Outcome, "report", None)
    result, text = verify([], values())
    assert result.verdict is Conclusion.NOT_EXERCISED
    assert "ovpatch doctor" in text


def test_the_end_of_what_can_be_compared_is_told(verify):
    result, text = verify(["a"], values(patched=SKIPPED, rerun=SKIPPED))
    assert result.verdict is Conclusion.NOISE
    assert "On rank 0 nothing is compared from 'step 2 of optimizer 0 ()' at step 2 on" in text


def test_no_step(verify):
    result, _ = verify(["a"], lambda name: None)
    assert (result.verdict, result.verdict.code) == (Conclusion.NO_STEP, 3)


def test_steps_in_one_run_only_are_a_difference(verify):
    result, _ = verify(["a"], lambda name: None if name in ("stock", "rerun", "reordered") else STOCK)
    assert result.verdict is Conclusion.DIFFERENT


@pytest.mark.parametrize(
    ("ends", "verdict", "said"),
    [
        ({"stock": {"code": 130, "interrupted": True}}, Conclusion.INTERRUPTED, "while the run 'stock' ran"),
        (
            {"stock": {"code": 1, "timed_out": True, "stacks": {7: "in f"}}},
            Conclusion.SCRIPT_FAILS,
            "rank 1 (process 7)",
        ),
        ({"stock": {"code": 3}}, Conclusion.SCRIPT_FAILS, "it ends with exit code 3, patched with 0"),
        (
            {"stock": {"code": 3}, "patched": {"code": 3}},
            Conclusion.BITWISE,
            "fails under stock PyTorch, with exit code 3",
        ),
        (
            {"patched": {"code": 3}},
            Conclusion.DIFFERENT,
            "the patched run fails with exit code 3, as stock does not, because of a",
        ),
        ({"patched": {"code": 1, "timed_out": True, "stacks": {7: "in f"}}}, Conclusion.DIFFERENT, "stacks of rank 1"),
        ({"rerun": {"code": 3}}, Conclusion.NOISE, "The run 'rerun' ended with exit code 3"),
    ],
)
def test_how_variants_end(verify, ends, verdict, said):
    result, text = verify(["a"], values(patched=1.0 + 1e-7 if "rerun" in ends else 1.0), ends=ends)
    assert result.verdict is verdict
    assert said in text


# --- variants that were to measure noise ---

FAILED = {"reordered": {"code": 1}}
LOG = {"reordered": "Traceback (most recent call last):\n  File\nAssertionError: First bucket should be smaller\n"}


@pytest.mark.parametrize("far", [1e-7, 0.5])
@pytest.mark.parametrize("variant", ["rerun", "reordered"])
def test_without_its_noise_a_difference_is_not_decided(verify, far, variant):
    ends, logs = {variant: {"code": 1}}, {variant: LOG["reordered"]}
    result, text = verify(["a"], values(patched=1.0 + far, **{variant: None}), ends=ends, logs=logs)
    assert (result.verdict, result.verdict.code, result.blamed) == (Conclusion.UNDECIDED, 3, [])
    end = f"the run '{variant}' failed after step 0 with exit code 1 by AssertionError, and stock did not"
    assert text.startswith("cannot decide: 1 of 2 values moved, by up to ")
    assert end in text.splitlines()[0]
    assert "1 values are not bitwise equal, noise not measured" in text
    assert "First bucket should be smaller" in text, "how it ended is shown"
    data = result.to_json()
    assert (data["different"], data["not_bitwise"], data["exit_code"]) == (None, 1, 3)
    assert data["worst"][0]["verdict"] is None


def test_an_variant_that_hangs_measures_no_noise(verify):
    ends = {"reordered": {"code": 143, "timed_out": True}}
    result, text = verify(["a"], values(patched=1.5, reordered=None), ends=ends)
    assert result.verdict is Conclusion.UNDECIDED
    assert "the run 'reordered' hung after step 0" in text


def test_equal_bits_need_no_noise(verify):
    result, text = verify(["a"], values(reordered=None), ends=FAILED, noise=True)
    assert result.verdict is Conclusion.BITWISE
    assert "reordered: failed after step 0 with exit code 1" in text


def test_that_the_patched_run_fails_needs_no_noise(verify):
    ends = {**FAILED, "patched": {"code": 3}}
    result, text = verify(["a"], values(patched=1.5, reordered=None), ends=ends)
    assert (result.verdict, result.blamed) == (Conclusion.DIFFERENT, ["a"])
    assert "noise not measured" in text


def test_a_further_variant_that_fails_leaves_a_difference_open(verify):
    moving = values(patched=1.9, reordered=1.1, reordered_2=None)
    result, text = verify(["a"], moving, ends={"reordered-2": {"code": 1}})
    assert result.verdict is Conclusion.UNDECIDED
    assert "the run 'reordered-2' failed" in text


@pytest.mark.parametrize("variant", ["rerun", "reordered"])
def test_an_interruption_leaves_the_noise_unmeasured(verify, variant):
    result, text = verify(["a"], values(patched=1.5), ends={variant: {"code": 130, "interrupted": True}})
    assert (result.verdict, result.verdict.code) == (Conclusion.INTERRUPTED, 130)
    assert "1 values are not bitwise equal, noise not measured" in text
    assert "by more than noise" not in text
    assert "noise       not measured" in text


# --- features that did nothing, or less than all ---


def test_a_feature_that_did_nothing_is_named_with_its_reason(verify):
    said = {"remarks": ["Adam had nothing to divide"], "counters": {"optimizers": 2, "steps": 0}, "work": ["steps"]}
    result, text = verify(["a", "b"], values(), says={"b": said})
    assert result.verdict is Conclusion.BITWISE
    assert text.startswith("bitwise equal: 2 steps, 1 rank, 2 values; b did nothing\n")
    assert "\nb           did nothing: Adam had nothing to divide\n" in text
    assert result.to_json()["idle"] == {"b": "Adam had nothing to divide"}
    result, text = verify(["b"], values(), says={"b": said})
    assert result.verdict is Conclusion.NOT_EXERCISED
    assert "no feature that was on did any work (b: Adam had nothing to divide)" in text


def test_what_was_left_to_stock_is_told(verify):
    said = {"remarks": ["LBFGS stays stock: r"], "counters": {"steps": 1, "stock_optimizers": 2}, "work": ["steps"]}
    result, text = verify(["a"], values(patched=1.9, reordered=1.5), says={"a": said})
    assert result.verdict is Conclusion.NOISE
    assert text.splitlines()[0].endswith("; a left some work to stock")
    assert "LBFGS stays stock: r" in text
    assert result.to_json()["remarks"] == {"a": ["LBFGS stays stock: r"]}


def test_that_it_was_not_called_is_said_of_what_has_no_better_words(verify, monkeypatch):
    waiting = {"feature": "b", "target": "m.f", "kind": "wrap", "state": "pending", "calls": 0, "traces": 0}
    monkeypatch.setitem(REPORT, "patches", [waiting])
    said = {"remarks": ["m.f is pending: m is not imported yet", NEVER_CALLED], "counters": {"calls": 0}}
    _, text = verify(["a", "b"], values(), says={"b": said})
    assert f"b           did nothing: {NEVER_CALLED}" in text
    said["remarks"] = ["no model was wrapped", f"{NEVER_CALLED} (rank 0)"]
    _, text = verify(["a", "b"], values(), says={"b": said})
    assert "b           did nothing: no model was wrapped\n" in text


def test_a_difference_before_a_failure_comes_first(verify):
    _, text = verify(["a"], values(patched=2.0), ends={"patched": {"code": 3}})
    where = "first in 'parameter w' at step 2 on rank 0"
    assert text.startswith(f"different: {where}, because of a; then the patched run fails with exit code 3, as")


def test_ranks_that_went_out_of_step_are_not_said_to_fail_by_themselves(verify):
    _, text = verify(["a"], values(patched=SKIPPED), ends={"patched": {"code": 1}})
    assert text.startswith("different: first in 'order of events' at step 2 on rank 0, because of a\n")
    assert "Afterwards the patched run fails with exit code 1" in text


def test_a_process_that_could_not_be_patched(verify, monkeypatch):
    failure = {"pid": 5, "rank": "1", "error": "no such feature"}
    monkeypatch.setattr(Outcome, "failures", property(lambda self: [failure] if self.variant.patched else []))
    result, text = verify(["a"], values())
    assert (result.verdict, result.verdict.code) == (Conclusion.NOT_EXERCISED, 3)
    assert "no such feature" in text


NAN = float("nan")


@pytest.mark.parametrize(
    ("loss", "parameter", "verdict"),
    [(NAN, NAN, Conclusion.NO_STEP), (NAN, 1.0, Conclusion.BITWISE), (1.0, 1.0, Conclusion.BITWISE)],
)
def test_losses_that_are_all_nan_tell_nothing(verify, monkeypatch, loss, parameter, verdict):
    def record(folder, value):
        recorder = EventRecorder(folder)
        recorder.record_event(BACKWARD, {"loss": keep_value(loss)}, step=1)
        both = {"parameter w": keep_value(torch.tensor([parameter])), "parameter v": keep_value(torch.tensor([NAN]))}
        recorder.record_event(STEP, {**both, "state w.x": keep_value(object())}, step=1)
        recorder.flush_events()

    monkeypatch.setitem(globals(), "_record", record)
    result, text = verify(["a"], values())
    assert result.verdict is verdict
    assert ("every loss and every parameter is NaN" in text) == (verdict is Conclusion.NO_STEP)
    told = "The answer is that of the parameters, of which 1 of 2 are finite." in " ".join(text.split())
    assert told == (loss != loss and parameter == parameter)
    assert ("cannot be read and were not compared: 'state w.x' (object)." in text) == (verdict is Conclusion.BITWISE)


# --- both fail ---

FAILS = {name: {"code": 1} for name in ("stock", "patched", "rerun", "reordered")}


def test_a_patched_run_that_fails_earlier_than_the_script_itself_is_different(verify):
    result, text = verify(["a"], values(), ends=FAILS, beats={"patched": 1})
    assert (result.verdict, result.blamed) == (Conclusion.DIFFERENT, ["a"])
    end = "the patched run fails after step 1 with exit code 1, stock after step 2 with exit code 1"
    assert text.startswith(f"different: {end}, because of a\n")


def test_runs_that_fail_by_the_same_exception_are_equal(verify):
    head = "Traceback (most recent call last):\n  File\n"
    raised = dict.fromkeys(FAILS, f"{head}ValueError: no data: 1\n")
    assert verify(["a"], values(), ends=FAILS, logs=raised)[0].verdict is Conclusion.BITWISE


def test_the_other_exception_is_named(verify):
    log = "[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: a.b.OddError: no\n"
    result, text = verify(["a"], values(), ends=FAILS, logs={"patched": log})
    assert result.verdict is Conclusion.DIFFERENT
    assert "with exit code 1 by a.b.OddError, stock" in text


def test_a_script_that_fails_now_here_and_now_there(verify):
    result, text = verify(["a"], values(), ends=FAILS, beats={"patched": 1, "rerun": 1})
    assert result.verdict is Conclusion.BITWISE
    assert "other stock runs end elsewhere, too" in text
