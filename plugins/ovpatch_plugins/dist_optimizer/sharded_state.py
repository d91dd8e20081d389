"""What this rank keeps of an optimizer's state for the parameters of one model, and how it gets the rest.

[Note: numbers of editions] A step makes an edition, on all ranks, and so does ``load_state_dict()``, which ranks call
one earlier than the other. Who still reads what was there before must get that, so a rank that loads keeps it for a
while; and who reads what it has loaded waits until its peers have loaded it, too. They are numbered by steps first,
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
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap.peer_rpc import shutdown
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.peer_rpc.shutdown import KeepAlive
from ovpatch.overlap.peer_rpc.versioned import TornReadError, VersionedTensors, copy_to_host
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.ownership import is_dense, is_unshared, weakly
from ovpatch.overlap.tensors.shard import Shard, flat, shard_view
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.state_format import StateFormat

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, StandIns


States = dict[Any, dict[Any, Any]]
Updated = Sequence[tuple["ShardedParam", Parameter]]  # each with what stands in for it
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

    def __init__(self, shards: ShardedGrads, number: int) -> None:
        self.editions = VersionedTensors(shards.params[0].device)
        self._shards, self._group = shards, shards.group
        self._farewell = KeepAlive(shards.group)
        self._index = {id(param): index for index, param in enumerate(shards.params)}
        self._parts: dict[Key, Tensor] = {}
        self._forms: dict[Key, StateFormat] = {}
        # Weakly: they know their source, whose parts must not wait for the garbage collector.
        self._placeholders: weakref.WeakValueDictionary[Key, LazyTensor] = weakref.WeakValueDictionary()
        self._whole: dict[Key, Tensor] = {}  # what stays so in this step; see [Note: the same tensor]
        self._counted = 0, 0  # bytes that this rank keeps, and bytes of the whole
        self._steps = self._coming_to = 0
        self._read_after = -1  # how many backwards there were when somebody read, since the last step
        self._changed = threading.Condition()
        self._earlier: dict[int, dict[Key, Tensor]] = {}  # what there was before state was loaded, by edition
        self._topic = f"state of optimizer {number} of {shards.identity}"
        weakref.finalize(self, PeerRpc.for_group(shards.group).register(self._topic, weakly(self._answer)))

    # ---------------------------------------------------------------- around a step

    def begin_step(self) -> None:
        """Say that a step begins to change the parts; all ranks came to the end of the last but one."""
        with self._changed:
            self._steps += 1
            self._changed.notify_all()
        self._whole.clear()
        oldest = (self._steps - 1) * _LOADS
        self._earlier = {number: parts for number, parts in self._earlier.items() if number >= oldest}
        self.editions.begin_update(self._steps * _LOADS)

    def come(self) -> None:
        """Say that a step comes, and wait for the others if need be; see [Note: read before the step]."""
        if self._read_after == self._shards.backwards:
            self._read_after = -1
            with self._changed:
                self._coming_to = self._steps + 1
                self._changed.notify_all()
            PeerRpc.for_group(self._group).call(self._topic, {"coming to": self._coming_to})

    def refill(self) -> None:
        """Put together after a step what stays whole."""
        if self._whole:
            with torch.inference_mode(False), torch.no_grad():
                for tensor, whole in zip(self._whole.values(), self._wholes(list(self._whole)), strict=True):
                    tensor.copy_(whole)
            COUNTERS.state_refilled += len(self._whole)

    def end_step(self, size: int) -> None:
        """Say that the parts are complete; there were ``size`` tensors before."""
        self.editions.end_update()
        if self.size > size:
            self.count()

    def load(self, states: States) -> None:
        """Cut what was loaded; see [Note: numbers of editions]."""
        now = {id(value) for state in states.values() for value in state.values()}
        # What the script still holds of the state before keeps its content, as under stock.
        if not PeerRpc.is_destroyed(self._group):
            held = [mark for mark in self._placeholders.values() if id(mark) not in now and self._is_ours(mark)]
            lazy_tensor.settle(held)
        self._earlier[self.editions.version] = self._parts
        self._parts = dict(self._parts)
        while len(self._earlier) > _KEPT:
            del self._earlier[next(iter(self._earlier))]
        self.editions.begin_update()
        try:
            for param, state in states.items():
                self.cut_whole(param, state)
        finally:
            self.editions.end_update()

    @abc.abstractmethod
    def put_parts(self, part: ShardedParam, states: States, stand_in: Tensor | None) -> None:
        """Put this rank's parts of a parameter's state where the optimizer looks for them.

        Args:
            part: The parameter.
            states: The optimizer's ``state``.
            stand_in: What the optimizer is given for the parameter, if anything.
        """

    @abc.abstractmethod
    def take_parts(self, part: ShardedParam, states: States, stand_in: Tensor | None) -> None:
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
    def _places(self, key: Key) -> Mapping[int, Shard]:
        """Return which of a tensor's elements each rank keeps."""

    def _leave_placeholder(
        self, key: Key, form: StateFormat, state: dict[Any, Any], held: Any = None, *, sole: bool | None = None
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
        if isinstance(held, Tensor) and not isinstance(held, LazyTensor) and _is_like(held, form):
            if is_unshared(held) if sole is None else sole:
                mark = lazy_tensor.make_lazy_(held, self, key, own=True)
            elif not held.is_inference():
                self._whole[key] = state[key[1]] = held
                return
            else:
                mark = lazy_tensor.make(form, self, key, own=True)
        else:
            mark = lazy_tensor.make(form, self, key, own=True)
        last = self._placeholders.get(key)
        if last is not None and last is not mark and self._is_ours(last):
            lazy_tensor.redirect(last, _REPLACED, key)
        self._placeholders[key] = state[key[1]] = mark

    def _is_shown(self, key: Key, value: Any) -> bool:
        """Tell whether this stands for a tensor of which this rank has taken its part."""
        return self._is_ours(value) or (bool(self._whole) and self._whole.get(key) is value)

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, LazyTensor) and value.source is self

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
        there = not PeerRpc.is_destroyed(self._group)
        if there:
            self._farewell.start_final_calls(self)
        return there

    def fetch(self, wanted: Sequence[LazyTensor], *, noticed: bool) -> list[Tensor]:
        """Return whole tensors where the placeholders are."""
        del noticed
        return [whole.to(one.device) for one, whole in zip(wanted, self.whole(wanted), strict=True)]

    def whole(self, wanted: Sequence[LazyTensor]) -> list[Tensor]:
        """Return whole tensors on the CPU, in new memory, of the edition that this rank has, to who reads them."""
        self._read_after = self._shards.backwards
        return self._wholes([one.key for one in wanted])

    def _wholes(self, keys: Sequence[Key]) -> list[Tensor]:
        number = self.editions.version
        question = self._farewell.mark_final({"edition": number, "entries": keys})
        begin = time.monotonic()
        answers = PeerRpc.for_group(self._group).call(self._topic, question)
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
            shard_view(whole, places[rank]).copy_(part)
        return whole

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        if "coming to" in question:
            with self._changed:
                self._changed.wait_for(lambda: max(self._steps, self._coming_to) >= question["coming to"], PATIENCE_S)
            return {}, []
        positions, parts = self._read(question["edition"], [tuple(entry) for entry in question["entries"]])
        self._farewell.record_call(question)
        return {"positions": positions}, parts

    def _read(self, number: int, keys: Sequence[Key]) -> tuple[list[int], list[Tensor]]:
        """Return copies of this rank's parts, of one edition, with the positions among ``keys`` of what it has."""

        def copy(source: Mapping[Key, Tensor]) -> tuple[list[int], list[Tensor]]:
            positions = [position for position, key in enumerate(keys) if key in source]
            return positions, [copy_to_host(_elements(source[keys[position]])) for position in positions]

        self.editions.wait_for_version(number, PATIENCE_S)
        parts = self._parts  # those of this edition or, if it is among the earlier ones by now, of a later
        if number not in self._earlier:
            try:
                return self.editions.read_version(number, lambda: copy(parts), PATIENCE_S)
            except TornReadError:
                if number not in self._earlier:  # else it was by loading
                    raise
        earlier = self._earlier[number]
        return self.editions.read_version(number, lambda: copy(earlier), PATIENCE_S, kept=True)


