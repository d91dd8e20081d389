"""A parameter whose update is sharded over the ranks, and the swap of such parameters in an optimizer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads

_CONTIGUOUS: Final = (1,)
_VERSION: Final = operator.attrgetter("_version")


class ShardedParam:
    """A parameter of which each rank updates a shard, or which one rank updates for all.

    Args:
        param: The parameter.
        shards: The sharded gradients of its model.
        index: Its index there.

    Attributes:
        param: The parameter.
        shards: The sharded gradients of its model.
        index: Its index there.
        owner: The group rank that updates all of it, where one does.
        shard: This rank's elements.
        memory: Where this rank's elements are updated; None if that is the parameter's own memory.
        shard_param: What the optimizer is given for it; between steps it has none of the parameter's memory.
    """

    # Each step goes through thousands of them.
    __slots__ = (
        "begin", "grad", "index", "memory", "nothing", "owner", "param", "reduced", "shard", "shard_param", "shards",
        "size", "strides",
    )  # fmt: skip

    def __init__(self, param: Parameter, shards: ShardedGrads, index: int) -> None:
        self.param, self.shards, self.index = param, shards, index
        self.owner: int | None = None
        self.shard = shards.local_range(index)
        self.begin, self.size, self.strides = self.shard.begin, (self.shard.numel,), param.stride()
        with outside_modes():
            self.nothing = param.new_empty(0)
            # What Parameter() does, which pending_param.py wraps. It keeps the parameter's version counter, whatever
            # its memory: autograd refuses to go back through a graph whose tensors were written to by shards.
            self.shard_param: Parameter = torch.Tensor._make_subclass(Parameter, param, True)
        self.set_memory(None)
        self.reduced = self.grad = self.nothing  # the shard of the gradient, and what the optimizer is given for it

    def set_memory(self, memory: Tensor | None) -> None:
        """Have this rank's elements updated in other memory, ``[shard.numel]``; see :attr:`memory`."""
        self.memory = memory
        with outside_modes():
            self.shard_param.data = self.nothing if memory is None else memory


def attach_shards(params: Sequence[ShardedParam]) -> list[Parameter]:
    """Return this rank's shards of parameters, as parameters with gradients, until :func:`detach_shards`.

    They are the same objects in every step, over the memory that the parameters have now, or over other memory, which
    has their content by then. The parameters themselves do not change: another thread, which saves a checkpoint, must
    not find shards.

    Raises:
        RuntimeError: A parameter's elements lie in another order than when its model was wrapped.
    """
    owners = tuple([one.param for one in params if one.memory is None])
    versions = tuple(read_versions(owners)) if owners else ()
    with outside_modes():
        try:
            for one in params:
                param, shard_param = one.param, one.shard_param
                if param.stride() != one.strides:
                    one.shards.check_layout(one.index)
                dtype = param.dtype
                if one.memory is None:
                    if dtype is not shard_param.dtype:
                        one.nothing = shard_param.data = param.new_empty(0)
                    begin = param.storage_offset() + one.begin
                    shard_param.set_(param.untyped_storage(), begin, one.size, _CONTIGUOUS)
                grad = param.grad
                if type(grad) is LazyTensor and grad.__dict__.get("source") is one.shards:
                    reduced, shard = one.shards.reduced[one.index], one.grad
                    # A tensor object of its own, since an optimizer may give it other memory.
                    if one.reduced is not reduced or shard.data_ptr() != reduced.data_ptr():
                        one.reduced, one.grad = reduced, reduced[: one.shard.numel]
                        shard = one.grad
                elif grad is not None:
                    shard = one.shards.local_shard(one.index, grad)
                else:
                    continue
                shard_param.grad = shard if shard.dtype is dtype else shard.to(dtype)
        finally:  # set_() counts as a write
            if owners:
                torch._C._autograd._unsafe_set_version_counter(owners, versions)
    return [one.shard_param for one in params]


def detach_shards(params: Sequence[ShardedParam]) -> None:
    """Take memory and gradients from the shards again.

    A parameter is pending only while no other tensor shares its memory; and where a script moves a parameter elsewhere,
    its memory is freed.
    """
    for one in params:
        if one.memory is None:
            one.shard_param.data = one.nothing
        one.shard_param.grad = None


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
            group["params"] = [one for one in map(by.get, map(id, params), params) if one is not None]
        yield
    finally:
        for group, params in groups:
            group["params"] = params


def read_versions(params: Iterable[Parameter]) -> list[int]:
    """Return how often autograd knows parameters to have been written to."""
    with outside_modes():
        return list(map(_VERSION, params))


def raise_versions(params: Sequence[Parameter], writes: Sequence[int]) -> None:
    """Raise parameters' versions, by which autograd refuses to go back through a graph whose tensors were written to.

    Args:
        params: The parameters.
        writes: How often each was written to where autograd did not see it.
    """
    versions = list(map(operator.add, read_versions(params), writes))
    with outside_modes():
        torch._C._autograd._unsafe_set_version_counter(tuple(params), tuple(versions))
