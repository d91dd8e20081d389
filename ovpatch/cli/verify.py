"""``ovpatch verify``: whether a command computes the same stock and patched.

Both runs use the same seeds and are compared step by step on every rank (:mod:`ovpatch.insight.verify`). The result
goes to stdout, progress to stderr, and the output of each run into a log.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ovpatch.cli import command_line
from ovpatch.session import workers

if TYPE_CHECKING:
    from ovpatch.insight.verify.verify import Verification

Progress = Callable[[str, int], None]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch verify``."""
    add = parser.add_argument
    number = command_line.make_int_parser(1)
    add("--steps", metavar="N", type=number, default=5, help="end each run after N optimizer steps (5)")
    command_line.add_features(parser)
    add("--noise", action="store_true", help="measure stock's own noise even where every bit is equal")
    add("--deterministic", action="store_true", help="use deterministic algorithms where torch has them")
    command_line.add_timeout(parser)
    add("--json", metavar="FILE", type=Path, help="write the outcome as JSON")
    add("--out", metavar="DIR", type=Path, help="keep logs and records of all runs there; it must be empty or new")
    command_line.add_command(parser)


def main(arguments: argparse.Namespace) -> int:
    """Verify the command; return the code of the verdict."""
    arguments.command = command_line.check_comparison(arguments, "verify")
    from ovpatch.insight.verify.verify import Request, verify

    with command_line.open_folder(arguments.out) as folder:
        names = ("steps", "features", "noise", "deterministic", "timeout")
        request = Request(arguments.command, folder, **{name: getattr(arguments, name) for name in names})
        with _progress(arguments.steps) as progress:
            result = verify(request, progress)
        return _conclude(result, arguments)


@contextmanager
def _progress(steps: int) -> Iterator[Progress]:
    """Show the progress on stderr: a status line on a terminal, one line per run elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    seen: set[str] = set()

    def tell(variant: str, step: int) -> None:
        if not console.is_terminal and variant not in seen:
            console.print(f"ovpatch verify: running {variant}", highlight=False)
        seen.add(variant)
        status.update(f"{variant}: step {step} of {steps}")

    with console.status("starting") as status:
        yield tell


def _conclude(result: Verification, arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from ovpatch.insight.verify.verify import print_result

    console = Console(width=shutil.get_terminal_size((120, 24)).columns)
    print_result(result, console)
    if arguments.json is not None:
        asked = {"command": list(arguments.command), "requested_steps": arguments.steps}
        workers.save_json(arguments.json, asked | result.to_json())
    if arguments.out is not None:
        console.print(Text(f"kept        logs and records are in {arguments.out}"), soft_wrap=True)
    elif result.verdict.code:
        console.print("more        --out DIR keeps the logs and records of all runs; --json FILE has every number")
    return result.verdict.code
