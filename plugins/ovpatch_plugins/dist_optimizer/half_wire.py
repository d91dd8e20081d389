"""In which dtype the sharded gradients of one model are sent, where they are averaged in fp32.

[Note: cast where they are added] A backend adds in the dtype that it is given, so a gradient that is averaged in fp32
is cast first: a pass over memory, and twice the bytes to send. The copy engines' sums are a kernel of ours, which casts
what it reads. The bits are the same, since a gradient of half precision is exact in fp32.

[Note: all alike] All ranks send one dtype. Half precision is exact only for a single contribution. If any rank holds a
gradient already when backward begins, or its static graph reaches a parameter twice, or hooks of the script may change
gradients, all ranks send fp32. Ranks tell each other at the host barrier. Where a graph that is not static reaches a
parameter twice behind the first collective (reentrant checkpoints), its sum is sent rounded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import reduce_scatter_transport
from ovpatch.overlap.data_parallel import fp32_accumulation
from ovpatch.overlap.data_parallel.fp32_accumulation import HALVES

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.sharded_grads import ShardedGrads


class HalfWire:
    """The dtype of each sharded gradient in one backward.

    Args:
        shards: The model's shards; held weakly, as they hold this.
        in_fp32: Whether gradients of half precision are averaged in fp32.
        sums: Whether they are added up in fp32 over several microbatches.

    Attributes:
        group: The process group that reduces; None until there is one.
        now: Whether this backward sends gradients of half precision as they are; not known before ranks have met.
    """

    def __init__(
        self,
        shards: ShardedGrads,
        *,
        in_fp32: bool,
        sums: bool,
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        self.now = False
        self._shards, self._sums = weakref.proxy(shards), sums
        self._halves = {i: param.dtype for i, param in enumerate(shards.params) if in_fp32 and param.dtype in HALVES}
        self._wide = False

    def begin(self, *, copied: bool, counts: Sequence[int] | None) -> None:
        """Note that a backward begins, to which nothing has been added yet, or one gradient.

        Args:
            copied: Whether each gradient is copied when it is complete.
            counts: How often a static graph adds to each parameter; None if that is not known.
        """
        self.now = False
        self._wide = copied or self._any_sum(lambda i, grad: grad is not None or (counts is not None and counts[i] > 1))

    def meet(self) -> None:
        """Have the host wait for the others, and agree with them. Called before a backward's first collective."""
        able = self._able()
        wide = self._wide or self._any_sum(lambda _, grad: fp32_accumulation.has_sum(grad))
        self.now = not self._shards.meet(wide if able else None) and able

    def dtype(self, index: int) -> torch.dtype | None:
        """Return in which half precision a cut gradient travels in this backward; None if in the sum's dtype."""
        return self._halves.get(index) if self.now else None

    def _able(self) -> bool:
        param = next((param for _, param in self._chosen()), None)
        return (
            param is not None
            and self.group is not None
            and reduce_scatter_transport(self.group, param.device) is not None
        )

    def _any_sum(self, of: Callable[[int, Tensor | None], bool]) -> bool:
        return self._sums and any(of(i, param.grad) for i, param in self._chosen())

    def _chosen(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        return ((i, self._shards.params[i]) for i in self._halves if i in self._shards.sharded)
