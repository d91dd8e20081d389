"""What ``apply()`` costs a script that uses nothing of it: processor time, and modules."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.environment import clean

TIMED = """
import time
began = time.process_time()
import torch
imported = time.process_time()
import ovpatch
ovpatch.apply()
print((time.process_time() - imported) / (imported - began))
"""

LOADED = """
import sys, torch, ovpatch
ovpatch.apply({})
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("ovpatch", "ovpatch_plugins")))
"""

IDLE = """
import sys, torch, torch.distributed as dist, torch.distributed.tensor.parallel, ovpatch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ovpatch.apply()
print(*(name for name in sys.modules if name.startswith("ovpatch_plugins.tp_linear.")))
dist.destroy_process_group()
"""

#: Of what ``import torch`` takes, in processor time. Measured: 4%, and 9% where no bytecode is cached.
MOST = 0.15


def output_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean(os.environ), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_applying_takes_a_small_part_of_what_importing_torch_takes():
    assert min(float(output_of(TIMED)) for _ in range(3)) < MOST


@pytest.mark.parametrize("features", ["", '"ddp"'])
def test_nothing_is_imported_that_does_the_work_before_there_is_any(features):
    """Reducers, collectives, experts and linears are imported with the first model that needs them."""
    loaded = output_of(LOADED.format(features)).split()
    assert "ovpatch_plugins.ddp.plugin" in loaded, "the feature is on"
    light = {"", "config", "errors", "options", "plugin", "report", "takeover"}
    work = [
        name
        for name in loaded
        if name.startswith(("ovpatch.overlap", "ovpatch_plugins."))
        and name.partition("ovpatch_plugins.")[2].partition(".")[2] not in light
    ]
    assert not work


def test_styles_that_are_imported_and_cut_nothing_bring_no_work_module():
    """Transformers imports them in every script."""
    loaded = {name.removeprefix("ovpatch_plugins.tp_linear.") for name in output_of(IDLE).split()}
    assert "plugin" in loaded, "the feature is on"
    assert loaded <= {"plugin", "options", "report"}
