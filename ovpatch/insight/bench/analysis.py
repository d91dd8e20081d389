"""Whether two kinds of runs differ, by the times of their steps.

[Note: when a difference is one] Two runs of the same program never take the same time, and the steps within a run tell
little of how far two runs are apart: memory layout, clocks and neighbours stay as they are for a whole run. So

- a pair is one run of each kind, one right after the other; the order within pairs alternates, so a machine that
  becomes slower favours neither. Its ratio is that of the medians over steps.
- the noise is the largest ratio, less one, between medians of two runs of the same kind. Where the machine drifts, that
  is the drift, which pairs do not see: so the noise is by how much the ratios of the pairs differ, if that is less.
  Either counts more than once with few rounds, in which numbers may be near each other by chance (:data:`_COUNTS`). It
  is never less than half the 95% interval that resampling the steps within the runs gives for the ratio.
- a difference is claimed if all pairs agree on its sign and the median of their ratios is farther from one than that.

On runs that differ by chance alone this claims something in at most one case of twenty (simulated in the tests), for
any number of rounds from two on. With one round there is no noise between runs to see: something is claimed only if the
99% interval within the runs excludes one, and it is said that the noise between runs is not known.

The interval is that of a bootstrap over blocks of neighbouring steps, because a slow step seldom comes alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from ovpatch.insight.bench.rounds import PATCHED, STOCK, Runs

FASTER: Final = "faster"
SLOWER: Final = "slower"
SAME: Final = "no difference beyond noise"

_BLOCK: Final = 3  # steps
_RESAMPLES: Final = 1000
_COUNTS: Final = {2: (2.5, math.inf), 3: (1.25, 2.0)}  # rounds: times that each noise counts, between runs and pairs


@dataclass(frozen=True)
class Spread:
    """How the steps of one kind of run are spread, in the unit of the times.

    Attributes:
        median: Of all steps.
        p10: A tenth of the steps were faster.
        p90: A tenth were slower.
        worst: The slowest step.
    """

    median: float
    p10: float
    p90: float
    worst: float


@dataclass(frozen=True)
class Judgement:
    """What one kind of run is against the other; see [Note: when a difference is one].

    Attributes:
        verdict: :data:`FASTER`, :data:`SLOWER` or :data:`SAME`: the second kind against the first.
        ratio: Median over pairs of (first kind's time / second kind's time); above one, the second is faster.
        pairs: The ratio of each pair.
        noise: By how much the medians of two runs of the same kind differ, at most; None with one round.
        threshold: How far from one a ratio has to be before anything is claimed.
        interval: With one round, the 99% interval within the runs, else None.
    """

    verdict: str
    ratio: float
    pairs: list[float]
    noise: float | None
    threshold: float
    interval: tuple[float, float] | None = None


def spread(times: Sequence[float]) -> Spread:
    """Return how times are spread.

    Raises:
        ValueError: There are none.
    """
    if not times:
        raise ValueError("no times to tell the spread of")
    return Spread(median(times), quantile(times, 0.1), quantile(times, 0.9), max(times))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def judge(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Judgement:
    """Tell whether the second kind of run is faster or slower than the first.

    Args:
        first: The times of the steps of each of its runs.
        second: The same; runs at the same place make a pair.

    Raises:
        ValueError: There is no pair, or there are runs without one.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} runs make no pairs")
    pairs = [median(a) / median(b) for a, b in zip(first, second, strict=True)]
    if len(pairs) == 1:
        return _judge_one(first[0], second[0], pairs[0])
    low, high = interval(first, second, 0.95)
    threshold = max(_threshold(first, second, pairs), (high - low) / 2)
    ratio = median(pairs)
    agreed = all(pair > 1 for pair in pairs) or all(pair < 1 for pair in pairs)
    return Judgement(
        _verdict(ratio, agreed and abs(ratio - 1) > threshold), ratio, pairs, _noise(first, second), threshold
    )


