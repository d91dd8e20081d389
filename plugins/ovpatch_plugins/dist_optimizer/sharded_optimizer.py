"""One optimizer whose step is divided among the ranks."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import Any, Final

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap.comm.lifetimes import attached_values, reset_after_fork, weak_method
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch_plugins.dist_optimizer import sharded_grads, step_log
from ovpatch_plugins.dist_optimizer.elementwise_state import ElementwiseState
from ovpatch_plugins.dist_optimizer.main_params import MainParamsState, drop_main_params, round_state
from ovpatch_plugins.dist_optimizer.param_sync import ParamSync
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import ShardedParam, replaced_params
from ovpatch_plugins.dist_optimizer.sharded_state import ShardedState, Shown
from ovpatch_plugins.dist_optimizer.state_dicts import StateDictSource
from ovpatch_plugins.dist_optimizer.step_log import Turn

Inner = Callable[..., Any]

LOCAL = (
    "a rank stepped it with gradients that DistributedDataParallel had not reduced (no_sync(), or a forward around the "
    "wrapper), or stepped another optimizer over its parameters alone, so ranks may want to differ"
)

OTHER_ORDER = (
    "ranks stepped, clipped or unscaled optimizers in orders that differ, or with gradients of different parameters, "
    "after which no optimizer of the process group is sharded. Use the same order on every rank; a set has none"
)

LEFT = (
    "its model got the stock reducer back (join(), a communication hook), under which ranks may step unevenly, or with "
    "gradients that differ"
)

IN_BACKWARD = (
    "it stepped inside of a backward, as in a hook on a parameter, where gradients are this rank's own, so ranks may "
    "want to differ"
)

_BESIDE = (
    "ovpatch: {0} steps beside a new {0} over the same parameters. The new one had taken its place, because other "
    "ranks step only one of them. Make and step the same optimizers on every rank, or turn dist_optimizer off."
)

_TOO_LATE = (
    "ovpatch: {} has to become stock again, because {}. Its state could not be collected, because other ranks went "
    "on. Do the same on every rank, or turn dist_optimizer off."
)

# A replay of a CUDA graph makes new state, and no host knows. A whole tensor is put together from shards that the hosts
# of all ranks know to be of the same step. Optimizers with capturable=True stay stock (takeover.py).
_CAPTURED = (
    "ovpatch: the step of {} would be captured into a CUDA graph. Each rank has a shard of its state, and shards "
    "could not be collected after a replay. Make it with capturable=True, if it has that, so that it stays stock; or "
    "turn dist_optimizer off."
)

_INSIDE = (
    "ovpatch: state_dict() of {} was called inside its own update, while each rank changes its shard of the state. "
    "Call it after step(), or in a step hook; or turn dist_optimizer off."
)

_GRAD: Final = operator.attrgetter("grad")

_ACCUMULATED: Final = 64  # backwards after which a script steps at the latest

#: What is kept for an optimizer that this rank alone has stepped: functions that leave stock the optimizers over the
#: same parameters that other ranks still divide.
BESIDE: Final = "dist_optimizer: beside"


class ShardedOptimizer:
    """Divides the steps of one optimizer.

    [Note: innermost] While torch's own ``step`` runs, the optimizer's parameters, their gradients and their state are
    this rank's shards, and it gets everything back whatever happens. That is done around the class's own ``step``
    function, inside of all that others put around it: step hooks, LR schedulers, profilers and closures see all
    parameters, whole, as under stock. The shards are other Parameter objects over the same memory; another thread that
    looks at the parameters themselves, as one that saves a checkpoint, never sees shards.

    Args:
        optimizer: The optimizer; held weakly.
        sync: Makes its parameters the same on all ranks after a step.
        state_type: Keeps its state, for one model.
        stand_down: Called with the optimizer and the reason when it has to go on as stock.
        quiet: The class is known to ask other ranks for nothing in its step, so that hosts can meet for the
            parameters' collective while it computes.

    Attributes:
        is_sharded: Whether it still shards steps.
        finalizers: These run once the optimizer is freed, unless it has fallen back to torch before.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sync: ParamSync,
        state_type: type[ShardedState],
        stand_down: Callable[[Optimizer, str], None],
        *,
        quiet: bool = False,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._sync, self._state_type, self._stand_down, self._quiet = sync, state_type, stand_down, quiet
        self._stepping = self._compared = False
        self.is_sharded = True
        self._apart = False  # this rank alone stepped another optimizer over these parameters
        self._replaced = False  # by a new one on this rank alone, see [Note: the same everywhere]
        self._turns: dict[ShardedGrads, Turn] = {}  # agreed on before the first step
        self._updating = threading.RLock()  # while the optimizer has this rank's shards
        reset_after_fork(self, "_updating", threading.RLock)
        self._params: list[ShardedParam] = []  # those whose update can be divided, as of the last step
        self._params_key: tuple[list[int], int] = ([], -1)  # what they were found by
        self._owners: list[Parameter] = []  # the parameters themselves
        self._lazy_grads = 0  # how many of these have one
        self._stepped: list[ShardedParam] = []  # those that had a gradient then
        self._by_model: dict[ShardedGrads, list[ShardedParam]] = {}
        self._of_groups: list[ShardedGrads] = []  # one model for each process group
        self._tags: dict[ShardedGrads, int] = {}  # name the votes on these steps
        self._states: dict[ShardedGrads, ShardedState] = {}
        self._keepers: dict[ShardedGrads, weakref.finalize[..., Any]] = {}  # keep these for peers
        self._thread = 0  # which steps
        self._state_dicts: weakref.WeakSet[StateDictSource] = weakref.WeakSet()
        self.finalizers = [weakref.finalize(optimizer, _complete_soon, self._state_dicts)]
        self.finalizers[0].atexit = False
        self._hooks = (
            optimizer.register_state_dict_post_hook(weak_method(self._show_lazily), prepend=True),
            optimizer.register_load_state_dict_post_hook(weak_method(self._shard_loaded)),
        )

    @property
    def is_elementwise(self) -> bool:
        """Whether each rank updates a shard of every parameter."""
        return issubclass(self._state_type, ElementwiseState)

    def step(self, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``inner``, the class's own step, on this rank's shards, then start to synchronise the parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._stepping:  # the class's step calls that of a base class
            return inner(optimizer, *args, **kwargs)
        if args or kwargs:
            args, kwargs = _evaluate_closure(args, kwargs)
        params = self._prepare_step(optimizer)
        if not params:
            return inner(optimizer, *args, **kwargs)
        known = len(optimizer.state)
        try:
            self._sync.begin_update(params)
            result = self._update_shards(optimizer, params, functools.partial(inner, optimizer, *args, **kwargs))
            self._start_param_sync(optimizer, params)
        except BaseException:  # a KeyboardInterrupt, or the others do not come: the state has gone on
            self._sync.keep_update()
            raise
        put_in_order(optimizer, known)
        COUNTERS.steps += 1
        COUNTERS.params_updated += len(params)
        return result

    def _update_shards(self, optimizer: Optimizer, params: Sequence[ShardedParam], update: Callable[[], Any]) -> Any:
        """Swap this rank's shards in, update them, and write them back."""
        try:
            with self._updating, self._swapped_in_shards(optimizer):
                return update()
        except Exception:  # on this rank, perhaps; the others wait for the parameters, and may have written to them
            torch.autograd.graph.increment_version([one.param for one in params])
            self._start_param_sync(optimizer, params)
            raise

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Keep steps from beginning while the block runs; a step that runs in another thread is waited for.

        Raises:
            RuntimeError: This thread is inside of the step itself.
        """
        with self._updating:
            if self._stepping:
                raise RuntimeError(_INSIDE.format(type(self._optimizer()).__name__))
            yield

    def _prepare_step(self, optimizer: Optimizer) -> list[ShardedParam]:
        """Return the parameters whose update is divided; none if the optimizer goes on as stock."""
        self._sync.finish()  # a second step without a forward in between
        self._thread = threading.get_ident()
        if self._state_dicts:
            for state_dict in list(self._state_dicts):
                state_dict.complete_read()
        params = self.params_to_step(optimizer)
        if self._lazy_grads and sharded_grads.materialize_moved([(one.param, one.shards, one.index) for one in params]):
            params = self.params_to_step(optimizer)
        if params != self._stepped:
            self._stepped, self._tags = params, {}
            self._by_model = {shards: [] for shards in sharded_grads.sort_models(p.shards for p in params)}
            for one in params:
                self._by_model[one.shards].append(one)
            self._of_groups = _one_per_group(self._by_model)
        models = self._by_model if params else {}
        for shards in models:
            if is_capturing(shards.versions.device):
                raise RuntimeError(_CAPTURED.format(type(optimizer).__name__))
        if reason := self._agree_on_step(optimizer, models):
            for one in params:
                if one.shards.local or reason is IN_BACKWARD:
                    one.shards.drifted.add(one.index)
            self.stand_down(reason)
            return []
        if not params:
            return params
        for shards in models:
            for other in shards.optimizers:  # whose all-gather would overwrite what this step updates
                if other is not self:
                    other._sync.finish()
        COUNTERS.grads_sharded += self._lazy_grads
        was_read = False
        for shards, of_model in models.items():
            state = self._states.get(shards)
            if state is None:
                self._add_model(optimizer, shards, of_model)
            else:
                was_read |= state.was_read
        if was_read:
            # Not of other models: nothing of them changes, and peers may come to no step over them. A rank may have
            # read another model's state than its peer, so all models are announced before the first wait.
            states = [self._states[shards] for shards in models]
            for state in states:
                state.announce_step()
            for state in states:
                state.wait_for_readers()
        if self._quiet:
            for shards in self._of_groups:
                shards.arrive_at_hosts()
        return self._stepped

    def _agree_on_step(self, optimizer: Optimizer, models: Iterable[ShardedGrads]) -> str:
        """Agree with the other ranks to divide this step; else return why the optimizer goes on as stock from now on.

        Raises:
            RuntimeError: A new optimizer has taken this one's place on other ranks.
        """
        if torch._C._current_graph_task_id() != -1:
            return IN_BACKWARD
        for shards in models:
            if shards.restored:
                return LEFT
        if not self._compared:
            self._compared = True
            return self._agree_at_first(optimizer)
        if self._replaced:
            self._stay_away(models)
            raise RuntimeError(_BESIDE.format(type(self._optimizer()).__name__))
        for shards in models:
            state = self._states.get(shards)
            if state is not None:
                log = shards.step_log
                log.record(shards.backwards, state.next_turn())
                if log.refused:
                    # A peer that has made a new optimizer takes its first step as torch does, and this rank must, too.
                    shards.local |= log.is_refused()
        is_local, tags = False, self._tags or self._tag_votes()
        for shards in models:
            shards.local |= self._apart or self._has_drifted(shards)
            shards.agree_if_local(tags[shards])
            is_local |= shards.local
        if is_local:
            self._stay_away(models)
            return self._say_local(models)
        return ""

    def _tag_votes(self) -> dict[ShardedGrads, int]:
        subjects: dict[ShardedGrads, tuple[int, ...]] = {}
        for shards, params in self._by_model.items():
            turn = self._turns.get(shards)
            number = zlib.crc32(turn.name.encode()) if turn is not None else 0
            subjects[shards] = (number, *sorted(sharded.index for sharded in params))
        self._tags = sharded_grads.tag_votes("step", subjects)
        return self._tags

    @staticmethod
    def _say_local(models: Iterable[ShardedGrads]) -> str:
        return OTHER_ORDER if any(shards.has_diverged for shards in models) else LOCAL

    def _has_drifted(self, shards: ShardedGrads) -> bool:
        return bool(shards.drifted) and any(one.index in shards.drifted for one in self._by_model.get(shards, ()))

    @staticmethod
    def _stay_away(models: Iterable[ShardedGrads]) -> None:
        """Have the ranks that wait for this one raise an error, where they cannot be told before their step."""
        for shards in _one_per_group(models):
            shards.stay_away_from_hosts()

    def _agree_at_first(self, optimizer: Optimizer) -> str:
        """Agree with the other ranks before the first step; return why the optimizer has to stay stock.

        Every rank does so at the optimizer's first step, also one that has nothing to divide.
        """
        found: dict[ShardedGrads, list[str]] = {}
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            entry = sharded_grads.find(param)
            if entry is not None and entry[0].group.size() > 1:
                found.setdefault(entry[0], []).append(entry[0].names[entry[1]])
        names = {shards: found[shards] for shards in sharded_grads.sort_models(found)}
        terms = {shards: step_log.list_terms(optimizer, of_model) for shards, of_model in names.items()}
        self._turns = {shards: shards.step_log.propose(terms[shards]) for shards in names}
        if any(shards.local or shards.has_diverged or self._has_drifted(shards) for shards in names):
            reason = self._say_local(names)  # it waits for no other rank
            for shards in names:
                shards.step_log.record(shards.backwards, Turn("", reason))
            self._leave_together({shards: self._older(shards) for shards in names}, told=any(map(self._older, names)))
            return reason
        logs = {shards.step_log: (shards.backwards, turn) for shards, turn in self._turns.items()}
        reason, agreed, is_older = step_log.agree(optimizer, logs, adopts=not all(shards.tells for shards in names))
        older = {shards: self._older(shards) for shards in names}
        if reason:
            meant = {shards: agreed.get(shards.step_log) for shards in names}
            going = {shards: [one for one in older[shards] if one._is(shards, meant[shards])] for shards in names}
            beside: list[Callable[[], None]] = attached_values(optimizer).setdefault(BESIDE, [])
            for shards in names:
                for one in older[shards]:
                    if one not in going[shards] and one._shares_params(optimizer):
                        one._apart = True
                        beside.append(one.leave_alone)
                if not older[shards] and shards.step_log.has_agreed(shards.backwards):  # it is gone
                    beside.append(functools.partial(_tell_local, [shards]))
            self._leave_together(going, told=is_older)
            if not beside:
                _keep_no_longer(names, read=is_older)
            return reason
        _keep_no_longer(names, read=is_older)
        self._turns = {shards: agreed[shards.step_log] for shards in names}
        for shards, turn in self._turns.items():
            for one in older[shards]:
                one._replaced |= one._is(shards, turn)
        COUNTERS.optimizers += 1
        if is_older:  # whose ranks vote in this step, and know the optimizer by the turn that is adopted
            for shards, tag in self._tag_votes().items():
                shards.agree_if_local(tag)
        return self._say_local(names) if any(shards.local for shards in names) else ""

    def _leave_together(self, older: Mapping[ShardedGrads, Sequence[ShardedOptimizer]], *, told: bool) -> None:
        """Leave older optimizers stock here and, if they can be told, on the ranks that go on with them."""
        for shards, of_model in older.items() if told else ():
            self._stay_away([shards])
            shards.local = True
            shards.agree_if_local(None)
            for one in of_model:
                one.stand_down(LOCAL)

    def _is(self, shards: ShardedGrads, turn: Turn | None) -> bool:
        """Return whether other ranks mean this optimizer by a turn."""
        return turn is not None and self._states[shards].turn.name == turn.name

    def _shares_params(self, optimizer: Optimizer) -> bool:
        own = {id(one.param) for one in self._params}
        return any(id(param) in own for group in optimizer.param_groups for param in group["params"])

    def _older(self, shards: ShardedGrads) -> list[ShardedOptimizer]:
        return [one for one in shards.optimizers if one is not self and one.is_sharded]

    @contextmanager
    def _swapped_in_shards(self, optimizer: Optimizer) -> Iterator[None]:
        """Show the optimizer this rank's shards while the block runs; see [Note: innermost]."""
        with ExitStack() as stack:
            shown: Shown = {}
            for shards, of_model in self._by_model.items():
                shown |= stack.enter_context(self._states[shards].swapped_in(of_model, optimizer.state))
            stack.enter_context(replaced_params(optimizer, shown))
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False

    def _start_param_sync(self, optimizer: Optimizer, params: Sequence[ShardedParam]) -> None:
        """Start the collectives that make the parameters the same on all ranks."""
        try:
            for shards, of_model in self._by_model.items():
                self._states[shards].exchange_metadata(of_model, optimizer.state)
        finally:  # the others wait for the collective in any case
            for shards in self._of_groups:
                (shards.start_host_barrier if self._quiet else shards.wait_for_hosts)()
            self._sync.start(params)

    def params_to_step(self, optimizer: Optimizer) -> list[ShardedParam]:
        """Return the parameters with a gradient whose update is divided."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        key = list(map(id, params)), sharded_grads.get_generation()
        with torch._C.DisableTorchFunctionSubclass():  # pending parameters tell as well whether they have a gradient
            if key != self._params_key:
                self._params, self._params_key = self._find_params(params), key
                self._owners = [one.param for one in self._params]
            kinds = list(map(type, map(_GRAD, self._owners)))
        self._lazy_grads = kinds.count(LazyTensor)
        if NoneType not in kinds:
            return self._params
        return [one for one, kind in zip(self._params, kinds, strict=True) if kind is not NoneType]

    def _find_params(self, params: Iterable[Parameter]) -> list[ShardedParam]:
        known = {id(one.param): one for one in self._params}
        found = []
        for param in params:
            entry = sharded_grads.find(param)
            if entry is None:
                continue
            one = known.get(id(param))
            if one is None or (one.shards, one.index) != entry:
                if not self._state_type.can_divide(*entry):
                    continue
                one = ShardedParam(param, *entry)
            found.append(one)
        return found

    # ---------------------------------------------------------------- state

    def _add_model(self, optimizer: Optimizer, shards: ShardedGrads, params: Sequence[ShardedParam]) -> None:
        """Begin to keep state for one model's parameters."""
        # Gradients and state that are other shards', as of a model that is wrapped again, are fetched now: once hosts
        # have said that they come to the parameters' collective, no rank may ask.
        held = [one for each in params for one in (each.param.grad, *optimizer.state.get(each.param, {}).values())]
        lazy_tensor.materialize(one for one in held if isinstance(one, LazyTensor) and one.source is not shards)
        log = shards.step_log
        turn = self._turns.get(shards)
        if turn is None:  # the model is wrapped again
            turn = log.propose(step_log.list_terms(optimizer, [shards.names[one.index] for one in params]))
            self._turns[shards] = turn
        log.adopt(turn)
        shards.optimizers.add(self)
        state = self._states[shards] = self._state_type(shards, turn)
        self._tags = {}  # they name the turns
        # A slower peer may still ask when the script has dropped the optimizer here. Ranks that go on with it ask, too,
        # once they hear of a new one that this rank alone has made, at its first step.
        keeper = weakref.finalize(optimizer, retention.retain, shards.group, state, _ACCUMULATED)
        keeper.atexit = False
        self._keepers[shards] = keeper
        current = {sharded.shards for sharded in self._params}
        for former in [model for model in self._states if model not in current]:
            self._drop_model(optimizer, former)

    def _drop_model(self, optimizer: Optimizer, shards: ShardedGrads) -> None:
        """Stop keeping state for a model whose parameters have other shards, as it was wrapped again."""
        state = self._states.pop(shards)
        self._keepers.pop(shards).detach()
        self._turns.pop(shards, None)
        shards.optimizers.discard(self)
        if not PeerRpc.is_destroyed(shards.group):
            # Parameters that this step leaves out still have lazy state.
            state.unshard(optimizer.state)
        state.discount()
        retention.retain(shards.group, state)  # slower peers still fetch

    def _show_lazily(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Show lazy tensors on the CPU in a state dict whose state is sharded; ``optimizer.state`` keeps its own."""
        values = [value for state in state_dict["state"].values() for value in state.values()]
        if not any(isinstance(value, LazyTensor) and isinstance(value.source, ShardedState) for value in values):
            return
        source = StateDictSource(state_dict["state"], weakref.WeakMethod(self.undivided))
        state_dict["state"] = source.shown
        if threading.get_ident() == self._thread:
            self._state_dicts.add(source)
        else:  # the thread that trains goes on meanwhile
            source.complete()

    def _shard_loaded(self, optimizer: Optimizer) -> None:
        """Shard what was loaded at once: whole state takes the memory that this feature is there to spare."""
        for state_dict in list(self._state_dicts):
            state_dict.complete()
        for state in self._states.values():
            state.load(optimizer.state)

    def stand_down(self, reason: str) -> None:
        """Leave the optimizer stock from now on."""
        optimizer = self._optimizer()
        try:
            self.release()
        except PeerError as error:
            raise RuntimeError(_TOO_LATE.format(type(optimizer).__name__, reason)) from error
        if optimizer is not None:
            self._stand_down(optimizer, reason)

    def leave_alone(self) -> None:
        """Leave the optimizer stock in the place of its own step, in which the other ranks wait for this one."""
        if not self.is_sharded:
            return  # it has stepped
        _tell_local(self._states)
        if self._optimizer() is None:  # the others still ask for its shards
            for state in self._states.values():
                state.start_final_calls()
        self.stand_down(LOCAL)

    def release(self) -> None:
        """Make everything whole again: the optimizer goes on as stock."""
        self.is_sharded = False
        self._sync.finish()
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        # They keep what peers read of an optimizer that is freed. This one lives, and keeps its shards for final calls.
        for finalizer in (*self.finalizers, *self._keepers.values()):
            finalizer.detach()
        in_fp32 = issubclass(self._state_type, MainParamsState)
        for state_dict in list(self._state_dicts):
            (state_dict.complete if in_fp32 else state_dict.complete_read)()  # else it shows what is whole below
        if in_fp32:
            drop_main_params(optimizer)
        leaving = [state for state in self._states.values() if state.start_final_calls()]
        for state in leaving:
            state.unshard(optimizer.state)
        if in_fp32:
            round_state(optimizer)
        if self.is_elementwise:
            self.params_to_step(optimizer)
            for one in self._params:
                one.shards.request_sharding(one.index, requested=False)


def _one_per_group(models: Iterable[ShardedGrads]) -> list[ShardedGrads]:
    return list({shards.group: shards for shards in models}.values())


def _evaluate_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Evaluate a closure first, which reads whole parameters and gradients; hand on one that returns its loss."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if args:
        return (lambda: loss, *args[1:]), kwargs
    return args, kwargs | {"closure": lambda: loss}


def put_in_order(optimizer: Optimizer, known: int) -> None:
    """Put the entries that a step has added behind the first ``known`` of ``optimizer.state`` where stock puts them."""
    state = optimizer.state
    if len(state) > known:
        places = {param: i for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        for param in sorted(list(state)[known:], key=lambda param: places.get(param, -1)):
            state[param] = state.pop(param)


def leave_beside(optimizer: Optimizer) -> None:
    """Leave stock the optimizers beside which this rank alone has stepped another, unless they have stepped since."""
    for leave in attached_values(optimizer).pop(BESIDE, ()):
        leave()


def _tell_local(models: Collection[ShardedGrads]) -> None:
    """Tell other ranks in their step that this one goes on by itself."""
    for shards in models:
        shards.local = True
        shards.agree_if_local(None)
    ShardedOptimizer._stay_away(models)
    _keep_no_longer(models, read=True)


def _keep_no_longer(models: Iterable[ShardedGrads], *, read: bool) -> None:
    """Stop keeping the state of optimizers that are gone: ranks have agreed on what follows them.

    Args:
        models: Their models.
        read: Whether other ranks go on with such an optimizer, and read its state before the next backward.
    """
    for shards in models:
        retention.shorten_retention(shards.group, may_be_read=read)


def _complete_soon(state_dicts: Iterable[StateDictSource]) -> None:
    """Have state dicts of an optimizer that is gone fetched before its state is freed on other ranks."""
    for state_dict in list(state_dicts):
        state_dict.complete_before_backward()
