"""Gradient buckets that leave each rank only its shards of most gradients."""

from __future__ import annotations

import enum
import operator
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from ovpatch.overlap.comm.collectives import Collectives, Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import record_streams, side_streams
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.data_parallel.grad_bucket import SMALL, GradBucket, get_grad, make_sparse_error
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazySource, LazyTensor, LostSource
from ovpatch.overlap.tensors.shard import compute_contiguous_strides, view_flat
from ovpatch.overlap.tensors.tensor_memory import count_grad_owners, count_references_of_one, is_shared, use_count
from ovpatch_plugins.dist_optimizer.report import COUNTERS

_GRAD: Final = operator.attrgetter("grad")

_LOST: Final = (
    "ovpatch: the gradient of parameter '{}' was reduced and freed by a backward that then failed, or during which it "
    "was taken from the parameter. Drop such gradients, as optimizer.zero_grad() does, or set "
    "OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0."
)


class GradState(enum.Enum):
    """What the last reduced backward has left of a gradient, or the running one has made of it."""

    FULL = enum.auto()
    """It was all-reduced, or not at all; there is no shard of it."""
    FREED = enum.auto()
    """The running backward has reduced it and freed ``p.grad``; its shard cannot be read before that backward ends."""
    HELD = enum.auto()
    """It is reduced, and the script holds the memory of ``p.grad``, which is to be filled with the average."""
    SHARDED = enum.auto()
    """Each rank has its shard. ``p.grad`` is lazy until it is read."""


@dataclass(eq=False)
class GradShards:
    """This rank's shards of one model's gradients, which its buckets write. Lists and keys go by parameter.

    Attributes:
        names: The parameters' fully qualified names.
        states: The state of each gradient.
        shards: The reduced shards, padded to the same size on all ranks.
        grads: The tensors that were ``p.grad`` when the last backward ended, as long as they exist.
        send_half: Whether the running backward sends gradients of half precision as they are, to be added in fp32.
    """

    names: Sequence[str]
    states: list[GradState]
    shards: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    send_half: bool = False


class GradSource(LazySource, Protocol):
    """Materializes the lazy gradients of one model."""

    has_lazy_grads: bool


