"""Gradient buckets: many gradients that one grouped collective reduces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ovpatch.overlap.comm.collectives import Collectives
from ovpatch.overlap.comm.side_streams import record_streams
from ovpatch.overlap.comm.work import Work
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.tensors.metadata_ops import grad_of
from ovpatch.overlap.tensors.ownership import contiguous_strides, is_dense, is_sole_owner, same_layout

# Gradients below this number of elements go through the flat tensor. On a GPU a launch takes as long as several hundred
# kilobytes of traffic; elsewhere backends make one flat tensor of what they are given.
SMALL = 1 << 18
_FLAT_BELOW = {"cuda": SMALL}

_CUDA_ALIGNMENT = 16  # bytes; copies of unaligned memory leave their vectorized path

# The fused kernels round the factor to the tensors' dtype on some devices, where plain multiplication does not.
_FUSED_DTYPES = (torch.float32, torch.float64)


class GradBucket:
    """Gradients of some parameters, of one dtype on one device.

    [Note: reduced in place] Stock DDP copies gradients into a flat tensor, reduces that and copies the result back. A
    large gradient whose memory no other tensor uses is reduced in ``p.grad`` itself. Small ones go through one flat
    tensor, since a launch costs more than a copy. Gradients that cannot be reduced in place (shared memory, holes,
    another dtype, part of a graph) go through a tensor of their own. Each rank chooses alone: the collective sees the
    same sequence of sizes.

    [Note: the node that is running] A hook of a parameter's AccumulateGrad node runs while the node still references
    the gradient that it was given. If ``p.grad`` is that gradient, its memory has one reference more than in any other
    hook, and another one if it is a view, which references its base: the weight of a Linear gets a transposed one.

    Args:
        indices: Index of each parameter in the order of the whole model.
        params: The parameters, in the same order.
        dtype: What the sum is computed in; the parameters' own dtype by default.
        flat_below: Gradients with fewer elements go through one flat tensor.
        alone: Parameters, by index in the whole model, that never do.

    Attributes:
        nbytes: Number of bytes that are summed.
    """

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
        limit = _FLAT_BELOW.get(self.device.type, 0) if flat_below is None else flat_below
        self._position = {index: i for i, index in enumerate(indices)}
        # Empty ones have nothing to reduce, and no memory by which they could be told apart.
        small = [p.numel() < max(limit, 1) and i not in alone for i, p in zip(indices, params, strict=True)]
        self._small = [i for i, is_small in enumerate(small) if is_small]
        self._large = [i for i, is_small in enumerate(small) if not is_small]
        self._strides = [p.stride() if is_dense(p) else contiguous_strides(p.shape) for p in params]
        self._offsets, self._flat_numel = _offsets([params[i] for i in self._small], self.dtype)
        self.nbytes = (self._flat_numel + sum(params[i].numel() for i in self._large)) * self.dtype.itemsize
        self._flat: Tensor | None = None
        self._views: dict[int, Tensor] = {}
        self._pieces: dict[int, Tensor] = {}

    @property
    def transient(self) -> int:
        """How many bytes can be freed once they are reduced; see :meth:`give_up`."""
        return 0

    def start(self, collectives: Collectives, pieces: list[Tensor]) -> Sequence[Work]:
        """Start the reduction of what :meth:`pack` or :meth:`zeros` has returned."""
        return collectives.all_reduce(pieces)

    def stage(self, index: int, divisor: int) -> None:
        """Copy the gradient of parameter ``index`` now; :meth:`pack` then does not look at ``p.grad`` any more."""
        position = self._position[index]
        if position not in self._pieces:
            with torch.no_grad():
                self._copy([position], 1.0 / divisor)

    def pack(self, divisor: int, *, absent: Collection[int] = (), given: Tensor | None = None) -> list[Tensor]:
        """Return what the collective has to sum in place.

        Args:
            divisor: What each gradient is divided by first, which keeps half precision in range; a missing gradient
                counts as zero.
            absent: Parameters, by index in the whole model, to which this backward adds nothing. If no other rank adds
                anything either, they must keep the gradient that they have now, so it is copied.
            given: The gradient that the running AccumulateGrad node was given, if this is called from a hook of one;
                see [Note: the node that is running].

        Returns:
            Dense tensors of the same sizes in the same order on every rank; of :attr:`dtype`, but for those that travel
            as they are.
        """
        scale = 1.0 / divisor
        with torch.no_grad():
            copied = [i for i in self._small if i not in self._pieces]
            own: dict[int, Tensor] = {}
            for i in self._large:
                if i not in self._pieces:
                    grad = None if self.indices[i] in absent else self._grad_in_place(i, given)
                    if grad is None:
                        copied.append(i)
                    else:
                        own[i] = grad
            if copied:
                self._copy(copied, scale)
            if own:
                fp32_accumulation.drop_sums(own.values())
                if scale != 1.0:
                    _multiply(self._divided(own), scale)
                self._pieces.update(own)
            packed = [self._flat] if self._flat is not None and self._flat_numel else []
            for i in self._large:
                piece = self._pieces[i]
                packed.append(piece if piece.is_contiguous() else _in_memory_order(piece))
            return packed

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Make ``p.grad`` the reduced gradient of every parameter. The collective has been waited for.

        Args:
            skip: Parameters, by index in the whole model, that no rank used: their ``grad`` stays what it was.

        Returns:
            What is left to do: gradients, each with the tensor that is to be copied into it.
        """
        copies: list[tuple[Tensor, Tensor]] = []
        dropped: list[Tensor] = []
        for i in sorted(self._pieces):  # where parameters share a gradient, the last one wins, as under stock
            param, piece = self.params[i], self._pieces[i]
            grad = param.grad
            if grad is not piece and i not in self._views:
                dropped.append(piece)
            if self.indices[i] in skip or grad is piece:
                continue
            if grad is None:
                # Also where a hook has dropped the gradient while it was being reduced, as under stock.
                with torch.inference_mode(False), torch.no_grad():
                    param.grad = piece.to(param.dtype, copy=i in self._views)
            elif grad.is_conj() or grad.is_neg():
                with torch.no_grad():
                    grad.copy_(piece)  # torch copies into lists of plain memory only
            else:
                copies.append((grad, piece))
        if dropped:
            record_streams(dropped, self.device)
        self._pieces.clear()
        return copies

    def zeros(self) -> list[Tensor]:
        """Return zero tensors that can stand in for what :meth:`pack` returns."""
        sizes = [(self._flat_numel, self.dtype)] if self._flat_numel else []
        sizes += [(self.params[i].numel(), self._dtype(i)) for i in self._large]
        return [torch.zeros(size, dtype=dtype, device=self.device) for size, dtype in sizes]

    def give_up(self, *, but: Collection[int]) -> None:
        """Free full gradients that are not needed once reduced, in backward; the collective has been waited for.

        Args:
            but: Parameters, by index in the whole model, whose ``p.grad`` stays unchanged.
        """

    def release(self) -> None:
        """Remove gradients that are being reduced in place from their parameters; the backward has failed.

        What the script writes to ``p.grad`` next must neither reach the collective nor be overwritten by it.
        """
        for i, piece in self._pieces.items():
            if self.params[i].grad is piece:
                self.params[i].grad = None

    def drop(self) -> None:
        """Drop what was packed. The collective has been waited for."""
        record_streams([piece for i, piece in self._pieces.items() if i not in self._views], self.device)
        self._pieces.clear()

    def _divided(self, pieces: Mapping[int, Tensor]) -> list[Tensor]:
        """Return those of some pieces that are divided before they are reduced."""
        return list(pieces.values())

    def _dtype(self, i: int) -> torch.dtype:
        """Return the dtype in which a gradient is sent; another one than :attr:`dtype` if it is not cast."""
        return self.dtype

    def _copy(self, positions: Iterable[int], scale: float) -> None:
        """Copy gradients into the flat tensor, or into tensors of their own, multiplied by ``scale``."""
        targets: dict[int, Tensor] = {}
        grads: list[Tensor] = []
        for i in positions:
            grad = self._grad(i)
            target = self._pieces[i] = self._target(i)
            if grad is None:
                target.zero_()
            else:
                targets[i] = target
                source = fp32_accumulation.take(grad)
                grads.append(source if target.dtype is torch.float32 else grad)
        if targets:
            torch._foreach_copy_([*targets.values()], grads)
            if scale != 1.0:
                _multiply(self._divided(targets), scale)

    def _grad(self, i: int) -> Tensor | None:
        grad = grad_of(self.params[i])
        if grad is not None and grad.layout is not torch.strided:
            raise RuntimeError(
                f"ovpatch: a parameter of shape {tuple(grad.shape)} has a sparse gradient, and its module was not made "
                "with sparse=True when the model was wrapped. Set sparse=True in the module's constructor."
            )
        return grad

    def _target(self, i: int) -> Tensor:
        # Outside inference mode, or a first backward under it would leave tensors that autograd refuses later.
        with torch.inference_mode(False):
            if self._flat is None and self._small:
                self._flat = torch.zeros(self._flat_numel, dtype=self.dtype, device=self.device)
                for j, offset in zip(self._small, self._offsets, strict=True):
                    self._views[j] = self._flat.as_strided(self.params[j].shape, self._strides[j], offset)
            if i in self._views:
                return self._views[i]
            shape, strides = self.params[i].shape, self._strides[i]
            return torch.empty_strided(shape, strides, dtype=self._dtype(i), device=self.device)

    def _grad_in_place(self, i: int, given: Tensor | None) -> Tensor | None:
        """Return the gradient if it can be reduced in its own memory; see [Note: reduced in place]."""
        grad = self._grad(i)
        in_place = (
            grad is not None
            and type(grad) is Tensor
            and grad.dtype == self._dtype(i)
            and not grad.requires_grad
            and same_layout(grad, self._strides[i])
            and not (grad.is_conj() or grad.is_neg())
            and is_sole_owner(grad, given)
        )
        return grad if in_place else None


