"""Megatron's 1F1B with input gradients that are sent before the weight gradients are computed.

Megatron's loop runs as it is, with its messages in its order. A backward leaves out the weight gradients of linears.
They are computed behind the start of the send, where a stage would wait for its neighbours. If Megatron receives next,
that is started before them, too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.data_parallel.grad_hooks import apply_function
from ovpatch.overlap.tensors.pending_param import wait_for_param
from ovpatch_plugins.megatron.linears import find_unsupported, find_weight_grad, find_wrapped, wrap_function
from ovpatch_plugins.megatron.report import COUNTERS
from ovpatch_plugins.megatron.takeover import note_left
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


class _Step:
    """A call of Megatron's schedule on a stage that sends input gradients.

    Args:
        queue: The weight gradients that are due.
        microbatches: Their number in the step.
        kept: For how many microbatches weight gradients may be due while the stage goes on.
        no_sync: In which context gradients are accumulated before the last microbatch's.
        is_uniform: Whether all messages of a direction have one shape.
    """

    def __init__(
        self, queue: WeightGradQueue, microbatches: int, kept: int, no_sync: Callable[[], Any], *, is_uniform: bool
    ) -> None:
        self._queue = queue
        self._left = microbatches
        self._kept = kept
        self._no_sync = no_sync
        self._is_uniform = is_uniform
        self._make: Callable[[], Tensor] | None = None  # memory for an output's gradient, once one has been received
        self._posted: tuple[Tensor, Any] | None = None  # memory and works of a receive that Megatron will ask for
        self.is_sending = False  # whether the message that is started next is the last one of an input gradient

    def start(self, original: Callable[..., Any], messages: dict[str, Any]) -> Any:
        """Start messages, and behind those that send an input gradient what the stage has time for.

        Behind :meth:`send_backward`, Megatron receives the next output gradient, if there is one. It would do so behind
        the weight gradients; messages stay in its order.
        """
        received = messages.get("tensor_recv_next")
        works = original(**messages) if self._posted is None else self._take(*self._posted, received)
        if received is not None and self._is_uniform:
            self._make = functools.partial(torch.empty, received.shape, dtype=received.dtype, device=received.device)
        if self.is_sending:
            if self._left and self._make is not None and messages.get("tensor_recv_prev") is None:
                memory = self._make()
                self._posted = memory, original(**messages | {"tensor_send_prev": None, "tensor_recv_next": memory})
                COUNTERS.early_receives += 1
            COUNTERS.early_sends += bool(self.compute_due())
        return works

    def _take(self, memory: Tensor, works: Any, received: Tensor | None) -> Any:
        """Give Megatron the receive that it starts by now.

        Raises:
            RuntimeError: It starts something else.
        """
        if received is None or received.shape != memory.shape:
            raise RuntimeError(
                "ovpatch: Megatron's pipeline schedule does not receive an output gradient where known versions do. "
                "Set OVPATCH_MEGATRON_PIPELINE_SCHEDULE=stock"
            )
        received.data, self._posted = memory, None
        return works

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run a microbatch's backward inside the ``with`` block."""
        if self._posted is not None:
            self._take(*self._posted, None)
        with self._queue.recording():
            yield
        self._left -= 1

    def compute_due(self) -> int:
        """Compute the weight gradients for which the stage has time now, all of them behind the last backward.

        Returns:
            Their number.
        """
        self.is_sending = False
        due = len(self._queue)
        if self._left:
            return self._queue.compute(max(0, due - self._kept))
        found = 0
        if due > 1:  # in the last backward Megatron has begun to count gradients, of which these are none
            with self._no_sync():
                found = self._queue.compute(due - 1)
        return found + self._queue.compute(min(1, due))


