"""Complete benches of small scripts; the numbers asserted are those that do not depend on the machine."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from ovpatch.cli import main
from tests.insight import programs
from tests.support.preloaded import preloaded
from tests.support.rarely import RARELY

environment = programs.environment

#: 2 ranks, 3 microbatches of 4 lines of 6 tokens, an evaluation in every step, and an endless loop.
LANGUAGE = """
import contextlib
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
    def forward(self, input_ids, attention_mask):
        return self.out(self.embedding(input_ids))
ddp = nn.parallel.DistributedDataParallel(Model())
loss, adam = nn.CrossEntropyLoss(), torch.optim.AdamW(ddp.parameters())
ids = torch.zeros(4, 6, dtype=torch.long)
while True:
    for micro in range(3):
        with ddp.no_sync() if micro < 2 else contextlib.nullcontext():
            logits = ddp(attention_mask=torch.ones(4, 6), input_ids=ids)
            loss(logits.flatten(0, 1), ids.flatten()).backward()
    with torch.no_grad():
        ddp.module(ids, None)
    adam.step()
    adam.zero_grad()
"""


@pytest.fixture
def bench(tmp_path, capfd):
    def bench(script, *arguments, ranks=0, launcher=()):
        (tmp_path / "train.py").write_text(script)
        file, out = tmp_path / "found.json", tmp_path / "out"
        options = [
            "--json",
            str(file),
            "--out",
            str(out),
            "--warmup",
            "3",
            "--timeout",
            "90",
            *arguments,
        ]
        code = main.main(
            ["bench", *options, "--", *(launcher or preloaded(ranks)), str(tmp_path / "train.py")]
        )
        return code, capfd.readouterr(), json.loads(file.read_text()) if file.exists() else None

    return bench


@pytest.mark.slow
def test_a_script_on_two_ranks_is_measured(bench, tmp_path):
    question = ("--what-if", "hosts=4,gpus=2,link=1Gbit")
    code, texts, found = bench(LANGUAGE, "--steps", "6", "--rounds", "1", *question, ranks=2)
    assert code == 0, texts.err
    # Gradients of 11 * 16 parameters and as many weights: one bucket, which two ranks of one host reduce.
    assert [row["hosts"] for row in found["what_if"]["rows"]] == [1, 1, 2, 4]
    assert set(found["what_if"]["errors"]) == {"stock", "ddp"}
    assert found["what_if"]["remarks"] == []
    files = list((tmp_path / "out" / "facts").glob("facts-*.json"))
    assert len(files) == 2
    for file in files:
        facts = json.loads(file.read_text())
        assert facts["buckets"] == [4 * 2 * 11 * 16]
        for name in ("forward_ms", "backward_ms", "optimizer_ms"):
            assert facts[name] > 0
        assert facts["exposed_ms"] >= 0
        assert facts["rings"]["within"].keys() == {
            "size",
            "bytes",
            "large_ms",
            "small_ms",
            "shard_ms",
        }
    assert (found["exercised"], found["samples"], found["tokens"]) == (["ddp"], 24.0, 144.0)
    stock, patched = (run["measured"] for run in found["runs"])
    for run in (stock, patched):
        assert (run["world"], run["taken"], len(run["times"]), run["clock"]) == (
            2,
            9,
            6,
            "host clock",
        )
        assert all(time > 0 for time in run["times"])
        assert run["batches"] == [3.0, "DistributedDataParallel"]
        assert run["memory"]["resident"] > 2**26
    # The linear layer: forward, and the gradients of weight and input, of three microbatches, and one evaluation.
    assert stock["flops"] == {"float32": 3 * 6 * 24 * 16 * 11 + 2 * 24 * 16 * 11}
    assert patched["flops"] == {}
    assert found["rows"][1]["tflops"] > 0
    assert found["judgement"]["interval"] is not None
    assert texts.out.startswith(f"ovpatch bench: {found['verdict']}\n")
    assert "144 tokens: 3 calls of DistributedDataParallel" in texts.out
    assert {"tokens/s", "TFLOP/s"} <= set(texts.out.replace("|", " ").split())


@RARELY
@pytest.mark.slow
def test_children_of_multiprocessing_are_measured_though_they_end_by_themselves(bench):
    script = textwrap.dedent("""
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        def work(rank, store):
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for _ in range(9):
                ddp(torch.ones(2, 4)).sum().backward()
                sgd.step()
            dist.destroy_process_group()
        if __name__ == "__main__":
            mp.start_processes(work, (f"{__file__}.{os.getpid()}",), nprocs=2, start_method="fork")
    """)
    code, texts, found = bench(script, "--rounds", "1", "--features", "", launcher=[sys.executable])
    assert code == 0, texts.err
    assert (found["runs"][0]["measured"]["world"], len(found["runs"][0]["measured"]["times"])) == (
        2,
        6,
    )
