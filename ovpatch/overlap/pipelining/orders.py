"""Orders of a pipeline: fixed ones, and the orders of torch's classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ovpatch.overlap.pipelining.ir import (
    Action,
    BidirectionalPlacement,
    Kind,
    Schedule,
    ScheduleError,
    find_source,
)
from ovpatch.overlap.pipelining.order_table import ORDERS

PLACEMENTS: Final = ("straight", "loop", "vee", "bidirectional")
"""The placements of :func:`build_placement`."""

_TORCH_KINDS: Final = {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW}
_OVERLAPPED: Final = "OVERLAP_F_B"
# Other actions of a lowered order. The engine derives them from the computations.
_NO_COMPUTATION: Final = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_", "RECV_", "WAIT_")


# --- fixed orders ---


def build_placement(name: str, *, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage.

    Args:
        name: ``straight`` has one stage per rank. ``loop`` has stage ``s`` on rank ``s % ranks``. In ``vee`` every
            second round of stages runs back, so rank ``r`` has stages ``r`` and ``2 * ranks - 1 - r``.
            ``bidirectional`` has two pipelines, see :class:`BidirectionalPlacement`.
        ranks: Number of ranks.
        chunks: Stages per rank.

    Raises:
        ScheduleError: The name is unknown, or ``straight`` has several stages per rank.
    """
    if name not in PLACEMENTS:
        raise ScheduleError(
            f"placement {name!r} is unknown. Choose one of {', '.join(PLACEMENTS)}."
        )
    if ranks < 1 or chunks < 1:
        raise ScheduleError(
            f"{ranks} ranks with {chunks} stages each make no pipeline. Give 1 or more of both."
        )
    if name == "bidirectional":
        _check_bidirectional(ranks, chunks)
        return BidirectionalPlacement.of(ranks)
    if name == "straight" and chunks != 1:
        raise ScheduleError(
            f"placement straight has 1 stage per rank, not {chunks}. Choose loop or vee."
        )
    rounds = [
        range(ranks) if name != "vee" or number % 2 == 0 else range(ranks)[::-1]
        for number in range(chunks)
    ]
    return tuple(rank for stages in rounds for rank in stages)


def build_order(name: str, *, ranks: int, microbatches: int) -> Schedule:
    """Return a fixed order for one stage per rank, stage ``r`` on rank ``r``.

    Fewer microbatches than ranks are allowed.

    Args:
        name: One of :data:`ORDERS`.
        ranks: Number of ranks and stages.
        microbatches: Number of microbatches in a step.

    Raises:
        ScheduleError: The name is unknown, or a number is below 1.
    """
    order = ORDERS.get(name)
    if order is None:
        raise ScheduleError(f"order {name!r} is unknown. Choose one of {', '.join(ORDERS)}.")
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"{ranks} ranks and {microbatches} microbatches make no order. Give 1 or more of both."
        )
    return [
        _interleave(
            stage,
            microbatches,
            warmup=order.count_warmup(stage, ranks, microbatches),
            lag=None if order.count_lag is None else order.count_lag(stage),
        )
        for stage in range(ranks)
    ]


def _interleave(stage: int, microbatches: int, *, warmup: int, lag: int | None) -> list[Action]:
    """Return ``warmup`` Fs, then backwards and Fs in turns, then the remaining backwards.

    ``lag`` is the number of microbatches by which W follows B while Fs are left; None means full backwards.
    With ``lag``, a W follows each B when no F is left, because Bs then arrive as far apart as a B and a W take.
    """
    warmup = min(warmup, microbatches)
    order = [Action(Kind.F, stage, index) for index in range(warmup)]
    weights = 0
    for index in range(microbatches):
        order.append(Action(Kind.BW if lag is None else Kind.B, stage, index))
        forward = warmup + index
        if lag is not None and weights <= index and (index >= lag or forward >= microbatches):
            order.append(Action(Kind.W, stage, weights))
            weights += 1
        if forward < microbatches:
            order.append(Action(Kind.F, stage, forward))
    if lag is not None:
        order.extend(Action(Kind.W, stage, index) for index in range(weights, microbatches))
    return order


def build_vee_order(*, ranks: int, microbatches: int) -> Schedule:
    """Return ZB-V (arXiv 2405.15362) for two stages per rank in a V, ``build_placement("vee", ranks=…, chunks=2)``.

    With ``2 * ranks`` microbatches or more it is the order of torch's ``ScheduleZBVZeroBubble``, and each rank holds at
    most the memory of 1F1B's first rank.

    Args:
        ranks: Number of ranks.
        microbatches: Number of microbatches in a step.

    Raises:
        ScheduleError: A number is below 1.
    """
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"{ranks} ranks and {microbatches} microbatches make no order. Give 1 or more of both."
        )
    return [_build_vee(rank, ranks, microbatches) for rank in range(ranks)]


