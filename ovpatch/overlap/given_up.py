"""Gradients whose memory is given up before the backward that reduced them has ended.

Until then there is nothing to put them together from. Who reads one gets an error, and not what is there by chance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from ovpatch.overlap.placeholders import Placeholder, Source

_TOO_EARLY = (
    "ovpatch: the gradient of parameter '{}' was read, or added to, while a backward computes that has already reduced "
    "it and given its memory up. Read it after the backward, or set OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0."
)

_LOST = (
    "ovpatch: the gradient of parameter '{}' was reduced and given up by a backward that then failed. Drop such "
    "gradients, as optimizer.zero_grad() does, or set OVPATCH_DIST_OPTIMIZER_GRADS_IN_FLIGHT_MB=0."
)


class GivenUp:
    """Those of one model in the running backward.

    Args:
        names: The parameters' names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._indices: set[int] = set()

    def add(self, index: int) -> None:
        """Note that the gradient of a parameter has been given up."""
        self._indices.add(index)

    def remove(self, index: int) -> None:
        """Note that there are parts of it now."""
        self._indices.discard(index)

    def refuse(self, indices: Collection[int]) -> None:
        """Raise an error if one of those was given up.

        Raises:
            RuntimeError: It says which, and what to do.
        """
        for index in self._indices.intersection(indices):
            raise RuntimeError(_TOO_EARLY.format(self._names[index]))

    def lost(self) -> Iterator[tuple[int, Source]]:
        """Forget all, since the backward has failed; yield each with the source that its gradient has from now on."""
        while self._indices:
            index = self._indices.pop()
            yield index, _Lost(self._names[index])


class _Lost:
    def __init__(self, name: str) -> None:
        self._name = name

    def fetch(self, placeholders: Sequence[Placeholder], *, noticed: bool) -> list[Tensor]:
        """Say that there is nothing."""
        del placeholders, noticed
        raise RuntimeError(_LOST.format(self._name))
