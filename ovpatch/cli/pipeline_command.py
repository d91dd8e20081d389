"""``ovpatch pipeline``: the costs of the orders of a pipeline.

``--what-if`` needs given costs only, before the pipeline runs: the planner simulates and solves. A command runs with
``schedule=auto``, which measures and races all orders. Tables go to stdout, progress and remarks to stderr, and the
output of the command into a log.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovpatch.cli import command_line
from ovpatch.exit_codes import ExitCode
from ovpatch.insight import pipeline_plan
from ovpatch.planner import what_if
from ovpatch.session.report_table import wants_colour
from ovpatch.settings import settings
from ovpatch.settings.settings import SettingsError, suggest_name

if TYPE_CHECKING:
    from ovpatch.insight import variants

_FEATURE: Final = "pipeline"
_BIDIRECTIONAL: Final = "bidirectional"
# The placements, each with the condition under which its orders can run.
_PLACEMENTS: Final = {
    "straight": "each rank has one stage",
    "loop": "ScheduleInterleaved1F1B has two stages a rank",
    "vee": "ScheduleZBVZeroBubble has two stages a rank",
    _BIDIRECTIONAL: f"cut(placement={_BIDIRECTIONAL!r}) made the schedule",
}
# The number of forwards, backwards and weight gradients that a simulation takes some seconds for.
_MAX_ACTIONS: Final = 100_000
# The costs by the word of --what-if: name and default. The defaults are F, B and W of transformer blocks on one H200,
# and a transfer of their activations over NVLink, in units of F.
_COSTS: Final = {
    "f": ("forward", 1.0),
    "b": ("backward", 1.22),
    "w": ("weight", 1.04),
    "c": ("send", 0.02),
}
_WORDS: Final = ("p", "m", "memory", "placement", *_COSTS)
_SWITCH: Final = "OVPATCH_PIPELINE"
_ERROR_NODES: Final = (
    "the command is one of {}, and this subcommand measures the ranks of one node. Give a command "
    "of one node; or set OVPATCH_AUTO=1, OVPATCH_PIPELINE=1 and OVPATCH_PIPELINE_SCHEDULE=auto on "
    "all nodes and start it without this subcommand, and ranks race the orders while they train."
)
_VARIANT: Final = "measured"
_say: Final = partial(command_line.say, _FEATURE)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch pipeline``."""
    add = parser.add_argument
    add(
        "--what-if",
        metavar="p=8,m=32,…",
        help="p ranks and m microbatches; memory=1x/1.5x/2x of 1F1B's, placement=straight/loop/vee/bidirectional; f, "
        "b, w: times of forward, input gradient and weight gradient of a rank's share of the "
        "model; c: of a transfer",
    )
    add(
        "--json",
        action="store_true",
        help="print JSON, with the best order's actions and their times",
    )
    add(
        "--figure",
        "--picture",
        dest="picture",
        type=Path,
        metavar="FILE",
        help="draw the best order to a PNG, SVG or PDF file; needs matplotlib",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="with a command: keep its log and raw files there; it must be empty or new",
    )
    command_line.add_timeout(parser)
    command_line.add_command(parser)


def main(arguments: argparse.Namespace) -> int:
    """Compare the orders for given costs, or measure a command."""
    command = command_line.get_command(arguments.command)
    if (arguments.what_if is None) == (not command):
        raise SettingsError(
            "give either --what-if or a command. Write for example: ovpatch pipeline --what-if "
            "p=8,m=32, or: ovpatch pipeline -- torchrun train.py"
        )
    if arguments.picture is not None:
        _check_picture(arguments.picture)
    return _measure(arguments, command) if command else _compare_orders(arguments)


# --- a command ---


