"""The profiler in the script's process: it records what was ordered, and makes room for the script's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd.profiler import profile as Session
from torch.profiler import ProfilerActivity

from ovpatch.insight.timeline.summary import Cost, measure_cost, read_recording
from ovpatch.insight.timeline.timeline_worker import ProfilerSession
from ovpatch.insight.timeline.trace import TraceError
from ovpatch.insight.timeline.tracks import read_all_ranks
from tests.insight.traces import Synthetic
from tests.support.environment import clean

HEAD = """
import torch
from torch.profiler import profile, ProfilerActivity, schedule
model = torch.nn.Linear(8, 8)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
def step(times=1):
    global steps
    for _ in range(times):
        model(torch.ones(2, 8)).sum().backward()
        sgd.step()
        sgd.zero_grad()
        steps += 1
"""


# Imports torch once, then runs each script in a fork, as a process under orders would.
SERVER = """
import json, os, sys
from pathlib import Path
import torch
from ovpatch.insight.timeline import timeline_worker
from ovpatch.session.worker_orders import Orders
import torch.profiler, torch._dynamo, torch._inductor.config  # as the first optimizer will
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if not pid:
        folder = Path(order["folder"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY, 0o600), number)
        timeline_worker.start_worker(Orders("", folder / "left", order["details"]))
        exec(order["code"], {"__name__": "__main__"})
        sys.exit()  # runs what is registered for the end
    os.write(3, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def server():
    line = ["bash", "-c", 'exec "$0" -c "$1" 3>&1', sys.executable, SERVER]
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean(os.environ)
    )
    yield process
    process.stdin.close()
    process.wait(60)


@pytest.fixture
def run(server, tmp_path):
    """Run a script under orders; returns its exit code, stdout and stderr, its files, and the facts of rank 0."""

    def run(body, first=3, count=2, stop=True, operators=False):
        (tmp_path / "left").mkdir()
        details = {"step": first, "steps": count, "stop": stop, "operators": operators}
        order = {"folder": str(tmp_path), "details": details, "code": HEAD + textwrap.dedent(body)}
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        done = SimpleNamespace(
            returncode=code, **{f"std{n}": (tmp_path / n).read_text() for n in ("out", "err")}
        )
        facts = tmp_path / "left" / "recording-rank0.json"
        return done, tmp_path / "left", json.loads(facts.read_text()) if facts.exists() else None

    return run


@pytest.mark.slow
def test_the_ordered_steps_are_recorded_and_the_process_leaves(run):
    done, folder, facts = run("step(50)\nprint('went on')")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert facts["recorded"] == [3, 4]
    assert facts["last"] == 7, (
        "two steps after those that were recorded, and the one in which the trace was written"
    )
    assert sorted(map(int, facts["durations"])) == [3, 4, 5, 6, 7]
    (tracks,) = read_all_ranks([folder / "trace-rank0.json.gz"])
    assert [step.number for step in tracks.steps] == [3, 4]
    for step in tracks.steps:
        assert 0 < tracks.compute.clip(step.start, step.end).total < step.end - step.start
    assert not tracks.compute.clip(
        tracks.steps[-1].end + 100_000_000, tracks.steps[-1].end + 10**12
    )


def test_without_operators_only_ours_is_told_to_leave_them_out():
    asked = []
    recorder = ProfilerSession(operators=False)
    try:
        enable = recorder._wrap_enable(
            lambda config, activities, scopes=(): asked.append([s.name for s in scopes])
        )
        both = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        enable(None, both)  # somebody else's
        recorder._starting = True
        enable(None, {ProfilerActivity.CPU})
        enable(None, both)
    finally:
        recorder.patches.revert()
    assert asked == [[], [], ["USER_SCOPE"]]


@pytest.mark.slow
def test_a_script_that_ends_earlier_leaves_what_there_is(run):
    done, folder, facts = run("step(4)\nprint('done')", count=5)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert facts["recorded"] == [3, 4]
    recording = read_recording("patched", folder, range(3, 8))
    assert recording.run.steps == (3, 4)
    assert "steps 3 to 7 were requested, recorded was 3 to 4" in recording.remarks[0]


