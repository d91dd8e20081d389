"""An optimizer whose parameters are updated whole, each by one rank, its owner.

[Note: gradients stay whole] An owner needs a whole gradient, and gradients are all-reduced in buckets under backward.
Reducing each to its owner would send half as much, but in a collective of its own for each; and whoever reads one
would have to ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from ovpatch.overlap.grad_shards import GradShards
from ovpatch_plugins.dist_optimizer.counters import COUNTERS
from ovpatch_plugins.dist_optimizer.handouts import Handouts
from ovpatch_plugins.dist_optimizer.parts import Part, leaving_out
from ovpatch_plugins.dist_optimizer.state import ShardedState
from ovpatch_plugins.dist_optimizer.step import ShardedOptimizer
from ovpatch_plugins.dist_optimizer.whole_state import WholesOfModel


class WholeOptimizer(ShardedOptimizer):
    """What the feature knows of one optimizer that needs whole parameters.

    Args:
        optimizer: The optimizer; held weakly.
        handouts: What hands out its parameters.
        stand_down: Called with the optimizer and the reason when it has to go on as stock.
        steady: Whether the form of a parameter's state is known not to change once it is there.
    """

    def __init__(
        self, optimizer: Optimizer, handouts: Handouts, stand_down: Callable[[Optimizer, str], None], *, steady: bool
    ) -> None:
        self._wholes = ShardedState(optimizer, WholesOfModel)
        self._steady = steady
        super().__init__(optimizer, handouts, self._wholes, stand_down)

    def _divides(self, shards: GradShards, index: int) -> bool:
        return shards.can_be_cut(index)

    @contextmanager
    def _divided(self, optimizer: Optimizer, parts: Sequence[Part]) -> Iterator[None]:
        for ones in self._by_model(parts).values():
            owners = self._wholes.model(ones[0].shards).owners(part.index for part in ones)
            for part, owner in zip(ones, owners, strict=True):
                part.owner = owner
        with leaving_out(optimizer, parts) as own, self._wholes.written(parts, own):
            yield
        COUNTERS.params_owned += len(own)

    def _hand_on(self, optimizer: Optimizer, parts: Sequence[Part]) -> None:
        try:
            for ones in self._by_model(parts).values():
                self._wholes.model(ones[0].shards).learn(ones, optimizer.state, steady=self._steady)
        finally:  # the others wait for the collective in any case
            super()._hand_on(optimizer, parts)

    @staticmethod
    def _by_model(parts: Sequence[Part]) -> dict[int, list[Part]]:
        found: dict[int, list[Part]] = {}
        for part in parts:
            found.setdefault(id(part.shards), []).append(part)
        return found
