"""An optimizer whose parameters are updated by slices, of which each rank has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from ovpatch.overlap import grad_shards
from ovpatch_plugins.dist_optimizer.gathers import Gathers
from ovpatch_plugins.dist_optimizer.parts import Part, standing_in
from ovpatch_plugins.dist_optimizer.slice_state import SlicesOfModel
from ovpatch_plugins.dist_optimizer.state import ShardedState
from ovpatch_plugins.dist_optimizer.step import ShardedOptimizer


class SlicedOptimizer(ShardedOptimizer):
    """What the feature knows of one element-wise optimizer.

    Args:
        optimizer: The optimizer; held weakly.
        gathers: What gathers its parameters.
        stand_down: Called with the optimizer and the reason when it has to go on as stock.
    """

    def __init__(self, optimizer: Optimizer, gathers: Gathers, stand_down: Callable[[Optimizer, str], None]) -> None:
        super().__init__(optimizer, gathers, ShardedState(optimizer, SlicesOfModel), stand_down)

    def parts(self, optimizer: Optimizer) -> list[Part]:
        """Return the parameters with a gradient that are to be updated by parts, and ask for their gradients so."""
        found = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                entry = grad_shards.find(param)
                if entry is not None and entry[0].want(entry[1]) and param.grad is not None:
                    found.append(Part(param, *entry))
        return found

    @contextmanager
    def _divided(self, optimizer: Optimizer, parts: Sequence[Part]) -> Iterator[None]:
        with standing_in(optimizer, parts) as stand_ins, self._state.written(parts, stand_ins):
            yield

    def release(self) -> None:
        """Make everything whole again, and ask for no parts of gradients any more."""
        super().release()
        optimizer = self._optimizer()
        for part in self.parts(optimizer) if optimizer is not None else []:
            part.shards.want(part.index, wanted=False)