@pytest.mark.slow
def test_the_rank_is_that_of_the_steps_though_the_group_is_destroyed_at_the_end(run):
    whose = "import os\nos.environ.update(RANK='{}', WORLD_SIZE='{}')\n"
    done, folder, _ = run(whose.format(3, 4) + "step(4)\n" + whose.format(0, 1))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.glob("*-rank*")) == [
        "recording-rank3.json",
        "trace-rank3.json.gz",
    ]
    assert json.loads((folder / "recording-rank3.json").read_text())["world"] == 4


def beat(folder):
    (path,) = folder.glob("beat-*")
    return path.name.partition("-")[2]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="needs /proc to see where its output goes"
)
def test_the_end_of_a_forked_child_is_not_that_of_the_script(run):
    done, folder, facts = run(
        """
        import multiprocessing, os
        step(3)
        child = multiprocessing.get_context("fork").Process(target=print, args=("child", ), kwargs={"flush": True})
        child.start()
        child.join(60)
        print(os.listdir(os.readlink("/proc/self/fd/1").removesuffix("out") + "left"), flush=True)
        step(30)
        """
    )
    assert (done.returncode, done.stdout) == (0, f"child\n['beat-{beat(folder)}']\n"), done.stderr
    assert (facts["recorded"], facts["last"]) == ([3, 4], 7)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [1, 2])
def test_a_script_that_ends_while_it_is_set_up_or_before_a_whole_step_ends_as_ever(run, taken):
    done, folder, facts = run(f"step({taken})\nprint('done')")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert (facts["recorded"], facts["last"]) == ([], taken)
    assert not list(folder.glob("trace-*"))


@pytest.mark.slow
def test_it_may_go_on_and_a_profiler_that_ends_before_ours_or_begins_after_it_is_no_reason(run):
    done, _, facts = run(
        """
        with profile():
            step()
        step(5)
        with profile() as p:
            step(30)
        print(steps, len(p.events()) > 0)
        """,
        stop=False,
    )
    assert (done.returncode, done.stdout) == (0, "36 True\n"), done.stderr
    assert (facts["recorded"], facts["yielded"]) == ([3, 4], "")


OWN = {
    "around ours": "with profile() as p:\n    step(30)",
    "within ours": "step(3)\nwith profile() as p:\n    step(5)\nstep(20)",
    "while ours is set up": "step()\np = profile()\np.start()\nstep(5)\np.stop()\nstep(20)",
    "only set up": "p = profile(schedule=schedule(wait=0, warmup=4, active=2, repeat=1)); p.start()\n"
    "for _ in range(6): step(); p.step()\nstep(20)",
    "the old one": "step(3)\nwith torch.autograd.profiler.profile() as p:\n    step(5)\nstep(20)",
}


