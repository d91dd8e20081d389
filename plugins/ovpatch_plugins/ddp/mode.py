"""What kind of backward a step has."""

from __future__ import annotations

from dataclasses import dataclass

from ovpatch_plugins.ddp.config import ReducerConfig


@dataclass(frozen=True)
class Mode:
    """Worked out once per step, because every hook would ask.

    Attributes:
        searches: Which parameters it leaves out is found when it begins.
        tracks_usage: Ranks tell each other which parameters they used.
        launches_early: Buckets are reduced while it computes.
    """

    searches: bool
    tracks_usage: bool
    launches_early: bool

    @staticmethod
    def of(config: ReducerConfig, *, learns: bool, static: bool, late: bool, first: bool) -> Mode:
        """Return the mode of a backward.

        Args:
            config: How to reduce.
            learns: Whether it shows how often a static graph uses each parameter; nothing is reduced before its end.
            static: Whether the graph was declared static.
            late: Whether the forward's first backward has been reduced before.
            first: Whether it is the model's first.
        """
        searches = late or (config.find_unused_parameters and not static)
        early = config.overlap and not (learns or late or (searches and first))
        return Mode(searches=searches, tracks_usage=searches or learns, launches_early=early)
