"""Schedule ``auto``, which measures the other schedules on random rows and weights, and uses the fastest one.

It chooses for each operator, shape, dtype and direction. Measuring needs all ranks, but a backward may run on only some
of them. So an operator's forward chooses for both directions. It does so in every grad mode, because a checkpoint may
turn gradients on later. An operator whose forward sends nothing cannot measure: a replicated linear uses the default
schedule. All linears that read a shared gather determine its schedule. These linears are the same on all ranks, but the
GEMMs that are computed with the gather may differ.
"""

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
    SentRows,
    WeightGrads,
    compute_weight_grad,
)
from ovpatch.overlap.tensor_parallel.tp_group import TPGroup
from ovpatch.settings.settings import cache_dir

ScheduleCall = Callable[[Schedule], object]


class Shape(NamedTuple):
    """The key of a choice, the same on all ranks.

    Attributes:
        operator: ``gather_linear``, ``linear_scatter`` or ``linear_reduce``.
        rows: A rank's number of rows, or the number of all rows for ``linear_reduce``. :func:`round_rows` rounds it.
        k: The number of input features on this rank.
        features: The number of output features on this rank, for each weight.
        dtype: The dtype of the GEMMs.
    """

    operator: str
    rows: int
    k: int
    features: tuple[int, ...]
    dtype: torch.dtype

    def text(self) -> str:
        """Return the shape as it is shown in the report."""
        outputs = " + ".join(map(str, self.features))
        return f"{self.rows} x {self.k} -> {outputs}, {str(self.dtype).removeprefix('torch.')}"


