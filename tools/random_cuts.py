"""Models that ``cut()`` cuts, made by a seed, and how a rank trains them and the full model in stock PyTorch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import nn

import ovpatch
from ovpatch.overlap.pipelining.order_table import ORDERS
from ovpatch_plugins.pipeline import CutError
from tests.plugins.pipeline.plain_models import (
    HABITS,
    Decoder,
    Habitual,
    Reused,
    Skewed,
    Skipping,
    Stateful,
    Training,
)
from tests.plugins.pipeline.test_cut import Cut, compare_cut

# Models whose stages would compute other values than the full model, so ``cut()`` must refuse them.
_REFUSED: Final[dict[str, Callable[[], nn.Module]]] = {
    "skips blocks": Skipping,
    "residuals outside": lambda: Decoder(residuals="outside"),
    "shared counter": lambda: Stateful("counter"),
    "shared generator": lambda: Stateful("generator"),
    "LayerDrop": lambda: Training(layerdrop=0.1),
    "noise": lambda: Training("noise"),
}

# Habits of blocks that draw from the streams of the process.
_DRAWING: Final = ("Python", "numpy", "layer drop")


@dataclass(frozen=True)
class RandomCut:
    """A cut model of a seed.

    Attributes:
        seed: The seed.
        world: The number of ranks.
        kind: The model, or its habits.
        case: The model and how it is cut.
        is_refused: Whether ``cut()`` must refuse it.
    """

    seed: int
    world: int
    kind: str
    case: Cut
    is_refused: bool

    def __str__(self) -> str:
        case = self.case
        return (
            f"seed {self.seed}: cut(), {self.world} ranks, {self.kind}, {case.placement}, "
            f"order {case.patched or 'of torch'}, recomputed {case.recomputed or 'nothing'}"
        )


def make_cut(seed: int) -> RandomCut:
    """Return the cut model of a seed."""
    draw = random.Random(f"{seed} cut")
    world, placement = draw.choice([2, 2, 3]), draw.choice(["straight", "straight", "loop", "vee"])
    # The full model draws the numbers of a rank by microbatch, and two stages of a rank draw them by stage.
    may_draw = placement == "straight"
    # A loop and a vee have two stages on each rank.
    layers = 2 * world + draw.choice([0, 1, 2])
    dropout, tied, recomputed = draw.choice([0.0, 0.3]) * may_draw, False, "DecoderBlock"
    kind = draw.choice(["habits"] * 5 + ["plain", "reused", "transposed", "stateful", "refused"])
    if kind == "refused":
        kind = draw.choice(list(_REFUSED))
        make = _REFUSED[kind]
        world, placement = 2, "straight"
    elif kind == "habits":
        fit = [habit for habit in HABITS if may_draw or habit not in _DRAWING]
        habits = draw.sample(fit, draw.randint(1, 4))
        make = functools.partial(Habitual, habits, dropout, layers)
        kind, recomputed = f"habits {', '.join(habits)}; dropout {dropout}", "HabitualBlock"
    elif kind == "stateful":
        make, recomputed, world, placement = Stateful, "StatefulBlock", 2, "straight"
    elif kind == "reused":
        make, world, placement = Reused, 2, "straight"
    else:
        tied = kind == "plain" and draw.random() < 0.4
        make = functools.partial(
            Decoder if kind == "plain" else Skewed, tied=tied, dropout=dropout, layers=layers
        )
        kind = f"{kind}; tied {tied}, dropout {dropout}"
    shared = ("embed.weight",) if tied else ("embed.weight", "positions") * (make is Reused)
    patched = draw.choice(["", "as-given", "auto", *(ORDERS if placement == "straight" else ())])
    case = Cut(
        make,
        shared,
        placement,
        patched=patched,
        recomputed=draw.choice(["", recomputed]) if patched else "",
    )
    return RandomCut(seed, world, kind, case, kind in _REFUSED)


def run_stock(cut: RandomCut) -> None:
    """Train it by the schedule of torch, which may refuse a model."""
    case = cut.case
    _compare(Cut(case.make, case.tied, case.placement))


def run_both(cut: RandomCut) -> tuple[list[str], int]:
    """Train it and the full model; return the differences, and 1."""
    # The comparison finds as well whether the feature ran the steps.
    found, was_refused = _compare(cut.case)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, was_refused)
    if len(set(by_rank)) > 1:
        found.append(f"refused on some ranks: {by_rank}")
    elif cut.is_refused != bool(was_refused):
        found.append(was_refused or "not refused")
    return found[:4], 1


def _compare(case: Cut) -> tuple[list[str], str]:
    """Return the differences, and the reason for which the model was refused, or ""."""
    try:
        return compare_cut(case), ""
    except CutError as error:
        ovpatch.revert()
        return [], str(error)
