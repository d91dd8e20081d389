"""Forked commands are started, found and ended as those of a tool; forked ranks are as those of torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from ovpatch.insight.launch import find_processes
from tests.support import patience
from tests.support.preloaded import preloaded
from tests.support.scripts import until

PROGRAM = """
import atexit, json, os, sys, time
import torch
seen = [sys.argv[1:], os.getcwd(), os.environ["MARK"], os.environ.get("RANK"), "ovpatch" in sys.modules]
print(json.dumps([*seen, sys.path[0] == os.path.dirname(__file__), sys.stdin.read()]) + "\\n", end="", flush=True)
atexit.register(print, "at exit", flush=True)
if sys.argv[1] == "waits":
    time.sleep(1000)
if sys.argv[1] == "raises":
    raise ValueError("lost")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def environment(**more):
    kept = {
        name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"
    }
    return {**kept, "MARK": "a=b\nc", **more}


@pytest.mark.parametrize(("argument", "code"), [("0", 0), ("7", 7), ("raises", 1)])
def test_a_program_runs_as_python_runs_it(program, tmp_path, argument, code):
    how = {
        "env": environment(),
        "cwd": tmp_path,
        "input": "given",
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run(
        [*preloaded(), program, argument, "-x"], timeout=patience.scale(60), **how
    )
    told, *rest = done.stdout.splitlines()
    assert (done.returncode, rest) == (code, ["at exit"]), done.stderr
    assert json.loads(told) == [
        [argument, "-x"],
        str(tmp_path),
        "a=b\nc",
        None,
        True,
        True,
        "given",
    ]
    assert ("ValueError: lost" in done.stderr) == (argument == "raises")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_are_found_by_their_environment_and_end_with_the_command(program, tmp_path, number):
    mark = f"it is {tmp_path}"
    with (tmp_path / "out").open("w") as out:
        command = subprocess.Popen(
            [*preloaded(ranks=2), program, "waits"], env=environment(MARK=mark), stdout=out
        )
    assert until(lambda: (tmp_path / "out").read_text().count("\n") == 2)
    told = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted(rank for _, _, _, rank, *_ in told) == ["0", "1"]
    assert len(find_processes(f"MARK={mark}")) == 4, (
        "the command, who waits for the ranks, and these"
    )
    command.send_signal(number)
    assert command.wait(60) == -number
    assert until(lambda: not find_processes(f"MARK={mark}"))


RANK = """
import os, sys, time
import torch, torch.distributed as dist

def hangs_here():
    dist.barrier() if dist.get_rank() else time.sleep(1000)

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
where = f"{dist.get_rank()} {dist.get_world_size()} {dist.is_torchelastic_launched()} {os.environ['LOCAL_RANK']}"
print(f"{__name__} {where}: {total.item():g} {sys.argv[1:]} {os.environ.get('OVPATCH')}\\n", end="", flush=True)
if "fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("lost")
if set(sys.argv) & {"fail", "hang"}:
    hangs_here()
"""


@pytest.fixture
def torchrun(forks, tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return lambda *args, **options: forks.torchrun(2, path, *args, **options)


def test_ranks_are_as_under_torchrun_and_one_that_fails_ends_the_others(torchrun, monkeypatch):
    monkeypatch.setenv("OVPATCH", "nonsense")
    result = torchrun("a", "fail", env={"OVPATCH": "0"})
    said = [f"__main__ {rank} 2 True {rank}: 2 ['a', 'fail'] 0" for rank in (0, 1)]
    assert (
        sorted(line for line in result.stdout.splitlines() if line.startswith("__main__")) == said
    )
    assert (result.rc, result.timed_out, result.left) == (1, False, ())
    assert "ValueError: lost" in result.stderr


def test_ranks_that_succeed(torchrun):
    assert torchrun().check().stdout.count("__main__") == 2


def test_a_hang_shows_the_stacks_of_all_ranks(torchrun):
    # A busy machine may not have come that far.
    for timeout in (2, 20, 90):
        result = torchrun("hang", timeout=timeout)
        assert result.timed_out
        if result.stdout.count("__main__") == result.stderr.count("in hangs_here") == 2:
            break
    assert result.stderr.count("in hangs_here") == 2
    assert {f", rank {rank}: " in result.stderr for rank in (0, 1)} == {True}
