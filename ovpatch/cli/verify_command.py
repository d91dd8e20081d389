"""``ovpatch verify``: compares the values that a command computes stock and patched.

Both runs use the same seeds and are compared step by step on every rank
(:mod:`ovpatch.insight.verify`). The result goes to stdout, progress to stderr, and the output of
each run into a log.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ovpatch.cli import command_line
from ovpatch.session import worker_reports

if TYPE_CHECKING:
    from ovpatch.insight.nodes import Leader
    from ovpatch.insight.verify.verification import Verification

Progress = Callable[[str, int], None]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch verify``."""
    add = parser.add_argument
    number = command_line.make_int_parser(1)
    add("--steps", metavar="N", type=number, default=5, help="end each run after N steps (5)")
    command_line.add_features(parser)
    add("--noise", action="store_true", help="measure noise even if every bit is equal")
    add("--deterministic", action="store_true", help="use torch's deterministic algorithms")
    command_line.add_timeout(parser)
    command_line.add_nodes(parser)
    add("--json", metavar="FILE", type=Path, help="write the result as JSON")
    add(
        "--out",
        metavar="DIR",
        type=Path,
        help="keep logs and records of all runs there; it must be empty or new",
    )
    command_line.add_command(parser)


def main(arguments: argparse.Namespace) -> int:
    """Verify the command; return the code of the verdict."""
    arguments.command = command_line.check_comparison(arguments, "verify")
    names = ("steps", "features", "noise", "deterministic")
    return command_line.lead_or_follow(
        arguments, "verify", arguments.command, names, partial(_verify, arguments)
    )


def _verify(arguments: argparse.Namespace, nodes: Leader | None) -> int:
    from ovpatch.insight.verify.verification import Request, verify

    with command_line.open_folder(arguments.out) as folder:
        names = ("steps", "features", "noise", "deterministic", "timeout")
        options = {name: getattr(arguments, name) for name in names}
        must_see_all_ranks = arguments.nodes is None
        request = Request(
            arguments.command, folder, nodes=nodes, must_see_all_ranks=must_see_all_ranks, **options
        )
        with _show_progress(arguments.steps) as progress:
            result = verify(request, progress)
        if nodes is not None:
            nodes.verdict = result.headline
        return _conclude(result, arguments)


@contextmanager
def _show_progress(steps: int) -> Iterator[Progress]:
    """Show progress on stderr: a status line on a terminal, one line per run elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    runs: list[str] = []

    def show(variant: str, step: int) -> None:
        if variant not in runs:
            runs.append(variant)
            if not console.is_terminal:
                line = f"ovpatch verify: {describe_run(len(runs), variant)}"
                console.print(line, highlight=False, soft_wrap=True)
        status.update(f"{describe_run(len(runs), variant)}: step {step} of {steps}")

    with console.status("starting") as status:
        yield show


def describe_run(number: int, variant: str) -> str:
    """Return the line about a run: its number, its name, and the reason for it."""
    if number == 1:
        return f"run 1 of 2, {variant} (if values differ, further runs follow)"
    if number == 2:
        return f"run 2 of 2, {variant}"
    if variant.startswith("without-"):
        return f"run {number}, {variant} (values differ: is this feature to blame?)"
    return f"run {number}, {variant} (values differ: by as much as stock PyTorch from itself?)"


def _conclude(result: Verification, arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from ovpatch.insight.verify.verify_report import print_result

    console = Console(width=shutil.get_terminal_size((120, 24)).columns)
    print_result(result, console, shlex.join(arguments.command))
    if arguments.json is not None:
        wanted = {"command": list(arguments.command), "requested_steps": arguments.steps}
        worker_reports.save_json(arguments.json, wanted | result.to_json())
        console.print(Text(f"written     {arguments.json}"), soft_wrap=True)
    if arguments.out is not None:
        console.print(Text(f"kept        logs and records are in {arguments.out}"), soft_wrap=True)
    return result.verdict.code
