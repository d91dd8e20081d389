"""Schedule ``copy`` on two and three ranks of a CPU, whose windows are files that the processes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ovpatch
from ovpatch.overlap.comm.lifetimes import group_state
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.copy_choice import ROW_ENGINE
from ovpatch.overlap.tensor_parallel.schedules import copied, find_schedule
from ovpatch.overlap.tensor_parallel.tp_group import get_tp_group
from ovpatch_plugins.tp_linear import (
    all_gather_linear,
    linear_reduce_scatter,
    tp_linear_feature,
)
from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS
from tests.plugins.tp_linear import test_drifted_copies, test_llama, test_operators
from tests.plugins.tp_linear.arms import both, mesh
from tests.plugins.tp_linear.training import equal
from tests.support import windows
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
