"""What each rank steps after each backward, by which ranks agree to divide an optimizer's work."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch.distributed as dist
from torch.optim import Optimizer

from ovpatch.overlap.comm.consensus import RankMismatchError, check_consistent, wait_limit_s
from ovpatch.overlap.comm.lifetimes import group_state, group_values, reset_after_fork, weak_method
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc

#: How long a rank waits for the others at most, in seconds; one may save a checkpoint first.
PATIENCE_S = 300.0

#: After how long it says for what it waits, in seconds.
SILENCE_S = 5.0

_log = logging.getLogger("ovpatch.dist_optimizer")

_REMEDY: Final = (
    "If the script divides the work itself, as ZeroRedundancyOptimizer does, nothing is wrong; otherwise make the "
    "same optimizers, and step them in the same order, on every rank."
)


_CROSSING: Final = "a step in another order than on other ranks"

_ANEW: Final = (
    "ovpatch: some ranks have made a new {}, and the others go on with the old one, whose state differs. Make a new "
    "one on every rank."
)

# All logs share it: a step over one model may decide about a turn over another.
_changed = threading.Condition()
reset_after_fork(sys.modules[__name__], "_changed", threading.Condition)


@dataclass(frozen=True)
class Turn:
    """One step of an optimizer, for the parameters of one model.

    Attributes:
        terms: The optimizer's class and parameters; "" for a step that does not go on to be divided.
        reason: Why it does not.
        number: Of the optimizer among those with the same terms.
        steps: How many divided steps there were under this number before.
        agreed: Whether ranks have agreed on it before, so that this rank asks no other.
    """

    terms: str
    reason: str = ""
    number: int = 0
    steps: int = 0
    agreed: bool = False

    @property
    def name(self) -> str:
        """A name that is the same on all ranks, for what is kept for the optimizer."""
        return f"{self.terms}, number {self.number}"


class StepLog:
    """The steps of this rank over the parameters of one model since the last backward that was reduced.

    [Note: the same everywhere] An optimizer may have other parameters on other ranks, as the one inside of a
    ZeroRedundancyOptimizer, or that of a script which shares the work out by hand; and one rank alone may make a new
    one. What one rank alone updates cannot be gathered from all. So at an optimizer's first step a rank asks the others
    what they step in the same turn. A rank answers when it comes to that turn, or to a further backward. If all bring
    a new one with the same class and parameters, that is agreed. If some go on with an older one, both are left stock
    where ranks tell each other before each step (:meth:`ShardedGrads.agree_if_local`); elsewhere a new one on the same
    terms goes on in the older one's place, which must not step any more.

    Two ranks may step two optimizers for the first time in orders that differ. Each would wait
    for a turn that its peer reaches only after the reply to its own question. So a question has the steps of all logs
    that the rank has taken by then. If a peer has taken another step over another model, and not that one, it refuses
    the turn to all ranks, itself included. Refused turns are stock on all of them. A backward of another model does
    the same where it blocks the host until all ranks have joined it.

    Args:
        group: The process group of the model.
        identity: The model's name, the same on all ranks.
        is_blocking: Whether the host waits in a backward of the model until all ranks have joined it.
    """

    def __init__(self, group: dist.ProcessGroup, identity: str, *, is_blocking: bool) -> None:
        self._turns: list[Turn] = []
        # Positions after a number of backwards that this rank has refused, since its own steps come in another order.
        self.refused: set[tuple[int, int]] = set()
        self._after = 0  # how many backwards were reduced before those turns
        self._left = -1  # a further backward has begun after so many
        self._counts: Counter[str] = Counter()  # the highest number under some terms
        self._is_blocking = is_blocking
        self._group, self._topic = group, f"steps over {identity}"
        self._key = f"{group.group_name}: {identity}"
        group_state(group).get_or_create(_Logs, _Logs).add(self)
        weakref.finalize(self, PeerRpc.for_group(group).register(self._topic, weak_method(self._answer)))

    def begin_backward(self, backwards: int) -> None:
        """Note that a backward begins, after so many were reduced."""
        with _changed:
            self._left = backwards
            _changed.notify_all()

    def record(self, backwards: int, turn: Turn) -> int:
        """Note a step after so many backwards; return which one after the same backward it is."""
        with _changed:
            if backwards != self._after:
                self._turns, self._after = [], backwards
                if self.refused:
                    self.refused = {place for place in self.refused if place[0] >= backwards}
            position = len(self._turns)
            self._turns.append(turn if (backwards, position) not in self.refused else Turn("", _CROSSING))
            _changed.notify_all()
            return position

    def is_refused(self) -> bool:
        """Return whether the newest step is one that this rank has refused."""
        return (self._after, len(self._turns) - 1) in self.refused

    def has_agreed(self, backwards: int) -> bool:
        """Return whether a step after so many backwards was one on which ranks had agreed before."""
        return self._after == backwards and any(turn.agreed for turn in self._turns)

    def propose(self, terms: str) -> Turn:
        """Return the turn of a new optimizer with some terms."""
        return Turn(terms, number=self._counts[terms] + 1)

    def adopt(self, turn: Turn) -> None:
        """Note the number that was agreed on."""
        self._counts[turn.terms] = max(self._counts[turn.terms], turn.number)

    def gather(self, backwards: int, position: int) -> dict[int, Turn]:
        """Return what every rank steps in one turn, by group rank.

        Raises:
            PeerError: A rank came neither to that turn nor to a further backward in time.
        """
        if dist.get_backend(self._group) == "fake":
            return {self._group.rank(): self._wait(backwards, position)}
        with _changed:
            taken = {key: log._list_taken() for key, log in _find_logs().items() if log is not self}
        question = {"backwards": backwards, "position": position, "taken": taken}
        limit_s = wait_limit_s(self._group, PATIENCE_S)
        answers = PeerRpc.for_group(self._group).call(self._topic, question, timeout_s=limit_s)
        turns = {rank: Turn(**header) for rank, (header, _) in answers.items()}
        return turns | {self._group.rank(): self._wait(backwards, position)}

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        return asdict(self._wait(question["backwards"], question["position"], question["taken"])), []

    def _wait(self, backwards: int, position: int, taken: Mapping[str, Sequence[int]] | None = None) -> Turn:
        def is_known() -> bool:
            if self._find(backwards, position) is None and self._crosses(taken or {}):
                self.refused.add((backwards, position))
            return self._find(backwards, position) is not None

        with _changed:
            found = self._find(backwards, position) if _changed.wait_for(is_known, 2 * PATIENCE_S) else None
            return found or Turn("", "it came to no step")

    def _list_taken(self) -> tuple[int, int, int]:
        """Return where this rank is: backwards before its newest step, steps since, and its newest backward."""
        return self._after, len(self._turns), self._left if self._is_blocking else -1

    @staticmethod
    def _crosses(taken: Mapping[str, Sequence[int]]) -> bool:
        """Return whether this rank has taken a step, or is in a backward, that a rank which waits for it has not."""
        logs = _find_logs() if taken else {}
        for key, (after, steps, left) in taken.items():
            log = logs.get(key)
            if log is not None:
                own_after, own_steps, own_left = log._list_taken()
                if (own_after, own_steps) > (after, steps) or own_left > left:
                    return True
        return False

    def _find(self, backwards: int, position: int) -> Turn | None:
        if (backwards, position) in self.refused:
            return Turn("", _CROSSING)
        if self._after == backwards and position < len(self._turns):
            return self._turns[position]
        return Turn("", "it has no such step") if self._left >= backwards or self._after > backwards else None


class _Logs(weakref.WeakSet[StepLog]):
    """The logs of one process group."""


def _find_logs() -> dict[str, StepLog]:
    """Return all logs of this process by group and model."""
    return {log._key: log for _, logs in group_values(_Logs) for log in list(logs)}


def list_terms(optimizer: Optimizer, names: Iterable[str]) -> str:
    """Return an optimizer's class and its parameters of one model, which are to be the same on all ranks."""
    known = sorted(names)
    digest = hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]
    cls = type(optimizer)
    return f"{cls.__module__}.{cls.__qualname__} of {len(known)} parameters from {known[0]} to {known[-1]} ({digest})"


