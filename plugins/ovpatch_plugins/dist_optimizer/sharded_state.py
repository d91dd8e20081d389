"""The state of one optimizer for the parameters of one model, of which each rank keeps a part."""

from __future__ import annotations

import abc
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.comm.lifetimes import outside_user_modes, renew_in_children, weak_method
from ovpatch.overlap.peer_rpc.retention import FinalReads
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.peer_rpc.sequence_lock import SequenceLock, TornReadError, copy_to_host
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor, TensorMeta
from ovpatch.overlap.tensors.shard import Shard, shard_view, view_flat
from ovpatch.overlap.tensors.tensor_memory import is_dense, is_unshared
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam
from ovpatch_plugins.dist_optimizer.step_log import Turn

States = dict[Any, dict[Any, Any]]  # an optimizer's ``state``
Swapped = list[tuple[ShardedParam, Parameter]]  # parameters, and what the optimizer is given for them
Shown = dict[int, Parameter | None]  # by id() of a parameter, what the optimizer is given for it, if anything
Key = tuple[int, Any]  # index of the parameter, and the optimizer's name of the tensor

_VERSIONS_PER_STEP = 1 << 20  # all but the first are made by load_state_dict()

_MAX_EARLIER = 4  # versions that loading has replaced and that are kept

PATIENCE_S = 600.0  # for a rank whose step comes later; the reader's own time-out comes first


_REPLACED = (
    "ovpatch: the tensor '{}' of an optimizer's state was replaced there, and a step has run since, so its old "
    "content is gone. Read or copy it before the step, or turn dist_optimizer off."
)

ERROR_MISPLACED = (
    "ovpatch: the tensor '{}' in the optimizer's state of parameter '{}' belongs to another parameter or has another "
    "name there. It was not read before, so each rank has the wrong shard of it. Put a copy there (tensor.clone()), "
    "or turn dist_optimizer off."
)

_TOO_LATE = (
    "A step ran meanwhile. Read optimizer state between a step and the next backward, on every rank that reads. For "
    "a thread that reads later, make a copy first: copy.deepcopy(optimizer.state_dict())"
)


