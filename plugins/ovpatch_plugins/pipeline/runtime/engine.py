"""Runs a rank's program: computations in their order, receives ahead of them, sends right behind.

[Note: a failed step ends on all ranks] A rank whose computation raises writes its name into the group's store. Then it
goes on with the messages of the step: it reads those that come and sends zeros, so that no rank waits for it and all
queues are empty at the end. Every rank that may have read such zeros looks into the store behind its last message,
before gradients are reduced, and raises an error that names the rank. The replicas of a stage do so together, once in
each step, at the same place among the messages: see :class:`~ovpatch_plugins.pipeline.runtime.step_failures.Replicas`.

On a device a receive is a kernel that waits. CUDA may wait for running kernels before it loads another one or frees
memory, and both come with a first step. A host that stops there behind a receive for which a peer needs its next
computation stops for good. So :attr:`Engine.settling` starts each receive of that step when it is read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.pipelining.copied_messages import CopiedMessages
from ovpatch.overlap.pipelining.ir import Kind, Program, Receive, Step
from ovpatch.overlap.pipelining.messages import Messages
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from ovpatch_plugins.pipeline.pipeline_report import Prediction
from ovpatch_plugins.pipeline.runtime.stage import StageRun
from ovpatch_plugins.pipeline.runtime.step_clock import Clock, StepTimes
from ovpatch_plugins.pipeline.runtime.step_failures import PipelineRankError, StepFailures, make_rank_error
from ovpatch_plugins.pipeline.runtime.torch_compat import defers_wait, finalizes_gradients


@dataclass(frozen=True)
class StepInputs:
    """What ``schedule.step()`` was given, by microbatch.

    Attributes:
        error: What is wrong with it, so that the step fails, on all ranks.
    """

    args: Sequence[Any]
    kwargs: Sequence[Any]
    targets: Sequence[Any] | None
    losses: list[Any] | None
    return_outputs: bool
    loss_kwargs: Mapping[str, Any] | None
    error: Exception | None = None


class Engine:
    """The runtime of one schedule object on one rank.

    Args:
        schedule: The schedule of ``torch.distributed.pipelining``.
        group: The pipeline's group.
        stages: The rank's stages, by index.
        program: What the rank runs.
        settling: What it runs until a step has ended well, where receives wait on the device; else None.
        transport: Its messages.
        times: Costs of the computations.
        clock: Measures them.
        prediction: What the simulator expects.
        by_perform: Whether stock's step calls ``perform_reduce_grad`` at a stage's end.

    Attributes:
        microbatches: Number of microbatches of a stage in a step.
        program: What the rank runs.
        settling: What it runs instead in its next step, or None.
        transport: Its messages.
        times: Costs of the computations.
        begins_as_stock: Whether stock computes the first step, as a stage of some rank needs it.
    """

    begins_as_stock = False

    def __init__(
        self,
        schedule: Any,
        group: dist.ProcessGroup,
        stages: Mapping[int, StageRun],
        program: Program,
        settling: Program | None,
        transport: Messages,
        times: StepTimes,
        clock: Clock,
        prediction: Prediction,
        *,
        by_perform: bool,
    ) -> None:
        self.schedule: Any = weakref.proxy(schedule)  # its owner is found by it, and lives as long
        self.stages: Final = dict(stages)
        self.program = program
        self.settling = settling
        self.microbatches = 1 + max(step.action.microbatch for step in program.steps)
        self.times = times
        self._clock = clock
        self._group = group
        self._failures = StepFailures(group)
        self._decided: set[int] = set()  # stages whose replicas have decided whether they reduce in this step
        self.transport = transport
        self._prediction = prediction
        self._by_perform = by_perform
        self._defers_wait = defers_wait(schedule)
        takes_loss_kwargs = "loss_kwargs" in inspect.signature(schedule._maybe_compute_loss).parameters
        self._takes_loss_kwargs = takes_loss_kwargs
        self._last_sent: Step | None = None
        self._is_connected = True
        self._has_failed = False  # in its last step
        self._tell_failure = functools.partial(_publish, self._failures, self._name(program.rank))

    def _open(self) -> None:
        """Open the transport for the messages of the stages."""
        for stage in self.stages.values():
            stage.take_buffers()
        assert isinstance(self.transport, CopiedMessages)
        stages = self.stages.values()
        self.transport = self.transport.open(lambda align: max(stage.count_message_bytes(align) for stage in stages))

    def run(self, inputs: StepInputs) -> None:
        """Run one step.

        Raises:
            PipelineRankError: Another rank failed in the step.
            Exception: A computation of this rank failed. The next step starts clean.
        """
        if self._has_failed:
            for stage in self.stages.values():
                stage.data_parallel.replicas.finish()
            self._has_failed = False
        if not self.transport.is_open:
            self._open()
        self._clock.start_step()
        self._failures.start_step(self.transport.start_step(self._tell_failure))
        self._decided.clear()
        self._last_sent, self._is_connected = None, True
        program, number = self.settling or self.program, 0
        try:
            with contextlib.ExitStack() as stack:
                for stage in self.stages.values():
                    stage.take_buffers()
                    stage.start_step(finalizes=finalizes_gradients(self.schedule))
                    stack.enter_context(stage.deferring())
                if inputs.error is not None:
                    raise inputs.error
                for number, step in enumerate(program.steps):  # noqa: B007 - read after an error
                    self._run_step(step, inputs)
            for index in program.final_reshards:
                self.stages[index].reshard()
            if self._defers_wait:
                self._finish_reductions()
            waits = self._clock.begin_wait()
            self.transport.finish()
            self._clock.end_wait(waits)
            if len(self._decided) < len(self.stages):  # else all messages were read before the last decision
                self._check_peers()
            self.schedule._update_losses([stage.stage for stage in self.stages.values()], inputs.losses)
        except BaseException as error:
            self._recover(program.steps[number:], error)
            if isinstance(error, Exception) and not isinstance(error, PipelineRankError):
                self._blame_first(error)
            raise
        self.settling = None
        self._clock.end_step()
        self._prediction.add_step(self.times)
        COUNTERS.steps += 1

    def set_program(self, program: Program, prediction: Prediction) -> None:
        """Run another order of the same pipeline from the next step on."""
        self.program, self._prediction = program, prediction

    def forget_times(self) -> None:
        """Forget all durations, also those of the last step that its device has not told yet."""
        self._clock.drop_step()
        self.times.clear()

    # --- a computation ---

    def _run_step(self, step: Step, inputs: StepInputs) -> None:
        for index in step.reshards:
            self.stages[index].reshard()
        for index in step.unshards:
            self.stages[index].start_unshard()
        for receive in step.posts:
            self._post(receive)
        if step.receive is not None:
            if step.receive.action.kind is not Kind.F:
                self.stages[step.receive.action.stage].launch_before_backward(step.receive.action.microbatch)
            self._wait_for(step.receive)
            self.transport.release(step.kept)
        kind, index, microbatch = step.action
        stage = self.stages[index]
        stage.wait_for_unshard()
        COUNTERS.actions += 1
        if kind is Kind.F:
            self._run_forward(step, stage, inputs)
        elif kind is not Kind.W:
            is_deferred = self._run_backward(step, stage)
            if kind is Kind.BW and is_deferred:
                COUNTERS.early_sends += step.receiver is not None
                self._run_weight_grads(stage, index, microbatch)
        else:
            self._run_weight_grads(stage, index, microbatch)
        if step.reduces:
            self._reduce(stage, index)

    def end_inference(self, *, may_change: bool) -> None:
        """Prepare the data parallelism of stages for a step in which their backwards have two parts.

        Args:
            may_change: Whether the step may have another order than this program's.
        """
        program = self.settling or self.program
        divided = {step.action.stage for step in program.steps if step.action.kind is Kind.W}
        for index, stage in self.stages.items():
            if may_change or index in divided:
                stage.data_parallel.end_inference()

    def _run_forward(self, step: Step, stage: StageRun, inputs: StepInputs) -> None:
        kind, index, microbatch = step.action
        given = stage.first_input + microbatch
        with profiler_span(profiler_label("pipeline", "F", str(step.action))):
            started = self._clock.now()
            args, kwargs = inputs.args[given], inputs.kwargs[given]
            output = stage.run_forward(microbatch, args, kwargs, inputs.return_outputs)
            self._send(step, stage)
            if step.next_stage is not None:
                stage.pass_forward(output, microbatch, self.stages[step.next_stage])
            extra = (inputs.loss_kwargs,) if self._takes_loss_kwargs else ()
            self.schedule._maybe_compute_loss(stage.stage, output, inputs.targets, given, *extra)
            stage.check_forward(self.schedule._internal_losses[-1] if stage.stage.is_last else output)
            self._clock.add_action(index, kind, started)

    def _run_backward(self, step: Step, stage: StageRun) -> bool:
        _, index, microbatch = step.action
        if step.is_last_backward and stage.reduces_in_backward:
            self._decide_to_reduce(stage, index)
        with profiler_span(profiler_label("pipeline", "B", str(step.action))):
            started = self._clock.now()
            loss = self.schedule._maybe_get_loss(stage.stage, microbatch)
            is_deferred = stage.run_backward(microbatch, loss, self.microbatches)
            del loss
            self._send(step, stage)
            if step.next_stage is not None:
                stage.pass_backward(microbatch, self.stages[step.next_stage])
            stage.finish_backward(microbatch, self._check_peers)
            self._clock.add_action(index, Kind.B if is_deferred else Kind.BW, started)
        return is_deferred

    def _run_weight_grads(self, stage: StageRun, index: int, microbatch: int) -> None:
        if stage.queue is None or not stage.queue.defers:
            return
        with profiler_span(profiler_label("pipeline", "W", f"{index}W{microbatch}")):
            started, before = self._clock.now(), stage.queue.computed
            stage.run_weight_grads(microbatch)
            COUNTERS.weight_grads += stage.queue.computed - before
            self._clock.add_action(index, Kind.W, started)

    def _reduce(self, stage: StageRun, index: int) -> None:
        if stage.reduces_after_backward:
            self._decide_to_reduce(stage, index)
        if self._defers_wait:
            self._finish_reductions()  # one is under way at most, as under stock
        scale = self.microbatches if self.schedule.scale_grads else 1
        stage.reduce(scale, by_perform=self._by_perform, waits=not self._defers_wait)

    def _finish_reductions(self) -> None:
        for stage in self.stages.values():
            stage.finish_reduce()

    # --- messages ---

    def _post(self, receive: Receive) -> None:
        try:
            self.transport.post(receive, self._make_buffers)
        except RuntimeError as error:
            raise self._make_transport_error(receive.sender, error) from error

    def _make_buffers(self, receive: Receive) -> list[Tensor]:
        kind, index, microbatch = receive.action
        stage, sizes = self.stages[index], None
        if stage.varies and kind is Kind.F:
            sizes = self.transport.receive_sizes(stage.count_inputs(microbatch), receive.sender)
        return stage.make_inputs(microbatch, kind, sizes)

    def _wait_for(self, receive: Receive) -> None:
        started = self._clock.begin_wait()
        try:
            self.transport.wait(receive)
        except RuntimeError as error:
            raise self._make_transport_error(receive.sender, error) from error
        self._clock.end_wait(started)

    def _send(self, step: Step, stage: StageRun) -> None:
        if step.receiver is None:
            return
        tensors = stage.list_outputs(step.action.microbatch, Kind.F if step.action.kind is Kind.F else Kind.B)
        try:
            self._send_tensors(tensors, step, stage)
        except RuntimeError as error:
            raise self._make_transport_error(step.receiver, error) from error
        self._last_sent = step
        COUNTERS.messages += 1
        COUNTERS.copied_messages += self.transport.is_copied

    def _send_tensors(self, tensors: Sequence[Tensor], step: Step, stage: StageRun) -> None:
        assert step.receiver is not None
        # An input gradient has the shape of what its receiver sent.
        with_sizes = stage.varies and step.action.kind is Kind.F
        self.transport.send(tensors, step.receiver, with_sizes=with_sizes)

    # --- failures ---

    def _make_transport_error(self, peer: int, error: RuntimeError) -> PipelineRankError:
        self.transport.abandon()
        self._is_connected = False
        text = self._failures.read() or f"a message between it and {self._name(peer)} failed ({error})"
        made = PipelineRankError(
            f"the pipeline stopped on {self._name(self.program.rank)}: {text.rstrip('.')}. Gradients of this step are "
            "not valid. Look for the first error in the output of that rank, and start the job again."
        )
        made.failure = f"{self._name(self.program.rank)} stopped: {text}"
        return made

    def _check_peers(self) -> None:
        """Raise if another rank failed in this step, before which all messages have been read."""
        self.transport.wait_for_arrivals()
        text = self._failures.read()
        if text:
            raise make_rank_error(text)

    def _decide_to_reduce(self, stage: StageRun, index: int) -> None:
        """Raise if any replica of a stage knows of a failure: zeros of a failed rank must not reach the others."""
        self._decided.add(index)
        self.transport.wait_for_arrivals()
        started = self._clock.begin_wait()
        text = stage.data_parallel.replicas.decide(self._failures.read())
        self._clock.end_wait(started)
        if text:
            raise make_rank_error(text)

    def _blame_first(self, error: Exception) -> None:
        """Raise if another rank failed before this one did, whose zeros may be what ``error`` is about."""
        text = self._failures.read()
        if text and not text.startswith(f"{self._name(self.program.rank)} "):
            raise make_rank_error(text) from error

    def _recover(self, left: Sequence[Step], error: BaseException) -> None:
        """Leave clean queues and stages behind a failed step, whose first computation of ``left`` failed."""
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
            with contextlib.suppress(RuntimeError):  # what the script has to see is the error of the computation
                if self._is_connected:
                    self._drain(left, failure)
            with contextlib.suppress(RuntimeError):  # without messages, replicas are still waiting
                for step in left:
                    self._refuse_to_reduce(step, failure)
            if self._is_connected:
                self._failures.wait_for_readers()
        self.transport.drop_receives()
        for stage in self.stages.values():
            stage.clear()

    def _drain(self, left: Sequence[Step], failure: str) -> None:
        """Go on with the messages and decisions of the step without computing."""
        for step in left:
            for receive in step.posts:
                if receive not in self.transport.posted:
                    self._post(receive)
            if step.receive in self.transport.arriving:
                self._wait_for(step.receive)
            if step.receiver is not None and step is not self._last_sent:
                stage, kind = self.stages[step.action.stage], Kind.F if step.action.kind is Kind.F else Kind.B
                self._send_tensors(stage.make_blank_outputs(kind, step.action.microbatch), step, stage)
            self._refuse_to_reduce(step, failure)
        self.transport.finish()

    def _refuse_to_reduce(self, step: Step, failure: str) -> None:
        """Take part in the decision that replicas make at a step, where this rank has not."""
        stage, index = self.stages[step.action.stage], step.action.stage
        decides = step.is_last_backward if stage.reduces_in_backward else step.reduces and stage.reduces_after_backward
        if decides and index not in self._decided:
            self._decided.add(index)
            stage.data_parallel.replicas.decide(failure)

    def _describe(self, step: Step, error: Exception) -> str:
        if isinstance(error, PipelineRankError):
            return error.failure
        cause = error.__cause__ or error
        return f"{self._name(self.program.rank)} failed in {step.action}: {type(cause).__name__}: {cause}"

    def _name(self, rank: int) -> str:
        return f"rank {dist.get_global_rank(self._group, rank)}"


def _publish(failures: StepFailures, rank: str, text: str) -> None:
    failures.publish(f"{rank} stopped: {text}")
