"""Pipelines made by a seed, and how a rank runs them, stock and patched."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

import ovpatch
from ovpatch.overlap.pipelining.order_table import ORDERS, TORCH_ORDERS
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.pipeline.cases import Case, counters, differences, make_schedule, run_steps
from tests.plugins.pipeline.models import ROWS, VARIANTS, WIDTH, Autocast, Block, Part, Raw, Variant
from tests.plugins.pipeline.order_sources import SOURCES
from tests.plugins.recompute.parts import PARTS, seed_streams
from tests.plugins.recompute.parts import WIDTH as PART_WIDTH
from tools import random_cuts

_LOOPS: Final = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS")
# Torch cannot evaluate a model with these.
_VEES: Final = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_ORDERS: Final = ("as-given", "auto", *ORDERS)
# The classes of the blocks that ``recompute`` runs again.
_BLOCKS: Final = "Block,Variant,Repeated"
# Torch infers shapes by a forward over uninitialized memory, which these keep.
_UNFIT: Final = (
    "tensor changed in place",
    "tensor replaced",
    "tensors of a container changed in place, and with a graph",
    "tensors of containers changed in place",
    "batch norm",
)


@dataclass(frozen=True)
class RandomPipeline:
    """A pipeline of a seed.

    Attributes:
        seed: The seed.
        world: On how many ranks.
        case: The model and its training; its steps are the steps of one call of the loop.
        kind: The kind of its stages' modules.
        options: Of the feature.
        rounds: How often the loop trains.
        habits: What the loop does in between.
        granularity: Of feature ``recompute``; ``none`` if it is off.
    """

    seed: int
    world: int
    case: Case
    kind: str
    options: dict[str, Any]
    rounds: int
    habits: frozenset[str]
    granularity: str

    def __str__(self) -> str:
        case, habits = self.case, ", ".join(sorted(self.habits))
        return (
            f"seed {self.seed}: {case.schedule}, {self.world} ranks, {case.microbatches} "
            f"microbatches, {case.chunks} "
            f"stages a rank, {self.kind}, {case.dtype}, order {case.source}, {case.pieces} pieces, "
            f"{self.rounds} rounds; recompute {self.granularity}; {self.options}; {dict(case.options)}; {habits}"
        )


class Repeated(nn.Module):
    """A block with a part whose forward depends on state: a random stream, a counter, a cache, hooks."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = PARTS[part]()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the part on rows of its width."""
        rows: Tensor = self.part(x.reshape(-1, PART_WIDTH))
        return x + rows.view_as(x)


def make_program(seed: int) -> RandomPipeline | random_cuts.RandomCut:
    """Return the program of a seed: a cut model or a pipeline."""
    return random_cuts.make_cut(seed) if seed % 4 == 0 else make_pipeline(seed)


def name_program(program: RandomPipeline | random_cuts.RandomCut) -> str:
    """Return the name under which a program is counted."""
    return "cut()" if isinstance(program, random_cuts.RandomCut) else program.case.schedule


def make_pipeline(seed: int) -> RandomPipeline:
    """Return the pipeline of a seed."""
    draw = random.Random(seed)
    world, name = draw.choice([2, 2, 3, 4]), draw.choice([*TORCH_ORDERS, *_LOOPS, *_VEES])
    chunks = 1 if name in TORCH_ORDERS else 2 if name in _VEES else draw.choice([1, 2, 3])
    microbatches = draw.choice([1, 2, 3, 4, 5, 6, 8, 9, 12])
    if name == "Schedule1F1B":
        microbatches = max(microbatches, world)
    elif name == "ScheduleDualPipeV":
        microbatches = max(microbatches, 2 * world)
    elif name in _LOOPS[:2]:
        microbatches = world * draw.choice([1, 2, 3])
    kind = draw.choice(
        ["mixed", "mixed", "blocks", "raw", "autocast", *["repeated"] * 4, *VARIANTS]
    )
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
    case = Case(
        schedule=name,
        microbatches=microbatches,
        chunks=chunks,
        steps=1,
        part=functools.partial(
            _make_part, seed, kind, draw.choice([0.0, 0.3]), draw.choice([None, False])
        ),
        options=draw.choice([{}, {}, {"scale_grads": False}]),
        vee=name in _VEES,
        pieces=draw.choice([1, 1, 2]),
        dtype=torch.float32 if kind in ("autocast", "repeated") else draw.choice(dtypes),
        source="built" if name in TORCH_ORDERS or draw.random() < 0.6 else draw.choice([*SOURCES]),
    )
    options: dict[str, Any] = {
        "schedule": draw.choice(_ORDERS),
        "delay_wgrad_compute": draw.choice(["auto", "on", "off"]),
        "overlap_p2p_comm": draw.choice([True, True, False]),
        "memory_limit": draw.choice(["auto", "1x", "1.5x", "3x"]),
    }
    possible = (
        ("evaluates", "freezes", "clips", "changes mode", "loads")
        if not case.vee
        else ("clips", "loads")
    )
    habits = frozenset(habit for habit in possible if draw.random() < 0.25)
    granularity = draw.choice(["none", "none", "full", "selective"])
    return RandomPipeline(
        seed, world, case, kind, options, draw.choice([2, 3, 6]), habits, granularity
    )


