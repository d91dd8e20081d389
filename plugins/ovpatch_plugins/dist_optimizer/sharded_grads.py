"""The gradients of one model of which each rank keeps a part.

[Note: on request] Who updates parameters by parts asks for their gradients by parts (:meth:`ShardedGrads.want`), and
who reads a whole gradient, by looking at ``p.grad`` as any script may, is noticed. Both are told to the other ranks by
votes: a gradient is reduced and scattered from the step on in which all ranks want that and none has ever read the
whole. Until then, and again afterwards, it is all-reduced as stock does it. So a script that reads gradients pays for
that with a few slow reads, and is then as fast as it was.

A whole gradient is put together from the peers' parts (:mod:`ovpatch_plugins.dist_optimizer.shard_peers`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.data_parallel.bucket import GradBucket
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder
from ovpatch.overlap.data_parallel.grad_sync import GradSync
from ovpatch.overlap.peer_rpc import host_barrier, shutdown
from ovpatch.overlap.peer_rpc.host_barrier import HostBarrier
from ovpatch.overlap.peer_rpc.versioned import VersionedTensors
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.metadata_ops import grad_of
from ovpatch.overlap.tensors.ownership import is_freeable_grad, is_shared
from ovpatch.overlap.tensors.param_state import WeakParams, drop_entry
from ovpatch.overlap.tensors.shard import Shard, can_be_sharded, shard_range, shard_view, unshard
from ovpatch_plugins.dist_optimizer.half_wire import HalfWire
from ovpatch_plugins.dist_optimizer.report import COUNTERS
from ovpatch_plugins.dist_optimizer.shard_peers import ShardPeers
from ovpatch_plugins.dist_optimizer.sharded_bucket import ShardedGradBucket

_LAID_OUT_ANEW = (
    "ovpatch: parameter '{}' was laid out anew in memory (memory_format?) after its model was wrapped, and parts of "
    "its gradient and of its optimizer's state are in the old order. Do that before DistributedDataParallel, or turn "
    "dist_optimizer off."
)


_TOO_EARLY = (
    "ovpatch: the gradient of parameter '{}' was read, or added to, while a backward computes that has already reduced "
    "it and given its memory up. Read it after the backward; if several reentrant checkpoints use the parameter, set "
    "use_reentrant=False; or set OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0."
)

_LOST = (
    "ovpatch: the gradient of parameter '{}' was reduced and given up by a backward that then failed, or during which "
    "it was taken from the parameter. Drop such gradients, as optimizer.zero_grad() does, or set "
    "OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0."
)


class ShardedGrads(GradSharder):
    """This rank's parts of one model's gradients.

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
        editions: The editions of the parts; who changes them says so there.
        retired: Whether the model has other shards by now.
        left: Whether the model's gradients are reduced elsewhere by now, for good: ranks may step unevenly.
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
        self.sharded = self._elected = frozenset[int]()
        self.max_inflight_bytes = max_inflight_bytes
        self.retired = self.left = False
        device = params[0].device
        self.editions = VersionedTensors(device)
        self._wanted: set[int] = set()
        self._read: set[int] = set()
        self._parts: dict[int, Tensor] = {}
        self._given: dict[int, weakref.ref[Tensor]] = {}
        self._delivered: dict[int, int] = {}  # the backward that last left parts of a gradient
        self._early = FreedGrads(names)
        self._backwards = self._searched = 0
        self._reducer: weakref.ref[object] | None = None
        self._listens: weakref.finalize[..., Any] | None = None
        self._overdue: list[int] = []
        self._rank, self._world = group.rank(), group.size()
        self._gate = (
            HostBarrier.for_group(group, device) if self._world > 1 and host_barrier.is_needed(device) else None
        )
        self._wire = HalfWire(self, in_fp32=in_fp32, sums=sums_in_fp32)
        # Once and for all: during a step the parameters themselves are slices, and peers' questions come at any time.
        self._numels = [param.numel() for param in params]
        self._strides = [param.stride() for param in params]
        self._peers = ShardPeers(group, self.editions, self._parts, self._numels)
        self._cuttable = [
            i not in sparse and can_be_sharded(param, self._world, min_numel(param)) for i, param in enumerate(params)
        ]
        for index, param in enumerate(params):
            reference = weakref.ref(param, functools.partial(drop_entry, _owners, id(param)))
            _unlisten(param)
            _owners[id(param)] = (reference, weakref.ref(self), index)

    # ---------------------------------------------------------------- what optimizers call

    def can_be_sharded(self, index: int) -> bool:
        """Tell whether there are parts of a parameter; it is dense, and large enough."""
        return self._cuttable[index]

    def want(self, index: int, wanted: bool = True) -> bool:
        """Ask for the gradient of a parameter by parts, or no longer; return whether it can be cut at all."""
        if self._cuttable[index]:
            (self._wanted.add if wanted else self._wanted.discard)(index)
        return self._cuttable[index]

    def slice(self, index: int) -> Shard:
        """Return which of a parameter's elements this rank owns."""
        return shard_range(self._numels[index], self._world, self._rank)

    def slices(self, index: int) -> list[Shard]:
        """Return which of a parameter's elements each rank owns."""
        return [shard_range(self._numels[index], self._world, rank) for rank in range(self._world)]

    def own_part(self, index: int) -> Tensor | None:
        """Return this rank's part of ``p.grad``, ``[slice.numel]``, of the parameter's dtype; None without a gradient.

        It is the memory that :meth:`part` reduces into, or a view of ``p.grad``, where its dtype is the parameter's.

        Raises:
            RuntimeError: The parameter's elements lie in another order than when the model was wrapped.
        """
        param, own = self.params[index], self.slice(index)
        if param.stride() != self._strides[index]:
            raise RuntimeError(_LAID_OUT_ANEW.format(self.names[index]))
        grad = param.grad
        if grad is None:
            return None
        if self.is_ours(grad):
            return self.part_of(index).to(param.dtype)
        return shard_view(self.in_param_layout(index, grad), own)

    def in_param_layout(self, index: int, grad: Tensor) -> Tensor:
        """Return a whole gradient whose elements lie in memory as the parameter's do, of which slices are cut."""
        param = self.params[index]
        return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)

    def part_of(self, index: int) -> Tensor:
        """Return this rank's part of the reduced gradient, ``[slice.numel]``, of the dtype that was reduced."""
        return self._parts[index][: self.slice(index).numel]  # another object: who is given it may give it other memory

    def is_pending(self, index: int) -> bool:
        """Tell whether nobody has put a gradient together, so that what is in the parts is what counts."""
        return self.is_ours(grad_of(self.params[index]))

    def current_part(self, index: int) -> Tensor:
        """Return this rank's part of what ``p.grad`` is now."""
        if self.is_pending(index):
            return self.part_of(index)
        part = self.own_part(index)
        assert part is not None
        return part

    def is_ours(self, grad: Tensor | None) -> bool:
        """Tell whether this is a gradient of which there are only parts."""
        return lazy_tensor.source_of(grad)[0] is self

    @property
    def backwards(self) -> int:
        """How many backwards were reduced."""
        return self._backwards

    def has_grad(self, index: int) -> bool:
        """Tell whether a parameter has a gradient, be it a placeholder."""
        return grad_of(self.params[index]) is not None

    def was_delivered(self, index: int) -> bool:
        """Tell whether the last backward left parts of a gradient, whatever ``p.grad`` is now; alike on all ranks.

        Only after :meth:`tell_if_local`, where ranks may have added gradients of their own since.
        """
        return not (self.local or self.left) and self.last_delivered(index)

    def last_delivered(self, index: int) -> bool:
        """Tell whether the last backward that was reduced left parts of a gradient; alike on all ranks."""
        return self._delivered.get(index) == self._backwards

    def tell_if_local(self) -> None:
        """Make :attr:`local` the same on all ranks, at a place to which all come.

        Who has local gradients waits for nobody: it goes on by itself, and that may be all that it ever does. The
        others are told by the sum that they wait for. Not on devices whose hosts run ahead: there it would stall them.
        """
        there = self._listens is not None and self._listens.alive and not (self.left or self.retired)
        if not there or self._gate is not None or self._world == 1 or not self._backwards:
            return
        from ovpatch.overlap.comm.step_communicator import step_communicator

        device = self.editions.device
        flag = torch.full((1,), int(self.local), dtype=torch.int32, device=device)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=step_communicator(self.group, device), async_op=True)
        if not self.local:
            work.wait()
            self.local = bool(flag.item())

    def is_newest(self, backward: int) -> bool:
        """Tell whether a backward is the last that was reduced."""
        return backward == self._backwards

    # ---------------------------------------------------------------- what the reducer calls

    def bind(self, reducer: object, group: dist.ProcessGroup) -> None:
        """Belong to a reducer; see :class:`GradSharder`.

        Gradients that are added once the reducer is gone, as with its wrapper, are not reduced. Hooks on the parameters
        note them from then on, until the parameters have other shards.
        """
        self._wire.group = group
        if self._reducer is None:
            self._reducer = weakref.ref(reducer)
            if any(self._cuttable):
                self._listens = weakref.finalize(reducer, _listen, weakref.ref(self))
                self._listens.atexit = False

    def update_sharded(self, sums: Sequence[int]) -> bool:
        """Shard what all ranks want sharded and none has read; see :class:`GradSharder`."""
        if sums:
            count = len(self.params)
            self._elected = frozenset(i for i in range(count) if sums[i] == self._world and sums[count + i] == 0)
            if self._elected and not self._peers.serving:
                self._peers.serve(self.identity, self._like())
                assert self._reducer is not None
                # A slower peer may ask once the reducer is gone.
                weakref.finalize(self._reducer(), shutdown.keep_until_backward, self.group, self._peers).atexit = False
        # No host hears of a replay, which makes new gradients: a captured backward leaves whole ones.
        sharded = frozenset() if is_capturing(self.editions.device) else self._elected
        changed, self.sharded = sharded != self.sharded, sharded
        return changed

    def make_bucket(
        self, indices: Sequence[int], params: Sequence[torch.nn.Parameter], dtype: torch.dtype | None
    ) -> GradBucket | None:
        """Return a bucket that reduce-scatters, if one of the parameters is sharded; see :class:`GradSharder`."""
        if self.sharded.isdisjoint(indices):
            return None
        return ShardedGradBucket(indices, params, self, self._wire, dtype=dtype)

    def watched_params(self) -> list[int]:
        """Return the parameters with a shard; one that is no longer sharded may have one from the last backward."""
        return [i for i in range(len(self.params)) if i in self.sharded or self.is_pending(i)]

    def on_backward_start(self, *, staged: bool, counts: Sequence[int] | None) -> None:
        """Choose the dtype to send, and put together gradients that the script has kept; see :class:`GradSharder`."""
        self._wire.begin(copied=staged, counts=counts)
        shutdown.prepare_backward(self.group)
        self.rescue()

    def before_first_collective(self) -> None:
        """Have the hosts meet, and agree on the dtype to send."""
        self._wire.meet()

    def wait_for_hosts(self) -> None:
        """Have the hosts meet."""
        self.meet()

    def get_flags(self) -> list[int]:
        """Return which gradients this rank wants by parts, and which it has read whole; two flags per parameter."""
        count = range(len(self.params))
        return [int(i in self._wanted) for i in count] + [int(i in self._read) for i in count]

    def part(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return where this rank's part of a gradient goes, ``[slice.size]``."""
        found = self._parts.get(index)
        if found is None or found.dtype != dtype:
            with torch.inference_mode(False):
                found = torch.zeros(self.slice(index).size, dtype=dtype, device=self.params[index].device)
            self._parts[index] = found
        return found

    def padded_numel(self, index: int) -> int:
        """Return how many elements a gradient has that is cut into equal parts."""
        return self.slice(index).size * self._world

    def rescue(self) -> None:
        """Put gradients together that somebody holds though they are no parameter's any more.

        Called before a backward launches anything: until then no peer can have overwritten its parts.
        """
        if not self._given:
            return
        held = [(index, grad) for index, reference in self._given.items() if (grad := reference()) is not None]
        self._given.clear()
        lazy_tensor.materialize(
            [grad for index, grad in held if self.is_ours(grad) and grad is not self.params[index].grad]
        )

    def come(self) -> None:
        """Say that this rank comes to :meth:`meet` next, and asks no other anything until then."""
        if self._gate is not None:
            self._gate.arrive()

    def meet(self, flag: bool | None = None) -> bool:
        """Have the host wait, before collectives, in order, as ``HostBarrier.wait``; true if flags mean nothing."""
        return self._gate is None or self._gate.wait(flag) or len(self._gate.devices) > 1

    def wait_for_grads(self, sync: GradSync) -> None:
        """Wait for all reductions of a backward: a new edition, which begins when peers have read the last."""
        self._backwards += 1
        # Where only the device waits it may do so first: without this rank no part can have been written.
        (sync.wait if self.editions.asynchronous else sync.wait_for_peers)()
        self.editions.begin_update()
        sync.wait()
        self.editions.end_update()
        shutdown.drop_kept(self.group)
        self.local = False

    def give_up(self, index: int, *, ours: bool) -> None:
        """Empty ``p.grad``, whose part is reduced, unless somebody holds its memory; :meth:`deliver` follows.

        Args:
            index: The parameter.
            ours: Whether nobody else knows the memory of ``p.grad``.
        """
        grad = grad_of(self.params[index])
        self.has_lazy_grads = True
        if grad is not None and _may_go(grad, ours=ours):
            self._early.add(index, lazy_tensor.make_lazy_(grad, self, index))

    def lose(self) -> None:
        """Take the gradients that were given up away from their parameters: there will be no parts of them."""
        for index in self._early.fail():
            if isinstance(self.params[index].grad, LazyTensor):
                self.params[index].grad = None

    def deliver(self, index: int, *, ours: bool) -> None:
        """Make ``p.grad`` a placeholder: the part has been reduced.

        Args:
            index: The parameter.
            ours: Whether nobody else knows the memory of ``p.grad``.
        """
        self.has_lazy_grads = True
        param = self.params[index]
        grad = grad_of(param)
        self._early.arrived(index, grad)
        if grad is None:
            grad = param.grad = lazy_tensor.make_lazy(param, self, index)
        elif self.is_ours(grad):
            pass  # it was given up
        elif _may_go(grad, ours=ours):
            lazy_tensor.make_lazy_(grad, self, index)
        else:
            self._overdue.append(index)  # somebody holds its memory, and must find the average there
        self._delivered[index] = self._backwards
        self._given[index] = weakref.ref(grad, functools.partial(drop_entry, _deliveries, id(grad)))
        _deliveries[id(grad)] = (self._given[index], weakref.ref(self), index, self._backwards)

    def fill_shared_grads(self) -> None:
        """Fill the gradients in whose memory somebody else looks; all parts have been reduced."""
        overdue, self._overdue = self._overdue, []
        if not overdue:
            return
        self._read.update(overdue)
        with torch.no_grad():
            for index, whole in zip(overdue, self._pull(overdue), strict=True):
                grad = self.params[index].grad
                if grad is not None:
                    grad.copy_(whole)

    def retire(self) -> None:
        """Leave the parameters to other shards."""
        self.retired = True

    def restore_grads(self) -> None:
        """Put all gradients in place, while there are peers to ask; there will be no parts any more."""
        self.left = True
        if self._listens is not None:
            self._listens.detach()  # another reducer comes
        if self._peers.leave():
            self.settle()

    def settle(self) -> None:
        """Put all gradients in place that are still in parts; not those that the running backward reduces."""
        lazy_tensor.materialize(
            p.grad for i, p in enumerate(self.params) if i not in self._early and self.is_pending(i)
        )

    def before_accumulate(self, index: int) -> None:
        """Put gradients in place before something is added to one, unless that was given up, which is an error."""
        if self._searched < self._backwards:  # once: in the usual case the script has dropped them all
            self._searched = self._backwards
            self.has_lazy_grads = any(map(self.is_pending, range(len(self.params))))
        if self.is_ours(grad_of(self.params[index])):
            self._early.refuse([index])
            self.settle()  # all of them: the others will be added to as well

    # ---------------------------------------------------------------- reading

    def fetch(self, wanted: Sequence[LazyTensor], *, noticed: bool) -> list[Tensor]:
        """Return whole gradients; by asking all peers."""
        indices = [one.key for one in wanted]
        self._early.refuse(indices)
        if noticed:
            self._read.update(indices)
            COUNTERS.grads_read += len(indices)
        return self._pull(indices)

    def _pull(self, indices: Sequence[int]) -> list[Tensor]:
        answers = self._peers.pull(indices)
        wholes = []
        for position, index in enumerate(indices):
            parts = {rank: tensors[position] for rank, tensors in answers.items()}
            parts[self._rank] = self._parts[index]
            with torch.inference_mode(False):
                wholes.append(unshard(self.params[index], parts, self.slices(index)))
        return wholes

    def norms_of_peers(self, indices: Sequence[int], norm_type: float) -> dict[int, list[float]]:
        """Return the norm of each of the other ranks' parts, by rank; no peer takes part."""
        return self._peers.norms(indices, norm_type)

    def _like(self) -> list[Tensor]:
        """Return one tensor for each dtype that parts may have."""
        dtypes = dict.fromkeys([*(param.dtype for param in self.params), torch.float32])
        return [self.params[0].new_empty(0, dtype=dtype) for dtype in dtypes if dtype.is_floating_point]


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


class FreedGrads:
    """The gradients of one model whose memory is freed before the backward that reduced them has ended.

    Until then no shard can be read. A read raises an error, and does not return what is there by chance.

    Args:
        names: The parameters' names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._grads: dict[int, weakref.ref[LazyTensor]] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._grads

    def add(self, index: int, grad: LazyTensor) -> None:
        """Note that the gradient of a parameter has been given up."""
        self._grads[index] = weakref.ref(grad)

    def refuse(self, indices: Iterable[int]) -> None:
        """Raise an error if one of those was given up.

        Raises:
            RuntimeError: It says which, and what to do.
        """
        for index in indices:
            if index in self._grads:
                raise RuntimeError(_TOO_EARLY.format(self._names[index]))

    def arrived(self, index: int, grad: Tensor | None) -> None:
        """Note that there are parts of a gradient now; what was given up is lost if ``p.grad`` is another one."""
        reference = self._grads.pop(index, None)
        given_up = None if reference is None else reference()
        if given_up is not None and given_up is not grad:
            self._lose(index, given_up)

    def fail(self) -> list[int]:
        """Forget all, since the backward has failed: they are lost. Return the parameters."""
        indices = list(self._grads)
        for index in indices:
            self.arrived(index, None)
        return indices

    def _lose(self, index: int, grad: LazyTensor) -> None:
        if isinstance(grad, LazyTensor):  # still: who has zeroed it has a plain gradient
            grad.source = _Lost(self._names[index])


class _Lost:
    def __init__(self, name: str) -> None:
        self._name = name

    def fetch(self, placeholders: Sequence[LazyTensor], *, noticed: bool) -> list[Tensor]:
        """Say that there is nothing."""
        del placeholders, noticed
        raise RuntimeError(_LOST.format(self._name))


def _may_go(grad: Tensor, *, ours: bool) -> bool:
    """Tell whether the memory of a gradient may be given up; by ``ours`` only this process knows it."""
    return (ours or is_freeable_grad(grad)) and not is_shared(grad)


def _listen(reference: weakref.ref[ShardedGrads]) -> None:
    shards = reference()
    if shards is None or shards.retired:
        return
    for index in range(len(shards.params)):
        param = shards.params.find(index)
        if param is not None and param.requires_grad and find(param) == (shards, index):
            with torch._C.DisableTorchFunctionSubclass():  # which a parameter may be that waits for a reader
                _listening[id(param)] = param.register_post_accumulate_grad_hook(_Unreduced(reference))


def _unlisten(param: Tensor) -> None:
    handle = _listening.pop(id(param), None)
    if handle is not None:
        handle.remove()


class _Unreduced:
    """A hook that says that gradients are local; copies of the parameter, which are nobody's, may have it, too."""

    def __init__(self, reference: weakref.ref[ShardedGrads]) -> None:
        self._reference = reference

    def __call__(self, param: Tensor) -> None:
        shards = self._reference()
        entry = find(param)
        if shards is not None and entry is not None and entry[0] is shards:
            shards.local = True


_listening: dict[int, RemovableHandle] = {}

_owners: dict[int, tuple[weakref.ref[torch.nn.Parameter], weakref.ref[ShardedGrads], int]] = {}


def find(param: Tensor) -> tuple[ShardedGrads, int] | None:
    """Return the shards that a parameter's gradient belongs to, and its index there."""
    entry = _owners.get(id(param))
    if entry is None or entry[0]() is not param:
        return None
    shards = entry[1]()
    return None if shards is None else (shards, entry[2])


# Gradients that a backward left in parts, as long as somebody holds the tensor object, also if they are whole by now.
_deliveries: dict[int, tuple[weakref.ref[Tensor], weakref.ref[ShardedGrads], int, int]] = {}


def delivered(grad: Tensor) -> tuple[ShardedGrads, int] | None:
    """Return whose a gradient is that the last backward left in parts; the same on all ranks."""
    entry = _deliveries.get(id(grad))
    if entry is None or entry[0]() is not grad:
        return None
    shards = entry[1]()
    if shards is None or shards.left or not shards.is_newest(entry[3]):
        return None
    return shards, entry[2]


@contextmanager
def changing(those: Sequence[tuple[ShardedGrads, int]]) -> Iterator[None]:
    """Say that gradients by parts are changed in place while the block runs, on all ranks alike.

    Some ranks may have put a gradient together. The block changes the whole there, and the part follows: peers ask for
    it.
    """
    ones = list(dict.fromkeys(shards for shards, _ in those))
    for shards in ones:
        shards.editions.begin_update()
    try:
        yield
    finally:
        with torch.no_grad():
            for shards, index in those:
                if shards.has_grad(index) and not shards.is_pending(index):
                    shards.part_of(index).copy_(shards.current_part(index))
        for shards in ones:
            shards.editions.end_update()
