"""Grad sync: which gradients of a backward are complete, and the collectives that reduce them.

A bucket's collective may start only when every contribution to every parameter in it has been added. The autograd hook
of a parameter fires once per graph task, however often the weight is used in it, so one contribution per parameter is
the rule. Work that adds to a gradient in several graph tasks (chunked modules, deferred weight gradients) declares how
many contributions to expect (:func:`expect_gradients`) and marks each (:func:`mark_gradient`); the hook then does not
count.

Source: the readiness counting of Megatron-Core's bucket groups (``register_grad_ready``), whose counts are learned.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import Collectives, Work, WorkWithEpilogue
from ovpatch.overlap.comm.lifetimes import find_param_record, param_record
from ovpatch.overlap.comm.streams import ProducerStreams, profiler_label, profiler_span
from ovpatch.overlap.data_parallel.grad_bucket import Bucket, GradBucket, get_grad


class SurplusGradientError(RuntimeError):
    """A gradient contribution came after the parameter was complete. The text names it and ends with the remedy."""


_CHANGED = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then got "
    "used in the second iteration. this is not compatible with static_graph set to True.\novpatch: parameter '{}' got "
    "contribution {} ({}) where the first backward had {}; have every forward and loss use the same parameters as "
    "often as the first ones did, or leave static_graph=True out."
)

ANY: Final = sys.maxsize
"""Number of expected contributions that is never reached: they are counted, and no parameter becomes complete."""

HOOK: Final = "its autograd hook"
"""Name of a contribution that the parameter's hook has seen."""


class ExpectingReducer(Protocol):
    """A reducer that is told how many contributions to expect."""

    def expect_contributions(self, index: int, count: int) -> None:
        """Parameter ``index`` gets ``count`` contributions that are marked, in the running backward."""

    def mark_contribution(self, index: int, key: str) -> None:
        """The contribution ``key`` has been added to ``grad`` of parameter ``index``."""


def register_reducer(params: Sequence[torch.nn.Parameter], reducer: ExpectingReducer) -> None:
    """Have :func:`expect_gradients` and :func:`mark_gradient` reach a reducer, which is held weakly."""
    reference = weakref.ref(reducer)
    for index, param in enumerate(params):
        entries = param_record(param).reducers
        entries[:] = [entry for entry in entries if entry[0]() not in (None, reducer)]
        entries.append((reference, index))


def _find(param: torch.nn.Parameter) -> list[tuple[ExpectingReducer, int]]:
    state = find_param_record(param)
    entries = () if state is None else state.reducers
    return [(reducer, index) for reference, index in entries if (reducer := reference()) is not None]


def expect_gradients(param: torch.nn.Parameter, count: int) -> bool:
    """Announce that ``param`` will be marked ``count`` times in this backward.

    Called in that backward, in the graph task that is around all contributions, and before the first of them. A second
    call adds to the first.

    Returns:
        Whether a reducer counts this parameter's gradients; if not, nothing needs to be marked.

    Raises:
        ValueError: ``count`` is less than 1.
        SurplusGradientError: The gradient was complete already.
    """
    found = _find(param)
    for reducer, index in found:
        reducer.expect_contributions(index, count)
    return bool(found)


def mark_gradient(param: torch.nn.Parameter, key: str) -> None:
    """Mark that the contribution ``key`` has been added to ``param.grad``; needs :func:`expect_gradients` before.

    A contribution that adds nothing, such as an empty chunk's, is marked as well. What is not marked by the end of the
    backward is reduced then.

    Raises:
        SurplusGradientError: All expected contributions had been marked.
    """
    for reducer, index in _find(param):
        reducer.mark_contribution(index, key)


