"""Plain models cut into stages train as the full model does, microbatch by microbatch."""

from __future__ import annotations

import copy
import functools
import importlib.util
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import ovpatch
from ovpatch_plugins.pipeline import CutError, cut
from ovpatch_plugins.pipeline.cutting.block_balance import (
    BlockCosts,
    measure_costs,
    split_blocks,
    split_evenly,
)
from ovpatch_plugins.pipeline.cutting.block_stack import find_block_stack, prepared
from ovpatch_plugins.pipeline.cutting.cut_check import name_args
from ovpatch_plugins.recompute import recompute
from tests.plugins.pipeline.cases import counters
from tests.plugins.pipeline.plain_models import (
    CONTEXT,
    HABITS,
    WORDS,
    Decoder,
    Habitual,
    Indexed,
    Named,
    Reused,
    Seeing,
    Skewed,
    Skipping,
    Stateful,
    Training,
    differ,
    language_loss,
    make_hf,
)
from tests.support.rarely import RARELY
from tests.support.torch_versions import HAS_OLD_STAGES

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers: pip install 'ovpatch[integration]'",
)

MICROBATCHES, ROWS = 6, 2


@dataclass(frozen=True)
class Cut:
    """A model and how it is cut.

    Attributes:
        make: Makes the model.
        tied: Names of parameters that several stages share.
        placement: The stages' placement.
        inputs: Makes the keyword arguments of a batch, given its rows.
        options: More arguments of ``cut()``.
        patched: The order in which ovpatch runs the schedule; "" for the schedule of torch.
        recomputed: Classes of the blocks that ``recompute`` runs again, if the schedule is patched.
    """

    make: Callable[[], nn.Module]
    tied: tuple[str, ...] = ()
    placement: str = "straight"
    inputs: Callable[[int], dict[str, Tensor]] = lambda rows: {}
    options: dict[str, Any] = field(default_factory=dict)
    patched: str = ""
    recomputed: str = ""


def _mask(rows: int) -> dict[str, Tensor]:
    return {
        "attention_mask": (
            torch.arange(CONTEXT) < torch.arange(rows).remainder(3).add(6)[:, None]
        ).long()
    }


