"""Schedule ``auto``: measures the other schedules on random rows and weights, and takes the fastest."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ovpatch.overlap.kernels.autotuner import Candidates, Tuning, get_autotuner
from ovpatch.overlap.tensor_parallel.schedules.overlapped import Bulk
from ovpatch.overlap.tensor_parallel.schedules.stock import (
    ColumnGrads,
    Schedule,
    WeightGrads,
    compute_weight_grad,
)
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup
from ovpatch.settings.settings import cache_dir

Call = Callable[[Schedule], object]


class Shape(NamedTuple):
    """The key of a choice, the same on all ranks."""

    operator: str  # ``gather_linear``, ``linear_scatter`` or ``linear_reduce``
    rows: int  # a rank's number of rows, for ``linear_reduce`` all of them; see round_rows()
    k: int  # the number of input features on this rank
    features: tuple[int, ...]  # the number of output features on this rank, of each weight
    dtype: torch.dtype  # the dtype of the products

    def text(self) -> str:
        """Return the shape in words."""
        outputs = " + ".join(map(str, self.features))
        return f"{self.rows} x {self.k} -> {outputs}, {str(self.dtype).removeprefix('torch.')}"


def round_rows(rows: int) -> int:
    """Return a number of rows to three significant bits, four numbers between a power of two and the next.

    Where sequences differ from step to step, schedules are measured for some lengths, which stand for those near them.
    """
    step = 1 << max(rows.bit_length() - 3, 0)
    return max((rows + step // 2) // step * step, 1)


def _distinct(schedules: Mapping[str, Schedule], method: str) -> tuple[str, ...]:
    """Return the schedules without those that compute a method just as an earlier one."""
    found: dict[Any, str] = {}
    for name, schedule in schedules.items():
        functions = _functions(type(schedule), method)
        plain = functions in (_functions(Schedule, method), _functions(Bulk, method))
        found.setdefault(functions if plain else name, name)
    return tuple(found.values())


def _functions(cls: type[Schedule], method: str) -> tuple[Any, ...]:
    """Return the functions by which a class computes a method, its steps included."""
    return tuple(getattr(cls, name, None) for name in (method, *_STEPS.get(method, ())))


_STEPS: Final = {"gather_linear_backward": ("scattered",)}


def _make_call(
    method: str, ranks: TPGroup, shape: Shape, generator: torch.Generator, anew: bool
) -> Call:
    """Return what calls a method of a schedule on random rows and weights."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=shape.dtype, device=generator.device)

    weights = [draw(n, shape.k) * shape.k**-0.5 for n in shape.features]
    every, weight = ranks.world * shape.rows, weights[0]
    if method == "gather_linear":
        x = draw(shape.rows, shape.k)
        return lambda schedule: schedule.gather_linear(
            ranks, x, weights, [None] * len(weights), True
        )
    if method == "gather_linear_backward":
        grads, kept = (
            [draw(every, n) for n in shape.features],
            draw(shape.rows if anew else every, shape.k),
        )

        def take(whole: Tensor, of_outputs: Sequence[Tensor | None]) -> object:
            return [compute_weight_grad(grad, whole) for grad in of_outputs if grad is not None]

        asked = ColumnGrads(grads, kept, weights, take, shape.dtype, anew=anew)
        return lambda schedule: schedule.gather_linear_backward(ranks, asked)
    if method == "linear_scatter":
        x = draw(every, shape.k)
        return lambda schedule: schedule.linear_scatter(ranks, x, weight)
    if method == "linear_scatter_backward":
        x, grad = draw(every, shape.k), draw(shape.rows, shape.features[0])
        return lambda schedule: schedule.linear_scatter_backward(
            ranks, grad, weight, lambda whole, _: compute_weight_grad(whole, x), True
        )
    x = draw(shape.rows, shape.k)
    return lambda schedule: schedule.linear_reduce(ranks, x, weight)


# Schedule ``auto``: for each operator, shape, dtype and direction one of the others, by measurement.
#
# Measuring needs all ranks, and a backward need not run on all of them. So an operator's forward chooses for both
# directions, in every grad mode, which a checkpoint may change later. An operator whose forward sends nothing cannot
# measure: a replicated linear takes the default schedule. A shared gather is chosen by all linears that read it, which
# are the same on all ranks; its products need not be.

_Known = dict[tuple[bool, Shape], "Pair"]


class Pair(Schedule):
    """One schedule for forward, another one for backward."""

    def __init__(self, forward: Schedule, backward: Schedule) -> None:
        self.forward, self.backward, self.ahead = forward, backward, forward.ahead
        self.name = f"{forward.name}, {backward.name}"

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_whole: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        return self.forward.gather_linear(ranks, x, weights, biases, needs_whole)

    def gather_linear_backward(self, ranks: TPGroup, asked: ColumnGrads) -> Tensor | None:
        return self.backward.gather_linear_backward(ranks, asked)


