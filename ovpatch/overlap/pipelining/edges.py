"""NCCL communicators and slots in memory that a process group keeps for the directed edges of its pipelines."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.consensus import agree_on_name
from ovpatch.overlap.comm.lifetimes import (
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    register_at_exit,
)

if TYPE_CHECKING:
    from ovpatch.overlap.kernels.copy_messages import PointToPoint

_log = logging.getLogger("ovpatch.pipeline")

# Slots whose memory is never freed, because that would wait for their streams, which never end.
_stuck: list[PointToPoint] = []

_ERROR_STUCK: Final = (
    "ovpatch: messages of a pipeline have not arrived in %g s, and this rank stops waiting for them, "
    "because a peer may have died. Read the output of its peers."
)


class Communicators(dict[tuple[int, int], dist.ProcessGroup]):
    """The communicators of this rank's directed edges ``(sender, receiver)``. The sender is rank 0 of each.

    [Note: a communicator per directed edge] A communicator runs its transfers sequentially, so a waiting receive would
    stall the sends after it. Each has one thread block: a waiting kernel slows concurrent GEMMs by the blocks that it
    takes. They are connected before the first step, in the same order on all ranks, because a lazy connection blocks
    the host until the peer also calls. Torch does not register them. If the default group has a device, torch would
    split them off that group, which takes all ranks of the job.
    """


def connect_edges(
    group: dist.ProcessGroup, edges: Iterable[tuple[int, int]], device: torch.device
) -> Communicators:
    """Return the communicators of a group, with all edges of this rank connected. All ranks call this."""
    made = group_state(group).get_or_create(Communicators, Communicators)
    name = agree_on_name(group, "pipeline edges", timeout_s=group_timeout_s(group))
    for edge in sorted(set(edges)):
        if dist.get_rank(group) in edge and edge not in made:
            made[edge] = _make_communicator(
                group, edge, f"ovpatch/{name}/{edge[0]}-{edge[1]}", device
            )
    return made


def _make_communicator(
    group: dist.ProcessGroup, edge: tuple[int, int], name: str, device: torch.device
) -> dist.ProcessGroup:
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = 1
    backend: Any = group._get_backend(device)
    # An unregistered communicator does not get the timeout of the group by itself.
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
        made._register_backend(
            torch.device("cuda"), kind, dist.ProcessGroupNCCL(store, rank, 2, options)
        )
        token = torch.zeros(1, dtype=torch.float32, device=device)
        # Torch warns that an unbatched transfer connects lazily, which is the purpose of this one.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="An unbatched P2P op")
            (made.send([token], 1, 0) if rank == 0 else made.recv([token], 0, 0)).wait()
        torch.cuda.synchronize(device)
    return made


class Slots(list[tuple[tuple[tuple[int, int], ...], "PointToPoint"]]):
    """The slots of a group's edges; its schedules share them, because they run sequentially."""

    def add(self, edges: tuple[tuple[int, int], ...], copies: PointToPoint) -> None:
        """Add the slots of some edges, and free them when the process exits."""
        register_at_exit(_free_slots)
        self.append((edges, copies))

    def close(self, timeout_s: float) -> None:
        """Free the slots once all messages have arrived."""
        for _, copies in self:
            if not copies.drain():
                _log.warning(_ERROR_STUCK, timeout_s)
                _stuck.append(copies)
        self.clear()


def find_slots(group: dist.ProcessGroup) -> Slots:
    """Return the slots of a group."""
    return group_state(group).get_or_create(Slots, Slots)


def _free_slots(group: dist.ProcessGroup | None = None) -> None:
    if not is_exiting_by_error():
        for owner, slots in group_values(Slots, group):
            slots.close(group_timeout_s(owner))


def close_edges(group: dist.ProcessGroup | None = None) -> None:
    """Shut down the communicators of one group, or of all, after their transfers, and free slots. All ranks call this.

    Does nothing if an exception ends this process: transfers in flight may wait for peers that have exited.

    Args:
        group: The pipeline's process group. Default: all groups.
    """
    if is_exiting_by_error():
        return
    for _, made in group_values(Communicators, group):
        for edge in sorted(made):
            made[edge].shutdown()
        made.clear()
    _free_slots(group)
