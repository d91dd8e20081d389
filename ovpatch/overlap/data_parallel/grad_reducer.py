"""The gradient reducer: it reduces the gradients of one model, backward after backward.

A step passes through these methods of :class:`GradReducer`, and from there through these files:

1. ``prepare_for_forward``: ``DistributedDataParallel`` calls it through its stub
   (``ddp/reducer_stub.py``). What ranks have agreed on takes effect (``comm/step_flags.py``).
2. ``arm``: the forward has ended. A patch (``ddp/ddp_attach.py``) has hooks watch its output
   (``grad_hooks.py``).
3. ``on_output_reached``: the backward begins. It has a plan (``backward_plan.py``), and a callback at
   the end of its graph task (``overlap/autograd.py``).
4. ``on_grad_accumulated``: a hook (``grad_hooks.py``) calls it for each gradient. ``GradSync``
   (``grad_sync.py``) packs each full bucket (``grad_bucket.py``, or ``sharded_bucket.py`` of
   ``dist_optimizer``), and starts its collective (``comm/collectives.py``).
5. ``_finish_backward``: the host waits for the collectives of buckets (``GradSync.wait``, or
   ``wait_for_grads`` in ``sharded_grads.py`` of ``dist_optimizer``), then for the usage map
   (``usage_map.py``) and the flags. Buckets write every ``p.grad``, and the owner counts
   (``WrapperCalls.after_backward`` in ``ddp/reducer_stub.py``). With ``dist_optimizer`` peers learn
   of new shards (``peer_rpc/sequence_lock.py``), and gradients become lazy
   (``tensors/lazy_tensor.py``).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from ovpatch.overlap.autograd import (
    GraphTask,
    find_executed,
    is_compiled_autograd_on,
    will_accumulate,
)
from ovpatch.overlap.comm.hosts import HostLayout
from ovpatch.overlap.comm.step_flags import StepFlags
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.data_parallel.backward_plan import (
    BackwardKind,
    BackwardPlan,
    PlanFacts,
    plan_backward,
)
from ovpatch.overlap.data_parallel.bucket_assignment import BucketAssignment
from ovpatch.overlap.data_parallel.grad_bucket import Bucket, GradBucket
from ovpatch.overlap.data_parallel.grad_hooks import GradHooks
from ovpatch.overlap.data_parallel.grad_sharder import GradSharder, make_grad_sharder
from ovpatch.overlap.data_parallel.grad_sync import (
    HOOK,
    GradReadiness,
    GradSync,
    SurplusGradientError,
    register_reducer,
)
from ovpatch.overlap.data_parallel.usage_map import UsageMap

# Stock PyTorch's name of this range in profiles.
_SEARCH_LABEL: Final = "torch.distributed.ddp.reducer::search_unused_parameters"
_RECOVER_LABEL: Final = profiler_label("ddp", "recover")

_ERROR_COMPILED_AUTOGRAD: Final = (
    "ovpatch: a backward under compiled autograd cannot reduce gradients, because compiled code "
    'calls no reducer. Set torch._dynamo.config.optimize_ddp = "python_reducer" before '
    "DistributedDataParallel(...) is constructed."
)

_ERROR_LATE_GRAD: Final = (
    "ovpatch: parameter '{}' got a gradient after its bucket had been reduced: only a reentrant "
    "checkpoint uses it, where find_unused_parameters=True cannot see it. Use "
    "checkpoint(..., use_reentrant=False), or turn the feature off with OVPATCH_DDP=0."
)

_ERROR_LATE_DECLARATION: Final = (
    "ovpatch: contributions to parameter '{}' were declared after its bucket had been reduced: it "
    "takes part in this backward for the first time, inside a module that works in chunks, where "
    "find_unused_parameters=True and static_graph=True cannot see it. Use all such modules in the "
    "first step, or set OVPATCH_DDP_OVERLAP_GRAD_REDUCE=0."
)


def say_peer_lost_backward(steps: range) -> str:
    """Return the error that another rank's part is missing in this rank's gradients."""
    when = f"step {steps[0]}" if len(steps) == 1 else f"a step from {steps[0]} to {steps[-1]}"
    return (
        f"ovpatch: an exception ended the backward of {when} on another rank while this rank's "
        "went well, so the averaged gradients of that step lack a part. Restart from the last "
        "checkpoint, and let the script either skip a failed step on all ranks or end with the "
        "exception."
    )


class ReducerState(enum.Enum):
    """The states of a reducer."""

    #: The next backward stays local.
    IDLE = enum.auto()
    #: A forward has run; the next backward that reaches its output is reduced.
    ARMED = enum.auto()
    #: That backward is running, or has ended with gradients missing.
    REDUCING = enum.auto()
    #: An exception ended that backward; :meth:`GradReducer.recover` completes its collectives.
    FAILED = enum.auto()


@dataclass(frozen=True)
class ReducerConfig:
    """The settings of a reducer, the same on all ranks.

    Attributes:
        facts: What backward plans depend on when the model is wrapped.
        feature: Name of the feature, for labels.
        remedy: Another remedy for a second contribution to a gradient, as the end of an imperative.
        bucket_limits: Capacity of the first, second, … bucket in bytes; the last one holds for all
            that follow.
        granularity: ``size``, ``layer`` or ``module``, see :class:`.BucketAssignment`.
        sparse: Whether each parameter's gradient will be sparse.
        skips_unused: Whether buckets are left out if their parameters are unused on all ranks.
        in_fp32: Whether low-precision gradients are reduced in float32.
        sums_in_fp32: Whether they are added up in float32 over several backwards.
        average: Whether the collective divides by the number of ranks.
        sharded: Whether gradients may be sharded, if a feature does that.
        layout: The hosts of the process group; None if its ranks have not compared them.
        reduces_by_host: Whether all-reduces work within hosts first.
    """

    facts: PlanFacts = field(default_factory=PlanFacts)
    feature: str = "ddp"
    remedy: str = "turn the feature off with OVPATCH_DDP=0"
    bucket_limits: tuple[int, ...] = (0,)
    granularity: str = "size"
    sparse: tuple[bool, ...] = ()
    skips_unused: bool = False
    in_fp32: bool = False
    sums_in_fp32: bool = False
    average: bool = False
    sharded: bool = False
    layout: HostLayout | None = None
    reduces_by_host: bool = False


class ReducerOwner:
    """The calls by which a reducer involves its owner; by default they do nothing.

    The reducer holds this object. It must not hold the reducer, or both would live until the next
    garbage collection.
    """

    def meet(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Do the work that takes all ranks, and return the communicator for the collectives.

        This comes in the first backward and not in a forward, which one rank may run alone.

        Args:
            group: The process group of the model.
        """
        return group

    def find_nodes(self, hooks: GradHooks) -> Sequence[Node]:
        """Return the AccumulateGrad nodes of which a backward reaches one, and ``grad()`` none."""
        return hooks.nodes

    def warn_of_create_graph(self) -> None:
        """Warn that gradients of gradients are not reduced."""

    def describe_missing(self, missing: Mapping[int, str], facts: PlanFacts, rank: int) -> str:
        """Return the error that a backward has ended and some parameters lack gradients.

        Args:
            missing: The names of these parameters, by index.
            facts: The facts about the model.
            rank: This rank in the process group.
        """
        del facts, rank
        return (
            "ovpatch: these parameters got no gradient in the last backward: "
            f"{[*missing.values()]}. Have all outputs of forward take part in the loss."
        )

    def after_backward(self, sync: GradSync, *, has_failed: bool) -> None:
        """Count a backward whose collectives are over.

        Args:
            sync: The collectives.
            has_failed: Whether an exception had ended the backward.
        """

    def note_error(self, text: str) -> None:
        """Note the text of an error that the reducer is about to raise."""