def _noise(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    return max(between_runs(first), between_runs(second))


def _threshold(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], pairs: Sequence[float]) -> float:
    runs, ratios = _COUNTS.get(len(pairs), (1.0, 1.0))
    among_pairs = ratios * (max(pairs) - min(pairs)) if math.isfinite(ratios) else math.inf
    return min(runs * _noise(first, second), among_pairs)


def _judge_one(first: Sequence[float], second: Sequence[float], ratio: float) -> Judgement:
    low, high = interval([first], [second], 0.99)
    return Judgement(_verdict(ratio, not low <= 1 <= high), ratio, [ratio], None, (high - low) / 2, (low, high))


def _verdict(ratio: float, claimed: bool) -> str:
    if not claimed:
        return SAME
    return FASTER if ratio > 1 else SLOWER


def between_runs(runs: Sequence[Sequence[float]]) -> float:
    """Return by which part the slowest run of a kind, by its median, exceeds the fastest."""
    medians = [median(run) for run in runs]
    return max(medians) / min(medians) - 1


def interval(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], level: float) -> tuple[float, float]:
    """Return the bootstrap interval of the median ratio over pairs, from the steps within the runs."""
    chance = random.Random(0)  # the same numbers give the same answer
    ratios = [
        median(_resampled(a, chance) / _resampled(b, chance) for a, b in zip(first, second, strict=True))
        for _ in range(_RESAMPLES)
    ]
    return quantile(ratios, (1 - level) / 2), quantile(ratios, (1 + level) / 2)


def _resampled(times: Sequence[float], chance: random.Random) -> float:
    """Return the median of as many steps, drawn in blocks of neighbours that may reach round the end."""
    count = len(times)
    starts = [chance.randrange(count) for _ in range(-(-count // _BLOCK))]
    drawn = [times[(start + offset) % count] for start in starts for offset in range(_BLOCK)]
    return median(drawn[:count])


# What devices can do at most, by their data sheets, and what a measured rate is of it.

#: Dense bf16 and fp16 matrix products, FLOP/s, by a part of the device's name; the first that fits counts.
PEAKS: Final = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100 PCIE": 112e12,
    "V100": 125e12,
    "MI300X": 1307.4e12,
}

HALF: Final = ("bfloat16", "float16")
_MOSTLY: Final = 0.9  # of a step's operations: the loss and the norms of a bf16 model are done in float32


def peak(device: str, flops: Mapping[str, float]) -> tuple[float | None, str]:
    """Return the device's peak in FLOP/s for a step in half precision, or None with the reason.

    Args:
        device: Its name.
        flops: Operations of the step by dtype.
    """
    total = sum(flops.values())
    half = sum(flops.get(dtype, 0) for dtype in HALF)
    if not total:
        return None, "operations were not counted"
    if _names("MIG", device):
        return None, f"{device} is a part of a device. Give --peak-tflops"
    known = next((value for words, value in PEAKS.items() if _names(words, device)), None)
    if known is None:
        return None, f"the peak of {device} is not known. Give --peak-tflops"
    if half < _MOSTLY * total:
        most = max(flops, key=lambda dtype: flops[dtype])
        return None, f"the step computes mostly in {most}; the peak that is known is for bf16. Give --peak-tflops"
    return known, ""


def _names(words: str, device: str) -> bool:
    """Whether the words are in the name as words, so that L4 is not found in L40."""
    return f" {words} " in f" {device.replace('-', ' ')} "


# The figures of a bench: one row for each kind of run, the ratio, and each feature's part.


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
    return peak(first.devices[0], first.flops)


def _per_second(count: float | None, ms: Spread) -> float | None:
    return count / ms.median * 1e3 if count else None


def _memory(runs: Runs, kind: str) -> dict[str, int]:
    """Return the median over rounds of each kind of peak."""
    measured = runs.of(kind)
    return {name: int(median(one.memory[name] for one in measured)) for name in measured[0].memory}
