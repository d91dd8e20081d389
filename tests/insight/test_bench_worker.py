"""Measurements of a step by the worker: its operations, the batch it is fed, its time and memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ovpatch.insight.bench import analysis, bench_worker
from ovpatch.insight.bench.bench_worker import BatchCounter, FlopCount, measure_batch

# --- operations ---


def work(model, x):
    """A forward of which a part is computed again, attention, and the backward, in two dtypes."""
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)[:, None]
        attended = nn.functional.scaled_dot_product_attention(y, y, y)
    again = checkpoint(model, x, use_reentrant=False)
    (attended.float().sum() + again.sum()).backward()


@pytest.fixture(autouse=True)
def compiles_nothing(monkeypatch):
    """Hide graphs that earlier tests of this process compiled: the counter refuses scripts that compile."""
    counters = (
        sys.modules["torch._dynamo.utils"].counters if "torch._dynamo.utils" in sys.modules else {}
    )
    if "stats" in counters:
        monkeypatch.delitem(counters["stats"], "unique_graphs", raising=False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Conv1d(4, 4, 3))


def test_operations_are_those_that_torch_counts(model):
    x = torch.randn(2, 4, 16)
    with FlopCounterMode(display=False) as torchs:
        work(model, x)
    ours = FlopCount()
    ours.start_counting()
    work(model, x)
    ours.stop_counting()
    assert ours.reason == ""
    assert sum(ours.by_dtype.values()) == torchs.get_total_flops() > 0
    assert set(ours.by_dtype) == {"bfloat16", "float32"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_known_apart(reentrant):
    layer, ours, forward = nn.Linear(8, 16), FlopCount(), 2 * 8 * 16 * 5
    x = torch.randn(5, 8, requires_grad=True)
    ours.start_counting()
    checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=reentrant).sum().backward()
    # A backward with gradients on is no forward.
    torch.autograd.grad(layer(x).sum(), [x, layer.weight], create_graph=True)
    ours.stop_counting()
    assert ours.to_json() == {"by_dtype": {"float32": 7 * forward}, "again": forward, "reason": ""}


def counts(*gemm_counts):
    """Yield the count of each step, by its number of GEMMs of one size; None is a step that cannot be counted."""
    for gemms in gemm_counts:
        count = FlopCount()
        if gemms is not None:
            count.start_counting()
            for _ in range(gemms):
                torch.ones(2, 2) @ torch.ones(2, 2)
            count.stop_counting()
        yield count


@pytest.mark.parametrize("orders", [(1, 3), (3, 1), (None, 1), (1, None)])
def test_an_evaluation_in_one_of_two_steps_does_not_count(orders):
    assert bench_worker.choose_cheaper(list(counts(*orders))) == {
        "by_dtype": {"float32": 16},
        "again": 0,
        "reason": "",
    }
    assert (
        "a step has no matrix product that torch can count"
        in bench_worker.choose_cheaper(list(counts(None, 0)))["reason"]
    )


def test_a_formula_that_fails_harms_nobody(model, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("an unknown shape")

    monkeypatch.setitem(bench_worker.flop_registry, torch.ops.aten.addmm, broken)
    ours = FlopCount()
    ours.start_counting()
    nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()
    ours.stop_counting()
    assert ours.to_json() == {
        "by_dtype": {},
        "again": 0,
        "reason": "torch's formula failed: ValueError('an unknown shape')",
    }


def test_where_counting_could_harm_it_is_not_tried(monkeypatch):
    ours = FlopCount()
    with FlopCounterMode(display=False):
        ours.start_counting()
    assert "the script has its own dispatch mode" in ours.reason
    monkeypatch.setattr(bench_worker, "is_compiling", lambda: True)
    ours.start_counting()
    assert ours.reason == bench_worker.COMPILED
    ours.stop_counting()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_script_that_compiles_in_the_counted_step(monkeypatch):
    ours = FlopCount()
    ours.start_counting()
    nn.Linear(4, 4)(torch.randn(2, 4))
    monkeypatch.setattr(bench_worker, "is_compiling", lambda: True)
    ours.stop_counting()
    assert ours.to_json() == {"by_dtype": {}, "again": 0, "reason": bench_worker.COMPILED}


def test_a_step_in_backward_is_not_counted():
    ours, x = FlopCount(), torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: ours.start_counting())
    (x * 2).sum().backward()
    ours.stop_counting()
    assert "inside of backward" in ours.reason


def test_a_mode_that_the_script_put_on_top_is_left_alone():
    ours, theirs = FlopCount(), FlopCounterMode(display=False)
    ours.start_counting()
    ours_mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    with theirs:
        ours.stop_counting()
    ours_mode.__exit__(None, None, None)
    assert "changes dispatch modes" in ours.reason
    assert ours.to_json()["by_dtype"] == {}


def test_a_script_that_ends_before_it_is_counted():
    assert FlopCount().to_json() == {
        "by_dtype": {},
        "again": 0,
        "reason": "the script ended before a step was counted",
    }


def test_compiling_is_noticed(model):
    torch._dynamo.utils.counters.clear()
    assert not bench_worker.is_compiling()
    torch.compile(model, backend="eager")(torch.randn(2, 4, 16))
    assert bench_worker.is_compiling()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize(
    ("device", "by_dtype", "expected"),
    [
        ("NVIDIA H200", {"bfloat16": 99.0, "float32": 1.0}, 989.4e12),
        ("NVIDIA H100 80GB HBM3", {"float16": 1.0}, 989.4e12),
        ("NVIDIA H100 PCIe", {"bfloat16": 1.0}, 756e12),
        ("NVIDIA H200 NVL", {"bfloat16": 1.0}, 835e12),
        ("Tesla V100-PCIE-16GB", {"float16": 1.0}, 112e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {"bfloat16": 1.0}, "a part of a device"),
        ("NVIDIA A100-SXM4-80GB", {"bfloat16": 1.0}, 312e12),
        ("NVIDIA L40S", {"bfloat16": 1.0}, 362e12),
        ("NVIDIA L40", {"bfloat16": 1.0}, "is not known"),
        ("cpu", {"bfloat16": 1.0}, "is not known"),
        ("NVIDIA H200", {"bfloat16": 1.0, "float32": 1.0}, "is for bf16"),
        ("NVIDIA H200", {"float32": 1.0}, "mostly in float32"),
        ("NVIDIA H200", {}, "not counted"),
    ],
)
def test_peaks(device, by_dtype, expected):
    found, reason = analysis.find_peak(device, by_dtype)
    assert (
        found == expected if isinstance(expected, float) else (found is None and expected in reason)
    )


# --- what it is fed ---


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, input_ids, mask=None):
        return self.out(self.embedding(input_ids))


@pytest.fixture
def watched(monkeypatch):
    """Batches that see only models of this test."""
    before = {id(module) for module in bench_worker.find_outermost_modules()}
    everything = bench_worker.find_outermost_modules
    monkeypatch.setattr(
        bench_worker,
        "find_outermost_modules",
        lambda: [module for module in everything() if id(module) not in before],
    )
    batches = BatchCounter()
    yield batches
    batches.stop_counting()


def test_microbatches_add_up_and_evaluation_does_not_count(watched):
    model, loss = Classifier(), nn.CrossEntropyLoss()
    ids = torch.zeros(2, 7, dtype=torch.long)
    watched.start_counting()
    for _ in range(3):
        for _ in range(4):
            loss(model(ids).flatten(0, 1), torch.zeros(14, dtype=torch.long)).backward()
        with torch.no_grad():
            model(ids)
        watched.close_step()
    assert watched.to_json() == {
        "samples": 8.0,
        "tokens": 56.0,
        "calls": 4.0,
        "module": "Classifier",
    }


def test_recomputation_in_backward_does_not_count(watched):
    model = Classifier()
    watched.start_counting()
    checkpoint(model, torch.zeros(2, 7, dtype=torch.long), use_reentrant=False).sum().backward()
    watched.close_step()
    assert watched.to_json()["calls"] == 1.0


def test_of_several_models_the_first_that_is_called_counts(watched):
    embedding, head, frozen = (
        nn.Embedding(10, 4),
        nn.Linear(4, 3),
        nn.Linear(1, 1).requires_grad_(False),
    )
    watched.start_counting()
    for _ in range(2):
        frozen(torch.zeros(99, 1))
        head(embedding(torch.zeros(5, 6, dtype=torch.long)))
    watched.close_step()
    assert watched.to_json() == {
        "samples": 10.0,
        "tokens": 60.0,
        "calls": 2.0,
        "module": "Embedding",
    }


def test_a_container_that_is_never_called_is_looked_into(watched):
    both = nn.ModuleDict({"system": nn.ModuleList([Classifier()])})
    watched.start_counting()
    for _ in range(4):
        both["system"][0](input_ids=torch.zeros(3, 5, dtype=torch.long))
        watched.close_step()
    assert watched.to_json() == {
        "samples": 3.0,
        "tokens": 15.0,
        "calls": 1.0,
        "module": "Classifier",
    }


def test_nothing_is_left_on_the_model(watched):
    model = Classifier()
    watched.start_counting()
    assert model._forward_pre_hooks
    watched.stop_counting()
    assert not model._forward_pre_hooks
    model(torch.zeros(2, 7, dtype=torch.long))
    watched.close_step()
    assert watched.to_json() == {"samples": None, "tokens": None, "calls": 0.0, "module": ""}


def test_a_model_that_is_looked_at_can_be_copied_and_pickled(watched):
    model = Classifier()
    watched.start_counting()
    copied = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    copied(torch.zeros(2, 7, dtype=torch.long))
    pickle.loads(pickle.dumps(model))
    del copied
    gc.collect()


IDS = torch.zeros(4, 6, dtype=torch.int32)
PIXELS = torch.zeros(5, 3, 8, 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((IDS,), {}, (4, 24)),
        ((PIXELS, IDS), {}, (5, 0)),
        (({"pixels": PIXELS},), {}, (5, 0)),
        ((([PIXELS], 3),), {}, (5, 0)),
        ((), {"labels": torch.zeros(9), "input_ids": IDS}, (4, 24)),
        (({"mask": torch.zeros(9), "input_ids": IDS},), {}, (4, 24)),
        ((IDS.bool(),), {}, (4, 0)),
        ((IDS[0],), {}, (6, 0)),
        ((torch.tensor(1.0),), {}, (0, 0)),
        ((object(), "text"), {"n": 3}, (0, 0)),
    ],
)
def test_sizes(args, kwargs, expected):
    assert measure_batch(args, kwargs) == expected


# --- time and memory ---


def test_times_are_what_lies_between_marks(monkeypatch):
    ticks = iter([0, 5_000_000, 7_000_000])
    monkeypatch.setattr(bench_worker.time, "perf_counter_ns", lambda: next(ticks))
    clock = bench_worker.BorderClock(torch.device("cpu"), 2)
    for _ in range(3):
        clock.mark_border()
    assert (clock.read_times(), clock.read_host_times(), clock.clock_name) == (
        [5.0, 2.0],
        [5.0, 2.0],
        "host clock",
    )


def test_the_peak_of_a_process_covers_what_it_holds():
    cpu = torch.device("cpu")
    held = torch.ones(1 << 22)
    assert bench_worker.PeakMemory(cpu).read_peak()["resident"] > held.numel() * 4
    assert (bench_worker.get_device_name(cpu), bench_worker.read_clock_mhz(cpu)) == ("cpu", None)


class NVMLError_NotSupported(Exception):
    """As of pynvml: no RuntimeError."""


def test_a_device_that_does_not_tell_its_clock_fails_no_script(monkeypatch):
    def unsupported(device):
        raise NVMLError_NotSupported

    monkeypatch.setattr(torch.cuda, "clock_rate", unsupported)
    assert bench_worker.read_clock_mhz(torch.device("cuda", 0)) is None


class Event:
    """A replacement of torch.cuda.Event that can be read only after a wait for it."""

    made = 0

    def __init__(self, enable_timing):
        Event.made += 1
        self.time, self.done = Event.made, False

    def record(self, stream):
        pass

    def synchronize(self):
        self.done = True

    def elapsed_time(self, end):
        assert self.done, "another stream's work need not be done when the last event is"
        assert end.done
        return float(end.time - self.time)


def test_events_of_several_streams_are_all_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = bench_worker.BorderClock(torch.device("cuda", 0), 2)
    for _ in range(3):
        clock.mark_border()
    assert clock.read_times() == [1.0, 1.0]


@pytest.mark.gpu(1)
def test_a_device_is_timed_where_it_works():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(4096, 4096, device=device)
    memory, clock = bench_worker.PeakMemory(device), bench_worker.BorderClock(device, 2)
    clock.mark_border()
    for _ in range(50):
        x @ x
    clock.mark_border()
    clock.mark_border()
    long, short = clock.read_times()
    assert clock.clock_name == "device events"
    assert long > 10 * short
    assert memory.read_peak()["allocated"] >= 2 * x.numel() * 4
    assert bench_worker.choose_device(torch.device("cpu")) == device
