"""All-gathers of parameters, on several ranks."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ovpatch.overlap.tensors import pending_param
from ovpatch.overlap.tensors.pending_param import PENDING, is_pending
from ovpatch.overlap.tensors.shard import shard_range, view_flat
from ovpatch_plugins.dist_optimizer.param_all_gather import AllGatherBucket
from tests.overlap.stale import GARBAGE, entrances, find_reason_against
from tests.overlap.test_collectives import for_each, group

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]

# The delay of rank 0 in seconds. A reader on its peers that does not wait reads garbage.
LATE_S = 0.01


def overwrite_shards_of_peers(params: list[nn.Parameter]) -> None:
    """Keep the shard of this rank of each parameter, and write garbage elsewhere."""
    for param in params:
        part = shard_range(param.numel(), dist.get_world_size(), dist.get_rank())
        elements = view_flat(param.data)
        elements[: part.begin] = GARBAGE
        elements[part.end :] = GARBAGE


def await_release(params: list[nn.Parameter]) -> None:
    """Wait until the thread of gloo has released the tensors of the last collective, as it has in a program's step."""
    deadline = time.monotonic() + 60
    while (
        "other tensors share its memory" in map(find_reason_against, params)
        and time.monotonic() < deadline
    ):
        time.sleep(0.0005)


def gathered(
    sizes: list[tuple[int, ...]], dtype: torch.dtype, memory_format: torch.memory_format
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    wanted = [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes
    ]
    wanted = [w.contiguous(memory_format=memory_format) if w.dim() == 4 else w for w in wanted]
    params = [nn.Parameter(w.clone()) for w in wanted]
    before = [(p.data_ptr(), p.stride(), p.dtype, p.shape, p._version) for p in params]
    gather = AllGatherBucket(params, group())
    outcome = []
    for _ in range(3):
        await_release(params)
        overwrite_shards_of_peers(params)
        reason = gather.start_all_gather()
        pending = [is_pending(p) for p in params]
        gather.finish_all_gather()
        values = [torch.equal(p, w) for p, w in zip(params, wanted, strict=True)]
        outcome.append((reason, all(pending), all(values), bool(PENDING)))
    after = [(p.data_ptr(), p.stride(), p.dtype, p.shape, p._version) for p in params]
    plain = all(
        type(p) is nn.Parameter and p.requires_grad and p.is_leaf and p.grad is None for p in params
    )
    return {"outcome": outcome, "same": before == after, "plain": plain}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters_are_gathered_into_their_own_memory(ranks, world):
    sizes = [(6, 4), (7,), (2, 6, 4, 3), (13, 5), (12,)]
    calls = [(sizes, dtype, torch.channels_last) for dtype in DTYPES]
    # The size of one parameter, or of none, is a multiple of the number of ranks.
    calls += [
        (some, torch.float32, torch.contiguous_format)
        for some in ([(6, 6)], [(7,)], [(5,), (1, 7)])
    ]
    right = {"outcome": [("", True, True, False)] * 3, "same": True, "plain": True}
    for results in ranks(world)(for_each, gathered, calls):
        assert [
            call for call, result in zip(calls, results, strict=True) if result != right
        ] == [] or world == 1


def in_flight() -> tuple[nn.Linear, torch.Tensor, AllGatherBucket]:
    """Return a model whose weight is being gathered, the expected weight, and the gather."""
    model = nn.Linear(6, 7)
    dist.broadcast(model.weight.data, 0)
    expected = model.weight.detach().clone()
    gather = AllGatherBucket([model.weight], group())
    await_release([model.weight])
    overwrite_shards_of_peers([model.weight])
    gather.start_all_gather()
    return model, expected, gather


def failing_once() -> tuple[bool, bool, bool]:
    """Let the first waits raise; return whether the weight was still pending, then right, then still pending."""
    model, expected, gather = in_flight()
    with mock.patch.object(gather, "_wait", side_effect=RuntimeError("not now")):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="not now"):
                model.weight.sum()
    still = is_pending(model.weight)
    return still, torch.equal(model.weight, expected), is_pending(model.weight)


def test_a_wait_that_raises_is_tried_again(ranks):
    assert ranks(2)(failing_once) == [(True, True, False)] * 2


