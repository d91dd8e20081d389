"""Traces of ``torch.profiler``: one file a process, exact times, and the kind of each event."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from ovpatch.exit_codes import ExitCode

Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Intervals:
    """A set of points in time, as half-open intervals in nanoseconds; made by :meth:`union_of`.

    Sums of durations would count concurrent events twice, and floats of microseconds since the epoch are exact to a
    quarter of one only; hence sets of integers.
    """

    # Disjoint ``(start, end)`` with ``start < end``, in order; no two of them touch.
    spans: tuple[Span, ...] = ()

    @classmethod
    def union_of(cls, spans: Iterable[Span]) -> Intervals:
        """Return the union of spans in any order; a span that ends where it starts, or before, is empty."""
        merged: list[Span] = []
        for start, end in sorted(spans):
            if start >= end:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        return cls(tuple(merged))

    @property
    def total(self) -> int:
        """Nanoseconds in the set."""
        return sum(end - start for start, end in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.union_of((*self.spans, *other.spans))

    def __and__(self, other: Intervals) -> Intervals:
        return Intervals(tuple(_common(self.spans, other.spans)))

    def __sub__(self, other: Intervals) -> Intervals:
        if not self.spans:
            return self
        return self & other.find_gaps(self.spans[0][0], self.spans[-1][1])

    def clip(self, start: int, end: int) -> Intervals:
        """Return the part from ``start`` up to ``end``."""
        return self & Intervals.union_of([(start, end)])

    def find_gaps(self, start: int, end: int) -> Intervals:
        """Return the part of ``start`` up to ``end`` that is not in the set."""
        inside = self.clip(start, end).spans
        edges = [(start, start), *inside, (end, end)]
        return Intervals(tuple((a, b) for (_, a), (b, _) in pairwise(edges) if a < b))


def _common(left: Sequence[Span], right: Sequence[Span]) -> Iterator[Span]:
    """Yield the intersection of two ordered lists of disjoint spans, in one pass over both."""
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            yield start, end
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1


#: Categories of the events that are read; a trace has a dozen more.
OPS: Final = ("cpu_op",)
ANNOTATIONS: Final = ("user_annotation", "gpu_user_annotation")
LAUNCHES: Final = ("cuda_runtime", "cuda_driver")
DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_USED: Final = frozenset((*OPS, *ANNOTATIONS, *LAUNCHES, *DEVICE))

#: Key of a merged trace, which is not the trace of one process.
MERGED: Final = "ovpatchMerged"

_GZIP: Final = b"\x1f\x8b"


class TraceError(ValueError):
    """A file that cannot be used as a trace; the text names it and ends with the remedy."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event with a duration."""

    # For example ``aten::mm``, a kernel's name or an annotation's text.
    name: str
    # One of ``OPS``, ``ANNOTATIONS``, ``LAUNCHES`` and ``DEVICE``.
    category: str
    # Process on the host, or number of the device.
    pid: int | str
    # Thread on the host, or stream of the device.
    tid: int | str
    # Nanoseconds since the epoch.
    start: int
    end: int
    # The profiler's arguments.
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """The trace of one process."""

    # The file of the trace.
    path: Path
    # Rank in the default group; None if neither the file nor its name has it.
    rank: int | None
    # Name of the machine, "" if unknown.
    host: str
    # The events, by start.
    events: tuple[TraceEvent, ...]
    # Start of the first event of any kind, nanoseconds since the epoch.
    first: int

    def select_events(self, *categories: str) -> Iterator[TraceEvent]:
        """Yield the events of some categories, by start."""
        return (event for event in self.events if event.category in categories)


