"""The schedules: the orders in which a tensor-parallel linear launches its GEMMs and collectives."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from ovpatch.overlap.tensor_parallel.schedule_table import (
    DEFAULT_SCHEDULE,
    MEASURED_NAMES,
    SCHEDULES,
    get_schedule_info,
)
from ovpatch.overlap.tensor_parallel.schedules.stock import Schedule

if TYPE_CHECKING:
    import torch.distributed as dist


def find_schedule(name: str, chunks: int, *, regathers: bool = False) -> Schedule:
    """Return the schedule of a name in the table.

    Args:
        name: The name.
        chunks: The number of chunks of schedule ``chunk``.
        regathers: Whether backward gathers inputs again for the weights' gradients. ``auto`` then measures that.
    """
    info = get_schedule_info(name)
    # Calls with the same arguments return the same object, because operators compare schedules by identity.
    if name == "auto":
        return _make_auto(info.implementation, chunks, regathers)
    return _make_schedule(info.implementation, chunks if info.takes_chunks else None)


@functools.cache
def parse_schedule(text: str) -> Schedule:
    """Return the schedule whose attribute ``name`` is ``text``, such as ``chunk4``; a graph keeps that string."""
    for info in SCHEDULES:
        chunks = text.removeprefix(info.name)
        if info.takes_chunks and chunks.isdecimal():
            return find_schedule(info.name, int(chunks))
    return find_schedule(text, 1)


@functools.cache
def _make_schedule(implementation: str, chunks: int | None) -> Schedule:
    schedule_object: Schedule = _find_class(implementation)(*(() if chunks is None else (chunks,)))
    return schedule_object


@functools.cache
def _make_auto(implementation: str, chunks: int, regathers: bool) -> Schedule:
    arms = {
        schedule.name: schedule
        for schedule in (find_schedule(name, chunks) for name in MEASURED_NAMES)
    }
    schedule_object: Schedule = _find_class(implementation)(
        f"auto{chunks}", arms, DEFAULT_SCHEDULE, regathers=regathers
    )
    return schedule_object


def find_schedule_objection(name: str, group: dist.ProcessGroup, device_type: str) -> str:
    """Return the reason why the ranks of a group cannot run a named schedule; "" if they can.

    This is a collective. All ranks get the same result.
    """
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, torch.cuda.current_device())
    if name == "fused":
        from ovpatch.overlap.tensor_parallel.schedules.fused import find_fused_objection

        return find_fused_objection(group, device)
    if name == "copy":
        from ovpatch.overlap.tensor_parallel.schedules.copied import find_copy_objection

        return find_copy_objection(group, device)
    return ""


def list_schedule_objections() -> list[str]:
    """Return a line for each schedule that computes as ``bulk`` does on a group, with the reason."""
    reasons = []
    # A report imports no schedule.
    if fused := _find_loaded("fused"):
        reasons += [("fused", reason) for reason in fused.list_fused_objections()]
    if copied := _find_loaded("copied"):
        reasons += [("copy", reason) for reason in copied.list_copy_objections()]
    return [f"schedule {name} computes as bulk does: {reason}" for name, reason in reasons]


def drop_schedule_support() -> None:
    """Drop what schedules keep for all groups: objections, memory, copy engines."""
    if fused := _find_loaded("fused"):
        fused.drop_fused_support()
    if copied := _find_loaded("copied"):
        copied.drop_copy_support()


def _find_loaded(module: str) -> Any:
    return sys.modules.get(f"{__name__}.{module}")


def _find_class(implementation: str) -> Any:
    # The module is imported at its first use: the default schedule needs neither the kernels nor the autotuner.
    module, _, name = implementation.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


__all__ = ["Schedule", "find_schedule", "parse_schedule"]
