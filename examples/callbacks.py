"""Callbacks that log what ovpatch did: for the Trainer of transformers, and for Lightning. Copy the one you need.

    trainer = transformers.Trainer(..., callbacks=[make_trainer_callback()])
    trainer = lightning.Trainer(..., callbacks=[make_lightning_callback()])

Counters go into each log of the library. At the end the gains go, in words, to the run of Weights & Biases and to
TensorBoard. Each library is imported only when its callback is made. Call ``ovpatch.apply()`` before the trainer is
made, or start the script by ``ovpatch run``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import ovpatch


def counters() -> dict[str, float]:
    """Return the counters of the features that are on, named as trackers like it: ``ovpatch/ddp/collectives``."""
    return {
        f"ovpatch/{feature.name}/{name}": float(count)
        for feature in ovpatch.report().features
        if feature.state == "applied"
        for name, count in feature.counters.items()
    }


def log_gains(trackers: Iterable[Any]) -> None:
    """Log the gains of each feature, such as ``1 model, 63 of 64 buckets reduced during backward``.

    Args:
        trackers: Runs of Weights & Biases, which have a ``summary``, and ``SummaryWriter`` of TensorBoard.
    """
    gains = {f"ovpatch/{name}": text for name, text in ovpatch.report().gains().items()}
    for tracker in trackers:
        if hasattr(tracker, "add_text"):
            for name, text in gains.items():
                tracker.add_text(name, text)
        elif hasattr(tracker, "summary"):
            tracker.summary.update(gains)


def make_trainer_callback(writer: Any = None) -> Any:
    """Return a callback for ``transformers.Trainer``.

    Args:
        writer: The ``SummaryWriter`` that you also give to transformers' ``TensorBoardCallback``; None for none. The
            run of Weights & Biases is found by itself.
    """
    from transformers import TrainerCallback

    class ReportCallback(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The Trainer saves this history as trainer_state.json.
            if state.log_history:
                state.log_history[-1].update(counters())

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                run = getattr(sys.modules.get("wandb"), "run", None)
                print(ovpatch.report())
                log_gains(tracker for tracker in (run, writer) if tracker is not None)

    return ReportCallback()


def make_lightning_callback() -> Any:
    """Return a callback for ``lightning.Trainer``, which logs to all of its loggers."""
    from lightning.pytorch import Callback

    class ReportCallback(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.log_metrics(counters(), step=trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                print(ovpatch.report())
                log_gains(
                    logger.experiment for logger in trainer.loggers if hasattr(logger, "experiment")
                )

    return ReportCallback()
