"""The state of full parameters, each of which one rank updates for all: its owner."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.peer_rpc.sequence_lock import copy_to_host
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor, TensorMeta
from ovpatch.overlap.tensors.shard import Shard
from ovpatch.overlap.tensors.tensor_memory import is_unshared
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, raise_versions, read_versions
from ovpatch_plugins.dist_optimizer.sharded_state import PATIENCE_S, Key, ShardedState, Shown, States, Swapped
from ovpatch_plugins.dist_optimizer.state_dicts import pack, unpack
from ovpatch_plugins.dist_optimizer.step_log import Turn


class OwnedState(ShardedState):
    """The state of the parameters that this rank owns.

    The gradients of such parameters are all-reduced whole: an owner needs all of one, and a reduction of each to its
    owner would send half as much, but in a collective of its own.

    [Note: largest first] Parameters are assigned from the largest to the smallest, each to the rank that owns the
    fewest elements so far. So the ranks own about the same, unless one parameter alone is more than a rank's share, and
    all ranks find the same owners without communication. An owner stays, because the state is there. The optimizers of
    one model share the loads: with one optimizer per parameter, all would go to rank 0 otherwise.

    [Note: also at its owner] Between steps ``optimizer.state`` shows lazy tensors at the owner, too, whose content is a
    copy. A script that changes state by hand does so on all ranks, one earlier than the other; the later one must find
    what there was, not what the owner has made of it. The next step takes over what it finds. Only the owner knows what
    state a parameter has: names, shapes, and numbers that are no tensors. The others ask when it first appears, and for
    classes that are known by name only after every step: their numbers of steps may be Python's.
    """

    keeps_format = True  # whether the names, shapes and numbers of a parameter's state stay as they first appear

    def __init__(self, shards: ShardedGrads, turn: Turn) -> None:
        self._loads, owners = shards.owners
        # A later optimizer on the same terms, which one rank alone may have, has the owners of the earlier one.
        self._owners = owners.setdefault(turn.terms, {})
        self._owned: dict[int, dict[Any, Any]] = {}  # state of parameters, as after the last step
        self._stood: dict[int, dict[Any, Any]] = {}  # the lazy tensors of a state, while this rank's are in place
        self._writes: dict[int, int] = {}  # how often a step writes to each parameter, as far as that is known
        super().__init__(shards, turn)  # from here on peers ask

    @staticmethod
    def can_divide(shards: ShardedGrads, index: int) -> bool:
        """Return whether a parameter may be updated by one rank for all."""
        return shards.can_be_sharded(index)

    def owners_of(self, indices: Iterable[int]) -> list[int]:
        """Return the group ranks that own some parameters, assigned now if they have none.

        All ranks call this for the same parameters, in the same order of calls.
        """
        wanted = list(indices)
        numels = {index: self._shards.params[index].numel() for index in wanted if index not in self._owners}
        for index in sorted(numels, key=lambda index: (-numels[index], index)):
            self._owners[index] = owner = self._loads.index(min(self._loads))
            self._loads[owner] += numels[index]
        return [self._owners[index] for index in wanted]

    # ---------------------------------------------------------------- around a step

    @contextmanager
    def swapped_in(self, params: Sequence[ShardedParam], states: States) -> Iterator[Shown]:
        """Put this rank's tensors in place for the time of a step; the optimizer sees its own parameters only."""
        with super().swapped_in(params, states) as shown:
            own = {one.index: one.param for one in params if self._owns(one.index)}
            before = read_versions(own.values())
            try:
                yield shown
            finally:
                writes = map(operator.sub, read_versions(own.values()), before)
                self._writes.update(zip(own, writes, strict=True))
        COUNTERS.params_owned += len(params) - len(shown)

    def _choose_shown(self, params: Sequence[ShardedParam]) -> tuple[Shown, Swapped]:
        for one, owner in zip(params, self.owners_of(one.index for one in params), strict=True):
            one.owner = owner
        # Its own parameters stand in for themselves: what users' classes know of them stays true.
        shown: Shown = {id(one.param): None for one in params if not self._owns(one.index)}
        return shown, [(one, one.param) for one in params]

    def _swap_in(self, swapped: Swapped, states: States) -> None:
        for one, _ in swapped:
            state = states.get(one.param)
            if state is None:
                continue
            self._shard_whole(one.param, state)
            if self._owns(one.index):
                self._stood[one.index] = stood = {
                    name: value
                    for name, value in state.items()
                    if self._is_own(value) or self._held.get((one.index, name), self) is value
                }
                state.update({name: self._local[one.index, name] for name in stood})

    def _write_back_param(self, one: ShardedParam, shown: Parameter, states: States) -> None:
        state = states.get(one.param)
        if state is None or not self._owns(one.index):
            self._owned.pop(one.index, None)
            return
        stood = self._stood.pop(one.index, {})
        for name, value in state.items():
            if _is_kept(value):
                self._local[one.index, name] = value
                self._leave_lazy((one.index, name), TensorMeta.of(value), state, stood.get(name))
        self._owned[one.index] = state

    def _shard_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep a parameter's tensors if this rank owns it, drop them if not, and leave lazy ones."""
        index = self._index.get(id(param))
        if index is None or index not in self._owners:
            return
        lazy_tensor.materialize(v for v in state.values() if isinstance(v, LazyTensor) and not self._is_own(v))
        for name, value in state.items():
            if _is_kept(value):
                key, meta, sole = (index, name), TensorMeta.of(value), is_unshared(value)
                if self._owns(index):
                    self._local[key] = value.detach() if sole else value.clone()
                self._leave_lazy(key, meta, state, value, sole=sole)

    def _ranges(self, key: Key) -> Mapping[int, Shard]:
        numel = self._metas[key].shape.numel()
        return {self._owners[key[0]]: Shard(0, numel, numel)}

    def _owns(self, index: int) -> bool:
        return self._owners[index] == self.group.rank()

    # ---------------------------------------------------------------- metadata

    def exchange_metadata(self, params: Sequence[ShardedParam], states: States) -> None:
        """Show the state, and the versions, that others' parameters have after a step, once all ranks have ended it."""
        others = [one for one in params if not self._owns(one.index)]
        self._ask_owners([one for one in others if not self._is_known(one, states)], states)
        raise_versions([one.param for one in others], [self._writes.get(one.index, 1) for one in others])

    def _is_known(self, one: ShardedParam, states: States) -> bool:
        return self.keeps_format and one.index in self._writes and bool(states.get(one.param))

    def _ask_owners(self, params: Sequence[ShardedParam], states: States) -> None:
        if not params:
            return
        asked = {one.index: one.param for one in params}
        question = {"version": self._versions.version, "params": list(asked)}
        owners = sorted({self._owners[index] for index in asked})
        for header, tensors in PeerRpc.for_group(self.group).call(self._topic, question, owners).values():
            self._writes.update(header["writes"])
            for index, made in unpack(header["state"], tensors, self._shards.params[0].device).items():
                state = states.setdefault(asked[index], {})
                before = dict(state)
                if list(state) != list(made):
                    state.clear()
                for name, value in made.items():
                    if isinstance(value, TensorMeta):
                        self._leave_lazy((index, name), value, state, before.get(name))
                    else:
                        state[name] = value

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        if "params" not in question:
            return super()._answer(question)
        self._versions.wait_for_version(question["version"], PATIENCE_S)
        wanted = [index for index in question["params"] if index in self._owned]
        metas = self._metas
        packed, inside = pack(
            {
                index: {
                    name: metas.get((index, name), value) if isinstance(value, Tensor) else value
                    for name, value in self._owned[index].items()
                }
                for index in wanted
            }
        )
        if inside:
            inside = self._versions.read_version(
                question["version"], lambda: [copy_to_host(one.contiguous()) for one in inside], PATIENCE_S
            )
        writes = [(index, self._writes[index]) for index in question["params"] if index in self._writes]
        return {"state": packed, "writes": writes}, inside


class NamedOwnedState(OwnedState):
    """The same for a class that is known by name only."""

    keeps_format = False


def _is_kept(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided
