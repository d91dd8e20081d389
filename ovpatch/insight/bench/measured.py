"""What the processes of one arm left behind, put together over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ovpatch.insight.bench.statistics import slowest_rank
from ovpatch.reports import workers


@dataclass(frozen=True)
class Measured:
    """One run of the command.

    Attributes:
        times: Of each measured step the time in ms of the rank that took longest.
        taken: Steps that all ranks have taken, warm-up included.
        clock: What the times were taken with.
        memory: Of each kind of peak the bytes of the rank that needed most.
        samples: Per step over all ranks, None if they cannot be told.
        tokens: The same.
        batches: Calls of the model per step, and the class of the model.
        flops: Operations per step and rank by dtype; empty if they were not, or could not be, counted.
        flops_again: Those of them that activation checkpointing did a second time.
        flops_reason: Why not.
        devices: Their names, each once.
        clocks_mhz: Their clocks at the end, where they could be asked.
        torch: Its version.
        world: Number of ranks.
        missing: Ranks that left nothing, of which nothing above tells.
    """

    times: list[float] = field(default_factory=list)
    taken: int = 0
    clock: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    samples: float | None = None
    tokens: float | None = None
    batches: tuple[float, str] = (0, "")
    flops: Mapping[str, float] = field(default_factory=dict)
    flops_again: float = 0
    flops_reason: str = ""
    devices: Sequence[str] = ()
    clocks_mhz: Sequence[int] = ()
    torch: str = ""
    world: int = 0
    missing: Sequence[int] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def in_words(self) -> str:
        """Return what was measured, in a few words."""
        return f"{median(self.times):.4g} ms a step, worst {max(self.times):.4g}"


def read(folder: Path) -> Measured:
    """Put together what an arm's processes left; without any, nothing was taken."""
    ranks = _one_each(workers.read_all(folder, "bench"))
    if not ranks:
        return Measured()
    flops, reason = _flops([rank["flops"] for rank in ranks])
    clocks = {rank["clock"] for rank in ranks if rank["clock"]}
    column = "ms" if len(clocks) == 1 else "host_ms"  # what differs in kind is not compared
    first = ranks[0]
    missing = sorted(set(range(first["world"])) - {rank["rank"] for rank in ranks})
    return Measured(
        times=slowest_rank([rank[column] for rank in ranks]),
        taken=min(rank["steps"] for rank in ranks),
        clock=clocks.pop() if len(clocks) == 1 else "host clock",
        memory={kind: max(rank["memory"].get(kind, 0) for rank in ranks) for kind in first["memory"]},
        samples=None if missing else _sum(rank["batch"]["samples"] for rank in ranks),
        tokens=None if missing else _sum(rank["batch"]["tokens"] for rank in ranks),
        batches=(first["batch"]["calls"], first["batch"]["module"]),
        flops=flops,
        flops_again=fmean(rank["flops"]["again"] for rank in ranks) if flops else 0,
        flops_reason=reason,
        devices=list(dict.fromkeys(rank["device"] for rank in ranks)),
        clocks_mhz=[rank["clock_mhz"] for rank in ranks if rank["clock_mhz"]],
        torch=first["torch"],
        world=first["world"],
        missing=missing,
    )


def _one_each(files: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one file for each rank: of the last elastic restart, and there of the process that took most steps.

    A restart may be with fewer ranks; those that it has not are left out.
    """
    by_rank: dict[int, Mapping[str, Any]] = {}
    order: Callable[[Mapping[str, Any]], tuple[int, int]] = lambda file: (file["restart"], file["steps"])  # noqa: E731
    for file in sorted(files, key=order):
        by_rank[file["rank"]] = file
    world = max(by_rank.values(), key=order)["world"] if by_rank else 0
    return [by_rank[rank] for rank in sorted(by_rank) if rank < world]


def _sum(values: Any) -> float | None:
    known = list(values)
    return None if None in known else sum(known)


def _flops(ranks: Sequence[Mapping[str, Any] | None]) -> tuple[dict[str, float], str]:
    """Return the mean over ranks of the operations by dtype, or why there is none."""
    counted = [rank for rank in ranks if rank is not None]
    reasons = [rank["reason"] for rank in counted if rank["reason"]]
    if reasons or not counted:
        return {}, next(iter(reasons), "they are counted in the first stock run only")
    dtypes = dict.fromkeys(dtype for rank in counted for dtype in rank["by_dtype"])
    return {dtype: sum(rank["by_dtype"].get(dtype, 0) for rank in counted) / len(counted) for dtype in dtypes}, ""
