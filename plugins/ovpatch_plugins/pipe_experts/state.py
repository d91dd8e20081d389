"""Whether the feature is on in this process, and how it computes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ovpatch_plugins.pipe_experts.how import How


class State:
    """What taken-over layers look up at every call.

    Attributes:
        on: Off, they do what stock does.
    """

    def __init__(self) -> None:
        self.on = False
        self._options: Mapping[str, Any] = {}

    def turn_on(self, options: Mapping[str, Any]) -> None:
        """Compute as the feature's options say."""
        self._options = dict(options)
        vars(self).pop("how", None)
        self.on = True

    @functools.cached_property
    def how(self) -> How:
        """How layers are computed; imported with the first layer, which a script may not have."""
        from ovpatch_plugins.pipe_experts.how import How

        return How(**self._options)


STATE = State()
