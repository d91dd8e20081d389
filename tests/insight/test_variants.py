"""Variants: what a tool's worker sees of somebody's script, how the script ends, and what is found when it hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from ovpatch.cli import command_line
from ovpatch.insight import launch, steps, variants
from ovpatch.insight.variants import Outcome, find_failure, find_rank_ends
from ovpatch.session import worker_orders
from ovpatch.settings.settings import SettingsError
from tests.insight import programs
from tests.insight.programs import TORCHRUN, report_ends
from tests.support.preloaded import preloaded

environment = programs.environment

WORKER = "tests.insight.leaving"
STOCK = variants.Variant("stock", variants.STOCK, {"steps": 3})
# Two ranks, which it forks itself unless a launcher has started them: that costs one import of torch instead of three.
HEAD = """
import os, sys, time
import torch, torch.distributed as dist
where = {}
if "RANK" not in os.environ:
    for rank in range(2):
        if not os.fork():
            where = {"rank": rank, "world_size": 2, "init_method": f"file://{__file__}.store"}
            break
    else:
        sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)))
dist.init_process_group("gloo", **where)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
def step(optimizer=sgd):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def run(tmp_path):
    def run(body, variant=STOCK, head=HEAD, launcher=None, **more):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "train.py.store").unlink(missing_ok=True)
        script = tmp_path / "train.py"
        script.write_text(head + textwrap.dedent(body))
        more = {"timeout": 60.0, **more}
        return variants.run_variant(
            variant, [*(launcher or preloaded()), str(script)], WORKER, tmp_path / "out", **more
        )

    return run


def counted(outcome):
    return {
        path.stem: json.loads(path.read_text())["step"]
        for path in sorted(outcome.folder.glob("rank*.json"))
    }


@pytest.mark.slow
def test_patched_ranks_of_torchrun_leave_after_the_ordered_step_with_a_report(run):
    seen = []
    variant = variants.Variant("variant", "ddp", {"steps": 3})
    script = "while True:\n    step()\n    time.sleep(0.3)"
    outcome = run(script, variant, progress=seen.append, launcher=TORCHRUN)
    assert (outcome.code, outcome.timed_out) == (0, False), outcome.read_failure()
    assert counted(outcome) == {"rank0": 3, "rank1": 3}
    assert seen == sorted(seen)
    assert set(seen) & {1, 2}
    assert outcome.applied == outcome.exercised == ["ddp"]


@pytest.mark.slow
def test_a_step_is_one_turn_of_all_optimizers_and_a_slow_rank_finds_its_peers_still_there(run):
    outcome = run(
        """
        adam = torch.optim.Adam(model.parameters())
        for turn in range(50):
            # At once: its peer writes there, too.
            os.write(1, b"turn %d\\n" % turn)
            if turn == 1 and dist.get_rank() == 1:
                time.sleep(1.0)
            step()
            step(adam)
            if turn == 0: step(adam)
        """
    )
    assert outcome.code == 0, outcome.read_failure()
    assert counted(outcome) == {"rank0": 3, "rank1": 3}
    # adam has stepped twice in turn 0, so it makes its third step in turn 1.
    assert "turn 1" in outcome.log.read_text()
    assert "turn 2" not in outcome.log.read_text()
    assert outcome.applied == []
    assert outcome.report is None


@pytest.mark.slow
def test_a_launcher_that_waits_for_other_nodes_after_its_ranks_have_left_is_ended(run, monkeypatch):
    monkeypatch.setattr(variants, "_OUTLIVE_TIMEOUT_S", 0.5)  # expires
    # Another node has the remaining rank.
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    waits = ["sh", "-c", '"$@"; exec sleep 1000', "sh", *preloaded()]
    outcome = run(STEPS, launcher=waits, head=ALONE)
    assert (outcome.code, outcome.timed_out) == (0, False), outcome.read_failure()
    assert counted(outcome) == {"rank0": 3}
    assert variants.describe_node(outcome.folder) == "this node saw rank 0 of 2"


@pytest.mark.slow
def test_a_command_may_continue_after_its_ranks_have_left(run, monkeypatch, tmp_path):
    monkeypatch.setattr(variants, "_OUTLIVE_TIMEOUT_S", 0.1)  # expires
    then = ["sh", "-c", f'"$@"; sleep 2; touch {tmp_path}/evaluated; exit 5', "sh", *preloaded()]
    outcome = run(STEPS, launcher=then, head=ALONE)
    assert (outcome.code, (tmp_path / "evaluated").exists()) == (5, True)


