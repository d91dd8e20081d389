"""Whether the feature is on in this process, and how it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ovpatch_plugins.tp_linear.call import How
from ovpatch_plugins.tp_linear.options import DEFAULT
from ovpatch_plugins.tp_linear.schedules import named


@dataclass
class State:
    """What taken-over modules look up at every call.

    Attributes:
        on: Off, they do what stock does; copies of them, of which nobody knows, included.
        how: How operators are computed.
        shares: Whether gathers for several linears are taken over.
        compiles: Whether compiled graphs get our operators.
        terms: All options, which must be the same on all ranks.
    """

    on: bool = False
    how: How = field(default_factory=lambda: How(named(DEFAULT, 4)))
    shares: bool = True
    compiles: bool = False
    terms: dict[str, Any] = field(default_factory=dict)

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Compute as the feature's options say."""
        schedule = named(options["schedule"], options["chunks"], anew=options["regather"])
        self.how = How(schedule, options["gradient_accumulation_fusion"], options["regather"])
        self.terms = dict(options)
        self.shares, self.compiles, self.on = options["shared_gather"], options["compiled"], True


STATE = State()
