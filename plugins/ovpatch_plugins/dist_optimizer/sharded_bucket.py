"""Gradient buckets that leave each rank only its shards of most gradients."""

from __future__ import annotations

import enum
import operator
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from ovpatch.overlap.comm.collectives import Collectives, Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import record_streams, side_streams
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.data_parallel.grad_bucket import (
    SMALL_NUMEL,
    GradBucket,
    get_grad,
    make_sparse_error,
)
from ovpatch.overlap.tensors import lazy_tensor
from ovpatch.overlap.tensors.lazy_tensor import LazySource, LazyTensor, LostSource
from ovpatch.overlap.tensors.shard import compute_contiguous_strides, view_flat
from ovpatch.overlap.tensors.tensor_memory import (
    count_grad_owners,
    count_sole_references,
    is_in_shared_memory,
    use_count,
)
from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

_read_grad: Final = operator.attrgetter("grad")

_ERROR_LOST: Final = (
    "ovpatch: the gradient of parameter '{}' was reduced and freed by a backward that then failed, "
    "or during which it was taken from the parameter. Drop such gradients, as "
    "optimizer.zero_grad() does, or set OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0."
)


class GradState(enum.Enum):
    """The state of one gradient after the last reduced backward, or within the running one."""

    #: The gradient was all-reduced, or not reduced at all. It has no shard.
    FULL = enum.auto()
    #: The running backward has reduced the gradient and freed ``p.grad``. No rank can read the
    #: shards before that backward ends.
    IN_FLIGHT = enum.auto()
    #: The gradient is reduced, but the script holds the memory of ``p.grad``. The average must
    #: still be written into it.
    ALIASED = enum.auto()
    #: Each rank has its shard. ``p.grad`` is lazy until it is read.
    SHARDED = enum.auto()


@dataclass(eq=False)
class GradShards:
    """This rank's shards of one model's gradients, which the buckets of the model write.

    Lists and keys go by the index of the parameter in the model.

    Attributes:
        names: The fully qualified names of the parameters.
        states: The state of each gradient.
        shards: The reduced shards, padded to the same size on all ranks.
        grads: The tensors that were ``p.grad`` when the last backward ended, while they exist.
        is_sent_in_low_precision: Whether the running backward sends bf16 and fp16 gradients as they
            are, and the receiver adds them in fp32.
    """

    names: Sequence[str]
    states: list[GradState]
    shards: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    is_sent_in_low_precision: bool = False


class GradSource(LazySource):
    """The source of the lazy gradients of one model, as its buckets see it.

    Attributes:
        has_lazy_grads: Whether a ``p.grad`` may be lazy.
    """

    has_lazy_grads: bool


