"""Rounds of agreement with keys of an earlier attempt in the store, and with ranks that come late."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ovpatch.overlap.comm import consensus


class Group:
    def __init__(self, rank, size=2):
        self._rank, self._size = rank, size

    def size(self):
        return self._size

    def rank(self):
        return self._rank


@pytest.fixture
def stores(monkeypatch):
    """Return the stores that ranks see, by rank, and the store that is the default of all ranks."""
    store = dist.HashStore()
    seen: dict[int, Any] = {}
    monkeypatch.setattr(consensus.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(consensus.dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(
        consensus.c10d,
        "_get_process_group_store",
        lambda group: seen.setdefault(group.rank(), store),
    )
    return seen, store


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.usefixtures("stores")
def test_a_rank_that_died_before_it_arrived_does_not_shift_later_rounds(alone):
    def agree(rank, timeout_s):
        return consensus.check_consistent(Group(rank), "topic", {"a": 1}, timeout_s=timeout_s)

    with pytest.raises(consensus.RankMismatchError, match=f"no reply from rank {1 - alone}"):
        # Ranks other than 0 wait 5 s longer.
        agree(alone, 0.1 if alone == 0 else -4.9)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(agree, (0, 1), (3, 3))) == ["", ""]


class Delayed:
    """A store through which a rank publishes its verdict only after a peer has timed out."""

    def __init__(self, store: dist.Store, until: threading.Event) -> None:
        self._store, self._until = store, until

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        self._wait(key)
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._wait(key)
        return self._store.compare_set(key, expected, desired)

    def _wait(self, key: str) -> None:
        if key.endswith("/verdict"):
            assert self._until.wait(60)


def ended(rank: int, size: int, timeout_s: float) -> str:
    try:
        return consensus.check_consistent(Group(rank, size), "topic", {"a": 1}, timeout_s=timeout_s)
    except consensus.RankMismatchError as error:
        return str(error)


@pytest.mark.parametrize("size", [2, 3])
def test_no_rank_agrees_with_a_rank_that_has_timed_out(stores, size):
    seen, store = stores
    over = threading.Event()
    seen[0] = Delayed(store, over)

    def late() -> str:
        try:
            # Half a second, because ranks other than 0 wait 5 s longer.
            return ended(1, size, -4.5)
        finally:
            over.set()

    with ThreadPoolExecutor(size) as pool:
        last = pool.submit(late)
        punctual = [pool.submit(ended, rank, size, 10) for rank in range(size) if rank != 1]
        assert "no reply from rank 0" in last.result()
        for result in punctual:
            assert "did not agree on feature 'topic': rank 1 had timed out" in result.result()


class Overtaken:
    """A store through which a rank sees no verdict until it has timed out."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        return not keys[0].endswith("/verdict") and self._store.check(keys)


def test_a_rank_that_has_just_timed_out_uses_a_verdict_that_came_before(stores):
    seen, store = stores
    seen[1] = Overtaken(store)
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(ended, 1, 2, -4.5)
        assert ended(0, 2, 10) == ""
        assert late.result() == ""


def test_rounds_leave_no_keys_in_the_store(stores):
    _, store = stores
    counts = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            agreed = pool.map(
                lambda rank: consensus.check_consistent(Group(rank), "topic", {}), (0, 1)
            )
            assert list(agreed) == ["", ""]
            counts.append(store.num_keys())
    assert counts[1:] == counts[:1] * 3
