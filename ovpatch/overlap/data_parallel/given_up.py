"""Gradients whose memory is given up before the backward that reduced them has ended.

Until then there is nothing to put them together from. Who reads one gets an error, and not what is there by chance.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from ovpatch.overlap.tensors.lazy_tensor import LazyTensor

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


class FreedGrads:
    """Those of one model in the running backward.

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
