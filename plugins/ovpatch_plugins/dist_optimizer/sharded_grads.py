"""The gradients of one model, where each rank keeps a shard of each."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.comm import host_barrier
from ovpatch.overlap.comm.collectives import (
    abort_step_communicators,
    abort_transport,
    reduce_scatter_transport,
)
from ovpatch.overlap.comm.host_barrier import HostBarrier
from ovpatch.overlap.comm.lifetimes import (
    WeakParams,
    find_param_record,
    group_state,
    group_values,
    is_destroyed,
    outside_modes,
    param_record,
)
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.data_parallel.fp32_accumulation import LOW_PRECISION_DTYPES
from ovpatch.overlap.data_parallel.grad_bucket import GradBucket, get_grad
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder
from ovpatch.overlap.data_parallel.grad_sync import GradSync
from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.peer_rpc.sequence_lock import SequenceLock
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.shard import Shard, can_be_sharded, shard_range, shard_view, unshard
from ovpatch_plugins.dist_optimizer.agreement import OptimizerName, StepVotes, Vote
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.shard_reader import ShardReader
from ovpatch_plugins.dist_optimizer.sharded_bucket import GradShards, GradSource, GradState, ShardedGradBucket

_STRICT_BACKWARDS: Final = 3  # of a model, in which its kernels are loaded

_OTHER_LAYOUT: Final = (
    "ovpatch: parameter '{}' got another memory layout (memory_format?) after its model was wrapped, and shards of "
    "its gradient and of its optimizer's state are in the old order. Change the layout before "
    "DistributedDataParallel, or turn dist_optimizer off."
)

_OTHER_ORDER: Final = (
    "ovpatch: ranks have stepped, clipped or unscaled optimizers over {} in orders that differ, or over different "
    "parameters, so its parameters may be wrong since one of the last steps. Use the same order on every rank (a set "
    "has none), or turn dist_optimizer off."
)

#: More than a rank's digest of its votes, so that the sum of its squares over 2,047 ranks is an int32.
_VOTED: Final = 1021

_TOO_EARLY: Final = (
    "ovpatch: the gradient of parameter '{}' was read, or added to, during a backward that has already reduced it "
    "and freed its memory. Read it after the backward; if several reentrant checkpoints use the parameter, set "
    "use_reentrant=False; or set OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0."
)


class ShardedGrads(GradSharder, GradSource):
    """This rank's shards of one model's gradients. Methods stand in the order of a gradient's life.

    [Note: sharded on request] An optimizer that updates shards requests sharded gradients; a script that looks at
    ``p.grad`` reads full ones, which is noticed. Ranks exchange both as step flags. A gradient is reduce-scattered from
    the step on in which all ranks request it and none has ever read it; otherwise it is all-reduced, as under stock. So
    a script that reads gradients pays for a few slow reads, and is then as fast as without this feature.

    [Note: one dtype on all ranks] Backends add in the dtype that is sent; the copy engines' kernel adds half precision
    in fp32, without a cast before. Half precision is exact for a single contribution only. If any rank has a gradient
    when backward begins, or its static graph reaches a parameter twice, or hooks of the script may change gradients,
    all ranks send fp32. Ranks exchange this at the host barrier. Where a graph that is not static reaches a parameter
    twice behind the first collective (reentrant checkpoints), its sum is sent rounded.

    Args:
        params: The parameters, the same on all ranks, in registration order.
        names: Their fully qualified names.
        group: The process group over which they are reduced.
        min_numel: Returns how many elements make a parameter worth sharding.
        max_inflight_bytes: How many bytes of full gradients may be under reduction at a time.
        sparse: Parameters, by index, that are not sharded, since their gradients are sparse.
        in_fp32: Whether gradients of half precision are averaged in fp32.
        sums_in_fp32: Whether they are added up in fp32 over several microbatches.

    Attributes:
        versions: The versions of the shards; an update of them is marked there.
        backwards: How many backwards were reduced.
        reduced: The reduced shards, by index of the parameter, padded to the same size on all ranks.
        is_replaced: Whether the model has other shards by now.
        is_detached: Whether the model's gradients are reduced elsewhere by now, for good: ranks may step unevenly.
        is_stock: Whether torch steps all optimizers over the model, for good.
        grads_of_backward: What was ``p.grad`` when the last backward ended, by index, as long as it exists.
        optimizers: The sharded optimizers over these parameters.
        owners: The elements that each rank owns, and the parameters' owners, by terms of the optimizer and index.
    """

    is_active = True

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        min_numel: Callable[[Tensor], int],
        max_inflight_bytes: float,
        sparse: Collection[int],
        in_fp32: bool,
        sums_in_fp32: bool,
    ) -> None:
        super().__init__()
        self.params, self.names, self.group = WeakParams(params), list(names), group
        self.sharded = self._agreed = frozenset[int]()
        self.max_inflight_bytes = max_inflight_bytes
        self.is_replaced = self.is_detached = False
        self.backwards = self._searched = 0
        device = params[0].device
        self.versions = SequenceLock(device)
        self.is_stock = False
        self._requested: set[int] = set()
        self._read: set[int] = set()
        self._grads = GradShards(self.names, [GradState.FULL] * len(params))
        self.grads_of_backward: Mapping[int, weakref.ref[Tensor]] = self._grads.grads
        self.reduced = self._grads.shards
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.owners: tuple[list[int], dict[str, dict[int, int]]] = [0] * group.size(), {}
        self._reducer: weakref.ref[object] | None = None
        self._watch: weakref.finalize[..., Any] | None = None
        self._rank, self._world = group.rank(), group.size()
        self._barrier: HostBarrier | None = None
        if self._world > 1 and host_barrier.is_needed(device):
            self._barrier = HostBarrier.for_group(group, device)
        self._halves = [i for i, param in enumerate(params) if in_fp32 and param.dtype in LOW_PRECISION_DTYPES]
        self._sums_in_fp32, self._must_send_fp32 = sums_in_fp32, False
        self._communicator = group
        self.votes = StepVotes.for_group(group, device) if self._world > 1 else None
        self._voted = 0
        self._names: Counter[str] = Counter()
        self._kept = group_state(group).values
        # Once: in a step the optimizer's parameters are shards, and peers call at any time.
        self._numels = [param.numel() for param in params]
        self._strides = [param.stride() for param in params]
        self._peers = ShardReader(group, self.versions, self._grads.shards, self._numels)
        self._can_be_sharded = [
            i not in sparse and can_be_sharded(param, self._world, min_numel(param)) for i, param in enumerate(params)
        ]
        for index, param in enumerate(params):
            state = param_record(param)
            if state.local_grad_hook is not None:
                state.local_grad_hook.remove()
            state.local_grad_hook, state.sharder = None, (weakref.ref(self), index)
        _Generation.number += 1
        group_state(group).get_or_create(_Models, _Models).add(self)

    def bind(self, reducer: object, group: dist.ProcessGroup) -> None:
        """Belong to a reducer; see :class:`GradSharder`.

        Gradients that are added once the reducer is gone, as with its wrapper, are not reduced. Hooks on the parameters
        note them from then on, until the parameters have other shards.
        """
        self._communicator = group
        if self._reducer is None:
            self._reducer = weakref.ref(reducer)
            if any(self._can_be_sharded):
                self._watch = weakref.finalize(reducer, _watch_local_grads, weakref.ref(self))
                self._watch.atexit = False

    # ---------------------------------------------------------------- which gradients are sharded

    def can_be_sharded(self, index: int) -> bool:
        """Return whether a parameter is dense and large enough for shards."""
        return self._can_be_sharded[index]

    def request_sharding(self, index: int, requested: bool = True) -> bool:
        """Request a sharded gradient, or no longer; return whether the parameter can be sharded at all."""
        if self._can_be_sharded[index]:
            (self._requested.add if requested else self._requested.discard)(index)
        return self._can_be_sharded[index]

    def get_flags(self) -> list[int]:
        """Return which gradients this rank requests sharded, and which it has read; two flags per parameter.

        Two more let ranks compare a number: all have the same if their count times the sum of squares is the sum's.
        """
        flags = [0] * (2 * len(self.params))
        for index in self._requested:
            flags[index] = 1
        for index in self._read:
            flags[len(self.params) + index] = 1
        return [*flags, self._voted, self._voted**2]

    def update_sharded(self, sums: Sequence[int]) -> bool:
        """Shard what all ranks request and none has read; see :class:`GradSharder`.

        Raises:
            RuntimeError: Ranks have done different things in a step, or in another order.
        """
        if sums:
            count = len(self.params)
            if self._world * sums[-1] != sums[-2] ** 2:
                raise RuntimeError(_OTHER_ORDER.format(self.identity))
            self._agreed = frozenset(i for i in range(count) if sums[i] == self._world and sums[count + i] == 0)
            if self._agreed and not self._peers.is_serving:
                self._peers.start_serving(self.identity, self._examples())
                assert self._reducer is not None
                # A slower peer may call once the reducer is gone.
                weakref.finalize(self._reducer(), retention.retain, self.group, self._peers).atexit = False
        # No host hears of a replay, which makes new gradients: a captured backward leaves full ones.
        sharded = frozenset() if is_capturing(self.versions.device) else self._agreed
        changed, self.sharded = sharded != self.sharded, sharded
        return changed

    def make_bucket(
        self, indices: Sequence[int], params: Sequence[torch.nn.Parameter], dtype: torch.dtype | None
    ) -> GradBucket | None:
        """Return a bucket that reduce-scatters, if one of the parameters is sharded; see :class:`GradSharder`."""
        if self.sharded.isdisjoint(indices):
            return None
        return ShardedGradBucket(indices, params, self, self._grads, self.sharded, self._world, dtype=dtype)

    def watched_params(self) -> list[int]:
        """Return the parameters with a shard; one that is no longer sharded may have one from the last backward."""
        return [i for i in range(len(self.params)) if i in self.sharded or self.is_lazy(i)]

    def _examples(self) -> list[Tensor]:
        """Return one tensor for each dtype that shards may have."""
        dtypes = dict.fromkeys([*(param.dtype for param in self.params), torch.float32])
        return [self.params[0].new_empty(0, dtype=dtype) for dtype in dtypes if dtype.is_floating_point]

    # ---------------------------------------------------------------- in a backward

    def before_accumulate(self, index: int) -> None:
        """Materialize lazy gradients before something is added to one; an error if the running backward freed it."""
        if self._searched < self.backwards:  # once: in the usual case the script has dropped them all
            self._searched = self.backwards
            with torch._C.DisableTorchFunctionSubclass():
                params = [reference() for reference in self.params.references]
                self.has_lazy_grads = LazyTensor in [type(param.grad) for param in params if param is not None]
        if self.has_lazy_grads and self.is_lazy(index):
            self._refuse_freed([index])
            self.materialize_grads()  # all of them: the others will be added to as well

    def on_backward_start(self, *, staged: bool, counts: Sequence[int] | None) -> None:
        """Materialize gradients that the script still holds, but no parameter has.

        No collective of this backward has started, so no peer can have overwritten its shards.
        """
        if self._halves:
            self._grads.is_sent_in_low_precision = False
            self._must_send_fp32 = staged or self._any_sum(
                lambda i, grad: grad is not None or (counts is not None and counts[i] > 1)
            )
        if self.votes is not None:
            self.votes.reached[self.identity] = self.backwards + 1
            if not self.versions.is_asynchronous:
                self.votes.inside[self.identity] = self.backwards + 1
        retained = self._kept.get(retention.Retention)
        if retained is not None and retained.before_backward:
            retention.prepare_backward(self.group)
        if self._grads.grads:
            kept = self.last_grads()
            self._grads.grads.clear()
            if kept:
                lazy_tensor.materialize(
                    [grad for index, grad in kept if self._is_own(grad) and grad is not self.params[index].grad]
                )

    def before_first_collective(self) -> None:
        """Have the hosts meet; see [Note: one dtype on all ranks]."""
        if not self._halves:
            self.start_host_barrier()
            return
        able = (
            not self.sharded.isdisjoint(self._halves)
            and reduce_scatter_transport(self._communicator, self.versions.device) is not None
        )
        in_fp32 = self._must_send_fp32 or self._any_sum(lambda _, grad: fp32_accumulation.has_sum(grad))
        self._grads.is_sent_in_low_precision = not self._meet_hosts(in_fp32 if able else None) and able

    def _any_sum(self, is_sum: Callable[[int, Tensor | None], bool]) -> bool:
        """Return whether a sharded gradient of half precision is a sum, which is added up in fp32."""
        return self._sums_in_fp32 and any(is_sum(i, self.params[i].grad) for i in self._halves if i in self.sharded)

    def start_host_barrier(self) -> None:
        """Arrive at the host barrier, and pass it in :meth:`finish_host_barrier`; in the first steps at once.

        Kernels that are loaded in the first steps may wait for a collective that is in flight.
        """
        if self._barrier is not None:
            (self._barrier.wait if self.backwards < _STRICT_BACKWARDS else self._barrier.defer_wait)()

    def finish_host_barrier(self) -> None:
        """Have this host wait for the others if it has not yet; see [Note: hosts before devices]."""
        if self._barrier is not None:
            try:
                self._barrier.finish()
            except RuntimeError:  # this rank's collectives are under way already
                abort_step_communicators(self.group)
                abort_transport(self.group)
                raise

    def arrive_at_hosts(self) -> None:
        """Tell the other hosts that this rank waits for them next, and calls no peer until then."""
        if self._barrier is not None:
            self._barrier.arrive()

    def wait_for_hosts(self) -> None:
        """Have the hosts meet before a collective."""
        if self._barrier is not None:
            self._barrier.wait()

    def _meet_hosts(self, flag: bool | None) -> bool:
        """Have the hosts meet and exchange a flag; return whether one is raised, or flags mean nothing."""
        return self._barrier is None or self._barrier.wait(flag) or len(self._barrier.devices) > 1

    # ---------------------------------------------------------------- at its end

    def wait_for_grads(self, sync: GradSync) -> None:
        """Wait for all reductions of a backward: a new version, which begins when peers have read the last."""
        self.backwards += 1
        states = self._grads.states
        freed = (
            [i for i, state in enumerate(states) if state is GradState.IN_FLIGHT]
            if GradState.IN_FLIGHT in states
            else ()
        )
        states[:] = [GradState.FULL] * len(states)
        for index in freed:
            states[index] = GradState.IN_FLIGHT
        # Where only the device waits it may do so first: without this rank no shard can have been written.
        (sync.wait if self.versions.is_asynchronous else sync.wait_for_peers)()
        self.versions.begin_update()
        sync.wait()
        for bucket in sync.buckets:
            if isinstance(bucket, ShardedGradBucket):
                bucket.publish_shards()
        self.versions.end_update()
        if self.votes is not None:
            self.votes.inside.pop(self.identity, None)
        retained = self._kept.get(retention.Retention)
        if retained is not None and retained.retained:
            retention.release_retained(self.group)
        self.is_local = False
        self.has_lazy_grads = bool(self.sharded)

    def fill_shared_grads(self) -> None:
        """Fill the gradients whose memory the script holds; all buckets have been unpacked."""
        if GradState.ALIASED not in self._grads.states:
            return
        held = [i for i, state in enumerate(self._grads.states) if state is GradState.ALIASED]
        self._read.update(held)
        with torch.no_grad():
            for index, full in zip(held, self._pull(held), strict=True):
                self._grads.states[index] = GradState.SHARDED
                grad = self.params[index].grad
                if grad is not None:
                    grad.copy_(full)

    # ---------------------------------------------------------------- what optimizers see

    def local_range(self, index: int) -> Shard:
        """Return which of a parameter's elements this rank owns."""
        return shard_range(self._numels[index], self._world, self._rank)

    def ranges(self, index: int) -> list[Shard]:
        """Return which of a parameter's elements each rank owns."""
        return [shard_range(self._numels[index], self._world, rank) for rank in range(self._world)]

    def local_shard(self, index: int, grad: Tensor | None = None) -> Tensor:
        """Return this rank's shard of what ``p.grad`` is now, ``[shard.numel]``.

        It is the memory that the reduce-scatter writes, or a view of ``p.grad``, where that lies as the parameter does.

        Args:
            index: The parameter.
            grad: Its ``p.grad``, if that is known.
        """
        grad = get_grad(self.params[index]) if grad is None else grad
        assert grad is not None
        if self._is_own(grad):
            return self.reduced_shard(index)
        return shard_view(self.in_param_layout(index, grad), self.local_range(index))

    def reduced_shard(self, index: int) -> Tensor:
        """Return this rank's shard of the reduced gradient, ``[shard.numel]``, of the dtype that was reduced."""
        return self._grads.shards[index][: self.local_range(index).numel]  # a new object: its memory may be replaced

    def in_param_layout(self, index: int, grad: Tensor) -> Tensor:
        """Return a full gradient whose elements lie in memory as the parameter's do."""
        param = self.params[index]
        return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)

    def check_layout(self, index: int) -> None:
        """Raise an error if a parameter's elements lie in another order than when the model was wrapped.

        Raises:
            RuntimeError: They do.
        """
        if self.params[index].stride() != self._strides[index]:
            raise RuntimeError(_OTHER_LAYOUT.format(self.names[index]))

    def is_lazy(self, index: int) -> bool:
        """Return whether ``p.grad`` has not been materialized, so that its shards are what counts."""
        return self._is_own(get_grad(self.params[index]))

    def _is_own(self, grad: Tensor | None) -> bool:
        return type(grad) is LazyTensor and grad.__dict__.get("source") is self

    def has_grad(self, index: int) -> bool:
        """Return whether a parameter has a gradient, lazy or not."""
        return get_grad(self.params[index]) is not None

    def was_sharded(self, index: int) -> bool:
        """Return whether the last reduced backward left shards of a gradient, whatever ``p.grad`` is now.

        The same on all ranks.
        """
        return self._grads.states[index] is GradState.SHARDED

    def is_sharded(self, index: int) -> bool:
        """Return :meth:`was_sharded`, unless ranks may have added gradients of their own since.

        Only after :meth:`cast_vote`.
        """
        return not (self.is_local or self.is_detached) and self.was_sharded(index)

    def last_grads(self) -> list[tuple[int, Tensor]]:
        """Return the tensors that still exist of those that were ``p.grad`` when the last backward ended."""
        if self.is_detached:
            return []
        return [(index, grad) for index, ref in self._grads.grads.items() if (grad := ref()) is not None]

    def name_optimizer(self, terms: str) -> OptimizerName:
        """Return the name of a new optimizer, which counts once ranks have agreed on it (:meth:`adopt_name`)."""
        return OptimizerName(terms, self._names[terms] + 1)

    def adopt_name(self, name: OptimizerName) -> None:
        """Count an optimizer on which ranks have agreed."""
        self._names[name.terms] = max(self._names[name.terms], name.number)

    @property
    def has_step_votes(self) -> bool:
        """True if ranks wait for each other's vote before each step; hosts that run ahead of their devices do not."""
        return self._barrier is None and self._world > 1

    def stay_away_from_hosts(self) -> None:
        """Tell the other hosts that this one does not come, if they are in :meth:`wait_for_hosts`."""
        if self._barrier is not None:
            self._barrier.abort()
            abort_step_communicators(self.group)

    def cast_vote(self, tag: int, *, text: str = "", spans_groups: bool = False) -> None:
        """Make :attr:`is_local` the same on all ranks, which all call this.

        A rank with local gradients waits for no peer, since it continues alone, perhaps forever. Peers find that in the
        vote in which they wait. A vote in each step would stall hosts that run ahead of their devices. There the step
        flags show whether ranks have done the same in the same order, so an error follows within a period.

        Args:
            tag: The next action of this rank (:func:`tag_votes`).
            text: The description of an optimizer at its first step.
            spans_groups: Whether the optimizer has models of several process groups.
        """
        # The model has votes also after the script has dropped the wrapper.
        is_sharded = self._watch is not None and not (self.is_detached or self.is_replaced)
        has_begun = bool(text) or self.backwards > 0
        if self.votes is None or not (is_sharded and has_begun) or is_destroyed(self.group):
            return
        # Ranks have left this model to torch together. A rank may have freed it since, and then casts no vote over it.
        if self.is_stock:
            self.is_local = True
            return
        waits = self.has_step_votes
        self.is_local = not self.votes.agree(Vote(tag, text, int(self.is_local), spans_groups), waits=waits)
        if not waits:
            self._voted = (self._voted * 31 + self.votes.reached[""] + tag) % _VOTED

    # ---------------------------------------------------------------- reading

    def fetch(self, wanted: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Return full gradients, put together from all ranks' shards."""
        indices = [one.key for one in wanted]
        self._refuse_freed(indices)
        if counts_as_read:
            self._read.update(indices)
            COUNTERS.grads_read += len(indices)
        return self._pull(indices)

    def materialize_grads(self) -> None:
        """Materialize every lazy ``p.grad`` but those that the running backward reduces."""
        states = self._grads.states
        lazy_tensor.materialize(
            p.grad for i, p in enumerate(self.params) if states[i] is not GradState.IN_FLIGHT and self.is_lazy(i)
        )

    def _refuse_freed(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self._grads.states[index] is GradState.IN_FLIGHT:
                raise RuntimeError(_TOO_EARLY.format(self.names[index]))

    def _pull(self, indices: Sequence[int]) -> list[Tensor]:
        answers = self._peers.pull_shards(indices)
        full = []
        for position, index in enumerate(indices):
            shards = {rank: tensors[position] for rank, tensors in answers.items()}
            shards[self._rank] = self._grads.shards[index]
            with outside_modes():
                full.append(unshard(self.params[index], shards, self.ranges(index)))
        return full

    def norms_of_peers(self, indices: Sequence[int], norm_type: float) -> dict[int, list[float]]:
        """Return the norm of each of the other ranks' shards, by rank; no peer takes part."""
        return self._peers.pull_norms(indices, norm_type)

    # ---------------------------------------------------------------- the end

    def retire(self) -> None:
        """Leave the parameters to other shards."""
        self.is_replaced = True

    def restore_grads(self) -> None:
        """Materialize all gradients, while there are peers to call; there will be no shards any more."""
        self.is_detached = True
        if self._watch is not None:
            self._watch.detach()  # another reducer comes
        if self._peers.start_final_calls():
            self.materialize_grads()


def make_sharded_grads(
    params: Sequence[torch.nn.Parameter], names: Sequence[str], group: dist.ProcessGroup, **options: Any
) -> GradSharder:
    """Return the sharder of a model; gradients stay full if its parameters lie on several devices.

    Args:
        params: As for :class:`ShardedGrads`.
        names: As for :class:`ShardedGrads`.
        group: As for :class:`ShardedGrads`.
        **options: All others of :class:`ShardedGrads`.
    """
    if any(param.device != params[0].device for param in params):
        return GradSharder()
    return ShardedGrads(params, names, group, **options)


class _Generation:
    """How many :class:`ShardedGrads` there were: as long as it is the same, :func:`find` returns the same."""

    number = 0


class _Models(weakref.WeakSet[ShardedGrads]):
    """The sharded gradients of one process group."""


def get_generation() -> int:
    """Return a number that changes when parameters get other sharded gradients."""
    return _Generation.number


def find(param: Tensor) -> tuple[ShardedGrads, int] | None:
    """Return the sharded gradients that a parameter's belongs to, and its index there."""
    state = find_param_record(param)
    if state is None or state.sharder is None:
        return None
    grads = state.sharder[0]()
    return None if grads is None else (grads, state.sharder[1])


def find_by_grad(grads: Sequence[Tensor]) -> list[tuple[ShardedGrads, int] | None]:
    """Return for each gradient where it belongs, if the last backward left shards of it; the same on all ranks."""
    places: dict[int, tuple[ShardedGrads, int]] = {}
    for _, models in group_values(_Models):
        for model in models:
            places |= {id(grad): (model, index) for index, grad in model.last_grads()}
    return [places.get(id(grad)) for grad in grads]


def list_models(group: dist.ProcessGroup) -> list[ShardedGrads]:
    """Return the sharded gradients of all models of a process group."""
    return [model for _, models in group_values(_Models, group) for model in models]


def sort_models(models: Iterable[ShardedGrads]) -> list[ShardedGrads]:
    """Return models, each once, in an order that is the same on all ranks: a script's may differ."""
    return sorted(dict.fromkeys(models), key=lambda shards: (shards.group.group_name, shards.identity))


def tag_votes(kind: str, subjects: Mapping[ShardedGrads, Hashable]) -> dict[ShardedGrads, int]:
    """Return the tag of each model's vote; the models are in the order of :func:`sort_models`.

    The first vote of a group decides on all collectives until the last one, so each tag is of all the group's models.

    Args:
        kind: What ranks are about to do.
        subjects: The parameters and other facts by model, as integers or tuples of these.
    """
    # The hash of integers is the same in all processes, that of a string is not.
    names = {shards: zlib.crc32(f"{kind} {shards.identity}".encode()) for shards in subjects}
    digests: dict[dist.ProcessGroup, int] = {}
    for shards, subject in subjects.items():
        digests[shards.group] = hash((digests.get(shards.group, 0), names[shards], subject))
    return {shards: hash((digests[shards.group], name)) & _TAG_MASK for shards, name in names.items()}


def vote(kind: str, places: Iterable[tuple[ShardedGrads, int]]) -> None:
    """Have ranks agree on what they do with some parameters' gradients next; see :meth:`ShardedGrads.cast_vote`.

    Args:
        kind: What that is.
        places: Where the gradients belong.
    """
    indices: dict[ShardedGrads, list[int]] = {}
    for shards, index in places:
        indices.setdefault(shards, []).append(index)
    subjects = {shards: tuple(sorted(indices[shards])) for shards in sort_models(indices)}
    for shards, tag in tag_votes(kind, subjects).items():
        shards.cast_vote(tag)


_TAG_MASK: Final = (1 << 30) - 1


def materialize_moved(places: Iterable[tuple[Tensor, ShardedGrads, int]]) -> bool:
    """Materialize lazy gradients that the script has given to another parameter, or only keeps; return if there are.

    What works on shards takes a lazy ``p.grad`` for the parameter's own, and writes over the shards of one that the
    script has replaced. All ranks call this, before they meet.

    Args:
        places: Parameters, with where their gradients belong.
    """
    moved: dict[int, Tensor] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for param, shards, index in places:  # of each step: no call for a parameter
            reference, grad = shards.grads_of_backward.get(index), param.grad
            last = None if reference is None else reference()
            if grad is not last:
                moved |= {id(one): one for one in (grad, last) if type(one) is LazyTensor}
    if moved:
        lazy_tensor.materialize(moved.values())
    return bool(moved)


def _watch_local_grads(reference: weakref.ref[ShardedGrads]) -> None:
    model = reference()
    if model is None or model.is_replaced:
        return
    for index in range(len(model.params)):
        param = model.params.find(index)
        if param is None or not param.requires_grad:
            continue
        with torch._C.DisableTorchFunctionSubclass():  # a pending parameter is of one
            if find(param) == (model, index):  # else another wrapper reduces its gradients
                hook = _LocalGradHook(reference)
                param_record(param).local_grad_hook = param.register_post_accumulate_grad_hook(hook)
            if model.is_lazy(index):  # the reducer's hooks, which made it whole before something is added, are gone
                before = _BeforeLocalGradHook(reference, index)
                before.handle = param.register_hook(before)


class _LocalGradHook:
    """A hook that notes that gradients are local; copies of the parameter, which have no shards, may have it, too."""

    def __init__(self, reference: weakref.ref[ShardedGrads]) -> None:
        self._reference = reference

    def __call__(self, param: Tensor) -> None:
        model = self._reference()
        entry = find(param)
        if model is not None and entry is not None and entry[0] is model:
            model.is_local = True


class _BeforeLocalGradHook:
    """A hook that makes gradients whole before a local one is added to them, once."""

    def __init__(self, reference: weakref.ref[ShardedGrads], index: int) -> None:
        self._reference, self._index = reference, index
        self.handle: RemovableHandle | None = None

    def __call__(self, _grad: Tensor) -> None:
        if self.handle is not None:
            self.handle.remove()
        model = self._reference()
        if model is not None and not model.is_replaced:
            model.before_accumulate(self._index)


@contextmanager
def updating_shards(places: Sequence[tuple[ShardedGrads, int]]) -> Iterator[None]:
    """Mark that sharded gradients are changed in place while the block runs, on all ranks alike.

    Some ranks may have materialized a gradient. The block changes that, and the shard follows, since peers read it.
    """
    models = list(dict.fromkeys(model for model, _ in places))
    for model in models:
        model.versions.begin_update()
    try:
        yield
    finally:
        with torch.no_grad():
            for model, index in places:
                if model.has_grad(index) and not model.is_lazy(index):
                    model.reduced_shard(index).copy_(model.local_shard(index))
        for model in models:
            model.versions.end_update()