def load_trace(path: Path) -> dict[str, Any]:
    """Return the JSON of a trace, packed by gzip or not; raise TraceError if it cannot be read or is not a trace.

    Numbers with a fraction become :class:`~decimal.Decimal`: floats of microseconds since the epoch lose digits. NaN
    and infinities, which JSON lacks, become text.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw.startswith(_GZIP) else raw
        data = json.loads(text, parse_float=Decimal, parse_constant=str, strict=False)
    except OSError as error:
        raise TraceError(
            f"{path}: {error.strerror or error}. Name a trace that torch.profiler exported."
        ) from error
    except (ValueError, EOFError, zlib.error) as error:
        raise TraceError(
            f"{path} is not complete JSON ({error}). Its process probably ended while it was "
            "written: record it again."
        ) from error
    data = {"traceEvents": data} if isinstance(data, list) else data
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise TraceError(
            f"{path} has no traceEvents. Name a file that torch.profiler's export_chrome_trace() "
            "wrote."
        )
    if MERGED in data:
        raise TraceError(
            f"{path} holds all ranks, merged by ovpatch. Name the raw traces: the folders next to "
            "it."
        )
    return data


def read_trace(path: Path) -> Trace:
    """Read a trace; raise TraceError if it cannot be read or has neither operators nor device activity."""
    data = load_trace(path)
    try:
        zero = get_time_base(data)
        events = sorted(_events(data, zero), key=lambda event: (event.start, -event.end))
        times = (event["ts"] for event in data["traceEvents"] if event.get("ph") == "X")
        rank, first = find_rank(data, path), zero + to_nanoseconds(min(times, default=0))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise TraceError(
            f"{path} has an event that cannot be understood ({error!r}). Record it again."
        ) from error
    if not any(event.category in (*OPS, *DEVICE) for event in events):
        raise TraceError(
            f"{path} holds no ops and no kernels. Record with ProfilerActivity.CPU, and .CUDA on "
            "GPUs."
        )
    return Trace(
        path, rank, str(data.get("hostName") or data.get("host_name") or ""), tuple(events), first
    )


def _events(data: Mapping[str, Any], zero: int) -> Iterator[TraceEvent]:
    for raw in data["traceEvents"]:
        if raw.get("ph") != "X" or raw.get("cat") not in _USED:
            continue
        start = zero + to_nanoseconds(raw["ts"])
        end = start + to_nanoseconds(raw.get("dur", 0))
        yield TraceEvent(
            raw["name"], raw["cat"], raw["pid"], raw["tid"], start, end, raw.get("args") or {}
        )


def to_nanoseconds(microseconds: int | Decimal) -> int:
    """Return a time of a trace as an integer; traces have three decimals."""
    return round(microseconds * 1000)


def get_time_base(data: Mapping[str, Any]) -> int:
    """Return the base of the trace's times, in nanoseconds since the epoch; 0 for older versions of torch."""
    return int(data.get("baseTimeNanoseconds", 0))


def find_rank(data: Mapping[str, Any], path: Path) -> int | None:
    """Return the rank from the trace, or else from its file's name (``rank3.json``, ``trace_3.json``)."""
    information = data.get("distributedInfo") or {}
    if "rank" in information:
        return int(information["rank"])
    found = re.search(r"rank[-_.]?(\d+)", path.name) or re.search(
        r"(?<!\d)(\d{1,5})\.json", path.name
    )
    return int(found[1]) if found else None


class DeviceTimeKind(str, Enum):
    """Kind of a device's time, by the names of torch, NCCL and CUPTI.

    Communication: NCCL's kernels, kernels on symmetric memory, copies between peers. Copy: between host and device; it
    hides no communication and is not hidden. Compute: everything else, with copies and memsets within the device. A
    kernel that computes and communicates at once is compute: its communication is hidden in it.
    """

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"


