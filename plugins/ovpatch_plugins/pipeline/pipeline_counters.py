"""The counters of the feature in this process, and the record of a stage that the report shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ovpatch.hookspecs import FeatureCounters


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        schedules: Schedules that the engine runs.
        steps: Steps that the engine ran.
        actions: Computations of those steps.
        early_sends: Input gradients sent before the weight gradients of their microbatch.
        weight_grads: Weight gradients of linears computed later than their backward.
        messages: Messages sent to other ranks.
        copied_messages: Messages that copy engines carried.
        failed_steps: Steps that ended with an exception.
        stock_steps: Steps with a backward that torch ran.
        microbatch_updates: Times that a stage stepped its optimizers after a backward, with ``weight_stash``.
    """

    schedules: int = 0
    steps: int = 0
    actions: int = 0
    early_sends: int = 0
    weight_grads: int = 0
    messages: int = 0
    copied_messages: int = 0
    failed_steps: int = 0
    stock_steps: int = 0
    microbatch_updates: int = 0


COUNTERS = Counters()


@dataclass
class StageReport:
    """The part of the report about a stage.

    Attributes:
        objection: The reason for which its weight gradients stay in the backward, or "".
        reasons: The reasons for which linears stay in B, with the numbers of linears.
        expert_weights: Number of trained weights of grouped experts, ``[experts, out, in]``, that stay in B.
        receive_nbytes: Bytes that it receives for a microbatch.
    """

    objection: str = ""
    reasons: Counter[str] = field(default_factory=Counter)
    expert_weights: int = 0
    receive_nbytes: int = 0
