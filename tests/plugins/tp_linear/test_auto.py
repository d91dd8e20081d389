"""Schedule ``auto`` makes choices, and every choice computes the results of stock PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ovpatch
from ovpatch.overlap.comm.consensus import RankMismatchError
from ovpatch.overlap.kernels.autotuner import report_lines
from ovpatch.overlap.tensor_parallel import tp_group
from ovpatch.overlap.tensor_parallel.schedule_table import MEASURED_NAMES
from ovpatch.overlap.tensor_parallel.schedules import autotuned, find_schedule, overlapped
from ovpatch.overlap.tensor_parallel.schedules.autotuned import (
    Auto,
    Shape,
    count_most_rows,
    round_rows,
)
from ovpatch_plugins.tp_linear import all_gather_linear, linear_reduce_scatter
from tests.plugins.ddp.arms import counted, seeded
from tests.plugins.tp_linear import test_compiled, test_gpu, test_llama, test_operators, test_shared
from tests.plugins.tp_linear.arms import Record, apply, both, counters, draw, mesh
from tests.plugins.tp_linear.models import MLP, WIDTH
from tests.plugins.tp_linear.training import equal
from tests.support import races
from tests.support.races import NOWHERE
from tests.support.rarely import RARELY

AUTO = {"schedule": "auto"}


@contextlib.contextmanager
def forced(first: int) -> Iterator[list[str]]:
    """Let schedules win in turn, without the choices of earlier groups."""
    tp_group.drop_tp_groups()
    with races.forced(first) as won:
        yield won
    tp_group.drop_tp_groups()


def won_by(first: int, function: Any, *args: Any, **kwargs: Any) -> tuple[Record, list[str]]:
    with forced(first) as won:
        return both(function, *args, **kwargs), won


# --- the operators alone ---


def wrong() -> tuple[list[str], set[str]]:
    """Return the wrong results of operators with any winner, and the schedules that won."""
    found, winners = [], set()
    for first in range(len(MEASURED_NAMES)):
        with forced(first) as won:
            for operator, cases in test_operators.CASES.items():
                for name, case in cases.items():
                    regather = (
                        {"regather": True}
                        if operator is test_operators.gathered and first % 2
                        else {}
                    )
                    for value, ours, theirs in operator(case, AUTO | regather):
                        same = ours is theirs is None or torch.allclose(ours, theirs, 1e-12, 1e-11)
                        found += [] if same else [f"{name}: {value}"]
            winners.update(won)
    return found, winners


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_operators_compute_the_same_whoever_wins(ranks, world):
    for found, winners in ranks(world)(wrong, env=NOWHERE):
        assert not found
        assert {"stock", "bulk", "ring", "chunk4"} <= winners


def measuring(sizes: list[int]) -> Record:
    """Call two operators, forward and backward, and return the lines that they add to the report."""
    world, group = dist.get_world_size(), dist.group.WORLD
    before = len(report_lines("tp_linear"))
    for size in sizes:
        x, weight = draw(size, 32, seed=1).requires_grad_(), draw(16, 32, seed=2).requires_grad_()
        (y,) = all_gather_linear(x, [weight], group, schedule="auto")
        linear_reduce_scatter(
            y, draw(8, 16, seed=3).requires_grad_(), group, schedule="auto"
        ).sum().backward()
        assert x.grad is not None
        assert y.shape == (size * world, 16)
    return {"lines": report_lines("tp_linear")[before:]}


def test_rows_are_rounded_to_four_numbers_between_powers_of_two():
    assert [round_rows(rows) for rows in (0, 1, 7, 8, 9, 11, 2048, 2200, 2304, 4000)] == [
        *(1, 1, 7, 8, 10, 12, 2048, 2048, 2560, 4096),
    ]
    assert {round_rows(rows) for rows in range(1024, 2049)} == {1024, 1280, 1536, 1792, 2048}
    for rows in range(1, 3000):
        most = count_most_rows(round_rows(rows))
        assert most >= rows
        assert round_rows(most) == round_rows(rows) != round_rows(most + 1)


def test_each_shape_is_measured_once_and_kept(ranks, tmp_path):
    env = {"OVPATCH_CACHE_DIR": str(tmp_path)}
    first, second = ranks(2)(measuring, [64, 96, 95, 64], env=env)
    assert first == second
    lines = first["lines"]
    assert len(lines) == 2 * 2 * 2, "two shapes, two operators, two directions"
    assert lines[0].startswith("gather_linear forward, 64 x 32 -> 16, float32, 2 ranks: ")
    assert "fused" not in lines[0], "on the CPU, fused computes as bulk does"
    assert all(name in lines[0] for name in ("stock ", "ring ", "chunk4 ", "; measured)"))
    assert "bulk" not in lines[0], "bulk computes this forward as the schedule stock does"
    assert lines[1].startswith("gather_linear backward, 64 x 32 -> 16, float32, 2 ranks: ")
    assert lines[3].startswith("linear_scatter backward, 64 x 16 -> 8, float32, 2 ranks: ")
    (again,) = {tuple(result["lines"]) for result in ranks(2)(measuring, [96, 128], env=env)}
    assert [line.endswith("measured in an earlier run)") for line in again] == [True] * 4 + [
        False
    ] * 4


def shapes_that_differ() -> str:
    with pytest.raises(RankMismatchError) as caught:
        all_gather_linear(
            torch.ones(4, 8),
            [torch.ones(2 + dist.get_rank(), 8)],
            dist.group.WORLD,
            schedule="auto",
        )
    return str(caught.value)


def test_shapes_that_differ_between_ranks_are_named(ranks):
    for text in ranks(2)(shapes_that_differ):
        assert "4 x 8 -> 2, float32, 2 ranks" in text
        assert "4 x 8 -> 3, float32, 2 ranks" in text


def test_only_schedules_that_differ_are_measured():
    arms = {name: find_schedule(name, 4) for name in MEASURED_NAMES}
    assert "fused" in arms
    wires: Any = type("Wires", (), {"world": 2})()

    def names(operator: str, direction: str) -> tuple[str, ...]:
        shape = Shape(operator, 8, 4, (4,), torch.float32)
        found = Auto("auto", arms, "bulk", regathers=True).make_tuning(
            wires, torch.device("cpu"), shape, direction
        )
        assert found.candidates[0] == "stock"
        assert found.default in found.candidates
        return tuple(name for name in found.candidates if name not in ("fused", "copy"))

    assert names("gather_linear", "forward") == ("stock", "ring", "chunk")
    assert names("gather_linear", "backward") == ("stock", "bulk")
    assert names("linear_scatter", "forward") == ("stock", "ring", "chunk")
    assert names("linear_scatter", "backward") == ("stock", "ring", "chunk")
    assert names("linear_reduce", "forward") == ("stock", "ring", "chunk")
    assert names("linear_reduce", "backward") == ("stock",), "nothing is sent"


def backward_of_a_choice() -> int:
    """Return how often the schedule of a backward gathers, if another one is chosen for forward."""
    pair = autotuned.Pair(find_schedule("stock", 4), find_schedule("ring", 4))
    x, weight = torch.ones(8, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    with (
        mock.patch.object(Auto, "_choose", return_value=pair),
        mock.patch.object(overlapped.Ring, "gather_linear", autospec=True) as gathers,
    ):
        gathers.side_effect = overlapped.Chunk.gather_linear
        linear_reduce_scatter(x, weight, dist.group.WORLD, schedule="auto").sum().backward()
    return gathers.call_count


def test_the_schedule_that_is_chosen_for_a_backward_runs_it(ranks):
    assert ranks(2)(backward_of_a_choice) == [1, 1]


# --- models ---


MODELS: dict[str, dict[str, Any]] = {"": {}, "checkpoints": {"checkpointing": "reentrant"}}


def models() -> list[tuple[Record, list[str]]]:
    """Return the results of a model in stock PyTorch and with each winner, and the winners of each race."""
    stocks = {name: seeded(test_llama.llama, steps=1, **case) for name, case in MODELS.items()}
    found = []
    for first, options in enumerate(({}, {"regather": True}, {}, {"chunks": 2})):
        for name, case in MODELS.items():
            with forced(first) as won, apply({**AUTO, **options}):
                found.append(
                    (
                        {
                            "stock": stocks[name],
                            **counted(test_llama.llama, counters=counters, steps=1, **case),
                        },
                        won,
                    )
                )
    return found


def test_a_model_computes_the_same_whoever_wins(ranks):
    for results in ranks(2)(models, env=NOWHERE):
        for result, won in results:
            equal(result["stock"], result["patched"])
            assert result["counters"]["stock_calls"] == 0
            assert result["counters"]["shared_calls"] > 0
            assert len(won) > 4


def watched(watch: Any) -> list[Record]:
    """Return the results of layers whose gathered input has another reader, with each winner."""
    bodies = (test_shared.both_called, *test_shared.OTHER_READERS)
    stocks = [seeded(test_shared.watched, watch, body, "a", True) for body in bodies]
    found = []
    for first in (0, 1, 2):
        with forced(first), apply(AUTO):
            found += [
                {"stock": stock, "patched": seeded(test_shared.watched, watch, body, "a", True)}
                for body, stock in zip(bodies, stocks, strict=True)
            ]
    return found


@pytest.mark.parametrize("watch", test_shared.WATCHES, ids=lambda watch: watch.__name__)
def test_one_rank_alone_may_watch(ranks, watch):
    for results in ranks(2)(watched, watch, env=NOWHERE):
        for result in results:
            equal([result["stock"]], [result["patched"]], ("y", "x", "grads"))


def test_a_compiled_model(ranks):
    layouts, shape = test_compiled.LAYOUTS["second"]
    options = {**AUTO, **test_compiled.FUSED}
    for first in (1, 2):
        for result, won in ranks(2)(
            won_by,
            first,
            test_compiled.compiled_mlp,
            layouts,
            shape,
            True,
            "graphs",
            options=options,
            env=NOWHERE,
        ):
            equal(result["stock"], result["patched"])
            assert result["counters"]["compiled_calls"] == result["counters"]["calls"] > 0
            assert len(won) == 4


class Replicated(nn.Module):
    """A model of a linear that reads a replicated input, which has nothing to choose, and a linear that is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def reported(deterministic: bool) -> list[str]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(deterministic)
    state = torch.get_rng_state()
    try:
        with ovpatch.applied("tp_linear", options={"tp_linear": AUTO}):
            model = Replicated()
            parallelize_module(
                model, mesh(), {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
            )
            state = torch.get_rng_state()
            for _ in range(2):
                model(draw(64, WIDTH).requires_grad_()).sum().backward()
            assert torch.equal(state, torch.get_rng_state())
            return [
                line
                for line in ovpatch.report()["tp_linear"].remarks
                if line.startswith("linear_reduce forward")
            ]
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_report_shows_what_was_chosen(ranks, tmp_path):
    for deterministic, why in (
        (False, "; measured)"),
        (True, "not measured, since algorithms must be deterministic)"),
    ):
        for lines in ranks(2)(reported, deterministic, env={"OVPATCH_CACHE_DIR": str(tmp_path)}):
            assert lines[-1].startswith("linear_reduce forward, 64 x 24 -> 24, float32, 2 ranks: ")
            assert lines[-1].endswith(why)


# --- on GPUs ---

NCCL = {"backend": "nccl", "timeout": 120, "env": NOWHERE}


@pytest.mark.gpu(2)
def test_models_and_graphs_on_gpus(ranks):
    for result in ranks(2)(both, test_llama.llama, steps=1, options=AUTO, **NCCL):
        equal(result["stock"], result["patched"])
        assert result["counters"]["shared_calls"] > 0
    for result in ranks(2)(both, test_gpu.replayed, options=AUTO, **NCCL):
        for replayed, eager in result["patched"]["steps"]:
            equal([{"": eager}], [{"": replayed}])


def measure_on_gpu() -> Record:
    """Return changes of memory and of a generator's state after first calls, and the result of a captured new shape."""
    group, width = dist.group.WORLD, 1024
    weight = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    allocated, reserved = [], []
    state = torch.cuda.get_rng_state()
    for rows in (256, 2048, 4096, 8192):
        x = torch.ones(rows, width, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            all_gather_linear(x, [weight], group, schedule="auto")
        del x
        allocated.append(torch.cuda.memory_allocated())
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    x, before = (
        torch.ones(512, width, device="cuda", dtype=torch.bfloat16),
        len(report_lines("tp_linear")),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        (y,) = all_gather_linear(x, [weight], group, schedule="auto")
    graph.replay()
    right = torch.allclose(y, torch.ones_like(x).repeat(2, 1) @ weight.t(), rtol=0.02, atol=0.5)
    return {
        "allocated": allocated,
        "reserved": reserved,
        "rng": torch.equal(state, torch.cuda.get_rng_state()),
        "captured": len(report_lines("tp_linear")) - before,
        "right": right,
    }


@pytest.mark.gpu(2)
def test_measuring_keeps_no_memory(ranks):
    for result in ranks(2)(measure_on_gpu, **NCCL):
        assert result["rng"]
        assert result["right"]
        assert not result["captured"], "a capture measures nothing"
        # Torch keeps some hundred bytes whenever symmetric memory is shared, which grows with the rows.
        assert max(result["allocated"][1:]) - result["allocated"][1] <= 4096, result
        assert result["reserved"][-1] <= result["reserved"][1], result


def test_schedules_that_race():
    arms = {name: find_schedule(name, 4) for name in MEASURED_NAMES}
    names = autotuned._list_distinct(arms, "gather_linear")
    assert names == ("stock", "ring", "chunk", "fused", "copy")
    names = autotuned._list_distinct(arms, "gather_linear_backward")
    assert names == ("stock", "bulk", "fused", "copy")
    assert autotuned._list_distinct(arms, "linear_scatter_backward") == (
        "stock",
        "ring",
        "chunk",
        "fused",
        "copy",
    )
