"""What ranks tell each other of a step that failed, through the stores of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch.distributed as dist

from ovpatch.overlap.comm.consensus import agree_on_name
from ovpatch.overlap.comm.kept_state import group_state, group_store, group_timeout_s
from ovpatch.overlap.peer_rpc.host_barrier import HostBarrier

_LONGEST_TEXT: Final = 500


class StepFailures:
    """Which rank of a pipeline failed in a step, as all its ranks know it.

    Args:
        group: The pipeline's group. All its ranks make this together.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._name = _agree_on_name(group, "pipeline failures")
        self._step = 0

    def start_step(self, step: int) -> None:
        """Begin a step, given its number among all of the group."""
        self._step = step

    def publish(self, text: str) -> None:
        """Tell the other ranks of a failure, before any message that follows."""
        store = group_store(self._group)
        if store is not None:
            store.set(self._key(), text[:_LONGEST_TEXT])
            store.get(self._key())  # set() does not wait for the store, and a message to a peer may overtake it

    def read(self) -> str:
        """Return which rank failed in this step, and why, or ""."""
        store = group_store(self._group)
        return store.get(self._key()).decode() if store is not None and store.check([self._key()]) else ""

    def _key(self) -> str:
        return f"{self._name}/{self._step}"


class Replicas:
    """The replicas of a stage, which decide together whether they reduce its gradients.

    Each is a rank of another pipeline, and knows of the failures in that one alone. One that reduced by itself would
    wait for those that do not.

    Args:
        groups: Groups over which the stage's gradients are reduced, in one order on all ranks. All their ranks make
            this together.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._votes = [_Vote.of(group) for group in groups if group.size() > 1]

    def decide(self, failure: str) -> str:
        """Wait for all replicas, each of which calls this once a step; return why they do not reduce, or "".

        Args:
            failure: Why this rank does not, or "".

        Raises:
            RuntimeError: Some do not come within the group's time-out.
        """
        for vote in self._votes:
            failure = vote.take(failure)
        return failure


class _Vote:
    """The decisions of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name = _agree_on_name(group, "pipeline replicas")
        self._barrier = HostBarrier(group, self._name)
        store = group_store(group)
        assert store is not None, "the process group was destroyed"
        self._store = store
        self._number = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> _Vote:
        return group_state(group).get_or_create(("pipeline", "replicas"), lambda: cls(group))

    def take(self, failure: str) -> str:
        """Return the first failure that a rank of the group knows of, the same text on all."""
        self._number += 1
        key = f"{self._name}/{self._number}"
        if failure:
            self._store.compare_set(key, "", failure)
        return self._store.get(key).decode() if self._barrier.wait(bool(failure)) else ""


def _agree_on_name(group: dist.ProcessGroup, topic: str) -> str:
    """Return a prefix for keys: the store may hold those of a group of this name that is gone."""
    if group.size() == 1:
        return f"ovpatch/{topic}"
    return f"ovpatch/{topic}/{agree_on_name(group, topic, timeout_s=group_timeout_s(group))}"
