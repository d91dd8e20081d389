"""Data parallelism over one dimension of a mesh, tensor parallelism over the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from ovpatch_plugins.ddp.reducer_stub import ReducerStub
from tests.plugins.ddp.arms import Record, both
from tests.plugins.ddp.checks import check


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))


def loop(tensor_parallel: bool, ddp: dict[str, Any]) -> list[Record]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = block()
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wrapped = DDP(model, device_mesh=mesh["dp"], **ddp)
    # Stock PyTorch replaces the parameters by DTensors in every forward, so this loop holds them.
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), 0.01)
    replica = mesh.get_local_rank("dp")
    records = []
    for step in range(4):
        # All ranks of a tensor-parallel row have the same data.
        generator = torch.Generator().manual_seed(10 * step + replica)
        loss = wrapped(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        records.append(
            {"loss": loss.detach().clone(), "grad": {n: p.grad.clone() for n, p in params.items()}}
        )
        optimizer.step()
        optimizer.zero_grad()
        records.append({"param": {n: p.detach().clone() for n, p in params.items()}})
    return records


def reverted_midway() -> list[list[torch.Tensor]]:
    """Train stock, then patched until ovpatch is reverted after the second step."""

    def train(patched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        # The parameters of the last layer stay in the module.
        model = nn.Sequential(block(), nn.Linear(8, 8))
        parallelize_module(model, mesh["tp"], {"0.0": ColwiseParallel(), "0.2": RowwiseParallel()})
        wrapped = DDP(model, device_mesh=mesh["dp"])
        params = list(model.parameters())
        for step in range(4):
            if patched and step == 2:
                ovpatch.revert()
                assert not isinstance(wrapped.reducer, ReducerStub)
            generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
            wrapped(torch.randn(4, 8, generator=generator)).square().mean().backward()
            with torch.no_grad():
                for param in params:
                    param -= 0.1 * param.grad
                    param.grad = None
        return [param.detach().clone() for param in params]

    stock = train(False)
    ovpatch.apply("ddp")
    return [stock, train(True)]


def test_revert_in_the_middle_of_training(ranks):
    for stock, patched in ranks(4)(reverted_midway):
        assert len(stock) == len(patched) == 8
        assert all(map(torch.equal, stock, patched))


def found_user_hooks() -> list[bool]:
    """Return whether hooks of a user are found, at first, with hooks of torch, and with a hook of the script."""
    with ovpatch.applied("ddp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = block()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        wrapped = DDP(model, device_mesh=mesh["dp"])
        params = list(model.parameters())
        hooks, found = wrapped.reducer.grad_reducer.hooks, []
        found.append(hooks.find_user_hooks())
        wrapped(torch.randn(4, 8)).sum().backward()
        found += [any(param._backward_hooks for param in params), hooks.find_user_hooks()]
        handle = params[0].register_hook(lambda grad: None)
        found.append(hooks.find_user_hooks())
        handle.remove()
        return [*found, hooks.find_user_hooks()]


def test_hooks_of_torch_do_not_count_as_user_hooks(ranks):
    assert ranks(4)(found_user_hooks) == [[False, True, False, True, False]] * 4


@pytest.mark.parametrize("tensor_parallel", [True, False])
@pytest.mark.parametrize(
    "ddp", [{}, {"bucket_cap_mb": 0.0001}, {"find_unused_parameters": True}], ids=str
)
def test_a_mesh_of_two_by_two(ranks, tensor_parallel, ddp):
    results = ranks(4)(both, loop, tensor_parallel, ddp)
    check(results, backwards=4)
    shape = results[0]["patched"][1]["param"]["0.weight"].shape
    assert shape == ((8, 8) if tensor_parallel else (16, 8)), "each rank has its shard of the layer"
