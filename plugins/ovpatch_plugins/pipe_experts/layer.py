"""Expert-parallel layers, also as a ready module: from routed tokens to the weighted sum of outputs.

If the options leave the chunks of a layer open, measurements choose them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from ovpatch.hookspecs import cache_dir
from ovpatch.overlap.comm.consensus import check_consistent_once
from ovpatch.overlap.comm.lifetimes import group_state
from ovpatch.overlap.kernels.autotuner import Candidates, Tuning, get_autotuner
from ovpatch.overlap.tensors.linear_ops import autocast_dtype
from ovpatch_plugins.pipe_experts.all_to_all import resolve_exchange
from ovpatch_plugins.pipe_experts.experts import (
    ACTIVATIONS,
    Activation,
    ExpertFactory,
    GroupedExperts,
    ModuleListExperts,
    StackedFactory,
    run_forward,
    swiglu,
)
from ovpatch_plugins.pipe_experts.pipe_experts_options import MoEConfig
from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS
from ovpatch_plugins.pipe_experts.routing import (
    ChunkPlan,
    PlanCandidates,
    compute_capacity,
    drop_over_capacity,
    list_candidates,
    make_plan,
)

DEFAULT_CONFIG = MoEConfig()

_REMEDY_SAME_LAYERS = (
    "Give every rank and every token the same number of experts. Give every rank the same OVPATCH "
    "variables and the same `how`, and call ovpatch.apply() with the same arguments everywhere, or "
    "set OVPATCH_PIPE_EXPERTS=0 on all ranks, which leaves layers to torch."
)


def expert_parallel_ffn(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: Sequence[Tensor],
    activation: Activation,
    group: dist.ProcessGroup | None,
    config: MoEConfig = DEFAULT_CONFIG,
    shared_experts: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Apply feed-forward experts with stacked weights to the tokens routed to them.

    Args:
        x: This rank's tokens, ``[tokens, h]``.
        top_k_index: Their experts, numbered over all ranks, ``[tokens, k]``; -1 for none.
        top_k_weights: Weight of each expert's output, ``[tokens, k]``.
        weights: This rank's experts: ``[e, n, h]`` and ``[e, h, m]``.
        activation: Between the two GEMMs, ``[rows, n]`` -> ``[rows, m]``.
        group: The ranks; each has ``e`` experts, numbered by rank. None for the default group.
        config: The settings of the layer.
        shared_experts: Computes a summand, ``[tokens, h]``, while the first rows are in flight.

    Returns:
        ``[tokens, h]``. Under autocast, GEMMs are in its dtype; outputs are weighted and summed in the
        dtype of ``x``.

    Raises:
        ValueError: A token is routed to an expert that does not exist, or this rank is not in the
            group.
    """
    dtype = autocast_dtype(x.device.type, x.dtype)
    factory = make_stacked_factory(weights, activation, dtype, config)
    return run_layer(
        x,
        top_k_index,
        top_k_weights,
        factory,
        len(weights[0]),
        group,
        config,
        shared_experts,
        dtype,
    )


def make_stacked_factory(
    weights: Sequence[Tensor], activation: Activation, dtype: torch.dtype | None, config: MoEConfig
) -> StackedFactory:
    """Return the factory of experts with stacked weights, ``[e, n, h]`` and ``[e, h, m]``.

    GEMMs are in ``dtype``, by default in the dtype of the weights.
    """
    # The cast is part of the graph, so gradients reach the weights in their own dtype.
    cast = [weight if dtype is None else weight.to(dtype) for weight in weights]
    return StackedFactory(cast, activation, config.delay_wgrad)


