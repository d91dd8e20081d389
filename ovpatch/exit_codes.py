"""Exit codes of the command line, the same in every subcommand.

An error that ends a subcommand has its code in the class attribute ``exit_code``.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a subcommand; the rows of the table in ``docs/settings.md``.

    ``run`` and ``timeline`` return the exit code of the command if that fails.
    """

    OK = 0, "fine; for verify: the same results; for bench: it was measured, whatever came out"
    PROBLEM = (
        1,
        (
            "a problem was found: verify found different results, a patched run failed, no process was patched, or "
            "doctor or list has something to complain about"
        ),
    )
    USAGE = 2, "a mistake in the command line or in a setting; nothing was run"
    UNDECIDED = 3, "nothing can be concluded: the script fails under stock PyTorch as well, or made no step"
    NOT_EXECUTABLE = 126, "the command exists and cannot be executed"
    NOT_FOUND = 127, "the command does not exist"
    INTERRUPTED = 130, "interrupted by Ctrl-C or a signal"

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """Return the member of a value."""
        member = int.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member


def get_exit_code(error: BaseException) -> ExitCode | None:
    """Return the exit code of an error; None for a defect of ovpatch, which shows its traceback."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, ExitCode):
        return code
    return ExitCode.UNDECIDED if isinstance(error, OSError) else None  # a full disk, say
