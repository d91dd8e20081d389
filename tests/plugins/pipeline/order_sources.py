"""Sources of a schedule's order: its class, a file, or a script that changes the order of the class."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Final

Change = Callable[[Any], None]
"""Gives a schedule another order, before its first step."""


def _keep(_schedule: Any) -> None:
    """Leave the order as the class has built it."""


def _load_csv(form: str) -> Change:
    def load(schedule: Any) -> None:
        handle, path = tempfile.mkstemp(suffix=".csv")
        os.close(handle)
        try:
            schedule._dump_csv(path, format=form)
            schedule._load_csv(path, format=form)
        finally:
            os.unlink(path)

    return load


def _change(edit: Callable[[list[Any]], list[Any]]) -> Change:
    def change(schedule: Any) -> None:
        orders = {
            rank: edit(list(order)) for rank, order in schedule.pipeline_order_with_comms.items()
        }
        schedule._prepare_schedule_with_comms(orders, format="compute_comms")

    return change


def _has_kind(action: Any, *kinds: str) -> bool:
    return action.computation_type.name in kinds


def _drop(*kinds: str) -> Change:
    return _change(lambda order: [action for action in order if not _has_kind(action, *kinds)])


def _reduce_at_the_end(order: list[Any]) -> list[Any]:
    reductions = [action for action in order if _has_kind(action, "REDUCE_GRAD")]
    return [action for action in order if not _has_kind(action, "REDUCE_GRAD")] + reductions


def _reduce_some(order: list[Any]) -> list[Any]:
    kept = max(action.stage_index for action in order)
    return [
        action
        for action in order
        if not _has_kind(action, "REDUCE_GRAD") or action.stage_index == kept
    ]


def _reduce_first(order: list[Any]) -> list[Any]:
    """Reduce the gradients of each stage before its last backward, which leaves the later gradients unscaled."""
    changed = [action for action in order if not _has_kind(action, "REDUCE_GRAD")]
    for reduction in (action for action in order if _has_kind(action, "REDUCE_GRAD")):
        last = max(
            place
            for place, action in enumerate(changed)
            if action.stage_index == reduction.stage_index
            and _has_kind(action, "FULL_BACKWARD", "BACKWARD_WEIGHT")
        )
        changed.insert(last, reduction)
    return changed


def _reduce_twice(order: list[Any]) -> list[Any]:
    return [*order, *(action for action in order if _has_kind(action, "REDUCE_GRAD"))]


#: Sources of an order that the engine runs. Each keeps the computations of the class.
SOURCES: Final[Mapping[str, Change]] = {
    "built": _keep,
    "compute_only": _load_csv("compute_only"),
    "compute_comms": _load_csv("compute_comms"),
    "without REDUCE_GRAD": _drop("REDUCE_GRAD"),
    "without UNSHARD and RESHARD": _drop("UNSHARD", "RESHARD"),
    "without REDUCE_GRAD, UNSHARD and RESHARD": _drop("REDUCE_GRAD", "UNSHARD", "RESHARD"),
    "REDUCE_GRAD at the end": _change(_reduce_at_the_end),
    "REDUCE_GRAD of the last stage": _change(_reduce_some),
}

#: Sources of an order that torch runs itself.
STOCK_SOURCES: Final[Mapping[str, Change]] = {
    "REDUCE_GRAD before the last backward": _change(_reduce_first),
    "REDUCE_GRAD twice": _change(_reduce_twice),
}
