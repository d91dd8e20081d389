"""Reading what ``torch.profiler`` exports: one file a process, with exact times."""

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

# Sets of time, exact: half-open intervals with integer ends, in nanoseconds.
#
# Sums of durations count twice what happens twice at a time, and floats of microseconds since the epoch are only
# exact to a quarter of one. Hence sets, and integers.

Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Intervals:
    """A set of points in time; make it with :meth:`of`.

    Attributes:
        spans: Disjoint ``(start, end)`` with ``start < end``, in order; no two of them touch.
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Intervals:
        """Return the union of spans in any order; one that ends where it starts, or before, holds nothing."""
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
        return Intervals.of((*self.spans, *other.spans))

    def __and__(self, other: Intervals) -> Intervals:
        return Intervals(tuple(_common(self.spans, other.spans)))

    def __sub__(self, other: Intervals) -> Intervals:
        if not self.spans:
            return self
        return self & other.gaps(self.spans[0][0], self.spans[-1][1])

    def within(self, start: int, end: int) -> Intervals:
        """Return the part from ``start`` up to ``end``."""
        return self & Intervals.of([(start, end)])

    def gaps(self, start: int, end: int) -> Intervals:
        """Return what of ``start`` up to ``end`` is not in the set."""
        inside = self.within(start, end).spans
        edges = [(start, start), *inside, (end, end)]
        return Intervals(tuple((a, b) for (_, a), (b, _) in pairwise(edges) if a < b))


def _common(left: Sequence[Span], right: Sequence[Span]) -> Iterator[Span]:
    """Yield what two ordered lists of disjoint spans share, in one pass over both."""
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            yield start, end
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1


#: Categories whose events have a meaning here; a trace has a dozen more.
OPS: Final = ("cpu_op",)
ANNOTATIONS: Final = ("user_annotation", "gpu_user_annotation")
LAUNCHES: Final = ("cuda_runtime", "cuda_driver")
DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_USED: Final = frozenset((*OPS, *ANNOTATIONS, *LAUNCHES, *DEVICE))

#: Key of a merged trace, which cannot be read as that of one process.
MERGED: Final = "ovpatchMerged"

_GZIP: Final = b"\x1f\x8b"


class TraceError(ValueError):
    """A file that cannot be used as a trace; the text names it and ends with the remedy."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time.

    Attributes:
        name: For example ``aten::mm``, a kernel's name or an annotation's text.
        category: One of ``OPS``, ``ANNOTATIONS``, ``LAUNCHES`` and ``DEVICE``.
        pid: Process on the host, or number of the device.
        tid: Thread on the host, or stream of the device.
        start: Nanoseconds since the epoch.
        end: Likewise.
        args: What the profiler noted beside.
    """

    name: str
    category: str
    pid: int | str
    tid: int | str
    start: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """The trace of one process.

    Attributes:
        path: Its file.
        rank: In the default group; None if neither the file nor its name says.
        host: Name of the machine, "" if not known.
        events: All that :class:`Event` describes, by start.
        first: When the first event of any kind was, nanoseconds since the epoch.
    """

    path: Path
    rank: int | None
    host: str
    events: tuple[Event, ...]
    first: int

    def of(self, *categories: str) -> Iterator[Event]:
        """Yield the events of some categories, by start."""
        return (event for event in self.events if event.category in categories)


def load(path: Path) -> dict[str, Any]:
    """Return the JSON of a trace, packed by gzip or not.

    Numbers with a fraction become :class:`~decimal.Decimal`: as floats, microseconds since the epoch lose digits. NaN
    and infinities, which JSON has not, become text.

    Raises:
        TraceError: It cannot be read or is no trace.
    """
    try:
        data = json.loads(_text(path), parse_float=Decimal, parse_constant=str, strict=False)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}. Name a trace that torch.profiler exported.") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise TraceError(
            f"{path} is not complete JSON ({error}). Its process probably ended while it was written: record it again."
        ) from error
    data = {"traceEvents": data} if isinstance(data, list) else data
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise TraceError(f"{path} has no traceEvents. Name a file that torch.profiler's export_chrome_trace() wrote.")
    if MERGED in data:
        raise TraceError(f"{path} holds all ranks, merged by ovpatch. Name the raw traces: the folders beside it.")
    return data


def _text(path: Path) -> bytes:
    raw = path.read_bytes()
    return gzip.decompress(raw) if raw.startswith(_GZIP) else raw


def read(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: It cannot be read, is no trace, or holds neither ops nor device activity.
    """
    data = load(path)
    try:
        events = sorted(_events(data, base_of(data)), key=lambda event: (event.start, -event.end))
        rank, first = rank_of(data, path), _first(data)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise TraceError(f"{path} has an event that cannot be understood ({error!r}). Record it again.") from error
    if not any(event.category in (*OPS, *DEVICE) for event in events):
        raise TraceError(f"{path} holds no ops and no kernels. Record with ProfilerActivity.CPU, and .CUDA on GPUs.")
    return Trace(path, rank, str(data.get("hostName") or data.get("host_name") or ""), tuple(events), first)


