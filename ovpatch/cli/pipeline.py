"""``ovpatch pipeline --what-if``: what orders of a pipeline cost, before it is run.

The answer comes from the plugin of feature ``pipeline``, by its hook ``ovpatch_plan``. The table goes to stdout,
progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ovpatch.exit_codes import ExitCode
from ovpatch.session.plugins import PluginError, Plugins, find_plugins
from ovpatch.session.report import wants_colour
from ovpatch.settings.settings import SettingsError, suggest_name

_FEATURE: Final = "pipeline"
_PLACEMENTS: Final = ("straight", "loop", "vee")
_MOST_ACTIONS: Final = 100_000
# F, B and W of transformer blocks on one H200, and a transfer of their activations over NVLink.
_COSTS: Final = {"f": ("forward", 1.0), "b": ("backward", 1.22), "w": ("weight", 1.04), "c": ("send", 0.02)}
_WORDS: Final = ("p", "m", "memory", "placement", *_COSTS)
_COLOURS: Final = {"F": "#7fa8d9", "B": "#e3a857", "BW": "#e3a857", "W": "#7fb5a8"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch pipeline``."""
    add = parser.add_argument
    add(
        "--what-if",
        metavar="p=8,m=32,…",
        required=True,
        help="p ranks and m microbatches; memory=1x/1.5x/2x of 1F1B's, placement=straight/loop/vee; f, b, w: times of "
        "forward, input gradient and weight gradient of a rank's share of the model; c: time of a transfer",
    )
    add("--json", action="store_true", help="print JSON, with the best order's actions and their times")
    add("--picture", type=Path, metavar="FILE", help="draw the best order to a PNG, SVG or PDF file; needs matplotlib")


def main(arguments: argparse.Namespace) -> int:
    """Ask the plugin, and print what it answers."""
    question = parse_question(arguments.what_if)
    if arguments.picture is not None:
        _check_picture(arguments.picture)
    answer = dict(_ask(question))
    picture = answer.pop("picture", [])
    if arguments.json:
        print(json.dumps({"question": question, **answer}, indent=1))
    else:
        answer["picture"] = picture
        print(format_answer(question, answer, colour=wants_colour(sys.stdout)))
    if answer["best"] is None:
        print("ovpatch pipeline: no order fits. Raise memory, as in memory=1x", file=sys.stderr)
        return ExitCode.PROBLEM
    if arguments.picture is not None:
        _draw(answer, arguments.picture)
        print(f"ovpatch pipeline: written: {arguments.picture}", file=sys.stderr)
    return ExitCode.OK


def parse_question(text: str) -> dict[str, Any]:
    """Parse ``p=8,m=32,memory=1.5x,f=1,b=1.2,w=1,c=0.02``.

    Raises:
        ovpatch.SettingsError: A word is unknown or missing, or its value cannot be.
    """
    words: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in _WORDS:
            raise SettingsError(
                f"--what-if: {name!r} is unknown{suggest_name(name, _WORDS)}. Write words of {', '.join(_WORDS)}."
            )
        words[name] = value.strip()
    question: dict[str, Any] = {"ranks": _whole(words, "p"), "microbatches": _whole(words, "m")}
    memories = _parts(words, "memory", "1x/1.5x/2x")
    question["memory"] = [_number("memory", part.removesuffix("x"), 0.01) for part in memories]
    question["placements"] = _parts(words, "placement", "straight/vee")
    for placement in question["placements"]:
        if placement not in _PLACEMENTS:
            raise SettingsError(
                f"--what-if: placement={placement} is unknown{suggest_name(placement, _PLACEMENTS)}. "
                f"Write some of {'/'.join(_PLACEMENTS)}."
            )
    for word, (name, default) in _COSTS.items():
        question[name] = _number(word, words.get(word, str(default)), 0.0)
    if question["forward"] + question["backward"] + question["weight"] <= 0:
        raise SettingsError("--what-if: f, b and w are all 0. Give times above 0.")
    if question["ranks"] * question["microbatches"] * 3 > _MOST_ACTIONS:
        raise SettingsError(
            f"--what-if: p times m is above {_MOST_ACTIONS // 3}. Give a smaller m: bubbles fall as 1/m."
        )
    return question


def _parts(words: Mapping[str, str], name: str, default: str) -> list[str]:
    return list(dict.fromkeys(filter(None, words.get(name, default).split("/"))))


def _whole(words: Mapping[str, str], name: str) -> int:
    text = words.get(name, "")
    if not text.isdecimal() or int(text) < 1:
        raise SettingsError(f"--what-if: {name}={text} is no whole number above 0. Write for example p=8,m=32.")
    return int(text)


