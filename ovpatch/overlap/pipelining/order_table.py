"""The fixed orders of a pipeline, in one table for the option, its help, the races and the planner.

A new order is a row here. This module imports no torch and no builder of orders, because features read it when they
describe their options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class FixedOrder:
    """An order for one stage per rank: forwards, then backwards and forwards in turns, then backwards.

    Attributes:
        count_warmup: Returns the number of forwards before the first backward, from the number of the stage, of
            stages, and of microbatches. More than there are microbatches means all of them.
        count_lag: Returns the number of microbatches by which W follows B on a stage. None: backwards are full.
        torch_class: The class of torch that has the order, so that it needs no option. Default: none.
        is_experimental: Whether no result file shows a gain; see ``benchmarks/value.toml``.
        help: The sentence about its memory in the help of the option, which begins with the name. Default: none.
    """

    count_warmup: Callable[[int, int, int], int]
    count_lag: Callable[[int], int] | None = None
    torch_class: str = ""
    is_experimental: bool = False
    help: str = ""


ORDERS: Final[Mapping[str, FixedOrder]] = {
    "gpipe": FixedOrder(
        lambda stage, ranks, microbatches: microbatches, torch_class="ScheduleGPipe"
    ),
    "1f1b": FixedOrder(
        lambda stage, ranks, microbatches: ranks - stage, torch_class="Schedule1F1B"
    ),
    # The handcrafted orders of Zero Bubble Pipeline Parallelism (arXiv 2401.10241). At most `ranks` microbatches wait
    # for their W on any rank with the first, and `2 * ranks - 1` with the second.
    "zb-h1": FixedOrder(
        lambda stage, ranks, microbatches: ranks - stage,
        count_lag=lambda stage: stage,
        help="takes the memory of 1F1B.",
    ),
    "zb-h2": FixedOrder(
        lambda stage, ranks, microbatches: 2 * (ranks - stage) - 1,
        count_lag=lambda stage: 2 * stage,
        help="takes up to twice the memory of 1F1B.",
    ),
}
"""All fixed orders, by name.

An order with a parameter has a row for each useful value of it, such as ``eager-1`` and ``eager-2``, made by one
function. So the option offers these values, and races compare them, and merge those that are equal on few ranks. A
value that only the user can know needs an option, and an argument of :func:`.orders.build_order` that all of its
callers pass.
"""

TORCH_ORDERS: Final[Mapping[str, str]] = {
    order.torch_class: name for name, order in ORDERS.items() if order.torch_class
}
"""The names of the orders that torch has, by its class."""


def describe_orders() -> str:
    """Return the help of the orders, as the help of the option shows it."""
    return " ".join(f"{name} {order.help}" for name, order in ORDERS.items() if order.help)
