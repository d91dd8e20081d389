"""Exchanging parts of gradients with the other ranks.

[Note: one-sided] Whoever asks gets the parts from the peers' threads. It takes no collective, so one rank may ask
alone, at any time until the next backward is reduced. No peer can get so far without this rank.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.peer_rpc.shutdown import KeepAlive
from ovpatch.overlap.peer_rpc.versioned import VersionedTensors, copy_to_host
from ovpatch.overlap.tensors.param_state import weak_method
from ovpatch.overlap.tensors.shard import shard_range

_PATIENCE_S = 600.0  # for a peer that is slower in its backward; the asker's own time-out comes first


class ShardPeers:
    """Hands out this rank's parts and asks for those of the others.

    Args:
        group: The process group.
        editions: The editions of the parts.
        parts: This rank's parts, padded to the same size on all ranks, by index of the parameter.
        numels: Number of elements of each parameter.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        editions: VersionedTensors,
        parts: Mapping[int, Tensor],
        numels: Sequence[int],
    ) -> None:
        self._group, self._editions, self._parts, self._numels = group, editions, parts, numels
        self._farewell = KeepAlive(group)
        self._topic = ""

    @property
    def serving(self) -> bool:
        """Whether peers may ask."""
        return bool(self._topic)

    def serve(self, identity: str, like: Sequence[Tensor]) -> None:
        """Answer from now on.

        Args:
            identity: Name of the model, the same on all ranks and no other's in the process group.
            like: One tensor for each dtype and device that parts may have.
        """
        for tensor in like:
            if tensor.is_cuda:  # a kernel that is loaded while a collective runs may have to wait for its end
                for order in (2.0, math.inf):
                    part_norms([torch.zeros(1, dtype=tensor.dtype, device=tensor.device)], order).tolist()
        self._topic = f"gradients of {identity}"
        weakref.finalize(self, PeerRpc.for_group(self._group).register(self._topic, weak_method(self._answer)))

    def pull(self, indices: Sequence[int]) -> dict[int, list[Tensor]]:
        """Return the other ranks' parts of some gradients, padded, on the CPU, by rank."""
        question = self._farewell.mark_final({"edition": self._editions.version, "indices": list(indices)})
        answers = PeerRpc.for_group(self._group).call(self._topic, question)
        return {rank: tensors for rank, (_, tensors) in answers.items()}

    def norms(self, indices: Sequence[int], order: float) -> dict[int, list[float]]:
        """Return the norm of each of the other ranks' parts, by rank."""
        question = {"edition": self._editions.version, "indices": list(indices), "norm": order}
        answers = PeerRpc.for_group(self._group).call(self._topic, question)
        return {rank: header["norms"] for rank, (header, _) in answers.items()}

    def leave(self) -> bool:
        """Tell whether there are still peers to ask; this is the last time."""
        there = self.serving and not PeerRpc.is_destroyed(self._group)
        if there:
            self._farewell.start_final_calls(self)
        return there

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        def copy() -> list[Tensor]:
            return [copy_to_host(self._parts[index]) for index in question["indices"]]

        def norm() -> list[float]:
            parts = [self._without_padding(index) for index in question["indices"]]
            found: list[float] = part_norms(parts, question["norm"]).tolist()
            return found

        if "norm" in question:
            return {"norms": self._editions.read_version(question["edition"], norm, _PATIENCE_S)}, []
        parts = self._editions.read_version(question["edition"], copy, _PATIENCE_S)
        self._farewell.record_call(question)
        return {}, parts

    def _without_padding(self, index: int) -> Tensor:
        own = shard_range(self._numels[index], self._group.size(), self._group.rank())
        return self._parts[index][: own.numel]


def part_norms(parts: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each part, ``[parts]``, in float32 at least: a power of half precision overflows.

    Args:
        parts: This rank's parts of gradients, on one device.
        order: Of the norm.
    """
    wide = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    return torch.stack(torch._foreach_norm([part.to(wide) for part in parts], order))
