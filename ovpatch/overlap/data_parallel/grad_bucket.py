"""Gradient buckets: each reduces the gradients of some parameters by one grouped collective."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ovpatch.overlap.comm.collectives import Collectives, Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.comm.streams import record_streams
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.tensors.shard import compute_contiguous_strides, has_same_layout
from ovpatch.overlap.tensors.tensor_memory import is_dense, is_sole_owner

# Gradients below this number of elements go through the flat tensor: the launch of a collective takes as long as
# several hundred kilobytes of traffic on a GPU, and longer with gloo.
SMALL = 1 << 18

_CUDA_ALIGNMENT = 16  # bytes; copies of unaligned memory leave their vectorized path

# The fused kernels round the factor to the tensors' dtype on some devices, where plain multiplication does not.
_FUSED_DTYPES = (torch.float32, torch.float64)

_GRAD: Callable[[Tensor], Tensor | None] = operator.attrgetter("grad")
_LAYOUT = operator.attrgetter("layout")


class GradBucket:
    """Gradients of some parameters, of one dtype on one device.

    [Note: reduced in place] Stock DDP copies gradients into a flat tensor, reduces that and copies the result back. A
    large gradient whose memory no other tensor uses is reduced in ``p.grad`` itself. Small ones go through one flat
    tensor, since a launch costs more than a copy. Gradients that cannot be reduced in place (shared memory, holes,
    another dtype, part of a graph) go through a tensor of their own. Each rank chooses alone: the collective sees the
    same sequence of sizes. A hook of an AccumulateGrad node passes the gradient that its node was given, because the
    node references it until the hooks are over, which does not count as use.

    Args:
        indices: Index of each parameter in the order of the whole model.
        params: The parameters, in the same order.
        dtype: What the sum is computed in; the parameters' own dtype by default.
        flat_below: Gradients with fewer elements go through one flat tensor.
        alone: Parameters, by index in the whole model, that never do.

    Attributes:
        nbytes: Number of bytes that are summed.
    """

    flat_below = SMALL

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        *,
        dtype: torch.dtype | None = None,
        flat_below: int | None = None,
        alone: Collection[int] = (),
    ) -> None:
        self.indices = tuple(indices)
        self.params = tuple(params)
        self.device = params[0].device
        self.dtype = dtype or params[0].dtype
        limit = self.flat_below if flat_below is None else flat_below
        self._position = {index: i for i, index in enumerate(indices)}
        # Empty ones have nothing to reduce, and no memory by which they could be told apart.
        small = [p.numel() < max(limit, 1) and i not in alone for i, p in zip(indices, params, strict=True)]
        self._small = [i for i, is_small in enumerate(small) if is_small]
        self._large = [i for i, is_small in enumerate(small) if not is_small]
        self._small_params = [params[i] for i in self._small]
        self._view_of = {i: v for v, i in enumerate(self._small)}
        self._strides = [p.stride() if is_dense(p) else compute_contiguous_strides(p.shape) for p in params]
        self._offsets, self._flat_numel = _offsets(self._small_params, self.dtype)
        self.nbytes = (self._flat_numel + sum(params[i].numel() for i in self._large)) * self.dtype.itemsize
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []  # of the flat tensor, one per small gradient
        self._staged: set[int] = set()  # small gradients that are in the flat tensor before it is packed
        self._is_packed = False
        self._inputs: dict[int, Tensor] = {}  # what the collective sums in place of the large gradients

    @property
    def freeable_nbytes(self) -> int:
        """How many bytes :meth:`free_reduced` frees."""
        return 0

    def start_reduce(self, collectives: Collectives, inputs: list[Tensor]) -> Sequence[Work]:
        """Start the reduction of what :meth:`pack` or :meth:`make_zeros` has returned."""
        return collectives.all_reduce(inputs)

    def stage_grad(self, index: int, divisor: int) -> None:
        """Copy the gradient of parameter ``index`` now; :meth:`pack` then does not look at ``p.grad`` any more."""
        position = self._position[index]
        with torch.no_grad():
            if position not in self._view_of:
                if position not in self._inputs:
                    self._copy_large([position], 1.0 / divisor)
            elif position not in self._staged:
                self._fill_flat([self._view_of[position]], 1.0 / divisor)
                self._staged.add(position)

    def pack(self, divisor: int, *, absent: Collection[int] = (), node_grad: Tensor | None = None) -> list[Tensor]:
        """Return what the collective has to sum in place.

        Args:
            divisor: What each gradient is divided by first, which keeps half precision in range; a missing gradient
                counts as zero.
            absent: Parameters, by index in the whole model, to which this backward adds nothing. If no other rank adds
                anything either, they must keep the gradient that they have now, so it is copied.
            node_grad: The gradient that the running AccumulateGrad node was given, if this is called from its hook.

        Returns:
            Dense tensors of the same sizes in the same order on every rank; of :attr:`dtype`, but for those that travel
            as they are.
        """
        scale = 1.0 / divisor
        with torch.no_grad():
            packed = []
            if self._small:
                staged = self._staged
                self._fill_flat([j for j, i in enumerate(self._small) if i not in staged] if staged else None, scale)
                self._is_packed = True
                if self._flat is not None and self._flat_numel:
                    packed.append(self._flat)
            if self._large:
                self._pack_large(scale, absent, node_grad)
                packed += [_in_memory_order(self._inputs[i]) for i in self._large]
            return packed

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Make ``p.grad`` the reduced gradient of every parameter. The collective has been waited for.

        Args:
            skip: Parameters, by index in the whole model, that no rank used: their ``grad`` stays what it was.

        Returns:
            What is left to do: gradients, each with the tensor that is to be copied into it.
        """
        copies: list[tuple[Tensor, Tensor]] = []
        if self._is_packed:
            for i, grad, view in zip(self._small, _grads(self._small_params), self._views, strict=True):
                if skip and self.indices[i] in skip:
                    continue
                if grad is None:
                    _write_grad(self.params[i], view, is_shared=True)
                else:
                    copies.append((grad, view))
        dropped: list[Tensor] = []
        for i, reduced in sorted(self._inputs.items()):  # where parameters share a gradient, the last one wins
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
        """Return zero tensors that can stand in for what :meth:`pack` returns."""
        sizes = [(self._flat_numel, self.dtype)] if self._flat_numel else []
        sizes += [(self.params[i].numel(), self._dtype(i)) for i in self._large]
        with outside_modes():
            return [torch.zeros(size, dtype=dtype, device=self.device) for size, dtype in sizes]

    def free_reduced(self, *, but: Collection[int]) -> None:
        """Free full gradients that are not needed once reduced, in backward; the collective has been waited for.

        Args:
            but: Parameters, by index in the whole model, whose ``p.grad`` stays unchanged.
        """

    def detach_grads(self) -> None:
        """Remove gradients that are being reduced in place from their parameters; the backward has failed.

        What the script writes to ``p.grad`` next must neither reach the collective nor be overwritten by it.
        """
        for i, reduced in self._inputs.items():
            if self.params[i].grad is reduced:
                self.params[i].grad = None

    def drop_inputs(self) -> None:
        """Drop what was packed. The collective has been waited for."""
        record_streams(self._inputs.values(), self.device)
        self._clear()

    def _clear(self) -> None:
        self._is_packed = False
        self._inputs.clear()
        self._staged.clear()

    def _divided(self, inputs: Mapping[int, Tensor]) -> list[Tensor]:
        """Return those of some large gradients that are divided before they are reduced."""
        return list(inputs.values())

    def _dtype(self, i: int) -> torch.dtype:
        """Return the dtype in which a gradient is sent; another one than :attr:`dtype` if it is not cast."""
        return self.dtype

    # ---------------------------------------------------------------- small gradients

    def _fill_flat(self, places: Sequence[int] | None, scale: float) -> None:
        """Copy small gradients, all by default, into the flat tensor, multiplied by ``scale``."""
        if self._flat is None:
            self._make_flat()
        params, views = self._small_params, self._views
        if places is not None:
            params, views = [params[j] for j in places], [views[j] for j in places]
        found = _grads(params)
        if {*map(type, found)} != {Tensor} or {*map(_LAYOUT, found)} != {torch.strided}:
            for grad, view in zip(found, views, strict=True):
                if grad is None:
                    view.zero_()
                elif grad.layout is not torch.strided:
                    raise make_sparse_error(grad)
            views = [view for grad, view in zip(found, views, strict=True) if grad is not None]
        grads = [grad for grad in found if grad is not None]
        if not grads:
            return
        torch._foreach_copy_(views, _sums(grads, self.dtype) if fp32_accumulation.sums else grads)
        if scale != 1.0 and places is None and self._flat is not None:
            self._flat.mul_(scale)
        elif scale != 1.0:
            _multiply(views, scale)

    def _make_flat(self) -> None:
        # Outside inference mode, or a first backward under it would leave tensors that autograd refuses later.
        with outside_modes():
            flat = self._flat = torch.zeros(self._flat_numel, dtype=self.dtype, device=self.device)
            places = zip(self._small, self._offsets, strict=True)
            self._views = [flat.as_strided(self.params[i].shape, self._strides[i], offset) for i, offset in places]

    # ---------------------------------------------------------------- large gradients

    def _pack_large(self, scale: float, absent: Collection[int], node_grad: Tensor | None) -> None:
        copied: list[int] = []
        own: dict[int, Tensor] = {}
        for i, grad in zip(self._large, _grads([self.params[i] for i in self._large]), strict=True):
            if i not in self._inputs:
                if grad is None or self.indices[i] in absent or not self._fits_in_place(i, grad, node_grad):
                    copied.append(i)
                else:
                    own[i] = grad
        if copied:
            self._copy_large(copied, scale)
        if own:
            if fp32_accumulation.sums:
                fp32_accumulation.drop_sums(own.values())
            if scale != 1.0:
                _multiply(self._divided(own), scale)
            self._inputs.update(own)

    def _fits_in_place(self, i: int, grad: Tensor, node_grad: Tensor | None) -> bool:
        """Return whether the gradient can be reduced in its own memory; see [Note: reduced in place]."""
        return (
            type(grad) is Tensor
            and grad.layout is torch.strided
            and grad.dtype == self._dtype(i)
            and not grad.requires_grad
            and has_same_layout(grad, self._strides[i])
            and not (grad.is_conj() or grad.is_neg())
            and is_sole_owner(grad, node_grad)
        )

    def _copy_large(self, positions: Sequence[int], scale: float) -> None:
        """Copy gradients into tensors of their own, multiplied by ``scale``."""
        targets: dict[int, Tensor] = {}
        grads: list[Tensor] = []
        for i, grad in zip(positions, _grads([self.params[i] for i in positions]), strict=True):
            with outside_modes():
                target = torch.empty_strided(
                    self.params[i].shape, self._strides[i], dtype=self._dtype(i), device=self.device
                )
            if grad is None:
                target.zero_()
            elif grad.layout is torch.strided:
                targets[i] = target
                grads += _sums([grad], target.dtype) if fp32_accumulation.sums else [grad]
            else:
                raise make_sparse_error(grad)
            self._inputs[i] = target
        if targets:
            torch._foreach_copy_([*targets.values()], grads)
            if scale != 1.0:
                _multiply(self._divided(targets), scale)


