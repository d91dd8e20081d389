"""The public functions for training code, which act on the session of the process: apply, applied, revert, report."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ovpatch.session import worker_exit
from ovpatch.session.feature_plan import FeatureError
from ovpatch.session.session import Session
from ovpatch.session.session_report import Report, explain_old_torch

__all__ = ["FeatureError", "applied", "apply", "report", "revert", "session"]

# A process has one session, because torch has one set of functions to patch.
session: Final = Session()
os.register_at_fork(after_in_child=session.after_fork)


def apply(
    *features: str,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    strict: bool | None = None,
) -> Report:
    """Turn features on, in this process.

    Call it once, near the top of the script, in every process of the job. The report names objects that were built
    earlier and fall back to torch. Another call applies the difference: features that are on stay on, an option that
    is not mentioned keeps its value, and a feature whose options change is reverted and applied again. The call
    creates no thread, socket or CUDA context, and prints nothing.

    A torch that is older than 2.11 gives a warning.

    The environment overrides the call, and off always wins: ``OVPATCH=0`` makes this call do nothing, without an error.

    Args:
        *features: Features to turn on. Default: the features that are on by default.
        options: Values by feature and option, for example ``{"ddp": {"bucket_cap_mb": 40}}``.
        strict: Whether a feature that cannot run is an error, even if it was not requested by name.

    Returns:
        The report: the state of each feature, with the reason.

    Raises:
        ovpatch.SettingsError: A name is unknown or a value cannot be parsed. Nothing has been patched.
        ovpatch.FeatureError: A feature that was requested by name, or any feature in strict mode, cannot run. Nothing
            has been changed.
    """
    _import_torch()
    report = session.apply(features, options, strict)
    _warn_of_old_torch(report)
    worker_exit.start_reporting(session.report)
    return report


@contextmanager
def applied(
    *features: str,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    strict: bool | None = None,
) -> Iterator[Report]:
    """Turn features on for a ``with`` block, and restore the previous state at its end.

    Args:
        *features: As in :func:`apply`.
        options: As in :func:`apply`.
        strict: As in :func:`apply`.

    Yields:
        The report.
    """
    _import_torch()
    with session.applied(features, options, strict) as report:
        _warn_of_old_torch(report)
        worker_exit.start_reporting(session.report)
        yield report


def revert(*features: str) -> Report:
    """Turn features off and restore the stock behaviour of live objects.

    Features that require one of them are turned off as well. If another library has patched a function afterwards,
    its patch stays: our wrapper below it calls the original, and the report has the state *shadowed*.

    Args:
        *features: Features to turn off. Default: all.

    Returns:
        The report.

    Raises:
        ovpatch.SettingsError: A name is unknown.
        ovpatch.FeatureError: A feature cannot be turned off now, for example during a backward, and stays on. Or all
            features are off, but a plugin's hook could not be removed.
    """
    return session.revert(features)


def report() -> Report:
    """Return the present state of each feature, with the reason and the counters."""
    return session.report()


def _import_torch() -> None:
    """Import torch outside the session's lock: with ``OVPATCH_AUTO=1`` the import itself calls :func:`apply`."""
    import torch  # noqa: F401


def _warn_of_old_torch(report: Report) -> None:
    """Warn if features are on under a torch that is not supported."""
    if any(feature.state != "disabled" for feature in report.features) and (
        problem := explain_old_torch()
    ):
        warnings.warn(problem, stacklevel=3)
