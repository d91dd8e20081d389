"""A ready expert-parallel feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from ovpatch_plugins.pipe_experts.config import MoEConfig
from ovpatch_plugins.pipe_experts.experts import ACTIVATIONS
from ovpatch_plugins.pipe_experts.layer import expert_parallel_ffn, resolve_group
from ovpatch_plugins.pipe_experts.routing import compute_capacity, drop_over_capacity


class ExpertParallelFFN(nn.Module):
    """Feed-forward experts, spread over the ranks of a group.

    Rank ``r`` of the group has experts ``r * e`` to ``r * e + e - 1``, in this order, however the layer is computed.

    Args:
        hidden: Features of a token, h.
        ffn: Features between an expert's products.
        experts: Number of experts on all ranks.
        group: The ranks; None for the default group.
        activation: ``swiglu``, with a gate, or ``gelu``, ``relu`` or ``silu``, plain.
        capacity_factor: An expert takes this many times its even share of one rank's tokens, and drops the others. None
            to drop nothing.
        shared: Computed on all tokens, while the first rows are in flight, and added.
        config: How to compute.
        device: Device of the weights.
        dtype: Dtype of the weights.

    Raises:
        ValueError: Experts that do not divide by the number of ranks, an unknown activation, a group without this rank.
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
            raise ValueError(f"{experts} experts cannot be shared evenly by {ep_size} ranks: choose a multiple")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        self.experts, self.activation, self.capacity_factor = experts, activation, capacity_factor
        self.shared, self.config = shared, config or MoEConfig()
        self.group_name = group.group_name  # a group cannot be copied or pickled with the module
        local, wide = experts // ep_size, 2 * ffn if activation == "swiglu" else ffn
        # ``[e, n, h]``; n is ``ffn``, or twice that with a gate: gate first.
        self.up = nn.Parameter(torch.empty(local, wide, hidden, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(local, hidden, ffn, device=device, dtype=dtype))  # ``[e, h, ffn]``
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as ``nn.Linear`` does; each rank from its own generator."""
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
        tokens, index = x.reshape(-1, x.shape[-1]), top_k_index.reshape(-1, top_k_index.shape[-1])
        if self.capacity_factor is not None:
            capacity = compute_capacity(len(tokens), index.shape[1], self.experts, self.capacity_factor)
            index = drop_over_capacity(index, self.experts, capacity)
        weights = top_k_weights.reshape(index.shape)
        shared = self.shared
        shared_experts: Callable[[], Tensor] | None = None if shared is None else lambda: shared(tokens)
        activation, group = ACTIVATIONS[self.activation], self._find_group()
        out = expert_parallel_ffn(
            tokens, index, weights, (self.up, self.down), activation, group, self.config, shared_experts
        )
        return out.view(*x.shape[:-1], out.shape[-1])

    def _find_group(self) -> dist.ProcessGroup:
        try:
            return distributed_c10d._resolve_process_group(self.group_name)
        except RuntimeError as error:
            raise RuntimeError(
                f"the process group '{self.group_name}', over which this layer's experts are shared, does not exist "
                "here: make it before the layer is copied or loaded, or make a new layer"
            ) from error

    def extra_repr(self) -> str:
        """Describe the layer."""
        local, _, hidden = self.up.shape
        return f"{hidden}, {self.down.shape[2]}, experts={self.experts}, local={local}, activation={self.activation!r}"
