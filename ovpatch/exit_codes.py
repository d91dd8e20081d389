"""Exit codes of the command line, the same in every subcommand.

An error that ends a subcommand has its code in the class attribute ``exit_code``.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of subcommands, which are the rows of the table in ``docs/settings.md`` and in each ``--help``.

    ``run`` and ``timeline`` return the exit code of the command if that fails.
    """

    OK = 0, "no problem; verify: the same results; bench: it was measured, faster or not"
    PROBLEM = (
        1,
        (
            "a problem; verify: different results; run: no process was patched, or a patched run "
            "failed; list, doctor: something is wrong on this machine"
        ),
    )
    USAGE = 2, "a mistake in the command line or in a setting; nothing was run"
    UNDECIDED = 3, "no conclusion: the script fails under stock PyTorch too, or made no step"
    NOT_EXECUTABLE = 126, "the command cannot be executed"
    NOT_FOUND = 127, "the command does not exist"
    INTERRUPTED = 130, "interrupted by Ctrl-C or a signal"

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """Return the member of a value."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


def get_exit_code(error: BaseException) -> ExitCode | None:
    """Return the exit code of an error; None for a defect of ovpatch, which shows its traceback."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, ExitCode):
        return code
    # A full disk, for example, is no defect of ovpatch.
    return ExitCode.UNDECIDED if isinstance(error, OSError) else None
