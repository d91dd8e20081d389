"""What a rank works on in a step, in the place of the parameters: its slices of them, or the whole ones that it owns.

[Note: stand-ins] The parameters themselves stay as they are, for other threads may look at them at any time: a
checkpoint that is saved in the background must not find slices. An optimizer is given other parameters for the time of
a step, whose memory is a part of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap.tensors.shard import shard_view
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads

StandIns = Mapping[int, Parameter]


@dataclass
class ShardedParam:
    """A parameter that is updated by parts, or by one rank for all.

    Attributes:
        param: The parameter.
        shards: Where its gradient's parts are.
        index: Its index there.
        owner: The group rank that updates all of it, where one does.
    """

    param: torch.nn.Parameter
    shards: ShardedGrads
    index: int
    owner: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether this rank updates all of it."""
        return self.owner == self.shards.group.rank()

    @property
    def delivered(self) -> bool:
        """Whether the last backward left parts of the gradient on the ranks."""
        return self.shards.was_delivered(self.index)


@contextmanager
def standing_in(optimizer: Optimizer, parts: Sequence[ShardedParam]) -> Iterator[StandIns]:
    """Give an optimizer stand-ins for the parameters that are updated by parts.

    Yields:
        The stand-ins, by ``id`` of the parameter.
    """
    with torch.inference_mode(False), torch.no_grad():
        stand_ins = {id(part.param): _stand_in(part) for part in parts}
    with _replacing(optimizer, stand_ins):
        yield stand_ins


@contextmanager
def leaving_out(optimizer: Optimizer, parts: Sequence[ShardedParam]) -> Iterator[StandIns]:
    """Show an optimizer none of the parameters that other ranks own; groups stay, though they may be empty.

    Yields:
        Those that this rank owns, which stand in for themselves: what users' classes know of them stays true.
    """
    with _replacing(optimizer, {id(part.param): None for part in parts if not part.is_own}):
        yield {id(part.param): part.param for part in parts if part.is_own}


@contextmanager
def _replacing(optimizer: Optimizer, by: Mapping[int, Parameter | None]) -> Iterator[None]:
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in groups:
            shown = [by.get(id(param), param) for param in params]
            group["params"] = [param for param in shown if param is not None]
        yield
    finally:
        for group, params in groups:
            group["params"] = params


def _stand_in(part: ShardedParam) -> Parameter:
    elements = shard_view(part.param.data, part.shards.slice(part.index))
    with torch._C.DisableTorchFunctionSubclass():
        # What Parameter() does, without asking whether there is something to settle.
        stand_in: Parameter = torch.Tensor._make_subclass(Parameter, elements, part.param.requires_grad)
    stand_in.grad = part.shards.own_part(part.index)
    return stand_in
