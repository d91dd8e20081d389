"""Options of the feature."""

from __future__ import annotations

import math
from typing import Final

from ovpatch.hookspecs import Option, make_count_parser


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
        "shard",
        "always",
        "Which models are sharded. always: all. auto: those where a step is not longer for it, by the number and size "
        "of their parameters, the number of ranks and hosts, and the backend. All ranks "
        "decide together when DistributedDataParallel is built, and the report says what and why. In doubt it is off. "
        "Models with main parameters (main_params_in_fp32) are always sharded.",
        choices=("always", "auto"),
        default_unless_named="auto",
    ),
    Option(
        "overlap_param_gather",
        True,
        "Gather updated parameters while the next forward already computes. false: gather them inside step().",
        aliases=("overlap_param_sync",),
    ),
    Option(
        "gather_granularity",
        "size",
        "What is gathered, and waited for, together. size: gather_bucket_mb of parameters. layer: one layer of the "
        "model (parameters whose names are alike up to the first number). module: the whole DistributedDataParallel "
        "module.",
        choices=("size", "layer", "module"),
    ),
    Option(
        "gather_bucket_mb",
        512.0,
        "How many MiB of parameters are gathered together. With overlap this is at most an eighth of all parameters, "
        "or 1 MiB if that is more, and half of that in the first two buckets. Whole parameters that ranks hand out: "
        "at most 64.",
        parse=_capacity,
    ),
    Option(
        "copy_engines",
        "auto",
        "What moves parameters and gradients between the GPUs of one host. off: the kernels of the backend (NCCL). "
        "on: the GPUs' copy engines, which leave multiprocessors to computation. auto: the faster of the two beside "
        "products, for parameters and for gradients; all ranks measure it once and keep it in OVPATCH_CACHE_DIR.",
        choices=("auto", "on", "off"),
    ),
    Option(
        "grads_in_flight_mb",
        1024.0,
        "How many MiB of whole gradients may be on their way to the ranks' shards. If there are more, backward waits "
        "for the oldest and frees its memory. 0: no limit.",
        parse=_capacity,
    ),
    Option(
        "min_param_numel",
        16384,
        "Parameters with fewer elements are updated whole on every rank. Cutting them would cost more than it saves.",
        parse=make_count_parser("a number of elements, 0 or more"),
    ),
    Option(
        "main_params_in_fp32",
        False,
        "Update half-precision parameters in fp32. Each rank keeps fp32 weights and state of its shards, and the "
        "parameters are rounded from them. This is closer to fp32 than stock is, and not equal to stock. Element-wise "
        "optimizers only.",
    ),
    Option(
        "element_wise",
        "",
        "Further optimizer classes that are element-wise, so that they can be given shards: module.Class,module.Class.",
    ),
    Option(
        "per_parameter",
        "",
        "Further optimizer classes that need the whole of a parameter to update it, and no other parameter: "
        "module.Class,module.Class.",
    ),
)
