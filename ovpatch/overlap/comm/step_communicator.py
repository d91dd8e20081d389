"""The communicator for collectives at places where stock torch issues none, as in ``optimizer.step()``.

[Note: beside the script's collectives] A communicator pairs collectives in the order in which hosts issue them. Where
stock issues none, a script may have a thread of its own, or one rank earlier than another, issue one on the model's
process group. Ours on the same communicator would come before it on one rank and after it on another, and pair with it:
a hang, or wrong numbers. So they have a communicator of their own. What a backward issues stays on the group, where
stock issues it as well.

It is known to nobody but us: a group that torch registers changes the names that torch makes up for groups to come,
which have to be the same on ranks that are no members.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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

_TUNED = ("cga_cluster_size", "min_ctas", "max_ctas")  # what users set in NCCL's configuration


def step_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the communicator; see [Note: beside the script's collectives].

    Every rank of the group makes this call at the same place the first time, which connects them.

    Args:
        group: The process group of the model.
        device: Where the tensors are.

    Returns:
        A process group over the same ranks. ``group`` itself for a backend that is neither gloo nor NCCL: there, a
        script must not issue collectives on it beside a step.
    """
    made = group_state(group).get_or_create(_Communicators, _Communicators)
    if device.type not in made:
        made[device.type] = _make(group, device)
    found = made[device.type]
    return group if found is None else found


def close(group: dist.ProcessGroup | None = None) -> None:
    """Shut the communicators of one group down, or all; what is under way ends before. All ranks do so.

    Not if an exception ends this process: what is under way may wait for peers that are gone.

    Args:
        group: Beside which they stand.
    """
    if is_exiting_by_error():
        return
    for _, made in group_values(_Communicators, group):
        for communicator in made.values():
            if communicator is not None:
                communicator.shutdown()
        made.clear()


class _Communicators(dict[str, "dist.ProcessGroup | None"]):
    """The communicators beside one group, by type of device; None where the group itself serves."""


def _make(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    connect = _by_backend(group._get_backend(device))
    store = group_store(group)
    if group.size() == 1 or connect is None or store is None:
        return None
    name = f"ovpatch/communicator/{agree_on_name(group, 'communicator', timeout_s=group_timeout_s(group))}"
    own = dist.PrefixStore(name, store)
    kind, made = connect(own, group, name)
    found = dist.ProcessGroup(own, group.rank(), group.size())
    found._set_default_backend(kind)
    found._register_backend(torch.device(device.type), kind, made)
    return found


Connect = Callable[[dist.Store, dist.ProcessGroup, str], tuple[Any, Any]]


def _by_backend(backend: Any) -> Connect | None:
    """Return what connects ranks as a backend does; None for one that is not known to need nothing else."""
    kind = type(getattr(backend, "wrapped_pg", backend))  # wrapped under TORCH_DISTRIBUTED_DEBUG=DETAIL
    if kind is getattr(dist, "ProcessGroupGloo", None):
        return _gloo
    if kind is getattr(dist, "ProcessGroupNCCL", None):
        return functools.partial(_nccl, getattr(backend, "wrapped_pg", backend).options)
    return None


def _gloo(store: dist.Store, group: dist.ProcessGroup, name: str) -> tuple[Any, Any]:
    del name
    timeout = timedelta(seconds=group_timeout_s(group))
    made = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)
    return dist.ProcessGroup.BackendType.GLOO, made


def _nccl(given: Any, store: dist.Store, group: dist.ProcessGroup, name: str) -> tuple[Any, Any]:
    """Make a communicator as the script has made its own; it connects, and takes memory, at its first collective."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = given._timeout
    options.is_high_priority_stream = given.is_high_priority_stream
    for tuned in _TUNED:
        setattr(options.config, tuned, getattr(given.config, tuned))
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = name
    made = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    return dist.ProcessGroup.BackendType.NCCL, made
