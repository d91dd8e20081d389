"""Flat gradient buckets: many gradients in one tensor, so that one collective reduces them.

[Note: whose memory is p.grad] Stock DDP copies gradients into a bucket, reduces it and copies the result back; with
``gradient_as_bucket_view`` it saves the copy back and half of the memory, but a tensor that the user kept from an
earlier step is then overwritten by the next. Here ``p.grad`` becomes a view of the bucket only where nobody can tell:
the gradient it replaces is owned by the parameter alone (no other Python reference, not a view, storage not shared).
Otherwise, and for small gradients, whose memory is not worth the look, the reduced values are copied back into the
tensor that is there. For the same reason a bucket's memory
is used again only while nobody holds a part of it but the parameters, which are given aliases of the bucket's own views
so that counting the tensors on the memory tells; if somebody does, the bucket moves to new memory.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Gradients below this number of elements are copied in and out by one fused call for all of them: a launch for each,
# and the host's time to arrange it, would cost more than the passes over memory.
# On a GPU a launch takes as long as several hundred kilobytes more of traffic.
_SMALL = {"cuda": 1 << 18, "cpu": 1 << 15}

_CUDA_ALIGNMENT = 16  # bytes

# The fused kernels round the factor to the tensors' dtype on some devices, where plain multiplication does not.
_FUSED_DTYPES = (torch.float32, torch.float64)


class GradBucket:
    """Gradients of some parameters, of one dtype on one device, in one flat tensor.

    Args:
        indices: Index of each parameter in the order of the whole model.
        params: The parameters, in the same order.
    """

    def __init__(self, indices: Sequence[int], params: Sequence[torch.nn.Parameter]) -> None:
        self.indices = tuple(indices)
        self.params = tuple(params)
        self.offsets, self.numel = _offsets(params)
        self.dtype = params[0].dtype
        self.device = params[0].device
        limit = _SMALL.get(self.device.type, 0) if self.dtype in _FUSED_DTYPES else 0
        self._small = [param.numel() < limit for param in params]
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._own_references = 0
        self._kept: dict[int, Tensor | None] = {}

    @property
    def nbytes(self) -> int:
        """Size of the flat tensor, in bytes."""
        return self.numel * self.dtype.itemsize

    def pack(self, divisor: int, *, absent: Iterable[int] = (), always_view: bool) -> Tensor:
        """Copy the gradients into the flat tensor, divided by ``divisor``; a missing gradient counts as zero.

        Args:
            divisor: What the sum over ranks is to be divided by; dividing first keeps half precision in range.
            absent: Parameters, by index in the whole model, to which this backward adds nothing. If no other rank
                adds anything either, they get back the gradient that they have now.
            always_view: Use the bucket's memory again even if somebody holds a part of it, as
                ``gradient_as_bucket_view=True`` promises.

        Returns:
            The flat tensor, shape ``[numel]``, ready for the collective.
        """
        flat = self._memory(always_view)
        scale = 1.0 / divisor
        self._keep(set(absent))
        views: list[Tensor] = []
        grads: list[Tensor] = []
        with torch.no_grad():
            for param, view, small in zip(self.params, self._views, self._small, strict=True):
                grad = param.grad
                if grad is None:
                    view.zero_()
                elif small and not always_view:
                    views.append(view)
                    grads.append(grad)
                elif _is_alias(grad, view):
                    # Stock divides where it reduces in place; for world sizes that are no power of two the bits differ.
                    view.div_(divisor) if always_view else view.mul_(scale)
                else:
                    torch.mul(grad, scale, out=view)
            if len(views) == 1:
                torch.mul(grads[0], scale, out=views[0])
            elif views:
                torch._foreach_copy_(views, grads)
                torch._foreach_mul_(views, scale)
        return flat

    def adopt(self, *, always_view: bool) -> None:
        """Let ``p.grad`` be the bucket's view wherever nobody can tell, which frees the gradient it replaces.

        The values may still be in flight; see [Note: whose memory is p.grad].
        """
        for i in range(len(self.params)):
            if i not in self._kept:
                self._adopt(i, always_view)

    def unpack(self, *, skip: Iterable[int] = (), always_view: bool) -> None:
        """Make ``p.grad`` the reduced gradient of every parameter. The collective has been waited for.

        Args:
            skip: Parameters, by index in the whole model, that no rank used: their ``grad`` stays what it was.
            always_view: As for :meth:`pack`.
        """
        untouched = set(skip)
        views: list[Tensor] = []
        grads: list[Tensor] = []
        # All of them, adopted ones too: a user's hook may have replaced or dropped a gradient since.
        for i, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            if self.indices[i] in untouched:
                self._restore(i)
            elif param.grad is None:
                param.grad = view.detach()
            elif not self._adopt(i, always_view):
                views.append(view)
                grads.append(param.grad)
        if grads:
            with torch.no_grad():
                torch._foreach_copy_(grads, views)
        self._kept = {}

    def carry_over(self) -> None:
        """Move the gradients that exist now into the bucket; ``p.grad`` becomes its view."""
        if all(param.grad is None for param in self.params):
            return
        self._memory(always_view=True)
        for param, view in zip(self.params, self._views, strict=True):
            if param.grad is not None and not param.grad.requires_grad:
                param.grad = view.copy_(param.grad).detach()

    def zeros_like(self) -> Tensor:
        """Return a zero tensor that can stand in for the flat tensor in a collective."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def _keep(self, absent: set[int]) -> None:
        """Save the gradients of absent parameters; those that are views of the bucket would be overwritten."""
        self._kept = {}
        for i, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            if self.indices[i] in absent:
                self._kept[i] = view.clone() if _is_alias(param.grad, view) else None

    def _restore(self, i: int) -> None:
        kept = self._kept.get(i)
        if kept is not None:
            with torch.no_grad():
                self._views[i].copy_(kept)

    def _adopt(self, i: int, always_view: bool) -> bool:
        if self._small[i] and not always_view:
            return False
        param, view = self.params[i], self._views[i]
        grad = param.grad
        if _is_alias(grad, view):
            return True
        if grad is None or grad.requires_grad or not (always_view or (_is_sole(grad) and _same_layout(grad, view))):
            return False
        param.grad = view.detach()
        return True

    def _memory(self, always_view: bool) -> Tensor:
        if self._flat is None or not (always_view or self._is_free(self._flat)):
            # Outside inference mode, or a first backward under it would leave tensors that autograd refuses later.
            with torch.inference_mode(False):
                self._flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
                self._views = _views(self._flat, self.params, self.offsets)
            self._own_references = _storage_references(self._flat)
        return self._flat

    def _is_free(self, flat: Tensor) -> bool:
        given = sum(_is_alias(param.grad, view) for param, view in zip(self.params, self._views, strict=True))
        return _storage_references(flat) == self._own_references + given


