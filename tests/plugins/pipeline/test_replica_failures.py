"""A rank fails alone, and the replicas of all stages raise its error instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.comm.lifetimes import group_store
from ovpatch_plugins.pipeline.runtime.step_failures import Replicas
from tests.plugins.pipeline.cases import Case, differences
from tests.plugins.pipeline.models import Block, Part
from tests.plugins.pipeline.test_failures import Armed, Bomb
from tests.support import signs
from tests.support.rarely import RARELY

Wrap = Callable[[nn.Module], nn.Module]


def _ddp(mesh: DeviceMesh) -> Wrap:
    return lambda module: DistributedDataParallel(module, process_group=mesh.get_group())


def _fsdp(mesh: DeviceMesh) -> Wrap:
    def wrap(module: nn.Module) -> nn.Module:
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        return fully_shard(module, mesh=mesh, reshard_after_forward=False)

    return wrap


KINDS: dict[str, tuple[Callable[[DeviceMesh], Wrap], tuple[str, ...]]] = {
    "ddp": (_ddp, ()),
    "our ddp": (_ddp, ("ddp",)),
    "fsdp": (_fsdp, ()),
}
# The order of the computations, the kind that fails on the victim, and at which call. As given, the last B of stage 0
# reduces.
FAILURES = [("zb-h1", "F", 1), ("zb-h1", "B", 0), ("zb-h1", "W", 5), ("as-given", "B", 2)]
# Ranks of stages 0 and 1, in replicas 0 and 1.
VICTIMS = (0, 3)


def _list_cases(kind: str) -> list[tuple[str, str, int, int]]:
    # FSDP2 computes with other tensors than the ones that have the hook of W.
    return [
        (*failure, victim)
        for failure in FAILURES
        for victim in VICTIMS
        if (kind, failure[1]) != ("fsdp", "W")
    ]


def _fail(kind: str) -> list[tuple[list[str], str]]:
    wrap, features = KINDS[kind]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, found = mesh["pp"].get_group(), []

    def arm(where: str, victim: int | None, left: int) -> Armed:
        part = lambda _index: Part(Bomb(where), Block())  # noqa: E731
        return Armed(Case(part=part, wrap=wrap(mesh["dp"]), steps=1), victim, left, group)

    if features:
        ovpatch.apply(*features)
    stock, _ = arm("F", None, 0).run()
    ovpatch.revert()
    for order, where, left, victim in _list_cases(kind):
        ovpatch.apply("pipeline", *features, options={"pipeline": {"schedule": order}})
        results, text = arm(where, victim, left).run()
        ovpatch.revert()
        found.append((differences(stock, results), text))
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=RARELY) if kind == "ddp" else kind for kind in KINDS]
)
def test_replicas_raise_the_error_of_a_rank_that_fails_alone(ranks: Any, kind: str) -> None:
    by_rank = ranks(4)(_fail, kind)
    for number, case in enumerate(_list_cases(kind)):
        victim = case[-1]
        for rank, results in enumerate(by_rank):
            wrong, text = results[number]
            assert not wrong, f"rank {rank}, {case}: {wrong[:4]}"
            if rank == victim:
                assert "out of memory, for a test" in text
            # The other stage may have finished its step.
            elif text or case[1] != "W" or rank // 2 == victim // 2:
                assert text.startswith("PipelineRankError"), f"rank {rank}, {case}: {text}"
                assert f"rank {victim} failed in " in text
                assert "OutOfMemoryError" in text
        for first, second in ((0, 1), (2, 3)):
            assert bool(by_rank[first][number][1]) == bool(by_rank[second][number][1]), case


def _decide_over_two_groups() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    replicas = Replicas([mesh["shard"].get_group(), mesh["replicate"].get_group()])
    rank = dist.get_rank()
    return [
        replicas.decide(f"rank {rank} of {victims}" if rank in victims else "")
        for victims in ((), (3,), (), (0, 2))
    ]


def test_all_replicas_of_a_grid_read_the_failure_of_one(ranks: Any) -> None:
    for nothing, first, again, second in ranks(4)(_decide_over_two_groups):
        assert (nothing, first, again) == ("", "rank 3 of (3,)", "")
        assert second in ("rank 0 of (0, 2)", "rank 2 of (0, 2)")


def _refuse_while_the_peer_computes() -> tuple[list[str], int]:
    """Have rank 0 refuse before rank 1 comes; return the decisions of both, and the number of keys that remain."""
    group, store = dist.group.WORLD, group_store(dist.group.WORLD)
    assert group is not None
    assert store is not None
    replicas = Replicas([group])
    texts = [replicas.decide("")]
    for number in range(2):
        if dist.get_rank() == 0:
            # Rank 0 waits for no peer here.
            texts.append(replicas.decide("rank 0 failed"))
            signs.give(f"refused {number}")
            replicas.finish()
        else:
            signs.await_others(f"refused {number}")
            texts.append(replicas.decide(""))
        dist.barrier()
        keys = store.num_keys()
    return [*texts, replicas.decide(""), replicas.decide("")], store.num_keys() - keys


def test_a_replica_that_failed_waits_for_no_peer(ranks: Any) -> None:
    for texts, kept in ranks(2)(_refuse_while_the_peer_computes):
        assert texts == ["", "rank 0 failed", "rank 0 failed", "", ""]
        assert kept <= 0
