"""The figures of a bench, the judgement of differences between kinds of runs, and the report as text."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from ovpatch.insight.bench.rounds import PATCHED, PEERS, STOCK, BenchPlan, BenchRuns, Measured
from ovpatch.session.report_table import render_table

FASTER: Final = "faster"
SLOWER: Final = "slower"
SAME: Final = "no difference beyond noise"
UNCLEAR: Final = "cannot tell"

# If a difference has to be larger than this share to count, the machine was too busy to measure.
_MAX_THRESHOLD: Final = 0.25

_BLOCK_STEPS: Final = 3
_RESAMPLES: Final = 1000
# By the number of rounds: factors of the noise between runs, and of that between pairs.
_COUNTS: Final = {2: (2.5, math.inf), 3: (1.25, 2.0)}


@dataclass(frozen=True)
class Spread:
    """The distribution of one kind of run's steps, in the unit of the times."""

    # Median of all steps.
    median: float
    # 10th percentile.
    p10: float
    # 90th percentile.
    p90: float
    # The slowest step.
    worst: float


@dataclass(frozen=True)
class Judgement:
    """The second kind of run against the first.

    [Note: when a difference is one] A pair is one run of each kind, back to back, in alternating order. Its ratio is
    the ratio of the medians. The noise is the largest ratio, less one, between runs of one kind. If the range of the
    pairs' ratios is less, as on a machine that drifts, it counts. With few rounds, either counts several times. It is
    at least half the 95% bootstrap interval within the runs. A difference is claimed if all pairs agree on its sign and
    their median exceeds the noise: by chance in at most one case of twenty. With one round the 99% interval must
    exclude one.
    """

    # FASTER, SLOWER, SAME or UNCLEAR: the second kind against the first.
    verdict: str
    # Median over pairs of (first kind's time / second kind's time); above one, the second is
    # faster.
    ratio: float
    # The ratio of each pair.
    pairs: list[float]
    # Largest difference of the medians of two runs of one kind; None with one round.
    noise: float | None
    # Least distance of the ratio from one for a claim.
    threshold: float
    # The origin of the threshold, in words, or the objection of pairs that disagree.
    rule: str
    # With one round, the 99% interval within the runs, else None.
    interval: tuple[float, float] | None = None


def compute_spread(times: Sequence[float]) -> Spread:
    """Return the distribution of one or more times."""
    if not times:
        raise ValueError("no times have no spread: give one or more")
    return Spread(
        median(times), compute_quantile(times, 0.1), compute_quantile(times, 0.9), max(times)
    )


def compute_quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of a share of the values, interpolated between neighbors."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def judge_runs(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Judgement:
    """Judge the second kind of run, a pair at each index, by step times; see [Note: when a difference is one]."""
    if not first or len(first) != len(second):
        raise ValueError(
            f"{len(first)} and {len(second)} runs make no pairs: give one or more of each, and as "
            "many"
        )
    pairs = [median(a) / median(b) for a, b in zip(first, second, strict=True)]
    if len(pairs) == 1:
        low, high = compute_interval(first, second, 0.99)
        verdict = _choose_verdict(pairs[0], not low <= 1 <= high, (high - low) / 2)
        rule = "how far two equal runs differ is not known: use --rounds 3"
        return Judgement(verdict, pairs[0], pairs, None, (high - low) / 2, rule, (low, high))
    low, high = compute_interval(first, second, 0.95)
    noise = max(measure_run_noise(first), measure_run_noise(second))
    by_runs, by_pairs = _COUNTS.get(len(pairs), (1.0, 1.0))
    spread = max(pairs) - min(pairs)
    among_pairs = by_pairs * spread if math.isfinite(by_pairs) else math.inf
    half = (high - low) / 2
    threshold = max(min(by_runs * noise, among_pairs), half)
    if threshold == half:
        origin = "half the 95% interval within the runs"
    elif by_runs * noise <= among_pairs:
        origin = f"{_times(by_runs)}the {noise:.1%} by which equal runs differ"
    else:
        origin = f"{_times(by_pairs)}the {spread:.1%} by which pairs differ"
    ratio = median(pairs)
    has_agreed = all(pair > 1 for pair in pairs) or all(pair < 1 for pair in pairs)
    rule = f"more than {threshold:.1%} counts, {origin}"
    if not has_agreed and abs(ratio - 1) > threshold:
        rule = "pairs disagree on which is faster"
    is_claimed = has_agreed and abs(ratio - 1) > threshold
    return Judgement(
        _choose_verdict(ratio, is_claimed, threshold), ratio, pairs, noise, threshold, rule
    )


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{factor:g} times "


def _choose_verdict(ratio: float, is_claimed: bool, threshold: float) -> str:
    if not is_claimed:
        return SAME if threshold <= _MAX_THRESHOLD else UNCLEAR
    return FASTER if ratio > 1 else SLOWER


