"""All-to-alls over symmetric memory: the interpreted kernel, over files that the processes share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ovpatch.hookspecs import OptionError
from ovpatch.overlap.comm.lifetimes import drop_values
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch_plugins.pipe_experts import all_to_all, layer, pipe_experts_feature
from ovpatch_plugins.pipe_experts.all_to_all import SymmAllToAll
from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig
from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS
from ovpatch_plugins.pipe_experts.routing import list_candidates, make_plan
from ovpatch_plugins.pipe_experts.triton_kernels import MAX_CHANNELS, symm_all_to_all_kernel
from tests.plugins.pipe_experts.models import Case, expected, train
from tests.support.equality import compare
from tests.support.interpreter import allocate, interpreted
from tests.support.races import NOWHERE, forced
from tests.support.rarely import RARELY

CPU = torch.device("cpu")
SMALL = {"channels": 3, "slot": 64, "depth": 2, "block": 8}

# The number of rows from each rank to each rank. The largest take many turns of a ring, and some pairs have no rows.
COUNTS = {
    2: (
        [[3, 40], [25, 1]],
        [[0, 1], [0, 7]],
        [[2, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [[4, 4], [9, 4]],
        [[0, 30], [7, 1]],
    ),
    3: ([[3, 9, 0], [14, 1, 5], [4, 4, 4]], [[0, 0, 33], [0, 5, 0], [1, 0, 0]]),
    4: ([[1, 6, 2, 0], [3, 0, 0, 7], [0, 0, 0, 0], [2, 2, 2, 2]],),
}
WIDTHS = ((8, torch.float32), (3, torch.bfloat16), (5, torch.uint8), (1, torch.float64))


def drawn(source: int, to: int, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of a pair of ranks, which both ranks can draw."""
    generator = torch.Generator().manual_seed(100 * source + 10 * to + count)
    return torch.randint(0, 200, (count, width), generator=generator).to(dtype)


