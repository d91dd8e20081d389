"""The gradient reducer that replaces torch's C++ ``Reducer`` inside ``DistributedDataParallel``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.consensus import check_consistent
from ovpatch.overlap.comm.lifetimes import group_timeout_s
from ovpatch.overlap.comm.step_flags import StepFlags
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.data_parallel.backward_reducer import BackwardReducer, ReducerState
from ovpatch.overlap.data_parallel.bucket_assignment import BucketAssignment
from ovpatch.overlap.data_parallel.grad_bucket import Bucket
from ovpatch.overlap.data_parallel.grad_hooks import ForeignHooks, GradHooks, watch_outputs
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder, make_grad_sharder
from ovpatch.overlap.data_parallel.grad_sync import ANY, GradSync, SurplusGradientError, register_reducer
from ovpatch.overlap.data_parallel.graph_tasks import find_executed, is_compiled_autograd_on, will_accumulate
from ovpatch.overlap.data_parallel.usage_map import UsageMap
from ovpatch_plugins.ddp import report
from ovpatch_plugins.ddp.nccl_budget import get_budgeted_group
from ovpatch_plugins.ddp.options import DDPConfig
from ovpatch_plugins.ddp.reducer_stub import ReducerLogger, StepTimes, StockOnly
from ovpatch_plugins.ddp.report import COUNTERS, warn_of_create_graph


def wait_for_late_backward(group: dist.ProcessGroup, model: str, number: int, timeout_s: float) -> None:
    """Wait until every rank runs a further backward through a forward of the same model that was reduced before.

    Args:
        group: The process group.
        model: Name of the model, the same on all ranks and no other's.
        number: How many of its backwards have been reduced.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        RankMismatchError: Some ranks run no such backward, or one of another model.
    """
    terms = {"model": model, "backward number": number}
    check_consistent(group, "ddp, second backward", terms, timeout_s=timeout_s, remedy=report.LATE_ON_SOME_RANKS)


# --- the reducer ---


_SEARCH_LABEL = "torch.distributed.ddp.reducer::search_unused_parameters"  # stock's name
_RECOVER_LABEL = profiler_label("ddp", "recover")


class GradReducer(BackwardReducer, StockOnly):
    """Averages the gradients of one model over the ranks of a process group.

    The methods stand in the order of a step. ``prepare_for_backward`` arms the reducer at the end of a forward that is
    synchronised. The backward that follows begins the step when it reaches the forward's output. Buckets are reduced
    as they fill. The engine's callback at the end of the backward waits for the collectives and makes ``p.grad`` the
    average. ``torch.compile`` of the wrapper breaks its graph where the wrapper calls the C++ reducer; methods that are
    hidden from Dynamo make it break in the same places.

    [Note: late backward] Stock DDP reduces one backward per forward. A second one through the same outputs
    (retain_graph, or two forwards and then two backwards) adds gradients that stay local, and ranks drift apart in
    silence. Here it is a step of its own: ``p.grad`` holds the average already, which averaging once more leaves as it
    is, plus this rank's part, which gets averaged. Ranks meet in the store first, because a backward on some ranks only
    would pair its collectives with others.

    Args:
        group: The process group.
        params: The parameters, the same on all ranks, in registration order.
        names: Their fully qualified names.
        config: How to reduce.

    Attributes:
        on_first_use: Called once, when the first backward that will be reduced begins.
        foreign_hooks: The script's hooks, which gradients must reach unchanged.
        name: Of the model, the same on all ranks and no other's in the process group.
        times: When the phases of this step began and ended.
        unused: Parameters that the last backward left out, where that is searched.
        buckets_reduced: How many buckets the last backward reduced.
        learns_graph: Whether the next backward, the first of a static graph, shows how often each parameter is used.
    """

    _assignment: BucketAssignment
    _budgeted: dist.ProcessGroup | None

    def __init__(
        self,
        group: dist.ProcessGroup,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        config: DDPConfig,
    ) -> None:
        super().__init__()
        self.params, self.names, self.config = list(params), list(names), config
        self.static_graph = self.has_rebuilt_buckets = self.learns_graph = False
        self.on_first_use: Callable[[], None] | None = None
        self.foreign_hooks = ForeignHooks(params)
        self.name, self._attached, self._steps, self._has_reduced = "", 0, 0, False
        self._group = group
        self._thread: Callable[[], threading.Thread | None] = _no_thread
        self.times, self.unused, self.buckets_reduced = StepTimes(), list[int](), 0
        self._graph_changed, self._futures = False, list[torch.futures.Future[Any]]()
        self._logger: Callable[[], ReducerLogger | None] = _no_logger
        self._static_counts: list[int] | None = None
        self._static_unused: frozenset[int] = frozenset()
        self._flags_raised = self._is_late = False
        register_reducer(self.params, self)
        self._attach()

    # ---------------------------------------------------------------- before a forward

    @torch._disable_dynamo
    def prepare_for_forward(self) -> None:
        """Called before a forward that will be synchronised."""
        self.times.begin_forward()
        self._finish_previous()
        if self._device.type == "cuda":  # elsewhere the backward has looked
            self._flags.raise_for_failures(report.say_peer_lost_backward)
        if self._hooks.are_lost():
            self._attach_anew()
        sharder = self.sharder
        if sharder.is_active and sharder.update_sharded(self._flags.result(self._steps)):
            self._hooks.set_prehooks(sharder.watched_params(), sharder)
            self._make_sync()

    def _finish_previous(self) -> None:
        if self.state is ReducerState.IDLE or self.state is ReducerState.ARMED:
            return
        if self.state is ReducerState.REDUCING and not self._task.queued:
            raise self._log_error(self._describe_unfinished())
        self.recover()

    @torch._disable_dynamo
    def _rebuild_buckets(self) -> bool:
        """Assign buckets again, once, along the order of the first backward; return whether that was done."""
        if self.state is not ReducerState.IDLE:
            self._finish_previous()  # a forward under no_sync comes by here only, before it broadcasts buffers
        # Not by the gradients that came: a rank whose first backward failed takes part in the broadcast as well.
        if self.has_rebuilt_buckets or not self._has_order or self._is_unfinished() or self._searches:
            return False
        self.sharder.wait_for_hosts()
        self._assignment.broadcast_order(self._group)
        self._make_sync()
        self.has_rebuilt_buckets = True
        return True

    # ---------------------------------------------------------------- after a forward

    @torch._disable_dynamo
    def prepare_for_backward(self, _outputs: Sequence[Tensor]) -> None:
        """Arm the reducer for the next backward. The outputs come by :meth:`watch_output`."""
        if self.state is not ReducerState.IDLE:
            self._finish_previous()
            if self.state is ReducerState.REDUCING:
                return  # a checkpoint recomputes the forward inside the backward that this would arm
        self._arm([ANY] * len(self.params) if self.learns_graph else self._static_counts)

    def _arm(self, expected: Sequence[int] | None = None) -> None:
        self._flags_raised = self._only_counts = False
        if not self._is_late:  # a late backward is armed by a thread of the engine, maybe
            self._thread = weakref.ref(threading.current_thread())
        self._choose_mode()
        super()._arm(expected)

    def _choose_mode(self) -> None:
        """Set what every hook of the next backward would ask."""
        searches = self._is_late or (self.config.find_unused_parameters and not self.static_graph)
        self._searches = searches  # which parameters it leaves out is found when it begins
        self._tracks_usage = searches or self.learns_graph  # ranks tell each other which parameters they used
        waits = self.learns_graph or self._is_late or (searches and not self._has_reduced)
        self._starts_early = self.config.overlap and not waits  # buckets are reduced while it computes

    @torch._disable_dynamo
    def watch_output(self, output: Any, *, synchronised: bool = True) -> None:
        """Begin the step when the backward reaches one of the tensors in the forward's output.

        That is in the outermost graph task and before any parameter's hook, so a backward that raises before the
        first gradient still takes part in the step's collectives.
        """
        if self.state is not ReducerState.IDLE:  # maybe by an earlier forward; one under no_sync is never reduced late
            watch_outputs(output, self._output_reached if synchronised else self._local_output_reached)

    # ---------------------------------------------------------------- the start of a backward

    def _output_reached(self) -> None:
        with self._lock:
            if self.state is ReducerState.FAILED or (self.state is ReducerState.REDUCING and self._task.queued):
                return
            if self.state is ReducerState.IDLE:
                if not self.config.late:
                    return
                self._is_revisited, self.quiet = True, False
            self._task.queue_callback(self._backward_ended, self._backward_died)
            if will_accumulate(self._hooks.nodes):
                self._join_backward()

    def _local_output_reached(self) -> None:
        if self.armed:
            self._output_reached()

    def _arm_late(self) -> bool:
        """Reduce a further backward through a forward that was reduced before; see [Note: late backward]."""
        if not (self._is_revisited and self._task.is_alive()):
            self.sharder.local, self.quiet = True, not (self._is_revisited or self._tracks_usage)
            return False
        wait_for_late_backward(self._group, self.identity, self._steps, group_timeout_s(self._group, self._device))
        self._is_late = True
        self._arm(self._static_counts)
        COUNTERS.late_backwards += 1
        return True

    def _on_backward_start(self) -> None:
        if is_compiled_autograd_on():
            raise self._log_error(report.COMPILED_AUTOGRAD)
        self._agree_at_first()
        if self.times.sampled:
            self.times.record("backward_compute_time_start")
        if torch.is_grad_enabled():
            warn_of_create_graph()
        self._stages = self.foreign_hooks.has_any() or self._hooks.has_foreign()
        if self.sharder.is_active:
            self.sharder.on_backward_start(staged=self._stages, counts=self._static_counts)
        self._records_order = not (self.has_rebuilt_buckets or self._is_late)
        # A gradient that comes has only to be counted.
        self._only_counts = not (self._stages or self._records_order or self._tracks_usage)
        if self._records_order:
            self._assignment.ready_order.clear()
        if self._searches:
            with profiler_span(_SEARCH_LABEL):
                self._skip_unused()

    def _agree_at_first(self) -> None:
        """Do what takes all ranks before the first reduction; not in a forward, which one rank may run alone."""
        if self.on_first_use is not None:
            self.on_first_use()
            self.on_first_use = None
        if self._budgeted is None:
            self._budgeted = get_budgeted_group(self._group, self.config.max_ctas)
            if self._budgeted is not self._group:
                self._make_sync()

    def _skip_unused(self) -> None:
        """Skip the parameters that this backward leaves out, as far as autograd knows when it begins.

        A parameter whose gradient came all the same, from a backward inside the backward, is waited for from then on.
        """
        will_come = find_executed(self._hooks.nodes)
        unused = [i for i, comes in enumerate(will_come) if not comes and i not in self._nested]
        for index in unused:
            self._sync.skip_param(index)
        if self.config.find_unused_parameters:  # not for late backwards, which always search
            self._graph_changed |= self._has_reduced and unused != self.unused
            self.unused = unused

    # ---------------------------------------------------------------- one gradient

    def on_grad_accumulated(self, index: int, node_grad: Tensor | None) -> None:
        """The gradient ``node_grad`` has been added to ``grad`` of parameter ``index``; called on an engine thread."""
        with self._lock:
            if self._only_counts and (missing := self._sync.count_once(index)) is not None:
                if not missing:
                    self._start_ready_buckets(node_grad)
                return
            is_joined = (self.state is ReducerState.REDUCING and self._task.queued) or self._join_backward()
            if self._tracks_usage and self.params[index].grad is not None:
                self._usage.record(index)  # also under no_sync: the accumulated gradient is reduced later
            try:
                if is_joined and self._sync.count_grad(index, adds=node_grad is not None):
                    self._grad_complete(index, node_grad)
            except SurplusGradientError as error:
                self._log_error(str(error))
                raise

    def expect_contributions(self, index: int, count: int) -> None:
        """Parameter ``index`` gets ``count`` contributions that are marked, in this backward."""
        with self._lock:
            if self._join_backward():
                self._nested.add(index)
            if self._tracks_usage:
                self._usage.record(index)  # work without autograd is not seen to add anything
            if not self._sync.expect_marks(index, count):
                raise self._log_error(report.say_late_declaration(self.names[index]))

    def _grad_complete(self, index: int, node_grad: Tensor | None) -> None:
        sync = self._sync
        if index in sync.absent:
            self._nested.add(index)
        if not sync.register_grad_ready(index):
            raise self._log_error(report.say_late(self.names[index]))
        if self._records_order:
            self._assignment.ready_order.append(index)
        if self._stages:
            sync.stage_grad(index)
        if sync.has_ready_bucket:
            self._start_ready_buckets(node_grad)

    def _start_ready_buckets(self, node_grad: Tensor | None) -> None:
        if self._starts_early:
            if self.times.sampled and not self._sync.launched:
                self.times.record("backward_comm_time_start")
            self._sync.start_ready_buckets(node_grad)

    # ---------------------------------------------------------------- the end of a backward

    def _backward_ended(self) -> None:
        self._is_revisited = self._only_counts = False
        super()._backward_ended()
        if self.state is ReducerState.REDUCING:  # gradients are missing, and what came is local until they come
            self.sharder.local = True

    def _is_complete(self) -> bool:
        if self.learns_graph:
            return False  # DistributedDataParallel calls _delay_all_reduce()
        return self._searches or not self._sync.missing_params()

    def _delay_all_reduce(self) -> None:
        """End of the first backward of a static graph: learn how often each parameter is used, then reduce."""
        with self._lock:
            if not self.armed:
                raise self._log_error(report.STATIC_GRAPH_UNSYNCHRONISED)
            self._agree_at_first()  # if not a single gradient has come
            counts = self._sync.get_counts()
            self._sync.skip_unused(counts)
            self._finish(counts)
            self._static_counts, self.learns_graph = counts, False

    def _finish(self, counts: Sequence[int] = ()) -> None:
        if self.times.sampled:
            self.times.record("backward_compute_time_end")
        self._counts = counts
        super()._finish()
        if self.times.sampled:
            self.times.record("backward_comm_time_end")
        if self._futures:
            futures, self._futures = self._futures, []
            torch.futures.wait_all(futures)
        COUNTERS.backwards += 1
        if self._device.type != "cuda":
            self._flags.raise_for_failures(report.say_peer_lost_backward)

    def _reduce_rest(self) -> None:
        sync, sharder = self._sync, self.sharder
        if self.times.sampled and not sync.launched:
            self.times.record("backward_comm_time_start")
        sync.start_grad_sync()
        if self._tracks_usage:
            self._usage.start_all_reduce(self._counts)
        self._raise_flags(failed=False)
        if sharder.is_active:
            sharder.wait_for_grads(sync)
        else:
            sync.wait()
        unused_anywhere = self._usage.finish_all_reduce() if self._tracks_usage else self._static_unused
        if self._counts:
            self._static_unused = unused_anywhere
        sync.finish_grad_sync(unused_anywhere)
        if sharder.is_active:
            sharder.fill_shared_grads()
        self._has_reduced = True

    def _raise_flags(self, *, failed: bool) -> None:
        self._flags_raised = True
        get_flags = self.sharder.get_flags if self.sharder.is_active else None
        self._flags.start_all_reduce(self._steps, failed=failed, get_flags=get_flags)

    def _go_idle(self) -> None:
        super()._go_idle()
        sync = self._sync
        self.buckets_reduced = sync.reduced
        COUNTERS.collectives += sync.reduced
        COUNTERS.collectives_in_backward += sync.reduced_early
        COUNTERS.bytes_reduced += sync.nbytes
        self._has_order, self._steps = not self.learns_graph, self._steps + 1
        if self._is_late:
            self._is_late = False
            self._choose_mode()

    # ---------------------------------------------------------------- what can go wrong

    def _complete_failed(self) -> None:
        with profiler_span(_RECOVER_LABEL):
            self._sync.start_zeros()
            if not self._flags_raised:
                if self._tracks_usage:
                    self._usage.start_all_reduce()
                self._raise_flags(failed=True)
            self.sharder.wait_for_grads(self._sync)
            if self._usage.is_reducing:
                self._usage.finish_all_reduce()
            self._sync.drop_inputs()
        COUNTERS.recovered += 1

    def _is_unfinished(self) -> bool:
        return self.state in (ReducerState.REDUCING, ReducerState.FAILED)

    def _describe_unfinished(self) -> str:
        missing = {i: self.names[i] for i in self._sync.missing_params()}
        if self.static_graph:
            return report.say_static_graph_lacks(missing, self._group.rank())
        return report.say_unfinished(missing, self._group.rank(), searched=self.config.find_unused_parameters)

    def _log_error(self, text: str) -> RuntimeError:
        """Return an error that the logger has been told of."""
        logger = self._logger()
        if logger is not None:
            logger.set_error_and_log(text)
        return RuntimeError(text)

    # ---------------------------------------------------------------- the model

    def _attach(self) -> None:
        self._device = self.params[0].device
        self._hooks = GradHooks(self.params, self, sums_in_fp32=self.config.sums_in_fp32)
        self._usage = UsageMap(len(self.params), self._group, self._device)
        self._flags = StepFlags(self._group, self._device, "ddp")
        self._nested: set[int] = set()  # parameters whose gradients a backward inside the backward makes
        self.state = ReducerState.IDLE
        self._task.queued = self._has_order = self._is_late = self._is_revisited = self.quiet = False
        self._stages = self._records_order = self._only_counts = False
        self.has_rebuilt_buckets = False
        self._choose_mode()
        self._budgeted = None
        self._attached += 1
        config = self.config
        sparse = [i for i, is_sparse in enumerate(config.sparse) if is_sparse]
        self.sharder: GradSharder = GradSharder()
        if config.sharded:
            self.sharder = make_grad_sharder(
                self.params,
                self.names,
                self._group,
                sparse=sparse,
                in_fp32=config.in_fp32,
                sums_in_fp32=config.sums_in_fp32,
            )
        self.sharder.identity = self.identity
        self._assignment = BucketAssignment(
            self.params,
            self.names,
            config.bucket_limits,
            config.granularity,
            config.in_fp32,
            config.sparse,
            self.sharder,
        )
        self._make_sync()

    def _attach_anew(self) -> None:
        self._hooks.remove()
        self.sharder.retire()
        self._attach()

    def _make_sync(self) -> None:
        group, sharder = self._budgeted or self._group, self.sharder
        sharder.bind(self, group)
        self._sync = GradSync(
            self._assignment.make_buckets(bucketed=self._searches),
            group,
            feature="ddp",
            names=self.names,
            before_first=sharder.before_first_collective if sharder.is_active else None,
            before_wait=sharder.finish_host_barrier if sharder.is_active else None,
            max_inflight_bytes=sharder.max_inflight_bytes,
            average=self.config.average,
            skip_absent=self.config.skip_unused,
        )
        if self.armed:
            self._sync.start_backward()

    def set_name(self, name: str) -> None:
        """Name the model, the same on all ranks and unlike others of the process group."""
        self.name = name
        self.sharder.identity = self.identity  # an optimizer may step before the first forward

    @property
    def identity(self) -> str:
        """The name, and how often the model was taken over, as after a cast: the same on all ranks."""
        return f"{self.name}, {self._attached}" if self._attached > 1 else self.name

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are reduced."""
        return self._sync.buckets

    @property
    def ready_order(self) -> list[int]:
        """The parameters in the order in which their gradients became ready, as far as that was recorded."""
        return self._assignment.ready_order

    def is_of_another_thread(self) -> bool:
        """Return whether another thread, which is still alive, has armed the reducer: its steps are that thread's."""
        thread = self._thread()
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def get_plain_params(self) -> list[int] | None:
        """Return which parameters a static graph uses; None if it is not known to use each once, on all ranks alike."""
        if self._static_counts is None or not self._usage.is_uniform:
            return None
        return [i for i in range(len(self.params)) if i not in self._static_unused]

    # ---------------------------------------------------------------- what else DistributedDataParallel calls

    def _set_static_graph(self) -> None:
        if self._steps or self.armed:
            raise self._log_error(report.STATIC_GRAPH_TOO_LATE)
        self.static_graph = self.learns_graph = True
        self._choose_mode()

    def _check_reducer_finalized(self) -> None:
        if self._is_unfinished():
            raise self._log_error(self._describe_unfinished())

    def _remove_autograd_hooks(self) -> None:
        self._hooks.remove()

    def _reset_state(self) -> None:
        """Drop the running step and the order of gradients; the process group is about to change."""
        self._static_counts, self.learns_graph = None, self.static_graph
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
        self._futures += futures

    def _get_local_used_map(self) -> Tensor:
        """Return by how many ranks each parameter was used in the last step, as far as ranks tell each other."""
        return self._usage.last

    def _ddp_graph_static(self) -> bool:
        """Return whether all backwards so far left the same parameters out."""
        return not self._graph_changed


def _no_logger() -> None:
    return None


def _no_thread() -> None:
    return None
