"""Pipelines that train in stock PyTorch and patched, and the results of their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import ovpatch
from ovpatch_plugins.pipeline.runtime.torch_compat import list_stages
from tests.plugins.pipeline.models import ROWS, WIDTH, make_blocks
from tests.plugins.pipeline.order_sources import SOURCES, STOCK_SOURCES

#: Whether stages may pass on tensors that get no gradient. Torch 2.11 expects a gradient for each tensor that is sent.
MAY_LACK_GRADIENTS = hasattr(PipelineStage, "_get_grad_send_meta")


class Stage(PipelineStage):
    """A stage that sends nothing to its own rank, which gloo cannot do, although stock torch 2.11 does so at first."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [
            op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank
        ]


def compute_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss in the dtype of the output, because the backward of torch 2.11 fails if the two differ."""
    return nn.functional.mse_loss(output, target.to(output.dtype))


@dataclass(frozen=True)
class Case:
    """A pipeline.

    Attributes:
        schedule: Name of its class.
        microbatches: Their number.
        chunks: Stages per rank.
        steps: Steps to train.
        part: Makes the module of a stage, given its index.
        wrap: Wraps the module, for example for data parallelism.
        context: Makes the context of a step.
        options: Arguments of the schedule.
        vee: Whether stages are placed as a V.
        stage: Arguments of the stage.
        pieces: Calls of ``schedule.step()`` before an optimizer step.
        dtype: Of parameters and inputs.
        shape: Rows of a microbatch and width of the inputs.
        source: Where the order comes from, a name of ``order_sources``.
        after_step: Called with the schedule after each call of ``schedule.step()``.
    """

    schedule: str = "Schedule1F1B"
    microbatches: int = 6
    chunks: int = 1
    steps: int = 2
    part: Callable[[int], nn.Module] = make_blocks
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    options: Mapping[str, Any] = field(default_factory=dict)
    vee: bool = False
    stage: Mapping[str, Any] = field(default_factory=dict)
    pieces: int = 1
    dtype: torch.dtype = torch.float32
    shape: tuple[int, int] = (ROWS, WIDTH)
    source: str = "built"
    after_step: Callable[[Any], None] = lambda _schedule: None


def device() -> torch.device:
    """Return this rank's device: a GPU under NCCL."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def make_schedule(
    case: Case, group: dist.ProcessGroup | None = None
) -> tuple[Any, list[nn.Module]]:
    """Return the schedule and the modules of this rank's stages."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    count = size * case.chunks
    indices = [rank, count - 1 - rank] if case.vee else list(range(rank, count, size))
    parts, stages = [], []
    for index in indices:
        torch.manual_seed(100 + index)
        parts.append(case.wrap(case.part(index).to(device(), case.dtype)))
        stages.append(Stage(parts[-1], index, count, device(), group=group, **case.stage))
    cls = getattr(schedules, case.schedule)
    single = issubclass(cls, schedules.PipelineScheduleSingle)
    made = cls(
        stages[0] if single else stages, case.microbatches, loss_fn=compute_loss, **case.options
    )
    ({**SOURCES, **STOCK_SOURCES})[case.source](made)
    return made, parts


def list_params(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of this rank's stages, by stage and name."""
    return [
        (f"{i}.{name}", param)
        for i, part in enumerate(parts)
        for name, param in part.named_parameters()
    ]


def train(case: Case, group: dist.ProcessGroup | None = None, seed: int = 0) -> list[Any]:
    """Return the losses, outputs, gradients and parameters of all steps."""
    schedule, parts = make_schedule(case, group)
    params = list_params(parts)
    optimizer = torch.optim.AdamW([param for _, param in params if param.requires_grad], lr=1e-2)
    return run_steps(case, schedule, params, optimizer, seed)


def run_steps(
    case: Case, schedule: Any, params: Sequence[tuple[str, nn.Parameter]], optimizer: Any, seed: int
) -> list[Any]:
    found: list[Any] = []
    is_first = any(stage.is_first for stage in list_stages(schedule))
    is_last = any(stage.is_last for stage in list_stages(schedule))
    torch.manual_seed(7 + seed)
    for step in range(case.steps):
        optimizer.zero_grad()
        for piece in range(case.pieces):
            data = torch.Generator().manual_seed(1000 * seed + 10 * step + piece)
            rows, width = case.shape[0] * case.microbatches, case.shape[1]
            x = torch.randn(rows, 2, width, generator=data).to(device(), case.dtype)
            y = torch.randn(rows, 2, width, generator=data).to(device(), case.dtype)
            losses: list[torch.Tensor] = []
            with case.context():
                out = schedule.step(
                    *((x,) if is_first else ()), target=y if is_last else None, losses=losses
                )
            case.after_step(schedule)
            found.append([loss.detach().clone() for loss in losses])
            found.append(None if out is None else out.detach().clone())
        found.append(
            {name: None if p.grad is None else _local(p.grad).clone() for name, p in params}
        )
        optimizer.step()
    found.append({name: _local(param.detach()).clone() for name, param in params})
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return the places where two results differ in a bit."""
    if isinstance(a, dict):
        return [text for key in a for text in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list):
        same = [] if len(a) == len(b) else [f"{where}: {len(a)} and {len(b)} items"]
        return same + [
            text
            for i, (x, y) in enumerate(zip(a, b, strict=False))
            for text in differences(x, y, f"{where}/{i}")
        ]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            [] if a.dtype == b.dtype and torch.equal(a, b) else [f"{where}: {(a - b).abs().max()}"]
        )
    return (
        [] if a is None and b is None else [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    )


def train_both(
    case: Case,
    order: str = "as-given",
    group: dist.ProcessGroup | None = None,
    stock: list[Any] | None = None,
    **options: Any,
) -> Outcome:
    """Train in stock PyTorch, unless its results are given, and patched, and compare."""
    stock = train(case, group) if stock is None else stock
    ovpatch.apply("pipeline", options={"pipeline": {"schedule": order, **options}})
    before = counters()
    patched = train(case, group)
    after = counters()
    remarks = feature_report().remarks
    ovpatch.revert()
    return Outcome(
        differences(stock, patched),
        {name: after[name] - before[name] for name in after},
        list(remarks),
    )


@dataclass
class Outcome:
    """The result of a comparison: differing tensors, the advances of the counters, and the remarks."""

    differences: list[str]
    counters: dict[str, int]
    remarks: list[str]


def feature_report() -> Any:
    """Return the feature's part of the report."""
    return next(feature for feature in ovpatch.report().features if feature.name == "pipeline")


def counters() -> dict[str, int]:
    """Return the feature's counters."""
    return dict(feature_report().counters)
