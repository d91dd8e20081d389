"""Expert-parallel layers: from routed tokens to the weighted sum of what their experts return."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.consensus import check_consistent_once
from ovpatch.overlap.tensors.autocast import autocast_dtype
from ovpatch_plugins.pipe_experts.autotune import plans_of
from ovpatch_plugins.pipe_experts.config import MoEConfig
from ovpatch_plugins.pipe_experts.experts import Activation, Grouped, Maker, Separate, Stacked
from ovpatch_plugins.pipe_experts.pipelined_forward import computed
from ovpatch_plugins.pipe_experts.report import COUNTERS
from ovpatch_plugins.pipe_experts.symm_all_to_all import possible

DEFAULT = MoEConfig()

_SAME_LAYERS = (
    "Give every rank and every token the same number of experts, every rank the same OVPATCH variables and the same "
    "`how`, and call ovpatch.apply() with the same arguments everywhere; OVPATCH_PIPE_EXPERTS=0 on all ranks leaves "
    "layers to stock."
)


def expert_parallel_ffn(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: Sequence[Tensor],
    activation: Activation,
    group: dist.ProcessGroup | None,
    how: MoEConfig = DEFAULT,
    meanwhile: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Apply experts that are feed-forward networks to the tokens that are routed to them.

    Args:
        x: This rank's tokens, ``[tokens, h]``.
        top_k_index: Their experts, numbered over all ranks, ``[tokens, k]``; -1 where there is none.
        top_k_weights: With what each expert's output is weighted, ``[tokens, k]``.
        weights: This rank's experts': ``[e, n, h]`` and ``[e, h, m]``.
        activation: Between the two products, ``[rows, n]`` -> ``[rows, m]``.
        group: The ranks, each of which has ``e`` experts, the first rank the first ones; None for the default group.
        how: How to compute.
        meanwhile: Computes what is added, ``[tokens, h]``, such as shared experts, while the first rows are under way.

    Returns:
        ``[tokens, h]``. Under autocast products are of its dtype; outputs are weighted and summed in that of ``x``.

    Raises:
        ValueError: A token is routed to an expert that no rank has, or this rank is in no such group.
    """
    dtype = autocast_dtype(x.device.type, x.dtype)
    maker = stacked(weights, activation, dtype, how)
    return run(x, top_k_index, top_k_weights, maker, len(weights[0]), group, how, meanwhile, dtype)


def stacked(weights: Sequence[Tensor], activation: Activation, dtype: torch.dtype | None, how: MoEConfig) -> Stacked:
    """Return what makes experts whose weights are stacked.

    Args:
        weights: ``[e, n, h]`` and ``[e, h, m]``.
        activation: Between the two products.
        dtype: Of the products, if it is not the weights' own.
        how: How to compute.
    """
    used = [weight if dtype is None else weight.to(dtype) for weight in weights]
    return Stacked(used, activation, how.delay_wgrad)


def run_experts(
    experts: Sequence[Callable[[Tensor], Tensor]],
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup | None,
    how: MoEConfig = DEFAULT,
    meanwhile: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Apply experts that are modules, such as those of an ``nn.ModuleList``, to the tokens that are routed to them.

    Args:
        experts: This rank's, ``[rows, h]`` -> ``[rows, h]`` each; all ranks have equally many.
        x: This rank's tokens, ``[tokens, h]``.
        top_k_index: Their experts, ``[tokens, k]``; see :func:`expert_parallel_ffn`.
        top_k_weights: With what each expert's output is weighted, ``[tokens, k]``.
        group: The ranks; None for the default group.
        how: How to compute.
        meanwhile: Computes what is added; see :func:`expert_parallel_ffn`.

    Returns:
        ``[tokens, h]``.
    """
    maker = functools.partial(Separate, modules=experts)
    return run(x, top_k_index, top_k_weights, maker, len(experts), group, how, meanwhile)


def run_grouped_experts(
    experts: Callable[[Tensor, Tensor], Tensor],
    local: int,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup | None,
    how: MoEConfig = DEFAULT,
    meanwhile: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Apply experts that one function computes, such as torchtitan's, to the tokens that are routed to them.

    Stands for a dispatcher's ``dispatch``, the experts, and its ``combine``.

    Args:
        experts: Rows by expert, ``[rows, h]``, and how many rows each of this rank's experts has, ``[local]``, ->
            ``[rows, h]``. Called in every part, for the experts of that part; the others have no rows then.
        local: How many experts a rank has.
        x: This rank's tokens, ``[tokens, h]``.
        top_k_index: Their experts, ``[tokens, k]``; see :func:`expert_parallel_ffn`.
        top_k_weights: With what each expert's output is weighted, ``[tokens, k]``.
        group: The ranks; None for the default group.
        how: How to compute.
        meanwhile: Computes what is added; see :func:`expert_parallel_ffn`.

    Returns:
        ``[tokens, h]``.
    """
    maker = functools.partial(Grouped, function=experts)
    return run(x, top_k_index, top_k_weights, maker, local, group, how, meanwhile)


def ranks_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that is meant, which is the default one if none is given.

    Raises:
        ValueError: There is none, or this rank is not in it.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group() first")
    if dist.get_rank(found) < 0:  # also for what new_group() returns to those left out
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group over which experts are shared: give it the group that it is in"
        )
    return found


@torch._disable_dynamo
def run(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    maker: Maker,
    local: int,
    group: dist.ProcessGroup | None,
    how: MoEConfig = DEFAULT,
    meanwhile: Callable[[], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Send tokens to experts, have these computed, and return the weighted sums.

    Args:
        x: This rank's tokens, ``[tokens, h]``.
        top_k_index: Their experts, ``[tokens, k]``; see :func:`expert_parallel_ffn`.
        top_k_weights: With what each expert's output is weighted, ``[tokens, k]``.
        maker: Makes what computes the parts.
        local: How many experts a rank has.
        group: The ranks; None for the default group.
        how: How to compute.
        meanwhile: Computes what is added; see :func:`expert_parallel_ffn`.
        dtype: In which tokens are sent; that of ``x`` by default.

    Returns:
        ``[tokens, h]``.
    """
    if len(x) != len(top_k_index) or top_k_index.shape != top_k_weights.shape:
        raise ValueError(
            f"tokens {tuple(x.shape)}, experts {tuple(top_k_index.shape)} and weights {tuple(top_k_weights.shape)} do "
            "not fit: give [tokens, h], [tokens, k] and [tokens, k]"
        )
    group = ranks_of(group)
    top_k, sent = top_k_index.shape[1], dtype or x.dtype
    terms = functools.partial(_terms, how, local, top_k)
    check_consistent_once(group, "pipe_experts", (how, local, top_k), terms, remedy=_SAME_LAYERS)
    how = possible(how, group, x.device)
    plans = plans_of(how, maker, group, local, x, top_k, sent)
    back = how.way_back(group)
    out, parts = computed(x, top_k_index, top_k_weights, maker, plans, group, back, sent, meanwhile)
    COUNTERS.calls += 1
    COUNTERS.parts += parts
    COUNTERS.stacked_calls += isinstance(maker, Stacked)
    return out


def _terms(how: MoEConfig, local: int, top_k: int) -> dict[str, Any]:
    version = importlib.metadata.version("ovpatch")
    return {"version of ovpatch": version, "experts of a rank": local, "experts of a token": top_k, **asdict(how)}
