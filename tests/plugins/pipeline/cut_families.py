"""The families of transformers that ``cut()`` splits: the table of docs/cut-families.md.

python -m tests.plugins.pipeline.cut_families docs/cut-families.md              # all, in half an hour
python -m tests.plugins.pipeline.cut_families docs/cut-families.md "not tried"  # with such outcomes
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ovpatch_plugins.pipeline import CutError, cut
from ovpatch_plugins.pipeline.cutting.block_stack import find_tensors
from ovpatch_plugins.pipeline.cutting.stage_tree import select_output
from tests.plugins.pipeline.tiny_inputs import PICTURES, Batch, make_inputs
from tests.plugins.pipeline.tiny_models import TASKS, list_families, make_model

ROWS, MICROBATCHES = 2, 3
_MOST_PARAMS: Final = 30_000_000
_VARIANTS: Final = ("", "dropout", "dropout and layerdrop")
_BEGIN, _END = "<!-- begin: families -->\n", "<!-- end: families -->"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def try_family(task: str, family: str) -> str:
    """Return the outcome for a family: "cut", possibly without some probabilities, or the reason against it."""
    outcome = ""
    for without in _VARIANTS:
        try:
            model = make_model(family, task, without).eval()
        except ImportError as error:
            named = re.search(r"requires the ([-\w]+) library|No module named '(\w+)'", str(error))
            return f"not tried: needs {(named[1] or named[2]) if named else 'another package'}"
        # The sizes of some configurations do not fit each other.
        except Exception as error:  # noqa: BLE001
            return _describe_failure(error)
        if sum(param.numel() for param in model.parameters()) > _MOST_PARAMS:
            return "not tried: has too many parameters"
        try:
            inputs, lacking = _find_inputs(model, task)
            expected = _train_full_model(model, inputs)
        # The inputs or sizes of some models do not fit.
        except Exception as error:  # noqa: BLE001
            return _describe_failure(error)
        try:
            difference, is_exact = _compare(model, inputs, *expected)
        except CutError as error:
            outcome = outcome or f"refused: {_shorten(str(error))}"
            if "training" not in str(error):
                return outcome
            continue
        if difference:
            return f"differs: {difference}"
        found = f"cut with {without} = 0" if without else "cut"
        found = found if is_exact else f"{found}, within rounding"
        return f"{found}, tried with {lacking}" if lacking else found
    return outcome


def _describe_failure(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    # Validators of configurations put the reason into the last line.
    return f"not tried: {type(error).__name__}, {_shorten(lines[-1].strip().removeprefix('ValueError: '))}"


def _find_inputs(model: nn.Module, task: str) -> tuple[Batch, str]:
    """Return a batch that a model takes, and the inputs of the task that this batch lacks."""
    failure: Exception | None = None
    for has_pictures in (True, False) if "image" in task else (False,):
        for inputs in make_inputs(model, ROWS * MICROBATCHES, has_pictures=has_pictures):
            try:
                output = _run_first(model, inputs)
                has_both = has_pictures and len(inputs) > 1
                if has_both and not _reads_pictures(model, inputs, output):
                    raise ValueError("the output does not depend on the pictures")
                takes_pictures = PICTURES & inspect.signature(model.forward).parameters.keys()
                return (
                    inputs,
                    "text alone" if "image" in task and takes_pictures and not has_pictures else "",
                )
            except Exception as error:  # noqa: BLE001 - the next inputs may do
                failure = failure or error
    assert failure is not None
    raise failure


def _run_first(model: nn.Module, inputs: Batch) -> list[Tensor]:
    with torch.no_grad():
        output = model(**{name: value.chunk(MICROBATCHES)[0] for name, value in inputs.items()})
    return [tensor for _, tensor in find_tensors(select_output(output))]


def _reads_pictures(model: nn.Module, inputs: Batch, output: list[Tensor]) -> bool:
    changed = {name: value.flip(0) if name in PICTURES else value for name, value in inputs.items()}
    return any(
        not torch.equal(a, b) for a, b in zip(output, _run_first(model, changed), strict=True)
    )


def _loss(output: Any, _target: Any = None) -> Tensor:
    tensors = [tensor for _, tensor in find_tensors(output) if tensor.is_floating_point()]
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def _split(inputs: Batch) -> list[Batch]:
    parts = {name: value.chunk(MICROBATCHES) for name, value in inputs.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(MICROBATCHES)]


def _train_full_model(model: nn.Module, inputs: Batch) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the losses and gradients of a copy of the model, without dropout."""
    # A change of mode clears the caches of earlier forwards, such as the attention biases of LeViT.
    full_model = copy.deepcopy(model).train().eval()
    losses: list[Tensor] = []
    for microbatch in _split(inputs):
        losses.append(_loss(select_output(full_model(**microbatch))))
        losses[-1].backward()
    for param in full_model.parameters():
        if param.grad is not None:
            param.grad.div_(MICROBATCHES)
    return torch.stack(losses).detach(), {
        name: p.grad for name, p in full_model.named_parameters(remove_duplicate=False)
    }


