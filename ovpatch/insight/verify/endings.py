"""Why a command ended, from its log: the script's own traceback, which a launcher buries under one of its own."""

from __future__ import annotations

import re
from typing import Final

_HEAD: Final = re.compile(r"^(\[rank\d+\]: ?)?Traceback \(most recent call last\):$")
_LAUNCHERS: Final = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError")
_LONGEST: Final = 24  # lines


def why(log: str, lines: int = 20) -> str:
    """Return the first traceback that is not a launcher's, shortened, or the last lines of the log if there is none.

    The first, because other ranks fail next, at a collective in which they were left alone.

    Args:
        log: What the command wrote.
        lines: How many lines to return if there is no traceback.
    """
    every = log.splitlines()
    for start, line in enumerate(every):
        if match := _HEAD.match(line):
            found = _traceback(every[start:], match[1] or "")
            if not any(name in found[-1] for name in _LAUNCHERS):
                return "\n".join(_shortened(found))
    return "\n".join(every[-lines:])


def error(log: str) -> str:
    """Return the class of the exception that :func:`why` finds, or nothing if there is none.

    Args:
        log: What the command wrote.
    """
    found = why(log).splitlines()
    match = _HEAD.match(found[0]) if found else None
    return found[-1].removeprefix(match[1] or "").partition(":")[0] if match else ""


def _traceback(lines: list[str], prefix: str) -> list[str]:
    """Return the lines of the traceback that begins here: to the first that is not indented."""
    found = [lines[0]]
    for line in lines[1:]:
        if prefix and not line.startswith(prefix.rstrip()):
            continue  # another rank's, in between
        found.append(line)
        if not line.removeprefix(prefix).startswith(" "):
            break
    return found


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LONGEST else [*lines[:5], "  …", *lines[5 - _LONGEST :]]
