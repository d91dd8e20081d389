"""Counters of the feature in this process, and what it leaves to Megatron."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import FeatureCounters


class Counters(FeatureCounters):
    """Totals since the process started."""

    calls: int = 0  # sequence-parallel linears that our operators computed, forward passes
    stock_calls: int = 0  # those that were left to Megatron
    models: int = 0  # models in Megatron's DistributedDataParallel
    reductions: int = 0  # bucket groups whose reduction started in backward, in order
    held: int = 0  # those of them that were ready before an earlier one, and waited for it
    gathers: int = 0  # bucket groups whose parameters are gathered from the end of a step on
    reads: int = 0  # those of them that a reader other than Megatron's own hooks has waited for
    pipeline_steps: int = 0  # steps of a pipeline's stage that the engine of feature pipeline ran
    weight_grads: int = 0  # weight gradients of linears that were computed behind a send
    early_sends: int = 0  # sends under which weight gradients were computed
    early_receives: int = (
        0  # receives that were started ahead of the computation in front of their reader
    )


COUNTERS = Counters()

# The parts that Megatron computes itself, each with its reason.
_LEFT: Final[dict[str, None]] = {}


def note_left(text: str) -> None:
    """Have the report list a part that is left to Megatron, and the reason."""
    _LEFT[text] = None


def list_left() -> list[str]:
    """Return the parts that are left to Megatron, with their reasons."""
    return list(_LEFT)


def drop_left() -> None:
    """Forget all parts."""
    _LEFT.clear()
