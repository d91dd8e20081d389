"""The main job: the unmodified script under torchrun, stock and patched, computes the same to the last bit."""

from __future__ import annotations

import ast
import json

import pytest
import torch

from examples import demo
from tests.support import scripts

# 0.4M parameters, which DistributedDataParallel cuts into two buckets. Accumulation with no_sync, clipping, warm-up and
# an evaluation on rank 0 alone take part.
SIZE = ["--layers=2", "--width=128", "--heads=2", "--context=16", "--batch-size=2", "--device=cpu"]
WAYS = ["--accumulate=2", "--clip=0.5", "--eval-every=2", "--eval-batches=1", "--warmup=20"]
STEPS, HALF = 6, 3

pytestmark = pytest.mark.slow


class Job:
    """Trains on two processes in a folder of its own; ``forks`` has all but one run, which torchrun starts."""

    def __init__(self, folder, forks):
        self.folder, self.forks = folder, forks

    def train(self, name, *args, patched, steps=STEPS, launched=False):
        """Return what each step logged: loss and gradient norm; torchrun starts the ranks of a launched run."""
        log, report = (self.folder / f"{name}.{suffix}" for suffix in ("jsonl", "report"))
        arguments = [*SIZE, *WAYS, f"--steps={steps}", f"--log-file={log}", *args]
        if launched:
            scripts.torchrun(
                2, demo.SCRIPT, *arguments, ovpatch=["--report", str(report)], timeout=240
            ).check()
        else:
            how = {"report": report} if patched else {"env": {"OVPATCH": "0"}}
            self.forks.torchrun(2, demo.SCRIPT, *arguments, timeout=240, **how).check()
        return [(entry["loss"], entry["grad_norm"]) for entry in demo.read_log(log)]

    def checkpoint(self, name):
        return torch.load(self.folder / f"{name}.pt", weights_only=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory, forks):
    return Job(tmp_path_factory.mktemp("gpt"), forks)


@pytest.fixture(scope="module")
def stock(job):
    return job.train("stock", f"--checkpoint={job.folder}/stock.pt", patched=False)


@pytest.fixture(scope="module")
def patched(job):
    return job.train(
        "patched", f"--checkpoint={job.folder}/patched.pt", patched=True, launched=True
    )


def test_losses_and_gradient_norms_are_bitwise_equal(stock, patched):
    assert len(stock) == STEPS
    assert patched == stock


def test_both_workers_were_patched_and_their_buckets_overlapped(job, patched):
    assert demo.check_report(demo.read_report(job.folder / "patched.report"), 2) == []


def test_checkpoints_are_equal_in_keys_shapes_types_and_bits(job, stock, patched):
    a, b = (
        torch.utils._pytree.tree_flatten_with_path(job.checkpoint(name))[0]
        for name in ("stock", "patched")
    )
    assert [path for path, _ in a] == [path for path, _ in b]
    for (path, x), (_, y) in zip(a, b, strict=True):
        assert type(x) is type(y), path
        assert (
            (x.dtype == y.dtype and torch.equal(x, y)) if isinstance(x, torch.Tensor) else x == y
        ), path


def test_a_run_resumed_the_other_way_goes_on_bitwise(job, stock):
    """From stock to patched; tests/scripts has the other direction, too."""
    file = job.folder / "half.pt"
    head = job.train("half", f"--checkpoint={file}", patched=False, steps=HALF)
    tail = job.train("half-resumed", f"--resume={file}", patched=True)
    assert head + tail == stock
    assert demo.check_report(demo.read_report(job.folder / "half-resumed.report"), 2) == []


def test_the_script_runs_alone_compiled_and_in_bfloat16(tmp_path, forks):
    log = tmp_path / "log"
    args = [
        *SIZE,
        "--layers=1",
        "--steps=2",
        "--compile=aot_eager",
        "--dtype=bfloat16",
        f"--log-file={log}",
    ]
    alone = dict.fromkeys(
        (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "TORCHELASTIC_RUN_ID",
        )
    )
    forks.torchrun(1, demo.SCRIPT, *args, env=alone, timeout=240).check()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize("name", ["train_gpt", "train_tp", "train_2d", "three_d", "train_megatron"])
def test_one_line_of_the_script_knows_ovpatch(name):
    """README and quick start show this line, so that readers find one way to write it."""
    script = demo.SCRIPT.with_name(f"{name}.py").read_text()
    tree = ast.parse(script)
    tree.body = tree.body[1:]  # the docstring may speak of it
    lines = [line for line in ast.unparse(tree).splitlines() if "ovpatch" in line]
    assert lines == ["import ovpatch", "ovpatch.apply()"]
    assert "\nimport ovpatch; ovpatch.apply()  # fmt: skip\n" in script
