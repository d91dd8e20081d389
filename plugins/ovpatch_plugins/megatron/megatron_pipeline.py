"""Megatron's 1F1B with the engine of ``pipeline``, which sends input gradients before it computes weight gradients.

Megatron's function runs unchanged, with its own forward and backward steps. The engine sends its messages: receives
start early, and no stage waits for a send. A backward skips the weight gradients of linears. They are computed after
the send, at the place that the engine's order gives them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.autograd import apply_function
from ovpatch.overlap.comm.consensus import LATE_START_S, check_consistent, wait_limit_s
from ovpatch.overlap.comm.lifetimes import attached_values, find_owners, outside_modes, weak_method
from ovpatch.overlap.pipelining.messages import find_group_reason
from ovpatch.overlap.pipelining.program_cursor import LoopError, ProgramCursor
from ovpatch.overlap.tensors.pending_param import wait_for_param
from ovpatch_plugins.megatron.linears import (
    find_unsupported,
    find_weight_grad,
    find_wrapped,
    wrap_function,
)
from ovpatch_plugins.megatron.megatron_report import COUNTERS, note_fallback
from ovpatch_plugins.megatron.weight_grads import Linear, WeightGradQueue, multiply

_SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"
_LAYERS: Final = "megatron.core.tensor_parallel.layers"
# The settings of Megatron that order or keep gradients in other ways.
_UNSUPPORTED_SETTINGS: Final = (
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "fine_grained_activation_offloading",
    "cpu_offloading",
    "enable_cuda_graph",
    "external_cuda_graph",
)
# The methods that Megatron's loop calls for messages, with the names of its timers.
_TIMERS: Final = {
    "recv_forward": "forward-recv",
    "recv_backward": "backward-recv",
    "send_forward": "forward-send",
    "send_backward": "backward-send",
    "send_forward_recv_backward": "forward-send-backward-recv",
    "send_backward_recv_forward": "backward-send-forward-recv",
}
_REMEDY: Final = (
    "Call ovpatch.apply() with the same arguments on every rank before the first step, and give every rank the same "
    "OVPATCH variables; or set OVPATCH_MEGATRON_PIPELINE_SCHEDULE=stock on all ranks to have Megatron run pipelines."
)

# The value of a model: the engine on which the ranks of its pipeline have agreed.
_ENGINE_KEY: Final = "megatron: engine"


def close_all() -> None:
    """Close the engines of all pipelines."""
    for model, agreed in find_owners(_ENGINE_KEY):
        # Ranks may also have agreed that there is no engine.
        if agreed.engine is not None:
            agreed.engine.close()
        del attached_values(model)[_ENGINE_KEY]


class _Step:
    """A call of Megatron's schedule on one stage.

    Args:
        engine: The engine, which has the stage's messages and the order.
        queue: The weight gradients that are due.
        microbatches: The number of microbatches of the step.
        no_sync: Returns the context in which gradients before those of the last microbatch are accumulated.
        timers: The timers of Megatron, or None.
        delays_weight_grads: Whether weight gradients are delayed.
    """

    def __init__(
        self,
        engine: ProgramCursor,
        queue: WeightGradQueue,
        microbatches: int,
        no_sync: Callable[[], Any],
        timers: Any,
        *,
        delays_weight_grads: bool,
    ) -> None:
        self.delays_weight_grads = delays_weight_grads
        self._engine = engine
        self._queue = queue
        self._microbatches = microbatches
        # The number of backwards that have not ended yet.
        self._remaining = microbatches
        self._no_sync = no_sync
        self._timers = timers

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run a microbatch's backward inside the ``with`` block."""
        with self._queue.recording() if self._queue.is_active else contextlib.nullcontext():
            yield
        self._remaining -= 1

    def receive(self, shapes: Sequence[Sequence[int]], *, is_forward: bool) -> list[Tensor | None]:
        """Return the input of the next forward or backward, in Megatron's form.

        Raises:
            RuntimeError: Megatron runs another computation than the engine's order has.
        """
        try:
            result: list[Tensor | None] = [*self._engine.receive(shapes, is_forward=is_forward)]
        except LoopError as error:
            raise _make_order_error(error) from error
        # The first stage receives nothing, and Megatron expects None for each tensor.
        return result or [None] * len(shapes)

    def send(self, tensors: Any) -> None:
        """Send a result, and compute the weight gradients that are due after it."""
        before = COUNTERS.weight_grads
        self._engine.send(tensors if isinstance(tensors, list) else [tensors])
        COUNTERS.early_sends += COUNTERS.weight_grads != before

    def compute(self, microbatch: int) -> None:
        """Compute a microbatch's weight gradients."""
        # The engine's order has a place for weight gradients even if this stage delays none.
        if not len(self._queue):
            return
        # Megatron counts gradients from its last backward on, but it must count only those of the last microbatch.
        should_count = self._remaining or microbatch == self._microbatches - 1
        with contextlib.nullcontext() if should_count else self._no_sync():
            self._queue.compute(1)

    def finish(self) -> None:
        """End the step."""
        try:
            self._engine.finish()
        except LoopError as error:
            raise _make_order_error(error) from error
        COUNTERS.early_receives += self._engine.early_receives

    @contextlib.contextmanager
    def time_message(self, name: str, is_edge: bool) -> Iterator[None]:
        """Run Megatron's timer ``name`` inside the ``with`` block, unless the stage has no such neighbor."""
        if self._timers is None or is_edge:
            yield
            return
        self._timers(name, log_level=2).start()
        yield
        self._timers(name).stop()


