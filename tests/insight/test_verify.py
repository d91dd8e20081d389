"""``ovpatch verify`` as people call it: verdicts, exit codes, and what is said when a script fails or hangs."""

from __future__ import annotations

import json
import textwrap

import pytest

from ovpatch.cli import main
from ovpatch.insight import variants
from ovpatch.insight.verify.verify import Conclusion
from tests.support.environment import cleaned
from tests.support.fake_plugins import Site
from tests.support.preloaded import preloaded

LOOP = """
import os, sys, time
import torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step(optimizer=optimizer):
    net(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

COUNTING = """
import functools
from ovpatch import Feature, hookimpl
COUNT = {{"calls": 0}}

@hookimpl
def ovpatch_feature():
    return Feature(name={name!r}, summary="Counts backwards.", default=False)

@hookimpl
def ovpatch_counters():
    return COUNT

@hookimpl
def ovpatch_register(patches, options):
    patches.register_patch("torch.autograd.backward", wrap=count)

def count(original):
    @functools.wraps(original)
    def backward(*args, **kwargs):
        {body}
        return original(*args, **kwargs)
    return backward
"""


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    site.raw("counts", COUNTING.format(name="counts", body="COUNT['calls'] += 1"))
    double = "COUNT['calls'] += 1; args = (args[0] * 2, *args[1:]) if COUNT['calls'] == 2 else args"
    site.raw("doubles", COUNTING.format(name="doubles", body=double))
    return site


@pytest.fixture
def verify(site, monkeypatch, capfd):
    """``verify(script, *options)`` -> exit code, stdout, the JSON."""
    cleaned(monkeypatch, PYTHONPATH=str(site.folder))
    monkeypatch.syspath_prepend(str(site.folder))

    def verify(script, *options):
        (site.folder / "train.py").write_text(script)
        file = site.folder / "verify.json"
        line = ["verify", "--json", str(file), *options, "--", *preloaded(), str(site.folder / "train.py")]
        code = main.main(line)
        out = capfd.readouterr().out
        return code, out, json.loads(file.read_text()) if file.exists() else {}

    return verify


def loop(body):
    return LOOP + textwrap.dedent(body)


def test_exit_codes():
    assert {verdict.name: verdict.code for verdict in Conclusion} == {
        "BITWISE": 0,
        "NOISE": 0,
        "DIFFERENT": 1,
        "UNDECIDED": 3,
        "NOT_EXERCISED": 3,
        "NO_STEP": 3,
        "SCRIPT_FAILS": 3,
        "NOT_SEEN": 3,
        "INTERRUPTED": 130,
    }


@pytest.mark.slow
def test_an_unseeded_script_is_seeded_stopped_and_bitwise_equal(verify, site):
    script = loop(
        "import random, numpy\nwhile True:\n    step(); net[0].bias.data += random.random() + numpy.random.rand()"
    )
    code, out, data = verify(script, "--features=counts", "--steps=3", "--out", str(site.folder / "ke[pt] it"))
    assert (code, data["verdict"], data["steps"]) == (0, "bitwise equal", 3), out
    assert out.startswith("bitwise equal: 3 steps, 1 rank, ")
    assert "counts      calls 3" in out
    assert list(data["runs"]) == ["stock", "patched"]
    assert f"records are in {site.folder}/ke[pt] it\n" in out
    assert (site.folder / "ke[pt] it" / "stock.log").exists()


@pytest.mark.slow
def test_a_fault_is_traced_to_the_feature(verify, site):
    code, out, data = verify(loop("for _ in range(3): step()"), "--features=counts,doubles")
    assert (code, data["verdict"], data["features"]) == (1, "different", ["doubles"]), out
    assert out.startswith("different: first in 'gradient 0.weight' at step 2 on rank 0, because of doubles\n")
    assert set(data["runs"]) == {
        "stock", "patched", "rerun", "reordered", "without-counts", "without-doubles"
    }  # fmt: skip
    assert data["noise"] == {"rerun": "all bits equal", "reordered": "all bits equal"}


@pytest.mark.slow
def test_a_script_that_fails_later_is_compared_up_to_there(verify):
    code, out, data = verify(loop("step()\nstep()\nraise ValueError('no more data')"), "--features=counts")
    assert (code, data["verdict"], data["steps"]) == (0, "bitwise equal", 2), out
    assert "The script itself fails under stock PyTorch, with exit code 1" in out
    assert "ValueError: no more data" in out


def test_a_disk_that_is_full_is_not_a_difference(verify, monkeypatch, capfd):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(variants, "run_variant", full)
    assert verify(loop(""), "--features=counts")[0] == 3


def test_mistakes_cost_no_run(verify, monkeypatch, capfd, site):
    def usage(*line):
        return main.main(["verify", *line]), capfd.readouterr().err

    code, err = usage("--json", str(site.folder / "no" / "file"), "--", "true")
    assert (code, "does not exist" in err) == (2, True)
    code, err = usage("--json", str(site.folder), "--", "true")
    assert (code, "is a directory" in err) == (2, True)
    code, err = usage("--out", str(site.folder), "--", "true")
    assert (code, "not an empty directory" in err) == (2, True)
    monkeypatch.setenv("OVPATCH", "0")
    code, err = usage("--features=counts", "--", "true")
    assert (code, "disagree" in err) == (2, True)
    with pytest.raises(SystemExit) as error:
        main.main(["verify", "--steps=0", "--", "true"])
    assert error.value.code == 2
