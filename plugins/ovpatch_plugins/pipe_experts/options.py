"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option

CUTS: Final = ("auto", "none", "experts", "tokens")
"""How rows can be cut: as is measured, not at all, by groups of experts, by chunks of tokens."""

EXCHANGES: Final = ("c10d", "symmetric", "auto")
"""By what rows can travel: torch.distributed's all-to-alls, symmetric memory, as is measured."""

DEFAULT_EXCHANGE: Final = "c10d"


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("expected a number of parts, or 0 for as many as the cut thinks best")
    return int(text)


OPTIONS: Final = (
    Option(
        "cut",
        "auto",
        "How a layer's rows are cut into parts: experts, by groups of a rank's experts, so that each weight is used "
        "once; tokens, by chunks of the batch; none, not at all; auto, in whichever of these ways is the fastest for a "
        "layer and its tokens, measured once by all ranks and kept in OVPATCH_CACHE_DIR.",
        choices=CUTS,
    ),
    Option(
        "parts",
        0,
        "Into how many parts; 0 for up to 4 groups of experts, or 2 chunks of tokens; auto measures 2, 4 and 8.",
        parse=_count,
        aliases=("multi_data", "pipeline_degree"),
    ),
    Option(
        "delay_wgrad",
        True,
        "Compute weight gradients behind the launch of a part's all-to-all, where the feature computes the experts.",
        aliases=("delay_wgrad_compute",),
    ),
    Option(
        "multi_stream",
        False,
        "Send rows back on a communicator of their own, so that they do not queue behind rows that are still to come.",
    ),
    Option(
        "exchange",
        DEFAULT_EXCHANGE,
        "By what rows travel: c10d, by torch.distributed's all-to-alls; symmetric, by a kernel that stores them into "
        "other GPUs' memory, on one host, and c10d elsewhere; auto, by whichever is faster where cut=auto measures.",
        choices=EXCHANGES,
    ),
)
