"""Gathers and reduce-scatters by copies between ranks: the right values at the right places, in any rounds."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing.util
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import AllGather, ReduceScatter, WorkGroup
from ovpatch.overlap.comm.lifetimes import group_state
from ovpatch.overlap.kernels import autotuner
from ovpatch.overlap.kernels import copy_choice as selection
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.autotuner import report_lines
from ovpatch.overlap.kernels.copy_choice import attend, choose
from ovpatch.overlap.kernels.copy_collectives import Engine
from ovpatch.overlap.kernels.copy_window import Addend, Span
from tests.support import windows
from tests.support.interpreter import interpreted

CPU = torch.device("cpu")
SIZES = ([4], [0, 5, 1, 300], [1000, 3, 700], [33])
# In bytes. The slot is small, so copies need many rounds.
SLOT = 3 * 512


def drawn(rank: int, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def moved(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Gather and scatter alternately over one engine, all sizes twice."""
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    engine = Engine(group, CPU, allocate=windows.allocate, slot_bytes=SLOT)
    results = []
    for sizes in SIZES * 2:
        gathered = [torch.full((size * world,), torch.nan).to(dtype) for size in sizes]
        inside = [output.chunk(world)[rank] if len(output) else output for output in gathered]
        separate = drawn(rank, sizes, dtype)
        for part, value in zip(inside, separate, strict=True):
            part.copy_(value)
        gathered_from_separate = [torch.empty_like(output) for output in gathered]
        given = drawn(rank, [size * world for size in sizes], dtype)
        sums, means = ([torch.empty(size, dtype=dtype) for size in sizes] for _ in range(2))
        wides = [
            torch.empty(size, dtype=torch.promote_types(dtype, torch.float32)) for size in sizes
        ]
        works = [*engine.gather(gathered, inside), *engine.scatter(sums, given, average=False)]
        works += [*engine.scatter(wides, given, average=False)]
        works += [*engine.scatter(means, given, average=True)]
        works += [*engine.gather(gathered_from_separate, separate)]
        for work in works:
            work.wait()
        results.append(
            {
                "gathered": gathered,
                "gathered from separate": gathered_from_separate,
                "sums": sums,
                "wides": wides,
                "means": means,
            }
        )
    return results


CASES = [
    (2, torch.float32),
    (3, torch.float32),
    (4, torch.float32),
    (2, torch.float64),
    (3, torch.float16),
]


