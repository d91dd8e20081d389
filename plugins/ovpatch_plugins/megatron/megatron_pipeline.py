"""Megatron's 1F1B by the engine of ``pipeline``, with input gradients sent before the weight gradients are computed.

Megatron's function runs as it is, with its own forward and backward steps. The engine carries its messages: receives
start ahead, and no stage waits for a send. A backward leaves out the weight gradients of linears, which are computed
behind the send where the engine's order has them.
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
from ovpatch_plugins.megatron.megatron_report import COUNTERS, note_left
from ovpatch_plugins.megatron.weight_grads import Linear, WeightGradQueue, multiply

_SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"
_LAYERS: Final = "megatron.core.tensor_parallel.layers"
# Settings of Megatron's that order or keep gradients in ways of their own.
_OTHERS: Final = (
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "fine_grained_activation_offloading",
    "cpu_offloading",
    "enable_cuda_graph",
    "external_cuda_graph",
)
_TIMERS: Final = {  # the methods that Megatron's loop calls for messages, with the names of its timers
    "recv_forward": "forward-recv",
    "recv_backward": "backward-recv",
    "send_forward": "forward-send",
    "send_backward": "backward-send",
    "send_forward_recv_backward": "forward-send-backward-recv",
    "send_backward_recv_forward": "backward-send-forward-recv",
}
_REMEDY: Final = (
    "Call ovpatch.apply() with the same arguments on every rank before the first step, and give "
    "every rank the same "
    "OVPATCH variables; OVPATCH_MEGATRON_PIPELINE_SCHEDULE=stock on all ranks leaves pipelines to "
    "Megatron."
)

_ENGINE: Final = "megatron: engine"  # of a model, as its pipeline's ranks have agreed


def close_all() -> None:
    """Close the engines of all pipelines."""
    for model, known in find_owners(_ENGINE):
        if known.engine is not None:
            known.engine.close()
        del attached_values(model)[_ENGINE]


class _Step:
    """A call of Megatron's schedule on one stage.

    Args:
        engine: Has the stage's messages and the order.
        queue: The weight gradients that are due.
        microbatches: Their number in the step.
        no_sync: In which context gradients are accumulated before the last microbatch's.
        timers: Megatron's, or None.
        delays: Whether weight gradients are delayed.
    """

    def __init__(
        self,
        engine: ProgramCursor,
        queue: WeightGradQueue,
        microbatches: int,
        no_sync: Callable[[], Any],
        timers: Any,
        *,
        delays: bool,
    ) -> None:
        self.delays = delays
        self._engine = engine
        self._queue = queue
        self._microbatches = self._left = microbatches
        self._no_sync = no_sync
        self._timers = timers

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run a microbatch's backward inside the ``with`` block."""
        with self._queue.recording() if self._queue.is_active else contextlib.nullcontext():
            yield
        self._left -= 1

    def receive(self, shapes: Sequence[Sequence[int]], *, is_forward: bool) -> list[Tensor | None]:
        """Return what the next forward or backward reads, as Megatron has it.

        Raises:
            RuntimeError: Megatron runs something else than the engine's order has.
        """
        try:
            found: list[Tensor | None] = [*self._engine.receive(shapes, is_forward=is_forward)]
        except LoopError as error:
            raise _make_order_error(error) from error
        return found or [None] * len(shapes)

    def send(self, tensors: Any) -> None:
        """Send a result, and compute what is due behind it."""
        before = COUNTERS.weight_grads
        self._engine.send(tensors if isinstance(tensors, list) else [tensors])
        COUNTERS.early_sends += COUNTERS.weight_grads != before

    def compute(self, microbatch: int) -> None:
        """Compute a microbatch's weight gradients."""
        if not len(self._queue):
            return
        # In its last backward Megatron counts gradients; only the last microbatch's are to be counted.
        counts = self._left or microbatch == self._microbatches - 1
        with contextlib.nullcontext() if counts else self._no_sync():
            self._queue.compute(1)

    def finish(self) -> None:
        """End the step."""
        try:
            self._engine.finish()
        except LoopError as error:
            raise _make_order_error(error) from error
        COUNTERS.early_receives += self._engine.early_receives

    @contextlib.contextmanager
    def timing(self, name: str, is_edge: bool) -> Iterator[None]:
        """Have Megatron's timer ``name`` run inside the ``with`` block, unless the stage has no such neighbour."""
        if self._timers is None or is_edge:
            yield
            return
        self._timers(name, log_level=2).start()
        yield
        self._timers(name).stop()


