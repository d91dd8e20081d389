"""One optimizer whose step is sharded over the ranks of its models' process groups.

The patched ``step`` (``step_patches.py``) finds the sharded optimizer (``optimizer_attach.py``). Its
:meth:`ShardedOptimizer.step` calls these methods, which lead to these files:

1. ``_find_step_params``: the last gather ends. Parameters with a gradient are found
   (``sharded_param.py``).
2. ``_agree_on_step``: ranks vote (``cast_vote`` in ``sharded_grads.py``, ``agreement.py``).
3. ``_prepare_update``: missing state is created, and peers have read what the step will change.
4. ``_step_shards``: torch's own step runs on shards (``sharded_state.py``), or on the parameters that
   this rank owns (``owned_state.py``).
5. ``_start_gather``: ranks exchange the parameters (``param_all_gather.py``, ``param_broadcast.py``).
   These are pending (``tensors/pending_param.py``) until their first reader has waited
   (``tensors/read_hooks.py``).
"""

from __future__ import annotations

import operator
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, Final

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ovpatch.overlap.autograd import is_differentiable
from ovpatch.overlap.comm.lifetimes import reset_after_fork, weak_method
from ovpatch.overlap.comm.step_communicators import abort_step_communicators
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch_plugins.dist_optimizer import sharded_grads
from ovpatch_plugins.dist_optimizer.agreement import (
    NO_HASHES,
    OptimizerName,
    hash_options,
    list_terms,
    make_hashes,
)
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS
from ovpatch_plugins.dist_optimizer.main_params import (
    MainParamsState,
    drop_main_params,
    round_state,
)
from ovpatch_plugins.dist_optimizer.param_sync import ParamSync
from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads
from ovpatch_plugins.dist_optimizer.sharded_param import (
    ShardedParam,
    call_with_params,
    unscaling_grads,
)
from ovpatch_plugins.dist_optimizer.sharded_state import ElementwiseState, ShardedState, Shown
from ovpatch_plugins.dist_optimizer.state_dicts import StateDictSource
from ovpatch_plugins.dist_optimizer.vote_tags import tag_votes

#: The ``step`` function of an optimizer's class.
StockStep = Callable[..., Any]

REASON_LOCAL: Final = (
    "a rank stepped it with gradients that DistributedDataParallel had not reduced (no_sync(), or "
    "a forward around the "
    "wrapper), or stepped another optimizer over its parameters alone, so ranks may want to differ"
)

REASON_DIFFERENT: Final = (
    "its parameters or its state differ between ranks, as after steps with local gradients, so ranks "
    "may want to differ"
)

REASON_DETACHED: Final = (
    "its model got the stock reducer back (join(), a communication hook), under which ranks may "
    "step unevenly, or with "
    "gradients that differ"
)

REASON_IN_BACKWARD: Final = (
    "it stepped inside of a backward, as in a hook on a parameter, where gradients are this rank's "
    "own, so ranks may "
    "want to differ"
)

_ERROR_PEERS_CONTINUED: Final = (
    "ovpatch: {} must fall back to torch, because {}. But peers have already continued with "
    "other work. Do the same on every rank, or turn dist_optimizer off."
)

_ERROR_CAPTURED: Final = (
    "ovpatch: the step of {} would be captured into a CUDA graph. Each rank has a shard of its "
    "state, and shards "
    "cannot be gathered after a replay. Create it with capturable=True if it has that option, "
    "which leaves it to "
    "torch, or turn dist_optimizer off."
)

_ERROR_INSIDE_STEP: Final = (
    "ovpatch: state_dict() of {} was called inside its own update, while each rank changes its "
    "shard of the state. "
    "Call it after step(), or in a step hook; or turn dist_optimizer off."
)

_GRAD: Final = operator.attrgetter("grad")

# The most backwards between two steps of a script that accumulates gradients. A dropped optimizer
# keeps its state during as many backwards, because a slower peer may still read it.
_MAX_ACCUMULATION_STEPS: Final = 64


