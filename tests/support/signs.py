"""Signs that ranks give each other: one that has to come later waits for a sign, not for a while."""

from __future__ import annotations

import time

import torch.distributed as dist

from tests.support.worker import fresh_store


def give(sign: str) -> None:
    """Tell all ranks that this one has come so far."""
    fresh_store("signs").set(f"{sign} of {dist.get_rank()}", "")


def await_others(sign: str) -> None:
    """Return when all other ranks have given a sign; where they never do, the case's time-out ends this.

    It asks again and again, since to wait in the store would keep this rank's other threads from it.
    """
    store = fresh_store("signs")
    others = [
        f"{sign} of {rank}" for rank in range(dist.get_world_size()) if rank != dist.get_rank()
    ]
    while not store.check(others):
        time.sleep(0.005)