def communicated(name: str) -> list[bool]:
    """Run a collective of the program on a pending parameter; return its states before and after, and the result."""
    collectives = {
        "all_reduce": lambda p: (dist.all_reduce(p, dist.ReduceOp.MAX), p)[1],
        "broadcast": lambda p: (dist.broadcast(p, 0), p)[1],
        "all_gather": lambda p: (
            dist.all_gather(parts := [torch.empty_like(p) for _ in range(2)], p),
            parts[1],
        )[1],
    }
    param = nn.Parameter(torch.arange(7.0))
    gather = AllGatherBucket([param], group())
    overwrite_shards_of_peers([param])
    with entrances(), torch.no_grad():
        assert gather.start_all_gather() == ""
        return [
            is_pending(param),
            torch.equal(collectives[name](param), torch.arange(7.0)),
            is_pending(param),
        ]


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather"])
def test_collectives_of_the_program_read_gathered_parameters(ranks, name):
    assert ranks(2)(communicated, name) == [[True, True, False]] * 2


def refused() -> list[Any]:
    """Gather a parameter that cannot be pending on rank 0, because an alias exists there; its peer continues."""
    model = nn.Linear(6, 6)
    dist.broadcast(model.weight.data, 0)
    expected = model.weight.detach().clone()
    gather = AllGatherBucket([model.weight], group())
    await_release([model.weight])
    alias = model.weight.detach() if dist.get_rank() == 0 else None
    overwrite_shards_of_peers([model.weight])
    reason = gather.start_all_gather()
    found = [
        reason,
        is_pending(model.weight),
        alias is None or torch.equal(alias, expected),
        bool(PENDING),
    ]
    # Otherwise the next case in this process would have a pending parameter.
    gather.finish_all_gather()
    return found


def released_at_once() -> list[Any]:
    """Gather while a thread, such as that of gloo, holds an alias at the check and releases it immediately."""
    model = nn.Linear(8, 8)
    expected = model.weight.detach().clone()
    gather = AllGatherBucket(list(model.parameters()), group())
    await_release(gather._params)
    overwrite_shards_of_peers(gather._params)
    counted, extra = pending_param.count_sole_references, [1]
    pending_param.count_sole_references = lambda: counted() - (extra.pop() if extra else 0)
    try:
        if dist.get_rank() == 0:
            time.sleep(LATE_S)
        reason = gather.start_all_gather()
    finally:
        pending_param.count_sole_references = counted
    return [reason, torch.equal(model.weight.data, expected), bool(PENDING)]


def test_a_parameter_with_an_alias_at_the_check_is_gathered_immediately(ranks):
    for result in ranks(2)(released_at_once):
        assert result == ["other tensors share its memory", True, False]


def test_a_parameter_with_shared_memory_is_gathered_immediately(ranks):
    first, second = ranks(2)(refused)
    assert first == ["other tensors share its memory", False, True, False]
    assert second == ["", True, True, True]


def scripted(wrapped: bool) -> list[Any]:
    found: list[Any] = []
    for make in (torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 6))):
        torch.manual_seed(0)
        model = nn.Linear(6, 7)
        expected = model(torch.ones(1, 6))
        gather = AllGatherBucket(list(model.parameters()), group())
        wrapper = DistributedDataParallel(model) if wrapped else None
        gather.start_all_gather()
        gather.finish_all_gather()
        await_release(list(model.parameters()))
        compiled = make(model)
        overwrite_shards_of_peers(list(model.parameters()))
        reason = gather.start_all_gather()
        found.append((reason, torch.equal(compiled.forward(torch.ones(1, 6)), expected)))
        del compiled, wrapper
    return found


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scripted_module_is_gathered_immediately(ranks, wrapped):
    for result in ranks(2)(scripted, wrapped):
        assert result == [("a graph or a scripted module holds it", True)] * 2


def profiled() -> list[str]:
    gather = AllGatherBucket([nn.Parameter(torch.zeros(4))], group(), name="0")
    with torch.profiler.profile() as profile:
        gather.start_all_gather()
        gather.finish_all_gather()
    return sorted({event.name for event in profile.events() if event.name.startswith("ovpatch::")})


def test_labels_in_a_profile(ranks):
    for names in ranks(2)(profiled):
        assert names == [
            "ovpatch::dist_optimizer::all_gather (0)",
            "ovpatch::dist_optimizer::wait (0)",
        ]