class ShardedGradBucket(GradBucket):
    """The gradients of some parameters, most of which are reduce-scattered.

    The remaining gradients are all-reduced, as in :class:`GradBucket`. Small sharded gradients are
    coalesced as in FSDP2: they are copied into one tensor ``[ranks, elements]``, whose row r has
    the shards of rank r, and one collective reduce-scatters it. Each large sharded gradient is
    separate: it is reduce-scattered from its own memory. A gradient that does not divide evenly is
    padded.
    """

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        source: GradSource,
        grad_shards: GradShards,
        sharded: Collection[int],
        world: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Lay out the collectives.

        Args:
            indices: The index of each parameter in the order of the model.
            params: The parameters, in the same order.
            source: Materializes the lazy gradients that the bucket leaves in ``p.grad``.
            grad_shards: Receives the shards.
            sharded: The parameters, by index in the model, whose gradients are sharded.
            world: Number of ranks.
            dtype: The dtype of the sum. Default: that of the parameters.
        """
        super().__init__(indices, params, dtype=dtype, never_flat=sharded)
        self._source = source
        self._grad_shards = grad_shards
        self._world = world

        # - Layout, by position in this bucket
        self._numels = [param.numel() for param in params]
        # Elements of each padded shard.
        self._shard_sizes = [-(-numel // world) for numel in self._numels]
        self._divides_evenly = [
            numel == size * world
            for numel, size in zip(self._numels, self._shard_sizes, strict=True)
        ]
        self._sharded_positions = [i for i in self._large_positions if indices[i] in sharded]
        self._coalesced_positions = [
            i
            for i in self._sharded_positions
            if self._numels[i] < SMALL_NUMEL and not self.dtype.is_complex
        ]
        coalesced = set(self._coalesced_positions)
        self._sharded_params = [params[i] for i in self._sharded_positions]
        self._sharded_indices = [indices[i] for i in self._sharded_positions]
        # The place of each separate gradient in the three lists of sharded ones, by position.
        self._separate_places = {
            i: place for place, i in enumerate(self._sharded_positions) if i not in coalesced
        }
        # The base class packs large gradients one by one, so it must not see the coalesced ones.
        self._large_positions = [i for i in self._large_positions if i not in coalesced]
        # Whether a gradient's chunks along its first dimension are the ranks' shards. This needs a
        # contiguous gradient and an evenly divided dimension. `_chunk_cat` can read it directly.
        self._is_chunkable = [
            self._strides[i] == compute_contiguous_strides(params[i].shape)
            and params[i].dim() > 0
            and len(params[i]) % world == 0
            for i in self._coalesced_positions
        ]
        # Elements of one rank's row of the coalesced tensor.
        self._row_numel = sum(self._shard_sizes[i] for i in self._coalesced_positions)
        sharded_numel = sum(self._numels[i] for i in self._sharded_positions)
        self.freeable_nbytes = sharded_numel * self.dtype.itemsize
        # A rank also holds its shards, and a copy of each gradient that is coalesced or padded.
        self._in_place_nbytes -= self.dtype.itemsize * sum(
            self._shard_sizes[i]
            * (1 if i in self._separate_places and self._divides_evenly[i] else 1 + world)
            for i in self._sharded_positions
        )
        self.saved_nbytes = self._in_place_nbytes
        # The tensor without memory that replaces each sharded gradient once it is freed.
        self._blanks = lazy_tensor.expand_blanks(self._sharded_params)

        # - Results, kept from one backward to the next
        # The shards of the separate gradients, then one tensor with those of the coalesced ones.
        self._outputs: list[Tensor] = []
        # Whether peers read these outputs as the shards of the model.
        self._is_published = False

        # - The running backward
        # Whether this backward has packed the bucket.
        self._is_started = False
        # Copies of the coalesced gradients that were staged, by position.
        self._staged_rows: dict[int, Tensor] = {}
        # The tensors that this backward made lazy before its end, by position.
        self._freed_grads: dict[int, weakref.ref[Tensor]] = {}
        # The tensor that the collective of the coalesced gradients reads.
        self._coalesced_input: Tensor | None = None
        # Padded copies of separate gradients. They must outlive the collective.
        self._padded_inputs: list[Tensor] = []

    # ---------------------------------------------------------------- the collective

    def stage_grad(self, index: int, divisor: int) -> None:
        """See :class:`GradBucket`."""
        i = self._position_by_index[index]
        if i in self._large_positions or i in self._small_positions:
            super().stage_grad(index, divisor)
        elif i not in self._staged_rows:
            # The division by `divisor` follows in `pack`, for all coalesced gradients at once.
            with outside_modes():
                self._staged_rows[i] = self._make_rows(i, self.params[i].grad).clone()

    def pack(
        self, divisor: int, *, absent: Collection[int] = (), node_grad: Tensor | None = None
    ) -> list[Tensor]:
        """See :class:`GradBucket`."""
        self._is_started = True
        packed: list[Tensor] = []
        if self._large_positions or self._small_positions:
            packed = super().pack(divisor, absent=absent, node_grad=node_grad)
        if self._coalesced_positions:
            packed.append(self._pack_coalesced(divisor))
        return packed

    def _pack_coalesced(self, divisor: int) -> Tensor:
        dtype, params, strides, world = self._sent_dtype, self.params, self._strides, self._world
        if self._coalesced_input is None or self._coalesced_input.dtype is not dtype:
            with outside_modes():
                self._coalesced_input = torch.empty(
                    world * self._row_numel, dtype=dtype, device=self.device
                )
        # A sum in fp32 of low-precision gradients may have fp32 sums of microbatches to read.
        is_widened = dtype is torch.float32 and params[0].dtype is not dtype
        can_read_directly = not (is_widened or self._staged_rows)
        rows = []
        strided = torch.strided
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            grads = map(_read_grad, [params[i] for i in self._coalesced_positions])
            for i, is_chunkable, grad in zip(
                self._coalesced_positions, self._is_chunkable, grads, strict=True
            ):
                if (
                    can_read_directly
                    and is_chunkable
                    and type(grad) is Tensor
                    and grad.layout is strided
                    and grad.dtype is dtype
                    and grad.stride() == strides[i]
                ):
                    rows.append(grad)
                else:
                    staged = self._staged_rows
                    row = staged[i] if i in staged else self._make_rows(i, grad)
                    rows.append(row.to(dtype))
            torch._chunk_cat(rows, 0, world, out=self._coalesced_input.view(world, -1))
            # The transport averages gradients that are sent in low precision after their fp32 sum.
            if divisor != 1 and dtype is self.dtype:
                self._coalesced_input.mul_(1.0 / divisor)
        return self._coalesced_input

    def _make_rows(self, position: int, grad: Tensor | None) -> Tensor:
        """Return a gradient's padded elements in the parameter's order, ``[ranks, size]``."""
        param = self.params[position]
        if grad is None:
            with outside_modes():
                return torch.zeros(
                    self._world,
                    self._shard_sizes[position],
                    dtype=param.dtype,
                    device=self.device,
                )
        # The gradient is still lazy if this backward adds nothing to it.
        lazy_tensor.materialize([grad])
        if grad.layout is not torch.strided:
            raise make_sparse_error(grad)
        total = fp32_accumulation.take_sum(grad)
        source = total if self._sent_dtype is torch.float32 else grad
        strides = self._strides[position]
        if type(source) is not Tensor or source.stride() != strides:
            source = torch.empty_strided(
                param.shape, strides, dtype=source.dtype, device=self.device
            ).copy_(source)
        return self._pad(position, view_flat(source)).view(self._world, -1)

    def _pad(self, position: int, elements: Tensor) -> Tensor:
        """Return one-dimensional elements that divide evenly, one shard per rank."""
        missing = self._shard_sizes[position] * self._world - len(elements)
        return torch.nn.functional.pad(elements, (0, missing)) if missing else elements

    def make_zeros(self) -> list[Tensor]:
        """See :class:`GradBucket`."""
        zeros = super().make_zeros()
        if self._coalesced_positions:
            numel = self._world * self._row_numel
            with outside_modes():
                zeros.append(torch.zeros(numel, dtype=self._sent_dtype, device=self.device))
        return zeros

    def start_reduce(self, collectives: Collectives, inputs: list[Tensor]) -> Sequence[Work]:
        """Start the reductions of the tensors that :meth:`pack` or :meth:`make_zeros` returned."""
        if not self._outputs:
            sizes = [self._shard_sizes[i] for i in self._separate_places]
            if self._coalesced_positions:
                sizes.append(self._row_numel)
            with outside_modes():
                self._outputs = [
                    torch.zeros(size, dtype=self.dtype, device=self.device) for size in sizes
                ]
        works: list[Work] = []
        coalesced = [inputs.pop()] if self._coalesced_positions else []
        separate = []
        if inputs:
            # The flat tensor, if there is one, precedes the large gradients.
            num_flat = len(inputs) - len(self._large_positions)
            full = inputs[:num_flat]
            for i, grad in zip(self._large_positions, inputs[num_flat:], strict=True):
                if i in self._separate_places:
                    separate.append(self._pad(i, view_flat(grad)))
                else:
                    full.append(grad)
            self._padded_inputs = [
                padded
                for i, padded in zip(self._separate_places, separate, strict=True)
                if not self._divides_evenly[i]
            ]
            works += collectives.all_reduce(full) if full else []
        is_low_precision = self._sent_dtype is not self.dtype
        reduce_scatter = (
            collectives.reduce_scatter_fp32 if is_low_precision else collectives.reduce_scatter
        )
        works += reduce_scatter(self._outputs, separate + coalesced)
        COUNTERS.grads_in_half += is_low_precision * len(self._sharded_positions)
        return works

    def publish_shards(self) -> None:
        """Make the outputs of this bucket the shards of the model.

        Until this call, peers may still read the shards that the buckets of an earlier assignment
        have written.
        """
        if self._is_published or not self._outputs:
            return
        self._is_published = True
        shards = list(self._outputs)
        if self._coalesced_positions:
            shards += shards.pop().split([self._shard_sizes[i] for i in self._coalesced_positions])
        indices = [self.indices[i] for i in (*self._separate_places, *self._coalesced_positions)]
        self._grad_shards.shards.update(zip(indices, shards, strict=True))

    @property
    def _sent_dtype(self) -> torch.dtype:
        """The dtype in which sharded gradients are sent."""
        return self.params[0].dtype if self._grad_shards.is_sent_in_low_precision else self.dtype

    def _get_sent_dtype(self, position: int) -> torch.dtype:
        return self._sent_dtype if position in self._separate_places else self.dtype

    def _select_scaled(self, inputs: Mapping[int, Tensor]) -> list[Tensor]:
        if not self._grad_shards.is_sent_in_low_precision:
            return list(inputs.values())
        # The transport averages gradients that are sent in low precision after their fp32 sum.
        return [grad for i, grad in inputs.items() if self._get_sent_dtype(i) is self.dtype]

    # ---------------------------------------------------------------- after the collective

    def free_reduced(self, *, but: Collection[int]) -> None:
        """Free full gradients during the backward; see :class:`GradBucket`."""
        self._source.has_lazy_grads = True
        self._make_grads_lazy(skip=but, state=GradState.IN_FLIGHT)

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Leave lazy gradients in ``p.grad``, and unpack all-reduced gradients."""
        if self._is_started:
            self._make_grads_lazy(skip=skip, state=GradState.SHARDED)
        self._end_backward()
        if self._large_positions or self._small_positions:
            return super().unpack(skip=skip)
        return []

    def _make_grads_lazy(self, *, skip: Collection[int], state: GradState) -> None:
        """Make each reduced gradient lazy, unless the script holds its memory.

        Args:
            skip: The parameters, by index in the model, whose ``p.grad`` stays unchanged.
            state: The new state of the gradients: IN_FLIGHT during the backward, SHARDED after it.
        """
        self._record_streams()
        states = self._grad_shards.states
        source = self._source
        is_early = state is GradState.IN_FLIGHT
        with torch._C.DisableTorchFunctionSubclass():
            grads = list(map(_read_grad, self._sharded_params))
        can_free = _find_freeable(grads)
        remaining: dict[int, Tensor] = {}
        for i, place in self._separate_places.items():
            reduced = self._inputs.pop(i, None)
            grad = grads[place]
            if reduced is not None and reduced is grad:
                # Only `p.grad` used this memory when the gradient was packed. The collective may
                # still hold views of it, which the count above takes for users.
                can_free[place] = can_free[place] or not is_in_shared_memory(grad)
        for i, index, grad, blank, may_free in zip(
            self._sharded_positions,
            self._sharded_indices,
            grads,
            self._blanks,
            can_free,
            strict=True,
        ):
            if skip and index in skip:
                continue
            if self._freed_grads:
                self._invalidate_replaced(i, grad)
            if may_free:
                assert grad is not None
                lazy_tensor.make_lazy_from(grad, blank, source, index)
                if is_early:
                    self._freed_grads[i] = weakref.ref(grad)
            elif grad is None:
                # This rank has no gradient, or a hook of the script has dropped it. The parameter
                # gets a lazy gradient only once the backward has ended.
                if is_early:
                    continue
                grad = lazy_tensor.make_lazy(self.params[i], source, index)
                self.params[i].grad = grad
            elif lazy_tensor.get_source(grad)[0] is not source:
                # The script holds this memory. It is filled once the backward has ended.
                if not is_early:
                    states[index] = GradState.ALIASED
                    remaining[index] = grad
                continue
            states[index] = state
            remaining[index] = grad
        if not is_early:
            self._grad_shards.grads.update(
                zip(remaining, map(weakref.ref, remaining.values()), strict=True)
            )

    def _invalidate_replaced(self, position: int, grad: Tensor | None) -> None:
        """Let reads of an early freed gradient fail, unless it is still ``grad``."""
        reference = self._freed_grads.pop(position, None)
        freed = None if reference is None else reference()
        if freed is not None and freed is not grad and isinstance(freed, LazyTensor):
            name = self._grad_shards.names[self.indices[position]]
            freed.source = LostSource(_ERROR_LOST.format(name))

    def detach_grads(self) -> None:
        """Remove gradients that are reduced in place, or were freed, from their parameters."""
        for i in list(self._freed_grads):
            self._invalidate_replaced(i, None)
            self._grad_shards.states[self.indices[i]] = GradState.FULL
            if isinstance(get_grad(self.params[i]), LazyTensor):
                self.params[i].grad = None
        for i in self._coalesced_positions if self._is_started else ():
            # A gradient that was staged may hold what the script's hooks have made of it since.
            if i not in self._staged_rows:
                self.params[i].grad = None
        super().detach_grads()

    def drop_inputs(self) -> None:
        """Drop the packed tensors, after the collective."""
        self._record_streams()
        self._end_backward()
        super().drop_inputs()

    def _record_streams(self) -> None:
        """Let the memory of the inputs outlive the collectives that read it.

        The current stream has waited for the collectives; see :func:`record_streams`.
        """
        if self.device.type == "cuda" and side_streams.is_used(self.device):
            grads = (get_grad(self.params[i]) for i in self._sharded_positions)
            separate = (self._inputs.get(i) for i in self._separate_places)
            tensors = (self._coalesced_input, *self._padded_inputs, *separate, *grads)
            record_streams(tensors, self.device)

    def _end_backward(self) -> None:
        self._is_started = False
        self._padded_inputs.clear()
        self._staged_rows.clear()
        self._freed_grads.clear()
        # Other tensors of a GPU soon need this memory. On the CPU new memory is slow, so the tensor
        # is kept for the next backward.
        if self.device.type == "cuda":
            self._coalesced_input = None


