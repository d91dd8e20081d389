"""Two opposite pipelines have the bits of a model that trains on both halves of the microbatches in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ovpatch
from ovpatch.overlap.pipelining.ir import Kind, ScheduleError
from ovpatch.overlap.pipelining.order_rules import check_schedule
from ovpatch.overlap.pipelining.orders import (
    build_bidirectional_order,
    build_placement,
    split_backwards,
)
from ovpatch.planner.simulator import Costs, simulate
from ovpatch_plugins.pipeline import CutError, cut
from ovpatch_plugins.pipeline.pipeline_attach import SchedulePatches
from ovpatch_plugins.pipeline.pipeline_counters import COUNTERS
from tests.plugins.pipeline.cases import counters, differences, feature_report
from tests.plugins.pipeline.plain_models import (
    CONTEXT,
    WORDS,
    Decoder,
    DecoderBlock,
    differ,
    language_loss,
)
from tests.support.rarely import RARELY

ROWS = 2
_wrap_step = SchedulePatches.wrap_step


@dataclass(frozen=True)
class Ways:
    """A model and the way in which it trains.

    Attributes:
        make: Makes the model.
        patched: Options of the feature; None for stock PyTorch.
        microbatches: Their number.
        options: More arguments of ``cut()``.
        pieces: Calls of ``schedule.step()`` before an optimizer step.
        loose: Whether gradients are summed in another order.
    """

    make: Callable[[], nn.Module] = Decoder
    patched: dict[str, Any] | None = field(default_factory=dict)
    microbatches: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    pieces: int = 1
    loose: bool = False


class _Sometimes(DecoderBlock):
    """A block with a bias that only some microbatches use, and a bias that none uses."""

    def __init__(self) -> None:
        super().__init__(0.0, True)
        self.bias, self.unused = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        result = super().forward(x, mask)
        return result + self.bias if x[0, -1, 0] > 0 else result


def _make_sometimes() -> nn.Module:
    model = Decoder(layers=4)
    model.layers = nn.ModuleList(_Sometimes() for _ in range(4))
    return model


CASES = {
    "stock": Ways(patched=None),
    "patched": Ways(),
    "doubled": Ways(patched={"forward_doubling": True}),
    "doubled, an odd number": Ways(patched={"forward_doubling": True}, microbatches=6),
    "fewer than ranks": Ways(microbatches=2),
    "not deferred": Ways(patched={"delay_wgrad_compute": "off"}),
    "sums": Ways(options={"scale_grads": False}),
    "several calls": Ways(patched={"forward_doubling": True}, pieces=2),
    "tied": Ways(lambda: Decoder(tied=True), loose=True),
    "sometimes used": Ways(_make_sometimes, microbatches=4),
    "several calls, gradients in buckets": Ways(
        pieces=2,
        options={
            "wrap": lambda part: nn.parallel.DistributedDataParallel(
                part, process_group=_alone(), gradient_as_bucket_view=True
            )
        },
    ),
    "wrapped": Ways(
        patched={"forward_doubling": True},
        options={
            "wrap": lambda part: nn.parallel.DistributedDataParallel(part, process_group=_alone())
        },
    ),
}


def _alone() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


def _batch(case: Ways, step: int) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(step)
    rows = torch.randint(WORDS, (case.microbatches * ROWS, CONTEXT + 1), generator=data)
    return rows[:, :-1], rows[:, 1:]


def _cut(case: Ways, model: nn.Module, **more: Any) -> Any:
    return cut(
        model,
        more.pop("group", dist.group.WORLD),
        (torch.zeros(ROWS, CONTEXT, dtype=torch.long),),
        n_microbatches=case.microbatches,
        loss_fn=language_loss,
        **{"placement": "bidirectional", "balance": "count", **case.options, **more},
    )


def _fail_to_apply() -> tuple[int, int]:
    """Return the numbers of steps that the feature ran after a failed ``apply()``, and after a reverted one."""
    found = []
    for fails in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(SchedulePatches, "wrap_step", _wrap_some)
                with pytest.raises(ovpatch.FeatureError):
                    ovpatch.apply("pipeline")
            else:
                ovpatch.apply("pipeline")
                ovpatch.revert()
        before, case = COUNTERS.steps, Ways()
        torch.manual_seed(0)
        schedule, (ids, target) = _cut(case, Decoder()), _batch(case, 0)
        schedule.step(ids, target=target)
        found.append(COUNTERS.steps - before)
    return found[0], found[1]


def _wrap_some(self: SchedulePatches, original: Any, owner: str) -> Any:
    if owner == "_PipelineScheduleRuntime":
        raise ValueError("planted")
    return _wrap_step(self, original, owner)


def test_a_failed_apply_leaves_no_feature_on(ranks: Any) -> None:
    assert ranks(2)(_fail_to_apply) == [(0, 0), (0, 0)]


def _train_full_model(
    case: Ways, full_model: nn.Module, batch: tuple[Tensor, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Add to the gradients the sum of both halves' gradients; return losses and outputs."""
    half = case.microbatches // 2
    scale = case.options.get("scale_grads", True)
    earlier = [param.grad for param in full_model.parameters()]
    losses, outs, sums = [], [], []
    for way in range(2):
        full_model.zero_grad()
        for number in range(way * half, (way + 1) * half):
            ids, target = (rows[number * ROWS : (number + 1) * ROWS] for rows in batch)
            outs.append(full_model(ids))
            losses.append(language_loss(outs[-1], target))
            losses[-1].backward()
        grads = [param.grad for param in full_model.parameters()]
        sums.append([grad.div(half) if scale and grad is not None else grad for grad in grads])
    for param, before, down, up in zip(full_model.parameters(), earlier, *sums, strict=True):
        both = [grad for grad in (down, up) if grad is not None]
        param.grad = sum(both[1:], both[0]) if both else None
        if scale and param.grad is not None:
            param.grad = param.grad / 2
        if before is not None:
            kept = before / case.microbatches if scale else before
            param.grad = kept if param.grad is None else kept + param.grad
    return losses, outs