def run_experts(
    experts: Sequence[Callable[[Tensor], Tensor]],
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup | None,
    config: MoEConfig = DEFAULT_CONFIG,
    shared_experts: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Apply experts that are modules, such as an ``nn.ModuleList``'s, to the tokens routed to them.

    ``experts`` are this rank's experts, ``[rows, h]`` -> ``[rows, h]`` each; all ranks have equally many.
    The remaining arguments and the result are as in :func:`expert_parallel_ffn`.
    """
    factory = functools.partial(ModuleListExperts, modules=experts)
    return run_layer(
        x, top_k_index, top_k_weights, factory, len(experts), group, config, shared_experts
    )


def run_grouped_experts(
    experts: Callable[[Tensor, Tensor], Tensor],
    num_local_experts: int,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup | None,
    config: MoEConfig = DEFAULT_CONFIG,
    shared_experts: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Apply experts that one function computes, such as torchtitan's, to the tokens routed to them.

    This replaces a dispatcher's ``dispatch``, the experts, and its ``combine``. ``experts`` maps rows by
    expert, ``[rows, h]``, and the number of rows of each of this rank's experts,
    ``[num_local_experts]``, to ``[rows, h]``. It is called once per chunk; experts outside the chunk
    have no rows. The remaining arguments and the result are as in :func:`expert_parallel_ffn`.
    """
    factory = functools.partial(GroupedExperts, function=experts)
    return run_layer(
        x, top_k_index, top_k_weights, factory, num_local_experts, group, config, shared_experts
    )


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or the default group for None.

    Raises:
        ValueError: There is no default group, or this rank is not in the group.
    """
    resolved = dist.group.WORLD if group is None else group
    if resolved is None:
        raise ValueError(
            "ovpatch: there is no process group. Call torch.distributed.init_process_group() first."
        )
    # This is also true of the placeholder that new_group() returns on ranks outside of a group.
    if dist.get_rank(resolved) < 0:
        raise ValueError(
            f"ovpatch: rank {dist.get_rank()} is not in the group over which experts are shared. "
            "Give the layer the group that this rank is in."
        )
    return resolved


@torch._disable_dynamo
def run_layer(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    factory: ExpertFactory,
    num_local_experts: int,
    group: dist.ProcessGroup | None,
    config: MoEConfig = DEFAULT_CONFIG,
    shared_experts: Callable[[], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Dispatch tokens, compute their experts, and return the weighted sums; see :func:`expert_parallel_ffn`.

    ``factory`` makes the experts of this call. Dispatched rows are in ``dtype``, by default in that of ``x``.
    """
    if len(x) != len(top_k_index) or top_k_index.shape != top_k_weights.shape:
        raise ValueError(
            f"tokens {tuple(x.shape)}, experts {tuple(top_k_index.shape)} and weights "
            f"{tuple(top_k_weights.shape)} do "
            "not fit: give [tokens, h], [tokens, k] and [tokens, k]"
        )
    group = resolve_group(group)
    top_k, dtype = top_k_index.shape[1], dtype or x.dtype
    # Ranks with other numbers would launch other collectives.
    terms = {"experts of a rank": num_local_experts, "experts of a token": top_k}
    key = (config, num_local_experts, top_k)
    check_consistent_once(
        group, "pipe_experts", key, lambda: terms | asdict(config), remedy=_REMEDY_SAME_LAYERS
    )
    config = resolve_exchange(config, group, x.device)
    plans = get_plans(config, factory, group, num_local_experts, x, top_k, dtype)
    combine_group = config.get_combine_group(group)
    out, num_chunks = run_forward(
        x, top_k_index, top_k_weights, factory, plans, group, combine_group, dtype, shared_experts
    )
    COUNTERS.calls += 1
    COUNTERS.parts += num_chunks
    COUNTERS.stacked_calls += isinstance(factory, StackedFactory)
    return out


# --- the plan of a layer, chosen by measurement ---

# A rank with fewer rows needs less time to compute them than to launch the kernels, so no plan is better.
MIN_ROWS: Final = 256


@dataclass(frozen=True)
class LayerShape:
    """The key of a choice, with the number of tokens; the same on all ranks.

    Attributes:
        config: The settings of the layer.
        ep_size: Number of ranks.
        num_local_experts: Number of experts of a rank.
        top_k: Number of experts of a token.
        hidden: Number of features of a token.
        wide: Number of output features of the first GEMM.
        ffn: Number of input features of the second GEMM.
        dtype: Dtype of dispatched rows and of GEMMs.
        device: Device of the tokens.
    """

    config: MoEConfig
    ep_size: int
    num_local_experts: int
    top_k: int
    hidden: int
    wide: int
    ffn: int
    dtype: torch.dtype
    device: torch.device

    def describe(self, tokens: int) -> str:
        """Return the measured layer in words; also the key of the cache."""
        gate = f"{self.wide} to {self.ffn}" if self.wide != self.ffn else str(self.ffn)
        extras = "" if self.config.delay_wgrad else ", weight gradients at once"
        extras += ", 2 communicators" if self.config.multi_stream else ""
        return (
            f"{tokens} tokens of {self.hidden}, {self.top_k} experts each, "
            f"{self.num_local_experts} experts of {gate} a rank, "
            f"{str(self.dtype).removeprefix('torch.')}, "
            f"{self.ep_size} ranks{extras}"
        )

    def estimate_bytes(self, tokens: int) -> int:
        """Return the peak memory of a call, forward and backward, with balanced routing, in bytes."""
        rows = tokens * self.top_k * (8 * self.hidden + 4 * (self.wide + self.ffn))
        # Weights have gradients. Sums over several low-precision chunks are in float32, then rounded.
        copies = 2 if self.dtype.itemsize >= 4 else 4
        weights = copies * self.num_local_experts * self.hidden * (self.wide + self.ffn)
        return (rows + weights + 2 * tokens * self.hidden) * self.dtype.itemsize


class MeasuredPlans(PlanCandidates):
    """The plans of a layer, of which the fastest is chosen.

    By the exchange of counts, all ranks know the number of tokens of the rank that has the most. The
    choice is by that number, rounded to a power of two. So a layer with varying tokens is measured a
    few times in all, and a recomputed checkpoint gets the same plan. Measurements use random tokens and
    balanced routing, since the choice must not depend on one rank's routing.
    """

    def __init__(self, layer: LayerShape, fixed: ChunkPlan, activation: Activation) -> None:
        self._layer = layer
        self._activation = activation
        self._plans = list_candidates(
            layer.ep_size, layer.num_local_experts, layer.config.parts, layer.config.exchange
        )
        # The name of the plan that is used if nothing can be measured.
        self._fixed = next(name for name, plan in self._plans.items() if plan == fixed)
        # The chosen plans, by deterministic mode, whether gradients are on, and rounded tokens.
        self._chosen: dict[tuple[bool, bool, int], ChunkPlan] = {}
        plans = list(self._plans.values())
        self._uncut = plans[0]
        super().__init__(plans[0])
        # The slices of each plan are unions of the slices of this plan, so counts by its slices serve
        # all plans.
        self.finest = replace(
            self._uncut,
            token_chunks=math.lcm(*(plan.token_chunks for plan in plans)),
            symmetric=any(plan.symmetric for plan in plans),
        )

    def choose_plan(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> ChunkPlan:
        """See :meth:`PlanCandidates.choose_plan`."""
        if tokens * self._layer.top_k < MIN_ROWS:
            return self._uncut
        # A power of two keeps the number of measurements small.
        rounded = 1 << round(math.log2(tokens))
        # The autotuner measures nothing while algorithms must be deterministic, so a choice holds in one mode alone.
        key = (torch.are_deterministic_algorithms_enabled(), trains, rounded)
        plan = self._chosen.get(key)
        if plan is None:
            plan, final = self._tune(group, rounded, trains)
            if final:
                self._chosen[key] = plan
        self.expected = plan
        return plan

    def _tune(self, group: dist.ProcessGroup, tokens: int, trains: bool) -> tuple[ChunkPlan, bool]:
        """Choose for both directions and return the plan for one, and whether the choices are final.

        A checkpoint calls a layer without gradients and recomputes it with gradients.
        """
        layer = self._layer
        autotuner, choices = get_autotuner(group, layer.device, "pipe_experts", cache_dir()), []
        for backward, direction in ((False, "forward"), (True, "forward and backward")):
            make = functools.partial(self._make_candidates, group, tokens, backward)
            key, needs = f"{direction}, {layer.describe(tokens)}", layer.estimate_bytes(tokens)
            choices.append(
                autotuner.tune(group, Tuning(key, tuple(self._plans), self._fixed, make, needs))
            )
        return self._plans[choices[trains].candidate], all(choice.final for choice in choices)

    def _make_candidates(
        self, group: dist.ProcessGroup, tokens: int, backward: bool, generator: torch.Generator
    ) -> Candidates:
        layer = self._layer
        experts = layer.ep_size * layer.num_local_experts

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = (
                torch.randn(*shape, generator=generator, dtype=layer.dtype, device=layer.device)
                * scale
            )
            return drawn.requires_grad_(backward)

        x, top = draw(tokens, layer.hidden), draw(tokens, layer.top_k)
        weights = (
            draw(layer.num_local_experts, layer.wide, layer.hidden, scale=layer.hidden**-0.5),
            draw(layer.num_local_experts, layer.hidden, layer.ffn, scale=layer.ffn**-0.5),
        )
        chances = torch.rand(tokens, experts, generator=generator, device=layer.device)
        # Distinct random experts for each token load all experts about equally.
        index = chances.topk(min(layer.top_k, experts), dim=-1).indices
        index = index.repeat(1, math.ceil(layer.top_k / experts))[:, : layer.top_k]
        grad = draw(tokens, layer.hidden).detach()
        factory = StackedFactory(weights, self._activation, layer.config.delay_wgrad)
        combine_group = layer.config.get_combine_group(group)

        def run(plan: ChunkPlan) -> None:
            with torch.set_grad_enabled(backward):
                out, _ = run_forward(
                    x, index, top, factory, PlanCandidates(plan), group, combine_group, layer.dtype
                )
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

    Only experts with stacked weights are measured, because the cost of other experts is unknown.

    Args:
        config: The settings of the layer.
        factory: The factory of its experts.
        group: The ranks.
        num_local_experts: Number of experts of a rank.
        x: Tokens, ``[tokens, h]``.
        top_k: Number of experts of a token.
        dtype: Dtype of dispatched rows.
    """
    ep_size = group.size()
    fixed = make_plan(ep_size, num_local_experts, config.cut, config.parts, config.exchange)
    if config.cut != "auto" or ep_size == 1 or not isinstance(factory, StackedFactory):
        return PlanCandidates(fixed)
    wide, ffn = factory.weights[0].shape[1], factory.weights[1].shape[2]
    # There is no activation of other widths to measure with.
    if wide not in (ffn, 2 * ffn):
        return PlanCandidates(fixed)
    activation = nn.functional.silu if wide == ffn else swiglu
    layer = LayerShape(
        config, ep_size, num_local_experts, top_k, x.shape[1], wide, ffn, dtype, x.device
    )
    return group_state(group).get_or_create(
        (MeasuredPlans, layer), lambda: MeasuredPlans(layer, fixed, activation)
    )


# --- the module ---


class ExpertParallelFFN(nn.Module):
    """Feed-forward experts, spread over the ranks of a group.

    Rank ``r`` of the group has experts ``r * e`` to ``r * e + e - 1``, in this order, for all settings.

    Args:
        hidden: Features of a token, h.
        ffn: Features between an expert's GEMMs.
        experts: Number of experts on all ranks.
        group: The ranks; None for the default group.
        activation: ``swiglu``, with a gate, or ``gelu``, ``relu`` or ``silu``, plain.
        capacity_factor: An expert takes this many times its even share of one rank's tokens, and drops
            all later tokens. None to drop nothing.
        shared: Computed on all tokens, while the first rows are in flight, and added.
        config: The settings of the layer. Default: ``MoEConfig()``.
        device: Device of the weights.
        dtype: Dtype of the weights.

    Raises:
        ValueError: The experts do not divide by the number of ranks, the activation is unknown, or this
            rank is not in the group.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        group: dist.ProcessGroup | None = None,
        *,
        activation: str = "swiglu",
        capacity_factor: float | None = None,
        shared: nn.Module | None = None,
        config: MoEConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = resolve_group(group)
        ep_size = group.size()
        if experts % ep_size:
            raise ValueError(
                f"ovpatch: {experts} experts cannot be shared evenly by {ep_size} ranks. Choose a "
                "multiple of the number of ranks."
            )
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"ovpatch: activation={activation!r} is unknown. Choose one of "
                f"{', '.join(ACTIVATIONS)}."
            )
        self.experts = experts
        self.activation = activation
        self.capacity_factor = capacity_factor
        self.shared = shared
        self.config = config or MoEConfig()
        # The module keeps a name, because a group cannot be copied or pickled with it.
        self.group_name = group.group_name
        local, wide = experts // ep_size, 2 * ffn if activation == "swiglu" else ffn
        # ``[e, n, h]``; n is ``ffn``, or twice that with a gate: gate first.
        self.up = nn.Parameter(torch.empty(local, wide, hidden, device=device, dtype=dtype))
        # ``[e, h, ffn]``
        self.down = nn.Parameter(torch.empty(local, hidden, ffn, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as ``nn.Linear`` does; each rank draws from its own generator."""
        for weight in (self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x: ``[..., h]``.
            top_k_index: Their experts, numbered over all ranks, ``[..., k]``; -1 for none.
            top_k_weights: ``[..., k]``.
        """
        # All leading dimensions count as tokens.
        tokens, index = x.reshape(-1, x.shape[-1]), top_k_index.reshape(-1, top_k_index.shape[-1])
        if self.capacity_factor is not None:
            capacity = compute_capacity(
                len(tokens), index.shape[1], self.experts, self.capacity_factor
            )
            index = drop_over_capacity(index, self.experts, capacity)
        weights = top_k_weights.reshape(index.shape)
        shared = self.shared
        shared_experts: Callable[[], Tensor] | None = (
            None if shared is None else lambda: shared(tokens)
        )
        activation, group = ACTIVATIONS[self.activation], self._find_group()
        out = expert_parallel_ffn(
            tokens,
            index,
            weights,
            (self.up, self.down),
            activation,
            group,
            self.config,
            shared_experts,
        )
        return out.view(*x.shape[:-1], out.shape[-1])

    def _find_group(self) -> dist.ProcessGroup:
        try:
            return distributed_c10d._resolve_process_group(self.group_name)
        except RuntimeError as error:
            raise RuntimeError(
                f"ovpatch: the process group '{self.group_name}', over which this layer's experts "
                "are shared, does not exist here. Create it before the layer is copied or loaded, or "
                "create a new layer."
            ) from error

    def extra_repr(self) -> str:
        """Describe the layer."""
        local, _, hidden = self.up.shape
        return f"{hidden}, {self.down.shape[2]}, experts={self.experts}, local={local}, activation={self.activation!r}"
