"""Ceilings of a steady pipeline step, as in ``tests/test_step_trace.py``."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from typing import Any

import pytest

from tests.support import patience, pipeline_trace
from tests.support.environment import clean
from tests.support.preloaded import preloaded
from tests.support.torch_versions import HAS_OLD_STAGES
from tests.test_step_trace import ROOT, assert_ceilings, count, list_by_file

pytestmark = pytest.mark.skipif(HAS_OLD_STAGES, reason="gloo sends no messages to its own rank")

# Two stages on one rank, four microbatches, a zero-bubble order, no message.
STEP = {
    "calls": 344,
    "functions": 70,
    "files": 14,
    "calls above": 319,
    "functions above": 66,
    "files above": 11,
}


@functools.cache
def trace() -> dict[str, Any]:
    env = clean(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")])}
    command = [*preloaded(), pipeline_trace.__file__]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=patience.scale(120)
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"calls": [tuple(call) for call in found["calls"]]}


def test_the_traced_step_is_a_steady_step_of_the_engine():
    traced = trace()
    grown = {name: number for name, number in traced["counters"].items() if number}
    assert grown == {"steps": 1, "actions": 24, "weight_grads": 4}
    assert traced["is_steady"], "the next step has other calls"


def test_a_pipeline_step_makes_no_more_calls_in_no_more_functions_and_files():
    calls = trace()["calls"]
    assert_ceilings(count(calls), STEP, list_by_file(calls))


def test_the_planner_and_the_report_have_no_part_in_a_step():
    files = {file for file, *_ in trace()["calls"]}
    rooms = ("planner", os.path.join("pipeline", "auto"), "pipeline_report", "order_rules")
    assert not [file for file in files for room in rooms if room in file]