def measure_run_noise(runs: Sequence[Sequence[float]]) -> float:
    """Return the share by which the slowest run of a kind, by its median, exceeds the fastest."""
    medians = [median(run) for run in runs]
    return max(medians) / min(medians) - 1


def compute_interval(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], level: float
) -> tuple[float, float]:
    """Return the bootstrap interval of the median ratio over pairs.

    Slow steps come in groups, so blocks of steps are drawn.
    """
    # A fixed seed gives the same interval for the same times.
    chance = random.Random(0)
    ratios = [
        median(
            _resampled(a, chance) / _resampled(b, chance)
            for a, b in zip(first, second, strict=True)
        )
        for _ in range(_RESAMPLES)
    ]
    return compute_quantile(ratios, (1 - level) / 2), compute_quantile(ratios, (1 + level) / 2)


def _resampled(times: Sequence[float], chance: random.Random) -> float:
    """Return the median of as many steps, drawn in blocks of neighbours that wrap around the end."""
    count = len(times)
    starts = [chance.randrange(count) for _ in range(-(-count // _BLOCK_STEPS))]
    drawn = [times[(start + offset) % count] for start in starts for offset in range(_BLOCK_STEPS)]
    return median(drawn[:count])


#: Peak of dense bf16 and fp16 matrix products by data sheet, FLOP/s, by a part of the device's name; the first match
#: counts.
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
# The share of low-precision operations in a step; loss and norms of a bf16 model are in float32.
_MOSTLY: Final = 0.9


def find_peak(device: str, flops: Mapping[str, float]) -> tuple[float | None, str]:
    """Return the device's peak in FLOP/s for a bf16 or fp16 step, or None and the reason.

    Args:
        device: Name of the device.
        flops: Operations of the step by dtype.
    """
    total = sum(flops.values())
    half = sum(flops.get(dtype, 0) for dtype in HALF)
    if not total:
        return None, "operations were not counted"
    if _has_words("MIG", device):
        return None, f"{device} is a part of a device. Give --peak-tflops"
    known = next((value for words, value in PEAKS.items() if _has_words(words, device)), None)
    if known is None:
        return None, f"the peak of {device} is not known. Give --peak-tflops"
    if half < _MOSTLY * total:
        most = max(flops, key=lambda dtype: flops[dtype])
        return (
            None,
            f"the step computes mostly in {most}; the peak that is known is for bf16. Give "
            "--peak-tflops",
        )
    return known, ""


def _has_words(words: str, device: str) -> bool:
    """Return whether the name contains exactly these words: L4 does not match L40."""
    return f" {words} " in f" {device.replace('-', ' ')} "


@dataclass(frozen=True)
class UserFigures:
    """Figures that the user gives instead of having them measured."""

    # Samples per step over all ranks.
    samples: float | None = None
    # Tokens per step over all ranks.
    tokens: float | None = None
    # Peak of one device.
    peak_tflops: float | None = None


@dataclass(frozen=True)
class ArmRow:
    """One kind of run, over all rounds."""

    # ``stock``, ``patched`` or ``without-<feature>``.
    kind: str
    # The distribution of the times of its steps.
    ms: Spread
    # The rate over all ranks. This and the next three are None if they are unknown.
    samples_per_second: float | None
    # The rate over all ranks.
    tokens_per_second: float | None
    # The rate of one device.
    tflops: float | None
    # Share of the device's peak, 0 to 1, without recomputation.
    mfu: float | None
    # Bytes by peak, of the rank with most; the median over rounds.
    memory: dict[str, int]


@dataclass(frozen=True)
class BenchFigures:
    """All figures of a bench."""

    # A row for each kind of run.
    rows: list[ArmRow]
    # Patched against stock; above one, patched is faster.
    judgement: Judgement
    # By feature, the run without it against the patched run. Above one, the feature helps.
    parts: dict[str, Judgement]
    # By peer, its run against the patched run. Above one, patched is faster.
    against: dict[str, Judgement]
    # Samples per step over all ranks, None if unknown.
    samples: float | None
    # Tokens per step over all ranks, None if unknown.
    tokens: float | None
    # The reason for unknown TFLOP/s; "" if they are known.
    no_tflops: str
    # The reason for unknown MFU; "" if it is known.
    no_mfu: str


def compute_figures(runs: BenchRuns, given: UserFigures) -> BenchFigures:
    """Compute all figures of rounds; at least the first one is complete."""
    first = runs.list_measured(STOCK)[0]
    peak, no_mfu = _peak(first, given)
    samples = given.samples or first.samples
    tokens = given.tokens or first.tokens
    flops = sum(first.flops.values()) or None
    useful = 1 - first.flops_again / flops if flops else None
    rows = []
    for kind in runs.kinds:
        measured = runs.list_measured(kind)
        ms = compute_spread([time for run in measured for time in run.times])
        rate = flops / ms.median * 1e3 if flops else None
        rows.append(
            ArmRow(
                kind,
                ms,
                samples_per_second=_per_second(samples, ms),
                tokens_per_second=_per_second(tokens, ms),
                tflops=rate / 1e12 if rate else None,
                mfu=rate * useful / peak if rate and useful and peak else None,
                memory={
                    name: int(median(run.memory[name] for run in measured))
                    for name in measured[0].memory
                },
            )
        )
    return BenchFigures(
        rows=rows,
        judgement=_judge(runs, STOCK),
        against={kind: _judge(runs, kind) for kind in runs.kinds if kind in PEERS},
        parts={
            kind.removeprefix("without-"): _judge(runs, kind)
            for kind in runs.kinds
            if kind.startswith("without-")
        },
        samples=samples,
        tokens=tokens,
        no_tflops=first.flops_reason,
        no_mfu=no_mfu,
    )


def _judge(runs: BenchRuns, kind: str) -> Judgement:
    return judge_runs(
        [run.times for run in runs.list_measured(kind)],
        [run.times for run in runs.list_measured(PATCHED)],
    )


def _peak(first: Measured, given: UserFigures) -> tuple[float | None, str]:
    if given.peak_tflops is not None:
        return given.peak_tflops * 1e12, ""
    if len(first.devices) != 1:
        return None, "the ranks have different devices. Give --peak-tflops"
    return find_peak(first.devices[0], first.flops)


def _per_second(count: float | None, ms: Spread) -> float | None:
    return count / ms.median * 1e3 if count else None


NOTHING: Final = "no feature did any work: both runs are the same program"


def format_verdict(runs: BenchRuns, figures: BenchFigures) -> str:
    """Return the verdict in one line."""
    return format_judgement(figures.judgement) if runs.exercised else NOTHING


def format_judgement(judgement: Judgement) -> str:
    """Return a judgement as half a sentence, such as ``1.080x faster (pairs 1.071 to 1.090; …)``."""
    if judgement.verdict == UNCLEAR:
        return _describe_unclear(judgement)
    # A ratio of 0.8 reads as 1.25 times slower; the pairs are inverted with it.
    slower = judgement.verdict == SLOWER
    ratio, *pairs = [
        1 / value if slower else value for value in (judgement.ratio, *judgement.pairs)
    ]
    said = (
        f"{SAME} (ratio {ratio:.3f}, "
        if judgement.verdict == SAME
        else f"{ratio:.3f}x {judgement.verdict} ("
    )
    if judgement.noise is not None:
        return f"{said}pairs {min(pairs):.3f} to {max(pairs):.3f}; {judgement.rule})"
    low, high = sorted(1 / end if slower else end for end in judgement.interval or ())
    within = f"99% interval of the steps {low:.3f} to {high:.3f}"
    return f"{said}one pair of runs, {within}; {judgement.rule})"


def _describe_unclear(judgement: Judgement) -> str:
    if judgement.noise is None:
        spread = f"the interval of the ratio is {judgement.threshold:.0%} wide to each side"
    else:
        spread = f"equal runs differ by {judgement.noise:.0%}"
    remedy = "Stop other programs, or give --steps and --rounds more"
    return f"{UNCLEAR}: this machine is too busy ({spread}). {remedy}"


def format_report(
    plan: BenchPlan,
    runs: BenchRuns,
    figures: BenchFigures,
    *,
    colour: bool = False,
    width: int | None = None,
) -> str:
    """Return the report below the verdict, as wide as the terminal by default."""
    columns = [(head, cell) for head, cell in _columns(figures) if any(map(cell, figures.rows))]
    rows = [tuple(cell(row) for _, cell in columns) for row in figures.rows]
    heads = [head for head, _ in columns]
    parts = [render_table("", heads, rows, colour=colour, width=width, right=heads[1:])]
    if runs.exercised:
        parts += [_pairs(runs, figures), _features(runs, figures)]
    else:
        parts.append(_reasons(runs))
    parts += [
        f"Against {name}: patched is {format_judgement(found)}"
        for name, found in figures.against.items()
    ]
    remarks = [_environment(plan, runs), *_remarks(runs, figures), *runs.notes]
    return "\n\n".join([*parts, "\n".join(f"- {remark}" for remark in remarks)])


def _columns(figures: BenchFigures) -> list[tuple[str, Callable[[ArmRow], str]]]:
    """Return the head and the cell of each column; one that is empty in all rows is left out."""
    peaks = dict.fromkeys(peak for row in figures.rows for peak in row.memory)
    return [
        ("run", lambda row: row.kind),
        ("ms/step", lambda row: format_number(row.ms.median)),
        ("p10 to p90", lambda row: f"{format_number(row.ms.p10)} to {format_number(row.ms.p90)}"),
        ("worst", lambda row: format_number(row.ms.worst)),
        ("samples/s", lambda row: format_number(row.samples_per_second)),
        ("tokens/s", lambda row: format_number(row.tokens_per_second)),
        ("TFLOP/s", lambda row: format_number(row.tflops)),
        ("MFU", lambda row: f"{row.mfu:.1%}" if row.mfu is not None else ""),
        *(
            (f"{peak} GiB", lambda row, peak=peak: f"{row.memory[peak] / 2**30:.2f}")
            for peak in peaks
        ),
    ]


def format_number(value: float | None) -> str:
    """Return a number with four significant digits, "" for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _pairs(runs: BenchRuns, figures: BenchFigures) -> str:
    lines = ["Pairs (median of a step, stock / patched = ratio):"]
    for place, (a, b) in enumerate(
        zip(runs.list_measured(STOCK), runs.list_measured(PATCHED), strict=True)
    ):
        order = "stock first" if place % 2 == 0 else "patched first"
        times = f"{format_number(median(a.times))} / {format_number(median(b.times))} ms"
        lines.append(
            f"  round {place + 1}, {order}: {times} = {figures.judgement.pairs[place]:.3f}"
        )
    return "\n".join(lines)


def _features(runs: BenchRuns, figures: BenchFigures) -> str:
    if len(runs.exercised) == 1:
        return f"Only {runs.exercised[0]} did something, so its part is the whole ratio."
    if not figures.parts:
        return f"{', '.join(runs.exercised)} did something; --leave-one-out shows the part of each."
    lines = ["Each feature's part (patched against patched without it):"]
    return "\n".join(
        [*lines, *(f"  {name}: {format_judgement(part)}" for name, part in figures.parts.items())]
    )


def _reasons(runs: BenchRuns) -> str:
    if runs.report is None:
        return "No process of the command reported that ovpatch is on in it. See `ovpatch doctor`."
    lines = ["No counter of any feature moved in the patched run, so there was no further round:"]
    for feature in runs.report["features"]:
        why = "; ".join(filter(None, (feature["reason"], *feature["remarks"])))
        lines.append(f"  {feature['name']}: {feature['state']}" + (f" ({why})" if why else ""))
    return "\n".join(lines)


def _environment(plan: BenchPlan, runs: BenchRuns) -> str:
    first = runs.done[0].measured
    ranks = f"{first.world} rank{'s' if first.world > 1 else ''}"
    length = f"{plan.steps} steps after {plan.warmup} of warm-up"
    rounds = max(run.round for run in runs.done)
    order = (
        f"{rounds} rounds ({', '.join(('A B', 'B A')[n % 2] for n in range(rounds))})"
        if rounds > 1
        else "1 round"
    )
    return f"{ranks} on {', '.join(first.devices)}; torch {first.torch}; {length}; {order}"


def _remarks(runs: BenchRuns, figures: BenchFigures) -> Iterator[str]:
    first = runs.done[0].measured
    seen = sorted({clock for run in runs.done for clock in run.measured.clocks_mhz})
    clocks = (
        f" ({' to '.join(map(str, dict.fromkeys((seen[0], seen[-1]))))} MHz at the end of a run)"
        if seen
        else ""
    )
    # A CPU has no clock that a bench could fix.
    device = f"; device clocks are left as they are{clocks}" if has_gpu(first) else ""
    yield f"times by {first.clock}; of each step the slowest rank counts{device}"
    yield _fed(first, figures)
    if figures.no_tflops:
        yield f"TFLOP/s are unknown: {figures.no_tflops}"
        return
    yield "TFLOP/s of one device: counted in a stock step, with recomputation, without kernels that torch does not know"
    if figures.no_mfu and not has_gpu(first):
        return
    if figures.no_mfu:
        yield f"MFU is unknown: {figures.no_mfu}"
    elif runs.list_measured(STOCK)[0].flops_again:
        yield "MFU is without what activation checkpointing computes again"


def has_gpu(measured: Measured) -> bool:
    """Return whether a run used a device other than CPUs."""
    return any(device != "cpu" for device in measured.devices)


def _fed(first: Measured, figures: BenchFigures) -> str:
    known = ((figures.samples, "samples"), (figures.tokens, "tokens"))
    fed = " = ".join(f"{format_number(count)} {what}" for count, what in known if count)
    if not fed:
        return "samples and tokens per second are unknown: give --samples-per-step or --tokens-per-step"
    calls, module = first.batches
    times = f": {calls:g} call{'' if calls == 1 else 's'} of {module} per step"
    per_rank = " and rank, each rank with its own batch" if first.world > 1 else ""
    return f"per step {fed}{times}{per_rank}" if module else f"per step {fed}"
