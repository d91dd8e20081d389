"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option

AS_GIVEN: Final = "as-given"

SCHEDULES: Final = (AS_GIVEN, "gpipe", "1f1b", "zb-h1", "zb-h2")
"""Orders of schedules with one stage per rank: that of the script's class, or one of the fixed ones."""

OPTIONS: Final = (
    Option(
        "schedule",
        AS_GIVEN,
        "Order of the computations where each rank has one stage: as-given, that of the script's class; zb-h1, with "
        "the memory of 1F1B; zb-h2, with up to twice that. Classes with several stages per rank and CSV files keep "
        "theirs.",
        choices=SCHEDULES,
    ),
    Option(
        "delay_wgrad_compute",
        "auto",
        "Weight gradients of linears: on, computed after the input gradient was sent, or in the W of a zero-bubble "
        "order; off, inside the backward; auto, on for stages that send an input gradient or have Ws.",
        choices=("auto", "on", "off"),
    ),
    Option(
        "overlap_p2p_comm",
        True,
        "Post receives ahead of the computation that reads them: two on gloo, one on NCCL.",
    ),
    Option(
        "gradient_accumulation_fusion",
        False,
        "Add weight gradients into p.grad inside the product. It saves a pass over the gradients and rounds once where "
        "stock rounds twice: not bitwise in bf16. Parameters with hooks are left out.",
    ),
)
