"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("expected a number of elements, 0 or more")
    return int(text)


OPTIONS: Final = (
    Option(
        "overlap_param_gather",
        True,
        "Gather updated parameters while the next forward already computes; false: inside step().",
        aliases=("overlap_param_sync",),
    ),
    Option(
        "min_param_numel",
        16384,
        "Parameters with fewer elements are updated whole on every rank: a launch for each would cost more than it saves.",
        parse=_count,
    ),
    Option(
        "element_wise",
        "",
        "Further optimizer classes that are element-wise and may be given slices, as module.Class,module.Class.",
    ),
)