def _build_vee(rank: int, ranks: int, microbatches: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    order: list[Action] = []
    # The next microbatch of each kind and stage.
    done: dict[tuple[Kind, int], int] = defaultdict(int)

    def run(*pairs: tuple[Kind, int]) -> None:
        """Run the next microbatch of each kind and stage, unless none is left."""
        for kind, stage in pairs:
            if done[kind, stage] < microbatches:
                order.append(Action(kind, stage, done[kind, stage]))
                done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        run((Kind.F, down))
    for _ in range(rank):
        run((Kind.F, up), (Kind.F, down))
    for _ in range(ranks - rank):
        run((Kind.F, up), (Kind.B, up), (Kind.W, up))
    while done[Kind.F, up] < microbatches or done[Kind.F, down] < microbatches:
        run(
            (Kind.F, down), (Kind.B, down), (Kind.W, down), (Kind.F, up), (Kind.B, up), (Kind.W, up)
        )
    for _ in range(rank):
        run((Kind.B, down), (Kind.B, up))
    while done[Kind.B, down] < microbatches:
        run((Kind.B, down), (Kind.W, down))
    run(*[(Kind.W, up)] * microbatches, *[(Kind.W, down)] * microbatches)
    return order


def build_vee_blocks(name: str, *, ranks: int, microbatches: int) -> Schedule:
    """Return V-Half or V-Min (arXiv 2405.15362): each microbatch has fixed slots, six after the previous one's.

    Only Fs and Bs have slots; each W follows its B.

    Args:
        name: ``v-half`` or ``v-min``, which differ in the memory that they hold.
        ranks: Number of ranks, in a V of two stages each.
        microbatches: Number of microbatches in a step.

    Raises:
        ScheduleError: The name is unknown.
    """
    if name not in ("v-half", "v-min"):
        raise ScheduleError(f"blocks {name!r} are unknown. Choose one of v-half, v-min.")
    schedule = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        if name == "v-min":
            shift = 2 if ranks % 3 == 0 else 0
            slots = (
                rank,
                2 * ranks - 1 - rank,
                2 * ranks + shift + rank,
                4 * ranks + shift - 1 - rank,
            )
        else:
            shift = 3 if ranks % 2 == 0 else 0
            slots = (
                2 * rank,
                3 * ranks - 2 - rank,
                3 * ranks + shift + 2 * rank - 1,
                6 * ranks + shift - 2 - rank,
            )
        computed = ((Kind.F, down), (Kind.F, up), (Kind.BW, up), (Kind.BW, down))
        timed = [
            (slot + 6 * microbatch, -number, Action(kind, stage, microbatch))
            for number, (slot, (kind, stage)) in enumerate(zip(slots, computed, strict=True))
            for microbatch in range(microbatches)
        ]
        schedule.append([action for *_, action in sorted(timed, key=lambda item: item[:2])])
    return split_backwards(schedule)


def _check_bidirectional(ranks: int, chunks: int) -> None:
    if ranks % 2 or chunks != 1:
        raise ScheduleError(
            "a bidirectional pipeline has an even number of ranks with 1 stage of each direction, "
            f"not {ranks} ranks with {chunks}. Use an even number of ranks, or placement straight."
        )


def build_bidirectional_order(*, ranks: int, microbatches: int, doubles: bool = False) -> Schedule:
    """Return an order of two pipelines in opposite directions, as in Chimera (Li and Hoefler, SC 2021).

    Each direction has half of the microbatches, numbered from 0. A rank runs the computation that can start first,
    as if F, B and W took the same time. Among equals, a backward goes before a forward. So the orders of ranks ``r``
    and ``ranks - 1 - r`` mirror each other. At most ``ranks + 1`` microbatches wait for their backward on a rank.

    Args:
        ranks: Number of ranks, even.
        microbatches: Number of microbatches in a step, in both directions together; even.
        doubles: Whether two forwards run in a row and count as one (*forward doubling*), since they take about as long
            as a backward of the other direction. Up to ``2 * ranks`` microbatches wait then.

    Raises:
        ScheduleError: A number is odd, or below 2.
    """
    _check_bidirectional(ranks, 1)
    if microbatches < 2 or microbatches % 2:
        raise ScheduleError(
            f"{microbatches} microbatches do not divide into two directions. Give an even number."
        )
    return _Bidirectional(ranks, microbatches // 2, 2 if doubles else 1).build()


class _Bidirectional:
    """A simulation that lists an order; an F takes one unit of time, and a backward takes two."""

    def __init__(self, ranks: int, microbatches: int, grouped: int) -> None:
        self.placement = BidirectionalPlacement.of(ranks)
        self.ranks = ranks
        self.microbatches = microbatches
        # The number of forwards that run in a row.
        self.grouped = grouped
        self.clocks = [0] * ranks
        self.ends: dict[Action, int] = {}
        # The number of computations that have run, by kind and stage.
        self.done: dict[Kind, list[int]] = {
            kind: [0] * len(self.placement) for kind in (Kind.F, Kind.BW)
        }

    def build(self) -> Schedule:
        """Return the orders of all ranks."""
        orders: list[list[Action]] = [[] for _ in range(self.ranks)]
        while min(self.done[Kind.BW]) < self.microbatches:
            start, *_, rank, action = min(
                candidate for stage in range(len(self.placement)) for candidate in self._list(stage)
            )
            self.clocks[rank] = end = start + (1 if action.kind is Kind.F else 2)
            self.ends[action if action.kind is Kind.F else action._replace(kind=Kind.B)] = end
            self.done[action.kind][action.stage] += 1
            orders[rank].append(action)
        return orders

    def _list(self, stage: int) -> Iterator[tuple[int, int, int, int, int, Action]]:
        """Yield the next actions of a stage, each with its start and the values that decide among equal starts."""
        rank, place = self.placement[stage], stage % self.ranks
        forwards, backwards = self.done[Kind.F][stage], self.done[Kind.BW][stage]
        # Whether a group of forwards has begun.
        continues = forwards % self.grouped != 0
        most = (
            min(self.ranks, 2 * (self.ranks - place) - 1)
            if self.grouped > 1
            else self.ranks - place
        )
        due = [(Kind.BW, backwards, 1)] if backwards < forwards else []
        if forwards < self.microbatches and (continues or forwards - backwards < most):
            due.append((Kind.F, forwards, 0 if continues else 2))
        for kind, number, turn in due:
            action = Action(kind, stage, number)
            source = find_source(action, self.placement)
            if source is None and kind is Kind.BW:
                source = action._replace(kind=Kind.F)
            ready = 0 if source is None else self.ends.get(source)
            if ready is not None:
                yield (
                    max(ready, self.clocks[rank]),
                    turn,
                    number // self.grouped,
                    -place,
                    rank,
                    action,
                )


# --- conversion ---


def convert_torch_order(pipeline_order: Mapping[int, Sequence[Any]]) -> Schedule:
    """Return the computations of a ``pipeline_order`` of ``torch.distributed.pipelining``.

    ``OVERLAP_F_B`` becomes its parts. Elements that are None, transfers, reductions, waits, unshards and reshards are
    left out.

    Args:
        pipeline_order: Actions (``_Action``) by rank, lowered or not. Ranks count from 0 without a gap.

    Raises:
        ScheduleError: A rank is missing, or the kind of an action is unknown.
    """
    missing = sorted(set(range(len(pipeline_order))) - set(pipeline_order))
    if missing:
        raise ScheduleError(
            f"the order has ranks {sorted(pipeline_order)}, so rank {missing[0]} is missing. "
            "Give an order to each rank."
        )
    return [list(_convert(rank, pipeline_order[rank])) for rank in range(len(pipeline_order))]


def _convert(rank: int, actions: Sequence[Any]) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        kind = str(getattr(action.computation_type, "value", action.computation_type))
        if kind == _OVERLAPPED and action.sub_actions:
            yield from _convert(rank, action.sub_actions)
        elif kind in _TORCH_KINDS and action.microbatch_index is not None:
            yield Action(_TORCH_KINDS[kind], int(action.stage_index), int(action.microbatch_index))
        elif not kind.startswith(_NO_COMPUTATION):
            raise ScheduleError(
                f"rank {rank}: action {action} of kind {kind} is unknown. Use torch 2.11 to 2.15, "
                "or turn the feature off with OVPATCH_PIPELINE=0."
            )


def split_backwards(schedule: Schedule) -> Schedule:
    """Return the schedule with a B and a W for each full backward, so that its gradient is sent earlier."""

    def parts(action: Action) -> tuple[Action, ...]:
        return (
            (action._replace(kind=Kind.B), action._replace(kind=Kind.W))
            if action.kind is Kind.BW
            else (action,)
        )

    return [[part for action in order for part in parts(action)] for order in schedule]
