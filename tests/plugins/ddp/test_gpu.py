"""The same loops on GPUs over NCCL, and loops whose errors only streams can cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ovpatch.overlap.comm.step_flags import PERIOD_STEPS, StepFlags
from tests.plugins.ddp import test_failures, test_gradients_kept, test_loops
from tests.plugins.ddp.arms import Record, both, data, device, record_steps, seen
from tests.plugins.ddp.checks import same_bits
from tests.support.equality import compare
from tests.support.worker import fresh_store

pytestmark = pytest.mark.gpu(2)

LOOPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (test_loops.loop_plain, {"early_optimizer": True, "clip": 0.1}),
    "bucket view": (
        test_loops.loop_plain,
        {"early_optimizer": False, "set_to_none": False, "ddp": {"gradient_as_bucket_view": True}},
    ),
    "small buckets": (
        test_loops.loop_plain,
        {"early_optimizer": False, "ddp": {"bucket_cap_mb": 0.001}},
    ),
    "static graph": (
        test_loops.loop_plain,
        {"early_optimizer": False, "ddp": {"static_graph": True}},
    ),
    "checkpoint": (test_loops.loop_plain, {"early_optimizer": False, "checkpointing": False}),
    "reentrant": (test_loops.loop_plain, {"early_optimizer": False, "checkpointing": True}),
    "no_sync": (test_loops.loop_accumulate, {"style": "no_sync"}),
    "unused": (
        test_loops.loop_unused,
        {"in_place": False, "per_rank": True, "set_to_none": True, "as_view": False},
    ),
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


def test_training_continues_after_an_exception_on_gpus(ranks):
    results = ranks(2)(
        both, test_failures.failing_on_all_ranks, {"bucket_cap_mb": 0.0001}, [0, 3], backend="nccl"
    )
    test_failures.require(results, recovered=2)


def test_a_lost_backward_is_reported_on_gpus(ranks):
    texts = ranks(2)(
        test_failures.failing_alone, 2, 2 * PERIOD_STEPS - 1, backend="nccl", timeout=60
    )
    assert (
        f"ended the backward of a step from {PERIOD_STEPS} to {2 * PERIOD_STEPS - 1} on another "
        "rank" in texts[0]
    )


def dropped_sum() -> int:
    """Drop sums that a peer joins late, and allocate memory of their size; return the number of changed elements."""
    place = torch.device("cuda", torch.cuda.current_device())
    flags = StepFlags(dist.group.WORLD, place, "ddp")
    dist.all_reduce(torch.zeros(1, device=place))
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        torch.cuda._sleep(1_000_000_000)
    for step in range(3):
        # The sum of failures differs from any value in the memory before.
        flags.start_all_reduce(step, failed=True)
    del flags
    # This allocates all small blocks that the allocator has.
    taken = [torch.full((1,), 7, dtype=torch.int32, device=place) for _ in range(5000)]
    torch.cuda.synchronize()
    return int((torch.cat(taken) != 7).sum())


def test_a_sum_that_is_dropped_writes_to_no_other_memory(ranks):
    assert ranks(2)(dropped_sum, backend="nccl") == [0, 0]


class TwoStreams(nn.Module):
    """A model in which half of the layers run on their own stream, from which their gradients come late."""

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
    # Inductor times configurations of a reduction that add in different orders. Both arms must use the same one.
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = MLP().to(device())
    wrapped = DDP(model) if outside else DDP(torch.compile(model, backend=backend))
    trained = torch.compile(wrapped, backend=backend) if outside else wrapped
    losses = (trained(data(step, 16, 64)).square().mean() for step in range(4))
    return record_steps(model, losses, torch.optim.AdamW(wrapped.parameters(), 1e-2))


@pytest.mark.parametrize("outside", [True, False])
def test_torch_compile_on_gpus(ranks, outside):
    for result in same_bits(
        ranks(2)(both, loop_compiled, outside, "inductor", backend="nccl", timeout=240)
    ):
        assert result["counters"]["backwards"] == 4


def loop_memory_of_another_stream(hooks: bool, wrap: Any = DDP) -> list[Record]:
    """Train with forwards on their own stream, which allocates memory as soon as the host has finished a backward.

    Rank 1 is late, so the device of rank 0 has not started to reduce by then. The size of one gradient is no multiple
    of the number of ranks.
    """
    torch.manual_seed(1)
    raw = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 1025), nn.Linear(1025, 1023)).to(
        device()
    )
    model = wrap(raw, bucket_cap_mb=5)
    optimizer = torch.optim.SGD(raw.parameters(), 0.1)
    # With hooks, gradients are copied before they are reduced.
    if hooks:
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
            overwritten = [torch.full((1025, 1023), torch.nan, device=device()) for _ in range(12)]
        del overwritten
        optimizer.step()
        optimizer.zero_grad()
        records.append({"loss": loss.detach().clone()})
    return [*records, {"param": seen(raw)["param"]}]


@pytest.mark.parametrize("hooks", [False, True])
def test_memory_is_not_released_before_it_was_read(ranks, hooks):
    for result in same_bits(ranks(2)(both, loop_memory_of_another_stream, hooks, backend="nccl")):
        assert result["counters"]["backwards"] > 0


# --- features of NCCL and CUDA: SM budgets, averages in the collective, CUDA graphs, models over several devices ---


class Mixed(nn.Module):
    """Large weights, whose gradients are reduced in place, and small ones, whose gradients use a flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(640, 640) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(640), nn.Linear(640, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(self.norm(x))


def loop_mixed(
    *, dtype: torch.dtype = torch.float32, accumulate: int = 1, **ddp: Any
) -> list[Record]:
    model = Mixed().to(device(), dtype)
    wrapped = DDP(model, **ddp)
    # The eps of AdamW is zero in float16.
    cls = torch.optim.SGD if dtype is torch.float16 else torch.optim.AdamW
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
def test_every_option_gives_the_bits_of_stock_pytorch(ranks, options, dtype):
    for result in ranks(2)(both, loop_mixed, backend="nccl", dtype=dtype, options=options):
        # NCCL rounds an average in fp16 differently.
        if dtype is torch.float16 and options.get("average_in_collective"):
            compare(result["stock"], result["patched"], floor=1e-4).assert_equal()
        else:
            compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["backwards"] == 6
        assert result["counters"]["stock_models"] == 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "ddp", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str
)
def test_gradients_reduced_in_place_and_through_a_flat_tensor(ranks, accumulate, ddp):
    for result in same_bits(
        ranks(2)(both, loop_mixed, backend="nccl", accumulate=accumulate, **ddp)
    ):
        assert result["counters"]["backwards"] == 6


