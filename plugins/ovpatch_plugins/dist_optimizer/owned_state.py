"""State of optimizers that update whole parameters: a parameter's owner keeps all of it, the others keep none.

[Note: also at its owner] Between steps the owner, too, shows placeholders in ``optimizer.state``, whose content is a
copy. A script that changes state by hand does so on all ranks, one earlier than the other; who comes later must find
what there was, not what the owner has made of it meanwhile. The next step takes over what it finds.

[Note: told by the owner] What state a parameter has, only its owner can know: names, shapes, and numbers that are no
tensors. The others ask when a parameter's state first appears. For classes of which no more is known, whose state may
change its form and whose numbers of steps may be Python's, they ask after every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.peer_rpc.versioned import copy_to_host
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.ownership import is_unshared
from ovpatch.overlap.tensors.shard import Shard
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_state import PATIENCE_S, Key, StateOfModel, States
from ovpatch_plugins.dist_optimizer.state_format import StateFormat, pack, unpack

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam


# Which rank owns which whole parameter.
#
# [Note: largest first] Parameters are dealt out from the largest to the smallest, each to the rank that has the
# fewest elements so far. So the ranks own about the same, unless one parameter alone is more than a rank's share. All
# ranks come to the same result without a word, for they deal out the same parameters in the same order. What has been
# dealt out stays where it is: its state is there. A model's optimizers are dealt to in turn from where the last left
# off, or one optimizer per parameter would leave everything to rank 0.

# How many elements of each model each rank owns.
_loads: weakref.WeakKeyDictionary[ShardedGrads, list[int]] = weakref.WeakKeyDictionary()


def assign_owners(shards: ShardedGrads, indices: Iterable[int]) -> dict[int, int]:
    """Give each of some parameters an owner. All ranks call this for the same ones, in the same order of calls.

    Args:
        shards: Of the model that the parameters belong to.
        indices: The parameters' indices there.

    Returns:
        The group rank that owns it, by index.
    """
    loads = _loads.setdefault(shards, [0] * shards.group.size())
    numels = {index: shards.params[index].numel() for index in indices}
    owners = {}
    for index in sorted(numels, key=lambda index: (-numels[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += numels[index]
    return owners


class OwnedStateOfModel(StateOfModel):
    """The state of the parameters that this rank owns."""

    def __init__(self, shards: ShardedGrads, number: int) -> None:
        self._owners: dict[int, int] = {}
        self._owned: dict[int, dict[Any, Any]] = {}  # state of parameters, as after the last step
        self._shown: dict[int, dict[Any, Any]] = {}  # what stands for this rank's tensors, while those are in place
        super().__init__(shards, number)  # from here on peers ask

    def owners(self, indices: Iterable[int]) -> list[int]:
        """Return the ranks that own some parameters, which get one now if they have none; the same on all ranks."""
        ones = list(indices)
        new = sorted(index for index in ones if index not in self._owners)
        self._owners |= assign_owners(self._shards, new)
        return [self._owners[index] for index in ones]

    # ---------------------------------------------------------------- around a step

    def put_parts(self, part: ShardedParam, states: States, stand_in: Tensor | None) -> None:
        """Put this rank's tensors in place."""
        state = states.get(part.param)
        if state is not None:
            self.cut_whole(part.param, state)
            if stand_in is not None:
                self._shown[part.index] = shown = {
                    name: value for name, value in state.items() if self._is_shown((part.index, name), value)
                }
                state.update({name: self._parts[part.index, name] for name in shown})

    def take_parts(self, part: ShardedParam, states: States, stand_in: Tensor | None) -> None:
        """Leave placeholders for them again."""
        state = states.get(part.param)
        if stand_in is None or state is None:
            self._owned.pop(part.index, None)
        else:
            shown = self._shown.pop(part.index, {})
            for name, value in state.items():
                if _is_kept(value):
                    self._parts[part.index, name] = value
                    self._leave_placeholder((part.index, name), StateFormat.of(value), state, shown.get(name))
            self._owned[part.index] = state

    def cut_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep a parameter's tensors if it is this rank's, drop them if it is not, and leave placeholders."""
        index = self._index.get(id(param))
        if index is None or index not in self._owners:
            return
        lazy_tensor.settle(v for v in state.values() if isinstance(v, LazyTensor) and not self._is_ours(v))
        for name, value in state.items():
            if _is_kept(value):
                key, form, sole = (index, name), StateFormat.of(value), is_unshared(value)
                if self._owns(index):
                    self._parts[key] = value.detach() if sole else value.clone()
                self._leave_placeholder(key, form, state, value, sole=sole)

    def _places(self, key: Key) -> Mapping[int, Shard]:
        numel = self._forms[key].shape.numel()
        return {self._owners[key[0]]: Shard(0, numel, numel)}

    def _owns(self, index: int) -> bool:
        return self._owners[index] == self._group.rank()

    # ---------------------------------------------------------------- telling the others

    def learn(self, parts: Iterable[ShardedParam], states: States, *, steady: bool) -> None:
        """Show the state that others' parameters have after a step, once all ranks have come to its end.

        Args:
            parts: The parameters of this model that were updated.
            states: The optimizer's ``state``.
            steady: Whether its form stays as it was when it appeared.
        """
        params = {
            part.index: part.param
            for part in parts
            if not self._owns(part.index) and not (steady and states.get(part.param))
        }
        if not params:
            return
        question = {"edition": self.editions.version, "forms": list(params)}
        owners = sorted({self._owners[index] for index in params})
        for header, tensors in PeerRpc.for_group(self._group).call(self._topic, question, owners).values():
            for index, form in unpack(header["forms"], tensors, self._shards.params[0].device).items():
                self._show(index, form, states.setdefault(params[index], {}))

    def _show(self, index: int, form: Mapping[Any, Any], state: dict[Any, Any]) -> None:
        shown = dict(state)
        if list(state) != list(form):
            state.clear()
        for name, value in form.items():
            if isinstance(value, StateFormat):
                self._leave_placeholder((index, name), value, state, shown.get(name))
            else:
                state[name] = value

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        if "forms" not in question:
            return super()._answer(question)
        self.editions.wait_for_version(question["edition"], PATIENCE_S)
        wanted = [index for index in question["forms"] if index in self._owned]
        packed, inside = pack({index: self._form(index) for index in wanted})
        if inside:
            inside = self.editions.read_version(
                question["edition"], lambda: [copy_to_host(one.contiguous()) for one in inside], PATIENCE_S
            )
        return {"forms": packed}, inside

    def _form(self, index: int) -> dict[Any, Any]:
        return {
            name: self._forms[index, name] if (index, name) in self._forms and isinstance(value, Tensor) else value
            for name, value in self._owned[index].items()
        }


def _is_kept(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided
