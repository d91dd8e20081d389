"""The state of one optimizer for the parameters of one model, of which each rank keeps a part.

:class:`ShardedState` swaps it around a step and serves peers that read it. :class:`ElementwiseState`
keeps shards of every tensor, and ``owned_state.py`` all state of the parameters that a rank owns.
"""

from __future__ import annotations

import abc
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.comm.consensus import name_group_ranks
from ovpatch.overlap.comm.lifetimes import (
    attached_values,
    find_owners,
    reset_after_fork,
    weak_method,
)
from ovpatch.overlap.peer_rpc.retention import FinalReads, retain
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.peer_rpc.sequence_lock import SequenceLock, TornReadError, copy_to_host
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazySource, LazyTensor, TensorMeta
from ovpatch.overlap.tensors.shard import Shard, shard_view, view_flat
from ovpatch.overlap.tensors.tensor_memory import has_sole_object, is_dense, is_unshared
from ovpatch_plugins.dist_optimizer.agreement import OptimizerName
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS, note_shared_state
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, attach_shards, detach_shards

#: The ``state`` of an optimizer.
States = dict[Any, dict[Any, Any]]
#: Parameters whose state this rank updates, each with the key of its state during the step.
Swapped = list[tuple[ShardedParam, Parameter]]
#: The parameter that the optimizer gets instead, by ``id()`` of a parameter; None for no parameter.
Shown = dict[int, Parameter | None]
#: The index of a parameter, and the name of the tensor in its state.
Key = tuple[int, Any]

# A step makes the first of these versions, and each load_state_dict() after it another one.
_VERSIONS_PER_STEP: Final = 1 << 20

# The number of versions that loading has replaced and that peers may still read.
_MAX_REPLACED_VERSIONS: Final = 4

# The key of the bytes that a state keeps and of the bytes of its full tensors, as long as an
# optimizer uses it.
_BYTES: Final = "dist_optimizer: bytes"

#: Time limit for a peer's step. The timeout of the rank that reads is shorter.
PEER_STEP_TIMEOUT_S: Final = 600.0

_ERROR_REPLACED: Final = (
    "ovpatch: the tensor '{}' of optimizer state was read after the script had replaced it there "
    "and a step had freed its content. Read or copy it before the step, or turn dist_optimizer off."
)

_ERROR_MISPLACED: Final = (
    "ovpatch: the unread tensor '{}' in the optimizer's state of parameter '{}' belongs to another "
    "parameter or name, so each rank has the wrong shard of it. Put a copy there (tensor.clone()), "
    "or turn dist_optimizer off."
)

_ERROR_MISSING: Final = (
    "ovpatch: rank {ranks} has no '{}' in the optimizer's state of {}, because it "
    "has loaded other state. Load the same state on all ranks."
)

_ERROR_OVERWRITTEN: Final = (
    "{}. A step ran concurrently. Read optimizer state between a step and the next backward on "
    "every rank that reads, or copy it there for other threads: "
    "copy.deepcopy(optimizer.state_dict())"
)


