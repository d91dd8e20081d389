"""Data and tensor parallelism over two dimensions of a mesh. Parameters are gathered during the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plugins.ddp.arms import Record
from tests.plugins.dist_optimizer.checks import both
from tests.support.equality import compare


def loop(how: str) -> list[Record]:
    """Train a model whose last linear is not tensor parallel, and read or hold a weight as a script may."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 8)
    )
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wrapped = DDP(model, device_mesh=mesh["dp"])
    # The first forward of stock PyTorch replaces the parameters by DTensors.
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), 0.01)
    records: list[Record] = []
    held: list[Any] = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
        loss = wrapped(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weight: Any = model[0].weight
        assert isinstance(weight, DTensor)
        if how == "held":
            held.append(weight.detach())
        records.append({"loss": loss.detach().clone()})
        if how == "DTensor read":
            records.append({"read": weight.to_local().detach().clone()})
        elif how == "parameter read":
            records.append({"read": params["0.weight"].detach().clone()})
    return [*records, {"param": {name: param.detach().clone() for name, param in params.items()}}]


@pytest.mark.parametrize("how", ["", "parameter read", "DTensor read", "held"])
def test_parameters_are_gathered_during_the_forward(ranks, how):
    for result in ranks(4)(both, loop, how):
        compare(result["stock"], result["patched"]).assert_bitwise()
        counted = result["counters"]
        # A view that the script holds from the first step on could be read without a wait, so later steps wait for
        # their gathers themselves.
        assert (counted["gathers"], counted["gathers_overlapped"]) == (5, 1 if how == "held" else 5)
