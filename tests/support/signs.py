"""Signs that ranks give each other. A rank that must come later waits for a sign and does not sleep."""

from __future__ import annotations

import time

import torch.distributed as dist

from tests.support.worker import fresh_store


def give(sign: str) -> None:
    """Notify all ranks that this rank has reached a point."""
    fresh_store("signs").set(f"{sign} of {dist.get_rank()}", "")


def await_others(sign: str) -> None:
    """Return when all other ranks have given a sign. If they never do, the case's timeout ends the wait.

    The function polls the store, because a wait in the store would block this rank's other threads from using it.
    """
    _await(sign, [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()])


def await_rank(rank: int, sign: str) -> None:
    """Return when a rank has given a sign; see :func:`await_others`."""
    _await(sign, [rank])


def _await(sign: str, ranks: list[int]) -> None:
    store = fresh_store("signs")
    keys = [f"{sign} of {rank}" for rank in ranks]
    while not store.check(keys):
        time.sleep(0.005)
