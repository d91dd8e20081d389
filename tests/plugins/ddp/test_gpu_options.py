"""What only NCCL and CUDA have: SM budgets, averaging in the collective, CUDA graphs, models over several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plugins.ddp.arms import Record, both, data, device, seen
from tests.plugins.ddp.checks import same_bits
from tests.support.equality import compare
from tests.support.worker import fresh_store

pytestmark = pytest.mark.gpu(2)


class Mixed(nn.Module):
    """Large weights, which are reduced in place, and small ones, which go through a flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(640, 640) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(640), nn.Linear(640, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(self.norm(x))


def loop_mixed(*, dtype: torch.dtype = torch.float32, accumulate: int = 1, **ddp: Any) -> list[Record]:
    model = Mixed().to(device(), dtype)
    wrapped = DDP(model, **ddp)
    cls = torch.optim.SGD if dtype is torch.float16 else torch.optim.AdamW  # whose eps is zero in float16
    optimizer = cls(wrapped.parameters(), 1e-3)
    records = []
    for step in range(6):
        for micro in range(accumulate):
            wrapped.require_backward_grad_sync = micro == accumulate - 1
            loss = wrapped(data(step, 32, 640, micro=micro).to(dtype)).square().mean()
            loss.backward()
        records.append(seen(model, loss))
        optimizer.step()
        optimizer.zero_grad()
    return records


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"average_in_collective": False},
        {"average_in_collective": True},
        {"max_ctas": 4},
        {"bucket_granularity": "layer"},
        {"bucket_granularity": "module"},
        {"overlap_grad_reduce": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_option_gives_stocks_bits(ranks, options, dtype):
    for result in ranks(2)(both, loop_mixed, backend="nccl", dtype=dtype, options=options):
        if dtype is torch.float16 and options.get("average_in_collective"):  # NCCL rounds it otherwise
            compare(result["stock"], result["patched"], floor=1e-4).assert_equal()
        else:
            compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["backwards"] == 6
        assert result["counters"]["stock_models"] == 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_gradients_reduced_in_place_and_through_a_flat_tensor(ranks, accumulate, ddp):
    for result in same_bits(ranks(2)(both, loop_mixed, backend="nccl", accumulate=accumulate, **ddp)):
        assert result["counters"]["backwards"] == 6


def loop_fp32() -> list[Record]:
    """One bf16 step, with each rank's own gradients beside the averaged ones."""
    model = Mixed().to(device(), torch.bfloat16)
    wrapped = DDP(model)
    wrapped(data(0, 32, 640).bfloat16()).square().mean().backward()
    averaged = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(data(0, 32, 640).bfloat16()).square().mean().backward()
    for p in model.parameters():
        wide = p.grad.float() / dist.get_world_size()
        dist.all_reduce(wide)
        p.grad.copy_(wide)
    return [{"averaged": averaged, "by hand": {name: p.grad.clone() for name, p in model.named_parameters()}}]


@pytest.mark.gpu(4)
def test_half_precision_gradients_averaged_in_float32(ranks):
    results = ranks(4)(both, loop_fp32, backend="nccl", options={"grad_reduce_in_fp32": True})
    for result in results:
        patched, stock = result["patched"][0], result["stock"][0]
        compare(patched["by hand"], patched["averaged"]).assert_bitwise()
        differ = [not torch.equal(stock["averaged"][name], stock["by hand"][name]) for name in stock["by hand"]]
        assert any(differ), "the data does not tell bf16 from float32"


def loop_graphed() -> list[Record]:
    """Forward, backward and optimizer step in one CUDA graph, as torch's notes on CUDA graphs have it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model = Mixed().to(device())
        wrapped = DDP(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3, capturable=True)
        static = torch.zeros(32, 640, device=device())
        for step in range(12):
            static.copy_(data(step, 32, 640))
            optimizer.zero_grad()
            wrapped(static).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph, stream=side):
        loss = wrapped(static).square().mean()
        loss.backward()
        optimizer.step()
    records = []
    for step in range(12, 20):
        static.copy_(data(step, 32, 640))
        graph.replay()
        records.append(seen(model, loss))
    torch.cuda.synchronize()
    # And eager steps again, on the same model.
    for step in range(20, 23):
        optimizer.zero_grad()
        loss = wrapped(data(step, 32, 640)).square().mean()
        loss.backward()
        optimizer.step()
        records.append(seen(model, loss))
    del graph
    return records


def test_a_whole_step_in_a_cuda_graph(ranks):
    for result in same_bits(ranks(2)(both, loop_graphed, backend="nccl", timeout=120)):
        assert result["counters"]["backwards"] == 12 + 1 + 3


class Split(nn.Module):
    """Two halves on two devices of one process."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.second = second
        self.head = Mixed().to(first)
        self.tail = nn.Sequential(nn.Linear(8, 640), nn.Tanh(), nn.Linear(640, 640)).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(x).to(self.second))


def loop_split(**ddp: Any) -> list[Record]:
    first = device()
    second = torch.device("cuda", (first.index or 0) + dist.get_world_size())
    model = Split(first, second)
    wrapped = DDP(model, **ddp)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    records = []
    for step in range(6):
        loss = wrapped(data(step, 32, 640)).square().mean()
        loss.backward()
        records.append(seen(model, loss))
        optimizer.step()
        optimizer.zero_grad()
    return records


def split_case(**ddp: Any) -> dict[str, Any]:
    """The pool's process group is bound to one device per rank; this one is not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=fresh_store("unbound"), rank=rank, world_size=world)
    return both(loop_split, **ddp)


@pytest.mark.gpu(4, own=True)
@pytest.mark.parametrize("ddp", [{}, {"bucket_cap_mb": 1}, {"find_unused_parameters": True}], ids=str)
def test_a_model_on_two_devices(ranks, ddp):
    for result in ranks(2)(split_case, backend="nccl", **ddp):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["backwards"] == 6
        assert result["counters"]["stock_models"] == 0


def late_twice() -> list[torch.Tensor]:
    import ovpatch

    with ovpatch.applied("ddp"):
        model = Mixed().to(device())
        wrapped = DDP(model)
        loss = wrapped(data(0, 32, 640)).square().mean()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        pairs = zip(model.parameters(), once, strict=True)
        return [torch.stack([p.grad.double().norm(), 2 * first.double().norm()]).cpu() for p, first in pairs]


def test_a_second_backward_through_one_forward(ranks):
    first, second = ranks(2)(late_twice, backend="nccl")
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b), "ranks differ"
        assert torch.allclose(a[0], a[1], rtol=1e-5)
