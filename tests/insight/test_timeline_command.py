"""``ovpatch timeline``: mistakes are found before anything runs; traces and programs become tables and files."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ovpatch.cli import main
from ovpatch.cli import timeline_command as command
from ovpatch.insight.timeline import timeline_export
from ovpatch.insight.timeline.trace import read_trace
from tests.insight.programs import ALONE, ROOT, TORCHRUN
from tests.insight.traces import DATA, Synthetic, recorded
from tests.support import patience, scripts
from tests.support.environment import forget
from tests.support.preloaded import preloaded

SMALL = [
    "--layers=2",
    "--width=64",
    "--heads=2",
    "--eval-every=0",
    "--steps=30",
    "--bucket-cap-mb=1",
]
FILES = {"timeline.png", "timeline.svg", "timeline.json.gz", "summary.json"}


@pytest.fixture
def timeline(monkeypatch, capfd, tmp_path):
    """Run the subcommand in this process, in an empty folder."""
    forget(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def timeline(*line):
        code = main.main(["timeline", *map(str, line)])
        out, err = capfd.readouterr()
        return code, out, err

    return timeline


# --- mistakes ---


@pytest.mark.parametrize(
    ("environ", "line", "message"),
    [
        ({}, ("--",), "Write it after two dashes"),
        ({}, ("--step", "1", "--"), "Give 2 or more"),
        ({}, ("--steps", "0", "--"), "Give 1 or more"),
        ({}, ("--communication", "(", "--"), "--communication (: not a regular expression"),
        ({"OVPATCH": "dpp"}, ("--",), "did you mean 'ddp'"),
        ({"OVPATCH": "0"}, ("--compare", "--"), "Unset OVPATCH"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, ("--",), "Unset it"),
        ({}, ("--out", "taken", "--"), "holds other things, such as thesis.tex"),
        ({}, ("--out", "taken/thesis.tex", "--"), "is a file. Name a folder"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    timeline, monkeypatch, tmp_path, environ, line, message
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("")
    mark = tmp_path / "started"
    command = (
        () if message.startswith("Write") else (sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    )
    code, out, err = timeline(*line, *command)
    assert (code, out) == (2, ""), err
    assert message in err
    assert not mark.exists()
    assert (tmp_path / "taken" / "thesis.tex").exists()


def test_without_matplotlib_it_is_said_before_and_the_tables_still_come(
    timeline, monkeypatch, tmp_path
):
    monkeypatch.setattr(timeline_export, "find_spec", lambda name: None)
    code, out, err = timeline(recorded("stock")[0])
    assert (code, out) == (2, "")
    assert "pip install 'ovpatch[plot]'" in err
    code, out, _ = timeline("--no-picture", recorded("stock")[0])
    assert code == 0
    assert "hidden share" in out
    assert {path.name for path in (tmp_path / "ovpatch-timeline").iterdir()} == {
        "timeline.json.gz",
        "summary.json",
    }


def test_a_command_that_does_not_exist_takes_no_earlier_result_with_it(timeline, tmp_path):
    earlier = tmp_path / "ovpatch-timeline" / "summary.json"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    code, out, err = timeline("--", "no-such-command-anywhere")
    assert earlier.exists()
    assert (code, out) == (127, "")
    assert "no-such-command-anywhere: command not found" in err


def test_a_command_that_takes_no_step_is_a_problem_with_its_cause(timeline):
    code, out, err = timeline("--", sys.executable, "-c", "print('hello')")
    assert (code, out) == (1, ""), "what the command writes is in its log"
    assert "patched: nothing was recorded. No process made a step" in err
    assert not Path("ovpatch-timeline").exists(), "nothing was recorded, and the command went well"


# --- traces that exist ---


def test_traces_of_a_run(timeline, tmp_path):
    code, out, err = timeline(*recorded("stock"))
    assert code == 0, err
    assert "recorded: " in out
    assert "overlap efficiency" not in out
    assert {path.name for path in (tmp_path / "ovpatch-timeline").iterdir()} == FILES
    summary = json.loads((tmp_path / "ovpatch-timeline" / "summary.json").read_text())
    assert summary["overlap_efficiency"] is None
    assert [rank["rank"] for rank in summary["runs"][0]["ranks"]] == [0, 1]


class Browser:
    """A browser that fetches the address that a page names, as Perfetto's page does."""

    def __init__(self):
        self.fetched = b""

    def open(self, url):
        page, _, address = url.partition("#!/?url=")
        assert page == "https://ui.perfetto.dev/"

        def fetch():
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(
                    address.rpartition("/")[0] + "/summary.json", timeout=patience.scale(60)
                )
            with urllib.request.urlopen(
                urllib.request.Request(address, method="OPTIONS"), timeout=patience.scale(60)
            ) as answer:
                assert answer.headers["Access-Control-Allow-Origin"] == command.PAGE
            with urllib.request.urlopen(address, timeout=patience.scale(60)) as answer:
                self.fetched = answer.read()

        self.thread = threading.Thread(target=fetch)
        self.thread.start()


