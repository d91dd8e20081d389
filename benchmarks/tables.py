"""Writes the tables of README.md, docs/ and the notes from ``benchmarks/results``: ``make tables``.

python -m benchmarks.tables           # rewrite the parts between <!-- table NAME --> and <!-- /table -->
python -m benchmarks.tables --check   # exit 1 if a page is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peaks import PEAK_TFLOPS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FEATURES = ("ddp", "dist_optimizer", "tp_linear", "pipe_experts")
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "benchmarks" / "NOTES.md",
    *(ROOT / "docs" / "features" / f"{name}.md" for name in FEATURES),
]

TP_ARMS = {
    "limit": "no communication",
    "stock": "stock",
    "stock, compiled": "stock, compiled",
    "stock, graphed": "stock, graphed",
    "ovpatch, bulk": "**ovpatch**",
    "ovpatch, bulk, regather": "and regather",
    "ovpatch, bulk, graphed": "ovpatch, graphed",
    "ovpatch, fused": "**`fused`**",
    "ovpatch, fused, graphed": "`fused`, graphed",
}

_COMPILED = {"model": "compiled", "blocks": "blocks compiled"}

ZERO_ARMS = {
    "limit, fp32": "no communication",
    "stock": "stock DDP",
    "ZeroRedundancyOptimizer": "ZeroRedundancy-Optimizer",
    "ovpatch, no overlap": "ovpatch, no overlap",
    "ovpatch": "**ovpatch**",
    "ovpatch, NCCL": "ovpatch, NCCL",
    "ovpatch, copy engines": "ovpatch, copy engines",
    "limit, bf16 linears": "no communication, bf16 linears",
    "limit, bf16": "no communication, bf16",
    "FSDP2, ZeRO-2": "FSDP2",
    "Megatron-Core": "Megatron-Core",
    "ovpatch, bf16 weights": "ovpatch, bf16 weights",
}

# Without peers nothing chooses between NCCL and copy engines, which is up to the arm.
ALONE_ARMS = ZERO_ARMS | {
    "ovpatch, NCCL": "**ovpatch**",
    "ovpatch, bf16 weights": "ovpatch, bf16 weights, NCCL",
    "ovpatch, bf16 weights, copy engines": "ovpatch, bf16 weights",
}


# Of these dist_optimizer shards tensors on 2 GPUs and more: sharding_choice.MIN_SAVED_NUMEL.
_SHARDED_BY_DEFAULT = ("2b", "3.8b")


def summary() -> str:
    """Return the table of all runs of GPT: the best stock setting, and a plain ``apply()``; new and large first."""
    groups = [
        *group_runs("zero_step", _default_arm),
        *group_runs("zero_step_2_h100", _default_arm),
        # These runs are older than dist_optimizer as a default.
        *group_runs("ddp_step"),
    ]
    groups.sort(
        key=lambda runs: (max(run["date"] for run in runs), pick_best(runs[0])["peak_gib"]),
        reverse=True,
    )
    rows = []
    for runs in groups:
        sharded = (
            runs[0]["benchmark"] != "ddp_step"
            and runs[0]["settings"]["size"] in _SHARDED_BY_DEFAULT
        )
        rows.append(_summary_row(runs, _default_arm, "ddp, dist_optimizer" if sharded else "ddp"))
    return _summary_table(["run", "best stock setting, ms", "ovpatch, ms", "peak GiB"], rows)


def _default_arm(run: dict[str, Any]) -> str:
    """Return the arm that does what a plain ``apply()`` does."""
    if run["benchmark"] == "ddp_step":
        return "ovpatch"
    if run["settings"]["size"] not in _SHARDED_BY_DEFAULT:
        return "ovpatch, ddp alone"
    by_rule = "ovpatch, where faster"
    return by_rule if by_rule in {row["arm"] for row in run["summary"]} else "ovpatch"


def ddp_summary() -> str:
    """Return the short table of feature ``ddp``."""
    rows = [_summary_row(runs, "ovpatch", "") for runs in group_runs("ddp_step")]
    rows += [
        _summary_row(runs, "ovpatch, ddp alone", "") for runs in group_runs("zero_step_2_h100")
    ]
    return _summary_table(["run", "best stock setting, ms", "ovpatch, ms", "peak GiB"], rows)


def zero_summary() -> str:
    """Return the short table of feature ``dist_optimizer``, with FSDP2 in the same runs."""
    rows = []
    for name in ("zero_step", "zero_step_2_h100"):
        for runs in group_runs(name):
            cells = _summary_row(runs, "ovpatch", "")
            arms = [{row["arm"]: row for row in run["summary"]} for run in runs]
            peers = [found["FSDP2, ZeRO-2"] for found in arms if "FSDP2, ZeRO-2" in found]
            memory = f", FSDP2 {_least_peak(peers)}" if peers else ""
            rows.append([*cells[:2], _spread(peers) if peers else "", cells[2], cells[3] + memory])
    return _summary_table(
        ["run", "best stock setting, ms", "FSDP2 (ZeRO-2), ms", "ovpatch, ms", "peak GiB"], rows
    )


def group_runs(
    name: str, pick: Callable[[dict[str, Any]], str] = lambda _run: "ovpatch"
) -> list[list[dict[str, Any]]]:
    """Return the runs of a file with a stock setting and the arm that ``pick`` names, those of one kind together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in read_results(name):
        arms = {row["arm"] for row in result["summary"]}
        if pick(result) in arms and any(arm.startswith("stock") for arm in arms):
            kind = f"{name_run(result)}, {_gpus(result)}"
            groups.setdefault(kind, []).append(result)
    return list(groups.values())