def _compare(
    model: nn.Module, inputs: Batch, losses: Tensor, grads: Mapping[str, Tensor | None]
) -> tuple[str, bool]:
    """Make a step of a cut model, without dropout.

    Args:
        model: The model.
        inputs: A batch.
        losses: The losses of the full model.
        grads: Gradients of the full model, by name.

    Returns:
        The tensor that differs by more than rounding, and whether all bits of both are equal, except of tied weights.
    """
    model.train()
    made = cut(
        model,
        dist.group.WORLD,  # type: ignore[arg-type]
        (),
        _split(inputs)[0],
        n_microbatches=MICROBATCHES,
        loss_fn=_loss,
        balance="count",
    )
    for part in made.model_parts:
        part.eval()
    found: list[Tensor] = []
    made.step(target=torch.zeros(ROWS * MICROBATCHES), losses=found, **inputs)
    pairs = [
        (f"the gradient of {name}", param.grad, grads[name])
        for name, param in made.named_parameters()
    ]
    if made.has_last_stage:
        pairs.insert(0, ("losses", torch.stack(found).detach(), losses))
    # The parts of a tied weight's gradient are added up in another order than in one process.
    tied = {
        id(param.grad) for shared in made._shared_grads for param in shared._param.find_params()
    }
    is_exact = all(id(value) in tied or _are_same(value, wanted) for _, value, wanted in pairs)
    # Some gradients consist of rounding alone, such as gradients of the biases of keys.
    scale = max(
        (wanted.abs().max().item() for _, _, wanted in pairs if wanted is not None), default=0.0
    )
    return next(
        (name for name, value, wanted in pairs if _differ(value, wanted, scale)), ""
    ), is_exact


def _are_same(found: Tensor | None, wanted: Tensor | None) -> bool:
    """Return whether all bits are equal; None means zeros."""
    if found is None or wanted is None:
        return not _differ(found, wanted, 0.0)
    return torch.equal(found.nan_to_num(), wanted.nan_to_num())


def _differ(found: Tensor | None, wanted: Tensor | None, scale: float) -> bool:
    """Return whether tensors differ by more than rounding of values of a scale; None means zeros."""
    if found is None or wanted is None:
        left = found if wanted is None else wanted
        return left is not None and bool(left.any())
    return not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


def _shorten(text: str) -> str:
    """Return a reason without names of one model, so that families with the same reason share a row."""
    text = re.sub(r" \(rank [\d, ]+\)$", "", text)
    text = re.split(r"(?<=\w)[:.;] |, first at | \(in |\n", text.removeprefix("ovpatch: "))[0]
    text = re.sub(r"\b[\w]+(\.\w+){1,}\b", "…", text)
    return text if len(text) <= 120 else f"{text[:119]}…"


def try_all(families: Sequence[tuple[str, str]]) -> list[str]:
    """Return the outcomes of families, as a job of the ranks."""
    with _quiet():
        return [try_family(*family) for family in families]


# --- the table ---


def make_table(outcomes: Mapping[tuple[str, str], str]) -> str:
    """Return the Markdown of all outcomes."""
    lines = ["| Task | Outcome | Families |\n", "| --- | --- | --- |\n"]
    for task in TASKS:
        rows: dict[str, list[str]] = {}
        for (own, family), outcome in outcomes.items():
            if own == task:
                rows.setdefault(outcome, []).append(family)
        for outcome in sorted(rows, key=lambda text: (not text.startswith("cut"), text)):
            cell = outcome.replace("|", "\\|")
            lines.append(f"| {task} | {cell} | {', '.join(rows[outcome])} |\n")
    return "".join(lines)


def read_table(page: str) -> dict[tuple[str, str], str]:
    """Return the outcomes in a page."""
    table = page.partition(_BEGIN)[2].partition(_END)[0]
    found: dict[tuple[str, str], str] = {}
    for line in table.splitlines()[2:]:
        task, outcome, families = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
        found |= {(task, family): outcome.replace("\\|", "|") for family in families.split(", ")}
    return found


def join_outcomes(by_rank: Iterable[list[str]]) -> list[str]:
    """Return the outcomes, with the outcomes of all ranks if these differ."""
    joined = []
    for own in zip(*by_rank, strict=True):
        # A rank may own the stages that round in another way.
        is_cut = all(outcome.startswith("cut") for outcome in own)
        joined.append(max(own, key=len) if is_cut or len(set(own)) == 1 else " / ".join(own))
    return joined


def main(path: str, kind: str = "") -> None:
    """Renew the table in a page, or its rows whose outcome matches a pattern."""
    # Ranks find no function of __main__.
    from tests.plugins.pipeline.cut_families import try_all as job
    from tests.support.pool import Pool

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    page, pool, size = Path(path), Pool(), 10
    outcomes = read_table(page.read_text(encoding="utf-8"))
    families = [family for family in list_families() if re.match(kind, outcomes.get(family, ""))]
    outcomes = {family: outcomes.get(family, "") for family in list_families()}
    for low in range(0, len(families), size):
        part = families[low : low + size]
        try:
            found = join_outcomes(pool(2)(job, part, timeout=240))
        except Exception as error:  # noqa: BLE001 - the families follow sequentially
            print(f"{part}: {error}"[:300], flush=True)
            found = []
            for family in part:
                try:
                    found += join_outcomes(pool(2)(job, [family], timeout=100))
                except Exception as inner:  # noqa: BLE001 - a row of the table
                    found.append(f"fails: {_shorten(str(inner))}")
        outcomes |= dict(zip(part, found, strict=True))
        print(low, *zip(part, found, strict=True), sep="\n", flush=True)
    pool.close()
    text = page.read_text(encoding="utf-8")
    before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
    page.write_text(f"{before}{_BEGIN}{make_table(outcomes)}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
