"""Collectives as features issue them: asynchronous, in place, without the checks of the convenience functions.

``torch.distributed.all_reduce`` costs about 10 µs of Python per call; a backward with many buckets on a fast device
notices. Stock DDP, too, calls the process group itself.

[Note: one tensor on gloo] Where a backend cannot group launches, tensors travel through one flat copy, which gloo's
coalesced collectives would make as well. Those must not be used: gloo's two threads write the name of what they have
completed into one string without a lock, and names of more than 15 letters, as "ALLREDUCE_COALESCED" is one, live on
the heap. Sooner or later both free the same memory. (_ALLREDUCE_SPARSE is another one; there stock does the same.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Backends that launch the collectives of several tensors as one.
_GROUPING = ("nccl",)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Make the current stream (the host, without streams) wait for the result."""


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that runs the group's collectives on ``device``."""
    return str(group._get_backend(device).name())


class AllReduce:
    """Sums of tensors over the ranks of a group, in place, in as few launches as the backend allows.

    Args:
        group: The process group.
        device: Where the tensors are.
        average: Divide by the number of ranks, for backends that can.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self._group = group
        self._groups = backend_name(group, device) in _GROUPING
        operation = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        self._one, self._many = dist.AllreduceOptions(), dist.AllreduceCoalescedOptions()
        for options in (self._one, self._many):
            options.reduceOp, options.asyncOp = operation, True

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums.

        Args:
            tensors: Contiguous, of one dtype, of the same sizes on all ranks. Complex numbers are summed as pairs of
                reals. One tensor alone may be sparse, if the backend sums sparse tensors.

        Returns:
            The works; ``wait()`` makes the current stream (the host, without streams) wait for the results.
        """
        given = _as_reals(tensors)
        if len(given) < 2:
            return [self._group.allreduce([tensor], self._one) for tensor in given]
        if self._groups:
            return [self._group.allreduce_coalesced(given, self._many)]
        together = _flattened(given)
        return [CopyingOut(self._group.allreduce([together], self._one), given, _cut_up(together, given))]


class AllGather:
    """Concatenations of every rank's part, in as few launches as the backend allows.

    Args:
        group: The process group.
        device: Where the tensors are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._groups = backend_name(group, device) in _GROUPING
        self._options = dist.distributed_c10d.AllgatherOptions()
        self._options.asyncOp = True

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start the gathering.

        Args:
            outputs: Contiguous, of one dtype, each ``world`` times as long as its input. Complex numbers travel as
                pairs of reals.
            inputs: This rank's parts. A part may be the very place in its output where it will be: NCCL gathers in
                place then.

        Returns:
            The works; ``wait()`` makes the current stream (the host, without streams) wait for the results.
        """
        to, of = _as_reals(outputs), _as_reals(inputs)
        if len(to) < 2:
            return [self._group._allgather_base(*pair, self._options) for pair in zip(to, of, strict=True)]
        if self._groups:
            return [self._group.allgather_into_tensor_coalesced(to, of, self._options)]
        world, together = self._group.size(), _flattened(of)
        gathered = together.new_empty(world * together.numel())
        work = self._group._allgather_base(gathered, together, self._options)
        parts = gathered.view(world, -1).split([tensor.numel() for tensor in of], dim=1)
        return [CopyingOut(work, [tensor.view(world, -1) for tensor in to], parts)]


class Broadcast:
    """Copies of one rank's tensor to all ranks of a group.

    Args:
        group: The process group.
        root: The rank in it that has the tensor.
    """

    def __init__(self, group: dist.ProcessGroup, root: int) -> None:
        self._group = group
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor, self._options.asyncOp = root, 0, True

    def __call__(self, tensor: Tensor) -> Work:
        """Start the copy.

        Args:
            tensor: Contiguous, of the same size on all ranks; on the others than ``root`` it is written.

        Returns:
            The work; ``wait()`` makes the current stream (the host, without streams) wait for the result.
        """
        return self._group.broadcast([tensor], self._options)


class ReduceScatter:
    """Sums of tensors over the ranks of a group, of which each rank gets its own part.

    [Note: sums on gloo] gloo's own reduce-scatter all-reduces a copy of its input. Where it is that or another backend
    but NCCL, we do the same, once for all tensors, and take our parts of the sums.

    Args:
        group: The process group.
        device: Where the tensors are.
        average: Divide by the number of ranks, for backends that can.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self._group, self._rank = group, group.rank()
        self._options = dist.ReduceScatterOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        self._options.asyncOp = True
        groups = backend_name(group, device) in _GROUPING
        self._all_reduce = None if groups else AllReduce(group, device, average=average)

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start the sums.

        Args:
            outputs: This rank's parts, ``[size]`` each.
            inputs: Contiguous, ``[world * size]`` each, of one dtype; what is left in them is undefined.

        Returns:
            The works; ``wait()`` makes the current stream (the host, without streams) wait for the results.
        """
        if self._all_reduce is not None:
            together = _flattened(inputs) if len(inputs) > 1 else inputs[0]
            (work,) = self._all_reduce([together])
            wholes = zip(outputs, _cut_up(together, inputs), strict=True)
            return [CopyingOut(work, outputs, [whole[self._rank * len(part) :][: len(part)] for part, whole in wholes])]
        return [self._group.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), self._options)]


class CopyingOut:
    """A collective under way whose results will be copied to where they belong.

    Args:
        work: The collective.
        targets: Where to.
        results: What to copy, of the same shapes: views of what the collective writes.
    """

    def __init__(self, work: Work, targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self._work, self._targets, self._results = work, list(targets), list(results)

    def wait_for_results(self) -> None:
        """Wait for the collective; nothing has been copied yet."""
        self._work.wait()

    def wait(self) -> None:
        """Wait for the collective and copy its results, once: what is in the targets later is not ours."""
        self._work.wait()
        targets, results = self._targets, self._results  # a signal handler may come to wait here as well
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, results)
        self._targets, self._results = [], []


class Collectives:
    """What reduces gradients on one device.

    Args:
        group: The process group.
        device: Where the tensors are.
        average: Divide by the number of ranks, for backends that can.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, average: bool = False) -> None:
        self.all_reduce = AllReduce(group, device, average=average)
        self.reduce_scatter = ReduceScatter(group, device, average=average)


def _as_reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _cut_up(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = together.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
