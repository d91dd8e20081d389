"""One stage of a rank: its forward, its backward in one or two parts, and the buffers of its messages.

Only methods of torch's stages that have kept name and meaning from 2.11 to 2.15 are called; for what differs there is
:mod:`~ovpatch_plugins.pipeline.runtime.torch_compat`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import attached_values, find_owners, outside_modes
from ovpatch.overlap.comm.streams import BACKWARD_WAITS
from ovpatch.overlap.pipelining.ir import Kind
from ovpatch_plugins.pipeline.pipeline_counters import StageReport
from ovpatch_plugins.pipeline.runtime.deferred_linears import WeightGradQueue
from ovpatch_plugins.pipeline.runtime.stage_replicas import (
    FullyShardedGradients,
    LocalGradients,
    is_fsdp2,
    make_data_parallel,
)
from ovpatch_plugins.pipeline.runtime.torch_compat import (
    clear_states,
    find_input_grad_shapes,
    find_output_nodes,
    find_output_shapes,
    find_shapes,
    has_buffers,
    makes_buffers,
    release_outputs,
    set_buffers,
    setting_attributes,
    shape_of,
)

_TAKEN: Final = "pipeline: receive buffers"  # of a stage, which several schedules may share


class StageRun:
    """A stage under the engine.

    Args:
        stage: The stage of ``torch.distributed.pipelining``.
        sends: Whether the stage sends an input gradient to another rank.
        splits: Whether the schedule has Ws for it.
        delay_wgrad_compute: The option.
        fuse: The option ``gradient_accumulation_fusion``.
        varies: The option ``variable_seq_lengths``.

    Attributes:
        stage: The stage.
        objection: Why its weight gradients are not deferred, or "".
        queue: Its deferred weight gradients; None where they are not deferred.
        varies: Whether messages may have other shapes than those of the first step.
        data_parallel: Its data parallelism.
        first_input: The microbatch of the step that is number 0 of the stage.
        is_reduced: Whether the order has the stage's gradients reduced and scaled; if not, the script does both.
        report: What the report says of it.
    """

    def __init__(
        self,
        stage: Any,
        *,
        sends: bool = False,
        splits: bool = False,
        delay_wgrad_compute: str,
        fuse: bool = False,
        varies: bool = False,
    ) -> None:
        self.stage = stage
        self.varies = varies
        self.first_input = 0
        self.is_reduced = True
        self.data_parallel = make_data_parallel(stage.submod)
        self.objection = ""
        self.report = StageReport()
        self.queue: WeightGradQueue | None = None
        self._sends, self._delay_wgrad_compute = sends, delay_wgrad_compute
        self._fuses = fuse and type(self.data_parallel) is LocalGradients
        self._queues: dict[bool, WeightGradQueue] = {}  # by whether they take linears of other features
        self.set_splits(splits)
        self._inputs: dict[int, list[Tensor | None]] = {}
        self._grads: dict[int, list[Tensor | None]] = {}
        self._sent: dict[Kind, list[Tensor]] = {}
        self._expected: list[torch.Size] | None = None  # shapes of the receiver's buffers
        self._sizes: dict[tuple[Kind, int], list[torch.Size]] = {}  # of what F reads, and of what B reads
        self._backwards = 0
        self._unshards: list[Any] = []
        self._finalizes = self._reshards = True
        self._reducing: int | None = None

    def set_splits(self, splits: bool) -> None:
        """Defer weight gradients from the next step on as an order with Ws for the stage needs it, or one without."""
        delay = self._delay_wgrad_compute
        self.objection, self.queue = self.data_parallel.objection, None
        if delay == "off":
            self.objection = "delay_wgrad_compute is off"
        elif delay == "auto" and not (self._sends or splits) and not self.objection:
            self.objection = "no rank waits for the stage's input gradient"
        self.report.objection = self.objection
        if not self.objection:
            takes = splits or delay == "on"
            if takes not in self._queues:
                module, fuse = self.stage.submod, self._fuses
                self._queues[takes] = WeightGradQueue(module, self.report, takes_others=takes, fuse=fuse)
            self.queue = self._queues[takes]

    # --- a step ---

    def start_step(self, *, finalizes: bool) -> None:
        """Begin a step.

        Args:
            finalizes: Whether gradients in FSDP2 are reduced at its end; if not, parameters stay unsharded.
        """
        self._backwards = 0
        self._finalizes, self._reshards = finalizes, True
        self._sizes.clear()
        if self.queue is not None:
            self.queue.scan()

    def deferring(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a step, in which the stage's linears defer."""
        return self.queue.installed() if self.queue is not None and self.queue.defers else contextlib.nullcontext()

    def run_forward(self, microbatch: int, args: Any, kwargs: Any, keep_output: bool) -> Any:
        """Compute F and return the module's output."""
        if self.queue is not None:
            self.queue.start_forward(microbatch)
        if not self.varies:
            return self.stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=keep_output)
        with self._unchecked():
            output = self.stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=keep_output)
        parts = output if isinstance(output, (tuple, list)) else [output]
        self._sizes[Kind.B, microbatch] = [_local(part).shape for part in parts if isinstance(part, Tensor)]
        return output

    def check_forward(self, output: Any) -> None:
        """Look at the graph of a microbatch's output, or of its loss, for weights that cannot be deferred."""
        if self.queue is not None:
            self.queue.check_graph(output)

    def launch_before_backward(self, microbatch: int) -> None:
        """Launch what B can have before its output gradient has come."""
        if BACKWARD_WAITS.launch_before is not None:
            if self.queue is not None:
                self.queue.start_recomputation(microbatch)
            BACKWARD_WAITS.launch_before(find_output_nodes(self.stage, microbatch))

    def run_backward(self, microbatch: int, loss: Any, microbatches: int) -> bool:
        """Compute B, or the full backward; tell whether weight gradients are left."""
        self._backwards += 1
        with self._unchecked() if self.varies else contextlib.nullcontext():
            if self.queue is None or not self.queue.defers:
                last = self._backwards == microbatches
                self.stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=last)
                return False
            with self.queue.recording(microbatch):
                self.stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=False)
        return True

    def finish_backward(self, microbatch: int, check_peers: Callable[[], None]) -> None:
        """End a microbatch's B, whose input gradient has been sent.

        Args:
            microbatch: Its index.
            check_peers: Raises if what was received may be the zeros of a failed rank.
        """
        self.drop_buffers(microbatch)

    def run_weight_grads(self, microbatch: int) -> None:
        """Compute W."""
        if self.queue is not None and self.queue.defers:
            self.data_parallel.computing_weight_grads(self.queue.compute, microbatch)

    def reduce(self, scale: int, *, by_perform: bool, waits: bool) -> None:
        """Reduce and scale the step's gradients.

        Args:
            scale: What gradients are divided by.
            by_perform: Whether stock calls ``perform_reduce_grad`` here, which handles FSDP2, or only ``scale_grads``.
            waits: Whether to wait for the reduction in FSDP2, or leave that to :meth:`finish_reduce`.
        """
        # DistributedDataParallel reduces in the last backward, with or without REDUCE_GRAD.
        if self.queue is not None and self.queue.defers:
            self.data_parallel.reduce()
        if not self.is_reduced:
            return
        if not by_perform:
            self.stage.scale_grads(scale)
        elif self.is_fully_sharded and not self._finalizes:
            self._reshards = False
        elif self.is_fully_sharded and not waits:
            self.stage.start_gradient_reduction()
            self._reducing = scale
        else:
            self.stage.perform_reduce_grad(scale)

    def finish_reduce(self) -> None:
        """Wait for a reduction that was started without."""
        if self._reducing is not None:
            scale, self._reducing = self._reducing, None
            self.stage.wait_for_gradient_reduction(scale)

    def _unchecked(self) -> contextlib.AbstractContextManager[None]:
        """Have stock not compare shapes with the first step's: torch 2.11 always does, later ones for debugging."""
        checks = [name for name in ("_validate_fwd_input", "_validate_fwd_outputs") if hasattr(self.stage, name)]
        changed: dict[str, Any] = dict.fromkeys(checks, _check_nothing)
        if hasattr(self.stage, "_runtime_validate"):
            changed["_runtime_validate"] = False
        return setting_attributes(self.stage, changed)

    def clear(self) -> None:
        """Drop what an interrupted step left."""
        if self.queue is not None:
            self.queue.clear()
        clear_states(self.stage)
        self.data_parallel.clear()
        for microbatch in self._inputs:
            self.drop_buffers(microbatch)
        self._unshards.clear()
        self._reducing = None

    # --- messages ---

    def take_buffers(self) -> None:
        """Take the receive buffers of all microbatches off the stage; :meth:`make_inputs` makes one when it is due.

        Stock to torch 2.14 allocates them once for all microbatches. Only shapes are kept here.
        """
        is_new = False
        for infos, kept in ((self.stage.args_recv_info, self._inputs), (self.stage.grad_recv_info, self._grads)):
            for microbatch, items in infos.items():
                if microbatch not in kept or has_buffers(items):
                    kept[microbatch] = find_shapes(items)
                    is_new = True
                set_buffers(items, kept[microbatch])
        if is_new:
            self._sent, self._expected = {}, None
            shapes = itertools.chain(self._inputs.get(0, ()), self._grads.get(0, ()))
            self.report.receive_nbytes = sum(shape.nbytes for shape in shapes if shape is not None)
        attached_values(self.stage)[_TAKEN] = self._inputs, self._grads

    def forget_sizes(self) -> None:
        """Make the next messages in the shapes of the first step."""
        self._sizes.clear()

    def count_inputs(self, microbatch: int) -> int:
        """Return how many tensors the message has that F reads."""
        return sum(shape is not None for shape in self._inputs[microbatch])

    def count_message_bytes(self, align: Callable[[int], int]) -> int:
        """Return the bytes of the largest message that the stage receives, each tensor's rounded up by ``align``."""
        return max(
            (
                sum(align(shape.nbytes) for shape in shapes if shape is not None)
                for shapes in (*self._inputs.values(), *self._grads.values())
            ),
            default=0,
        )

    def make_inputs(self, microbatch: int, kind: Kind, sizes: Sequence[torch.Size] | None = None) -> list[Tensor]:
        """Allocate the buffers of a message that F or B reads, and return those to receive into.

        Args:
            microbatch: Its index.
            kind: F or B.
            sizes: Shapes of the tensors of a message for F where they vary.
        """
        is_forward = kind is Kind.F
        infos = (self.stage.args_recv_info if is_forward else self.stage.grad_recv_info)[microbatch]
        shapes = (self._inputs if is_forward else self._grads)[microbatch]
        if sizes is not None:
            self._sizes[Kind.F, microbatch] = list(sizes)
        if self.varies and (kind, microbatch) in self._sizes:
            shapes = _resize(shapes, self._sizes[kind, microbatch])
        buffers = [self._make(shape) for shape in shapes]
        set_buffers(infos, buffers)
        return [buffer for buffer in buffers if buffer is not None]

    def list_outputs(self, microbatch: int, kind: Kind) -> list[Tensor]:
        """Return the tensors of the message that F or B sends.

        Raises:
            ValueError: Their shapes are not those that the receiver expects.
        """
        ops = self.stage.get_fwd_send_ops(microbatch) if kind is Kind.F else self.stage.get_bwd_send_ops(microbatch)
        tensors = [op.tensor for op in ops]
        if kind is Kind.F and not self.varies:
            self._check_shapes(tensors)
        if kind is Kind.F:
            release_outputs(self.stage, microbatch)  # what is sent holds the tensors
        elif self.varies:  # stock makes missing gradients in the shapes of the first step
            for place, size in enumerate(self._sizes_of_grads(microbatch)):
                if tensors[place].shape != size:
                    tensors[place] = tensors[place].new_zeros(size)
        if kind not in self._sent:
            self._sent[kind] = [shape_of(tensor) for tensor in tensors]
        return tensors

    def _sizes_of_grads(self, microbatch: int) -> list[torch.Size]:
        """Return the shapes of the input gradients to send; empty if no input has come."""
        left = list(self._sizes.get((Kind.F, microbatch), ()))
        inputs = self._inputs[microbatch]
        pairs = zip(inputs, find_input_grad_shapes(self.stage, inputs), strict=True)
        sizes = [(left.pop(0), grad) for shape, grad in pairs if left and shape is not None]
        return [size for size, grad in sizes if grad is not None]

    def _check_shapes(self, tensors: Sequence[Tensor]) -> None:
        if self._expected is None:
            self._expected = [shape.shape for shape in find_output_shapes(self.stage)]
        found = [tensor.shape for tensor in tensors]
        if found != self._expected and len(found) == len(self._expected):  # a traced stage may send a part
            made, wanted = ([tuple(shape) for shape in shapes] for shapes in (found, self._expected))
            raise ValueError(
                f"stage {self.stage.stage_index} sends tensors of shapes {made}, and its receiver expects {wanted}, "
                "those of the first step. Set OVPATCH_PIPELINE_VARIABLE_SEQ_LENGTHS=1 on all ranks, or pad the "
                "microbatches to one shape."
            )

    def make_blank_outputs(self, kind: Kind, microbatch: int = 0) -> list[Tensor]:
        """Return zeros of the shapes of a message that F or B sends."""
        shapes: Sequence[Tensor | None] = self._sent.get(kind, [])
        if not shapes and kind is Kind.F:
            shapes = find_output_shapes(self.stage)
        elif not shapes:
            grads = find_input_grad_shapes(self.stage, self._inputs[0])
            shapes = [shape for shape in grads if shape is not None]
        if self.varies and kind is Kind.B and (Kind.F, microbatch) in self._sizes:
            shapes = _resize(shapes, self._sizes_of_grads(microbatch))
        made = [one.detach().zero_() for shape in shapes if (one := self._make(shape)) is not None]
        if self.varies and kind is Kind.F:
            self._sizes[Kind.B, microbatch] = [one.shape for one in made]
        return made

    def pass_forward(self, output: Any, microbatch: int, receiver: StageRun) -> None:
        """Hand the output to the next stage on this rank."""
        receiver.stage.set_local_fwd_input(output, microbatch)

    def pass_backward(self, microbatch: int, receiver: StageRun) -> None:
        """Hand the input gradient to the previous stage on this rank."""
        grads = self.stage.get_local_bwd_output(microbatch)
        if any(grad is None for grad in grads) and not makes_buffers(receiver.stage):
            receiver.make_inputs(microbatch, Kind.B)  # stock fills those of missing gradients with zeros
        receiver.stage.set_local_bwd_input(grads, microbatch)

    def drop_buffers(self, microbatch: int) -> None:
        """Drop the received tensors of a microbatch."""
        for infos, kept in ((self.stage.args_recv_info, self._inputs), (self.stage.grad_recv_info, self._grads)):
            if microbatch in kept:
                set_buffers(infos[microbatch], kept[microbatch])

    def _make(self, shape: Tensor | None) -> Tensor | None:
        return _make_buffer(shape, self.stage.device)

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
        """Free the gathered parameters, unless they stay for the next step."""
        for module in self._list_fsdp_modules() if self._reshards else ():
            module.reshard()

    def _list_fsdp_modules(self) -> list[Any]:
        return [module for module in self.stage.submod.modules() if is_fsdp2(module)] if self.is_fully_sharded else []

    @property
    def reduces_in_backward(self) -> bool:
        """Whether the step's last backward reduces gradients, as weight gradients are not deferred."""
        return self.data_parallel.reduces_in_backward and not (self.queue is not None and self.queue.defers)

    @property
    def reduces_after_backward(self) -> bool:
        """Whether gradients are reduced behind the last weight gradients."""
        waits = self.is_fully_sharded and not (self._finalizes and self.is_reduced)  # until a later step
        return self.data_parallel.has_replicas and not self.reduces_in_backward and not waits

    @property
    def is_fully_sharded(self) -> bool:
        """Whether the module is in FSDP2."""
        return isinstance(self.data_parallel, FullyShardedGradients)


