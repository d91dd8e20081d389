"""One-sided reads of gradient shards from peers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.hosts import ShardHolders
from ovpatch.overlap.comm.lifetimes import weak_method
from ovpatch.overlap.peer_rpc.retention import FinalReads
from ovpatch.overlap.peer_rpc.rpc import PeerRpc
from ovpatch.overlap.peer_rpc.sequence_lock import SequenceLock, copy_to_host
from ovpatch.overlap.tensors.shard import Shard
from ovpatch_plugins.dist_optimizer.sharded_bucket import shard_norms

# The time in which this rank must reach the version that a faster peer reads. The peer's own
# timeout is shorter, so it expires first.
_VERSION_TIMEOUT_S: Final = 600.0


class ShardReader:
    """The server of this rank's gradient shards, and the reader of those on peers.

    [Note: one-sided] The RPC threads of the peers reply. A read is no collective, so one rank may
    read alone, at any time until the next backward is reduced. No peer can finish that backward
    without this rank, so the shards stay valid until then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        versions: SequenceLock,
        shards: Mapping[int, Tensor],
        local_ranges: Sequence[Shard],
        holders: ShardHolders,
    ) -> None:
        """Prepare reads; peers cannot call before :meth:`start_serving`.

        Args:
            group: The process group.
            versions: The versions of the shards.
            shards: This rank's shards by index of the parameter, padded to the same size on all
                ranks. The caller updates this mapping.
            local_ranges: The range of each parameter's elements that this rank owns.
            holders: The ranks that have the other shards.
        """
        self._group = group
        self._versions = versions
        self._shards = shards
        self._local_ranges = local_ranges
        self._holders = holders
        # Keeps the shards until peers have read them for the last time.
        self._final_reads = FinalReads(group, holders.peers)
        # The topic of the calls, or "" until this rank serves them.
        self._topic = ""

    @property
    def is_serving(self) -> bool:
        """True if peers may call."""
        return bool(self._topic)

    def start_serving(self, identity: str, examples: Sequence[Tensor]) -> None:
        """Start to reply to calls.

        Args:
            identity: The name of the model. It is the same on all ranks and unique in the group.
            examples: One tensor for each dtype and device of the shards.
        """
        for tensor in examples:
            if tensor.is_cuda:
                # CUDA loads a kernel at its first launch. If a collective runs at that time, the
                # load may have to wait for its end, so the kernels of norms are loaded here.
                for order in (2.0, math.inf):
                    zero = torch.zeros(1, dtype=tensor.dtype, device=tensor.device)
                    shard_norms([zero], order).tolist()
        self._topic = f"gradients of {identity}"
        peers = PeerRpc.for_group(self._group)
        # The server holds the handler weakly, and forgets the topic with this object.
        weakref.finalize(self, peers.register(self._topic, weak_method(self._reply)))

    def pull_shards(self, indices: Sequence[int]) -> dict[int, list[Tensor]]:
        """Return the padded shards of some gradients from all peers, on the CPU, by shard."""
        call = self._final_reads.mark_final(
            {"version": self._versions.version, "indices": list(indices)}
        )
        replies = PeerRpc.for_group(self._group).call(self._topic, call, self._holders.peers)
        return self._holders.by_place({rank: tensors for rank, (_, tensors) in replies.items()})

    def pull_norms(self, indices: Sequence[int], order: float) -> dict[int, list[float]]:
        """Return the norms of the shards of some gradients from all peers, by shard."""
        call = {"version": self._versions.version, "indices": list(indices), "norm": order}
        replies = PeerRpc.for_group(self._group).call(self._topic, call, self._holders.peers)
        return self._holders.by_place(
            {rank: header["norms"] for rank, (header, _) in replies.items()}
        )

    def start_final_calls(self) -> bool:
        """Mark the next calls as final; return whether there are still peers to call."""
        has_peers = self.is_serving and not PeerRpc.is_destroyed(self._group)
        if has_peers:
            self._final_reads.start_final_calls(self)
        return has_peers

    def _reply(self, call: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        def copy_shards() -> list[Tensor]:
            return [copy_to_host(self._shards[index]) for index in call["indices"]]

        def compute_norms() -> list[float]:
            shards = [self._view_unpadded(index) for index in call["indices"]]
            norms: list[float] = shard_norms(shards, call["norm"]).tolist()
            return norms

        # This rank may be slower in its backward than the caller, so it waits for the version.
        version = call["version"]
        if "norm" in call:
            norms = self._versions.read_version(version, compute_norms, _VERSION_TIMEOUT_S)
            return {"norms": norms}, []
        shards = self._versions.read_version(version, copy_shards, _VERSION_TIMEOUT_S)
        self._final_reads.record_call(call)
        return {}, shards

    def _view_unpadded(self, index: int) -> Tensor:
        return self._shards[index][: self._local_ranges[index].numel]
