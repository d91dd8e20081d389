"""NCCL's averages in the collective, and its limit of thread blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from ovpatch.hookspecs import refuse_option
from ovpatch.overlap.comm.collectives import backend_name
from ovpatch.overlap.comm.lifetimes import group_state
from ovpatch_plugins.ddp import report
from ovpatch_plugins.ddp.options import OPTIONS

# --- the communicator ---


def averages(
    group: dist.ProcessGroup, device: torch.device, wanted: bool | None, dtypes: Collection[torch.dtype] = ()
) -> bool:
    """Return whether the collective is to divide by the number of ranks.

    Args:
        group: The process group.
        device: Where the gradients are.
        wanted: The option; ``None`` leaves it to the backend and the dtypes.
        dtypes: What is summed.

    Raises:
        ovpatch.OptionError: The option is on, and the backend cannot.
    """
    able = backend_name(group, device) == "nccl"
    if wanted and not able:
        refuse_option(
            "ddp", OPTIONS, "average_in_collective", wanted, report.say_needs_nccl(backend_name(group, device))
        )
    return able and _keeps_bits(group.size(), dtypes) if wanted is None else wanted


def _keeps_bits(ranks: int, dtypes: Collection[torch.dtype]) -> bool:
    # NCCL multiplies each rank's part before it adds, by a factor of the part's own dtype, and rounds product and sum
    # once. For a power of two all that is exact, except for parts of float16 below 2^-13. Otherwise a third in bfloat16
    # is off by 0.2%, which is too much, and one in float32 by a last bit, as sums in another order are.
    power_of_two = ranks & (ranks - 1) == 0
    return torch.float16 not in dtypes and (power_of_two or torch.bfloat16 not in dtypes)


def check_budget(group: dist.ProcessGroup, device: torch.device, max_ctas: int | None) -> None:
    """Raise an error if there is an SM budget and the backend has none.

    Raises:
        ovpatch.OptionError: Names the option, the backend and the remedy.
    """
    if max_ctas is not None and backend_name(group, device) != "nccl":
        refuse_option("ddp", OPTIONS, "max_ctas", max_ctas, report.say_needs_nccl(backend_name(group, device)))


def get_budgeted_group(group: dist.ProcessGroup, max_ctas: int | None) -> dist.ProcessGroup:
    """Return a communicator over the ranks of ``group`` that takes at most ``max_ctas`` thread blocks.

    All ranks of ``group`` call this together the first time; ``group`` itself comes back if there is no budget.
    """
    if max_ctas is None:
        return group
    # Models share it: each communicator takes memory on the device.
    return group_state(group).get_or_create(("max_ctas", max_ctas), lambda: _new_group(group, max_ctas))


def _new_group(group: dist.ProcessGroup, max_ctas: int) -> dist.ProcessGroup:
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    options.config.min_ctas = 1
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        backend="nccl",
        pg_options=options,
        use_local_synchronization=True,
        group_desc=f"ovpatch ddp, max_ctas {max_ctas}",
    )
    return made
