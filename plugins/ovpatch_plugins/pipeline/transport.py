"""Messages between the ranks of a pipeline, by ``torch.distributed``.

Messages from one rank to another keep the sender's order, which both sides know from the schedule, and wait behind no
message of another edge. On gloo a tag per step makes such a queue inside the stage's own group; stock's transfers have
tag 0. On NCCL each directed edge has a communicator of its own.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.consensus import agree_on_name
from ovpatch.overlap.comm.group_state import (
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
)

_MOST_DIMENSIONS: Final = 8
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
        edges: All directed edges ``(sender, receiver)`` of the pipeline, by rank in the group; the same on all ranks,
            which make their transports together.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, edges: Iterable[tuple[int, int]]) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._device = device
        self._tag = 0
        self._sent: dict[int, deque[tuple[list[dist.Work], list[Tensor]]]] = {}
        self._steps = group_state(group).get_or_create(("pipeline", "steps"), _Steps)
        self._communicators = _Communicators()
        self._arrived: torch.cuda.Event | None = None
        self._is_arriving = False
        if not blocks_host(group, device):
            self._communicators = _connect(group, edges, device)
            self._arrived = torch.cuda.Event()

    def start_step(self) -> None:
        """Begin the messages of a step. What an interrupted step left unread cannot be taken for one of them."""
        self._steps.count += 1
        self._tag = _FIRST_TAG + self._steps.count % _TAGS
        self._is_arriving = False

    @property
    def step(self) -> int:
        """Number of the step among all of the group."""
        return self._steps.count

    def send(self, tensors: Sequence[Tensor], receiver: int, *, tells_sizes: bool = False) -> None:
        """Send tensors, which are kept until :meth:`release` or :meth:`finish` finds them sent.

        Args:
            tensors: The tensors of one message.
            receiver: Rank of the receiver.
            tells_sizes: Whether it reads their shapes first, by :meth:`receive_sizes`.

        Raises:
            ValueError: A tensor whose shape is told has more than eight dimensions.
        """
        if tells_sizes:
            tensors = [_list_sizes(tensors).to(self._device), *tensors]
        communicator = self._communicators.get((self._rank, receiver))
        if communicator is None:
            works = [self._group.send([_real(tensor)], receiver, self._tag) for tensor in tensors]
        else:
            works = [communicator.send([_real(tensor)], 1, 0) for tensor in tensors]
        self._sent.setdefault(receiver, deque()).append((works, list(tensors)))

    def receive(self, tensors: Sequence[Tensor], sender: int) -> list[dist.Work]:
        """Start to receive into ``tensors``, in the sender's order."""
        communicator = self._communicators.get((sender, self._rank))
        if communicator is None:
            return [self._group.recv([_real(tensor)], sender, self._tag) for tensor in tensors]
        return [communicator.recv([_real(tensor)], 0, 0) for tensor in tensors]

    def receive_sizes(self, count: int, sender: int) -> list[torch.Size]:
        """Return the shapes of the ``count`` tensors that follow. The host waits for them."""
        found = torch.empty(count, 1 + _MOST_DIMENSIONS, dtype=torch.int64, device=self._device)
        self.wait_for(self.receive([found], sender))
        return [torch.Size(sizes[:dimensions]) for dimensions, *sizes in found.tolist()]

    def wait_for(self, works: Sequence[dist.Work]) -> None:
        """Wait for a message: the host on gloo, the current stream on NCCL."""
        for work in works:
            work.wait()
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self._device))
            self._is_arriving = True

    def wait_for_arrivals(self) -> None:
        """Have the host wait until all messages have come that :meth:`wait_for` was called for.

        On NCCL the host is ahead of the device: what senders did before they sent can only be seen from here on.
        """
        if self._arrived is not None and self._is_arriving:
            self._arrived.synchronize()
            self._is_arriving = False

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


class _Steps:
    """Number of steps that ran over a group."""

    def __init__(self) -> None:
        self.count = 0


def _list_sizes(tensors: Sequence[Tensor]) -> Tensor:
    """Return numbers of dimensions and sizes, ``[tensors, 1 + 8]``."""
    rows = []
    for tensor in tensors:
        if tensor.dim() > _MOST_DIMENSIONS:
            raise ValueError(
                f"a stage sends a tensor of {tensor.dim()} dimensions; with variable_seq_lengths it may have "
                f"{_MOST_DIMENSIONS}. Flatten some before the end of the stage."
            )
        rows.append([tensor.dim(), *tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())])
    return torch.tensor(rows, dtype=torch.int64)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# --- communicators of NCCL ---


class _Communicators(dict[tuple[int, int], dist.ProcessGroup]):
    """The communicators of this rank's directed edges ``(sender, receiver)``. The sender is rank 0 of each.

    [Note: a communicator per directed edge] A communicator runs its transfers one after the other, so a receive that
    waits would stall the sends behind it. Each has one thread block: a waiting kernel slows the products beside it by
    the blocks that it takes. They are connected before the first step, in one order on all ranks, as a lazy connection
    blocks the host until the peer calls, too. Torch does not register them: where the default group has a device, it
    would split them off that, which takes all ranks of the job.
    """


def _connect(group: dist.ProcessGroup, edges: Iterable[tuple[int, int]], device: torch.device) -> _Communicators:
    """Return the communicators of a group, with those of all edges of this rank connected. All ranks call this."""
    made = group_state(group).get_or_create(_Communicators, _Communicators)
    name = agree_on_name(group, "pipeline edges", timeout_s=group_timeout_s(group))
    for edge in sorted(set(edges)):
        if dist.get_rank(group) in edge and edge not in made:
            made[edge] = _make_communicator(group, edge, f"ovpatch/{name}/{edge[0]}-{edge[1]}", device)
    return made


def _make_communicator(
    group: dist.ProcessGroup, edge: tuple[int, int], name: str, device: torch.device
) -> dist.ProcessGroup:
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    backend: Any = group._get_backend(device)
    options._timeout = getattr(backend, "wrapped_pg", backend).options._timeout
    options.global_ranks_in_group = [dist.get_global_rank(group, rank) for rank in edge]
    options.group_name = name
    store, rank = group_store(group), edge.index(dist.get_rank(group))
    assert store is not None
    store = dist.PrefixStore(name, store)
    made = dist.ProcessGroup(store, rank, 2)
    kind = dist.ProcessGroup.BackendType.NCCL
    made._set_default_backend(kind)
    with torch.cuda.device(device):
        made._register_backend(torch.device("cuda"), kind, dist.ProcessGroupNCCL(store, rank, 2, options))
        token = torch.zeros(1, device=device)
        with warnings.catch_warnings():  # that a transfer connects lazily is what is wanted here
            warnings.filterwarnings("ignore", message="An unbatched P2P op")
            (made.send([token], 1, 0) if rank == 0 else made.recv([token], 0, 0)).wait()
        torch.cuda.synchronize(device)
    return made


def close_edge_communicators(group: dist.ProcessGroup | None = None) -> None:
    """Shut down the communicators of one group, or of all, behind their transfers. All ranks call this.

    Does nothing if an exception ends this process: transfers in flight may wait for peers that are gone.

    Args:
        group: The pipeline's process group; all by default.
    """
    if is_exiting_by_error():
        return
    for _, made in group_values(_Communicators, group):
        for edge in sorted(made):
            made[edge].shutdown()
        made.clear()
