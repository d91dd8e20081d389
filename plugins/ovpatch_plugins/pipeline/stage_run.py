"""One stage of a rank: its forward, its backward in one or two parts, and the buffers of its messages.

Only methods of torch's stages that have kept name and meaning from 2.11 to 2.15 are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ovpatch.overlap.comm.backward_waits import BACKWARD_WAITS
from ovpatch_plugins.pipeline.actions import Kind
from ovpatch_plugins.pipeline.data_parallel import (
    FullyShardedGradients,
    LocalGradients,
    is_fsdp2,
    make_data_parallel,
)
from ovpatch_plugins.pipeline.report import StageReport
from ovpatch_plugins.pipeline.wgrad import WeightGradQueue


class StageRun:
    """A stage under the engine.

    Args:
        stage: The stage of ``torch.distributed.pipelining``.
        sends_or_splits: Whether a deferred weight gradient can help anyone: the stage sends an input gradient to
            another rank, or the schedule has Ws for it.
        delay_wgrad_compute: The option.
        fuse: The option ``gradient_accumulation_fusion``.

    Attributes:
        stage: The stage.
        objection: Why its weight gradients are not deferred, or "".
        queue: Its deferred weight gradients; None where they are not deferred.
        data_parallel: Its data parallelism.
        report: What the report says of it.
    """

    def __init__(self, stage: Any, *, sends_or_splits: bool, delay_wgrad_compute: str, fuse: bool) -> None:
        self.stage = stage
        self.data_parallel = make_data_parallel(stage.submod)
        self.objection = self.data_parallel.objection
        if delay_wgrad_compute == "off":
            self.objection = "delay_wgrad_compute is off"
        elif delay_wgrad_compute == "auto" and not sends_or_splits and not self.objection:
            self.objection = "no rank waits for the stage's input gradient"
        is_local = type(self.data_parallel) is LocalGradients
        self.report = StageReport(self.objection)
        self.queue = None if self.objection else WeightGradQueue(stage.submod, self.report, fuse=fuse and is_local)
        self._inputs: dict[int, list[Tensor | None]] = {}
        self._grads: dict[int, list[Tensor | None]] = {}
        self._sent: dict[Kind, list[Tensor]] = {}
        self._backwards = 0
        self._unshards: list[Any] = []

    # --- a step ---

    def start_step(self) -> None:
        """Begin a step."""
        self._backwards = 0
        if self.queue is not None:
            self.queue.scan()

    def deferring(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a step, in which the stage's linears defer."""
        return self.queue.installed() if self.queue is not None and self.queue.defers else contextlib.nullcontext()

    def run_forward(self, microbatch: int, args: Any, kwargs: Any, keep_output: bool) -> Any:
        """Compute F and return the module's output."""
        return self.stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=keep_output)

    def check_forward(self, output: Any) -> None:
        """Look at the graph of a microbatch's output, or of its loss, for weights that cannot be deferred."""
        if self.queue is not None:
            self.queue.check_graph(output)

    def launch_before_backward(self, microbatch: int) -> None:
        """Launch what B can have before its output gradient has come."""
        if BACKWARD_WAITS.launch_before is not None:
            outputs, _ = self.stage.fwd_cache[microbatch]
            BACKWARD_WAITS.launch_before(outputs)

    def run_backward(self, microbatch: int, loss: Any, microbatches: int) -> bool:
        """Compute B, or the full backward; tell whether weight gradients are left."""
        self._backwards += 1
        if self.queue is None or not self.queue.defers:
            last = self._backwards == microbatches
            self.stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=last)
            return False
        with self.queue.recording(microbatch):
            self.stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=False)
        return True

    def run_weight_grads(self, microbatch: int) -> None:
        """Compute W."""
        if self.queue is not None and self.queue.defers:
            self.data_parallel.computing_weight_grads(self.queue.compute, microbatch)

    def reduce(self, scale: int, *, by_perform: bool) -> None:
        """Reduce and scale the step's gradients.

        Args:
            scale: What gradients are divided by.
            by_perform: Whether stock calls ``perform_reduce_grad`` here, which handles FSDP2, or only ``scale_grads``.
        """
        if self.queue is not None and self.queue.defers:
            self.data_parallel.reduce()
        if by_perform:
            self.stage.perform_reduce_grad(scale)
        else:
            self.stage.scale_grads(scale)

    def clear(self) -> None:
        """Drop what an interrupted step left."""
        if self.queue is not None:
            self.queue.clear()
        for name in ("fwd_cache", "bwd_cache", "dw_runner", "backward_state", "output_chunks"):
            getattr(self.stage, name).clear()
        for microbatch in self._inputs:
            self.drop_buffers(microbatch)
        self._unshards.clear()

    # --- messages ---

    def take_buffers(self) -> None:
        """Take the receive buffers of all microbatches off the stage; :meth:`make_inputs` makes one when it is due.

        Stock allocates them once for all microbatches. Only shapes are kept here.
        """
        for infos, kept in ((self.stage.args_recv_info, self._inputs), (self.stage.grad_recv_info, self._grads)):
            for microbatch, items in infos.items():
                found = [getattr(info, "buffer", None) for info in items]
                if microbatch not in kept or any(isinstance(one, Tensor) and not one.is_meta for one in found):
                    kept[microbatch] = [None if one is None else _shape_of(one) for one in found]
                _set_buffers(items, kept[microbatch])  # torch 2.11 clears each buffer's gradient, and expects a tensor

    def give_buffers_back(self) -> None:
        """Give the stage receive buffers for all microbatches, as stock expects them."""
        for infos, kept in ((self.stage.args_recv_info, self._inputs), (self.stage.grad_recv_info, self._grads)):
            for microbatch, items in infos.items():
                if microbatch in kept:
                    _set_buffers(items, [self._make(shape) for shape in kept[microbatch]])
        self._inputs, self._grads = {}, {}

    def make_inputs(self, microbatch: int, kind: Kind) -> list[Tensor]:
        """Allocate the buffers of a message that F or B reads, and return those to receive into."""
        is_forward = kind is Kind.F
        infos = (self.stage.args_recv_info if is_forward else self.stage.grad_recv_info)[microbatch]
        shapes = (self._inputs if is_forward else self._grads)[microbatch]
        _set_buffers(infos, [self._make(shape) for shape in shapes])
        ops = self.stage.get_fwd_recv_ops(microbatch) if is_forward else self.stage.get_bwd_recv_ops(microbatch)
        return [op.tensor for op in ops]

    def list_outputs(self, microbatch: int, kind: Kind) -> list[Tensor]:
        """Return the tensors of the message that F or B sends."""
        ops = self.stage.get_fwd_send_ops(microbatch) if kind is Kind.F else self.stage.get_bwd_send_ops(microbatch)
        tensors = [op.tensor for op in ops]
        if kind not in self._sent:
            self._sent[kind] = [_shape_of(tensor) for tensor in tensors]
        return tensors

    def make_blank_outputs(self, kind: Kind) -> list[Tensor]:
        """Return zeros of the shapes of a message that F or B sends."""
        shapes: Sequence[Tensor | None] = self._sent.get(kind, [])
        if not shapes:
            shapes = self._shapes_of_outputs() if kind is Kind.F else self._inputs[0]
        return [made.detach().zero_() for shape in shapes if (made := self._make(shape)) is not None]

    def pass_forward(self, output: Any, microbatch: int, receiver: StageRun) -> None:
        """Hand the output to the next stage on this rank."""
        receiver.stage.set_local_fwd_input(output, microbatch)

    def pass_backward(self, microbatch: int, receiver: StageRun) -> None:
        """Hand the input gradient to the previous stage on this rank."""
        grads = self.stage.get_local_bwd_output(microbatch)
        if any(grad is None for grad in grads):
            receiver.make_inputs(microbatch, Kind.B)  # stock fills those of missing gradients with zeros
        receiver.stage.set_local_bwd_input(grads, microbatch)

    def drop_buffers(self, microbatch: int) -> None:
        """Drop the received tensors of a microbatch."""
        for infos, kept in ((self.stage.args_recv_info, self._inputs), (self.stage.grad_recv_info, self._grads)):
            if microbatch in kept:
                _set_buffers(infos[microbatch], kept[microbatch])

    def _make(self, shape: Tensor | None) -> Tensor | None:
        if shape is None:
            return None
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=self.stage.device)
        return made.requires_grad_(shape.requires_grad)

    def _shapes_of_outputs(self) -> list[Tensor]:
        metas = getattr(getattr(self.stage, "_stage_meta", None), "outputs", None)
        if metas is None:
            metas = self.stage.get_outputs_meta()  # tensors, in torch 2.11
        shapes = []
        for meta in metas:
            stride = meta.stride() if callable(meta.stride) else meta.stride
            shapes.append(torch.empty_strided(tuple(meta.shape), tuple(stride), dtype=meta.dtype, device="meta"))
        return shapes

    # --- parameters in FSDP2 ---

    def start_unshard(self) -> None:
        """Start to gather the parameters."""
        for module in self._list_fsdp_modules():
            self._unshards.append(module.unshard(async_op=True))

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are gathered."""
        while self._unshards:
            handle = self._unshards.pop(0)
            if handle is not None:
                handle.wait()

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for module in self._list_fsdp_modules():
            module.reshard()

    def _list_fsdp_modules(self) -> list[Any]:
        return [module for module in self.stage.submod.modules() if is_fsdp2(module)] if self.is_fully_sharded else []

    @property
    def is_data_parallel(self) -> bool:
        """Whether other replicas of the stage get its gradients."""
        return type(self.data_parallel) is not LocalGradients

    @property
    def is_fully_sharded(self) -> bool:
        """Whether the module is in FSDP2."""
        return isinstance(self.data_parallel, FullyShardedGradients)


def list_stages(schedule: Any) -> list[Any]:
    """Return this rank's stages of one of torch's schedules, in its order."""
    stages = getattr(schedule, "_stages", None)
    return [schedule._stage] if stages is None else list(stages)


def _shape_of(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _set_buffers(infos: Sequence[Any], buffers: Sequence[Tensor | None]) -> None:
    for info, buffer in zip(infos, buffers, strict=True):
        if hasattr(info, "buffer"):  # not a placeholder of torch 2.11 for an argument of the script
            info.buffer = buffer
