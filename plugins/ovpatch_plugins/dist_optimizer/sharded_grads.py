"""The sharded gradients of one model: each rank keeps a shard of each gradient."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.autograd import add_hook
from ovpatch.overlap.comm import host_barrier
from ovpatch.overlap.comm.collectives import reduce_scatter_transport
from ovpatch.overlap.comm.host_barrier import HostBarrier
from ovpatch.overlap.comm.hosts import HostLayout, ShardHolders
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
from ovpatch_plugins.dist_optimizer.agreement import NO_HASHES, OptimizerName, StepVotes, Vote
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS
from ovpatch_plugins.dist_optimizer.shard_reader import ShardReader
from ovpatch_plugins.dist_optimizer.sharded_bucket import (
    GradShards,
    GradSource,
    GradState,
    ShardedGradBucket,
)

# The first backwards of a model, in which CUDA loads its kernels.
_NUM_STRICT_BACKWARDS: Final = 3

_ERROR_OTHER_LAYOUT: Final = (
    "ovpatch: parameter '{}' got another memory layout (memory_format?) after its model was "
    "wrapped, "
    "and shards of its gradient and of its optimizer's state are in the old order. Change the "
    "layout "
    "before DistributedDataParallel, or turn dist_optimizer off."
)

_ERROR_IN_FLIGHT: Final = (
    "ovpatch: the gradient of parameter '{}' was read, or added to, during a backward that had "
    "already reduced it and freed its memory. Read it after the backward; if several reentrant "
    "checkpoints use the parameter, set use_reentrant=False; or set "
    "OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0."
)


class ShardedGrads(GradSharder, GradSource):
    """This rank's shards of one model's gradients.

    The methods follow the life of a gradient.

    [Note: sharded on request] An optimizer that updates shards requests sharded gradients. A script
    that reads ``p.grad`` gets full ones, and this class counts the read. Ranks exchange both as
    step flags. A gradient is reduce-scattered from the step on in which all ranks request it and
    none has ever read it; otherwise it is all-reduced, as in stock PyTorch. So a script that reads
    gradients pays for a few slow reads, and is then as fast as without this feature.

    [Note: one dtype on all ranks] Backends add in the dtype that is sent. The kernel of the copy
    engines adds low precision in fp32, without a cast before. Low precision is exact for a single
    contribution only. All ranks send fp32 if any rank has a gradient when backward begins, its
    static graph reaches a parameter twice, or hooks of the script may change gradients. Ranks
    exchange this at the host barrier. If another graph reaches a parameter twice after the first
    collective (reentrant checkpoints), its sum is sent rounded.

    Args:
        params: The parameters, the same on all ranks, in registration order.
        names: Their fully qualified names.
        group: The process group over which they are reduced.
        min_numel: Returns the number of elements from which a parameter is worth sharding.
        max_inflight_bytes: Limit of the bytes of full gradients that are in reduction at one time.
        sparse: Parameters, by index, that are not sharded, because their gradients are sparse.
        in_fp32: Whether low-precision gradients are averaged in fp32.
        sums_in_fp32: Whether they are added up in fp32 over several microbatches.
        holders: The ranks that together have all shards: those of the group, or of this host.

    Attributes:
        params: See the argument; held weakly.
        names: See the argument.
        group: See the argument.
        backwards: The number of reduced backwards.
        reduced: The reduced shards, by index of the parameter, padded to the same size on all
            ranks.
        versions: The versions of the shards. Every update of the shards is marked there.
        grads_of_backward: The tensors that were ``p.grad`` when the last backward ended, by index,
            while they exist.
        local_ranges: The range of each parameter's elements that this rank owns.
        is_detached: Whether the stock reducer reduces the model's gradients for good, so that ranks
            may step unevenly.
        is_stock: Whether torch steps all optimizers over the model, for good.
        votes: The votes of the process group; None if this rank has no peers.
        step_barrier: The barrier at which hosts meet for the collectives of steps and clips; None
            as for ``host_barrier``.
        optimizers: The sharded optimizers over these parameters.
        owners: The elements that each rank owns, and the parameters' owners by terms of the
            optimizer and index.
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
        holders: ShardHolders,
    ) -> None:
        super().__init__()
        self.params = WeakParams(params)
        self.names = list(names)
        self.group = group
        self.max_inflight_bytes = max_inflight_bytes
        self._world = group.size()
        self.holders = holders
        self.shards_by_host = holders.layout is not None
        device = params[0].device
        self._values = group_state(group).values
        # The group of the reducer's collectives, over the same ranks.
        self._communicator = group
        self._reducer: weakref.ref[object] | None = None
        # Runs when the reducer is freed, as with its wrapper. Later gradients are local.
        self._reducer_finalizer: weakref.finalize[..., Any] | None = None

        # - Geometry
        # In a step parameters are shards, and peers call at any time, so these are read once.
        self._numels = [param.numel() for param in params]
        self._strides = [param.stride() for param in params]
        self.local_ranges = [
            shard_range(numel, len(holders), holders.place) for numel in self._numels
        ]
        self._can_be_sharded = [
            i not in sparse and can_be_sharded(param, len(holders), min_numel(param))
            for i, param in enumerate(params)
        ]

        # - Agreement on sharded gradients; see [Note: sharded on request]
        # The parameters, by index, for which an optimizer of this rank requests shards.
        self._requested: set[int] = set()
        # The parameters, by index, whose full gradients this rank has read.
        self._read: set[int] = set()
        # The parameters, by index, whose gradients all ranks agree to shard.
        self._agreed = frozenset[int]()
        self.sharded = frozenset[int]()

        # - Shards
        self.backwards = 0
        # The value of `backwards` when lazy gradients were last searched.
        self._searched_backward = 0
        self.versions = SequenceLock(device)
        self._grads = GradShards(self.names, [GradState.FULL] * len(params))
        self.reduced = self._grads.shards
        self.grads_of_backward: Mapping[int, weakref.ref[Tensor]] = self._grads.grads
        self._peers = ShardReader(
            group, self.versions, self._grads.shards, self.local_ranges, holders
        )

        # - The dtype that is sent; see [Note: one dtype on all ranks]
        # The parameters, by index, whose low-precision gradients are averaged in fp32.
        self._low_precision_params = [
            i for i, param in enumerate(params) if in_fp32 and param.dtype in LOW_PRECISION_DTYPES
        ]
        self._sums_in_fp32 = sums_in_fp32
        # Whether this rank needs fp32 in the running backward.
        self._must_send_fp32 = False

        # The tensors that were `p.grad` after the last backward, if the script has put local
        # gradients aside before it; {} until its end, and None otherwise.
        self.grads_after_local: dict[int, weakref.ref[Tensor] | None] | None = None

        # - Steps
        self.is_detached = False
        self.is_stock = False
        self.step_barrier: HostBarrier | None = None
        if self._world > 1 and host_barrier.is_needed(device):
            self.host_barrier = HostBarrier.for_group(group, device)
            self.step_barrier = HostBarrier.for_steps(group)
        self.votes = StepVotes.for_group(group, device) if self._world > 1 else None
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        # The number of optimizers on which ranks have agreed, by their terms.
        self._num_optimizers: Counter[str] = Counter()
        self.owners: tuple[list[int], dict[str, dict[int, int]]] = [0] * len(holders), {}

        for index, param in enumerate(params):
            record = param_record(param)
            # The shards of a former wrapper have put this hook on the parameter.
            if record.local_grad_hook is not None:
                record.local_grad_hook.remove()
                record.local_grad_hook = None
            record.sharder = (weakref.ref(self), index)
        Generation.number += 1
        group_state(group).get_or_create(_Models, _Models).add(self)

    def bind(self, reducer: object, group: dist.ProcessGroup) -> None:
        """Belong to a reducer; see :class:`GradSharder`.

        No collective reduces gradients that are added after the reducer was freed. Hooks on the
        parameters note such gradients until the parameters have other shards.
        """
        self._communicator = group
        if self._reducer is None:
            self._reducer = weakref.ref(reducer)
            if any(self._can_be_sharded):
                self._reducer_finalizer = weakref.finalize(
                    reducer, _watch_local_grads, weakref.ref(self)
                )
                self._reducer_finalizer.atexit = False

    # ---------------------------------------------------------------- which gradients are sharded

    def can_be_sharded(self, index: int) -> bool:
        """Return whether a parameter is dense and large enough for shards."""
        return self._can_be_sharded[index]

    def request_sharding(self, index: int, requested: bool = True) -> bool:
        """Request a sharded gradient, or end the request; return whether a shard is possible."""
        if self._can_be_sharded[index]:
            (self._requested.add if requested else self._requested.discard)(index)
        return self._can_be_sharded[index]

    def get_flags(self) -> list[int]:
        """Return two flags per parameter.

        They are the gradients that this rank requests sharded, and those that it has read.
        """
        flags = [0] * (2 * len(self.params))
        for index in self._requested:
            flags[index] = 1
        for index in self._read:
            flags[len(self.params) + index] = 1
        return flags

    def apply_flags(self, sums: Sequence[int]) -> list[int] | None:
        """Shard the gradients that all ranks request and none has read; see :class:`GradSharder`."""
        if sums:
            count = len(self.params)
            self._agreed = frozenset(
                i for i in range(count) if sums[i] == self._world and sums[count + i] == 0
            )
            if self._agreed and not self._peers.is_serving:
                # Shards may have each of these dtypes.
                dtypes = dict.fromkeys([*(param.dtype for param in self.params), torch.float32])
                examples = [
                    self.params[0].new_empty(0, dtype=dtype)
                    for dtype in dtypes
                    if dtype.is_floating_point
                ]
                self._peers.start_serving(self.identity, examples)
                assert self._reducer is not None
                # A slower peer may call after the reducer was freed.
                weakref.finalize(
                    self._reducer(), retention.retain, self.group, self._peers
                ).atexit = False
        # Hosts cannot observe a replay, which makes new gradients, so a captured backward leaves
        # full ones.
        sharded = frozenset() if is_capturing(self.versions.device) else self._agreed
        if sharded == self.sharded:
            return None
        self.sharded = sharded
        # A parameter that is no longer sharded may still have a shard from the last backward.
        return [i for i in range(len(self.params)) if i in sharded or self.is_lazy(i)]

    def make_bucket(
        self,
        indices: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        dtype: torch.dtype | None,
    ) -> GradBucket | None:
        """Return a bucket that reduce-scatters if a parameter is sharded; see the base class."""
        if self.sharded.isdisjoint(indices):
            return None
        return ShardedGradBucket(
            indices, params, self, self._grads, self.sharded, len(self.holders), dtype=dtype
        )

    # ---------------------------------------------------------------- in a backward

    def on_backward_start(self, *, staged: bool, counts: Sequence[int] | None) -> None:
        """Materialize gradients that the script still holds, but no parameter has.

        No collective of this backward has started, so no peer can have overwritten its shards.
        """
        if self._low_precision_params:
            self._grads.is_sent_in_low_precision = False
            self._must_send_fp32 = staged or self._has_sum(
                lambda i, grad: grad is not None or (counts is not None and counts[i] > 1)
            )
        if not self.backwards and self.host_barrier is not None and any(self._can_be_sharded):
            device = self.versions.device
            # Gloo connects when the communicator is created, and has no kernels to load.
            if device.type == "cuda" and not is_capturing(device):
                self.holders.connect(device)
        if self.votes is not None:
            self.votes.reached[self.identity] = self.backwards + 1
            # On a device only the stream waits for peers, so the host is not inside of anything.
            if not self.versions.is_asynchronous:
                self.votes.inside[self.identity] = self.backwards + 1
        retained = self._values.get(retention.Retention)
        if retained is not None and retained.before_backward:
            retention.prepare_backward(self.group)
        if self.is_local and not any(map(self.has_grad, range(len(self.params)))):
            self.grads_after_local = {}
        if self._grads.grads:
            last_grads = self.last_grads()
            self._grads.grads.clear()
            if last_grads:
                lazy_tensor.materialize(
                    [
                        grad
                        for index, grad in last_grads
                        if self._is_own(grad) and grad is not self.params[index].grad
                    ]
                )

    def before_accumulate(self, index: int) -> None:
        """Materialize lazy gradients before the engine adds to one of them.

        Raises:
            RuntimeError: The running backward has freed the gradient.
        """
        # One search per backward saves a search per parameter. In the usual case the script has
        # dropped all gradients.
        if self._searched_backward < self.backwards:
            self._searched_backward = self.backwards
            with torch._C.DisableTorchFunctionSubclass():
                params = [reference() for reference in self.params.references]
                self.has_lazy_grads = LazyTensor in [
                    type(param.grad) for param in params if param is not None
                ]
        if self.has_lazy_grads and self.is_lazy(index):
            self._refuse_freed([index])
            # The backward will add to the remaining gradients as well, and one fetch is cheaper
            # than many.
            self.materialize_grads()

    def before_first_collective(self) -> None:
        """Have the hosts meet; see [Note: one dtype on all ranks]."""
        if not self._low_precision_params:
            if self.host_barrier is not None:
                self.start_host_barrier(self.host_barrier)
            return
        can_send_low_precision = (
            not self.sharded.isdisjoint(self._low_precision_params)
            # Transports serve all ranks of a group.
            and not self.shards_by_host
            and reduce_scatter_transport(self._communicator, self.versions.device) is not None
        )
        must_send_fp32 = self._must_send_fp32 or self._has_sum(
            lambda _, grad: fp32_accumulation.has_sum(grad)
        )
        barrier = self.host_barrier
        if barrier is not None:
            # The condition is the same on all ranks, so either all exchange a flag or none does.
            must_send_fp32 = barrier.wait(must_send_fp32 if can_send_low_precision else None)
            # With several devices a flag means nothing, because the flag of one device may be read
            # as the flag of another one.
            must_send_fp32 |= len(barrier.devices) > 1
        else:
            must_send_fp32 = True
        self._grads.is_sent_in_low_precision = not must_send_fp32 and can_send_low_precision

    def _has_sum(self, is_sum: Callable[[int, Tensor | None], bool]) -> bool:
        """Return whether a sharded low-precision gradient is a sum that is added up in fp32."""
        return self._sums_in_fp32 and any(
            is_sum(i, self.params[i].grad) for i in self._low_precision_params if i in self.sharded
        )

    def start_host_barrier(self, barrier: HostBarrier) -> None:
        """Arrive at a barrier, unless this rank has arrived, and finish it later.

        In the first steps the host waits immediately, because the load of a kernel may wait for a
        collective that is in flight.
        """
        (barrier.wait if self.backwards < _NUM_STRICT_BACKWARDS else barrier.defer_wait)()

    # ---------------------------------------------------------------- at its end

    def wait_for_grads(self, sync: GradSync) -> None:
        """Wait for all reductions of a backward, and publish the shards.

        They are a new version, which begins when peers have read the last one.
        """
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
        # If only the device waits, it may wait for the collectives before the new version begins.
        # Without this rank no peer can have written a shard.
        (sync.wait if self.versions.is_asynchronous else sync.wait_for_peers)()
        self.versions.begin_update()
        sync.wait()
        for bucket in sync.buckets:
            if isinstance(bucket, ShardedGradBucket):
                bucket.publish_shards()
        self.versions.end_update()
        if self.votes is not None:
            self.votes.inside.pop(self.identity, None)
        retained = self._values.get(retention.Retention)
        if retained is not None and retained.retained:
            retention.release_retained(self.group)
        self.is_local = False
        self.has_lazy_grads = bool(self.sharded)

    def fill_shared_grads(self) -> None:
        """Fill the gradients whose memory the script holds; all buckets have been unpacked."""
        if self.grads_after_local is not None:
            self.grads_after_local = {
                index: None if grad is None else weakref.ref(grad)
                for index, grad in enumerate(map(get_grad, self.params))
            }
        if GradState.ALIASED not in self._grads.states:
            return
        aliased = [i for i, state in enumerate(self._grads.states) if state is GradState.ALIASED]
        # Each such gradient costs a fetch from all peers, so it counts as read, and ranks will
        # agree on full gradients.
        self._read.update(aliased)
        with torch.no_grad():
            for index, full in zip(aliased, self._pull(aliased), strict=True):
                self._grads.states[index] = GradState.SHARDED
                grad = self.params[index].grad
                if grad is not None:
                    grad.copy_(full)

    # ---------------------------------------------------------------- what optimizers see

    def ranges(self, index: int) -> list[Shard]:
        """Return the range of a parameter's elements in each shard."""
        return [
            shard_range(self._numels[index], len(self.holders), i) for i in range(len(self.holders))
        ]

    def local_shard(self, index: int, grad: Tensor | None = None) -> Tensor:
        """Return this rank's shard of the present ``p.grad``, ``[shard.numel]``.

        It is the memory that the reduce-scatter writes, or a view of ``p.grad`` if its elements are
        stored in the order of the parameter's elements, or a copy.

        Args:
            index: The parameter.
            grad: Its ``p.grad``. Default: it is read.
        """
        grad = get_grad(self.params[index]) if grad is None else grad
        assert grad is not None
        if self._is_own(grad):
            return self.reduced_shard(index)
        return shard_view(self.in_param_layout(index, grad), self.local_ranges[index])

    def reduced_shard(self, index: int) -> Tensor:
        """Return this rank's shard of the reduced gradient, ``[shard.numel]``, in its dtype."""
        # This is a new tensor object, because the optimizer may give it other memory.
        return self._grads.shards[index][: self.local_ranges[index].numel]

    def in_param_layout(self, index: int, grad: Tensor) -> Tensor:
        """Return a full gradient whose elements are in memory in the order of the parameter's."""
        param = self.params[index]
        if grad.is_sparse:
            # The script has given a dense parameter the gradient of a sparse one.
            grad = grad.to_dense()
        return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)

    def check_layout(self, index: int) -> None:
        """Raise an error if a parameter's elements have another order than at the wrapping.

        Raises:
            RuntimeError: They do.
        """
        if self.params[index].stride() != self._strides[index]:
            raise RuntimeError(_ERROR_OTHER_LAYOUT.format(self.names[index]))

    def is_lazy(self, index: int) -> bool:
        """Return whether ``p.grad`` is lazy, so that the shards are its content."""
        return self._is_own(get_grad(self.params[index]))

    def _is_own(self, grad: Tensor | None) -> bool:
        return type(grad) is LazyTensor and grad.__dict__.get("source") is self

    def has_grad(self, index: int) -> bool:
        """Return whether a parameter has a gradient, lazy or not."""
        return get_grad(self.params[index]) is not None

    def was_sharded(self, index: int) -> bool:
        """Return whether the last reduced backward left shards, whatever ``p.grad`` is now.

        The result is the same on all ranks.
        """
        return self._grads.states[index] is GradState.SHARDED

    def is_sharded(self, index: int) -> bool:
        """Return :meth:`was_sharded`, unless ranks may have added their own gradients since.

        The result is the same on all ranks after :meth:`cast_vote`, and only then.
        """
        return not (self.is_local or self.is_detached) and self.was_sharded(index)

    def last_grads(self) -> list[tuple[int, Tensor]]:
        """Return the tensors that were ``p.grad`` when the last backward ended and still exist."""
        if self.is_detached:
            return []
        return [
            (index, grad) for index, ref in self._grads.grads.items() if (grad := ref()) is not None
        ]

    def name_optimizer(self, terms: str) -> OptimizerName:
        """Return the name of a new optimizer, which counts from :meth:`adopt_name` on."""
        return OptimizerName(terms, self._num_optimizers[terms] + 1)

    def adopt_name(self, name: OptimizerName) -> None:
        """Count an optimizer on which ranks have agreed."""
        self._num_optimizers[name.terms] = max(self._num_optimizers[name.terms], name.number)

    @property
    def has_step_votes(self) -> bool:
        """True if ranks wait for each other's vote before each step.

        A vote in each step would stall hosts that run ahead of their devices.
        """
        return self.host_barrier is None and self._world > 1

    def cast_vote(
        self,
        tag: int,
        *,
        text: str = "",
        spans_groups: bool = False,
        hashes: Sequence[int] = NO_HASHES,
    ) -> None:
        """Make :attr:`is_local` the same on all ranks, which all call this.

        A rank with local gradients waits for no peer, because it continues alone, perhaps forever.
        Peers find that in the vote in which they wait. If ranks do not wait in votes, the barrier
        of steps compares their digests, and its tag raises an error if these differ.

        Args:
            tag: The next action of this rank (:func:`.tag_votes`).
            text: The description of an optimizer at its first step.
            spans_groups: Whether the optimizer has models of several process groups.
            hashes: The hashes of parameters and options, and of state, before they get shards.
        """
        # The model also has votes after the script has dropped the wrapper.
        is_sharded = self._reducer_finalizer is not None and not (
            self.is_detached or self.is_replaced
        )
        has_begun = bool(text) or self.backwards > 0
        if self.grads_after_local:
            note_restored_grads(self)
        if self.votes is None or not (is_sharded and has_begun) or is_destroyed(self.group):
            return
        # Ranks have left this model to torch together. A rank may have freed it since, and then
        # casts no vote over it.
        if self.is_stock:
            self.is_local = True
            return
        waits = self.has_step_votes
        self.is_local = not self.votes.agree(
            Vote(tag, text, int(self.is_local), spans_groups, hashes), waits=waits
        )
        if not waits:
            # A rank that alone skips a step casts the same vote a backward later.
            self.votes.digest = hash((self.votes.digest, tag, self.backwards))

    # ---------------------------------------------------------------- reading

    def fetch(self, wanted: Sequence[LazyTensor], *, counts_as_read: bool) -> list[Tensor]:
        """Return full gradients, gathered from all ranks' shards."""
        indices = [grad.key for grad in wanted]
        self._refuse_freed(indices)
        if counts_as_read:
            self._read.update(indices)
            COUNTERS.grads_read += len(indices)
        return self._pull(indices)

    def materialize_grads(self) -> None:
        """Materialize every lazy ``p.grad``, except those that the running backward reduces."""
        states = self._grads.states
        lazy_tensor.materialize(
            param.grad
            for index, param in enumerate(self.params)
            if states[index] is not GradState.IN_FLIGHT and self.is_lazy(index)
        )

    def _refuse_freed(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self._grads.states[index] is GradState.IN_FLIGHT:
                raise RuntimeError(_ERROR_IN_FLIGHT.format(self.names[index]))

    def _pull(self, indices: Sequence[int]) -> list[Tensor]:
        replies = self._peers.pull_shards(indices)
        full = []
        for position, index in enumerate(indices):
            shards = {place: tensors[position] for place, tensors in replies.items()}
            shards[self.holders.place] = self._grads.shards[index]
            # The full tensor must not inherit the script's modes, such as fake tensors.
            with outside_modes():
                full.append(unshard(self.params[index], shards, self.ranges(index)))
        return full

    def norms_of_peers(self, indices: Sequence[int], norm_type: float) -> dict[int, list[float]]:
        """Return the norms of peers' shards, by shard; their serving threads reply."""
        return self._peers.pull_norms(indices, norm_type)

    # ---------------------------------------------------------------- the end

    def detach(self) -> None:
        """Materialize all gradients while there are peers to call, and stop sharding for good."""
        self.is_detached = True
        # The stock reducer reduces gradients that come later, so they are not local.
        if self._reducer_finalizer is not None:
            self._reducer_finalizer.detach()
        if self._peers.start_final_calls():
            self.materialize_grads()


def make_sharded_grads(
    params: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    group: dist.ProcessGroup,
    layout: HostLayout | None,
    **options: Any,
) -> GradSharder:
    """Return the sharder of a model.

    Gradients stay full if the parameters are on several devices.

    Args:
        params: As for :class:`ShardedGrads`.
        names: As for :class:`ShardedGrads`.
        group: As for :class:`ShardedGrads`.
        layout: The hosts of the group, each of which has all shards; None for one shard per rank.
        **options: The remaining arguments of :class:`ShardedGrads`.
    """
    if any(param.device != params[0].device for param in params):
        return GradSharder()
    return ShardedGrads(params, names, group, holders=ShardHolders(group, layout), **options)


class Generation:
    """The number of :class:`ShardedGrads` so far; while it is the same, :func:`find` is as well."""

    number = 0


class _Models(weakref.WeakSet[ShardedGrads]):
    """The sharded gradients of one process group."""


def find(param: Tensor) -> tuple[ShardedGrads, int] | None:
    """Return the sharded gradients to which a parameter's gradient belongs, and its index there."""
    record = find_param_record(param)
    if record is None or record.sharder is None:
        return None
    reference, index = record.sharder
    grads = reference()
    return None if grads is None else (grads, index)


def find_by_grad(grads: Sequence[Tensor]) -> list[tuple[ShardedGrads, int] | None]:
    """Return the place of each gradient of which the last backward left shards, else None.

    The result is the same on all ranks.
    """
    places: dict[int, tuple[ShardedGrads, int]] = {}
    for _, models in group_values(_Models):
        for model in models:
            places |= {id(grad): (model, index) for index, grad in model.last_grads()}
    return [places.get(id(grad)) for grad in grads]


def list_models(group: dist.ProcessGroup) -> list[ShardedGrads]:
    """Return the sharded gradients of all models of a process group."""
    return [model for _, models in group_values(_Models, group) for model in models]


def sort_models(models: Iterable[ShardedGrads]) -> list[ShardedGrads]:
    """Return models without repetition, in an order that is the same on all ranks."""
    return sorted(
        dict.fromkeys(models), key=lambda shards: (shards.group.group_name, shards.identity)
    )


def note_restored_grads(model: ShardedGrads) -> None:
    """Note that gradients are local again if the script has restored any that it had put aside."""
    for index, reference in (model.grads_after_local or {}).items():
        last, grad = None if reference is None else reference(), get_grad(model.params[index])
        model.is_local |= grad is not None and grad is not last
    model.grads_after_local = None


def materialize_moved(places: Iterable[tuple[Tensor, ShardedGrads, int]]) -> bool:
    """Materialize lazy gradients that the script has moved; return whether there are any.

    The script has given such a gradient to another parameter, or only keeps it. Code that works on
    shards takes a lazy ``p.grad`` for the parameter's own gradient, and overwrites the shards of a
    gradient that the script has replaced. All ranks call this before they meet.

    Args:
        places: Parameters, with the models and indices of their gradients.
    """
    moved: dict[int, Tensor] = {}
    with torch._C.DisableTorchFunctionSubclass():
        # This loop runs in each step, so it makes no Python call per parameter.
        for param, shards, index in places:
            reference, grad = shards.grads_of_backward.get(index), param.grad
            last = None if reference is None else reference()
            if grad is not last:
                moved |= {
                    id(tensor): tensor for tensor in (grad, last) if type(tensor) is LazyTensor
                }
    if moved:
        lazy_tensor.materialize(moved.values())
    return bool(moved)


def _watch_local_grads(reference: weakref.ref[ShardedGrads]) -> None:
    model = reference()
    if model is None or model.is_replaced:
        return
    for index in range(len(model.params)):
        param = model.params.find(index)
        if param is None:
            continue
        # The class of a pending parameter would wait for its gather.
        with torch._C.DisableTorchFunctionSubclass():
            # Otherwise another wrapper reduces the gradients of this parameter.
            if find(param) == (model, index):
                hook = _LocalGradHook(reference)
                handle = add_hook(param, "_post_accumulate_grad_hooks", hook)
                param_record(param).local_grad_hook = handle
            # The reducer's hooks were freed with it. They would have materialized this gradient
            # before the engine adds to it.
            if model.is_lazy(index):
                before = _BeforeLocalGradHook(reference, index)
                before.handle = add_hook(param, "_backward_hooks", before)


class _LocalGradHook:
    """A hook that notes that gradients are local.

    Copies of the parameter, which have no shards, may have the hook as well.
    """

    def __init__(self, reference: weakref.ref[ShardedGrads]) -> None:
        self._reference = reference

    def __call__(self, param: Tensor) -> None:
        model = self._reference()
        place = find(param)
        if model is not None and place is not None and place[0] is model:
            model.is_local = True


class _BeforeLocalGradHook:
    """A hook that materializes gradients, once, before a local gradient is added to one."""

    def __init__(self, reference: weakref.ref[ShardedGrads], index: int) -> None:
        self._reference = reference
        self._index = index
        self.handle: RemovableHandle | None = None

    def __call__(self, _grad: Tensor) -> None:
        if self.handle is not None:
            self.handle.remove()
        model = self._reference()
        if model is not None and not model.is_replaced:
            model.before_accumulate(self._index)
