"""The command line: ``ovpatch list | doctor | run | verify | bench | timeline``, also as ``python -m ovpatch``.

Exit codes: 0 fine, 1 a problem was found, 2 usage or settings. ``run`` returns the exit code of its command;
``verify`` 1 where patched is different, 2 also where nothing can be told.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from ovpatch._version import __version__
from ovpatch.settings.settings import SettingsError


@dataclass(frozen=True)
class _Command:
    """One subcommand; its module is imported when it is used.

    Attributes:
        module: Name within ``ovpatch.commands``; has ``configure(parser)`` and the function.
        function: Takes the parsed arguments, returns the exit code.
        help: One line.
    """

    module: str
    function: str
    help: str


COMMANDS: Final = {
    "list": _Command("doctor", "main_list", "which features there are, and their state on this machine"),
    "doctor": _Command("doctor", "main_doctor", "versions, plugins, settings, and what is wrong"),
    "run": _Command("run", "main", "run a training command with every worker patched"),
    "verify": _Command("verify", "main", "whether a command computes the same patched as stock"),
    "bench": _Command("bench", "main", "whether a command is faster patched than stock, and by how much"),
    "timeline": _Command("timeline", "main", "record steps of a command and show which communication is exposed"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: Command line without the program; ``sys.argv`` by default.

    Returns:
        The exit code.
    """
    line = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in line if not word.startswith("-")), "")
    parsed = _parser(chosen).parse_args(line)
    command = COMMANDS[parsed.subcommand]
    try:
        code = int(getattr(import_module(f"ovpatch.commands.{command.module}"), command.function)(parsed))
        sys.stdout.flush()
        return code
    except SettingsError as error:
        print(f"ovpatch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while no command runs that would have been told
        print("ovpatch: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `ovpatch list | head`; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser; only the chosen subcommand's arguments are declared, so only its module is imported."""
    parser = argparse.ArgumentParser(prog="ovpatch", description="The same program, with its communication hidden.")
    parser.add_argument("--version", action="version", version=f"ovpatch {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="command")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            import_module(f"ovpatch.commands.{command.module}").configure(subparser)
    return parser
