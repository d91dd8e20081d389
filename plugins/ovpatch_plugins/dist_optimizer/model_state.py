"""What this rank keeps of an optimizer's state for the parameters of one model, and how it gets the rest.

[Note: numbers of editions] A step makes an edition, on all ranks, and so does ``load_state_dict()``, which ranks call
one earlier than the other. Who still reads what was there before must get that, so a rank that loads keeps it for a
while; and who reads what it has loaded waits until its peers have loaded it, too. Editions are numbered by steps first,
so that ranks agree again after the next step even if only one of them has loaded.

[Note: the same tensor] A script may hold a tensor of the state over steps, read it and write to it: stock updates it in
place. So an object that was a placeholder once, and was put together since, becomes one again in the next step. Where
something else looks into its memory (a view, an array of NumPy), it stays whole, and is put together after every step.

[Note: read before the step] Nobody begins a step before all ranks have taken part in its backward, so what is read
until then is there. A rank that reads after the backward, and whose peers perhaps do so, too, lets them come to their
steps before its own begins.
"""

from __future__ import annotations

import abc
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap import placeholders
from ovpatch.overlap.editions import Editions, TornReadError
from ovpatch.overlap.farewell import Farewell
from ovpatch.overlap.grad_shards import GradShards
from ovpatch.overlap.memory import is_dense, is_unshared
from ovpatch.overlap.peers import Peers
from ovpatch.overlap.placeholders import Placeholder
from ovpatch.overlap.slices import Slice, elements_of, flat
from ovpatch.overlap.staging import to_host
from ovpatch.overlap.weakly import weakly
from ovpatch_plugins.dist_optimizer.counters import COUNTERS
from ovpatch_plugins.dist_optimizer.forms import Form

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.parts import Part

States = dict[Any, dict[Any, Any]]
Updated = Sequence[tuple["Part", Parameter]]  # each with what stands in for it
Key = tuple[int, Any]  # index of the parameter, and the optimizer's name of the tensor

_LOADS = 1 << 20  # editions from one step to the next; all but the first are made by load_state_dict()

