"""The engine that runs a rank's program: computations in their order, receives before them, sends right after.

[Note: a failed step ends on all ranks] A rank whose computation raises writes its name into the group's store.
Then it continues with the messages of the step. It reads arriving messages and sends zeros, so that no rank
waits for it and all queues are empty at the end. Every rank that may have read such zeros reads the store
after its last message, before gradients are reduced, and raises an error that names the rank. The replicas of a
stage do so together, once in each step, at the same place among the messages: see
:class:`~ovpatch_plugins.pipeline.runtime.step_failures.Replicas`.

On a device a receive is a kernel that waits. CUDA may wait for running kernels before it loads another kernel or
frees memory, and both happen in a first step. Suppose that a host waits there after it has launched a receive, and
that the receive's sender needs this rank's next computation. Then both would wait forever. So
:attr:`Engine.settling` starts each receive of that step when it is read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.consensus import name_group_ranks
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.pipelining.copied_messages import CopiedMessages
from ovpatch.overlap.pipelining.ir import Action, Kind, Program, Receive, Step
from ovpatch.overlap.pipelining.messages import Messages
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from ovpatch_plugins.pipeline.runtime.stage import Stage
from ovpatch_plugins.pipeline.runtime.step_clock import Clock, StepTimes
from ovpatch_plugins.pipeline.runtime.step_failures import (
    PipelineRankError,
    StepFailures,
    make_rank_error,
)
from ovpatch_plugins.pipeline.runtime.torch_compat import (
    defers_wait,
    finalizes_gradients,
    makes_buffers,
)


@dataclass(frozen=True)
class StepInputs:
    """The arguments of ``schedule.step()``, by microbatch.

    Attributes:
        error: The reason for which they are wrong; the step then fails on all ranks. None if they are right.
    """

    args: Sequence[Any]
    kwargs: Sequence[Any]
    targets: Sequence[Any] | None
    losses: list[Any] | None
    return_outputs: bool
    loss_kwargs: Mapping[str, Any] | None
    error: Exception | None = None


class StepObserver(Protocol):
    """A watcher of an engine's computations."""

    def start_action(self, stage: int, kind: Kind) -> None:
        """Note that F, B or W starts. A full backward starts as B."""

    def finish_action(self, stage: int, kind: Kind) -> None:
        """Note that the computation has been issued."""


@dataclass(frozen=True)
class Programs:
    """The programs of a rank.

    Attributes:
        steady: The program of its steps.
        settling: The program until a step has succeeded, if receives wait on the device; otherwise None.
    """

    steady: Program
    settling: Program | None = None


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine.

    Attributes:
        schedule: The schedule of ``torch.distributed.pipelining``.
        group: The pipeline's group. All its ranks make their engines together.
        stages: The rank's stages, by index.
        programs: Its programs.
        messages: Its messages.
        times: The durations of computations.
        clock: Measures the durations.
        by_perform: Whether torch's own step calls ``perform_reduce_grad`` at a stage's end.
    """

    schedule: Any
    group: dist.ProcessGroup
    stages: Mapping[int, Stage]
    programs: Programs
    messages: Messages
    times: StepTimes
    clock: Clock
    by_perform: bool


class _Labels(dict[Action, str]):
    """The profiler's labels of computations, each created on its first use."""

    def __missing__(self, action: Action) -> str:
        phase = "B" if action.kind is Kind.BW else action.kind.value
        label = self[action] = profiler_label("pipeline", phase, str(action))
        return label