def _is_like(tensor: Tensor, form: StateFormat) -> bool:
    return tensor.shape == form.shape and tensor.dtype == form.dtype and tensor.device == form.device


class _Replaced:
    """The source of tensors in whose place the script has put others, and steps have been made since."""

    def fetch(self, wanted: Sequence[LazyTensor], *, noticed: bool) -> list[Tensor]:
        del noticed
        raise RuntimeError(
            f"ovpatch: a tensor that was '{wanted[0].key[1]}' in an optimizer's state was replaced there, and there "
            "was a step since, so its content is gone. Read or copy it before the step, or turn dist_optimizer off."
        )


_REPLACED = _Replaced()


def _elements(part: Tensor) -> Tensor:
    return flat(part if is_dense(part) else part.contiguous())


# State of element-wise optimizers: each rank keeps a slice of every tensor that has its parameter's shape.


class ShardedStateOfModel(StateOfModel):
    """The slices; what has another shape, as the number of steps, is on all ranks."""

    def put_parts(self, part: ShardedParam, states: States, stand_in: Tensor | None) -> None:
        """Make this rank's slices the stand-in's state."""
        state = states.get(part.param)
        if state is not None:
            self.cut_whole(part.param, state)
            states[stand_in] = {
                name: self._parts[key] if self._is_shown(key := (part.index, name), value) else value
                for name, value in state.items()
            }

    def take_parts(self, part: ShardedParam, states: States, stand_in: Tensor | None) -> None:
        """Keep what a step has made of them, and leave placeholders."""
        if stand_in is None or stand_in not in states:
            return
        state = states.setdefault(part.param, {})
        for name, value in states.pop(stand_in).items():
            if isinstance(value, Tensor) and value.shape == stand_in.shape:
                self._keep((part.index, name), value, state, state.get(name))
            else:
                state[name] = value

    def cut_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's slices of state that is whole, and leave placeholders."""
        index = self._index.get(id(param))
        if index is None or not self._shards.can_be_sharded(index):
            return
        own = self._shards.slice(index)
        with torch._C.DisableTorchFunctionSubclass():
            shape = param.shape
        for name, value in state.items():
            if isinstance(value, Tensor) and not self._is_ours(value) and value.shape == shape:
                laid_out = value.detach()
                if value.stride() != param.stride():
                    laid_out = torch.empty_like(param, dtype=value.dtype).copy_(value)
                part = shard_view(laid_out, own).clone()
                del laid_out  # else it would count as somebody who looks into the memory
                self._keep((index, name), part, state, value)

    def _keep(self, key: Key, part: Tensor, state: dict[Any, Any], held: Any) -> None:
        self._parts[key] = part
        form = self._forms.get(key)
        if form is None or form.dtype != part.dtype:  # the rest is the parameter's, as long as it has these shards
            param = self._shards.params[key[0]]
            form = StateFormat(param.shape, param.stride(), part.dtype, param.device)
        self._leave_placeholder(key, form, state, held)

    def _places(self, key: Key) -> Mapping[int, Shard]:
        return dict(enumerate(self._shards.slices(key[0])))


