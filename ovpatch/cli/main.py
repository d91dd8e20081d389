"""The command line: ``ovpatch list | doctor | run | verify | bench | timeline | pipeline``.

``python -m ovpatch`` is the same. Exit codes are those of :class:`ovpatch.exit_codes.ExitCode`.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from ovpatch._version import __version__
from ovpatch.exit_codes import ExitCode, get_exit_code
from ovpatch.settings.settings import suggest_name


@dataclass(frozen=True)
class _Command:
    """One subcommand; its module is imported when it is used."""

    module: str  # name within ``ovpatch.cli``; has both functions
    help: str  # one line
    about: str  # what it does, in sentences
    examples: tuple[str, ...]  # each as the words after ``ovpatch``
    function: str = "main"  # takes the parsed arguments, returns the exit code
    configure: str = "configure"  # declares its arguments


COMMANDS: Final = {
    "list": _Command(
        "doctor",
        "which features there are, and their state on this machine",
        "Show one line for each feature, or the options of one feature.",
        ("list", "list ddp", "list --json"),
        function="main_list",
        configure="configure_list",
    ),
    "doctor": _Command(
        "doctor",
        "versions, plugins, settings, and what is wrong",
        "Turn all features on in a process of its own, and show what was found. The last lines name each problem.",
        ("doctor", "doctor --json"),
    ),
    "run": _Command(
        "run",
        "run a training command with every worker patched",
        "Run a command with ovpatch on in each of its Python processes, and report what each feature did. The script "
        "needs no change.",
        (
            "run -- torchrun --nproc-per-node 8 train.py",
            "run --features=+dist_optimizer --report report.json -- torchrun --nproc-per-node 8 train.py",
        ),
    ),
    "verify": _Command(
        "verify",
        "whether a command computes the same patched as stock",
        "Run a command stock and patched with the same seeds, and compare losses, gradients, parameters, optimizer "
        "state and checkpoints on every rank after each step. Each run writes the files that the script writes.",
        (
            "verify -- torchrun --nproc-per-node 2 train.py",
            "verify --steps 10 --features ddp --json result.json -- torchrun --nproc-per-node 2 train.py",
        ),
    ),
    "bench": _Command(
        "bench",
        "whether a command is faster patched than stock, and by how much",
        "Run a command stock and patched in turn, and compare step times and memory. A difference is claimed only if "
        "it is larger than the noise between equal runs.",
        (
            "bench -- torchrun --nproc-per-node 8 train.py",
            "bench --rounds 5 --steps 50 -- torchrun --nproc-per-node 8 train.py",
        ),
    ),
    "timeline": _Command(
        "timeline",
        "record steps of a command and show which communication is exposed",
        "Record a few steps of a command, or read traces of torch.profiler, and show for each rank how much "
        "communication is hidden by compute. The result is a table, a picture and a trace for Perfetto.",
        (
            "timeline --compare -- torchrun --nproc-per-node 8 train.py",
            "timeline --compare stock/ patched/",
            "timeline --open trace0.json trace1.json",
        ),
    ),
    "pipeline": _Command(
        "pipeline_command",
        "what orders of a pipeline cost, by its size, costs and memory",
        "Compare the orders of a pipeline: by given costs with --what-if, or by costs measured in a run of a command.",
        (
            "pipeline --what-if p=8,m=32,memory=1x/1.5x",
            "pipeline -- torchrun --nproc-per-node 4 train.py",
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand, by default that of ``sys.argv``, and return its exit code."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in line if not word.startswith("-")), "")
    parsed = _parser(chosen).parse_args(line)
    command = COMMANDS[parsed.subcommand]
    try:
        code = int(getattr(import_module(f"ovpatch.cli.{command.module}"), command.function)(parsed))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # no command is running that would get the signal itself
        print("ovpatch: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `ovpatch list | head`; else Python reports it again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PROBLEM
    except Exception as error:  # an error without exit code is a defect of ovpatch, and is raised
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            remedy = "Install torch 2.11 or later, or use the Python that trains: python -m ovpatch."
            print(f"ovpatch {parsed.subcommand}: {sys.executable} has no torch. {remedy}", file=sys.stderr)
            return ExitCode.PROBLEM if parsed.subcommand in ("list", "doctor") else ExitCode.USAGE
        ending = get_exit_code(error)
        if ending is None:
            raise
        print(f"ovpatch {parsed.subcommand}: {error}", file=sys.stderr)
        return ending


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest option or subcommand."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; an unknown option is an error of the subcommand that it was given to."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            choices: Any = next(action.choices for action in self._actions if action.dest == "subcommand")
            parser = choices[parsed.subcommand]
            option = unknown[0].partition("=")[0]
            parser.error(f"unknown option {option}{suggest_name(option, parser._option_string_actions)}")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.dest == "subcommand" and action.choices is not None and value not in action.choices:
            known = list(action.choices)
            raise argparse.ArgumentError(
                None, f"unknown command {value!r}{suggest_name(value, known)}. Write one of {', '.join(known)}"
            )
        super()._check_value(action, value)


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser; only the chosen subcommand's arguments are declared, so only its module is imported."""
    parser = _Parser(
        prog="ovpatch",
        description="Patches PyTorch training so that communication hides behind compute: same results, less memory, "
        "faster steps.",
        epilog=_epilog(
            "verify -- torchrun --nproc-per-node 2 train.py", "run -- torchrun --nproc-per-node 8 train.py", "list"
        ),
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ovpatch {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="command")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=command.about,
            epilog=_epilog(*command.examples),
            formatter_class=_HelpFormatter,
        )
        if name == chosen:
            getattr(import_module(f"ovpatch.cli.{command.module}"), command.configure)(subparser)
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of an epilog: examples stay whole, and meanings are wrapped in their column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        lines = []
        for line in text.splitlines():
            wraps = line[2:3].isdigit()
            lines += textwrap.wrap(line, width, subsequent_indent=" " * 7) if wraps else [line]
        return "\n".join(lines)


def _epilog(*examples: str) -> str:
    """Return the examples, and the exit codes, which are the same in every subcommand."""
    lines = ["examples:", *(f"  ovpatch {example}" for example in examples), "", "exit codes:"]
    lines += [f"  {code.value:<4} {code.meaning}" for code in ExitCode]
    return "\n".join([*lines, "  run and timeline return the command's own exit code if that fails"])
