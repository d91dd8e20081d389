"""Options of the feature."""

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
        f"Order of products and collectives. {describe_schedules()}",
        choices=SCHEDULE_NAMES,
        experimental=EXPERIMENTAL_NAMES,
    ),
    Option(
        "chunks",
        4,
        "Into how many parts schedule chunk cuts a product, as far as the rows divide.",
        parse=make_count_parser("a number of chunks, 1 or more", least=1),
        aliases=("num_splits",),
        values="a number of chunks",
    ),
    Option(
        "regather",
        False,
        "Keep this rank's part of a gathered input for backward, and gather it again there. This "
        "saves memory, and "
        "all ranks have to run backward.",
    ),
    Option(
        "shared_gather",
        True,
        "Where PrepareModuleInput gathers for several linears, compute their products together "
        "with the gather.",
    ),
    Option(
        "compiled",
        False,
        "Use the feature's operators under torch.compile, too; the compiler does not look into "
        "them. false: compiled "
        "code is as under stock.",
        experimental=(True,),
    ),
    Option(
        "gradient_accumulation_fusion",
        False,
        "Add a weight's gradient to weight.main_grad, or to weight.grad of earlier microbatches, "
        "as part of the "
        "product. Weights with hooks are left out, because their hooks would not be called.",
        experimental=(True,),
    ),
)