def test_ranks_whose_processes_have_all_ended_are_found(monkeypatch, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for rank, pid in ((0, os.getpid()), (1, ended.pid), (2, ended.pid + worker_orders.MAX_PID)):
        (tmp_path / f"process-{pid}.json").write_text(json.dumps({"rank": str(rank)}))
    monkeypatch.setattr(variants, "_is_alive", lambda pid, folder: pid == os.getpid())
    # Rank 2 is on another host, and rank 3 has not signed in.
    assert steps.find_ended_ranks(tmp_path, range(4)) == {1}


@pytest.mark.slow
def test_a_script_that_ends_earlier_ends_by_itself(run):
    outcome = run(
        "step()\nprint('the end', "
        "flush=True)\ndist.barrier()\ndist.destroy_process_group()\nos._exit(0)"
    )
    assert outcome.code == 0
    assert counted(outcome) == {"rank0": 1, "rank1": 1}
    assert "the end" in outcome.read_failure()


@pytest.mark.slow
def test_a_hang_is_ended_and_every_process_says_where_it_is(run):
    body = """
        def wait_for_nobody():
            if dist.get_rank() == 0:
                dist.barrier()
            time.sleep(1000)
        step()
        wait_for_nobody()
        """
    for timeout in programs.HANG_TIMEOUTS_S:
        outcome = run(body, launcher=preloaded(ranks=2), timeout=timeout)
        if (
            len(variants.read_ranks(outcome.folder)) == 2
            and variants.read_slowest_step(outcome.folder) == 1
        ):
            break
    assert outcome.timed_out
    assert sorted(variants.read_ranks(outcome.folder).values()) == ["0", "1"]
    assert outcome.code != 0
    assert sum("wait_for_nobody" in text for text in outcome.stacks.values()) == 2, outcome.stacks
    assert variants.list_processes(outcome.folder) == []


ALONE = """
import multiprocessing, signal, subprocess, sys, time
import torch
def wait_here():
    time.sleep(1000)
"""
STEPS = """
sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
while True: sgd.step()
"""


@pytest.mark.slow
def test_nothing_is_left_of_what_a_script_started(run, tmp_path):
    outcome = run(
        """
        sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
        subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
        multiprocessing.get_context("fork").Process(target=wait_here).start()
        sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        while True: sgd.step()
        """,
        head=ALONE,
    )
    assert (outcome.code, outcome.timed_out) == (0, False)
    assert launch.find_processes(f"OVPATCH_REPORT_DIR={outcome.folder}") == []


@pytest.mark.slow
def test_a_forked_rank_that_hangs_shows_its_own_stacks(run):
    body = """
        child = multiprocessing.get_context("fork").Process(target=wait_here)
        child.start()
        child.join()
        """
    for timeout in programs.HANG_TIMEOUTS_S:
        outcome = run(body, head=ALONE, timeout=timeout)
        if any("in wait_here" in text for text in outcome.stacks.values()):
            break
    assert outcome.timed_out
    assert sorted("in wait_here" in text for text in outcome.stacks.values()) == [False, True]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_what_ignores_the_first(run, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "GRACE", 1000)  # after which the first would

    ignores = tmp_path / "ignores"

    def interrupt():
        while not ignores.exists():
            time.sleep(0.05)
        for _ in range(2):
            # A job that has ended has no handler. If the first signal ended it, the second would end pytest.
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.6)

    thread = threading.Thread(target=interrupt)
    thread.start()
    ignoring = "import signal\nfor ignored in (signal.SIGINT, signal.SIGTERM): signal.signal(ignored, signal.SIG_IGN)\n"
    ignoring += f"open({str(ignores)!r}, 'w').close()\n"
    outcome = run("wait_here()", head=ignoring + ALONE)
    thread.join()
    assert (outcome.interrupted, outcome.timed_out) == (True, False)
    assert launch.find_processes(f"OVPATCH_REPORT_DIR={outcome.folder}") == []


@pytest.mark.slow
def test_a_worker_that_cannot_begin_ends_the_variant(run, monkeypatch, tmp_path):
    (tmp_path / "broken_worker.py").write_text("raise RuntimeError('no such thing')")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    monkeypatch.setattr(sys.modules[__name__], "WORKER", "broken_worker")
    outcome = run("time.sleep(1000)")
    assert not outcome.timed_out
    assert "no such thing" in outcome.failures[0]["error"]


def test_what_cannot_be_seen_is_refused(monkeypatch, tmp_path):
    with pytest.raises(SettingsError, match="two dashes"):
        command_line.check_command([])
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(SettingsError, match="Unset it"):
        variants.check_autoload()
    with pytest.raises(launch.NotStartedError, match="not found"):
        variants.run_variant(
            variants.Variant("stock"), ["no-such-program"], WORKER, tmp_path, timeout=1.0
        )


def test_an_variant_has_its_own_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OVPATCH", "-x")
    monkeypatch.setenv("OVPATCH_AUTO", "1")
    stock = variants.Variant("stock", variants.STOCK).build_environment(WORKER, tmp_path)
    assert stock["OVPATCH"] == "0"
    assert "OVPATCH_AUTO" not in stock
    assert worker_orders.read_orders(stock).directory == tmp_path
    patched = variants.Variant("patched", None, {"steps": 3}, {"MORE": "1"}).build_environment(
        WORKER, tmp_path
    )
    assert (patched["OVPATCH"], patched["OVPATCH_AUTO"], patched["MORE"]) == ("-x", "1", "1")
    assert worker_orders.read_orders(patched).details == {"steps": 3}


