"""The command line: ``ovpatch list | doctor | run | report | verify | bench | timeline | pipeline``.

``python -m ovpatch`` is the same. :class:`ovpatch.exit_codes.ExitCode` has the exit codes.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, NoReturn

from ovpatch._version import __version__
from ovpatch.exit_codes import ExitCode, get_exit_code
from ovpatch.settings.settings import suggest_name

# The exit codes that a command has if it starts the command of a user.
_STARTING: Final = {
    code: code.meaning
    for code in (
        ExitCode.USAGE,
        ExitCode.NOT_EXECUTABLE,
        ExitCode.NOT_FOUND,
        ExitCode.INTERRUPTED,
    )
}
_USAGE: Final = {ExitCode.USAGE: ExitCode.USAGE.meaning}
_NO_STEP: Final = {ExitCode.UNDECIDED: ExitCode.UNDECIDED.meaning}
_MACHINE: Final = {
    ExitCode.OK: "no problem",
    ExitCode.PROBLEM: "something is wrong on this machine",
}


@dataclass(frozen=True)
class _Command:
    """One subcommand; its module is imported when it is used.

    Attributes:
        module: Name within ``ovpatch.cli``.
        help: One line.
        about: The description, in sentences.
        examples: Each as the words after ``ovpatch``.
        codes: The meaning of each exit code.
        function: Function of the module that gets the parsed arguments and returns the exit code.
        configure: Function of the module that declares the arguments.
    """

    module: str
    help: str
    about: str
    examples: tuple[str, ...]
    codes: Mapping[ExitCode, str]
    function: str = "main"
    configure: str = "configure"


COMMANDS: Final = {
    "list": _Command(
        "doctor_command",
        "the features, and why each is on or off here",
        "Show all features, or the options of one feature.",
        ("list", "list ddp", "list --json"),
        _MACHINE | _USAGE,
        function="main_list",
        configure="configure_list",
    ),
    "doctor": _Command(
        "doctor_command",
        "this machine on one screen: versions, GPUs, features, problems",
        "Turn all features on in a separate process, and show the machine, the features and each "
        "problem. Paste it into a bug report.",
        ("doctor", "doctor --full", "doctor --json"),
        _MACHINE | _USAGE,
    ),
    "run": _Command(
        "run_command",
        "run a training command with every worker patched",
        "Run a command with ovpatch on in each of its Python processes, and report the gain of "
        "each "
        "feature. The script needs no change.",
        (
            "run -- torchrun --nproc-per-node 8 train.py",
            "run --features=+dist_optimizer --report report.json -- torchrun --nproc-per-node 8 "
            "train.py",
        ),
        {
            ExitCode.OK: "the command succeeded, patched",
            ExitCode.PROBLEM: "no process was patched, or a process could not be patched",
            **_STARTING,
        },
    ),
    "report": _Command(
        "report_command",
        "show the reports of run, merged over nodes",
        "Merge the files that `ovpatch run --report FILE` wrote on each node of a job, and show "
        "the "
        "gain of each feature.",
        ("report node0.json node1.json", "report --full report.json"),
        {ExitCode.OK: "the reports were shown", **_USAGE},
    ),
    "verify": _Command(
        "verify_command",
        "whether a command computes the same stock and patched",
        "Run a command stock and patched with the same seeds, and compare losses, gradients, "
        "parameters, optimizer state and checkpoints on every rank after each step. Each run "
        "writes "
        "the files that the script writes.",
        (
            "verify -- torchrun --nproc-per-node 2 train.py",
            "verify --steps 10 --features ddp --json result.json -- torchrun --nproc-per-node 2 "
            "train.py",
        ),
        {
            ExitCode.OK: "the same results",
            ExitCode.PROBLEM: "different results",
            **_NO_STEP,
            **_STARTING,
        },
    ),
    "bench": _Command(
        "bench_command",
        "whether a command is faster patched, and by how much",
        "Run a command stock and patched in turn, and compare step times and memory. A difference "
        "is claimed only if it is larger than the noise between equal runs.",
        (
            "bench -- torchrun --nproc-per-node 8 train.py",
            "bench --rounds 5 --steps 50 -- torchrun --nproc-per-node 8 train.py",
            "bench --against fsdp2 -- torchrun --nproc-per-node 8 train_hf.py",
        ),
        {
            ExitCode.OK: "it was measured, faster or not",
            ExitCode.PROBLEM: "the patched run failed",
            **_NO_STEP,
            **_STARTING,
        },
    ),
    "timeline": _Command(
        "timeline_command",
        "record steps of a command and show which communication is exposed",
        "Record a few steps of a command, or read traces of torch.profiler, and show for each rank "
        "how much communication is hidden by compute. The result is a table, a picture and a trace "
        "for Perfetto.",
        (
            "timeline --compare -- torchrun --nproc-per-node 8 train.py",
            "timeline --compare stock/ patched/",
            "timeline --open trace0.json trace1.json",
        ),
        {
            ExitCode.OK: "the timeline was written",
            ExitCode.PROBLEM: "no feature was on, or a process could not be observed",
            **_NO_STEP,
            **_STARTING,
        },
    ),
    "pipeline": _Command(
        "pipeline_command",
        "what orders of a pipeline cost, by its size, costs and memory",
        "Compare the orders of a pipeline: by given costs with --what-if, or by costs measured in "
        "a run of a command.",
        (
            "pipeline --what-if p=8,m=32,memory=1x/1.5x",
            "pipeline -- torchrun --nproc-per-node 4 train.py",
        ),
        {
            ExitCode.OK: "the orders were compared",
            ExitCode.PROBLEM: "the patched run failed",
            **_NO_STEP,
            **_STARTING,
        },
    ),
}
# The subcommands that return the exit code of the user's command if it fails.
_PASSING: Final = ("run", "timeline")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, by default the subcommand in ``sys.argv``, and return its exit code."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in line if not word.startswith("-")), "")
    parser = _make_parser(chosen)
    if not line:
        parser.print_help()
        return ExitCode.OK
    parsed = parser.parse_args(line)
    command = COMMANDS[parsed.subcommand]
    try:
        code = int(
            getattr(import_module(f"ovpatch.cli.{command.module}"), command.function)(parsed)
        )
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        # No command of the user is running, which would get the signal itself.
        print("ovpatch: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader, as in `ovpatch list | head`, has ended. Without the next line, Python would
        # report the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PROBLEM
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            remedy = (
                "Install torch 2.11 or later, or use the Python that trains: python -m ovpatch."
            )
            name = f"ovpatch {parsed.subcommand}"
            print(f"{name}: {sys.executable} has no torch. {remedy}", file=sys.stderr)
            return ExitCode.PROBLEM if parsed.subcommand in ("list", "doctor") else ExitCode.USAGE
        ending = get_exit_code(error)
        # An error without an exit code is a defect of ovpatch.
        if ending is None:
            raise
        print(f"ovpatch {parsed.subcommand}: {error}", file=sys.stderr)
        return ending


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest option or subcommand."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. An unknown option is an error of the subcommand that it was given to."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            choices: Any = next(
                action.choices for action in self._actions if action.dest == "subcommand"
            )
            parser = choices[parsed.subcommand]
            option = unknown[0].partition("=")[0]
            kind = "unknown option" if option[:1] == "-" else "unexpected word"
            parser.error(f"{kind} {option}{suggest_name(option, parser._option_string_actions)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake, and exit. A value that begins with a dash needs "="."""
        option, _, problem = message.removeprefix("argument ").partition(": ")
        if problem == "expected one argument":
            message = f"{option} needs a value. If it begins with a dash, write {option}=-…"
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if (
            action.dest == "subcommand"
            and action.choices is not None
            and value not in action.choices
        ):
            known = list(action.choices)
            raise argparse.ArgumentError(
                None,
                f"unknown command {value!r}{suggest_name(value, known)}. Write one of "
                f"{', '.join(known)}",
            )
        super()._check_value(action, value)


