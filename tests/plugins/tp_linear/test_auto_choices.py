"""Schedule ``auto`` runs what it has chosen: each operator, in each direction, by exactly this schedule."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from ovpatch.overlap.kernels.autotuner import Autotuner, Choice, Tuning
from ovpatch.overlap.tensor_parallel import tp_group
from ovpatch.overlap.tensor_parallel.operators import (
    GATHER_LINEARS,
    INPUT_GRADS_SCATTER,
    LINEAR_SCATTER,
    OPERATORS,
)
from ovpatch.overlap.tensor_parallel.schedule_table import MEASURED_NAMES
from ovpatch.overlap.tensor_parallel.schedules import (
    Schedule,
    autotuned,
    copied,
    find_schedule,
    fused,
    overlapped,
)
from ovpatch.overlap.tensor_parallel.schedules.autotuned import Auto, Pair
from tests.plugins.tp_linear import test_frozen, test_operators
from tests.plugins.tp_linear.arms import Record, apply, draw, mesh, part, seen
from tests.plugins.tp_linear.test_copied import copies_allowed
from tests.support.equality import compare

Calls = list[tuple[str, str]]
"""The schedules that computed, each with the method that was called."""

CLASSES: Final[tuple[Any, ...]] = (
    Schedule,
    overlapped.Bulk,
    overlapped.SplitGather,
    overlapped.Chunk,
    overlapped.Ring,
    copied.Copied,
    fused.Fused,
    Auto,
    Pair,
)
METHODS: Final = (
    "gather_linear",
    "gather_linear_backward",
    "linear_scatter",
    "linear_scatter_backward",
    "finish_scatter_backward",
    "linear_reduce",
    "replicated_linear_backward",
)


# --- the choices, and who computes ---


class Choices:
    """The choices of the autotuner, by ``operator direction``; all others are its default.

    Attributes:
        by_key: The names of the schedules.
        requested: The keys for which a choice was requested.
    """

    def __init__(self, operator: str, names: Sequence[str] = ()) -> None:
        keys = [f"{operator} {direction}" for direction in ("forward", "backward")]
        self.by_key = dict(zip(keys, names, strict=True)) if names else {}
        self.requested: set[str] = set()

    def tune(self, _: Autotuner, group: Any, tuning: Tuning) -> Choice:
        """Replace :meth:`.Autotuner.tune`."""
        key = tuning.key.partition(",")[0]
        self.requested.add(key)
        name = self.by_key.get(key, tuning.default)
        assert name in filter(tuning.usable, tuning.candidates)
        return Choice(name, "")


@contextlib.contextmanager
def chosen(choices: Choices) -> Iterator[Calls]:
    """Let the autotuner choose, and record the schedule of each computation."""
    # The operators keep choices by group, and contexts of calls keep their group until the generation changes.
    tp_group.drop_tp_groups()
    with (
        mock.patch.object(Autotuner, "tune", lambda *args: choices.tune(*args)),
        recorded() as calls,
    ):
        yield calls
    tp_group.drop_tp_groups()


@contextlib.contextmanager
def recorded() -> Iterator[Calls]:
    """Record the schedule of each computation; ``auto`` if it called no other schedule."""
    calls: Calls = []
    within: list[str] = []

    def record(method: str, function: Any) -> Callable[..., Any]:
        # Callers have an object of the schedule, so the replacement of a static method has one as well.
        is_static = isinstance(function, staticmethod)
        compute = function.__func__ if is_static else function

        def run(self: Schedule, *args: Any, **kwargs: Any) -> Any:
            given = args if is_static else (self, *args)
            # A schedule's methods call each other.
            if within:
                return compute(*given, **kwargs)
            before = len(calls)
            if isinstance(self, (Auto, Pair)):
                result = compute(*given, **kwargs)
                calls.extend([("auto", method)] if len(calls) == before else [])
                return result
            calls.append((self.name, method))
            within.append(self.name)
            try:
                return compute(*given, **kwargs)
            finally:
                within.pop()

        return run

    with contextlib.ExitStack() as stack:
        for cls, method in itertools.product(CLASSES, METHODS):
            if method in vars(cls):
                run = record(method, vars(cls)[method])
                stack.enter_context(mock.patch.object(cls, method, run))
        yield calls


def list_choices(operator: str) -> list[Choices]:
    """Return choices for an operator, so that each schedule of the CPU is chosen once for each direction."""
    schedules = {
        schedule.name: schedule
        for schedule in (find_schedule(name, 4) for name in MEASURED_NAMES if name != "fused")
    }
    forward, backward = (
        autotuned._list_distinct(schedules, operator + suffix) for suffix in ("", "_backward")
    )
    # The other direction has another schedule if there are several.
    return [
        Choices(operator, (forward[i % len(forward)], backward[(i + 1) % len(backward)]))
        for i in range(max(len(forward), len(backward)))
    ]


def check(
    case: str, operator: str, choices: Choices, calls: Calls, *, sends_grad: bool, forwards: int = 1
) -> list[str]:
    """Return a line if other schedules computed than those that were chosen.

    Args:
        case: The name of the case.
        operator: The operator.
        choices: The choices.
        calls: The schedules that computed.
        sends_grad: Whether the backward sends anything.
        forwards: The number of forwards.
    """
    name, suffix = choices.by_key, "_backward"
    wanted: list[Calls] = [[], []]
    # Only these operators send anything in forward, or have a choice in backward.
    if operator in ("gather_linear", "linear_scatter", "linear_reduce"):
        wanted[0] = [(name[f"{operator} forward"], operator)] * forwards
    if operator in ("gather_linear", "linear_scatter") and sends_grad:
        wanted[1] = [(name[f"{operator} backward"], operator + suffix)]
    if operator == "replicated_linear" and sends_grad:
        wanted[1] = [("auto", operator + suffix)]
    found = [[call for call in calls if call[1].endswith(suffix) is late] for late in (False, True)]
    return [] if found == wanted else [f"{case}, {name}: {found}, not {wanted}"]


# --- linears that parallelize_module has cut ---


PLANS: Final = {
    "gather": "gather_linear",
    "shared gather": "gather_linear",
    "scatter": "linear_scatter",
    "reduce": "linear_reduce",
    "replicated": "replicated_linear",
    "local": "local_linear",
}


def run_model(plan: str, frozen: str, needs: bool, how: str) -> Record:
    """Return the results of a parallel model; see :data:`.test_frozen.PLANS`."""
    stock_plan = "replicated" if plan == "local" else plan
    model = test_frozen.made(stock_plan, frozen)
    leaf, x = test_frozen.given(stock_plan, needs)
    if how == "autocast":
        model, x = model.float(), x.float()
    if plan == "local":
        x = DTensor.from_local(x, mesh(), [Replicate()], run_check=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = checkpoint(model, x, use_reentrant=False) if how == "checkpoint" else model(x)
    if y.requires_grad:
        y.square().sum().backward()
    return {"y": part(y), "x": leaf.grad, **seen(model)}


def find_wrong_models(plan: str) -> list[str]:
    """Return the cases of a plan in which other schedules computed than those that were chosen."""
    operator, found = PLANS[plan], []
    frozen = ("", "a", "ab") if plan == "shared gather" else ("", "a")
    cases = [*itertools.product(frozen, (True, False), ("",)), ("", True, "checkpoint")]
    for frozen_names, needs, how in [*cases, ("", True, "autocast")]:
        stock = run_model(plan, frozen_names, needs, how)
        for regather in (False, True) if operator == "gather_linear" else (False,):
            for choices in list_choices(operator):
                options = {"schedule": "auto", "regather": regather}
                with apply(options), chosen(choices) as calls:
                    ours = run_model(plan, frozen_names, needs, how)
                # Rounded terms of sums differ in their last bits, of which bf16 has 8.
                compare(stock, ours, floor=0.25 if how == "autocast" else 1e-10).assert_equal()
                case = f"{plan}, frozen {frozen_names}, {needs}, {how}, {regather}"
                if plan == "shared gather":
                    calls = _add_shared_gather(choices, calls, how)
                # Nothing is sent if neither the input nor the weight needs a gradient, or for a constant input.
                sends_grad = needs or (plan == "scatter" and not frozen_names)
                forwards = 2 if how == "checkpoint" else 1
                found += check(
                    case, operator, choices, calls, sends_grad=sends_grad, forwards=forwards
                )
    return found


def _add_shared_gather(choices: Choices, calls: Calls, how: str) -> Calls:
    """Return the calls, with those of a shared gather whose linears compute after it.

    They call no schedule. These are gathers by a schedule that splits no GEMM, and gathers under autocast, for which
    nothing may be chosen.
    """
    key = "gather_linear forward"
    name = choices.by_key[key]
    if how == "autocast":
        assert key not in choices.requested
        return [(name, "gather_linear"), *calls]
    assert key in choices.requested
    forwards = 2 if how == "checkpoint" else 1
    return calls if name != "stock" else [(name, "gather_linear")] * forwards + calls


def find_wrong() -> list[str]:
    with copies_allowed():
        return [line for plan in PLANS for line in find_wrong_models(plan)]


def test_linears_run_what_was_chosen(ranks):
    assert set(PLANS.values()) == set(OPERATORS)
    assert ranks(2)(find_wrong, timeout=240) == [[], []]


# --- the operators alone, and those of compiled graphs ---


def find_wrong_operators() -> list[str]:
    """Return the cases of operators in which other schedules computed, or whose results differ from the full GEMM."""
    found = []
    operators_by_name: dict[str, Any] = {
        "gather_linear": test_operators.gathered,
        "linear_scatter": test_operators.scattered,
    }
    with copies_allowed():
        for operator, run in operators_by_name.items():
            for name, case in test_operators.CASES[run].items():
                for choices in list_choices(operator):
                    with chosen(choices) as calls:
                        pairs = run(case, {"schedule": "auto"})
                    for value, ours, theirs in pairs:
                        if ours is not theirs and not torch.allclose(ours, theirs, 1e-12, 1e-11):
                            found.append(f"{name}: {value}")
                    is_constant = operator == "gather_linear" and "x" in case.get("frozen", ())
                    found += check(name, operator, choices, calls, sends_grad=not is_constant)
    return found


def test_operators_run_what_was_chosen(ranks):
    assert ranks(2)(find_wrong_operators, timeout=120) == [[], []]


def find_wrong_graph_nodes() -> list[str]:
    """Return the operators of compiled graphs that other schedules computed, or whose results differ."""
    world, found = dist.get_world_size(), []
    x, wide = (draw(rows, 10, seed=rows, dtype=torch.float64) for rows in (8, 8 * world))
    weights = [draw(6, 10, seed=seed, dtype=torch.float64) for seed in (1, 2)]
    bias, group = draw(6, seed=3, dtype=torch.float64), dist.group.WORLD.group_name
    grads = [draw(8 * world, 6, seed=seed, dtype=torch.float64) for seed in (4, 5)]
    nodes: dict[str, tuple[str, str, Callable[[str], Any]]] = {
        "gather": (
            "gather_linear",
            "forward",
            lambda schedule: GATHER_LINEARS(x, weights, [bias, None], group, schedule, True),
        ),
        "scatter": (
            "linear_scatter",
            "forward",
            lambda schedule: LINEAR_SCATTER(wide, weights[0], bias, group, schedule),
        ),
        "scatter of input gradients": (
            "gather_linear",
            "backward",
            lambda schedule: INPUT_GRADS_SCATTER(grads, weights, group, schedule),
        ),
    }
    with copies_allowed():
        for name, (operator, direction, run) in nodes.items():
            wanted = run("stock")
            for choices in list_choices(operator):
                with chosen(choices) as calls:
                    ours = run("auto4")
                compare(wanted, ours, floor=1e-10).assert_equal()
                method = operator if direction == "forward" else f"{operator}_backward"
                expected = [(choices.by_key[f"{operator} {direction}"], method)]
                found += [] if calls == expected else [f"{name}: {calls}, chosen: {expected}"]
    return found


def test_nodes_of_graphs_run_what_was_chosen(ranks):
    assert ranks(2)(find_wrong_graph_nodes, timeout=120) == [[], []]
