"""``ovpatch verify`` as a user calls it: verdicts, exit codes, and the report of a script that fails or hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap

import pytest

from ovpatch.cli import main
from ovpatch.insight import variants
from ovpatch.insight.verify.verification import Conclusion
from tests.insight.programs import ROOT, TORCHRUN
from tests.support import patience
from tests.support.environment import clean, cleaned, free_port
from tests.support.fake_plugins import Site
from tests.support.preloaded import preloaded
from tests.support.rarely import RARELY

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
        line = [
            "verify",
            "--json",
            str(file),
            *options,
            "--",
            *preloaded(),
            str(site.folder / "train.py"),
        ]
        code = main.main(line)
        out = capfd.readouterr().out
        return code, out, json.loads(file.read_text()) if file.exists() else {}

    return verify


TWO_NODES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(2, 4)).sum().backward()
    sgd.step()
    sgd.zero_grad()
"""


def loop(body):
    return LOOP + textwrap.dedent(body)


def test_exit_codes():
    assert {verdict.name: verdict.code for verdict in Conclusion} == {
        "BITWISE": 0,
        "FLOOR": 0,
        "NOISE": 0,
        "DIFFERENT": 1,
        "UNDECIDED": 3,
        "NOT_EXERCISED": 3,
        "NO_STEP": 3,
        "FAILS_LATER": 3,
        "SCRIPT_FAILS": 3,
        "NOT_SEEN": 3,
        "INTERRUPTED": 130,
    }


@pytest.mark.slow
def test_an_unseeded_script_is_seeded_stopped_and_bitwise_equal(verify, site):
    script = loop(
        "import random, numpy\nwhile True:\n    step(); net[0].bias.data += random.random() + "
        "numpy.random.rand()"
    )
    code, out, data = verify(
        script, "--features=counts", "--steps=3", "--out", str(site.folder / "ke[pt] it")
    )
    assert (code, data["verdict"], data["steps"]) == (0, "bitwise equal", 3), out
    assert re.match(
        r"SAME: all \d+ values of 3 steps on 1 rank have stock's bits \(counts\)\n", out
    )
    counted = data["values_by_role"]
    assert sum(counted.values()) == data["values"]
    assert counted.keys() == {
        "loss", "gradient", "norm of gradients", "parameter", "option", "random"
    }  # fmt: skip
    assert (counted["loss"], counted["gradient"], counted["random"]) == (3, 12, 9)
    assert "counts      calls 3" in out
    assert list(data["runs"]) == ["stock", "patched"]
    assert f"records are in {site.folder}/ke[pt] it\n" in out
    assert (site.folder / "ke[pt] it" / "stock.log").exists()


@pytest.mark.slow
def test_a_fault_is_traced_to_the_feature(verify, site):
    code, out, data = verify(loop("for _ in range(3): step()"), "--features=counts,doubles")
    assert (code, data["verdict"], data["features"]) == (1, "different", ["doubles"]), out
    line = out.partition("\n")[0]
    assert line.startswith("DIFFERENT: first in 'gradient 0.weight' at step 2 on rank 0 by ")
    assert line.endswith(", where 1e-06 is allowed (floor), because of doubles")
    assert set(data["runs"]) == {
        "stock", "patched", "rerun", "reordered", "without-counts", "without-doubles"
    }  # fmt: skip
    assert data["noise"] == {"rerun": "all bits equal", "reordered": "all bits equal"}


PATCHED = "os.environ['OVPATCH'] != '0'"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
SAME = "all 44 values of 2 steps on 1 rank have stock's bits (counts)\n"
FAILS = "SCRIPT FAILS: equal up to step 2, where the script itself fails, stock and patched"
UNTIL = f"{FAILS}, after step 2 with exit code"

