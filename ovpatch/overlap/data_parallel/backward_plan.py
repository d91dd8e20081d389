"""Backward plans: how the gradients of one backward are reduced.

A plan is made when a backward begins, because only then are all facts known: hooks of the script
may come after the forward. It depends on :class:`PlanFacts` alone, so a warm step finds its plan
in a cache.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import NamedTuple


class BackwardKind(enum.Enum):
    """The kinds of backwards, see :func:`plan_backward`."""

    FIRST = enum.auto()
    PLAIN = enum.auto()
    SEARCHED = enum.auto()
    STATIC_FIRST = enum.auto()
    STATIC = enum.auto()
    EXPERTS = enum.auto()


class Expected(enum.Enum):
    """The number of contributions that a parameter's gradient gets in one backward."""

    #: One, since the hook of a parameter fires once per graph task.
    SINGLE = enum.auto()
    #: Not known yet: contributions are counted, and no gradient becomes complete.
    UNKNOWN = enum.auto()
    #: As many as in the first backward of the static graph.
    LEARNED = enum.auto()


class PlanFacts(NamedTuple):
    """The facts about a model on which its backward plans depend.

    Attributes:
        should_overlap: Whether buckets start while backward computes; an option.
        finds_unused: Whether a backward may leave parameters out (``find_unused_parameters``).
        is_static: Whether all backwards have the same graph (``static_graph``).
        has_learned: Whether the first backward of the static graph has been counted.
        has_order: Whether buckets are assigned along the order in which gradients become ready.
        has_reduced: Whether a backward of the model was reduced before.
        has_experts: Whether the parameters are experts, each of which some ranks have.
    """

    should_overlap: bool = True
    finds_unused: bool = False
    is_static: bool = False
    has_learned: bool = False
    has_order: bool = False
    has_reduced: bool = False
    has_experts: bool = False

    @property
    def kind(self) -> BackwardKind:
        """The kind of the next backward."""
        if self.has_experts:
            return BackwardKind.EXPERTS
        if self.is_static:
            return BackwardKind.STATIC if self.has_learned else BackwardKind.STATIC_FIRST
        if self.finds_unused:
            return BackwardKind.SEARCHED
        return BackwardKind.PLAIN if self.has_order else BackwardKind.FIRST


@dataclass(frozen=True)
class BackwardPlan:
    """The way in which one backward is reduced.

    Attributes:
        kind: The kind of the backward.
        expected: The number of contributions to each gradient.
        searches_unused: Whether parameters that the graph task does not reach are skipped.
        skips_frozen: Whether frozen parameters are skipped. All ranks must have frozen them.
        shares_usage: Whether ranks sum their maps of used parameters.
        overlaps: Whether buckets start while backward computes.
        records_order: Whether the order in which gradients become ready is recorded.
        copies_grads: Whether each gradient is copied in its own hook, because hooks of the script
            or a second wrapper may change ``p.grad`` until the backward ends.
        ends_with_task: Whether the end of the outermost graph task is the end of the backward,
            even if gradients are missing.
        only_counts: Whether a gradient has only to be counted when it comes.
    """

    kind: BackwardKind
    expected: Expected
    searches_unused: bool
    skips_frozen: bool
    shares_usage: bool
    overlaps: bool
    records_order: bool
    copies_grads: bool
    ends_with_task: bool
    only_counts: bool


@functools.cache
def plan_backward(facts: PlanFacts, copies_grads: bool) -> BackwardPlan:
    """Return the plan of the next backward.

    ============ ======== ============ ============ ============ ========= ====================
    kind         expected skips        shares usage overlaps     records   ends
    ============ ======== ============ ============ ============ ========= ====================
    FIRST        one      nothing      no           option       the order nothing missing
    PLAIN        one      nothing      no           option       no        nothing missing
    SEARCHED     one      unreachable  yes          second, …    no        with the task
    STATIC_FIRST unknown  nothing      yes          no           no        when torch calls us
    STATIC       learned  unused       no           option       once      nothing missing
    EXPERTS      one      frozen       no           yes          no        with the task
    ============ ======== ============ ============ ============ ========= ====================

    Args:
        facts: The facts about the model.
        copies_grads: See :class:`BackwardPlan`.
    """
    kind = facts.kind
    is_searched = kind is BackwardKind.SEARCHED
    shares_usage = is_searched or kind is BackwardKind.STATIC_FIRST
    # Ranks take part in the first searched backward with different parameters. If buckets started
    # early there, a parameter that a reentrant checkpoint uses might come after its bucket.
    waits = kind is BackwardKind.STATIC_FIRST or (is_searched and not facts.has_reduced)
    records_order = not facts.has_order and kind in (BackwardKind.FIRST, BackwardKind.STATIC)
    return BackwardPlan(
        kind=kind,
        expected={
            BackwardKind.STATIC_FIRST: Expected.UNKNOWN,
            BackwardKind.STATIC: Expected.LEARNED,
        }.get(kind, Expected.SINGLE),
        searches_unused=is_searched,
        skips_frozen=kind is BackwardKind.EXPERTS,
        shares_usage=shares_usage,
        overlaps=facts.should_overlap and not waits,
        records_order=records_order,
        copies_grads=copies_grads,
        ends_with_task=is_searched or kind is BackwardKind.EXPERTS,
        only_counts=not (copies_grads or records_order or shares_usage),
    )
