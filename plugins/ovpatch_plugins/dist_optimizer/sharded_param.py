"""A parameter whose update is sharded, and the swap of such parameters in an optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.data_parallel.grad_bucket import get_grad
from ovpatch.overlap.data_parallel.grad_hooks import all_trained
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.shard import view_flat
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads

_CONTIGUOUS: Final = (1,)
#: Returns the number of writes that autograd has counted for a parameter. Call it outside of modes, as
#: :func:`read_versions` does.
VERSION: Final = operator.attrgetter("_version")


class ShardedParam:
    """A parameter of which each rank updates a shard, or which one rank updates for all ranks.

    Args:
        param: The parameter.
        shards: The sharded gradients of its model.
        index: Its index in ``shards``.

    Attributes:
        param: The parameter.
        shards: The sharded gradients of its model.
        index: Its index in ``shards``.
        owner: The place of the rank that updates the full parameter; None if each rank updates a shard.
        shard: The range of this rank's elements.
        memory: The memory in which this rank's elements are updated, ``[shard.numel]``; None if
            that is the parameter's own memory.
        shard_param: The parameter that the optimizer gets instead of ``param``. Between steps it
            references none of the memory of ``param``.
    """

    # A step visits thousands of these objects, and slots are read faster than a dictionary.
    __slots__ = (
        "begin",
        "empty",
        "grad",
        "index",
        "memory",
        "owner",
        "param",
        "reduced",
        "shard",
        "shard_param",
        "shards",
        "size",
        "strides",
    )

    def __init__(self, param: Parameter, shards: ShardedGrads, index: int) -> None:
        self.param = param
        self.shards = shards
        self.index = index
        self.owner: int | None = None
        self.shard = shards.local_ranges[index]

        # - Geometry, computed once because every step needs it
        self.begin = self.shard.begin
        self.size = (self.shard.numel,)
        self.strides = param.stride()

        with outside_modes():
            # The memory of `shard_param` between steps.
            self.empty = param.new_empty(0)
            # `Parameter()` would do the same, but pending_param.py wraps it. The result shares the
            # version counter of `param`, whatever its memory. So autograd detects that a step has
            # written to a parameter that a graph has saved.
            with all_trained((param,)):
                self.shard_param: Parameter = torch.Tensor._make_subclass(Parameter, param, True)
        self.set_memory(None)

        # - The gradient of the last step
        # The reduced shard with its padding, by which a step detects that `grad` is still valid.
        self.reduced = self.empty
        # The part of `reduced` without padding, which the optimizer gets.
        self.grad = self.empty

    def set_memory(self, memory: Tensor | None) -> None:
        """Update this rank's elements in other memory; see :attr:`memory`."""
        self.memory = memory
        with outside_modes():
            self.shard_param.data = self.empty if memory is None else memory


def attach_shards(params: Sequence[ShardedParam]) -> list[Parameter]:
    """Return this rank's shards as parameters with gradients, until :func:`detach_shards`.

    Every step gets the same objects. They use the memory that the parameters have now, or
    ``memory``, to which the caller has copied the content of the parameters. The parameters
    themselves do not change, because a thread that saves a checkpoint must not find shards.

    Raises:
        RuntimeError: The elements of a parameter have another order than when its model was
            wrapped.
    """
    shared_memory_params = tuple([sharded.param for sharded in params if sharded.memory is None])
    with outside_modes():
        versions = tuple(map(VERSION, shared_memory_params))
        try:
            for sharded in params:
                param = sharded.param
                shard_param = sharded.shard_param
                if param.stride() != sharded.strides:
                    sharded.shards.check_layout(sharded.index)
                dtype = param.dtype
                if sharded.memory is None:
                    # set_() keeps the dtype of the shard, but a script may cast the parameter.
                    if dtype is not shard_param.dtype:
                        sharded.empty = param.new_empty(0)
                        shard_param.data = sharded.empty
                    begin = param.storage_offset() + sharded.begin
                    storage = param.untyped_storage()
                    shard_param.set_(storage, begin, sharded.size, _CONTIGUOUS)
                grad = param.grad
                is_lazy = type(grad) is LazyTensor
                if is_lazy and grad.__dict__.get("source") is sharded.shards:
                    reduced = sharded.shards.reduced[sharded.index]
                    shard = sharded.grad
                    # The optimizer may give other memory to the gradient that it gets, so that must
                    # be another tensor object than the one in `reduced`.
                    if sharded.reduced is not reduced or shard.data_ptr() != reduced.data_ptr():
                        sharded.reduced = reduced
                        shard = reduced[: sharded.shard.numel]
                        sharded.grad = shard
                elif grad is not None:
                    shard = sharded.shards.local_shard(sharded.index, grad)
                else:
                    continue
                shard_param.grad = shard if shard.dtype is dtype else shard.to(dtype)
        finally:
            # set_() counts as a write to the shared version counter, but nothing was written.
            if shared_memory_params:
                torch._C._autograd._unsafe_set_version_counter(shared_memory_params, versions)
    return [sharded.shard_param for sharded in params]