def test_leaving_one_out():
    variant = variants.Variant("patched", "a,b", variables={"X": "1"})
    assert variants.leave_one_out(variant, ["a"], {}) == {}
    left = variants.leave_one_out(variant, ["a", "b"], {"a": [], "b": ["other"]})
    assert {
        feature: (left_variant.name, left_variant.variables)
        for feature, left_variant in left.items()
    } == {
        "a": ("without-a", {"X": "1", "OVPATCH_A": "0"}),
        "b": ("without-b", {"X": "1", "OVPATCH_B": "0"}),
    }


def test_what_requires_a_feature_goes_with_it():
    variant = variants.Variant("patched", "a,b,c,d")
    requires = {"b": ["a"], "c": ["b"]}
    left = variants.leave_one_out(variant, ["a", "b", "c", "d"], requires)
    assert {feature: sorted(left_variant.variables) for feature, left_variant in left.items()} == {
        "a": ["OVPATCH_A", "OVPATCH_B", "OVPATCH_C"],
        "b": ["OVPATCH_B", "OVPATCH_C"],
        "c": ["OVPATCH_C"],
        "d": ["OVPATCH_D"],
    }
    assert list(variants.leave_one_out(variant, ["a", "b", "c"], requires)) == ["b", "c"], (
        "without a nothing is left"
    )


# --- the script's own traceback in a launcher's log ---


LOG = """step 1
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in <module>
W1121 torch/distributed/elastic: sending SIGTERM
[rank1]:     raise RuntimeError("rank 1 has no data")
[rank1]: RuntimeError: rank 1 has no data
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 8, in <module>
[rank0]: RuntimeError: connection closed by peer
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1019, in run
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====
"""


def test_the_first_traceback_of_the_script():
    assert find_failure(LOG).splitlines() == [LOG.splitlines()[line] for line in (1, 2, 4, 5)]


def test_a_launchers_traceback_alone_is_not_it():
    log = LOG[LOG.index("Traceback (most recent call last):\n  File") :]
    assert find_failure(log, 2).splitlines() == log.splitlines()[-2:]
    usage = "usage: train.py [-h]\ntrain.py: error: no such option\n"
    warning = "W1121 14:19:07.464000 22 torch/distributed/elastic/agent.py:9] sending SIGTERM\n"
    assert find_failure(usage + warning + log, 2) == usage.strip()
    root = "Root Cause (first observed failure):\n  exitcode  : -9 (pid: 7)"
    assert find_failure(f"step 7\n{log}\nFailures:\n{root}", 2) == f"step 7\n{root}"
    assert find_failure("a\nb\nc", 2) == "b\nc"
    assert find_failure("") == ""


SPAWNED = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with "


@pytest.mark.parametrize(
    ("log", "ends"),
    [
        (report_ends(rank1=7), {"rank 1": "exit code 7"}),
        (report_ends(rank1=-9), {"rank 1": "SIGKILL"}),
        (
            report_ends(rank1=7, rank0=-15, rank2=1),
            {"rank 2": "exit code 1", "rank 1": "exit code 7"},
        ),
        (report_ends(rank0=-15), {"rank 0": "SIGTERM"}),
        (f"{SPAWNED}exit code 7\n", {"process 1": "exit code 7"}),
        (f"{SPAWNED}signal SIGKILL\n", {"process 1": "SIGKILL"}),
        (LOG, {}),
    ],
)
def test_how_the_ranks_ended_that_a_launcher_names(log, ends):
    assert list(find_rank_ends(f"step 1\n{log}\n").items()) == list(ends.items())


def test_the_end_of_a_rank_is_told_if_the_launcher_has_another_code(tmp_path):
    log = tmp_path / "log"

    def describe(text, code, cause=""):
        log.write_text(text)
        return Outcome(variants.Variant("stock"), tmp_path, log, code, 1.0).describe_exit(cause)

    assert describe(report_ends(rank1=7), 1) == "exit code 1 (rank 1: exit code 7)"
    assert describe(report_ends(rank1=-9), 1, "E") == "exit code 1 by E (rank 1: SIGKILL)"
    assert describe(report_ends(rank1=1), 1, "E") == "exit code 1 by E"
    assert describe("", 7) == "exit code 7"


def test_a_deep_traceback_keeps_its_two_ends():
    frames = "".join(f'  File "f.py", line {n}\n' for n in range(500))
    short = find_failure(
        f"Traceback (most recent call last):\n{frames}ValueError: x\n"
    ).splitlines()
    assert len(short) < 30
    assert short[-1] == "ValueError: x"
    assert short[1].endswith("line 0")
