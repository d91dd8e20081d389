"""Gradient buckets: each reduces the gradients of some parameters by one grouped collective."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ovpatch.overlap.comm.collectives import Collectives, Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import record_streams
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.tensors.shard import compute_contiguous_strides, has_same_layout
from ovpatch.overlap.tensors.tensor_memory import is_dense, is_sole_owner

#: Gradients with fewer elements go through the flat tensor. The launch of a collective takes as
#: long as several hundred kilobytes of traffic on a GPU, and longer with gloo.
SMALL_NUMEL = 1 << 18

# CUDA copies of memory that is not aligned to this many bytes leave their vectorized path.
_CUDA_ALIGNMENT_BYTES: Final = 16

# On some devices the fused kernels round the factor to the dtype of the tensors, and plain
# multiplication does not. Only for these dtypes is the result the same.
_FUSED_DTYPES: Final = (torch.float32, torch.float64)

_read_grad: Callable[[Tensor], Tensor | None] = operator.attrgetter("grad")
_read_layout: Final = operator.attrgetter("layout")


class GradBucket:
    """The gradients of some parameters, which have one dtype and are on one device.

    [Note: reduced in place] Stock DDP copies gradients into a flat tensor, reduces the tensor and
    copies the result back. A bucket reduces a large gradient in ``p.grad`` itself if no other
    tensor uses its memory. Small gradients go through one flat tensor, since a launch costs more
    than a copy. A gradient that cannot be reduced in place (shared memory, holes, another dtype,
    part of a graph) is copied into its own tensor. Each rank chooses alone, because the collective
    sees the same sequence of sizes. A hook of an AccumulateGrad node passes the gradient that its
    node received: the node references it until its hooks have run, and this is no other use.

    Attributes:
        indices: The index of each parameter in the order of the model.
        params: The parameters, in the same order.
        device: The device of the parameters.
        dtype: The dtype of the sum.
        nbytes: The number of bytes that are summed.
        freeable_nbytes: The number of bytes that :meth:`free_reduced` frees.
        saved_nbytes: The number of these bytes that are summed in the gradients themselves.
    """

    flat_below = SMALL_NUMEL
    freeable_nbytes = 0

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        *,
        dtype: torch.dtype | None = None,
        flat_below: int | None = None,
        never_flat: Collection[int] = (),
    ) -> None:
        """Lay out the flat tensor, and allocate nothing yet.

        Args:
            indices: The index of each parameter in the order of the model.
            params: The parameters, in the same order.
            dtype: The dtype of the sum. Default: that of the parameters.
            flat_below: Gradients with fewer elements go through one flat tensor. Default:
                :data:`SMALL_NUMEL`.
            never_flat: The parameters, by index in the model, whose gradients never go through the
                flat tensor. Default: none.
        """
        self.indices = tuple(indices)
        self.params = tuple(params)
        self.device = params[0].device
        self.dtype = dtype or params[0].dtype

        # - Layout. Positions count the parameters of this bucket, indices those of the model.
        self._position_by_index = {index: i for i, index in enumerate(indices)}
        # An empty gradient always counts as large. It has nothing to reduce, and no memory that
        # would distinguish it from its neighbors in the flat tensor.
        limit = max(self.flat_below if flat_below is None else flat_below, 1)
        are_small = [
            param.numel() < limit and index not in never_flat
            for index, param in zip(indices, params, strict=True)
        ]
        self._small_positions = [i for i, is_small in enumerate(are_small) if is_small]
        self._large_positions = [i for i, is_small in enumerate(are_small) if not is_small]
        self._small_params = [params[i] for i in self._small_positions]
        self._view_by_position = {i: view for view, i in enumerate(self._small_positions)}
        # A gradient is laid out like its parameter, as autograd makes it, or contiguous.
        self._strides = [
            param.stride() if is_dense(param) else compute_contiguous_strides(param.shape)
            for param in params
        ]
        self._offsets, self._flat_numel = _compute_offsets(self._small_params, self.dtype)
        large_numel = sum(params[i].numel() for i in self._large_positions)
        self.nbytes = (self._flat_numel + large_numel) * self.dtype.itemsize
        # The bytes that are summed in place, unless a backward has to copy a gradient.
        self._in_place_nbytes = large_numel * self.dtype.itemsize
        self.saved_nbytes = self._in_place_nbytes

        # - The flat tensor, created by the first backward
        self._flat: Tensor | None = None
        # One view of the flat tensor per small gradient.
        self._views: list[Tensor] = []

        # - The running backward
        # Positions of small gradients that were copied into the flat tensor ahead of `pack`.
        self._staged_positions: set[int] = set()
        # Whether the flat tensor holds the small gradients of this backward.
        self._is_packed = False
        # The tensor that the collective sums for each large gradient, by position. It is `p.grad`
        # itself if the gradient is reduced in place.
        self._inputs: dict[int, Tensor] = {}

    def start_reduce(self, collectives: Collectives, inputs: list[Tensor]) -> Sequence[Work]:
        """Start the reduction of the tensors that :meth:`pack` or :meth:`make_zeros` returned."""
        return collectives.all_reduce(inputs)

    def stage_grad(self, index: int, divisor: int) -> None:
        """Copy the gradient of parameter ``index`` now, so that :meth:`pack` ignores ``p.grad``."""
        position = self._position_by_index[index]
        with torch.no_grad():
            if position not in self._view_by_position:
                if position not in self._inputs:
                    self._copy_large([position], 1.0 / divisor)
            elif position not in self._staged_positions:
                self._fill_flat([self._view_by_position[position]], 1.0 / divisor)
                self._staged_positions.add(position)

    def pack(
        self, divisor: int, *, absent: Collection[int] = (), node_grad: Tensor | None = None
    ) -> list[Tensor]:
        """Return the tensors that the collective sums in place.

        Args:
            divisor: Each gradient is divided by it first, which keeps bf16 and fp16 sums in range.
                A missing gradient counts as zero.
            absent: The parameters, by index in the model, to which this backward adds nothing. If
                no peer adds anything either, they must keep their present gradient, so the bucket
                copies it. Default: none.
            node_grad: The gradient that the running AccumulateGrad node received, if one of its
                hooks calls this. Default: None.

        Returns:
            Dense tensors of the same sizes in the same order on every rank. Their dtype is
            :attr:`dtype`, except for gradients that a subclass sends unconverted.
        """
        scale = 1.0 / divisor
        with torch.no_grad():
            packed = []
            if self._small_positions:
                staged = self._staged_positions
                # None means all, which needs no list.
                unstaged = None
                if staged:
                    positions = enumerate(self._small_positions)
                    unstaged = [view for view, i in positions if i not in staged]
                self._fill_flat(unstaged, scale)
                self._is_packed = True
                if self._flat is not None and self._flat_numel:
                    packed.append(self._flat)
            if self._large_positions:
                self._pack_large(scale, absent, node_grad)
                packed += [_view_in_memory_order(self._inputs[i]) for i in self._large_positions]
            return packed

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Make ``p.grad`` the reduced gradient of every parameter, after the collective.

        Args:
            skip: The parameters, by index in the model, that no rank used. Their ``p.grad`` stays
                unchanged. Default: none.

        Returns:
            The remaining copies: pairs of a gradient and the tensor to copy into it. The caller
            fuses the copies of all buckets.
        """
        copies: list[tuple[Tensor, Tensor]] = []
        if self._is_packed:
            grads = _read_grads(self._small_params)
            for i, grad, view in zip(self._small_positions, grads, self._views, strict=True):
                if skip and self.indices[i] in skip:
                    continue
                if grad is None:
                    _write_grad(self.params[i], view, is_shared=True)
                else:
                    copies.append((grad, view))
        dropped: list[Tensor] = []
        # The order is fixed because the last copy wins if parameters share a gradient.
        for i, reduced in sorted(self._inputs.items()):
            grad = self.params[i].grad
            if grad is not reduced:
                dropped.append(reduced)
                if self.indices[i] in skip:
                    continue
                if grad is None:
                    _write_grad(self.params[i], reduced, is_shared=False)
                else:
                    copies.append((grad, reduced))
        if dropped:
            record_streams(dropped, self.device)
        self._clear()
        return copies

    def make_zeros(self) -> list[Tensor]:
        """Return zero tensors of the sizes and dtypes that :meth:`pack` returns."""
        sizes = [(self._flat_numel, self.dtype)] if self._flat_numel else []
        sizes += [(self.params[i].numel(), self._get_sent_dtype(i)) for i in self._large_positions]
        with outside_modes():
            return [torch.zeros(size, dtype=dtype, device=self.device) for size, dtype in sizes]

    def free_reduced(self, *, but: Collection[int]) -> None:
        """Free full gradients during the backward, after the collective.

        Args:
            but: The parameters, by index in the model, whose ``p.grad`` stays unchanged.
        """

    def detach_grads(self) -> None:
        """Remove gradients that are reduced in place from their parameters after a failure.

        The collective may still be in flight. The script's next writes to ``p.grad`` must not reach
        it, and its result must not overwrite them.
        """
        for i, reduced in self._inputs.items():
            if self.params[i].grad is reduced:
                self.params[i].grad = None

    def drop_inputs(self) -> None:
        """Drop the packed tensors, after the collective."""
        record_streams(self._inputs.values(), self.device)
        self._clear()

    def _clear(self) -> None:
        self._is_packed = False
        self._inputs.clear()
        self._staged_positions.clear()
        self.saved_nbytes = self._in_place_nbytes

    def _select_scaled(self, inputs: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the large gradients, from ``inputs`` by position, to divide before the sum."""
        return list(inputs.values())

    def _get_sent_dtype(self, position: int) -> torch.dtype:
        """Return the dtype in which a large gradient is sent."""
        del position
        return self.dtype

    # ---------------------------------------------------------------- small gradients

    def _fill_flat(self, view_numbers: Sequence[int] | None, scale: float) -> None:
        """Copy small gradients, multiplied by ``scale``, into the flat tensor; None copies all."""
        if self._flat is None:
            self._make_flat()
        params, views = self._small_params, self._views
        if view_numbers is not None:
            params = [params[j] for j in view_numbers]
            views = [views[j] for j in view_numbers]
        found = _read_grads(params)
        # Two sets decide for the usual step that nothing is missing, lazy or sparse, which is
        # cheaper than a test of each gradient.
        if {*map(type, found)} != {Tensor} or {*map(_read_layout, found)} != {torch.strided}:
            for grad, view in zip(found, views, strict=True):
                if grad is None:
                    view.zero_()
                elif grad.layout is not torch.strided:
                    raise make_sparse_error(grad)
            views = [view for grad, view in zip(found, views, strict=True) if grad is not None]
        grads = [grad for grad in found if grad is not None]
        if not grads:
            return
        sources = _take_sources(grads, self.dtype) if fp32_accumulation.sums else grads
        torch._foreach_copy_(views, sources)
        # One kernel scales the full flat tensor, but not if earlier stages have scaled a part.
        if scale != 1.0 and view_numbers is None and self._flat is not None:
            self._flat.mul_(scale)
        elif scale != 1.0:
            _multiply(views, scale)

    def _make_flat(self) -> None:
        # If the first backward runs in inference mode, a flat tensor created in that mode would
        # make autograd refuse later backwards.
        with outside_modes():
            flat = torch.zeros(self._flat_numel, dtype=self.dtype, device=self.device)
            self._flat = flat
            self._views = [
                flat.as_strided(self.params[i].shape, self._strides[i], offset)
                for i, offset in zip(self._small_positions, self._offsets, strict=True)
            ]

    # ---------------------------------------------------------------- large gradients

    def _pack_large(self, scale: float, absent: Collection[int], node_grad: Tensor | None) -> None:
        copied: list[int] = []
        in_place: dict[int, Tensor] = {}
        grads = _read_grads([self.params[i] for i in self._large_positions])
        for i, grad in zip(self._large_positions, grads, strict=True):
            # A gradient that was staged has its input already.
            if i not in self._inputs:
                if (
                    grad is None
                    or self.indices[i] in absent
                    or not self._fits_in_place(i, grad, node_grad)
                ):
                    copied.append(i)
                else:
                    in_place[i] = grad
        if copied:
            self._copy_large(copied, scale)
        if in_place:
            if fp32_accumulation.sums:
                fp32_accumulation.drop_sums(in_place.values())
            if scale != 1.0:
                _multiply(self._select_scaled(in_place), scale)
            self._inputs.update(in_place)

    def _fits_in_place(self, position: int, grad: Tensor, node_grad: Tensor | None) -> bool:
        """Return whether the gradient may be reduced in its memory: [Note: reduced in place]."""
        return (
            type(grad) is Tensor
            and grad.layout is torch.strided
            and grad.dtype == self._get_sent_dtype(position)
            and not grad.requires_grad
            and has_same_layout(grad, self._strides[position])
            and not (grad.is_conj() or grad.is_neg())
            and is_sole_owner(grad, node_grad)
        )

    def _copy_large(self, positions: Sequence[int], scale: float) -> None:
        """Copy large gradients, multiplied by ``scale``, into new tensors."""
        targets: dict[int, Tensor] = {}
        sources: list[Tensor] = []
        grads = _read_grads([self.params[i] for i in positions])
        for i, grad in zip(positions, grads, strict=True):
            with outside_modes():
                target = torch.empty_strided(
                    self.params[i].shape,
                    self._strides[i],
                    dtype=self._get_sent_dtype(i),
                    device=self.device,
                )
            if grad is None:
                target.zero_()
            elif grad.layout is torch.strided:
                targets[i] = target
                sources += _take_sources([grad], target.dtype) if fp32_accumulation.sums else [grad]
            else:
                raise make_sparse_error(grad)
            self._inputs[i] = target
            self.saved_nbytes -= target.nbytes
        if targets:
            torch._foreach_copy_([*targets.values()], sources)
            if scale != 1.0:
                _multiply(self._select_scaled(targets), scale)


def get_grad(param: Tensor) -> Tensor | None:
    """Return ``param.grad`` without the Python call of a pending parameter's class."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad


def _read_grads(params: Sequence[Tensor]) -> list[Tensor | None]:
    # Each read of a pending parameter would call its `__torch_function__`, which is Python code.
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_read_grad, params))


