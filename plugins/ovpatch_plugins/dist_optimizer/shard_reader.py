"""One-sided reads of gradient shards from peers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import weak_method
from ovpatch.overlap.peer_rpc.retention import FinalReads
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.peer_rpc.sequence_lock import SequenceLock, copy_to_host
from ovpatch.overlap.tensors.shard import shard_range
from ovpatch_plugins.dist_optimizer.sharded_bucket import shard_norms

# --- what ranks ask each other for ---


_PATIENCE_S = 600.0  # for a peer that is slower in its backward; the caller's own time-out comes first


class ShardReader:
    """Sends this rank's shards to the other ranks and pulls theirs.

    [Note: one-sided] The peers' RPC threads reply. It takes no collective, so one rank may pull alone, at any time
    until the next backward is reduced, which no peer can finish without this rank.

    Args:
        group: The process group.
        versions: The versions of the shards.
        shards: This rank's shards, padded to the same size on all ranks, by index of the parameter.
        numels: Number of elements of each parameter.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        versions: SequenceLock,
        shards: Mapping[int, Tensor],
        numels: Sequence[int],
    ) -> None:
        self._group, self._versions, self._shards, self._numels = group, versions, shards, numels
        self._keep_alive = FinalReads(group)
        self._topic = ""

    @property
    def is_serving(self) -> bool:
        """Whether peers may call."""
        return bool(self._topic)

    def start_serving(self, identity: str, examples: Sequence[Tensor]) -> None:
        """Reply to calls from now on.

        Args:
            identity: Name of the model, the same on all ranks and no other's in the process group.
            examples: One tensor for each dtype and device that shards may have.
        """
        for tensor in examples:
            if tensor.is_cuda:  # a kernel that is loaded while a collective runs may have to wait for its end
                for order in (2.0, math.inf):
                    shard_norms([torch.zeros(1, dtype=tensor.dtype, device=tensor.device)], order).tolist()
        self._topic = f"gradients of {identity}"
        peers = PeerRpc.for_group(self._group)
        weakref.finalize(self, peers.register(self._topic, weak_method(self._answer)))

    def pull_shards(self, indices: Sequence[int]) -> dict[int, list[Tensor]]:
        """Return the other ranks' shards of some gradients, padded, on the CPU, by rank."""
        call = self._keep_alive.mark_final({"version": self._versions.version, "indices": list(indices)})
        answers = PeerRpc.for_group(self._group).call(self._topic, call)
        return {rank: tensors for rank, (_, tensors) in answers.items()}

    def pull_norms(self, indices: Sequence[int], order: float) -> dict[int, list[float]]:
        """Return the norm of each of the other ranks' shards, by rank; no peer takes part."""
        call = {"version": self._versions.version, "indices": list(indices), "norm": order}
        answers = PeerRpc.for_group(self._group).call(self._topic, call)
        return {rank: header["norms"] for rank, (header, _) in answers.items()}

    def start_final_calls(self) -> bool:
        """Return whether there are still peers to call; this is the last time."""
        there = self.is_serving and not PeerRpc.is_destroyed(self._group)
        if there:
            self._keep_alive.start_final_calls(self)
        return there

    def _answer(self, call: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        def copy() -> list[Tensor]:
            return [copy_to_host(self._shards[index]) for index in call["indices"]]

        def norm() -> list[float]:
            shards = [self._without_padding(index) for index in call["indices"]]
            found: list[float] = shard_norms(shards, call["norm"]).tolist()
            return found

        if "norm" in call:
            return {"norms": self._versions.read_version(call["version"], norm, _PATIENCE_S)}, []
        shards = self._versions.read_version(call["version"], copy, _PATIENCE_S)
        self._keep_alive.record_call(call)
        return {}, shards

    def _without_padding(self, index: int) -> Tensor:
        own = shard_range(self._numels[index], self._group.size(), self._group.rank())
        return self._shards[index][: own.numel]
