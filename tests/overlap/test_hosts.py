"""The layout of hosts, and the order in which reductions over hosts start their stages."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from ovpatch.overlap.comm import hosts
from ovpatch.overlap.comm.hosts import HostGroups, HostLayout


class FakeWork:
    """A collective that ends when the test sets its flag, or when it is waited on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_over = False
        self.error = error

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True
        if self.error is not None:
            raise self.error


class Reductions:
    """Reductions of three stages, and the order in which their stages started."""

    def __init__(self) -> None:
        self.groups = HostGroups.__new__(HostGroups)
        self.groups._started = deque()
        self.groups._lock = threading.RLock()
        self.groups._failure = None
        self.started: list[tuple[str, int]] = []
        self.works: dict[tuple[str, int], FakeWork] = {}

    def start(self, name: str, error: Exception | None = None) -> Any:
        def stage(number: int) -> list[FakeWork]:
            self.started.append((name, number))
            self.works[name, number] = FakeWork(error if number == 1 else None)
            return [self.works[name, number]]

        return self.groups.start([lambda number=number: stage(number) for number in range(3)])


def test_a_stage_starts_after_the_stage_before_it_and_after_that_stage_of_earlier_reductions():
    reductions = Reductions()
    reductions.start("a")
    reductions.start("b")
    reductions.works["b", 0].is_over = True
    reductions.start("c")
    assert reductions.started == [("a", 0), ("b", 0), ("c", 0)], "b must wait for a's second stage"
    reductions.works["a", 0].is_over = True
    last = reductions.start("d")
    assert reductions.started[3:] == [("a", 1), ("b", 1), ("d", 0)]
    last.wait()
    for stage in range(3):
        assert [name for name, number in reductions.started if number == stage] == [
            "a",
            "b",
            "c",
            "d",
        ]
    assert not reductions.groups._started


def test_a_wait_starts_its_own_stages_and_no_stage_of_a_later_reduction():
    reductions = Reductions()
    first = reductions.start("a")
    reductions.start("b")
    first.wait()
    assert first.is_completed()
    assert reductions.started == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]


def test_after_a_failed_stage_no_later_stage_starts():
    reductions = Reductions()
    first, second = (
        reductions.start("a", RuntimeError("Connection closed by peer")),
        reductions.start("b"),
    )
    for reduction in (first, second, first):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            reduction.wait()
    assert ("a", 2) not in reductions.started
    with pytest.raises(
        RuntimeError, match=r"earlier reduction has failed: Connection.*Restart all ranks"
    ):
        reductions.start("c")
    assert ("c", 0) not in reductions.started


class StreamWork:
    """A collective for which a stream waits; it notes the stream."""

    def __init__(self, launches: StreamLaunches, name: str) -> None:
        self.launches = launches
        self.name = name

    def wait(self) -> None:
        self.launches.events.append(f"{self.launches.current} waits for {self.name}")


class StreamLaunches:
    """The collectives that the host launches, and the streams that wait for them, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = "script"
        self.groups = HostGroups.__new__(HostGroups)
        self.groups._streams = {}

    def launch(self, name: str) -> list[StreamWork]:
        self.events.append(f"{name} follows {self.current}")
        return [StreamWork(self, name)]

    @contextmanager
    def switch(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def test_the_host_launches_all_stages_at_once_and_another_stream_waits_between_them():
    launches = StreamLaunches()
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    with (
        mock.patch.object(hosts, "unwatched_stream", launches.switch),
        mock.patch.object(torch.cuda, "Stream", side_effect=["side", "second"]),
    ):
        reductions = [
            launches.groups.start_on_streams(
                [
                    lambda name=name: launches.launch(f"{name} within"),
                    lambda name=name: launches.launch(f"{name} across"),
                ],
                (tensor,),
            )
            for name in "ab"
        ]
    del tensor
    assert launches.events == [
        "a within follows script",
        "side waits for a within",
        "a across follows side",
        "b within follows script",
        "side waits for b within",
        "b across follows side",
    ]
    launches.events.clear()
    reductions[0].wait()
    assert alive() is not None, "b still reads it"
    launches.current = "another stream"
    reductions[1].wait()
    assert alive() is None
    # The end of a backward may wait on another stream than its middle.
    reductions[0].wait()
    assert launches.events == [
        "script waits for a across",
        "another stream waits for b across",
        "another stream waits for a across",
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("aabb", (((0, 1), (2, 3)), 2, True, True)),
        ("abab", (((0, 2), (1, 3)), 2, True, True)),
        ("aaab", (((0, 1, 2), (3,)), 1, False, True)),
        ("aaaa", (((0, 1, 2, 3),), 4, True, False)),
        ("abcd", (((0,), (1,), (2,), (3,)), 1, True, False)),
    ],
)
def test_layouts(names, expected):
    layouts = [HostLayout.of(list(names), rank) for rank in range(4)]
    for rank, layout in enumerate(layouts):
        assert (layout.ranks, layout.num_lanes, layout.is_even, layout.is_hierarchical) == expected
        assert layout.own_ranks[layout.place] == rank


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1, 1), True),
        ((1, 1, 1, 1), True),
        ((2, 1), True),
        ((2, 2), True),
        ((2, 2, 2, 2), True),
        # Eight ranks send 16 eighths over a link, and their ring 14.
        ((4, 4), False),
        # Without a link, shared memory decides.
        ((4,), False),
    ],
    ids=str,
)
def test_terms_are_exchanged_where_that_sends_less_over_a_link(counts, expected):
    names = [f"host{host}" for host, count in enumerate(counts) for _ in range(count)]
    assert HostLayout.of(names, 0).sends_less_by_exchange() == expected