def _in_memory_order(piece: Tensor) -> Tensor:
    """Return a contiguous tensor with the same memory."""
    return piece if piece.is_contiguous() else piece.as_strided((piece.numel(),), (1,))


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
        self._piece: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that the collective is given by this rank; known once packed."""
        if self._piece is None:
            return 0
        indices, values = self._piece.indices(), self._piece.values()
        return indices.nbytes + values.nbytes

    def start(self, collectives: Collectives, pieces: list[Tensor]) -> Sequence[Work]:
        """Start the reduction of what :meth:`pack` or :meth:`zeros` has returned."""
        return collectives.all_reduce(pieces)

    def stage(self, index: int, divisor: int) -> None:
        """Copy the gradient now."""
        del index
        if self._piece is None:
            grad = self.params[0].grad
            with torch.no_grad():
                # Multiplying by 1/3 would not give the bits that stock DDP's division gives.
                self._piece = self._zero() if grad is None else (_sparse(grad) / divisor).coalesce()

    def pack(self, divisor: int, *, absent: Collection[int] = (), given: Tensor | None = None) -> list[Tensor]:
        """Return the gradient, divided."""
        del absent, given
        self.stage(self.indices[0], divisor)
        assert self._piece is not None
        return [self._piece]

    def unpack(self, *, skip: Collection[int] = ()) -> list[tuple[Tensor, Tensor]]:
        """Make ``p.grad`` the reduced gradient."""
        piece, self._piece = self._piece, None
        param = self.params[0]
        if piece is not None and self.indices[0] not in skip:
            with torch.no_grad():
                if param.grad is None:
                    param.grad = piece
                else:
                    param.grad.copy_(piece if param.grad.is_sparse else piece.to_dense())
        return []

    def zeros(self) -> list[Tensor]:
        """Return a gradient without entries."""
        return [self._zero()]

    def release(self) -> None:
        """Nothing is reduced in place."""

    def drop(self) -> None:
        """Forget what was packed."""
        self._piece = None

    def _zero(self) -> Tensor:
        return torch.zeros(self.params[0].shape, dtype=self.dtype, device=self.device).to_sparse(1)


def _sparse(grad: Tensor) -> Tensor:
    # A module may be told to be sparse and still give a dense gradient, for example where a tied weight is dense.
    return grad if grad.is_sparse else grad.to_sparse(1)