def test_a_trace_is_shown_in_the_browser(timeline, monkeypatch, tmp_path):
    browser = Browser()
    monkeypatch.setattr(command, "PORT", 0)
    monkeypatch.setattr(command.webbrowser, "get", lambda: browser)
    code, _, err = timeline("--no-picture", "--open", recorded("stock")[0])
    browser.thread.join(60)
    assert (code, browser.fetched) == (
        0,
        (tmp_path / "ovpatch-timeline" / "timeline.json.gz").read_bytes(),
    )
    assert "shown at https://ui.perfetto.dev" in err


def test_without_a_browser_the_file_is_named(timeline, monkeypatch):
    def get():
        raise command.webbrowser.Error

    monkeypatch.setattr(command.webbrowser, "get", get)
    code, _, err = timeline("--no-picture", "--open", recorded("stock")[0])
    assert code == 0
    assert (
        "there is no browser here; open ovpatch-timeline/timeline.json.gz at "
        "https://ui.perfetto.dev by hand" in err
    )


def test_an_option_after_a_trace_starts_nothing_and_removes_nothing(timeline, tmp_path):
    kept = tmp_path / "ovpatch-timeline" / "patched" / "trace-rank0.json.gz"
    kept.parent.mkdir(parents=True)
    shutil.copy(recorded("patched")[0], kept)
    (kept.parent / "process-1.json").write_text("{}")
    code, out, err = timeline(kept.parent, "--no-picture")
    assert (code, out) == (2, "")
    assert "--no-picture is none. Put options before traces" in err
    assert kept.exists()


def test_somebody_elses_traces_in_the_output_folder_are_not_removed(timeline, tmp_path):
    kept = tmp_path / "runs" / "stock" / "rank0.json.gz"
    kept.parent.mkdir(parents=True)
    shutil.copy(recorded("stock")[0], kept)
    code, _, err = timeline("--no-picture", "--out", "runs", "--", sys.executable, "-c", "")
    assert (code, kept.exists()) == (2, True)
    assert "holds a folder stock that is not ours" in err


def test_what_is_read_is_not_replaced_and_a_merged_trace_is_no_ranks(timeline, tmp_path):
    named = tmp_path / "timeline.json.gz"
    shutil.copy(recorded("stock")[0], named)
    code, _, err = timeline("--no-picture", "--out", ".", named)
    assert (code, named.exists()) == (2, True)
    assert "would be replaced" in err
    assert timeline("--no-picture", "--out", "there", named)[0] == 0
    code, _, err = timeline("--no-picture", "--out", "there", "there/timeline.json.gz")
    assert (code, Path("there/timeline.json.gz").exists()) == (2, True)
    assert "merged by ovpatch. Name the raw traces" in err


def test_two_folders_are_compared_and_may_lie_in_the_output_folder(timeline, tmp_path):
    folder = tmp_path / "ovpatch-timeline"
    for variant in ("stock", "patched"):
        (folder / variant).mkdir(parents=True)
        for path in recorded(variant):
            shutil.copy(path, folder / variant / path.name.replace(variant, "trace"))
    # A variant leaves other files as well.
    (folder / "stock" / "worker-1.json").write_text("{}")
    # The second call replaces the files of the first.
    for _ in range(2):
        code, out, err = timeline("--compare", folder / "stock", folder / "patched")
        assert code == 0, err
        assert "overlap efficiency: " in out
    assert {path.name for path in folder.iterdir()} == FILES | {"stock", "patched"}
    assert len(list((folder / "stock").iterdir())) == 3


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (("--compare", "a.json"), 2, "stock first; 1 were given"),
        (("nowhere.json",), 2, "No such file"),
        (("empty",), 2, "holds no traces"),
        (
            ("--compare", "stock", "patched"),
            2,
            "there is no stock and no patched. Name two folders",
        ),
        (("--compare", "stock", "empty"), 2, "there is no stock. Name two folders"),
        (("--compare", "empty", "patched"), 2, "there is no patched. Name two folders"),
        (("--compare", "test", "patched"), 2, "there is no test and no patched. Name two folders"),
        (("--compare", "test", "empty"), 2, "there is no test. Name two folders"),
        (("stock", "patched"), 127, "stock: command not found"),
    ],
)
def test_traces_that_cannot_be_used(timeline, tmp_path, line, code, message):
    (tmp_path / "empty").mkdir()
    found, out, err = timeline(*line)
    assert (found, out) == (code, "")
    assert message in err