def agree(
    optimizer: Optimizer, logs: Mapping[StepLog, tuple[int, Turn]], *, adopts: bool
) -> tuple[str, dict[StepLog, Turn], bool]:
    """Agree with the other ranks on an optimizer's first step; every rank with that step in its turn agrees alike.

    Args:
        optimizer: The optimizer.
        logs: For each of its models, how many backwards were reduced, and the turn that this rank proposes.
        adopts: Whether the new optimizer is to go on in the place of an older one with which other ranks go on.

    Returns:
        Why the optimizer has to stay stock, "" if it has not; the turns that are agreed on; and whether some ranks go
        on with an optimizer on which ranks have agreed before.
    """
    positions = {log: log.record(backwards, turn) for log, (backwards, turn) in logs.items()}
    reasons: dict[dist.ProcessGroup, str] = {}
    agreed: dict[StepLog, Turn] = {}
    is_older = False
    with _warning_when_slow(optimizer, min((wait_limit_s(log._group, PATIENCE_S) for log in logs), default=0.0)):
        for log, (backwards, _) in logs.items():
            reasons.setdefault(log._group, "")
            try:
                turns = log.gather(backwards, positions[log])
            except PeerError as error:
                reasons[log._group] = f"{error} {_REMEDY}"
                continue
            older = [one for _, one in sorted(turns.items()) if one.agreed]
            is_older |= bool(older)
            reasons[log._group] = reasons[log._group] or _difference(turns, log._group)
            if older and not reasons[log._group]:
                text = _ANEW.format(type(optimizer).__name__)
                if adopts:
                    _log.warning("%s", text)
                else:
                    reasons[log._group] = text
            agreed[log] = older[0] if older else max(turns.values(), key=lambda one: one.number)
    reason = next(filter(None, reasons.values()), "")
    if not is_older:  # a rank may have heard of a reason in another group
        for group in [group for group, failed in reasons.items() if not failed]:
            names = sorted(turn.name for log, turn in agreed.items() if log._group is group)
            reason = _tell(group, names, reason) or reason
    return reason, agreed, is_older


