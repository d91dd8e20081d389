"""Choosing between ways to compute the same by measuring them, alike on all ranks of a group.

[Note: chosen alike] Ranks that compute in different ways issue different collectives, and hang. So every number from
which is chosen is one that all ranks have: the first rank's, read from a file, or the slowest's, measured. Before the
ranks measure, or read, they compare by the group's store what they want to know: a rank that is about to compute
something else, or does not come, is named in an error.

[Note: when to measure] To measure is a collective of its own. It is done where an operator is first called with shapes
that are new to the group, since its forward needs all ranks there anyhow. It is not done in a backward, which one rank
may run alone or in another order; under CUDA graph capture, where nothing can be waited for; nor by a compiler's
tracing. There a fixed arm is taken, and the next call asks again.

[Note: arms that fail] A kernel that a compiler refuses must not end a training that could do without it. An arm that
fails in its first call is left out, but for the baseline, if it fails on all ranks, which they tell each other by the
store. If others do not come there, they are in the middle of the arm, and nothing could bring them back: then the error
is raised, as it would be had the arm been taken.

[Note: a thread of its own] The operator may be called under modes that change, count or keep what is computed: a
checkpoint's, autocast, inference mode, a profiler's, a default device. All of these belong to a thread. So the arms run
in a new thread, which has none of them, on tensors made for it from a generator of its own; the caller waits. What they
took of the device's memory is given back.
"""

from __future__ import annotations

from ovpatch.overlap.choosing.budget import Budget
from ovpatch.overlap.choosing.chooser import Chooser, chooser_of
from ovpatch.overlap.choosing.race import Arms, Choice, Race
from ovpatch.overlap.choosing.records import remarks

__all__ = ["Arms", "Budget", "Choice", "Chooser", "Race", "chooser_of", "remarks"]
