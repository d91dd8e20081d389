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
from ovpatch_plugins.pipe_experts.layer import expert_parallel_ffn, ranks_of
from ovpatch_plugins.pipe_experts.routing import capacity_of, drop_surplus


class ExpertParallelFFN(nn.Module):
    """Feed-forward experts, of which each rank has some.

    Rank ``r`` of the group has experts ``r * e`` to ``r * e + e - 1``, in this order, however the layer is computed.

    Args:
        hidden: Features of a token, h.
        ffn: Features between an expert's products.
        experts: How many experts there are on all ranks.
        group: The ranks; the default group if it is None.
        activation: ``swiglu``, with a gate, or ``gelu``, ``relu`` or ``silu``, plain.
        capacity_factor: How many times its share of one rank's tokens an expert takes; what is more goes to none. None
            to drop nothing.
        shared: Computed on all tokens, while the first rows are on their way, and added.
        how: How to compute.
        device: Where.
        dtype: Of the weights.

    Attributes:
        up: ``[e, n, h]``, where n is ``ffn``, or twice that with a gate: gate first.
        down: ``[e, h, ffn]``.

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
        how: MoEConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        found = ranks_of(group)
        if experts % found.size():
            raise ValueError(f"{experts} experts cannot be shared evenly by {found.size()} ranks: choose a multiple")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        self.experts, self.activation, self.capacity_factor = experts, activation, capacity_factor
        self.shared, self.how = shared, how or MoEConfig()
        self.group_name = found.group_name  # and not the group: copies and pickles of modules are made
        local, wide = experts // found.size(), 2 * ffn if activation == "swiglu" else ffn
        self.up = nn.Parameter(torch.empty(local, wide, hidden, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(local, hidden, ffn, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, as ``nn.Linear`` does; each rank from its own generator."""
        for weight in (self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts return.

        Args:
            x: ``[..., h]``.
            top_k_index: Their experts, numbered over all ranks, ``[..., k]``; -1 for none.
            top_k_weights: ``[..., k]``.
        """
        tokens, index = x.reshape(-1, x.shape[-1]), top_k_index.reshape(-1, top_k_index.shape[-1])
        if self.capacity_factor is not None:
            capacity = capacity_of(len(tokens), index.shape[1], self.experts, self.capacity_factor)
            index = drop_surplus(index, self.experts, capacity)
        weights = top_k_weights.reshape(index.shape)
        shared = self.shared
        meanwhile: Callable[[], Tensor] | None = None if shared is None else lambda: shared(tokens)
        out = expert_parallel_ffn(
            tokens,
            index,
            weights,
            (self.up, self.down),
            ACTIVATIONS[self.activation],
            self._group(),
            self.how,
            meanwhile,
        )
        return out.view(*x.shape[:-1], out.shape[-1])

    def _group(self) -> dist.ProcessGroup:
        try:
            return distributed_c10d._resolve_process_group(self.group_name)
        except RuntimeError as error:
            raise RuntimeError(
                f"the process group '{self.group_name}', over which this layer's experts are shared, does not exist "
                "here: make it before the layer is copied or loaded, or make the layer anew"
            ) from error

    def extra_repr(self) -> str:
        """Describe the layer."""
        local, _, hidden = self.up.shape
        return f"{hidden}, {self.down.shape[2]}, experts={self.experts}, local={local}, activation={self.activation!r}"