def give_buffers_back(stage: Any) -> None:
    """Give a stage receive buffers for all microbatches, where stock expects them and a :class:`StageRun` took them."""
    taken = attached_values(stage).pop(_TAKEN, None)
    if taken is None:
        return
    for infos, kept in zip((stage.args_recv_info, stage.grad_recv_info), taken, strict=True):
        for microbatch, items in infos.items():
            if microbatch in kept and not makes_buffers(stage):
                set_buffers(items, [_make_buffer(shape, stage.device) for shape in kept[microbatch]])
        kept.clear()


def give_all_buffers_back() -> None:
    """Give all stages receive buffers, also those whose schedule was dropped."""
    for stage, _ in find_owners(_TAKEN):
        give_buffers_back(stage)


def _make_buffer(shape: Tensor | None, device: torch.device) -> Tensor | None:
    if shape is None:
        return None
    with outside_modes():
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)
    return made.requires_grad_(shape.requires_grad)


def _resize(shapes: Sequence[Tensor | None], sizes: Sequence[torch.Size]) -> list[Tensor | None]:
    """Return meta tensors of other sizes."""
    left, made = list(sizes), list[Tensor | None]()
    for number, shape in enumerate(shapes):
        # What B reads has a size for each output, also for those without a gradient.
        size = sizes[number] if len(sizes) == len(shapes) else None if shape is None else left.pop(0)
        if shape is None or size is None or size == shape.shape:
            made.append(shape)
            continue
        resized = torch.empty(size, dtype=shape.dtype, device="meta")  # messages are contiguous
        made.append(resized.requires_grad_(shape.requires_grad))
    return made


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)  # of a DTensor, whose local part is sent
    return tensor if to_local is None else to_local()


def _check_nothing(*_args: Any) -> None:
    """Stand in for a check of shapes."""