def _make_order_error(error: LoopError) -> RuntimeError:
    return RuntimeError(
        "ovpatch: Megatron's pipeline schedule is not that of known versions: "
        f"{str(error).rstrip('.')}. "
        "Set OVPATCH_MEGATRON_PIPELINE_SCHEDULE=stock"
    )


class _Known(NamedTuple):
    """What the ranks of a pipeline have agreed on: the engine, or None with the reason."""

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
        self._wrappers: weakref.WeakKeyDictionary[Any, str] = (
            weakref.WeakKeyDictionary()
        )  # by the model

    def wrap_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward_backward_pipelining_without_interleaving``."""

        @functools.wraps(original)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            if self._step is not None:
                with self._paused():
                    return original(*args, **kwargs)
            step = None if args else self._begin(kwargs)
            if step is None:
                return original(*args, **kwargs)
            try:
                self._step = step
                with self.queue.running() if step.delays else contextlib.nullcontext():
                    found = original(**kwargs)
                step.finish()
            finally:
                self._step = None
            COUNTERS.pipeline_steps += 1
            return found

        return forward_backward

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Leave what runs inside the ``with`` block to Megatron: its messages are not those of the step around it."""
        note_left(
            "the pipeline's schedule inside of another step, as in a function of its loss or of "
            "its gradients"
        )
        step, delays = self._step, self.queue.is_active
        self._step, self.queue.is_active = None, False
        try:
            yield
        finally:
            self._step, self.queue.is_active = step, delays

    def wrap_interleaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward_backward_pipelining_with_interleaving``, which is left as it is: the report says so."""

        @functools.wraps(original)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            note_left(
                "the pipeline's schedule with interleaving, which can hide messages itself "
                "(overlap_p2p_comm)"
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
        """Wrap a method of :data:`_TIMERS`: takes what a computation has made, and returns what the next one reads."""
        patches = self
        name = original.__name__
        timer, sends, receives = _TIMERS[name], name.startswith("send"), "recv" in name
        is_forward = name.endswith("recv_forward")
        names = list(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)
        def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
            if patches._step is None:
                return original(self, *args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs
            *values, is_edge = (
                given[name] for name in names
            )  # tensors, shapes, whether there is no neighbour
            with patches._step.timing(timer, is_edge):
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
        """Wrap ``register_grad_ready``: a gradient that is held counts when it is computed."""
        queue = self.queue

        @functools.wraps(original)
        def register_grad_ready(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
            if not queue.holds(param):
                original(self, param, *args, **kwargs)

        return register_grad_ready

    def _compute(
        self,
        foreign: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fuse: bool,
        reduces: bool,
        sequence_parallel: bool,
        further: Mapping[str, Any],
    ) -> Tensor | None:
        """Return a linear's output; None if its weight's gradient stays in Megatron's backward."""
        if not self.queue.is_active or sequence_parallel or torch.compiler.is_compiling():
            return None
        if not x.requires_grad or further.get("grad_output_buffer") is not None:
            return None
        if type(weight) is not torch.nn.Parameter:
            wait_for_param(weight)
        reason = foreign or find_unsupported(x, weight, fuse)
        if reason:
            note_left(f"the weight gradient of a linear, which stays in the backward: {reason}")
            return None
        compute = find_weight_grad(weight) if fuse else multiply
        entering, taking = self.queue.enter(weight, compute)
        if taking is compute:
            return None
        layers = sys.modules[_LAYERS]
        group = (
            layers.get_tensor_model_parallel_group_if_none(further.get("tp_group"))
            if reduces
            else None
        )
        prepare = layers.prepare_input_tensors_for_wgrad_compute
        output: Tensor = apply_function(Linear, x, entering, bias, taking, group, prepare)
        return output

    def _begin(self, given: Mapping[str, Any]) -> _Step | None:
        """Return what a call of the schedule runs with, or None if it stays Megatron's."""
        if given.get("forward_only"):
            return None
        schedules, model = sys.modules[_SCHEDULES], given["model"]
        model = model[0] if isinstance(model, list) else model
        config, communicator = schedules.get_model_config(model), given.get("p2p_communicator")
        reason, engine = _find_foreign_messages(given, schedules), None
        if not reason:
            state = schedules.parallel_state
            group = (
                state.get_pipeline_model_parallel_group()
                if communicator is None
                else communicator.pp_group
            )
            engine, reason = self._find_engine(model, config, group)
        if engine is None:
            note_left(f"the pipeline's schedule: {reason}")
            return None
        no_sync, order = config.no_sync_func, "1f1b"
        if self._schedule == "zb-h1":
            if no_sync is None or getattr(no_sync, "__func__", None) is _find_no_sync(model):
                order = "zb-h1"
            else:
                note_left(
                    "schedule zb-h1, which is 1f1b here: no_sync_func is not that of Megatron's "
                    "own model"
                )
        if (
            no_sync is None or config.grad_sync_func is not None
        ):  # the latter: Megatron counts behind all backwards
            no_sync = contextlib.nullcontext
        step = _Step(
            engine,
            self.queue,
            given["num_microbatches"],
            no_sync,
            config.timers,
            delays=self._delays(config, group),
        )
        varies = config.variable_seq_lengths or getattr(config, "mtp_standalone", False)
        make = functools.partial(_make_buffer, config.pipeline_dtype)
        compute = weak_method(step.compute)  # which may reference the model: that keeps the engine
        engine.start_step(order, given["num_microbatches"], make, compute, varies=varies)
        return step

    def _find_engine(
        self, model: Any, config: Any, group: dist.ProcessGroup
    ) -> tuple[ProgramCursor | None, str]:
        """Return the engine of a model's pipeline, or None and the reason; the same on all ranks."""
        if model not in self._wrappers:
            self._wrappers[model] = _find_wrapper(model)
        device = torch.device(torch.cuda.current_device())
        objection = (
            self._wrappers[model] or _find_setting(config) or find_group_reason(group, device)
        )
        known: _Known | None = attached_values(model).get(_ENGINE)
        if known is None or known.group is not group or known.objection != objection:
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
            attached_values(model)[_ENGINE] = known = _Known(group, objection, engine, reason)
        return known.engine, known.reason

    def _delays(self, config: Any, group: dist.ProcessGroup) -> bool:
        """Return whether this stage computes weight gradients behind its sends."""
        if self._schedule == "auto" and config.tensor_model_parallel_size > 1:
            note_left(
                "weight gradients of a pipeline's stages: auto keeps collectives of "
                "tensor-parallel linears under them"
            )
            return False
        return group.rank() > 0  # no stage waits for the first one's input gradient


