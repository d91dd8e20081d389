"""The time that steps would take if each rank had its own core, on a machine whose cores are shared.

A rank's clock is the CPU time of its main thread. It stops while the rank waits, and jumps ahead to the time at
which the awaited message was sent, or received where the rank waits for its own send. So what other processes take of
the cores is left out, and what a schedule waits for stays in; the message itself takes no time. Stock schedules and
feature ``pipeline`` are measured equally, as both call ``ProcessGroup.send`` and ``recv``. For gloo, one thread a rank.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch.distributed as dist

Message: TypeAlias = tuple[int, int, int]
"""Sender, receiver, and number among their messages."""

Event: TypeAlias = tuple[str, Message | None, float]
"""An action of a rank (``send``, ``post``, ``wait for message``, ``wait for receiver``, ``step``), and its CPU time."""


class _Work:
    """A transfer whose wait is an event."""

    def __init__(self, work: Any, wait: Callable[[], None]) -> None:
        self._work, self._wait = work, wait

    def wait(self, *args: Any) -> Any:
        """Wait for the transfer."""
        done = self._work.wait(*args)
        self._wait()
        return done

    def is_completed(self) -> bool:
        """Return whether the transfer has ended."""
        return bool(self._work.is_completed())


class MessageClock:
    """Records what this rank does, from the start of :meth:`recording` on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._counts: Counter[tuple[int, int]] = Counter()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all messages inside the ``with`` block."""
        rank = dist.get_rank()
        send, receive = dist.ProcessGroup.send, dist.ProcessGroup.recv

        def sends(group: Any, tensors: Any, peer: int, tag: int) -> _Work:
            message = self._add("send", (rank, peer))
            return _Work(
                send(group, tensors, peer, tag), lambda: self._note("wait for receiver", message)
            )

        def receives(group: Any, tensors: Any, peer: int, tag: int) -> _Work:
            message = self._add("post", (peer, rank))
            return _Work(
                receive(group, tensors, peer, tag), lambda: self._note("wait for message", message)
            )

        self._note("step", None)
        with (
            mock.patch.object(dist.ProcessGroup, "send", sends),
            mock.patch.object(dist.ProcessGroup, "recv", receives),
        ):
            yield

    def end_step(self) -> None:
        """Note the end of a step."""
        self._note("step", None)

    def _add(self, kind: str, edge: tuple[int, int]) -> Message:
        message = (*edge, self._counts[edge])
        self._counts[edge] += 1
        self._note(kind, message)
        return message

    def _note(self, kind: str, message: Message | None) -> None:
        self.events.append((kind, message, time.thread_time()))


def replay(ranks: Sequence[Sequence[Event]]) -> list[list[float]]:
    """Return the clocks of all ranks at the ends of their steps, in seconds, by rank.

    Args:
        ranks: Events by rank; all begin at the same time.

    Raises:
        RuntimeError: A rank waits for a message that no rank sends.
    """
    clocks, done = [0.0] * len(ranks), [0] * len(ranks)
    times: dict[tuple[str, Message | None], float] = {}
    ends: list[list[float]] = [[] for _ in ranks]
    awaited = {"wait for message": "send", "wait for receiver": "post"}
    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(ranks):
            while done[rank] < len(events):
                kind, message, cpu = events[done[rank]]
                source = awaited.get(kind)
                if source is not None and (source, message) not in times:
                    break
                before = events[max(0, done[rank] - 1)][2]
                clocks[rank] = max(
                    clocks[rank] + cpu - before, times.get((source or "", message), 0.0)
                )
                times[kind, message] = clocks[rank]
                if kind == "step":
                    ends[rank].append(clocks[rank])
                done[rank], moved = done[rank] + 1, True
    if any(count < len(events) for count, events in zip(done, ranks, strict=True)):
        raise RuntimeError(
            "a rank waits for a message that no rank sends, or that was sent before the recording "
            "began"
        )
    return ends


def time_steps(step: Callable[[], object], steps: int) -> list[float]:
    """Return the ms of ``steps`` steps that follow each other, those of the slowest rank; all ranks call this."""
    dist.barrier()
    clock = MessageClock()
    with clock.recording():
        for _ in range(steps):
            step()
            clock.end_step()
    shared: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shared, clock.events)
    ends = replay(shared)
    return [1000 * max(own[number + 1] - own[number] for own in ends) for number in range(steps)]