def _events(data: Mapping[str, Any], zero: int) -> Iterator[Event]:
    for raw in data["traceEvents"]:
        if raw.get("ph") != "X" or raw.get("cat") not in _USED:
            continue
        start = zero + nanoseconds(raw["ts"])
        end = start + nanoseconds(raw.get("dur", 0))
        yield Event(raw["name"], raw["cat"], raw["pid"], raw["tid"], start, end, raw.get("args") or {})


def _first(data: Mapping[str, Any]) -> int:
    times = (event["ts"] for event in data["traceEvents"] if event.get("ph") == "X")
    return base_of(data) + nanoseconds(min(times, default=0))


def nanoseconds(microseconds: int | Decimal) -> int:
    """Return a time of a trace as an integer; traces have three decimals."""
    return round(microseconds * 1000)


def base_of(data: Mapping[str, Any]) -> int:
    """Return what the trace's times count from, in nanoseconds since the epoch; older versions have no such base."""
    return int(data.get("baseTimeNanoseconds", 0))


def rank_of(data: Mapping[str, Any], path: Path) -> int | None:
    """Return the rank that the trace, or else its file's name (``rank3.json``, ``trace_3.json``), says."""
    information = data.get("distributedInfo") or {}
    if "rank" in information:
        return int(information["rank"])
    found = re.search(r"rank[-_.]?(\d+)", path.name) or re.search(r"(?<!\d)(\d{1,5})\.json", path.name)
    return int(found[1]) if found else None


# What a device does in an event, and which collective that is, by the names that torch, NCCL and CUPTI give.
#
# [Note: kinds of device time] Communication: NCCL's kernels, kernels on symmetric memory, copies between peers. Copy:
# between host and device. It neither computes nor talks to other ranks, so it hides nothing and is not hidden; time
# in which there is only that has a column of its own. Compute: everything else, copies and memsets within the device
# included. A kernel that computes and communicates at once is compute: its communication is hidden in it, and no
# trace can tell how well. Where the names below do not reach, a pattern of the user's decides.


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


# Which feature's label stands over the launch of an event on a device, or of a collective on a CPU thread.

_PREFIX: Final = "ovpatch::"
_COLLECTIVES: Final = ("c10d::", "_c10d_functional::", "c10d_functional::")


