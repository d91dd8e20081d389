"""The state of optimizers whose step is element-wise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.tensors.lazy_tensor import LazyTensor, TensorMeta
from ovpatch.overlap.tensors.shard import Shard, shard_view
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, attach_shards, detach_shards
from ovpatch_plugins.dist_optimizer.sharded_state import (
    ERROR_MISPLACED,
    Key,
    ShardedState,
    Shown,
    States,
    SwapCache,
    Swapped,
)


class ElementwiseState(ShardedState):
    """The state of an element-wise optimizer.

    Each rank keeps a shard of every tensor that has its parameter's shape. All ranks keep the full
    values of other shapes, such as the number of steps.
    """

    @staticmethod
    def can_shard(shards: ShardedGrads, index: int) -> bool:
        """Return whether a parameter is sharded, and request its gradient in shards."""
        return shards.request_sharding(index)

    # ---------------------------------------------------------------- around a step

    def swap_out(self, params: Sequence[ShardedParam], states: States) -> None:
        """Keep the result of a step and release the shards; see :class:`ShardedState`."""
        try:
            super().swap_out(params, states)
        finally:
            detach_shards(params)

    def _choose_shown(self, params: Sequence[ShardedParam]) -> tuple[Shown, Swapped]:
        swapped = list(zip(params, attach_shards(params), strict=True))
        return {id(sharded.param): shard_param for sharded, shard_param in swapped}, swapped

    def _swap_in_state(self, swapped: Swapped, states: States) -> None:
        cache = self._swap_cache
        if cache is not None and cache.begin_step(swapped, states):
            states.update(cache.shown)
            return
        self._swap_cache = None
        local = self._local
        for sharded, shard_param in swapped:
            state = states.get(sharded.param)
            if state is None:
                continue
            index = sharded.index
            shape = sharded.param.shape
            # The state of the parameter itself stays as it is, because another thread may read it.
            shown = dict(state)
            states[shard_param] = shown
            for name, value in shown.items():
                if type(value) is LazyTensor and vars(value).get("source") is self:
                    if vars(value).get("key") != (index, name):
                        param_name = self._shards.names[index]
                        raise RuntimeError(ERROR_MISPLACED.format(name, param_name))
                    shown[name] = local[index, name]
                elif isinstance(value, Tensor) and value.shape == shape:
                    # The script has put this tensor there.
                    self._shard_tensor((index, name), value, state)
                    shown[name] = local[index, name]

    def _write_back(self, swapped: Swapped, states: States) -> None:
        cache = self._swap_cache
        # If anything raises below, the next step must inspect each tensor.
        self._swap_cache = None
        is_done = False
        try:
            is_done = cache is not None and cache.end_step(states)
        finally:
            # An interrupt may have ended end_step(), so the shards are taken out in any case.
            if not is_done:
                updated = list(swapped)
                shown = {shard_param: states.get(shard_param) for _, shard_param in swapped}
                super()._write_back(swapped, states)
                cache = SwapCache.of(self, updated, states, shown)
        swapped.clear()
        self._swap_cache = cache

    def _write_back_param(self, sharded: ShardedParam, shown: Parameter, states: States) -> None:
        updated = states.pop(shown, None)
        if updated is None:
            return
        state = states.setdefault(sharded.param, {})
        index = sharded.index
        shape = shown.shape
        for name, value in updated.items():
            if not (isinstance(value, Tensor) and value.shape == shape):
                state[name] = value
                continue
            replaced = state.get(name)
            key = (index, name)
            meta = self._metas.get(key)
            self._local[key] = value
            # The common case, in which the state already has the right lazy tensor.
            is_valid = (
                type(replaced) is LazyTensor
                and (meta is not None and meta.dtype == value.dtype)
                and (vars(replaced).get("source") is self and replaced.key == key)
            )
            if not is_valid:
                self._leave_lazy(key, self._meta_of(key, value), state, replaced)

    # ---------------------------------------------------------------- full tensors

    def _shard_state(self, param: Tensor, state: dict[Any, Any]) -> None:
        index = self._index.get(id(param))
        if index is None or not self._shards.can_be_sharded(index):
            return
        # The parameter may be pending, and its shape needs no values.
        with torch._C.DisableTorchFunctionSubclass():
            shape = param.shape
        for name, value in state.items():
            if isinstance(value, Tensor) and not self._is_own(value) and value.shape == shape:
                self._shard_tensor((index, name), value, state)

    def _shard_tensor(self, key: Key, full: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's shard of a full tensor, and leave a lazy one in ``state``."""
        param = self._shards.params[key[0]]
        # Shards are ranges of memory, so the tensor must have the memory order of its parameter.
        laid_out = full.detach()
        if full.stride() != param.stride():
            laid_out = torch.empty_like(param, dtype=full.dtype).copy_(full)
        local = shard_view(laid_out, self._shards.local_ranges[key[0]]).clone()
        self._local[key] = local
        # This reference to the memory would make the full tensor look shared.
        del laid_out
        self._leave_lazy(key, self._meta_of(key, local), state, full)

    def _meta_of(self, key: Key, local: Tensor) -> TensorMeta:
        meta = self._metas.get(key)
        # Only the dtype can change: as long as a parameter has these shards, its shape stays.
        if meta is None or meta.dtype != local.dtype:
            param = self._shards.params[key[0]]
            meta = TensorMeta(param.shape, param.stride(), local.dtype, param.device)
        return meta

    def _ranges(self, key: Key) -> Mapping[int, Shard]:
        return dict(enumerate(self._shards.ranges(key[0])))
