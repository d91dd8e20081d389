"""The plan of a layer, chosen by measurement."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ovpatch.hookspecs import cache_dir
from ovpatch.overlap.autotune.autotuner import Candidates, Tuning, autotuner_for
from ovpatch.overlap.comm.kept_state import group_state
from ovpatch_plugins.pipe_experts.chunks import ChunkPlan, PlanCandidates, list_candidates, make_plan
from ovpatch_plugins.pipe_experts.experts import Activation, StackedFactory, run_forward, swiglu
from ovpatch_plugins.pipe_experts.options import MoEConfig

MIN_ROWS: Final = 256  # of a rank; fewer rows take as long as their kernels' launches


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The key of a choice, beside the number of tokens; the same on all ranks."""

    config: MoEConfig  # how the layer is computed
    ep_size: int  # number of ranks
    num_local_experts: int  # number of experts of a rank
    top_k: int  # experts of a token
    hidden: int  # features of a token
    wide: int  # output features of the first product
    ffn: int  # input features of the second product
    dtype: torch.dtype  # dtype of dispatched rows and products
    device: torch.device  # device of the tokens

    def describe(self, tokens: int) -> str:
        """Return the measured layer in words; also the key of the cache."""
        gate = f"{self.wide} to {self.ffn}" if self.wide != self.ffn else str(self.ffn)
        extras = "" if self.config.delay_wgrad else ", weight gradients at once"
        extras += ", 2 communicators" if self.config.multi_stream else ""
        return (
            f"{tokens} tokens of {self.hidden}, {self.top_k} experts each, "
            f"{self.num_local_experts} experts of {gate} a rank, {str(self.dtype).removeprefix('torch.')}, "
            f"{self.ep_size} ranks{extras}"
        )

    def estimate_bytes(self, tokens: int) -> int:
        """Return the peak memory of a call, forward and backward, with balanced routing, in bytes."""
        rows = tokens * self.top_k * (8 * self.hidden + 4 * (self.wide + self.ffn))
        copies = 2 if self.dtype.itemsize >= 4 else 4  # with gradients; chunks' sums are in float32, then rounded
        weights = copies * self.num_local_experts * self.hidden * (self.wide + self.ffn)
        return (rows + weights + 2 * tokens * self.hidden) * self.dtype.itemsize


class MeasuredPlans(PlanCandidates):
    """Plans of a layer, of which the fastest is chosen.

    The exchange of counts tells all ranks the tokens of the rank that has the most; the choice is by that number,
    rounded to a power of two. So a layer with varying tokens is measured a few times in all, and a recomputed
    checkpoint gets the same plan. Measurements use random tokens and balanced routing, since the choice must not depend
    on one rank's routing.
    """

    def __init__(self, layer: LayerShape, fixed: ChunkPlan, activation: Activation) -> None:
        self._layer, self._activation = layer, activation
        self._plans = list_candidates(layer.ep_size, layer.num_local_experts, layer.config.parts, layer.config.exchange)
        self._fixed = next(name for name, plan in self._plans.items() if plan == fixed)
        self._chosen: dict[tuple[bool, bool, int], ChunkPlan] = {}
        plans = list(self._plans.values())
        self._uncut = plans[0]
        super().__init__(plans[0])
        self.finest = dataclasses.replace(
            self._uncut,
            token_chunks=math.lcm(*(plan.token_chunks for plan in plans)),
            symmetric=any(plan.symmetric for plan in plans),
        )

    def choose_plan(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> ChunkPlan:
        """See :meth:`PlanCandidates.choose_plan`."""
        if tokens * self._layer.top_k < MIN_ROWS:
            return self._uncut
        rounded = 1 << round(math.log2(tokens))
        key = (torch.are_deterministic_algorithms_enabled(), trains, rounded)
        plan = self._chosen.get(key)
        if plan is None:
            plan, final = self._tune(group, rounded, trains)
            if final:
                self._chosen[key] = plan
        self.expected = plan
        return plan

    def _tune(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> tuple[ChunkPlan, bool]:
        """Choose for both directions: a checkpoint calls a layer without gradients, and recomputes it with them."""
        layer = self._layer
        autotuner, choices = autotuner_for(group, layer.device, "pipe_experts", cache_dir()), []
        for backward, direction in ((False, "forward"), (True, "forward and backward")):
            make = functools.partial(self._make_candidates, group, tokens, backward)
            key, needs = f"{direction}, {layer.describe(tokens)}", layer.estimate_bytes(tokens)
            choices.append(autotuner.tune(group, Tuning(key, tuple(self._plans), self._fixed, make, needs)))
        return self._plans[choices[trains].candidate], all(choice.final for choice in choices)

    def _make_candidates(
        self, group: dist.ProcessGroup, tokens: int, backward: bool, generator: torch.Generator
    ) -> Candidates:
        layer = self._layer
        experts = layer.ep_size * layer.num_local_experts

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=layer.dtype, device=layer.device) * scale
            return drawn.requires_grad_(backward)

        x, top = draw(tokens, layer.hidden), draw(tokens, layer.top_k)
        weights = (
            draw(layer.num_local_experts, layer.wide, layer.hidden, scale=layer.hidden**-0.5),
            draw(layer.num_local_experts, layer.hidden, layer.ffn, scale=layer.ffn**-0.5),
        )
        chances = torch.rand(tokens, experts, generator=generator, device=layer.device)
        index = chances.topk(min(layer.top_k, experts), dim=-1).indices
        index = index.repeat(1, math.ceil(layer.top_k / experts))[:, : layer.top_k]
        grad = draw(tokens, layer.hidden).detach()
        factory = StackedFactory(weights, self._activation, layer.config.delay_wgrad)
        combine_group = layer.config.get_combine_group(group)

        def run(plan: ChunkPlan) -> None:
            with torch.set_grad_enabled(backward):
                out, _ = run_forward(x, index, top, factory, PlanCandidates(plan), group, combine_group, layer.dtype)
                if backward:
                    torch.autograd.grad(out, (x, top, *weights), grad)

        return {name: functools.partial(run, plan) for name, plan in self._plans.items()}


def get_plans(
    config: MoEConfig,
    factory: object,
    group: dist.ProcessGroup,
    num_local_experts: int,
    x: Tensor,
    top_k: int,
    dtype: torch.dtype,
) -> PlanCandidates:
    """Return the plan of a layer, or the plans to choose from.

    Only experts with stacked weights are measured: the cost of others is not known. ``x`` are tokens ``[tokens, h]``,
    with ``top_k`` experts of each; dispatched rows are in ``dtype``.
    """
    ep_size = group.size()
    fixed = make_plan(ep_size, num_local_experts, config.cut, config.parts, config.exchange)
    if config.cut != "auto" or ep_size == 1 or not isinstance(factory, StackedFactory):
        return PlanCandidates(fixed)
    wide, ffn = factory.weights[0].shape[1], factory.weights[1].shape[2]
    if wide not in (ffn, 2 * ffn):  # there is no activation of that width to measure with
        return PlanCandidates(fixed)
    activation = nn.functional.silu if wide == ffn else swiglu
    layer = LayerShape(config, ep_size, num_local_experts, top_k, x.shape[1], wide, ffn, dtype, x.device)
    return group_state(group).get_or_create((MeasuredPlans, layer), lambda: MeasuredPlans(layer, fixed, activation))
