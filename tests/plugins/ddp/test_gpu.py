"""The same loops on GPUs over NCCL, and what only streams can get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ovpatch.overlap.comm.step_flags import PERIOD, StepFlags
from tests.plugins.ddp import test_failures, test_gradients_kept, test_loops
from tests.plugins.ddp.arms import Record, both, data, device, record_steps, seen
from tests.plugins.ddp.checks import same_bits

pytestmark = pytest.mark.gpu(2)

LOOPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (test_loops.loop_plain, {"early_optimizer": True, "clip": 0.1}),
    "bucket view": (
        test_loops.loop_plain,
        {"early_optimizer": False, "set_to_none": False, "ddp": {"gradient_as_bucket_view": True}},
    ),
    "small buckets": (test_loops.loop_plain, {"early_optimizer": False, "ddp": {"bucket_cap_mb": 0.001}}),
    "static graph": (test_loops.loop_plain, {"early_optimizer": False, "ddp": {"static_graph": True}}),
    "checkpoint": (test_loops.loop_plain, {"early_optimizer": False, "checkpointing": False}),
    "reentrant": (test_loops.loop_plain, {"early_optimizer": False, "checkpointing": True}),
    "no_sync": (test_loops.loop_accumulate, {"style": "no_sync"}),
    "unused": (test_loops.loop_unused, {"in_place": False, "per_rank": True, "set_to_none": True, "as_view": False}),
    "scaler": (test_loops.loop_amp, {"dtype": "float16", "scaler": True}),
    "ema": (test_loops.loop_ema_eval_save, {}),
    "kept": (test_gradients_kept.loop_keeps_last_gradients, {"how": "tensor"}),
    "own tensors": (test_gradients_kept.loop_own_gradient_tensors, {"flat": True}),
    "hooks": (test_gradients_kept.loop_user_hooks, {}),
    "odd": (test_gradients_kept.loop_odd, {"as_view": False}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_on_gpus(ranks, name):
    loop, kwargs = LOOPS[name]
    for result in same_bits(ranks(2)(both, loop, backend="nccl", **kwargs)):
        assert result["counters"]["backwards"] > 0
        assert result["counters"]["stock_models"] == 0


def test_training_goes_on_after_an_exception_on_gpus(ranks):
    results = ranks(2)(both, test_failures.failing_alike, {"bucket_cap_mb": 0.0001}, [0, 3], backend="nccl")
    test_failures.require(results, recovered=2)


def test_a_lost_backward_is_reported_on_gpus(ranks):
    texts = ranks(2)(test_failures.failing_alone, 2, 2 * PERIOD - 1, backend="nccl", timeout=60)
    assert f"ended the backward of a step from {PERIOD} to {2 * PERIOD - 1} on another rank" in texts[0]


def dropped_sum() -> int:
    """Drop sums that another rank joins late, and take memory of their size; return how much of it is changed."""
    place = torch.device("cuda", torch.cuda.current_device())
    flags = StepFlags(dist.group.WORLD, place, "ddp")
    dist.all_reduce(torch.zeros(1, device=place))
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        torch.cuda._sleep(1_000_000_000)
    for step in range(3):
        flags.start_all_reduce(step, failed=True)  # a sum that is larger than what there was, whatever there is
    del flags
    taken = [torch.full((1,), 7, dtype=torch.int32, device=place) for _ in range(5000)]  # all small blocks there are
    torch.cuda.synchronize()
    return int((torch.cat(taken) != 7).sum())


def test_a_sum_that_is_dropped_writes_to_no_other_memory(ranks):
    assert ranks(2)(dropped_sum, backend="nccl") == [0, 0]


class TwoStreams(nn.Module):
    """Half of the layers run on a stream of their own, so their gradients come from it, late."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(512, 512), nn.Linear(512, 512)
        self.head = nn.Linear(512, 8)

    def forward(self, x: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = x
            for _ in range(20):
                y = torch.tanh(self.side(y))
        a = self.main(x)
        torch.cuda.current_stream().wait_stream(stream)
        y.record_stream(torch.cuda.current_stream())
        return self.head(a + y)


def loop_two_streams() -> list[Record]:
    stream = torch.cuda.Stream()
    model = TwoStreams().to(device())
    wrapped = DDP(model)
    losses = (wrapped(data(step, 256, 512), stream).square().mean() for step in range(10))
    return record_steps(model, losses, torch.optim.SGD(wrapped.parameters(), 0.1))


def test_gradients_from_several_streams(ranks):
    for result in same_bits(ranks(2)(both, loop_two_streams, backend="nccl")):
        assert result["counters"]["backwards"] == 10


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


def loop_compiled(outside: bool, backend: str) -> list[Record]:
    torch._dynamo.reset()
    # Inductor times the configurations of a reduction, which add up in other orders; here it may take one of a kind.
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = MLP().to(device())
    wrapped = DDP(model) if outside else DDP(torch.compile(model, backend=backend))
    trained = torch.compile(wrapped, backend=backend) if outside else wrapped
    losses = (trained(data(step, 16, 64)).square().mean() for step in range(4))
    return record_steps(model, losses, torch.optim.AdamW(wrapped.parameters(), 1e-2))


@pytest.mark.parametrize("outside", [True, False])
def test_torch_compile_on_gpus(ranks, outside):
    for result in same_bits(ranks(2)(both, loop_compiled, outside, "inductor", backend="nccl", timeout=240)):
        assert result["counters"]["backwards"] == 4


def loop_memory_of_another_stream(hooks: bool, wrap: Any = DDP) -> list[Record]:
    """Train with forwards on a stream of their own, which takes memory again as soon as the host has ended a backward.

    Rank 1 is late, so rank 0's device has not begun to reduce by then. One gradient does not divide by the ranks.
    """
    torch.manual_seed(1)
    raw = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 1025), nn.Linear(1025, 1023)).to(device())
    model = wrap(raw, bucket_cap_mb=5)
    optimizer = torch.optim.SGD(raw.parameters(), 0.1)
    if hooks:  # then gradients are copied before they are reduced
        for param in raw.parameters():
            param.register_hook(lambda grad: grad * 1)
    forwards, records = torch.cuda.Stream(), []
    for step in range(8):
        forwards.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(forwards):
            loss = model(data(step, 4, 512)).square().mean()
            if dist.get_rank() == 1:
                torch.cuda._sleep(100_000_000)
        torch.cuda.current_stream().wait_stream(forwards)
        loss.backward()
        with torch.cuda.stream(forwards):
            other = [torch.full((1025, 1023), torch.nan, device=device()) for _ in range(12)]
        del other
        optimizer.step()
        optimizer.zero_grad()
        records.append({"loss": loss.detach().clone()})
    return [*records, {"param": seen(raw)["param"]}]


@pytest.mark.parametrize("hooks", [False, True])
def test_memory_is_not_given_back_before_it_was_read(ranks, hooks):
    for result in same_bits(ranks(2)(both, loop_memory_of_another_stream, hooks, backend="nccl")):
        assert result["counters"]["backwards"] > 0
