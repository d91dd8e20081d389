"""Whether the feature is on in this process, and how it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ovpatch_plugins.pipe_experts.how import How


@dataclass
class State:
    """What taken-over layers look up at every call.

    Attributes:
        on: Off, they do what stock does.
        how: How they are computed.
    """

    on: bool = False
    how: How = field(default_factory=How)

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Compute as the feature's options say."""
        self.how = How(**options)
        self.on = True


STATE = State()