class ShardedGradBucket(GradBucket):
    """Gradients of some parameters, most of which are reduce-scattered; the others are all-reduced.

    Small sharded gradients are copied into one tensor ``[ranks, elements]``, whose row r has the shards of rank r, and
    are reduce-scattered by one collective, as FSDP2 does it. Large ones are reduce-scattered where they lie. A gradient
    that cannot be divided evenly is padded.

    Args:
        indices: Index of each parameter in the order of the whole model.
        params: The parameters, in the same order.
        source: Materializes the lazy gradients that the bucket leaves.
        grads: Where the shards go.
        sharded: The parameters, by index in the whole model, that are sharded.
        world: Number of ranks.
        dtype: What the sum is computed in; the parameters' own dtype by default.
    """

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        source: GradSource,
        grads: GradShards,
        sharded: Collection[int],
        world: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(indices, params, dtype=dtype, alone=sharded)
        self._source, self._grads, self._world = source, grads, world
        numels = [param.numel() for param in params]
        self._numels, self._sizes = numels, [-(-numel // world) for numel in numels]
        self._is_even = [numel == size * world for numel, size in zip(numels, self._sizes, strict=True)]
        self._sharded = [i for i in self._large if indices[i] in sharded]
        self._coalesced = [i for i in self._sharded if numels[i] < SMALL and not self.dtype.is_complex]
        coalesced = set(self._coalesced)
        self._sharded_params = [params[i] for i in self._sharded]
        self._sharded_indices = [indices[i] for i in self._sharded]
        self._alone = {i: place for place, i in enumerate(self._sharded) if i not in coalesced}  # in the lists before
        self._large = [i for i in self._large if i not in coalesced]
        # Whose chunks along the first dimension are the ranks' shards, as a contiguous gradient lies in memory.
        self._is_chunked = [
            self._strides[i] == compute_contiguous_strides(params[i].shape)
            and params[i].dim() > 0
            and len(params[i]) % world == 0
            for i in self._coalesced
        ]
        self._row = sum(self._sizes[i] for i in self._coalesced)
        self._freeable_nbytes = sum(numels[i] for i in self._sharded) * self.dtype.itemsize
        self._zeros = lazy_tensor.expand_zeros(self._sharded_params)
        self._is_started = self._is_published = False
        self._rows: dict[int, Tensor] = {}  # copies of coalesced gradients that were staged
        self._freed: dict[int, weakref.ref[Tensor]] = {}
        self._input: Tensor | None = None  # of the coalesced gradients
        self._outputs: list[Tensor] = []  # the shards of those that go alone, then that of the coalesced ones
        self._copies: list[Tensor] = []

    @property
    def freeable_nbytes(self) -> int:
        """See :class:`GradBucket`."""
        return self._freeable_nbytes

    # ---------------------------------------------------------------- the collective

    def stage_grad(self, index: int, divisor: int) -> None:
        """See :class:`GradBucket`."""
        i = self._position[index]
        if i in self._large or i in self._small:
            super().stage_grad(index, divisor)
        elif i not in self._rows:
            with outside_modes():
                self._rows[i] = self._make_rows(i, self.params[i].grad).clone()

    def pack(self, divisor: int, *, absent: Collection[int] = (), node_grad: Tensor | None = None) -> list[Tensor]:
        """See :class:`GradBucket`."""
        self._is_started = True
        packed = super().pack(divisor, absent=absent, node_grad=node_grad) if self._large or self._small else []
        if self._coalesced:
            packed.append(self._pack_coalesced(divisor))
        return packed

    def _pack_coalesced(self, divisor: int) -> Tensor:
        dtype, params, strides, world = self._sent_dtype, self.params, self._strides, self._world
        if self._input is None or self._input.dtype is not dtype:
            with outside_modes():
                self._input = torch.empty(world * self._row, dtype=dtype, device=self.device)
        summed = dtype is torch.float32 and params[0].dtype is not dtype
        rows, plain, strided = [], not (summed or self._rows), torch.strided
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            grads = map(_GRAD, [params[i] for i in self._coalesced])
            for i, is_chunked, grad in zip(self._coalesced, self._is_chunked, grads, strict=True):
                if (
                    plain
                    and is_chunked
                    and type(grad) is Tensor
                    and grad.layout is strided
                    and grad.dtype is dtype
                    and grad.stride() == strides[i]
                ):
                    rows.append(grad)
                else:
                    row = self._rows[i] if i in self._rows else self._make_rows(i, grad)
                    rows.append(row.to(dtype))
            torch._chunk_cat(rows, 0, world, out=self._input.view(world, -1))
            if divisor != 1 and dtype is self.dtype:
                self._input.mul_(1.0 / divisor)
        return self._input

    def _make_rows(self, i: int, grad: Tensor | None) -> Tensor:
        """Return a gradient's elements in the parameter's memory order, ``[ranks, size]``, padded."""
        if grad is None:
            with outside_modes():
                return torch.zeros(self._world, self._sizes[i], dtype=self.params[i].dtype, device=self.device)
        lazy_tensor.materialize([grad])  # of a parameter that this backward leaves out
        if grad.layout is not torch.strided:
            raise make_sparse_error(grad)
        total = fp32_accumulation.take_sum(grad)
        source = total if self._sent_dtype is torch.float32 else grad
        if type(source) is not Tensor or source.stride() != self._strides[i]:
            shape, strides = self.params[i].shape, self._strides[i]
            source = torch.empty_strided(shape, strides, dtype=source.dtype, device=self.device).copy_(source)
        return self._pad(i, view_flat(source)).view(self._world, -1)

    def _pad(self, i: int, elements: Tensor) -> Tensor:
        """Return elements, one-dimensional, that can be divided evenly, one shard per rank."""
        missing = self._sizes[i] * self._world - len(elements)
        return torch.nn.functional.pad(elements, (0, missing)) if missing else elements

    def make_zeros(self) -> list[Tensor]:
        """See :class:`GradBucket`."""
        zeros = super().make_zeros()
        if self._coalesced:
            with outside_modes():
                zeros.append(torch.zeros(self._world * self._row, dtype=self._sent_dtype, device=self.device))
        return zeros

    def start_reduce(self, collectives: Collectives, inputs: list[Tensor]) -> Sequence[Work]:
        """Start the reductions of what :meth:`pack` or :meth:`make_zeros` has returned."""
        if not self._outputs:
            with outside_modes():
                sizes = [*(self._sizes[i] for i in self._alone), *([self._row] if self._coalesced else [])]
                self._outputs = [torch.zeros(size, dtype=self.dtype, device=self.device) for size in sizes]
        works: list[Work] = []
        coalesced = [inputs.pop()] if self._coalesced else []
        alone = []
        if inputs:
            first = len(inputs) - len(self._large)  # before it: the flat tensor, if there is one
            full = inputs[:first]
            for i, grad in zip(self._large, inputs[first:], strict=True):
                if i in self._alone:
                    alone.append(self._pad(i, view_flat(grad)))
                else:
                    full.append(grad)
            self._copies = [padded for i, padded in zip(self._alone, alone, strict=True) if not self._is_even[i]]
            works += collectives.all_reduce(full) if full else []
        in_half = self._sent_dtype is not self.dtype
        reduce_scatter = collectives.reduce_scatter_fp32 if in_half else collectives.reduce_scatter
        works += reduce_scatter(self._outputs, alone + coalesced)
        COUNTERS.grads_in_half += in_half * len(self._sharded)
        return works

    def publish_shards(self) -> None:
        """Make the bucket's shards those of the model; until now, peers may have read those of other buckets."""
        if self._is_published or not self._outputs:
            return
        self._is_published, shards = True, list(self._outputs)
        if self._coalesced:
            shards += shards.pop().split([self._sizes[i] for i in self._coalesced])
        indices = [self.indices[i] for i in (*self._alone, *self._coalesced)]
        self._grads.shards.update(zip(indices, shards, strict=True))

    @property
    def _sent_dtype(self) -> torch.dtype:
        """In which dtype sharded gradients are sent."""
        return self.params[0].dtype if self._grads.send_half else self.dtype

    def _dtype(self, i: int) -> torch.dtype:
        return self._sent_dtype if i in self._alone else self.dtype

    def _divided(self, inputs: Mapping[int, Tensor]) -> list[Tensor]:
        if not self._grads.send_half:
            return list(inputs.values())
        return [grad for i, grad in inputs.items() if self._dtype(i) is self.dtype]

    # ---------------------------------------------------------------- after it

    def free_reduced(self, *, but: Collection[int]) -> None:
        """Free full gradients in backward; see :class:`GradBucket`."""
        self._source.has_lazy_grads = True
        self._free(skip=but, state=GradState.FREED)

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Leave lazy gradients in ``p.grad``; all others as for other buckets."""
        if self._is_started:
            self._free(skip=skip, state=GradState.SHARDED)
        self._forget()
        return super().unpack(skip=skip) if self._large or self._small else []

    def _free(self, *, skip: Collection[int], state: GradState) -> None:
        """Make gradients lazy whose memory the script does not hold; those that it holds stay as they are."""
        self._keep_memory()
        states, source, is_early = self._grads.states, self._source, state is GradState.FREED
        with torch._C.DisableTorchFunctionSubclass():
            grads = list(map(_GRAD, self._sharded_params))
        freeable, left = _find_freeable(grads), {}
        for i, place in self._alone.items():
            reduced, grad = self._inputs.pop(i, None), grads[place]
            if reduced is not None and reduced is grad:
                freeable[place] = freeable[place] or not is_shared(grad)
        for i, index, grad, zero, may_free in zip(
            self._sharded, self._sharded_indices, grads, self._zeros, freeable, strict=True
        ):
            if skip and index in skip:
                continue
            if self._freed:
                self._lose_other(i, grad)
            if may_free:
                assert grad is not None
                lazy_tensor.make_lazy_from(grad, zero, source, index)
                if is_early:
                    self._freed[i] = weakref.ref(grad)
            elif grad is None:
                if is_early:
                    continue
                grad = self.params[i].grad = lazy_tensor.make_lazy(self.params[i], source, index)
            elif lazy_tensor.get_source(grad)[0] is not source:
                if not is_early:
                    states[index], left[index] = GradState.HELD, grad
                continue
            states[index], left[index] = state, grad
        if not is_early:
            self._grads.grads.update(zip(left, map(weakref.ref, left.values()), strict=True))

    def _lose_other(self, i: int, grad: Tensor | None) -> None:
        """Tell the readers of a gradient that was freed, and taken from its parameter, that it is lost."""
        reference = self._freed.pop(i, None)
        freed = None if reference is None else reference()
        if freed is not None and freed is not grad and isinstance(freed, LazyTensor):
            freed.source = LostSource(_LOST.format(self._grads.names[self.indices[i]]))

    def detach_grads(self) -> None:
        """Take gradients away that are being reduced in place, or were freed."""
        for i in list(self._freed):
            self._lose_other(i, None)
            self._grads.states[self.indices[i]] = GradState.FULL
            if isinstance(get_grad(self.params[i]), LazyTensor):
                self.params[i].grad = None
        for i in self._coalesced if self._is_started else ():
            if i not in self._rows:  # else the script's hooks may have changed it since
                self.params[i].grad = None
        super().detach_grads()

    def drop_inputs(self) -> None:
        """Drop what was packed."""
        self._keep_memory()
        self._forget()
        super().drop_inputs()

    def _keep_memory(self) -> None:
        """Have the memory of inputs outlive the collectives, which have been waited for; see :func:`record_streams`."""
        if self.device.type == "cuda" and side_streams.is_used(self.device):
            grads = (get_grad(self.params[i]) for i in self._sharded)
            alone = (self._inputs.get(i) for i in self._alone)
            record_streams((self._input, *self._copies, *alone, *grads), self.device)

    def _forget(self) -> None:
        self._is_started = False
        self._copies.clear()
        self._rows.clear()
        self._freed.clear()
        if self.device.type == "cuda":  # whose memory is soon of use to others; elsewhere fresh memory is slow
            self._input = None


def _find_freeable(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return of each gradient of a parameter whether its memory may be freed: in this process and in others."""
    owners, references, strided, plain = count_grad_owners(), count_references_of_one(), torch.strided, Tensor
    count_references, count_owners, count = torch._C._storage_Use_Count, use_count, sys.getrefcount
    found = []
    for grad in grads:  # one loop, since there may be thousands
        freeable = (
            type(grad) is plain and grad.layout is strided and not grad.requires_grad and count_owners(grad) == owners
        )
        if freeable:
            storage = grad.untyped_storage()  # type: ignore[union-attr]  # it is a tensor
            freeable = count_references(storage._cdata) + count(storage) == references
            freeable = freeable and not (grad.is_cpu and storage.is_shared())  # type: ignore[union-attr]
            freeable = freeable and not (grad.is_conj() or grad.is_neg())  # type: ignore[union-attr]
        found.append(freeable)
    return found


def shard_norms(shards: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each shard, ``[shards]``, in float32 at least: a power of half precision overflows.

    Args:
        shards: This rank's shards of gradients, on one device.
        order: Of the norm.
    """
    wide = torch.float64 if any(shard.dtype is torch.float64 for shard in shards) else torch.float32
    return torch.stack(torch._foreach_norm([shard.to(wide) for shard in shards], order))