def _make_part(
    seed: int, kind: str, dropout: float, reentrant: bool | None, index: int
) -> nn.Module:
    draw = random.Random(f"{seed} {index}")
    names = [name for name in PARTS if name not in _UNFIT]

    def make_one() -> nn.Module:
        return Variant(draw.choice(VARIANTS)) if draw.random() < 0.5 else Block(dropout, reentrant)

    if kind == "mixed":
        return Part(*[make_one() for _ in range(draw.randint(1, 3))])
    if kind == "repeated":
        return Part(*[Repeated(draw.choice(names)) for _ in range(draw.randint(1, 3))])
    if kind == "blocks":
        return Part(*[Block(dropout, reentrant) for _ in range(draw.randint(1, 3))])
    if kind == "autocast":
        return Autocast(Part(Block(dropout, reentrant), make_one()))
    return Raw() if kind == "raw" else Variant(kind)


def _train(pipeline: RandomPipeline) -> list[Any]:
    """Return the records of the loop on this rank."""
    case, habits = pipeline.case, pipeline.habits
    seed_streams()
    schedule, parts = make_schedule(case)
    params = [
        (f"{i}.{name}", param)
        for i, part in enumerate(parts)
        for name, param in part.named_parameters()
    ]
    optimizer = torch.optim.AdamW([param for _, param in params if param.requires_grad], lr=1e-2)
    stages, found = list_stages(schedule), []
    is_first, is_last = (
        any(stage.is_first for stage in stages),
        any(stage.is_last for stage in stages),
    )
    rows = torch.ones(case.microbatches * ROWS, 2, WIDTH, dtype=case.dtype)
    may_freeze = [param for _, param in params[::3] if param.requires_grad]
    for number in range(pipeline.rounds):
        if "freezes" in habits:
            for param in may_freeze:
                param.requires_grad_(number % 2 == 0)
        if "changes mode" in habits:
            for part in parts:
                part.train(number % 2 == 0)
        found += run_steps(case, schedule, params, optimizer, number)
        if "evaluates" in habits:
            out = schedule.eval(*((rows,) if is_first else ()), target=rows if is_last else None)
            found.append(None if out is None else out.detach().clone())
        if "clips" in habits:
            found.append(nn.utils.clip_grad_norm_([param for _, param in params], 0.1).clone())
        if "loads" in habits:
            for part in parts:
                part.load_state_dict(
                    {name: value.clone() for name, value in part.state_dict().items()}
                )
    return found


def _finite(value: Any) -> Any:
    """Return a result in which NaN, which no comparison finds equal, is a number."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value.nan_to_num(nan=7.5) if isinstance(value, Tensor) else value


def run_stock(seed: int) -> None:
    """Run the program of a seed on this rank, stock."""
    program = make_program(seed)
    if isinstance(program, random_cuts.RandomCut):
        random_cuts.run_stock(program)
    else:
        _train(program)


def run_both(seed: int) -> tuple[list[str], int]:
    """Run it stock and patched; return where the results differ, and how many steps the feature ran.

    What differs in a second stock run as well does not count: torch infers shapes with memory that holds anything, of
    which the averages of batch norms take notice.
    """
    pipeline = make_program(seed)
    if isinstance(pipeline, random_cuts.RandomCut):
        return random_cuts.run_both(pipeline)
    stock = _train(pipeline)
    if differences(_finite(stock), _finite(_train(pipeline))):
        return [], 1
    recompute = {"granularity": pipeline.granularity, "blocks": _BLOCKS}
    options = {"pipeline": pipeline.options, "recompute": recompute}
    with ovpatch.applied("pipeline", "recompute", options=options):
        before = counters()["steps"]
        patched = _train(pipeline)
        return differences(_finite(stock), _finite(patched))[:4], counters()["steps"] - before