@pytest.mark.parametrize(("world", "dtype"), [*CASES, (2, torch.bfloat16), (3, torch.bfloat16)])
def test_each_rank_gets_all_parts_and_its_sums(ranks, world, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for rank, results in enumerate(ranks(world)(moved, dtype)):
        for sizes, result in zip(SIZES * 2, results, strict=True):
            parts = [drawn(r, sizes, dtype) for r in range(world)]
            given = [drawn(r, [size * world for size in sizes], dtype) for r in range(world)]
            for i in range(len(sizes)):
                expected = torch.cat([part[i] for part in parts])
                assert torch.equal(result["gathered"][i], expected)
                assert torch.equal(result["gathered from separate"][i], expected)
                if not sizes[i]:
                    continue
                terms = [tensors[i].chunk(world)[rank].to(wide) for tensors in given]
                total = functools.reduce(torch.add, terms)
                assert torch.equal(result["sums"][i], total.to(dtype))
                assert torch.equal(result["wides"][i], total)
                assert torch.equal(result["means"][i], (total * (1 / world)).to(dtype))


def unfit() -> list[str]:
    engine = Engine(
        dist.new_group([0], use_local_synchronization=True), CPU, allocate=windows.allocate
    )
    matrix, refused = torch.zeros(2, 3), []
    for outputs, inputs in (
        ([matrix], [matrix.t()]),
        ([matrix.t()], [matrix]),
        ([matrix], [torch.zeros(5)]),
    ):
        for call in (engine.gather, functools.partial(engine.scatter, average=False)):
            with pytest.raises(
                ValueError, match="contiguous tensors, and outputs whose sizes match"
            ) as error:
                call(outputs, inputs)
            refused.append(str(error.value))
    return refused


def test_tensors_with_gaps_or_wrong_sizes_are_refused(ranks):
    assert list(map(len, ranks(1)(unfit))) == [6]


def instead_of_the_backend() -> dict[str, Any]:
    group, rank = dist.group.WORLD, dist.get_rank()
    before = selection.find_gatherer(group, CPU), selection.find_scatterer(group, CPU)
    chosen = selection.get_choice(group, CPU)
    chosen.engine = Engine(group, CPU, allocate=windows.allocate, slot_bytes=SLOT)
    chosen.gathers = chosen.scatters = True
    gathered, part = torch.zeros(6), torch.empty(3, dtype=torch.complex64)
    gathered.chunk(2)[rank].fill_(rank + 1)
    for work in AllGather(group, CPU)([gathered], [gathered.chunk(2)[rank]]):
        work.wait()
    for work in ReduceScatter(group, CPU)(
        [part], [torch.full((6,), 1j * (rank + 1), dtype=torch.complex64)]
    ):
        work.wait()
    attend(group, CPU)
    integers = torch.empty(1, dtype=torch.int32)
    for work in ReduceScatter(group, CPU)([integers], [torch.tensor([1, 2], dtype=torch.int32)]):
        work.wait()
    selection.forget()
    after = selection.find_gatherer(group, CPU), selection.find_scatterer(group, CPU)
    return {
        "gathered": gathered,
        "part": part,
        "integers": integers.tolist(),
        "none": [*before, *after],
    }


def test_collectives_use_the_engine_that_was_chosen_for_their_group(ranks):
    for rank, result in enumerate(ranks(2)(instead_of_the_backend)):
        assert result["gathered"].tolist() == [1.0] * 3 + [2.0] * 3
        assert result["part"].tolist() == [3j] * 3
        assert result["integers"] == [2 * (rank + 1)], (
            "the backend sums integers, which copies cannot add"
        )
        assert result["none"] == [None] * 4


class Recorded:
    """A process group that records its all-reduces, and an engine that records the end of its copies."""

    def __init__(self) -> None:
        self.number, self.calls = torch.zeros(1), []

    def allreduce(self, tensors: list[Tensor]) -> WorkGroup:
        assert tensors[0] is self.number
        self.calls.append("all-reduce")
        return WorkGroup(())

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        self.calls.append("behind")
        yield
        self.calls.append("end")


@pytest.mark.parametrize(
    "what", [{"gathers": True}, {"scatters": True}, {"gathers": True, "scatters": True}, {}]
)
def test_copies_are_followed_by_one_collective_that_the_backend_watches(monkeypatch, what):
    both: Any = Recorded()
    attend(both, CPU)
    assert both.calls == [], "nothing is copied"
    chosen = selection.Chosen(engine=both, **what)
    monkeypatch.setitem(group_state(both).values, (selection.Chosen, CPU), chosen)
    attend(both, CPU)
    assert both.calls == (["behind", "all-reduce", "end"] if what else [])


def choices() -> list[Any]:
    """Choose without devices that copy, without shared or usable memory, with copies off, and with working copies."""
    group, found = dist.group.WORLD, []

    def refused(size: int, group: Any, device: torch.device) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("pidfd_getfd: Operation not permitted\nmore")
        return windows.allocate(0, dist.new_group([0], use_local_synchronization=True), device)

    def deaf(size: int, group: Any, device: torch.device) -> Any:
        unheard = [0] if dist.get_rank() == 1 else []
        return dataclasses.replace(windows.allocate(size, group, device), unheard=lambda: unheard)

    before = memory.memory_unsupported_reason
    for mode, against, allocate in (
        ("auto", before, windows.allocate),
        ("on", before, windows.allocate),
        ("on", lambda device: "", refused),
        ("on", lambda device: "", deaf),
        ("off", lambda device: "", windows.allocate),
        ("on", lambda device: "", windows.allocate),
    ):
        selection.forget()
        autotuner._report_lines.pop("test", None)
        memory.memory_unsupported_reason = against
        try:
            choose(group, CPU, mode, feature="test", directory=None, allocate=allocate)
        finally:
            memory.memory_unsupported_reason = before
        chosen = selection.get_choice(group, CPU)
        found.append((chosen.gathers, chosen.scatters, chosen.final, report_lines("test")))
    selection.forget()
    autotuner._report_lines.pop("test", None)
    return found


def test_all_ranks_make_the_same_choice_and_report_the_reason_against_copies(ranks):
    first, second = ranks(2)(choices)
    assert first == second
    automatic, unable, refused, deaf, off, on = first
    assert automatic == off == (False, False, False, [])
    assert unable[:3] == refused[:3] == deaf[:3] == (False, False, True)
    assert unable[3] == [
        "copy engines are not used: tensors are on cpu, not on CUDA devices (rank 0, 1)"
    ]
    assert "memory cannot be shared (pidfd_getfd: Operation not permitted)" in refused[3][0]
    assert "data from rank 0 does not arrive" in deaf[3][0]
    assert on == (True, True, True, [])


def at_address(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_byte * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype) if numel else torch.empty(0, dtype=dtype)


class Known:
    """A fake cache of compiled kernels, which take addresses as on GPUs. It records the launches."""

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def get(self, key: Any) -> Any:
        self.keys.append(key)
        _, dtype, wide, rank, count, aligned = key

        def launch(*args: Any, stream: int) -> None:
            slots, own, out, places, sizes = (args[i : i + 8] for i in range(0, 40, 8))
            assert [slot is None for slot in slots] == [r == rank or r >= count for r in range(8)]
            assert args[40:] == (
                1.0 if dtype == torch.float64 else 1 / 4,
                rank,
                count,
                dtype == torch.float64,
                64,
            )
            for mine, to, at, n in zip(own, out, places, sizes, strict=True):
                if not aligned or not n:
                    assert (mine % 16, to % 16, n % 16) == (0, 0, 0)
                terms = [
                    mine if r == rank else slots[r] + at * dtype.itemsize for r in range(count)
                ]
                exact = torch.promote_types(dtype, torch.float32)
                total = sum(at_address(term, n, dtype).to(exact) for term in terms)
                at_address(to, n, wide).copy_(total * args[40])

        return launch


def added(known: bool) -> list[tuple[Tensor, Tensor]]:
    from ovpatch.overlap.kernels import copy_collectives as collectives
    from ovpatch.overlap.kernels import copy_sum_kernel as sum_kernel

    sum_kernel._BLOCK, sum_kernel._GRID = 64, (3, 1, 1)
    sum_kernel._use_stream = torch.cuda.device = lambda *_: contextlib.nullcontext()
    if known:
        sum_kernel._compiled = Known()

    def span(values: Tensor, begin: int = 0) -> Span:
        memory = torch.cat(
            [torch.full((begin,), torch.nan), values, torch.full((3,), torch.nan)]
        ).to(values.dtype)
        return Span(memory, begin, len(values), memory.data_ptr() + begin * memory.itemsize)

    found = []
    for count, rank, dtype, wide in (
        (2, 0, torch.float32, torch.float32),
        (3, 1, torch.float16, torch.float16),
        (3, 2, torch.bfloat16, torch.float32),
        (8, 5, torch.float32, torch.float32),
        (3, 0, torch.float64, torch.float64),
    ):
        slots = [None if r == rank else span(torch.randn(2000).to(dtype), 8) for r in range(count)]
        sizes = [1, 500, 64, 64, 200, 70, 640, 16, 32, 48, 64, 16, 33]
        places = [sum(sizes[:i]) for i in range(len(sizes))]
        own = [span(torch.randn(numel).to(dtype), i % 3) for i, numel in enumerate(sizes)]
        ours, expected = (
            [span(torch.zeros(numel, dtype=wide), 2) for numel in sizes] for _ in range(2)
        )
        sum_kernel.launch_sum(slots, [*map(Addend, own, ours, places)], 1 / 4, 0)
        collectives.add_slots(slots, [*map(Addend, own, expected, places)], 1 / 4, 0)
        found += [(out.memory, wanted.memory) for out, wanted in zip(ours, expected, strict=True)]
    if known:
        together = [key for key in sum_kernel._compiled.keys if not key[-1]]
        assert len(together) < len(sum_kernel._compiled.keys) < len(found), (
            "some spans share a launch, and some have their own"
        )
    return found


def first_and_later() -> dict[str, list[tuple[Tensor, Tensor]]]:
    return {"first": added(known=False), "later": added(known=True)}


def test_the_kernel_adds_in_order():
    for when, found in interpreted(first_and_later).items():
        assert found, when
        for ours, expected in found:
            assert torch.equal(ours.nan_to_num(7), expected.nan_to_num(7)), when


class Group:
    """A fake process group with the one attribute that is read when a group ends."""

    _device_types = ()


class Lasting:
    """An engine whose copies may not end."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.drains = ends, 0

    def drain(self, timeout_s: float) -> bool:
        self.drains += 1
        assert timeout_s == dist.default_pg_timeout.total_seconds()
        return self.ends


def test_one_group_is_forgotten_and_memory_that_is_in_use_is_kept(monkeypatch, caplog):
    monkeypatch.setattr(selection, "_stuck", [])
    stuck, finished = Group(), Group()
    engines = Lasting(False), Lasting(True)
    for group, engine in zip((stuck, finished), engines, strict=True):
        selection.get_choice(group, CPU).engine = engine
        selection.get_choice(group, CPU).gathers = True
    selection.forget(stuck)
    assert "A peer may have died" in caplog.text
    assert selection._stuck == [engines[0]]
    assert selection.find_gatherer(stuck, CPU) is None
    assert selection.find_gatherer(finished, CPU) is engines[1]
    assert engines[1].drains == 0
    selection.forget()
    assert (selection.find_gatherer(finished, CPU), engines[1].drains, selection._stuck) == (
        None,
        1,
        [engines[0]],
    )


def ends(pipe: Any, error: bool) -> None:
    group = Group()
    engine = selection.get_choice(group, CPU).engine = Lasting(True)
    engine.drain = lambda timeout_s: pipe.send("drained") or True
    multiprocessing.util.Finalize(None, pipe.send, args=("end",), exitpriority=-1)
    multiprocessing.util.Finalize(None, lambda kept: None, args=(group,), exitpriority=-1)
    if error:
        raise SystemExit(1)


@pytest.mark.parametrize("error", [False, True])
def test_a_rank_that_leaves_waits_for_its_copies_unless_it_fails(error):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=ends, args=(there, error))
    process.start()
    there.close()
    received = [here.recv()]
    received += [here.recv()] if received == ["drained"] else []
    process.join()
    assert received == (["end"] if error else ["drained", "end"])


class Stepping(torch.autograd.Function):
    """A function that chooses in its backward, like an optimizer that steps there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        choose(dist.group.WORLD, torch.device("cuda", 0), "auto", feature="test", directory=None)
        return grad


def in_backward() -> tuple[int, bool]:
    calls: list[Any] = []
    before = memory.unsupported_reason, torch.cuda.is_current_stream_capturing
    memory.unsupported_reason, torch.cuda.is_current_stream_capturing = (
        lambda *_: calls.append(1) or "no",
        lambda: False,
    )
    try:
        Stepping.apply(torch.ones(1, requires_grad=True)).backward()
        within = len(calls)
        choose(dist.group.WORLD, torch.device("cuda", 0), "auto", feature="test", directory=None)
    finally:
        memory.unsupported_reason, torch.cuda.is_current_stream_capturing = before
        selection.forget()
        autotuner._report_lines.pop("test", None)
    return within, len(calls) == 1


def test_a_choice_in_a_backward_makes_no_call_to_peers(ranks):
    assert ranks(2)(in_backward) == [(0, True)] * 2


def busy_with(ranks_: set[int]) -> str:
    """Wait until the GPU is idle, which it never is on ``ranks_``; return the reason of the failure."""
    end = threading.Event()
    never = (lambda _device: end.wait()) if dist.get_rank() in ranks_ else (lambda _device: None)
    timeout_s = 1.0 if ranks_ else selection.IDLE_S
    with (
        mock.patch.object(torch.cuda, "synchronize", never),
        mock.patch.object(selection, "IDLE_S", timeout_s),
    ):
        try:
            return selection._wait_until_idle(dist.group.WORLD, torch.device("cuda", 0))
        finally:
            end.set()


def test_no_rank_waits_for_a_device_that_waits_for_a_collective_of_the_script(ranks):
    first, second = ranks(2)(busy_with, {0})
    assert first == second
    assert "cuda:0 was still busy after 1 s" in first
    assert ranks(2)(busy_with, set()) == ["", ""]
