"""Limits of waits that do not depend on how busy the machine is.

A test waits for something that comes, or for something that hangs. A limit ends the second wait. On a
machine with ten busy processes for each core, all takes ten times as long, and so does the limit.
"""

from __future__ import annotations

import os
from typing import Final

# A shorter limit is meant to expire: the test is about something that hangs.
SHORTEST_S: Final = 30.0
# Beyond this, a wait for something that hangs would outlast the run of all tests.
_MOST_SHARES: Final = 20.0


def scale(seconds: float) -> float:
    """Return a limit in seconds for this machine, from the limit for a quiet machine."""
    return seconds if seconds < SHORTEST_S else seconds * _count_shares()


def lengthen(seconds: float) -> float:
    """Return a limit that is meant to expire, but not in the steps before, as does the timeout of a group."""
    return seconds * _count_shares()


def _count_shares() -> float:
    last_minute, last_five, _ = os.getloadavg()
    shares = max(last_minute, last_five) / (os.cpu_count() or 1)
    return min(max(shares, 1.0), _MOST_SHARES)
