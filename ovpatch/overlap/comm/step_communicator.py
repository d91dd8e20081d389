"""A communicator for collectives at places where stock torch issues none, such as ``optimizer.step()``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ovpatch.overlap.comm.consensus import agree_on_name
from ovpatch.overlap.comm.group_state import (
    group_state,
    group_store,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
)

_TUNED = ("cga_cluster_size", "min_ctas", "max_ctas")  # fields of NCCL's configuration that users set


def step_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the communicator of a group for collectives in steps; made once.

    Every rank of the group makes the first call at the same place, which connects them.

    [Note: beside the script's collectives] A communicator pairs collectives in the order in which hosts issue them.
    Where stock issues none, a script's thread may issue one on the model's process group, before ours on one rank and
    after it on another: a hang, or wrong numbers. So ours have a communicator of their own; those of a backward stay
    on the group, where stock issues them, too. Torch does not register it: a registered group would change the names
    of later groups, which have to be the same on ranks that are no members.

    Args:
        group: The process group of the model.
        device: Where the tensors are.

    Returns:
        A process group over the same ranks. ``group`` itself for a backend that is neither gloo nor NCCL; a script must
        then issue no collectives on it beside a step.
    """
    made = group_state(group).values.get(_Communicators)
    if made is None or device.type not in made:
        made = group_state(group).get_or_create(_Communicators, _Communicators)
        made[device.type] = _make(group, device)
    found = made[device.type]
    return group if found is None else found


def close_step_communicators(group: dist.ProcessGroup | None = None) -> None:
    """Shut down the communicators of one group, or all, after their collectives. All ranks call this.

    Collectives in which a rank is known to be missing are aborted (:func:`abandon_step_communicators`).
    Does nothing if an exception ends this process: collectives in flight may wait for peers that are gone.

    Args:
        group: The model's process group; all by default.
    """
    if is_exiting_by_error():
        return
    for _, made in group_values(_Communicators, group):
        for device, communicator in made.items():
            if communicator is not None:
                # Gloo cannot abort, and has no collective that waits on a device.
                (communicator.abort if made.is_abandoned and device == "cuda" else communicator.shutdown)()
        made.clear()


def abandon_step_communicators(group: dist.ProcessGroup) -> None:
    """Have a group's communicators closed without a wait for collectives, as a rank of the group joins one no more."""
    made = group_state(group).values.get(_Communicators)
    if made is not None:
        made.is_abandoned = True


class _Communicators(dict[str, "dist.ProcessGroup | None"]):
    """The communicators of one group, by type of device; None where the group itself is used."""

    is_abandoned = False


def _make(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    backend: Any = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # wrapped under TORCH_DISTRIBUTED_DEBUG=DETAIL
    # Backends of other classes may need more than a store.
    is_nccl = type(backend) is getattr(dist, "ProcessGroupNCCL", None)
    is_known = is_nccl or type(backend) is getattr(dist, "ProcessGroupGloo", None)
    store = group_store(group)
    if group.size() == 1 or not is_known or store is None:
        return None
    name = f"ovpatch/communicator/{agree_on_name(group, 'communicator', timeout_s=group_timeout_s(group))}"
    own_store = dist.PrefixStore(name, store)
    rank, size = group.rank(), group.size()
    if is_nccl:
        kind = dist.ProcessGroup.BackendType.NCCL
        made: Any = dist.ProcessGroupNCCL(own_store, rank, size, _nccl_options(group, backend.options, name))
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        made = dist.ProcessGroupGloo(own_store, rank, size, timeout=timedelta(seconds=group_timeout_s(group)))
    found = dist.ProcessGroup(own_store, rank, size)
    found._set_default_backend(kind)
    found._register_backend(torch.device(device.type), kind, made)
    return found


def _nccl_options(group: dist.ProcessGroup, script_options: Any, name: str) -> Any:
    """Return the options of the script's communicator. NCCL connects at the first collective."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = script_options._timeout
    options.is_high_priority_stream = script_options.is_high_priority_stream
    for tuned in _TUNED:
        setattr(options.config, tuned, getattr(script_options.config, tuned))
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = name
    return options
