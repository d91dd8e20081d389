"""The one helper that names what ovpatch does, in profiles and in logs."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch


def label(feature: str, phase: str, name: str = "") -> str:
    """Return ``ovpatch::<feature>::<phase> (<name>)``.

    Args:
        feature: Name of the feature.
        phase: What is being done, a verb or the name of a collective.
        name: What it is done to, a fully qualified name where there is one.
    """
    return f"ovpatch::{feature}::{phase} ({name})" if name else f"ovpatch::{feature}::{phase}"


_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


def span(text: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows ``text``, made by :func:`label`, as a range in torch's profiler.

    Without a profiler it is nothing: an idle ``record_function`` costs more than launching a collective.
    """
    return torch.autograd.profiler.record_function(text) if torch.autograd._profiler_enabled() else _NOTHING
