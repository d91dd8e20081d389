"""Messages between the ranks of a pipeline, by ``torch.distributed``.

Messages from one rank to another keep the sender's order, which both sides know
from the schedule, and wait behind no message of another edge. On gloo a tag per step makes such a queue inside the
stage's own group; stock's transfers have tag 0. On NCCL each directed edge has a communicator of its own with one
thread block, because a waiting kernel slows the products beside it by the blocks that it takes. They are connected
before the first step, in one order on all ranks: a lazy connection would block the host until the peer calls, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.group_state import group_state

_FIRST_TAG: Final = 1 << 20
_TAGS: Final = 1 << 10

SUPPORTED_BACKENDS: Final = ("gloo", "nccl")


def blocks_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the wait for a message blocks the host, as on gloo, or a stream."""
    return backend_name(group, device) == "gloo"


class PeerToPeer:
    """Sends and receives of one rank of a pipeline.

    Args:
        group: The pipeline's group.
        device: Where its stages compute.
        edges: All directed edges ``(sender, receiver)`` of the pipeline, by rank in the group; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, edges: Iterable[tuple[int, int]]) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._tag = 0
        self._sent: dict[int, deque[tuple[list[dist.Work], list[Tensor]]]] = {}
        self._steps = group_state(group).get_or_create(("pipeline", "steps"), _Steps)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        if not blocks_host(group, device):
            for edge in sorted(set(edges)):
                if self._rank in edge:
                    self._groups[edge] = _connect(group, edge, device)

    def start_step(self) -> None:
        """Begin the messages of a step. What an interrupted step left unread cannot be taken for one of them."""
        self._steps.count += 1
        self._tag = _FIRST_TAG + self._steps.count % _TAGS

    @property
    def step(self) -> int:
        """Number of the step among all of the group."""
        return self._steps.count

    def send(self, tensors: Sequence[Tensor], receiver: int) -> None:
        """Send tensors, which are kept until :meth:`release` or :meth:`finish` finds them sent."""
        edge = (self._rank, receiver)
        works = [self._start(dist.isend, tensor, edge, receiver) for tensor in tensors]
        self._sent.setdefault(receiver, deque()).append((works, list(tensors)))

    def receive(self, tensors: Sequence[Tensor], sender: int) -> list[dist.Work]:
        """Start to receive into ``tensors``, in the sender's order."""
        edge = (sender, self._rank)
        return [self._start(dist.irecv, tensor, edge, sender) for tensor in tensors]

    def release(self, receiver: int, left: int) -> None:
        """Drop the oldest sent messages of an edge, which the receiver has read, until ``left`` are kept."""
        sent = self._sent.get(receiver)
        while sent and len(sent) > left:
            works, _ = sent.popleft()
            for work in works:
                work.wait()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for receiver in self._sent:
            self.release(receiver, 0)

    def abandon(self) -> None:
        """Drop all messages, after an error of the transport."""
        self._sent.clear()

    def _start(self, call: Any, tensor: Tensor, edge: tuple[int, int], peer: int) -> dist.Work:
        group = self._groups.get(edge)
        name = "group_dst" if call is dist.isend else "group_src"
        if group is not None:
            work = call(tensor, group=group, **{name: _rank_in_edge(edge, peer)})
        else:
            work = call(tensor, group=self._group, tag=self._tag, **{name: peer})
        assert isinstance(work, dist.Work)
        return work


class _Steps:
    """Number of steps that ran over a group."""

    def __init__(self) -> None:
        self.count = 0


def _connect(group: dist.ProcessGroup, edge: tuple[int, int], device: torch.device) -> dist.ProcessGroup:
    """Return the connected communicator of a directed edge, made once."""

    def make() -> dist.ProcessGroup:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = 1
        ranks = [dist.get_global_rank(group, rank) for rank in sorted(edge)]
        made: dist.ProcessGroup = dist.new_group(
            ranks, backend="nccl", pg_options=options, use_local_synchronization=True
        )
        token = torch.zeros(1, device=device)
        if dist.get_rank(group) == edge[0]:
            dist.send(token, group=made, group_dst=_rank_in_edge(edge, edge[1]))
        else:
            dist.recv(token, group=made, group_src=_rank_in_edge(edge, edge[0]))
        torch.cuda.synchronize(device)
        return made

    return group_state(group).get_or_create(("pipeline", "edge", edge), make)


def _rank_in_edge(edge: tuple[int, int], rank: int) -> int:
    return int(rank == max(edge))
