"""All-to-alls over symmetric memory on GPUs agree with NCCL's, also with late streams, rings and ranks."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ovpatch_plugins.pipe_experts import all_to_all
from ovpatch_plugins.pipe_experts.all_to_all import get_transport
from ovpatch_plugins.pipe_experts.layer import ExpertParallelFFN
from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig
from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS
from tests.plugins.pipe_experts import test_layer
from tests.plugins.pipe_experts.models import Case, device, expected, train
from tests.plugins.pipe_experts.test_gpu import wide
from tests.support.equality import compare

pytestmark = pytest.mark.gpu(2)

NCCL = {"backend": "nccl", "timeout": 120}
HOWS = {
    "none": MoEConfig("none"),
    "experts": MoEConfig("experts"),
    "chunks": MoEConfig("tokens", 3, delay_wgrad=False),
}


def symmetric(config: MoEConfig) -> MoEConfig:
    return dataclasses.replace(config, exchange="symmetric")


def trained(cases: list[Case]) -> list[Any]:
    """Return the records of training, by cases, and their numbers of all-to-alls over symmetric memory."""
    found = []
    for case in cases:
        before = COUNTERS.symmetric
        found.append((train(case), COUNTERS.symmetric - before))
    return found


def test_any_layer(ranks, gpus):
    cases = [
        dataclasses.replace(case, config=symmetric(how))
        for case in test_layer.CASES.values()
        for how in HOWS.values()
    ]
    right = [expected(case, gpus) for case in cases]
    for rank, results in enumerate(ranks(gpus)(trained, cases, **NCCL)):
        for case, wanted, (found, count) in zip(cases, right, results, strict=True):
            compare(wanted[rank], found, floor=1e-10).assert_equal()
            assert count, case


def differing(hows: list[MoEConfig]) -> list[str]:
    """Return the tensors that differ in a bit from the results of NCCL's all-to-alls."""
    found = []
    for how in hows:
        ours, theirs = wide(torch.bfloat16, symmetric(how)), wide(torch.bfloat16, how)
        found += [
            f"{how}: {name}" for name, value in theirs.items() if not torch.equal(ours[name], value)
        ]
    return (
        found
        if not all_to_all.list_unsupported_reasons()
        else all_to_all.list_unsupported_reasons()
    )


def test_all_bits_are_the_bits_of_nccl(ranks, gpus):
    hows = [
        MoEConfig("none"),
        MoEConfig("experts", 2),
        MoEConfig("experts"),
        MoEConfig("tokens", 3),
    ]
    assert ranks(gpus)(differing, hows, **NCCL) == [[]] * gpus


def repeated(config: MoEConfig, times: int) -> bool:
    first = wide(torch.bfloat16, symmetric(config))
    torch.manual_seed(dist.get_rank())
    for _ in range(times):
        again = wide(torch.bfloat16, symmetric(config), 0.002)
        if not all(torch.equal(first[name], value) for name, value in again.items()):
            return False
    return True


@pytest.mark.parametrize("how", HOWS)
def test_delays_change_nothing(ranks, how):
    assert ranks(2)(repeated, HOWS[how], 200, **NCCL) == [True, True]


def late(rounds: int) -> int:
    """Return the number of wrong values of rows sent there and back on two streams; ranks and streams are late.

    Counts are uneven, and some are zero; some widths are odd. Each value encodes its sender and receiver.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    common, chance = random.Random(7), random.Random(rank)
    transport = get_transport(dist.group.WORLD, device())
    assert transport is not None, all_to_all.list_unsupported_reasons()
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    torch.cuda.synchronize()
    for i in range(rounds):
        most = common.choice((3, 200, 6000))
        counts = [
            [common.choice((0, 1, common.randrange(most))) for _ in range(world)]
            for _ in range(world)
        ]
        width, dtype = common.choice(
            ((2048, torch.bfloat16), (7, torch.float32), (5, torch.int16), (3, torch.uint8))
        )
        sent, received = counts[rank], [of[rank] for of in counts]
        with torch.cuda.stream(streams[i % 2]):
            rows = torch.cat(
                [make_rows(rank, to, count, width, dtype) for to, count in enumerate(sent)]
            )
            right = torch.cat(
                [
                    make_rows(source, rank, count, width, dtype)
                    for source, count in enumerate(received)
                ]
            )
            found, back = torch.empty_like(right), torch.empty_like(rows)
            torch.cuda._sleep(chance.randrange(200_000))
            there = transport.start_transfer(found, rows, received, sent)
            time.sleep(chance.random() / 2000)
            there.wait()
            transport.start_transfer(back, found, sent, received).wait()
            wrong += (found != right).sum() + (back != rows).sum()
    torch.cuda.synchronize()
    return int(wrong)


def make_rows(source: int, to: int, count: int, width: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(count * width, device=device()).view(count, width)
    return (numbers * 7 + 31 * source + 17 * to).remainder(251).to(dtype)


def test_late_ranks_and_streams_change_nothing(ranks, gpus):
    assert ranks(gpus)(late, 600, **NCCL) == [0] * gpus


def unawaited() -> list[bool]:
    """Return whether memory keeps its values although rows that no rank waits for would have arrived in it before."""
    world, count = dist.get_world_size(), 4096
    transport, found = get_transport(dist.group.WORLD, device()), []
    assert transport is not None, all_to_all.list_unsupported_reasons()
    for _ in range(5):
        rows = torch.ones(world * count, 512, device=device())
        into = torch.empty_like(rows)
        torch.cuda._sleep(50_000_000)
        transport.start_transfer(into, rows, [count] * world, [count] * world)
        del into, rows
        newer = [torch.zeros(world * count, 512, device=device()) for _ in range(2)]
        torch.cuda.synchronize()
        found.append(not any(tensor.any() for tensor in newer))
    return found


def test_rows_that_no_rank_waits_for_overwrite_no_memory(ranks, gpus):
    assert ranks(gpus)(unawaited, **NCCL) == [[True] * 5] * gpus


def checkpointed(config: MoEConfig) -> list[Tensor]:
    """Run two layers, each on its own stream and computed again in the backward."""
    torch.manual_seed(dist.get_rank())
    world, dtype = dist.get_world_size(), torch.bfloat16
    layers = [
        ExpertParallelFFN(64, 96, 4 * world, config=config, device=device(), dtype=dtype)
        for _ in range(2)
    ]
    x = torch.randn(300, 64, device=device(), dtype=dtype, requires_grad=True)
    index = torch.rand(300, 4 * world, device=device()).topk(2).indices
    weights = torch.rand(300, 2, device=device(), dtype=dtype)
    current, outs = torch.cuda.current_stream(), []
    for layer in layers:
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            outs.append(checkpoint(layer, x, index, weights, use_reentrant=False))
        current.wait_stream(stream)
    sum(out.float().square().sum() for out in outs).backward()
    torch.cuda.synchronize()
    params = nn.ModuleList(layers).parameters()
    return [
        tensor.cpu()
        for tensor in (*(out.detach() for out in outs), x.grad, *(param.grad for param in params))
    ]


def both(config: MoEConfig) -> list[bool]:
    pairs = zip(checkpointed(symmetric(config)), checkpointed(config), strict=True)
    return [torch.equal(ours, theirs) for ours, theirs in pairs]


@pytest.mark.parametrize("how", HOWS)
def test_checkpoints_on_two_streams(ranks, gpus, how):
    for found in ranks(gpus)(both, HOWS[how], **NCCL):
        assert all(found)
