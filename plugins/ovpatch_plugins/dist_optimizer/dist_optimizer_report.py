"""The counters of feature ``dist_optimizer``, and its lines in the report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from ovpatch.hookspecs import FeatureCounters, Level, Peak


class Counters(FeatureCounters):
    """Totals since the process started, levels and peaks.

    Attributes:
        optimizers: Optimizers with sharded steps.
        stock_optimizers: Optimizers that fell back to torch.
        steps: Sharded optimizer steps.
        params_updated: Parameters updated by shards, or by one rank for all, summed over steps.
        params_owned: Parameters among these that this rank updated for all ranks.
        grads_sharded: Gradients that were reduce-scattered and were not read before the step.
        grads_in_half: Sharded gradients that are averaged in fp32 and were sent in bf16 or fp16.
        grads_read: Lazy gradients that this rank materialized because the script read them.
        gathers: Buckets of parameters all-gathered, or broadcast by their owners, after steps.
        gathers_overlapped: Buckets among these that step() did not wait for.
        gathers_copied: Buckets among these that the GPUs' copy engines gathered.
        bytes_gathered: Size of the parameters in them, in bytes.
        norms: Gradient norms computed from shards.
        state_reads: Reads of lazy optimizer state.
        bytes_pulled: Optimizer state that peers sent for these reads, in bytes.
        state_read_ms: Duration of these reads; in a merged report, that of the slowest rank, in
            milliseconds.
        state_bytes: Peak of this rank's optimizer state for sharded parameters; in a merged report,
            the largest of a rank, in bytes.
        state_bytes_whole: Peak of the full state of these parameters; in a merged report, the
            largest of a rank, in bytes.
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
    state_read_ms: Level = 0
    state_bytes: Peak = 0
    state_bytes_whole: Peak = 0


COUNTERS = Counters()

_log = logging.getLogger("ovpatch.dist_optimizer")

_REMARK_SHARED_STATE: Final = "the script shares the memory of optimizer state"
_REMARK_SHARED_STATE_EFFECT: Final = (
    "over a step, as by a view, an array or a graph, which keeps the values from before the step. "
    "Read the tensor from optimizer.state again after each step."
)

# The lines of the report, in the order of events.
_remarks: Final[list[str]] = []
# Classes of optimizers that stepped and had no parameter whose gradient is sharded.
_unmanaged: Final[set[str]] = set()


def remark(text: str) -> bool:
    """Add a remark to the report, unless it is there; return whether it is new."""
    # Callers log only new remarks, so that a loop over many optimizers warns once.
    is_new = text not in _remarks
    if is_new:
        _remarks.append(text)
    return is_new


def note_unmanaged(name: str) -> None:
    """Note the class of an optimizer that stepped without a parameter with sharded gradients."""
    _unmanaged.add(name)


def note_choice(text: str) -> None:
    """Report whether a model is sharded."""
    if remark(text):
        _log.info("%s", text)


def note_shared_state(name: object) -> None:
    """Warn, once, that a script shares the memory of a tensor of optimizer state over a step."""
    # Each tensor would warn again otherwise, and they have the same remedy.
    if not any(text.startswith(_REMARK_SHARED_STATE) for text in _remarks):
        text = f"{_REMARK_SHARED_STATE} '{name}' {_REMARK_SHARED_STATE_EFFECT}"
        remark(text)
        _log.warning("%s", text)


def list_remarks() -> Sequence[str]:
    """Return the lines of the report.

    They name the models that are sharded by choice, the optimizers that fell back, and the
    optimizers that had nothing to shard.
    """
    remarks = list(_remarks)
    # If another line names an optimizer or a model, unmanaged ones are on purpose.
    if _unmanaged and not (_remarks or COUNTERS.optimizers):
        names = ", ".join(sorted(_unmanaged))
        remarks.append(
            f"{names} had nothing to shard: no parameter of a model whose gradients feature ddp "
            "reduces"
        )
    return remarks
