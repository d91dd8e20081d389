"""Two records side by side: what is bitwise, what is noise, what differs first, and where runs go different ways."""

from __future__ import annotations

import argparse
import io

import pytest
import torch
from rich.console import Console

from ovpatch.cli import verify_command
from ovpatch.insight.equality import Verdict
from ovpatch.insight.verify import noise_runs, recording
from ovpatch.insight.verify.compare import ORDER, compare_runs, compare_values
from ovpatch.insight.verify.recording import (
    BACKWARD,
    CHECKPOINT,
    MAX_KEPT_ELEMENTS,
    SCALE,
    STEP,
    EventRecorder,
    keep_text,
    keep_value,
)
from ovpatch.insight.verify.verification import Conclusion as Verdicts
from ovpatch.insight.verify.verification import Verification
from ovpatch.insight.verify.verify_report import print_result
from tests.support.golden import check_golden


def value(number=1.0, more=0.0, size=4):
    tensor = torch.full((size,), number)
    tensor[-1] += more
    return keep_value(tensor)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """``record(name, events, rank=0, cut=False)``: events are (type, values) with a step's number after each step."""

    def record(name, *processes, cut=False):
        (tmp_path / name).mkdir()
        for rank, events in enumerate(processes):
            monkeypatch.setenv("RANK", str(rank))
            recorder, step = EventRecorder(tmp_path / name), 1
            for event_type, values in events:
                recorder.record_event(event_type, values, step=step, label="SGD")
                if event_type == STEP:
                    step += 1
                    recorder.flush_events()
            recorder.flush_events()
        return recording.read_recorded(tmp_path / name, cut=cut)

    return record


def turns(count, **changes):
    """A loss and a step each; ``changes`` are values of step 2."""
    events = []
    for step in range(1, count + 1):
        values = {"gradient a": value(), "parameter a": value(float(step))}
        events += [
            (BACKWARD, {"loss": keep_value(1.0)}),
            (STEP, {**values, **(changes if step == 2 else {})}),
        ]
    return events


def test_the_same_events_are_equal(record):
    compared = compare_runs(record("a", turns(3), turns(3)), record("b", turns(3), turns(3)))
    assert compared.findings == []
    assert (compared.processes, compared.steps, compared.values) == (
        ["rank 0", "rank 1"],
        3,
        2 * 3 * 3,
    )
    assert compared.events == {BACKWARD: 6, STEP: 6}


def saving(far=0.0, ema=0.0, stale=0):
    """Two steps and a checkpoint; the second step is ``far`` off, the average ``ema``; ``stale`` saves the first."""
    after = [value(1.0), value(2.0, far)]
    steps = [(STEP, {"parameter a": after[0]}), (STEP, {"parameter a": after[1]})]
    saved = {
        "saved model.a": after[0 if stale else 1],
        "saved ema.a": value(1.5, ema),
        "saved epoch": keep_text("int"),
    }
    return [*steps, (CHECKPOINT, saved)]


def test_an_average_in_a_checkpoint_is_compared_by_value(record):
    stock = record("stock", saving())
    (found,) = compare_runs(stock, record("late", saving(ema=0.01))).findings
    assert (found.row.name, found.row.verdict) == ("saved ema.a", Verdict.DIFFERENT)
    assert found.row.max_abs_diff == pytest.approx(0.01)
    assert compare_runs(stock, record("rounded", saving(ema=4e-7))).different == []
    noise = {"reordered": record("reordered", saving(ema=0.006))}
    assert compare_runs(stock, record("noisy", saving(ema=0.01)), noise).different == []


def test_a_parameter_that_is_saved_is_judged_at_its_step(record):
    stock = record("stock", saving())
    compared = compare_runs(stock, record("far", saving(far=0.5)))
    assert [finding.row.name for finding in compared.different] == ["parameter a"]
    (saved,) = (finding for finding in compared.findings if finding.row.name == "saved model.a")
    assert saved.row.note == "it is 'parameter a' of the step before"
    (stale,) = compare_runs(stock, record("stale", saving(stale=1))).findings
    assert (stale.row.name, stale.row.verdict) == ("saved model.a", Verdict.DIFFERENT)


