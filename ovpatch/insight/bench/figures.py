"""The figures of a bench: one row for each kind of run, the ratio, and each feature's part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ovpatch.insight.bench import peaks
from ovpatch.insight.bench.rounds import PATCHED, STOCK, Runs
from ovpatch.insight.bench.statistics import Judgement, Spread, judge, spread


@dataclass(frozen=True)
class Given:
    """What the user said instead of having it found out.

    Attributes:
        samples: Per step over all ranks.
        tokens: The same.
        peak_tflops: What one device can do at most.
    """

    samples: float | None = None
    tokens: float | None = None
    peak_tflops: float | None = None


@dataclass(frozen=True)
class Row:
    """One kind of run, over all rounds.

    Attributes:
        kind: ``stock``, ``patched`` or ``without-<feature>``.
        ms: How its steps are spread.
        samples_per_second: Over all ranks; None if it cannot be told, as with the next three.
        tokens_per_second: The same.
        tflops: Of one device.
        mfu: The part of the device's peak, 0 to 1, without what is computed again.
        memory: Bytes by kind of peak, of the rank that needs most.
    """

    kind: str
    ms: Spread
    samples_per_second: float | None
    tokens_per_second: float | None
    tflops: float | None
    mfu: float | None
    memory: dict[str, int]


@dataclass(frozen=True)
class Figures:
    """All that is told.

    Attributes:
        rows: One for each kind of run.
        judgement: Patched against stock; above one, patched is faster.
        parts: For each feature, the run without it against the patched run; above one, it makes the run faster.
        samples: Per step over all ranks, None if unknown.
        tokens: The same.
        no_tflops: Why TFLOP/s cannot be told; empty if they can.
        no_mfu: Why MFU cannot be told; empty if it can.
    """

    rows: list[Row]
    judgement: Judgement
    parts: dict[str, Judgement]
    samples: float | None
    tokens: float | None
    no_tflops: str
    no_mfu: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def figures(runs: Runs, given: Given) -> Figures:
    """Work out all figures of rounds of which at least the first is whole."""
    first = runs.of(STOCK)[0]
    peak, no_mfu = _peak(runs, given)
    samples = given.samples or first.samples
    tokens = given.tokens or first.tokens
    flops = sum(first.flops.values()) or None
    useful = 1 - first.flops_again / flops if flops else None
    rows = []
    for kind in runs.kinds:
        ms = spread([time for one in runs.of(kind) for time in one.times])
        rate = flops / ms.median * 1e3 if flops else None
        rows.append(
            Row(
                kind,
                ms,
                samples_per_second=_per_second(samples, ms),
                tokens_per_second=_per_second(tokens, ms),
                tflops=rate / 1e12 if rate else None,
                mfu=rate * useful / peak if rate and useful and peak else None,
                memory=_memory(runs, kind),
            )
        )
    return Figures(
        rows=rows,
        judgement=_judge(runs, STOCK),
        parts={kind.removeprefix("without-"): _judge(runs, kind) for kind in runs.kinds if kind.startswith("without-")},
        samples=samples,
        tokens=tokens,
        no_tflops=first.flops_reason,
        no_mfu=no_mfu,
    )


def _judge(runs: Runs, kind: str) -> Judgement:
    return judge([one.times for one in runs.of(kind)], [one.times for one in runs.of(PATCHED)])


def _peak(runs: Runs, given: Given) -> tuple[float | None, str]:
    """Return the peak of one device in FLOP/s, or why it is not known."""
    first = runs.of(STOCK)[0]
    if given.peak_tflops is not None:
        return given.peak_tflops * 1e12, ""
    if len(first.devices) != 1:
        return None, "the ranks have different devices. Give --peak-tflops"
    return peaks.peak(first.devices[0], first.flops)


def _per_second(count: float | None, ms: Spread) -> float | None:
    return count / ms.median * 1e3 if count else None


def _memory(runs: Runs, kind: str) -> dict[str, int]:
    """Return the median over rounds of each kind of peak."""
    measured = runs.of(kind)
    return {name: int(median(one.memory[name] for one in measured)) for name in measured[0].memory}
