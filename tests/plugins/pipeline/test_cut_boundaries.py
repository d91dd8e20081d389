"""Models that start to change hidden states between blocks after they were cut: never silently other values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ovpatch
from ovpatch_plugins.pipeline import CutError, cut
from ovpatch_plugins.pipeline.cutting.cut_check import name_args
from tests.plugins.pipeline.plain_models import (
    CHANGES,
    CONTEXT,
    WORDS,
    Changing,
    differ,
    language_loss,
)
from tests.support.torch_versions import HAS_OLD_STAGES

MICROBATCHES, ROWS = 2, 2
# Other ways to call the blocks, which are right or an error.
ORDERS = ("swap", "skip", "twice before", "twice after", "keyword")


def _batch(step: int) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(step)
    rows = torch.randint(WORDS, (MICROBATCHES * ROWS, CONTEXT + 1), generator=data)
    return rows[:, :-1], rows[:, 1:]


def _cut(model: nn.Module, **more: Any) -> Any:
    return cut(
        model,
        dist.group.WORLD,  # type: ignore[arg-type]
        (torch.zeros(ROWS, CONTEXT, dtype=torch.long),),
        n_microbatches=MICROBATCHES,
        loss_fn=language_loss,
        balance="count",
        **more,
    )


def _set(modules: list[nn.Module], **values: Any) -> None:
    for module in modules:
        # A wrapper of a stage does not pass writes on.
        own = next(inner for inner in module.modules() if isinstance(inner, Changing))
        for name, value in values.items():
            setattr(own, name, value)


def _train(made: Any, full_model: nn.Module, step: int) -> str:
    """Make a step of the cut and of the full model; return the error, the differences, or ""."""
    ids, target = _batch(step)
    losses: list[Tensor] = []
    for module in [*made.model_parts, full_model]:
        module.zero_grad()
    try:
        made.step(ids, target=target, losses=losses)
    except (CutError, RuntimeError) as error:
        return _name_error(error)
    wanted = []
    for rows, words in zip(ids.split(ROWS), target.split(ROWS), strict=True):
        wanted.append(language_loss(full_model(rows), words))
        (wanted[-1] / MICROBATCHES).backward()
    found, reference = [], dict(full_model.named_parameters())
    if made.has_last_stage:
        found += differ("losses", torch.stack(losses), torch.stack(wanted), 1e-6)
    for name, param in made.named_parameters():
        # A stage whose outputs get no gradient has zeros, or none.
        grads = [
            torch.zeros_like(param) if grad is None else grad
            for grad in (param.grad, reference[name.replace(".block.", ".")].grad)
        ]
        found += differ(name, grads[0], grads[1], 1e-6)
    return ", ".join(found)


def _evaluate(made: Any) -> list[str]:
    """Evaluate this rank's stages, each alone; return their errors."""
    ids, _ = _batch(0)
    found = []
    for part, own in zip(made.model_parts, made.block_ranges[dist.get_rank() :: 2], strict=True):
        part.eval()
        received = [torch.ones(ROWS, CONTEXT, 16)] if own[0] else []
        try:
            with torch.no_grad():
                part(*received, **name_args((ids[:ROWS],), {}))
            found.append("")
        except (CutError, LookupError) as error:
            found.append(_name_error(error))
        part.train()
    return found


def _name_error(error: BaseException | None) -> str:
    """Return the text of an error and of its causes."""
    return f"{type(error).__name__}: {error}; {_name_error(error.__cause__)}" if error else ""


Case = tuple[str, int]


def _change_later(placement: str, layers: int) -> tuple[dict[Case, str], dict[Case, list[str]]]:
    """Return the errors of steps and evaluations, by the way in which the model changes and by the block."""
    torch.manual_seed(0)
    model = Changing(layers)
    full_model = copy.deepcopy(model)
    steps, evaluations = {}, {}
    with ovpatch.applied("pipeline"):
        made = _cut(model, placement=placement)
        modules = [*made.model_parts, full_model]
        assert not _train(made, full_model, 0)
        ends = {own[0] for own in made.block_ranges}
        ways = [*CHANGES, *ORDERS]
        for number, way in enumerate(ways):
            for at in range(1, layers):
                # Blocks within stages take turns.
                if at not in ends and at % len(ways) != number % layers:
                    continue
                _set(modules, way=way, at=at, mode=True)
                steps[way, at] = _train(made, full_model, number)
                assert not any(_evaluate(made)), "the model changes hidden states in training alone"
                _set(modules, mode=False)
                evaluations[way, at] = _evaluate(made)
        assert not _train(made, full_model, 1), "steps are right again"
    return steps, evaluations


