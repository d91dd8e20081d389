"""The state of one optimizer, of which each rank keeps its parts.

[Note: what others see] Between steps ``optimizer.state[p]`` holds, under the names that the optimizer gave them,
tensors of full shape: placeholders, whose content is put together from the peers' parts when somebody reads it. A slice
must never be seen there: torch checks no shapes when a state is loaded, and its fused kernels write beyond the end of
one that is too short. What somebody puts there instead (a loaded checkpoint, a state changed by hand) is whole, and is
cut when the next step begins.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ovpatch.overlap import farewell, placeholders
from ovpatch.overlap.editions import Editions
from ovpatch.overlap.farewell import Farewell
from ovpatch.overlap.grad_shards import GradShards
from ovpatch.overlap.peers import Peers
from ovpatch.overlap.placeholders import Placeholder
from ovpatch.overlap.slices import assemble, flat
from ovpatch.overlap.staging import to_host
from ovpatch.overlap.weakly import weakly
from ovpatch_plugins.dist_optimizer.counters import COUNTERS

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.parts import Part, StandIns

# How many optimizers have stepped over each model; the same on all ranks, which step in the same order.
_optimizers_of: weakref.WeakKeyDictionary[GradShards, int] = weakref.WeakKeyDictionary()

_PATIENCE_S = 600.0  # for a rank whose step comes later; the asker's own time-out comes first


class ShardedState:
    """The parts of one optimizer's state.

    Args:
        optimizer: The optimizer; held weakly.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._models: dict[int, _StateOfModel] = {}
        optimizer.register_state_dict_post_hook(weakly(self._whole_state_dict), prepend=True)
        optimizer.register_load_state_dict_post_hook(weakly(self._loaded))

    @contextmanager
    def written(self, parts: Sequence[Part], stand_ins: StandIns) -> Iterator[None]:
        """Put this rank's parts into ``optimizer.state``, as the stand-ins' state, for the time of a step."""
        optimizer = self._optimizer()
        assert optimizer is not None
        by_model = [(part, self._model(part.shards)) for part in parts]
        models = list({id(model): model for _, model in by_model}.values())
        for model in models:
            model.editions.begin()
        try:
            for part, model in by_model:
                model.put_parts(part, stand_ins[id(part.param)], optimizer.state)
            yield
        finally:
            for part, model in by_model:
                model.take_parts(part, stand_ins[id(part.param)], optimizer.state)
            for model in models:
                model.editions.end()

    def release(self) -> None:
        """Put whole tensors into ``optimizer.state``, while there are peers to ask."""
        optimizer = self._optimizer()
        if optimizer is not None:
            leaving = [model for model in self._models.values() if model.leave()]
            values = [value for state in optimizer.state.values() for value in state.values()]
            placeholders.settle(v for v in values if isinstance(v, Placeholder) and v.source in leaving)

    def _model(self, shards: GradShards) -> _StateOfModel:
        if id(shards) not in self._models:
            number = _optimizers_of[shards] = _optimizers_of.get(shards, 0) + 1
            model = self._models[id(shards)] = _StateOfModel(shards, number)
            # A slower peer may still ask when the script has dropped the optimizer here.
            weakref.finalize(self._optimizer(), farewell.keep, shards.group, model).atexit = False
        return self._models[id(shards)]

    def _whole_state_dict(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Replace placeholders by whole tensors on the CPU, fetched together; ``optimizer.state`` keeps its own.

        All else goes to the CPU, too, but for scalars: torch.distributed.checkpoint wants one device.
        """
        wanted = [
            (number, name, value)
            for number, state in state_dict["state"].items()
            for name, value in state.items()
            if isinstance(value, Placeholder) and isinstance(value.source, _StateOfModel)
        ]
        if not wanted:
            return
        copies = {number: _on_cpu(state) for number, state in state_dict["state"].items()}
        for _, group in itertools.groupby(sorted(wanted, key=_source), key=_source):
            ones = list(group)
            model = ones[0][2].source
            assert isinstance(model, _StateOfModel)
            wholes = model.whole([value for *_, value in ones])
            for (number, name, _), whole in zip(ones, wholes, strict=True):
                copies[number][name] = whole
        state_dict["state"] = copies

    def _loaded(self, optimizer: Optimizer) -> None:
        """Cut what was loaded, at once: whole state takes the memory that this feature is there to spare."""
        for param, state in optimizer.state.items():
            for model in self._models.values():
                model.cut_whole(param, state)


class _StateOfModel:
    """The parts of an optimizer's state for the parameters of one model; the source of their placeholders."""

    def __init__(self, shards: GradShards, number: int) -> None:
        self.editions = Editions(shards.params[0].device)
        self._farewell = Farewell(shards.group)
        self._shards = shards
        self._index = {id(param): index for index, param in enumerate(shards.params)}
        self._parts: dict[tuple[int, str], Tensor] = {}
        self._placeholders: dict[tuple[int, str], Placeholder] = {}
        self._topic = f"state of optimizer {number} of {shards.identity}"
        weakref.finalize(self, Peers.of(shards.group).serve(self._topic, weakly(self._answer)))

    # ---------------------------------------------------------------- around a step

    def put_parts(self, part: Part, stand_in: Tensor, states: dict[Any, dict[str, Any]]) -> None:
        """Make this rank's parts of a parameter's state its stand-in's."""
        state = states.get(part.param)
        if state is not None:
            self.cut_whole(part.param, state)
            states[stand_in] = {
                name: self._parts[part.index, name] if self._is_ours(value) else value for name, value in state.items()
            }

    def take_parts(self, part: Part, stand_in: Tensor, states: dict[Any, dict[str, Any]]) -> None:
        """Keep what a step has made of them, and leave placeholders."""
        if stand_in not in states:
            return
        state = states.setdefault(part.param, {})
        for name, value in states.pop(stand_in).items():
            if isinstance(value, Tensor) and value.shape == stand_in.shape:
                self._keep(part.index, name, value, state)
            else:
                state[name] = value

    def cut_whole(self, param: Tensor, state: dict[str, Any]) -> None:
        """Keep this rank's parts of state that is whole, and leave placeholders."""
        index = self._index.get(id(param))
        if index is None or not self._shards.can_be_cut(index):
            return
        own = self._shards.slice(index)
        for name, value in state.items():
            if isinstance(value, Tensor) and not self._is_ours(value) and value.shape == param.shape:
                if value.stride() != param.stride():
                    value = torch.empty_like(param, dtype=value.dtype).copy_(value)
                self._keep(index, name, flat(value.detach())[own.begin : own.end].clone(), state)

    def _keep(self, index: int, name: str, part: Tensor, state: dict[str, Any]) -> None:
        key = (index, name)
        self._parts[key] = part
        mark = self._placeholders.get(key)
        if mark is None or not self._is_ours(mark) or mark.dtype != part.dtype:
            mark = self._placeholders[key] = placeholders.make(self._shards.params[index], self, key, dtype=part.dtype)
        state[name] = mark

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, Placeholder) and value.source is self

    # ---------------------------------------------------------------- reading

    def leave(self) -> bool:
        """Tell whether there are still peers to ask; this is the last time."""
        there = not Peers.destroyed(self._shards.group)
        if there:
            self._farewell.say(self)
        return there

    def fetch(self, wanted: Sequence[Placeholder], *, noticed: bool) -> list[Tensor]:
        """Return whole tensors where the parameters are."""
        del noticed
        return [whole.to(one.device) for one, whole in zip(wanted, self.whole(wanted), strict=True)]

    def whole(self, wanted: Sequence[Placeholder]) -> list[Tensor]:
        """Return whole tensors on the CPU, in new memory, of the edition that this rank has."""
        entries = [one.key for one in wanted]
        question = self._farewell.mark({"edition": self.editions.number, "entries": entries})
        answers = Peers.of(self._shards.group).ask(self._topic, question)
        COUNTERS.state_reads += 1
        wholes = []
        for position, (index, name) in enumerate(entries):
            parts = {rank: tensors[position] for rank, (_, tensors) in answers.items()}
            COUNTERS.bytes_pulled += sum(part.nbytes for part in parts.values())
            own = self._parts[index, name]
            parts[self._shards.group.rank()] = own
            like = torch.empty_like(self._shards.params[index], dtype=own.dtype, device="cpu", requires_grad=False)
            wholes.append(assemble(like, parts, self._shards.slices(index)))
        return wholes

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        def copy() -> list[Tensor]:
            return [to_host(self._parts[index, name]) for index, name in question["entries"]]

        parts = self.editions.read(question["edition"], copy, _PATIENCE_S)
        self._farewell.hear(question)
        return {}, parts


def put_in_order(optimizer: Optimizer, known: int) -> None:
    """Put what has come into ``optimizer.state`` since it had ``known`` entries where stock puts it."""
    state = optimizer.state
    if len(state) > known:
        places = {param: i for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        for param in sorted(list(state)[known:], key=lambda param: places.get(param, -1)):
            state[param] = state.pop(param)


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def _copied(value: Tensor) -> Tensor:
    return value if value.ndim == 0 or isinstance(value, Placeholder) else value.cpu()


def _source(wanted: tuple[Any, str, Placeholder]) -> int:
    return id(wanted[2].source)
