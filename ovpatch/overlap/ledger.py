"""Which gradients of the running backward are complete.

A collective over a bucket may start only when every contribution to every parameter in it has been added. The autograd
hook of a parameter fires once per graph task, however often the weight is used in it, so one mark per parameter is the
rule. Work that adds to a gradient in several graph tasks (chunked experts, deferred weight gradients) declares how many
marks to expect and makes them itself; the parameter's hook then no longer counts.

Source: the readiness counting of Megatron-Core's bucket groups and MindSpeed's pipelined experts, whose learned or
global counts lose contributions when the number changes; here the number is declared and a surplus is an error.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Final, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class SurplusGradientError(RuntimeError):
    """A gradient contribution came after the parameter was complete. The text names it and ends with the remedy."""


_CHANGED = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then got "
    "used in the second iteration. this is not compatible with static_graph set to True.\novpatch: parameter '{}' got "
    "contribution {} ({}) where the first backward had {}; have every forward and loss use the same parameters as "
    "often as the first ones did, or leave static_graph=True out."
)

ANY: Final = sys.maxsize
"""Number of expected marks that is never reached: contributions are counted, nothing becomes complete."""


class Counter(Protocol):
    """Who counts contributions, with a ledger of its own."""

    def gradients_declared(self, index: int, marks: int) -> None:
        """Parameter ``index`` will be marked ``marks`` times; calls :meth:`GradLedger.declare`."""

    def gradient_marked(self, index: int, key: str) -> None:
        """Parameter ``index`` is marked; calls :meth:`GradLedger.marked`."""


class GradLedger:
    """Counts contributions per parameter within one backward.

    Args:
        params: The parameters, in the index order that all methods use.
        names: Their fully qualified names, for messages.
        owner: Told of declarations and marks. Held weakly: it normally holds the ledger, and buckets should be freed
            with their last user.
        remedy: What else helps against a second contribution; ends an error's text.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        owner: Counter,
        *,
        remedy: str = "turn the feature off with OVPATCH_DDP=0",
    ) -> None:
        self._names, self._remedy = names, remedy
        self._is_open = self._learned = False
        self._expected = [1] * len(params)
        self._seen = [0] * len(params)
        self._declared: set[int] = set()
        self._late: set[int] = set()
        reference = weakref.ref(owner)
        for index, param in enumerate(params):
            entries = _counters.setdefault(param, [])
            entries[:] = [entry for entry in entries if entry[0]() is not None]
            entries.append((reference, index))

    def open(self, expected: Sequence[int] | None = None) -> None:
        """Start a backward: nothing is complete.

        Args:
            expected: Number of marks per parameter, 1 each by default. :data:`ANY` only counts. Others are what the
                first backward of a static graph has shown.
        """
        self._is_open, self._learned = True, expected is not None
        self._expected = list(expected) if expected is not None else [1] * len(self._seen)
        self._seen = [0] * len(self._seen)
        self._declared.clear()
        self._late.clear()

    def close(self) -> None:
        """End the backward. Until the next is opened, nothing is counted, and nothing declared counts then."""
        self._late = set(self.overdue())
        self._is_open = False

    def declare(self, index: int, marks: int) -> None:
        """Expect ``marks`` explicit marks for this parameter in this backward, instead of the autograd hook's one.

        Who declares again, before the parameter is complete, adds to that.

        Raises:
            ValueError: There are to be no marks at all.
            SurplusGradientError: The parameter has had all declared contributions, or undeclared ones.
        """
        if marks < 1:
            raise ValueError(
                f"ovpatch: {marks} contributions were declared for parameter '{self._names[index]}'. Declare at least "
                "one, and mark it also where there is nothing to add."
            )
        self._late.discard(index)
        if not self._is_open:
            return
        before = self._expected[index] if index in self._declared else 0
        if self._seen[index] >= max(before, 1):
            raise self._surplus(index, "declared after the others", before + marks)
        self._declared.add(index)
        self._expected[index] = before + marks

    def hook_fired(self, index: int, *, adds: bool = True) -> bool:
        """Count a contribution seen by the parameter's autograd hook, unless its marks are declared.

        Args:
            index: The parameter.
            adds: Whether there was a gradient; a hook also fires for the None of a function that adds by itself.

        Returns:
            Whether the parameter is complete now.

        Raises:
            SurplusGradientError: The parameter was already complete.
        """
        if index not in self._declared:
            return self._count(index, "its autograd hook")
        if adds and self._seen[index] >= self._expected[index]:
            raise self._surplus(index, "its autograd hook", self._seen[index] + 1)
        return False

    def marked(self, index: int, key: str) -> bool:
        """Count a declared contribution, named ``key``; nothing is counted between backwards.

        Returns:
            Whether the parameter is complete now.

        Raises:
            SurplusGradientError: The parameter was already complete, or the backward is over.
        """
        if self._is_open:
            return self._count(index, key)
        if index in self._late:
            raise SurplusGradientError(
                f"ovpatch: a declared contribution to parameter '{self._names[index]}' ({key}) came after the "
                "backward, when the gradient had been reduced without it. Add and mark all contributions before "
                "backward() returns, or do not declare that one."
            )
        return False

    def _count(self, index: int, key: str) -> bool:
        seen = self._seen[index] = self._seen[index] + 1
        if seen > self._expected[index]:
            raise self._surplus(index, key, seen)
        return seen == self._expected[index]

    def _surplus(self, index: int, key: str, number: int) -> SurplusGradientError:
        expected = self._expected[index]
        if self._learned and index not in self._declared:
            return SurplusGradientError(_CHANGED.format(self._names[index], number, key, expected))
        text = (
            f"ovpatch: parameter '{self._names[index]}' got contribution {number} ({key}) in one backward where "
            f"{expected} {'were declared' if index in self._declared else 'was expected'}, after its gradient may have "
            "been reduced. "
        )
        if index in self._declared:
            return SurplusGradientError(
                f"{text}Declare all contributions before the first (expect_gradients) and mark each once; use a module "
                "that works in chunks once per forward, and its weights nowhere else, or turn that way of working off."
            )
        return SurplusGradientError(
            f"{text}Expected to mark a variable ready only once: this happens with reentrant activation "
            "checkpointing, or when contributions are not declared "
            f"before the first (expect_gradients). Use checkpoint(..., use_reentrant=False), or {self._remedy}."
        )

    def seen(self, index: int) -> int:
        """Return how many contributions the parameter has had in this backward."""
        return self._seen[index]

    def incomplete(self) -> list[int]:
        """Return the parameters that still lack a contribution."""
        return [i for i, (seen, want) in enumerate(zip(self._seen, self._expected, strict=True)) if seen < want]

    def overdue(self) -> list[int]:
        """Return those of them whose contributions were declared."""
        return sorted(i for i in self._declared if self._seen[i] < self._expected[i])

    def unforeseen(self) -> list[int]:
        """Return those of them whose contributions were not declared."""
        return [i for i in self.incomplete() if i not in self._declared]


