"""ovpatch list and doctor, and the plugin template as a third party would install it."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import ovpatch
from ovpatch import api
from ovpatch.cli import doctor_command, main
from ovpatch.exit_codes import ExitCode
from ovpatch.insight import launch
from ovpatch.session.report_table import wants_colour
from ovpatch.session.session import Session
from ovpatch.session.session_report import FeatureReport, Report
from ovpatch.session.worker_reports import merge_reports
from tests.support import fake_plugins, patience
from tests.support.environment import clean, forget
from tests.support.golden import check_golden
from tests.support.rarely import ALL_CASES

TEMPLATE = Path(__file__).resolve().parent.parent / "examples" / "plugin_template"


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a subcommand in this process; returns exit code, stdout and stderr."""
    forget(monkeypatch)

    session = Session()
    monkeypatch.setattr(doctor_command, "session", session)

    def command(*line):
        code = main.main(line)
        return (code, *capsys.readouterr())

    yield command
    session.revert(())


site = fake_plugins.site


# --- list ---


def test_list_as_json(command, site):
    site.plugin("a", feature="default=False, options=(Option('n', 1, 'Amount.'),)")
    code, out, err = command("list", "--json")
    assert (code, err) == (0, "")
    rows = {row["name"]: row for row in json.loads(out)["features"]}
    assert rows["ddp"]["default"] is True
    assert rows["ddp"]["state"] == "applied"
    assert rows["ddp"]["summary"]
    assert rows["a"]["state"] == "disabled"
    assert rows["a"]["options"] == {"n": {"value": 1, "source": "default"}}
    assert rows["a"]["distribution"] == "dist-a 1.0"


def test_list_as_a_table(command, site, monkeypatch):
    site.plugin("a")
    monkeypatch.setenv("OVPATCH", "-a")
    code, out, _ = command("list")
    rows = {row[0]: row for row in table_rows(out)}
    shipped = {
        path.parent.name
        for path in TEMPLATE.parents[1].glob("plugins/ovpatch_plugins/*/*_feature.py")
    }
    assert (code, shipped | {"a"} | {"feature"}) == (0, set(rows) - {""})
    assert rows["feature"] == ["feature", "default", "state", "why", "summary"]
    assert rows["a"][1:4] == ["?", "disabled", "off by OVPATCH=-a"]
    assert rows["megatron"][1:3] == ["off", "disabled"]
    assert rows["megatron"][3].startswith("off by default")
    assert not any("bucket_cap_mb" in line or len(line) > 120 for line in out.splitlines())
    assert "off by OVPATCH=-a" in command("list", "a")[1]
    assert "fake_a" not in sys.modules


def test_list_gives_the_reason_also_with_everything_off(command, monkeypatch):
    monkeypatch.setenv("OVPATCH", "0")
    rows = table_rows(command("list")[1])[1:]
    assert {row[3] for row in rows if row[0]} == {"off by OVPATCH=0"}


