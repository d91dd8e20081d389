"""Options of the feature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

from ovpatch.hookspecs import Option, make_count_parser, make_seconds_parser, parse_flag

_T = TypeVar("_T")

GRANULARITIES: Final = ("size", "layer", "module")


def _or_none(parse: Callable[[str], _T]) -> Callable[[str], _T | None]:
    """Return a parser that accepts ``none`` and the empty string as well."""

    def parsed(text: str) -> _T | None:
        return None if text.strip().lower() in ("", "none") else parse(text)

    return parsed


def _capacity(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        # No option accepts this number, so the message below is shown.
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError("expected a size in MiB, 0 or more, or none")
    return value


def _flag(text: str) -> bool:
    truth = parse_flag(text)
    if truth is None:
        raise ValueError("expected 1, 0 or none")
    return truth


OPTIONS: Final = (
    Option(
        "overlap_grad_reduce",
        True,
        "Reduce gradient buckets while backward still computes. false: reduce all of them after "
        "backward.",
        aliases=("overlap_grad_sync",),
    ),
    Option(
        "bucket_cap_mb",
        None,
        "Capacity of a gradient bucket in MiB, where the script sets none. none: on CUDA a 16th "
        "of all gradients, between 25 and 400; elsewhere DistributedDataParallel's own 25.",
        parse=_or_none(_capacity),
        values="a size in MiB, or `none`",
    ),
    Option(
        "bucket_granularity",
        "size",
        "What a bucket holds. size: gradients up to its capacity. layer: one layer of the model "
        "(parameters whose names are equal up to the first number). module: the whole "
        "DistributedDataParallel module, such as one virtual-pipeline chunk.",
        choices=GRANULARITIES,
        experimental=("layer", "module"),
    ),
    Option(
        "grad_reduce_in_fp32",
        False,
        "Average fp16 and bf16 gradients in float32. This is more precise with many ranks. It "
        "doubles the traffic, except where copy engines carry it.",
    ),
    Option(
        "grad_accumulate_in_fp32",
        False,
        "Add fp16 and bf16 gradients up in float32 over the microbatches of a step. p.grad is "
        "the rounded sum; grad_reduce_in_fp32 averages the float32 sum. This takes 4 bytes a "
        "parameter until the gradient is reduced.",
    ),
    Option(
        "average_in_collective",
        None,
        "Let the collective divide by the number of ranks, which saves a pass over the "
        "gradients. false: divide before it. none: only where the backend can (NCCL) and rounds "
        "as stock PyTorch does (not float16, and bfloat16 only on 2, 4, 8, ... ranks).",
        parse=_or_none(_flag),
        values="`0` `1` `none`",
    ),
    Option(
        "hierarchical",
        "auto",
        "Reduce gradients within each host first, so that one sum per host crosses the links "
        "between hosts. on: with "
        "gloo on the CPU. off: in one collective over all ranks. auto: on where hosts have several "
        "ranks and the "
        "backend does not know the hosts, which NCCL does.",
        choices=("auto", "on", "off"),
    ),
    Option(
        "max_ctas",
        None,
        "SM budget: reduce on a communicator that takes at most this many thread blocks (NCCL). "
        "none: the script's communicator.",
        parse=_or_none(make_count_parser("a number of thread blocks, 1 or more, or none", least=1)),
        values="a number of blocks, or `none`",
    ),
    Option(
        "agreement_timeout_s",
        20.0,
        "How many seconds a rank waits for the settings of its peers when a model is wrapped.",
        parse=make_seconds_parser(),
        values="a time in seconds",
    ),
)

REMOVED_OPTIONS: Final = (
    (
        "reduce_late_gradients",
        "the gradients of a second backward through one forward always stay local, as in stock "
        "PyTorch, since their reduction made ranks wait for a backward that only some of them "
        "may run. Add the losses up and run one backward.",
    ),
)