def _compare(case: Ways) -> list[str]:
    """Train two steps of the cut and of the full model; return the differences."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = case.make()
    full_model = copy.deepcopy(model)
    before = {}
    if case.patched is not None:
        ovpatch.apply("pipeline", options={"pipeline": case.patched})
        before = counters()
    made = _cut(case, model)
    optimizers = [
        torch.optim.AdamW(params, lr=0.01)
        for params in (made.parameters(), full_model.parameters())
    ]
    reference, found = dict(full_model.named_parameters(remove_duplicate=False)), []
    half = case.microbatches // 2
    own = {0: slice(half, None), size - 1: slice(0, half)}.get(rank)
    for step in range(2):
        for piece in range(case.pieces):
            batch = _batch(case, 10 * step + piece)
            losses: list[Tensor] = []
            out = made.step(batch[0], target=batch[1], losses=losses)
            expected, outs = _train_full_model(case, full_model, batch)
            loose = case.loose and step > 0
            if own is None:
                found += ["losses or outputs on an inner rank"] if losses or out is not None else []
            else:
                found += _differ(
                    f"step {step}, losses", torch.stack(losses), torch.stack(expected[own]), loose
                )
                found += _differ(f"step {step}, outputs", out, torch.cat(outs[own]), loose)
        for name, param in made.named_parameters():
            loose = case.loose and (step > 0 or reference[name] is reference["embed.weight"])
            found += _differ(f"step {step}, {name}", param.grad, reference[name].grad, loose)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if case.patched is not None:
        after = counters()
        # Torch runs the first step of a wrapped stage, for both directions sequentially.
        stocks = int("wrap" in case.options)
        if after["steps"] - before["steps"] != 2 * case.pieces - stocks:
            found.append(f"not run by the engine: {before} before, {after} after")
        order = (
            "bidirectional, forwards doubled"
            if case.patched.get("forward_doubling")
            else "bidirectional"
        )
        if f"ScheduleBidirectional runs as {order} on rank {rank}: " not in "".join(
            feature_report().remarks
        ):
            found.append(f"runs otherwise: {feature_report().remarks}")
        ovpatch.revert()
    return found


def _differ(where: str, found: Tensor | None, wanted: Tensor | None, loose: bool) -> list[str]:
    return differ(where, found, wanted, 1e-5 if loose else 0.0)


def _compare_all(names: list[str]) -> dict[str, list[str]]:
    return {name: _compare(CASES[name]) for name in names}


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, list(CASES)),
        pytest.param(4, ["stock", "patched", "doubled", "tied", "sometimes used"], marks=RARELY),
    ],
)
def test_both_ways_train_as_the_full_model(ranks: Any, world: int, names: list[str]) -> None:
    for rank, found in enumerate(ranks(world)(_compare_all, names)):
        assert not any(found.values()), f"rank {rank}: {found}"


def _evaluate_between() -> list[str]:
    """Evaluate and train in turns, patched and then reverted; gradients add up over all steps."""
    torch.manual_seed(0)
    model, case, found = Decoder(), Ways(), []
    full_model = copy.deepcopy(model)
    half = (
        slice(case.microbatches // 2 * ROWS, None)
        if dist.get_rank() == 0
        else slice(case.microbatches // 2 * ROWS)
    )
    ovpatch.apply("pipeline", options={"pipeline": {"forward_doubling": True}})
    made = _cut(case, model)
    for step in range(3):
        if step == 2:
            ovpatch.revert()
        batch = _batch(case, step)
        with torch.no_grad():
            losses: list[Tensor] = []
            out = made.eval(batch[0], target=batch[1], losses=losses)
            found += differences(
                out, torch.cat([full_model(rows) for rows in batch[0].split(ROWS)])[half]
            )
            found += [] if len(losses) == case.microbatches // 2 else [f"{len(losses)} losses"]
        made.step(batch[0], target=batch[1])
        _train_full_model(case, full_model, batch)
        wanted = {name: param.grad for name, param in full_model.named_parameters()}
        found += differences({name: param.grad for name, param in made.named_parameters()}, wanted)
    return found


def test_evaluation_between_steps_patched_and_reverted(ranks: Any) -> None:
    assert ranks(2)(_evaluate_between) == [[], []]


def _train_in_replicas() -> dict[str, float]:
    """Train pipelines of two ranks in two replicas; return the largest difference of a gradient."""
    mesh, case, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), Ways(), {}
    group = mesh["dp"].get_group()
    wraps: dict[str, Callable[[nn.Module], Any]] = {
        "ddp": lambda part: nn.parallel.DistributedDataParallel(part, process_group=group),
        "fsdp2": lambda part: fully_shard(part, mesh=mesh["dp"]),
    }
    for name, wrap in wraps.items():
        torch.manual_seed(0)
        model, worst = Decoder(), 0.0
        full_model = copy.deepcopy(model)
        ovpatch.apply("pipeline", *(["ddp"] if name == "ddp" else []))
        made = _cut(case, model, group=mesh["pp"], wrap=wrap)
        reference = dict(full_model.named_parameters())
        optimizers = [
            torch.optim.SGD(params, lr=0.1)
            for params in (made.parameters(), full_model.parameters())
        ]
        for step in range(2):
            batch = _batch(case, 10 * step + mesh.get_local_rank("dp"))
            made.step(batch[0], target=batch[1])
            _train_full_model(case, full_model, batch)
            for param in full_model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad, group=group)
                param.grad /= 2
            for key, param in made.named_parameters():
                grad: Any = param.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                worst = max(worst, (grad - reference[key].grad).abs().max().item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[name] = worst
        ovpatch.revert()
    return found


def test_stages_in_data_parallelism(ranks: Any) -> None:
    """Gradients are averaged over replicas first, and then summed over both directions."""
    for found in ranks(4)(_train_in_replicas):
        assert max(found.values()) < 1e-7, found


# --- unsupported ---


class _Counting(DecoderBlock):
    """A block whose norm has running statistics."""

    def __init__(self) -> None:
        super().__init__(0.0, True)
        self.norm = nn.BatchNorm1d(16)  # type: ignore[assignment]


def _refuse() -> dict[str, str]:
    statistics = Decoder(layers=2)
    statistics.layers = nn.ModuleList(_Counting() for _ in range(2))
    tries: dict[str, Callable[[], Any]] = {
        "statistics": lambda: _cut(Ways(), statistics),
        "class": lambda: _cut(Ways(), Decoder(), schedule="Schedule1F1B"),
        "odd": lambda: _cut(Ways(microbatches=5), Decoder()),
    }
    if dist.get_world_size() == 3:
        tries = {"ranks": lambda: _cut(Ways(), Decoder())}
    found = {}
    for name, attempt in tries.items():
        with pytest.raises((CutError, ValueError)) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


def test_models_without_two_ways_are_refused(ranks: Any) -> None:
    for found in [*ranks(2)(_refuse), *ranks(3)(_refuse)]:
        for name, text in found.items():
            assert REASONS[name] in text, text


REASONS = {
    "statistics": "layers.0.norm has running statistics",
    "class": "has its own order, not 'Schedule1F1B'. Leave schedule out.",
    "odd": "5 microbatches do not divide into two directions. Give an even n_microbatches.",
    "ranks": "not 3 ranks",
}


def _run_in_one_direction() -> tuple[list[str], str]:
    ovpatch.apply("pipeline", options={"pipeline": {"forward_doubling": True}})
    made = _cut(Ways(), Decoder(), placement="straight", schedule="ScheduleGPipe")
    ids, target = _batch(Ways(), 0)
    made.step(ids, target=target)
    remarks = list(feature_report().remarks)
    ovpatch.revert()
    return remarks, ""


def _replicas_differ() -> str:
    """Cut a model whose weights differ between ranks; return the error of the first step."""
    torch.manual_seed(0)
    case = Ways()
    made = _cut(case, case.make())
    if dist.get_rank() == 0:
        with torch.no_grad():
            made.parameters()[0].mul_(1.5)
    ids, target = _batch(case, 0)
    with pytest.raises(RuntimeError) as raised:
        made.step(ids, target=target)
    return str(raised.value)


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_that_start_with_other_weights_are_named_on_all_ranks(
    ranks: Any, world: int
) -> None:
    texts = ranks(world)(_replicas_differ, timeout=120)
    for rank, text in enumerate(texts):
        assert "do not have the same weights" in text
        assert ("0 more differ here" in text) is (rank in (0, world - 1)), text


def test_the_report_says_that_one_direction_has_nothing_to_double(ranks: Any) -> None:
    for remarks, _ in ranks(2)(_run_in_one_direction):
        assert "forward_doubling=True has no effect: the pipeline runs in one direction" in remarks


# --- failures ---


def _fail(where: int) -> tuple[list[str], str]:
    """Have a rank fail in its last backward, after which its peers have nothing left to do; then continue training."""
    rank = dist.get_rank()
    ovpatch.apply("pipeline", options={"pipeline": {"forward_doubling": True}})
    torch.manual_seed(0)
    model = Decoder()
    full_model, case = copy.deepcopy(model), Ways()
    made = _cut(case, model)
    batch = _batch(case, 0)
    made.step(batch[0], target=batch[1])
    for param in made.parameters():
        param.grad = None
    fails = rank == where
    first = next(param for part in made.model_parts for param in part.parameters())
    calls: list[int] = []

    def hook(grad: Tensor) -> Tensor:
        calls.append(1)
        if fails and len(calls) == case.microbatches // 2:
            raise RuntimeError("planted")
        return grad

    handle = first.register_hook(hook)
    with pytest.raises(RuntimeError) as caught:
        made.step(batch[0], target=batch[1])
    handle.remove()
    left = [name for name, param in made.named_parameters() if param.grad is not None]
    made.step(batch[0], target=batch[1])
    _train_full_model(case, full_model, batch)
    wanted = {name: param.grad for name, param in full_model.named_parameters()}
    found = differences({name: param.grad for name, param in made.named_parameters()}, wanted)
    ovpatch.revert()
    return found + left, f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_fails_is_named_on_its_replica_and_the_next_step_is_right(
    ranks: Any, where: int
) -> None:
    for rank, (found, text) in enumerate(ranks(2)(_fail, where)):
        assert not found, f"rank {rank}: {found}"
        assert "planted" in text, text
        assert rank == where or f"rank {where} failed in" in text, text


# --- orders ---


def _simulate(ranks: int, microbatches: int, doubles: bool, early: bool) -> tuple[float, float]:
    """Return the step in units of m(F + B + W), and the memory in units of 1F1B's."""
    placement = build_placement("bidirectional", ranks=ranks)
    order = build_bidirectional_order(ranks=ranks, microbatches=microbatches, doubles=doubles)
    costs = Costs.uniform(len(placement), forward=1.0, backward=1.0, weight=1.0)
    found = simulate(split_backwards(order) if early else order, placement, costs, chained=False)
    return found.step / (3 * microbatches), max(found.peak_memory) / ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 16), (8, 32), (8, 64)])
