"""The tensors of a stage's messages: buffers to receive into, outputs to send, and their shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import attached_values, find_owners, outside_modes
from ovpatch.overlap.pipelining.ir import Kind
from ovpatch_plugins.pipeline.runtime.torch_compat import (
    find_input_grad_shapes,
    find_output_shapes,
    find_shapes,
    has_buffers,
    makes_buffers,
    release_outputs,
    set_buffers,
    shape_of,
)

# The key of the receive buffers that a stage had before they were removed. Several schedules may share the stage.
_REMOVED: Final = "pipeline: receive buffers"


class StageBuffers:
    """The message tensors of one stage.

    Stock PyTorch up to 2.14 allocates receive buffers once for all microbatches. Here the stage keeps only their
    shapes, and a buffer exists from its receive to the end of the backward.

    Args:
        stage: The stage of ``torch.distributed.pipelining``.
        varies: Whether messages may have other shapes than those of the first step.

    Attributes:
        varies: The argument.
        receive_nbytes: Bytes that the stage receives for a microbatch.
    """

    def __init__(self, stage: Any, *, varies: bool) -> None:
        self.varies = varies
        self.receive_nbytes = 0
        self._stage = stage
        # Meta tensors like the received ones, by microbatch; None for an input that is no tensor.
        self._inputs: dict[int, list[Tensor | None]] = {}
        self._grads: dict[int, list[Tensor | None]] = {}
        # Meta tensors like the last sent ones.
        self._sent: dict[Kind, list[Tensor]] = {}
        # Shapes of the receiver's buffers.
        self._expected: list[torch.Size] | None = None
        # Shapes of the tensors that F reads, and of those that B reads, if they vary.
        self._sizes: dict[tuple[Kind, int], list[torch.Size]] = {}

    # --- receive buffers ---

    def take(self) -> None:
        """Remove the receive buffers of all microbatches from the stage.

        :meth:`make` allocates a buffer when it is due. The next messages have the shapes of the first step,
        unless they come with other shapes.
        """
        is_new = False
        self._sizes.clear()
        for infos, kept in (
            (self._stage.args_recv_info, self._inputs),
            (self._stage.grad_recv_info, self._grads),
        ):
            for microbatch, items in infos.items():
                shapes = kept.get(microbatch)
                if shapes is None or has_buffers(items):
                    kept[microbatch] = shapes = find_shapes(items)
                    is_new = True
                set_buffers(items, shapes)
        if is_new:
            self._sent = {}
            self._expected = None
            shapes = [*self._inputs.get(0, ()), *self._grads.get(0, ())]
            self.receive_nbytes = sum(shape.nbytes for shape in shapes if shape is not None)
        attached_values(self._stage)[_REMOVED] = self._inputs, self._grads

    def count_inputs(self, microbatch: int) -> int:
        """Return the number of tensors in the message that F reads."""
        return sum(shape is not None for shape in self._inputs[microbatch])

    def count_message_bytes(self, align: Callable[[int], int]) -> int:
        """Return the bytes of the largest message that the stage receives, with each tensor rounded up by ``align``."""
        return max(
            (
                sum(align(shape.nbytes) for shape in shapes if shape is not None)
                for shapes in (*self._inputs.values(), *self._grads.values())
            ),
            default=0,
        )

    def make(
        self, kind: Kind, microbatch: int, sizes: Sequence[torch.Size] | None = None
    ) -> list[Tensor]:
        """Allocate the buffers of a message and return them.

        Args:
            kind: F or B, the computation that reads the message.
            microbatch: Its index.
            sizes: Shapes of the tensors of a message for F, if they vary.
        """
        is_forward = kind is Kind.F
        infos = (self._stage.args_recv_info if is_forward else self._stage.grad_recv_info)[
            microbatch
        ]
        shapes = (self._inputs if is_forward else self._grads)[microbatch]
        if sizes is not None:
            self._sizes[Kind.F, microbatch] = list(sizes)
        if self.varies and (kind, microbatch) in self._sizes:
            shapes = _resize(shapes, self._sizes[kind, microbatch])
        buffers = [_make_buffer(shape, self._stage.device) for shape in shapes]
        set_buffers(infos, buffers)
        return [buffer for buffer in buffers if buffer is not None]

    def drop(self, microbatch: int) -> None:
        """Drop the received tensors of a microbatch."""
        if microbatch in self._inputs:
            set_buffers(self._stage.args_recv_info[microbatch], self._inputs[microbatch])
        if microbatch in self._grads:
            set_buffers(self._stage.grad_recv_info[microbatch], self._grads[microbatch])

    def drop_all(self) -> None:
        """Drop all received tensors, after an error."""
        for microbatch in self._inputs:
            self.drop(microbatch)

    # --- outputs ---

    def keep_output_sizes(self, microbatch: int, output: Any) -> None:
        """Note the shapes of an output; the gradients that B reads have the same shapes."""
        parts = output if isinstance(output, (tuple, list)) else [output]
        self._sizes[Kind.B, microbatch] = [
            _local(part).shape for part in parts if isinstance(part, Tensor)
        ]

    def list_outputs(self, microbatch: int, kind: Kind) -> list[Tensor]:
        """Return the tensors of the message that F or B sends.

        Raises:
            ValueError: Their shapes differ from the shapes that the receiver expects.
        """
        stage = self._stage
        ops = (
            stage.get_fwd_send_ops(microbatch)
            if kind is Kind.F
            else stage.get_bwd_send_ops(microbatch)
        )
        tensors = [op.tensor for op in ops]
        if kind is Kind.F:
            if not self.varies:
                self._check_shapes(tensors)
            # The message holds the tensors, so the stage need not.
            release_outputs(stage, microbatch)
        elif self.varies:
            # Stock PyTorch makes missing gradients in the shapes of the first step.
            for place, size in enumerate(self._list_grad_sizes(microbatch)):
                if tensors[place].shape != size:
                    tensors[place] = tensors[place].new_zeros(size)
        if kind not in self._sent:
            self._sent[kind] = [shape_of(tensor) for tensor in tensors]
        return tensors

    def _list_grad_sizes(self, microbatch: int) -> list[torch.Size]:
        """Return the shapes of the input gradients to send; empty if no input has arrived."""
        left = list(self._sizes.get((Kind.F, microbatch), ()))
        inputs = self._inputs[microbatch]
        pairs = zip(inputs, find_input_grad_shapes(self._stage, inputs), strict=True)
        sizes = [(left.pop(0), grad) for shape, grad in pairs if left and shape is not None]
        return [size for size, grad in sizes if grad is not None]

    def _check_shapes(self, tensors: Sequence[Tensor]) -> None:
        if self._expected is None:
            self._expected = [shape.shape for shape in find_output_shapes(self._stage)]
        found = [tensor.shape for tensor in tensors]
        # A traced stage may send only some of its outputs.
        if found != self._expected and len(found) == len(self._expected):
            made, wanted = (
                [tuple(shape) for shape in shapes] for shapes in (found, self._expected)
            )
            raise ValueError(
                f"ovpatch: stage {self._stage.stage_index} sends tensors of shapes {made}, and its "
                f"receiver expects {wanted}, the shapes of the first step. Set "
                "OVPATCH_PIPELINE_VARIABLE_SEQ_LENGTHS=1 on all ranks, or pad the microbatches to one "
                "shape."
            )

    def make_blank_outputs(self, kind: Kind, microbatch: int = 0) -> list[Tensor]:
        """Return zeros of the shapes of a message that F or B sends."""
        shapes: Sequence[Tensor | None] = self._sent.get(kind, [])
        if not shapes and kind is Kind.F:
            shapes = find_output_shapes(self._stage)
        elif not shapes:
            grads = find_input_grad_shapes(self._stage, self._inputs[0])
            shapes = [shape for shape in grads if shape is not None]
        if self.varies and kind is Kind.B and (Kind.F, microbatch) in self._sizes:
            shapes = _resize(shapes, self._list_grad_sizes(microbatch))
        buffers = [_make_buffer(shape, self._stage.device) for shape in shapes]
        made = [buffer.detach().zero_() for buffer in buffers if buffer is not None]
        if self.varies and kind is Kind.F:
            self._sizes[Kind.B, microbatch] = [zeros.shape for zeros in made]
        return made


def release_buffers(stage: Any) -> None:
    """Allocate a stage's removed receive buffers for all microbatches again, as torch expects them."""
    removed = attached_values(stage).pop(_REMOVED, None)
    if removed is None:
        return
    for infos, kept in zip((stage.args_recv_info, stage.grad_recv_info), removed, strict=True):
        for microbatch, items in infos.items():
            if microbatch in kept and not makes_buffers(stage):
                set_buffers(
                    items, [_make_buffer(shape, stage.device) for shape in kept[microbatch]]
                )
        kept.clear()


def release_all_buffers() -> None:
    """Allocate the receive buffers of all stages again, also of stages whose schedule was freed."""
    for stage, _ in find_owners(_REMOVED):
        release_buffers(stage)


def _make_buffer(shape: Tensor | None, device: torch.device) -> Tensor | None:
    if shape is None:
        return None
    with outside_modes():
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)
    return made.requires_grad_(shape.requires_grad)


def _resize(shapes: Sequence[Tensor | None], sizes: Sequence[torch.Size]) -> list[Tensor | None]:
    """Return meta tensors like ``shapes`` but of other sizes."""
    left, made = list(sizes), list[Tensor | None]()
    for number, shape in enumerate(shapes):
        # B reads a size for each output, also for outputs without a gradient.
        size = (
            sizes[number] if len(sizes) == len(shapes) else None if shape is None else left.pop(0)
        )
        if shape is None or size is None or size == shape.shape:
            made.append(shape)
            continue
        # Messages are contiguous.
        resized = torch.empty(size, dtype=shape.dtype, device="meta")
        made.append(resized.requires_grad_(shape.requires_grad))
    return made


def _local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, because messages have local parts."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
