"""Streams on which parameters are read after another stream has waited for them, with a fake CUDA and on GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ovpatch.overlap.comm import streams as module
from ovpatch.overlap.comm.streams import (
    SideStreams,
    record_numbered_switches,
    record_streams,
    record_switches,
    side_streams,
    unwatched_stream,
)
from ovpatch.overlap.tensors.pending_param import is_pending
from ovpatch_plugins.dist_optimizer.param_all_gather import AllGatherBucket
from tests.overlap.stale import entrances
from tests.overlap.test_gathering import group, overwrite_shards_of_peers


class Stream(SimpleNamespace):
    """A fake stream that records its waits."""

    def __init__(self, number: int, device: int = 0) -> None:
        super().__init__(
            stream_id=number, device_index=device, device=torch.device("cuda", device), waited=[]
        )

    def __eq__(self, other: object) -> bool:
        return self is other

    def record_event(self) -> Work:
        return Work(f"event of {self.stream_id}")


class Work:
    """A fake work whose wait is recorded by the current stream."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self) -> None:
        torch.cuda.current_stream().waited.append(self.name)


class Cuda:
    """The functions of ``torch.cuda`` that the runtime calls, for one device."""

    def __init__(self) -> None:
        self.default = Stream(0)
        self._local = threading.local()
        self.capturing: list[Stream] = []

    def current_stream(self, _device: Any = None) -> Stream:
        return getattr(self._local, "stream", self.default)

    def default_stream(self, _device: Any = None) -> Stream:
        return self.default

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream() in self.capturing

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        yield
        self.set_stream(before)

    def set_stream(self, stream: Stream) -> None:
        self._local.stream = stream
        module.side_streams.record_switch(0)


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda()
    for name in ("current_stream", "default_stream", "is_current_stream_capturing", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentRawStream",
        lambda _: cuda.current_stream().stream_id,
        raising=False,
    )
    streams = SideStreams()
    monkeypatch.setattr(module, "side_streams", streams)
    monkeypatch.setattr("ovpatch_plugins.dist_optimizer.param_all_gather.side_streams", streams)
    return cuda


