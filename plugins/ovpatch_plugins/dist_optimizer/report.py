"""What the feature did in this process, and what the report says of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from ovpatch.hookspecs import FeatureCounters


class Counters(FeatureCounters):
    """Totals since the process started.

    Attributes:
        optimizers: Optimizers whose steps are divided among ranks.
        stock_optimizers: Optimizers that were left stock.
        steps: Optimizer steps that were divided.
        params_updated: Parameters updated by shards, or by one rank for all, summed over steps.
        params_owned: Those of them that this rank updated whole, for all ranks.
        grads_sharded: Gradients that were reduce-scattered and had not been read by the step.
        grads_in_half: Sharded gradients that are averaged in fp32 and were sent in half precision.
        grads_read: Lazy gradients that this rank materialized because the script read them.
        gathers: Buckets of parameters all-gathered, or broadcast by their owners, after steps.
        gathers_overlapped: Those of them that step() did not wait for.
        gathers_copied: Those of them that the GPUs' copy engines carried.
        bytes_gathered: Size of the parameters in them, in bytes.
        norms: Gradient norms computed from shards.
        state_reads: Reads of lazy optimizer state.
        bytes_pulled: Optimizer state that peers sent for that, in bytes.
        state_read_ms: How long that took, in milliseconds.
        state_bytes: Optimizer state that this rank keeps, of parameters whose update is divided, in bytes.
        state_bytes_whole: What stock would keep here of the same, in bytes.
    """

    optimizers: int = 0
    stock_optimizers: int = 0
    steps: int = 0
    params_updated: int = 0
    params_owned: int = 0
    grads_sharded: int = 0
    grads_in_half: int = 0
    grads_read: int = 0
    gathers: int = 0
    gathers_overlapped: int = 0
    gathers_copied: int = 0
    bytes_gathered: int = 0
    norms: int = 0
    state_reads: int = 0
    bytes_pulled: int = 0
    state_read_ms: int = 0
    state_bytes: int = 0
    state_bytes_whole: int = 0


COUNTERS = Counters()

_log = logging.getLogger("ovpatch.dist_optimizer")

_remarks: Final[list[str]] = []
_unmanaged: Final[set[str]] = set()  # classes of optimizers that stepped and had no parameter of ours


_SHARED_STATE: Final = "the script shares the memory of optimizer state"
_SHARED_STATE_EFFECT: Final = (
    "over a step, as by a view, an array or a graph, which keeps the values from before the step. Read the tensor from "
    "optimizer.state again after each step."
)


def remark(text: str) -> bool:
    """Keep a remark, each once; return whether it is new."""
    new = text not in _remarks
    if new:
        _remarks.append(text)
    return new


def note_unmanaged(name: str) -> None:
    """Note the class of an optimizer that stepped and had no parameter whose gradient is sharded."""
    _unmanaged.add(name)


def note_choice(text: str) -> None:
    """Report whether a model is sharded."""
    if remark(text):
        _log.info("%s", text)


def note_shared_state(name: object) -> None:
    """Report, once, that a script shares the memory of a tensor of optimizer state over a step."""
    if not any(text.startswith(_SHARED_STATE) for text in _remarks):
        text = f"{_SHARED_STATE} '{name}' {_SHARED_STATE_EFFECT}"
        remark(text)
        _log.warning("%s", text)


def list_remarks() -> Sequence[str]:
    """Return which models are sharded, if that is chosen, and which optimizers are stock or had nothing to divide."""
    found = list(_remarks)
    if _unmanaged and not (_remarks or COUNTERS.optimizers):
        names = ", ".join(sorted(_unmanaged))
        found.append(f"{names} had nothing to divide: no parameter of a model whose gradients feature ddp reduces")
    return found