class ShardedState(abc.ABC):
    """The source of the lazy tensors in one optimizer's state for the parameters of one model.

    Between steps ``optimizer.state[p]`` holds lazy tensors of full shape, whose content is put together from the shards
    of all ranks when they are read. A shard is never seen there: torch checks no shapes when it loads a state, and its
    fused kernels write beyond the end of a tensor that is too short. What a script puts there instead (a checkpoint, a
    state changed by hand) is whole, and is sharded when the next step begins.

    [Note: versions of state] A step makes a version of the shards, on all ranks; so does ``load_state_dict()``, which
    ranks call one earlier than the other. A reader asks for the version that it has itself: a rank that loads keeps the
    shards from before for a while, and a reader of loaded state waits until its peers have loaded it. Versions are
    numbered by steps first, so ranks agree again after the next step even if one of them alone has loaded. No rank
    begins a step before all ranks have taken part in its backward. A rank that has read after the backward waits until
    its peers, which may read as well, have come to their steps (:meth:`wait_for_readers`).

    [Note: the same tensor] A script may hold a tensor of the state over steps, read it and write to it: stock updates
    it in place. So a lazy tensor that was materialized becomes lazy again in the next step. If its memory is referenced
    elsewhere (a view, an array of NumPy), it stays whole, and is filled again after every step.

    Args:
        shards: The sharded gradients of the model.
        turn: The optimizer's terms and number, the same on all ranks and no other's over this model.
    """

    def __init__(self, shards: ShardedGrads, turn: Turn) -> None:
        self._versions = SequenceLock(shards.params[0].device)
        self._shards, self.group = shards, shards.group
        self._keep_alive = FinalReads(shards.group)
        self._index = {id(param): index for index, param in enumerate(shards.params)}
        self._local: dict[Key, Tensor] = {}  # this rank's shards
        self._metas: dict[Key, TensorMeta] = {}
        # Weakly: they know their source, whose shards must not wait for the garbage collector.
        self._lazy: weakref.WeakValueDictionary[Key, LazyTensor] = weakref.WeakValueDictionary()
        self._held: dict[Key, Tensor] = {}  # what stays whole in this step; see [Note: the same tensor]
        self._counted = 0, 0  # bytes that this rank keeps, and bytes of the whole
        self._steps = self._next_step = turn.steps
        self.turn = turn
        self._read_after = -1  # how many backwards there were at the last read since the last step
        self._changed = threading.Condition()
        renew_in_children(self, "_changed", threading.Condition)
        self._earlier: dict[int, dict[Key, Tensor]] = {}  # shards that loading has replaced, by version
        self._kept: SwapCache | None = None
        self._topic = f"state of {turn.name}, of {shards.identity}"
        if turn.name in shards.states:  # this rank alone has made its optimizer again
            shards.states[turn.name]._withdraw()
        shards.states[turn.name] = self
        peers, for_forks = PeerRpc.for_group(shards.group), not self._versions.asynchronous
        withdraw = peers.register(self._topic, weak_method(self._answer), for_forks=for_forks)
        self._withdraw: weakref.finalize[[], ShardedState] = weakref.finalize(self, withdraw)

    def next_turn(self) -> Turn:
        """Return what the next step is."""
        return Turn(self.turn.terms, number=self.turn.number, steps=self._steps, agreed=True)

    # ---------------------------------------------------------------- what the optimizer calls around a step

    @staticmethod
    @abc.abstractmethod
    def can_divide(shards: ShardedGrads, index: int) -> bool:
        """Return whether a parameter's update can be divided, and ask for what that takes of its gradient."""

    @property
    def was_read(self) -> bool:
        """True if this rank has read state since its last step and the last backward."""
        return self._read_after == self._shards.backwards

    def announce_step(self) -> None:
        """Let peers that have read begin their steps: this rank has reached its own, and reads no more before it."""
        with self._changed:
            self._next_step = self._steps + 1
            self._changed.notify_all()

    def wait_for_readers(self) -> None:
        """Wait for the peers' steps if this rank has read since the last one; see [Note: versions of state]."""
        if self.was_read:
            self._read_after = -1
            PeerRpc.for_group(self.group).call(self._topic, {"next step": self._next_step})

    @contextmanager
    def swapped_in(self, params: Sequence[ShardedParam], states: States) -> Iterator[Shown]:
        """Put this rank's shards into the optimizer's state for the time of a step, then keep what it made of them.

        Args:
            params: The parameters of this model that are updated.
            states: The optimizer's ``state``.

        Yields:
            What the optimizer is to be given in the parameters' places.
        """
        shown, swapped = self._choose_shown(params)
        self._begin_step()
        size = len(self._metas)
        try:
            try:
                self._swap_in(swapped, states)
                yield shown
            finally:
                self._write_back(swapped, states)
        finally:  # whatever raises: peers wait for the end of a version that has begun
            self._versions.end_update()
            if len(self._metas) > size:
                self._count()

    def exchange_metadata(self, params: Sequence[ShardedParam], states: States) -> None:
        """Show the state that other ranks' parameters have after a step; here each rank knows it."""
        del params, states

    def refill_held(self) -> None:
        """Fill what stays whole, after a step; see [Note: the same tensor]."""
        if self._held:
            # Lazy state is read by its class here, so torch functions must stay on.
            with outside_user_modes():
                for tensor, whole in zip(self._held.values(), self._unshard(list(self._held)), strict=True):
                    tensor.copy_(whole)
            COUNTERS.state_refilled += len(self._held)

    def load(self, states: States) -> None:
        """Shard what was loaded; see [Note: versions of state]."""
        if self._shards.retired:
            return  # the model has other shards now, as after a cast
        if PeerRpc.is_destroyed(self.group):
            return  # no peer answers any more, so shards could not be put together
        now = {id(value) for state in states.values() for value in state.values()}
        # What the script still holds of the state before keeps its content, as under stock.
        lazy_tensor.materialize(lazy for lazy in self._lazy.values() if id(lazy) not in now and self._is_own(lazy))
        self._earlier[self._versions.version] = self._local
        self._local, self._kept = dict(self._local), None
        while len(self._earlier) > _MAX_EARLIER:
            del self._earlier[next(iter(self._earlier))]
        self._versions.begin_update()
        try:
            for param, state in states.items():
                self._shard_whole(param, state)
        finally:
            self._versions.end_update()

    def start_final_calls(self) -> bool:
        """Return whether there are still peers to call; this is the last time."""
        there = not PeerRpc.is_destroyed(self.group)
        if there:
            self._keep_alive.start_final_calls(self)
        return there

    # ---------------------------------------------------------------- swapping

    @abc.abstractmethod
    def _choose_shown(self, params: Sequence[ShardedParam]) -> tuple[Shown, Swapped]:
        """Return what the optimizer is to be given for parameters, and those that this rank updates."""

    @abc.abstractmethod
    def _swap_in(self, swapped: Swapped, states: States) -> None:
        """Put this rank's shards of the parameters' state where the optimizer looks for them."""

    def _write_back(self, swapped: Swapped, states: States) -> None:
        """Keep what a step has made of the parameters' state, and leave lazy tensors; empties ``swapped``."""
        try:
            while swapped:
                self._write_back_param(*swapped.pop(), states)
        finally:
            if swapped:  # one has raised; the others are written back all the same
                self._write_back(swapped, states)

    @abc.abstractmethod
    def _write_back_param(self, one: ShardedParam, shown: Parameter, states: States) -> None:
        """Do that for one parameter, which the optimizer was shown as ``shown``."""

    @abc.abstractmethod
    def _shard_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's shards of a parameter's state that is whole, and leave lazy tensors."""

    @abc.abstractmethod
    def _ranges(self, key: Key) -> Mapping[int, Shard]:
        """Return which of a tensor's elements each rank keeps."""

    def _begin_step(self) -> None:
        with self._changed:
            self._steps += 1
            self._changed.notify_all()
        self._held.clear()
        if self._earlier:  # all ranks came to the end of the last step but one
            oldest = (self._steps - 1) * _VERSIONS_PER_STEP
            self._earlier = {number: local for number, local in self._earlier.items() if number >= oldest}
        self._versions.begin_update(self._steps * _VERSIONS_PER_STEP)

    def _leave_lazy(
        self, key: Key, meta: TensorMeta, state: dict[Any, Any], held: Any = None, *, sole: bool | None = None
    ) -> None:
        """Leave in ``state`` what stands for a tensor when this rank keeps its shard.

        Args:
            key: Of the tensor.
            meta: The tensor's.
            state: The parameter's state.
            held: What stood there before, which the script may hold; see [Note: the same tensor].
            sole: Whether the memory of ``held`` is referenced only through it, where that was asked before.
        """
        known = self._metas.get(key)
        self._metas[key] = meta
        if self._is_own(held) and held.key == key and (known is meta or known == meta):
            state[key[1]] = held
            return
        is_whole = isinstance(held, Tensor) and not isinstance(held, LazyTensor)
        if is_whole and (held.shape, held.dtype, held.device) == (meta.shape, meta.dtype, meta.device):
            if is_unshared(held) if sole is None else sole:
                lazy = lazy_tensor.make_lazy_(held, self, key)
            elif not held.is_inference():
                self._held[key] = state[key[1]] = held
                return
            else:
                lazy = lazy_tensor.make_lazy(meta, self, key, own=True)
        else:
            lazy = lazy_tensor.make_lazy(meta, self, key, own=True)
        last = self._lazy.get(key)
        if last is not None and last is not lazy and self._is_own(last):
            lazy_tensor.set_source(last, lazy_tensor.LostSource(_REPLACED.format(key[1])), key)
        self._lazy[key] = state[key[1]] = lazy

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, LazyTensor) and vars(value).get("source") is self

    def _count(self) -> None:
        """Count what is kept, where there is more than the last time."""
        kept = sum(local.nbytes for local in self._local.values())
        whole = sum(meta.shape.numel() * meta.dtype.itemsize for meta in self._metas.values())
        COUNTERS.state_bytes += max(0, kept - self._counted[0])
        COUNTERS.state_bytes_whole += max(0, whole - self._counted[1])
        self._counted = max(kept, self._counted[0]), max(whole, self._counted[1])

    def discount(self) -> None:
        """Take what was counted back: the optimizer's state is kept elsewhere now."""
        COUNTERS.state_bytes -= self._counted[0]
        COUNTERS.state_bytes_whole -= self._counted[1]
        self._counted = 0, 0

    # ---------------------------------------------------------------- reading

    def fetch(self, wanted: Sequence[LazyTensor], *, noticed: bool) -> list[Tensor]:
        """Return whole tensors on the devices of the lazy ones."""
        del noticed
        wholes = self.fetch_to_host(wanted)
        return [whole.to(lazy.device) for lazy, whole in zip(wanted, wholes, strict=True)]

    def fetch_to_host(self, wanted: Sequence[LazyTensor]) -> list[Tensor]:
        """Return whole tensors on the CPU, in new memory, of the version that this rank has."""
        self._read_after = self._shards.backwards
        return self._unshard([lazy.key for lazy in wanted])

    def _unshard(self, keys: Sequence[Key]) -> list[Tensor]:
        number = self._versions.version
        question = self._keep_alive.mark_final({"version": number, "entries": keys})
        begin = time.monotonic()
        answers = PeerRpc.for_group(self.group).call(self._topic, question, from_fork=True)
        COUNTERS.state_reads += 1
        COUNTERS.state_read_ms += round(1e3 * (time.monotonic() - begin))
        found: dict[Key, dict[int, Tensor]] = {key: {} for key in keys}
        for rank, (header, tensors) in answers.items():
            for position, shard in zip(header["positions"], tensors, strict=True):
                found[keys[position]][rank] = shard
                COUNTERS.bytes_pulled += shard.nbytes
        for position, shard in zip(*self._read(number, keys), strict=True):
            found[keys[position]][self.group.rank()] = shard
        return [self._assemble(key, found[key]) for key in keys]

    def _assemble(self, key: Key, found: Mapping[int, Tensor]) -> Tensor:
        ranges = self._ranges(key)
        missing = [rank for rank in ranges if rank not in found]
        if missing:
            raise RuntimeError(
                f"ovpatch: rank {missing[0]} of the process group has no '{key[1]}' in the optimizer's state of "
                f"{self._shards.names[key[0]]}; load the same state on all ranks"
            )
        whole = self._metas[key].empty()
        for rank, shard in found.items():
            shard_view(whole, ranges[rank]).copy_(shard)
        return whole

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        if "next step" in question:
            with self._changed:
                self._changed.wait_for(lambda: max(self._steps, self._next_step) >= question["next step"], PATIENCE_S)
            return {}, []
        positions, found = self._read(question["version"], [tuple(entry) for entry in question["entries"]])
        self._keep_alive.record_call(question)
        return {"positions": positions}, found

    def _read(self, number: int, keys: Sequence[Key]) -> tuple[list[int], list[Tensor]]:
        """Return copies of this rank's shards, of one version, with the positions among ``keys`` of what it has."""

        def copy(source: Mapping[Key, Tensor]) -> tuple[list[int], list[Tensor]]:
            positions = [position for position, key in enumerate(keys) if key in source]
            local = [source[keys[position]] for position in positions]
            return positions, [copy_to_host(view_flat(one if is_dense(one) else one.contiguous())) for one in local]

        self._versions.wait_for_version(number, PATIENCE_S)
        local = self._local  # of this version or, if that is among the earlier ones by now, of a later one
        if number not in self._earlier:
            try:
                return self._versions.read_version(number, lambda: copy(local), PATIENCE_S)
            except TornReadError as error:
                if number not in self._earlier:  # else it was by loading
                    raise TornReadError(f"{str(error).rstrip('.')}. {_TOO_LATE}") from error
        earlier = self._earlier[number]
        return self._versions.read_version(number, lambda: copy(earlier), PATIENCE_S, kept=True)