class Group:
    """A fake process group without collectives."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def _get_backend(self, _device: Any) -> Any:
        return SimpleNamespace(name=lambda: "nccl")


def launched(stream: Stream, *names: str, padded: bool = False) -> AllGatherBucket:
    """Return a gather in flight."""
    gather = AllGatherBucket([nn.Parameter(torch.zeros(4))], Group())
    gather._stream, gather._works = stream, [Work(name) for name in names]
    gather._copies = [(torch.zeros(3), torch.zeros(3))] if padded else []
    return gather


def in_a_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_launch_and_reader_wait(cuda):
    reader, step = Stream(3), Stream(4)
    with cuda.stream(reader):
        launched(step, "a", "b").finish_all_gather()
    assert reader.waited == step.waited == ["a", "b"]
    assert cuda.default.waited == ["a", "b"], (
        "a thread that has set no stream reads on the default stream"
    )


def test_on_the_default_stream_no_other_stream_waits(cuda):
    gather = launched(cuda.default, "a")
    gather.finish_all_gather()
    gather.finish_all_gather()
    assert cuda.default.waited == ["a"]


def test_a_stream_that_becomes_current_later_waits_once(cuda):
    gather, reader = launched(cuda.default, "a"), Stream(3)
    gather.finish_all_gather()
    for _ in range(2):
        with cuda.stream(reader):
            assert reader.waited == ["a"]
    assert cuda.default.waited == ["a"]
    gather._works = [Work("b")]
    side = module.side_streams
    side.remove_transfer(gather, 0)
    gather._finished = None
    with cuda.stream(reader):
        assert reader.waited == ["a"], (
            "the gather is in flight again, and its readers wait themselves"
        )
    gather.finish_all_gather()
    with cuda.stream(reader):
        assert reader.waited == ["a", "b"]


def test_unwatched_streams_do_not_wait(cuda):
    gather, ours, theirs = launched(cuda.default, "a"), Stream(3), Stream(4)
    gather.finish_all_gather()
    with unwatched_stream(ours), unwatched_stream(ours):
        assert cuda.current_stream() is ours
    with cuda.stream(theirs):
        assert theirs.waited == ["a"]
    assert ours.waited == []


def test_no_stream_waits_for_a_freed_gather(cuda):
    gather, reader = launched(cuda.default, "a"), Stream(3)
    gather.finish_all_gather()
    del gather
    with cuda.stream(reader):
        assert reader.waited == []


def test_a_stream_that_is_current_in_another_thread_waits(cuda):
    reader, entered, go = Stream(3), threading.Event(), threading.Event()

    def read() -> None:
        with cuda.stream(reader):
            entered.set()
            go.wait(60)

    thread = in_a_thread(read)
    entered.wait(60)
    launched(cuda.default, "a").finish_all_gather()
    assert reader.waited == ["a"]
    go.set()
    thread.join(60)
    launched(cuda.default, "b").finish_all_gather()
    assert reader.waited == ["a"], "no thread reads on this stream now"


def test_streams_wait_for_copies_out_of_padded_memory_by_an_event_after_them(cuda):
    step, reader = Stream(4), Stream(3)
    gather = launched(step, "a", padded=True)
    gather.finish_all_gather()
    with cuda.stream(reader):
        assert reader.waited == ["event of 4"]
    assert step.waited == ["a"]


def test_a_stream_that_captures_does_not_wait(cuda):
    gather, reader = launched(cuda.default, "a"), Stream(3)
    gather.finish_all_gather()
    cuda.capturing.append(reader)
    with cuda.stream(reader):
        assert reader.waited == []
    cuda.capturing.clear()
    with cuda.stream(reader):
        assert reader.waited == ["a"]


def test_functions_that_switch_streams_record_it(cuda, monkeypatch):
    switches: list[int] = []
    monkeypatch.setattr(module.side_streams, "record_switch", switches.append)
    by_numbers = record_numbered_switches(lambda *args, **kwargs: None)
    by_numbers(stream_id=3, device_index=0, device_type=1)
    by_numbers(3, 1, 1)
    by_stream = record_switches(lambda stream, *args: stream)
    assert by_stream(stream := Stream(3, 2)) is stream
    by_stream(SimpleNamespace(device=torch.device("cpu")))
    assert switches == [0, 1, 2]
    assert module.side_streams.is_watched


def test_memory_is_recorded_on_streams_only_if_side_streams_were_used(cuda):
    recorded: list[Any] = []

    class Recorder(torch.Tensor):
        def record_stream(self, stream: Any) -> None:
            recorded.append(stream)

    device = torch.device("cuda", 0)
    assert not side_streams.is_used(torch.device("cpu"))
    module.side_streams.is_watched = True
    assert not module.side_streams.is_used(device)
    record_streams([torch.zeros(2)], device)
    with cuda.stream(Stream(3)):
        pass
    assert module.side_streams.is_used(device)
    plain = torch.zeros(2).as_subclass(Recorder)
    record_streams([None, plain], device)
    assert recorded == [], "a tensor of another class has no memory"


# --- on GPUs ---


# In cycles, some tenths of a second.
SLEEP = 400_000_000


def read_elsewhere(how: str) -> list[bool]:
    """Read parameters on another stream, which is ordered after the step, once the stream of the step has waited."""
    # The second size is no multiple of the number of ranks, so this parameter is copied out of padded memory.
    sizes = [(64, 64), (7,)]
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = [torch.randn(size, generator=generator).to(device) for size in sizes]
    params = [nn.Parameter(value.clone()) for value in wanted]
    found: list[torch.Tensor] = []
    with entrances():
        reader, entered, go = torch.cuda.Stream(), threading.Event(), threading.Event()

        def copy() -> None:
            found.extend(param.detach().clone() for param in params)

        def in_thread() -> None:
            torch.cuda.set_device(device)
            with torch.cuda.stream(reader):
                entered.set()
                go.wait(60)
                reader.wait_event(ready)
                copy()

        # A first run loads the kernels, because the load of a kernel waits for the device.
        gather = AllGatherBucket(params, group())
        gather.start_all_gather()
        [(param.sum(), param.detach().clone()) for param in params]
        torch.cuda.synchronize()
        overwrite_shards_of_peers(params)
        ready = torch.cuda.Event()
        thread = in_a_thread(in_thread) if how == "in a thread" else None
        if thread is not None:
            entered.wait(60)
        torch.cuda.synchronize()
        if torch.distributed.get_rank() == 1:
            torch.cuda._sleep(SLEEP)
        gather.start_all_gather()
        ready.record()
        # After these reads, this stream has waited.
        [param.sum() for param in params]
        assert not any(map(is_pending, params))
        if thread is not None:
            go.set()
            thread.join(60)
        elif how == "host has waited":
            ready.synchronize()
            with torch.cuda.stream(reader):
                copy()
        elif how == "stream as a context":
            reader.wait_event(ready)
            with reader:
                copy()
        elif how == "torch.accelerator":
            reader.wait_event(ready)
            before = torch.accelerator.current_stream()
            torch.accelerator.set_stream(reader)
            copy()
            torch.accelerator.set_stream(before)
        else:
            reader.wait_event(ready)
            with torch.cuda.stream(reader):
                copy()
        torch.cuda.synchronize()
        return [torch.equal(copied, value) for copied, value in zip(found, wanted, strict=True)]


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "how",
    [
        "after an event",
        "in a thread",
        "host has waited",
        "stream as a context",
        "torch.accelerator",
    ],
)
def test_parameters_are_gathered_on_every_stream(ranks, how):
    if how == "stream as a context" and not hasattr(torch.Stream, "__enter__"):
        pytest.skip("streams are no context managers in this version of torch")
    assert ranks(2)(read_elsewhere, how, backend="nccl") == [[True, True]] * 2
