"""The end of process groups whose pipelines keep communicators or memory. Imports no torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def wrap_destroy_process_group(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``destroy_process_group``: edges of a pipeline end before its group does."""

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        # Without the module no group has edges, and an import only to find that out would cost time.
        edges = sys.modules.get("ovpatch.overlap.pipelining.edges")
        if edges is not None:
            edges.close_edges(
                None if group is sys.modules["torch"].distributed.group.WORLD else group
            )
        original(group)

    return destroy_process_group
