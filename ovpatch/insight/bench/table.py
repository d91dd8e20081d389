"""The outcome of a bench as text: the verdict, the table, the pairs, each feature's part, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final

from ovpatch.insight.bench.analysis import SAME, SLOWER, Figures, Judgement, Row
from ovpatch.insight.bench.rounds import PATCHED, STOCK, Measured, Plan, Runs
from ovpatch.session.report import render_table

NOTHING: Final = "nothing ran: the two arms are the same program"


@dataclass(frozen=True)
class _Column:
    """One column; left out where no row has anything for it."""

    head: str
    cell: Callable[[Row], str]


def verdict(runs: Runs, figures: Figures) -> str:
    """Return the one line that matters."""
    return words(figures.judgement) if runs.exercised else NOTHING


def words(judgement: Judgement) -> str:
    """Return a judgement as half a sentence, such as ``1.080x faster (pairs 1.071 to 1.090; …)``."""
    # A ratio of 0.8 is read as 1.25 times slower; the pairs are turned with it.
    slower = judgement.verdict == SLOWER
    ratio, *pairs = [1 / one if slower else one for one in (judgement.ratio, *judgement.pairs)]
    said = f"{SAME} (ratio {ratio:.3f}, " if judgement.verdict == SAME else f"{ratio:.3f}x {judgement.verdict} ("
    if judgement.noise is not None:
        alike = f"runs alike differ by {judgement.noise:.1%}, so more than {judgement.threshold:.1%} counts"
        return f"{said}pairs {min(pairs):.3f} to {max(pairs):.3f}; {alike})"
    low, high = sorted(1 / end if slower else end for end in judgement.interval or ())
    within = f"99% interval of the steps {low:.3f} to {high:.3f}"
    return f"{said}one pair of runs, {within}; how far two runs alike differ is not known: use --rounds 3)"


def text(plan: Plan, runs: Runs, figures: Figures, *, colour: bool = False, width: int | None = None) -> str:
    """Return everything below the verdict.

    Args:
        plan: What was to be run.
        runs: What ran.
        figures: What came of it.
        colour: Whether to use terminal colours.
        width: Columns; those of the terminal by default.
    """
    parts = [_table(runs, figures, colour, width)]
    parts += [_reasons(runs)] if not runs.exercised else [_pairs(runs, figures), _features(runs, figures)]
    remarks = [_environment(plan, runs), *_remarks(runs, figures), *runs.notes]
    return "\n\n".join([*parts, "\n".join(f"- {remark}" for remark in remarks)])


def _table(runs: Runs, figures: Figures, colour: bool, width: int | None) -> str:
    columns = [column for column in _columns(figures) if any(column.cell(row) for row in figures.rows)]
    rows = [tuple(column.cell(row) for column in columns) for row in figures.rows]
    heads = [column.head for column in columns]
    return render_table("", heads, rows, colour=colour, width=width, right=heads[1:])


def _columns(figures: Figures) -> list[_Column]:
    kinds = dict.fromkeys(kind for row in figures.rows for kind in row.memory)
    return [
        _Column("arm", lambda row: row.kind),
        _Column("ms/step", lambda row: number(row.ms.median)),
        _Column("p10 to p90", lambda row: f"{number(row.ms.p10)} to {number(row.ms.p90)}"),
        _Column("worst", lambda row: number(row.ms.worst)),
        _Column("samples/s", lambda row: number(row.samples_per_second)),
        _Column("tokens/s", lambda row: number(row.tokens_per_second)),
        _Column("TFLOP/s", lambda row: number(row.tflops)),
        _Column("MFU", lambda row: f"{row.mfu:.1%}" if row.mfu is not None else ""),
        *(_memory(kind) for kind in kinds),
    ]


def _memory(kind: str) -> _Column:
    return _Column(f"{kind} GiB", lambda row: f"{row.memory[kind] / 2**30:.2f}")


def number(value: float | None) -> str:
    """Return a number with four digits that count, nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _pairs(runs: Runs, figures: Figures) -> str:
    lines = ["Pairs (median of a step, stock / patched = ratio):"]
    for place, (a, b) in enumerate(zip(runs.of(STOCK), runs.of(PATCHED), strict=True)):
        order = "stock first" if place % 2 == 0 else "patched first"
        times = f"{number(median(a.times))} / {number(median(b.times))} ms"
        lines.append(f"  round {place + 1}, {order}: {times} = {figures.judgement.pairs[place]:.3f}")
    return "\n".join(lines)


def _features(runs: Runs, figures: Figures) -> str:
    if len(runs.exercised) == 1:
        return f"Only {runs.exercised[0]} did something, so its part is the whole ratio."
    if not figures.parts:
        return f"{', '.join(runs.exercised)} did something; --leave-one-out tells each one's part."
    lines = ["Each feature's part (patched against patched without it):"]
    return "\n".join([*lines, *(f"  {name}: {words(part)}" for name, part in figures.parts.items())])


def _reasons(runs: Runs) -> str:
    if runs.report is None:
        return "No process of the command reported that ovpatch is on in it. See `ovpatch doctor`."
    lines = ["No counter of any feature moved in the patched run, so there was no further round:"]
    for feature in runs.report["features"]:
        why = "; ".join(filter(None, (feature["reason"], *feature["remarks"])))
        lines.append(f"  {feature['name']}: {feature['state']}" + (f" ({why})" if why else ""))
    return "\n".join(lines)


def _environment(plan: Plan, runs: Runs) -> str:
    first = runs.done[0].measured
    ranks = f"{first.world} rank{'s' if first.world > 1 else ''}"
    length = f"{plan.steps} steps after {plan.warmup} of warm-up"
    rounds = max(run.round for run in runs.done)
    order = f"{rounds} rounds ({', '.join(('A B', 'B A')[n % 2] for n in range(rounds))})" if rounds > 1 else "1 round"
    return f"{ranks} on {', '.join(first.devices)}; torch {first.torch}; {length}; {order}"


def _remarks(runs: Runs, figures: Figures) -> Iterator[str]:
    first = runs.done[0].measured
    clocks = f" ({_clocks(runs)} MHz at the end of a run)" if first.clocks_mhz else ""
    yield f"times by {first.clock}; of each step the slowest rank counts; device clocks are left as they are{clocks}"
    yield _fed(first, figures)
    if figures.no_tflops:
        yield f"TFLOP/s cannot be told: {figures.no_tflops}"
        return
    yield "TFLOP/s of one device: counted in a stock step, recomputation included, kernels unknown to torch not"
    if figures.no_mfu:
        yield f"MFU cannot be told: {figures.no_mfu}"
    elif runs.of(STOCK)[0].flops_again:
        yield "MFU is without what activation checkpointing computes again"


def _fed(first: Measured, figures: Figures) -> str:
    known = ((figures.samples, "samples"), (figures.tokens, "tokens"))
    fed = " = ".join(f"{number(count)} {what}" for count, what in known if count)
    if not fed:
        return "samples and tokens per second cannot be told: give --samples-per-step or --tokens-per-step"
    calls, module = first.batches
    times = f": {calls:g} call{'' if calls == 1 else 's'} of {module} per step"
    each = " and rank, each rank with a batch of its own" if first.world > 1 else ""
    return f"per step {fed}{times}{each}" if module else f"per step {fed}"


def _clocks(runs: Runs) -> str:
    seen = [clock for run in runs.done for clock in run.measured.clocks_mhz]
    return f"{min(seen)} to {max(seen)}" if min(seen) != max(seen) else str(seen[0])
