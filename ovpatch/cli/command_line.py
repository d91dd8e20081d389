"""Arguments and early checks of the subcommands that run a command."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ovpatch.exit_codes import ExitCode, get_exit_code
from ovpatch.insight import launch
from ovpatch.settings import settings
from ovpatch.settings.settings import SettingsError

if TYPE_CHECKING:
    from ovpatch.insight.nodes import Leader
    from ovpatch.session.feature_plan import FeaturePlan


def add_features(parser: argparse.ArgumentParser) -> None:
    """Declare ``--features``."""
    parser.add_argument(
        "--features",
        metavar="LIST",
        help="which features are on, as in OVPATCH: ddp,tp_linear (only these), all, +pipeline (the defaults and this "
        "one), or --features=-ddp (the defaults without this one)",
    )


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Declare ``--timeout``, in seconds."""
    parser.add_argument(
        "--timeout",
        type=parse_positive,
        default=600.0,
        metavar="S",
        help="end a run as hung after S seconds without a step (600)",
    )


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a job of several nodes."""
    parser.add_argument(
        "--nodes",
        type=make_int_parser(1),
        metavar="N",
        help="the number of nodes, on each of which you start this command (default: by the launcher). 1: each node "
        "shows its own ranks, or those that the command starts on nodes that see --out",
    )
    parser.add_argument(
        "--meet",
        metavar="HOST:PORT",
        help="where the nodes meet (default: at node 0, one port after that of the launcher)",
    )


def lead_or_follow(
    arguments: argparse.Namespace,
    subcommand: str,
    command: Sequence[str],
    settings: Sequence[str],
    lead: Callable[[Leader | None], int],
) -> int:
    """Conclude on node 0, or on the only node; follow node 0 elsewhere. Return the exit code.

    Args:
        arguments: The arguments of the subcommand.
        subcommand: The name of the subcommand.
        command: The command of this node.
        settings: The names of the arguments that must be equal on all nodes.
        lead: Runs everything and prints the conclusion. It gets None in a job of one node.
    """
    from ovpatch.insight import node_place, nodes

    place = node_place.find_place(command, arguments.nodes, arguments.meet)
    if place is None:
        return lead(None)
    terms = {name: getattr(arguments, name) for name in settings}
    node = nodes.meet(place, subcommand, terms, arguments.timeout, partial(say, subcommand))
    if isinstance(node, nodes.Follower):
        with open_folder(None) as folder:
            verdict, code = node.follow(command, folder)
        own = nodes.name_node(node.index, node.names[node.index])
        leader = nodes.name_node(0, node.names[0])
        print(f"ovpatch {subcommand}: {own} took part; {leader} concluded: {verdict}")
        return code
    code = int(ExitCode.PROBLEM)
    try:
        code = lead(node)
    except BaseException as error:
        node.verdict = f"it ended with {str(error) or type(error).__name__}"
        code = int(get_exit_code(error) or ExitCode.INTERRUPTED)
        raise
    finally:
        node.end(node.verdict, code)
    return code


def add_command(parser: argparse.ArgumentParser) -> None:
    """Declare the command, which comes last."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="-- and the command, for example: torchrun train.py",
    )


def say(command: str, message: object) -> None:
    """Print a subcommand's message on stderr."""
    print(f"ovpatch {command}: {message}", file=sys.stderr, flush=True)


def get_command(words: Sequence[str]) -> list[str]:
    """Return the command without the two dashes before it."""
    return list(words[1:] if words[:1] == ["--"] else words)


