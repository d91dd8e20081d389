"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option

SCHEDULES: Final = ("stock", "bulk", "ring", "chunk", "fused", "auto")
DEFAULT: Final = "bulk"

MEASURED: Final = tuple(name for name in SCHEDULES if name != "auto")
"""What ``auto`` chooses between; the first is what the others are held against."""

FIXED: Final = "bulk"
"""What ``auto`` takes where it does not measure."""


def _chunks(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise ValueError("expected a number of chunks, 1 or more")
    return int(text)


OPTIONS: Final = (
    Option(
        "schedule",
        DEFAULT,
        "How products and collectives are ordered: stock, one after the other; bulk, in backward each collective under "
        "the product that does not need it; ring, rows handed on from rank to rank under products of those that are "
        "there; chunk, products in parts, each part's collective under the next part; fused, kernels that compute and "
        "move rows at the same time, on the GPUs of one host, and bulk elsewhere; auto, whichever of these is the "
        "fastest for an operator and its shape, measured once by all ranks and kept in OVPATCH_CACHE_DIR.",
        choices=SCHEDULES,
    ),
    Option(
        "chunks",
        4,
        "Into how many parts schedule chunk cuts a product, as far as rows divide.",
        parse=_chunks,
        aliases=("num_splits",),
    ),
    Option(
        "regather",
        False,
        "Keep this rank's part of a gathered input for backward, and gather it anew there, to save memory; all ranks "
        "have to run backward then.",
    ),
    Option(
        "shared_gather",
        True,
        "Where PrepareModuleInput gathers for several linears, compute their products together with the gather.",
    ),
    Option(
        "compiled",
        False,
        "Compute with the feature's operators under torch.compile as well, opaque to it; else it sees what stock does.",
    ),
    Option(
        "gradient_accumulation_fusion",
        False,
        "Add a weight's gradient to weight.main_grad, or to what earlier microbatches left in weight.grad, as part of "
        "the product. Hooks of the weight are not called then, so it is not done for weights that have any.",
    ),
)
