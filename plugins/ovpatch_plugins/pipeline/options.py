"""Options of the feature."""

from __future__ import annotations

from typing import Final

from ovpatch.hookspecs import Option
from ovpatch.overlap.pipelining.order_table import ORDERS, describe_orders
from ovpatch.planner.memory_limit import parse_memory_limit

AS_GIVEN: Final = "as-given"
AUTO: Final = "auto"
COPIES: Final = "copies"


OPTIONS: Final = (
    Option(
        "schedule",
        AS_GIVEN,
        "Order of the computations. as-given: that of the script's class. auto: solved from costs "
        "that are measured in the first steps, and used if it is faster in a race. All other orders "
        f"need one stage on each rank. {describe_orders()} CSV files, and other classes with several "
        "stages per rank, keep their order.",
        choices=(AS_GIVEN, AUTO, *ORDERS),
        experimental=(AUTO, *(name for name, order in ORDERS.items() if order.is_experimental)),
    ),
    Option(
        "memory_limit",
        AUTO,
        "Memory that microbatches may hold on a rank in an order of schedule=auto. 1.5x: in units "
        "of the memory that 1F1B holds on its first rank. 40GiB: a size. auto: 2x, or the memory of "
        "the order as given if that is more, within the memory that is free on each rank after the "
        "first steps, less a margin of a tenth of the device; 1x on a CPU.",
        parse=parse_memory_limit,
        values="`auto`, a multiple such as `1.5x`, or a size such as `40GiB`",
    ),
    Option(
        "delay_wgrad_compute",
        "auto",
        "When weight gradients of linears are computed. on: after the input gradient was sent, or "
        "in the W of a zero-bubble order. off: inside the backward. auto: on for stages that send an "
        "input gradient or have Ws, and for linears of tp_linear if the order has Ws.",
        choices=("auto", "on", "off"),
    ),
    Option(
        "overlap_p2p_comm",
        True,
        "Post receives ahead of the computation that reads them: two on gloo, one on NCCL. Copies "
        "need none.",
    ),
    Option(
        "p2p_transport",
        AUTO,
        "The transport of messages. c10d: torch.distributed. copies: the GPUs' copy engines, through "
        "slots in the receiver's memory, so that no kernel runs while a rank waits; for up to 8 GPUs "
        "of one host that reach each other's memory, otherwise it is an error. auto: copies if each "
        "rank of the pipeline has its own such GPU, otherwise c10d.",
        choices=(AUTO, "c10d", COPIES),
    ),
    Option(
        "variable_seq_lengths",
        False,
        "Let microbatches have other shapes than those of the first step. Each activation is sent "
        "with its shape, and no receive is started ahead. false: another shape is an error.",
    ),
    Option(
        "plan_file",
        "",
        "Where schedule=auto writes costs and the times of all orders, which it then races. "
        "ovpatch pipeline sets this.",
        values="a path",
    ),
    Option(
        "weight_stash",
        "off",
        "pipedream: the optimizers of attach_optimizer() step after the backward of each "
        "microbatch, which has the weights of its forward. Numbers differ from stock PyTorch's, "
        "because the training is asynchronous. Needs schedule=as-given or 1f1b.",
        choices=("off", "pipedream"),
        experimental=("pipedream",),
    ),
    Option(
        "forward_doubling",
        False,
        "Chimera's: in a pipeline of cut(placement='bidirectional'), two forwards run in a row, "
        "which take as long as a backward of the other direction. Less bubble, up to twice the "
        "memory of 1F1B. Other schedules keep their order.",
        experimental=(True,),
    ),
    Option(
        "gradient_accumulation_fusion",
        False,
        "Add weight gradients into p.grad inside the GEMM. This saves a pass over the gradients and "
        "rounds once where stock PyTorch rounds twice, so bits differ in bf16. Parameters with hooks "
        "are left out.",
        experimental=(True,),
    ),
)
