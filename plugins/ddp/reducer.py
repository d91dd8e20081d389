"""The gradient reducer that takes the place of torch's C++ ``Reducer`` inside ``DistributedDataParallel``.

[Note: life of a step] ``prepare_for_backward`` arms the reducer at the end of a forward that wants synchronisation.
The backward that follows begins the step when it reaches the forward's output. Buckets are reduced as they fill,
strictly in index order, so that all ranks issue the same collectives in the same order whatever order their gradients
come in. The engine's callback at the end of the backward waits for the collectives and makes ``p.grad`` the average.

[Note: interrupted backward] The engine's callback does not run when the backward raises. Peers may already wait for
buckets that this rank has not launched. The next synchronised forward on this rank therefore first completes the step's
collectives with zeros and casts a ballot, by which peers whose backward went well learn that their gradients lack a
part. If all ranks failed alike, all of them complete alike and training goes on.

[Note: several graph tasks] A reentrant checkpoint runs a backward inside the backward, with an end-of-backward callback
of its own. A callback that finds gradients missing leaves the step open for the hooks that follow, each of which makes
sure that the graph task it belongs to has a callback.

[Note: compiled wrapper] ``torch.compile`` of the wrapper traces ``DistributedDataParallel.forward`` and breaks its
graph where that calls the C++ reducer. Our methods are hidden from Dynamo, so that it breaks in the same places.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel.distributed import _find_tensors

from ovpatch.overlap.ballot import Ballots
from ovpatch.overlap.buckets import GradBucket
from ovpatch.overlap.collectives import all_reduce
from ovpatch.overlap.labels import label, span
from ovpatch.overlap.lanes import Producers
from ovpatch.overlap.layout import arrival_layout, initial_layout
from ovpatch.overlap.ledger import ANY, GradLedger
from ovpatch_plugins.ddp import messages
from ovpatch_plugins.ddp.config import ReducerConfig
from ovpatch_plugins.ddp.counters import COUNTERS
from ovpatch_plugins.ddp.hooks import GradientHooks
from ovpatch_plugins.ddp.task import BackwardTask
from ovpatch_plugins.ddp.usage import UsageMap, accumulates, executed


class GradReducer:
    """Averages the gradients of one model over the ranks of a process group.

    Args:
        group: The process group.
        params: The parameters, the same on all ranks, in registration order.
        names: Their fully qualified names, for messages and profiles.
        config: How to reduce.

    Attributes:
        on_first_use: Called once, before the first forward that will be synchronised.
        armed: Whether the next backward is to be reduced.
        shares_parameters: Whether another reducer reads gradients of these parameters in the same backward.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        config: ReducerConfig,
    ) -> None:
        self.params = list(params)
        self.names = list(names)
        self.config = config
        self.static_graph = False
        self.has_rebuilt_buckets = False
        self.on_first_use: Callable[[], None] | None = None
        self.shares_parameters = False
        self._group = group
        self._lock = threading.RLock()
        self._static_counts: list[int] | None = None
        self._static_nowhere: list[int] = []
        self._steps = 0
        self.armed = self._began = self._voted = False
        self._absent: set[int] = set()
        self._task = BackwardTask()
        self._attach()

    # ---------------------------------------------------------------- what DistributedDataParallel calls

    @torch._disable_dynamo
    def prepare_for_forward(self) -> None:
        """Called before a forward that will be synchronised."""
        if self.on_first_use is not None:
            first_use, self.on_first_use = self.on_first_use, None
            first_use()
        self._finish_previous()
        self._raise_if_peers_lost_gradients()
        if self._hooks.lost():
            self._hooks.remove()
            self._attach()

    @torch._disable_dynamo
    def prepare_for_backward(self, _outputs: Sequence[Tensor]) -> None:
        """Arm the reducer for the next backward. The outputs come by :meth:`watch`."""
        self._finish_previous()
        if self._began:
            return  # a checkpoint recomputes the forward inside the backward that this would arm
        self.armed = True
        self._set_modes()
        self._absent.clear()
        self._open([ANY] * len(self.params) if self.learns_static_graph() else self._static_counts)

    @torch._disable_dynamo
    def watch(self, output: Any) -> None:
        """Begin the step when the backward reaches one of the tensors in the forward's output.

        That is in the outermost graph task and before any parameter's hook, so a backward that raises before the
        first gradient still takes part in the step's collectives. The hook is on the node, not on the tensor, which
        stays as it was to whoever pickles it.
        """
        if self.armed:
            reached = weakref.WeakMethod(self._output_reached)
            nodes = {id(tensor.grad_fn): tensor.grad_fn for tensor in _find_tensors(output)}
            for node in nodes.values():
                if node is not None:
                    node.register_prehook(lambda _gradients: _call(reached))

    @torch._disable_dynamo
    def _rebuild_buckets(self) -> bool:
        """Cut the buckets anew along the order in which gradients arrived in the first backward.

        Returns:
            Whether that was done; it is done once.
        """
        self.recover()  # a forward under no_sync comes by here only, before it broadcasts buffers
        # Not by what arrived: a rank whose first backward failed takes part in the broadcast as well.
        if self.has_rebuilt_buckets or not self._ordered or self._began or self._finds_unused():
            return False
        missing = [i for i in range(len(self.params)) if i not in set(self._arrivals)]
        order = torch.tensor(self._arrivals + missing, dtype=torch.int64).to(self._device)
        dist.broadcast(order, src=dist.get_global_rank(self._group, 0), group=self._group)
        self._set_buckets(arrival_layout(self.params, self.config.bucket_limits, order.tolist()))
        self.has_rebuilt_buckets = True
        return True

    def _set_static_graph(self) -> None:
        if self._steps or self.armed:
            raise RuntimeError(messages.STATIC_GRAPH_TOO_LATE)
        self.static_graph = True
        self._set_modes()

    def _delay_all_reduce(self) -> None:
        """End of the first backward of a static graph: learn how often each parameter is used, then reduce."""
        with self._lock:
            if not self.armed:
                raise RuntimeError(messages.STATIC_GRAPH_UNSYNCHRONISED)
            counts = [self._ledger.seen(i) for i in range(len(self.params))]
            self._absent = {i for i, count in enumerate(counts) if count == 0}
            self._finish(launch_usage=True)
            self._static_counts = counts

    def _check_reducer_finalized(self) -> None:
        if self._began:
            raise RuntimeError(self._unfinished())

    def _remove_autograd_hooks(self) -> None:
        self._hooks.remove()

    def _reset_state(self) -> None:
        """Forget the running step and the order of gradients; the process group is about to change."""
        self._hooks.remove()
        self._static_counts = None
        self._attach()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._reset_state()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """Accepted for compatibility; nothing is sampled here, torch's profiler shows every phase."""

    # ---------------------------------------------------------------- what the autograd engine calls

    def gradient_accumulated(self, index: int) -> None:
        """A gradient has been added to ``grad`` of parameter ``index``; called on an engine thread."""
        with self._lock:
            if self._tracks_usage and self.params[index].grad is not None:
                self._usage.note(index)  # also under no_sync: the accumulated gradient is reduced later
            if not self.armed:
                return
            if not self._callback_queued:
                self._begin()
            self._producers.note()
            if self._ledger.hook_fired(index):
                self._gradient_complete(index)

    def _output_reached(self) -> None:
        with self._lock:
            if self.armed and accumulates(self._hooks.nodes):
                self._begin()

    def _backward_ended(self) -> None:
        with self._lock:
            self._callback_queued = False
            if not self._began or self.learns_static_graph():
                return
            if self._finds_unused() or not self._ledger.incomplete():
                self._finish(launch_usage=self._finds_unused())

    # ---------------------------------------------------------------- the step

    def _attach(self) -> None:
        limits, unused = self.config.bucket_limits, self.config.find_unused_parameters
        self._device = self.params[0].device
        self._hooks = GradientHooks(self.params, self)
        self._ledger = GradLedger(self.params, self.names, self._gradient_complete)
        self._usage = UsageMap(len(self.params), self._group, self._device)
        self._ballots = Ballots(self._group, self._device)
        self._producers = Producers(self._device)
        self._arrivals: list[int] = []
        self.armed = self._began = self._callback_queued = self._ordered = False
        self._absent.clear()
        self._nested: set[int] = set()
        self.has_rebuilt_buckets = False
        self._set_modes()
        self._set_buckets(initial_layout(self.params, limits, bucketed=unused and not self.static_graph))

    def _set_buckets(self, buckets: list[GradBucket]) -> None:
        self.buckets = buckets
        if self.config.gradient_as_bucket_view:
            for bucket in buckets:
                bucket.carry_over()
        self._bucket_of = {index: b for b, bucket in enumerate(buckets) for index in bucket.indices}
        self._labels = [label("ddp", "all_reduce", f"bucket {b}") for b in range(len(buckets))]
        self._open(None)

    def _open(self, expected: Sequence[int] | None) -> None:
        self._ledger.open(expected)
        self._began = self._voted = False
        self._works: list[dist.Work] = []
        self._pending = [len(bucket.indices) for bucket in self.buckets]
        for index, count in enumerate(expected or ()):
            if count == 0:
                self._absent.add(index)
                self._pending[self._bucket_of[index]] -= 1

    def _begin(self) -> None:
        if not self._callback_queued:
            self._task.queue(self._backward_ended)
            self._callback_queued = True
        if not self._began:
            self._began = True
            self._producers.clear()
            if not self.has_rebuilt_buckets:
                self._arrivals = []
            if self._finds_unused():
                self._find_absent()

    def _find_absent(self) -> None:
        """Do not wait for parameters that this backward will not reach.

        In the first step nothing is launched before the end, and a parameter that came although it was not to be
        reached (it is inside a reentrant checkpoint) is waited for from then on.
        """
        reached = executed(self._hooks.nodes)
        for index, will_come in enumerate(reached):
            if not will_come and index not in self._nested:
                self._absent.add(index)
                self._pending[self._bucket_of[index]] -= 1

    def _gradient_complete(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if index in self._absent:
            self._nested.add(index)
            self._absent.discard(index)
            if bucket < len(self._works):
                raise RuntimeError(messages.late(self.names[index]))
        else:
            self._pending[bucket] -= 1
        if not self.has_rebuilt_buckets:
            self._arrivals.append(index)
        if self._launches_early:
            self._launch_ready()

    def _launch_ready(self) -> None:
        while len(self._works) < len(self.buckets) and self._pending[len(self._works)] == 0:
            self._launch()
            COUNTERS.collectives_in_backward += 1

    def _launch(self) -> None:
        """Reduce the next bucket."""
        index = len(self._works)
        bucket = self.buckets[index]
        view = self.config.gradient_as_bucket_view
        with span(self._labels[index]):
            self._producers.join(p.grad for p in bucket.params if p.grad is not None)
            flat = bucket.pack(self._group.size(), absent=self._absent, always_view=view)
            self._works.append(all_reduce(flat, self._group))
        if index > 0 and not self.shares_parameters:
            # One bucket late: the gradients of this one are still referenced by the node whose hook is running.
            self.buckets[index - 1].adopt(always_view=view)
        COUNTERS.collectives += 1
        COUNTERS.bytes_reduced += bucket.nbytes

    def _finish(self, *, launch_usage: bool) -> None:
        """End the step: every gradient of this backward has come."""
        self._callback_queued = True  # until closed: what raises from here on leaves a step to recover
        while len(self._works) < len(self.buckets):
            self._launch()
        if launch_usage:
            self._usage.launch()
        self._voted = True
        self._ballots.count(self._steps, failed=False)
        for work in self._works:
            work.wait()
        if launch_usage:
            self._static_nowhere = self._usage.nowhere_used()
        nowhere = self._static_nowhere if self._tracks_usage or self.static_graph else []
        for bucket in self.buckets:
            bucket.unpack(skip=nowhere, always_view=self.config.gradient_as_bucket_view)
        self._close()
        COUNTERS.backwards += 1
        if self._device.type != "cuda":
            self._raise_if_peers_lost_gradients()

    def _close(self) -> None:
        self._ledger.close()
        self._works = []
        self.armed = self._began = self._callback_queued = False
        self._ordered, self._steps = not self.learns_static_graph(), self._steps + 1

    # ---------------------------------------------------------------- what can go wrong

    def _finish_previous(self) -> None:
        if self._began and not self._callback_queued:
            raise RuntimeError(self._unfinished())
        self.recover()

    def recover(self) -> None:
        """Complete the collectives of a backward that an exception cut short; see [Note: interrupted backward]."""
        if not (self._began and self._callback_queued) or self._task.running():
            return
        with span(label("ddp", "recover")):
            for bucket in self.buckets[len(self._works) :]:
                self._works.append(all_reduce(bucket.zeros_like(), self._group))
            if not self._voted:
                if self._tracks_usage:
                    self._usage.launch()
                self._ballots.count(self._steps, failed=True)
            for work in self._works:
                work.wait()
            if self._usage.launched():
                self._usage.nowhere_used()
        self._close()
        COUNTERS.recovered += 1

    def in_backward(self) -> bool:
        """Tell whether gradients are being reduced by a backward that will still end, here or in another thread."""
        return self._began and self._callback_queued and self._task.running()

    def _raise_if_peers_lost_gradients(self) -> None:
        losses = self._ballots.losses()
        if losses:
            raise RuntimeError(messages.peer_lost_backward(losses[0]))

    def _unfinished(self) -> str:
        return messages.unfinished([self.names[i] for i in self._ledger.incomplete()])

    # ---------------------------------------------------------------- modes

    def _finds_unused(self) -> bool:
        return self.config.find_unused_parameters and not self.static_graph

    def learns_static_graph(self) -> bool:
        """Tell whether the first backward of a static graph, which shows the use of each parameter, is to come."""
        return self.static_graph and self._static_counts is None

    def _set_modes(self) -> None:
        """Work out once per step what every hook would ask."""
        learns = self.learns_static_graph()
        self._tracks_usage = self._finds_unused() or learns
        first_search = self._finds_unused() and self._steps == 0
        self._launches_early = self.config.overlap and not first_search and not learns


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    target = method()
    if target is not None:
        target()
