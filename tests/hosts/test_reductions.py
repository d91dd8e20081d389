"""Reductions over hosts, on ranks of one machine that count as hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ovpatch.insight.equality import Verdict
from ovpatch.overlap.data_parallel import grad_reducer
from ovpatch.overlap.data_parallel.bucket_assignment import BucketAssignment
from tests.plugins.ddp.arms import Record, all_both, data, record_steps
from tests.support.equality import compare
from tests.support.hosts import fake_hosts

# Ranks by host, by the number of ranks.
ALONE = {2: (0, 1), 3: (0, 1, 2)}
EVEN = {4: (0, 0, 1, 1)}
UNEVEN = {3: (0, 0, 1), 4: (0, 1, 1, 1)}


_permuted: list[bool] = []


def source() -> int:
    """Return the rank whose data this rank gets: its own, or another one's in the run that measures noise."""
    world = dist.get_world_size()
    return (2 * dist.get_rank() + 1) % (world + 1 - world % 2) if _permuted else dist.get_rank()


@contextmanager
def terms_in_another_order() -> Iterator[None]:
    _permuted.append(True)
    yield
    _permuted.clear()


class Net(nn.Module):
    """Small and large gradients, one of which does not divide evenly, and a complex one."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6, sparse=is_sparse, dtype=dtype)
        self.layers = nn.Sequential(
            nn.Linear(6, 701, dtype=dtype), nn.Tanh(), nn.Linear(701, 401, dtype=dtype)
        )
        self.phase = (
            nn.Parameter(torch.ones(5, dtype=torch.complex64)) if dtype is torch.float32 else None
        )

    def forward(self, step: int) -> torch.Tensor:
        rank = source()
        index = torch.arange(4) + rank + step
        with mock.patch.object(dist, "get_rank", return_value=rank):
            given = data(step, 4, 6).to(self.embedding.weight.dtype)
        hidden = self.layers(self.embedding(index) + given)
        loss = hidden.float().square().mean()
        return loss if self.phase is None else loss + self.phase.abs().square().sum() * (rank + 1)


def train(
    dtype: torch.dtype = torch.float32,
    *,
    is_sparse: bool = False,
    steps: int = 3,
    **options: object,
) -> list[Record]:
    model = DistributedDataParallel(Net(dtype, is_sparse=is_sparse), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = record_steps(model, (model(step) for step in range(steps)), optimizer)
    # Ranks have other losses where they have other data.
    return [{name: record[name] for name in ("grad", "param")} for record in records]


CASES = {
    "": {},
    "many buckets": {"bucket_cap_mb": 0.001},
    "sparse": {"is_sparse": True},
    # Another order of sums may round a parameter to its neighbor, which a single run of the noise need not show.
    "bf16": {"dtype": torch.bfloat16, "steps": 1},
    "static": {"static_graph": True},
    "searched": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}


def all_on_hosts(hosts, cases, option="auto"):
    with fake_hosts(hosts):
        results = all_both(
            train, cases, options={"hierarchical": option}, again=terms_in_another_order
        )
    return results, [str(line) for line in _remarks()]


def _remarks():
    from ovpatch_plugins.ddp import ddp_report as report

    return report.REMARKS


def has_same_runs(result, first):
    arms = [[runs[arm] for arm in ("stock", "patched", "reordered")] for runs in (result, first)]
    return compare(*arms).verdict is Verdict.BITWISE


@pytest.mark.parametrize(("world", "hosts"), [*EVEN.items(), *UNEVEN.items()], ids=str)
def test_gradients_are_those_of_stock_and_the_same_on_all_ranks(ranks, world, hosts):
    cases = CASES if hosts == EVEN[4] else {name: CASES[name] for name in ("", "many buckets")}
    replies = ranks(world)(all_on_hosts, hosts, cases)
    results = [result for result, _ in replies]
    for name in cases:
        for result in results:
            # Ranks mostly have the same bits, which are compared much faster than noise is measured.
            if result is results[0] or not has_same_runs(result[name], results[0][name]):
                compare(
                    result[name]["stock"],
                    result[name]["patched"],
                    reordered=result[name]["reordered"],
                ).assert_equal()
            assert result[name]["counters"]["stock_models"] == 0
            for own, first in zip(
                result[name]["patched"], results[0][name]["patched"], strict=True
            ):
                compare(first["param"], own["param"]).assert_bitwise()
    assert all(
        "2 hosts reduce gradients within each host first" in "\n".join(remarks)
        for _, remarks in replies
    )


@pytest.mark.parametrize(("world", "hosts"), [(3, UNEVEN[3]), (2, ALONE[2])], ids=str)
def test_hierarchical_on_computes_what_stock_does(ranks, world, hosts):
    case = {"many buckets": CASES["many buckets"]}
    for results, remarks in ranks(world)(all_on_hosts, hosts, case, "on"):
        runs = results["many buckets"]
        compared = compare(runs["stock"], runs["patched"], reordered=runs["reordered"])
        (compared.assert_bitwise if world == 2 else compared.assert_equal)()
        assert runs["counters"]["stock_models"] == 0
        # Hosts of one rank have nothing to reduce within.
        assert any("within each host first" in remark for remark in remarks) == (world == 3)


def all_alone(hosts, cases):
    sends_each = []

    def assign(*args, **kwargs):
        sends_each.append(kwargs["sends_each"])
        return BucketAssignment(*args, **kwargs)

    with mock.patch.object(grad_reducer, "BucketAssignment", assign):
        results, _ = all_on_hosts(hosts, cases)
    return results, sends_each


@pytest.mark.parametrize(("world", "hosts"), [*ALONE.items(), (2, (0, 0))], ids=str)
def test_hosts_of_one_rank_collect_small_gradients(ranks, world, hosts):
    cases = {name: CASES[name] for name in ("", "many buckets", "searched")}
    for results, sends_each in ranks(world)(all_alone, hosts, cases):
        assert sends_each
        assert set(sends_each) == {hosts != (0, 0)}
        for name in cases:
            runs = results[name]
            compared = compare(runs["stock"], runs["patched"], reordered=runs["reordered"])
            (compared.assert_bitwise if world == 2 else compared.assert_equal)()
            assert runs["counters"]["stock_models"] == 0
