"""A rank retains objects until no peer can read them."""

from __future__ import annotations

import weakref

import pytest
import torch.distributed as dist

from ovpatch.overlap.comm.lifetimes import drop_destroyed
from ovpatch.overlap.peer_rpc import retention
from ovpatch.overlap.peer_rpc.retention import FinalReads
from tests.support.gloo import destroy_group


class Owner:
    """An object that peers may read."""


def final_reads() -> list[bool]:
    """Return whether an object is retained after each of some calls, the last of which is the peer's final call."""
    group, peer = dist.group.WORLD, 1 - dist.get_rank()
    reads, owner = FinalReads(group), Owner()
    retained = weakref.ref(owner)
    assert reads.mark_final({"a": 1}) == {"a": 1}
    reads.start_final_calls(owner)
    assert reads.mark_final({"a": 1}) == {"a": 1, "last of": dist.get_rank()}
    del owner
    found = []
    for arguments in ({}, {"a": 1}, {"a": 1, "last of": peer}):
        reads.record_call(arguments)
        found.append(retained() is not None)
    return found


def early_peer() -> list[bool]:
    """Return whether an object is retained if the peer has made its final call before this rank's."""
    reads, owner = FinalReads(dist.group.WORLD), Owner()
    retained = weakref.ref(owner)
    reads.record_call({"last of": 1 - dist.get_rank()})
    reads.start_final_calls(owner)
    del owner
    return [retained() is not None]


def retained_twice() -> list[bool]:
    """Return whether a rank that retains an object again still waits for its peer's final call, and for it alone."""
    group, reads, owner = dist.new_group(), FinalReads(dist.group.WORLD), Owner()
    peer = 1 - dist.get_rank()
    retention.retain(group, owner, 2, reads)
    retention.retain(group, owner)
    awaited = retention.list_awaited_ranks(group)
    reads.record_call({"last of": peer})
    return [awaited == [peer], retention.list_awaited_ranks(group) == []]


def backwards(count: int, shortened_at: int = 9) -> list[bool]:
    """Return whether an object is retained after each of some backwards."""
    group, owner = dist.group.WORLD, Owner()
    retained = weakref.ref(owner)
    retention.retain(group, owner, count)
    del owner
    found = []
    for number in range(4):
        if number == shortened_at:
            retention.shorten_retention(group)
            found.append(retained() is not None)
        retention.release_retained(group)
        found.append(retained() is not None)
    return found


def late_peer(peer_ends_at: int) -> list[bool]:
    """Return whether an object is retained after each backward until final reads, or three backwards."""
    group, owner = dist.group.WORLD, Owner()
    retained = weakref.ref(owner)
    reads = FinalReads(group)
    reads.start_final_calls(owner, 3)
    del owner
    found = []
    for number in range(4):
        if number == peer_ends_at:
            reads.record_call({"last of": 1 - dist.get_rank()})
        retention.release_retained(group)
        found.append(retained() is not None)
    return found


def before_backward() -> list[bool]:
    """Return whether a function that raises is called once, before any later function, and the object is freed."""
    group, calls, owner = dist.new_group(), [], Owner()
    retained = weakref.ref(owner)
    retention.prepare_backward(group)
    retention.call_before_backward(group, lambda: calls.append("second"))

    def fail() -> None:
        calls.append("first")
        raise RuntimeError("fails")

    retention.call_before_backward(group, fail)
    with pytest.raises(RuntimeError, match="fails"):
        retention.prepare_backward(group)
    retention.prepare_backward(group)
    retention.prepare_backward(group)
    retention.retain(group, owner)
    del owner
    destroy_group(group)
    retention.retain(group, Owner())
    retention.call_before_backward(group, fail)
    drop_destroyed()
    return [calls == ["first", "second"], retained() is None]


def all_retained() -> dict[str, list[bool]]:
    return {
        "final reads": final_reads(),
        "early peer": early_peer(),
        "retained twice": retained_twice(),
        "one backward": backwards(1),
        "three backwards": backwards(3),
        "shortened at first": backwards(3, 0),
        "shortened later": backwards(3, 1),
        "three backwards or final reads": late_peer(9),
        "final reads after one backward": late_peer(1),
        "before backward": before_backward(),
    }


def test_objects_are_retained_as_long_as_peers_may_read_them(ranks):
    for found in ranks(2)(all_retained):
        assert found == {
            "final reads": [True, True, False],
            "early peer": [False],
            "retained twice": [True, True],
            "one backward": [False, False, False, False],
            "three backwards": [True, True, False, False],
            "shortened at first": [True, False, False, False, False],
            "shortened later": [True, True, False, False, False],
            "three backwards or final reads": [True, True, False, False],
            "final reads after one backward": [True, False, False, False],
            "before backward": [True, True],
        }
