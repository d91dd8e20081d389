"""NCCL's averages in the collective, and its limit of thread blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from ovpatch.hookspecs import refuse_option
from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.lifetimes import group_state
from ovpatch_plugins.ddp import ddp_report as report
from ovpatch_plugins.ddp.ddp_options import OPTIONS

# --- the communicator ---


def averages(
    group: dist.ProcessGroup,
    device: torch.device,
    wanted: bool | None,
    dtypes: Collection[torch.dtype] = (),
) -> bool:
    """Return whether the collective must divide by the number of ranks.

    Args:
        group: The process group.
        device: Where the gradients are.
        wanted: The option; None leaves the decision to the backend and the dtypes.
        dtypes: The dtypes of the sums.

    Raises:
        ovpatch.OptionError: The option is on, and the backend cannot.
    """
    backend = backend_name(group, device)
    is_able = backend == "nccl"
    if wanted and not is_able:
        reason = report.say_needs_nccl(backend)
        refuse_option("ddp", OPTIONS, "average_in_collective", wanted, reason)
    return is_able and _keeps_bits(group.size(), dtypes) if wanted is None else wanted


def _keeps_bits(ranks: int, dtypes: Collection[torch.dtype]) -> bool:
    # NCCL multiplies each rank's part by a factor of the part's dtype before it adds, and rounds
    # the multiplied part and the sum once each. For a power of two both are exact, except for
    # parts of float16 below 2^-13. For three ranks the factor in bfloat16 is off by 0.2%, which is
    # too much. In float32 it is off by a last bit, as a sum in another order is.
    is_power_of_two = ranks & (ranks - 1) == 0
    return torch.float16 not in dtypes and (is_power_of_two or torch.bfloat16 not in dtypes)


def check_budget(group: dist.ProcessGroup, device: torch.device, max_ctas: int | None) -> None:
    """Raise an error if there is an SM budget and the backend has none.

    Raises:
        ovpatch.OptionError: Names the option, the backend and the remedy.
    """
    backend = backend_name(group, device)
    if max_ctas is not None and backend != "nccl":
        refuse_option("ddp", OPTIONS, "max_ctas", max_ctas, report.say_needs_nccl(backend))


def get_budgeted_group(group: dist.ProcessGroup, max_ctas: int | None) -> dist.ProcessGroup:
    """Return a communicator over the ranks of ``group`` that takes at most ``max_ctas`` thread blocks.

    All ranks of ``group`` must make the first call together. Without a budget this is ``group``
    itself.
    """
    if max_ctas is None:
        return group
    # Models share the communicator, because each takes memory on the device.
    key = ("max_ctas", max_ctas)
    return group_state(group).get_or_create(key, lambda: _create_group(group, max_ctas))


def _create_group(group: dist.ProcessGroup, max_ctas: int) -> dist.ProcessGroup:
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    options.config.min_ctas = 1
    created: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        backend="nccl",
        pg_options=options,
        use_local_synchronization=True,
        group_desc=f"ovpatch ddp, max_ctas {max_ctas}",
    )
    return created
