"""Callbacks that log what ovpatch did: for the Trainer of transformers, and for Lightning. Copy the one you need.

    trainer = transformers.Trainer(..., callbacks=[make_trainer_callback()])
    trainer = lightning.Trainer(..., callbacks=[make_lightning_callback()])

Each library is imported only when its callback is made. Call ``ovpatch.apply()`` before the trainer is made, or start
the script by ``ovpatch run``.
"""

from __future__ import annotations

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


def make_trainer_callback() -> Any:
    """Return a callback for ``transformers.Trainer``: counters into its log history, at the end the report."""
    from transformers import TrainerCallback

    class ReportCallback(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The Trainer saves this history as trainer_state.json.
            if state.log_history:
                state.log_history[-1].update(counters())

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                print(ovpatch.report())

    return ReportCallback()


def make_lightning_callback() -> Any:
    """Return a callback for ``lightning.Trainer``: counters to its loggers, at the end the report."""
    from lightning.pytorch import Callback

    class ReportCallback(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.log_metrics(counters(), step=trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                print(ovpatch.report())

    return ReportCallback()
