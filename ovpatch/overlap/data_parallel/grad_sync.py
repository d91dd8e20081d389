"""Grad sync: the collectives of one backward, which reduce the gradients of buckets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import Work, WorkWithEpilogue
from ovpatch.overlap.comm.host_barrier import HostBarrier
from ovpatch.overlap.comm.hosts import HostLayout, make_collectives
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.data_parallel.grad_bucket import Bucket, GradBucket, get_grad
from ovpatch.overlap.data_parallel.grad_readiness import GradReadiness


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