def get_grad(param: Tensor) -> Tensor | None:
    """Return ``param.grad``, without the call of Python by which the class of a pending parameter answers."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad


def _grads(params: Sequence[Tensor]) -> list[Tensor | None]:
    with torch._C.DisableTorchFunctionSubclass():  # the class of a pending parameter answers by Python
        return list(map(_GRAD, params))


def _sums(grads: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return what gradients are copied from; fp32 sums are dropped in any case."""
    pairs = [(grad, fp32_accumulation.take_sum(grad)) for grad in grads]
    return [total if dtype is torch.float32 else grad for grad, total in pairs]


def _write_grad(param: torch.nn.Parameter, reduced: Tensor, *, is_shared: bool) -> None:
    """Make the reduced gradient ``param.grad``; a hook has dropped its own while it was being reduced.

    Args:
        param: The parameter.
        reduced: The reduced gradient.
        is_shared: Whether others use the memory of ``reduced``.
    """
    with outside_modes():
        param.grad = reduced.to(param.dtype, copy=is_shared)


def make_sparse_error(grad: Tensor) -> RuntimeError:
    """Return the error of a sparse gradient in a bucket of dense ones."""
    return RuntimeError(
        f"ovpatch: a parameter of shape {tuple(grad.shape)} has a sparse gradient, and its module was not made "
        "with sparse=True when the model was wrapped. Set sparse=True in the module's constructor."
    )