def pick_best(run: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run's fastest stock setting."""
    return min(
        (row for row in run["summary"] if row["arm"].startswith("stock")),
        key=lambda row: row["median_ms"],
    )


def _summary_row(
    runs: list[dict[str, Any]], arm: str | Callable[[dict[str, Any]], str], features: str
) -> list[str]:
    """Return a row over all runs of one kind; the baseline is the fastest stock setting of each run."""
    best = [pick_best(run) for run in runs]
    ours = [
        row
        for run in runs
        for row in run["summary"]
        if row["arm"] == (arm if isinstance(arm, str) else arm(run))
    ]
    rounds = sum(len(row["round_medians_ms"]) for row in ours)
    kind = f"{name_run(runs[0])}, {_gpus(runs[0])}"
    times = f"{rounds} rounds" if rounds > 1 else "1 round"
    if len(runs) > 1:
        times += f" in {len(runs)} runs"
    ratio = _middle(ours) / _middle(best) - 1
    dates = sorted({run["date"] for run in runs})
    times += f", {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "")
    return [
        f"{kind}{f', `{features}`' if features else ''} ({times})",
        _spread(best),
        f"{_spread(ours)}, {ratio:+.1%}",
        f"{_least_peak(best)} → {_least_peak(ours)}",
    ]


def _least_peak(rows: list[dict[str, Any]]) -> str:
    """Return the least peak of memory of several runs: in some, memory was left over from what ran before."""
    return f"{min(row['peak_gib'] for row in rows):.1f}"


def _middle(rows: list[dict[str, Any]]) -> float:
    return statistics.median(row["median_ms"] for row in rows)


def _spread(rows: list[dict[str, Any]]) -> str:
    """Return the median of runs, and the range of their rounds."""
    rounds = [ms for row in rows for ms in row["round_medians_ms"]]
    middle = f"{_middle(rows):.1f}"
    return middle if len(rounds) == 1 else f"{middle} ({min(rounds):.1f} to {max(rounds):.1f})"


def _summary_table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join([_heading(header), _row(["---"] * len(header)), *(_row(row) for row in rows)])


def ddp_step() -> str:
    """Return the table of ``benchmarks/ddp_step.py``: one row per run, the best stock setting and our default."""
    results = read_results("ddp_step")
    header = [
        "run",
        "GPUs",
        "no communication",
        "stock",
        "stock, best setting",
        "ovpatch",
        "against best",
    ]
    header += ["TFLOP/s", "MFU", "peak GiB, stock at least → ovpatch"]
    lines = [_heading(header), _row(["---"] * len(header))]
    lines += [_ddp_row(result) for result in results]
    newest = results[-1]
    return "\n".join(lines) + (
        "\n\nMilliseconds per training step, median, the slowest rank counts. "
        f"Measured with torch {newest['torch']}, fp32 weights "
        "under bf16 autocast, fused AdamW, 4 sequences of 1024 tokens per GPU and microbatch, "
        "random data, alternating "
        "settings in one run. TFLOP/s per GPU and MFU are "
        "ovpatch's. Settings of stock DDP, where the run has them: 25, 100, 200 and 400 MiB "
        "buckets, with and without `gradient_as_bucket_view`. Raw data, with worst cases and more settings: "
        "`benchmarks/results/ddp_step.jsonl`."
    )


def _ddp_row(result: dict[str, Any]) -> str:
    arms = {row["arm"]: row for row in result["summary"]}
    stock = [row for name, row in arms.items() if name.startswith("stock")]
    best, ours = min(stock, key=lambda row: row["median_ms"]), arms["ovpatch"]
    setting = best["arm"].removeprefix("stock").removeprefix(", ") or "default"
    against = ours["median_ms"] / best["median_ms"] - 1
    return _row(
        [
            name_run(result),
            _where_and_when(result),
            _ms(arms["no sync"]),
            _ms(arms["stock"]),
            f"{_ms(best)} ({setting})",
            _ms(ours),
            f"{against:+.1%}",
            f"{ours['tflops']:.0f}",
            f"{ours['mfu']:.0%}",
            f"{min(row['peak_gib'] for row in stock):.1f} → {ours['peak_gib']:.1f}",
        ]
    )


def zero_step() -> str:
    """Return the table of ``benchmarks/zero_step.py``: one row per run, with ratios to the limit and stock DDP."""
    # Comparisons of settings of ovpatch have no row.
    needed = {"limit, fp32", "ovpatch"}
    results = [
        run for run in read_results("zero_step") if needed <= {row["arm"] for row in run["summary"]}
    ]
    columns = _seen(ZERO_ARMS, results)
    header = [
        "run",
        "GPUs",
        *columns.values(),
        "ovpatch / limit",
        "stock / ovpatch",
        "TFLOP/s",
        "MFU",
    ]
    header += ["peak GiB, stock → ovpatch"]
    lines = [_heading(header), _row(["---"] * len(header))]
    for result in results:
        arms = {row["arm"]: row for row in result["summary"]}
        ours, limit = arms["ovpatch"], arms["limit, fp32"]
        stock = min(
            (row for name, row in arms.items() if name.startswith("stock")),
            key=lambda row: row["median_ms"],
        )
        tflops = result["settings"]["flops"] / ours["median_ms"] / 1e9
        lines.append(
            _row(
                [
                    name_run(result),
                    _where_and_when(result),
                    *(_ms(arms[arm]) if arm in arms else "" for arm in columns),
                    f"{ours['median_ms'] / limit['median_ms']:.2f}",
                    f"{stock['median_ms'] / ours['median_ms']:.2f}",
                    f"{tflops:.0f}",
                    f"{tflops / PEAK_TFLOPS[result['device']]:.0%}",
                    f"{stock['peak_gib']:.1f} → {ours['peak_gib']:.1f}",
                ]
            )
        )
    newest = results[-1]
    return "\n".join(lines) + (
        "\n\nMilliseconds per training step, median, the slowest rank counts; torch "
        f"{newest['torch']}, fused AdamW, "
        "4 sequences of 1024 tokens per GPU and microbatch, random data, alternating settings in "
        "one run. Stock in "
        "the ratios is the best of its settings in the run. TFLOP/s per GPU and MFU are ovpatch's. "
        "Raw data, with "
        "worst cases and more settings: "
        "`benchmarks/results/zero_step.jsonl`."
    )


def zero_alone() -> str:
    """Return the table of ``benchmarks/zero_alone.py``: one row per run."""
    results = read_results("zero_alone")
    for row in (row for result in results for row in result["summary"]):
        # NCCL carries everything in this arm.
        if row["arm"] == "ovpatch":
            row["arm"] = "ovpatch, NCCL"
    columns = _seen(ALONE_ARMS, results)
    header = ["run", "ranks", *columns.values(), "ovpatch / limit"]
    lines = [_heading(header), _row(["---"] * len(header))]
    for result in results:
        arms = {row["arm"]: row for row in result["summary"]}
        cells = [
            f"{_ms(arms[arm])}, {arms[arm]['peak_gib']:.1f} GiB" if arm in arms else ""
            for arm in columns
        ]
        limit = arms.get("limit, fp32")
        against = f"{arms['ovpatch, NCCL']['median_ms'] / limit['median_ms']:.3f}" if limit else ""
        name = f"{name_run(result)}, {result['device'].split()[1]}, {result['date']}"
        lines.append(_row([name, str(result["world"]), *cells, against]))
    newest = results[-1]
    return "\n".join(lines) + (
        "\n\nMilliseconds per training step, median, and peak of memory of one rank on one GPU, "
        "whose "
        f"peers are not there: nothing is communicated. torch {newest['torch']}, otherwise as "
        "above. "
        "Raw data, with worst cases: `benchmarks/results/zero_alone.jsonl`."
    )


def tp_blocks() -> str:
    """Return the table of ``benchmarks/tp_blocks.py``: one row for all runs of the same blocks, GPUs, torch and day."""
    header = ["blocks", "GPUs", *TP_ARMS.values(), "peak GiB, stock → ovpatch → regather"]
    lines = [_heading(header), _row(["---"] * len(header))]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    results = read_results("tp_blocks")
    for result in results:
        settings = result["settings"]
        name = {"8b": "h 4096, 8 layers", "70b": "h 8192, 4 layers", "gpt": "h 3072, 8 layers"}[
            settings["size"]
        ]
        name += ", local residuals" if settings["plain"] else ""
        name += f", {settings['batch']} sequences" if settings["batch"] > 1 else ""
        groups.setdefault((name, _where_and_when(result), result["torch"]), []).append(result)
    for (name, gpus, _), runs in groups.items():
        times, peaks = dict[str, list[float]](), dict[str, float]()
        for row in (row for run in runs for row in run["rows"]):
            times.setdefault(row["arm"], []).extend(row["ms"])
            peaks.setdefault(row["arm"], row["peak_gib"])
        medians = [
            f"{statistics.median(times[arm]):.1f}" if arm in times else "" for arm in TP_ARMS
        ]
        compared = ("stock", "ovpatch, bulk", "ovpatch, bulk, regather")
        gpus += f", {len(runs)} runs" if len(runs) > 1 else ""
        lines.append(
            _row(
                [
                    name,
                    gpus,
                    *medians,
                    " → ".join(f"{peaks[arm]:.2f}" if arm in peaks else "?" for arm in compared),
                ]
            )
        )
    return "\n".join(lines) + (
        "\n\nMilliseconds, forward and backward of a stack of blocks, bf16, the slowest rank "
        "counts. Each column has the median of "
        "all steps of the runs that have it. These runs differ between columns. "
        f"Measured with torch {results[-1]['torch']}, NCCL without NVLink multicast, random data, 8192 tokens (h "
        "3072: "
        "4096). ovpatch: schedule `bulk`, the default, or `fused`. Raw data, with worst cases: "
        "`benchmarks/results/tp_blocks.jsonl`."
    )


MOE_ARMS = {
    "experts": "experts alone",
    "all-to-alls": "two all-to-alls alone",
    "in sequence": "in sequence",
    "transformers": "transformers",
    "ovpatch, none": "ovpatch, uncut",
    "ovpatch, auto": "**ovpatch**",
}
MOE_SHAPES = {"mixtral": "Mixtral-like", "dsv3": "DeepSeek-V3-like", "qwen3": "Qwen3-30B-A3B-like"}


def moe_layer() -> str:
    """Return the table of ``benchmarks/moe_layer.py``: one row per run."""
    results = read_results("moe_layer")
    columns = _seen(MOE_ARMS, results)
    header = [
        "layer",
        "GPUs",
        *columns.values(),
        "in sequence / ovpatch",
        "peak GiB, in sequence → ovpatch",
    ]
    lines = [_heading(header), _row(["---"] * len(header))]
    for result in results:
        arms, settings = {row["arm"]: row for row in result["summary"]}, result["settings"]
        name = MOE_SHAPES[settings["shape"]] + (
            ", forward and backward" if settings["backward"] else ", forward"
        )
        name += (
            f", one expert with {settings['skew']:g} times its share"
            if settings["skew"] > 1
            else ""
        )
        name += f", {settings['tokens']} tokens" if settings["tokens"] else ""
        before, ours = arms["in sequence"], arms["ovpatch, auto"]
        lines.append(
            _row(
                [
                    name,
                    _where_and_when(result),
                    *(f"{arms[arm]['median_ms']:.2f}" if arm in arms else "" for arm in columns),
                    f"{before['median_ms'] / ours['median_ms']:.2f}",
                    f"{before['peak_gib']:.2f} → {ours['peak_gib']:.2f}",
                ]
            )
        )
    newest = results[-1]
    return "\n".join(lines) + (
        f"\n\nMilliseconds, median, the slowest rank counts; torch {newest['torch']}, bf16, random "
        "data, 4096 tokens a "
        "rank unless said, balanced routing unless said. Raw data, with worst cases and more "
        "settings: "
        "`benchmarks/results/moe_layer.jsonl`."
    )


def ablation() -> str:
    """Return the table of ``benchmarks/ablation.py``: one row per run and arm."""
    results = read_results("ablation")
    header = [
        "model",
        "mesh, GPUs",
        "run",
        "ms",
        "TFLOP/s per GPU",
        "MFU",
        "over stock",
        "over no overlap",
        "peak GiB",
    ]
    header += ["clock, MHz", "cycles / limit", "joules", "what came under compute"]
    lines = [_heading(header), _row(["---"] * len(header))]
    for result in results:
        lines += _ablation_rows(result)
    newest = results[-1]
    return "\n".join(lines) + (
        "\n\nMilliseconds per training step, median, the slowest rank counts; torch "
        f"{newest['torch']}, fused AdamW, "
        "random data, alternating settings in one run. MFU is of the "
        "989 dense bf16 TFLOP/s that the maker states. No overlap: all features on, each with its "
        "overlap off. Clock and joules are the means over GPUs; cycles are time by clock. Raw "
        "data, with worst cases, losses and counters: `benchmarks/results/ablation.jsonl`."
    )


def _ablation_rows(result: dict[str, Any]) -> list[str]:
    settings, arms = result["settings"], {row["arm"]: row for row in result["summary"]}
    model = settings["model"]
    name = f"{'Llama' if model['llama'] else 'GPT'} {settings['parameters'] / 1e9:.1f}B, {model['layers']} layers, "
    name += {"bf16": "bf16 weights", "fp32": "fp32 weights, autocast"}[settings["dtype"]]
    mesh = (
        f"DP {result['world'] // settings['tp']} x TP {settings['tp']}, {_where_and_when(result)}"
    )
    how = {row["arm"]: row["features"] for row in result["rows"]}
    clocks, lines = _mean_of_gpus(result, "mhz"), []
    joules = _mean_of_gpus(result, "joules")
    for arm, row in arms.items():
        ms = row["median_ms"]
        measured = [a for a in (arm, "limit") if a in arms and a in clocks]
        cycles = [arms[a]["median_ms"] * clocks[a] for a in measured]
        tflops = settings["flops"] / ms / 1e9
        mfu = f"{tflops / settings['peak_tflops']:.1%}" if settings["peak_tflops"] else ""
        ratios = [
            f"{arms[peer]['median_ms'] / ms:.2f}" if peer in arms else ""
            for peer in ("stock", "ovpatch, no overlap")
        ]
        cells = [
            name,
            mesh,
            arm,
            f"{ms:.1f}",
            f"{tflops:.0f}",
            mfu,
            *ratios,
            f"{row['peak_gib']:.1f}",
            f"{clocks[arm]:.0f}" if arm in clocks else "",
            f"{cycles[0] / cycles[1]:.2f}" if len(cycles) == 2 else "",
            f"{joules[arm]:.0f}" if arm in joules else "",
        ]
        lines.append(_row([*cells, _overlapped(how[arm])]))
    return lines


def _mean_of_gpus(result: dict[str, Any], name: str) -> dict[str, float]:
    """Return the mean of a measurement of all GPUs by arm; nothing for arms without it."""
    by_arm: dict[str, list[float]] = {}
    for row in result["rows"]:
        found = [gpu[name] for gpu in row.get("gpu", ()) if name in gpu]
        if found:
            by_arm.setdefault(row["arm"], []).extend(found)
    return {arm: statistics.mean(values) for arm, values in by_arm.items()}


# A feature's counters of overlapped and of all collectives, and their name.
OVERLAPPED = {
    "ddp": ("collectives_in_backward", "collectives", "gradients"),
    "dist_optimizer": ("gathers_overlapped", "gathers", "parameters"),
}


def _overlapped(features: dict[str, dict[str, Any]]) -> str:
    """Return the hidden share of each feature's collectives, and features that fell back."""
    found = [
        f"{name} {how['state']}" for name, how in features.items() if how["state"] != "applied"
    ]
    for name, (hidden, total, what) in OVERLAPPED.items():
        counters = features.get(name, {}).get("counters", {})
        if counters.get(total):
            found.append(f"{what} {counters[hidden] / counters[total]:.0%}")
    return ", ".join(found)


OPERATOR_ARMS = {
    "product, graphed": "product",
    "collective, graphed": "collective",
    "in sequence": "in sequence",
    "in sequence, graphed": "graphed",
    "stock": "stock",
    "stock, compiled": "compiled",
    "stock, compiled, micro pipeline": "`_micro_pipeline_tp`",
    "torch symm_mem": "torch's fused operator",
    "ovpatch, fused": "**ovpatch, fused**",
    "ovpatch, fused, graphed": "**graphed**",
}


def tp_operators() -> str:
    """Return the table of ``benchmarks/tp_operators.py``: one row per operator and shape."""
    results = read_results("tp_operators")
    shown = _seen(OPERATOR_ARMS, results)
    header = ["linear", "GPUs", *shown.values(), "in sequence / fused", "graphed", "speed of light"]
    lines = [_heading(header), _row(["---"] * len(header))]
    for result in results:
        settings = result["settings"]
        arms = {
            row["arm"]: statistics.median(
                [ms for r in result["rows"] if r["arm"] == row["arm"] for ms in r["ms"]]
            )
            for row in result["summary"]
        }
        kind = {"gather": "gather and product", "scatter": "product and reduce-scatter"}[
            settings["operators"]
        ]
        fused, graphed = arms["ovpatch, fused"], arms["ovpatch, fused, graphed"]
        limit = max(arms["product, graphed"], arms["collective, graphed"])
        ratios = [
            arms["in sequence"] / fused,
            arms["in sequence, graphed"] / graphed,
            limit / graphed,
        ]
        cut = f", cut for {settings['tp']}" if settings["tp"] else ""
        times = [f"{arms[arm]:.3f}" if arm in arms else "" for arm in shown]
        lines.append(
            _row(
                [
                    f"{settings['shapes']}{cut}: {kind}",
                    _where_and_when(result),
                    *times,
                    *(f"{r:.2f}" for r in ratios),
                ]
            )
        )
    newest = results[-1]
    return "\n".join(lines) + (
        "\n\nMilliseconds of one call, forward, bf16, median, the slowest rank counts; torch "
        f"{newest['torch']}, NCCL "
        "without NVLink multicast, random data. Speed of light: the longer "
        "one of cuBLAS's product and NCCL's collective, over ours, both graphed. Raw data, with "
        "worst cases: "
        "`benchmarks/results/tp_operators.jsonl`."
    )


def tp_host() -> str:
    """Return the table of ``benchmarks/tp_host.py``."""
    result = json.loads((RESULTS / "tp_host.json").read_text())
    names = {
        "F.linear": "`F.linear`",
        "stock": "stock",
        "ovpatch": "ovpatch",
        "fused": "with `fused`",
        "bare": "without launches",
        "over": "over `F.linear`",
    }
    names = {name: text for name, text in names.items() if name in result["rows"][0]}
    header = ["linear", "gradients", *names.values()]
    lines = [_heading(header), _row(["---"] * len(header))]
    for row in result["rows"]:
        times = [f"{row[name]:.0f}" for name in names]
        lines.append(_row([row["kind"], "with" if row["grad"] else "without", *times]))
    return "\n".join(lines) + (
        f"\n\nMicroseconds of host time for a forward, median; {result['world']} x "
        f"{result['device']}, torch "
        f"{result['torch']}, {result['date']}."
    )


def hosts() -> str:
    """Return the table of ``benchmarks/hosts.py``: a row for each layout of hosts, and number of microbatches."""
    # That module imports torch, which few tables need.
    from benchmarks.hosts import make_table

    return make_table(read_results("hosts"))


def programs() -> str:
    """Return the table of ``benchmarks/programs.py``: one row per program."""
    # That module imports torch, which other tables do not need.
    from benchmarks.programs import make_table

    results = read_results("programs")
    heading, _, rows = make_table(results).partition("\n")
    table = f"{_heading([cell.strip() for cell in heading.strip('|').split('|')])}\n{rows}"
    return table + (
        "\n\nMilliseconds of a step: the median of a round's steps, the slowest rank counts, then "
        "the median of the "
        "rounds. In brackets: the ratio to the stock run of the same round. Memory is the peak of "
        "torch's allocator "
        f"after warm-up. torch {results[-1]['torch']}, random weights and data. Raw data: "
        "`benchmarks/results/programs.jsonl`."
    )


# The rows of README.md: common programs, and one that gains nothing.
README_PROGRAMS = (
    "trainer-llama-1.2b-b4",
    "nano-774m",
    "resnet50-b32",
    "nano-124m-compiled",
    "resnet50-b256",
)


def programs_short() -> str:
    """Return the table of README.md: time and memory of :data:`README_PROGRAMS`, stock and with ovpatch."""
    # That module imports torch, which other tables do not need.
    from benchmarks.programs import find_ratio

    results = {result["program"]: result for result in read_results("programs")}
    shown = [results[name] for name in README_PROGRAMS]
    header = [
        "Program",
        "Step, stock PyTorch",
        "Step, ovpatch",
        "Peak memory, stock PyTorch",
        "Peak memory, ovpatch",
    ]
    lines = [_heading(header), _row(["---"] * len(header))]
    rounds = set()
    for result in shown:
        stock, ours = find_program_pair(result)
        rounds.add(len(ours["round_medians_ms"]))
        step = f"{ours['median_ms']:.1f} ms, **{_percent(ours['ratio'])}**"
        tuned_ratio = find_ratio(result["rounds"], "ovpatch", "best")
        if tuned_ratio is not None:
            step += f" (against best settings {_percent(tuned_ratio)})"
        memory = f"{ours['peak_gib']:.1f} GiB, **{_percent(ours['peak_gib'] / stock['peak_gib'])}**"
        best = next((row for row in result["summary"] if row["variant"] == "best"), None)
        tuned = f" (best settings {best['median_ms']:.1f})" if best else ""
        cells = [
            f"{stock['median_ms']:.1f} ms{tuned}",
            step,
            f"{stock['peak_gib']:.1f} GiB",
            memory,
        ]
        lines.append(_row([result["title"], *cells]))
    newest = shown[-1]
    return "\n".join(lines) + (
        f"\n\n{_gpus(newest)}, {newest['date']}, torch {newest['torch'].partition('+')[0]}, "
        "unmodified programs, "
        f"`ovpatch run` without settings, {min(rounds)} alternating rounds. Medians; percent: "
        "the median ratio of a round, not of the medians. Best settings: the script changed to a fused "
        "optimizer, `gradient_as_bucket_view` and `static_graph`. Memory: the peak of torch's allocator."
    )


def find_program_pair(result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of stock PyTorch and of plain ovpatch in a result of ``benchmarks/programs.py``."""
    summary = {row["variant"]: row for row in result["summary"]}
    return summary["stock"], summary["ovpatch"]


def _percent(ratio: float) -> str:
    """Return a ratio as a change, in percent and with a sign unless it rounds to 0."""
    percent = round((ratio - 1) * 100)
    return f"{percent:+d}%" if percent else "0%"


def _seen(arms: dict[str, str], results: list[dict[str, Any]]) -> dict[str, str]:
    """Return the arms that any of the runs has."""
    seen = {row["arm"] for result in results for row in result["summary"]}
    return {arm: name for arm, name in arms.items() if arm in seen}


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _heading(cells: list[str]) -> str:
    """Return the first row of a table, whose cells begin with a capital letter or with a name."""
    names = ("ovpatch", "transformers")
    return _row([cell if cell.startswith(names) else cell[:1].upper() + cell[1:] for cell in cells])


def _ms(row: dict[str, Any]) -> str:
    return f"{row['median_ms']:.1f}"


def _gpus(result: dict[str, Any]) -> str:
    """Return the number and kind of the GPUs on which a run was measured."""
    _, _, model = result["device"].rpartition("NVIDIA ")
    return f"{result['world']} {model.split()[0]}"


def _where_and_when(result: dict[str, Any]) -> str:
    """Return the number and kind of the GPUs, and the day, on which a run was measured."""
    return f"{_gpus(result)}, {result['date']}"


def name_run(result: dict[str, Any]) -> str:
    """Return the name of a run of ``ddp_step`` or ``zero_step``: the model and what is special."""
    settings = result["settings"]
    size = (
        "tiny GPT, host-bound" if settings["size"] == "tiny" else f"GPT {settings['size'].upper()}"
    )
    more = [f"{settings['accumulate']} microbatches"] if settings["accumulate"] > 1 else []
    more += ["clipped"] if settings.get("clip") else []
    more += [_COMPILED.get(settings["compile"], "torch.compile")] if settings["compile"] else []
    more += (
        ["no peer-to-peer"] if result.get("environment", {}).get("NCCL_P2P_DISABLE") == "1" else []
    )
    return ", ".join([size, *more])


TABLES = {
    "ablation": ablation,
    "ddp_step": ddp_step,
    "ddp_summary": ddp_summary,
    "hosts": hosts,
    "summary": summary,
    "zero_summary": zero_summary,
    "zero_alone": zero_alone,
    "zero_step": zero_step,
    "moe_layer": moe_layer,
    "programs": programs,
    "programs_short": programs_short,
    "tp_blocks": tp_blocks,
    "tp_host": tp_host,
    "tp_operators": tp_operators,
}


def read_results(name: str) -> list[dict[str, Any]]:
    """Return the runs in a file of ``benchmarks/results``, oldest first."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def fill(text: str) -> str:
    """Return ``text`` with every marked table made again."""
    return re.sub(
        r"(<!-- table (\w+) -->\n).*?(<!-- /table -->)",
        lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    """Rewrite or check the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [page for page in PAGES if fill(page.read_text()) != page.read_text()]
    for page in stale:
        if not check:
            page.write_text(fill(page.read_text()))
        print(
            f"{page.relative_to(ROOT)}: "
            f"{'out of date, run python -m benchmarks.tables' if check else 'written'}"
        )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
