"""Collectives as features issue them: asynchronous, in place, without the checks of the convenience functions.

``torch.distributed.all_reduce`` costs about 10 µs of Python per call; a backward with many buckets on a fast device
notices. Stock DDP, too, calls the process group itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the sum of ``tensor`` over the ranks of ``group``, in place.

    Args:
        tensor: Contiguous, the same shape and dtype on all ranks. Complex numbers are summed as pairs of reals.
        group: The process group.

    Returns:
        The work; ``wait()`` makes the current stream (the host, without streams) wait for the result.
    """
    options = dist.AllreduceOptions()  # sums, unless told otherwise
    options.asyncOp = True
    return group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)
