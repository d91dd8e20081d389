"""What the training thread of a CPU run computed.

[Note: compute on a CPU] The thread computes while it is in an operator, not in what stands around operators: frames of
autograd run the hooks of others, which may wait for communication, and so may a user's autograd function; there only
the operators inside count. An operator with a collective inside counts without it, for the same reason. Waiting itself
leaves no trace: it is what remains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ovpatch.insight.intervals import Intervals, Span
from ovpatch.insight.timeline.trace import OPS, Event, Trace

_COLLECTIVES: Final = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::", "record_param_comms")
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
    if op.event.name.startswith(_COLLECTIVES):
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
    return any(inner.event.name.startswith(_COLLECTIVES) or _communicates(inner) for inner in op.inside)
