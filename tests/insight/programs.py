"""Programs that tests of the tools run as a user's command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.support.environment import cleaned

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]

#: Timeouts in seconds for programs that hang, to try in turn: on a busy machine a program may not have reached its hang
#: within a short one. A long wait costs no processor time, but a repeated start does.
HANG_TIMEOUTS_S = (3, 12, 30, 80)

#: A process without a group. Append code that trains with ``step()``.
ALONE = """
import os, sys
import torch
model = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(2, 4)).sum().backward()
    sgd.step()
    sgd.zero_grad()
"""


# Test modules import it under the same name, which makes it their autouse fixture.
@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Keep the environment of the process that runs the tests away from the command."""
    cleaned(monkeypatch, PYTHONPATH=str(ROOT))


def report_ends(**codes):
    """Return torchrun's report of ranks that ended with these codes, ``rank0=7``; the first one failed first."""
    failures = {}
    for order, (rank, code) in enumerate(codes.items()):
        failure = ProcessFailure(int(rank.removeprefix("rank")), 100 + order, code, "missing")
        failure.timestamp = 1000 + order
        failures[failure.local_rank] = failure
    return f"torch.distributed.elastic.multiprocessing.errors.{ChildFailedError.__name__}: " + str(
        ChildFailedError("train.py", failures)
    )
