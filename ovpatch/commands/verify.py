"""``ovpatch verify``: whether a command computes the same stock and patched.

Both run with the same seeds and are compared step by step on every rank (:mod:`ovpatch.insight.verify`). The outcome
is written on stdout, progress on stderr; what the command writes goes to one log for each run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovpatch.jobs import launching
from ovpatch.reports import workers
from ovpatch.session.plan import FeatureError
from ovpatch.settings.settings import SettingsError

if TYPE_CHECKING:
    from ovpatch.insight.verify.verdict import Result

USAGE: Final = 2
Progress = Callable[[str, int], None]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ovpatch verify``."""
    add = parser.add_argument
    add("--steps", metavar="N", type=_positive, default=5, help="end each run after N optimizer steps (5)")
    add("--features", metavar="LIST", help="what OVPATCH would say: a,b or all or +c; --features=-c")
    add("--noise", action="store_true", help="measure stock's own noise even where every bit is equal")
    add("--deterministic", action="store_true", help="use deterministic algorithms where torch has them")
    add("--timeout", metavar="SECONDS", type=float, default=600.0, help="a run without a step for so long hangs (600)")
    add("--json", metavar="FILE", type=Path, help="write the outcome as JSON")
    add("--out", metavar="DIR", type=Path, help="keep logs and records of all runs there; it must be empty or new")
    add("command", nargs=argparse.REMAINDER, help="-- and the command, for example: torchrun train.py")


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return number


def main(arguments: argparse.Namespace) -> int:
    """Verify the command; return 0 if it computes the same, 1 if not, 2 if that cannot be told."""
    arguments.command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        _check(arguments)
        with _folder(arguments.out) as folder:
            result = _verify(arguments, folder)
            return _conclude(result, arguments)
    except (FeatureError, launching.NotStartedError) as error:
        print(f"ovpatch verify: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, say; Python's own exit code would read as "different"
        print(f"ovpatch verify: {error}", file=sys.stderr)
        return USAGE


def _check(arguments: argparse.Namespace) -> None:
    """Find every mistake that can be found before anything runs.

    Raises:
        ovpatch.SettingsError: There is no command, or a setting cannot be understood.
        ovpatch.FeatureError: A feature asked for by name cannot even be loaded.
    """
    from ovpatch.insight import arms
    from ovpatch.session.session import Session

    arms.check(arguments.command)
    already = os.environ.get("OVPATCH", "").strip()
    if arguments.features is not None and already and already != arguments.features:
        raise SettingsError(f"--features {arguments.features} and OVPATCH={already} disagree. Give one of them.")
    chosen = {} if arguments.features is None else {"OVPATCH": arguments.features}
    Session().plan(environ={**os.environ, **chosen}, ask_machine=False).check()
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise SettingsError(f"--json {arguments.json}: its directory does not exist. Create it first.")
    if arguments.json is not None and arguments.json.is_dir():
        raise SettingsError(f"--json {arguments.json} is a directory. Name a file in it.")


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is None:
        folder = Path(tempfile.mkdtemp(prefix="ovpatch-verify-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"--out {out} is not an empty directory. Name another, or empty it.")
    out.mkdir(parents=True, exist_ok=True)
    yield out


def _verify(arguments: argparse.Namespace, folder: Path) -> Result:
    from ovpatch.insight.verify.verifying import Request, verify

    request = Request(
        arguments.command,
        folder,
        steps=arguments.steps,
        features=arguments.features,
        noise=arguments.noise,
        deterministic=arguments.deterministic,
        timeout=arguments.timeout,
    )
    with _progress(arguments.steps) as progress:
        return verify(request, progress)


@contextmanager
def _progress(steps: int) -> Iterator[Progress]:
    """Show on stderr which run is at which step: a line that moves on a terminal, a line for each run elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    seen: set[str] = set()

    def tell(arm: str, step: int) -> None:
        if not console.is_terminal and arm not in seen:
            console.print(f"ovpatch verify: running {arm}", highlight=False)
        seen.add(arm)
        status.update(f"{arm}: step {step} of {steps}")

    with console.status("starting") as status:
        yield tell


def _conclude(result: Result, arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from ovpatch.insight.verify.table import show

    console = Console(width=None if sys.stdout.isatty() else 120)
    show(result, console)
    if arguments.json is not None:
        workers.write_json(arguments.json, _kept(result.to_json(), arguments))
    if arguments.out is not None:
        console.print(Text(f"kept        logs and records are in {arguments.out}"), soft_wrap=True)
    elif result.verdict.code:
        console.print("more        --out DIR keeps the logs and records of all runs; --json FILE has every number")
    return result.verdict.code


def _kept(data: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    return {"command": list(arguments.command), "requested_steps": arguments.steps, **data}
