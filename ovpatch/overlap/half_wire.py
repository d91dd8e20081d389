"""Whether gradients of half precision travel as they are, where they are averaged in fp32.

[Note: cast where they are added] Backends add in the dtype that they are given, so a gradient that is to be averaged in
fp32 has to be cast first: a pass over memory, and twice the bytes to send. Copies between ranks leave adding to a
kernel of ours, which casts what it reads. The bits are the same, since a gradient of half precision is exact in fp32.

[Note: all alike] One rank's fp32 sum of several microbatches cannot be sent in half precision, and then no rank may:
slots hold one dtype. Whether there will be such a sum can be told when a backward begins: any gradient is there
already, also one of zeros, or the graph is static and reaches a parameter twice. Ranks tell each other where their
hosts meet. Where a graph that is not static reaches a parameter twice, behind the first collective (with reentrant
checkpoints), its sum is sent as its rounding. Gradients that hooks of the script might change are copied before ranks
meet, and cast then.

[Note: taken] Parameters of fp32 that are kept in half precision (:mod:`ovpatch.overlap.mixed`) get gradients that the
backward of a cast has made, each of one in half precision. That one is taken instead (:mod:`.unwidened`), and sent if
on all ranks each of those parameters is reached by one cast in this backward and by nothing else, and no hook waits for
its gradient. A sum of several would be none of half precision, and here nothing is ever rounded: where a gradient is
none after ranks have agreed, that is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap import main_grads, placeholders, unwidened
from ovpatch.overlap.copies.registry import scattering
from ovpatch.overlap.grad_shards import GradShards, nobody
from ovpatch.overlap.halves import HALVES
from ovpatch.overlap.lanes import Producers
from ovpatch.overlap.memory import outside_inference
from ovpatch.overlap.metadata import grad_of
from ovpatch.overlap.mixed import find

_CHANGED: Final = (
    "ovpatch: ranks have agreed to send the gradient of parameter '{}' in half precision, as it comes, for when "
    "backward began there was one addend and no hook; but it has been changed, and would have to be rounded. Register "
    "hooks that write gradients before backward, let no loss reach back behind an optimizer step, or set "
    "OVPATCH_DIST_OPTIMIZER_PARAM_DTYPE to nothing."
)


class HalfWire:
    """How the cut gradients of one model travel.

    Args:
        params: The parameters.
        shards: Where their parts go.
        in_fp32: Whether gradients of half precision are averaged in fp32.
        sums: Whether they are added up in fp32 over several microbatches.

    Attributes:
        group: The process group that reduces; None until there is one.
        now: Whether this backward sends gradients of half precision as they are; not known before ranks have met.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        shards: GradShards,
        *,
        in_fp32: bool,
        sums: bool,
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        self.now = False
        self._params, self._shards, self._sums = params, shards, sums
        self._halves = {i: param for i, param in enumerate(params) if in_fp32 and param.dtype in HALVES}
        self._wide = False
        self._lowered = frozenset[int]()  # in this backward
        self._producers = Producers()  # unwidened.py, [Note: its stream]
        self._task = -1  # the graph task whose gradients are taken

    def begin(self, *, copied: bool, counts: Sequence[int] | None) -> None:
        """Note that a backward begins, to which nothing has been added yet, or one gradient.

        Args:
            copied: Whether each gradient is copied when it is complete.
            counts: How often a static graph adds to each parameter; None if that is not known.
        """
        self.now = False
        self._wide = copied or self._any_sum(lambda i, grad: grad is not None or (counts is not None and counts[i] > 1))
        self._producers.clear()
        self._lowered = self._shards.chosen.intersection(self._shards.lowered)
        takes = bool(self._lowered) and not (copied or torch.is_grad_enabled()) and self._able()
        takes = takes and all((counts is None or counts[i] == 1) and self._is_reached_once(i) for i in self._lowered)
        self._task = torch._C._current_graph_task_id() if takes else -1
        self._shards.taker = weakref.ref(self) if takes else nobody  # it is held by what this object holds

    def meet(self) -> None:
        """Have the host wait for the others, and agree with them. Called before a backward's first collective."""
        able = self._able()
        takes = not self._lowered or torch._C._current_graph_task_id() == self._task != -1
        wide = self._wide or self._any_sum(lambda _, grad: main_grads.has(grad)) or not takes
        self.now = not self._shards.meet(wide if able else None) and able

    def take(self, param: torch.nn.Parameter, index: int, half: Tensor) -> bool:
        """Put a gradient in ``p.grad``, unless it is better cast; see [Note: taken]."""
        now = index in self._lowered and torch._C._current_graph_task_id() == self._task
        if not now or type(half) is not Tensor:
            return False
        with outside_inference(), torch._C.DisableTorchFunctionSubclass():  # which the parameter is
            if param.grad is not None or param._backward_hooks:
                return False
            param.grad = unwidened.make(param, half.contiguous())
        if half.is_cuda:
            self._producers.note(half.device.index)
        return True

    def adds(self, index: int) -> None:
        """Note that autograd is about to add to a gradient."""
        if index in self._lowered:
            self._wide = True

    def dtype(self, index: int) -> torch.dtype | None:
        """Return in which half precision a cut gradient travels in this backward; None if in the sum's dtype."""
        if not self.now:
            return None
        return self._params[index].dtype if index in self._halves else self._shards.lowered.get(index)

    def release(self, index: int) -> Tensor | None:
        """Return a gradient that is to be sent in half precision, if it was taken, or have it cast.

        Raises:
            RuntimeError: Ranks have agreed to send it, and it has become another one, which would be rounded.
        """
        if index not in self._lowered:
            return None
        grad = grad_of(self._params[index])
        half = unwidened.half_of(grad)
        if not self.now:
            if half is not None:
                placeholders.settle([grad])
            return None
        if half is None and grad is not None:  # somebody has read it, or changed it
            half = grad.to(self._shards.lowered[index], memory_format=torch.contiguous_format)
            if not torch.allclose(half.to(grad.dtype), grad, rtol=0.0, atol=0.0, equal_nan=True):
                raise RuntimeError(_CHANGED.format(self._shards.names[index]))
        if half is not None:
            self._producers.join(half.device, [half])
        return half

    def _able(self) -> bool:
        chosen = [*(i for i, _ in self._chosen()), *self._lowered]
        return (
            bool(chosen)
            and self.group is not None
            and scattering(self.group, self._params[chosen[0]].device) is not None
        )

    def _is_reached_once(self, index: int) -> bool:
        """Tell whether all that the running backward adds to a parameter is the gradient of one cast."""
        param = self._params[index]
        mixed = find(param)
        return mixed is not None and mixed.is_reached_once() and grad_of(param) is None

    def _any_sum(self, of: Callable[[int, Tensor | None], bool]) -> bool:
        return self._sums and any(of(i, param.grad) for i, param in self._chosen())

    def _chosen(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        return ((i, param) for i, param in self._halves.items() if i in self._shards.chosen)


class Sent:
    """How many gradients this process has sent in half precision to be averaged in fp32."""

    total: int = 0


sent = Sent()
