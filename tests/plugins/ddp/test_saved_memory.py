"""The memory that a model does without, next to stock PyTorch, and the line about it at the end of a run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from ovpatch.overlap.data_parallel.grad_bucket import SMALL_NUMEL
from ovpatch_plugins.ddp.ddp_report import COUNTERS
from tests.plugins.ddp.arms import data

WIDTH = 512
# One large weight in each of two linears, which is reduced in its own memory, and small biases.
LARGE_BYTES = WIDTH * WIDTH * 4
SHARDED = {"min_param_numel": 1, "shard": "always"}


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def hook_each(model: nn.Module) -> None:
    """Register hooks, before which each gradient is copied."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _param: None)


# Name: features, options of ddp, arguments of the wrapper, of the model, a preparation, bytes.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], Any, int]] = {
    "large": ("ddp", {}, {}, {}, None, 2 * LARGE_BYTES),
    "searched": ("ddp", {}, {"find_unused_parameters": True}, {}, None, 2 * LARGE_BYTES),
    "static": ("ddp", {}, {"static_graph": True}, {}, None, 2 * LARGE_BYTES),
    "small": ("ddp", {}, {}, {"width": 8}, None, 0),
    # In stock PyTorch, too, each gradient exists once.
    "views": ("ddp", {}, {"gradient_as_bucket_view": True}, {}, None, 0),
    "hooks": ("ddp", {}, {}, {}, hook_each, 0),
    "sums in fp32": (
        "ddp",
        {"grad_reduce_in_fp32": True},
        {},
        {"dtype": torch.bfloat16},
        None,
        0,
    ),
    "fp32 over microbatches": (
        "ddp",
        {"grad_accumulate_in_fp32": True},
        {},
        {"dtype": torch.bfloat16},
        None,
        0,
    ),
    # Besides its gradients, a rank holds half of them, and the coalesced biases.
    "sharded": (
        "ddp,dist_optimizer",
        {},
        {},
        {},
        None,
        2 * LARGE_BYTES // 2 - 2 * WIDTH * 4 // 2,
    ),
}


def train(name: str, steps: int = 3) -> None:
    _, _, arguments, model, prepare, _ = CASES[name]
    torch.manual_seed(0)
    net = Net(**model)
    wrapped = DDP(net, **arguments)
    if prepare is not None:
        prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    width, dtype = net.layers[0].weight.shape[0], net.layers[0].weight.dtype
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(data(step, 4, width).to(dtype)).float().square().mean().backward()
        optimizer.step()


def measure(names: list[str]) -> dict[str, tuple[int, str]]:
    found = {}
    for name in names:
        features, options, *_ = CASES[name]
        given = {"ddp": options}
        if "dist_optimizer" in features:
            given["dist_optimizer"] = SHARDED
        COUNTERS.saved_bytes = 0
        with ovpatch.applied(*features.split(","), options=given) as report:
            train(name)
            found[name] = (COUNTERS.saved_bytes, ovpatch.report().gains()["ddp"])
        assert report["ddp"].state == "applied"
    return found


def test_memory_is_counted_where_gradients_have_no_second_copy(ranks):
    assert WIDTH * WIDTH >= SMALL_NUMEL
    for found in ranks(2)(measure, list(CASES)):
        assert {name: saved for name, (saved, _) in found.items()} == {
            name: case[-1] for name, case in CASES.items()
        }
        for name, (saved, gains) in found.items():
            assert ("less memory a rank" in gains) == (saved > 0), name
        assert found["large"][1].endswith(", 2.0 MiB less memory a rank")


def count_models() -> list[int]:
    found = []
    with ovpatch.applied("ddp"):
        models = [DDP(Net()) for _ in range(2)]
        for model in models:
            model(data(0, 4, WIDTH)).sum().backward()
            found.append(COUNTERS.saved_bytes)
        del model, models
        gc.collect()
        # The next trial of a search.
        model = DDP(Net())
        model(data(0, 4, WIDTH)).sum().backward()
        found.append(COUNTERS.saved_bytes)
    return found


def test_models_add_up_while_they_live(ranks):
    for found in ranks(2)(count_models):
        assert found == [2 * LARGE_BYTES, 4 * LARGE_BYTES, 2 * LARGE_BYTES]


@pytest.mark.gpu(2)
def test_the_allocator_agrees(ranks):
    """With ovpatch the allocator holds less between two steps, by as much as the counter says."""
    for stock, patched, saved in ranks(2)(measure_allocator, backend="nccl"):
        # A reducer has a few small tensors besides its buckets.
        assert abs(stock - patched - saved) < saved / 100


def measure_allocator() -> tuple[int, int, int]:
    # A model that ends while the next one is measured would count against it.
    kept: list[DDP] = []
    dropping = torch.zeros(1, device="cuda")

    def allocate() -> int:
        before = torch.cuda.memory_allocated()
        net = Net(2 * WIDTH).cuda()
        kept.append(DDP(net))
        for step in range(3):
            kept[-1](data(step, 4, 2 * WIDTH).cuda()).square().mean().backward()
        # NCCL's watchdog sees the end of a collective, and the next collective drops its memory. The buckets of the
        # first step would be held otherwise.
        kept[-1].process_group._wait_for_pending_works()
        torch.distributed.all_reduce(dropping)
        return torch.cuda.memory_allocated() - before

    # The first run allocates the workspaces of cuBLAS and NCCL.
    allocate()
    stock = allocate()
    with ovpatch.applied("ddp"):
        return stock, allocate(), COUNTERS.saved_bytes
