"""Noise in bfloat16 and float32: other orders of sums are noise, and faults are found among it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ovpatch.insight.equality import Verdict
from ovpatch.insight.verify import recording
from ovpatch.insight.verify.compare import Noise, RunComparison, Size, compare_runs, judge_value
from ovpatch.insight.verify.recording import (
    MAX_KEPT_ELEMENTS,
    STEP,
    EventRecorder,
    RecordedRun,
    keep_value,
)
from tests.insight.chaos import Event, trained
from tests.support import patience
from tests.support.preloaded import preloaded

SEED, DRAWS = 1, 5
NONE = Size()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Event]], RecordedRun]:
    """Return the run of one process that records events."""

    def recorded(events: Sequence[Event]) -> RecordedRun:
        folder, step = tmp_path_factory.mktemp("run"), 1
        recorder = EventRecorder(folder)
        for event_type, values in events:
            recorder.record_event(event_type, values, step=step, label="AdamW")
            step += event_type == STEP
        recorder.flush_events()
        return recording.read_recorded(folder)

    return recorded


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def judged(request: pytest.FixtureRequest, recorded: Any) -> Callable[..., RunComparison]:
    """Return ``judged(fault, draws)``: it compares stock to a training in another order, with a fault."""
    stock, *noise_runs = (
        recorded(trained(SEED, order, request.param)) for order in range(DRAWS + 1)
    )

    def judged(fault: Any = None, draws: int = DRAWS) -> RunComparison:
        patched = recorded(trained(SEED, DRAWS + 1, request.param, fault=fault))
        return compare_runs(
            stock, patched, {f"reordered {n}": run for n, run in enumerate(noise_runs[:draws])}
        )

    return judged


def test_another_order_of_sums_is_noise(judged):
    compared = judged()
    assert compared.different == []
    assert len(compared.findings) > compared.values / 2


def dropped(when: str, step: int, named: Any, gradients: Any) -> None:
    """One rank's contribution to one gradient is lost."""
    if (when, step) == ("reduce", 3):
        gradients[1]["layers.1.up"] = torch.zeros_like(named["layers.1.up"])


def averaged_twice(when: str, step: int, named: Any, gradients: Any) -> None:
    if (when, step) == ("reduce", 3):
        for grads in gradients:
            grads["layers.2.norm.weight"] = grads["layers.2.norm.weight"] / 2


def stale(when: str, step: int, named: Any, before: Any) -> None:
    """A parameter is late by a step; in bfloat16 single elements of it go farther by chance."""
    if (when, step) == ("step", 3):
        named["layers.0.down"].data.copy_(before["layers.0.down"])


def stale_norm(when: str, step: int, named: Any, before: Any) -> None:
    """A step moves these numbers by a unit in the last place of bfloat16, or not at all."""
    if (when, step) == ("step", 2):
        named["layers.1.norm.weight"].data.copy_(before["layers.1.norm.weight"])


def rounded(when: str, step: int, named: Any, losses: Any) -> None:
    """A loss is computed in bfloat16 where stock does so in float32."""
    if when == "loss":
        losses[:] = [loss.bfloat16().float() for loss in losses]


FAULTS = {
    dropped: (3, "gradient layers.1.up"),
    averaged_twice: (3, "gradient layers.2.norm.weight"),
    stale: (3, "parameter layers.0.down"),
    stale_norm: (2, "parameter layers.1.norm.weight"),
    rounded: (1, "loss"),
}


# Where single precision loses a gradient or a parameter, test_verify_faults finds it.
FOUND = [(torch.bfloat16, fault) for fault in FAULTS] + [
    (torch.float32, fault) for fault in (dropped, rounded)
]


@pytest.mark.parametrize(("judged", "fault"), FOUND, indirect=["judged"])
def test_faults_are_found_among_noise_in_their_first_value(judged, fault):
    first = judged(fault).first
    assert first is not None
    assert (first.step, first.row.name) == FAULTS[fault]


# --- the rule ---


def steps(*values: dict[str, Tensor]) -> list[Event]:
    return [(STEP, {name: keep_value(value) for name, value in grads.items()}) for grads in values]


def test_noise_is_that_of_all_layers_and_steps_so_far_in_proportion(recorded):
    def layers(first: float, second: float, third: float, moved: float) -> dict[str, Tensor]:
        direction = torch.tensor([1.0, 0.0, 0.0, 0.0])
        return {
            "gradient layers.0.w": (first + first * moved) * direction,
            "gradient layers.1.w": second * direction,
            "gradient layers.1.v": second * direction,
            "gradient layers.2.w": third * torch.ones(5),
        }

    stock = recorded(
        steps(layers(1.0, 0.1, 1.0, 0.0), layers(1.0, 8.0, 1.0, 0.0), layers(2.0, 8.0, 1.0, 0.0))
    )
    noisy = recorded(
        steps(layers(1.0, 0.1, 1.0, 0.0), layers(1.0, 8.0, 1.0, 0.25), layers(2.0, 8.0, 1.0, 0.125))
    )
    noise, events = Noise(stock, [noisy]), list(stock.events("rank 0"))
    assert [noise.get_noise(event, "gradient layers.0.w").largest for event in events] == [
        0.0,
        0.25,
        0.25,
    ]
    # One of four elements moved.
    assert noise.get_noise(events[1], "gradient layers.0.w").mean == 0.125
    assert noise.get_noise(events[1], "gradient layers.1.w").largest == 0.25, (
        "no more than any of its like moved"
    )
    assert (
        noise.get_noise(events[2], "gradient layers.1.v")
        == noise.get_noise(events[2], "gradient layers.2.w")
        == NONE
    )
    small = recorded(steps(layers(1.0, 0.1, 1.0, 0.0), layers(1.0, 0.1, 1.0, 0.0)))
    noise = Noise(small, [recorded(steps(layers(1.0, 0.1, 1.0, 0.0), layers(1.0, 0.1, 1.0, 0.25)))])
    assert noise.get_noise(
        list(small.events("rank 0"))[1], "gradient layers.1.w"
    ).largest == pytest.approx(0.025)


