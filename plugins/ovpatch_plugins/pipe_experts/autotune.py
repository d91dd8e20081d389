"""Into which parts a layer is cut, by measurement.

[Note: by the most tokens] Ranks learn in the exchange of counts, which is there anyhow, how many tokens the rank with
the most has; all choose by that, rounded to a power of two. So a layer whose tokens differ from call to call is
measured a few times in all, and one that a checkpoint computes again is cut as before. What the routing does to the
experts is not looked at: the layers that are measured have random tokens and a balanced routing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ovpatch.hookspecs import cache_dir
from ovpatch.overlap.autotune import Candidates, Tuning, autotuner_for
from ovpatch.overlap.comm.group_state import group_state
from ovpatch_plugins.pipe_experts.chunks import ChunkPlan, Plans, candidates
from ovpatch_plugins.pipe_experts.config import MoEConfig
from ovpatch_plugins.pipe_experts.experts import Activation, Stacked, swiglu
from ovpatch_plugins.pipe_experts.pipelined_forward import computed

FEWEST_ROWS: Final = 256  # of a rank; all-to-alls and products of fewer take as long as their launch


@dataclass(frozen=True)
class Layer:
    """What plans are chosen by, beside the number of tokens; the same on all ranks.

    Attributes:
        how: How it is computed.
        world: Number of ranks.
        local: Number of experts of a rank.
        top_k: Experts of a token.
        hidden: Features of a token.
        wide: Features behind the first product.
        ffn: Features before the second one.
        dtype: In which tokens are sent, and products computed.
        device: Where.
    """

    how: MoEConfig
    world: int
    local: int
    top_k: int
    hidden: int
    wide: int
    ffn: int
    dtype: torch.dtype
    device: torch.device

    def text(self, tokens: int) -> str:
        """Return what is computed, in words."""
        gate = f"{self.wide} to {self.ffn}" if self.wide != self.ffn else str(self.ffn)
        extras = "" if self.how.delay_wgrad else ", weight gradients at once"
        extras += ", 2 communicators" if self.how.multi_stream else ""
        return (
            f"{tokens} tokens of {self.hidden}, {self.top_k} experts each, {self.local} experts of {gate} a rank, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.world} ranks{extras}"
        )

    def needs(self, tokens: int) -> int:
        """Return how many bytes of memory a call, forward and backward, takes at most, with balanced routing."""
        rows = tokens * self.top_k * (8 * self.hidden + 4 * (self.wide + self.ffn))
        as_large = 2 if self.dtype.itemsize >= 4 else 4  # with gradients; sums of chunks' are in float32, then rounded
        weights = as_large * self.local * self.hidden * (self.wide + self.ffn)
        return (rows + weights + 2 * tokens * self.hidden) * self.dtype.itemsize


class Measured:
    """Plans of a layer, of which the fastest is chosen.

    Args:
        layer: Which.
        activation: Between the products, in what is measured.
    """

    def __init__(self, layer: Layer, activation: Activation) -> None:
        self._layer, self._activation = layer, activation
        self._plans = candidates(layer.world, layer.local, layer.how.parts, layer.how.exchange)
        fixed = layer.how.plan(layer.world, layer.local)
        self._fixed = next(name for name, plan in self._plans.items() if plan == fixed)
        self._known: dict[tuple[bool, bool, int], ChunkPlan] = {}
        self.world, self.local = layer.world, layer.local
        self.chunks = math.lcm(*(plan.chunks for plan in self._plans.values()))
        self.symmetric = any(plan.symmetric for plan in self._plans.values())
        self.expected = self._uncut = next(iter(self._plans.values()))

    def chosen(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> ChunkPlan:
        """Return the plan for a number of tokens; see [Note: by the most tokens]."""
        if tokens * self._layer.top_k < FEWEST_ROWS:
            return self._uncut
        rounded = 1 << round(math.log2(tokens))
        key = (torch.are_deterministic_algorithms_enabled(), trains, rounded)
        found = self._known.get(key)
        if found is None:
            found, final = self._asked(group, rounded, trains)
            if final:
                self._known[key] = found
        self.expected = found
        return found

    def _asked(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> tuple[ChunkPlan, bool]:
        """Choose for both directions, since a checkpoint may call without gradients what it computes again with."""
        autotuner = autotuner_for(group, self._layer.device, "pipe_experts", cache_dir())
        forward, training = (autotuner.tune(group, self._tuning(group, tokens, backward)) for backward in (False, True))
        return self._plans[(training if trains else forward).candidate], forward.final and training.final

    def _tuning(self, group: dist.ProcessGroup, tokens: int, backward: bool) -> Tuning:
        layer = self._layer
        direction = "forward and backward" if backward else "forward"
        make = functools.partial(self._make_candidates, group, tokens, backward)
        key = f"{direction}, {layer.text(tokens)}"
        return Tuning(key, tuple(self._plans), self._fixed, make, layer.needs(tokens))

    def _make_candidates(
        self, group: dist.ProcessGroup, tokens: int, backward: bool, generator: torch.Generator
    ) -> Candidates:
        layer = self._layer
        experts = layer.world * layer.local

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=layer.dtype, device=layer.device) * scale
            return drawn.requires_grad_(backward)

        x, top = draw(tokens, layer.hidden), draw(tokens, layer.top_k)
        weights = (
            draw(layer.local, layer.wide, layer.hidden, scale=layer.hidden**-0.5),
            draw(layer.local, layer.hidden, layer.ffn, scale=layer.ffn**-0.5),
        )
        chances = torch.rand(tokens, experts, generator=generator, device=layer.device)
        index = chances.topk(min(layer.top_k, experts), dim=-1).indices
        index = index.repeat(1, math.ceil(layer.top_k / experts))[:, : layer.top_k]
        grad = draw(tokens, layer.hidden).detach()
        maker = Stacked(weights, self._activation, delays=layer.how.delay_wgrad)
        back = layer.how.way_back(group)

        def run(plan: ChunkPlan) -> None:
            with torch.set_grad_enabled(backward):
                out, _ = computed(x, index, top, maker, plan, group, back, layer.dtype)
                if backward:
                    torch.autograd.grad(out, (x, top, *weights), grad)

        return {name: functools.partial(run, plan) for name, plan in self._plans.items()}


def plans_of(
    how: MoEConfig, maker: object, group: dist.ProcessGroup, local: int, x: Tensor, top_k: int, dtype: torch.dtype
) -> Plans:
    """Return the plan of a layer, or those between which is chosen.

    Args:
        how: How it is computed.
        maker: Makes its experts. Only stacked weights are measured, since nothing tells what others compute.
        group: The ranks.
        local: Number of experts of a rank.
        x: Tokens, ``[tokens, h]``.
        top_k: Experts of each.
        dtype: In which they are sent.
    """
    world = group.size()
    if how.cut != "auto" or world == 1 or not isinstance(maker, Stacked):
        return how.plan(world, local)
    wide, ffn = maker.weights[0].shape[1], maker.weights[1].shape[2]
    activation = _stand_in(wide, ffn)
    if activation is None:
        return how.plan(world, local)
    layer = Layer(how, world, local, top_k, x.shape[1], wide, ffn, dtype, x.device)
    return group_state(group).get_or_create((Measured, layer), lambda: Measured(layer, activation))


def _stand_in(wide: int, ffn: int) -> Callable[[Tensor], Tensor] | None:
    """Return an activation of a width, for one that is a script's own; None if there is none."""
    if wide == ffn:
        return nn.functional.silu
    return swiglu if wide == 2 * ffn else None