_NCCL: Final = re.compile(r"^(void )?(nccl|rccl|mscclKernel)")
#: torch's kernels on symmetric memory, such as multimem_all_reduce_kernel, two_shot_all_reduce_kernel, barrier_kernel;
#: NVSHMEM's, such as alltoall_on_stream_kernel; and ovpatch's pure communication kernel, symm_all_to_all_kernel.
_SYMMETRIC: Final = re.compile(
    r"\b(multimem_\w+|(one|two)_?shot_?\w+|(barrier|put_signal|wait_signal|symm_\w+)_kernel|\w+_on_stream_kernel\w*|"
    r"nvshmem\w*)",
    re.IGNORECASE,
)
# In this order: reduce_scatter contains the word reduce.
_SHAPES: Final = (
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send/recv"),
    # The names of NVSHMEM begin here and end with sync.
    ("fcollect", "all_gather"),
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


def classify_event(event: TraceEvent, also: re.Pattern[str] | None = None) -> DeviceTimeKind:
    """Classify an event of a device; ``also`` is the user's pattern of further communication kernels."""
    if also is not None and also.search(event.name):
        return DeviceTimeKind.COMMUNICATION
    # CUPTI's names are like `Memcpy DtoD (Device -> Device)`; arrays, `A`, count as devices.
    if event.category == "gpu_memcpy":
        if "PtoP" in event.name:
            return DeviceTimeKind.COMMUNICATION
        return (
            DeviceTimeKind.COPY
            if "H" in event.name.removeprefix("Memcpy ")[:4]
            else DeviceTimeKind.COMPUTE
        )
    if event.category == "kernel" and (_NCCL.match(event.name) or _SYMMETRIC.search(event.name)):
        return DeviceTimeKind.COMMUNICATION
    return DeviceTimeKind.COMPUTE


def name_collective(event: TraceEvent) -> str:
    """Return the collective of a device's communication, for example ``nccl all_reduce``."""
    if event.category == "gpu_memcpy":
        return "peer copy"
    if _NCCL.match(event.name):
        said = str(event.args.get("Collective name", ""))
        return f"nccl {find_collective_name(said) or find_collective_name(event.name.partition('(')[0]) or 'other'}"
    symmetric = _SYMMETRIC.search(event.name)
    if symmetric:
        return f"symmetric memory {find_collective_name(symmetric[0]) or 'other'}"
    return event.name.partition("(")[0].partition("<")[0]


def find_collective_name(name: str) -> str:
    """Return the collective in a name, in the spelling of torch.distributed; "" for none."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((shape for word, shape in _SHAPES if word in plain), "")


def name_cpu_collective(event: TraceEvent) -> str:
    """Return the collective of an annotation on the CPU, for example ``gloo all_reduce``; "" for none."""
    found = _ON_CPU.match(event.name) if event.category == "user_annotation" else None
    return f"{found[1]} {find_collective_name(found[2]) or found[2]}" if found else ""


_PREFIX: Final = "ovpatch::"
_COLLECTIVES: Final = ("c10d::", "_c10d_functional::", "c10d_functional::")


class FeatureLabels:
    """The labelled ranges of ovpatch's features in a trace, by thread of the host or stream of the device."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self._ranges: dict[tuple[int | str, int | str], list[TraceEvent]] = defaultdict(list)
        for event in events:
            if event.name.startswith(_PREFIX):
                self._ranges[event.pid, event.tid].append(event)

    def find_label(self, pid: int | str, tid: int | str, time: int) -> str:
        """Return the innermost label around a time of a thread or stream, "" for none."""
        ranges = self._ranges.get((pid, tid), [])
        for index in range(bisect_right(ranges, time, key=lambda event: event.start) - 1, -1, -1):
            # Ranges of a thread nest, so the last one to start is the innermost.
            if time < ranges[index].end:
                return ranges[index].name
        return ""


class Launches:
    """The host's launches of device events, by correlation number.

    The profiler omits some launches, such as the driver's memsets, but not their events. Numbers follow the order of
    calls, so an omitted launch came after the recorded one with the preceding number. Without numbers, the event's
    start is the latest possible launch.
    """

    def __init__(self, trace: Trace) -> None:
        self._calls = {
            event.args["correlation"]: event
            for event in trace.select_events(*LAUNCHES)
            if "correlation" in event.args
        }
        self._numbers = sorted(number for number in self._calls if isinstance(number, int))
        self._host = FeatureLabels(trace.select_events("user_annotation"))
        self._device = FeatureLabels(trace.select_events("gpu_user_annotation"))

    def find_launch_time(self, event: TraceEvent) -> int | None:
        """Return the launch time of a device event, None if it is before the trace."""
        number = event.args.get("correlation")
        if number in self._calls:
            return self._calls[number].start
        if not self._numbers or not isinstance(number, int):
            return event.start
        before = bisect_left(self._numbers, number)
        return self._calls[self._numbers[before - 1]].start if before else None

    def find_launch_label(self, event: TraceEvent) -> str:
        """Return the label around the launch, or else around the event on its stream; "" for none."""
        call = self._calls.get(event.args.get("correlation"))
        over_launch = "" if call is None else self._host.find_label(call.pid, call.tid, call.start)
        return over_launch or self._device.find_label(event.pid, event.tid, event.start)


def find_cpu_labels(trace: Trace, collectives: Iterable[TraceEvent]) -> list[str]:
    """Return the label around the call of each collective on a backend's own thread; the collectives are by start.

    The trace does not connect the two. A backend takes its calls in order, so the n-th collective of a kind belongs to
    the n-th call of that kind, and does not start before it.
    """
    waiting: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in trace.select_events(*OPS):
        if event.name.startswith(_COLLECTIVES):
            waiting[find_collective_name(event.name.partition("::")[2])].append(event)
    labels, found = FeatureLabels(trace.select_events("user_annotation")), []
    for event in collectives:
        calls = waiting[find_collective_name(event.name.partition(":")[2])]
        call = calls.pop(0) if calls and calls[0].start <= event.start else None
        found.append("" if call is None else labels.find_label(call.pid, call.tid, call.start))
    return found


_CPU_COLLECTIVES: Final = (*_COLLECTIVES, "symm_mem::", "record_param_comms")
_FRAMES: Final = ("autograd::", "torch::autograd::")
#: Compiled code: one call for many operators.
_COMPILED: Final = ("## Call CompiledFxGraph", "triton_", "cpp_fused")


@dataclass
class _Op:
    event: TraceEvent
    inside: list[_Op] = field(default_factory=list)


def find_training_thread(trace: Trace) -> tuple[int | str, int | str]:
    """Return process and thread of the optimizer's step, or else of the most time in operators."""
    for event in trace.select_events("user_annotation"):
        if event.name.startswith("Optimizer.step#"):
            return event.pid, event.tid
    spent: dict[tuple[int | str, int | str], list[Span]] = {}
    for event in trace.select_events(*OPS):
        spent.setdefault((event.pid, event.tid), []).append((event.start, event.end))
    return max(spent, key=lambda where: Intervals.union_of(spent[where]).total)


def find_cpu_compute(trace: Trace) -> Intervals:
    """Return the time in which the training thread computes on a CPU.

    The thread computes while it is in an operator. Frames of autograd, users' functions and operators around a
    collective may wait for communication, so only the operators inside them count.
    """
    where = find_training_thread(trace)
    ops = _nested([event for event in trace.select_events(*OPS) if (event.pid, event.tid) == where])
    return Intervals.union_of(span for op in ops for span in _computing(op))


def _nested(events: Sequence[TraceEvent]) -> list[_Op]:
    """Return the outermost operators of a thread, from events by start, longer ones first."""
    outermost: list[_Op] = []
    stack: list[_Op] = []
    for event in events:
        while stack and stack[-1].event.end <= event.start:
            stack.pop()
        op = _Op(event)
        (stack[-1].inside if stack else outermost).append(op)
        stack.append(op)
    return outermost


def _computing(op: _Op) -> Iterator[Span]:
    name = op.event.name
    if name.startswith(_CPU_COLLECTIVES):
        return
    # An operator has a namespace (`aten::mm`); autograd's nodes and users' functions have none.
    is_operator = name.startswith(_COMPILED) or ("::" in name and not name.startswith(_FRAMES))
    if is_operator and not _communicates(op):
        yield op.event.start, op.event.end
        return
    for inner in op.inside:
        yield from _computing(inner)


def _communicates(op: _Op) -> bool:
    return any(
        inner.event.name.startswith(_CPU_COLLECTIVES) or _communicates(inner) for inner in op.inside
    )
