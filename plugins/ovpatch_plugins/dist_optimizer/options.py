"""Options of the feature."""

from __future__ import annotations

import math
from typing import Final

from ovpatch.hookspecs import Option


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("expected a number of elements, 0 or more")
    return int(text)


def _capacity(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError("expected a size in MiB, 0 or more")
    return value


OPTIONS: Final = (
    Option(
        "overlap_param_gather",
        True,
        "Gather updated parameters while the next forward already computes; false: inside step().",
        aliases=("overlap_param_sync",),
    ),
    Option(
        "gather_granularity",
        "size",
        "What is gathered, and waited for, together: size, as much as gather_bucket_mb; layer, one layer of the model "
        "(names alike up to the first number); module, the whole DistributedDataParallel module.",
        choices=("size", "layer", "module"),
    ),
    Option(
        "gather_bucket_mb",
        512.0,
        "How many MiB of parameters are gathered together; with overlap, at most an eighth of them all, but 1 MiB, and "
        "half of that in the first two; of whole parameters that ranks hand out, at most 64.",
        parse=_capacity,
    ),
    Option(
        "copy_engines",
        "auto",
        "What moves parameters and gradients between the GPUs of one host: off, the backend's kernels (NCCL); on, the "
        "GPUs' copy engines, which leave multiprocessors to what computes; auto, for parameters and for gradients "
        "whichever is faster beside products, measured once by all ranks and kept in OVPATCH_CACHE_DIR.",
        choices=("auto", "on", "off"),
    ),
    Option(
        "grads_in_flight_mb",
        1024.0,
        "How many MiB of whole gradients may be on their way to the ranks' shards: more is waited for, and its memory "
        "given up, while backward still computes. 0: all are there until backward ends.",
        parse=_capacity,
    ),
    Option(
        "min_param_numel",
        16384,
        "Parameters with fewer elements are updated whole on every rank: cutting them costs more than it saves.",
        parse=_count,
    ),
    Option(
        "main_params_in_fp32",
        False,
        "Update parameters of half precision in fp32, with fp32 state, of which each rank keeps its shards; parameters "
        "are the roundings. Not what stock computes, but closer to fp32. Element-wise optimizers only.",
    ),
    Option(
        "element_wise",
        "",
        "Further optimizer classes that are element-wise and may be given shards, as module.Class,module.Class.",
    ),
    Option(
        "per_parameter",
        "",
        "Further optimizer classes whose update of a parameter needs that parameter alone, but the whole of it, as "
        "module.Class,module.Class.",
    ),
)
