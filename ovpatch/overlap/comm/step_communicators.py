"""The communicators that a process group has for the collectives of steps."""

from __future__ import annotations

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
    communicator = step_communicator(group, device)
    with outside_modes():
        own = torch.zeros(1, dtype=torch.float32, device=device)
        gathered = torch.empty(group.size(), dtype=torch.float32, device=device)
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
            if communicator is None:
                continue
            # Gloo cannot abort, and has no collective that waits on a device.
            if communicators.should_abort and device_type == "cuda":
                communicator.abort()
            else:
                communicator.shutdown()
        communicators.clear()


def abort_step_communicators(group: dist.ProcessGroup) -> None:
    """Abort the step communicators of a group when they are closed.

    A rank of the group does not join a collective, so a shutdown would wait for it forever.
    """
    communicators = group_state(group).values.get(_Communicators)
    if communicators is not None:
        communicators.should_abort = True


class _Communicators(dict[str, "dist.ProcessGroup | None"]):
    """The step communicators of a group, by type of device; None if the group itself is used."""

    should_abort = False


def _make_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    backend: Any = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend.
    backend = getattr(backend, "wrapped_pg", backend)
    # Backends of other classes may need more than a store.
    is_nccl = type(backend) is getattr(dist, "ProcessGroupNCCL", None)
    is_known = is_nccl or type(backend) is getattr(dist, "ProcessGroupGloo", None)
    store = group_store(group)
    if group.size() == 1 or not is_known or store is None:
        return None
    timeout_s = group_timeout_s(group)
    # Ranks may first use the communicators of two devices in different orders, so each device has
    # its own topic.
    agreed = agree_on_name(group, f"communicator of {device.type}", timeout_s=timeout_s)
    name = f"ovpatch/communicator/{agreed}"
    own_store = dist.PrefixStore(name, store)
    rank = group.rank()
    size = group.size()
    if is_nccl:
        kind = dist.ProcessGroup.BackendType.NCCL
        options = _make_nccl_options(group, backend.options, name)
        made: Any = dist.ProcessGroupNCCL(own_store, rank, size, options)
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        timeout = timedelta(seconds=timeout_s)
        made = dist.ProcessGroupGloo(own_store, rank, size, timeout=timeout)
    return wrap_backend(own_store, device, kind, made)


def wrap_backend(
    store: dist.Store, device: torch.device, kind: Any, backend: Any
) -> dist.ProcessGroup:
    """Return a communicator that torch does not register; see [Note: step communicators]."""
    communicator = dist.ProcessGroup(store, backend.rank(), backend.size())
    communicator._set_default_backend(kind)
    communicator._register_backend(torch.device(device.type), kind, backend)
    return communicator


def _make_nccl_options(group: dist.ProcessGroup, script_options: Any, name: str) -> Any:
    # NCCL connects at the first collective, so options that are set now are in time.
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = script_options._timeout
    options.is_high_priority_stream = script_options.is_high_priority_stream
    for field in _NCCL_FIELDS:
        setattr(options.config, field, getattr(script_options.config, field))
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = name
    return options
