"""Records of a training loop, in this process: events, values, and that nothing is disturbed."""

from __future__ import annotations

import inspect
import io
import multiprocessing
import os
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ovpatch.insight.steps import StepCounter
from ovpatch.insight.verify import noise_runs, recording
from ovpatch.insight.verify.probes import ScriptRecorder
from ovpatch.insight.verify.recording import EventRecorder
from ovpatch.patching import PatchManager


@pytest.fixture
def watched(tmp_path):
    """Call a function while it is watched; returns the events."""

    def watched(train):
        recorder = EventRecorder(tmp_path)
        steps = StepCounter(tmp_path, lambda number: recorder.flush_events())
        watch = ScriptRecorder(recorder, steps)
        watch.start_recording()
        steps.start_counting()
        try:
            train()
        finally:
            steps.stop_counting()
            watch.patches.revert()
        recorder.flush_events()
        (process,) = recording.read_recorded(tmp_path).processes
        return list(recording.read_recorded(tmp_path).events(process))

    return watched


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def loss_of(net):
    return net(torch.randn(5, 4)).square().mean()


def test_two_optimizers_that_take_turns(watched):
    def train():
        nets = [model(), model()]
        optimizers = [
            torch.optim.SGD(nets[0].parameters(), lr=0.1),
            torch.optim.AdamW(nets[1].parameters()),
        ]
        for turn in range(4):
            for net, optimizer in zip(nets, optimizers, strict=True):
                if turn % 2 == 0 or net is nets[0]:
                    loss_of(net).backward()
                    optimizer.step()

    events = watched(train)
    steps = [
        (event.index, event.label, event.step) for event in events if event.event_type == "step"
    ]
    sgd, adam = (0, "SGD"), (1, "AdamW")
    assert steps == [(*sgd, 1), (*adam, 1), (*sgd, 2), (*sgd, 3), (*adam, 3), (*sgd, 4)]
    assert {"parameter optimizer1:0.weight", "state optimizer1:0.weight.exp_avg"} <= set(
        events[3].values
    )