def _in_memory_order(dense: Tensor) -> Tensor:
    """Return a contiguous tensor with the same memory."""
    return dense if dense.is_contiguous() else dense.as_strided((dense.numel(),), (1,))


def _multiply(tensors: list[Tensor], scale: float) -> None:
    if not tensors:
        return
    if tensors[0].dtype in _FUSED_DTYPES:
        torch._foreach_mul_(tensors, scale)
    else:
        for tensor in tensors:
            tensor.mul_(scale)


def _offsets(params: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> tuple[list[int], int]:
    """Return where each gradient begins in the flat tensor, and the flat tensor's size, in elements."""
    step = max(1, _CUDA_ALIGNMENT // dtype.itemsize) if params and params[0].is_cuda else 1
    offsets, offset = [], 0
    for param in params:
        offsets.append(offset)
        offset += -(-param.numel() // step) * step
    return offsets, offset


class SparseBucket:
    """The gradient of one parameter whose module makes sparse gradients; used like a :class:`GradBucket`.

    Ranks have entries in different places, so each sparse gradient is summed by a collective of its own.

    Args:
        index: Index of the parameter in the order of the whole model.
        param: The parameter.
    """

    def __init__(self, index: int, param: torch.nn.Parameter) -> None:
        self.indices = (index,)
        self.params = (param,)
        self.device = param.device
        self.dtype = param.dtype
        self._input: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that the collective is given by this rank; known once packed."""
        if self._input is None:
            return 0
        indices, values = self._input.indices(), self._input.values()
        return indices.nbytes + values.nbytes

    def start_reduce(self, collectives: Collectives, inputs: list[Tensor]) -> Sequence[Work]:
        """Start the reduction of what :meth:`pack` or :meth:`make_zeros` has returned."""
        return collectives.all_reduce(inputs)

    def stage_grad(self, index: int, divisor: int) -> None:
        """Copy the gradient now."""
        del index
        if self._input is None:
            grad = self.params[0].grad
            with torch.no_grad():
                # Multiplying by 1/3 would not give the bits that stock DDP's division gives.
                self._input = self._zero() if grad is None else (_sparse(grad) / divisor).coalesce()

    def pack(self, divisor: int, *, absent: Collection[int] = (), node_grad: Tensor | None = None) -> list[Tensor]:
        """Return the gradient, divided."""
        del absent, node_grad
        self.stage_grad(self.indices[0], divisor)
        assert self._input is not None
        return [self._input]

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Make ``p.grad`` the reduced gradient."""
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
        """Return a gradient without entries."""
        return [self._zero()]

    def detach_grads(self) -> None:
        """Nothing is reduced in place."""

    def drop_inputs(self) -> None:
        """Drop what was packed."""
        self._input = None

    def _zero(self) -> Tensor:
        with outside_modes():
            return torch.zeros(self.params[0].shape, dtype=self.dtype, device=self.device).to_sparse(1)


def _sparse(grad: Tensor) -> Tensor:
    # A module may be told to be sparse and still give a dense gradient, for example where a tied weight is dense.
    return grad if grad.is_sparse else grad.to_sparse(1)


Bucket: TypeAlias = GradBucket | SparseBucket
