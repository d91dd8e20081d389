"""Autotuning: candidates that compute the same are measured, and all ranks of a group take the same one.

A feature describes its candidates as a :class:`Tuning`; :func:`autotuner_for` returns the group's :class:`Autotuner`,
which measures once per key and keeps the times in ``OVPATCH_CACHE_DIR``.
"""

from __future__ import annotations

from ovpatch.overlap.autotune.autotuner import (
    Autotuner,
    Candidates,
    Choice,
    Tuning,
    TuningBudget,
    autotuner_for,
    report_lines,
)

__all__ = ["Autotuner", "Candidates", "Choice", "Tuning", "TuningBudget", "autotuner_for", "report_lines"]
