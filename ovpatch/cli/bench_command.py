"""``ovpatch bench``: runs a training command stock and patched in turn, and compares step times."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from ovpatch._version import __version__
from ovpatch.cli import command_line
from ovpatch.exit_codes import ExitCode
from ovpatch.insight.bench import analysis, rounds, scaling
from ovpatch.insight.bench.analysis import BenchFigures, UserFigures, compute_figures
from ovpatch.insight.bench.rounds import (
    PATCHED,
    STOCK,
    BenchPlan,
    BenchRuns,
    FailedError,
    StoppedError,
)
from ovpatch.insight.nodes import Leader
from ovpatch.insight.variants import Outcome
from ovpatch.session import worker_reports
from ovpatch.session.report_table import wants_colour
from ovpatch.settings.settings import SettingsError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch bench``."""
    add = parser.add_argument
    number = command_line.make_int_parser
    add(
        "--steps",
        type=number(rounds.MIN_STEPS),
        default=30,
        metavar="N",
        help="steps to measure in each run (30)",
    )
    add(
        "--warmup",
        type=number(rounds.MIN_WARMUP),
        default=10,
        metavar="M",
        help="steps of warm-up before them (10)",
    )
    add(
        "--rounds",
        type=number(1),
        default=3,
        metavar="R",
        help="pairs of a stock and a patched run (3)",
    )
    command_line.add_features(parser)
    add(
        "--leave-one-out",
        action=argparse.BooleanOptionalAction,
        help="also run without each feature, to measure its part (default: if several did something)",
    )
    add(
        "--against",
        choices=sorted(rounds.PEERS),
        help="also run your script stock under FSDP2, by the switches of HF Trainer and accelerate",
    )
    figure = command_line.parse_positive
    add(
        "--samples-per-step",
        type=figure,
        metavar="X",
        help="samples of a step, over all ranks (default: found out)",
    )
    add(
        "--tokens-per-step",
        type=figure,
        metavar="X",
        help="tokens of a step, over all ranks (default: found out)",
    )
    add(
        "--peak-tflops",
        type=figure,
        metavar="X",
        help="peak TFLOP/s of one device, for MFU (default: for bf16, by the device's name)",
    )
    add(
        "--what-if",
        metavar="hosts=16,…",
        help="also predict the step on hosts with gpus=8 each, whose link=200Gbit each; local=300GB: the rate between "
        "GPUs of a host, if it was not measured",
    )
    add(
        "--figure",
        type=Path,
        metavar="FILE",
        help="draw the prediction to a PNG, SVG or PDF file; needs matplotlib",
    )
    command_line.add_timeout(parser)
    command_line.add_nodes(parser)
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="keep logs and raw files there; it must be empty or new",
    )
    add("--json", type=Path, metavar="FILE", help="write everything that was found as JSON")
    command_line.add_command(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run all rounds and print the result."""
    question = _parse_prediction(arguments)
    command = command_line.check_comparison(arguments, "bench")
    names = ("steps", "warmup", "rounds", "features", "leave_one_out", "against")

    def lead(nodes: Leader | None) -> int:
        with command_line.open_folder(arguments.out) as out:
            given = {name: getattr(arguments, name) for name in (*names, "timeout")}
            must_see_all_ranks = arguments.nodes is None
            plan = BenchPlan(
                command, out, nodes=nodes, must_see_all_ranks=must_see_all_ranks, **given
            )
            return _measure(plan, arguments, question)

    return command_line.lead_or_follow(arguments, "bench", command, (*names, "what_if"), lead)


def _parse_prediction(arguments: argparse.Namespace) -> scaling.Question | None:
    """Return the question of ``--what-if``, before anything runs."""
    if arguments.what_if is None:
        if arguments.figure is not None:
            raise SettingsError("--figure draws a prediction. Give --what-if, too.")
        return None
    if arguments.figure is not None:
        scaling.check_figure(arguments.figure)
        command_line.check_file(arguments.figure, "--figure")
    return scaling.parse_question(arguments.what_if)


def _measure(
    plan: BenchPlan, arguments: argparse.Namespace, question: scaling.Question | None
) -> int:
    facts = None
    try:
        progress = rounds.Progress(plan)
        with nullcontext() if progress.bar.disable else progress.bar:
            if question is not None:
                facts = rounds.measure_facts(plan, progress)
                # A rate that is missing is an error before all rounds run.
                scaling.resolve(question, scaling.merge_layout(facts))
            runs = rounds.run_rounds(plan, progress)
    except (StoppedError, KeyboardInterrupt):
        return _fail("interrupted; nothing was concluded", ExitCode.INTERRUPTED)
    except FailedError as error:
        return _explain(error, arguments.out)
    found = compute_figures(
        runs,
        UserFigures(arguments.samples_per_step, arguments.tokens_per_step, arguments.peak_tflops),
    )
    answer = None
    if question is not None and facts is not None:
        measured = scaling.merge_facts(facts, _list_steps(runs))
        answer = scaling.answer_question(question, measured)
    if arguments.json is not None:
        predicted = {} if answer is None else {"what_if": scaling.answer_to_json(answer)}
        data = _collect_data(plan, runs, found)
        worker_reports.save_json(arguments.json, {**data, **predicted})
    colour = wants_colour(sys.stdout)
    line = f"ovpatch bench: {analysis.format_verdict(runs, found)}"
    if plan.nodes is not None:
        plan.nodes.verdict = analysis.format_verdict(runs, found)
    print(f"\033[1m{line}\033[0m" if colour else line)
    print(analysis.format_report(plan, runs, found, colour=colour))
    if answer is not None:
        print(f"\n{scaling.format_answer(answer, colour=colour)}")
        if arguments.figure is not None:
            scaling.draw_answer(answer, arguments.figure)
            command_line.say("bench", f"written: {arguments.figure}")
    if arguments.json is not None:
        command_line.say("bench", f"everything that was measured is in {arguments.json}")
    return ExitCode.OK


def _list_steps(runs: BenchRuns) -> dict[str, float]:
    """Return the median step of each arm that the prediction knows."""
    kinds = {STOCK: STOCK}
    if "dist_optimizer" in runs.exercised:
        kinds |= {"dist_optimizer": PATCHED, "ddp": "without-dist_optimizer"}
    elif "ddp" in runs.exercised:
        kinds["ddp"] = PATCHED
    return {
        arm: median([time for run in runs.list_measured(kind) for time in run.times])
        for arm, kind in kinds.items()
        if kind in runs.kinds
    }


def _collect_data(plan: BenchPlan, runs: BenchRuns, found: BenchFigures) -> dict[str, Any]:
    return {
        "ovpatch": __version__,
        "command": list(plan.command),
        "settings": {
            name: getattr(plan, name)
            for name in ("steps", "warmup", "rounds", "features", "timeout", "against")
        },
        "verdict": analysis.format_verdict(runs, found),
        "exercised": runs.exercised,
        **asdict(found),
        "runs": runs.to_json(),
        "report": runs.report,
        "notes": runs.notes,
    }


def _explain(error: FailedError, out: Path | None) -> ExitCode:
    """Print the failed run and its failure, and return the exit code."""
    outcome = error.outcome
    is_ours = error.kind not in (STOCK, *rounds.PEERS) and not outcome.waits_in_tool
    code = ExitCode.PROBLEM if is_ours else ExitCode.UNDECIDED
    # The command succeeded, but took too few steps.
    if not outcome.code:
        return _fail(f"{str(error).rstrip('.')}.", code)
    for pid, stacks in outcome.stacks.items() if outcome.timed_out else ():
        print(f"--- stacks of process {pid}\n{stacks.rstrip()}", file=sys.stderr)
    print(f"--- how it ended\n{outcome.read_failure()}\n---", file=sys.stderr)
    where = f"The whole log: {outcome.log}" if out is not None else "Keep full logs with --out DIR."
    return _fail(
        " ".join(
            filter(None, (f"{str(error).rstrip('.')}.", _explain_blame(error.kind, outcome), where))
        ),
        code,
    )


def _explain_blame(kind: str, outcome: Outcome) -> str:
    if outcome.waits_in_tool:
        return ""
    if kind == STOCK:
        return "This is the stock run, so ovpatch is not the cause."
    if kind in rounds.PEERS:
        return "This is the run of the peer, so ovpatch is not the cause."
    return (
        "The stock run did not."
        if kind == PATCHED
        else "The stock run and the run with all features did not."
    )


def _fail(message: str, code: ExitCode) -> ExitCode:
    command_line.say("bench", message)
    return code