# By the parameter's identity: a parameter may be in several models, of which the one whose backward runs counts.
_counters: MutableMapping[torch.Tensor, list[tuple[weakref.ref[Counter], int]]] = WeakTensorKeyDictionary()


def _find(param: torch.nn.Parameter) -> list[tuple[Counter, int]]:
    entries = _counters.get(param, ())
    return [(counter, index) for reference, index in entries if (counter := reference()) is not None]


def expect_gradients(param: torch.nn.Parameter, marks: int) -> bool:
    """Declare that ``param`` will be marked ``marks`` times in this backward.

    Called in that backward, where autograd calls the function that is going to add: in the graph task that is around
    all contributions, and before the first of them.

    Returns:
        Whether somebody counts this parameter's gradients; if not, nothing needs to be marked either.

    Raises:
        ValueError: ``marks`` is less than 1.
        SurplusGradientError: The gradient was complete already.
    """
    found = _find(param)
    for counter, index in found:
        counter.gradients_declared(index, marks)
    return bool(found)


def mark_gradient(param: torch.nn.Parameter, key: str) -> None:
    """Mark that the contribution ``key`` has been added to ``param.grad``; needs :func:`expect_gradients` before.

    A contribution that adds nothing, such as an empty chunk's, is marked as well.

    Raises:
        SurplusGradientError: All declared contributions had been marked.
    """
    for counter, index in _find(param):
        counter.gradient_marked(index, key)