def _number(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise SettingsError(
            f"--what-if: {name}={text} is no number of at least {least:g}. Write for example {name}=1.5."
        )
    return value


def _ask(question: Mapping[str, Any]) -> Mapping[str, Any]:
    found = find_plugins().get(_FEATURE)
    if found is None:
        raise SettingsError("the plugin of feature pipeline is not installed. Install ovpatch anew.")
    shown = sys.stderr.isatty()

    def progress(done: float) -> None:
        if shown:
            print(f"\rovpatch pipeline: solving, {100 * done:3.0f}%", end="\n" if done >= 1 else "", file=sys.stderr)

    plugins = Plugins()
    try:
        plugins.load_feature(found)
        answer = plugins.call_hook(_FEATURE, "ovpatch_plan", question=question, progress=progress)
    except PluginError as error:
        raise SettingsError(f"feature pipeline: {error}. `ovpatch doctor` tells more.") from error
    if answer is None:
        raise SettingsError(f"{found.origin} answers no questions. Install ovpatch anew.")
    checked: Mapping[str, Any] = answer
    return checked


def format_answer(question: Mapping[str, Any], answer: Mapping[str, Any], *, colour: bool) -> str:
    """Return the table, the bounds and the picture of the best order."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.ASCII if not colour else box.ROUNDED)
    for heading in ("order", "placement", "memory", "step", "bubble", ""):
        table.add_column(heading, justify="left" if heading in ("order", "placement", "") else "right", no_wrap=True)
    for index, row in enumerate(answer["rows"]):
        limit = "" if row["limit"] is None else f" for {row['limit']:g}x"
        remark = "best" if index == answer["best"] else "" if row["fits"] else "too large"
        table.add_row(
            f"{row['order']}{limit}",
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
        f"{question['ranks']} ranks, {question['microbatches']} microbatches, F {question['forward']:g}, "
        f"B {question['backward']:g}, W {question['weight']:g}, transfer {question['send']:g}",
        capture.get().rstrip(),
        "memory: of the fullest rank, in units of 1F1B's; step: in units of m(F+B+W), steps chain without a barrier",
        "no order is below " + ", ".join(f"{bound:.3f} ({placement})" for placement, bound in answer["bounds"].items()),
    ]
    if answer["best"] is not None:
        best = answer["rows"][answer["best"]]
        lines += ["", f"{best['order']}, {best['placement']} (a dot: the rank waits):"]
        lines += [f"  rank {rank}  {letters}" for rank, letters in enumerate(answer["picture"])]
    settable = [row for row in answer["rows"] if row["fits"] and row["setting"]]
    if settable:
        row = min(settable, key=lambda row: float(row["step"]))
        setting = " ".join(f"{name}={value}" for name, value in row["setting"].items())
        lines += ["", f"to run {row['order']} where each rank has one stage: {setting}"]
    return "\n".join(lines)


# --- picture ---


def _check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise SettingsError(f"--picture {path}: the name ends with none of .png, .svg, .pdf. Give it such an ending.")
    if find_spec("matplotlib") is None:
        raise SettingsError(
            "the picture needs matplotlib, which is not installed. "
            "Install it with: pip install 'ovpatch[plot]' — or leave out --picture."
        )


def _draw(answer: Mapping[str, Any], path: Path) -> None:
    """Draw a row per rank, F, B and W by colour; later stages of a rank are darker."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timeline: Sequence[Sequence[Sequence[Any]]] = answer["timeline"]
    figure = Figure(figsize=(12, 0.5 * len(timeline) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for rank, line in enumerate(timeline):
        stages = sorted({action[1] for action in line})
        for kind, stage, _, start, end in line:
            alpha = 1.0 - 0.5 * stages.index(stage) / len(stages)
            colour = _COLOURS[kind]
            axes.barh(rank, end - start, 0.85, start, color=colour, alpha=alpha, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(timeline)), [f"rank {rank}" for rank in range(len(timeline))])
    axes.invert_yaxis()
    axes.set_xlabel("time in units of m(F+B+W)")
    best = answer["rows"][answer["best"]]
    numbers = f"bubble {100 * best['bubble']:.1f}%, memory {best['memory']:.2f}x"
    axes.set_title(f"{best['order']}, {best['placement']}: {numbers}")
    axes.legend(handles=[Patch(color=_COLOURS[kind], label=kind) for kind in "FBW"], loc="upper right", ncols=3)
    figure.savefig(path, dpi=130)
