"""The one helper that names what ovpatch does, in profiles and in logs."""

from __future__ import annotations

import torch


def label(feature: str, phase: str, name: str = "") -> str:
    """Return ``ovpatch::<feature>::<phase> (<name>)``.

    Args:
        feature: Name of the feature.
        phase: What is being done, a verb or the name of a collective.
        name: What it is done to, a fully qualified name where there is one.
    """
    return f"ovpatch::{feature}::{phase} ({name})" if name else f"ovpatch::{feature}::{phase}"


def span(text: str) -> torch.autograd.profiler.record_function:
    """Return a context manager that shows ``text``, made by :func:`label`, as a range in torch's profiler."""
    return torch.autograd.profiler.record_function(text)
