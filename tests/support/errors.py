"""The error that a call ends with, as a rank can send it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the text of the RuntimeError that a call raises, "no error" if it raises none."""
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return "no error"
