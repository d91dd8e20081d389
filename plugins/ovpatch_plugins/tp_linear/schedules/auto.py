"""Schedule ``auto``: for each operator, shape, dtype and direction one of the others, by measurement.

[Note: forward chooses for backward] A backward cannot measure, since not all ranks need be there; an operator's forward
needs them all. So it chooses for both directions, whatever its gradient mode, which a checkpoint may change later. An
operator whose forward sends nothing cannot choose at all: what all ranks have takes the default schedule.

[Note: readers of a shared gather] Which products are computed with a shared gather may differ between ranks, see [Note:
same collectives on all ranks]. What is chosen by is the same on all: the linears that read what is gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ovpatch.hookspecs import cache_dir
from ovpatch.overlap.autotune import autotuner_for
from ovpatch_plugins.tp_linear.schedules.bulk import Bulk
from ovpatch_plugins.tp_linear.schedules.racing import Shape, rounded, tuning_for
from ovpatch_plugins.tp_linear.schedules.stock import ColumnGrads, Schedule, WeightGrads
from ovpatch_plugins.tp_linear.wires import Wires

_Known = dict[tuple[bool, Shape], "Pair"]


class Pair(Schedule):
    """One schedule for forward, another one for backward.

    Args:
        forward: The one.
        backward: The other.
    """

    def __init__(self, forward: Schedule, backward: Schedule) -> None:
        self.forward, self.backward, self.ahead = forward, backward, forward.ahead
        self.name = f"{forward.name}, {backward.name}"

    def gather_linear(
        self, wires: Wires, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], needs_whole: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """See :meth:`Schedule.gather_linear`."""
        return self.forward.gather_linear(wires, x, weights, biases, needs_whole)

    def gather_linear_backward(self, wires: Wires, asked: ColumnGrads) -> Tensor | None:
        """See :meth:`Schedule.gather_linear_backward`."""
        return self.backward.gather_linear_backward(wires, asked)


class Auto(Bulk):
    """Asks the group's choices which schedule computes a call.

    Args:
        name: What it is called.
        candidates: The other schedules, by name, stock first.
        default: Which of them is taken where nothing is measured.
        anew: Whether inputs are gathered anew for the weights' gradients.
    """

    chooses = True

    def __init__(self, name: str, candidates: Mapping[str, Schedule], default: str, *, anew: bool) -> None:
        self.name, self._candidates, self._default, self._anew = name, dict(candidates), default, anew
        self._known: weakref.WeakKeyDictionary[Wires, _Known] = weakref.WeakKeyDictionary()

    def together(
        self, wires: Wires, device: torch.device, rows: int, k: int, features: Sequence[int], dtype: torch.dtype
    ) -> Schedule:
        """See :meth:`Schedule.together`."""
        return self._chosen(wires, device, Shape("gather_linear", rounded(rows), k, tuple(features), dtype))

    def gather_linear(
        self, wires: Wires, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], needs_whole: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """See :meth:`Schedule.gather_linear`."""
        shape = Shape("gather_linear", rounded(len(x)), x.shape[1], tuple(map(len, weights)), x.dtype)
        forward = self._chosen(wires, x.device, shape).forward
        return forward.gather_linear(wires, x, weights, biases, needs_whole)

    def gather_linear_backward(self, wires: Wires, asked: ColumnGrads) -> Tensor | None:
        """See :meth:`Schedule.gather_linear_backward`."""
        grad = next(grad for grad in asked.grads if grad is not None)
        rows, weight = len(grad) // wires.world, asked.weights[0]
        shape = Shape("gather_linear", rounded(rows), weight.shape[1], tuple(map(len, asked.weights)), weight.dtype)
        return self._chosen(wires, grad.device, shape).backward.gather_linear_backward(wires, asked)

    def linear_scatter(self, wires: Wires, x: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Schedule.linear_scatter`."""
        shape = Shape("linear_scatter", rounded(len(x) // wires.world), x.shape[1], (len(weight),), x.dtype)
        return self._chosen(wires, x.device, shape).forward.linear_scatter(wires, x, weight)

    def linear_scatter_backward(
        self, wires: Wires, grad: Tensor, weight: Tensor, weight_grads: WeightGrads | None, needs_input: bool
    ) -> Tensor | None:
        """See :meth:`Schedule.linear_scatter_backward`."""
        shape = Shape("linear_scatter", rounded(len(grad)), weight.shape[1], (len(weight),), weight.dtype)
        backward = self._chosen(wires, grad.device, shape).backward
        return backward.linear_scatter_backward(wires, grad, weight, weight_grads, needs_input)

    def linear_reduce(self, wires: Wires, x: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Schedule.linear_reduce`."""
        shape = Shape("linear_reduce", rounded(len(x)), x.shape[1], (len(weight),), x.dtype)
        return self._chosen(wires, x.device, shape).forward.linear_reduce(wires, x, weight)

    def _chosen(self, wires: Wires, device: torch.device, shape: Shape) -> Pair:
        """Return the schedules of a shape; see [Note: forward chooses for backward]."""
        known = self._known.get(wires)
        if known is None:
            known = self._known[wires] = {}
        key = (torch.are_deterministic_algorithms_enabled(), shape)
        found = known.get(key)
        if found is None:
            found, final = self._asked(wires, device, shape)
            if final:
                known[key] = found
        return found

    def _asked(self, wires: Wires, device: torch.device, shape: Shape) -> tuple[Pair, bool]:
        autotuner = autotuner_for(wires.group, device, "tp_linear", cache_dir())
        forward, backward = (
            autotuner.tune(
                wires.group,
                tuning_for(wires, device, shape, direction, self._candidates, self._default, anew=self._anew),
            )
            for direction in ("forward", "backward")
        )
        return Pair(
            self._candidates[forward.candidate], self._candidates[backward.candidate]
        ), forward.final and backward.final
