"""Which gradients of the running backward are complete.

A collective over a bucket may start only when every contribution to every parameter in it has been added. The autograd
hook of a parameter fires once per graph task, however often the weight is used in it, so one mark per parameter is the
rule. Work that adds to a gradient in several graph tasks (chunked experts, deferred weight gradients) declares how many
marks to expect and makes them itself; the parameter's hook then no longer counts.

Source: the readiness counting of Megatron-Core's bucket groups and MindSpeed's pipelined experts, whose learned or
global counts lose contributions when the number changes; here the number is declared and a surplus is an error.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch


class SurplusGradientError(RuntimeError):
    """A gradient contribution came after the parameter was complete. The text names it and ends with the remedy."""


ANY: Final = sys.maxsize
"""Number of expected marks that is never reached: contributions are counted, nothing becomes complete."""


class GradLedger:
    """Counts contributions per parameter within one backward.

    Args:
        params: The parameters, in the index order that all methods use.
        names: Their fully qualified names, for messages.
        on_complete: Method called with a parameter's index when its last declared contribution is marked.
            Held weakly: its owner normally holds the ledger, and buckets should be freed with their last user.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], names: Sequence[str], on_complete: Callable[[int], None]
    ) -> None:
        self._names = names
        self._on_complete = weakref.WeakMethod(on_complete)
        self._expected = [1] * len(params)
        self._seen = [0] * len(params)
        self._declared: set[int] = set()
        for index, param in enumerate(params):
            forget = functools.partial(_forget, id(param))
            _ledgers[id(param)] = (weakref.ref(param, forget), weakref.ref(self), index)

    def open(self, expected: Sequence[int] | None = None) -> None:
        """Start a backward: nothing is complete.

        Args:
            expected: Number of marks per parameter, 1 each by default. :data:`ANY` only counts.
        """
        self._expected = list(expected) if expected is not None else [1] * len(self._seen)
        self._seen = [0] * len(self._seen)
        self._declared.clear()

    def close(self) -> None:
        """End the backward; declarations do not outlive it."""
        self._declared.clear()

    def declare(self, index: int, marks: int) -> None:
        """Expect ``marks`` explicit marks for this parameter in this backward, instead of the autograd hook's one."""
        self._declared.add(index)
        self._expected[index] = marks

    def hook_fired(self, index: int) -> bool:
        """Count a contribution seen by the parameter's autograd hook, unless its marks are declared.

        Returns:
            Whether the parameter is complete now; its owner is the caller, so it is not called back.

        Raises:
            SurplusGradientError: The parameter was already complete.
        """
        return index not in self._declared and self._count(index, "its autograd hook")

    def mark(self, index: int, key: str) -> None:
        """Mark one declared contribution, named ``key``.

        Raises:
            SurplusGradientError: The parameter was already complete.
        """
        on_complete = self._on_complete()
        if self._count(index, key) and on_complete is not None:
            on_complete(index)

    def _count(self, index: int, key: str) -> bool:
        seen = self._seen[index] = self._seen[index] + 1
        if seen > self._expected[index]:
            raise SurplusGradientError(
                f"ovpatch: parameter '{self._names[index]}' got contribution {seen} ({key}) in one "
                f"backward where {self._expected[index]} was expected, after its gradient may have been reduced. "
                "Expected to mark a variable ready only once: this happens with reentrant activation checkpointing, "
                "or when the graph changes under static_graph=True. Use checkpoint(..., use_reentrant=False), or "
                "turn the feature off with OVPATCH_DDP=0."
            )
        return seen == self._expected[index]

    def seen(self, index: int) -> int:
        """Return how many contributions the parameter has had in this backward."""
        return self._seen[index]

    def incomplete(self) -> list[int]:
        """Return the parameters that still lack a contribution."""
        return [i for i, (seen, want) in enumerate(zip(self._seen, self._expected, strict=True)) if seen < want]


_ledgers: dict[int, tuple[weakref.ref[torch.nn.Parameter], weakref.ref[GradLedger], int]] = {}


def _forget(key: int, _dead: object) -> None:
    _ledgers.pop(key, None)


def _find(param: torch.nn.Parameter) -> tuple[GradLedger, int] | None:
    entry = _ledgers.get(id(param))
    if entry is None or entry[0]() is not param:
        return None
    ledger = entry[1]()
    return None if ledger is None else (ledger, entry[2])


def expect_gradients(param: torch.nn.Parameter, marks: int) -> bool:
    """Declare that ``param`` will be marked ``marks`` times in this backward.

    Returns:
        Whether somebody counts this parameter's gradients; if not, nothing needs to be marked either.
    """
    found = _find(param)
    if found is not None:
        found[0].declare(found[1], marks)
    return found is not None


def mark_gradient(param: torch.nn.Parameter, key: str) -> None:
    """Mark that the contribution ``key`` has been added to ``param.grad``; needs :func:`expect_gradients` before."""
    found = _find(param)
    if found is not None:
        found[0].mark(found[1], key)
