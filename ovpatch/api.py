"""What training code calls: apply, applied, revert, report, over the one session of the process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ovpatch.session import worker_reports
from ovpatch.session.plan import FeatureError
from ovpatch.session.report import Report
from ovpatch.session.session import Session

__all__ = ["FeatureError", "applied", "apply", "report", "revert", "session"]

session: Final = Session()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=session.after_fork)


def apply(*features: str, options: Mapping[str, Mapping[str, Any]] | None = None, strict: bool | None = None) -> Report:
    """Turn features on, in this process.

    Call it once, near the top of the script, where every process of the job passes; objects built earlier are named in
    the report if they stay stock. Calling it again applies the difference: features that are on stay on, an option
    that is not mentioned keeps its value, and a feature whose options change is taken back and applied anew. No
    thread, no socket and no CUDA context is made, and nothing is printed.

    The environment has the last word, and off always wins: ``OVPATCH=0`` makes this call do nothing, without an error.

    Args:
        *features: Turn on only these. Without any, those that are on by default.
        options: Values by feature and option, for example ``{"ddp": {"bucket_cap_mb": 40}}``.
        strict: Whether a feature that is on and cannot run is an error, even if it was not asked for by name.

    Returns:
        What is on, what is off, and why.

    Raises:
        ovpatch.SettingsError: A name is unknown or a value cannot be parsed. Nothing has been patched.
        ovpatch.FeatureError: A feature asked for by name cannot run, or any in strict mode. The process is as before.
    """
    _import_torch()
    report = session.apply(features, options, strict)
    worker_reports.start_reporting(session.report)
    return report


@contextmanager
def applied(
    *features: str, options: Mapping[str, Mapping[str, Any]] | None = None, strict: bool | None = None
) -> Iterator[Report]:
    """Turn features on for a ``with`` block; afterwards everything is as it was before.

    Args:
        *features: As in :func:`apply`.
        options: As in :func:`apply`.
        strict: As in :func:`apply`.

    Yields:
        The report.
    """
    _import_torch()
    with session.applied(features, options, strict) as report:
        worker_reports.start_reporting(session.report)
        yield report


def revert(*features: str) -> Report:
    """Turn features off and give live objects their stock behaviour back.

    What requires one of them is turned off as well. A function that somebody else patched on top of ours is not
    overwritten: our layer below it falls silent, and the report says *shadowed*.

    Args:
        *features: Turn off only these. Without any, all.

    Returns:
        What is still on.

    Raises:
        ovpatch.SettingsError: A name is unknown.
        ovpatch.FeatureError: A feature cannot be turned off now, for example in the middle of a backward; it stays on.
            Or all are off, and a plugin's hook could not be removed.
    """
    return session.revert(features)


def report() -> Report:
    """Return what is on, what is off and why, with counters, at this moment."""
    return session.report()


def _import_torch() -> None:
    """Import torch before the session is entered: with ``OVPATCH_AUTO=1`` that import itself calls :func:`apply`."""
    import torch  # noqa: F401
