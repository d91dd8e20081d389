"""The collectives of one backward: buckets are reduced as they fill.

[Note: one order] Buckets are launched strictly in index order, on every rank. A collective that is launched out of turn
because its gradients happened to come first pairs with another one on a rank where they did not.

[Note: gradients in flight] Of a gradient that is scattered each rank needs its part alone, so its memory can serve for
the next ones, once it is reduced: a backward then holds the gradients that are under way instead of all. Whoever
computes waits for the oldest when more are launched than may be under way; for the newest never. A device does that in
the order of its streams, and the host goes on. Where the limit leaves room for some milliseconds of traffic there is
hardly anything to wait for, unless communication is what takes longest; then one of the two waits anyway.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.buckets import GradBucket
from ovpatch.overlap.collectives import Collectives
from ovpatch.overlap.labels import label, span
from ovpatch.overlap.lanes import Producers
from ovpatch.overlap.metadata import grad_of
from ovpatch.overlap.sparse import SparseBucket
from ovpatch.overlap.works import Unpacked, Work

Bucket: TypeAlias = GradBucket | SparseBucket


class Reduction:
    """Reduces a fixed sequence of buckets, once per backward.

    Args:
        buckets: What to reduce, in this order.
        group: The process group.
        feature: Name for labels.
        average: Let the collective divide by the number of ranks; otherwise gradients are divided before it.
        skip_absent: Launch nothing for buckets to which this backward adds nothing. Right only if all ranks do so.
        in_flight: How many bytes may be under way that nobody needs once they are reduced.
        meet: Called once a backward, before its first collective.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        *,
        feature: str,
        average: bool = False,
        skip_absent: bool = False,
        in_flight: float = math.inf,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.buckets = list(buckets)
        self._skip_absent, self._limit, self._meet = skip_absent, in_flight, meet
        self._divisor = 1 if average else group.size()
        self._bucket_of = {index: b for b, bucket in enumerate(buckets) for index in bucket.indices}
        self._labels = [label(feature, "all_reduce", f"bucket {b}") for b in range(len(buckets))]
        self._sizes = [len(bucket.indices) for bucket in buckets]
        self._producers = Producers()
        self._cuda = {i: b.device.index for b in buckets for i in b.indices if b.device.type == "cuda"}
        self._collectives = {b.device: Collectives(group, b.device, average=average) for b in buckets}
        self.open()

    def open(self) -> None:
        """Begin a backward: nothing has come, every parameter is waited for."""
        self.absent: set[int] = set()
        self.launched, self.reduced, self._attended, self._met = 0, 0, False, False
        self._waiting = list(self._sizes)
        self._works: list[Work] = []
        self._staged: set[int] = set()
        self._in_flight: deque[tuple[GradBucket, Sequence[Work]]] = deque()
        self._transient = 0
        self._producers.clear()

    def without(self, index: int) -> None:
        """Do not wait for a parameter: this backward adds nothing to its gradient."""
        if index not in self.absent:
            self.absent.add(index)
            self._waiting[self._bucket_of[index]] -= 1

    def leave_out(self, counts: Sequence[int]) -> None:
        """Do not wait for those parameters for which there is a count, and it is 0."""
        for index, count in enumerate(counts):
            if count == 0:
                self.without(index)

    def expect(self, index: int) -> bool:
        """Wait for a parameter after all; undoes :meth:`without`.

        Returns:
            Whether that is in time: its bucket has not been launched.
        """
        bucket = self._bucket_of[index]
        if index in self.absent:
            self.absent.discard(index)
            self._waiting[bucket] += 1
        return bucket >= self.launched

    def produced(self, index: int) -> None:
        """Note on which stream something was just added to a gradient. Called for every gradient."""
        device = self._cuda.get(index)
        if device is not None:
            self._producers.note(device)

    def arrived(self, index: int) -> bool:
        """Note that a gradient is complete.

        Returns:
            Whether it comes in time. It does not if it was taken for absent and its bucket has been launched.
        """
        bucket = self._bucket_of[index]
        if index in self.absent:
            self.absent.discard(index)
        else:
            self._waiting[bucket] -= 1
        return bucket >= self.launched

    def stage(self, index: int) -> None:
        """Copy a complete gradient now, whatever happens to ``p.grad`` until its bucket is launched."""
        bucket = self.buckets[self._bucket_of[index]]
        self._join(bucket)
        bucket.stage(index, self._divisor)
        self._staged.add(index)

    def launch_ready(self, on_launch: Callable[[Bucket], None], given: Tensor | None = None) -> None:
        """Launch the buckets that are full, up to the first that is not.

        Args:
            on_launch: Told of each.
            given: The gradient that the running AccumulateGrad node was given, if this is called from its hook.
        """
        while self.launched < len(self.buckets) and self._waiting[self.launched] == 0:
            self._launch(on_launch, given)

    def launch_rest(self, on_launch: Callable[[Bucket], None]) -> None:
        """Launch all others."""
        while self.launched < len(self.buckets):
            self._launch(on_launch, None)
        self._attend()

    def launch_zeros(self) -> None:
        """Launch all others with zeros, so that peers, which wait for them, can go on."""
        for bucket in self.buckets[self.launched :]:
            if not self._skipped(bucket):
                self._meet_once()
                self._start(bucket, bucket.zeros())
            self.launched += 1
        self._attend()

    def wait_for_peers(self) -> None:
        """Have the host wait until all ranks have taken part; parts of gradients are not written yet."""
        _wait_for_peers(self._works)

    def wait(self) -> None:
        """Make the current stream (the host, without streams) wait for everything launched."""
        for work in self._works:
            work.wait()
        self._works = []
        self._in_flight.clear()
        self._transient = 0

    def unpack(self, skip: Collection[int]) -> None:
        """Make every ``p.grad`` the reduced gradient, but for the parameters in ``skip``, which no rank used."""
        batches: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for bucket in self.buckets:
            targets, results = batches.setdefault((bucket.device, bucket.dtype), ([], []))
            for target, result in bucket.unpack(skip=skip):
                targets.append(target)
                results.append(result)
        with torch.no_grad():
            for targets, results in batches.values():
                if targets:
                    torch._foreach_copy_(targets, results)

    def release(self) -> None:
        """Take gradients that are being reduced in place away from their parameters; the backward has failed."""
        for bucket in self.buckets:
            bucket.release()

    def drop(self) -> None:
        """Forget what was packed. The collectives have been waited for."""
        for bucket in self.buckets:
            bucket.drop()

    def _launch(self, on_launch: Callable[[Bucket], None], given: Tensor | None) -> None:
        index, bucket = self.launched, self.buckets[self.launched]
        if not self._skipped(bucket):
            with span(self._labels[index]):
                self._meet_once()
                self._join(bucket)
                works = self._start(bucket, bucket.pack(self._divisor, absent=self.absent, given=given))
            self.launched = index + 1  # before anything else that can raise: it must not be launched again
            on_launch(bucket)
            self._follow(bucket, works)
        self.launched = index + 1

    def _attend(self) -> None:
        if self._attended:
            return
        self._attended = True
        for collectives in self._collectives.values():
            collectives.attend()

    def _meet_once(self) -> None:
        if not self._met:
            self._meet()
            self._met = True

    def _start(self, bucket: Bucket, pieces: list[Tensor]) -> Sequence[Work]:
        works = bucket.start(self._collectives[bucket.device], pieces)
        self._works += works
        self.reduced += 1
        return works

    def _follow(self, bucket: Bucket, works: Sequence[Work]) -> None:
        """Keep what is under way below the limit; see [Note: gradients in flight]."""
        if not (isinstance(bucket, GradBucket) and bucket.transient) or math.isinf(self._limit):
            return
        self._in_flight.append((bucket, works))
        self._transient += bucket.transient
        while len(self._in_flight) > 1 and self._transient > self._limit:
            oldest, started = self._in_flight.popleft()
            self._transient -= oldest.transient
            _wait_for_peers(started)
            oldest.give_up(but=self.absent | self._staged)

    def _skipped(self, bucket: Bucket) -> bool:
        return self._skip_absent and self.absent.issuperset(bucket.indices)

    def _join(self, bucket: Bucket) -> None:
        grads = map(grad_of, bucket.params)
        dense = (grad for grad in grads if grad is not None and not grad.is_sparse)
        self._producers.join(bucket.device, dense)


def _wait_for_peers(works: Sequence[Work]) -> None:
    """Wait for collectives; what has to be put in its place afterwards is not yet."""
    for work in works:
        (work.wait_for_results if isinstance(work, Unpacked) else work.wait)()