def _is_alias(grad: Tensor | None, view: Tensor) -> bool:
    """Tell whether ``grad`` is what was made of ``view`` by ``detach()``. An empty tensor has no memory to share."""
    return grad is not None and grad.data_ptr() == view.data_ptr() != 0 and grad.stride() == view.stride()


def _offsets(params: Sequence[torch.nn.Parameter]) -> tuple[list[int], int]:
    """Return where each gradient begins in the flat tensor, and the flat tensor's size, in elements.

    On CUDA gradients begin at 16 bytes as tensors of their own do, or fused optimizers and norms leave their vectorised
    path. Elsewhere, and wherever sizes are multiples of that anyway, the layout is stock DDP's.
    """
    step = max(1, _CUDA_ALIGNMENT // params[0].dtype.itemsize) if params[0].is_cuda else 1
    offsets, offset = [], 0
    for param in params:
        offsets.append(offset)
        offset += -(-param.numel() // step) * step
    return offsets, offset


def _views(flat: Tensor, params: Sequence[torch.nn.Parameter], offsets: Sequence[int]) -> list[Tensor]:
    """Cut ``flat`` into one view per parameter, with the parameter's strides where they leave no holes."""
    views = []
    for param, offset in zip(params, offsets, strict=True):
        strides = param.stride() if _is_dense(param) else _contiguous_strides(param.shape)
        views.append(flat.as_strided(param.shape, strides, offset))
    return views


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether the tensor fills its memory range exactly once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= max(shape[i], 1)
    return strides


def _storage_references(tensor: Tensor) -> int:
    """Count the tensors and Python's storage objects that share this one's memory, plus a constant."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def _python_references(tensor: Tensor) -> int:
    return sys.getrefcount(tensor)


def _handles(tensor: Tensor) -> int:
    """Count the owners of the tensor itself; a DLPack capsule is one that neither Python nor the memory counts."""
    count: int = tensor._use_count() if hasattr(tensor, "_use_count") else 0
    return count


def _same_layout(grad: Tensor, view: Tensor) -> bool:
    return all(
        size == 1 or mine == theirs
        for size, mine, theirs in zip(grad.shape, grad.stride(), view.stride(), strict=True)
    )


@functools.cache
def _sole_counts() -> tuple[int, int, int]:
    """Return the counts for a gradient that its parameter alone owns.

    Measured, because what Python and torch count for themselves differs between their versions.
    """
    with torch.inference_mode(False), torch.no_grad():
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.zeros(1)
        grad = param.grad
        return _python_references(grad), _storage_references(grad), _handles(grad)


def _is_sole(grad: Tensor) -> bool:
    """Tell whether nobody but its parameter knows this gradient or its memory, as far as that can be told."""
    python, storage, handles = _sole_counts()
    if type(grad) is not Tensor or grad._is_view() or weakref.getweakrefcount(grad) or vars(grad):
        return False
    # One more than measured there: this function's own caller holds the gradient, too.
    if _python_references(grad) != python + 1 or _storage_references(grad) != storage or _handles(grad) != handles:
        return False
    memory = grad.untyped_storage()
    # Memory that came from NumPy, DLPack or a file cannot be resized; every CUDA memory calls itself shared.
    return memory.resizable() and (memory.device.type == "cuda" or not memory.is_shared())
