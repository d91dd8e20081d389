"""The communicators that a process group has for the collectives of steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.consensus import agree_on_name
from ovpatch.overlap.comm.lifetimes import (
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    outside_modes,
)

# The fields of NCCL's configuration that users set.
_NCCL_FIELDS: Final = ("cga_cluster_size", "min_ctas", "max_ctas")


def step_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the communicator of a model's group for collectives in steps.

    The first call creates it and connects the ranks, so every rank of the group must make it at the
    same place. If the backend is neither gloo nor NCCL, the result is the group itself. A script
    must then issue no collectives on the group concurrently with a step.

    [Note: step communicators] A communicator pairs collectives in the order in which
    hosts issue them. During a step, stock PyTorch issues none. A thread of the script may issue one
    on the model's group, before ours on one rank and after it on another. The result would be a
    hang or wrong numbers. So collectives in steps have their own communicator, and those of a
    backward stay on the group, as in stock PyTorch. Torch does not register the communicator. A
    registered group would change the names of later groups, which must be equal on all ranks.
    """
    communicators = group_state(group).values.get(_Communicators)
    if communicators is None or device.type not in communicators:
        communicators = group_state(group).get_or_create(_Communicators, _Communicators)
        communicators[device.type] = _make_communicator(group, device)
    communicator: dist.ProcessGroup | None = communicators[device.type]
    return group if communicator is None else communicator


def connect_step_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """Create the step communicator of a group, and connect its ranks; all ranks call this.

    NCCL connects ranks in the first collective of each kind, and hosts wait for each other there. A
    step may be too late for that. A rank whose device runs a collective of the script waits in the
    first kernel of its step, because the load of a kernel waits for the device. If a peer launches
    its part of that collective after its own step, it never gets there.
    """
    connect_for_steps(step_communicator(group, device), device)


def connect_for_steps(communicator: dist.ProcessGroup, device: torch.device) -> None:
    """Connect the ranks of a communicator; see :func:`connect_step_communicator`."""
    with outside_modes():
        own = torch.zeros(1, dtype=torch.float32, device=device)
        gathered = torch.empty(communicator.size(), dtype=torch.float32, device=device)
        communicator.allreduce([own]).wait()
        communicator._allgather_base(gathered, own).wait()


def close_step_communicators(group: dist.ProcessGroup | None = None) -> None:
    """Shut down the step communicators of one model's group, or of all, after their collectives.

    All ranks call this. Communicators of :func:`abort_step_communicators` are aborted instead. The
    call does nothing if an exception ends this process, because collectives in flight may wait for
    peers that have exited.
    """
    if is_exiting_by_error():
        return
    for _, communicators in group_values(_Communicators, group):
        for device_type, communicator in communicators.items():
            if communicator is not None:
                close_communicator(communicator, device_type, aborts=communicators.should_abort)
        communicators.clear()


def close_communicator(communicator: dist.ProcessGroup, device_type: str, *, aborts: bool) -> None:
    """Shut a communicator down after its collectives, or abort these.

    Args:
        communicator: The communicator.
        device_type: The type of the device of its collectives.
        aborts: Whether a rank is missing in its collectives.
    """
    # Gloo cannot abort, and has no collective that waits on a device.
    if aborts and device_type == "cuda":
        communicator.abort()
    else:
        communicator.shutdown()


def abort_step_communicators(group: dist.ProcessGroup) -> None:
    """Abort the step communicators of a group when they are closed.

    A rank of the group does not join a collective, so a shutdown would wait for it forever.
    """
    communicators = group_state(group).values.get(_Communicators)
    if communicators is not None:
        communicators.should_abort = True


def lacks_rank(group: dist.ProcessGroup) -> bool:
    """Return whether :func:`abort_step_communicators` was called for a group."""
    communicators = group_state(group).values.get(_Communicators)
    return communicators is not None and communicators.should_abort


class _Communicators(dict[str, "dist.ProcessGroup | None"]):
    """The step communicators of a group, by type of device; None if the group itself is used."""

    should_abort = False


def _make_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    if group.size() == 1 or not _has_known_backend(group, device) or group_store(group) is None:
        return None
    # Ranks may first use the communicators of two devices in different orders, so each device has
    # its own topic.
    timeout_s = group_timeout_s(group)
    agreed = agree_on_name(group, f"communicator of {device.type}", timeout_s=timeout_s)
    return make_communicator(group, device, agreed, range(group.size()))


def make_communicator(
    group: dist.ProcessGroup, device: torch.device, name: str, ranks: Sequence[int]
) -> dist.ProcessGroup:
    """Return a communicator of some ranks of a group; see [Note: step communicators].

    Args:
        group: The process group, whose backend is gloo or NCCL.
        device: The device of the collectives.
        name: A name that only these ranks use.
        ranks: The ranks of the group, this rank among them.
    """
    store = group_store(group)
    assert store is not None, "the process group exists"
    own_store = dist.PrefixStore(f"ovpatch/communicator/{name}", store)
    rank = list(ranks).index(group.rank())
    backend = _find_backend(group, device)
    if _is_nccl(backend):
        kind = dist.ProcessGroup.BackendType.NCCL
        options = _make_nccl_options(group, backend.options, f"ovpatch/communicator/{name}", ranks)
        made: Any = dist.ProcessGroupNCCL(own_store, rank, len(ranks), options)
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        timeout = timedelta(seconds=group_timeout_s(group))
        made = dist.ProcessGroupGloo(own_store, rank, len(ranks), timeout=timeout)
    return _wrap_backend(own_store, device, kind, made)


def _find_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend: Any = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend.
    return getattr(backend, "wrapped_pg", backend)


def _is_nccl(backend: Any) -> bool:
    return type(backend) is getattr(dist, "ProcessGroupNCCL", None)


def _has_known_backend(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a backend needs only a store; backends of other classes may need more."""
    backend = _find_backend(group, device)
    return _is_nccl(backend) or type(backend) is getattr(dist, "ProcessGroupGloo", None)


def _wrap_backend(
    store: dist.Store, device: torch.device, kind: Any, backend: Any
) -> dist.ProcessGroup:
    communicator = dist.ProcessGroup(store, backend.rank(), backend.size())
    communicator._set_default_backend(kind)
    communicator._register_backend(torch.device(device.type), kind, backend)
    return communicator


def _make_nccl_options(
    group: dist.ProcessGroup, script_options: Any, name: str, ranks: Sequence[int]
) -> Any:
    # NCCL connects at the first collective, so options that are set now are in time.
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = script_options._timeout
    options.is_high_priority_stream = script_options.is_high_priority_stream
    for field in _NCCL_FIELDS:
        setattr(options.config, field, getattr(script_options.config, field))
    global_ranks = dist.get_process_group_ranks(group)
    options.global_ranks_in_group = [global_ranks[rank] for rank in ranks]
    options.group_name = name
    return options
