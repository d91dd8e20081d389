"""What this rank keeps of an optimizer's state for the parameters of one model, and how it gets the rest."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ovpatch.overlap import placeholders
from ovpatch.overlap.editions import Editions
from ovpatch.overlap.farewell import Farewell
from ovpatch.overlap.grad_shards import GradShards
from ovpatch.overlap.memory import is_dense
from ovpatch.overlap.peers import Peers
from ovpatch.overlap.placeholders import Placeholder
from ovpatch.overlap.slices import Slice, flat
from ovpatch.overlap.staging import to_host
from ovpatch.overlap.weakly import weakly
from ovpatch_plugins.dist_optimizer.counters import COUNTERS
from ovpatch_plugins.dist_optimizer.forms import Form

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.parts import Part

States = dict[Any, dict[Any, Any]]
Key = tuple[int, Any]  # index of the parameter, and the optimizer's name of the tensor

PATIENCE_S = 600.0  # for a rank whose step comes later; the asker's own time-out comes first


class StateOfModel(abc.ABC):
    """The source of the placeholders in one optimizer's state for the parameters of one model.

    Args:
        shards: The model's.
        number: Of the optimizer, the same on all ranks and no other's over this model.

    Attributes:
        editions: The editions of the parts.
    """

    def __init__(self, shards: GradShards, number: int) -> None:
        self.editions = Editions(shards.params[0].device)
        self._shards, self._group = shards, shards.group
        self._farewell = Farewell(shards.group)
        self._index = {id(param): index for index, param in enumerate(shards.params)}
        self._parts: dict[Key, Tensor] = {}
        self._forms: dict[Key, Form] = {}
        self._placeholders: dict[Key, Placeholder] = {}
        self._topic = f"state of optimizer {number} of {shards.identity}"
        weakref.finalize(self, Peers.of(shards.group).serve(self._topic, weakly(self._answer)))

    # ---------------------------------------------------------------- around a step

    @abc.abstractmethod
    def put_parts(self, part: Part, states: States, stand_in: Tensor | None) -> None:
        """Put this rank's parts of a parameter's state where the optimizer looks for them.

        Args:
            part: The parameter.
            states: The optimizer's ``state``.
            stand_in: What the optimizer is given for the parameter, if anything.
        """

    @abc.abstractmethod
    def take_parts(self, part: Part, states: States, stand_in: Tensor | None) -> None:
        """Keep what a step has made of them, and leave placeholders; arguments as in :meth:`put_parts`."""

    @abc.abstractmethod
    def cut_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's parts of a parameter's state that is whole, and leave placeholders."""

    @abc.abstractmethod
    def _places(self, key: Key) -> Mapping[int, Slice]:
        """Return which of a tensor's elements each rank keeps."""

    def _leave_placeholder(self, key: Key, form: Form, state: dict[Any, Any]) -> None:
        mark = self._placeholders.get(key)
        if mark is None or not self._is_ours(mark) or self._forms[key] != form:
            mark = self._placeholders[key] = placeholders.make(form, self, key)
        self._forms[key] = form
        state[key[1]] = mark

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, Placeholder) and value.source is self

    # ---------------------------------------------------------------- reading

    def leave(self) -> bool:
        """Tell whether there are still peers to ask; this is the last time."""
        there = not Peers.destroyed(self._group)
        if there:
            self._farewell.say(self)
        return there

    def fetch(self, wanted: Sequence[Placeholder], *, noticed: bool) -> list[Tensor]:
        """Return whole tensors where the placeholders are."""
        del noticed
        return [whole.to(one.device) for one, whole in zip(wanted, self.whole(wanted), strict=True)]

    def whole(self, wanted: Sequence[Placeholder]) -> list[Tensor]:
        """Return whole tensors on the CPU, in new memory, of the edition that this rank has."""
        keys: list[Key] = [one.key for one in wanted]
        question = self._farewell.mark({"edition": self.editions.number, "entries": keys})
        answers = Peers.of(self._group).ask(self._topic, question)
        COUNTERS.state_reads += 1
        parts: dict[Key, dict[int, Tensor]] = {key: {} for key in keys}
        for rank, (header, tensors) in answers.items():
            for position, part in zip(header["positions"], tensors, strict=True):
                parts[keys[position]][rank] = part
                COUNTERS.bytes_pulled += part.nbytes
        for key in keys:
            if key in self._parts:
                parts[key][self._group.rank()] = _elements(self._parts[key])
        return [self._assembled(key, parts[key]) for key in keys]

    def _assembled(self, key: Key, parts: Mapping[int, Tensor]) -> Tensor:
        places = self._places(key)
        missing = [rank for rank in places if rank not in parts]
        if missing:
            raise RuntimeError(
                f"ovpatch: rank {missing[0]} of the process group has no '{key[1]}' in the optimizer's state of "
                f"{self._shards.names[key[0]]}; load the same state on all ranks"
            )
        whole = self._forms[key].empty()
        for rank, part in parts.items():
            flat(whole)[places[rank].begin : places[rank].end].copy_(part)
        return whole

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        keys = [tuple(entry) for entry in question["entries"]]

        def copy() -> tuple[list[int], list[Tensor]]:
            positions = [position for position, key in enumerate(keys) if key in self._parts]
            return positions, [to_host(_elements(self._parts[keys[position]])) for position in positions]

        positions, parts = self.editions.read(question["edition"], copy, PATIENCE_S)
        self._farewell.hear(question)
        return {"positions": positions}, parts


def _elements(part: Tensor) -> Tensor:
    return flat(part if is_dense(part) else part.contiguous())