def table_rows(out):
    """Return the cells of each line of the tables in an output."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in out.splitlines()
        if line.startswith("| ")
    ]


def test_list_of_one_feature_has_its_options(command, monkeypatch):
    monkeypatch.setenv("OVPATCH_DDP_BUCKET_CAP_MB", "31")
    code, out, _ = command("list", "DDP")
    assert code == 0
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in out.splitlines()
        if line.startswith("|")
    ]
    assert ["bucket_cap_mb", "31.0", "OVPATCH_DDP_BUCKET_CAP_MB"] in [row[:3] for row in rows]
    assert "dist_optimizer" not in out
    code, out, err = command("list", "dpd")
    assert (code, out) == (2, "")
    assert err.startswith(
        "ovpatch list: the command line names an unknown feature 'dpd' (did you mean 'ddp'?)."
    )
    assert json.loads(command("list", "ddp", "--json")[1])["features"][0]["name"] == "ddp"


@pytest.mark.parametrize("columns", [40, 70, 200])
def test_the_terminal_is_as_wide_as_it_is(command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for line in (("list",), ("doctor", "--full")):
        out = command(*line)[1]
        assert all(len(row) <= columns for row in out.splitlines() if row[:1] in ("|", "+"))


# --- mistakes ---


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ("verify", "--stpes", "3", "--", "true"),
            "ovpatch verify: error: unknown option --stpes (did you mean '--steps'?)",
        ),
        (
            ("bench", "--warmpu=3", "--", "true"),
            "ovpatch bench: error: unknown option --warmpu (did you mean '--warmup'?)",
        ),
        (
            ("run", "--reprot", "x", "--", "true"),
            "unknown option --reprot (did you mean '--report'?)",
        ),
        (
            ("timeline", "--compre", "--", "true"),
            "unknown option --compre (did you mean '--compare'?)",
        ),
        (("list", "--jsn"), "ovpatch list: error: unknown option --jsn (did you mean '--json'?)"),
        (("verfy", "--", "true"), "unknown command 'verfy' (did you mean 'verify'?)"),
        (("list", "ddp", "tp_linear"), "ovpatch list: error: unexpected word tp_linear"),
        (
            ("run", "--features", "-ddp", "--", "true"),
            "error: --features needs a value. If it begins with a dash, write --features=-…",
        ),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(capsys, line, said):
    with pytest.raises(SystemExit) as ended:
        main.main(line)
    assert ended.value.code == ExitCode.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", main.COMMANDS)
def test_a_value_that_cannot_be_parsed_is_explained_without_names_of_functions(capsys, name):
    """argparse shows the name of the parser if it raises ValueError."""
    (subparsers,) = (a for a in main._make_parser(name)._actions if a.dest == "subcommand")
    for action in subparsers.choices[name]._actions:
        if action.type in (None, Path):
            continue
        for value in ("x", "", "-1", "1e999", "nan"):
            with contextlib.suppress(SystemExit):
                main.main((name, f"{action.option_strings[0]}={value}", "--", "no-such-program"))
            err = capsys.readouterr().err
            assert "invalid" not in err, err
            assert f"argument {action.option_strings[0]}: {value} is " in err or value == "-1", err


def test_run_meets_nodes_for_a_report_alone(command):
    code, _, err = command("run", "--nodes", "2", "--", "true")
    assert code == ExitCode.USAGE
    assert err.endswith("they need a file for it. Add --report FILE, or leave them out.\n")


RUNNERS = ("run", "verify", "bench", "timeline")

MISTAKES: dict[str, tuple[dict[str, str], tuple[str, ...], ExitCode, str]] = {
    "no command": ({}, (), ExitCode.USAGE, "no command given"),
    "nothing behind the dashes": ({}, ("--",), ExitCode.USAGE, "no command given"),
    "unknown feature": ({"OVPATCH": "dpd"}, ("--", "true"), ExitCode.USAGE, "did you mean 'ddp'?"),
    "an unknown feature by option": (
        {},
        ("--features", "dpp", "--", "true"),
        ExitCode.USAGE,
        "--features=dpp names an unknown feature 'dpp' (did you mean 'ddp'?)",
    ),
    "a feature that cannot be loaded": (
        {"OVPATCH": "+broken"},
        ("--", "true"),
        ExitCode.USAGE,
        "boom",
    ),
    "no such program": (
        {},
        ("--", "no-such-program"),
        ExitCode.NOT_FOUND,
        "no-such-program: command not found",
    ),
    "a script alone": (
        {},
        ("--", "train.py"),
        ExitCode.NOT_FOUND,
        "Put its launcher before it: torchrun train.py",
    ),
    "a folder": ({}, ("--", "/"), ExitCode.NOT_EXECUTABLE, "/: not executable"),
    "a script that is no program": (
        {},
        ("--", "./script.py"),
        ExitCode.NOT_EXECUTABLE,
        "./script.py: not executable (Permission denied). Put its launcher before it: torchrun",
    ),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_has_one_exit_code(command, site, monkeypatch, tmp_path, runner, mistake):
    site.plugin("broken", extra="raise RuntimeError('boom')")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    variables, words, expected, said = MISTAKES[mistake]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started: list[str] = []
    monkeypatch.setattr(launch, "running_command", lambda *args, **kwargs: started.append(runner))
    code, out, err = command(runner, *words)
    assert (code, out, started) == (expected, "", []), "nothing was started"
    assert err.startswith(f"ovpatch {runner}: ")
    assert said in err


@pytest.mark.parametrize("runner", ["verify", "bench"])
@pytest.mark.parametrize("how", ["all at once", "one by one", "by a list"])
def test_stock_is_not_compared_with_stock(command, monkeypatch, runner, how):
    names = sorted(Session().plan(should_check_machine=False).records)
    by_list = ",".join(f"-{name}" for name in names)
    one_by_one = {f"OVPATCH_{name.upper()}": "0" for name in names}
    off = {
        "all at once": {"OVPATCH": "0"},
        "one by one": one_by_one,
        "by a list": {"OVPATCH": by_list},
    }
    for name, value in off[how].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "running_command", lambda *args, **kwargs: pytest.fail("it ran"))
    code, _, err = command(runner, "--", "true")
    assert code == ExitCode.USAGE
    assert "there is nothing to compare" in err


@pytest.mark.parametrize("runner", ["verify", "bench", "timeline"])
def test_a_folder_of_results_that_cannot_be_made_is_a_mistake(
    command, tmp_path, monkeypatch, runner
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(launch, "running_command", lambda *args, **kwargs: pytest.fail("it ran"))
    code, _, err = command(runner, "--out", str(tmp_path / "file" / "below"), "--", "true")
    assert code == ExitCode.USAGE
    assert "--out" in err
    assert err.rstrip().endswith(("Name another.", "Name a folder that can be written."))


@pytest.mark.parametrize("subcommand", ["", *main.COMMANDS])
def test_help_has_examples_and_the_exit_codes(capsys, monkeypatch, subcommand):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main.main([*filter(None, [subcommand]), "--help"])
    out = capsys.readouterr().out
    codes = main.COMMANDS[subcommand].codes if subcommand else {}
    listed = {int(line.split()[0]) for line in out.splitlines() if re.match(r"  \d+ +\w", line)}
    assert listed == set(codes), "a page has the exit codes of its command, and no other"
    for example in main.COMMANDS[subcommand].examples if subcommand else ("list",):
        assert f"\n  ovpatch {example}\n" in out
        main._make_parser(example.split()[0]).parse_args(example.split())


def test_the_documented_exit_codes_are_those_there_are():
    documented = (Path(__file__).parent.parent / "docs" / "settings.md").read_text(encoding="utf-8")
    for code in ExitCode:
        assert f"| {code.value} | {code.meaning} |" in documented


@pytest.mark.parametrize("name", ["OVPATH", "OVPACTH", "ovpatch", "OV_PATCH", "OVPATCHH"])
def test_a_variable_that_is_nearly_ours_is_named(command, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    code, out, _ = command("doctor")
    assert code == ExitCode.PROBLEM
    assert f"PROBLEM: {name}=0 does nothing here" in out
    assert "(did you mean 'OVPATCH'?)" in out


@pytest.mark.parametrize(
    ("variables", "terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour_is_the_users_choice(monkeypatch, variables, terminal, expected):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    assert wants_colour(stream) is expected


def test_a_broken_plugin_is_a_problem_and_does_not_hide_the_others(command, site):
    site.plugin("a", extra="raise RuntimeError('boom')")
    code, out, _ = command("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)["features"]}
    assert code == 1
    assert rows["a"]["state"] == "failed"
    assert "boom" in rows["a"]["reason"]
    assert rows["ddp"]["state"] == "applied"


# --- doctor ---


def test_doctor_as_json(command, site, monkeypatch):
    site.plugin("a", feature="options=(Option('n', 1, 'Amount.'),)", dist="other", version="2.5")
    monkeypatch.setenv("OVPATCH_A_N", "5")
    code, out, err = command("doctor", "--json")
    data = json.loads(out)
    assert (code, err, data["problems"]) == (0, "", [])
    assert {"ovpatch", "python", "platform", "torch", "pluggy", "wrapt"} <= set(data["versions"])
    points = {point["name"]: point for point in data["entry_points"]}
    assert points["ddp"]["target"] == "ovpatch_plugins.ddp.ddp_feature:hooks"
    assert (points["a"]["distribution"], points["a"]["version"]) == ("other", "2.5")
    assert str(site.folder) in points["a"]["path"]
    assert data["autoload"] == {"possible": True, "reason": ""}
    assert data["settings"] == [
        {
            "variable": "OVPATCH_A_N",
            "value": "5",
            "source": "environment",
            "meaning": "option 'n' of feature 'a'",
        }
    ]
    features = {feature["name"]: feature for feature in data["report"]["features"]}
    assert features["a"]["options"]["n"] == {"value": 5, "source": "environment OVPATCH_A_N"}


GPU = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * 2**30)


def test_doctor_is_one_screen_for_a_bug_report(command, monkeypatch):
    """Two GPUs that reach each other; what differs between machines is left out of the golden file."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: GPU)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(doctor_command, "_find_versions", lambda report: VERSIONS)
    monkeypatch.setattr(doctor_command, "_explain_state", lambda feature: "")
    machine = doctor_command.find_machine() | {
        "cpus": 16,
        "memory_bytes": 2**37,
        "backends": ["gloo", "nccl"],
    }
    monkeypatch.setattr(doctor_command, "find_machine", lambda: machine)
    monkeypatch.setenv("OVPATCH_CACHE_DIR", os.devnull)
    out = command("doctor")[1]
    assert len(out.splitlines()) <= 40
    check_golden(
        "doctor", re.sub(r"\| (applied, idle|applied|pending|skipped) *\|", "| state |", out)
    )
    assert "gather_bucket_mb" not in out, "options are in --full"
    full = command("doctor", "--full")[1]
    assert "dist_optimizer.gather_bucket_mb" in full
    assert "collectives_in_backward 0" in full


VERSIONS = {"ovpatch": "1.0", "python": "3.11.7", "platform": "Linux-6.1", "torch": "2.13.0"}
VERSIONS |= dict.fromkeys(doctor_command._LIBRARIES, "1.2.3") | {"lightning": "not installed"}


def test_doctor_says_where_measurements_are_kept(command, site, monkeypatch, tmp_path):
    for path, kept in ((tmp_path / "new" / "er", True), (Path(os.devnull) / "none", False)):
        monkeypatch.setenv("OVPATCH_CACHE_DIR", str(path))
        text = f"measurements {'are' if kept else 'cannot be'} kept in {path} (OVPATCH_CACHE_DIR)"
        assert text in command("doctor")[1]
        assert json.loads(command("doctor", "--json")[1])["measurements"] == {
            "path": str(path),
            "writable": kept,
        }
    assert not (tmp_path / "new").exists()


def test_doctor_tells_what_apply_would_raise(command, site, monkeypatch):
    site.plugin(
        "a", extra="@hookimpl\ndef ovpatch_reasons_against():\n    return ['no such machine']"
    )
    monkeypatch.setenv("OVPATCH", "+a")
    monkeypatch.setenv("OVPATCH_STRICT", "1")
    code, out, _ = command("doctor")
    assert code == 1
    assert "PROBLEM: a was requested by name (OVPATCH=+a) and is skipped: no such machine" in out
    assert "applied" in out