def _make_buffer(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    with outside_modes():
        return torch.empty(
            shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=True
        )


def _find_foreign_messages(given: Mapping[str, Any], schedules: Any) -> str:
    """Return why the engine cannot have a step's messages, or ""; the same on all ranks."""
    communicator, groups = given.get("p2p_communicator"), given.get("pg_collection")
    if communicator is not None and type(communicator) is not schedules.P2PCommunicator:
        return f"messages are sent by {type(communicator).__name__}"
    if groups is not None and (communicator is None or "MultiModule" in type(groups).__name__):
        return f"its groups are given as {type(groups).__name__}"
    return (
        "adjust_tensor_shapes_fn is given"
        if given.get("adjust_tensor_shapes_fn") is not None
        else ""
    )


def _find_setting(config: Any) -> str:
    """Return which setting leaves a step to Megatron, or ""."""
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return "cuda_graph_impl is on"
    return next((f"{name} is on" for name in _OTHERS if getattr(config, name, False)), "")


def _find_wrapper(model: Any) -> str:
    """Return which wrapper of the model waits for all gradients inside of the backward, or ""."""
    for kind in {type(module) for module in model.modules()}:
        if (
            kind.__module__.startswith("torch.nn.parallel")
            or hasattr(kind, "unshard")
            or "FullyShard" in kind.__name__
        ):
            return f"the model is in {kind.__name__}"
    return ""


def _find_no_sync(model: Any) -> Any:
    """Return the function ``no_sync`` of a model in Megatron's own DistributedDataParallel."""
    kind = type(model)
    return (
        kind.no_sync
        if kind.__module__ == "megatron.core.distributed.distributed_data_parallel"
        else model
    )