def test_small_numbers_are_not_all_noise():
    def event(factor, bias=1e-12):
        return {
            "gradient w": value(1e-7 * factor),
            "gradient b": value(bias),  # its true gradient is zero
            "state w.exp_avg_sq": value(1e-15 * factor),
            "state w.step": keep_value(3.0),
            "option param_groups[0].lr": keep_value(1e-6 * factor),
            "parameter e": keep_value(torch.zeros(0)),
            "parameter c": keep_value(torch.full((2,), 1e-7j * factor)),
            "parameter f": keep_value((torch.ones(2) * factor).to(torch.float8_e4m3fn)),
        }

    halved = {
        row.name
        for row in compare_values(event(1.0), event(0.5), {})
        if row.verdict is Verdict.DIFFERENT
    }
    assert halved == {
        "gradient w", "state w.exp_avg_sq", "option param_groups[0].lr", "parameter f"
    }  # fmt: skip
    noisy = compare_values(event(1.0), event(1.0 + 1e-6, bias=5e-12), {})
    assert {row.verdict for row in noisy} == {Verdict.WITHIN_NOISE}


def test_what_cannot_be_read_is_counted_apart(record):
    runs = [record(name, turns(2, **{"state a.x": keep_value(object())})) for name in "ab"]
    compared = compare_runs(*runs)
    assert (compared.values, compared.unread, compared.finite) == (6, {"state a.x": "object"}, 2)
    compared = compare_runs(runs[0], record("c", turns(2, **{"state a.x": keep_value(1.0)})))
    assert compared.first.row.note == "unread became float"


def test_compared_values_are_counted_by_role(record):
    events = [
        (BACKWARD, {"loss 0": keep_value(1.0), "loss 1": keep_value(1.0)}),
        (SCALE, {"loss scale": keep_value(2.0)}),
        (STEP, {
            "norm of gradients": keep_value(1.0), "gradient a.b c": value(), "gradient d": value(),
            "parameter a": value(), "frozen a": value(), "buffer a": value(),
            "state a.step": keep_value(1.0), "state a.x": keep_value(object()),
            "option param_groups[0].lr": keep_value(0.1), **noise_runs.digest_generators(),
        }),
        (CHECKPOINT, {"saved model.gradient a": value()}),
    ]  # fmt: skip
    compared = compare_runs(record("a", events, events), record("b", events, events))
    generators = len(noise_runs.digest_generators())
    assert compared.values_by_role == {
        "loss": 4, "loss scale": 2, "norm of gradients": 2, "gradient": 4, "parameter": 2,
        "frozen": 2, "buffer": 2, "state": 2, "option": 2, "random": 2 * generators, "saved": 2,
    }  # fmt: skip
    assert sum(compared.values_by_role.values()) == compared.values


def test_losses_that_are_not_finite_are_not_counted(record):
    nan = float("nan")
    large = torch.zeros(MAX_KEPT_ELEMENTS + 1)
    large[0] = nan
    events = [
        (BACKWARD, {"loss": keep_value(loss)}) for loss in (nan, torch.tensor(nan), large, 1.0)
    ]
    assert compare_runs(record("a", events), record("b", events)).finite == 1


def test_names_that_stock_does_not_repeat_are_no_difference():
    def saved(stamp, **more):
        return {f"at_{stamp}": keep_text("float32 [3]"), "w": keep_text("float32 [3]"), **more}

    rows = compare_values(saved(1), saved(2), {"rerun": saved(3), "reordered": saved(4)})
    assert [(row.name, row.verdict) for row in rows] == [
        ("at_1", Verdict.WITHIN_NOISE),
        ("at_2", Verdict.WITHIN_NOISE),
    ]
    rows = compare_values(saved(1), saved(1, more=keep_text("int")), {"rerun": saved(1)})
    assert [(row.name, row.verdict) for row in rows] == [("more", Verdict.DIFFERENT)]


def test_the_first_difference_is_of_the_earliest_event_and_of_a_parameter(record):
    changed = turns(3, **{"norm of gradients": keep_value(2.0), "gradient a": value(2.0)})
    stock = turns(3, **{"norm of gradients": keep_value(1.0)})
    late = turns(3)
    late[5][1]["parameter a"] = value(9.0)
    compared = compare_runs(record("a", turns(3), stock), record("b", late, changed))
    first = compared.first
    assert (first.process, first.step, first.row.name) == ("rank 1", 2, "gradient a")
    assert first.event == "step 2 of optimizer 0 (SGD)"
    assert len(compared.different) == 3


def test_a_step_that_one_run_skips_is_named(record):
    skipped = turns(3)
    del skipped[3]
    skipped.insert(3, (SCALE, {}))
    compared = compare_runs(record("a", turns(3), turns(3)), record("b", turns(3), skipped))
    (finding,) = compared.findings
    assert (finding.process, finding.step, finding.row.name) == ("rank 1", 2, ORDER)
    assert finding.row.note == "stock: step 2 of optimizer 0 (SGD); patched: GradScaler.update()"
    assert compared.first is finding


