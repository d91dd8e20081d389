"""The options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option, make_count_parser
from ovpatch.overlap.tensor_parallel.schedule_table import DEFAULT_SCHEDULE, SCHEDULE_NAMES

PIPELINE_SCHEDULES: Final = ("auto", "stock", "1f1b", "zb-h1")


OPTIONS: Final = (
    Option(
        "linears",
        True,
        "Compute sequence-parallel linears of the local specification with the operators of feature tp_linear.",
        experimental=(True,),
    ),
    Option(
        "schedule",
        DEFAULT_SCHEDULE,
        "Order of GEMMs and collectives in these linears, one of the schedules of feature tp_linear. bulk sums as "
        "Megatron does; on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=1, Megatron hides as much and computes the linears.",
        choices=SCHEDULE_NAMES,
    ),
    Option(
        "min_linear_gflop",
        512,
        "On GPUs, Megatron computes linears whose GEMM has fewer billions of operations on a rank, unless their weight "
        "gradients are delayed: the host takes longer for ours. 0: no such linears.",
        parse=make_count_parser("a number of billions of operations, 0 or more"),
        values="billions of operations",
    ),
    Option(
        "chunks",
        4,
        "The chunks into which schedule chunk splits a GEMM; fewer if the rows do not divide.",
        parse=make_count_parser("a number of chunks, 1 or more", least=1),
        values="a number of chunks",
    ),
    Option(
        "regather",
        True,
        "Keep this rank's shard of a gathered input for backward, and gather it again there, as Megatron does. false: "
        "keep the gathered input, which takes memory and avoids a collective.",
    ),
    Option(
        "ordered_grad_reduce",
        True,
        "Reduce gradient buckets in one order, the same on all ranks. A gradient that comes after the start of its "
        "bucket's reduction is an error.",
    ),
    Option(
        "early_param_gather",
        True,
        "With overlap_param_gather, start the all-gathers of all buckets at the end of step(). A reader of a parameter "
        "waits for its bucket.",
    ),
    Option(
        "pipeline_schedule",
        "auto",
        "Run pipelines without interleaving by the engine of feature pipeline, whose receives start early. The values "
        "say when a stage computes the weight gradients of its linears. 1f1b: after the start of the send of its input "
        "gradient. zb-h1: also in the bubble, within the memory of 1F1B's first stage. auto: as 1f1b; in the backward "
        "with tensor parallelism. stock: Megatron runs everything.",
        choices=PIPELINE_SCHEDULES,
        experimental=("zb-h1",),
    ),
)
