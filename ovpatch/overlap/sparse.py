"""Sparse gradients, which no two ranks have in the same places: each is summed by a collective of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ovpatch.overlap.collectives import Collectives
from ovpatch.overlap.works import Work


class SparseBucket:
    """The gradient of one parameter whose module makes sparse gradients; used like a :class:`GradBucket`.

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