class Labels:
    """The ranges of ovpatch's features in a trace, on each thread of the host and each stream of the device."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._ranges: dict[tuple[int | str, int | str], list[Event]] = defaultdict(list)
        for event in events:
            if event.name.startswith(_PREFIX):
                self._ranges[event.pid, event.tid].append(event)
        self._starts = {where: [event.start for event in ranges] for where, ranges in self._ranges.items()}

    def at(self, pid: int | str, tid: int | str, time: int) -> str:
        """Return the innermost label that stands over a time of a thread or stream, "" if none does."""
        ranges = self._ranges.get((pid, tid), [])
        for index in range(bisect_right(self._starts.get((pid, tid), []), time) - 1, -1, -1):
            if time < ranges[index].end:  # ranges of a thread nest: of those around a time, the last to start is inside
                return ranges[index].name
        return ""


class Launches:
    """What the host did to have the device do something.

    [Note: launches that are not in the trace] The profiler leaves out some calls, such as the driver's memsets, though
    what they launched is there. Numbers are given out in the order of calls, so such a call was made after the
    recorded one with the number before its own. Where nothing has a number, a launch was at its event's start at the
    latest.
    """

    def __init__(self, trace: Trace) -> None:
        self._calls = {event.args["correlation"]: event for event in trace.of(*LAUNCHES) if "correlation" in event.args}
        self._numbers = sorted(number for number in self._calls if isinstance(number, int))
        self._host, self._device = Labels(trace.of("user_annotation")), Labels(trace.of("gpu_user_annotation"))

    def time_of(self, event: Event) -> int | None:
        """Return when an event of the device was launched, None if that was before the trace began.

        See [Note: launches that are not in the trace].
        """
        number = event.args.get("correlation")
        if number in self._calls:
            return self._calls[number].start
        if not self._numbers or not isinstance(number, int):
            return event.start
        before = bisect_left(self._numbers, number)
        return self._calls[self._numbers[before - 1]].start if before else None

    def label_of(self, event: Event) -> str:
        """Return the label over the launch, or else over the event on its stream; "" if there is none."""
        call = self._calls.get(event.args.get("correlation"))
        over_launch = "" if call is None else self._host.at(call.pid, call.tid, call.start)
        return over_launch or self._device.at(event.pid, event.tid, event.start)


def labels_on_cpu(trace: Trace, collectives: Iterable[Event]) -> list[str]:
    """Find the label over the call of each collective that ran on a backend's own thread.

    Nothing in the trace ties the two together. A backend takes its calls in their order, so the first of a kind that
    ran belongs to the first of that kind that was called, and not before that.

    Args:
        trace: The whole.
        collectives: The annotations of the backend's threads, by start.
    """
    waiting: dict[str, list[Event]] = defaultdict(list)
    for event in trace.of(*OPS):
        if event.name.startswith(_COLLECTIVES):
            waiting[shape_of(event.name.partition("::")[2])].append(event)
    labels, found = Labels(trace.of("user_annotation")), []
    for event in collectives:
        calls = waiting[shape_of(event.name.partition(":")[2])]
        call = calls.pop(0) if calls and calls[0].start <= event.start else None
        found.append("" if call is None else labels.at(call.pid, call.tid, call.start))
    return found


# What the training thread of a CPU run computed.
#
# [Note: compute on a CPU] The thread computes while it is in an operator, not in what stands around operators: frames
# of autograd run the hooks of others, which may wait for communication, and so may a user's autograd function; there
# only the operators inside count. An operator with a collective inside counts without it, for the same reason.
# Waiting itself leaves no trace: it is what remains.

_CPU_COLLECTIVES: Final = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::", "record_param_comms")
_FRAMES: Final = ("autograd::", "torch::autograd::")
#: Compiled code, which is one call for many operators.
_COMPILED: Final = ("## Call CompiledFxGraph", "triton_", "cpp_fused")


@dataclass
class _Op:
    event: Event
    inside: list[_Op] = field(default_factory=list)


def training_thread(trace: Trace) -> tuple[int | str, int | str]:
    """Return process and thread that stepped the optimizer, or else that spent most time in operators."""
    for event in trace.of("user_annotation"):
        if event.name.startswith("Optimizer.step#"):
            return event.pid, event.tid
    spent: dict[tuple[int | str, int | str], list[Span]] = {}
    for event in trace.of(*OPS):
        spent.setdefault((event.pid, event.tid), []).append((event.start, event.end))
    return max(spent, key=lambda where: Intervals.of(spent[where]).total)


def compute(trace: Trace) -> Intervals:
    """Return when the training thread computed; see [Note: compute on a CPU]."""
    where = training_thread(trace)
    ops = _nested([event for event in trace.of(*OPS) if (event.pid, event.tid) == where])
    return Intervals.of(span for op in ops for span in _computing(op))


def _nested(events: Sequence[Event]) -> list[_Op]:
    """Return the outermost operators of a thread; events come by start, the longer first."""
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
    if op.event.name.startswith(_CPU_COLLECTIVES):
        return
    if _is_operator(op.event.name) and not _communicates(op):
        yield op.event.start, op.event.end
        return
    for inner in op.inside:
        yield from _computing(inner)


def _is_operator(name: str) -> bool:
    """Operators have a namespace (``aten::mm``); autograd's nodes (``MulBackward0``) and users' functions have none."""
    return name.startswith(_COMPILED) or ("::" in name and not name.startswith(_FRAMES))


def _communicates(op: _Op) -> bool:
    return any(inner.event.name.startswith(_CPU_COLLECTIVES) or _communicates(inner) for inner in op.inside)
