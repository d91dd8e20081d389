"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option, make_count_parser

SCHEDULES: Final = ("stock", "bulk", "ring", "chunk", "fused", "auto")
DEFAULT: Final = "bulk"

MEASURED: Final = tuple(name for name in SCHEDULES if name != "auto")
"""What ``auto`` chooses between; the first is what the others are held against."""

FIXED: Final = "bulk"
"""What ``auto`` takes where it does not measure."""


OPTIONS: Final = (
    Option(
        "schedule",
        DEFAULT,
        "Order of products and collectives. stock: one after the other. bulk: in backward, each collective runs under "
        "the product that does not need it. ring: rows go from rank to rank, under products of rows that are there. "
        "chunk: products are cut into parts, and a part's collective runs under the next part. fused: kernels compute "
        "and move rows at the same time, on the GPUs of one host; elsewhere it is an error. auto: the fastest of these "
        "for an operator and its shape; all ranks measure it once and keep it in OVPATCH_CACHE_DIR.",
        choices=SCHEDULES,
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
        "Keep this rank's part of a gathered input for backward, and gather it again there. This saves memory, and "
        "all ranks have to run backward.",
    ),
    Option(
        "shared_gather",
        True,
        "Where PrepareModuleInput gathers for several linears, compute their products together with the gather.",
    ),
    Option(
        "compiled",
        False,
        "Use the feature's operators under torch.compile, too; the compiler does not look into them. false: compiled "
        "code is as under stock.",
    ),
    Option(
        "gradient_accumulation_fusion",
        False,
        "Add a weight's gradient to weight.main_grad, or to weight.grad of earlier microbatches, as part of the "
        "product. Weights with hooks are left out, because their hooks would not be called.",
    ),
)
