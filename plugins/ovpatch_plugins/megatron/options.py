"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option

PIPELINE_SCHEDULES: Final = ("auto", "stock", "1f1b", "zb-h1")
SCHEDULES: Final = ("stock", "bulk", "ring", "chunk", "fused", "auto")  # of tp_linear


def _parse_chunks(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise ValueError("expected a number of chunks, 1 or more")
    return int(text)


OPTIONS: Final = (
    Option(
        "linears",
        True,
        "Compute sequence-parallel linears of the local specification by the operators of tp_linear.",
    ),
    Option(
        "schedule",
        "bulk",
        "How products and collectives of these linears are ordered: the schedules of feature tp_linear. bulk sums as "
        "Megatron does.",
        choices=SCHEDULES,
    ),
    Option(
        "chunks",
        4,
        "Into how many parts schedule chunk cuts a product, as far as rows divide.",
        parse=_parse_chunks,
    ),
    Option(
        "regather",
        True,
        "Keep this rank's part of a gathered input for backward, and gather it anew there, as Megatron does; off, it "
        "is kept gathered, which takes memory and saves a collective.",
    ),
    Option(
        "ordered_grad_reduce",
        True,
        "Start the reductions of gradient buckets in the order of the buckets, the same on all ranks, and refuse a "
        "gradient that comes after the reduction of its bucket has started.",
    ),
    Option(
        "early_param_gather",
        True,
        "With overlap_param_gather, start the all-gathers of all buckets at the end of step(); whoever reads a "
        "parameter waits for its bucket.",
    ),
    Option(
        "pipeline_schedule",
        "auto",
        "Order of a pipeline's stage without interleaving: stock, Megatron's; 1f1b, the same with the input gradient "
        "sent before the weight gradients of linears are computed; zb-h1, these also fill the bubble, within the "
        "memory of 1F1B's first stage; auto, 1f1b where tensor parallelism is off.",
        choices=PIPELINE_SCHEDULES,
    ),
)