class GradSync:
    """Reduces a fixed sequence of buckets, once per backward.

    [Note: one order] Buckets are started strictly in index order, on every rank. A collective that starts out of turn,
    because its gradients happened to be complete first, pairs with another one on a rank where they were not.

    [Note: gradients in flight] After a reduce-scatter only the local shard is needed, so full gradients are freed
    during backward. When more than ``max_inflight_bytes`` are under reduction, the compute stream waits for the oldest
    bucket, never for the newest. On a device the host goes on; where the limit leaves room for some milliseconds of
    traffic, there is hardly anything to wait for unless communication takes longest.

    Args:
        buckets: What to reduce, in this order.
        group: The process group.
        feature: Name for labels.
        names: The parameters' fully qualified names, for messages.
        remedy: What else helps against a second contribution; ends an error's text.
        average: Let the collective divide by the number of ranks; otherwise gradients are divided before it.
        skip_absent: Start nothing for buckets to which this backward adds nothing. Right only if all ranks do so.
        max_inflight_bytes: How many bytes may be under reduction that can be freed afterwards.
        before_first: Called once a backward, before its first collective.
        before_wait: Called before a stream, or the host, waits for collectives.

    Attributes:
        absent: Parameters that are not waited for, because this backward adds nothing to them.
        has_ready_bucket: Whether all gradients of the next bucket are complete.
        launched: How many buckets were started or skipped in this backward.
        reduced: How many were started with this rank's gradients.
        reduced_early: How many of these were started while gradients were still to come.
        nbytes: How many bytes they hold.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        *,
        feature: str,
        names: Sequence[str] = (),
        remedy: str = "turn the feature off with OVPATCH_DDP=0",
        average: bool = False,
        skip_absent: bool = False,
        max_inflight_bytes: float = math.inf,
        before_first: Callable[[], None] | None = None,
        before_wait: Callable[[], None] | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self._names, self._remedy = names, remedy
        self._skip_absent, self._limit = skip_absent, max_inflight_bytes
        self._before_first, self._before_wait = before_first, before_wait
        self._divisor = 1 if average else group.size()
        self._bucket_of = {index: b for b, bucket in enumerate(buckets) for index in bucket.indices}
        self._labels = [profiler_label(feature, "all_reduce", f"bucket {b}") for b in range(len(buckets))]
        self._sizes = [len(bucket.indices) for bucket in buckets]
        self._producers = ProducerStreams()
        self._cuda = {i: b.device.index for b in buckets for i in b.indices if b.device.type == "cuda"}
        self._collectives = {b.device: Collectives(group, b.device, average=average) for b in buckets}
        self._count = 1 + max(self._bucket_of, default=-1)
        self.start_backward()
        self.end_backward()

    def start_backward(self, expected: Sequence[int] | None = None) -> None:
        """Begin a backward: no gradient is complete, and every parameter is waited for.

        Args:
            expected: Number of contributions per parameter, 1 each by default; :data:`ANY` only counts. A parameter for
                which it is 0 is not waited for. Others are what the first backward of a static graph has shown.
        """
        self.is_open, self._is_learned = True, expected is not None
        self._expected = list(expected) if expected is not None else [1] * self._count
        self._seen = [0] * self._count
        self._marked: set[int] = set()  # parameters whose contributions are marked, and not counted by their hooks
        self.absent: set[int] = set()
        self.launched = self.reduced = self.reduced_early = self.nbytes = 0
        self._is_started = self._is_ended = False
        self._expects_one_each = expected is None  # and no parameter is left out
        self._waiting, self.has_ready_bucket = list(self._sizes), False
        self._works: list[Work] = []
        self._staged: set[int] = set()
        self._in_flight: deque[tuple[GradBucket, Sequence[Work]]] = deque()
        self._inflight_bytes = 0
        if self._cuda:
            self._producers.clear()
        if expected is not None:
            self.skip_unused(expected)

    # ---------------------------------------------------------------- contributions

    def skip_param(self, index: int) -> None:
        """Do not wait for a parameter: this backward adds nothing to its gradient."""
        if index not in self.absent:
            self._expects_one_each = False
            self.absent.add(index)
            self._waiting[self._bucket_of[index]] -= 1

    def skip_unused(self, counts: Sequence[int]) -> None:
        """Do not wait for the parameters whose count is 0."""
        for index, count in enumerate(counts):
            if count == 0:
                self.skip_param(index)

    def expect_marks(self, index: int, count: int) -> bool:
        """Wait for ``count`` marked contributions to a parameter, besides those that are expected already.

        Returns:
            Whether that is in time: the parameter's bucket has not been started.

        Raises:
            ValueError: ``count`` is less than 1.
            SurplusGradientError: The parameter has had all contributions.
        """
        if count < 1:
            raise ValueError(
                f"ovpatch: {count} contributions were declared for parameter '{self._names[index]}'. Declare at least "
                "one, and mark it also where there is nothing to add."
            )
        if not self.is_open:
            return True
        before = self._expected[index] if index in self._marked else 0
        if self._seen[index] >= max(before, 1):
            raise self._surplus(index, "declared after the others", before + count)
        self._expects_one_each = False
        self._marked.add(index)
        self._expected[index] = before + count
        bucket = self._bucket_of[index]
        if index in self.absent:
            self.absent.discard(index)
            self._waiting[bucket] += 1
        return bucket >= self.launched

    def count_once(self, index: int) -> int | None:
        """Count the only contribution to a gradient, which is complete then: :meth:`count_grad` in the usual case.

        Returns:
            How many gradients its bucket lacks; None, and nothing is counted, where it is not the usual case.
        """
        if self._seen[index] or not self._expects_one_each:
            return None
        if index in self._cuda:
            self._producers.record_current(self._cuda[index])
        self._seen[index], bucket = 1, self._bucket_of[index]
        missing = self._waiting[bucket] = self._waiting[bucket] - 1
        return missing

    def count_grad(self, index: int, key: str = HOOK, *, adds: bool = True) -> bool:
        """Count a contribution to a gradient, on the stream that is current.

        Args:
            index: The parameter.
            key: Name of the contribution, for messages.
            adds: Whether there was a gradient. A hook also fires for the None of a function that adds by itself.

        Returns:
            Whether the gradient is complete now.

        Raises:
            SurplusGradientError: The parameter was already complete.
        """
        if not self.is_open:
            return False
        if index in self._cuda:
            self._producers.record_current(self._cuda[index])
        if key is HOOK and index in self._marked:
            if adds and self._seen[index] >= self._expected[index]:
                raise self._surplus(index, key, self._seen[index] + 1)
            return False
        seen = self._seen[index] = self._seen[index] + 1
        if seen > self._expected[index]:
            raise self._surplus(index, key, seen)
        return seen == self._expected[index]

    def get_counts(self) -> list[int]:
        """Return how many contributions each parameter has had in this backward."""
        return list(self._seen)

    def missing_params(self) -> list[int]:
        """Return the parameters that lack a contribution, but for those whose contributions are marked."""
        if self._seen == self._expected:
            return []
        pairs = enumerate(zip(self._seen, self._expected, strict=True))
        return [i for i, (seen, expected) in pairs if seen < expected and i not in self._marked]

    def _surplus(self, index: int, key: str, number: int) -> SurplusGradientError:
        expected, name = self._expected[index], self._names[index]
        if self._is_learned and index not in self._marked:
            return SurplusGradientError(_CHANGED.format(name, number, key, expected))
        text = (
            f"ovpatch: parameter '{name}' got contribution {number} ({key}) in one backward where {expected} "
            f"{'were declared' if index in self._marked else 'was expected'}, after its gradient may have been "
            "reduced. "
        )
        if index in self._marked:
            return SurplusGradientError(
                f"{text}Declare all contributions before the first (expect_gradients) and mark each once; use a module "
                "that works in chunks once per forward, and its weights nowhere else, or turn that way of working off."
            )
        return SurplusGradientError(
            f"{text}Expected to mark a variable ready only once: this happens with reentrant activation "
            "checkpointing, or when contributions are not declared "
            f"before the first (expect_gradients). Use checkpoint(..., use_reentrant=False), or {self._remedy}."
        )

    def register_grad_ready(self, index: int) -> bool:
        """Note that a gradient is complete.

        Returns:
            Whether it is in time. It is not if the parameter was skipped and its bucket has been started.
        """
        bucket, waiting, started = self._bucket_of[index], self._waiting, self.launched
        if index in self.absent:
            self.absent.discard(index)
        else:
            waiting[bucket] -= 1
        self.has_ready_bucket = started < len(waiting) and waiting[started] == 0
        return bucket >= started

    def stage_grad(self, index: int) -> None:
        """Copy a complete gradient now, whatever happens to ``p.grad`` until its bucket is started."""
        bucket = self.buckets[self._bucket_of[index]]
        self._wait_for_producers(bucket)
        bucket.stage_grad(index, self._divisor)
        self._staged.add(index)

    # ---------------------------------------------------------------- collectives

    def start_ready_buckets(self, node_grad: Tensor | None = None) -> None:
        """Start the buckets whose gradients are complete, up to the first that lacks one.

        Args:
            node_grad: The gradient that the running AccumulateGrad node was given, if this is called from its hook.
        """
        while self.launched < len(self.buckets) and self._waiting[self.launched] == 0:
            self._start_next(node_grad)
        self.reduced_early = self.reduced

    def start_grad_sync(self) -> None:
        """Start all other buckets."""
        while self.launched < len(self.buckets):
            self._start_next(None)
        self._end_collectives()

    def start_zeros(self) -> None:
        """Start all other buckets with zeros, so that peers, which wait for them, can go on."""
        for bucket in self.buckets[self.launched :]:
            if not self._is_skipped(bucket):
                self._call_before_first()
                self._start_bucket(bucket, bucket.make_zeros())
            self.launched += 1
        self._end_collectives()

    def _start_next(self, node_grad: Tensor | None) -> None:
        index, bucket = self.launched, self.buckets[self.launched]
        if self._is_skipped(bucket):
            self.launched = index + 1
            return
        with profiler_span(self._labels[index]):
            self._call_before_first()
            if self._cuda:
                self._wait_for_producers(bucket)
            inputs = bucket.pack(self._divisor, absent=self.absent, node_grad=node_grad)
            works = self._start_bucket(bucket, inputs)
            self.launched = index + 1  # before anything else that can raise: it must not be started again
        self.reduced += 1
        self.nbytes += bucket.nbytes
        if self._limit < math.inf:
            self._limit_inflight(bucket, works)

    def _start_bucket(self, bucket: Bucket, inputs: list[Tensor]) -> Sequence[Work]:
        works = bucket.start_reduce(self._collectives[bucket.device], inputs)
        self._works += works
        return works

    def _call_before_first(self) -> None:
        if not self._is_started and self._before_first is not None:
            self._before_first()
        self._is_started = True

    def _end_collectives(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            for collectives in self._collectives.values():
                collectives.end_reduction()

    def _limit_inflight(self, bucket: Bucket, works: Sequence[Work]) -> None:
        """Wait for the oldest buckets, and free their gradients; see [Note: gradients in flight]."""
        if not (isinstance(bucket, GradBucket) and bucket.freeable_nbytes):
            return
        self._in_flight.append((bucket, works))
        self._inflight_bytes += bucket.freeable_nbytes
        while len(self._in_flight) > 1 and self._inflight_bytes > self._limit:
            oldest, started = self._in_flight.popleft()
            self._inflight_bytes -= oldest.freeable_nbytes
            if self._before_wait is not None:
                self._before_wait()
            _wait_for_results(started)
            oldest.free_reduced(but=self.absent | self._staged)

    def _is_skipped(self, bucket: Bucket) -> bool:
        return self._skip_absent and self.absent.issuperset(bucket.indices)

    def _wait_for_producers(self, bucket: Bucket) -> None:
        grads = map(get_grad, bucket.params)
        dense = (grad for grad in grads if grad is not None and not grad.is_sparse)
        self._producers.wait_for_producers(bucket.device, dense)

    # ---------------------------------------------------------------- the end of a backward

    def wait_for_peers(self) -> None:
        """Have the host wait until all ranks have taken part; shards of gradients are not written yet."""
        if self._before_wait is not None:
            self._before_wait()
        _wait_for_results(self._works)

    def wait(self) -> None:
        """Make the current stream (the host, without streams) wait for everything started."""
        if self._before_wait is not None:
            self._before_wait()
        for work in self._works:
            work.wait()
        self._works = []
        self._in_flight.clear()
        self._inflight_bytes = 0

    def finish_grad_sync(self, skip: Collection[int]) -> None:
        """Make every ``p.grad`` the reduced gradient, but for the parameters in ``skip``, which no rank used."""
        batches: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for bucket in self.buckets:
            batches.setdefault((bucket.device, bucket.dtype), []).extend(bucket.unpack(skip=skip))
        with torch.no_grad():
            for pairs in batches.values():
                if pairs:
                    grads, reduced = zip(*pairs, strict=True)
                    try:
                        torch._foreach_copy_(grads, reduced)
                    except RuntimeError:  # torch copies into lists of plain memory only, and one is conjugated
                        for grad, average in pairs:
                            grad.copy_(average)

    def end_backward(self) -> None:
        """Count nothing until the next backward."""
        self.is_open = self._expects_one_each = False

    def detach_grads(self) -> None:
        """Remove gradients that are being reduced in place from their parameters; the backward has failed."""
        for bucket in self.buckets:
            bucket.detach_grads()

    def drop_inputs(self) -> None:
        """Drop what was packed. The collectives have been waited for."""
        for bucket in self.buckets:
            bucket.drop_inputs()


def _wait_for_results(works: Sequence[Work]) -> None:
    """Wait for collectives, and leave what has to be done with their results to :meth:`GradSync.wait`."""
    for work in works:
        (work.wait_for_results if isinstance(work, WorkWithEpilogue) else work.wait)()