def parse_positive(text: str) -> float:
    """Parse a finite number above 0."""
    # An exception of float() would make argparse show the name of this function.
    with suppress(ValueError):
        value = float(text)
        if 0 < value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def make_int_parser(least: int) -> Callable[[str], int]:
    """Return a parser of integers, ``least`` or more."""

    def parse(text: str) -> int:
        number = parse_integer(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is fewer than {least}")
        return number

    return parse


def parse_integer(text: str) -> int:
    """Parse an integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from None


def make_environment(features: str | None) -> dict[str, str]:
    """Return the environment of the patched command, with ``features`` as ``OVPATCH``.

    Raises:
        SettingsError: This process has another value of ``OVPATCH``.
    """
    environment = dict(os.environ)
    already = environment.get("OVPATCH", "").strip()
    if features is not None and already and already != features:
        raise SettingsError(
            f"--features {features} and OVPATCH={already} disagree. Give one of them."
        )
    if features is not None:
        environment["OVPATCH"] = features
    environment["OVPATCH_AUTO"] = "1"
    return environment


def check_command(command: Sequence[str]) -> None:
    """Check that there is a command and that it can be executed.

    Raises:
        SettingsError: There is no command.
        NotStartedError: The command does not exist or cannot be executed.
    """
    if not command:
        raise SettingsError("no command given. Write it after two dashes: -- torchrun train.py")
    launch.check_executable(command)


def check_settings(environment: Mapping[str, str], features: str | None = None) -> FeaturePlan:
    """Return the plan that an environment leads to.

    Args:
        environment: The environment of the patched command.
        features: The value of ``--features``, which the environment has as ``OVPATCH``. Default:
            the option was not given.

    Raises:
        SettingsError: A setting is wrong.
        FeatureError: A feature cannot be loaded.
    """
    from ovpatch.session.session import Session

    variable = f"OVPATCH={features}"
    try:
        plan = Session().plan(environ=environment, should_check_machine=False)
        plan.check_requests()
    except SettingsError as error:
        if features is None or not str(error).startswith(variable):
            raise
        # The user has written the option and not the variable.
        text = str(error).removeprefix(variable)
        raise SettingsError(f"--features={features}{text}") from error
    return plan


def warn_of_near_misses(environment: Mapping[str, str], command: str) -> None:
    """Warn of variables that look like misspelt ones of ovpatch."""
    for text in settings.find_near_misses(environment):
        say(command, text)


def check_comparison(arguments: argparse.Namespace, subcommand: str) -> list[str]:
    """Check settings, files and the command of ``verify`` and ``bench`` before anything runs. Return the command."""
    from ovpatch.insight import variants

    variants.check_autoload()
    environment = make_environment(arguments.features)
    plan = check_settings(environment, arguments.features)
    if plan.environment.selection.kind == "nothing":
        raise SettingsError(
            "OVPATCH turns everything off, so there is nothing to compare. Unset it."
        )
    requests = [record.request for record in plan.records.values()]
    # A feature that the environment does not turn off may be turned on by the script.
    if requests and all(request.enforced and not request.on for request in requests):
        reasons = ", ".join(dict.fromkeys(request.reason for request in requests))
        raise SettingsError(
            f"every feature is turned off ({reasons}), so there is nothing to compare. Unset one."
        )
    warn_of_near_misses(environment, subcommand)
    check_file(arguments.json, "--json")
    check_folder(arguments.out)
    command = get_command(arguments.command)
    check_command(command)
    return command


def check_file(file: Path | None, option: str) -> None:
    """Raise SettingsError if the file of an option cannot be written."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise SettingsError(f"{option} {file}: its directory does not exist. Create it first.")
    if file.is_dir():
        raise SettingsError(f"{option} {file} is a directory. Name a file in it.")
    if not os.access(folder, os.W_OK):
        raise SettingsError(f"{option} {file}: its directory is not writable. Name another file.")


def check_folder(out: Path | None) -> None:
    """Raise SettingsError unless a folder of results is new or empty."""
    if out is None:
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"--out {out} is not an empty directory. Name another, or empty it.")
    nearest = next(
        folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists()
    )
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise SettingsError(
            f"--out {out}: {nearest} is no directory that can be written. Name another."
        )


@contextmanager
def open_folder(out: Path | None) -> Iterator[Path]:
    """Yield the folder of results, or a temporary one."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="ovpatch-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)