class ShardedState(LazySource):
    """The source of the lazy tensors in one optimizer's state for the parameters of one model.

    Between steps ``optimizer.state[p]`` holds lazy tensors of full shape. A read gathers their
    content from the shards of all ranks. The script never finds a shard there: torch checks no
    shapes when it loads a state, and its fused kernels write beyond the end of a tensor that is too
    short. A full tensor that the script puts there (from a checkpoint, or changed by hand) is
    sharded when the next step begins.

    [Note: versions of state] A step makes a new version of the shards on all ranks. So does
    ``load_state_dict()``, which ranks do not call at the same time. A reader requests the version
    that it has itself: a rank that loads keeps its old shards for a while, and a reader of loaded
    state waits until its peers have loaded it. The number of steps comes first in a version, so the
    next step makes ranks agree even if only one of them has loaded. No rank begins a step before
    all ranks have taken part in its backward. A rank that has read after the backward waits until
    its peers, which may read as well, have reached their steps (:meth:`wait_for_readers`).

    [Note: the same tensor] A script may hold a tensor of the state over steps, and read or write
    it, because stock PyTorch updates it in place. So the next step makes a tensor that was read
    lazy again, and the object stays the same. A view of it, or an array, keeps the memory with the
    old values. If C++ holds the object too, as a view or a graph does, the state gets another
    object: a graph must not find zeros, nor a DLPack capsule freed memory.

    Args:
        shards: The sharded gradients of the model.
        name: The name of the optimizer. It is the same on all ranks, and no other optimizer of
            this model has it.
    """

    def __init__(self, shards: ShardedGrads, name: OptimizerName) -> None:
        self.group = shards.group
        self._shards = shards
        # Indices of the model's parameters by id().
        self._index = {id(param): index for index, param in enumerate(shards.params)}
        self._final_reads = FinalReads(shards.group, shards.holders.peers)

        # - The tensors
        # This rank's shards.
        self._local: dict[Key, Tensor] = {}
        self._metas: dict[Key, TensorMeta] = {}
        # A lazy tensor references this object, so a strong reference would delay freeing the
        # shards until the garbage collector runs.
        self._lazy: weakref.WeakValueDictionary[Key, LazyTensor] = weakref.WeakValueDictionary()
        # Shards that loading has replaced, by version.
        self._replaced: dict[int, dict[Key, Tensor]] = {}
        # The number of tensors when their bytes were last counted.
        self._num_counted = 0

        # - The running step
        # Whether `swap_in` has begun, and `swap_out` has not ended.
        self.is_swapped = False
        self._swapped: Swapped = []
        self._has_begun_version = False
        # None if the next step must inspect each tensor of the state.
        self._swap_cache: SwapCache | None = None

        # - Steps of this rank, for peers that wait for them
        # The number of steps that have begun.
        self._steps = 0
        # The number of the next step once this rank has reached it, before it begins.
        self._next_step = 0
        # The number of backwards at the last read since the last step.
        self._backwards_at_read = -1
        self._changed = threading.Condition()
        reset_after_fork(self, "_changed", threading.Condition)

        # - Calls of peers, which may arrive from here on
        self._versions = SequenceLock(shards.params[0].device)
        self._topic = f"state of {name}, of {shards.identity}"
        withdraw = PeerRpc.for_group(shards.group).register(self._topic, weak_method(self._answer))
        weakref.finalize(self, withdraw)

    # ---------------------------------------------------------------- around a step

    @staticmethod
    @abc.abstractmethod
    def can_shard(shards: ShardedGrads, index: int) -> bool:
        """Return whether a parameter's update can be sharded, and request the gradient for that."""

    @property
    def was_read(self) -> bool:
        """True if this rank has read state since its last step and the last backward."""
        return self._backwards_at_read == self._shards.backwards

    def note_read(self) -> None:
        """Note that ranks read state now, so that this rank waits for them before its next step."""
        self._backwards_at_read = self._shards.backwards

    def announce_step(self) -> None:
        """Let peers that have read begin their steps.

        This rank has reached its own step, and reads no more before it.
        """
        with self._changed:
            self._next_step = self._steps + 1
            self._changed.notify_all()

    def wait_for_readers(self) -> None:
        """Wait until peers reach this step if they may read; see [Note: versions of state]."""
        if self.was_read:
            self._backwards_at_read = -1
            PeerRpc.for_group(self.group).call(
                self._topic, {"next step": self._next_step}, self._shards.holders.peers
            )

    def swap_in(self, params: Sequence[ShardedParam], states: States) -> Shown:
        """Put this rank's shards into the optimizer's state, until :meth:`swap_out`.

        The caller must call :meth:`swap_out` even if this method was interrupted, and again if that
        call was interrupted.

        Args:
            params: The parameters of this model that the step updates.
            states: The ``state`` of the optimizer.

        Returns:
            The parameters that the optimizer must get instead.
        """
        self.is_swapped = True
        shown, self._swapped = self._choose_shown(params)
        with self._changed:
            self._steps += 1
            self._changed.notify_all()
        # All ranks have ended the step before the last one, so no rank reads older versions.
        if self._replaced:
            oldest = (self._steps - 1) * _VERSIONS_PER_STEP
            self._replaced = {
                version: local for version, local in self._replaced.items() if version >= oldest
            }
        self._has_begun_version = True
        self._versions.begin_update(self._steps * _VERSIONS_PER_STEP)
        self._swap_in_state(self._swapped, states)
        return shown

    def swap_out(self, params: Sequence[ShardedParam], states: States) -> None:
        """Keep the result of a step, and put lazy tensors back into the optimizer's state.

        A second call does nothing, unless the first one was interrupted.

        Args:
            params: The parameters that were given to :meth:`swap_in`.
            states: The ``state`` of the optimizer.
        """
        del params
        try:
            if self._swapped:
                self._write_back(self._swapped, states)
        finally:
            # Peers wait for the end of a version that has begun, whatever error ended the step.
            if self._has_begun_version:
                self._versions.end_update()
                self._has_begun_version = False
            if len(self._metas) > self._num_counted:
                self._count_bytes()
            self.is_swapped = bool(self._swapped)

    def exchange_metadata(self, params: Sequence[ShardedParam], states: States) -> None:
        """Show the state that peers' parameters have after a step.

        By default each rank knows this without a message.
        """
        del params, states

    # ---------------------------------------------------------------- between steps

    def load(self, states: States) -> None:
        """Shard loaded state; see [Note: versions of state]."""
        # After a cast, for instance, the model has other shards.
        if self._shards.is_replaced:
            return
        # No peer replies after the end of the group, so shards could not be gathered again.
        if PeerRpc.is_destroyed(self.group):
            return
        loaded = {id(value) for state in states.values() for value in state.values()}
        # In stock PyTorch, the tensors that loading has replaced keep their content.
        lazy_tensor.materialize(
            lazy for lazy in self._lazy.values() if id(lazy) not in loaded and self._is_own(lazy)
        )
        self._replaced[self._versions.version] = self._local
        self._local = dict(self._local)
        self._swap_cache = None
        while len(self._replaced) > _MAX_REPLACED_VERSIONS:
            del self._replaced[next(iter(self._replaced))]
        self._versions.begin_update()
        try:
            for param, state in states.items():
                self._shard_state(param, state)
        finally:
            self._versions.end_update()

    def unshard(self, states: States) -> None:
        """Make the tensors of this model in the optimizer's state full."""
        values = [value for state in states.values() for value in state.values()]
        lazy_tensor.materialize(value for value in values if self._is_own(value))

    def start_final_calls(self, backwards: int) -> bool:
        """Start this rank's last calls to peers, for an optimizer that falls back to torch.

        Return false if no peer can be called.

        Args:
            backwards: The largest number of backwards until the final calls of peers.
        """
        attached_values(self).pop(_BYTES, None)
        is_reachable = not PeerRpc.is_destroyed(self.group)
        if is_reachable:
            self._final_reads.start_final_calls(self, backwards)
        return is_reachable

    def retire(self, backwards: int = 1) -> None:
        """Keep this state for peers that may read it, and no longer for an optimizer.

        Args:
            backwards: The number of backwards during which peers may read.
        """
        attached_values(self).pop(_BYTES, None)
        retain(self.group, self, backwards)

    # ---------------------------------------------------------------- swapping

    @abc.abstractmethod
    def _choose_shown(self, params: Sequence[ShardedParam]) -> tuple[Shown, Swapped]:
        """Return the parameters that the optimizer gets, and those whose state is swapped."""

    @abc.abstractmethod
    def _swap_in_state(self, swapped: Swapped, states: States) -> None:
        """Put this rank's shards where the optimizer expects the parameters' state."""

    def _write_back(self, swapped: Swapped, states: States) -> None:
        """Keep the state that a step has updated, and leave lazy tensors; empty ``swapped``."""
        try:
            while swapped:
                self._write_back_param(*swapped.pop(), states)
        finally:
            # One parameter has raised. The remaining ones must not keep shards in their state.
            if swapped:
                self._write_back(swapped, states)

    @abc.abstractmethod
    def _write_back_param(self, sharded: ShardedParam, shown: Parameter, states: States) -> None:
        """Write one parameter back, which the optimizer has got as ``shown``."""

    @abc.abstractmethod
    def _shard_state(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's shards of a parameter's full state, and leave lazy tensors."""

    @abc.abstractmethod
    def _ranges(self, key: Key) -> Mapping[int, Shard]:
        """Return the range of a tensor's elements in each shard that exists, by shard."""

    def _leave_lazy(
        self,
        key: Key,
        meta: TensorMeta,
        state: dict[Any, Any],
        replaced: Any = None,
        *,
        was_unshared: bool | None = None,
    ) -> None:
        """Leave a lazy tensor in ``state``, because this rank keeps only its shard.

        Args:
            key: The key of the tensor.
            meta: The metadata of the tensor.
            state: The state of the parameter.
            replaced: The value that was there, which the script may hold; see
                [Note: the same tensor].
            was_unshared: Whether only the object ``replaced`` referenced its memory before this
                rank kept a reference to it. Default: read the references now.
        """
        known = self._metas.get(key)
        self._metas[key] = meta
        if self._is_own(replaced) and replaced.key == key and (known is meta or known == meta):
            state[key[1]] = replaced
            return
        lazy = None
        is_full = isinstance(replaced, Tensor) and not isinstance(replaced, LazyTensor)
        if is_full and (replaced.shape, replaced.dtype, replaced.device) == (
            meta.shape,
            meta.dtype,
            meta.device,
        ):
            if not (is_unshared(replaced) if was_unshared is None else was_unshared):
                note_shared_state(key[1])
            if has_sole_object(replaced):
                lazy = lazy_tensor.make_lazy_(replaced, self, key)
        if lazy is None:
            lazy = lazy_tensor.make_lazy(meta, self, key, own=True)
        # The script may still hold the tensor that had this key. It would show the new content.
        last = self._lazy.get(key)
        if last is not None and last is not lazy and self._is_own(last):
            lost = lazy_tensor.LostSource(_ERROR_REPLACED.format(key[1]))
            lazy_tensor.set_source(last, lost, key)
        self._lazy[key] = lazy
        state[key[1]] = lazy

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, LazyTensor) and vars(value).get("source") is self

    def _count_bytes(self) -> None:
        local_bytes = sum(local.nbytes for local in self._local.values())
        full_bytes = sum(meta.shape.numel() * meta.dtype.itemsize for meta in self._metas.values())
        attached_values(self)[_BYTES] = local_bytes, full_bytes
        sizes = [size for _, size in find_owners(_BYTES)]
        # Most scripts have freed their optimizers before the report, so the counters have the peaks.
        COUNTERS.state_bytes = max(COUNTERS.state_bytes, sum(kept for kept, _ in sizes))
        COUNTERS.state_bytes_whole = max(COUNTERS.state_bytes_whole, sum(full for _, full in sizes))
        self._num_counted = len(self._metas)

    # ---------------------------------------------------------------- reading

    def fetch(self, wanted: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Return full tensors on the devices of the lazy ones."""
        del counts_as_read
        full = self.fetch_to_host(wanted)
        return [tensor.to(lazy.device) for lazy, tensor in zip(wanted, full, strict=True)]

    def fetch_to_host(self, wanted: Sequence[LazyTensor]) -> list[Tensor]:
        """Return full tensors on the CPU, in new memory, of the version that this rank has."""
        self.note_read()
        keys = [lazy.key for lazy in wanted]
        version = self._versions.version
        arguments = self._final_reads.mark_final({"version": version, "entries": keys})
        begin = time.monotonic()
        holders = self._shards.holders
        replies = PeerRpc.for_group(self.group).call(self._topic, arguments, holders.peers)
        COUNTERS.state_reads += 1
        COUNTERS.state_read_ms += round(1e3 * (time.monotonic() - begin))
        shards: dict[Key, dict[int, Tensor]] = {key: {} for key in keys}
        for place, (header, tensors) in holders.by_place(replies).items():
            for position, shard in zip(header["positions"], tensors, strict=True):
                shards[keys[position]][place] = shard
                COUNTERS.bytes_pulled += shard.nbytes
        for position, shard in zip(*self._copy_shards(version, keys), strict=True):
            shards[keys[position]][holders.place] = shard
        return [self._assemble(key, shards[key]) for key in keys]

    def _assemble(self, key: Key, shards: Mapping[int, Tensor]) -> Tensor:
        ranges = self._ranges(key)
        missing = [place for place in ranges if place not in shards]
        if missing:
            param_name = self._shards.names[key[0]]
            rank = self._shards.holders.ranks[missing[0]]
            ranks = name_group_ranks(self.group, [rank])
            raise RuntimeError(_ERROR_MISSING.format(key[1], param_name, ranks=ranks))
        full = self._metas[key].empty()
        for place, shard in shards.items():
            shard_view(full, ranges[place]).copy_(shard)
        return full

    def _answer(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        """Serve the call of a peer that reads shards, or that waits for this rank's next step."""
        if "next step" in arguments:
            awaited = arguments["next step"]
            with self._changed:
                self._changed.wait_for(
                    lambda: max(self._steps, self._next_step) >= awaited, PEER_STEP_TIMEOUT_S
                )
            return {}, []
        # JSON has made lists of the tuples.
        keys = [tuple(key) for key in arguments["entries"]]
        positions, shards = self._copy_shards(arguments["version"], keys)
        self._final_reads.record_call(arguments)
        return {"positions": positions}, shards

    def _copy_shards(self, version: int, keys: Sequence[Key]) -> tuple[list[int], list[Tensor]]:
        """Return copies of this rank's shards of one version, and their positions in ``keys``."""

        def copy(source: Mapping[Key, Tensor]) -> tuple[list[int], list[Tensor]]:
            positions = [position for position, key in enumerate(keys) if key in source]
            shards = [source[keys[position]] for position in positions]
            dense = [shard if is_dense(shard) else shard.contiguous() for shard in shards]
            return positions, [copy_to_host(view_flat(shard)) for shard in dense]

        self._versions.wait_for_version(version, PEER_STEP_TIMEOUT_S)
        # If loading has already replaced the requested version, these shards are of a later one.
        local = self._local
        if version not in self._replaced:
            try:
                return self._versions.read_version(
                    version, lambda: copy(local), PEER_STEP_TIMEOUT_S
                )
            except TornReadError as error:
                # If loading has replaced the version concurrently, its shards are still there.
                if version not in self._replaced:
                    text = _ERROR_OVERWRITTEN.format(str(error).rstrip("."))
                    raise TornReadError(text) from error
        replaced = self._replaced[version]
        return self._versions.read_version(
            version, lambda: copy(replaced), PEER_STEP_TIMEOUT_S, is_retained=True
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
                        raise RuntimeError(_ERROR_MISPLACED.format(name, param_name))
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


class SwapCache:
    """The shards of a step's lazy tensors, for the next step if no tensor is read or replaced.

    With it a warm step swaps by a few calls per model instead of one or more per tensor. It
    references neither parameters nor lazy tensors: if the script held one of these, it would keep
    the model alive.

    Args:
        source: The source of the lazy tensors.
        shown: The state with this rank's shards, by the parameter that the optimizer gets.
        left: The state of the same parameters between steps, with the same order and names.

    Attributes:
        shown: The argument ``shown``.
    """

    def __init__(
        self,
        source: ShardedState,
        shown: dict[Parameter, dict[Any, Any]],
        left: Sequence[Mapping[Any, Any]],
    ) -> None:
        self.shown = shown
        self._source = weakref.ref(source)
        # The ids of the keys and values of `shown`, alternating.
        self._ids = list(map(id, itertools.chain.from_iterable(shown.items())))
        # All values of `shown`, in the order of `_names`.
        self._shards = list(itertools.chain.from_iterable(map(_VALUES, shown.values())))
        self._names = _names(left)

        # - The values between steps
        values = list(itertools.chain.from_iterable(map(_VALUES, left)))
        self._is_lazy = [type(value) is LazyTensor for value in values]
        # Their ids. Only this source creates its lazy tensors, and it does so without this object,
        # so the id of a lazy tensor is not reused unseen. Other values, such as the number of
        # steps, are the objects in `_shards`; a full tensor is another object, which is detected.
        self._value_ids = [
            id(value if is_lazy else shard)
            for value, shard, is_lazy in zip(values, self._shards, self._is_lazy, strict=True)
        ]

        # The lazy tensors, while the optimizer updates the shards.
        self._lazy_in_step: list[Tensor] = []

    @classmethod
    def of(
        cls,
        source: ShardedState,
        swapped: Swapped,
        states: States,
        shown: Mapping[Parameter, dict[Any, Any] | None],
    ) -> SwapCache | None:
        """Return the cache of a step's state; None if the next step must inspect each tensor."""
        left = []
        for sharded, _ in swapped:
            state = states.get(sharded.param)
            if state is not None:
                left.append(state)
        updated = {param: state for param, state in shown.items() if state is not None}
        if len(left) != len(swapped) or _names(left) != _names(updated.values()):
            return None
        return cls(source, updated, left)

    def begin_step(self, swapped: Swapped, states: States) -> bool:
        """Return whether the parameters' state is unchanged since the last step."""
        if [id(shard_param) for _, shard_param in swapped] != self._ids[::2]:
            return False
        # A lookup by tensor would call Tensor.__hash__, a Python function, for each parameter.
        states_by_id = dict(zip(map(id, states), states.values(), strict=True))
        left = [states_by_id.get(id(sharded.param)) for sharded, _ in swapped]
        if None in left or _names(left) != self._names:
            return False
        values = list(itertools.chain.from_iterable(map(_VALUES, left)))
        if list(map(id, values)) != self._value_ids:
            return False
        lazy = list(itertools.compress(values, self._is_lazy))
        try:
            is_own = list(map(_SOURCE, lazy)).count(self._source()) == len(lazy)
        except AttributeError:
            # A tensor was read, or another thread reads it at this moment.
            return False
        self._lazy_in_step = lazy if is_own else []
        return is_own

    def end_step(self, states: States) -> bool:
        """Take the shards out of the state.

        Returns:
            Whether this is done. If not, because some shards are not where they were, the state is
            unchanged.
        """
        lazy = self._lazy_in_step
        self._lazy_in_step = []
        # Another thread may have read a lazy tensor during the step.
        if list(map(type, lazy)).count(LazyTensor) != len(lazy):
            return False
        values = list(itertools.chain.from_iterable(map(_VALUES, self.shown.values())))
        is_same = map(operator.is_, values, self._shards)
        if len(values) != len(self._shards) or not all(is_same):
            return False
        if len(states) < len(self.shown):
            return False
        # The step has appended the state of the shards to the dictionary.
        popped = [states.popitem() for _ in self.shown][::-1]
        if list(map(id, itertools.chain.from_iterable(popped))) == self._ids:
            return True
        states.update(popped)
        return False


_SOURCE: Final = operator.attrgetter("source")
_VALUES: Final = operator.methodcaller("values")


def _names(states: Iterable[Any]) -> list[Any]:
    """Return the number of names in each state, followed by all names."""
    states = list(states)
    return [*map(len, states), *itertools.chain.from_iterable(states)]