def _recomputing(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # type: ignore[no-any-return]


def _plain_mask(rows: int) -> dict[str, Tensor]:
    return {"mask": _mask(rows)["attention_mask"].float()}


def _pictures(rows: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return {
        "pictures": torch.randn(rows, 4, 6, generator=draw),
        "sizes": torch.randint(1, 4, (rows,), generator=draw),
    }


def _run(model: nn.Module) -> nn.Module:
    """Return a model after a first forward, in which it registers hooks."""
    model(torch.zeros(2, CONTEXT, dtype=torch.long), **_pictures(2))
    return model


PLAIN = {
    "plain": Cut(Decoder, inputs=_plain_mask),
    "plain, tied, dropout": Cut(lambda: Decoder(tied=True, dropout=0.3), ("embed.weight",)),
    "plain, patched": Cut(lambda: Decoder(dropout=0.3), patched="zb-h1"),
    "plain, loop": Cut(lambda: Decoder(layers=8), placement="loop", patched="as-given"),
    "plain, vee, tied": Cut(
        lambda: Decoder(tied=True, layers=8), ("embed.weight",), placement="vee"
    ),
    "plain, measured": Cut(Decoder, options={"balance": "measured"}),
    "reused": Cut(Reused, ("embed.weight", "positions")),
    "transposed": Cut(Skewed),
    "transposed, patched": Cut(Skewed, patched="zb-h1"),
    "transposed, vee": Cut(lambda: Skewed(layers=8), placement="vee"),
    "indices": Cut(Indexed),
    "stateful": Cut(Stateful),
    "stateful, patched": Cut(Stateful, patched="as-given"),
    "stateful, recomputed": Cut(Stateful, patched="zb-h1", recomputed="StatefulBlock"),
    "habits": Cut(lambda: Habitual(HABITS)),
    "habits, recomputed": Cut(
        lambda: Habitual(HABITS), patched="as-given", recomputed="HabitualBlock"
    ),
    "named module": Cut(Named),
    "pictures": Cut(Seeing, inputs=_pictures),
    "pictures, patched": Cut(lambda: _run(Seeing()), inputs=_pictures, patched="zb-h1"),
    "pictures, in the tower": Cut(Seeing, inputs=_pictures, options={"blocks": "tower.layers"}),
}
HF = {
    "Llama": Cut(lambda: make_hf("Llama"), inputs=_mask),
    "Llama, tied, dropout": Cut(
        lambda: make_hf("Llama", 0.3, tied=True), ("model.embed_tokens.weight",)
    ),
    "Qwen3Moe": Cut(lambda: make_hf("Qwen3Moe"), patched="zb-h1"),
    "GPTNeoX": Cut(lambda: make_hf("GPTNeoX", 0.3), inputs=_mask),
    "GPT2": Cut(lambda: make_hf("GPT2", tied=True), ("transformer.wte.weight",), inputs=_mask),
    "GPT2, dropout": Cut(lambda: make_hf("GPT2", 0.3)),
    "Llama, dropout, recomputed": Cut(lambda: _recomputing(make_hf("Llama", 0.3)), patched="zb-h1"),
    "Gemma": Cut(
        lambda: make_hf("Gemma", tied=True), ("model.embed_tokens.weight",), patched="as-given"
    ),
}


def _batch(case: Cut, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    data = torch.Generator().manual_seed(step)
    rows = torch.randint(WORDS, (MICROBATCHES * ROWS, CONTEXT + 1), generator=data)
    return rows[:, :-1], rows[:, 1:], case.inputs(MICROBATCHES * ROWS)


def _cut(case: Cut, model: nn.Module, **more: Any) -> Any:
    return cut(
        model,
        dist.group.WORLD,  # type: ignore[arg-type]
        (torch.zeros(ROWS + 1, CONTEXT, dtype=torch.long),),  # not the shape of the steps
        case.inputs(ROWS + 1),
        n_microbatches=MICROBATCHES,
        loss_fn=language_loss,
        **{"placement": case.placement, "balance": "count", **case.options, **more},
    )


def _read_streams() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def _write_streams(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def _seed_streams(rank: int) -> tuple[Any, ...]:
    """Seed the streams of torch, Python and numpy for a rank, and return their states."""
    torch.manual_seed(50 + rank)
    random.seed(50 + rank)
    numpy.random.seed(50 + rank)
    return _read_streams()


class _Streams:
    """Random numbers as the ranks of a pipeline draw them: each rank has its own streams."""

    def __init__(
        self, model: nn.Module, blocks: list[nn.Module], ranges: list[range], ranks: list[int]
    ) -> None:
        self._states = {rank: _seed_streams(rank) for rank in set(ranks)}
        self._rank = 0
        model.register_forward_pre_hook(lambda *_: _write_streams(self._states[0]))
        for own, rank in zip(ranges[1:], ranks[1:], strict=True):
            blocks[own[0]].register_forward_pre_hook(lambda *_, rank=rank: self._switch(rank))
        model.register_forward_hook(lambda *_: self._switch(0))

    def _switch(self, rank: int) -> None:
        self._states[self._rank], self._rank = _read_streams(), rank
        _write_streams(self._states[rank])


def compare_cut(case: Cut) -> list[str]:
    """Train two steps of the cut and of the full model; return the differences."""
    torch.manual_seed(0)
    model = case.make()
    full_model = copy.deepcopy(model)
    if case.patched:
        # Only the stages are recomputed, not the full model.
        options = {"pipeline": {"schedule": case.patched}, "recompute": {"granularity": "none"}}
        ovpatch.apply("pipeline", "recompute", options=options)
        before = counters()
    made = _cut(case, model)
    for part in made.model_parts if case.patched and case.recomputed else ():
        recompute(part, blocks=case.recomputed)
    if getattr(full_model, "is_gradient_checkpointing", False):
        # Hooks of blocks would run again in the backward, and _Streams would switch there.
        full_model.gradient_checkpointing_disable()
    blocks = next(module for module in full_model.modules() if isinstance(module, nn.ModuleList))
    stages = len(made.block_ranges)
    ranks = [
        stage if case.placement == "straight" else stage % dist.get_world_size()
        for stage in range(stages)
    ]
    _Streams(full_model, list(blocks), made.block_ranges, ranks)
    names = [name for name, _ in full_model.named_parameters(remove_duplicate=False)]
    optimizers = [
        torch.optim.SGD(params, lr=0.1) for params in (made.parameters(), full_model.parameters())
    ]
    params, reference = (
        made.named_parameters(),
        dict(full_model.named_parameters(remove_duplicate=False)),
    )
    found = [f"{name} is no name of the model" for name, _ in params if name not in names]
    state = _seed_streams(dist.get_rank())
    for step in range(2):
        ids, target, kwargs = _batch(case, step)
        losses: list[Tensor] = []
        _write_streams(state)
        out = made.step(ids, target=target, losses=losses, **kwargs)
        state = _read_streams()
        expected, outs = _train_full_model(full_model, ids, target, kwargs)
        # The gradient of a tied weight is sum(e) + sum(h) over microbatches here, and sum(e + h) there. The two round
        # differently, and so do all values that depend on the weight in the next step.
        loose = bool(case.tied) and step > 0
        if made.has_last_stage:
            found += _differ(
                f"step {step}, losses", torch.stack(losses), torch.stack(expected), loose
            )
            found += _differ(f"step {step}, outputs", out, torch.cat(outs), loose)
        shared = {id(reference[name]) for name in case.tied}
        for name, param in params:
            is_loose = loose or id(reference[name]) in shared
            found += _differ(f"step {step}, {name}", param.grad, reference[name].grad, is_loose)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state_dict = full_model.state_dict()
    for name, value in made.state_dict().items():
        if name not in reference:
            found += _differ(f"buffer {name}", value, state_dict[name], False)
    if case.patched:
        after = counters()
        if after["steps"] - before["steps"] < 2 or after["stock_steps"] != before["stock_steps"]:
            found.append(f"not run by the engine: {before} before, {after} after")
        ovpatch.revert()
    return found


def _train_full_model(
    full_model: nn.Module, ids: Tensor, target: Tensor, kwargs: dict[str, Tensor]
) -> tuple[list, list]:
    losses, outs = [], []
    for index in range(MICROBATCHES):
        rows = slice(index * ROWS, (index + 1) * ROWS)
        result = full_model(ids[rows], **{name: value[rows] for name, value in kwargs.items()})
        outs.append(result if isinstance(result, Tensor) else result.logits)
        losses.append(language_loss(outs[-1], target[rows]))
        losses[-1].backward()
    for param in full_model.parameters():
        if param.grad is not None:
            param.grad.div_(MICROBATCHES)
    return losses, outs


def _differ(where: str, found: Tensor | None, wanted: Tensor | None, loose: bool) -> list[str]:
    return differ(where, found, wanted, 1e-6 if loose else 0.0)


def _compare_all(names: list[str]) -> dict[str, list[str]]:
    cases = PLAIN | HF
    return {name: compare_cut(cases[name]) for name in names}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_plain_models_train_as_the_full_model(ranks: Any, world: int) -> None:
    refused = {"indices"} if HAS_OLD_STAGES else set()
    names = [name for name in PLAIN if world == 2 or "," in name if name not in refused]
    for rank, found in enumerate(ranks(world)(_compare_all, names)):
        assert not any(found.values()), f"rank {rank}: {found}"


@needs_transformers
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_models_of_transformers_train_as_the_full_model(ranks: Any, world: int) -> None:
    names = [name for index, name in enumerate(HF) if world == 2 or index % 2]
    for rank, found in enumerate(ranks(world)(_compare_all, names, timeout=120)):
        assert not any(found.values()), f"rank {rank}: {found}"


# --- refused ---


def _refuse() -> dict[str, str]:
    tries: dict[str, Callable[[], Any]] = {
        "residuals outside": lambda: _cut(
            Cut(lambda: Decoder(residuals="outside")), Decoder(residuals="outside")
        ),
        "skips blocks": lambda: _cut(Cut(Decoder), Skipping()),
        "no such list": lambda: _cut(Cut(Decoder), Decoder(), blocks="layer"),
        "no list": lambda: _cut(Cut(Decoder), nn.Linear(3, 3)),
        "too few": lambda: _cut(Cut(Decoder), Decoder(layers=2), placement="loop", chunks=2),
        "wrapped": lambda: _cut(Cut(Decoder), nn.parallel.DistributedDataParallel(Decoder())),
        "sizes": lambda: _cut(Cut(Decoder), Decoder(), blocks_per_stage=[3, 3]),
        "schedule": lambda: _cut(Cut(Decoder), Decoder(), schedule="ScheduleDualPipeV"),
        "draws": lambda: _cut(Cut(Decoder), _Drawing()),
        "one rank": lambda: _cut(
            Cut(Decoder), Decoder(residuals="outside" if dist.get_rank() else "inside")
        ),
        "fails": lambda: _cut(Cut(Decoder), _Failing(dist.get_rank() == 1)),
        "fails, measured": lambda: _cut(
            Cut(Decoder), _Failing(dist.get_rank() == 1), balance="measured"
        ),
        "fails without a message": lambda: _cut(
            Cut(Decoder), _Failing(dist.get_rank() == 1, StopIteration())
        ),
        "fails in eval()": lambda: _cut(Cut(Decoder), _FailingMode(eval_on=1)),
        "fails in train()": lambda: _cut(Cut(Decoder), _FailingMode(train_on=1)),
        "output fails": lambda: _cut(Cut(Decoder), Decoder(), output=lambda result: result.no_such),
        "scalar": lambda: _cut(Cut(Decoder), _Losing()),
        "layerdrop": lambda: _cut(Cut(Decoder), Training(layerdrop=0.02)),
        "dropped results": lambda: _cut(Cut(Decoder), Training("drops below", 0.02)),
        "results dropped at large numbers": lambda: _cut(
            Cut(Decoder), Training("drops above", 0.02)
        ),
        "noise in training": lambda: _cut(Cut(Decoder), Training("noise")),
        "noise through a gate": lambda: _cut(Cut(Decoder), Training("gated noise")),
        "reads in training": lambda: _cut(Cut(Decoder), Training("reads")),
        "writes": lambda: _cut(Cut(Decoder), Training("writes")),
        "shared counter": lambda: _cut(Cut(Decoder), Stateful("counter")),
        "shared generator": lambda: _cut(Cut(Decoder), Stateful("generator")),
        "integers, torch 2.11": _cut_integers,
    }
    found = {}
    for name, attempt in tries.items():
        with pytest.raises(CutError) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


def _cut_integers() -> None:
    # Stages of torch 2.11 have this method, and can pass on only what has a gradient.
    with mock.patch.object(PipelineStage, "_shape_inference", create=True):
        _cut(Cut(Decoder), Indexed())


class _Drawing(Decoder):
    """A decoder that adds noise after its blocks, in evaluation mode too."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        result = super().forward(ids, mask)
        return result + torch.rand_like(result)


class _Failing(Decoder):
    """A decoder whose forward fails on one rank."""

    def __init__(self, fails: bool, error: Exception | None = None) -> None:
        super().__init__()
        self.fails = fails
        self.error = IndexError("no such thing") if error is None else error

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.fails:
            raise self.error
        return super().forward(ids, mask)


class _FailingMode(Decoder):
    """A decoder that fails on one rank when its mode changes."""

    def __init__(self, eval_on: int = -1, train_on: int = -1) -> None:
        super().__init__()
        self.fails_on = {False: eval_on, True: train_on}

    def train(self, mode: bool = True) -> _FailingMode:
        if self.fails_on[mode] == dist.get_rank():
            raise RuntimeError("this mode needs a cache")
        return super().train(mode)


class _Losing(Decoder):
    """A decoder that returns its own loss before the logits."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        logits = super().forward(ids, mask)
        return {"loss": language_loss(logits, ids), "logits": logits}


REASONS = {
    "residuals outside": "the output of layers.1 is not the input of layers.2",
    "skips blocks": "layers.2 to layers.4 depend on layers.0 by more than",
    "no such list": "blocks='layer' names no list",
    "no list": "has no list of blocks of one class",
    "too few": "2 blocks make no 4 stages",
    "wrapped": "the model is already a DistributedDataParallel",
    "sizes": "does not divide 5 blocks into 2 stages",
    "schedule": "placement='vee', chunks=2",
    "draws": "computes other values than the full model",
    "one rank": "(rank 1)",
    "fails": "IndexError: no such thing (in forward(), test_cut.py:",
    "fails, measured": "IndexError: no such thing (in forward(), test_cut.py:",
    "fails without a message": "failed with StopIteration (in forward(), test_cut.py:",
    "fails in eval()": "RuntimeError: this mode needs a cache (in train(), test_cut.py:",
    "fails in train()": "RuntimeError: this mode needs a cache (in train(), test_cut.py:",
    "output fails": "'Tensor' object has no attribute 'no_such'",
    "scalar": "cut(..., output=lambda result: result.logits)",
    "layerdrop": "skips layers.1 in training, as LayerDrop does, and stages cannot decide together which blocks to "
    "skip. Have the forward call all blocks: before cut(), set layerdrop = 0.0.",
    "integers, torch 2.11": f"passes on a tensor of torch.int64, which torch {torch.__version__} cannot send",
    "dropped results": "the output of layers.1 is not the input of layers.2",
    "results dropped at large numbers": "the output of layers.1 is not the input of layers.2",
    "noise in training": "full model in training mode, first at layers.2",
    "noise through a gate": "full model in training mode, first at layers.2",
    "reads in training": "full model in training mode, first at layers.2",
    "writes": "the model's forward writes its parameter positions",
    "shared counter": "full model in evaluation mode, first at layers.2",
    "shared generator": "full model in evaluation mode, first at layers.2",
}


def test_models_that_cannot_be_cut_are_refused_on_all_ranks(ranks: Any) -> None:
    for found in ranks(2)(_refuse):
        for name, text in REASONS.items():
            assert text in found[name], f"{name}: {found[name]}"


def _take_another_way() -> str:
    made = _cut(Cut(Decoder), _TwoWays())
    if not made.has_first_stage:
        return ""
    with pytest.raises(CutError) as caught:
        made.model_parts[0](**name_args((torch.zeros(ROWS, 4, dtype=torch.long),), {}))
    return str(caught.value)


class _TwoWays(Decoder):
    """A decoder that runs no block if inputs are short."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        if ids.shape[1] < CONTEXT:
            result: Tensor = self.embed(ids)
            return result
        return super().forward(ids, mask)


def test_another_way_through_the_model_is_an_error(ranks: Any) -> None:
    first, _ = ranks(2)(_take_another_way)
    assert "ended before layers.2, unlike with the microbatch that it was cut with" in first


# The blocks that each forward skips. The first of two stages has blocks 0 and 1.
SKIPPED = (range(99), (2,), (0,), (2, 3), (0, 1))


def _skip_later() -> list[str]:
    """Return the error of each forward whose model skips blocks after the cut; "" if there is none."""
    made = _cut(Cut(Decoder), Training())
    (part,), found = made.model_parts, []
    part.train()
    part.layerdrop = 0.5
    inputs = [] if made.has_first_stage else [torch.ones(ROWS, CONTEXT, 16, requires_grad=True)]
    for skipped in SKIPPED:
        numbers = (torch.tensor(0.0 if block in skipped else 0.9) for block in range(99))
        try:
            with mock.patch("torch.rand", side_effect=numbers):
                part(*inputs, **name_args((torch.zeros(ROWS, CONTEXT, dtype=torch.long),), {}))
        except CutError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def test_blocks_skipped_after_the_cut_are_an_error(ranks: Any) -> None:
    first, last = ranks(2)(_skip_later)
    for errors, due in ((first, 2), (last, 0)):
        for skipped, error in zip(SKIPPED, errors, strict=True):
            # A stage may skip its own blocks, as in stock PyTorch.
            expected = f"the model's forward skipped layers.{due}" if due in skipped else ""
            assert (expected in error) if expected else not error, (skipped, error)
            assert not error or "layerdrop=0.0" in error


def _leave_a_trace() -> list[str]:
    torch.manual_seed(0)
    model = Stateful()
    model.layers[0](torch.zeros(1, 2, 16), None)
    before, twin = (
        copy.deepcopy(model.state_dict()),
        [(layer.calls, list(layer.counter)) for layer in model.layers],
    )
    numbers = [layer.generator.get_state() for layer in model.layers]
    streams = [numpy.random.default_rng(0), numpy.random.RandomState(0), random.Random(0)]

    def draw(*_call: Any) -> None:
        drawn.append([streams[0].random(), streams[1].rand(), streams[2].random()])

    drawn: list[Any] = []
    for layer in model.layers:
        layer.stream = streams[0]
        layer.register_forward_hook(draw)
    model.old_stream, model.python_stream = streams[1:]
    model.system_stream = random.SystemRandom()
    seeing = Seeing()
    hooks = [len(module._forward_hooks) for module in seeing.modules()]
    _cut(Cut(Decoder, inputs=_pictures), seeing, balance="measured")
    _cut(Cut(Decoder), model, balance="measured")
    found = [
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert drawn, "the cut has run the model"
    if [len(module._forward_hooks) for module in seeing.modules()] != hooks:
        found.append("hooks")
    drawn = [streams[0].random(), streams[1].rand(), streams[2].random()]
    if drawn != [
        numpy.random.default_rng(0).random(),
        numpy.random.RandomState(0).rand(),
        random.Random(0).random(),
    ]:
        found.append(f"streams that continue with {drawn}")
    for layer, (calls, counter), state in zip(model.layers, twin, numbers, strict=True):
        if (layer.calls, layer.counter) != (calls, counter) or not torch.equal(
            layer.generator.get_state(), state
        ):
            found.append(f"{layer.calls} calls and {layer.counter}, not {calls} and {counter}")
    return found


def test_a_cut_leaves_the_model_as_it_was(ranks: Any) -> None:
    assert ranks(2)(_leave_a_trace) == [[], []]


def _fail_before_a_step() -> tuple[str, list[bool]]:
    """Return the error of a step whose replicas differ, and whether each gradient has kept its value."""
    torch.manual_seed(0)
    made = _cut(Cut(Decoder), Decoder(tied=True), placement="bidirectional")
    with torch.no_grad():
        for param in made.model_parts[0].parameters():
            param.add_(dist.get_rank())
    for param in made.parameters():
        param.grad = torch.ones_like(param)
    ids, target, _ = _batch(Cut(Decoder), 0)
    with pytest.raises(RuntimeError) as caught:
        made.step(ids, target=target)
    return str(caught.value), [
        param.grad is not None and bool((param.grad == 1).all()) for param in made.parameters()
    ]


def test_a_failed_check_of_replicas_keeps_earlier_gradients(ranks: Any) -> None:
    for text, kept in ranks(2)(_fail_before_a_step):
        assert "do not have the same weights" in text
        assert all(kept)


# --- checkpoints ---


def _load_named(wraps: bool) -> list[str]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    full_model = Named()
    pairs = [dist.new_group([rank]) for rank in range(2)]
    wrap = (
        functools.partial(DistributedDataParallel, process_group=pairs[dist.get_rank()])
        if wraps
        else None
    )
    made = _cut(Cut(Named), Named(), wrap=wrap)
    made.load_state_dict(full_model.state_dict())
    wanted = full_model.state_dict()
    return [
        name for name, value in made.state_dict().items() if not torch.equal(value, wanted[name])
    ]


@pytest.mark.parametrize("wraps", [False, True])
def test_an_attribute_named_module_keeps_its_name(ranks: Any, wraps: bool) -> None:
    assert ranks(2)(_load_named, wraps) == [[], []]


def _save(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    made = _cut(Cut(Decoder), Decoder(tied=True))
    ids, target, _ = _batch(Cut(Decoder), 0)
    made.step(ids, target=target)
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    dcp.save({"model": made}, checkpoint_id=folder)


def _load(folder: str) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(1)
    full_model = Decoder(tied=True)
    made = _cut(Cut(Decoder), copy.deepcopy(full_model))
    dcp.load({"model": made}, checkpoint_id=folder)
    state = full_model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)  # in place
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())
    made.load_state_dict(state)
    return state


def test_checkpoints_pass_between_numbers_of_stages(ranks: Any) -> None:
    torch.manual_seed(0)
    fresh = Decoder(tied=True).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        ranks(2)(_save, folder)
        for state in ranks(3)(_load, folder):
            assert set(state) == set(fresh)
            assert not any(torch.equal(state[name], value) for name, value in fresh.items())


# --- with data parallelism ---


def _train_replicas(kind: str) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(part: nn.Module) -> nn.Module:
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group("dp"))
        return fully_shard(part, mesh=mesh["dp"]) if kind == "fsdp" else part

    torch.manual_seed(0)
    model = Decoder(tied=True)
    # The blocks per stage are fixed, because replicas must have the same stages.
    made = cut(
        model,
        mesh["pp"],
        (torch.zeros(ROWS, CONTEXT, dtype=torch.long),),
        n_microbatches=3,
        loss_fn=language_loss,
        wrap=wrap,
        blocks_per_stage=[2, 3],
    )
    ids, target, _ = _batch(Cut(Decoder), 0)
    # Each replica has half of the rows of each microbatch.
    if kind != "none":
        rows = (
            torch.arange(MICROBATCHES * ROWS).view(3, 2, 2)[:, mesh.get_local_rank("dp")].flatten()
        )
        ids, target = ids[rows], target[rows]
    made.step(ids, target=target)
    grads = {name: param.grad for name, param in made.named_parameters()}
    return {
        name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items()
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_stages_are_wrapped_for_data_parallelism(ranks: Any, kind: str) -> None:
    for unwrapped, parts in zip(
        ranks(4)(_train_replicas, "none"), ranks(4)(_train_replicas, kind), strict=True
    ):
        assert set(unwrapped) == set(parts)
        for name, grad in unwrapped.items():
            torch.testing.assert_close(
                parts[name], grad, msg=lambda text, name=name: f"{name}: {text}"
            )


# --- balance ---


def test_stages_are_balanced_by_time_then_by_memory() -> None:
    costs = BlockCosts([1.0] * 6, before=1.0, after=3.0)
    # The head costs as much as three blocks, the embedding as much as one.
    assert split_blocks(costs, (0, 1)) == [0, 4]
    heavy = BlockCosts(
        [1.0] * 6,
        block_bytes=[9.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        activation_bytes=[1.0] * 6,
        after=0.01,
    )
    assert split_blocks(heavy, (0, 1)) == [0, 3]
    slow = BlockCosts([3.0, 1.0, 1.0, 1.0])
    assert split_blocks(slow, (0, 1)) == [0, 1]
    assert split_evenly(7, 3) == [0, 2, 4]
    with pytest.raises(CutError, match="3 blocks make no 4 stages"):
        split_blocks(BlockCosts([1.0] * 3), (0, 1, 2, 3))


def test_costs_are_measured_per_block() -> None:
    model = Decoder(layers=3)
    model.layers[1].up = nn.Linear(16, 100000)
    model.layers[1].down = nn.Linear(100000, 16)
    stack = find_block_stack(model)
    ids = torch.zeros(4, CONTEXT, dtype=torch.long)
    with prepared(model, torch.device("cpu")):
        costs = measure_costs(model, stack, (ids,), {}, torch.device("cpu"))
    assert costs.blocks[1] > costs.blocks[0] == costs.blocks[2] > 0
    assert costs.block_bytes is not None
    assert costs.activation_bytes is not None
    assert costs.block_bytes[1] > 100 * costs.block_bytes[0]
    assert costs.activation_bytes[1] > 4 * CONTEXT * 100000 * 4 > costs.activation_bytes[0] > 0
    assert costs.after_bytes == 4 * 4 * (16 * WORDS + 32)
    assert all(module.training for module in model.modules())