@dataclass(frozen=True)
class StaticGraph:
    """The uses of parameters in the first backward of a static graph.

    Attributes:
        counts: How often this rank used each parameter.
        unused: The parameters that no rank used.
        is_uniform: Whether all ranks or no rank used a parameter, and none used it more than once.
    """

    counts: list[int]
    unused: frozenset[int]
    is_uniform: bool


class GradReducer:
    """Reduces the gradients of one model over the ranks of a process group.

    The methods follow the order of a step. :meth:`arm` comes at the end of a forward that is
    synchronized. The next backward that reaches the forward's output is reduced: buckets start as
    they fill, and the engine's callback at the end of the backward waits for the collectives and
    makes every ``p.grad`` the average. A second backward through the same output stays local, as
    in stock PyTorch. The engine may call methods on its threads.

    [Note: interrupted backward] The engine drops our callback if the backward raises. Peers may
    already wait for buckets that this rank has not started. So :meth:`recover`, called before the
    next forward that is reduced, completes the collectives with zeros. Peers whose backward went
    well learn by a flag that their gradients lack a part. If all ranks failed in the same step,
    training continues.

    [Note: several graph tasks] A reentrant checkpoint runs a backward inside the backward, which
    has its own end-of-backward callback. The task that reached the forward's output encloses all
    others, and the backward is over when it ends. If no task reached the output, a callback that
    finds gradients missing leaves the backward open, and the next hook queues another callback.

    Args:
        params: The parameters, the same on all ranks, in registration order.
        names: Their fully qualified names.
        group: The process group.
        config: The settings.
        owner: Calls of the object that owns the reducer.

    Attributes:
        facts: What the next backward plan depends on.
        plan: The plan of the running or of the last backward; None before the first one.
        state: The state of the reducer.
        is_muted: Whether hooks skip their calls, as in the rest of a microbatch under ``no_sync``.
        steps: How many backwards were reduced or recovered.
        name: Name of the model, the same on all ranks and unique in the process group.
        static_graph: The uses of parameters, once they are known.
    """

    # Set by `_attach`, and again when a cast or a move gave the parameters new nodes.
    _device: torch.device
    sharder: GradSharder
    assignment: BucketAssignment
    # `pipe_experts` sums no usage and no flags: its ranks have different tokens, and no sharded
    # optimizer.
    usage: UsageMap | None
    flags: StepFlags | None
    # Set by `_make_sync`, and again when buckets or the communicator change.
    readiness: GradReadiness
    sync: GradSync

    def __init__(
        self,
        params: Sequence[Parameter],
        names: Sequence[str],
        group: dist.ProcessGroup,
        config: ReducerConfig,
        owner: ReducerOwner,
    ) -> None:
        self.params = list(params)
        self.names = list(names)
        self.group = group
        self.config = config
        self.owner = owner
        self.name = ""
        # - The running backward
        self.facts = config.facts
        self.plan: BackwardPlan | None = None
        self.state = ReducerState.IDLE
        self.is_muted = False
        self.steps = 0
        self.static_graph: StaticGraph | None = None
        self._task = GraphTask()
        # The engine calls hooks on one thread per device, and one of them may start a bucket while
        # another one counts.
        self._lock = threading.RLock()
        # Whether the owner did what takes all ranks, since the parameters got their present nodes.
        self._has_met = False
        # Peers wait for the flags of a step until this rank has sent them, also if it failed.
        self._has_sent_flags = False
        # Experts: syncs of failed backwards that no rank has waited for yet.
        self._unfinished_syncs: list[GradSync] = []
        self.hooks = GradHooks(self.params, self, sums_in_fp32=config.sums_in_fp32)
        register_reducer(self.params, self)
        self._attach()

    # ---------------------------------------------------------------- forward

    @property
    def is_armed(self) -> bool:
        """True if the next backward, or the one that runs, is reduced."""
        return self.state is not ReducerState.IDLE

    def prepare_for_forward(self) -> None:
        """Complete the last backward if it failed, and let what ranks agreed on take effect."""
        if self.state is not ReducerState.IDLE:
            self.complete_last_backward()
            # A checkpoint recomputes the forward inside of our own backward, which needs its
            # buckets.
            if self.state is ReducerState.REDUCING:
                return
        # On CUDA the host learns only now of peers whose backward failed. Elsewhere it has raised
        # at the end of the backward.
        if self.flags is not None and self._device.type == "cuda":
            self.flags.raise_for_failures(say_peer_lost_backward)
        if self.hooks.have_moved():
            self.reattach()
        sharder = self.sharder
        # The sums of the flags are the same on all ranks, so all change their buckets before the
        # same step.
        flags = self.flags
        if not sharder.is_active or flags is None:
            return
        watched_params = sharder.apply_flags(flags.result(self.steps))
        if watched_params is not None:
            self.hooks.set_prehooks(watched_params, sharder)
            self._make_sync(self.sync.group)

    def complete_last_backward(self) -> None:
        """Recover from a failed backward, and raise RuntimeError if gradients are missing."""
        if self.state is ReducerState.REDUCING and not self._task.queued:
            self.raise_for_missing()
        self.recover()

    def raise_for_missing(self) -> None:
        """Raise RuntimeError if the last backward has not been completed."""
        if self.state is ReducerState.REDUCING or self.state is ReducerState.FAILED:
            missing = {index: self.names[index] for index in self.readiness.list_missing()}
            raise self.make_error(
                self.owner.describe_missing(missing, self.facts, self.group.rank())
            )

    def rebuild_buckets(self) -> bool:
        """Assign buckets along the order of the first backward, once; return whether this did."""
        if self.state is not ReducerState.IDLE:
            # A forward under no_sync calls this method only, before it broadcasts buffers.
            self.complete_last_backward()
        # The plan decides, and not the gradients that came: a rank whose first backward failed
        # takes part in the broadcast as well.
        if self.plan is None or not self.plan.records_order or self.facts.has_order:
            return False
        if self.state is ReducerState.REDUCING or self.state is ReducerState.FAILED:
            return False
        # The broadcast blocks the host.
        if self.sharder.host_barrier is not None:
            self.sharder.host_barrier.wait()
        self.assignment.broadcast_order(self.group)
        self._make_sync(self.sync.group)
        self.facts = self.facts._replace(has_order=True)
        return True

    def arm(self) -> None:
        """Reduce the next backward."""
        if self.state is not ReducerState.IDLE:
            self.complete_last_backward()
            # A checkpoint that recomputes the forward must not restart the backward around it.
            if self.state is ReducerState.REDUCING:
                return
        self.state = ReducerState.ARMED
        self.is_muted = False

    # ---------------------------------------------------------------- the start of a backward

    def on_output_reached(self) -> None:
        """Begin the armed backward; it has reached the forward's output, and accumulated nothing.

        :func:`.grad_hooks.watch_outputs` calls this in the outermost graph task and before any
        parameter's hook. So a backward that raises before the first gradient still takes part in
        the step's collectives.
        """
        with self._lock:
            if self.state is ReducerState.IDLE or self.state is ReducerState.FAILED:
                return
            if self.state is ReducerState.REDUCING and self._task.queued:
                return
            # This task encloses all others, so the backward ends with it, even if only the
            # backwards of reentrant checkpoints inside of it accumulate gradients.
            self._task.queue_callback(self._on_task_ended, self._on_task_died)
            # `torch.autograd.grad` passes the output as well, and accumulates nothing.
            has_experts = self.facts.has_experts
            nodes = self.owner.find_nodes(self.hooks) if has_experts else self.hooks.nodes
            if will_accumulate(nodes) and self.state is ReducerState.ARMED:
                self._begin_backward()

    def _join_backward(self) -> bool:
        """Begin or reopen the armed backward; return whether the running backward is reduced."""
        if self.state is ReducerState.IDLE:
            # The backward runs under `no_sync`, or is a second one through the same output.
            self.sharder.is_local = True
            # Hooks have nothing more to report, unless a later backward reduces these uses.
            self.is_muted = not plan_backward(self.facts, False).shares_usage
            return False
        if self.state is ReducerState.ARMED:
            self._task.queue_callback(self._on_task_ended, self._on_task_died)
            self._begin_backward()
        elif self.state is ReducerState.REDUCING and not self._task.queued:
            # See [Note: several graph tasks].
            self._task.queue_callback(self._on_task_ended, self._on_task_died)
        return True

    def _begin_backward(self) -> None:
        """Plan the backward. No gradient is complete, and no collective has started."""
        self.state = ReducerState.REDUCING
        self._has_sent_flags = False
        # Hooks of the script may have come since the forward. Experts are reduced after these
        # hooks.
        copies_grads = not self.facts.has_experts and self.hooks.find_user_hooks()
        plan = plan_backward(self.facts, copies_grads)
        counts = None if self.static_graph is None else self.static_graph.counts
        self.plan = plan
        self.readiness.begin(plan, counts or ())
        self.sync.begin()
        # From here on an exception leaves a backward that `recover` can complete.
        if is_compiled_autograd_on():
            raise self.make_error(_ERROR_COMPILED_AUTOGRAD)
        if torch.is_grad_enabled():
            self.owner.warn_of_create_graph()
        if not self._has_met:
            group = self.owner.meet(self.group)
            self._has_met = True
            if group is not self.sync.group:
                self._make_sync(group)
                self.readiness.begin(plan, counts or ())
                self.sync.begin()
        if self.sharder.is_active:
            self.sharder.on_backward_start(staged=copies_grads, counts=counts)
        if plan.records_order:
            self.assignment.ready_order.clear()
        if plan.searches_unused:
            assert self.usage is not None
            with profiler_span(_SEARCH_LABEL):
                executed = find_executed(self.hooks.nodes)
                # The search does not see a backward inside the backward. A parameter whose gradient
                # came from such a backward once is never skipped again.
                reentrant = self.hooks.reentrant
                unused = [i for i, runs in enumerate(executed) if not runs and i not in reentrant]
                for index in unused:
                    self.readiness.skip(index)
                self.usage.note_unused(unused)
        if plan.skips_frozen:
            self.readiness.skip_unused([int(param.requires_grad) for param in self.params])

    # ---------------------------------------------------------------- one gradient

    def on_grad_accumulated(self, index: int, node_grad: Tensor | None) -> None:
        """The engine has added ``node_grad`` to the gradient of parameter ``index``.

        The hook calls this once per parameter and graph task, on a thread of the engine.
        """
        with self._lock:
            readiness = self.readiness
            # These lines are `GradReadiness.count` for one contribution per parameter. A call for
            # each gradient of each backward would cost host time. `is_simple` is true only in a
            # backward that is reduced and whose callback is queued.
            if readiness.is_simple and not readiness.seen[index]:
                if readiness.cuda_devices:
                    device = readiness.cuda_devices.get(index)
                    if device is not None and readiness.newest_streams.get(
                        device
                    ) != torch._C._cuda_getCurrentRawStream(device):
                        readiness.record_stream(device)
                readiness.seen[index] = 1
                bucket = readiness.bucket_of[index]
                lacking = readiness.lacking[bucket] - 1
                readiness.lacking[bucket] = lacking
                if not lacking and self.plan.overlaps:  # type: ignore[union-attr]
                    self.sync.start_ready_buckets(node_grad)
                return
            is_reducing = self.state is ReducerState.REDUCING and self._task.queued
            is_joined = is_reducing or self._join_backward()
            if plan_backward(self.facts, False).shares_usage:
                # Under `no_sync` as well, because a later backward reduces the accumulated
                # gradient.
                assert self.usage is not None
                if self.params[index].grad is not None:
                    self.usage.record(index)
            if is_joined:
                self._count(index, node_grad, HOOK, adds=node_grad is not None)

    def _count(self, index: int, node_grad: Tensor | None, key: str, *, adds: bool = True) -> None:
        """Count a contribution, and start the buckets that it makes ready."""
        readiness = self.readiness
        was_absent = index in readiness.absent
        try:
            is_complete = readiness.count(index, key, adds=adds)
        except SurplusGradientError as error:
            self.owner.note_error(str(error))
            raise
        if not is_complete:
            return
        if was_absent:
            self.hooks.reentrant.add(index)
        bucket = readiness.bucket_of[index]
        if bucket < self.sync.started:
            raise self.make_error(_ERROR_LATE_GRAD.format(self.names[index]))
        plan = self.plan
        assert plan is not None
        if plan.records_order:
            self.assignment.ready_order.append(index)
        if plan.copies_grads:
            self.sync.copy_grad(index)
        if plan.overlaps and readiness.lacking[bucket] == 0:
            self.sync.start_ready_buckets(node_grad)

    def expect_contributions(self, index: int, count: int) -> None:
        """Expect ``count`` marked contributions to parameter ``index`` in this backward."""
        with self._lock:
            if self._join_backward():
                self.hooks.reentrant.add(index)
            if plan_backward(self.facts, False).shares_usage:
                # No hook fires for work without autograd.
                assert self.usage is not None
                self.usage.record(index)
            self.readiness.expect_marks(index, count)
            is_started = self.readiness.bucket_of[index] < self.sync.started
            if self.readiness.is_open and is_started:
                raise self.make_error(_ERROR_LATE_DECLARATION.format(self.names[index]))

    def mark_contribution(self, index: int, key: str) -> None:
        """Count the contribution ``key``, which was added to the gradient of a parameter."""
        assert key is not HOOK
        with self._lock:
            self._count(index, None, key)

    # ---------------------------------------------------------------- the end of a backward

    def _on_task_ended(self) -> None:
        with self._lock:
            # Further gradients must queue another callback.
            self.readiness.is_simple = False
            if self.state is not ReducerState.REDUCING:
                return
            assert self.plan is not None
            if self.plan.ends_with_task or not self.readiness.list_missing():
                self._finish_backward()
            else:
                # Gradients so far are local until the missing ones come; see [Note: several graph
                # tasks].
                self.sharder.is_local = True

    def finish_static_first(self) -> None:
        """Learn how often a static graph uses each parameter, and end its first backward."""
        with self._lock:
            # No gradient has come, and the backward has not passed the forward's output.
            if self.state is ReducerState.ARMED:
                self._begin_backward()
            counts = list(self.readiness.seen)
            self.readiness.skip_unused(counts)
            unused = self._finish_backward(counts)
            assert self.usage is not None
            self.static_graph = StaticGraph(counts, unused, self.usage.is_uniform)
            self.facts = self.facts._replace(has_learned=True)

    def _finish_backward(self, counts: Sequence[int] = ()) -> frozenset[int]:
        """Start the remaining collectives, wait for all, and write every ``p.grad``.

        Args:
            counts: How often this rank used each parameter, for the first backward of a static
                graph.

        Returns:
            The parameters that no rank used.
        """
        plan = self.plan
        assert plan is not None
        # An exception from here on leaves a backward to recover.
        self.state = ReducerState.FAILED
        self.sync.start_remaining()
        if plan.shares_usage:
            assert self.usage is not None
            self.usage.start_all_reduce(counts)
        self._send_flags(failed=False)
        for unfinished in self._unfinished_syncs:
            unfinished.wait()
            unfinished.drop_inputs()
        self._unfinished_syncs.clear()
        if self.sharder.is_active:
            self.sharder.wait_for_grads(self.sync)
        else:
            self.sync.wait()
        if plan.shares_usage:
            assert self.usage is not None
            unused = self.usage.finish_all_reduce()
        else:
            unused = frozenset() if self.static_graph is None else self.static_graph.unused
        self.sync.write_grads(but=unused)
        if self.sharder.is_active:
            self.sharder.fill_shared_grads()
        if not self.facts.has_reduced:
            self.facts = self.facts._replace(has_reduced=True)
        self._go_idle(has_failed=False)
        if self.flags is not None and self._device.type != "cuda":
            self.flags.raise_for_failures(say_peer_lost_backward)
        return unused

    def _send_flags(self, *, failed: bool) -> None:
        self._has_sent_flags = True
        if self.flags is not None:
            get_flags = self.sharder.get_flags if self.sharder.is_active else None
            self.flags.start_all_reduce(self.steps, failed=failed, get_flags=get_flags)

    def _go_idle(self, *, has_failed: bool) -> None:
        self.readiness.end()
        self._task.queued = False
        self.state = ReducerState.IDLE
        self.steps += 1
        self.owner.after_backward(self.sync, has_failed=has_failed)

    # ---------------------------------------------------------------- failure

    def _on_task_died(self) -> None:
        """Note that the engine dropped our callback, because the backward raised."""
        with self._lock:
            if self.state is ReducerState.REDUCING:
                self.state = ReducerState.FAILED
                self.sync.detach_grads()

    def recover(self) -> None:
        """Complete the collectives of a failed backward; see [Note: interrupted backward]."""
        # The engine may drop a dead backward a moment after `backward()` has raised.
        if self.state is ReducerState.REDUCING:
            self.is_in_backward()
        if self.state is ReducerState.FAILED:
            with self._lock:
                # Another thread may have recovered while this one waited for the lock.
                if self.state is ReducerState.FAILED:
                    self._complete_failed()

    def _complete_failed(self) -> None:
        sync = self.sync
        sync.detach_grads()
        with profiler_span(_RECOVER_LABEL):
            sync.start_zeros()
            if self.facts.has_experts:
                # Peers may have to recover their dense gradients before they come here, so the next
                # backward waits for these zeros.
                self._unfinished_syncs.append(sync)
                self._make_sync(sync.group)
            else:
                assert self.plan is not None
                assert self.usage is not None
                if not self._has_sent_flags:
                    if self.plan.shares_usage:
                        self.usage.start_all_reduce()
                    self._send_flags(failed=True)
                self.sharder.wait_for_grads(sync)
                if self.usage.is_reducing:
                    self.usage.finish_all_reduce()
                sync.drop_inputs()
        self._go_idle(has_failed=True)

    def is_in_backward(self) -> bool:
        """Return whether a backward that will still end, perhaps on another thread, is reduced."""
        return self.state is ReducerState.REDUCING and self._task.queued and self._task.is_running()

    def make_error(self, text: str) -> RuntimeError:
        """Return an error that the owner has noted."""
        self.owner.note_error(text)
        return RuntimeError(text)

    # ---------------------------------------------------------------- the model

    def _attach(self) -> None:
        config = self.config
        device = self.params[0].device
        self._device = device
        has_experts = self.facts.has_experts
        self.usage = None if has_experts else UsageMap(len(self.params), self.group, device)
        self.flags = None if has_experts else StepFlags(self.group, device, config.feature)
        self.plan = None
        self.facts = self.facts._replace(has_order=False)
        self.state = ReducerState.IDLE
        self.is_muted = False
        self._task.queued = False
        self._has_met = False
        self.sharder = GradSharder()
        if config.sharded:
            self.sharder = make_grad_sharder(
                self.params,
                self.names,
                self.group,
                sparse=[index for index, is_sparse in enumerate(config.sparse) if is_sparse],
                in_fp32=config.in_fp32,
                sums_in_fp32=config.sums_in_fp32,
                layout=config.layout,
            )
        self.sharder.identity = self.identity
        self.assignment = BucketAssignment(
            self.params,
            self.names,
            config.bucket_limits,
            config.granularity,
            config.in_fp32,
            config.sparse,
            self.sharder,
            sends_each=device.type == "cpu"
            and config.layout is not None
            and len(config.layout.ranks) > 1,
        )
        self._make_sync(self.group)

    def reattach(self) -> None:
        """Put hooks on the parameters' present nodes, and learn the order of gradients again."""
        self.hooks.remove()
        self.sharder.is_replaced = True
        self.hooks.attach()
        self._attach()

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Reduce over another process group, and learn a static graph again."""
        if group is not self.group:
            # Ranks have not compared the hosts of this group.
            self.config = replace(self.config, layout=None)
        self.group = group
        self.static_graph = None
        self.facts = self.facts._replace(has_learned=False)
        self.reattach()

    def _make_sync(self, group: dist.ProcessGroup) -> None:
        """Make the buckets and their collectives.

        Args:
            group: The communicator of the collectives, over the ranks of the process group.
        """
        config = self.config
        sharder = self.sharder
        sharder.bind(self, group)
        buckets: list[Bucket]
        if self.facts.has_experts:
            # Weights of many experts are stacked, and large.
            buckets = [GradBucket([index], [param]) for index, param in enumerate(self.params)]
        else:
            is_searched = self.facts.kind is BackwardKind.SEARCHED
            buckets = self.assignment.make_buckets(bucketed=is_searched)
        self.readiness = GradReadiness(
            self.params,
            [bucket.indices for bucket in buckets],
            names=self.names,
            remedy=config.remedy,
        )
        self.sync = GradSync(
            buckets,
            self.readiness,
            group,
            feature=config.feature,
            average=config.average,
            skip_absent=config.skips_unused,
            max_inflight_bytes=sharder.max_inflight_bytes,
            before_first=sharder.before_first_collective if sharder.is_active else None,
            host_barrier=sharder.host_barrier,
            layout=config.layout,
            reduces_by_host=config.reduces_by_host,
            shards_by_host=sharder.shards_by_host,
        )

    def set_name(self, name: str) -> None:
        """Name the model, the same on all ranks and unique in the process group."""
        self.name = name
        # An optimizer may step before the first forward.
        self.sharder.identity = self.identity

    @property
    def identity(self) -> str:
        """The name, with the number of attachments after a cast; the same on all ranks."""
        count = self.hooks.attachments
        return f"{self.name}, {count}" if count > 1 else self.name
