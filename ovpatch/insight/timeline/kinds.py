"""What a device does in an event, and which collective that is, by the names that torch, NCCL and CUPTI give.

[Note: kinds of device time]
    Communication: NCCL's kernels, kernels on symmetric memory, copies between peers.
    Copy: between host and device. It neither computes nor talks to other ranks, so it hides nothing and is not hidden;
    time in which there is only that has a column of its own.
    Compute: everything else, copies and memsets within the device included.
A kernel that computes and communicates at once is compute: its communication is hidden in it, and no trace can tell how
well. Where the names below do not reach, a pattern of the user's decides.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from ovpatch.insight.timeline.trace import Event


class Kind(str, Enum):
    """What a device is busy with."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"


_NCCL: Final = re.compile(r"^(void )?(nccl|rccl|mscclKernel)")
#: torch's kernels on symmetric memory: multimem_all_reduce_kernel, two_shot_all_reduce_kernel, barrier_kernel, …; and
#: NVSHMEM's own, of which those that its host functions launch have names such as alltoall_on_stream_kernel; and those
#: of the features here that do nothing else, symm_all_to_all_kernel.
_SYMMETRIC: Final = re.compile(
    r"\b(multimem_\w+|(one|two)_?shot_?\w+|(barrier|put_signal|wait_signal|symm_\w+)_kernel|\w+_on_stream_kernel\w*|"
    r"nvshmem\w*)",
    re.IGNORECASE,
)
_SHAPES: Final = (  # in this order: a reduce_scatter holds the word reduce
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send/recv"),
    ("fcollect", "all_gather"),  # these three as NVSHMEM says it
    ("rdxn", "all_reduce"),
    ("sync", "barrier"),
    ("barrier", "barrier"),
    ("signal", "signal"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("send", "send/recv"),
    ("recv", "send/recv"),
    ("reduce", "reduce"),
)
#: Backends of torch.distributed that annotate their own threads on CPU.
_ON_CPU: Final = re.compile(r"^(gloo|mpi|ucc):(\w+)$")


def kind_of(event: Event, also: re.Pattern[str] | None = None) -> Kind:
    """Classify an event of a device; see [Note: kinds of device time].

    Args:
        event: One of the categories ``trace.DEVICE``.
        also: Kernels whose names it finds communicate, too.
    """
    if also is not None and also.search(event.name):
        return Kind.COMMUNICATION
    if event.category == "gpu_memcpy":
        return _copy(event.name)
    if event.category == "kernel" and (_NCCL.match(event.name) or _SYMMETRIC.search(event.name)):
        return Kind.COMMUNICATION
    return Kind.COMPUTE


def _copy(name: str) -> Kind:
    """CUPTI's names: ``Memcpy DtoD (Device -> Device)``; arrays (``AtoD``) are on the device as well."""
    if "PtoP" in name:
        return Kind.COMMUNICATION
    return Kind.COPY if "H" in name.removeprefix("Memcpy ")[:4] else Kind.COMPUTE


def collective_of(event: Event) -> str:
    """Name the collective of communication on a device, for example ``nccl all_reduce``."""
    if event.category == "gpu_memcpy":
        return "peer copy"
    if _NCCL.match(event.name):
        said = str(event.args.get("Collective name", ""))
        return f"nccl {shape_of(said) or shape_of(event.name.partition('(')[0]) or 'other'}"
    symmetric = _SYMMETRIC.search(event.name)
    if symmetric:
        return f"symmetric memory {shape_of(symmetric[0]) or 'other'}"
    return event.name.partition("(")[0].partition("<")[0]


def shape_of(name: str) -> str:
    """Return the collective that a name speaks of, in the spelling of torch.distributed; "" if it speaks of none."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((shape for word, shape in _SHAPES if word in plain), "")


def collective_on_cpu(event: Event) -> str:
    """Name the collective that an annotation on the CPU stands for, for example ``gloo all_reduce``; "" for others."""
    found = _ON_CPU.match(event.name) if event.category == "user_annotation" else None
    return f"{found[1]} {shape_of(found[2]) or found[2]}" if found else ""
