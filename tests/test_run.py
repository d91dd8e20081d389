"""ovpatch run: every worker of an unmodified command is patched, or the command fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from ovpatch.cli import main
from tests.support import patience
from tests.support.environment import clean, forget
from tests.support.fake_plugins import Site

ADD = "patches.register_patch('victim.f', wrap=add(10))"
COUNTERS = "@hookimpl\ndef ovpatch_counters():\n    return COUNT"


@pytest.fixture
def environ(tmp_path):
    """An environment in which a folder of plugins is importable."""
    return {**clean(os.environ), "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    site.plugin("a", register=ADD, extra=COUNTERS)
    return site


@pytest.fixture
def run(environ, tmp_path):
    """Run ``ovpatch run`` in a process of its own; returns it and the merged report."""

    def run(*command, timeout=120, **more):
        report = tmp_path / "report.json"
        line = [sys.executable, "-m", "ovpatch", "run", "--report", str(report), "--", *command]
        done = subprocess.run(
            line,
            env={**environ, **more},
            capture_output=True,
            text=True,
            timeout=patience.scale(timeout),
            cwd=tmp_path,
        )
        return done, json.loads(report.read_text()) if report.exists() else None

    return run


@pytest.fixture
def here(monkeypatch, capfd):
    """Run the subcommand in this process; for commands that import no torch."""
    forget(monkeypatch)

    def here(*line):
        code = main.main(["run", *map(str, line)])
        out, err = capfd.readouterr()
        return code, out, err

    return here


def script(folder, name, text):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


# --- workers ---


@pytest.mark.slow
def test_torchrun_workers_of_an_unmodified_script_over_a_restart(run, site):
    train = script(
        site.folder,
        "train.py",
        """
        import os, sys
        import torch
        import victim
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            victim.f(1)
            sys.exit(3 if os.environ["RANK"] == "0" else 0)
        assert victim.f(1) == 11
        def later():
            from torch.distributed.pipelining import Schedule1F1B
        sys.stdout.write("rank %s\\n" % os.environ["RANK"])
        """,
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done, report = run(*launcher, "--max-restarts=1", "--monitor-interval=0.1", train)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1"], "nothing of ours is on stdout"
    features = {feature["name"]: feature for feature in report["features"]}
    assert features["a"]["state"] == features["ddp"]["state"] == "applied"
    assert features["a"]["counters"] == {"calls": 2}, "the first generation does not count"
    seen = {(process["rank"], process["restart"]) for process in report["processes"]}
    assert {(0, 0), (0, 1), (1, 1)} <= seen
    assert all(rank is not None for rank, _ in seen), "the launcher is no worker"
    assert features["pipeline"]["fits"] == "uses Schedule1F1B"
    assert "--features=+pipeline, because this script uses Schedule1F1B" in done.stderr
    assert "ovpatch:     a: calls 1 (each of 2 ranks)" in done.stderr
    assert f"the report is in {site.folder}/report.json" in done.stderr


CHILDREN = """
import multiprocessing as mp, os, signal
import torch
import victim

