"""The schedules of tensor-parallel linears: the one table from which options, checks, classes and texts are made.

A new schedule is a class in ``schedules`` and an entry here. This module imports no torch, because features read it
when they describe their options.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class ScheduleEntry(NamedTuple):
    """A schedule.

    Attributes:
        name: Value of the option ``schedule``.
        implementation: ``module:class`` below ``schedules``.
        help: The order of GEMMs and collectives, in one or two sentences.
        takes_chunks: Whether the class gets the number of chunks.
        is_measured: Whether ``auto`` measures it.
        keeps_operands: Whether the operands of a weight gradient stay valid after the backward, so that the gradient
            can be computed later. Kernels gather into memory that the next linear overwrites, and ``auto`` may take
            them.
    """

    name: str
    implementation: str
    help: str
    takes_chunks: bool = False
    is_measured: bool = True
    keeps_operands: bool = True


#: All schedules. ``auto`` compares the others with the first one.
SCHEDULES: Final = (
    ScheduleEntry("stock", "stock:Schedule", "one after the other."),
    ScheduleEntry(
        "bulk", "overlapped:Bulk", "in backward, each collective runs under the product that does not need it."
    ),
    ScheduleEntry("ring", "overlapped:Ring", "rows go from rank to rank, under products of rows that are there."),
    ScheduleEntry(
        "chunk",
        "overlapped:Chunk",
        "products are cut into parts, and a part's collective runs under the next part.",
        takes_chunks=True,
    ),
    ScheduleEntry(
        "fused",
        "fused:Fused",
        "kernels compute and move rows at the same time, on the GPUs of one host; elsewhere it is an error.",
        keeps_operands=False,
    ),
    ScheduleEntry(
        "auto",
        "autotuned:Auto",
        "the fastest of these for an operator and its shape; all ranks measure it once and keep it in "
        "OVPATCH_CACHE_DIR.",
        takes_chunks=True,
        is_measured=False,
        keeps_operands=False,
    ),
)

SCHEDULE_NAMES: Final = tuple(entry.name for entry in SCHEDULES)
MEASURED_NAMES: Final = tuple(entry.name for entry in SCHEDULES if entry.is_measured)

#: The schedule without any setting, which ``auto`` also takes where it does not measure.
DEFAULT_SCHEDULE: Final = "bulk"


def get_schedule_entry(name: str) -> ScheduleEntry:
    """Return the entry of a schedule; KeyError if there is none."""
    return _ENTRIES[name]


_ENTRIES: Final = {entry.name: entry for entry in SCHEDULES}


def describe_schedules() -> str:
    """Return the help of all schedules, for an option."""
    return " ".join(f"{entry.name}: {entry.help}" for entry in SCHEDULES)
