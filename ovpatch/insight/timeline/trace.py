"""Reading what ``torch.profiler`` exports: one file a process, with exact times."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from ovpatch.exit_codes import ExitCode

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
