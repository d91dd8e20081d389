"""The schedules of tensor-parallel linears: one table, from which options, their help, checks and objects are made.

A new schedule is a class in ``schedules`` and a row here. This module imports no torch, because features read it
when they describe their options.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class ScheduleInfo(NamedTuple):
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
        is_experimental: Whether no result file shows a gain; see ``benchmarks/value.toml``.
    """

    name: str
    implementation: str
    help: str
    takes_chunks: bool = False
    is_measured: bool = True
    keeps_operands: bool = True
    is_experimental: bool = False


#: All schedules. ``auto`` compares all of them with the first.
SCHEDULES: Final = (
    ScheduleInfo("stock", "stock:Schedule", "one after the other."),
    ScheduleInfo(
        "bulk",
        "overlapped:Bulk",
        "in backward, each collective runs under the product that does not need it.",
    ),
    ScheduleInfo(
        "ring",
        "overlapped:Ring",
        "rows go from rank to rank, under products of rows that are there.",
        is_experimental=True,
    ),
    ScheduleInfo(
        "chunk",
        "overlapped:Chunk",
        "products are cut into parts, and a part's collective runs under the next part.",
        takes_chunks=True,
        is_experimental=True,
    ),
    ScheduleInfo(
        "fused",
        "fused:Fused",
        "kernels compute and move rows at the same time, on the GPUs of one host; elsewhere it is "
        "an error.",
        keeps_operands=False,
    ),
    ScheduleInfo(
        "auto",
        "autotuned:Auto",
        "the fastest of these for an operator and its shape; all ranks measure it once and keep it "
        "in "
        "OVPATCH_CACHE_DIR.",
        takes_chunks=True,
        is_measured=False,
        keeps_operands=False,
        is_experimental=True,
    ),
)

SCHEDULE_NAMES: Final = tuple(info.name for info in SCHEDULES)
MEASURED_NAMES: Final = tuple(info.name for info in SCHEDULES if info.is_measured)
EXPERIMENTAL_NAMES: Final = tuple(info.name for info in SCHEDULES if info.is_experimental)

#: The schedule without any setting, which ``auto`` also takes where it does not measure.
DEFAULT_SCHEDULE: Final = "bulk"


def get_schedule_info(name: str) -> ScheduleInfo:
    """Return the row of a schedule; KeyError if there is none."""
    return _INFO_BY_NAME[name]


_INFO_BY_NAME: Final = {info.name: info for info in SCHEDULES}


def describe_schedules() -> str:
    """Return the help of all schedules, for an option."""
    return " ".join(f"{info.name}: {info.help}" for info in SCHEDULES)
