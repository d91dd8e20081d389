"""The state of full parameters, each of which one rank updates for all: its owner."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
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
from ovpatch_plugins.dist_optimizer.agreement import OptimizerName
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import (
    ShardedParam,
    raise_versions,
    read_versions,
)
from ovpatch_plugins.dist_optimizer.sharded_state import (
    PEER_STEP_TIMEOUT_S,
    Key,
    ShardedState,
    Shown,
    States,
    Swapped,
)
from ovpatch_plugins.dist_optimizer.state_dicts import pack, unpack


class OwnedState(ShardedState):
    """The state of an optimizer that updates full parameters, each on the rank that owns it.

    The owner of a parameter keeps all of its state, and peers keep none. The gradients of such
    parameters are all-reduced, because an owner needs the full gradient. To reduce each gradient to
    its owner would send half as much, but in one collective per gradient.

    [Note: largest first] Parameters are assigned from the largest to the smallest, each to the rank
    that owns the fewest elements so far. So ranks own about the same number of elements, unless one
    parameter exceeds a rank's share, and all ranks find the same owners without communication. An
    owner does not change, because it has the state. The optimizers of one model share the loads:
    otherwise, with one optimizer per parameter, rank 0 would own all parameters.

    [Note: also at its owner] Between steps ``optimizer.state`` shows lazy tensors at the owner,
    too. Their content is a copy. A script that changes state by hand does so on all ranks, but not
    at the same time. A later rank must find the old state and not the owner's change of it. The
    next step uses what it finds. Only the owner knows the names, the shapes and the numbers in a
    parameter's state. Peers request them when the state first appears. For classes that are known
    by name only, peers do so after every step, because the number of steps may be a Python number
    there.
    """

    # Whether the names, shapes and numbers of a parameter's state stay as they first appear.
    keeps_format = True

    def __init__(self, shards: ShardedGrads, name: OptimizerName) -> None:
        # The number of elements that each rank owns.
        self._loads, owners_by_terms = shards.owners
        # The owner of each parameter. Only this rank may have a later optimizer on the same terms,
        # so it must find the owners of the earlier one.
        self._owners = owners_by_terms.setdefault(name.terms, {})
        # The state of this rank's parameters after the last step.
        self._owned: dict[int, dict[Any, Any]] = {}
        # The lazy tensors of a state, while this rank's tensors replace them.
        self._saved: dict[int, dict[Any, Any]] = {}
        # The number of writes to each parameter in a step, if known.
        self._writes: dict[int, int] = {}
        # This rank's parameters in the running step, and their autograd versions before it.
        self._updated: list[ShardedParam] = []
        self._versions_before: list[int] = []
        # Peers may call from here on, so all other attributes must exist.
        super().__init__(shards, name)

    @staticmethod
    def can_shard(shards: ShardedGrads, index: int) -> bool:
        """Return whether one rank may update a parameter for all ranks."""
        return shards.can_be_sharded(index)

    def owners_of(self, indices: Iterable[int]) -> list[int]:
        """Return the owners of some parameters, by place; assign owners to new parameters.

        On several hosts each host may have an owner in that place.

        All ranks call this for the same parameters, and in the same order of calls.
        """
        indices = list(indices)
        params = self._shards.params
        numels = {index: params[index].numel() for index in indices if index not in self._owners}
        for index in sorted(numels, key=lambda index: (-numels[index], index)):
            owner = self._loads.index(min(self._loads))
            self._owners[index] = owner
            self._loads[owner] += numels[index]
        return [self._owners[index] for index in indices]

    # ---------------------------------------------------------------- around a step

    def swap_in(self, params: Sequence[ShardedParam], states: States) -> Shown:
        """Put this rank's tensors in place; the optimizer gets this rank's parameters only."""
        # An interrupted swap must not leave the parameters of the last step to swap_out().
        self._updated = []
        self._versions_before = []
        shown = super().swap_in(params, states)
        updated = [sharded for sharded in params if self._owns(sharded.index)]
        self._versions_before = read_versions(sharded.param for sharded in updated)
        self._updated = updated
        return shown

    def swap_out(self, params: Sequence[ShardedParam], states: States) -> None:
        """Keep the result of a step, and count its writes to this rank's parameters."""
        updated = self._updated
        self._updated = []
        versions = read_versions(sharded.param for sharded in updated)
        writes = list(map(operator.sub, versions, self._versions_before))
        indices = [sharded.index for sharded in updated]
        self._writes.update(zip(indices, writes, strict=True))
        # A step that raised may have written to none of them.
        COUNTERS.params_owned += sum(map(bool, writes))
        super().swap_out(params, states)

    def _choose_shown(self, params: Sequence[ShardedParam]) -> tuple[Shown, Swapped]:
        owners = self.owners_of(sharded.index for sharded in params)
        for sharded, owner in zip(params, owners, strict=True):
            sharded.owner = owner
        # This rank's parameters are not replaced, since classes of users may know the objects.
        shown: Shown = {
            id(sharded.param): None for sharded in params if not self._owns(sharded.index)
        }
        return shown, [(sharded, sharded.param) for sharded in params]

    def _swap_in_state(self, swapped: Swapped, states: States) -> None:
        for sharded, _ in swapped:
            index = sharded.index
            state = states.get(sharded.param)
            if state is None:
                continue
            self._shard_state(sharded.param, state)
            if self._owns(index):
                saved = {name: value for name, value in state.items() if self._is_own(value)}
                self._saved[index] = saved
                state.update({name: self._local[index, name] for name in saved})

    def _write_back_param(self, sharded: ShardedParam, shown: Parameter, states: States) -> None:
        index = sharded.index
        state = states.get(sharded.param)
        if state is None or not self._owns(index):
            self._owned.pop(index, None)
            return
        saved = self._saved.pop(index, {})
        for name, value in state.items():
            if _is_plain(value):
                self._local[index, name] = value
                self._leave_lazy((index, name), TensorMeta.of(value), state, saved.get(name))
        self._owned[index] = state

    def _shard_state(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep the tensors of a parameter that this rank owns, and leave lazy ones in any case."""
        index = self._index.get(id(param))
        if index is None or index not in self._owners:
            return
        # Lazy tensors of another source, as of a former wrapper, are replaced by their content.
        lazy_tensor.materialize(
            value
            for value in state.values()
            if isinstance(value, LazyTensor) and not self._is_own(value)
        )
        for name, value in state.items():
            if _is_plain(value):
                key = (index, name)
                meta = TensorMeta.of(value)
                was_unshared = is_unshared(value)
                if self._owns(index):
                    # Without a copy, a view that the script holds would change with the state.
                    self._local[key] = value.detach() if was_unshared else value.clone()
                self._leave_lazy(key, meta, state, value, was_unshared=was_unshared)

    def _ranges(self, key: Key) -> Mapping[int, Shard]:
        numel = self._metas[key].shape.numel()
        return {self._owners[key[0]]: Shard(0, numel, numel)}

    def _owns(self, index: int) -> bool:
        return self._owners[index] == self._shards.holders.place

    # ---------------------------------------------------------------- metadata

    def exchange_metadata(self, params: Sequence[ShardedParam], states: States) -> None:
        """Show the state and the versions of peers' parameters, once all ranks have stepped."""
        foreign = [sharded for sharded in params if not self._owns(sharded.index)]
        unknown = [sharded for sharded in foreign if not self._is_known(sharded, states)]
        if unknown:
            self._request_metadata(unknown, states)
        # Every rank must refuse the same stale graphs.
        writes = [self._writes.get(sharded.index, 1) for sharded in foreign]
        raise_versions([sharded.param for sharded in foreign], writes)

    def _is_known(self, sharded: ShardedParam, states: States) -> bool:
        has_state = bool(states.get(sharded.param))
        return self.keeps_format and sharded.index in self._writes and has_state

    def _request_metadata(self, params: Sequence[ShardedParam], states: States) -> None:
        param_of = {sharded.index: sharded.param for sharded in params}
        arguments = {"version": self._versions.version, "params": list(param_of)}
        ranks = self._shards.holders.ranks
        owners = sorted({ranks[self._owners[index]] for index in param_of})
        replies = PeerRpc.for_group(self.group).call(self._topic, arguments, owners)
        device = self._shards.params[0].device
        for header, tensors in replies.values():
            self._writes.update(header["writes"])
            for index, values in unpack(header["state"], tensors, device).items():
                state = states.setdefault(param_of[index], {})
                before = dict(state)
                # The names must have the owner's order, which is visible in a state_dict().
                if list(state) != list(values):
                    state.clear()
                for name, value in values.items():
                    if isinstance(value, TensorMeta):
                        self._leave_lazy((index, name), value, state, before.get(name))
                    else:
                        state[name] = value

    def _answer(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        """Serve a call for metadata, or a call of :class:`ShardedState`."""
        if "params" not in arguments:
            return super()._answer(arguments)
        version = arguments["version"]
        self._versions.wait_for_version(version, PEER_STEP_TIMEOUT_S)
        indices = [index for index in arguments["params"] if index in self._owned]
        packed, tensors = pack({index: self._describe(index) for index in indices})
        # Tensors inside of lists and dictionaries are sent with their content.
        if tensors:
            tensors = self._versions.read_version(
                version,
                lambda: [copy_to_host(tensor.contiguous()) for tensor in tensors],
                PEER_STEP_TIMEOUT_S,
            )
        writes = [
            (index, self._writes[index]) for index in arguments["params"] if index in self._writes
        ]
        return {"state": packed, "writes": writes}, tensors

    def _describe(self, index: int) -> dict[Any, Any]:
        """Return an owned parameter's state, with metadata instead of its tensors."""
        metas = self._metas
        return {
            name: metas.get((index, name), value) if isinstance(value, Tensor) else value
            for name, value in self._owned[index].items()
        }


class NamedOwnedState(OwnedState):
    """The owned state of an optimizer class that is known by name only."""

    keeps_format = False


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided
