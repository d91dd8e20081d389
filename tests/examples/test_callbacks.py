"""The callbacks for trainers: gains in words reach the trackers that are there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "callbacks.py"
spec = importlib.util.spec_from_file_location("example_callbacks", FILE)
callbacks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(callbacks)


GAINS = {"ddp": "1 model, 63 of 64 buckets reduced during backward"}


@pytest.fixture
def gains(monkeypatch):
    monkeypatch.setattr(
        callbacks.ovpatch, "report", lambda: SimpleNamespace(gains=lambda: GAINS, features=())
    )
    return {f"ovpatch/{name}": text for name, text in GAINS.items()}


class Writer:
    """A SummaryWriter of TensorBoard."""

    def __init__(self):
        self.texts = {}

    def add_text(self, name, text):
        self.texts[name] = text


def test_the_trainer_logs_gains_to_both_trackers(monkeypatch, gains):
    # The libraries patch torch when they are imported; whole programs run in tests/scripts.
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=object))
    run, writer = SimpleNamespace(summary={}), Writer()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    callback = callbacks.make_trainer_callback(writer)
    callback.on_train_end(None, SimpleNamespace(is_world_process_zero=False), None)
    assert (run.summary, writer.texts) == ({}, {})
    callback.on_train_end(None, SimpleNamespace(is_world_process_zero=True), None)
    assert run.summary == writer.texts == gains


def test_lightning_logs_gains_to_its_loggers(monkeypatch, gains):
    library = SimpleNamespace(Callback=object)
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=library))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", library)
    run, writer = SimpleNamespace(summary={}), Writer()
    loggers = [
        SimpleNamespace(experiment=run),
        SimpleNamespace(experiment=writer),
        SimpleNamespace(),
    ]
    callbacks.make_lightning_callback().on_train_end(
        SimpleNamespace(is_global_zero=True, loggers=loggers), None
    )
    assert run.summary == writer.texts == gains