def test_doctor_says_why_autoload_cannot_work(command, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert command("doctor")[0] == 0
    monkeypatch.setenv("OVPATCH_AUTO", "1")
    code, out, _ = command("doctor", "--json")
    assert code == 1
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in json.loads(out)["problems"][0]


def test_a_torch_that_is_too_old_is_a_problem_and_a_warning(command, monkeypatch):
    problem = "torch 2.9 is older than 2.11"
    monkeypatch.setattr(doctor_command, "explain_old_torch", lambda: problem)
    code, out, _ = command("doctor")
    assert (code, out.splitlines()[0]) == (1, f"ovpatch {ovpatch.__version__}: 1 problem found")
    assert out.splitlines()[2] == f"PROBLEM: {problem}"
    monkeypatch.setattr(api, "explain_old_torch", lambda: problem)
    monkeypatch.setattr(api, "session", doctor_command.session)
    with pytest.warns(UserWarning, match=problem):
        ovpatch.apply()
    monkeypatch.setenv("OVPATCH", "0")
    doctor_command.session.revert(())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ovpatch.apply()


def test_without_torch_the_remedy_is_named(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = command("doctor")
    assert (code, out) == (ExitCode.PROBLEM, "")
    assert err.startswith(
        f"ovpatch doctor: {sys.executable} has no torch. Install torch 2.11 or later"
    )


def test_doctor_names_a_duplicate_that_was_left_out(command, site):
    site.announce("ddp", "fake_ddp", dist="impostor")
    code, out, _ = command("doctor", "--json")
    data = json.loads(out)
    assert code == 1
    assert "impostor 1.0 (fake_ddp) was left out" in data["problems"][0]
    assert data["report"]["features"][0]["state"] == "applied"


# --- report ---


def test_levels_and_peaks_of_nodes_are_not_added(command, tmp_path):
    """Two nodes of two ranks each: a total is a sum, and a level or a peak that of the process with most."""
    for node in (0, 1):
        processes = [
            Report("1", "2", "3", 7, rank, (count_on(rank),)).to_json()
            for rank in (2 * node, 2 * node + 1)
        ]
        (tmp_path / f"{node}.json").write_text(json.dumps(merge_reports(processes)))
    files = [str(tmp_path / f"{node}.json") for node in (0, 1)]
    written = tmp_path / "all.json"
    code, _, _ = command("report", *files, "--json", str(written))
    (merged,) = json.loads(written.read_text())["features"]
    assert (code, merged["counters"]) == (0, {"steps": 12, "kept_bytes": 40, "most_parts": 8})
    assert merged["levels"] == {"kept_bytes": "level", "most_parts": "peak"}
    again = command("report", "--full", str(written), files[1])[1]
    assert "steps 18, kept_bytes 40, most_parts 8" in again, (
        "merged reports are merged by the same rule"
    )


def count_on(rank: int) -> FeatureReport:
    counters = {"steps": 3, "kept_bytes": 10 * (rank + 1), "most_parts": 8 - rank}
    return FeatureReport(
        "ddp", "applied", counters=counters, levels={"kept_bytes": "level", "most_parts": "peak"}
    )


def test_reports_of_nodes_are_merged(command, tmp_path):
    nodes = []
    for node in (0, 1):
        made = FeatureReport(
            "ddp", "applied", counters={"models": 1, "steps": 4}, gains=("{models:model}",)
        )
        process = Report("1", "2", "3", 7, node, (made,)).to_json()
        nodes.append(tmp_path / f"node{node}.json")
        nodes[node].write_text(json.dumps(merge_reports([process])))
    written = tmp_path / "all.json"
    code, out, err = command("report", *map(str, nodes), "--json", str(written))
    assert (code, out) == (0, "ovpatch:     ddp: 1 model (each of 2 ranks)\n")
    assert err == f"ovpatch report: the merged report is in {written}\n"
    merged = json.loads(written.read_text())
    assert merged["features"][0]["counters"] == {"models": 2, "steps": 8}
    assert [process["rank"] for process in merged["processes"]] == [0, 1]
    assert [process["rank"] for process in merged["features"][0]["processes"]] == [0, 1]
    assert "models 2, steps 8" in command("report", "--full", str(written))[1]


def test_gains_of_ranks_that_differ_are_those_of_the_busiest(command, tmp_path):
    processes = [
        Report(
            "1",
            "2",
            "3",
            7,
            rank,
            (
                FeatureReport(
                    "ddp", "applied", counters={"models": 1 + rank}, gains=("{models:model}",)
                ),
            ),
        ).to_json()
        for rank in range(2)
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(merge_reports(processes)))
    _, out, _ = command("report", str(path))
    assert out == "ovpatch:     ddp: 2 models (the busiest of 2 ranks)\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read as a report"),
        ("{", "cannot be read as a report"),
        ("[]", "is no report"),
        (
            '{"features": [], "patches": [], "processes": []}',
            "nothing was patched there. Leave the file out.",
        ),
    ],
)
def test_a_file_that_is_no_report_is_a_mistake(command, tmp_path, text, said):
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    code, out, err = command("report", str(tmp_path / "r.json"))
    assert (code, out) == (2, "")
    assert said in err


