"""The options of feature ``dist_optimizer``."""

from __future__ import annotations

import math
from typing import Final

from ovpatch.hookspecs import Option, make_count_parser


def _parse_capacity(text: str) -> float:
    """Return a size in MiB.

    Raises:
        ValueError: The text is no finite number, or a negative one.
    """
    try:
        value = float(text)
    except ValueError:
        # One message covers this and the values below.
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError("expected a size in MiB, 0 or more")
    return value


OPTIONS: Final = (
    # - Models
    Option(
        "shard",
        "always",
        "The models to shard. always: all. auto: those whose steps do not become longer, judged "
        "by the number and size of their parameters, the number of ranks and hosts, and the "
        "backend. All ranks decide together when DistributedDataParallel is built, and the report "
        "gives the reason. In doubt a model is not sharded. Models with main parameters "
        "(main_params_in_fp32) are always sharded.",
        choices=("always", "auto"),
        # A user who names the feature wants it for every model.
        default_unless_named="auto",
    ),
    Option(
        "shard_over",
        "auto",
        "The ranks that share the state of a model. host: the ranks of each host, which keeps all "
        "state once, so that "
        "parameters do not cross the links between hosts. world: all ranks. auto: host if there "
        "are several hosts, "
        "each with the same number of ranks and more than one, and gloo reduces on the CPU or NCCL on "
        "CUDA; otherwise world.",
        choices=("auto", "host", "world"),
    ),
    # - Gathers
    Option(
        "overlap_param_gather",
        True,
        "Gather updated parameters while the next forward already computes. false: gather them "
        "inside step().",
        # The documentation of NeMo calls it so.
        aliases=("overlap_param_sync",),
    ),
    Option(
        "gather_granularity",
        "size",
        "The unit that is gathered and that readers wait for. size: gather_bucket_mb of "
        "parameters. layer: one layer of the model (parameters whose names are equal up to the "
        "first number). module: the entire DistributedDataParallel module.",
        choices=("size", "layer", "module"),
        experimental=("layer", "module"),
    ),
    Option(
        "gather_bucket_mb",
        512.0,
        "The size of a gather in MiB. With overlap it is at most an eighth of all parameters, or "
        "1 MiB if that is more, and half of that in the first two buckets. Broadcasts of "
        "parameters that one rank updates for all are at most 64 MiB.",
        parse=_parse_capacity,
        values="a size in MiB",
    ),
    Option(
        "copy_engines",
        "auto",
        "The way of parameters and gradients between the GPUs of one host. off: the kernels of the "
        "backend (NCCL). on: the GPUs' copy engines, which leave multiprocessors to computation. "
        "auto: the faster of the two while GEMMs run, for parameters and for gradients; all ranks "
        "measure it once and keep it in OVPATCH_CACHE_DIR.",
        choices=("auto", "on", "off"),
        experimental=("on",),
    ),
    # - Gradients
    Option(
        "grads_in_flight_mb",
        1024.0,
        "Limit in MiB for full gradients that ranks have not reduced to shards yet. Beyond it, "
        "backward waits for the oldest gradients and frees their memory. 0: no limit.",
        parse=_parse_capacity,
        values="a size in MiB",
    ),
    # - Parameters
    Option(
        "min_param_numel",
        16384,
        "Every rank updates parameters with fewer elements in full, because a shard would cost "
        "more than it saves.",
        parse=make_count_parser("a number of elements, 0 or more"),
        values="a number of elements",
    ),
    Option(
        "main_params_in_fp32",
        False,
        "Update bf16 and fp16 parameters in fp32. Each rank keeps fp32 weights and state of its "
        "shards, and the parameters are rounded from them. The results are closer to fp32 than "
        "those of stock PyTorch, and differ from them. Element-wise optimizers only.",
    ),
    # - Optimizers; feature `dist_optimizer` cannot know how other classes compute
    Option(
        "element_wise",
        "",
        "More optimizer classes that are element-wise, so that they can update shards. They are not checked: "
        "module.Class,module.Class.",
        values="classes, separated by commas",
    ),
    Option(
        "per_parameter",
        "",
        "More optimizer classes that need a full parameter to update it, and no other parameter: "
        "module.Class,module.Class.",
        values="classes, separated by commas",
    ),
)