def test_the_table_shows_the_first_difference_and_then_the_worst(record):
    patched = [(BACKWARD, {f"loss {n}": keep_value(1.0 + 1e-3 * 2**n)}) for n in range(15)]
    stock = [(BACKWARD, {f"loss {n}": keep_value(1.0)}) for n in range(15)]
    compared = compare_runs(record("a", stock), record("b", patched))
    text = printed(Verification(Verdicts.DIFFERENT, "why", compared))
    assert "not bitwise equal: the first, then the worst of 15 names" in text
    sizes = [float(line.split("|")[4]) for line in text.splitlines() if line.startswith("| loss")]
    assert sizes[0] == 0.001
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert (len(sizes), max(sizes)) == (10, 16.4)


def test_a_name_has_one_row_which_counts_its_places(record):
    """A late parameter differs on each rank and in each later step, and must not fill the table."""
    late = turns(3)
    for place in (1, 3, 5):
        late[place][1]["parameter a"] = value(9.0)
    compared = compare_runs(record("a", turns(3), turns(3)), record("b", late, turns(3)))
    result = Verification(
        Verdicts.DIFFERENT, "first in 'parameter a' at step 1", compared, blamed=["ddp"]
    )
    text = printed(result, "torchrun train.py")
    assert sum("| parameter a" in line for line in text.splitlines()) == 1
    assert "and 2 more places" in text
    check_golden("verify-different", text)


def printed(result, command=""):
    stream = io.StringIO()
    print_result(result, Console(width=150, file=stream), command)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [80, 150])
def test_a_log_is_as_wide_as_it_is_told(record, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    patched = [(BACKWARD, {"a loss with a name that wants much room": keep_value(1.0 + 1e-3)})]
    stock = [(BACKWARD, {"a loss with a name that wants much room": keep_value(1.0)})]
    result = Verification(
        Verdicts.DIFFERENT, "why", compare_runs(record("a", stock), record("b", patched))
    )
    arguments = argparse.Namespace(json=None, out=None, command=["train me"])
    assert verify_command._conclude(result, arguments) == Verdicts.DIFFERENT.code
    rows = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "|+"]
    assert max(map(len, rows)) <= columns
    assert any("a loss with a name that wants much room" in row for row in rows) == (columns == 150)


def test_a_run_that_was_cut_is_compared_as_far_as_it_goes(record):
    stock = record("a", turns(3), turns(3))
    assert compare_runs(stock, record("b", turns(2), turns(1), cut=True)).findings == []
    assert compare_runs(stock, record("c", turns(2), turns(1), cut=True)).steps == 2
    found = compare_runs(stock, record("d", turns(3), turns(1))).findings
    assert [(finding.process, finding.row.note) for finding in found] == [
        ("rank 1", "stock: a backward (step 2); patched: the end")
    ]
    (missing,) = compare_runs(stock, record("e", turns(3))).findings
    assert (missing.process, missing.row.note) == (
        "rank 1",
        "nothing happened here in the patched run",
    )


def test_what_stock_itself_does_not_repeat_is_noise(record):
    def variant(name, moved, shorter=False):
        events = turns(
            3, **{"gradient a": value(more=moved), "random.python": keep_text(str(moved))}
        )
        return record(name, events[:-1] if shorter else events)

    stock, near, far = variant("a", 0.0), variant("b", 1.9e-3), variant("c", 2.1e-3)
    noise_run = variant("d", 1e-3)
    allowed = compare_runs(stock, near, {"reordered": noise_run})
    assert [finding.row.verdict for finding in allowed.findings] == [Verdict.WITHIN_NOISE] * 2
    assert allowed.different == []
    assert {finding.row.name for finding in compare_runs(stock, near).different} == {
        "gradient a",
        "random.python",
    }
    assert {
        finding.row.name for finding in compare_runs(stock, far, {"rerun": noise_run}).different
    } == {"gradient a"}
    gone = compare_runs(
        stock, variant("e", 0.0, shorter=True), {"rerun": variant("f", 0.0, shorter=True)}
    )
    assert [finding.row.verdict for finding in gone.findings] == [Verdict.WITHIN_NOISE]


