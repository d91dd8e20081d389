"""Stages of other libraries' modules: peft's adapters, and the grouped experts of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.plugins.pipeline.cases import Case, Outcome, train_both
from tests.plugins.pipeline.models import WIDTH, Block, Part

MICROBATCHES, STEPS = 6, 2
# The first microbatch leaves all weight gradients in B.
DEFERRING = MICROBATCHES * STEPS - 1


def _make_adapted(_index: int) -> nn.Module:
    """Return two blocks whose linears are frozen and have adapters."""
    from peft import LoraConfig, inject_adapter_in_model

    part = Part(Block(), Block())
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["up", "down"], lora_dropout=0.1, init_lora_weights=False
    )
    made: nn.Module = inject_adapter_in_model(config, part)
    return made


class Experts(nn.Module):
    """A residual layer of experts with weights ``[experts, out, in]``, after a linear."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        from transformers.models.qwen3_moe.modeling_qwen3_moe import (
            Qwen3MoeConfig,
            Qwen3MoeSparseMoeBlock,
        )

        config = Qwen3MoeConfig(
            hidden_size=WIDTH, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
        )
        config._experts_implementation = implementation
        self.linear, self.moe = nn.Linear(WIDTH, WIDTH), Qwen3MoeSparseMoeBlock(config)
        for param in self.parameters():
            nn.init.normal_(param, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(torch.tanh(self.linear(x)))
        result: Tensor = x + (y[0] if isinstance(y, tuple) else y)
        return result


def _run(kind: str) -> Outcome:
    part = _make_adapted if kind == "adapters" else lambda _index: Experts(kind)
    return train_both(Case(part=part, steps=STEPS, microbatches=MICROBATCHES), "zb-h1")


def test_adapters_are_deferred_and_frozen_weights_have_no_w(ranks: Any) -> None:
    pytest.importorskip("peft")
    for rank, outcome in enumerate(ranks(2)(_run, "adapters")):
        assert not outcome.differences, f"rank {rank}: {outcome.differences[:4]}"
        # A and B of four linears are deferred, except the first A of the first stage, whose input needs no gradient.
        assert outcome.counters["weight_grads"] == (8 if rank else 7) * DEFERRING
        assert f"stage {rank}: 4 linears in B: with a frozen weight" in outcome.remarks


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_grouped_experts_stay_in_the_backward_and_the_report_lists_them(
    ranks: Any, implementation: str
) -> None:
    pytest.importorskip("transformers")
    for rank, outcome in enumerate(ranks(2)(_run, implementation)):
        assert not outcome.differences, f"rank {rank}: {outcome.differences[:4]}"
        assert (
            f"stage {rank}: 2 weights of experts in B: their GEMMs are grouped" in outcome.remarks
        )
        deferred = outcome.counters["weight_grads"] / DEFERRING
        assert deferred == (1 if rank else 0), (
            "the input of the first stage's linear needs no gradient"
        )
