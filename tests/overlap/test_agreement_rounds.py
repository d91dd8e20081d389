"""What an attempt left in a store that outlives it does not confuse the next one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from ovpatch.overlap import agreement


class Group:
    def __init__(self, rank):
        self._rank = rank

    def size(self):
        return 2

    def rank(self):
        return self._rank


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_died_before_it_arrived_does_not_shift_later_rounds(monkeypatch, alone):
    store = dist.HashStore()
    monkeypatch.setattr(agreement.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(agreement.dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(agreement.c10d, "_get_process_group_store", lambda group: store)

    def agree(rank, timeout_s):
        return agreement.agree(Group(rank), "topic", {"a": 1}, timeout_s=timeout_s)

    with pytest.raises(agreement.DisagreementError, match=f"no answer from rank {1 - alone}"):
        agree(alone, 0.1 if alone == 0 else -4.9)  # another rank than 0 waits 5 s longer
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(agree, (0, 1), (3, 3))) == ["", ""]