def round_rows(rows: int) -> int:
    """Round a number of rows to three significant bits, which are four numbers between two powers of two.

    If the lengths of sequences differ from step to step, only rounded lengths are measured.
    """
    step = _get_rounding_step(rows)
    return max((rows + step // 2) // step * step, 1)


def count_most_rows(rounded: int) -> int:
    """Return the largest number of rows that :func:`round_rows` rounds to a number."""
    return rounded + (_get_rounding_step(rounded) + 1) // 2 - 1


def _get_rounding_step(rows: int) -> int:
    return 1 << max(rows.bit_length() - 3, 0)


def _list_distinct(schedules: Mapping[str, Schedule], method: str) -> tuple[str, ...]:
    """Return the names of the schedules, except those that compute a method exactly as an earlier one."""
    name_by_functions: dict[Any, str] = {}
    for name, schedule in schedules.items():
        functions = _list_functions(type(schedule), method)
        # A schedule may inherit the method from a third class and override functions that are not listed here, so
        # only the functions of these two classes show that two schedules compute the same.
        is_shared = functions in (_list_functions(Schedule, method), _list_functions(Bulk, method))
        name_by_functions.setdefault(functions if is_shared else name, name)
    return tuple(name_by_functions.values())


def _list_functions(cls: type[Schedule], method: str) -> tuple[Any, ...]:
    """Return the functions by which a class computes a method, including the methods that it calls."""
    return tuple(getattr(cls, name, None) for name in (method, *_STEPS.get(method, ())))


def _find_sent_rows(method: str, shape: Shape) -> SentRows | None:
    """Return the most rows that a rank sends at a time in calls of a method that have a shape when rounded."""
    bytes_per_feature = count_most_rows(shape.rows) * shape.dtype.itemsize
    if method == "gather_linear":
        return SentRows(bytes_per_feature * shape.k, is_sum=False)
    if method == "linear_scatter":
        return SentRows(bytes_per_feature * shape.features[0], is_sum=True)
    if method == "linear_scatter_backward":
        return SentRows(bytes_per_feature * shape.features[0], is_sum=False)
    # Sums of gradients may take several rounds, and nothing else is sent.
    return None


# The methods that subclasses override as steps of another method.
_STEPS: Final = {"gather_linear_backward": ("start_input_grad_scatter",)}


def _make_call(
    method: str, ranks: TPGroup, shape: Shape, generator: torch.Generator, regathers: bool
) -> ScheduleCall:
    """Return a function that calls a method of a schedule with random rows and weights."""

    def draw_random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=shape.dtype, device=generator.device)

    # This scale makes outputs as large as inputs.
    weights = [draw_random(n, shape.k) * shape.k**-0.5 for n in shape.features]
    all_rows, weight = ranks.world * shape.rows, weights[0]
    if method == "gather_linear":
        x = draw_random(shape.rows, shape.k)
        return lambda schedule: schedule.gather_linear(
            ranks, x, weights, [None] * len(weights), True
        )
    if method == "gather_linear_backward":
        grads = [draw_random(all_rows, n) for n in shape.features]
        saved_input = draw_random(shape.rows if regathers else all_rows, shape.k)

        def compute_grads(gathered: Tensor, output_grads: Sequence[Tensor | None]) -> object:
            return [
                compute_weight_grad(grad, gathered) for grad in output_grads if grad is not None
            ]

        request = ColumnGrads(
            grads, saved_input, weights, compute_grads, shape.dtype, regathers=regathers
        )
        return lambda schedule: schedule.gather_linear_backward(ranks, request)
    if method == "linear_scatter":
        x = draw_random(all_rows, shape.k)
        return lambda schedule: schedule.linear_scatter(ranks, x, weight)
    if method == "linear_scatter_backward":
        x, grad = draw_random(all_rows, shape.k), draw_random(shape.rows, shape.features[0])
        return lambda schedule: schedule.linear_scatter_backward(
            ranks, grad, weight, lambda gathered, _: compute_weight_grad(gathered, x), True
        )
    x = draw_random(shape.rows, shape.k)
    return lambda schedule: schedule.linear_reduce(ranks, x, weight)


# The choices, by whether algorithms must be deterministic, whether forward has a choice, and the shape.
_PairByShape = dict[tuple[bool, bool, Shape], "Pair"]


class Pair(Schedule):
    """The schedules of forward and of backward, which may differ."""

    def __init__(self, forward: Schedule, backward: Schedule) -> None:
        self.forward = forward
        self.backward = backward
        self.computes_ahead = forward.computes_ahead
        self.name = f"{forward.name}, {backward.name}"

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        return self.forward.gather_linear(ranks, x, weights, biases, needs_gathered)

    def gather_linear_backward(self, ranks: TPGroup, request: ColumnGrads) -> Tensor | None:
        return self.backward.gather_linear_backward(ranks, request)


class Auto(Bulk):
    """The schedule that computes a call by the fastest schedule for its shape.

    Args:
        name: The name of this schedule, with the number of chunks.
        candidates: The other schedules by name, stock first.
        default: The name of the schedule to use if nothing is measured.
        regathers: Whether inputs are gathered again for the weights' gradients.
    """

    # A gather that starts early is finished without the schedule that was chosen for the backward.
    starts_grad_gather_early = False

    def __init__(
        self, name: str, candidates: Mapping[str, Schedule], default: str, *, regathers: bool
    ) -> None:
        self.name = name
        self._candidates = dict(candidates)
        self._default = default
        self._regathers = regathers
        self._pairs_by_group: weakref.WeakKeyDictionary[TPGroup, _PairByShape] = (
            weakref.WeakKeyDictionary()
        )

    def choose_for_gather(
        self,
        ranks: TPGroup,
        device: torch.device,
        rows: int,
        k: int,
        features: Sequence[int],
        dtype: torch.dtype,
        *,
        can_split: bool = True,
    ) -> Schedule:
        """Return the schedule of a gather for several linears.

        Args:
            ranks: The ranks.
            device: The device of the operands.
            rows: This rank's number of rows, not rounded.
            k: See :class:`Shape`.
            features: See :class:`Shape`; of all linears that read the gathered input.
            dtype: See :class:`Shape`.
            can_split: Whether GEMMs may begin before all rows are there. Otherwise only the backward has a choice.
                Default: True.
        """
        shape = Shape("gather_linear", round_rows(rows), k, tuple(features), dtype)
        return self._choose(ranks, device, shape, chooses_forward=can_split)

    def gather_linear(
        self,
        ranks: TPGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        needs_gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        shape = Shape(
            "gather_linear", round_rows(len(x)), x.shape[1], tuple(map(len, weights)), x.dtype
        )
        forward = self._choose(ranks, x.device, shape).forward
        return forward.gather_linear(ranks, x, weights, biases, needs_gathered)

    def gather_linear_backward(self, ranks: TPGroup, request: ColumnGrads) -> Tensor | None:
        # The key must be that of forward, although some outputs may have no gradient.
        grad = next(grad for grad in request.output_grads if grad is not None)
        rows, weight = len(grad) // ranks.world, request.weights[0]
        shape = Shape(
            "gather_linear",
            round_rows(rows),
            weight.shape[1],
            tuple(map(len, request.weights)),
            weight.dtype,
        )
        return self._choose(ranks, grad.device, shape).backward.gather_linear_backward(
            ranks, request
        )

    def linear_scatter(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        shape = Shape(
            "linear_scatter", round_rows(len(x) // ranks.world), x.shape[1], (len(weight),), x.dtype
        )
        return self._choose(ranks, x.device, shape).forward.linear_scatter(ranks, x, weight, bias)

    def linear_scatter_backward(
        self,
        ranks: TPGroup,
        grad: Tensor,
        weight: Tensor,
        compute_weight_grads: WeightGrads | None,
        needs_input: bool,
    ) -> Tensor | None:
        shape = Shape(
            "linear_scatter", round_rows(len(grad)), weight.shape[1], (len(weight),), weight.dtype
        )
        backward = self._choose(ranks, grad.device, shape).backward
        return backward.linear_scatter_backward(
            ranks, grad, weight, compute_weight_grads, needs_input
        )

    def linear_reduce(
        self, ranks: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        shape = Shape("linear_reduce", round_rows(len(x)), x.shape[1], (len(weight),), x.dtype)
        return self._choose(ranks, x.device, shape).forward.linear_reduce(ranks, x, weight, bias)

    def _choose(
        self, ranks: TPGroup, device: torch.device, shape: Shape, *, chooses_forward: bool = True
    ) -> Pair:
        """Return the schedules of a shape, after measuring them if this is possible now.

        Without ``chooses_forward``, the default computes forward.
        """
        pairs = self._pairs_by_group.setdefault(ranks, {})
        # While algorithms must be deterministic, the autotuner returns the default without measuring. Neither that
        # choice nor a measured one may hold in the other mode.
        key = (torch.are_deterministic_algorithms_enabled(), chooses_forward, shape)
        pair = pairs.get(key)
        if pair is None:
            candidates = self._candidates.values()
            without_memory = [
                schedule for schedule in candidates if not schedule.has_memory(ranks, device)
            ]
            tune = get_autotuner(ranks.group, device, "tp_linear", cache_dir()).tune
            directions = ("forward", "backward") if chooses_forward else ("backward",)
            choices = [
                tune(ranks.group, self.make_tuning(ranks, device, shape, direction))
                for direction in directions
            ]
            forward_name = choices[0].candidate if chooses_forward else self._default
            forward = self._candidates[forward_name]
            backward = self._candidates[choices[-1].candidate]
            pair = Pair(forward, backward)
            # The race has allocated this memory, and no call will use it.
            for schedule in without_memory:
                if schedule not in (forward, backward):
                    schedule.release(ranks, device)
            # A choice without measurement, as under a capture, does not hold for later calls.
            if all(choice.final for choice in choices):
                pairs[key] = pair
                # A choice of an earlier run of the feature may have lost its memory. A forward allocates it again, a
                # backward cannot.
                backward.prepare(ranks, device)
        return pair

    def make_tuning(
        self, ranks: TPGroup, device: torch.device, shape: Shape, direction: str
    ) -> Tuning:
        """Return the measurement of the schedules that differ for an operator and a direction.

        Args:
            ranks: The ranks.
            device: The device of the operands.
            shape: The operator and its shape.
            direction: ``forward`` or ``backward``.
        """
        method = shape.operator if direction == "forward" else f"{shape.operator}_backward"
        regathers_here = self._regathers and method == "gather_linear_backward"
        schedules = self._candidates
        features, sent = (shape.k, *shape.features), _find_sent_rows(method, shape)

        def make(generator: torch.Generator) -> Candidates:
            call = _make_call(method, ranks, shape, generator, regathers_here)
            return {name: functools.partial(call, schedules[name]) for name in names}

        def can_run(name: str) -> bool:
            return schedules[name].can_run(ranks, device, shape.dtype, features, sent)

        def recover() -> None:
            for schedule in schedules.values():
                schedule.recover(ranks, device)

        # Schedules that compute this method in the same way are measured once.
        names = _list_distinct(schedules, method)
        # Files of earlier runs have these keys, so the words must not change.
        variant = ", gathered anew" if regathers_here else ""
        key = f"{shape.operator} {direction}, {shape.text()}{variant}, {ranks.world} ranks"
        default = self._default if self._default in names else names[0]
        total_features = sum(shape.features)
        # The limit of the memory of inputs, outputs and gradients, with copies.
        memory_bytes = (
            3
            * (ranks.world * shape.rows * (shape.k + total_features) + shape.k * total_features)
            * shape.dtype.itemsize
        )
        return Tuning(key, names, default, make, memory_bytes, can_run, recover=recover)