def _take_sources(grads: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors to copy gradients from: their fp32 sums if ``dtype`` is float32.

    The sums are dropped in either case, since a reduction ends them.
    """
    pairs = [(grad, fp32_accumulation.take_sum(grad)) for grad in grads]
    return [total if dtype is torch.float32 else grad for grad, total in pairs]


def _write_grad(param: torch.nn.Parameter, reduced: Tensor, *, is_shared: bool) -> None:
    """Make ``reduced`` the gradient of a parameter whose ``p.grad`` a hook has dropped.

    Args:
        param: The parameter.
        reduced: The reduced gradient.
        is_shared: Whether the bucket or other gradients use the memory of ``reduced``.
    """
    with outside_modes():
        param.grad = reduced.to(param.dtype, copy=is_shared)


def make_sparse_error(grad: Tensor) -> RuntimeError:
    """Return the error of a sparse gradient in a bucket of dense gradients."""
    return RuntimeError(
        f"ovpatch: a parameter of shape {tuple(grad.shape)} has a sparse gradient, and its module "
        "was not made with sparse=True when the model was wrapped. Set sparse=True in the module's "
        "constructor."
    )


def _view_in_memory_order(dense: Tensor) -> Tensor:
    """Return a contiguous tensor over the same memory."""
    return dense if dense.is_contiguous() else dense.as_strided((dense.numel(),), (1,))


def _multiply(tensors: list[Tensor], scale: float) -> None:
    if not tensors:
        return
    if tensors[0].dtype in _FUSED_DTYPES:
        torch._foreach_mul_(tensors, scale)
    else:
        for tensor in tensors:
            tensor.mul_(scale)


def _compute_offsets(
    params: Sequence[torch.nn.Parameter], dtype: torch.dtype
) -> tuple[list[int], int]:
    """Return the first element of each gradient in the flat tensor, and the size of the tensor."""
    step = max(1, _CUDA_ALIGNMENT_BYTES // dtype.itemsize) if params and params[0].is_cuda else 1
    offsets = []
    offset = 0
    for param in params:
        offsets.append(offset)
        # Round up to a multiple of the alignment.
        offset += -(-param.numel() // step) * step
    return offsets, offset


class SparseBucket:
    """The gradient of one parameter whose module makes sparse gradients.

    Reducers use it like a :class:`GradBucket`. Ranks have values at different rows, so a collective
    for sparse tensors sums each gradient alone.

    Attributes:
        indices: The index of the parameter in the order of the model.
        params: The parameter.
        device: The device of the parameter.
        dtype: The dtype of the parameter.
        saved_nbytes: The bytes that are summed in the gradient itself; none.
    """

    saved_nbytes = 0

    def __init__(self, index: int, param: torch.nn.Parameter) -> None:
        self.indices = (index,)
        self.params = (param,)
        self.device = param.device
        self.dtype = param.dtype
        # The tensor that the collective sums, from `pack` or `stage_grad` until `unpack`.
        self._input: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank contributes to the collective; 0 until it is packed."""
        if self._input is None:
            return 0
        indices, values = self._input.indices(), self._input.values()
        return indices.nbytes + values.nbytes

    def start_reduce(self, collectives: Collectives, inputs: list[Tensor]) -> Sequence[Work]:
        """Start the reduction of the tensors that :meth:`pack` or :meth:`make_zeros` returned."""
        return collectives.all_reduce(inputs)

    def stage_grad(self, index: int, divisor: int) -> None:
        """Copy the gradient now."""
        del index
        if self._input is None:
            grad = self.params[0].grad
            with torch.no_grad():
                # Stock DDP divides. A multiplication by 1/3 would give other bits.
                self._input = (
                    self._make_zero()
                    if grad is None
                    else (_convert_to_sparse(grad) / divisor).coalesce()
                )

    def pack(
        self, divisor: int, *, absent: Collection[int] = (), node_grad: Tensor | None = None
    ) -> list[Tensor]:
        """Return the gradient, divided."""
        del absent, node_grad
        self.stage_grad(self.indices[0], divisor)
        assert self._input is not None
        return [self._input]

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Make ``p.grad`` the reduced gradient; no copies remain."""
        reduced, self._input = self._input, None
        param = self.params[0]
        if reduced is not None and self.indices[0] not in skip:
            with torch.no_grad():
                if param.grad is None:
                    param.grad = reduced
                else:
                    param.grad.copy_(reduced if param.grad.is_sparse else reduced.to_dense())
        return []

    def make_zeros(self) -> list[Tensor]:
        """Return a gradient without values."""
        return [self._make_zero()]

    def detach_grads(self) -> None:
        """Do nothing, since no sparse gradient is reduced in place."""

    def drop_inputs(self) -> None:
        """Drop the packed tensor."""
        self._input = None

    def _make_zero(self) -> Tensor:
        param = self.params[0]
        with outside_modes():
            return torch.zeros(param.shape, dtype=self.dtype, device=self.device).to_sparse(1)


def _convert_to_sparse(grad: Tensor) -> Tensor:
    # A module made with sparse=True may still get a dense gradient, for example if it shares its
    # weight with a dense module.
    return grad if grad.is_sparse else grad.to_sparse(1)


Bucket: TypeAlias = GradBucket | SparseBucket
