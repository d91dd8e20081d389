"""The state of optimizers whose step is element-wise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """The state of an element-wise optimizer: each rank keeps a shard of every tensor that has its parameter's shape.

    What has another shape, as the number of steps, is on all ranks.
    """

    @staticmethod
    def can_divide(shards: ShardedGrads, index: int) -> bool:
        """Return whether a parameter is sharded, and ask for its gradient by shards."""
        return shards.request_sharding(index)

    @contextmanager
    def swapped_in(self, params: Sequence[ShardedParam], states: States) -> Iterator[Shown]:
        """Put this rank's shards in place for the time of a step; see :class:`ShardedState`."""
        try:
            with super().swapped_in(params, states) as shown:
                yield shown
        finally:
            detach_shards(params)

    def _choose_shown(self, params: Sequence[ShardedParam]) -> tuple[Shown, Swapped]:
        swapped = list(zip(params, attach_shards(params), strict=True))
        return {id(one.param): shard_param for one, shard_param in swapped}, swapped

    def _swap_in(self, swapped: Swapped, states: States) -> None:
        kept = self._kept
        if kept is not None and kept.begin_step(swapped, states):
            states.update(kept.shown)
            return
        self._kept = None
        local = self._local
        for one, shard_param in swapped:
            state = states.get(one.param)
            if state is None:
                continue
            index, shape = one.index, one.param.shape
            states[shard_param] = shown = dict(state)
            for name, value in shown.items():
                if type(value) is LazyTensor and vars(value).get("source") is self:
                    if vars(value).get("key") != (index, name):
                        raise RuntimeError(ERROR_MISPLACED.format(name, self._shards.names[index]))
                    shown[name] = local[index, name]
                elif isinstance(value, Tensor) and value.shape == shape:  # what the script has put there
                    self._shard_tensor((index, name), value, state)
                    shown[name] = local[index, name]

    def _write_back(self, swapped: Swapped, states: States) -> None:
        kept, self._kept = self._kept, None  # whatever raises, the next step looks at each tensor
        is_done = False
        try:
            is_done = kept is not None and kept.end_step(states)
        finally:  # also where it was interrupted
            if not is_done:
                updated = list(swapped)
                shown = {shard_param: states.get(shard_param) for _, shard_param in swapped}
                super()._write_back(swapped, states)
                kept = SwapCache.of(self, updated, states, shown)
        swapped.clear()
        self._kept = kept

    def _write_back_param(self, one: ShardedParam, shown: Parameter, states: States) -> None:
        made = states.pop(shown, None)
        if made is None:
            return
        state, index, shape = states.setdefault(one.param, {}), one.index, shown.shape
        for name, value in made.items():
            if not (isinstance(value, Tensor) and value.shape == shape):
                state[name] = value
                continue
            held, key = state.get(name), (index, name)
            meta = self._metas.get(key)
            self._local[key] = value
            if not (
                type(held) is LazyTensor
                and (meta is not None and meta.dtype == value.dtype)
                and (vars(held).get("source") is self and held.key == key)
            ):
                self._leave_lazy(key, self._meta_of(key, value), state, held)

    def _shard_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        index = self._index.get(id(param))
        if index is None or not self._shards.can_be_sharded(index):
            return
        with torch._C.DisableTorchFunctionSubclass():
            shape = param.shape
        for name, value in state.items():
            if isinstance(value, Tensor) and not self._is_own(value) and value.shape == shape:
                self._shard_tensor((index, name), value, state)

    def _shard_tensor(self, key: Key, whole: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's shard of a whole tensor, and leave a lazy one in ``state``."""
        param = self._shards.params[key[0]]
        laid_out = whole.detach()
        if whole.stride() != param.stride():
            laid_out = torch.empty_like(param, dtype=whole.dtype).copy_(whole)
        self._local[key] = local = shard_view(laid_out, self._shards.local_range(key[0])).clone()
        del laid_out  # else it would count as a reference to the memory
        self._leave_lazy(key, self._meta_of(key, local), state, whole)

    def _meta_of(self, key: Key, local: Tensor) -> TensorMeta:
        meta = self._metas.get(key)
        if meta is None or meta.dtype != local.dtype:  # the rest is the parameter's, as long as it has these shards
            param = self._shards.params[key[0]]
            meta = TensorMeta(param.shape, param.stride(), local.dtype, param.device)
        return meta

    def _ranges(self, key: Key) -> Mapping[int, Shard]:
        return dict(enumerate(self._shards.ranges(key[0])))
