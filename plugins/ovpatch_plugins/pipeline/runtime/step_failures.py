"""Reports of failed steps among ranks, through the stores of their groups."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from ovpatch.overlap.comm.consensus import agree_on_name
from ovpatch.overlap.comm.host_barrier import HostBarrier
from ovpatch.overlap.comm.lifetimes import group_state, group_store, group_timeout_s, unwrap_store

# The store keeps the start of a report alone, in characters. The rank's own output has the full error.
_LONGEST_TEXT: Final = 500
# Peers have all messages when this wait starts.
_READERS_TIMEOUT_S: Final = 10.0


class PipelineRankError(RuntimeError):
    """The error that another rank of the pipeline failed; the message names the rank.

    Attributes:
        failure: The report for ranks that do not know of the failure.
    """

    failure = ""


def make_rank_error(failure: str) -> PipelineRankError:
    """Return the error of a step that failed on another rank.

    Args:
        failure: The rank that failed, and the reason.
    """
    made = PipelineRankError(
        f"ovpatch: the pipeline's step failed: {failure.rstrip('.')}. Gradients of this step are "
        "not valid on any rank. Call optimizer.zero_grad() before the next step, or correct the "
        "error named here."
    )
    made.failure = failure
    return made


class StepFailures:
    """The first failure in each step of a pipeline, as all its ranks read it.

    The store may end with the rank that hosts it, and that rank may exit right after a step that its peers still
    finish. If it failed in the step, it first waits until they have read its report. So a closed store had no
    report to read.

    Args:
        group: The pipeline's group. All its ranks make this together.

    Attributes:
        step: Number of the step among all of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._name = name_keys(group, "pipeline failures")
        self.step = 0

    def publish(self, text: str) -> None:
        """Report a failure to peers, before any later message."""
        store = group_store(self._group)
        with suppress(dist.DistNetworkError):
            if store is not None:
                store.set(self._key(), text[:_LONGEST_TEXT])
                # set() does not wait for the store, and a message to a peer may overtake it.
                store.get(self._key())

    def read(self) -> str:
        """Return the rank that failed in this step, and the reason, or ""."""
        store, key = group_store(self._group), f"{self._name}/{self.step}"
        with suppress(dist.DistNetworkError):
            if store is not None and store.check([key]):
                text = store.get(key).decode()
                store.set(f"{key}/read by {self._group.rank()}", "")
                return text
        return ""

    def wait_for_readers(self) -> None:
        """Wait up to ``_READERS_TIMEOUT_S`` until peers have read a failure, if this rank hosts the store."""
        store, key = group_store(self._group), self._key()
        # torchrun's agent hosts a store that outlives the ranks.
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if (
            store is None
            or by_agent
            or dist.get_rank()
            or not isinstance(unwrap_store(store), dist.TCPStore)
        ):
            return
        peers = [rank for rank in range(self._group.size()) if rank != self._group.rank()]
        with suppress(dist.DistStoreError):
            store.wait(
                [f"{key}/read by {rank}" for rank in peers], timedelta(seconds=_READERS_TIMEOUT_S)
            )

    def _key(self) -> str:
        return f"{self._name}/{self.step}"


class Replicas:
    """The replicas of a stage, which decide together whether they reduce its gradients.

    Each replica is a rank of another pipeline, and knows only the failures in that pipeline. A replica that
    reduced alone would wait for replicas that do not reduce.

    Args:
        groups: Groups over which the stage's gradients are reduced, in one order on all ranks. All their ranks make
            this together.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._votes = [Vote.for_replicas(group) for group in groups if group.size() > 1]

    def decide(self, failure: str) -> str:
        """Decide once per step, together with all replicas; return the reason not to reduce, or "".

        Args:
            failure: The reason for which this rank does not reduce, or "". If there is one, this rank waits for no
                peer until :meth:`finish`.

        Raises:
            RuntimeError: Some replicas do not arrive within the group's timeout.
        """
        for vote in self._votes:
            failure = vote.take(failure)
        return failure

    def finish(self) -> None:
        """Wait for the replicas whose votes this rank has skipped.

        Without this wait, a collective would meet a collective of another step.

        Raises:
            RuntimeError: Some replicas do not arrive within the group's timeout.
        """
        for vote in self._votes:
            vote.finish()


class Vote:
    """The decisions of one group, whose ranks make this together.

    Args:
        group: The process group.
        topic: The subject of the decisions.

    Attributes:
        name: A prefix for keys in the store, which no other vote has.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str) -> None:
        self.name = name_keys(group, topic)
        self._barrier = HostBarrier(group, self.name)
        store = group_store(group)
        assert store is not None, "the process group was destroyed"
        self._store = store
        self._number = 0
        # Keys of failures that this rank deletes at its next successful vote.
        self._written: list[str] = []
        # The reason for which a rank has left all later decisions, or "", and its key.
        self._left_key = f"{self.name}/left"
        self._left = ""

    @classmethod
    def for_replicas(cls, group: dist.ProcessGroup) -> Vote:
        """Return the vote of the replicas in a group."""
        make = functools.partial(cls, group, "pipeline replicas")
        return group_state(group).get_or_create(("pipeline", "replicas"), make)

    def take(self, failure: str) -> str:
        """Decide; return the failure that a rank knows of, or "".

        Args:
            failure: The failure that this rank knows of, or "". If it knows of a failure, it waits for no peer until
                :meth:`finish` or the next decision, because peers may come much later.

        Raises:
            RuntimeError: Some ranks do not arrive within the group's timeout.
        """
        if self._left:
            return self._left
        key = self._key()
        try:
            if failure:
                self.announce(failure)
                self._barrier.defer_wait()
            else:
                self._barrier.wait()
        except RuntimeError:
            self._left = self._read(self._left_key)
            if not self._left:
                raise
            return self._left
        self._number += 1
        if failure:
            self._written.append(key)
            return failure
        failure = self._read(key)
        # All ranks have taken part since the keys were written, so they have read them.
        while self._written:
            self._store.delete_key(self._written.pop())
        if failure:
            self._written.append(key)
        return failure

    def finish(self) -> None:
        """Wait for the ranks whose votes this rank has skipped."""
        self._barrier.finish()

    def announce(self, failure: str) -> None:
        """Report a failure ahead of :meth:`take`."""
        self._store.compare_set(self._key(), "", failure[:_LONGEST_TEXT])

    def read(self) -> str:
        """Return the failure that a rank has announced for the next :meth:`take`, or ""."""
        return self._read(self._key())

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def leave(self, failure: str) -> None:
        """Leave all later decisions, so that peers do not wait for this rank; they then fail with ``failure``."""
        # The key differs from the key of the vote, because a rank may decide by the announcement and wait for this rank
        # in a later decision.
        self._store.set(self._left_key, failure[:_LONGEST_TEXT])
        self.announce(failure)
        self._left = failure
        self._barrier.abort()

    def _key(self) -> str:
        return f"{self.name}/{self._number}"


def name_keys(group: dist.ProcessGroup, topic: str) -> str:
    """Return a new prefix for keys in the group's store, the same on all ranks. All ranks of the group call this.

    The store may hold keys of an earlier group of the same name.
    """
    if group.size() == 1:
        return f"ovpatch/{topic}"
    return f"ovpatch/{topic}/{agree_on_name(group, topic, timeout_s=group_timeout_s(group))}"