class Own(torch.optim.SGD):
    """Its ``step()`` and that of its base both have torch's hooks, once there is an SGD."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ValueError("no step")
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        loss = super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].clamp_(max=0.1)
        return loss


def test_a_step_that_raises_is_none_and_leaves_no_gradients_to_the_next(watched):
    net = model()
    own = Own(net.parameters(), lr=0.1)

    def closure():
        own.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    def train():
        closure()
        own.fails = True
        with pytest.raises(ValueError, match="no step"):
            own.step()
        own.fails = False
        own.step(closure)

    (step,) = (event for event in watched(train) if event.event_type == "step")
    assert (step.label, step.step) == ("Own", 1)
    assert torch.equal(step.values["gradient 0.weight"].values, net[0].weight.grad)


def test_every_value_of_a_step(watched):
    """Gradients are those that the step was handed: it halves them."""
    net = model()
    optimizer = Own(net.parameters(), lr=0.1, momentum=0.9)
    handed = []

    def train():
        loss_of(net).backward()
        handed.extend(p.grad.clone() for p in net.parameters())
        optimizer.step()
        torch.save({"net": net.state_dict()}, "/dev/null")

    events = watched(train)
    shape = [(event.event_type, event.index, event.step) for event in events]
    assert shape == [("backward", 0, 1), ("step", 0, 1), ("checkpoint", 0, 1)]
    values = events[1].values
    assert {name.partition(" ")[0] for name in values} == {
        "norm", "gradient", "parameter", "state", "option", "buffer", "random.python", "random.torch", "random.numpy"
    }  # fmt: skip
    assert torch.equal(values["gradient 0.weight"].values, handed[0])
    assert torch.equal(values["parameter 0.weight"].values, net[0].weight)
    assert torch.equal(values["state 0.weight.momentum_buffer"].values, net[0].weight.grad)
    assert torch.equal(values["buffer 1.running_mean"].values, net[1].running_mean)
    norm = torch.cat([grad.flatten() for grad in handed]).double().norm()
    assert values["norm of gradients"].values == pytest.approx(norm.item(), rel=1e-12)
    assert torch.equal(events[2].values["saved net.0.weight"].values, net[0].weight)


def halving(original):
    """Store every tensor in half its bits."""
    return lambda tensors, *args: original(
        {name: value.half() for name, value in tensors.items()}, *args
    )


def list_forms(event):
    """Return the strings of an event, and the forms of its tensors."""
    found = {
        name: kept.digest if kept.form == "text" else kept.form
        for name, kept in event.values.items()
    }
    return {name.removeprefix("saved "): what for name, what in found.items()}


def test_a_checkpoint_is_read_back_from_its_file(watched, monkeypatch, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setattr(safetensors, "save_file", halving(safetensors.save_file))
    saved = {"w": torch.ones(2, 3)}

    def train():
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "_save", halving_save(torch.serialization._save))
            torch.save(saved, tmp_path / "model.pt")
        safetensors.save_file(saved, tmp_path / "model.safetensors")
        torch.save(saved, tmp_path / "older.pt", _use_new_zipfile_serialization=False)

    pt, safe, older = watched(train)
    assert list_forms(older) == {"(the object that was read)": "the file", "w": "float32 [2, 3]"}
    assert [event.values["saved w"].values.tolist() for event in (pt, safe, older)] == [
        saved["w"].tolist()
    ] * 3
    assert list_forms(pt) == {"(the object that was read)": "the file", "w": "float16 [2, 3]"}
    assert list_forms(safe) == {"(the object that was read)": "the file", "w": "float16 [2, 3]"}


def halving_save(original):
    return lambda obj, *args: (
        halving(original)(obj, *args) if isinstance(obj, dict) else original(obj, *args)
    )


class Broken(nn.Module):
    def state_dict(self, *args, **kwargs):
        raise RuntimeError("not now")


def test_what_cannot_be_read_back_is_looked_at_as_it_is_handed_over(watched, tmp_path):
    def train():
        torch.save({"own": Broken}, tmp_path / "own.pt")
        torch.save([1], io.BytesIO())
        torch.save([round_trip], tmp_path / "round.pt")
        torch.save(Broken(), io.BytesIO())

    round_trip: list[object] = []
    round_trip.append(round_trip)
    own, buffer, looped, broken = (list_forms(event) for event in watched(train))
    assert own == {"(the object that was read)": "what was handed over", "own": "type"}
    assert buffer == {"(the object that was read)": "what was handed over", "0": "int"}
    assert looped["0.0"] == "list"
    assert broken == {"(the object that was read)": "nothing: RuntimeError"}


def test_a_checkpoint_is_recorded_even_if_the_script_leaves_at_once(tmp_path):
    recorder = EventRecorder(tmp_path)
    watch = ScriptRecorder(recorder, StepCounter(tmp_path, lambda number: None))
    watch.start_recording()
    torch.save([1], io.BytesIO())
    watch.patches.revert()  # nothing else is written from here on
    assert [event.event_type for event in recording.read_recorded(tmp_path).events("rank 0")] == [
        "checkpoint"
    ]


def test_a_process_keeps_its_rank_and_its_order_when_its_group_is_gone(tmp_path, monkeypatch):
    recorder = EventRecorder(tmp_path)
    # The last event comes after destroy_process_group(), where RANK is not set.
    for step, rank in enumerate((3, 3, 0), 1):
        monkeypatch.setattr(recording.steps, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda rank=rank: rank == 3)
        recorder.record_event(recording.STEP, {}, step=step)
        recorder.flush_events()
    run = recording.read_recorded(tmp_path)
    assert list(run.processes) == ["rank 3"]
    assert [event.step for event in run.events("rank 3")] == [1, 2, 3]


def test_events_from_before_a_process_had_its_rank_come_first(tmp_path, monkeypatch):
    recorder = EventRecorder(tmp_path)
    for step, rank in enumerate((7, 3), 1):
        monkeypatch.setattr(recorder, "_know_rank", lambda rank=rank: rank)
        recorder.record_event(recording.STEP, {}, step=step)
        recorder.flush_events()
    assert [event.step for event in recording.read_recorded(tmp_path).events("rank 3")] == [1, 2]


def test_children_are_told_apart_by_their_number_not_by_their_birth(tmp_path, monkeypatch):
    for number in (10, 2):
        monkeypatch.setattr(multiprocessing.process.current_process(), "_identity", (number,))
        recorder = EventRecorder(tmp_path)
        recorder.record_event(recording.STEP, {}, step=number)
        recorder.flush_events()
    run = recording.read_recorded(tmp_path)
    found = {name: [event.step for event in run.events(name)] for name in run.processes}
    assert found == {"rank 0": [2], "rank 0, process 2": [10]}


def test_a_closure_makes_the_gradients_that_its_step_uses(watched):
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    events = watched(lambda: optimizer.step(closure))
    assert [event.event_type for event in events][-1] == "step"
    assert {event.event_type for event in events[:-1]} == {"backward"}
    assert torch.equal(events[-1].values["gradient 0.weight"].values, net[0].weight.grad)
    assert "state 0.weight.prev_flat_grad" in events[-1].values


def test_a_skipped_step_leaves_its_loss_scale_and_no_step(watched):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(loss_of(net) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.amp.GradScaler("cpu", enabled=False).update()

    events = watched(train)
    assert [event.event_type for event in events] == [
        "backward", "step", "scale", "backward", "scale", "backward", "step", "scale",
    ]  # fmt: skip
    assert [
        event.values["loss scale"].values for event in events if event.event_type == "scale"
    ] == [
        4.0,
        2.0,
        2.0,
    ]
    assert [event.step for event in events if event.event_type == "backward"] == [1, 2, 2]


def test_backwards_inside_a_backward_and_of_several_tensors(watched):
    def train():
        x = torch.ones(3, 4, requires_grad=True)
        net = nn.Linear(4, 4)
        torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True).sum().backward()
        torch.autograd.backward([net(x).sum(), net(x).mean()])

    events = watched(train)
    assert [list(event.values) for event in events] == [["loss"], ["loss 0", "loss 1"]]


def test_watching_changes_no_bit(watched):
    def run(results):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        net = model()
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.dropout(loss_of(net)).backward()
            optimizer.step()
        results.append([p.detach() for p in net.parameters()] + [torch.rand(3)])
        results[-1] += [torch.tensor([random.random(), numpy.random.rand()])]

    results: list[list[torch.Tensor]] = []
    run(results)
    watched(lambda: run(results))
    for plain, seen in zip(*results, strict=True):
        assert torch.equal(plain, seen)


def test_a_compiled_model_is_the_same_when_watched(watched):
    net = model()
    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def train():
        compiled = torch.compile(net, backend=backend)
        for _ in range(2):
            loss = compiled(torch.ones(5, 4)).sum()
            loss.backward()

    signature = inspect.signature(torch.autograd.backward)
    watched(train)
    assert len(graphs) == 1
    assert inspect.signature(torch.autograd.backward) == signature


def test_events_are_written_whole_and_by_the_process_that_they_belong_to(tmp_path):
    recorder = EventRecorder(tmp_path)
    recorder.flush_events()
    assert list(tmp_path.iterdir()) == []
    recorder.record_event(recording.BACKWARD, {}, step=1)
    recorder.flush_events()
    assert [path.suffix for path in tmp_path.iterdir()] == [".pt"]


def test_the_generators_start_from_a_number_of_the_rank(monkeypatch):
    def state(rank):
        monkeypatch.setenv("RANK", rank)
        noise_runs.seed_generators()
        return {name: kept.digest for name, kept in noise_runs.digest_generators().items()}

    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)  # it could not be taken back
    kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    first, second, again = state("0"), state("1"), state("0")
    random.setstate(kept[0])
    numpy.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
    assert first == again
    assert all(
        first[name] != second[name] for name in ("random.python", "random.torch", "random.numpy")
    )


# --- the reordered variant ---


def buckets(bucket_cap_mb=None):
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb)
    wrapped(torch.ones(1, 64)).sum().backward()
    data = wrapped._get_ddp_logging_data()
    return data["bucket_sizes"], data["bucket_cap_bytes"]


def stock_and_reordered(function, *args, turns=(1,)):
    found = [function(*args)]
    for turn in turns:
        patches = PatchManager()
        noise_runs.reorder_reductions(patches, turn)
        with patches.applied():
            found.append(function(*args))
    return found


def test_the_reordered_variants_have_other_buckets_from_the_first_backward_on(ranks):
    (stock, reordered, again), _ = ranks(2)(stock_and_reordered, buckets, turns=(1, 2))
    assert len(stock[0].split(",")) == 1
    assert len(reordered[0].split(",")) >= 3
    assert 0 < again[1] < reordered[1] < stock[1]
    (stock, reordered, again), _ = ranks(2)(stock_and_reordered, buckets, 0.01, turns=(1, 2))
    assert 0 < again[1] < reordered[1] < stock[1]


def compiled_buckets():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph

    net = nn.Sequential(
        *(nn.Linear(600, 600) for _ in range(4))
    )  # DDPOptimizer's first bucket has 1 MiB
    wrapped = DistributedDataParallel(torch.compile(net, backend=backend))
    for _ in range(2):
        wrapped(torch.ones(1, 600)).sum().backward()
    sizes = wrapped._get_ddp_logging_data()["bucket_sizes"]
    return sizes, graphs, wrapped.bucket_bytes_cap


def test_compiled_models_are_reordered_and_their_graphs_are_cut_as_under_stock(ranks):
    """Dynamo's DDPOptimizer cuts graphs by the wrapper's bucket size, and refuses one below 1 MiB."""
    for stock, reordered in ranks(2)(stock_and_reordered, compiled_buckets):
        (sizes, graphs, cap), (other_sizes, other_graphs, other_cap) = stock, reordered
        assert len(graphs) == 2
        assert (other_graphs, other_cap) == (graphs, cap)
        assert sizes != other_sizes


def buckets_of_a_list():
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    wrapped = DistributedDataParallel(net, bucket_cap_mb_list=[0.05, 0.1])
    # The reducer rebuilds its buckets after the first step.
    for _ in range(3):
        wrapped(torch.ones(1, 64)).sum().backward()
    return wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"], wrapped.bucket_bytes_cap


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters,
    reason="torch 2.13 has it first",
)
def test_a_list_of_bucket_sizes_is_reordered_too(ranks):
    (stock, reordered), _ = ranks(2)(stock_and_reordered, buckets_of_a_list)
    assert len(stock[0].split(",")) < len(reordered[0].split(","))
    assert stock[1] == reordered[1]


def norm(*args):
    # Looked up at each call, because the patch rebinds the name.
    return torch.nn.utils.get_total_norm(*args)


def test_the_reordered_variant_has_norms_that_are_rounded_otherwise():
    torch.manual_seed(0)
    gradients = [torch.randn(37, 41) for _ in range(20)]
    stock, reordered = stock_and_reordered(norm, gradients)
    torch.testing.assert_close(reordered, stock)
    assert reordered != stock
    stock, reordered = stock_and_reordered(norm, gradients, float("inf"))
    assert reordered == stock


def test_what_is_frozen_is_watched_too(watched):
    def train():
        net = model()
        net[0].weight.requires_grad_(False)
        sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            loss_of(net).backward()
            sgd.step()
            net[0].weight.data.mul_(2)

    steps = [event for event in watched(train) if event.event_type == recording.STEP]
    first, second = (event.values["frozen 0.weight"].values for event in steps)
    assert torch.equal(second, first * 2)
    assert not [
        name
        for event in steps
        for name in event.values
        if name.startswith("frozen") and "weight" not in name
    ]