class SwapCache:
    """The shards behind what a step has left in an optimizer's state, until that is read or replaced.

    It keeps neither parameters nor lazy tensors: a script that holds one of these would keep the model alive.

    Args:
        source: Of the lazy tensors.
        shown: By what the optimizer is given for a parameter, its state with this rank's shards.
        left: The state of these parameters between steps, in the same order, with the same names.

    Attributes:
        shown: See there.
    """

    def __init__(
        self, source: ShardedState, shown: dict[Parameter, dict[Any, Any]], left: Sequence[Mapping[Any, Any]]
    ) -> None:
        self._source, self.shown = weakref.ref(source), shown
        self._ids = list(map(id, itertools.chain.from_iterable(shown.items())))  # of what is kept here
        self._shards = _values(shown.values())
        self._names = _names(left)
        values = _values(left)
        self._is_lazy = [type(value) is LazyTensor for value in values]
        # Of lazy tensors, which only this source makes, and then without this object; of others, such as the number of
        # steps, the same objects as are kept here. What stays whole is not the same, so it is noticed.
        self._left = [
            id(one if is_lazy else other)
            for one, other, is_lazy in zip(values, self._shards, self._is_lazy, strict=True)
        ]
        self._in_step: list[Tensor] = []  # lazy tensors, while the optimizer works on the shards

    @classmethod
    def of(
        cls, source: ShardedState, swapped: Swapped, states: States, shown: Mapping[Parameter, dict[Any, Any] | None]
    ) -> SwapCache | None:
        """Return what a step has left; None if the next one has to look at each tensor."""
        left = [state for one, _ in swapped if (state := states.get(one.param)) is not None]
        made = {shard_param: state for shard_param, state in shown.items() if state is not None}
        if len(left) != len(swapped) or _names(left) != _names(made.values()):
            return None
        return cls(source, made, left)

    def begin_step(self, swapped: Swapped, states: States) -> bool:
        """Return whether the parameters' state still is what the last step has left."""
        if [id(shard_param) for _, shard_param in swapped] != self._ids[::2]:
            return False
        states_by_id = dict(zip(map(id, states), states.values(), strict=True))  # a tensor's hash() is a call of Python
        left = [states_by_id.get(id(one.param)) for one, _ in swapped]
        if None in left or _names(left) != self._names:
            return False
        values = _values(left)
        if list(map(id, values)) != self._left:
            return False
        lazy = list(itertools.compress(values, self._is_lazy))
        try:
            is_own = list(map(_SOURCE, lazy)).count(self._source()) == len(lazy)
        except AttributeError:  # one was read, or is at this moment, by another thread
            return False
        self._in_step = lazy if is_own else []
        return is_own

    def end_step(self, states: States) -> bool:
        """Take the shards out of the state; return false, and leave all in place, if some are not where they were."""
        lazy, self._in_step = self._in_step, []
        if list(map(type, lazy)).count(LazyTensor) != len(lazy):
            return False  # another thread has read one
        values = _values(self.shown.values())
        if len(values) != len(self._shards) or not all(map(operator.is_, values, self._shards)):
            return False
        if len(states) < len(self.shown):
            return False
        made = [states.popitem() for _ in self.shown][::-1]  # they came last
        if list(map(id, itertools.chain.from_iterable(made))) == self._ids:
            return True
        states.update(made)
        return False


_SOURCE: Final = operator.attrgetter("source")
_VALUES: Final = operator.methodcaller("values")


def _names(states: Iterable[Any]) -> list[Any]:
    """Return the names in each state, and how many there are."""
    known = list(states)
    return [*map(len, known), *itertools.chain.from_iterable(known)]


def _values(states: Iterable[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(_VALUES, states)))
