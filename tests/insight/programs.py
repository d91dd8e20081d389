"""What tests of the tools run as somebody's command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.support.environment import cleaned

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]

#: Time-outs for what shall hang, to try one after the other: on a busy machine it may not have come that far. To wait
#: costs no processor, and to begin anew does.
PATIENCE = (3, 12, 30, 80)

#: One process without a group; add what it does with ``step()``.
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


# A test module takes it over under the same name.
@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Nothing of the environment of whoever runs the tests reaches the command."""
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
