"""What the report says of the feature besides its counters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Final

from ovpatch_plugins.ddp import messages
from ovpatch_plugins.ddp.counters import COUNTERS

_log = logging.getLogger("ovpatch.ddp")

REMARKS: Final[list[str]] = []
"""Each text once, in the order in which they came."""


def remark(text: str) -> None:
    """Say something in the report and, the first time, in the log."""
    if text not in REMARKS:
        REMARKS.append(text)
        _log.warning("%s", text)


def fell_short(names: Sequence[str]) -> None:
    """Count a backward in which these parameters lacked declared marks, if there are any; say so the first time."""
    if names and not COUNTERS.shortfalls:
        remark(messages.shortfall(names))
    COUNTERS.shortfalls += bool(names)


@functools.cache
def warn_of_create_graph() -> None:
    """Say once, as stock does, that higher-order gradients are not reduced."""
    _log.warning("%s", messages.CREATE_GRAPH)
