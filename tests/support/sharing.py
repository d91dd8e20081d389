"""All ranks of a test on one GPU (``pytest -m gpu --share-gpu``), where there are not as many GPUs as ranks.

Processes take turns on a GPU, a few milliseconds each, so a kernel that waits for another rank's is interrupted for it:
everything runs as on GPUs of its own, only slowly. Ranks must be kept from noticing that they are so close.
"""

from __future__ import annotations

from typing import Final

# A wait takes as long as everybody's turns.
PATIENCE: Final = 5


def environment(rank: int) -> dict[str, str]:
    """Return what NCCL and symmetric memory need of a rank that shares its GPU with the others."""
    return {
        "NCCL_HOSTID": f"rank {rank}",  # NCCL refuses a GPU to two ranks of one host, and has sockets between hosts
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
