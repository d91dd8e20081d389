"""The callbacks of examples/callbacks.py log the report, in a real Trainer of each library."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import clean

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.slow

HF = """
import sys
import torch, transformers
import callbacks, ovpatch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}

ovpatch.apply()
rows = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(4)]
options = dict(max_steps=2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
trainer = transformers.Trainer(
    Model(),
    transformers.TrainingArguments(sys.argv[1], **options),
    train_dataset=rows,
    callbacks=[callbacks.make_trainer_callback()],
)
trainer.train()
trainer.save_state()
"""

LIGHTNING = """
import sys
import lightning, torch
from lightning.pytorch.loggers import CSVLogger
import callbacks, ovpatch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

ovpatch.apply()
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, logger=CSVLogger(sys.argv[1]), callbacks=[callbacks.make_lightning_callback()],
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4, 2)))
"""


def run(code, folder):
    environment = {**clean(os.environ), "PYTHONPATH": str(ROOT / "examples")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "| ddp " in done.stdout, "the report is printed"


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="pip install 'ovpatch[integration]'")
def test_the_trainers_log_history_has_the_counters(tmp_path):
    run(HF, tmp_path)
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert history[0]["ovpatch/ddp/collectives"] == 0.0, "one process reduces nothing"
    assert "loss" in history[0]


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="pip install 'ovpatch[integration]'")
def test_lightnings_logger_has_the_counters(tmp_path):
    run(LIGHTNING, tmp_path)
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "ovpatch/ddp/collectives" in metrics.read_text()
