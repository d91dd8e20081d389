"""An optimizer whose parameters are updated by slices, of which each rank has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from ovpatch.overlap.grad_shards import GradShards
from ovpatch_plugins.dist_optimizer.gathers import Gathers
from ovpatch_plugins.dist_optimizer.main_params import MainSlicesOfModel, forget_mains, round_state
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
        quiet: The class is known to ask for nothing in its step that other ranks have.
        in_fp32: Update parameters of half precision in fp32.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gathers: Gathers,
        stand_down: Callable[[Optimizer, str], None],
        *,
        quiet: bool = False,
        in_fp32: bool = False,
    ) -> None:
        state = ShardedState(optimizer, MainSlicesOfModel if in_fp32 else SlicesOfModel)
        super().__init__(optimizer, gathers, state, stand_down)
        self._quiet, self._in_fp32 = quiet, in_fp32

    def _divides(self, shards: GradShards, index: int) -> bool:
        return shards.want(index)

    def _update(self, parts: list[Part], inner: Callable[[], Any], optimizer: Optimizer) -> Any:
        self._state.take_over(parts)
        for shards in self._to_meet(parts) if self._quiet else ():
            shards.come()  # [Note: ahead]
        return super()._update(parts, inner, optimizer)

    @contextmanager
    def _divided(self, optimizer: Optimizer, parts: Sequence[Part]) -> Iterator[None]:
        with standing_in(optimizer, parts) as stand_ins, self._state.written(parts, stand_ins):
            yield

    def release(self) -> None:
        """Make everything whole again, and ask for no parts of gradients any more."""
        optimizer = self._optimizer()
        if optimizer is None:
            return super().release()
        if self._in_fp32:
            forget_mains(optimizer)
        super().release()
        if self._in_fp32:
            round_state(optimizer)
        for part in self.parts(optimizer):
            part.shards.want(part.index, wanted=False)
