"""Values of a process group or another object are freed with it, and a fork is not a rank of its parent's group."""

from __future__ import annotations

import gc
import os
import weakref

import torch.distributed as dist

from ovpatch.overlap.comm import lifetimes
from ovpatch.overlap.comm.consensus import agree_on_name, check_consistent_once, gather_values
from ovpatch.overlap.comm.lifetimes import (
    attached_values,
    call_after_fork,
    drop_values,
    find_owners,
    group_state,
    group_values,
    is_destroyed,
)


class Kept:
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group


def lives() -> list[bool]:
    first, second = dist.new_group(), dist.new_group()
    tied = group_state(first).get_or_create((Kept, "tied"), lambda: Kept(first), keeps_group=True)
    free = group_state(first).get_or_create((Kept, "free"), Kept)
    again = group_state(first).get_or_create((Kept, "free"), Kept) is free
    both = [value for _, value in group_values(Kept)] == [tied, free]
    dist.destroy_process_group(first)
    first_ref = weakref.ref(first)
    group_state(second).get_or_create(Kept, lambda: Kept(second), keeps_group=True)
    only_free = [value for _, value in group_values(Kept, first)] == [free]
    found = [again, both, is_destroyed(first), only_free]
    # These are the last references.
    first = tied = None
    gc.collect()
    found += [first_ref() is None, [owner for owner, _ in group_values(Kept)] == [second]]
    drop_values(Kept)
    return [*found, not group_values(Kept)]


def test_values_end_with_their_group(ranks):
    for found in ranks(2)(lives):
        assert found == [True] * 7


class Unhashable:
    def __eq__(self, other: object) -> bool:
        return True


def test_values_end_with_their_object_even_if_all_objects_are_equal():
    first, second = Unhashable(), Unhashable()
    before = len(lifetimes._object_values)
    attached_values(first)["name"] = 1
    attached_values(second)["name"] = 2
    attached_values(second)["other name"] = 3
    assert attached_values(first) == {"name": 1}
    assert [(owner is first, value) for owner, value in find_owners("name")] == [
        (True, 1),
        (False, 2),
    ]
    del first
    assert [value for _, value in find_owners("name")] == [2]
    assert len(lifetimes._object_values) == before + 1
    del second
    assert (find_owners("other name"), len(lifetimes._object_values)) == ([], before)


def test_a_forked_child_calls_the_functions_of_objects_that_still_exist():
    reader, writer = os.pipe()
    before = len(lifetimes._after_fork_functions)
    kept, freed = Kept(), Kept()
    kept.text, freed.text = b"kept", b"freed"
    for owner in (kept, freed):
        # A function that references its owner would keep it forever.
        call_after_fork(owner, lambda found: os.write(writer, found.text))
    del owner
    del freed
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 16) == b"kept"
    del kept
    assert len(lifetimes._after_fork_functions) == before, (
        "later forks would write to the number of this pipe"
    )
    os.close(reader)
    os.close(writer)


def forked() -> list[bool]:
    state = group_state(dist.distributed_c10d._get_default_group())
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, b"1" if state.is_forked else b"0")
        os._exit(0)
    os.wait()
    found = [state.is_forked, os.read(reader, 1) == b"1"]
    os.close(reader)
    os.close(writer)
    return found


def test_a_fork_is_detected(ranks):
    assert ranks(2)(forked) == [[False, True]] * 2


def agreements() -> tuple[int, list[str]]:
    group, calls = dist.new_group(), []

    def terms() -> dict[str, int]:
        calls.append(1)
        return {"a": 1}

    for key in (1, 1, 2, 1):
        check_consistent_once(group, "topic", key, terms, remedy="")
    return len(calls), [agree_on_name(group, "name", timeout_s=100) for _ in range(2)]


def test_ranks_agree_once_per_key_and_on_unique_names(ranks):
    (count, names), (_, names_of_peer) = ranks(2)(agreements)
    assert count == 2
    assert names == names_of_peer
    assert len(set(names)) == 2


def gathered() -> list[object]:
    return gather_values(dist.new_group(), "values", {"rank": dist.get_rank()})


def test_values_of_all_ranks_are_gathered_by_rank(ranks):
    assert ranks(3)(gathered) == [[{"rank": rank} for rank in range(3)]] * 3
