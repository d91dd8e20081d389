"""Counters of the feature in this process, and the parts for which it falls back to Megatron."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import FeatureCounters


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        calls: Forward passes through sequence-parallel linears that our operators computed.
        stock_calls: Forward passes through sequence-parallel linears that Megatron computed.
        models: Models in Megatron's DistributedDataParallel.
        reductions: Bucket groups whose reduction started in backward, in order.
        held: Bucket groups that were ready before an earlier group, and waited for it.
        gathers: Bucket groups whose parameters were gathered from the end of a step on.
        reads: Bucket groups for which a reader other than Megatron's own hooks has waited.
        pipeline_steps: Steps of a pipeline's stage that the engine of feature pipeline ran.
        weight_grads: Weight gradients of linears that were computed after a send.
        early_sends: Sends under which weight gradients were computed.
        early_receives: Receives that started before the computation that precedes their reader.
    """

    calls: int = 0
    stock_calls: int = 0
    models: int = 0
    reductions: int = 0
    held: int = 0
    gathers: int = 0
    reads: int = 0
    pipeline_steps: int = 0
    weight_grads: int = 0
    early_sends: int = 0
    early_receives: int = 0


COUNTERS = Counters()

# The parts that Megatron computes itself, each with its reason.
_FALLBACKS: Final[dict[str, None]] = {}


def note_fallback(text: str) -> None:
    """Make the report list a part that Megatron computes, and the reason."""
    _FALLBACKS[text] = None


def list_fallbacks() -> list[str]:
    """Return the parts that Megatron computes, with their reasons."""
    return list(_FALLBACKS)


def clear_fallbacks() -> None:
    """Drop all parts."""
    _FALLBACKS.clear()
