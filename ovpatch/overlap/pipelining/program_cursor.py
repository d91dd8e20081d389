"""The position of another library's loop in a rank's program.

The loop computes F and B itself, in the program's order. It takes the inputs of a computation and passes the results
on. The cursor starts receives early, does not wait for sends, and calls the loop to compute W after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.pipelining.edges import close_edges
from ovpatch.overlap.pipelining.ir import Kind, Program, Receive, Step, make_program
from ovpatch.overlap.pipelining.messages import AHEAD, Messages, blocks_host
from ovpatch.overlap.pipelining.orders import build_order


class LoopError(RuntimeError):
    """The error of a loop that computes in another order than its program."""


class ProgramCursor:
    """The runtime of a foreign loop on one rank, whose stage has the rank's number.

    Args:
        group: The pipeline's group, whose ranks make their cursors together.
        device: The device on which the stage computes.

    Attributes:
        early_receives: The receives of the step that start before the computation that precedes their readers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.early_receives = 0
        self._group = group
        self._rank = group.rank()
        self._ranks = group.size()
        edges = [edge for pair in pairwise(range(self._ranks)) for edge in (pair, pair[::-1])]
        self._messages = Messages(group, device, edges)
        self._blocks_host = blocks_host(group, device)
        # Whether receives may start early. On a device the first step must not post early: see Engine.settling.
        self._is_settled = self._blocks_host
        # Programs by order, number of microbatches, and number of early receives.
        self._programs: dict[tuple[str, int, int], Program] = {}
        # - State of a step
        self._steps: Sequence[Step] = ()
        # The computation that the loop runs, by its index in the steps.
        self._position = -1
        # Shapes of the tensors of a message, if they do not vary.
        self._shapes: Sequence[Sequence[int]] = ()
        # Shapes of outputs by microbatch, if shapes vary: an input gradient has the shape of the output.
        self._sent_shapes: dict[int, list[torch.Size]] = {}

    def start_step(
        self,
        order: str,
        microbatches: int,
        make_buffer: Callable[[Sequence[int]], Tensor],
        compute_weight_grads: Callable[[int], object],
        *,
        varies: bool,
    ) -> None:
        """Start a step, and drop the remains of an interrupted step.

        Args:
            order: Name of the order. Ranks may differ in Ws alone.
            microbatches: The number of microbatches.
            make_buffer: Makes the memory for a received tensor of a shape.
            compute_weight_grads: Called after the send of a full backward, and for W, with the microbatch.
            varies: Whether shapes differ by microbatch, so that they are sent as well; the same on all ranks.
        """
        ahead = AHEAD[self._blocks_host] if self._is_settled and not varies else 0
        key = order, microbatches, ahead
        if key not in self._programs:
            schedule = build_order(order, ranks=self._ranks, microbatches=microbatches)
            self._programs[key] = make_program(
                schedule, range(self._ranks), self._rank, ahead=ahead
            )
        self._steps = self._programs[key].steps
        self._position = -1
        self.early_receives = sum(
            receive != step.receive for step in self._steps for receive in step.posts
        )
        self._make_buffer = make_buffer
        self._compute_weight_grads = compute_weight_grads
        self._varies = varies
        self._shapes = ()
        self._sent_shapes = {}
        self._messages.abandon()
        self._messages.start_step()

    def receive(self, shapes: Sequence[Sequence[int]], *, is_forward: bool) -> list[Tensor]:
        """Move to the next computation, F or a backward, and return its inputs; [] if no rank sends any.

        Args:
            shapes: The shapes of the tensors of a message. Unless shapes vary, those of the first call hold for all
                messages of a step.
            is_forward: Whether the loop runs F.

        Raises:
            LoopError: The program has another computation here.
        """
        self._position += 1
        step = self._steps[self._position] if self._position < len(self._steps) else None
        if step is None or (step.action.kind is Kind.F) != is_forward:
            found = "the step's end" if step is None else str(step.action)
            raise LoopError(
                f"the loop runs {'F' if is_forward else 'B'} where its order has {found}"
            )
        self._shapes = self._shapes or shapes
        for receive in step.posts:
            self._messages.post(receive, self._make_buffers)
        if step.receive is None:
            return []
        received = self._messages.wait(step.receive)
        self._messages.release(step.kept)
        return received

    def _make_buffers(self, receive: Receive) -> list[Tensor]:
        shapes = self._shapes
        if self._varies:
            if receive.action.kind is Kind.F:
                shapes = self._messages.receive_sizes(len(shapes), receive.sender)
            else:
                shapes = self._sent_shapes.pop(receive.action.microbatch)
        return [self._make_buffer(shape) for shape in shapes]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send a result, and let W be computed after it up to the next F or B.

        Args:
            tensors: The output or input gradient, which the loop may free afterwards; unused without a receiver.
        """
        step = self._steps[self._position]
        kind, _, microbatch = step.action
        if step.receiver is not None:
            with_sizes = self._varies and kind is Kind.F
            if with_sizes:
                self._sent_shapes[microbatch] = [tensor.shape for tensor in tensors]
            sent = [tensor.detach().contiguous() for tensor in tensors]
            self._messages.send(sent, step.receiver, with_sizes=with_sizes)
        if kind is Kind.BW:
            self._compute_weight_grads(microbatch)
        for following in self._steps[self._position + 1 :]:
            if following.action.kind is not Kind.W:
                break
            self._position += 1
            self._compute_weight_grads(following.action.microbatch)

    def finish(self) -> None:
        """Finish the step: wait until all messages are sent.

        Raises:
            LoopError: The loop left computations out.
        """
        if self._position != len(self._steps) - 1:
            raise LoopError(f"the loop ended before {self._steps[self._position + 1].action}")
        self._messages.finish()
        self._is_settled = True

    def close(self) -> None:
        """Shut down the communicators of the group's edges. All ranks call this."""
        close_edges(self._group)
