"""W computes weight gradients of linears of ``tp_linear`` with the bits of stock PyTorch on 2 x 2 ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import ovpatch
from tests.plugins.pipeline.cases import Case, counters, differences, feature_report, train
from tests.plugins.pipeline.models import WIDTH, Block, Part
from tests.support.rarely import RARELY

HIDDEN = 20
LOOP: dict[str, Any] = {"microbatches": 4, "chunks": 2}


class Heads(nn.Module):
    """Two linears that read one input; a third one reads their multiplied outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.o = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.o(torch.tanh(self.q(x)) * self.k(x))
        return result


class Attention(nn.Module):
    """A norm, :class:`Heads` and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH), Heads()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.heads(self.norm(x))


class Used(Block):
    """A block whose linears are used in a particular way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0

    def _compute(self, x: Tensor) -> Tensor:
        if self.kind == "called twice":
            x = super()._compute(x)
        if self.kind == "read elsewhere":
            weight: Any = self.up.weight
            x = x * (1 + weight.to_local().mean())
        return super()._compute(x)


def _cut(mesh: DeviceMesh, block: nn.Module, sequence: bool) -> None:
    shard = Shard(0) if sequence else Replicate()
    column, row = ColwiseParallel(input_layouts=shard), RowwiseParallel(output_layouts=shard)
    if isinstance(block, Attention):
        given = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),))
        plan = {
            "heads": given,
            "heads.q": ColwiseParallel(),
            "heads.k": ColwiseParallel(),
            "heads.o": row,
        }
        parallelize_module(block, mesh, plan)
        return
    parallelize_module(block, mesh, {"up": column, "down": row})
    if isinstance(block, Used) and block.kind == "hook":
        block.up.weight.register_hook(
            lambda grad: setattr(block, "calls", block.calls + (grad is not None))
        )


def _part(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda _index: Part(make(), make())


_attention = _part(Attention)
_case = functools.partial(Case, microbatches=4)
# A case, whether the sequence is sharded, too, the order, and options of the features.
CASES: dict[str, tuple[Case, bool, str, dict[str, Any]]] = {
    "plain": (_case(pieces=2), False, "zb-h1", {}),
    "sequence": (_case(), True, "zb-h1", {}),
    "sequence, stock schedule": (_case(), True, "zb-h2", {"tp_linear": {"schedule": "stock"}}),
    "one gather": (_case(part=_attention), True, "zb-h1", {}),
    "gathered again": (_case(part=_attention), True, "zb-h1", {"tp_linear": {"regather": True}}),
    "bf16, fully sharded": (_case(dtype=torch.bfloat16), True, "zb-h1", {}),
    "autocast": (_case(context=lambda: torch.autocast("cpu", torch.bfloat16)), True, "zb-h1", {}),
    "checkpoint": (_case(part=_part(lambda: Block(0.0, False))), True, "zb-h1", {}),
    "called twice": (_case(part=_part(lambda: Used("called twice"))), True, "zb-h1", {}),
    "read elsewhere": (_case(part=_part(lambda: Used("read elsewhere"))), True, "zb-h1", {}),
    "hook": (_case(part=_part(lambda: Used("hook"))), True, "zb-h1", {}),
    "as given": (_case(), True, "as-given", {}),
    "as given, on": (_case(), True, "as-given", {"pipeline": {"delay_wgrad_compute": "on"}}),
    "loop": (Case("ScheduleInterleavedZeroBubble", **LOOP), True, "as-given", {}),
}
# The number of weight gradients of a step and stage that W computes: two weights, two blocks, four microbatches.
DEFERRED = {
    "one gather": 24,
    "gathered again": 24,
    "read elsewhere": 8,
    "hook": 8,
    "as given": 0,
    "loop": 32,
}


def _compare(names: list[str]) -> dict[str, tuple[list[str], int, bool, list[str]]]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    group, found = mesh["pp"].get_group(), {}
    stock_of_block: list[Any] | None = None
    for name in names:
        case, sequence, order, options = CASES[name]
        is_plain_block = sequence and case == _case()
        blocks: list[nn.Module] = []

        def wrap(
            module: nn.Module,
            sequence: bool = sequence,
            blocks: list[nn.Module] = blocks,
            name: str = name,
        ) -> nn.Module:
            blocks += module.blocks  # type: ignore[arg-type]
            for block in module.blocks:  # type: ignore[union-attr]
                _cut(mesh["tp"], block, sequence)
                if "fully sharded" in name:
                    fully_shard(block, mesh=mesh["dp"])
            return fully_shard(module, mesh=mesh["dp"]) if "fully sharded" in name else module

        case = Case(**{**vars(case), "wrap": wrap})
        seed = mesh.get_local_rank("tp") if sequence else 0
        # Several linears read one input, so tp_linear sums its gradient in another order than torch.
        if case.part is _attention:
            ovpatch.apply("tp_linear", options=options)
        stock = stock_of_block if is_plain_block and stock_of_block else train(case, group, seed)
        if is_plain_block:
            stock_of_block = stock
        ovpatch.revert()
        calls = sum(getattr(block, "calls", 0) for block in blocks)
        blocks.clear()
        chosen = {"pipeline": {"schedule": order, **options.get("pipeline", {})}}
        ovpatch.apply("pipeline", "tp_linear", options={**options, **chosen})
        before = counters()["weight_grads"]
        patched = train(case, group, seed)
        deferred, remarks = counters()["weight_grads"] - before, list(feature_report().remarks)
        ovpatch.revert()
        same_calls = calls == sum(getattr(block, "calls", 0) for block in blocks)
        found[name] = (differences(stock, patched), deferred, same_calls, remarks)
    return found


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=RARELY)])
def test_w_computes_weight_gradients_of_tp_linear_with_the_bits_of_stock(
    ranks: Any, part: int
) -> None:
    names = list(CASES)[part::2]
    for rank, found in enumerate(ranks(4)(_compare, names)):
        for name, (changes, deferred, same_calls, remarks) in found.items():
            assert not changes, f"rank {rank}, {name}: {changes[:4]}"
            assert same_calls, name
            case = CASES[name][0]
            assert deferred == DEFERRED.get(name, 16) * case.steps * case.pieces, (
                f"rank {rank}, {name}"
            )
            if name == "hook":
                assert any(
                    "2 linears in B: of tp_linear, with hooks or a main_grad" in text
                    for text in remarks
                )