@pytest.mark.slow
@pytest.mark.parametrize("when", OWN)
def test_the_scripts_own_profiler_is_not_disturbed(run, when):
    check = (
        "\nassert 'aten::addmm' in {e.key for e in p.key_averages()}, 'the script has "
        "lost its events'\nprint('fine')"
    )
    done, folder, facts = run(OWN[when] + check, stop=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    assert facts["recorded"] == []
    assert "own profiler" in facts["yielded"]
    with pytest.raises(
        TraceError, match=r"own profiler.*, and ours gave way\. Choose other steps with --step"
    ):
        read_recording("patched", folder, range(3, 5))


def test_what_shows_the_scripts_profilers_can_be_taken_back():
    stock = Session._prepare_trace, Session.__exit__
    recorder = ProfilerSession(operators=True)
    with Session():
        recorder.start_recording()
    recorder.patches.revert()
    assert (recorder.running, recorder.yielded) == (False, "the script's own profiler was on")
    assert (Session._prepare_trace, Session.__exit__) == stock


# --- what is missing, and the cost ---


def facts(rank=0, world=1, recorded=(3, 4), durations=(), device="cpu", last=7, yielded=""):
    times = {str(number): time for number, time in dict(durations).items()}
    return {
        "rank": rank,
        "world": world,
        "device": device,
        "recorded": list(recorded),
        "yielded": yielded,
        "last": last,
        "durations": times,
    }


def left(folder, *all_facts, traces=()):
    for rank_facts in all_facts:
        (folder / f"recording-rank{rank_facts['rank']}.json").write_text(json.dumps(rank_facts))
    for rank in traces:
        trace = Synthetic(rank).op("aten::mm", 0, 30).border(2, 0).border(3, 10).border(4, 20)
        trace.write(folder / f"trace-rank{rank}.json")
    return folder


def test_a_rank_without_a_trace_is_named(tmp_path):
    folder = left(
        tmp_path,
        facts(0, 3),
        facts(2, 3, (), yielded="the script started its own profiler"),
        traces=[0],
    )
    assert read_recording("stock", folder, range(3, 5)).remarks == (
        "stock: rank 1 left no trace: it took none of these steps, or was killed",
        "stock: rank 2 left no trace: the script started its own profiler",
    )


@pytest.mark.parametrize(
    ("some", "complaint"),
    [
        ([], "No process made a step of an optimizer"),
        (
            [facts(last=2, recorded=())],
            "ended after step 2, and step 3 was requested. Lower --step",
        ),
    ],
)
def test_nothing_recorded_is_an_error_with_the_cause(tmp_path, some, complaint):
    with pytest.raises(TraceError, match=complaint):
        read_recording("stock", left(tmp_path, *some), range(3, 5))


def test_the_cost_is_of_the_slowest_rank_without_the_steps_in_which_our_own_work_is_done():
    first = facts(0, 2, (5, 6), {3: 90, 4: 500, 5: 103, 6: 102, 7: 900, 8: 110})
    second = facts(1, 2, (5, 6), {3: 80, 4: 500, 5: 100, 6: 104, 7: 900, 8: 110})
    assert measure_cost([first, second]) == Cost(102.5e-9, 100e-9, (2, 2), (80e-9, 110e-9))
    assert measure_cost([first, second]).share == pytest.approx(0.025)


@pytest.mark.parametrize(("recorded", "said"), [(102, False), (104, False), (112, True)])
def test_a_cost_beyond_the_limit_is_said_if_it_is_beyond_the_steps_spread(tmp_path, recorded, said):
    times = {3: recorded, 4: recorded, 6: 92, 7: 108}
    remarks = read_recording(
        "stock", left(tmp_path, facts(durations=times), traces=[0]), range(3, 5)
    ).remarks
    assert [remark.startswith("stock: recording cost 12.0% of a step") for remark in remarks] == [
        True
    ] * said


def test_on_a_gpu_blocks_count_not_single_steps():
    times = {4: 10, 5: 186, 6: 500, 7: 10, 8: 200, 9: 900, 10: 12, 11: 192}
    cost = measure_cost([facts(0, 1, (7, 8), times, device="gpu")])
    assert (cost.recorded, cost.unrecorded) == (pytest.approx(105e-9), pytest.approx(100e-9))
    assert cost.spread == (pytest.approx(98e-9), pytest.approx(102e-9))
    assert cost.notable
    assert str(cost).endswith("(2 steps), 0.0 ms beside (4 steps, 0.0 to 0.0 ms)")


def test_hosts_that_run_ahead_in_turns_cost_nothing():
    first = facts(0, 2, (6, 7), {3: 100, 4: 100, 6: 10, 7: 190}, device="gpu")
    second = facts(1, 2, (6, 7), {3: 100, 4: 100, 6: 190, 7: 10}, device="gpu")
    assert measure_cost([first, second]).share == pytest.approx(0)


def test_a_device_that_gets_slower_as_it_gets_warm_is_no_cost():
    times = {
        **dict.fromkeys(range(3, 10), 90),
        10: 99,
        11: 101,
        12: 50,
        13: 102,
        14: 102,
        15: 900,
        16: 103,
        17: 105,
    }
    cost = measure_cost([facts(0, 1, (13, 14), times, device="gpu")])
    assert (cost.recorded, cost.unrecorded) == (pytest.approx(102e-9), pytest.approx(102e-9))


def test_without_unrecorded_steps_there_is_no_cost():
    assert measure_cost([facts(0, 1, (2, 3), {3: 10})]) is None
    assert measure_cost([]) is None
