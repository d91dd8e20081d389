"""What the feature did in this process."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Totals since the process started.

    Attributes:
        optimizers: Optimizers whose update was divided among ranks.
        stock_optimizers: Optimizers that were left stock.
        steps: Optimizer steps that were divided.
        params_updated: Parameters updated by parts, or by one rank for all, summed over steps.
        params_owned: Those of them that this rank updated whole, for all ranks.
        grads_by_parts: Gradients that were reduced and scattered and that nobody had read whole by the step.
        grads_in_half: Gradients by parts that are averaged in fp32 and were sent in half precision.
        grads_read: Gradients by parts that this rank put together because somebody read them.
        gathers: Buckets of parameters gathered, or sent by their owners, after steps.
        gathers_overlapped: Those of them that step() did not wait for.
        gathers_copied: Those of them that the GPUs' copy engines carried.
        bytes_gathered: Size of the parameters gathered after steps, in bytes.
        norms: Gradient norms computed from parts.
        state_reads: Times that somebody wanted whole optimizer state.
        bytes_pulled: Optimizer state that peers sent for that, in bytes.
        state_read_ms: How long that took, in milliseconds.
        state_refilled: Tensors of optimizer state that were put together after a step because a view, or the like, of
            them is held.
        state_bytes: Optimizer state that this rank keeps, of parameters whose update is divided, in bytes.
        state_bytes_whole: What of that stock would keep here, in bytes.
    """

    optimizers: int = 0
    stock_optimizers: int = 0
    steps: int = 0
    params_updated: int = 0
    params_owned: int = 0
    grads_by_parts: int = 0
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
    state_refilled: int = 0
    state_bytes: int = 0
    state_bytes_whole: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


COUNTERS = Counters()
