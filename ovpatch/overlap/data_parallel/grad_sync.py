"""Which gradients of the running backward are complete.

A collective over a bucket may start only when every contribution to every parameter in it has been added. The autograd
hook of a parameter fires once per graph task, however often the weight is used in it, so one mark per parameter is the
rule. Work that adds to a gradient in several graph tasks (chunked experts, deferred weight gradients) declares how many
marks to expect and makes them itself; the parameter's hook then no longer counts.

Source: the readiness counting of Megatron-Core's bucket groups and MindSpeed's pipelined experts, whose learned or
global counts lose contributions when the number changes; here the number is declared and a surplus is an error.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Final, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ovpatch.overlap.comm.collectives import Collectives
from ovpatch.overlap.comm.streams import ProducerStreams, profiler_label, profiler_span
from ovpatch.overlap.comm.work import Work, WorkWithEpilogue
from ovpatch.overlap.data_parallel.bucket import GradBucket, SparseBucket
from ovpatch.overlap.tensors.metadata_ops import grad_of


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


# The collectives of one backward: buckets are reduced as they fill.
#
# [Note: one order] Buckets are launched strictly in index order, on every rank. A collective that is launched out of
# turn because its gradients happened to come first pairs with another one on a rank where they did not.
#
# [Note: gradients in flight] Of a gradient that is scattered each rank needs its part alone, so its memory can serve
# for the next ones, once it is reduced: a backward then holds the gradients that are under way instead of all.
# Whoever computes waits for the oldest when more are launched than may be under way; for the newest never. A device
# does that in the order of its streams, and the host goes on. Where the limit leaves room for some milliseconds of
# traffic there is hardly anything to wait for, unless communication is what takes longest; then one of the two waits
# anyway.

Bucket: TypeAlias = GradBucket | SparseBucket


class GradSync:
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
        self._labels = [profiler_label(feature, "all_reduce", f"bucket {b}") for b in range(len(buckets))]
        self._sizes = [len(bucket.indices) for bucket in buckets]
        self._producers = ProducerStreams()
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
            self._producers.record_current(device)

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
            with profiler_span(self._labels[index]):
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
            collectives.end_reduction()

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
        self._producers.wait_for_producers(bucket.device, dense)


def _wait_for_peers(works: Sequence[Work]) -> None:
    """Wait for collectives; what has to be put in its place afterwards is not yet."""
    for work in works:
        (work.wait_for_results if isinstance(work, WorkWithEpilogue) else work.wait)()