def sent_and_right(
    table: list[list[int]], rank: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    world = range(len(table))
    rows = torch.cat([drawn(rank, to, table[rank][to], width, dtype) for to in world])
    return rows, torch.cat(
        [drawn(source, rank, table[source][rank], width, dtype) for source in world]
    )


def wrong(
    transport: SymmAllToAll, table: list[list[int]], rank: int, width: int, dtype: torch.dtype
) -> bool:
    """Return whether rows, sent and sent back, arrive with wrong values."""
    rows, right = sent_and_right(table, rank, width, dtype)
    sent, received = table[rank], [of[rank] for of in table]
    found, back = torch.full_like(right, 77), torch.full_like(rows, 77)
    transport.start_transfer(found, rows, received, sent).wait()
    transport.start_transfer(back, found, sent, received).wait()
    return not torch.equal(found, right) or not torch.equal(back, rows)


def exchanged(delay: float) -> list[str]:
    """Return the names of wrong exchanges of groups of 2, 3 and 4 ranks that come late at random."""
    memory.allocate = allocate
    rank, chance, found = dist.get_rank(), random.Random(dist.get_rank()), []
    for world, tables in COUNTS.items():
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        transport = SymmAllToAll(group, CPU, **SMALL)
        for table, (width, dtype) in zip(tables, itertools.cycle(WIDTHS)):
            time.sleep(delay * chance.random())
            if wrong(transport, table, rank, width, dtype):
                found.append(f"{world} ranks, {table}, {width} of {dtype}")
        if world == 2:
            transport.channels = 1
            found += ["one channel"] if wrong(transport, tables[-1], rank, 8, torch.float32) else []
    return found


def test_rows_reach_their_ranks():
    assert interpreted(exchanged, 0.01, world=4) == [[]] * 4


def allow() -> None:
    """Let this process use the kernel, with rings that are soon full."""
    memory.unsupported_reason = lambda group, device: ""
    memory.allocate = allocate
    SymmAllToAll.__init__.__defaults__ = tuple({**SMALL, "channels": 2, "slot": 256}.values())


LAYERS = (
    Case(local=2, config=MoEConfig("experts", exchange="symmetric"), tokens=(17, 0), steps=1),
    Case(
        top_k=1,
        favourites=(1,),
        module="numbered",
        config=MoEConfig("tokens", 2, exchange="symmetric"),
        tokens=(9, 4),
        steps=1,
    ),
)
RACED = Case(local=1, top_k=1, config=MoEConfig("auto", 2, exchange="auto"), tokens=(8, 5), steps=1)


def trained(cases: tuple[Case, ...]) -> tuple[list[tuple[list[Any], int]], list[str]]:
    """Return records of layers' training, their numbers of all-to-alls over symmetric memory, and winners of races."""
    allow()
    layer.MIN_ROWS, found = 1, []
    with forced(2) as won:
        for case in cases:
            before = COUNTERS.symmetric
            found.append((train(case), COUNTERS.symmetric - before))
    return found, won


def check(rank: int, cases: tuple[Case, ...], found: list[tuple[list[Any], int]]) -> list[int]:
    for case, (seen, _) in zip(cases, found, strict=True):
        compare(expected(case, 2)[rank], seen, floor=1e-10).assert_equal()
    return [count for _, count in found]


def test_layers():
    for rank, (found, won) in enumerate(interpreted(trained, LAYERS, world=2)):
        assert check(rank, LAYERS, found) == [9, 9], (
            "counts; two parts, there and back, forward and backward"
        )
        assert not won


@RARELY
def test_it_may_win_a_race(monkeypatch):
    monkeypatch.setenv(*next(iter(NOWHERE.items())))
    for rank, (found, won) in enumerate(interpreted(trained, (RACED,), world=2)):
        assert check(rank, (RACED,), found)[0] > 9
        assert won == ["none, symmetric", "tokens 2, symmetric"], "forward; forward and backward"


def test_candidates_of_the_choice():
    known = list(list_candidates(2, 4, 2))
    assert list(list_candidates(2, 4, 2, "symmetric")) == [f"{name}, symmetric" for name in known]
    both = list_candidates(2, 4, 2, "auto")
    assert list(both) == [*known, *(f"{name}, symmetric" for name in known)]
    assert [plan.symmetric for plan in both.values()] == [False] * 3 + [True] * 3
    assert not make_plan(2, 4, "experts", exchange="auto").symmetric, "nothing is measured there"
    with pytest.raises(
        ValueError, match=r"exchange='nccl' is unknown. Choose one of c10d, symmetric, auto"
    ):
        make_plan(2, 4, exchange="nccl")


def fall_back(why: str, config: MoEConfig) -> tuple[int, str, list[str]]:
    """Return the number of all-to-alls over symmetric memory, the error or "", and the report; check c10d's values."""
    before, objection, made = COUNTERS.symmetric, memory.unsupported_reason, memory.allocate
    if why:
        memory.unsupported_reason = lambda group, device: ""
        memory.allocate = functools.partial(lacking, why)
    case, error = Case(tokens=(5, 3), steps=1, config=config), ""
    try:
        ours = train(case)
    except OptionError as refusal:
        error = str(refusal)
    else:
        compare(train(dataclasses.replace(case, config=MoEConfig("experts"))), ours).assert_equal()
    finally:
        memory.unsupported_reason, memory.allocate = objection, made
        drop_values(all_to_all.SymmAllToAll)
    lines = [line for line in pipe_experts_feature.list_remarks() if "symmetric memory" in line]
    all_to_all._unsupported_reasons.clear()
    return COUNTERS.symmetric - before, error, lines


def lacking(why: str, size: int, group: Any, device: torch.device, prepare: Any) -> memory.Memory:
    if dist.get_rank() == 1:
        raise RuntimeError(f"{why}\nand a trace")
    prepare(torch.empty(size, dtype=torch.uint8))
    raise AssertionError("the peers would wait for this rank")


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("", "tensors are on cpu, not on CUDA devices (rank 0, 1)"),
        ("out of memory", "32 MiB of symmetric memory: out of memory (rank 1)"),
    ],
)
def test_without_gpus_or_memory_auto_is_c10d_and_symmetric_an_error(ranks, why, reason):
    start = "rows are sent by c10d's all-to-alls, not over symmetric memory: "
    for count, error, lines in ranks(2)(fall_back, why, MoEConfig("auto", 2, exchange="auto")):
        assert count == 0
        assert error == ""
        assert lines == [f"{start}{reason}"]
    for count, error, lines in ranks(2)(fall_back, why, MoEConfig("experts", exchange="symmetric")):
        assert count == 0
        assert (
            f"exchange=symmetric of feature 'pipe_experts' cannot act here: {reason}. Set "
            "OVPATCH_PIPE" in error
        )
        assert lines == [f"{start}{reason}"]


def compiled(aligned: bool) -> Any:
    """Compile the kernel for an H200 on a machine without one."""
    fixed = {
        "WORLD": 8,
        "CHANNELS": 16,
        "SLOT": 131072,
        "DEPTH": 2,
        "BLOCK": 8192,
        "ALIGNED": aligned,
    }
    names = symm_all_to_all_kernel.arg_names
    types = {"rows": "*i32", "out": "*i32", "peers": "*i64", "state": "*i64"}
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    source = ASTSource(
        symm_all_to_all_kernel,
        signature,
        {(names.index(name),): value for name, value in fixed.items()},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": all_to_all._WARPS}
    )


@pytest.mark.parametrize("aligned", [True, False])
def test_aligned_rows_are_moved_by_16_bytes(aligned, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled(aligned).asm["ptx"]
    assert ("ld.global.v4" in ptx and "st.global.v4" in ptx) == aligned
    assert ("ld.global.cg.v4" in ptx) == aligned, (
        "slots are read past the first cache, which stores of peers leave stale"
    )
    assert ptx.count("release") >= 2
    assert ptx.count("acquire") >= 2


def test_a_slot_holds_full_blocks_and_a_ring_two_slots():
    transport = inspect.signature(SymmAllToAll.__init__).parameters
    for size, _ in all_to_all._WORDS:
        assert transport["slot"].default // size % transport["block"].default == 0
    assert transport["depth"].default >= 2
    assert transport["channels"].default <= MAX_CHANNELS.value