class Engine:
    """The runtime of one schedule object on one rank.

    Args:
        parts: Its parts.

    Attributes:
        stages: The rank's stages, by index.
        program: The program of its steps.
        settling: The program of its next step if that is not ``program``, or None.
        messages: Its messages.
        microbatches: Number of microbatches of a stage in a step.
        times: The durations of computations.
        observer: Watches the computations; None without one.
    """

    def __init__(self, parts: EngineParts) -> None:
        schedule = parts.schedule
        # The schedule holds the engine, and both must be freed together.
        self.schedule: Any = weakref.proxy(schedule)
        self.stages: Final = dict(parts.stages)
        self.program = parts.programs.steady
        self.settling = parts.programs.settling
        self.messages = parts.messages
        self.microbatches = 1 + max(step.action.microbatch for step in self.program.steps)
        self.times = parts.times
        self.observer: StepObserver | None = None
        self._group = parts.group
        self._clock = parts.clock
        self._labels = _Labels()
        # - Properties of the schedule
        self._by_perform = parts.by_perform
        self._defers_wait = defers_wait(schedule)
        self._takes_loss_kwargs = (
            "loss_kwargs" in inspect.signature(schedule._maybe_compute_loss).parameters
        )
        self._is_sharded = any(stage.is_fully_sharded for stage in self.stages.values())
        # - State of a step
        # Stages whose replicas have decided whether to reduce.
        self._decided: set[int] = set()
        # The last computation whose result was sent.
        self._last_sent: Step | None = None
        # False once a message has failed: peers no longer expect the messages of this step.
        self._is_connected = True
        # - Failures
        self._failures = StepFailures(parts.group)
        self._report_failure = functools.partial(
            _publish, self._failures, self._name(self.program.rank)
        )
        # Whether the last step failed, so that replicas may still wait for this rank.
        self._has_failed = False

    # --- a step ---

    def run_step(self, inputs: StepInputs) -> None:
        """Run one step.

        Raises:
            PipelineRankError: Another rank failed in the step.
            Exception: A computation of this rank failed. The next step starts clean.
        """
        program = self._open_step()
        number = 0
        try:
            self._start_stages()
            if inputs.error is not None:
                raise inputs.error
            # After an error, `number` is the computation that failed.
            for number, step in enumerate(program.steps):  # noqa: B007 - read after an error
                self._run(step, inputs)
            self._close_step(program, inputs)
        except BaseException as error:
            self._recover(program.steps[number:], error)
            if isinstance(error, Exception) and not isinstance(error, PipelineRankError):
                self._blame_first(error)
            raise
        self.settling = None
        self._clock.end_step()
        COUNTERS.steps += 1

    def _open_step(self) -> Program:
        """Start the messages and the time of a step, and return its program."""
        if self._has_failed:
            for stage in self.stages.values():
                stage.data_parallel.replicas.finish()
            self._has_failed = False
        if not self.messages.is_open:
            self._open_messages()
        self._clock.start_step()
        self._failures.step = self.messages.start_step(self._report_failure)
        self._decided.clear()
        self._last_sent = None
        self._is_connected = True
        return self.settling or self.program

    def _open_messages(self) -> None:
        """Allocate slots for the messages of the stages, whose sizes are now known."""
        for stage in self.stages.values():
            stage.buffers.take()
        assert isinstance(self.messages, CopiedMessages)
        stages = self.stages.values()
        self.messages = self.messages.open(
            lambda align: max(stage.buffers.count_message_bytes(align) for stage in stages)
        )

    def _start_stages(self) -> None:
        finalizes = finalizes_gradients(self.schedule)
        for stage in self.stages.values():
            stage.buffers.take()
            stage.start_step(finalizes=finalizes)
            stage.report.receive_nbytes = stage.buffers.receive_nbytes

    def _run(self, step: Step, inputs: StepInputs) -> None:
        """Run one computation with the messages before and after it."""
        kind, index, microbatch = step.action
        stage = self.stages[index]
        if self._is_sharded:
            for sharded in step.reshards:
                self.stages[sharded].reshard()
            for sharded in step.unshards:
                self.stages[sharded].start_unshard()
        for receive in step.posts:
            self._post(receive)
        if step.receive is not None:
            if kind is not Kind.F:
                # A recomputation needs no gradient, so it runs while the stream or the host waits.
                stage.recompute_ahead(microbatch)
            self._wait_for(step.receive)
            self.messages.release(step.kept)
        if self._is_sharded:
            stage.wait_for_unshard()
        COUNTERS.actions += 1
        if kind is Kind.F:
            self._forward(step, stage, inputs)
        elif kind is Kind.W:
            self._weight_grads(step.action, stage)
        elif self._backward(step, stage) and kind is Kind.BW:
            # The input gradient is in flight, so peers compute at the same time.
            COUNTERS.early_sends += step.receiver is not None
            self._weight_grads(step.action._replace(kind=Kind.W), stage)
        if step.reduces:
            self._reduce(stage, index)

    def _forward(self, step: Step, stage: Stage, inputs: StepInputs) -> None:
        _, index, microbatch = step.action
        given = stage.first_input + microbatch
        with profiler_span(self._labels[step.action]):
            started = self._clock.now()
            if self.observer is not None:
                self.observer.start_action(index, Kind.F)
            output = stage.forward(
                microbatch, inputs.args[given], inputs.kwargs[given], inputs.return_outputs
            )
            self._hand_on(step, stage, output)
            extra = (inputs.loss_kwargs,) if self._takes_loss_kwargs else ()
            self.schedule._maybe_compute_loss(stage.stage, output, inputs.targets, given, *extra)
            if self.observer is not None:
                self.observer.finish_action(index, Kind.F)
            if stage.queue is not None and not stage.queue.is_graph_known:
                stage.queue.check_graph(
                    self.schedule._internal_losses[-1] if stage.stage.is_last else output
                )
            self._clock.add_action(index, Kind.F, started)

    def _backward(self, step: Step, stage: Stage) -> bool:
        """Compute B, or the full backward; return whether weight gradients are left."""
        _, index, microbatch = step.action
        if step.is_last_backward and stage.reduces_in_backward:
            self._decide_to_reduce(stage, index)
        with profiler_span(self._labels[step.action]):
            started = self._clock.now()
            loss = self.schedule._maybe_get_loss(stage.stage, microbatch)
            if self.observer is not None:
                self.observer.start_action(index, Kind.B)
            is_deferred = stage.backward(microbatch, loss, self.microbatches)
            if self.observer is not None:
                self.observer.finish_action(index, Kind.B)
            # The loss holds the graph.
            del loss
            self._hand_on(step, stage)
            stage.finish_backward(microbatch, self._check_peers)
            self._clock.add_action(index, Kind.B if is_deferred else Kind.BW, started)
        return is_deferred

    def _weight_grads(self, action: Action, stage: Stage) -> None:
        if stage.queue is None or not stage.queue.defers:
            return
        with profiler_span(self._labels[action]):
            started = self._clock.now()
            if self.observer is not None:
                self.observer.start_action(action.stage, Kind.W)
            COUNTERS.weight_grads += stage.weight_grads(action.microbatch)
            if self.observer is not None:
                self.observer.finish_action(action.stage, Kind.W)
            self._clock.add_action(action.stage, Kind.W, started)

    def _hand_on(self, step: Step, stage: Stage, output: Any = None) -> None:
        """Send a result to its receiver, or pass it to the next stage on this rank.

        Args:
            step: The computation.
            stage: Its stage.
            output: The output of F.
        """
        kind, _, microbatch = step.action
        is_forward = kind is Kind.F
        if step.receiver is not None:
            tensors = stage.buffers.list_outputs(microbatch, Kind.F if is_forward else Kind.B)
            try:
                # An input gradient has the shape of the tensor that its receiver sent.
                self.messages.send(
                    tensors, step.receiver, with_sizes=is_forward and stage.buffers.varies
                )
            except RuntimeError as error:
                raise self._make_message_error(step.receiver, error) from error
            self._last_sent = step
            COUNTERS.messages += 1
            COUNTERS.copied_messages += self.messages.is_copied
        if step.next_stage is not None:
            receiver = self.stages[step.next_stage]
            if is_forward:
                receiver.stage.set_local_fwd_input(output, microbatch)
            else:
                grads = stage.stage.get_local_bwd_output(microbatch)
                # Torch fills the buffers of missing gradients with zeros.
                if [grad for grad in grads if grad is None] and not makes_buffers(receiver.stage):
                    receiver.buffers.make(Kind.B, microbatch)
                receiver.stage.set_local_bwd_input(grads, microbatch)

    def _reduce(self, stage: Stage, index: int) -> None:
        if stage.reduces_after_backward:
            self._decide_to_reduce(stage, index)
        if self._defers_wait:
            # Torch also keeps at most one reduction in flight.
            self._finish_reductions()
        scale = self.microbatches if self.schedule.scale_grads else 1
        stage.reduce(scale, by_perform=self._by_perform, waits=not self._defers_wait)

    def _finish_reductions(self) -> None:
        for stage in self.stages.values():
            stage.finish_reduce()

    def _close_step(self, program: Program, inputs: StepInputs) -> None:
        """Finish the messages of a step, and pass its losses to the script."""
        for stage in self.stages.values():
            stage.end_step()
        if self._is_sharded:
            for index in program.final_reshards:
                self.stages[index].reshard()
        if self._defers_wait:
            self._finish_reductions()
        started = self._clock.begin_wait()
        self.messages.finish()
        self._clock.end_wait(started)
        # If all stages have decided, all messages were read before the last decision.
        if len(self._decided) < len(self.stages):
            self._check_peers()
        self.schedule._update_losses([stage.stage for stage in self.stages.values()], inputs.losses)

    # --- between steps ---

    def set_program(self, program: Program) -> None:
        """Run another order of the same pipeline from the next step on."""
        self.program = program

    def forget_times(self) -> None:
        """Drop all durations, also those of the last step, which the device may not have reported."""
        self._clock.drop_step()
        self.times.clear()

    def end_inference(self, *, may_change: bool) -> None:
        """Prepare the data parallelism of stages for a step with split backwards.

        Args:
            may_change: Whether the step may have another order than this program's.
        """
        program = self.settling or self.program
        split = {step.action.stage for step in program.steps if step.action.kind is Kind.W}
        for index, stage in self.stages.items():
            if may_change or index in split:
                stage.data_parallel.end_inference()

    # --- receives ---

    def _post(self, receive: Receive) -> None:
        try:
            self.messages.post(receive, self._make_buffers)
        except RuntimeError as error:
            raise self._make_message_error(receive.sender, error) from error

    def _make_buffers(self, receive: Receive) -> list[Tensor]:
        kind, index, microbatch = receive.action
        buffers = self.stages[index].buffers
        sizes = None
        if buffers.varies and kind is Kind.F:
            sizes = self.messages.receive_sizes(buffers.count_inputs(microbatch), receive.sender)
        return buffers.make(kind, microbatch, sizes)

    def _wait_for(self, receive: Receive) -> None:
        started = self._clock.begin_wait()
        try:
            self.messages.wait(receive)
        except RuntimeError as error:
            raise self._make_message_error(receive.sender, error) from error
        self._clock.end_wait(started)

    # --- failures ---

    def _make_message_error(self, peer: int, error: RuntimeError) -> PipelineRankError:
        self.messages.abandon()
        self._is_connected = False
        text = self._failures.read()
        if not text:
            text = f"a message between it and {self._name(peer)} failed ({error})"
        made = PipelineRankError(
            f"ovpatch: the pipeline stopped on {self._name(self.program.rank)}: "
            f"{text.rstrip('.')}. Gradients of this step are not valid. Read the first error in the "
            "output of that rank, and start the job again."
        )
        made.failure = f"{self._name(self.program.rank)} stopped: {text}"
        return made

    def _check_peers(self) -> None:
        """Raise if another rank failed in this step before it sent a message that this rank has read."""
        self.messages.wait_for_arrivals()
        text = self._failures.read()
        if text:
            raise make_rank_error(text)

    def _decide_to_reduce(self, stage: Stage, index: int) -> None:
        """Raise if any replica of a stage knows of a failure, because zeros of a failed rank must not reach peers."""
        self._decided.add(index)
        self.messages.wait_for_arrivals()
        started = self._clock.begin_wait()
        text = stage.data_parallel.replicas.decide(self._failures.read())
        self._clock.end_wait(started)
        if text:
            raise make_rank_error(text)

    def _blame_first(self, error: Exception) -> None:
        """Raise if another rank failed before this rank, because its zeros may have caused ``error``."""
        text = self._failures.read()
        if text and not text.startswith(f"{self._name(self.program.rank)} "):
            raise make_rank_error(text) from error

    def _recover(self, left: Sequence[Step], error: BaseException) -> None:
        """Clean queues and stages after a failed step; the first computation of ``left`` failed."""
        COUNTERS.failed_steps += 1
        self._has_failed = True
        self._clock.drop_step()
        self.schedule._internal_losses.clear()
        for stage in self.stages.values():
            stage.clear()
        if isinstance(error, Exception):
            failure = self._failures.read()
            if not failure:
                failure = self._describe(left[0], error)
                if self._is_connected:
                    self._failures.publish(failure)
            # An error of a message must not hide the error of the computation from the script.
            with contextlib.suppress(RuntimeError):
                if self._is_connected:
                    self._drain(left, failure)
            # Replicas wait for this rank, even if its messages have failed.
            with contextlib.suppress(RuntimeError):
                for step in left:
                    self._refuse_to_reduce(step, failure)
            if self._is_connected:
                self._failures.wait_for_readers()
        self.messages.drop_receives()
        for stage in self.stages.values():
            stage.clear()

    def _drain(self, left: Sequence[Step], failure: str) -> None:
        """Continue with the messages and decisions of the step without computing."""
        for step in left:
            for receive in step.posts:
                if receive not in self.messages.posted:
                    self._post(receive)
            if step.receive in self.messages.arriving:
                self._wait_for(step.receive)
            if step.receiver is not None and step is not self._last_sent:
                is_forward = step.action.kind is Kind.F
                buffers = self.stages[step.action.stage].buffers
                blank = buffers.make_blank_outputs(
                    Kind.F if is_forward else Kind.B, step.action.microbatch
                )
                self.messages.send(blank, step.receiver, with_sizes=is_forward and buffers.varies)
            self._refuse_to_reduce(step, failure)
        self.messages.finish()

    def _refuse_to_reduce(self, step: Step, failure: str) -> None:
        """Take part in the decision of the replicas at a step, unless this rank already has."""
        index = step.action.stage
        stage = self.stages[index]
        decides = (
            step.is_last_backward
            if stage.reduces_in_backward
            else step.reduces and stage.reduces_after_backward
        )
        if decides and index not in self._decided:
            self._decided.add(index)
            stage.data_parallel.replicas.decide(failure)

    def _describe(self, step: Step, error: Exception) -> str:
        if isinstance(error, PipelineRankError):
            return error.failure
        cause = error.__cause__ or error
        return f"{self._name(self.program.rank)} failed in {step.action}: {type(cause).__name__}: {cause}"

    def _name(self, rank: int) -> str:
        return f"rank {name_group_ranks(self._group, [rank])}"


def _publish(failures: StepFailures, rank: str, text: str) -> None:
    failures.publish(f"{rank} stopped: {text}")