class ShardedOptimizer:
    """An optimizer of which each rank steps its shard.

    [Note: innermost] While torch's own ``step`` runs, the optimizer's parameters, their gradients
    and their state are this rank's shards, and it gets everything back whatever happens. The swap
    is inside of the class's own ``step`` function, so step hooks, LR schedulers, profilers and
    closures see full tensors, as in stock PyTorch. The shards are other Parameter objects over the
    same memory, so a thread that saves a checkpoint never meets a shard.

    Args:
        optimizer: The optimizer; only a weak reference is stored.
        sync: Makes its parameters the same on all ranks after a step.
        state_type: The class of its state for one model.
        on_fallback: Called with the optimizer and the reason when it falls back to torch.
        calls_no_peers: Whether the step of the class calls no peers. Hosts can then meet for the
            parameters' collective while the step computes. Default: False.

    Attributes:
        is_sharded: False once the optimizer has fallen back to torch.
        finalizers: These run once the optimizer is freed, unless it has fallen back to torch
            before.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sync: ParamSync,
        state_type: type[ShardedState],
        on_fallback: Callable[[Optimizer, str], None],
        *,
        calls_no_peers: bool = False,
    ) -> None:
        # The optimizer owns this object, so the reference back must be weak.
        self._optimizer = weakref.ref(optimizer)
        self._sync = sync
        self._state_type = state_type
        self._on_fallback = on_fallback
        self._calls_no_peers = calls_no_peers
        self.is_sharded = True

        # - The running step
        # Held while the optimizer has shards; `state_dict()` in another thread waits for it.
        self._step_lock = threading.RLock()
        reset_after_fork(self, "_step_lock", threading.RLock)
        self._is_stepping = False
        # The thread of the last step. Only this thread may read state dicts later, because others
        # would meet a step.
        self._step_thread_id = 0

        # - Agreement with peers; see [Note: the same everywhere]
        self._has_voted = False
        self._names: dict[ShardedGrads, OptimizerName] = {}
        # The tags of votes on steps of the same parameters as the last one.
        self._tags: dict[ShardedGrads, int] = {}

        # - Parameters
        # Those whose update can be sharded, and the key of that list: parameters and wrappers of
        # the last step.
        self._params: list[ShardedParam] = []
        self._params_key: tuple[list[int], int] = ([], -1)
        # The script's parameter of each element of `_params`.
        self._full_params: list[Parameter] = []
        # The number of lazy gradients among these.
        self._num_lazy_grads = 0
        # The parameters that had a gradient in the last step, also by model.
        self._last_params: list[ShardedParam] = []
        self._params_by_model: dict[ShardedGrads, list[ShardedParam]] = {}
        # One model of each process group, since hosts meet once per group.
        self._group_models: list[ShardedGrads] = []

        # - State
        self._states: dict[ShardedGrads, ShardedState] = {}
        # These keep the states for peers after the optimizer is freed.
        self._keepers: dict[ShardedGrads, weakref.finalize[..., Any]] = {}
        # State dicts that the script may still read.
        self._state_dicts: weakref.WeakSet[StateDictSource] = weakref.WeakSet()
        self.finalizers = [weakref.finalize(optimizer, _complete_soon, self._state_dicts)]
        self.finalizers[0].atexit = False
        self._hook_handles = (
            optimizer.register_state_dict_post_hook(weak_method(self._show_lazily), prepend=True),
            optimizer.register_load_state_dict_post_hook(weak_method(self._shard_loaded)),
        )

    @property
    def is_elementwise(self) -> bool:
        """True if each rank updates a shard of every parameter."""
        return issubclass(self._state_type, ElementwiseState)

    # ---------------------------------------------------------------- a step

    def step(self, stock_step: StockStep, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``stock_step`` on this rank's shards, then start to gather the parameters.

        Args:
            stock_step: The ``step`` function of the optimizer's class.
            *args: Positional arguments of ``stock_step``.
            **kwargs: Keyword arguments of ``stock_step``.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        # The step of a subclass calls the step of its base class, which is patched as well.
        if self._is_stepping:
            return stock_step(optimizer, *args, **kwargs)
        if args or kwargs:
            args, kwargs = _evaluate_closure(args, kwargs)

        params = self._find_step_params(optimizer)
        if reason := self._agree_on_step(optimizer):
            self._end_sharding(reason)
        if not params or not self.is_sharded:
            return stock_step(optimizer, *args, **kwargs)
        self._prepare_update(optimizer)

        num_states = len(optimizer.state)
        try:
            self._sync.begin_update(params)
            try:
                # A GradScaler has left it to the kernels of a fused step to unscale gradients.
                is_unscaling = vars(optimizer).get("grad_scale") is not None
                if is_unscaling and optimizer.defaults.get("fused"):
                    with unscaling_grads(params, optimizer):
                        result = self._step_shards(stock_step, optimizer, args, kwargs)
                else:
                    result = self._step_shards(stock_step, optimizer, args, kwargs)
            except Exception:
                # Peers may have updated their shards, so a graph over these parameters is stale
                # here as well. They wait for the gather, too, because an error may be this rank's
                # alone.
                torch.autograd.graph.increment_version([sharded.param for sharded in params])
                self._start_gather(optimizer, params)
                raise
            self._start_gather(optimizer, params)
        except BaseException:
            # The state is already updated, so the parameters must keep the update as well, even if
            # a KeyboardInterrupt ends the step or peers never join the gather.
            self._sync.keep_update()
            raise
        if len(optimizer.state) > num_states:
            _sort_new_state(optimizer, num_states)
        COUNTERS.steps += 1
        COUNTERS.params_updated += len(params)
        return result

    def _find_step_params(self, optimizer: Optimizer) -> list[ShardedParam]:
        """Complete all values, and return the parameters that :meth:`params_to_step` selects."""
        # There may be no forward between two steps, so the last gather may still be in flight.
        self._sync.finish()
        self._step_thread_id = threading.get_ident()
        # A state dict shows the moment of its first read, so its unread rest is fetched before
        # state changes.
        if self._state_dicts:
            for state_dict in list(self._state_dicts):
                state_dict.complete_read()
        params = self.params_to_step(optimizer)
        # A lazy gradient that the script gave to another parameter is no shard of that parameter's
        # gradient.
        if self._num_lazy_grads and sharded_grads.materialize_moved(
            [(sharded.param, sharded.shards, sharded.index) for sharded in params]
        ):
            params = self.params_to_step(optimizer)
        if params != self._last_params:
            self._last_params = params
            self._tags = {}
            self._params_by_model = {
                model: [] for model in sharded_grads.sort_models(p.shards for p in params)
            }
            for sharded in params:
                self._params_by_model[sharded.shards].append(sharded)
            self._group_models = _one_per_group(self._params_by_model)
            self._sync.find_copy_places(params)
        if params:
            for model in self._params_by_model:
                # A full tensor is gathered from shards that all hosts know to be of the same step.
                # A replay of a CUDA graph makes new state, and no host knows. Optimizers with
                # capturable=True are left to torch.
                if is_capturing(model.versions.device):
                    raise RuntimeError(_ERROR_CAPTURED.format(type(optimizer).__name__))
        return self._last_params

    def _prepare_update(self, optimizer: Optimizer) -> None:
        """Create missing state, and wait for readers and writers of the memory that changes."""
        COUNTERS.grads_sharded += self._num_lazy_grads
        was_read = False
        new_models = []
        for model in self._params_by_model:
            for sharded_optimizer in model.optimizers:
                # Its gather would overwrite the parameters that this step updates.
                if sharded_optimizer is not self:
                    sharded_optimizer._sync.finish()
            state = self._states.get(model)
            if state is None:
                new_models.append(model)
            else:
                was_read |= state.was_read
        if new_models:
            # A rank that has all of the moved state itself reads nothing, but its peers read from
            # it, so every rank waits as if it had read.
            was_read |= bool(self._states)
            for state in self._states.values():
                state.note_read()
            for model in new_models:
                self._add_model(optimizer, model, self._params_by_model[model])
        if was_read:
            # Other models are left out: nothing of them changes, and peers may reach no step over
            # them. A rank may have read another model's state than its peer, so all models are
            # announced before the first wait.
            states = [self._states[model] for model in self._params_by_model]
            for state in states:
                state.announce_step()
            for state in states:
                state.wait_for_readers()
        if self._sync.copy_places:
            self._sync.choose_transport()
        # From here to the gather this rank calls no peer; see [Note: hosts before devices].
        if self._calls_no_peers:
            for model in self._group_models:
                if model.step_barrier is not None and model.votes is not None:
                    model.step_barrier.arrive(model.votes.digest)

    def _step_shards(
        self, stock_step: StockStep, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> Any:
        """Run ``stock_step`` while the optimizer has this rank's shards; see [Note: innermost].

        A KeyboardInterrupt may come at the first instruction of any function. So
        the shards are taken out in two ``finally`` clauses of one function: the ``__exit__`` of a
        context manager written in Python may be ended before it has done anything.
        """
        states = optimizer.state
        swapped: list[tuple[ShardedState, list[ShardedParam]]] = []
        shown: Shown = {}
        with self._step_lock:
            try:
                try:
                    for model, params in self._params_by_model.items():
                        state = self._states[model]
                        swapped.append((state, params))
                        shown |= state.swap_in(params, states)
                    self._is_stepping = True
                    return call_with_params(
                        optimizer, shown, stock_step, optimizer, *args, **kwargs
                    )
                finally:
                    self._is_stepping = False
                    _swap_out(swapped, states)
            finally:
                self._is_stepping = False
                for model, params in self._params_by_model.items():
                    state = self._states[model]
                    if state.is_swapped:
                        state.swap_out(params, states)

    def _start_gather(self, optimizer: Optimizer, params: Sequence[ShardedParam]) -> None:
        """Start the collectives that make the parameters the same on all ranks."""
        try:
            for model, model_params in self._params_by_model.items():
                self._states[model].exchange_metadata(model_params, optimizer.state)
        finally:
            # Peers wait for the gather even if the state of one parameter could not be described.
            for model in self._group_models:
                if model.step_barrier is None or model.votes is None:
                    continue
                if self._calls_no_peers:
                    model.start_host_barrier(model.step_barrier)
                else:
                    model.step_barrier.wait(tag=model.votes.digest)
            self._sync.start(params)

    @contextmanager
    def pause_steps(self) -> Iterator[None]:
        """Keep steps from beginning while the block runs; first wait for a step in another thread.

        Raises:
            RuntimeError: This thread is inside of the step itself.
        """
        with self._step_lock:
            if self._is_stepping:
                raise RuntimeError(_ERROR_INSIDE_STEP.format(type(self._optimizer()).__name__))
            yield

    # ---------------------------------------------------------------- agreement

    def _agree_on_step(self, optimizer: Optimizer) -> str:
        """Agree with peers to shard this step; return the reason for the fallback, or "".

        All ranks that wait get the same reason.
        """
        if torch._C._current_graph_task_id() != -1:
            return REASON_IN_BACKWARD
        for model in self._params_by_model:
            if model.is_detached:
                return REASON_DETACHED
        if not self._has_voted:
            self._has_voted = True
            return self._agree_at_first(optimizer)
        return self._vote(self._tags or self._tag_steps(), {}, {})

    def _agree_at_first(self, optimizer: Optimizer) -> str:
        """Agree with peers to shard the optimizer; return the reason for the fallback, or "".

        Every rank does so, also one that has nothing to update.
        """
        names: dict[ShardedGrads, list[str]] = {}
        # Ranks may have the parameters in different orders, so they compare them by the index of a
        # parameter in its model.
        values: dict[ShardedGrads, dict[int, Any]] = {}
        states: dict[ShardedGrads, dict[int, Any]] = {}
        for group in optimizer.param_groups:
            options = hash_options(optimizer, group)
            for param in group["params"]:
                place = sharded_grads.find(param)
                if place is None or place[0].votes is None:
                    continue
                model, index = place
                names.setdefault(model, []).append(model.names[index])
                if model.can_be_sharded(index):
                    state = optimizer.state.get(param, {})
                    values.setdefault(model, {})[index] = param, options
                    states.setdefault(model, {})[index] = sorted(
                        ((str(key), value) for key, value in state.items()),
                        key=lambda item: item[0],
                    )
        models = sharded_grads.sort_models(names)
        self._names = {
            model: model.name_optimizer(list_terms(optimizer, names[model])) for model in models
        }
        descriptions = {model: str(name) for model, name in self._names.items()}
        tags = tag_votes(
            "first step", {model: zlib.crc32(descriptions[model].encode()) for model in models}
        )
        hashes = {
            model: make_hashes(sorted(values[model].items()), sorted(states[model].items()))
            for model in values
            if model.votes is not None and model.votes.calls_peers
        }
        reason = self._vote(tags, descriptions, hashes)
        if reason:
            return reason
        # Until ranks agree on the next optimizer, peers may read the state of one that this rank
        # has dropped. Their first step of the next one reads it, too, if they have loaded it unread.
        for model in models:
            retention.shorten_retention(model.group)
            assert model.votes is not None
            model.votes.num_optimizers += 1
        COUNTERS.optimizers += 1
        return ""

    def _tag_steps(self) -> dict[ShardedGrads, int]:
        subjects: dict[ShardedGrads, tuple[int, ...]] = {}
        for model, params in self._params_by_model.items():
            name = self._names.get(model)
            number = zlib.crc32(str(name).encode()) if name is not None else 0
            subjects[model] = (number, *sorted(sharded.index for sharded in params))
        self._tags = tag_votes("step", subjects)
        return self._tags

    def _vote(
        self,
        tags: Mapping[ShardedGrads, int],
        descriptions: Mapping[ShardedGrads, str],
        hashes: Mapping[ShardedGrads, Sequence[int]],
    ) -> str:
        """Cast a vote for each model; return the reason for the fallback, "" if all ranks agree.

        Args:
            tags: The tags, by model.
            descriptions: Descriptions of the optimizer by model, at its first step; {} later.
            hashes: Hashes of its parameters and options, and of its state, likewise.

        Raises:
            RuntimeError: Peers have passed this vote, and continue with other work.
        """
        # One rule: what ends the sharding of one model ends it for the optimizer, and so for all of
        # its models. These loops run in each step, so they have no generator, whose every element
        # would be a call.
        is_leaving = False
        for model in tags:
            if model.grads_after_local:
                sharded_grads.note_restored_grads(model)
            is_leaving |= model.is_local or model.is_stock
        spans_groups = len(tags) > 1 and len({model.group for model in tags}) > 1
        agreed = []
        groups_ahead: set[torch.distributed.ProcessGroup] = set()
        is_local = is_leaving
        is_different = False
        for model, tag in tags.items():
            model.is_local |= is_leaving
            model.cast_vote(
                tag,
                text=descriptions.get(model, ""),
                spans_groups=spans_groups,
                hashes=hashes.get(model, NO_HASHES),
            )
            is_different |= model.votes is not None and not model.votes.is_content_equal
            is_local |= model.is_local
            if model.is_local and _has_peers_ahead(model):
                groups_ahead.add(model.group)
                # A peer may wait at the barrier of this group, so this rank waits for no further
                # vote.
                is_leaving = True
            if not model.is_local and model.votes is not None and model.votes.spans_groups:
                agreed.append(model)
        # A rank that is in one of the groups only learns of a failure in another group by a second
        # vote.
        for model in agreed:
            model.is_local |= is_local
            model.cast_vote(tags[model], text=descriptions.get(model, ""))
            is_local |= model.is_local
        if not is_local:
            return ""
        for model in tags:
            model.is_local = True
            is_awaited = model.group in groups_ahead or self._is_awaited(model, is_leaving)
            if model.step_barrier is not None and is_awaited:
                model.step_barrier.abort()
                abort_step_communicators(model.group)
        reasons = [model.votes.reason for model in tags if model.votes is not None]
        reason = next(filter(None, reasons), REASON_DIFFERENT if is_different else REASON_LOCAL)
        if groups_ahead:
            self._end_sharding(reason)
            # Peers raise at the barrier of steps. This rank would wait for them in its next
            # collective.
            raise RuntimeError(
                _ERROR_PEERS_CONTINUED.format(type(self._optimizer()).__name__, reason)
            )
        return reason

    @staticmethod
    def _is_awaited(model: ShardedGrads, is_leaving: bool) -> bool:
        """Return whether peers wait for this host, and do not know that it leaves the model."""
        if model.votes is None or model.votes.reason:
            return False
        return is_leaving and any(optimizer.is_sharded for optimizer in model.optimizers)

    def _end_sharding(self, reason: str) -> None:
        """Fall back for good with this optimizer, and with all others over models that end here."""
        ending = {self}
        models = set(self._params_by_model) | set(self._names)
        if reason is not REASON_DETACHED:
            for group in {
                model.group for model in models if model.votes is not None and model.votes.reason
            }:
                models.update(sharded_grads.list_models(group))
            for model in models:
                model.is_stock = True
                ending.update(model.optimizers)
        for sharded_optimizer in ending:
            if sharded_optimizer.is_sharded:
                sharded_optimizer.fall_back(reason)

    # ---------------------------------------------------------------- parameters

    def params_to_step(self, optimizer: Optimizer) -> list[ShardedParam]:
        """Return the parameters that have a gradient and whose update can be sharded."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        key = list(map(id, params)), sharded_grads.Generation.number
        # The class of a pending parameter would wait for the gather, although `.grad` does not
        # depend on it.
        with torch._C.DisableTorchFunctionSubclass():
            if key != self._params_key:
                self._params = self._find_params(params)
                self._params_key = key
                self._full_params = [sharded.param for sharded in self._params]
            grad_types = list(map(type, map(_GRAD, self._full_params)))
        self._num_lazy_grads = grad_types.count(LazyTensor)
        if NoneType not in grad_types:
            return self._params
        return [
            p
            for p, grad_type in zip(self._params, grad_types, strict=True)
            if grad_type is not NoneType
        ]

    def _find_params(self, params: Iterable[Parameter]) -> list[ShardedParam]:
        known = {id(sharded.param): sharded for sharded in self._params}
        found = []
        for param in params:
            place = sharded_grads.find(param)
            if place is None:
                continue
            sharded = known.get(id(param))
            if sharded is None or (sharded.shards, sharded.index) != place:
                # Before a quantized parameter can be trained, it gets another dtype and other shards.
                if not is_differentiable(param) or not self._state_type.can_shard(*place):
                    continue
                sharded = ShardedParam(param, *place)
            found.append(sharded)
        return found

    # ---------------------------------------------------------------- state

    def _add_model(
        self, optimizer: Optimizer, model: ShardedGrads, params: Sequence[ShardedParam]
    ) -> None:
        """Begin to shard the state of one model's parameters."""
        # Gradients and state may be shards of a former wrapper of the model. They are fetched now,
        # because this rank calls no peer once it has arrived at the host barrier.
        held = [
            tensor
            for sharded in params
            for tensor in (sharded.param.grad, *optimizer.state.get(sharded.param, {}).values())
        ]
        lazy_tensor.materialize(
            value for value in held if isinstance(value, LazyTensor) and value.source is not model
        )
        name = self._names.get(model)
        # The model was wrapped again, or add_param_group() added its parameters.
        if name is None:
            names = [model.names[sharded.index] for sharded in params]
            name = self._names[model] = model.name_optimizer(list_terms(optimizer, names))
            # The tags hash the names of optimizers.
            self._tags = {}
        model.adopt_name(name)
        model.optimizers.add(self)
        state = self._states[model] = self._state_type(model, name)
        # Peers may read the state after the script has dropped the optimizer here: slower ones, and
        # those that continue with it until this rank steps a new optimizer, which ends sharding.
        keeper = weakref.finalize(optimizer, state.retire, _MAX_ACCUMULATION_STEPS)
        keeper.atexit = False
        self._keepers[model] = keeper
        current = {sharded.shards for sharded in self._params}
        for former in [model for model in self._states if model not in current]:
            self._drop_model(optimizer, former)

    def _drop_model(self, optimizer: Optimizer, model: ShardedGrads) -> None:
        """Stop keeping state for a model whose parameters have other shards in a new wrapper."""
        state = self._states.pop(model)
        # Slower peers still fetch the tensors that this rank fetches below.
        state.retire()
        self._keepers.pop(model).detach()
        self._names.pop(model, None)
        model.optimizers.discard(self)
        if not PeerRpc.is_destroyed(model.group):
            # Parameters that this step leaves out still have lazy state.
            state.unshard(optimizer.state)

    def _show_lazily(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Replace sharded state in a state dict by lazy CPU tensors, but not in the optimizer."""
        values = [value for state in state_dict["state"].values() for value in state.values()]
        if not any(
            isinstance(value, LazyTensor) and isinstance(value.source, ShardedState)
            for value in values
        ):
            return
        source = StateDictSource(state_dict["state"], weakref.WeakMethod(self.pause_steps))
        state_dict["state"] = source.shown
        if threading.get_ident() == self._step_thread_id:
            self._state_dicts.add(source)
        else:
            # The thread that trains continues concurrently, and would change what is unread.
            source.complete()

    def _shard_loaded(self, optimizer: Optimizer) -> None:
        """Shard loaded state at once: full copies would take the memory that this feature saves."""
        for state_dict in list(self._state_dicts):
            state_dict.complete()
        for state in self._states.values():
            state.load(optimizer.state)

    # ---------------------------------------------------------------- the end of sharding

    def fall_back(self, reason: str) -> None:
        """Make everything full, and leave all further steps to torch.

        Args:
            reason: The reason, for the report.

        Raises:
            RuntimeError: The full state cannot be gathered, because peers have continued.
        """
        optimizer = self._optimizer()
        try:
            self.unshard()
        except PeerError as error:
            raise RuntimeError(
                _ERROR_PEERS_CONTINUED.format(type(optimizer).__name__, reason)
            ) from error
        if optimizer is not None:
            self._on_fallback(optimizer, reason)

    def unshard(self) -> None:
        """Make gradients and state full, and remove all hooks from the optimizer."""
        self.is_sharded = False
        self._sync.finish()
        for handle in self._hook_handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        # They keep what peers read of an optimizer that is freed. This one lives, and keeps its
        # shards for final calls.
        for finalizer in (*self.finalizers, *self._keepers.values()):
            finalizer.detach()
        has_main_params = issubclass(self._state_type, MainParamsState)
        for state_dict in list(self._state_dicts):
            # The fp32 state is rounded below, so state dicts are fetched before. Other unread state
            # dicts show the full state that is restored below.
            (state_dict.complete if has_main_params else state_dict.complete_read)()
        if has_main_params:
            drop_main_params(optimizer)
        # All are marked before the first read, so that each peer's last read of one finds the mark.
        # A peer that has promised to end the votes does so only when it reaches its own step, after
        # more backwards. Its final reads end the retention, or this number of backwards.
        reachable = [
            state
            for state in self._states.values()
            if state.start_final_calls(_MAX_ACCUMULATION_STEPS)
        ]
        for state in reachable:
            state.unshard(optimizer.state)
        if has_main_params:
            round_state(optimizer)
        if self.is_elementwise:
            self.params_to_step(optimizer)
            for sharded in self._params:
                sharded.shards.request_sharding(sharded.index, requested=False)


def _swap_out(
    swapped: list[tuple[ShardedState, list[ShardedParam]]], states: dict[Any, Any]
) -> None:
    """Take the shards of all models out of an optimizer's state, the last model first; empty ``swapped``."""
    try:
        while swapped:
            state, params = swapped.pop()
            state.swap_out(params, states)
    finally:
        # The state of one model has raised. The remaining ones must not keep shards.
        if swapped:
            _swap_out(swapped, states)


def _one_per_group(models: Iterable[ShardedGrads]) -> list[ShardedGrads]:
    return list({model.group: model for model in models}.values())


def _has_peers_ahead(model: ShardedGrads) -> bool:
    """Return whether peers continue with other work, and a barrier makes them raise an error."""
    # Models that were left to torch cast no votes, so an earlier vote has set their flag.
    is_voting = model.step_barrier is not None and not model.is_stock
    return is_voting and model.votes is not None and model.votes.has_peers_ahead


def _evaluate_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Evaluate a closure before the swap, and replace it by a function that returns its loss.

    The closure reads full tensors.
    """
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if args:
        return (lambda: loss, *args[1:]), kwargs
    return args, kwargs | {"closure": lambda: loss}


def _sort_new_state(optimizer: Optimizer, num_known: int) -> None:
    """Sort the state that a step has added by parameter, the order in which torch adds it.

    Args:
        optimizer: The optimizer.
        num_known: The length of ``optimizer.state`` before the step.
    """
    state = optimizer.state
    params = (param for group in optimizer.param_groups for param in group["params"])
    places = {param: place for place, param in enumerate(params)}
    for param in sorted(list(state)[num_known:], key=lambda param: places.get(param, -1)):
        state[param] = state.pop(param)


def _complete_soon(state_dicts: Iterable[StateDictSource]) -> None:
    """Have the state dicts of a freed optimizer fetched before peers free its state."""
    for state_dict in list(state_dicts):
        state_dict.complete_before_backward()
