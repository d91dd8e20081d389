"""Tests of the plugin: install it, then run ``pytest test_clip_watch.py``."""

import json
import os
import subprocess
import sys

TRAIN = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def run(*arguments, **environ):
    command = [sys.executable, "-m", "ovpatch", *arguments]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)


def test_results_are_those_of_stock_pytorch(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run("verify", "--features", "clip_watch", "--", sys.executable, str(script))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_variable_turns_it_off():
    features = json.loads(run("list", "--json", OVPATCH_CLIP_WATCH="0").stdout)["features"]
    assert [f["state"] for f in features if f["name"] == "clip_watch"] == ["disabled"]