def detach_shards(params: Sequence[ShardedParam]) -> None:
    """Release the memory and the gradients of the shards.

    A parameter can only be pending while no other tensor shares its memory. If the script moves a
    parameter to another device, its old memory must be freed.
    """
    for sharded in params:
        if sharded.memory is None:
            sharded.shard_param.data = sharded.empty
        sharded.shard_param.grad = None


class updating_shards:
    """A block that updates sharded gradients in place, on all ranks.

    A rank may have materialized a gradient. The block changes the full gradient there, and the
    shard follows, because peers read the shard.
    """

    # A step enters it, and a generator of contextlib would cost several times as much.

    __slots__ = ("_models", "_places")

    def __init__(self, places: Sequence[tuple[ShardedGrads, int]]) -> None:
        self._places = places

    def __enter__(self) -> None:
        self._models = list(dict.fromkeys(model for model, _ in self._places))
        for model in self._models:
            model.versions.begin_update()

    def __exit__(self, *_error: object) -> None:
        with torch.no_grad():
            for model, index in self._places:
                if model.has_grad(index) and not model.is_lazy(index):
                    model.reduced_shard(index).copy_(model.local_shard(index))
        for model in self._models:
            model.versions.end_update()


class unscaling_grads(updating_shards):
    """A block with a fused step that unscales gradients.

    Its kernels write this rank's shards, so shards have a new version. The rest of full gradients follows.
    """

    __slots__ = ("_optimizer", "_params")

    def __init__(self, params: Sequence[ShardedParam], optimizer: Optimizer) -> None:
        self._params = params
        self._optimizer = optimizer
        sharded = [(param.shards, param.index) for param in params]
        super().__init__([place for place in sharded if place[0].is_sharded(place[1])])

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            _unscale_rest(self._params, self._optimizer)
        super().__exit__(*error)


@torch.no_grad()
def _unscale_rest(params: Iterable[ShardedParam], optimizer: Optimizer) -> None:
    """Unscale the elements of gradients that the kernels of a fused step have not seen."""
    values = vars(optimizer)
    scale, found_inf = values["grad_scale"], values.get("found_inf")
    if found_inf is not None:
        # The kernels change nothing then. The host does not wait for the flag.
        scale = torch.where(found_inf.bool(), torch.ones_like(scale), scale)
    for sharded in params:
        grad, dtype = get_grad(sharded.param), sharded.param.dtype
        if grad is None:
            continue
        if sharded.shards.is_lazy(sharded.index):
            shard = sharded.shards.reduced_shard(sharded.index)
            rest = [] if shard.dtype is dtype else [shard]
        elif grad.dtype is dtype and grad.stride() == sharded.strides:
            elements = view_flat(grad)
            rest = [elements[: sharded.begin], elements[sharded.begin + sharded.shard.numel :]]
        else:
            # The kernels have seen a copy.
            rest = [grad]
        for tensor in rest:
            tensor.div_(scale.to(tensor.device))


def call_with_params(
    optimizer: Optimizer,
    replacements: Mapping[int, Parameter | None],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function while parameters of an optimizer are replaced; return its result.

    This is no context manager, because a KeyboardInterrupt may end the ``__exit__`` of one before
    it has done anything.

    Args:
        optimizer: The optimizer.
        replacements: The replacement by ``id()`` of a parameter. None leaves the parameter out. The
            groups stay, even if they are empty.
        function: The function.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        try:
            for group, params in groups:
                replaced = map(replacements.get, map(id, params), params)
                group["params"] = [param for param in replaced if param is not None]
            return function(*args, **kwargs)
        finally:
            for group, params in groups:
                group["params"] = params
    finally:
        # A KeyboardInterrupt may have ended the loop above, and nothing else restores the groups.
        for group, params in groups:
            group["params"] = params


def read_versions(params: Iterable[Parameter]) -> list[int]:
    """Return the number of writes that autograd has counted for each parameter."""
    with outside_modes():
        return list(map(VERSION, params))


def raise_versions(params: Sequence[Parameter], writes: Sequence[int]) -> None:
    """Count writes that autograd did not see, so that it refuses stale graphs.

    Args:
        params: The parameters.
        writes: The number of writes to each parameter.
    """
    versions = list(map(operator.add, read_versions(params), writes))
    with outside_modes():
        torch._C._autograd._unsafe_set_version_counter(tuple(params), tuple(versions))
