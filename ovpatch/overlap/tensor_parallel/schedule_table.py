"""The schedules of tensor-parallel linears, in one table for options, their help, checks and objects.

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
            can be computed later. Kernels gather into memory that the next linear overwrites, and ``auto`` may choose
            the kernels.
        is_experimental: Whether no result file shows a gain; see ``benchmarks/value.toml``.
    """

    name: str
    implementation: str
    help: str
    takes_chunks: bool = False
    is_measured: bool = True
    keeps_operands: bool = True
    is_experimental: bool = False


#: All schedules. ``auto`` compares all of them with the first one.
SCHEDULES: Final = (
    ScheduleInfo("stock", "stock:Schedule", "each starts after the previous one."),
    ScheduleInfo(
        "bulk",
        "overlapped:Bulk",
        "in backward, each collective runs under the GEMM that does not need it.",
    ),
    ScheduleInfo(
        "ring",
        "overlapped:Ring",
        "rows go from rank to rank, under GEMMs of rows that have arrived.",
        is_experimental=True,
    ),
    ScheduleInfo(
        "chunk",
        "overlapped:Chunk",
        "GEMMs are split into chunks, and a chunk's collective runs under the next chunk.",
        takes_chunks=True,
        is_experimental=True,
    ),
    ScheduleInfo(
        "fused",
        "fused:Fused",
        "kernels compute and move rows at the same time, on the GPUs of one host; elsewhere it is an error.",
        keeps_operands=False,
    ),
    ScheduleInfo(
        "copy",
        "copied:Copied",
        "copy engines move rows under GEMMs of other rows, on the GPUs of one host; elsewhere it is an error.",
        is_experimental=True,
    ),
    ScheduleInfo(
        "auto",
        "autotuned:Auto",
        "the fastest of these for an operator and its shape; all ranks measure once and cache the result in "
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

#: The schedule without any setting. ``auto`` also uses it if it does not measure.
DEFAULT_SCHEDULE: Final = "bulk"


def get_schedule_info(name: str) -> ScheduleInfo:
    """Return the row of a schedule.

    Raises:
        KeyError: The table has no schedule of this name.
    """
    return _INFO_BY_NAME[name]


_INFO_BY_NAME: Final = {info.name: info for info in SCHEDULES}


def describe_schedules() -> str:
    """Return the help of all schedules, as the help of an option shows it."""
    return " ".join(f"{info.name}: {info.help}" for info in SCHEDULES)
