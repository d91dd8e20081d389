"""Reentrant checkpoints: backwards inside the backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from tests.plugins.ddp.arms import Record, data, is_patched, record_steps, table
from tests.plugins.ddp.checks import check_cases
from tests.plugins.ddp.test_failures import Bomb
from tests.support.equality import compare

WORLDS = [2, 3]
TINY = 0.0001


class Segments(nn.Module):
    """A model whose trained parameters are all inside of two checkpoints. A third branch is used sometimes or never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.spare = nn.Linear(8, 3)

    def forward(
        self, x: torch.Tensor, reentrant: bool, spare: bool, bomb: bool = False
    ) -> torch.Tensor:
        def last(h: torch.Tensor) -> torch.Tensor:
            h = Bomb.apply(h) if bomb else h
            return self.spare(h) if spare else self.second(h)

        h = checkpoint(self.first, x.requires_grad_(), use_reentrant=reentrant)
        return checkpoint(last, h, use_reentrant=reentrant)


SPARE = {
    "never": lambda step, rank: False,
    "by step": lambda step, rank: step % 2 == 1,
    "by rank": lambda step, rank: (step + rank) % 2 == 1,
}


def train(
    reentrant: bool, spare: str, ddp: dict[str, Any], fails: tuple[int, ...] = ()
) -> list[Record]:
    """Train; in the steps that fail, raise in the backward inside the backward."""
    torch.manual_seed(0)
    model = Segments()
    wrapped = DDP(model, find_unused_parameters=True, **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def losses() -> Iterator[torch.Tensor]:
        for step in range(5):
            spares = SPARE[spare](step, dist.get_rank())
            if step in fails:
                Bomb.armed = True
                with pytest.raises(RuntimeError, match="not really"):
                    wrapped(
                        data(90 + step, 4, 6), reentrant, spares, True
                    ).square().mean().backward()
                Bomb.armed = False
                optimizer.zero_grad()
            yield wrapped(data(step, 4, 6), reentrant, spares).square().mean()

    return record_steps(model, losses(), optimizer)


def reentrant_or_not(spare: str, ddp: dict[str, Any], fails: tuple[int, ...] = ()) -> list[Record]:
    """Train with reentrant checkpoints and failures in the patched arm.

    Stock PyTorch cannot search inside reentrant checkpoints, nor continue after an exception, so its arm has neither.
    """
    patched = is_patched()
    return train(patched, spare, ddp, fails if patched else ())


def require(results: list[dict[str, Any]], fails: int) -> None:
    for result in results:
        compare(result["stock"], result["patched"]).assert_equal()
        compare(
            [r["param"] for r in results[0]["patched"]], [r["param"] for r in result["patched"]]
        ).assert_bitwise()
        assert result["counters"]["recovered"] == fails


FAILS = [(), (0,), (2,), (1, 3)]


@pytest.mark.parametrize(
    ("fails", "world"), [*((fails, 2) for fails in FAILS), ((), 3), ((1, 3), 3)], ids=str
)
def test_the_search_with_all_parameters_inside_reentrant_checkpoints_that_may_fail(
    ranks, world, fails
):
    spare = ["never"] if fails else SPARE
    cases = table(spare=spare, ddp=[{}, {"bucket_cap_mb": TINY}], fails=[fails])
    check_cases(ranks(world), reentrant_or_not, cases, check=require, fails=len(fails))


def without_search(ddp: dict[str, Any]) -> list[Record]:
    model = Segments()
    model.spare.requires_grad_(False)
    wrapped = DDP(model, **ddp)
    return record_steps(
        model, (wrapped(data(step, 4, 6), True, False).square().mean() for step in range(3))
    )


@pytest.mark.parametrize("world", WORLDS)
def test_all_parameters_inside_reentrant_checkpoints_without_the_search(ranks, world):
    cases = table(ddp=[{}, {"bucket_cap_mb": TINY}, {"static_graph": True}])
    check_cases(ranks(world), without_search, cases, backwards=3)