def _find_freeable(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return for each ``p.grad`` whether no other tensor or process can read its memory."""
    # One loop with local names, because a model may have thousands of gradients.
    owners = count_grad_owners()
    references = count_sole_references()
    strided = torch.strided
    plain = Tensor
    count_references = torch._C._storage_Use_Count
    count_owners = use_count
    count = sys.getrefcount
    found = []
    for grad in grads:
        freeable = (
            type(grad) is plain
            and grad.layout is strided
            and not grad.requires_grad
            and count_owners(grad) == owners
        )
        if freeable:
            # mypy does not see that the test above excludes None.
            tensor: Tensor = grad  # type: ignore[assignment]
            storage = tensor.untyped_storage()
            freeable = count_references(storage._cdata) + count(storage) == references
            freeable = freeable and not (tensor.is_cpu and storage.is_shared())
            freeable = freeable and not (tensor.is_conj() or tensor.is_neg())
        found.append(freeable)
    return found


def shard_norms(shards: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each shard, ``[shards]``.

    Norms are computed in float32 at least, because a power overflows in fp16.

    Args:
        shards: This rank's shards of gradients, on one device.
        order: The order of the norm.
    """
    wide = torch.float64 if any(shard.dtype is torch.float64 for shard in shards) else torch.float32
    return torch.stack(torch._foreach_norm([shard.to(wide) for shard in shards], order))
