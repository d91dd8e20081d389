"""All ranks of a test on one GPU (``pytest -m gpu --share-gpu``), for machines with fewer GPUs than ranks.

Processes take turns on a GPU, a few milliseconds each. The GPU interrupts a kernel that waits for another rank's kernel
and runs that rank. So everything runs as on separate GPUs, only slowly. Ranks must not detect that they share a GPU.
"""

from __future__ import annotations

from typing import Final

# The factor for timeouts: a wait takes as long as the turns of all ranks.
TIMEOUT_FACTOR: Final = 5


def environment(rank: int) -> dict[str, str]:
    """Return the variables that NCCL and symmetric memory need on a rank that shares its GPU with its peers."""
    return {
        # NCCL refuses two ranks of one host on a GPU. Between hosts it uses sockets.
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