def loop_fp32() -> list[Record]:
    """Compute averaged gradients in bf16, and averages by hand of the local gradients in fp32."""
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
    return [
        {
            "averaged": averaged,
            "by hand": {name: p.grad.clone() for name, p in model.named_parameters()},
        }
    ]


@pytest.mark.gpu(4)
def test_low_precision_gradients_are_averaged_in_fp32(ranks):
    results = ranks(4)(both, loop_fp32, backend="nccl", options={"grad_reduce_in_fp32": True})
    for result in results:
        patched, stock = result["patched"][0], result["stock"][0]
        compare(patched["by hand"], patched["averaged"]).assert_bitwise()
        differ = [
            not torch.equal(stock["averaged"][name], stock["by hand"][name])
            for name in stock["by hand"]
        ]
        assert any(differ), "with this data, bf16 and fp32 give the same averages"


def loop_graphed() -> list[Record]:
    """Capture forward, backward and optimizer step in one CUDA graph, as in torch's notes on CUDA graphs."""
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
    # Eager steps on the same model follow.
    for step in range(20, 23):
        optimizer.zero_grad()
        loss = wrapped(data(step, 32, 640)).square().mean()
        loss.backward()
        optimizer.step()
        records.append(seen(model, loss))
    del graph
    return records


def test_a_full_step_in_a_cuda_graph(ranks):
    for result in same_bits(ranks(2)(both, loop_graphed, backend="nccl", timeout=120)):
        assert result["counters"]["backwards"] == 12 + 1 + 3


class Split(nn.Module):
    """A model with two halves, on two devices of one process."""

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
    losses = (wrapped(data(step, 32, 640)).square().mean() for step in range(6))
    return record_steps(model, losses, torch.optim.AdamW(wrapped.parameters(), 1e-3))


def split_case(**ddp: Any) -> dict[str, Any]:
    """Run both arms in a process group that is not bound to one device per rank, as the group of the pool is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=fresh_store("unbound"), rank=rank, world_size=world)
    return both(loop_split, **ddp)


@pytest.mark.gpu(4, own=True)
@pytest.mark.parametrize(
    "ddp", [{}, {"bucket_cap_mb": 1}, {"find_unused_parameters": True}], ids=str
)
def test_a_model_on_two_devices(ranks, ddp):
    for result in ranks(2)(split_case, backend="nccl", **ddp):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["counters"]["backwards"] == 6
        assert result["counters"]["stock_models"] == 0


def loop_twice_through_one_forward() -> list[Record]:
    model = Mixed().to(device())
    wrapped = DDP(model)
    records: list[Record] = []
    for step in range(4):
        loss = wrapped(data(step, 32, 640)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        records.append(seen(model, loss))
        wrapped.zero_grad(set_to_none=bool(step % 2))
    return records


def test_a_second_backward_through_one_forward(ranks):
    for result in same_bits(ranks(2)(both, loop_twice_through_one_forward, backend="nccl")):
        assert result["counters"]["backwards"] == 4
