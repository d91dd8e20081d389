"""Asynchronous all-reduce, all-gather, broadcast and reduce-scatter, as methods of the process group.

The checks of ``torch.distributed.all_reduce`` cost a backward with many buckets noticeable time. Stock DDP, too, calls
the process group itself.

Backends that cannot group launches get other collectives: :mod:`ovpatch.overlap.comm.gloo`. A transport, such as the
GPUs' copy engines, may carry a group's all-gathers and reduce-scatters instead of its backend: :func:`set_transports`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.gloo import GlooAllGather, GlooAllReduce, GlooReduceScatter
from ovpatch.overlap.comm.work import Work

# Backends that launch the collectives of several tensors as one.
_GROUPING = ("nccl",)


class Transport(Protocol):
    """Carries the all-gathers and reduce-scatters of one group on one device."""

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start all-gathers; as :meth:`AllGather.__call__`."""

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool) -> Sequence[Work]:
        """Start reduce-scatters, summed in fp32 at least; as :meth:`ReduceScatter.__call__`.

        The outputs' dtype may be wider than that of the inputs; the average divides by the number of ranks.
        """

    def adds(self, dtype: torch.dtype) -> bool:
        """Return whether it sums tensors of a dtype."""


Lookup = Callable[[dist.ProcessGroup, torch.device], "Transport | None"]


@dataclass(frozen=True)
class Transports:
    """Which transports have been chosen."""

    all_gather: Lookup  # returns what carries the all-gathers of a group on a device now; None for the group's backend
    reduce_scatter: Lookup  # the same of reduce-scatters
    # Issues a collective of the backend behind what a transport carries, so that the backend's watchdog names a rank
    # that is missing.
    add_watchdog_collective: Callable[[dist.ProcessGroup, torch.device], None]


_transports: Transports | None = None


def set_transports(transports: Transports | None) -> None:
    """Have collectives ask for transports from now on; with None, every group uses its backend."""
    global _transports
    _transports = transports


def reduce_scatter_transport(group: dist.ProcessGroup, device: torch.device) -> Transport | None:
    """Return what carries a group's reduce-scatters now; None for its backend."""
    return None if _transports is None else _transports.reduce_scatter(group, device)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that runs the group's collectives on ``device``."""
    return str(group._get_backend(device).name())


class AllReduce:
    """All-reduces tensors over the ranks of a group, in place, in as few launches as the backend allows.

    ``average`` divides by the number of ranks, for backends that can.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self._group = group
        operation = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        self._one, self._many = dist.AllreduceOptions(), dist.AllreduceCoalescedOptions()
        for options in (self._one, self._many):
            options.reduceOp, options.asyncOp = operation, True
        self._ungrouped = None if _groups(group, device) else GlooAllReduce(group, self._one)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums; ``wait()`` makes the current stream (the host, without streams) wait for the results.

        Tensors are contiguous, of one dtype, of the same sizes on all ranks. Complex numbers are summed as pairs of
        reals. One tensor alone may be sparse, if the backend sums sparse tensors.
        """
        given = _as_reals(tensors)
        if len(given) < 2:
            return [self._group.allreduce([tensor], self._one) for tensor in given]
        if self._ungrouped is not None:
            return self._ungrouped(given)
        return [self._group.allreduce_coalesced(given, self._many)]


class AllGather:
    """All-gathers every rank's parts, in as few launches as the backend allows.

    The backend gathers on a communicator over the same ranks; by default on the group itself.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, communicator: dist.ProcessGroup | None = None
    ) -> None:
        self._copied, self._device = group, device
        self._group = communicator or group
        self._options = dist.distributed_c10d.AllgatherOptions()
        self._options.asyncOp = True
        self._ungrouped = None if _groups(group, device) else GlooAllGather(self._group)

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start the gathering; ``wait()`` makes the current stream (the host, without streams) wait for the results.

        Outputs are contiguous, of one dtype, each ``world`` times as long as its input; complex numbers travel as pairs
        of reals. Inputs are this rank's parts, contiguous. A part may be the very place in its output where it will be:
        NCCL gathers in place then.
        """
        to, of = _as_reals(outputs), _as_reals(inputs)
        transport = None if _transports is None else _transports.all_gather(self._copied, self._device)
        if transport is not None:
            return transport.gather(to, of)
        if self._ungrouped is not None:
            return self._ungrouped(to, of)
        if len(to) < 2:
            return [self._group._allgather_base(*pair, self._options) for pair in zip(to, of, strict=True)]
        return [self._group.allgather_into_tensor_coalesced(to, of, self._options)]


class Broadcast:
    """Broadcasts the tensor of the rank ``root`` to all ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, root: int) -> None:
        self._group = group
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor, self._options.asyncOp = root, 0, True

    def __call__(self, tensor: Tensor) -> Work:
        """Start to copy a contiguous tensor of the same size on all ranks; on the others than ``root`` it is written.

        ``wait()`` makes the current stream (the host, without streams) wait for the result.
        """
        return self._group.broadcast([tensor], self._options)


class ReduceScatter:
    """Reduce-scatters tensors: sums over the ranks of a group, of which each rank gets its own part.

    ``average`` divides by the number of ranks, for backends that can.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self._group, self._device, self._average = group, device, average
        self._options = dist.ReduceScatterOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        self._options.asyncOp = True
        self._ungrouped = None if _groups(group, device) else GlooReduceScatter(group)

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums; ``wait()`` makes the current stream (the host, without streams) wait for the results.

        Outputs are this rank's parts, ``[size]`` each, contiguous. Inputs are contiguous, ``[world * size]`` each, of
        one dtype; their content is undefined afterwards.
        """
        to, of = _as_reals(outputs), _as_reals(inputs)
        transport = None if _transports is None else _transports.reduce_scatter(self._group, self._device)
        if transport is not None and transport.adds(of[0].dtype):
            return transport.scatter(to, of, average=self._average)
        if self._ungrouped is not None:
            return self._ungrouped(to, of)
        return [self._group.reduce_scatter_tensor_coalesced(to, of, self._options)]


class Collectives:
    """The collectives that reduce gradients on one device; ``average`` divides, for backends that can."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self._group, self._device = group, device
        self.all_reduce = AllReduce(group, device, average=average)
        self.reduce_scatter = ReduceScatter(group, device, average=average)

    def reduce_scatter_fp32(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Average tensors of half precision in fp32, as :meth:`ReduceScatter.__call__`; only a transport can.

        Raises:
            RuntimeError: The group's transport has been given up meanwhile.
        """
        transport = reduce_scatter_transport(self._group, self._device)
        if transport is None:
            raise RuntimeError(_GONE)
        return transport.scatter(outputs, inputs, average=True)

    def end_reduction(self) -> None:
        """Have the backend's watchdog see what a transport carries; all ranks call this behind the last reduction."""
        if _transports is not None:
            _transports.add_watchdog_collective(self._group, self._device)


_GONE = (
    "ovpatch: copies between ranks ended during a backward that others go on with. Restart all ranks; or set "
    "OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off, if it happens again."
)


def _groups(group: dist.ProcessGroup, device: torch.device) -> bool:
    return backend_name(group, device) in _GROUPING


def _as_reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        if tensor.is_complex():
            return [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    return list(tensors)
