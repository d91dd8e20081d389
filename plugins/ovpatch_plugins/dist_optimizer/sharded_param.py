"""A parameter whose update is divided among the ranks, and what an optimizer is given in its place during a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads


@dataclass(eq=False)
class ShardedParam:
    """A parameter of which each rank updates a shard, or which one rank updates for all.

    Attributes:
        param: The parameter.
        shards: The sharded gradients of its model.
        index: Its index there.
        owner: The group rank that updates all of it, where one does.
    """

    param: Parameter
    shards: ShardedGrads
    index: int
    owner: int | None = None

    def __post_init__(self) -> None:
        self.shard = self.shards.local_range(self.index)
        self.strides = self.param.stride()
        self.is_padded = self.shard.numel < self.shard.size


def make_shard_params(params: Sequence[ShardedParam]) -> list[Parameter]:
    """Return this rank's shards of parameters, as parameters with gradients.

    The parameters themselves do not change: another thread, which saves a checkpoint, must not find shards.

    Raises:
        RuntimeError: A parameter's elements lie in another order than when its model was wrapped.
    """
    make: Callable[[type[Parameter], Tensor, bool], Parameter] = torch.Tensor._make_subclass
    shard_params = []
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for one in params:
            param, shards = one.param, one.shards
            data, grad = param.data, param.grad
            if data.stride() != one.strides:
                shards.check_layout(one.index)
            elements = data.as_strided((one.shard.numel,), (1,), data.storage_offset() + one.shard.begin)
            # What Parameter() does, which read_hooks.py wraps.
            shard_param = make(Parameter, elements, param.requires_grad)
            if grad is not None:
                if type(grad) is LazyTensor and grad.__dict__.get("source") is shards:
                    shard = shards.reduced[one.index]
                    # A new object, since an optimizer may give it other memory.
                    shard = shard[: one.shard.numel] if one.is_padded else shard.detach()
                else:
                    shard = shards.local_shard(one.index, grad)
                shard_param.grad = shard if shard.dtype is data.dtype else shard.to(data.dtype)
            shard_params.append(shard_param)
    return shard_params


@contextmanager
def replaced_params(optimizer: Optimizer, by: Mapping[int, Parameter | None]) -> Iterator[None]:
    """Show an optimizer other parameters while the block runs.

    Args:
        optimizer: The optimizer.
        by: By ``id()`` of a parameter, the one that it is replaced by; None leaves it out. Groups stay, though they may
            be empty.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in groups:
            shown = []
            for param in params:
                other = by.get(id(param), param)
                if other is not None:
                    shown.append(other)
            group["params"] = shown
        yield
    finally:
        for group, params in groups:
            group["params"] = params