def verdict_of(
    stock: Tensor, patched: Tensor, *, moving: bool = True, noise: Size = NONE
) -> Verdict:
    return judge_value(
        "w", keep_value(stock), keep_value(patched), [], floor=1e-6, noise=noise, moving=moving
    ).verdict


def test_few_elements_may_be_a_unit_off_where_the_noise_run_moved_anything():
    for dtype in (torch.bfloat16, torch.float16):
        stock = torch.full((32,), 0.75, dtype=dtype)
        units = torch.nextafter(stock, torch.full_like(stock, 2)) - stock
        few, many = (stock + units * (torch.arange(32) < count) for count in (4, 5))
        assert verdict_of(stock, few) is Verdict.WITHIN_NOISE
        assert verdict_of(stock, few, moving=False) is Verdict.DIFFERENT
        assert verdict_of(stock, many) is Verdict.DIFFERENT
        assert verdict_of(stock, stock + 2 * units * (torch.arange(32) < 1)) is Verdict.DIFFERENT
        assert verdict_of(stock[:1], many[:1]) is Verdict.WITHIN_NOISE
    below = torch.full((8,), 1 - torch.finfo(torch.bfloat16).eps / 2, dtype=torch.bfloat16)
    for changed, verdict in ((1.0, Verdict.WITHIN_NOISE), (1.0078125, Verdict.DIFFERENT)):
        assert verdict_of(below, below.index_fill(0, torch.tensor([2]), changed)) is verdict
    nan = torch.ones(32).index_fill(0, torch.tensor([3]), float("nan"))
    assert verdict_of(torch.ones(32), nan) is Verdict.DIFFERENT


@pytest.mark.parametrize("size", [64, 2 * MAX_KEPT_ELEMENTS])
def test_no_more_elements_may_move_than_noise_moves(size):
    stock = torch.zeros(size)
    noise = Size(2e-3, 5e-4)
    assert verdict_of(stock, torch.full((size,), 0.9e-3), noise=noise) is Verdict.WITHIN_NOISE
    assert verdict_of(stock, torch.full((size,), 1.1e-3), noise=noise) is Verdict.DIFFERENT


def test_a_single_element_may_go_farther_than_all_together():
    stock, noise = torch.zeros(4096), Size(2e-3, 5e-4)
    for moved, verdict in ((7.9e-3, Verdict.WITHIN_NOISE), (8.1e-3, Verdict.DIFFERENT)):
        assert (
            verdict_of(stock, stock.index_fill(0, torch.tensor([7]), moved), noise=noise) is verdict
        )
    for moved, verdict in ((2.9e-3, Verdict.WITHIN_NOISE), (3.1e-3, Verdict.DIFFERENT)):
        assert verdict_of(stock[0], stock[0] + moved, noise=Size(1e-3, 1e-3)) is verdict


# --- GEMMs with split sums, in each dtype and operator ---


# The replacements last for the rest of a process.
PROGRAM = """
import warnings
import torch
from ovpatch.insight.verify import noise_runs

warnings.simplefilter("error")

def values():
    torch.manual_seed(0)
    a, b, c = torch.randn(30, 200), torch.randn(200, 40), torch.randn(40)
    found = [a @ b, torch.addmm(c, a, b), torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.addmm(c, a, b, beta=0)]
    found += [torch.mm(a, b, out=torch.empty(0)), torch.addmm(c, a, b, beta=3, out=torch.empty(30, 40))]
    for called in (lambda layer: layer, lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer, x = torch.nn.Linear(200, 40), torch.randn(3, 30, 200, requires_grad=True)
        y = called(layer)(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, layer.weight.grad]
    must_move = len(found)
    with torch.inference_mode():
        found.append(layer(x.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        found.append(a @ b)
    found += [layer.bias.grad, a[:, :0] @ b[:0], a[:, :1] @ b[:1], a[:0] @ b, b.t() @ a.t()]
    found += [(a > 0).long() @ (b > 0).long(), (a.to(torch.complex64) * 1j).conj() @ b.to(torch.complex64)]
    return found, must_move

def distance(one, other):
    one, other = one.cdouble(), other.cdouble()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1.0)) if one.numel() else 0.0

stock, must_move = values()
runs = [stock]
for pieces in (2, 3, 1):
    noise_runs.split_products(pieces)
    ours, _ = values()
    far = [distance(one, other) > (1e-2 if one.dtype == torch.bfloat16 else 1e-5) for one, other in zip(stock, ours)]
    assert not any(far), (pieces, far)
    assert [(one.shape, one.dtype) for one in stock] == [(one.shape, one.dtype) for one in ours]
    if pieces > 1:
        for run in runs:
            moved = [not torch.equal(one, other) for one, other in zip(run, ours)]
            assert all(moved[:must_move]), (pieces, moved)
    runs.append(ours)
"""


def test_sums_are_near_and_not_the_same(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*preloaded(), str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience.scale(120))
    assert done.returncode == 0, done.stderr
