"""Choosing between ways to compute the same by measuring them, with one outcome on all ranks of a group.

A feature describes its candidates as a :class:`Tuning`; :func:`autotuner_for` returns the group's :class:`Autotuner`,
which measures once per key, and keeps the times in ``OVPATCH_CACHE_DIR``.
"""

from __future__ import annotations

from ovpatch.overlap.autotune.autotuner import Autotuner, TuningBudget, autotuner_for, report_lines
from ovpatch.overlap.autotune.measure import Candidates, Choice, Tuning

__all__ = ["Autotuner", "Candidates", "Choice", "Tuning", "TuningBudget", "autotuner_for", "report_lines"]