def test_a_noise_run_that_went_another_way_allows_nothing(record):
    stock, patched = (
        record("a", turns(3)),
        record("b", turns(3, **{"gradient a": value(more=1e-3)})),
    )
    wild = turns(3, **{"gradient a": value(more=1.0)})
    assert not compare_runs(stock, patched, {"rerun": record("c", wild)}).different
    # The later events are at the same places as in the stock run, but nothing shows that they are the same events.
    wild[:2] = wild[1::-1]
    assert compare_runs(stock, patched, {"rerun": record("d", wild)}).different


def test_large_tensors_are_judged_by_their_sums():
    def row(more, noise_run=0.0):
        stock, patched, noisy = (
            value(1.0, moved, MAX_KEPT_ELEMENTS * 4) for moved in (0.0, more, noise_run)
        )
        (found,) = compare_values({"a": stock}, {"a": patched}, {"reordered": {"a": noisy}})
        return found.verdict

    assert row(1.0) is Verdict.DIFFERENT
    assert row(1e-6) is Verdict.WITHIN_NOISE
    assert row(1e-2, noise_run=0.6e-2) is Verdict.WITHIN_NOISE
    assert row(1e-2, noise_run=0.4e-2) is Verdict.DIFFERENT
    zeros, signed = torch.zeros(MAX_KEPT_ELEMENTS + 1), torch.zeros(MAX_KEPT_ELEMENTS + 1)
    signed[3] = -0.0
    (found,) = compare_values({"a": keep_value(zeros)}, {"a": keep_value(signed)}, {})
    assert (found.verdict, found.max_abs_diff) == (Verdict.WITHIN_NOISE, 0.0)


def test_a_nan_is_different_wherever_it_comes(record):
    for size in (4, MAX_KEPT_ELEMENTS + 1):
        stock, patched = value(size=size), value(more=float("nan"), size=size)
        (found,) = compare_values(
            {"a": stock}, {"a": patched}, {"rerun": {"a": value(more=1.0, size=size)}}
        )
        assert found.verdict is Verdict.DIFFERENT
        assert compare_values({"a": patched}, {"a": patched}, {}) == []


@pytest.mark.parametrize(
    ("stock", "patched", "note"),
    [
        ({"a": value()}, {}, "missing in the patched run"),
        ({}, {"a": value()}, "stock has no such value"),
        ({"a": value()}, {"a": keep_value(torch.ones(4).half())}, "float32 [4] became float16 [4]"),
        ({"a": keep_value(None)}, {"a": value()}, "none became float32 [4]"),
        ({"a": keep_text("x")}, {"a": keep_text("y")}, "x became y"),
        ({"a": keep_value(1)}, {"a": keep_value(1.0)}, "int became float"),
    ],
)
def test_what_cannot_be_subtracted_is_different(stock, patched, note):
    (found,) = compare_values(stock, patched, {})
    assert (found.verdict, found.note) == (Verdict.DIFFERENT, note)


def losses(*numbers):
    """A loss and a step for each number."""
    return [
        event
        for n in numbers
        for event in ((BACKWARD, {"loss": keep_value(n)}), (STEP, {"parameter a": value()}))
    ]


@pytest.mark.parametrize(
    ("patched", "different"),
    [
        # Three times the move of rank 0.
        ([(1.0, 1.0, 1.0), (1.0, 1.025, 1.025)], []),
        ([(1.0, 1.0, 1.0), (1.0, 1.035, 1.0)], [("rank 1", 2)]),
        # Nothing had moved until then.
        ([(1.0, 1.0, 1.0), (1.015, 1.0, 1.0)], [("rank 1", 1)]),
    ],
)
def test_the_noise_of_a_loss_is_that_of_all_ranks_so_far(record, patched, different):
    stock = record("a", *[losses(1.0, 1.0, 1.0)] * 2)
    rerun = record("b", losses(1.0, 1.01, 1.0), losses(1.0, 1.0, 1.0))
    compared = compare_runs(
        stock, record("c", *(losses(*numbers) for numbers in patched)), {"rerun": rerun}
    )
    assert [(finding.process, finding.step) for finding in compared.different] == different


def test_progress_counts_runs_and_says_why_there_are_more():
    assert (
        verify_command.describe_run(1, "stock")
        == "run 1 of 2, stock (if values differ, further runs follow)"
    )
    assert verify_command.describe_run(2, "patched") == "run 2 of 2, patched"
    assert (
        verify_command.describe_run(3, "rerun")
        == "run 3, rerun (values differ: by as much as stock PyTorch from itself?)"
    )
    assert "is this feature to blame?" in verify_command.describe_run(5, "without-ddp")
