"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option

CUTS: Final = ("auto", "none", "experts", "tokens")
"""How rows are cut into chunks: as measured, not at all, by groups of experts, by slices of the tokens."""

EXCHANGES: Final = ("c10d", "symmetric", "auto")
"""How rows travel: by torch.distributed's all-to-alls, over symmetric memory, as measured."""

DEFAULT_EXCHANGE: Final = "c10d"


def _parse_count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("expected a number of parts, or 0 for as many as the cut thinks best")
    return int(text)


OPTIONS: Final = (
    Option(
        "cut",
        "auto",
        "How a layer's rows are cut into chunks. experts: by groups of a rank's experts, so that each weight is used "
        "once. tokens: by slices of the batch. none: not at all. auto: the fastest of these for the layer and its "
        "number of tokens; all ranks measure it once and keep it in OVPATCH_CACHE_DIR.",
        choices=CUTS,
    ),
    Option(
        "parts",
        0,
        "Number of chunks. 0: up to 4 groups of experts, or 2 slices of tokens; auto measures 2, 4 and 8.",
        parse=_parse_count,
        aliases=("multi_data", "pipeline_degree"),
    ),
    Option(
        "delay_wgrad",
        True,
        "Compute weight gradients after the launch of a chunk's all-to-all, where the feature computes the experts.",
        aliases=("delay_wgrad_compute",),
    ),
    Option(
        "multi_stream",
        False,
        "Send results back on a second communicator, so that they do not queue behind later dispatches.",
    ),
    Option(
        "exchange",
        DEFAULT_EXCHANGE,
        "How rows travel. c10d: by torch.distributed's all-to-alls. symmetric: by a kernel that stores them into the "
        "memory of the host's other GPUs; between hosts, as c10d. auto: the faster of the two, where cut=auto "
        "measures.",
        choices=EXCHANGES,
    ),
)