# --- usage ---


def test_wrong_settings_are_exit_code_2(command, monkeypatch):
    monkeypatch.setenv("OVPATCH", "dpp")
    code, out, err = command("list")
    assert (code, out) == (2, "")
    assert "did you mean 'ddp'" in err


def test_the_name_alone_prints_help(capsys):
    assert main.main([]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("usage: ovpatch")
    assert "ovpatch verify -- torchrun" in out


@pytest.mark.parametrize("line", [["nonsense"], ["list", "--nonsense"]])
def test_wrong_usage_is_exit_code_2(line, capsys):
    with pytest.raises(SystemExit) as error:
        main.main(line)
    assert error.value.code == 2
    assert "usage: ovpatch" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="pipes break differently elsewhere")
def test_a_reader_that_stops_reading_is_no_traceback(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-m", "ovpatch", "list", "--json"]
    done = subprocess.run(
        line,
        stdout=writing,
        stderr=subprocess.PIPE,
        env=clean(os.environ),
        cwd=tmp_path,
        timeout=patience.scale(60),
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_version(capsys):
    with pytest.raises(SystemExit) as error:
        main.main(["--version"])
    assert (error.value.code, capsys.readouterr().out) == (0, f"ovpatch {ovpatch.__version__}\n")


# --- the template ---

USE = """
import torch, ovpatch, json
from torch.nn.utils import clip_grad_norm_ as held_before
p = torch.nn.Parameter(torch.ones(4))
ovpatch.apply("clip_watch", "save_watch")
assert "not called so far" in str(ovpatch.report())
torch.save(p, "p.pt")
row = str(ovpatch.report()).partition("save_watch")[2]
assert "not called so far" not in row, row
for norm in (1.0, 100.0):
    p.grad = torch.ones(4)
    held_before([p], norm)
assert ovpatch.report()["clip_watch"].counters == {"calls": 2}
ovpatch.revert()
held_before([p], 1.0)
assert ovpatch.report()["clip_watch"].counters == {}
import ovpatch_clip_watch
assert ovpatch_clip_watch.COUNTERS.calls == 2
from ovpatch.cli.main import main
main(["list", "--json"])
"""


@pytest.mark.slow
def test_the_plugin_template_installs_works_and_is_listed(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(TEMPLATE, source)
    pip = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(source),
    ]
    environ = {**clean(os.environ), "PYTHONPATH": str(target)}

    def run(*line):
        done = subprocess.run(
            [sys.executable, *line],
            env=environ,
            capture_output=True,
            text=True,
            timeout=patience.scale(180),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(*pip)
    rows = {row["name"]: row for row in json.loads(run("-c", USE))["features"]}
    assert rows["clip_watch"]["state"] == "applied"
    assert rows["clip_watch"]["distribution"] == "ovpatch-clip-watch 0.1.0"
    assert rows["clip_watch"]["options"] == {}
    if ALL_CASES:
        assert "2 passed" in run("-m", "pytest", str(source / "test_clip_watch.py"))


def test_the_template_stays_small():
    shortest = (TEMPLATE / "ovpatch_save_watch.py").read_text()
    assert len([line for line in shortest.splitlines()[1:] if line]) <= 10
    assert len((TEMPLATE / "ovpatch_clip_watch.py").read_text().splitlines()) <= 41


def test_the_counter_of_the_template_does_not_compile_again(monkeypatch):
    import torch

    monkeypatch.syspath_prepend(TEMPLATE)
    template = importlib.import_module("ovpatch_clip_watch")
    watched = template.watch(lambda x: x + 1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: watched(x) * 2, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
        watched(torch.ones(2))
    assert torch._dynamo.utils.counters["frames"]["total"] == 1
    assert template.COUNTERS.calls == 3