def test_doubled_forwards_have_the_published_bubble_and_memory(
    ranks: int, microbatches: int
) -> None:
    """Chimera wastes (D - 2) / (2N + D - 2) of a step, if a doubled forward takes as long as a backward."""
    step, memory = _simulate(ranks, microbatches, True, False)
    bubble = (ranks - 2) / (2 * microbatches + ranks - 2)
    wasted = 1 - 1 / step
    assert wasted == pytest.approx(bubble, rel=0.01) or (
        (ranks, microbatches) == (4, 8) and wasted < 1.01 * 2 / 18
    )
    assert memory == 2
    single, less = _simulate(ranks, microbatches, False, False)
    assert step < single
    assert less == 1 + 1 / ranks
    assert (
        _simulate(ranks, microbatches, True, True)[0]
        <= _simulate(ranks, microbatches, False, True)[0]
    )


@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(2, 2), (2, 6), (4, 4), (4, 10), (6, 14), (8, 32)]
)
def test_orders_of_both_ways_mirror_each_other(
    ranks: int, microbatches: int, doubles: bool
) -> None:
    placement = build_placement("bidirectional", ranks=ranks)
    orders = build_bidirectional_order(ranks=ranks, microbatches=microbatches, doubles=doubles)
    check_schedule(orders, placement)
    for rank, order in enumerate(orders):
        mirrored = [action._replace(stage=(action.stage + ranks) % (2 * ranks)) for action in order]
        assert mirrored == list(orders[ranks - 1 - rank])
    forwards = [action for action in orders[0] if action.kind is Kind.F and action.stage == 0]
    distances = [
        orders[0].index(second) - orders[0].index(first)
        for first, second in zip(forwards[::2], forwards[1::2], strict=False)
    ]
    assert not doubles or set(distances) <= {1}


def test_an_odd_number_has_no_two_ways() -> None:
    with pytest.raises(ScheduleError, match="3 ranks"):
        build_bidirectional_order(ranks=3, microbatches=4)
    with pytest.raises(ScheduleError, match="5 microbatches"):
        build_bidirectional_order(ranks=2, microbatches=5)