_KEPT = 4  # editions that loading has replaced

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
        # Weakly: they know their source, whose parts must not wait for the garbage collector.
        self._placeholders: weakref.WeakValueDictionary[Key, Placeholder] = weakref.WeakValueDictionary()
        self._whole: dict[Key, Tensor] = {}  # what stays so in this step; see [Note: the same tensor]
        self._counted = 0, 0  # bytes that this rank keeps, and bytes of the whole
        self._steps = self._coming_to = 0
        self._read_after = -1  # how many backwards there were when somebody read, since the last step
        self._changed = threading.Condition()
        self._earlier: dict[int, dict[Key, Tensor]] = {}  # what there was before state was loaded, by edition
        self._topic = f"state of optimizer {number} of {shards.identity}"
        weakref.finalize(self, Peers.of(shards.group).serve(self._topic, weakly(self._answer)))

    # ---------------------------------------------------------------- around a step

    def begin_step(self) -> None:
        """Say that a step begins to change the parts; all ranks came to the end of the last but one."""
        with self._changed:
            self._steps += 1
            self._changed.notify_all()
        self._whole.clear()
        oldest = (self._steps - 1) * _LOADS
        self._earlier = {number: parts for number, parts in self._earlier.items() if number >= oldest}
        self.editions.begin(self._steps * _LOADS)

    def come(self) -> None:
        """Say that a step comes, and wait for the others if need be; see [Note: read before the step]."""
        if self._read_after == self._shards.backwards:
            self._read_after = -1
            with self._changed:
                self._coming_to = self._steps + 1
                self._changed.notify_all()
            Peers.of(self._group).ask(self._topic, {"coming to": self._coming_to})

    def refill(self) -> None:
        """Put together after a step what stays whole."""
        if self._whole:
            with torch.inference_mode(False), torch.no_grad():
                for tensor, whole in zip(self._whole.values(), self._wholes(list(self._whole)), strict=True):
                    tensor.copy_(whole)
            COUNTERS.state_refilled += len(self._whole)

    def end_step(self, size: int) -> None:
        """Say that the parts are complete; there were ``size`` tensors before."""
        self.editions.end()
        if self.size > size:
            self.count()

    def load(self, states: States) -> None:
        """Cut what was loaded; see [Note: numbers of editions]."""
        now = {id(value) for state in states.values() for value in state.values()}
        # What the script still holds of the state before keeps its content, as under stock.
        if not Peers.destroyed(self._group):
            held = [mark for mark in self._placeholders.values() if id(mark) not in now and self._is_ours(mark)]
            placeholders.settle(held)
        self._earlier[self.editions.number] = self._parts
        self._parts = dict(self._parts)
        while len(self._earlier) > _KEPT:
            del self._earlier[next(iter(self._earlier))]
        self.editions.begin()
        try:
            for param, state in states.items():
                self.cut_whole(param, state)
        finally:
            self.editions.end()

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

    def begin_update(self, updated: Updated, states: States) -> None:
        """Prepare stand-ins for the update, all at once; their state has been put."""
        del updated, states

    def end_update(self, updated: Updated, states: States) -> None:
        """Take from stand-ins what the update has made of them, all at once; their state will be taken."""
        del updated, states

    @abc.abstractmethod
    def cut_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's parts of a parameter's state that is whole, and leave placeholders."""

    @abc.abstractmethod
    def _places(self, key: Key) -> Mapping[int, Slice]:
        """Return which of a tensor's elements each rank keeps."""

    def _leave_placeholder(
        self, key: Key, form: Form, state: dict[Any, Any], held: Any = None, *, sole: bool | None = None
    ) -> None:
        """Leave in ``state`` what stands for a tensor of which this rank has taken its part.

        Args:
            key: Of the tensor.
            form: The tensor's.
            state: The parameter's state.
            held: What stood there before, which the script may hold; see [Note: the same tensor].
            sole: Whether nobody else knows the memory of ``held``, where that was asked before.
        """
        known = self._forms.get(key)
        self._forms[key] = form
        if self._is_ours(held) and held.key == key and (known is form or known == form):
            state[key[1]] = held
            return
        if isinstance(held, Tensor) and not isinstance(held, Placeholder) and _is_like(held, form):
            if is_unshared(held) if sole is None else sole:
                mark = placeholders.empty_out(held, self, key, own=True)
            elif not held.is_inference():
                self._whole[key] = state[key[1]] = held
                return
            else:
                mark = placeholders.make(form, self, key, own=True)
        else:
            mark = placeholders.make(form, self, key, own=True)
        last = self._placeholders.get(key)
        if last is not None and last is not mark and self._is_ours(last):
            placeholders.redirect(last, _REPLACED, key)
        self._placeholders[key] = state[key[1]] = mark

    def _is_shown(self, key: Key, value: Any) -> bool:
        """Tell whether this stands for a tensor of which this rank has taken its part."""
        return self._is_ours(value) or (bool(self._whole) and self._whole.get(key) is value)

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, Placeholder) and value.source is self

    def count(self) -> None:
        """Count what is kept, where more has come since the last time."""
        kept = sum(part.nbytes for part in self._parts.values())
        whole = sum(form.shape.numel() * form.dtype.itemsize for form in self._forms.values())
        COUNTERS.state_bytes += max(0, kept - self._counted[0])
        COUNTERS.state_bytes_whole += max(0, whole - self._counted[1])
        self._counted = max(kept, self._counted[0]), max(whole, self._counted[1])

    @property
    def retired(self) -> bool:
        """Whether the model has other shards now, as after a cast."""
        return self._shards.retired

    @property
    def size(self) -> int:
        """How many tensors of state there are."""
        return len(self._forms)

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
        """Return whole tensors on the CPU, in new memory, of the edition that this rank has, to who reads them."""
        self._read_after = self._shards.backwards
        return self._wholes([one.key for one in wanted])

    def _wholes(self, keys: Sequence[Key]) -> list[Tensor]:
        number = self.editions.number
        question = self._farewell.mark({"edition": number, "entries": keys})
        begin = time.monotonic()
        answers = Peers.of(self._group).ask(self._topic, question)
        COUNTERS.state_reads += 1
        COUNTERS.state_read_ms += round(1e3 * (time.monotonic() - begin))
        parts: dict[Key, dict[int, Tensor]] = {key: {} for key in keys}
        for rank, (header, tensors) in answers.items():
            for position, part in zip(header["positions"], tensors, strict=True):
                parts[keys[position]][rank] = part
                COUNTERS.bytes_pulled += part.nbytes
        for position, part in zip(*self._read(number, keys), strict=True):
            parts[keys[position]][self._group.rank()] = part
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
            elements_of(whole, places[rank]).copy_(part)
        return whole

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        if "coming to" in question:
            with self._changed:
                self._changed.wait_for(
                    lambda: max(self._steps, self._coming_to) >= question["coming to"], PATIENCE_S
                )
            return {}, []
        positions, parts = self._read(question["edition"], [tuple(entry) for entry in question["entries"]])
        self._farewell.hear(question)
        return {"positions": positions}, parts

    def _read(self, number: int, keys: Sequence[Key]) -> tuple[list[int], list[Tensor]]:
        """Return copies of this rank's parts, of one edition, with the positions among ``keys`` of what it has."""

        def copy(source: Mapping[Key, Tensor]) -> tuple[list[int], list[Tensor]]:
            positions = [position for position, key in enumerate(keys) if key in source]
            return positions, [to_host(_elements(source[keys[position]])) for position in positions]

        self.editions.wait_for(number, PATIENCE_S)
        parts = self._parts  # those of this edition or, if it is among the earlier ones by now, of a later
        if number not in self._earlier:
            try:
                return self.editions.read(number, lambda: copy(parts), PATIENCE_S)
            except TornReadError:
                if number not in self._earlier:  # else it was by loading
                    raise
        earlier = self._earlier[number]
        return self.editions.read(number, lambda: copy(earlier), PATIENCE_S, kept=True)


def _is_like(tensor: Tensor, form: Form) -> bool:
    return tensor.shape == form.shape and tensor.dtype == form.dtype and tensor.device == form.device


class _Replaced:
    """The source of tensors in whose place the script has put others, and steps have been made since."""

    def fetch(self, wanted: Sequence[Placeholder], *, noticed: bool) -> list[Tensor]:
        del noticed
        raise RuntimeError(
            f"ovpatch: a tensor that was '{wanted[0].key[1]}' in an optimizer's state was replaced there, and there "
            "was a step since, so its content is gone. Read or copy it before the step, or turn dist_optimizer off."
        )


_REPLACED = _Replaced()


def _elements(part: Tensor) -> Tensor:
    return flat(part if is_dense(part) else part.contiguous())
