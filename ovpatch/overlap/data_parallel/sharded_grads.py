"""The gradients of one model of which each rank keeps a part.

[Note: on request] Who updates parameters by parts asks for their gradients by parts (:meth:`ShardedGrads.want`), and
who reads a whole gradient, by looking at ``p.grad`` as any script may, is noticed. Both are told to the other ranks by
votes: a gradient is reduced and scattered from the step on in which all ranks want that and none has ever read the
whole. Until then, and again afterwards, it is all-reduced as stock does it. So a script that reads gradients pays for
that with a few slow reads, and is then as fast as it was.

A whole gradient is put together from the peers' parts (:mod:`ovpatch.overlap.data_parallel.shard_peers`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ovpatch.overlap.comm.step_flags import Votes
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.data_parallel.given_up import FreedGrads
from ovpatch.overlap.data_parallel.grad_sharder import Arriving, Minimum, Reducer
from ovpatch.overlap.data_parallel.shard_peers import ShardPeers
from ovpatch.overlap.peer_rpc import host_barrier, shutdown
from ovpatch.overlap.peer_rpc.host_barrier import HostBarrier
from ovpatch.overlap.peer_rpc.versioned import VersionedTensors
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor
from ovpatch.overlap.tensors.metadata_ops import grad_of
from ovpatch.overlap.tensors.ownership import is_freeable_grad, is_shared
from ovpatch.overlap.tensors.param_state import WeakParams, drop_entry
from ovpatch.overlap.tensors.shard import Shard, can_be_sharded, shard_range, shard_view, unshard

_LAID_OUT_ANEW = (
    "ovpatch: parameter '{}' was laid out anew in memory (memory_format?) after its model was wrapped, and parts of "
    "its gradient and of its optimizer's state are in the old order. Do that before DistributedDataParallel, or turn "
    "dist_optimizer off."
)


class ShardedGrads:
    """This rank's parts of one model's gradients.

    Args:
        params: The parameters, the same on all ranks, in registration order.
        names: Their fully qualified names.
        group: The process group over which they are reduced.
        minimum: With how many elements a parameter is worth to be cut; None keeps all whole, and costs nothing.
        whole: Parameters that are not cut in any case, by index, since their gradients are sparse.

    Attributes:
        chosen: Parameters whose gradients are reduced and scattered now.
        editions: The editions of the parts; who changes them says so there.
        retired: Whether the model has other shards by now.
        left: Whether the model's gradients are reduced elsewhere by now, for good: ranks may step unevenly.
        local: Whether gradients were added that were not reduced, as under ``no_sync()``.
        identity: Name of the model, the same on all ranks and no other's in the process group.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: dist.ProcessGroup,
        minimum: Minimum,
        *,
        whole: Collection[int] = (),
    ) -> None:
        self.params, self.names, self.group = WeakParams(params), list(names), group
        self.chosen = self._elected = frozenset[int]()
        self.local = self.retired = self.left = False
        device = params[0].device
        self.editions = VersionedTensors(device)
        self._votes = Votes(group, device, "dist_optimizer")
        self._wanted: set[int] = set()
        self._read: set[int] = set()
        self._parts: dict[int, Tensor] = {}
        self._given: dict[int, weakref.ref[Tensor]] = {}
        self._delivered: dict[int, int] = {}  # the backward that last left parts of a gradient
        self._early = FreedGrads(names)
        self._backwards = 0
        self._listens: weakref.finalize[..., Reducer] | None = None
        self.identity = ""
        self._overdue: list[int] = []
        self._rank, self._world = group.rank(), group.size()
        self._active = minimum is not None and all(param.device == device for param in params)
        self._gate = (
            HostBarrier.of(group, device) if self._active and self._world > 1 and host_barrier.needed(device) else None
        )
        # Once and for all: during a step the parameters themselves are slices, and peers' questions come at any time.
        self._numels = [param.numel() for param in params]
        self._strides = [param.stride() for param in params]
        self._peers = ShardPeers(group, self.editions, self._parts, self._numels)
        self._cuttable = [
            minimum is not None
            and self._active
            and i not in whole
            and can_be_sharded(param, self._world, minimum(param))
            for i, param in enumerate(params)
        ]
        if self._active:
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
        """Tell whether the last backward left parts of a gradient, whatever ``p.grad`` is now; alike on all ranks."""
        return not (self.local or self.left) and self._delivered.get(index) == self._backwards

    def is_newest(self, backward: int) -> bool:
        """Tell whether a backward is the last that was reduced."""
        return backward == self._backwards

    # ---------------------------------------------------------------- what the reducer calls

    def choose(self, step: int, reducer: Reducer) -> bool:
        """Let votes take effect before step ``step``.

        Args:
            step: Number of backwards that were reduced.
            reducer: Who reduces.

        Returns:
            Whether :attr:`chosen` has changed.
        """
        self.identity = reducer.identity
        votes = self._votes.result(step)
        if votes is not None:
            count = len(self.params)
            self._elected = frozenset(i for i in range(count) if votes[i] == self._world and votes[count + i] == 0)
            if self._elected and not self._peers.serving:
                self._peers.serve(self.identity, self._like())
                weakref.finalize(reducer, shutdown.keep, self.group, self._peers).atexit = False  # a slower peer asks
        # cuda_graphs.py, [Note: captured backwards]
        chosen = frozenset() if is_capturing(self.editions.device) else self._elected
        changed, self.chosen = chosen != self.chosen, chosen
        return changed

    def cast(self, step: int) -> None:
        """Tell the other ranks what this one wants and has read; comes after the step's other collectives."""
        count = range(len(self.params))
        if self._active:
            self._votes.cast(step, [i in self._wanted for i in count] + [i in self._read for i in count])

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
            self._gate.come()

    def meet(self, flag: bool | None = None) -> bool:
        """Have the host wait, before collectives, in order, as ``HostBarrier.meet``; true if flags mean nothing."""
        return self._gate is None or self._gate.meet(flag) or len(self._gate.devices) > 1

    def receive(self, reduction: Arriving) -> None:
        """Wait for all reductions of a backward: a new edition, which begins when peers have read the last."""
        if not self._active:
            return reduction.wait()
        self._backwards += 1
        # Where only the device waits it may do so first: without this rank no part can have been written.
        (reduction.wait if self.editions.asynchronous else reduction.wait_for_peers)()
        self.editions.begin()
        reduction.wait()
        self.editions.end()
        shutdown.met(self.group)
        self.local = False

    def give_up(self, index: int, *, ours: bool) -> None:
        """Empty ``p.grad``, whose part is reduced, unless somebody holds its memory; :meth:`deliver` follows.

        Args:
            index: The parameter.
            ours: Whether nobody else knows the memory of ``p.grad``.
        """
        grad = grad_of(self.params[index])
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

    def complete(self) -> None:
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

    def leave(self) -> None:
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

    def prepare(self, index: int, *, adds: bool) -> None:
        """Put gradients in place before something is added to one, unless that was given up, which is an error."""
        if self.is_ours(grad_of(self.params[index])):
            self._early.refuse([index])
            self.settle()  # all of them: the others will be added to as well

    def outlive(self, reducer: Reducer) -> None:
        """Hear of gradients that are added once ``reducer`` is gone, as with its wrapper: nobody reduces them.

        Hooks on the parameters say so from then on, until they have other shards.
        """
        if any(self._cuttable):
            self._listens = weakref.finalize(reducer, _listen, weakref.ref(self))
            self._listens.atexit = False

    # ---------------------------------------------------------------- reading

    def fetch(self, wanted: Sequence[LazyTensor], *, noticed: bool) -> list[Tensor]:
        """Return whole gradients; by asking all peers."""
        indices = [one.key for one in wanted]
        self._early.refuse(indices)
        if noticed:
            self._read.update(indices)
            reads.total += len(indices)
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


class Reads:
    """How many gradients were put together in this process because somebody read them."""

    total: int = 0


reads = Reads()


@contextmanager
def changing(those: Sequence[tuple[ShardedGrads, int]]) -> Iterator[None]:
    """Say that gradients by parts are changed in place while the block runs, on all ranks alike.

    Some ranks may have put a gradient together. The block changes the whole there, and the part follows: peers ask for
    it.
    """
    ones = list(dict.fromkeys(shards for shards, _ in those))
    for shards in ones:
        shards.editions.begin()
    try:
        yield
    finally:
        with torch.no_grad():
            for shards, index in those:
                if shards.has_grad(index) and not shards.is_pending(index):
                    shards.part_of(index).copy_(shards.current_part(index))
        for shards in ones:
            shards.editions.end()