@pytest.mark.parametrize(("placement", "layers"), [("straight", 6), ("loop", 8)])
def test_changes_that_start_later_are_right_or_an_error_on_all_ranks(
    ranks: Any, placement: str, layers: int
) -> None:
    found = ranks(2)(_change_later, placement, layers, timeout=120)
    size = layers // (2 if placement == "straight" else 4)
    wrong = []
    for way, at in found[0][0]:
        texts = [steps[way, at] for steps, _ in found]
        if HAS_OLD_STAGES and all("has gradients None" in text for text in texts):
            continue
        is_error, is_right = all("CutError" in text for text in texts), not any(texts)
        is_as_wanted = is_error or is_right
        if way in CHANGES and at % size == 0:
            name = f"did not pass the output of layers.{at - 1} on to layers.{at} unchanged"
            is_as_wanted = all(name in text and "Move what" in text for text in texts)
            # The stages before and after the change fail alone as well. To a stage that drops the output of a block of
            # an earlier stage, nothing changes.
            failed = [name in text for _, own in found for text in own[way, at]]
            is_as_wanted &= sum(failed) == (1 if way == "drop" else 2)
        elif way == "add noise":
            # The ranks of a pipeline draw other numbers than the full model.
            is_as_wanted = all(text and "Error" not in text for text in texts)
        elif way in CHANGES:
            is_as_wanted = is_right and not any(any(own[way, at]) for _, own in found)
        if not is_as_wanted:
            wrong.append(f"{way} before layers.{at}: {texts}, {[own[way, at] for _, own in found]}")
    assert not wrong, "\n".join(wrong)


# --- with compilers, checkpoints and wrappers ---


class _Checkpointed(nn.Module):
    """A wrapper of a block that checkpoints it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False)


def _replace_blocks(part: Any, make: Any) -> nn.Module:
    for index, block in enumerate(part.layers):
        if next(block.parameters(), None) is not None:
            part.layers[index] = make(block)
    return part  # type: ignore[no-any-return]


def _compile_in_place(part: Any) -> nn.Module:
    for block in part.layers:
        block.compile(backend="eager")
    return part  # type: ignore[no-any-return]


WRAPPERS: dict[str, Any] = {
    "none": None,
    "compiled in place": _compile_in_place,
    "compiled": lambda part: _replace_blocks(
        part, lambda block: torch.compile(block, backend="eager")
    ),
    "checkpointed": lambda part: _replace_blocks(part, _Checkpointed),
}
FEATURES = {"none": ("pipeline",), "checkpointed": ("pipeline", "recompute")}


def _wrap_and_change(names: list[str]) -> dict[str, list[str]]:
    """Return the errors of four steps, of which the last two change hidden states, one as the first step of a cut."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = Changing()
        full_model = copy.deepcopy(model)
        with ovpatch.applied(*FEATURES.get(name, ("pipeline",))):
            made = _cut(model, wrap=WRAPPERS[name])
            modules = [*made.model_parts, full_model]
            steps = found[name] = [_train(made, full_model, 0)]
            with torch.autocast("cpu", torch.bfloat16):
                # The full model also has gradients, and a difference of low precision is no error.
                steps.append(_train(made, full_model, 1))
            _set(modules, way="scale", at=3)
            steps.append(_train(made, full_model, 2))
            made = _cut(Changing(), wrap=WRAPPERS[name])
            _set(made.model_parts, way="scale", at=3)
            steps.append(_train(made, full_model, 3))
            calls = [
                vars(block).get("_compiled_call_impl")
                for part in made.model_parts
                for block in part.modules()
            ]
            steps.append(f"{sum(type(call).__name__ == '_BlockWatch' for call in calls)} watched")
    return found


def test_compiled_and_checkpointed_blocks_are_checked_and_left_as_they_are(ranks: Any) -> None:
    for rank, found in enumerate(ranks(2)(_wrap_and_change, list(WRAPPERS), timeout=120)):
        for name, (right, autocast, later, first, left) in found.items():
            assert not right, f"{name}, rank {rank}: {right}"
            assert "Error" not in autocast, f"{name}, rank {rank}: {autocast}"
            for text in (later, first):
                assert "did not pass the output of layers.2 on" in text, (
                    f"{name}, rank {rank}: {text}"
                )
            assert left == "0 watched", f"{name}, rank {rank}"