def work(times):
    for _ in range(times):
        assert victim.f(1) == 11

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    work(2)
    children = [
        mp.get_context("fork").Process(target=work, args=(3,)),
        mp.get_context("fork").Process(target=work, args=(0,), daemon=True),  # as a data loader's
        mp.get_context("fork").Process(target=die),
        mp.get_context("spawn").Process(target=work, args=(5,)),
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    pid = os.fork()
    if not pid:
        work(7)
        raise SystemExit(0)
    os.waitpid(pid, 0)
    work(1)
"""


@pytest.mark.slow
def test_children_report_for_themselves_and_count_nothing_twice(run, site):
    done, report = run(sys.executable, script(site.folder, "train.py", CHILDREN))
    assert done.returncode == 0, done.stderr
    feature = next(feature for feature in report["features"] if feature["name"] == "a")
    counts = sorted(process["counters"]["calls"] for process in feature["processes"])
    # killed, parent, fork, spawn, plain os.fork; the idle daemon leaves no report
    assert counts == [0, 3, 3, 5, 7]
    assert feature["counters"] == {"calls": 18}
    assert (
        next(patch for patch in report["patches"] if patch["target"] == "victim.f")["calls"] == 18
    )


@pytest.mark.slow
def test_off_is_no_failure(run, site):
    train = script(site.folder, "train.py", "import torch, victim\nassert victim.f(1) == 1")
    done, report = run(sys.executable, train, OVPATCH="0")
    assert done.returncode == 0, done.stderr
    assert {feature["state"] for feature in report["features"]} == {"disabled"}
    assert not any(feature["fits"] for feature in report["features"]), (
        "what is off on purpose is no advice"
    )


@pytest.mark.slow
def test_a_worker_that_cannot_be_patched_stops_the_command(run, site):
    site.plugin(
        "b", extra="@hookimpl\ndef ovpatch_reasons_against():\n    return ['no such machine']"
    )
    train = script(site.folder, "train.py", "import torch, time\ntime.sleep(100)")
    done, report = run(sys.executable, train, OVPATCH="+b", timeout=60)
    assert done.returncode == 1
    assert "runs WITHOUT ovpatch" in done.stderr
    assert "stopping the command" in done.stderr
    assert "was not patched: " in done.stderr
    assert "no such machine" in done.stderr
    assert report == {"features": [], "patches": [], "processes": []}


@pytest.mark.slow
def test_a_script_that_calls_apply_reports_also_without_autoload(run, site):
    train = script(
        site.folder,
        "train.py",
        "import ovpatch, victim\novpatch.apply('a')\nassert victim.f(1) == 11",
    )
    done, report = run(sys.executable, train, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1" in done.stderr
    assert len(report["processes"]) == 1


# --- no worker ---


def test_no_worker_is_a_failure_with_the_possible_causes(here):
    code, out, err = here("--", sys.executable, "-c", "print('done')")
    assert (code, out) == (1, "done\n")
    for cause in (
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "another Python",
        "dropped the variables",
        "ovpatch.apply()",
    ):
        assert cause in err


# --- exit codes and checks beforehand ---


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_exit_code_is_the_commands(here, code, expected):
    assert here("--", sys.executable, "-c", code)[0] == expected


def test_a_command_that_cannot_be_executed(here, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    assert here("--", plain)[0] == 126
    # The file is executable now, but its content is no program.
    plain.chmod(0o755)
    assert here("--", plain)[0] == 126


@pytest.mark.parametrize(
    ("environ", "line", "message"),
    [
        ({"OVPATCH_DDP_OVERLAP_GRAD_REDUCE": "maybe"}, (), "expected 1 or 0"),
        ({"OVPATCH_DDP_NONSENSE": "1"}, (), "Unknown environment variable OVPATCH_DDP_NONSENSE"),
        ({"OVPATCH": "0"}, ("--features", "ddp"), "--features ddp and OVPATCH=0 disagree"),
        ({}, ("--report", "no/such/folder/r.json"), "Create it first"),
        ({}, ("--report", os.curdir), "is a directory. Name a file in it"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    here, monkeypatch, tmp_path, environ, line, message
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    mark = tmp_path / "started"
    code, out, err = here(*line, "--", sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    assert (code, out) == (2, "")
    assert message in err
    assert not mark.exists()


def test_arguments_of_the_command_are_its_own(here):
    code = "import sys; print(sys.argv[1:])"
    assert (
        here("--", sys.executable, "-c", code, "--report", "x", "--", "-h")[1]
        == "['--report', 'x', '--', '-h']\n"
    )


# --- signals ---

WAIT = """
import signal, sys, time
got = []
signal.signal(signal.{name}, lambda *_: got.append(1))
print("ready", flush=True)
end = time.monotonic() + 60
while not got and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.3)  # a second delivery would come now
sys.exit(40 + len(got))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signals_are_forwarded_once(environ, tmp_path, name):
    command = [sys.executable, "-c", WAIT.format(name=name)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ovpatch", "run", "--", *command],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        # The new session has no terminal, as under a scheduler.
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=patience.scale(60))
        assert process.returncode == 41
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_ctrl_c_ends_has_the_exit_status_of_stock_python(environ, tmp_path):
    """Its report is written at the exit, and must not change the status. One that handles Ctrl-C ends as usual."""
    lines = ["import os, signal, sys, torch", "os.kill(os.getpid(), signal.SIGINT)"]
    handled = [lines[0], "try:", f"    {lines[1]}", "except KeyboardInterrupt:", "    sys.exit(5)"]
    for name, program, code in (("plain", lines, 130), ("handled", handled, 5)):
        (tmp_path / f"{name}.py").write_text("\n".join(program))
        done = subprocess.run(
            [sys.executable, "-m", "ovpatch", "run", "--full", "--", sys.executable, f"{name}.py"],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=patience.scale(60),
        )
        assert done.returncode == code, done.stderr
        assert "1 process reported" in done.stderr