def _difference(turns: Mapping[int, Turn], group: dist.ProcessGroup) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, turn in sorted(turns.items()):
        ranks.setdefault(turn.reason or turn.terms, []).append(str(dist.get_global_rank(group, rank)))
    if len(ranks) == 1:
        (text,) = ranks
        return "" if all(turn.terms for turn in turns.values()) else text
    parts = " but ".join(f"{text} on rank {', '.join(own)}" for text, own in ranks.items())
    return f"ovpatch: ranks step different optimizers: {parts}. {_REMEDY}"


def _tell(group: dist.ProcessGroup, names: Sequence[str], objection: str) -> str:
    try:
        limit_s = wait_limit_s(group, PATIENCE_S)
        return check_consistent(
            group, "dist_optimizer", {"optimizer": names}, objection=objection, timeout_s=limit_s, remedy=_REMEDY
        )
    except RankMismatchError as error:
        return str(error)


@contextmanager
def _warning_when_slow(optimizer: Optimizer, patience: float) -> Iterator[None]:
    """Warn if the other ranks do not come to a step, or to a further backward, soon."""
    text = (
        f"{type(optimizer).__name__} has not stepped before, and waits for the other ranks to step theirs, for up to "
        f"{patience:g} s. {_REMEDY}"
    )
    timer = threading.Timer(SILENCE_S, _log.warning, ("%s", text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
