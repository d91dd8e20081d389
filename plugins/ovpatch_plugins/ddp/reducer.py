"""The gradient reducer that takes the place of torch's C++ ``Reducer`` inside ``DistributedDataParallel``.

[Note: life of a step] ``prepare_for_backward`` arms the reducer at the end of a forward that wants synchronisation.
The backward that follows begins the step when it reaches the forward's output. Buckets are reduced as they fill,
strictly in index order, so that all ranks issue the same collectives in the same order whatever order their gradients
come in. The engine's callback at the end of the backward waits for the collectives and makes ``p.grad`` the average.

[Note: compiled wrapper] ``torch.compile`` of the wrapper traces ``DistributedDataParallel.forward`` and breaks its
graph where that calls the C++ reducer. Our methods are hidden from Dynamo, so that it breaks in the same places.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from ovpatch.overlap.comm.collectives import AllReduce
from ovpatch.overlap.comm.group_state import group_timeout_s
from ovpatch.overlap.comm.step_flags import StepFlags
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.comm.work import Work
from ovpatch.overlap.data_parallel.bucket_assignment import BucketAssignment, BucketOrder
from ovpatch.overlap.data_parallel.grad_hooks import GradientHooks, accumulates, executed, watch_outputs
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder, make_grad_sharder
from ovpatch.overlap.data_parallel.grad_sync import ANY, Bucket, GradSync, SurplusGradientError, register_reducer
from ovpatch.overlap.data_parallel.reducer import BackwardReducer, ReducerState
from ovpatch_plugins.ddp import errors
from ovpatch_plugins.ddp.foreign_hooks import ForeignHooks
from ovpatch_plugins.ddp.logger import StepTimes, StockOnly
from ovpatch_plugins.ddp.options import ReducerConfig
from ovpatch_plugins.ddp.process_group import meet_for_late_backward, with_budget
from ovpatch_plugins.ddp.report import COUNTERS, warn_of_create_graph

if TYPE_CHECKING:
    from ovpatch_plugins.ddp.logger import ReducerLogger


# What kind of backward a step has.


@dataclass(frozen=True)
class Mode:
    """Worked out once per step, because every hook would ask.

    Attributes:
        searches: Which parameters it leaves out is found when it begins.
        tracks_usage: Ranks tell each other which parameters they used.
        launches_early: Buckets are reduced while it computes.
    """

    searches: bool
    tracks_usage: bool
    launches_early: bool

    @staticmethod
    def of(config: ReducerConfig, *, learns: bool, static: bool, late: bool, first: bool) -> Mode:
        """Return the mode of a backward.

        Args:
            config: How to reduce.
            learns: Whether it shows how often a static graph uses each parameter; nothing is reduced before its end.
            static: Whether the graph was declared static.
            late: Whether the forward's first backward has been reduced before.
            first: Whether it is the model's first.
        """
        searches = late or (config.find_unused_parameters and not static)
        early = config.overlap and not (learns or late or (searches and first))
        return Mode(searches=searches, tracks_usage=searches or learns, launches_early=early)


# Which parameters took part in a step, on this rank and on any.

_LABEL = profiler_label("ddp", "usage")


class LocallyUsedMap:
    """A flag per parameter, summed over ranks on request.

    A parameter that only other ranks used gets their average; one that nobody used keeps the gradient it had, so that
    optimizers skip it (no weight decay), as under stock DDP.

    Args:
        count: Number of parameters.
        group: The process group.
        device: Where its collectives run.

    Attributes:
        alike: Whether in the last map with counts each parameter was used once by all ranks, or by none.
    """

    def __init__(self, count: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._used, self._world = [0] * count, group.size()
        self._counted = self.alike = False
        self._device = device
        self._last = torch.zeros(count, dtype=torch.int32, device=device)
        self._all_reduce = AllReduce(group, device)
        self._map: torch.Tensor | None = None
        self._work: Work | None = None

    def note(self, index: int) -> None:
        """Remember that this rank gave the parameter a gradient."""
        self._used[index] = 1

    def all_used(self) -> bool:
        """Tell whether this rank used every parameter."""
        return all(self._used)

    def launch(self, counts: Sequence[int] = ()) -> None:
        """Start the sum over ranks; with counts, how often this rank used each parameter, :attr:`alike` is told."""
        self._counted = bool(counts)
        several = self._world + 1  # which makes a sum that no ranks have that used it once
        by_count = [one * (several if n > 1 else 1) for one, n in zip(self._used, counts, strict=False)]
        self._map = torch.tensor(by_count or self._used, dtype=torch.int32, device=self._device)
        with profiler_span(_LABEL):
            (self._work,) = self._all_reduce([self._map])

    def launched(self) -> bool:
        """Tell whether a sum is under way."""
        return self._work is not None

    def nowhere_used(self) -> frozenset[int]:
        """Return the parameters that no rank used, and start afresh.

        Reading the sum makes the host wait for the device, so it is read only if this rank left a parameter out, or
        has counted.
        """
        assert self._map is not None
        assert self._work is not None
        self._work.wait()
        totals = self._map.tolist() if self._counted or not self.all_used() else ()
        if self._counted:
            self.alike = all(total in (0, self._world) for total in totals)
        nowhere = frozenset(i for i, total in enumerate(totals) if total == 0)
        self._used = [0] * len(self._used)
        self._last, self._map, self._work = self._map, None, None
        return nowhere

    def last(self) -> torch.Tensor:
        """Return by how many ranks each parameter was used in the last step, int32, ``[count]``."""
        return self._last


class UnusedParams:
    """Which parameters a backward leaves out, as far as autograd knows when it begins.

    A parameter that came although it was not to be reached (its gradient is made by a backward inside the backward) is
    waited for from then on.
    """

    def __init__(self) -> None:
        self._nested: set[int] = set()

    def came(self, index: int) -> None:
        """Remember a parameter that :meth:`left_out` has not foreseen."""
        self._nested.add(index)

    def left_out(self, nodes: Sequence[Node]) -> list[int]:
        """Return the parameters not to wait for. Only valid inside a backward; nothing was launched in the first."""
        return [i for i, comes in enumerate(executed(nodes)) if not comes and i not in self._nested]


class GradReducer(BackwardReducer, StockOnly):
    """Averages the gradients of one model over the ranks of a process group.

    Args:
        group: The process group.
        params: The parameters, the same on all ranks, in registration order.
        names: Their fully qualified names, for messages and profiles.
        config: How to reduce.

    Attributes:
        on_first_use: Called once, when the first backward that will be reduced begins.
        hands: Who may change gradients while backward runs; see [Note: foreign hands].
        name: Of the model, the same on all ranks and no other's in the process group.
        times: When the phases of this step began and ended.
        left_out: Parameters that the last backward left out, where that is searched.
        buckets_reduced: How many buckets the last backward reduced.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        config: ReducerConfig,
    ) -> None:
        super().__init__()
        self.params, self.names = list(params), list(names)
        self.config = config
        self.static_graph = self.has_rebuilt_buckets = False
        self.on_first_use: Callable[[], None] | None = None
        self.hands = ForeignHooks(params)
        self.name, self._attached, self._steps, self._ended = "", 0, 0, False
        self._group = group
        self._thread: Callable[[], threading.Thread | None] = _no_thread
        self.times, self.left_out, self.buckets_reduced = StepTimes(), list[int](), 0
        self._graph_changed, self._installed = False, list[torch.futures.Future[Any]]()
        self._logger: Callable[[], ReducerLogger | None] = _no_logger
        self._static_counts: list[int] | None = None
        self._static_nowhere: frozenset[int] = frozenset()
        self._flags_raised = self._late = False
        register_reducer(self.params, self)
        self._attach()

    # ---------------------------------------------------------------- what DistributedDataParallel calls

    @torch._disable_dynamo
    def prepare_for_forward(self) -> None:
        """Called before a forward that will be synchronised."""
        self.times.forward_begins()
        self._finish_previous()
        self._flags.raise_for_failures(errors.peer_lost_backward)
        if self._hooks.lost():
            self._attach_anew()
        sharder = self.sharder
        if sharder.is_active and sharder.update_sharded(self._flags.result(self._steps)):
            self._hooks.set_prehooks(sharder.watched_params(), sharder)
            self._set_buckets()

    @torch._disable_dynamo
    def prepare_for_backward(self, _outputs: Sequence[Tensor]) -> None:
        """Arm the reducer for the next backward. The outputs come by :meth:`watch`."""
        self._finish_previous()
        if self.state is ReducerState.REDUCING:
            return  # a checkpoint recomputes the forward inside the backward that this would arm
        self._arm([ANY] * len(self.params) if self.learns_static_graph() else self._static_counts)

    @torch._disable_dynamo
    def watch(self, output: Any, *, synchronised: bool = True) -> None:
        """Begin the step when the backward reaches one of the tensors in the forward's output.

        That is in the outermost graph task and before any parameter's hook, so a backward that raises before the
        first gradient still takes part in the step's collectives.
        """
        if self.state is not ReducerState.IDLE:  # maybe by an earlier forward; one under no_sync is never reduced late
            watch_outputs(output, self._output_reached if synchronised else self._local_output_reached)

    @torch._disable_dynamo
    def _rebuild_buckets(self) -> bool:
        """Cut the buckets anew, once, along the order of the first backward; return whether that was done."""
        self.recover()  # a forward under no_sync comes by here only, before it broadcasts buffers
        # Not by what arrived: a rank whose first backward failed takes part in the broadcast as well.
        if self.has_rebuilt_buckets or not self._ordered or self._is_unfinished() or self._mode.searches:
            return False
        self.sharder.wait_for_hosts()
        self._cutting.agree()
        self._set_buckets()
        self.has_rebuilt_buckets = True
        return True

    def _set_static_graph(self) -> None:
        if self._steps or self.armed:
            raise self._told(errors.STATIC_GRAPH_TOO_LATE)
        self.static_graph = True
        self._set_mode()

    def _delay_all_reduce(self) -> None:
        """End of the first backward of a static graph: learn how often each parameter is used, then reduce."""
        with self._lock:
            if not self.armed:
                raise self._told(errors.STATIC_GRAPH_UNSYNCHRONISED)
            self._agree_at_first()  # if not a single gradient has come
            counts = [self._sync.count_of(i) for i in range(len(self.params))]
            self._sync.skip_unused(counts)
            self._finish(counts)
            self._static_counts = counts

    def _check_reducer_finalized(self) -> None:
        if self._is_unfinished():
            raise self._told(self._unfinished())

    def _is_unfinished(self) -> bool:
        return self.state in (ReducerState.REDUCING, ReducerState.FAILED)

    def _remove_autograd_hooks(self) -> None:
        self._hooks.remove()

    def _reset_state(self) -> None:
        """Forget the running step and the order of gradients; the process group is about to change."""
        self._static_counts = None
        self._attach_anew()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._reset_state()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.times.rate = rate

    def set_logger(self, logger: ReducerLogger) -> None:
        """Tell the logger of errors from now on; it holds this reducer, so it is held weakly."""
        self._logger = weakref.ref(logger)

    @torch._disable_dynamo
    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Wait for these at the end of the next backward that is reduced, besides those that are installed already."""
        self._installed += futures

    def _get_local_used_map(self) -> Tensor:
        """Return by how many ranks each parameter was used in the last step, as far as ranks tell each other."""
        return self._usage.last()

    def _ddp_graph_static(self) -> bool:
        """Tell whether all backwards so far left the same parameters out."""
        return not self._graph_changed

    def came(self) -> list[int]:
        """Return the parameters in the order in which their gradients came, as far as that was noted."""
        return self._cutting.last()

    # ---------------------------------------------------------------- what the autograd engine calls

    def _output_reached(self) -> None:
        with self._lock:
            if self.state is ReducerState.FAILED or (self.state is ReducerState.REDUCING and self._task.queued):
                return
            if self.state is ReducerState.IDLE:
                if not self.config.late:
                    return
                self._revisited, self.quiet = True, False
            self._task.queue_callback(self._backward_ended, self._backward_died)
            if accumulates(self._hooks.nodes):
                self._join_backward()

    def _local_output_reached(self) -> None:
        if self.armed:
            self._output_reached()

    def _arm_late(self) -> bool:
        """Reduce a further backward through a forward that was reduced before; see [Note: late backward]."""
        if not (self._revisited and self._task.is_alive()):
            self.sharder.local, self.quiet = True, not (self._revisited or self._mode.tracks_usage)
            return False
        meet_for_late_backward(self._group, self.identity, self._steps, group_timeout_s(self._group, self._device))
        self._late = True
        self._arm(self._static_counts)
        COUNTERS.late_backwards += 1
        return True

    def _agree_at_first(self) -> None:
        """Do what takes all ranks before the first reduction; not in a forward, which one rank may run alone."""
        if self.on_first_use is not None:
            self.on_first_use()
            self.on_first_use = None
        if self._lane is None:
            self._make_communicator()

    def _on_backward_start(self) -> None:
        self._agree_at_first()
        if self.times.sampled:
            self.times.note("backward_compute_time_start")
        if torch.is_grad_enabled():
            warn_of_create_graph()
        self._copies_at_once = self.hands.present() or self._hooks.foreign()
        if self.sharder.is_active:
            self.sharder.on_backward_start(staged=self._copies_at_once, counts=self._static_counts)
        if not self.has_rebuilt_buckets and not self._late:
            self._cutting.backward_begins()
        if self._mode.searches:
            with profiler_span("torch.distributed.ddp.reducer::search_unused_parameters"):  # stock's name
                self._skip_unused(self._search.left_out(self._hooks.nodes))

    def _skip_unused(self, indices: list[int]) -> None:
        for index in indices:
            self._sync.skip_param(index)
        if self.config.find_unused_parameters:  # not for late backwards, which always search
            self._graph_changed |= self._ended and indices != self.left_out
            self.left_out = indices

    def gradient_accumulated(self, index: int, node_grad: Tensor | None) -> None:
        """The gradient ``node_grad`` has been added to ``grad`` of parameter ``index``; called on an engine thread."""
        with self._lock:
            reduced = (self.state is ReducerState.REDUCING and self._task.queued) or self._join_backward()
            if self._mode.tracks_usage and self.params[index].grad is not None:
                self._usage.note(index)  # also under no_sync: the accumulated gradient is reduced later
            try:
                if reduced and self._sync.count_grad(index, adds=node_grad is not None):
                    self._grad_complete(index, node_grad)
            except SurplusGradientError as error:
                self._told(str(error))
                raise

    def expect_contributions(self, index: int, count: int) -> None:
        """Parameter ``index`` gets ``count`` contributions that are marked, in this backward."""
        with self._lock:
            if self._join_backward():
                self._search.came(index)
            if self._mode.tracks_usage:
                self._usage.note(index)  # work without autograd is not seen to add anything
            if not self._sync.expect(index, count):
                raise self._told(errors.late_declaration(self.names[index]))

    def _grad_complete(self, index: int, node_grad: Tensor | None) -> None:
        sync = self._sync
        if index in sync.absent:
            self._search.came(index)
        if not sync.register_grad_ready(index):
            raise self._told(errors.late(self.names[index]))
        if not self.has_rebuilt_buckets and not self._late:
            self._cutting.came(index)
        if self._copies_at_once:
            sync.stage(index)
        if sync.has_ready_bucket and self._mode.launches_early:
            sync.start_ready_buckets(COUNTERS.launched_early, node_grad)

    def _backward_ended(self) -> None:
        self._revisited = False
        super()._backward_ended()

    def _is_complete(self) -> bool:
        if self.static_graph and self._static_counts is None:
            return False  # DistributedDataParallel calls _delay_all_reduce()
        return self._mode.searches or not self._sync.missing_params()

    def _finish(self, counts: Sequence[int] = ()) -> None:
        if self.times.sampled:
            self.times.note("backward_compute_time_end")
        self._counts = counts
        super()._finish()
        self.buckets_reduced = self._sync.reduced
        if self.times.sampled:
            self.times.note("backward_comm_time_end")
        if self._installed:
            self._wait_for_installed()
        COUNTERS.backwards += 1
        if self._device.type != "cuda":
            self._flags.raise_for_failures(errors.peer_lost_backward)

    def _reduce_rest(self) -> None:
        self._sync.start_grad_sync(COUNTERS.launched)
        if self._mode.tracks_usage:
            self._usage.launch(self._counts)
        self._raise_flags(failed=False)
        if self.sharder.is_active:
            self.sharder.wait_for_grads(self._sync)
        else:
            self._sync.wait()
        nowhere = self._usage.nowhere_used() if self._mode.tracks_usage else self._static_nowhere
        if self._counts:
            self._static_nowhere = nowhere
        self._sync.finish_grad_sync(nowhere)
        if self.sharder.is_active:
            self.sharder.fill_shared_grads()
        self._ended = True

    def _go_idle(self) -> None:
        super()._go_idle()
        self._ordered, self._steps = not self.learns_static_graph(), self._steps + 1
        if self._late:
            self._late = False
            self._set_mode()

    def _complete_failed(self) -> None:
        with profiler_span(profiler_label("ddp", "recover")):
            self._sync.start_zeros()
            if not self._flags_raised:
                if self._mode.tracks_usage:
                    self._usage.launch()
                self._raise_flags(failed=True)
            self.sharder.wait_for_grads(self._sync)
            if self._usage.launched():
                self._usage.nowhere_used()
            self._sync.drop()
        COUNTERS.recovered += 1

    def _raise_flags(self, *, failed: bool) -> None:
        self._flags_raised = True
        get_flags = self.sharder.get_flags if self.sharder.is_active else None
        self._flags.start_all_reduce(self._steps, failed=failed, get_flags=get_flags)

    def _wait_for_installed(self) -> None:
        installed, self._installed = self._installed, []
        torch.futures.wait_all(installed)

    # ---------------------------------------------------------------- the model

    def _attach(self) -> None:
        self._device = self.params[0].device
        self._hooks: GradientHooks = GradientHooks(self.params, self, sums_in_fp32=self.config.sums_in_fp32)
        self._usage = LocallyUsedMap(len(self.params), self._group, self._device)
        self._flags = StepFlags(self._group, self._device, "ddp")
        self._search = UnusedParams()
        self.state = ReducerState.IDLE
        self._task.queued = self._ordered = self._late = self._revisited = self.quiet = False
        self.has_rebuilt_buckets = False
        self._set_mode()
        self._lane: dist.ProcessGroup | None = None
        self._attached += 1
        sparse = [i for i, is_sparse in enumerate(self.config.sparse) if is_sparse]
        self.sharder: GradSharder = make_grad_sharder(
            self.params,
            self.names,
            self._group,
            sparse=sparse,
            in_fp32=self.config.in_fp32,
            sums_in_fp32=self.config.sums_in_fp32,
        )
        self.sharder.identity = self.identity
        layout = BucketAssignment(self.params, self.names, *self.config.layout, self.sharder)
        self._cutting = BucketOrder(layout, self._group)
        self._set_buckets()

    def _attach_anew(self) -> None:
        self._hooks.remove()
        self.sharder.retire()
        self._attach()

    def set_name(self, name: str) -> None:
        """Name the model, the same on all ranks and unlike others of the process group."""
        self.name = name
        self.sharder.identity = self.identity  # an optimizer may step before the first forward

    @property
    def identity(self) -> str:
        """The name, and how often the model was taken over, as after a cast: the same on all ranks."""
        return f"{self.name}, {self._attached}" if self._attached > 1 else self.name

    def _make_communicator(self) -> None:
        """Make the communicator with an SM budget, if there is one, all ranks together."""
        self._lane = with_budget(self._group, self.config.max_ctas)
        if self._lane is not self._group:
            self._set_buckets()

    def _set_buckets(self) -> None:
        buckets, group = self._cutting.buckets(bucketed=self._mode.searches), self._lane or self._group
        self.sharder.bind(self, group)
        self._sync = GradSync(
            buckets,
            group,
            feature="ddp",
            names=self.names,
            meet=functools.partial(self.times.first_collective, self.sharder.before_first_collective),
            in_flight=self.sharder.max_inflight_bytes,
            average=self.config.average,
            skip_absent=self.config.skip_unused,
        )
        if self.armed:
            self._sync.start_backward()

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are reduced."""
        return self._sync.buckets

    def _arm(self, expected: Sequence[int] | None = None) -> None:
        self._flags_raised = False
        if not self._late:  # a late backward is armed by a thread of the engine, maybe
            self._thread = weakref.ref(threading.current_thread())
        self._set_mode()
        super()._arm(expected)

    def is_of_another_thread(self) -> bool:
        """Return whether another thread, which is still alive, has armed the reducer: its steps are that thread's."""
        thread = self._thread()
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    # ---------------------------------------------------------------- what can go wrong

    def _finish_previous(self) -> None:
        if self.state is ReducerState.REDUCING and not self._task.queued:
            raise self._told(self._unfinished())
        if self.state in (ReducerState.REDUCING, ReducerState.FAILED):
            self.recover()

    def _unfinished(self) -> str:
        missing = {i: self.names[i] for i in self._sync.missing_params()}
        if self.static_graph:
            return errors.static_graph_lacks(missing, self._group.rank())
        return errors.unfinished(missing, self._group.rank(), searched=self.config.find_unused_parameters)

    def _told(self, text: str) -> RuntimeError:
        """Return an error of which the logger knows."""
        logger = self._logger()
        if logger is not None:
            logger.set_error_and_log(text)
        return RuntimeError(text)

    # ---------------------------------------------------------------- modes

    def plain_indices(self) -> list[int] | None:
        """Return which parameters a static graph uses; None if it is not known to use each once, on all ranks alike."""
        if self._static_counts is None or not self._usage.alike:
            return None
        return [i for i in range(len(self.params)) if i not in self._static_nowhere]

    def learns_static_graph(self) -> bool:
        """Tell whether the first backward of a static graph, which shows the use of each parameter, is to come."""
        return self.static_graph and self._static_counts is None

    def _set_mode(self) -> None:
        learns, static = self.learns_static_graph(), self.static_graph
        self._mode = Mode.of(self.config, learns=learns, static=static, late=self._late, first=not self._ended)


def _no_logger() -> None:
    return None


def _no_thread() -> None:
    return None
