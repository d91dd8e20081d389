"""ovpatch pipeline: --what-if, and a command that is measured."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from ovpatch.cli import main, pipeline_command
from ovpatch.exit_codes import ExitCode
from ovpatch.insight import pipeline_plan
from ovpatch.overlap.pipelining.order_table import ORDERS, TORCH_ORDERS
from ovpatch.planner import solver, what_if
from ovpatch.settings.settings import SettingsError
from ovpatch_plugins.pipeline.auto.order_race import CLEAR
from tests.support import patience
from tests.support.preloaded import preloaded


@pytest.fixture
def command(capsys, monkeypatch):
    # By default it looks for better orders for seconds; tests/plugins/pipeline/test_solver.py asks how good they are.
    monkeypatch.setitem(solver.solve.__kwdefaults__, "effort", 30_000)

    def command(*line):
        code = main.main(["pipeline", *line])
        return (code, *capsys.readouterr())

    return command


def test_the_table_has_fixed_and_solved_orders_and_a_picture(command):
    code, out, err = command("--what-if", "p=2,m=4,memory=1x/1.5x,f=1,b=1,w=1,c=0")
    assert code == ExitCode.OK, err
    rows = {
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in out.splitlines()
        if line[:1] == "|"
    }
    assert ("stock 1f1b", "straight", "1.00x", "1.250", "20.0%", "") in rows
    assert ("1f1b", "straight", "1.00x", "1.167", "14.3%", "") in rows
    assert ("zb-h1", "straight", "1.00x", "1.083", "7.7%", "") in rows
    assert ("stock gpipe", "straight", "2.00x", "1.250", "20.0%", "too large") in rows
    assert sum(row[-1] == "best" for row in rows) == 1
    assert any(row[0] == "solved for 1.5x" for row in rows)
    assert "no order is below 1.000 (straight), 1.000 (vee)" in out
    assert "2 ranks, 4 microbatches, F 1, B 1, W 1, transfer 0" in out
    pictures = [line.split()[2] for line in out.splitlines() if line.startswith("  rank ")]
    assert len(pictures) == 2
    assert all(set(picture) == set("FBW.") and len(picture) == 100 for picture in pictures)
    # The order to run is that which the table calls the best.
    (best,) = (row for row in rows if row[-1] == "best")
    runs = [line for line in out.splitlines() if line.startswith("to run ")]
    assert runs[0].startswith(f"to run {best[0]} where ")
    assert f"{best[0]}, {best[1]} (a dot" in out
    assert len(runs) == 2


def test_where_no_order_is_faster_the_feature_stays_off(command):
    code, out, _ = command("--what-if", "p=1,m=4,memory=1x/2x")
    assert code == ExitCode.OK
    assert (
        "stock 1f1b is the fastest order: leave the feature off where each rank has one stage"
        in out
    )
    assert "to run " not in out


def test_each_order_tells_how_to_run_it(command):
    _, out, _ = command("--what-if", "p=2,m=4,placement=straight/loop/vee/bidirectional", "--json")
    rows = json.loads(out)["rows"]
    settings = {row["order"]: row["setting"] for row in rows}
    # Each order that torch has is listed twice, because the engine runs it with early sends.
    torchs = {f"stock {name}" for name in TORCH_ORDERS.values()}
    assert {name for name, setting in settings.items() if not setting} == torchs
    for name in ORDERS:
        variables = {"OVPATCH_PIPELINE": "1", "OVPATCH_PIPELINE_SCHEDULE": name}
        assert settings[name] == variables
    for row in rows:
        assert (
            row["limit"] is None
            or row["setting"]["OVPATCH_PIPELINE_MEMORY_LIMIT"] == f"{row['limit']:g}x"
        )


def test_more_memory_never_makes_a_solved_step_longer(command, monkeypatch):
    """Here the search for the larger limit finds only what fits into 0.7x."""
    steps = []

    def search(problem, **options):
        limit = problem.memory_limit if not steps else 0.7 * problem.ranks
        found = solver.solve(dataclasses.replace(problem, memory_limit=limit), effort=0)
        steps.append(found.simulation.step)
        return found

    monkeypatch.setattr(what_if, "solve", search)
    code, out, err = command("--what-if", "p=3,m=6,placement=vee,memory=1x/1.2x", "--json")
    assert code == ExitCode.OK, err
    assert steps[1] > steps[0]
    small, large = (row for row in json.loads(out)["rows"] if row["limit"])
    assert (large["step"], large["memory"]) == (small["step"], small["memory"])


def test_json_has_each_action_of_the_best_order(command):
    code, out, _ = command(
        "--what-if", "p=2,m=3,memory=1.5x,placement=straight,f=1,b=1,w=1,c=0", "--json"
    )
    assert code == ExitCode.OK
    answer = json.loads(out)
    assert answer["question"]["memory"] == [1.5]
    assert answer["unit"] == 9
    best = answer["rows"][answer["best"]]
    assert best["step"] == pytest.approx(min(row["step"] for row in answer["rows"] if row["fits"]))
    assert best["memory"] <= 1.5
    assert len(answer["timeline"]) == 2
    for line in answer["timeline"]:
        assert sorted((kind, microbatch) for kind, _, microbatch, _, _ in line) == [
            (kind, microbatch) for kind in "BFW" for microbatch in range(3)
        ]
    last = max(end - line[0][3] for line in answer["timeline"] for *_, end in line[-1:])
    assert last == pytest.approx(best["step"])


def test_a_memory_that_holds_nothing_is_a_problem(command):
    code, _, err = command("--what-if", "p=4,m=8,memory=0.1x")
    assert code == ExitCode.PROBLEM
    assert "Raise memory" in err


def test_the_picture_is_drawn(command, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "best.png"
    code, _, err = command("--what-if", "p=2,m=2,memory=1x", "--picture", str(path))
    assert code == ExitCode.OK
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert str(path) in err


def test_without_matplotlib_the_remedy_is_named_before_anything_is_solved(
    command, monkeypatch, tmp_path
):
    monkeypatch.setattr(pipeline_command, "find_spec", lambda name: None)
    monkeypatch.setattr(pipeline_command, "_plan_orders", lambda question: pytest.fail("solved"))
    code, _, err = command("--what-if", "p=2,m=2", "--picture", str(tmp_path / "best.png"))
    assert code == ExitCode.USAGE
    assert "ovpatch[plot]" in err


def test_two_directions_come_with_what_runs_them(command):
    code, out, _ = command("--what-if", "p=4,m=16,memory=2x,placement=bidirectional,f=1,b=1,w=1")
    assert code == ExitCode.OK
    assert "where cut(placement='bidirectional') made the schedule: OVPATCH_PIPELINE=1" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p=2", "m= is no integer"),
        ("p=0,m=2", "p=0 is no integer"),
        ("p=2,m=2,memroy=1x", "'memroy' is unknown.*did you mean.*memory"),
        ("p=2,m=2,memory=much", "memory=much is no number"),
        ("p=2,m=2,f=-1", "f=-1 is no number of at least 0"),
        ("p=2,m=2,f=0,b=0,w=0", "are all 0"),
        ("p=2,m=2,placement=vees", "placement=vees is unknown"),
        ("p=1000,m=1000", "Give a smaller m"),
        (
            "p=3,m=7,placement=bidirectional",
            "p=3 and m=7 cannot be split into the two directions.*even numbers",
        ),
    ],
)
def test_mistakes_are_named(text, message, command):
    with pytest.raises(SettingsError, match=message):
        pipeline_command.parse_question(text)
    assert command("--what-if", text)[0] == ExitCode.USAGE


def test_defaults():
    question = pipeline_command.parse_question("p=8,m=32")
    assert question["memory"] == [1.0, 1.5, 2.0]
    assert question["placements"] == ["straight", "vee"]
    assert (question["forward"], question["backward"], question["weight"], question["send"]) == (
        1.0,
        1.22,
        1.04,
        0.02,
    )


def test_torch_is_not_imported(command):
    """A plan needs no torch; it may run on a machine without."""
    import subprocess

    program = (
        "import sys; from ovpatch.cli.main import main; "
        "from ovpatch.planner import solver; solver.solve.__kwdefaults__['effort'] = 30_000; "
        "main(['pipeline', '--what-if', 'p=2,m=2,memory=1x']); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patience.scale(120),
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


# --- a command ---

THREE_D = Path(__file__).parents[1] / "examples" / "three_d.py"


def test_a_command_is_measured_with_all_orders(command, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = [*preloaded(ranks=2), str(THREE_D)]
    small = ["--dp=1", "--tp=1", "--width=16", "--context=8", "--microbatches=4", "--steps=1000"]
    code, out, err = command("--json", "--out", str(tmp_path / "out"), "--", *torchrun, *small)
    assert code == ExitCode.OK, err
    plan = json.loads(out)
    assert (plan["class"], plan["ranks"], plan["microbatches"], plan["placement"]) == (
        "Schedule1F1B",
        2,
        4,
        [0, 1],
    )
    assert all(
        seconds > 0 for name in ("forward", "backward", "weight") for seconds in plan["costs"][name]
    )
    assert plan["costs"]["send"] > 0
    names = " = ".join(row["order"] for row in plan["rows"]).split(" = ")
    assert set(names) >= {
        "as given",
        *ORDERS,
        "solved for 1x",
        "solved for 1.5x",
    }
    assert plan["rows"][0]["order"] == "stock"
    assert plan["rows"][1]["order"].startswith("as given = 1f1b")
    # Equal predictions may differ in the last bit.
    assert plan["rows"][0]["predicted"] >= plan["rows"][1]["predicted"] * (1 - 1e-9)
    stock, *measured = [row["measured"] for row in plan["rows"]]
    fastest = 1 + measured.index(min(measured))
    assert plan["best"] == (fastest if min(measured) < CLEAR * stock else 0)
    assert stock > 0
    assert all(row["predicted"] > 0 for row in plan["rows"])
    assert len(plan["timeline"]) == len(plan["picture"]) == 2
    log = (tmp_path / "out" / "measured.log").read_text()
    last = max(
        int(line.split()[1].rstrip(":")) for line in log.splitlines() if line.startswith("step ")
    )
    assert 6 + 6 * len(plan["rows"]) <= last + 1 < 100, "it ends when all is measured"

    plan["best"] = fastest
    shown = pipeline_plan.format_plan(plan, "torchrun train.py", colour=False)
    best = plan["rows"][fastest]
    setting = f"OVPATCH_PIPELINE_SCHEDULE={best['setting']['schedule']}"
    assert f"to run it: OVPATCH_AUTO=1 OVPATCH_PIPELINE=1 {setting}" in shown
    assert shown.count("| best |") == 1
    assert shown.count("  rank ") == 2
    shown = pipeline_plan.format_plan({**plan, "best": 0}, "torchrun train.py", colour=False)
    assert "no order is faster than torch's own step: leave feature pipeline off" in shown
    assert "to run it" not in shown


def test_a_command_without_a_pipeline_is_told_so(command, tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    code, _, err = command(
        "--out", str(tmp_path / "out"), "--", *preloaded(), str(tmp_path / "train.py")
    )
    assert code == ExitCode.UNDECIDED
    assert "the feature ran no schedule of torch.distributed.pipelining" in err


def test_a_command_or_a_question_is_needed(command, monkeypatch):
    assert command()[0] == ExitCode.USAGE
    code, _, err = command("--what-if", "p=2,m=2", "--", "true")
    assert code == ExitCode.USAGE
    assert "give either --what-if or a command" in err
    monkeypatch.setenv("OVPATCH", "0")
    code, _, err = command("--", "true")
    assert code == ExitCode.USAGE
    assert "Unset it" in err


@pytest.mark.parametrize(
    ("line", "env", "count"),
    [
        ("torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 train.py", {}, "2"),
        ("torchrun --nnodes 2:4 --rdzv-backend etcd train.py", {}, "several"),
        ("torchrun train.py", {"PET_NNODES": "3", "PET_MASTER_ADDR": "h"}, "3"),
        ("env", {"WORLD_SIZE": "8", "RANK": "1", "MASTER_ADDR": "h"}, "8"),
    ],
)
def test_a_command_of_several_nodes_is_an_error_with_the_remedy(
    command, monkeypatch, line, env, count
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, out, err = command("--", *line.split())
    assert (code, out) == (ExitCode.USAGE, "")
    assert f"the command is one of {count} nodes, and this subcommand measures" in err
    assert "OVPATCH_PIPELINE_SCHEDULE=auto on all nodes" in err


def test_the_line_to_set_begins_with_the_schedule():
    line = pipeline_plan.write_setting({"memory_limit": "2x", "schedule": "auto"})
    assert line.endswith("OVPATCH_PIPELINE_SCHEDULE=auto OVPATCH_PIPELINE_MEMORY_LIMIT=2x")