@pytest.mark.parametrize(
    "line", [("--", "test", "b"), ("python3", "train.py"), ("python3", "-V"), ("test", "b", "c")]
)
def test_a_command_of_few_words_is_no_missing_folder(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    command._refuse_missing(line)


def test_how_steps_were_found_is_a_remark(timeline, tmp_path):
    Synthetic(0).op("aten::mm", 0, 5).write(tmp_path / "rank0.json")
    code, out, err = timeline("rank0.json")
    assert code == 0
    assert "recorded: no steps are marked" in err
    assert "no communication in step 1" in out


def test_kernels_of_the_users_own(timeline, tmp_path):
    Synthetic(0).gemm(0, 10).on_device("my_push_kernel", 10, 30).write(tmp_path / "rank0.json")
    assert "no communication" in timeline("rank0.json")[1]
    assert "my_push_kernel" in timeline("--communication", "^my_push", "rank0.json")[1]


# --- complete programs ---


def run(folder, *line, timeout=150):
    program = [Path(sys.executable).with_name("ovpatch"), "timeline", *line]
    return scripts.run(program, cwd=folder, timeout=timeout, env={"PYTHONPATH": str(ROOT)})


def written(folder, *lines):
    (folder / "train.py").write_text("\n".join([ALONE, *lines]))
    return str(folder / "train.py")


@pytest.mark.slow
def test_a_whole_program_is_compared(tmp_path):
    command = [*preloaded(ranks=2), str(ROOT / "examples" / "train_gpt.py"), *SMALL]
    done = run(tmp_path, "--compare", "--step", "4", "--steps", "2", "--", *command).check()
    folder = tmp_path / "ovpatch-timeline"
    assert {path.name for path in folder.iterdir()} == FILES | {
        "stock",
        "patched",
        "stock.log",
        "patched.log",
    }
    assert "step    0  loss" in (folder / "stock.log").read_text()
    assert "loss" not in done.stdout, "what the command writes is in its log"
    for line in (
        "stock: ",
        "patched: ",
        "overlap efficiency: ",
        "stock: recording cost ",
        "patched: recording cost ",
    ):
        assert f"\n{line}" in done.stdout
    assert "ovpatch::ddp::all_reduce" in done.stdout
    summary = json.loads((folder / "summary.json").read_text())
    assert [run["name"] for run in summary["runs"]] == ["stock", "patched"]
    for variant in summary["runs"]:
        assert [rank["rank"] for rank in variant["ranks"]] == [0, 1]
        for rank in variant["ranks"]:
            assert [step["number"] for step in rank["steps"]] == [4, 5]
            phases = {group["phase"] for step in rank["steps"] for group in step["collectives"]}
            assert ("ovpatch::ddp::all_reduce" in phases) == (variant["name"] == "patched")
            assert all(
                step["compute"] > 0 and step["exposed"] + step["hidden"] > 0
                for step in rank["steps"]
            )
    merged = json.loads(gzip.decompress((folder / "timeline.json.gz").read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in merged if event["name"] == "process_name"}
    assert {name for name in names if "summary" in name} == {
        f"{variant} rank {rank}: summary" for variant in ("stock", "patched") for rank in (0, 1)
    }


@pytest.mark.slow
def test_a_command_that_fails_keeps_its_code_and_shows_how_far_it_got(tmp_path):
    script = written(tmp_path, "for _ in range(3): step()", "sys.exit('the data ran out')")
    done = run(tmp_path, "--step", "2", "--", *preloaded(), script)
    assert done.rc == 1
    assert "the data ran out" in done.stderr
    assert "steps 2 to 4 were requested, recorded was 2 to 3" in done.stderr
    assert "no communication in steps 2 to 3" in done.stdout


@pytest.mark.slow
def test_an_variant_that_recorded_nothing_does_not_take_the_other_with_it(tmp_path):
    script = written(
        tmp_path, "for _ in range(20 if os.environ.get('OVPATCH') == '0' else 1): step()"
    )
    done = run(tmp_path, "--compare", "--step", "2", "--no-picture", "--", *preloaded(), script)
    assert done.rc == 3
    assert (
        "patched: nothing was recorded. The command ended after step 1, and step 2 was requested"
        in done.stderr
    )
    assert "\nstock: no communication in steps 2 to 4" in done.stdout


@pytest.mark.gpu(2)
@pytest.mark.slow
@pytest.mark.parametrize("operators", [True, False])
def test_a_whole_program_on_gpus(tmp_path, operators):
    command = [*TORCHRUN, str(ROOT / "examples" / "train_gpt.py"), "--eval-every=0", "--steps=30"]
    options = ("--operators",) if operators else ()
    run(tmp_path, "--compare", *options, "--", *command, timeout=280).check()
    for path in (tmp_path / "ovpatch-timeline").glob("*/trace-rank*.json.gz"):
        assert any(read_trace(path).select_events("cpu_op")) == operators
    summary = json.loads((tmp_path / "ovpatch-timeline" / "summary.json").read_text())
    for variant in summary["runs"]:
        assert [rank["device"] for rank in variant["ranks"]] == ["gpu 0", "gpu 1"]
        for rank in variant["ranks"]:
            assert [step["number"] for step in rank["steps"]] == [5, 6, 7]
            groups = [group for step in rank["steps"] for group in step["collectives"]]
            assert {group["collective"] for group in groups} == {"nccl all_reduce"}
            phases = {group["phase"] for group in groups}
            assert ("ovpatch::ddp::all_reduce" in phases) == (variant["name"] == "patched")
            assert all(step["compute"] > step["step"] / 100 for step in rank["steps"])


def test_the_recorded_traces_are_there():
    assert len(list(DATA.iterdir())) == 8