def _measure(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Run a command until all orders have been raced, and print the result."""
    from ovpatch.insight import variants

    variants.check_autoload()
    environment = command_line.make_environment(None)
    command_line.check_settings(environment)
    if (
        settings.read_environment(environment).selection.kind == "nothing"
        or environment.get(_SWITCH) == "0"
    ):
        raise SettingsError("OVPATCH, or OVPATCH_PIPELINE, turns the feature off. Unset it.")
    command_line.warn_of_near_misses(environment, _FEATURE)
    command_line.check_folder(arguments.out)
    _check_nodes(command)
    command_line.check_command(command)
    with command_line.open_folder(arguments.out) as out:
        plan_file = (out / _VARIANT / pipeline_plan.PLAN).absolute()
        variables = {
            _SWITCH: "1",
            f"{_SWITCH}_SCHEDULE": "auto",
            f"{_SWITCH}_PLAN_FILE": str(plan_file),
        }
        variant = variants.Variant(_VARIANT, None, {"plan": str(plan_file)}, variables)
        _say(f"measuring: {' '.join(command)}")
        outcome = variants.run_variant(
            variant,
            command,
            pipeline_plan.__name__,
            out,
            timeout=arguments.timeout,
            progress=_show_step,
        )
        if not plan_file.exists():
            return _explain_missing_plan(outcome)
        plan = json.loads(plan_file.read_text(encoding="utf-8"))
    if arguments.json:
        print(json.dumps(plan, indent=1))
    else:
        print(pipeline_plan.format_plan(plan, " ".join(command), colour=wants_colour(sys.stdout)))
    if arguments.picture is not None:
        best = plan["rows"][plan["best"]]
        timeline = [
            [[*action[:3], *(1000 * time for time in action[3:])] for action in line]
            for line in plan["timeline"]
        ]
        title = (
            f"{plan['class']}, {best['order']}: {1000 * best['predicted']:.1f} ms a step, simulated"
        )
        pipeline_plan.draw_order(timeline, title, "ms", arguments.picture)
        _say(f"written: {arguments.picture}")
    return ExitCode.OK


def _check_nodes(command: Sequence[str]) -> None:
    """Raise an error if the command trains on several nodes: no other node would end with the races here."""
    from ovpatch.insight import node_place

    try:
        place = node_place.find_place(command)
    except SettingsError:
        # The nodes of such a job cannot know where to meet, but there are several.
        raise SettingsError(_ERROR_NODES.format("several nodes")) from None
    if place is not None:
        raise SettingsError(_ERROR_NODES.format(f"{place.count} nodes"))


def _show_step(step: int) -> None:
    if sys.stderr.isatty():
        print(f"\rovpatch pipeline: step {step}", end="", file=sys.stderr, flush=True)


def _explain_missing_plan(outcome: variants.Outcome) -> int:
    """Print the reason for a missing plan, and return the exit code."""
    for failure in outcome.failures:
        _say(f"process {failure['pid']} (rank {failure['rank']}): {failure['error']}")
    for remark in outcome.remarks.get(_FEATURE, ()):
        _say(remark)
    if outcome.interrupted:
        _say("interrupted; nothing was measured")
        return ExitCode.INTERRUPTED
    if outcome.timed_out or outcome.code:
        end = outcome.describe_exit()
        failure_text = (
            "no step for too long, so it was ended" if outcome.timed_out else f"it ended with {end}"
        )
        _say(f"{failure_text}. How it ended:\n{outcome.read_failure()}")
        return outcome.code or ExitCode.PROBLEM
    if outcome.report is None:
        _say("no process of the command loaded ovpatch. Run `ovpatch doctor` for the reason.")
        return ExitCode.PROBLEM
    if not outcome.counters.get(_FEATURE, {}).get("steps"):
        _say(
            "the feature ran no schedule of torch.distributed.pipelining. Give a command that "
            "trains with one; the remarks above give the reason for each that fell back to torch."
        )
    else:
        _say(
            "the command ended before all orders were measured. Let it run for more steps, some 80."
        )
    return ExitCode.UNDECIDED


# --- given costs ---


def _compare_orders(arguments: argparse.Namespace) -> int:
    """Print the costs of all orders for the costs of ``--what-if``."""
    question = parse_question(arguments.what_if)
    result = dict(_plan_orders(question))
    # The picture in letters repeats the timeline, so JSON goes without it.
    picture = result.pop("picture", [])
    if arguments.json:
        print(json.dumps({"question": question, **result}, indent=1))
    else:
        result["picture"] = picture
        print(format_answer(question, result, colour=wants_colour(sys.stdout)))
    if result["best"] is None:
        print("ovpatch pipeline: no order fits. Raise memory, as in memory=1x", file=sys.stderr)
        return ExitCode.PROBLEM
    if arguments.picture is not None:
        best = result["rows"][result["best"]]
        numbers = f"bubble {100 * best['bubble']:.1f}%, memory {best['memory']:.2f}x"
        title = f"{_format_order(best)}, {best['placement']}: {numbers}"
        pipeline_plan.draw_order(result["timeline"], title, "units of m(F+B+W)", arguments.picture)
        _say(f"written: {arguments.picture}")
    return ExitCode.OK


def parse_question(text: str) -> dict[str, Any]:
    """Parse ``p=8,m=32,memory=1.5x,f=1,b=1.2,w=1,c=0.02``.

    Raises:
        SettingsError: A word is unknown, or its value cannot be parsed or is impossible.
    """
    words: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in _WORDS:
            raise SettingsError(
                f"--what-if: {name!r} is unknown{suggest_name(name, _WORDS)}. Write words of "
                f"{', '.join(_WORDS)}."
            )
        words[name] = value.strip()
    question: dict[str, Any] = {
        "ranks": _parse_count(words, "p"),
        "microbatches": _parse_count(words, "m"),
    }
    memories = _split_choices(words, "memory", "1x/1.5x/2x")
    question["memory"] = [
        _parse_number("memory", part.removesuffix("x"), 0.01) for part in memories
    ]
    question["placements"] = _split_choices(words, "placement", "straight/vee")
    for placement in question["placements"]:
        if placement not in _PLACEMENTS:
            raise SettingsError(
                f"--what-if: placement={placement} is "
                f"unknown{suggest_name(placement, _PLACEMENTS)}. "
                f"Write one or more of {'/'.join(_PLACEMENTS)}."
            )
    odd = [
        f"{word}={question[name]}"
        for word, name in (("p", "ranks"), ("m", "microbatches"))
        if question[name] % 2
    ]
    if odd and _BIDIRECTIONAL in question["placements"]:
        raise SettingsError(
            f"--what-if: {' and '.join(odd)} cannot be split into the two directions of "
            f"placement={_BIDIRECTIONAL}. Give even numbers, or leave that placement out."
        )
    for word, (name, default) in _COSTS.items():
        question[name] = _parse_number(word, words.get(word, str(default)), 0.0)
    if question["forward"] + question["backward"] + question["weight"] <= 0:
        raise SettingsError("--what-if: f, b and w are all 0. Give times above 0.")
    if question["ranks"] * question["microbatches"] * 3 > _MAX_ACTIONS:
        raise SettingsError(
            f"--what-if: p times m is above {_MAX_ACTIONS // 3}. Give a smaller m: bubbles fall "
            "as 1/m."
        )
    return question


def _split_choices(words: Mapping[str, str], name: str, default: str) -> list[str]:
    return list(dict.fromkeys(filter(None, words.get(name, default).split("/"))))


def _parse_count(words: Mapping[str, str], name: str) -> int:
    text = words.get(name, "")
    if not text.isdecimal() or int(text) < 1:
        raise SettingsError(
            f"--what-if: {name}={text} is no integer above 0. Write for example p=8,m=32."
        )
    return int(text)


def _parse_number(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise SettingsError(
            f"--what-if: {name}={text} is no number of at least {least:g}. Write for example "
            f"{name}=1.5."
        )
    return value


def _plan_orders(question: Mapping[str, Any]) -> Mapping[str, Any]:
    is_terminal = sys.stderr.isatty()

    def show_progress(done: float) -> None:
        if is_terminal:
            print(
                f"\rovpatch pipeline: solving, {100 * done:3.0f}%",
                end="\n" if done >= 1 else "",
                file=sys.stderr,
            )

    return what_if.plan(question, show_progress)


def format_answer(question: Mapping[str, Any], answer: Mapping[str, Any], *, colour: bool) -> str:
    """Return the table, the bounds and the picture of the best order."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.ASCII if not colour else box.ROUNDED)
    for heading in ("order", "placement", "memory", "step", "bubble", ""):
        table.add_column(
            heading,
            justify="left" if heading in ("order", "placement", "") else "right",
            no_wrap=True,
        )
    for index, row in enumerate(answer["rows"]):
        remark = "best" if index == answer["best"] else "" if row["fits"] else "too large"
        table.add_row(
            _format_order(row),
            row["placement"],
            f"{row['memory']:.2f}x",
            f"{row['step']:.3f}",
            f"{100 * row['bubble']:.1f}%",
            remark,
            style="bold" if colour and remark == "best" else None,
        )
    console = Console(width=120, color_system="standard" if colour else None, force_terminal=colour)
    with console.capture() as capture:
        console.print(table)
    lines = [
        f"{question['ranks']} ranks, {question['microbatches']} microbatches, F "
        f"{question['forward']:g}, "
        f"B {question['backward']:g}, W {question['weight']:g}, transfer {question['send']:g}",
        capture.get().rstrip(),
        "memory: of the fullest rank, in units of 1F1B's; step: in units of m(F+B+W), steps chain "
        "without a barrier",
    ]
    bounds = ", ".join(
        f"{bound:.3f} ({placement})" for placement, bound in answer["bounds"].items()
    )
    lines += [f"no order is below {bounds}"] if bounds else []
    if answer["best"] is not None:
        best = answer["rows"][answer["best"]]
        lines += ["", f"{_format_order(best)}, {best['placement']} (a dot: the rank waits):"]
        lines += [f"  rank {rank}  {letters}" for rank, letters in enumerate(answer["picture"])]
        lines += ["", *_list_settings(answer["rows"], best)]
    return "\n".join(lines)


def _list_settings(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> list[str]:
    """Return the settings for the best order, and for the best order of each remaining placement."""
    if not best["setting"]:
        where = _PLACEMENTS[best["placement"]]
        return [f"{_format_order(best)} is the fastest order: leave the feature off where {where}"]
    shortest: dict[str, Mapping[str, Any]] = {best["placement"]: best}
    for row in sorted(rows, key=lambda row: (float(row["step"]), float(row["memory"]))):
        if row["fits"]:
            shortest.setdefault(row["placement"], row)
    lines = []
    for placement, row in shortest.items():
        setting = " ".join(f"{variable}={value}" for variable, value in row["setting"].items())
        lines.append(
            f"to run {_format_order(row)} where {_PLACEMENTS[placement]}: "
            f"{setting or 'leave the feature off'}"
        )
    return lines


def _format_order(row: Mapping[str, Any]) -> str:
    order = str(row["order"])
    return order if row["limit"] is None else f"{order} for {row['limit']:g}x"


# --- picture ---


def _check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise SettingsError(
            f"--figure {path}: the name ends with none of .png, .svg, .pdf. Give it such an ending."
        )
    if find_spec("matplotlib") is None:
        raise SettingsError(
            "the picture needs matplotlib, which is not installed. "
            "Install it with: pip install 'ovpatch[plot]' — or leave out --figure."
        )
