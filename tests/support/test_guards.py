"""The guards of ``tests/conftest.py``, on a separate suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support import guard, scripts

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest, torch
from torch.nn.parallel import DistributedDataParallel as DDP

def test_that_patches():
    DDP.forward = lambda self: None

def test_that_does_not():
    torch.nn.Linear(2, 2)

@pytest.mark.gpu(64)
def test_that_needs_a_cluster():
    raise AssertionError("ran")
"""

RANKS = """
@pytest.mark.gpu(64)
def test_that_may_share(ranks):
    raise AssertionError("ran")

@pytest.mark.gpu(64, own=True)
def test_that_names_devices(ranks):
    raise AssertionError("ran")

@pytest.mark.gpu(64)
def test_that_starts_programs():
    raise AssertionError("ran")
"""

HANG = """
import time

def wait_for_ever():
    time.sleep(1000)

def test_that_hangs():
    wait_for_ever()
"""


def pytest_on(tmp_path, suite, *options):
    file = tmp_path / "test_suite.py"
    file.write_text(suite)
    config = tmp_path / "pytest.ini"
    config.write_text("[pytest]\nmarkers =\n    gpu\n")
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        config,
        "-rA",
        "-p",
        "tests.conftest",
        *options,
        file,
    ]
    return scripts.run(argv, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The output of pytest for all tests except the tests that hang, with ``--share-gpu``, which some tests read."""
    return pytest_on(tmp_path_factory.mktemp("suite"), SUITE + RANKS, "--share-gpu").stdout


def test_a_test_that_leaves_a_patch_fails_by_name(said):
    assert "2 passed, 4 skipped, 1 error" in said
    assert "ERROR test_suite.py::test_that_patches" in said
    assert (
        "DistributedDataParallel.forward was "
        "torch.nn.parallel.distributed.DistributedDataParallel.forward" in said
    )
    assert "needs 64 CUDA devices, found" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to share")
def test_ranks_need_one_gpu_if_they_share_it(said):
    lines = said.splitlines()
    assert [line.split()[1] for line in lines if "needs 1 CUDA device, found 0" in line] == ["[1]"]
    assert [line.split()[1] for line in lines if "needs 64 CUDA devices, found 0" in line] == [
        "[3]"
    ]


@pytest.mark.parametrize(
    "options", [(), ("-n", "2", "--dist", "loadfile")], ids=["one process", "two workers"]
)
def test_a_test_that_hangs_ends_the_run_with_its_stack(tmp_path, options):
    result = pytest_on(tmp_path, HANG, "--hard-limit=1", *options)
    assert not result.timed_out
    assert result.rc
    assert result.stderr.count("Timeout (0:") == 1, "it is not tried again"
    assert "in wait_for_ever" in result.stderr
    assert not options or "crashed while running 'test_suite.py::test_that_hangs'" in result.stdout


def test_the_wrapper_that_torch_puts_around_each_step_is_no_patch():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    before = {"Own": dict(vars(Own))}
    Own([torch.ones(1, requires_grad=True)])
    assert vars(Own)["step"] is not before["Own"]["step"], "torch wraps it"
    assert guard.leftovers(before, {"Own": dict(vars(Own))}) == []
    Own.step = lambda self: None
    assert len(guard.leftovers(before, {"Own": dict(vars(Own))})) == 1