# The state of one optimizer, of which each rank keeps its parts.
#
# [Note: what others see] Between steps ``optimizer.state[p]`` holds, under the names that the optimizer gave them,
# tensors of full shape: placeholders, whose content is put together from the peers' parts when somebody reads it. A
# slice must never be seen there: torch checks no shapes when a state is loaded, and its fused kernels write beyond
# the end of one that is too short. What somebody puts there instead (a loaded checkpoint, a state changed by hand) is
# whole, and is cut when the next step begins.

_Model = TypeVar("_Model", bound=StateOfModel)

# How many optimizers have stepped over each model; the same on all ranks, which step in the same order.
_optimizers_of: weakref.WeakKeyDictionary[ShardedGrads, int] = weakref.WeakKeyDictionary()


class ShardedState(Generic[_Model]):
    """The parts of one optimizer's state.

    Args:
        optimizer: The optimizer; held weakly.
        of_model: What keeps them, for one model.
    """

    def __init__(self, optimizer: Optimizer, of_model: Callable[[ShardedGrads, int], _Model]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._of_model = of_model
        self._models: dict[int, _Model] = {}
        self._hooks = (
            optimizer.register_state_dict_post_hook(weakly(self._whole_state_dict), prepend=True),
            optimizer.register_load_state_dict_post_hook(weakly(self._loaded)),
        )

    def take_over(self, parts: Sequence[ShardedParam]) -> None:
        """Fill in what a step would ask for: gradients and state that are other shards', as of a model wrapped anew.

        Called before hosts arrive for the gathers, from when on no rank may ask.
        """
        if all(id(part.shards) in self._models for part in parts):
            return
        optimizer = self._optimizer()
        assert optimizer is not None
        for part in parts:
            ours = part.shards, self._models.get(id(part.shards))
            held = (part.param.grad, *optimizer.state.get(part.param, {}).values())
            lazy_tensor.settle(one for one in held if isinstance(one, LazyTensor) and one.source not in ours)

    def come(self) -> None:
        """Say that a step comes; see model_state.py, [Note: read before the step]."""
        for model in self._models.values():
            model.come()

    def refill(self) -> None:
        """Put together after a step, once all ranks have come to its end, what stays whole in ``optimizer.state``."""
        for model in self._models.values():
            model.refill()

    @contextmanager
    def written(self, parts: Sequence[ShardedParam], stand_ins: StandIns) -> Iterator[None]:
        """Put this rank's parts into ``optimizer.state``, as the stand-ins' state, for the time of a step."""
        optimizer = self._optimizer()
        assert optimizer is not None
        by_model = [(part, self.model(part.shards)) for part in parts]
        with ExitStack() as afterwards:  # all of it, whatever raises: peers wait for the end of what has begun
            for model in dict.fromkeys(model for _, model in by_model):
                afterwards.callback(model.end_step, model.size)
                model.begin_step()
            updated: dict[_Model, list[tuple[ShardedParam, Parameter]]] = {}
            for part, model in by_model:
                stand_in = stand_ins.get(id(part.param))
                afterwards.callback(model.take_parts, part, optimizer.state, stand_in)
                model.put_parts(part, optimizer.state, stand_in)
                if stand_in is not None:
                    updated.setdefault(model, []).append((part, stand_in))
            for model, ones in updated.items():
                afterwards.callback(model.end_update, ones, optimizer.state)
                model.begin_update(ones, optimizer.state)
            yield

    def release(self) -> None:
        """Put whole tensors into ``optimizer.state``, while there are peers to ask; nothing of it is cut any more."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            leaving: list[StateOfModel] = [model for model in self._models.values() if model.leave()]
            values = [value for state in optimizer.state.values() for value in state.values()]
            lazy_tensor.settle(v for v in values if isinstance(v, LazyTensor) and v.source in leaving)

    def model(self, shards: ShardedGrads) -> _Model:
        """Return what keeps the parts of one model's parameters."""
        if id(shards) not in self._models:
            number = _optimizers_of[shards] = _optimizers_of.get(shards, 0) + 1
            model = self._models[id(shards)] = self._of_model(shards, number)
            # A slower peer may still ask when the script has dropped the optimizer here.
            weakref.finalize(self._optimizer(), shutdown.keep_until_backward, shards.group, model).atexit = False
        return self._models[id(shards)]

    def _whole_state_dict(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Replace placeholders by whole tensors on the CPU, fetched together; ``optimizer.state`` keeps its own.

        All else goes to the CPU, too, but for scalars: torch.distributed.checkpoint wants one device.
        """
        wanted = [
            (number, name, value)
            for number, state in state_dict["state"].items()
            for name, value in state.items()
            if isinstance(value, LazyTensor) and isinstance(value.source, StateOfModel)
        ]
        if not wanted:
            return
        copies = {number: _on_cpu(state) for number, state in state_dict["state"].items()}
        for _, group in itertools.groupby(sorted(wanted, key=_source), key=_source):
            ones = list(group)
            model = ones[0][2].source
            assert isinstance(model, StateOfModel)
            wholes = model.whole([value for *_, value in ones])
            for (number, name, _), whole in zip(ones, wholes, strict=True):
                copies[number][name] = whole
        state_dict["state"] = copies

    def _loaded(self, optimizer: Optimizer) -> None:
        """Cut what was loaded, at once: whole state takes the memory that this feature is there to spare."""
        for model in self._models.values():
            if not model.retired:
                model.load(optimizer.state)


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
    return value if value.ndim == 0 or isinstance(value, LazyTensor) else value.cpu()


def _source(wanted: tuple[Any, str, LazyTensor]) -> int:
    return id(wanted[2].source)