def _make_parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser; only the chosen subcommand declares arguments and imports its module."""
    parser = _Parser(
        prog="ovpatch",
        description="Patches PyTorch training so that communication hides under compute: same "
        "results, less memory, faster steps.",
        epilog=_write_epilog(
            (
                "verify -- torchrun --nproc-per-node 2 train.py",
                "run -- torchrun --nproc-per-node 8 train.py",
                "list",
            )
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
            epilog=_write_epilog(command.examples, command.codes, passes=name in _PASSING),
            formatter_class=_HelpFormatter,
        )
        if name == chosen:
            module = import_module(f"ovpatch.cli.{command.module}")
            getattr(module, command.configure)(subparser)
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    """A formatter that keeps the lines of an epilog, and wraps meanings in their column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        lines = []
        for line in text.splitlines():
            wraps = line[2:3].isdigit()
            lines += textwrap.wrap(line, width, subsequent_indent=" " * 7) if wraps else [line]
        return "\n".join(lines)


def _write_epilog(
    examples: Sequence[str],
    codes: Mapping[ExitCode, str] | None = None,
    *,
    passes: bool = False,
) -> str:
    """Return the examples and the exit codes; ``passes`` adds the code of the user's command."""
    lines = ["examples:", *(f"  ovpatch {example}" for example in examples)]
    if codes is not None:
        lines += ["", "exit codes:"]
        lines += [f"  {code.value:<4} {meaning}" for code, meaning in sorted(codes.items())]
    if passes:
        lines.append(
            "  The exit code of the command if that fails; torchrun ends with 1 after Ctrl-C"
        )
    return "\n".join(lines)
