"""Forked ranks: the environment of torchrun's, what they leave, and how failures and hangs are told."""

from __future__ import annotations

import pytest

from tests.support import forked, scripts
from tests.support.rarely import RARELY

PROGRAM = """
import atexit, os, sys, time
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
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def server(program, forks):
    return lambda *args, **options: forks.torchrun(2, program, *args, **options)


@pytest.fixture
def launcher(program):
    return lambda *args, **options: scripts.torchrun(2, program, *args, forked=True, **options)


@pytest.mark.parametrize("way", ["server", "launcher"])
def test_ranks_are_as_under_torchrun_and_one_that_fails_ends_the_others(request, way, monkeypatch):
    monkeypatch.setattr(forked, "GRACE", 0.5)
    monkeypatch.setenv("OVPATCH", "nonsense")
    result = request.getfixturevalue(way)("a", "fail", env={"OVPATCH": "0"})
    said = [f"__main__ {rank} 2 True {rank}: 2 ['a', 'fail'] 0" for rank in (0, 1)]
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("__main__")) == said
    assert (result.rc, result.timed_out, result.left) == (1, False, ())
    assert "ValueError: lost" in result.stderr


def test_a_run_that_succeeds(server):
    assert server().check().stdout.count("__main__") == 2


# The launcher's processes are stopped as any program's, see test_scripts; it has torch to import.
@pytest.mark.parametrize(("way", "first"), [("server", 2), pytest.param("launcher", 15, marks=RARELY)])
def test_a_hang_shows_the_stacks_of_all_ranks(request, way, first):
    for timeout in (first, 20, 90):  # a busy machine may not have come that far
        result = request.getfixturevalue(way)("hang", timeout=timeout)
        assert result.timed_out
        if result.stdout.count("__main__") == result.stderr.count("in hangs_here") == 2:
            break
    assert result.stderr.count("in hangs_here") == 2
    with pytest.raises(AssertionError, match="exceeded its time"):
        result.check()
