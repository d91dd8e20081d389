"""The options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option, make_count_parser
from ovpatch.overlap.tensor_parallel.schedule_table import (
    DEFAULT_SCHEDULE,
    EXPERIMENTAL_NAMES,
    SCHEDULE_NAMES,
    describe_schedules,
)

OPTIONS: Final = (
    Option(
        "schedule",
        DEFAULT_SCHEDULE,
        f"Order of GEMMs and collectives. {describe_schedules()}",
        choices=SCHEDULE_NAMES,
        experimental=EXPERIMENTAL_NAMES,
    ),
    Option(
        "chunks",
        4,
        "The chunks into which schedule chunk splits a GEMM; fewer if the rows do not divide.",
        parse=make_count_parser("a number of chunks, 1 or more", least=1),
        aliases=("num_splits",),
        values="a number of chunks",
    ),
    Option(
        "regather",
        False,
        "Keep this rank's shard of a gathered input for backward, and gather it again there. This saves memory, and "
        "all ranks must run backward.",
    ),
    Option(
        "shared_gather",
        True,
        "If PrepareModuleInput gathers for several linears, compute their GEMMs together with the gather.",
    ),
    Option(
        "compiled",
        False,
        "Fuse gathers and reduce-scatters with their GEMMs in graphs of torch.compile's backend inductor, too. false: "
        "compiled code is as in stock PyTorch.",
        experimental=(True,),
    ),
    Option(
        "gradient_accumulation_fusion",
        False,
        "Add a weight's gradient to weight.main_grad, or to weight.grad of earlier microbatches, as part of the GEMM. "
        "This skips weights with hooks, because their hooks would not be called.",
        experimental=(True,),
    ),
)
