"""Process groups that span parts of hosts: models reduce as in stock PyTorch, and the report says in which way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from tests.support.hosts import fake_hosts

HOSTS = (0, 0, 1, 1)
# Groups with their remarks about hosts, and why hosts cannot keep all state.
PARTS = {
    (0, 3): ("", "each host has one rank, which would keep all state"),
    (0, 1, 3): (
        "2 hosts reduce gradients within each host first",
        "hosts have different numbers of ranks (2 on host0, 1 on host1)",
    ),
    (1, 2, 3): (
        "2 hosts reduce gradients within each host first",
        "hosts have different numbers of ranks (1 on host0, 2 on host1)",
    ),
    # A single host keeps all state anyway.
    (2, 3): ("", "no error"),
}


def train(group, steps=4):
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = DistributedDataParallel(linear, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def train_in_part(members):
    """Return the distance to stock PyTorch, the sharded gradients, the report, and the error of a named option."""
    from ovpatch_plugins.ddp import ddp_report
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS, list_remarks

    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    options = {"dist_optimizer": {"min_param_numel": 1}}
    with fake_hosts(HOSTS):
        stock = train(group)
        with ovpatch.applied("ddp", "dist_optimizer", options=options):
            patched = train(group)
            sharded = COUNTERS.grads_sharded
            report = [*map(str, ddp_report.REMARKS), *list_remarks()]
        options["dist_optimizer"]["shard_over"] = "host"
        error = "no error"
        with ovpatch.applied("ddp", "dist_optimizer", options=options):
            try:
                train(group, steps=1)
            except ValueError as failure:
                error = str(failure)
    distance = max(
        float((own - expected).abs().max()) for own, expected in zip(patched, stock, strict=True)
    )
    return distance, sharded, "\n".join(report), error


@pytest.mark.parametrize("members", PARTS, ids=str)
def test_a_group_of_parts_of_hosts_trains_as_stock_does_and_the_report_has_its_hosts(
    ranks, members
):
    by_host, objection = PARTS[members]
    results = ranks(4)(train_in_part, members)
    assert [result is not None for result in results] == [rank in members for rank in range(4)]
    for distance, sharded, report, error in filter(None, results):
        assert distance <= 1e-6
        assert sharded > 0
        assert ("hosts reduce gradients" in report) == bool(by_host)
        assert by_host in report
        assert objection in error
        assert ("OVPATCH_DIST_OPTIMIZER_SHARD_OVER=auto" in error) == (error != "no error")