def _make_order_error(error: LoopError) -> RuntimeError:
    return RuntimeError(
        "ovpatch: Megatron's pipeline schedule differs from the schedules of known versions: "
        f"{str(error).rstrip('.')}. Set OVPATCH_MEGATRON_PIPELINE_SCHEDULE=stock"
    )


class _AgreedEngine(NamedTuple):
    """The engine on which the ranks of a pipeline have agreed.

    Attributes:
        group: The process group of the pipeline.
        objection: This rank's reason against an engine; "" if it has none.
        engine: The engine; None if a rank has a reason against it.
        reason: That reason; "" if there is an engine.
    """

    group: dist.ProcessGroup
    objection: str
    engine: ProgramCursor | None
    reason: str


class PipelinePatches:
    """The wrappers of Megatron's functions, for one set of options."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.queue = WeightGradQueue()
        self._schedule: str = options["pipeline_schedule"]
        self._step: _Step | None = None
        # The objections against the wrappers of models.
        self._wrapper_reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def wrap_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward_backward_pipelining_without_interleaving``."""

        @functools.wraps(original)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            # A loss that runs another pipeline calls this function inside of a step.
            if self._step is not None:
                with self._pause_step():
                    return original(*args, **kwargs)
            # Megatron's signature has only keyword parameters. Positional arguments belong to an unknown version.
            step = None if args else self._start_step(kwargs)
            if step is None:
                return original(*args, **kwargs)
            # An exception must also clear the step, because later calls would run inside of it.
            try:
                self._step = step
                with self.queue.running() if step.delays_weight_grads else contextlib.nullcontext():
                    result = original(**kwargs)
                step.finish()
            finally:
                self._step = None
            COUNTERS.pipeline_steps += 1
            return result

        return forward_backward

    @contextlib.contextmanager
    def _pause_step(self) -> Iterator[None]:
        """Make Megatron run the ``with`` block itself, because its messages do not belong to the outer step."""
        note_fallback(
            "the pipeline's schedule inside of another step, as in a function of its loss or of its gradients"
        )
        step, delays_weight_grads = self._step, self.queue.is_active
        self._step = None
        self.queue.is_active = False
        try:
            yield
        finally:
            self._step = step
            self.queue.is_active = delays_weight_grads

    def wrap_interleaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward_backward_pipelining_with_interleaving``, to report that Megatron runs it."""

        @functools.wraps(original)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            note_fallback(
                "the pipeline's schedule with interleaving, which can hide messages itself (overlap_p2p_comm)"
            )
            return original(*args, **kwargs)

        return forward_backward

    def wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``backward_step``."""

        @functools.wraps(original)
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            if self._step is None:
                return original(*args, **kwargs)
            with self._step.backward():
                return original(*args, **kwargs)

        return backward_step

    def wrap_message(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of :data:`_TIMERS`, which sends the last result and returns the next computation's input."""
        patches = self
        name = original.__name__
        timer, sends, receives = _TIMERS[name], name.startswith("send"), "recv" in name
        is_forward = name.endswith("recv_forward")
        # Callers may pass the arguments by position.
        names = list(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)
        def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
            if patches._step is None:
                return original(self, *args, **kwargs)
            arguments = dict(zip(names, args, strict=False)) | kwargs
            # The arguments are tensors to send, shapes to receive, and whether the stage has no such neighbor.
            *values, is_edge = (arguments[name] for name in names)
            with patches._step.time_message(timer, is_edge):
                if sends:
                    patches._step.send(values[0])
                return (
                    patches._step.receive(values[-1], is_forward=is_forward) if receives else None
                )

        return communicate

    def wrap_linear(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap ``linear_with_grad_accumulation_and_async_allreduce``."""
        return wrap_function(original, functools.partial(self._compute, find_wrapped(original)))

    def wrap_register(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``register_grad_ready``, so that a held gradient counts when it is computed."""
        queue = self.queue

        @functools.wraps(original)
        def register_grad_ready(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
            if not queue.holds(param):
                original(self, param, *args, **kwargs)

        return register_grad_ready

    def _compute(
        self,
        foreign_reason: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fuses: bool,
        should_reduce: bool,
        sequence_parallel: bool,
        extra_args: Mapping[str, Any],
    ) -> Tensor | None:
        """Return a linear's output; None if Megatron's backward computes the weight's gradient."""
        if not self.queue.is_active or sequence_parallel:
            return None
        # With a buffer, Megatron defers the weight's gradient itself.
        if not x.requires_grad or extra_args.get("grad_output_buffer") is not None:
            return None
        # The parameter may still be pending after a step that gathers early.
        if type(weight) is not torch.nn.Parameter:
            wait_for_param(weight)
        reason = foreign_reason or find_unsupported(x, weight, fuses)
        if reason:
            note_fallback(f"the weight gradient of a linear, which the backward computes: {reason}")
            return None
        compute = find_weight_grad(weight) if fuses else multiply
        entered, taken = self.queue.enter(weight, compute)
        # The queue does not delay the gradient of this weight.
        if taken is compute:
            return None
        layers = sys.modules[_LAYERS]
        group = (
            layers.get_tensor_model_parallel_group_if_none(extra_args.get("tp_group"))
            if should_reduce
            else None
        )
        prepare = layers.prepare_input_tensors_for_wgrad_compute
        output: Tensor = apply_function(Linear, x, entered, bias, taken, group, prepare)
        return output

    def _start_step(self, arguments: Mapping[str, Any]) -> _Step | None:
        """Return the step of a call of the schedule; None if Megatron runs the call."""
        if arguments.get("forward_only"):
            return None
        schedules, model = sys.modules[_SCHEDULES], arguments["model"]
        model = model[0] if isinstance(model, list) else model
        config, communicator = schedules.get_model_config(model), arguments.get("p2p_communicator")
        reason, engine = _find_foreign_messages(arguments, schedules), None
        if not reason:
            state = schedules.parallel_state
            group = (
                state.get_pipeline_model_parallel_group()
                if communicator is None
                else communicator.pp_group
            )
            engine, reason = self._find_engine(model, config, group)
        if engine is None:
            note_fallback(f"the pipeline's schedule: {reason}")
            return None
        no_sync, order = config.no_sync_func, "1f1b"
        if self._schedule == "zb-h1":
            if no_sync is None or getattr(no_sync, "__func__", None) is _find_no_sync(model):
                order = "zb-h1"
            else:
                note_fallback(
                    "schedule zb-h1, which is 1f1b here: no_sync_func does not belong to Megatron's own model"
                )
        # With grad_sync_func, Megatron counts gradients after all backwards.
        if no_sync is None or config.grad_sync_func is not None:
            no_sync = contextlib.nullcontext
        step = _Step(
            engine,
            self.queue,
            arguments["num_microbatches"],
            no_sync,
            config.timers,
            delays_weight_grads=self._should_delay(config, group),
        )
        has_varying_shapes = config.variable_seq_lengths or getattr(config, "mtp_standalone", False)
        make_buffer = functools.partial(_make_buffer, config.pipeline_dtype)
        # The step may refer to the model, which keeps the engine. A strong reference would be a cycle.
        compute = weak_method(step.compute)
        engine.start_step(
            order,
            arguments["num_microbatches"],
            make_buffer,
            compute,
            varies=has_varying_shapes,
        )
        return step

    def _find_engine(
        self, model: Any, config: Any, group: dist.ProcessGroup
    ) -> tuple[ProgramCursor | None, str]:
        """Return the engine of a model's pipeline, or None and the reason; all ranks get the same result."""
        if model not in self._wrapper_reasons:
            self._wrapper_reasons[model] = _find_wrapper(model)
        device = torch.device(torch.cuda.current_device())
        objection = (
            self._wrapper_reasons[model]
            or _find_setting(config)
            or find_group_reason(group, device)
        )
        agreed: _AgreedEngine | None = attached_values(model).get(_ENGINE_KEY)
        # Ranks agree again if the group or this rank's objection has changed.
        if agreed is None or agreed.group is not group or agreed.objection != objection:
            terms = {"pipeline_schedule": self._schedule}
            limit = wait_limit_s(group, LATE_START_S)
            reason = check_consistent(
                group,
                "megatron pipeline",
                terms,
                objection=objection,
                timeout_s=limit,
                remedy=_REMEDY,
            )
            engine = None if reason else ProgramCursor(group, device)
            attached_values(model)[_ENGINE_KEY] = agreed = _AgreedEngine(
                group, objection, engine, reason
            )
        return agreed.engine, agreed.reason

    def _should_delay(self, config: Any, group: dist.ProcessGroup) -> bool:
        """Return whether this stage computes weight gradients after its sends."""
        if self._schedule == "auto" and config.tensor_model_parallel_size > 1:
            note_fallback(
                "weight gradients of a pipeline's stages: auto keeps collectives of tensor-parallel linears under them"
            )
            return False
        # No stage waits for the input gradient of the first stage.
        return group.rank() > 0


def _make_buffer(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    with outside_modes():
        return torch.empty(
            shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=True
        )


def _find_foreign_messages(arguments: Mapping[str, Any], schedules: Any) -> str:
    """Return the reason for which the engine cannot send a step's messages; "" if there is none.

    All ranks get the same result.
    """
    communicator, groups = arguments.get("p2p_communicator"), arguments.get("pg_collection")
    if communicator is not None and type(communicator) is not schedules.P2PCommunicator:
        return f"messages are sent by {type(communicator).__name__}"
    if groups is not None and (communicator is None or "MultiModule" in type(groups).__name__):
        return f"its groups are given as {type(groups).__name__}"
    return (
        "adjust_tensor_shapes_fn is given"
        if arguments.get("adjust_tensor_shapes_fn") is not None
        else ""
    )


def _find_setting(config: Any) -> str:
    """Return the remark that a setting is not supported; "" if all are."""
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return "cuda_graph_impl is on"
    return next(
        (f"{name} is on" for name in _UNSUPPORTED_SETTINGS if getattr(config, name, False)), ""
    )


def _find_wrapper(model: Any) -> str:
    """Return the remark that a wrapper of the model needs all gradients inside of the backward; "" if none does."""
    for module_class in {type(module) for module in model.modules()}:
        if (
            module_class.__module__.startswith("torch.nn.parallel")
            or hasattr(module_class, "unshard")
            or "FullyShard" in module_class.__name__
        ):
            return f"the model is in {module_class.__name__}"
    return ""


def _find_no_sync(model: Any) -> Any:
    """Return the ``no_sync`` function of a model in Megatron's own DistributedDataParallel, or otherwise the model."""
    # The caller compares the result with a function, and a model equals no function.
    module_class = type(model)
    return (
        module_class.no_sync
        if module_class.__module__ == "megatron.core.distributed.distributed_data_parallel"
        else model
    )
