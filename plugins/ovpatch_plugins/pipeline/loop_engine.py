"""Runs a rank's program for the loop of another library, which computes F and B itself.

The loop has the program's order. It asks for what a computation reads and hands over what it makes. The engine starts
receives ahead, does not wait for sends, and has W computed behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch_plugins.pipeline.orders import Kind, build_order
from ovpatch_plugins.pipeline.program import Program, Receive, make_program
from ovpatch_plugins.pipeline.transport import AHEAD, PeerToPeer, StepReceives, blocks_host, close_edges


class LoopError(RuntimeError):
    """A loop computes in another order than its program."""


class LoopEngine:
    """The runtime of a foreign loop on one rank, whose stage has the rank's number.

    Args:
        group: The pipeline's group, whose ranks make their engines together.
        device: Where the stage computes.

    Attributes:
        early_receives: How many receives of the step are started ahead of the computation in front of their readers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        edges = [edge for pair in pairwise(range(self._ranks)) for edge in (pair, pair[::-1])]
        self._transport = PeerToPeer(group, device, edges)
        self._receives = StepReceives(self._transport)
        self._waits_on_device = not blocks_host(group, device)
        self._is_settled = not self._waits_on_device  # see Engine.settling
        self._programs: dict[tuple[str, int, int], Program] = {}
        self.early_receives = 0

    def start_step(
        self,
        order: str,
        microbatches: int,
        make_buffer: Callable[[Sequence[int]], Tensor],
        compute_weight_grads: Callable[[int], object],
        *,
        varies: bool,
    ) -> None:
        """Begin a step, and drop what an interrupted one left.

        Args:
            order: Name of the order. Ranks may differ in Ws alone.
            microbatches: Their number.
            make_buffer: Makes the memory for a received tensor of a shape.
            compute_weight_grads: Called behind the send of a full backward, and for W, with the microbatch.
            varies: Whether shapes differ by microbatch, so that they are sent, too; the same on all ranks.
        """
        ahead = AHEAD[not self._waits_on_device] if self._is_settled and not varies else 0
        key = order, microbatches, ahead
        if key not in self._programs:
            schedule = build_order(order, ranks=self._ranks, microbatches=microbatches)
            self._programs[key] = make_program(schedule, range(self._ranks), self._rank, ahead=ahead)
        self._steps, self._position = self._programs[key].steps, -1  # of the computation that the loop runs
        self.early_receives = sum(receive != step.receive for step in self._steps for receive in step.posts)
        self._make_buffer, self._compute_weight_grads, self._varies = make_buffer, compute_weight_grads, varies
        self._shapes: Sequence[Sequence[int]] = ()
        self._sent_shapes: dict[int, list[torch.Size]] = {}  # of outputs, by the microbatch
        self._receives.clear()
        self._transport.abandon()
        self._transport.start_step()

    def receive(self, shapes: Sequence[Sequence[int]], *, is_forward: bool) -> list[Tensor]:
        """Go on to the next computation, F or a backward, and return what it reads; [] if no rank sends that.

        Args:
            shapes: Of the tensors of a message; those of the step's first call stand for all, unless shapes vary.
            is_forward: Whether the loop runs F.

        Raises:
            LoopError: The program has another computation here.
        """
        self._position += 1
        step = self._steps[self._position] if self._position < len(self._steps) else None
        if step is None or (step.action.kind is Kind.F) != is_forward:
            found = "the step's end" if step is None else str(step.action)
            raise LoopError(f"the loop runs {'F' if is_forward else 'B'} where its order has {found}")
        self._shapes = self._shapes or shapes
        for receive in step.posts:
            self._receives.post(receive, functools.partial(self._make_buffers, receive))
        if step.receive is None:
            return []
        received = self._receives.wait_for(step.receive)
        self._receives.release_sent(step)
        return received

    def _make_buffers(self, receive: Receive) -> list[Tensor]:
        shapes = self._shapes
        if self._varies:
            if receive.action.kind is Kind.F:
                shapes = self._transport.receive_sizes(len(shapes), receive.sender)
            else:  # a gradient has the shape of what was sent
                shapes = self._sent_shapes.pop(receive.action.microbatch)
        return [self._make_buffer(shape) for shape in shapes]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send what the computation made, and have W computed behind that up to the next F or B.

        Args:
            tensors: Its output or input gradient, which the loop may free afterwards; not read where nobody gets it.
        """
        step = self._steps[self._position]
        kind, _, microbatch = step.action
        if step.receiver is not None:
            tells_sizes = self._varies and kind is Kind.F
            if tells_sizes:
                self._sent_shapes[microbatch] = [tensor.shape for tensor in tensors]
            sent = [tensor.detach().contiguous() for tensor in tensors]
            self._transport.send(sent, step.receiver, tells_sizes=tells_sizes)
        if kind is Kind.BW:
            self._compute_weight_grads(microbatch)
        for following in self._steps[self._position + 1 :]:
            if following.action.kind is not Kind.W:
                break
            self._position += 1
            self._compute_weight_grads(following.action.microbatch)

    def finish(self) -> None:
        """End the step: wait until all messages are sent.

        Raises:
            LoopError: The loop left computations out.
        """
        if self._position != len(self._steps) - 1:
            raise LoopError(f"the loop ended before {self._steps[self._position + 1].action}")
        self._transport.finish()
        self._is_settled = True

    def close(self) -> None:
        """Shut down the communicators of the group's edges. All ranks call this."""
        close_edges(self._group)
