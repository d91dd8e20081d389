"""Schedule ``copy`` on two and three ranks of a CPU, whose windows are files that the processes share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ovpatch
from ovpatch.overlap.comm.lifetimes import drop_values, group_state
from ovpatch.overlap.kernels import autotuner
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.copy_choice import ROW_ENGINE
from ovpatch.overlap.kernels.copy_collectives import Engine
from ovpatch.overlap.tensor_parallel import tp_group
from ovpatch.overlap.tensor_parallel.schedules import copied, find_schedule, fused
from ovpatch.overlap.tensor_parallel.schedules.autotuned import Auto, Shape
from ovpatch.overlap.tensor_parallel.tp_group import get_tp_group
from ovpatch_plugins.tp_linear import (
    all_gather_linear,
    linear_reduce_scatter,
    tp_linear_feature,
)
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS
from tests.plugins.tp_linear import test_drifted_copies, test_llama, test_operators
from tests.plugins.tp_linear.arms import both, device, mesh
from tests.plugins.tp_linear.training import equal
from tests.support import windows
from tests.support.races import NOWHERE
from tests.support.rarely import RARELY

COPY = {"schedule": "copy"}
CASES: list[dict[str, Any]] = [
    {},
    {"checkpointing": "not reentrant", "frozen": "attention"},
    {"micro": 3},
]


@contextlib.contextmanager
def copies_allowed(slot_bytes: int = 1 << 20) -> Iterator[None]:
    """Let this process copy between ranks of the CPU."""
    with (
        mock.patch.object(copied, "allocate_window", windows.allocate),
        mock.patch.object(copied, "_SLOT_BYTES", slot_bytes),
        mock.patch.object(memory, "unsupported_reason", return_value=""),
    ):
        copied.drop_copy_support()
        yield
        copied.drop_copy_support()


def differing_values(slot_bytes: int) -> tuple[list[str], int]:
    """Return the values and gradients of operators that differ from the full GEMM, and the number of copies."""
    with copies_allowed(slot_bytes):
        used = COUNTERS.copied
        return list(find_differences()), COUNTERS.copied - used


def find_differences() -> Iterator[str]:
    for operator, cases in test_operators.CASES.items():
        for name, case in cases.items():
            for regather in (False, True) if operator is test_operators.gathered else (None,):
                way = COPY if regather is None else COPY | {"regather": regather}
                for value, ours, theirs in operator(case, way):
                    if (ours is None) != (theirs is None):
                        yield f"{name}, {way}: {value} is {ours}, expected {theirs}"
                    elif ours is not None and not torch.allclose(ours, theirs, 1e-9, 1e-9):
                        yield f"{name}, {way}: {value} differs by {(ours - theirs).abs().max()}"


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_operators_alone(ranks, world):
    for found, copies in ranks(world)(differing_values, 1 << 20):
        assert found == []
        assert copies > 0


def test_calls_that_do_not_fit_into_the_window_compute_as_bulk(ranks):
    for found, copies in ranks(2)(differing_values, 128):
        assert found == []
        # Only the sums of gradients, which take several rounds, are copied.
        assert copies > 0


def train_blocks() -> list[dict[str, Any]]:
    with copies_allowed():
        drifted = both(lambda: [test_drifted_copies.trained("blocks", "bias")], options=COPY)
        return [drifted, *(both(test_llama.llama, options=COPY, **case) for case in CASES)]


def test_blocks(ranks):
    for results in ranks(2)(train_blocks, timeout=180):
        for result in results:
            equal(result["stock"], result["patched"])
            assert result["counters"]["copied"] > 0


def fall_back() -> tuple[bool, int, list[str]]:
    """Return whether operators on the CPU compute as with ``bulk``, the counter, and the remarks of the report."""
    x, weight, used = torch.ones(4, 8), torch.ones(16, 8), COUNTERS.copied
    found = [
        all_gather_linear(x, [weight], dist.group.WORLD, schedule=name)[0]
        for name in ("copy", "bulk")
    ]
    remarks = list(tp_linear_feature.list_remarks())
    copied.drop_copy_support()
    return torch.equal(*found), COUNTERS.copied - used, remarks


def test_without_gpus_copy_falls_back_to_bulk_and_reports_it(ranks):
    for same, count, remarks in ranks(2)(fall_back):
        assert same
        assert count == 0
        wanted = "schedule copy computes as bulk does: tensors are on cpu, not on CUDA devices (rank 0, 1)"
        assert wanted in remarks


def reverted() -> list[bool]:
    """Return whether the group has an engine, while the feature is applied and after it is reverted."""
    key, found = (ROW_ENGINE, torch.device("cpu")), []
    with copies_allowed():
        with ovpatch.applied("tp_linear", options={"tp_linear": COPY}):
            test_llama.llama(steps=1)
            values = group_state(mesh().get_group()).values
            found.append(key in values)
        return [*found, key in values]


def test_revert_drops_the_engine(ranks):
    for found in ranks(2)(reverted):
        assert found == [True, False]


def calls_at_the_edge() -> list[str]:
    """Return the errors of calls without rows, after an error of the script, and after a race in which copies fail."""
    found = []
    with copies_allowed():
        weight = torch.ones(6, 4, dtype=torch.float64)
        empty = torch.ones(0, 4, dtype=torch.float64)
        (gathered,) = all_gather_linear(empty, [weight], dist.group.WORLD, **COPY)
        scattered = linear_reduce_scatter(empty, weight, dist.group.WORLD, **COPY)
        found += [str(out.shape) for out in (gathered, scattered) if out.shape != (0, 6)]
        x = torch.ones(8, 4, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            linear_reduce_scatter(x, weight[:, :3], dist.group.WORLD, **COPY)
        used = COUNTERS.copied
        right = linear_reduce_scatter(x, weight, dist.group.WORLD, **COPY)
        found += [] if bool((right == 4.0 * dist.get_world_size()).all()) else [f"sum: {right}"]
        engine = group_state(dist.group.WORLD).values[ROW_ENGINE, x.device].engine
        engine._is_within_call = True
        find_schedule("copy", 1).recover(get_tp_group(dist.group.WORLD, x.device), x.device)
        linear_reduce_scatter(x, weight, dist.group.WORLD, **COPY)
        found += [] if COUNTERS.copied == used + 2 else [f"{COUNTERS.copied - used} copies"]
    return found


def test_calls_at_the_edge(ranks):
    assert ranks(2)(calls_at_the_edge) == [[], []]


def fail_at_terms() -> list[str]:
    """Return wrong sums after calls in which the term of one owner failed, on all ranks."""
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    engine = Engine(group, torch.device("cpu"), allocate=windows.allocate, slot_bytes=4096)
    found = []
    for failing in (*range(world), None) * 2:

        def compute(owner: int, failing: int | None = failing) -> torch.Tensor:
            # A term without a gap has 6 numbers.
            return torch.full((5 if owner == failing else 6,), 10.0 * rank + owner)

        result = torch.zeros(6)
        if failing is None:
            engine.scatter_in_turn(result, compute).wait()
            wanted = sum(10.0 * peer + rank for peer in range(world))
            found += [] if bool((result == wanted).all()) else [f"{result}, not {wanted}"]
        else:
            with pytest.raises(ValueError, match="sizes match"):
                engine.scatter_in_turn(result, compute)
    return found


def test_an_error_in_any_term_of_a_sum_leaves_later_calls_right(ranks):
    assert ranks(3)(fail_at_terms) == [[]] * 3


# --- the memory ---


def run_operators(schedule: str, rows: int) -> Callable[[], list[torch.Tensor]]:
    """Call an operator, and return a function that runs its backward and returns the gradients."""
    on_gpu = device().type == "cuda"
    kind: Any = {
        "device": device(),
        "dtype": torch.bfloat16 if on_gpu else torch.float64,
    }
    width = 256 if on_gpu else 8
    x = torch.ones(rows, width, **kind).requires_grad_()
    weight = torch.ones(width, width, **kind).requires_grad_()
    y = linear_reduce_scatter(x, weight, dist.group.WORLD, schedule=schedule)

    def run_backward() -> list[torch.Tensor]:
        y.sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad]

    return run_backward


def has_engine() -> bool:
    found = group_state(dist.group.WORLD).values.get((ROW_ENGINE, device()))
    return found is not None and found.engine is not None


def race(winner: str, loser_of: str) -> tuple[list[bool], int]:
    """Let ``copy`` win a direction or none.

    Args:
        winner: The schedule that wins.
        loser_of: A direction in which the first schedule wins instead; "" for none.

    Returns:
        Whether there is a window after the first and the second shape, and the number of copies in the backward.
    """
    stock = autotuner.measure_candidates

    def measure(candidates: Any, *args: Any) -> dict[str, float]:
        for candidate in candidates.values():
            candidate()
        return {name: 1.0 if name == best[0] else 2.0 for name in candidates}

    tune, best = autotuner.Autotuner.tune, [winner]

    def tune_direction(self: Any, group: Any, tuning: Any) -> Any:
        best[0] = "stock" if loser_of and loser_of in tuning.key else winner
        return tune(self, group, tuning)

    tp_group.drop_tp_groups()
    drop_values(autotuner.Autotuner)
    allowed = contextlib.nullcontext() if device().type == "cuda" else copies_allowed()
    with (
        allowed,
        mock.patch.object(autotuner, "measure_candidates", measure),
        mock.patch.object(autotuner.Autotuner, "tune", tune_direction),
    ):
        copied.drop_copy_support()
        found = []
        for rows in (16, 64):
            run_backward = run_operators("auto", rows)
            found.append(has_engine())
            used = COUNTERS.copied
            run_backward()
        copies = COUNTERS.copied - used
        # The choice is known, but the window was freed, as after revert() and apply().
        tp_group.drop_tp_groups()
        copied.drop_copy_support()
        run_operators("auto", 64)()
        found.append(has_engine())
        copied.drop_copy_support()
    assert autotuner.measure_candidates is stock
    tp_group.drop_tp_groups()
    drop_values(autotuner.Autotuner)
    return found, copies


def races() -> list[tuple[list[bool], int]]:
    return [race("stock", ""), race("copy", "forward"), race("copy", "backward")]


def test_auto_keeps_the_window_only_if_copies_win(ranks):
    for nowhere, backward, forward in ranks(2)(races, env=NOWHERE):
        assert nowhere == ([False] * 3, 0)
        assert backward == ([True] * 3, 1)
        assert forward == ([True] * 3, 0)


@pytest.mark.gpu(2)
def test_auto_keeps_the_window_only_if_copies_win_on_gpus(ranks):
    for nowhere, backward, forward in ranks(2)(races, backend="nccl", timeout=120, env=NOWHERE):
        assert nowhere == ([False] * 3, 0)
        assert backward == ([True] * 3, 1)
        assert forward == ([True] * 3, 0)


def end_after_revert() -> tuple[bool, bool, int]:
    """Return whether a backward whose engine was dropped is right and creates none, and the number of its copies."""
    on_gpu = device().type == "cuda"
    with contextlib.nullcontext() if on_gpu else copies_allowed():
        grads = run_operators("copy", 16)()
        run_backward, used = run_operators("copy", 16), COUNTERS.copied
        assert has_engine()
        copied.drop_copy_support()
        ours = run_backward()
        same = all(torch.equal(*pair) for pair in zip(ours, grads, strict=True))
        return same, has_engine(), COUNTERS.copied - used


def test_a_backward_creates_no_engine(ranks):
    assert ranks(2)(end_after_revert) == [(True, False, 0)] * 2


@pytest.mark.gpu(2)
def test_a_backward_creates_no_engine_on_gpus(ranks):
    found = ranks(2)(end_after_revert, backend="nccl", timeout=120)
    assert found == [(True, False, 0)] * 2


def end_without_kernels() -> tuple[bool, int]:
    """Return whether a backward is right whose kernels were dropped, and how often it compares ranks."""
    x = torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(16, 16, dtype=torch.bfloat16)
    y = linear_reduce_scatter(x, weight, dist.group.WORLD, schedule="fused")
    fused.drop_fused_support()
    with mock.patch.object(memory, "unsupported_reason", return_value="") as compare:
        y.sum().backward()
    return bool((x.grad == 16).all()), compare.call_count


def test_a_backward_without_kernels_compares_no_ranks(ranks):
    assert ranks(2)(end_without_kernels) == [(True, 0)] * 2


def list_fitting() -> list[list[str]]:
    """Return, for numbers of rows that grow, the directions in which ``auto`` may choose copies."""
    ranks = get_tp_group(dist.group.WORLD, torch.device("cpu"))
    auto = find_schedule("auto", 4)
    assert isinstance(auto, Auto)
    found = []
    # A slot has room for 128 rows of 8 features, and rows up to 143 are rounded to 128.
    with copies_allowed(8192):
        for rows in (96, 112, 128):
            shape = Shape("linear_scatter", rows, 16, (8,), torch.float64)
            tunings = {
                direction: auto.make_tuning(ranks, torch.device("cpu"), shape, direction)
                for direction in ("forward", "backward")
            }
            found.append([name for name, tuning in tunings.items() if tuning.usable("copy")])
    return found


def test_auto_races_copies_only_if_all_rows_of_a_shape_fit(ranks):
    assert ranks(2)(list_fitting) == [[["forward", "backward"], ["forward", "backward"], []]] * 2