class PipelinePatches:
    """The wrappers of Megatron's functions, for one set of options."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.queue = WeightGradQueue()
        self._schedule: str = options["pipeline_schedule"]
        self._step: _Step | None = None
        self._wrappers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # by the model

    def wrap_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward_backward_pipelining_without_interleaving``."""

        @functools.wraps(original)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            step = None if args or self._step is not None else self._begin(kwargs)
            if step is None:
                return original(*args, **kwargs)
            try:
                with self.queue.running():
                    self._step = step
                    found = original(**kwargs)
            finally:
                self._step = None
            COUNTERS.pipeline_steps += 1
            return found

        return forward_backward

    def wrap_interleaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward_backward_pipelining_with_interleaving``, which is left as it is: the report says so."""

        @functools.wraps(original)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            note_left("the pipeline's schedule with interleaving, which hides messages by overlap_p2p_comm")
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

    def wrap_send(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the methods that send an input gradient, ``send_backward`` and ``send_backward_recv_forward``."""

        @functools.wraps(original)
        def send(self_: Any, input_tensor_grads: Any, *args: Any, **kwargs: Any) -> Any:
            step = self._step
            if step is None:
                return original(self_, input_tensor_grads, *args, **kwargs)
            # Of several tensors Megatron waits for each before it sends the next one.
            step.is_sending = not isinstance(input_tensor_grads, list) or len(input_tensor_grads) == 1
            found = original(self_, input_tensor_grads, *args, **kwargs)
            step.compute_due()
            return found

        return send

    def wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the functions that start messages, behind which Megatron waits for them."""

        @functools.wraps(original)
        def start(**messages: Any) -> Any:
            return original(**messages) if self._step is None else self._step.start(original, messages)

        return start

    def wrap_linear(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap ``linear_with_grad_accumulation_and_async_allreduce``."""
        return wrap_function(original, functools.partial(self._compute, original))

    def _compute(
        self,
        original: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fuse: bool,
        reduces: bool,
        sequence_parallel: bool,
        further: Mapping[str, Any],
    ) -> Tensor | None:
        """Return a linear's output; None if its weight's gradient stays in Megatron's backward."""
        if self._step is None or sequence_parallel or torch.compiler.is_compiling():
            return None
        if not x.requires_grad or further.get("grad_output_buffer") is not None:
            return None
        if type(weight) is not torch.nn.Parameter:
            wait_for_param(weight)
        reason = find_wrapped(original) or find_unsupported(x, weight, fuse)
        if reason:
            note_left(f"the weight gradient of a linear, which stays in the backward: {reason}")
            return None
        compute = find_weight_grad(weight) if fuse else multiply
        entering, taking = self.queue.enter(weight, compute)
        if taking is compute:
            return None
        layers = sys.modules[_LAYERS]
        group = layers.get_tensor_model_parallel_group_if_none(further.get("tp_group")) if reduces else None
        prepare = layers.prepare_input_tensors_for_wgrad_compute
        output: Tensor = apply_function(Linear, x, entering, bias, taking, group, prepare)
        return output

    def _begin(self, given: Mapping[str, Any]) -> _Step | None:
        """Return what a call of the schedule runs with, or None if Megatron's order stays."""
        if given.get("forward_only"):
            return None
        schedules, model = sys.modules[_SCHEDULES], given["model"]
        model = model[0] if isinstance(model, list) else model
        config, communicator = schedules.get_model_config(model), given.get("p2p_communicator")
        if model not in self._wrappers:
            self._wrappers[model] = _find_wrapper(model)
        reason = self._wrappers[model] or _find_reason(config, communicator, given.get("pg_collection"), schedules)
        if self._schedule == "auto" and config.tensor_model_parallel_size > 1:
            reason = "auto keeps collectives of tensor-parallel linears under their weight gradients"
        if reason:
            note_left(f"the pipeline's schedule: {reason}")
            return None
        state = schedules.parallel_state
        group = state.get_pipeline_model_parallel_group() if communicator is None else communicator.pp_group
        if group.rank() == 0:  # nobody waits for the first stage's input gradient
            return None
        no_sync, kept = config.no_sync_func, 0
        if self._schedule == "zb-h1":
            if no_sync is None or getattr(no_sync, "__func__", None) is _find_no_sync(model):
                kept = group.rank()
            else:
                note_left("schedule zb-h1, which is 1f1b here: no_sync_func is not that of Megatron's own model")
        if no_sync is None or config.grad_sync_func is not None:  # the latter: Megatron counts behind all backwards
            no_sync = contextlib.nullcontext
        is_uniform = not (config.variable_seq_lengths or getattr(config, "mtp_standalone", False))
        return _Step(self.queue, given["num_microbatches"], kept, no_sync, is_uniform=is_uniform)


def _find_reason(config: Any, communicator: Any, groups: Any, schedules: Any) -> str:
    """Return why a step is left to Megatron, or ""."""
    if communicator is not None and type(communicator) is not schedules.P2PCommunicator:
        return f"messages are sent by {type(communicator).__name__}"
    if groups is not None and (communicator is None or "MultiModule" in type(groups).__name__):
        return f"its groups are given as {type(groups).__name__}"
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return "cuda_graph_impl is on"
    return next((f"{name} is on" for name in _OTHERS if getattr(config, name, False)), "")


def _find_wrapper(model: Any) -> str:
    """Return which wrapper of the model waits for all gradients inside of the backward, or ""."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.startswith("torch.nn.parallel") or hasattr(kind, "unshard") or "FullyShard" in kind.__name__:
            return f"the model is in {kind.__name__}"
    return ""


def _find_no_sync(model: Any) -> Any:
    """Return the function ``no_sync`` of a model in Megatron's own DistributedDataParallel."""
    kind = type(model)
    return kind.no_sync if kind.__module__ == "megatron.core.distributed.distributed_data_parallel" else model
