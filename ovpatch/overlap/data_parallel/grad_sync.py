"""The gradients of one backward: which of them are complete, and the collectives that reduce them.

A bucket's collective may start only when every contribution to every parameter in it has been
added. :class:`GradReadiness` counts them, and :class:`GradSync` starts the buckets that are ready.

The autograd hook of a parameter fires once per graph task, however often the task uses the weight,
so one contribution per parameter is the rule. Work that adds to a gradient in several graph tasks
(chunked modules, deferred weight gradients) declares the number of contributions
(:func:`expect_gradients`) and marks each (:func:`mark_gradient`). The hook of such a parameter does
not count.

Source: the readiness counting of Megatron-Core's bucket groups (``register_grad_ready``), whose
counts are learned.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ovpatch.overlap.comm.collectives import Work, WorkWithEpilogue
from ovpatch.overlap.comm.host_barrier import HostBarrier
from ovpatch.overlap.comm.hosts import HostLayout, make_collectives
from ovpatch.overlap.comm.lifetimes import find_param_record, param_record
from ovpatch.overlap.comm.streams import ProducerStreams, profiler_label, profiler_span
from ovpatch.overlap.data_parallel.backward_plan import BackwardPlan, Expected
from ovpatch.overlap.data_parallel.grad_bucket import Bucket, GradBucket, get_grad

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


# --- which gradients are complete ---


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


# --- the collectives ---


class GradSync:
    """Runs the collectives of a fixed sequence of buckets, once per backward.

    [Note: one order] Every rank starts its buckets strictly in index order. Gradients may become
    complete in another order on each rank. If a bucket started as soon as it is complete, peers
    would pair its collective with that of another bucket.

    [Note: gradients in flight] After a reduce-scatter only the local shard is needed, so full
    gradients are freed during backward. If more than ``max_inflight_bytes`` are being reduced, the
    compute stream waits for the oldest bucket, never for the newest. On a device the host
    continues. A limit that leaves room for some milliseconds of traffic hardly ever makes a stream
    wait, unless communication takes longest.

    Args:
        buckets: The buckets, in the order in which they are reduced.
        readiness: Counts the contributions to the gradients of these buckets.
        group: The process group.
        feature: Name of the feature, for labels.
        average: Whether the collective divides by the number of ranks; otherwise buckets divide
            gradients when they pack them.
        skip_absent: Whether buckets to which this backward adds nothing are left out. All ranks
            must leave out the same buckets.
        max_inflight_bytes: Limit of the bytes in reduction that can be freed afterwards.
        before_first: Called once per backward, before its first collective.
        host_barrier: A barrier that hosts finish before a stream, or the host, waits for
            collectives. Default: none.
        layout: The hosts of the group. Default: reductions do not depend on hosts.
        reduces_by_host: See :class:`.HostCollectives`.
        shards_by_host: See :class:`.HostCollectives`.

    Attributes:
        buckets: See the argument.
        group: See the argument.
        started: How many buckets were started or left out in this backward.
        reduced: How many buckets were started with this rank's gradients.
        reduced_early: How many of these were started while gradients were still missing.
        nbytes: How many bytes the reduced buckets hold.
        saved_nbytes: How many of these bytes have no second copy.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        readiness: GradReadiness,
        group: dist.ProcessGroup,
        *,
        feature: str,
        average: bool = False,
        skip_absent: bool = False,
        max_inflight_bytes: float = math.inf,
        before_first: Callable[[], None] | None = None,
        host_barrier: HostBarrier | None = None,
        layout: HostLayout | None = None,
        reduces_by_host: bool = False,
        shards_by_host: bool = False,
    ) -> None:
        self.buckets = list(buckets)
        self.group = group
        self._readiness = readiness
        self._divisor = 1 if average else group.size()
        self._should_skip_absent = skip_absent
        self._max_inflight_bytes = max_inflight_bytes
        self._before_first = before_first
        self._host_barrier = host_barrier
        self._labels = [
            profiler_label(feature, "all_reduce", f"bucket {number}")
            for number in range(len(buckets))
        ]
        self._collectives = {
            bucket.device: make_collectives(
                group,
                bucket.device,
                layout,
                average=average,
                reduces_by_host=reduces_by_host,
                shards_by_host=shards_by_host,
            )
            for bucket in buckets
        }
        # - The running backward
        self.started = 0
        self.reduced = 0
        self.reduced_early = 0
        self.nbytes = 0
        self.saved_nbytes = 0
        # `before_first` is still to be called; None afterwards, and if there is nothing to call.
        self._pending_call: Callable[[], None] | None = None
        # Whether backends know that no collective of this backward follows.
        self._has_ended = False
        self._works: list[Work] = []
        # Gradients that were copied in their own hooks.
        self._copied: set[int] = set()
        # The oldest buckets in reduction, and how many bytes can be freed with them.
        self._in_flight: deque[tuple[GradBucket, Sequence[Work]]] = deque()
        self._inflight_bytes = 0

    def begin(self) -> None:
        """Begin a backward: no bucket is started."""
        self.started = 0
        self.reduced = 0
        self.reduced_early = 0
        self.nbytes = 0
        self.saved_nbytes = 0
        self._pending_call = self._before_first
        self._has_ended = False
        self._works = []
        self._copied = set()
        self._in_flight.clear()
        self._inflight_bytes = 0

    # ---------------------------------------------------------------- start

    def copy_grad(self, index: int) -> None:
        """Copy a complete gradient now, because hooks may change ``p.grad`` later."""
        bucket = self.buckets[self._readiness.bucket_of[index]]
        self._wait_for_producers(bucket)
        bucket.stage_grad(index, self._divisor)
        self._copied.add(index)

    def start_ready_buckets(self, node_grad: Tensor | None = None) -> None:
        """Start the buckets whose gradients are complete, up to the first incomplete one.

        Args:
            node_grad: The gradient that the running AccumulateGrad node was given, if its hook is
                the caller.
        """
        lacking = self._readiness.lacking
        while self.started < len(lacking) and lacking[self.started] == 0:
            self._start_next(node_grad)
        # The last gradient starts all buckets that are left, and no computation hides them.
        if self.started < len(lacking):
            self.reduced_early = self.reduced

    def start_remaining(self) -> None:
        """Start all other buckets."""
        while self.started < len(self.buckets):
            self._start_next(None)
        self._end_collectives()

    def start_zeros(self) -> None:
        """Start all other buckets with zeros, so that peers, which wait for them, can continue."""
        for bucket in self.buckets[self.started :]:
            if not self._is_skipped(bucket):
                self._call_before_first()
                collectives = self._collectives[bucket.device]
                self._works += bucket.start_reduce(collectives, bucket.make_zeros())
            self.started += 1
        self._end_collectives()

    def _start_next(self, node_grad: Tensor | None) -> None:
        number = self.started
        bucket = self.buckets[number]
        absent = self._readiness.absent
        if self._should_skip_absent and self._is_skipped(bucket):
            self.started = number + 1
            return
        with profiler_span(self._labels[number]):
            if self._pending_call is not None:
                self._call_before_first()
            if self._readiness.cuda_devices:
                self._wait_for_producers(bucket)
            inputs = bucket.pack(self._divisor, absent=absent, node_grad=node_grad)
            works = bucket.start_reduce(self._collectives[bucket.device], inputs)
            self._works += works
            # Nothing that can raise comes before this line, or the bucket would be started again.
            self.started = number + 1
        self.reduced += 1
        self.nbytes += bucket.nbytes
        self.saved_nbytes += bucket.saved_nbytes
        if self._max_inflight_bytes < math.inf:
            self._limit_inflight(bucket, works)

    def _call_before_first(self) -> None:
        call = self._pending_call
        if call is not None:
            # If the call raises, it is repeated before the collectives that complete the backward.
            call()
            self._pending_call = None

    def _is_skipped(self, bucket: Bucket) -> bool:
        return self._should_skip_absent and self._readiness.absent.issuperset(bucket.indices)

    def _wait_for_producers(self, bucket: Bucket) -> None:
        grads = map(get_grad, bucket.params)
        dense = (grad for grad in grads if grad is not None and not grad.is_sparse)
        self._readiness.producers.wait_for_producers(bucket.device, dense)

    def _end_collectives(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            for collectives in self._collectives.values():
                collectives.end_reduction()

    def _limit_inflight(self, bucket: Bucket, works: Sequence[Work]) -> None:
        """Wait for the oldest buckets, and free their gradients."""
        # See [Note: gradients in flight].
        if not (isinstance(bucket, GradBucket) and bucket.freeable_nbytes):
            return
        self._in_flight.append((bucket, works))
        self._inflight_bytes += bucket.freeable_nbytes
        while len(self._in_flight) > 1 and self._inflight_bytes > self._max_inflight_bytes:
            oldest, oldest_works = self._in_flight.popleft()
            self._inflight_bytes -= oldest.freeable_nbytes
            if self._host_barrier is not None:
                self._host_barrier.finish()
            _wait_for_results(oldest_works)
            oldest.free_reduced(but=self._readiness.absent | self._copied)

    # ---------------------------------------------------------------- the end of a backward

    def wait_for_peers(self) -> None:
        """Have the host wait until all ranks have taken part; no shard is written yet."""
        if self._host_barrier is not None:
            self._host_barrier.finish()
        _wait_for_results(self._works)

    def wait(self) -> None:
        """Make the current stream (the host, without streams) wait for all started collectives."""
        if self._host_barrier is not None:
            self._host_barrier.finish()
        for work in self._works:
            work.wait()
        self._works = []
        self._in_flight.clear()
        self._inflight_bytes = 0

    def write_grads(self, but: Collection[int]) -> None:
        """Make every ``p.grad`` the reduced gradient, but for the parameters that no rank used."""
        batches: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for bucket in self.buckets:
            copies = bucket.unpack(skip=but)
            if copies:
                batches.setdefault((bucket.device, bucket.dtype), []).extend(copies)
        with torch.no_grad():
            for pairs in batches.values():
                grads, reduced = zip(*pairs, strict=True)
                try:
                    torch._foreach_copy_(grads, reduced)
                except RuntimeError:
                    # torch copies into lists of plain memory only, and a gradient is conjugated.
                    for grad, average in pairs:
                        grad.copy_(average)

    def detach_grads(self) -> None:
        """Remove gradients that are being reduced in place from their parameters.

        The backward has failed. The script's next write to ``p.grad`` must neither reach the
        collective nor be overwritten by it.
        """
        for bucket in self.buckets:
            bucket.detach_grads()

    def drop_inputs(self) -> None:
        """Drop packed gradients. The collectives must be over."""
        for bucket in self.buckets:
            bucket.drop_inputs()


def _wait_for_results(works: Sequence[Work]) -> None:
    """Wait for collectives, and leave the work on their results to :meth:`GradSync.wait`."""
    for work in works:
        (work.wait_for_results if isinstance(work, WorkWithEpilogue) else work.wait)()


# --- contributions that code declares ---


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
