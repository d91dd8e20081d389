"""Grad readiness: the contributions to the gradients of one backward, and the complete buckets.

A bucket's collective may start only when every contribution to every parameter in it has been
added. The autograd hook of a parameter fires once per graph task, however often the task uses the
weight, so one contribution per parameter is the rule. Work that adds to a gradient in several
graph tasks (chunked modules, deferred weight gradients) declares the number of contributions
(:func:`expect_gradients`) and marks each (:func:`mark_gradient`). The hook of such a parameter
does not count.

Source: the readiness counting of Megatron-Core's bucket groups (``register_grad_ready``), whose
counts are learned.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import Parameter

from ovpatch.overlap.comm.lifetimes import find_param_record, param_record
from ovpatch.overlap.comm.streams import ProducerStreams
from ovpatch.overlap.data_parallel.backward_plan import BackwardPlan, Expected

if TYPE_CHECKING:
    from ovpatch.overlap.data_parallel.grad_reducer import GradReducer

#: A number of expected contributions that no backward reaches.
_UNREACHABLE: Final = sys.maxsize

#: The name of the contribution that a parameter's autograd hook counts.
HOOK: Final = "its autograd hook"

_ERROR_GRAPH_CHANGED: Final = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
    "iteration, but then got used in the second iteration. this is not compatible with "
    "static_graph set to True.\novpatch: parameter '{}' got contribution {} ({}) where the first "
    "backward had {}. Have every forward and loss use the same parameters as often as the first "
    "ones did, or leave static_graph=True out."
)

_ERROR_SURPLUS_DECLARED: Final = (
    "ovpatch: parameter '{}' got contribution {} ({}) in one backward where {} were declared, "
    "after "
    "its gradient may have been reduced. Declare all contributions before the first "
    "(expect_gradients) and mark each once; use a module that works in chunks once per forward, "
    "and its weights nowhere else, or turn that way of working off."
)

_ERROR_SURPLUS_HOOK: Final = (
    "ovpatch: parameter '{}' got contribution {} ({}) in one backward where {} was expected, after "
    "its gradient may have been reduced. Expected to mark a variable ready only once: this happens "
    "with reentrant activation checkpointing, or when contributions are not declared before the "
    "first (expect_gradients). Use checkpoint(..., use_reentrant=False), or {}."
)


class SurplusGradientError(RuntimeError):
    """A contribution that came after the gradient was complete."""


def register_reducer(params: Sequence[Parameter], reducer: GradReducer) -> None:
    """Have :func:`expect_gradients` and :func:`mark_gradient` reach a reducer, held weakly."""
    reference = weakref.ref(reducer)
    for index, param in enumerate(params):
        reducers = param_record(param).reducers
        reducers[:] = [known for known in reducers if known[0]() not in (None, reducer)]
        reducers.append((reference, index))


def _find_reducers(param: Parameter) -> list[tuple[GradReducer, int]]:
    state = find_param_record(param)
    known = () if state is None else state.reducers
    return [(reducer, index) for reference, index in known if (reducer := reference()) is not None]


def expect_gradients(param: Parameter, count: int) -> bool:
    """Announce that ``param`` will be marked ``count`` times in this backward.

    Call this in that backward, in the graph task that encloses all contributions, before the first
    of them. A second call adds to the first.

    Returns:
        Whether a reducer counts this parameter's gradients; if not, nothing needs to be marked.

    Raises:
        ValueError: ``count`` is less than 1.
        SurplusGradientError: The gradient was complete already.
    """
    found = _find_reducers(param)
    for reducer, index in found:
        reducer.expect_contributions(index, count)
    return bool(found)


def mark_gradient(param: Parameter, key: str) -> None:
    """Mark that the contribution ``key`` has been added to ``param.grad``.

    :func:`expect_gradients` must come before. Mark a contribution that adds nothing as well, such
    as that of an empty chunk. Contributions that are not marked by the end of the backward are
    reduced then.

    Raises:
        SurplusGradientError: All expected contributions had been marked.
    """
    for reducer, index in _find_reducers(param):
        reducer.mark_contribution(index, key)


class GradReadiness:
    """Counts the contributions to the gradients of one backward, and knows which bucket is ready.

    Lists go by the parameter's index, unless they go by bucket.

    Args:
        params: The parameters.
        layout: The indices of the parameters of each bucket; each parameter is in one bucket.
        names: The parameters' fully qualified names, for messages.
        remedy: Another remedy for a second contribution, as the end of an imperative.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        layout: Sequence[Sequence[int]],
        *,
        names: Sequence[str] = (),
        remedy: str = "turn the feature off with OVPATCH_DDP=0",
    ) -> None:
        self._names = names
        self._remedy = remedy
        # - Layout
        # The bucket of each parameter.
        self.bucket_of = [0] * len(params)
        for bucket, indices in enumerate(layout):
            for index in indices:
                self.bucket_of[index] = bucket
        self._bucket_sizes = [len(indices) for indices in layout]
        # The device of each parameter that is on CUDA.
        self.cuda_devices = {i: p.device.index for i, p in enumerate(params) if p.is_cuda}
        # - The running backward
        # False between backwards, when contributions are local and nothing is counted.
        self.is_open = False
        # True while each parameter gets one contribution and nothing else has to be done for it.
        # `GradReducer.on_grad_accumulated` then counts in the lists below itself, because a call
        # for each gradient of each backward costs host time.
        self.is_simple = False
        # How many contributions each parameter has had, and how many it gets.
        self.seen = [0] * len(params)
        self.expected = [1] * len(params)
        # Whether the first backward of a static graph has shown the expected numbers.
        self._is_learned = False
        # Parameters whose contributions are marked, and not counted by their hooks.
        self._marked: set[int] = set()
        # Parameters that the bucket does not wait for, because this backward adds nothing to them.
        self.absent: set[int] = set()
        # By bucket, how many gradients are incomplete.
        self.lacking = list(self._bucket_sizes)
        # The streams on which gradients were computed, and the newest one by device.
        self.producers = ProducerStreams()
        self.newest_streams: dict[int, int] = {}

    def begin(self, plan: BackwardPlan, learned: Sequence[int] = ()) -> None:
        """Begin a backward: no gradient is complete.

        Args:
            plan: The plan of the backward.
            learned: How often the first backward of a static graph added to each parameter.
        """
        count = len(self.seen)
        self.is_open = True
        self._is_learned = plan.expected is Expected.LEARNED
        self.is_simple = plan.only_counts and plan.expected is Expected.SINGLE
        self.seen = [0] * count
        if self._is_learned:
            self.expected = list(learned)
        else:
            self.expected = [1 if plan.expected is Expected.SINGLE else _UNREACHABLE] * count
        self._marked = set()
        self.absent = set()
        self.lacking = list(self._bucket_sizes)
        if self.cuda_devices:
            self.producers.clear()
            self.newest_streams.clear()
        if self._is_learned:
            self.skip_unused(learned)

    def end(self) -> None:
        """Count nothing until the next backward."""
        self.is_open = False
        self.is_simple = False

    def skip(self, index: int) -> None:
        """Do not wait for a parameter, because this backward adds nothing to its gradient."""
        if index not in self.absent:
            self.is_simple = False
            self.absent.add(index)
            self.lacking[self.bucket_of[index]] -= 1

    def skip_unused(self, counts: Sequence[int]) -> None:
        """Do not wait for the parameters whose count is 0."""
        for index, count in enumerate(counts):
            if count == 0:
                self.skip(index)

    def expect_marks(self, index: int, count: int) -> None:
        """Wait for ``count`` more marked contributions to a parameter.

        Raises:
            ValueError: ``count`` is less than 1.
            SurplusGradientError: The parameter has had all contributions.
        """
        if count < 1:
            raise ValueError(
                f"ovpatch: {count} contributions were declared for parameter "
                f"'{self._names[index]}'. Declare at least one, and mark it also if there is "
                "nothing to add."
            )
        if not self.is_open:
            return
        before = self.expected[index] if index in self._marked else 0
        if self.seen[index] >= max(before, 1):
            raise self._make_surplus_error(
                index, "declared after other contributions", before + count
            )
        self.is_simple = False
        self._marked.add(index)
        self.expected[index] = before + count
        if index in self.absent:
            self.absent.discard(index)
            self.lacking[self.bucket_of[index]] += 1

    def count(self, index: int, key: str = HOOK, *, adds: bool = True) -> bool:
        """Count a contribution to a gradient, on the stream that is current.

        Args:
            index: The parameter.
            key: Name of the contribution, for messages.
            adds: Whether there was a gradient. A hook also fires for the None of a function that
                adds by itself.

        Returns:
            Whether the gradient is complete now.

        Raises:
            SurplusGradientError: The gradient was complete already.
        """
        if not self.is_open:
            return False
        if index in self.cuda_devices:
            self.record_stream(self.cuda_devices[index])
        if key is HOOK and index in self._marked:
            if adds and self.seen[index] >= self.expected[index]:
                raise self._make_surplus_error(index, key, self.seen[index] + 1)
            return False
        seen = self.seen[index] = self.seen[index] + 1
        if seen > self.expected[index]:
            raise self._make_surplus_error(index, key, seen)
        if seen < self.expected[index]:
            return False
        # The bucket of an absent parameter does not wait for it.
        if index in self.absent:
            self.absent.discard(index)
        else:
            self.lacking[self.bucket_of[index]] -= 1
        return True

    def record_stream(self, device: int) -> None:
        """Record that the current stream of a CUDA device has computed a gradient."""
        self.producers.record_current(device)
        self.newest_streams[device] = torch._C._cuda_getCurrentRawStream(device)

    def list_missing(self) -> list[int]:
        """Return the parameters that lack a contribution.

        Parameters whose contributions are marked are left out: what lacks a mark is reduced at the
        end of the backward.
        """
        if self.seen == self.expected:
            return []
        pairs = enumerate(zip(self.seen, self.expected, strict=True))
        return [
            index
            for index, (seen, expected) in pairs
            if seen < expected and index not in self._marked
        ]

    def _make_surplus_error(self, index: int, key: str, number: int) -> SurplusGradientError:
        expected = self.expected[index]
        name = self._names[index]
        if index in self._marked:
            text = _ERROR_SURPLUS_DECLARED.format(name, number, key, expected)
        elif self._is_learned:
            text = _ERROR_GRAPH_CHANGED.format(name, number, key, expected)
        else:
            text = _ERROR_SURPLUS_HOOK.format(name, number, key, expected, self._remedy)
        return SurplusGradientError(text)