class Auto(Bulk):
    """Computes a call by the schedule that is measured to be the fastest for its shape.

    ``candidates`` are the other schedules by name, stock first; ``default`` is taken where nothing is measured. With
    ``anew`` inputs are gathered again for the weights' gradients.
    """

    def __init__(
        self, name: str, candidates: Mapping[str, Schedule], default: str, *, anew: bool
    ) -> None:
        self.name, self._candidates, self._default, self._anew = (
            name,
            dict(candidates),
            default,
            anew,
        )
        self._known: weakref.WeakKeyDictionary[TPGroup, _Known] = weakref.WeakKeyDictionary()

    def choose_for_gather(
        self,
        ranks: TPGroup,
        device: torch.device,
        rows: int,
        k: int,
        features: Sequence[int],
        dtype: torch.dtype,
    ) -> Schedule:
        """Return the schedule of a gather for several linears, by all of them; other arguments as of :class:`Shape`."""
        return self._chosen(
            ranks, device, Shape("gather_linear", round_rows(rows), k, tuple(features), dtype)
        )

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_whole: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        shape = Shape(
            "gather_linear", round_rows(len(x)), x.shape[1], tuple(map(len, weights)), x.dtype
        )
        forward = self._chosen(ranks, x.device, shape).forward
        return forward.gather_linear(ranks, x, weights, biases, needs_whole)

    def gather_linear_backward(self, ranks: TPGroup, asked: ColumnGrads) -> Tensor | None:
        grad = next(grad for grad in asked.grads if grad is not None)
        rows, weight = len(grad) // ranks.world, asked.weights[0]
        shape = Shape(
            "gather_linear",
            round_rows(rows),
            weight.shape[1],
            tuple(map(len, asked.weights)),
            weight.dtype,
        )
        return self._chosen(ranks, grad.device, shape).backward.gather_linear_backward(ranks, asked)

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        shape = Shape(
            "linear_scatter", round_rows(len(x) // ranks.world), x.shape[1], (len(weight),), x.dtype
        )
        return self._chosen(ranks, x.device, shape).forward.linear_scatter(ranks, x, weight, bias)

    def linear_scatter_backward(
        self,
        ranks: TPGroup,
        grad: Tensor,
        weight: Tensor,
        weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        shape = Shape(
            "linear_scatter", round_rows(len(grad)), weight.shape[1], (len(weight),), weight.dtype
        )
        backward = self._chosen(ranks, grad.device, shape).backward
        return backward.linear_scatter_backward(ranks, grad, weight, weight_grads, needs_input)

    def linear_reduce(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        shape = Shape("linear_reduce", round_rows(len(x)), x.shape[1], (len(weight),), x.dtype)
        return self._chosen(ranks, x.device, shape).forward.linear_reduce(ranks, x, weight, bias)

    def _chosen(self, ranks: TPGroup, device: torch.device, shape: Shape) -> Pair:
        """Return the schedules of a shape."""
        known = self._known.setdefault(ranks, {})
        key = (torch.are_deterministic_algorithms_enabled(), shape)
        found = known.get(key)
        if found is None:
            tune = get_autotuner(ranks.group, device, "tp_linear", cache_dir()).tune
            forward, backward = (
                tune(ranks.group, self.make_tuning(ranks, device, shape, way))
                for way in ("forward", "backward")
            )
            found = Pair(self._candidates[forward.candidate], self._candidates[backward.candidate])
            if forward.final and backward.final:
                known[key] = found
        return found

    def make_tuning(
        self, ranks: TPGroup, device: torch.device, shape: Shape, direction: str
    ) -> Tuning:
        """Return the measurement of the schedules that differ for an operator and a direction, forward or backward."""
        method = shape.operator if direction == "forward" else f"{shape.operator}_backward"
        gathers = self._anew and method == "gather_linear_backward"
        schedules = self._candidates

        def make(generator: torch.Generator) -> Candidates:
            call = _make_call(method, ranks, shape, generator, gathers)
            return {name: functools.partial(call, schedules[name]) for name in names}

        def usable(name: str) -> bool:
            return schedules[name].can_run(ranks, device, shape.dtype, (shape.k, *shape.features))

        names = _distinct(schedules, method)
        key = f"{shape.operator} {direction}, {shape.text()}{', gathered anew' if gathers else ''}, {ranks.world} ranks"
        taken = self._default if self._default in names else names[0]
        total = sum(shape.features)  # inputs, outputs and gradients, with copies, take at most:
        needs = (
            3
            * (ranks.world * shape.rows * (shape.k + total) + shape.k * total)
            * shape.dtype.itemsize
        )
        return Tuning(key, names, taken, make, needs, usable)