#: Ways in which a script may end after its second step: what it does, the exit code, the beginning of the first line.
ENDINGS = {
    "raises in both": ("raise ValueError('no data')", 3, f"{UNTIL} 1 by ValueError: {SAME}"),
    "raises only patched": (
        f"if {PATCHED}: raise ValueError('no data')",
        1,
        "DIFFERENT: the patched run fails with exit code 1, and stock does not, because of counts",
    ),
    "raises only in stock": (
        f"if not {PATCHED}: raise ValueError('no data')",
        3,
        "SCRIPT FAILS: in stock PyTorch it fails after step 2 with exit code 1 by ValueError, "
        "patched it",
    ),
    "raises another exception": (
        f"raise (KeyError if {PATCHED} else ValueError)",
        1,
        "DIFFERENT: the patched run fails after step 2 with exit code 1 by KeyError, stock after "
        "step 2 with exit",
    ),
    "ends": ("", 0, f"SAME: {SAME}"),
    "exits": ("sys.exit()", 0, f"SAME: {SAME}"),
    "exits with a code": ("sys.exit(7)", 3, f"{UNTIL} 7: {SAME}"),
    "is killed": (KILL, 3, f"{UNTIL} 137 by SIGKILL: {SAME}"),
    "is killed only patched": (
        f"if {PATCHED}: {KILL}",
        1,
        "DIFFERENT: the patched run fails with exit code 137",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_first_line_says_how_far_the_runs_are_equal_and_how_the_script_ends(verify, ending):
    body, code, head = ENDINGS[ending]
    found, out, data = verify(loop(f"import signal\nstep()\nstep()\n{body}"), "--features=counts")
    assert (found, data["exit_code"]) == (code, code)
    assert out.startswith(head), out
    assert "counts      calls 2" in out or ending == "raises only in stock", (
        "also of a process that was killed"
    )


ONE_EXITS = """
import os, sys, time
step()
step()
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(600)
"""


@RARELY
def test_the_first_line_has_the_exit_code_of_a_rank_of_torchrun(site, monkeypatch, capfd):
    cleaned(monkeypatch, PYTHONPATH=f"{site.folder}{os.pathsep}{ROOT}")
    monkeypatch.syspath_prepend(str(site.folder))
    (site.folder / "train.py").write_text(loop(ONE_EXITS))
    main.main(["verify", "--features=counts", "--", *TORCHRUN, str(site.folder / "train.py")])
    assert capfd.readouterr().out.startswith(f"{UNTIL} 1 (rank 1: exit code 7): all ")


NODE_SAME = "SAME: all 36 values of 2 steps on 1 rank have stock's bits (counts)"
ALL_SAME = NODE_SAME.replace("36", "72").replace("1 rank", "2 ranks")
NODE = """
import sys
from ovpatch.cli import main
sys.exit(main.main(sys.argv[1:]))
"""


def run_on_two_nodes(site, tmp_path, *options):
    """Return output and exit code of ``verify`` on two nodes, as under ``torchrun --nnodes 2 --nproc-per-node 1``."""
    (tmp_path / "node.py").write_text(NODE)
    (tmp_path / "train.py").write_text(TWO_NODES)
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    job |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": f"{site.folder}{os.pathsep}{ROOT}"}
    line = [
        "verify",
        "--steps=2",
        "--features=counts",
        *options,
        "--",
        *preloaded(),
        str(tmp_path / "train.py"),
    ]
    nodes = [
        subprocess.Popen(
            [*preloaded(), str(tmp_path / "node.py"), *line],
            env={**clean(os.environ), **job, "RANK": str(node)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        return [
            (process.communicate(timeout=patience.scale(100))[0], process.returncode)
            for process in nodes
        ]
    finally:
        for process in nodes:
            process.kill()


@pytest.mark.slow
def test_two_nodes_wait_for_no_rank_in_the_folder_of_the_other(site, tmp_path):
    found = run_on_two_nodes(site, tmp_path, "--nodes=1")
    for node, (out, code) in enumerate(found):
        assert out.startswith(f"{NODE_SAME}; this node saw rank {node} of 2\n"), out
        assert code == 0


@pytest.mark.slow
def test_two_nodes_give_one_verdict(site, tmp_path):
    (leader, code), (follower, own_code) = run_on_two_nodes(site, tmp_path)
    assert code == own_code == 0, (leader, follower)
    assert leader.startswith(f"{ALL_SAME}\n"), leader
    line = r"ovpatch verify: node 1 \(.*\) took part; node 0 \(.*\) concluded: "
    assert re.fullmatch(rf"{line}{re.escape(ALL_SAME)}\n", follower), follower


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool", ["verify", pytest.param("bench", marks=RARELY), pytest.param("timeline", marks=RARELY)]
)
def test_ranks_on_nodes_that_do_not_meet_are_an_error_after_one_run(
    tool, verify, site, monkeypatch, capfd
):
    # The timeline writes its files here.
    monkeypatch.chdir(site.folder)
    # A launcher that ovpatch does not know started this node of two.
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    script = site.folder / "train.py"
    script.write_text(
        loop(f"open({str(site.folder / 'runs')!r}, 'a').write('.')\nwhile True: step()")
    )
    assert main.main([tool, "--features=counts", "--", *preloaded(), str(script)]) == 2
    err = capfd.readouterr().err
    assert "this node saw rank 0 of 2, so other nodes have ranks" in err
    assert err.rstrip().endswith("or --nodes 1, with which each node judges its own ranks.")
    assert (site.folder / "runs").read_text() == "."


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
