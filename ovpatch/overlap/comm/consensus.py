"""Ranks compare terms through the process group's store before a feature's first collective.

One of the three ways for ranks to agree: this one blocks; ``comm.step_flags`` is an all-reduce within a step;
and ``comm.host_barrier`` synchronises hosts.
"""

from __future__ import annotations

import importlib.metadata
import json
import socket
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ovpatch.overlap.comm.lifetimes import group_state, group_timeout_s

LATE_START_S = 300.0  # for ranks that may load or build their models at different speeds
_LONGEST_PAUSE_S = 0.05  # between two polls of the store


class RankMismatchError(RuntimeError):
    """Ranks differ in their settings, or a rank takes no part. The text names ranks, difference and remedy."""


def check_consistent(
    group: dist.ProcessGroup,
    topic: str,
    terms: Mapping[str, Any],
    *,
    objection: str = "",
    timeout_s: float = 20.0,
    remedy: str = "",
) -> str:
    """Agree with all ranks of ``group`` on ``terms`` before they issue collectives of a feature.

    Every rank of the group calls this the same number of times per topic, normally the feature's name. Terms are JSON
    values. Returns "" when all ranks take part, otherwise the ``objection`` of those that cannot, the same text on
    every rank. A rank waits ``timeout_s`` for the others. The remedy is by default about settings and ranks without
    ovpatch.

    [Note: store, not collective] A rank where ovpatch is off, or set otherwise, issues other collectives than its
    peers. An agreement by collective would pair with one of those, and hang or corrupt data. In the store, a rank that
    does not answer is a missing key, which an error can name. Group rank 0 collects the terms and publishes one
    verdict, so N ranks cost N reads. A rank may time out at the moment in which rank 0 finds that all have answered:
    the verdict's key is written by compare-and-set, so all ranks go on or none does.

    Raises:
        RankMismatchError: Terms differ, or a rank did not answer in time.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return objection
    return str(_Round(group, topic, timeout_s, remedy).run(terms, objection)["objection"])


class _Agreed(set[tuple[str, Hashable]]):
    """What the ranks of one group have agreed on, by topic and key."""


def check_consistent_once(
    group: dist.ProcessGroup, topic: str, key: Hashable, terms: Callable[[], Mapping[str, Any]], *, remedy: str
) -> None:
    """Agree with all ranks of ``group`` on ``terms`` when this rank first passes ``key``, which stands for the terms.

    The version of ovpatch is one of them. Waits up to :data:`LATE_START_S` for the others, and at most for half of the
    group's time-out. Raises as :func:`check_consistent`.
    """
    agreed = group_state(group).values.get(_Agreed)
    if agreed is None or (topic, key) not in agreed:
        all_terms = {"version of ovpatch": importlib.metadata.version("ovpatch"), **terms()}
        check_consistent(group, topic, all_terms, timeout_s=wait_limit_s(group, LATE_START_S), remedy=remedy)
        group_state(group).get_or_create(_Agreed, _Agreed).add((topic, key))


def agree_on_name(group: dist.ProcessGroup, topic: str, *, timeout_s: float, remedy: str = "") -> str:
    """Return a name that is the same on all ranks and that no other call, of this or another process, returns.

    Every rank of the group, of two or more, calls this the same number of times per topic. RankMismatchError if one did
    not answer in time.
    """
    return str(_Round(group, topic, timeout_s, remedy).run({})["marks"][0])


def gather_values(group: dist.ProcessGroup, topic: str, value: Any) -> list[Any]:
    """Return the JSON values of all ranks by group rank: some hundred bytes, since rank 0 publishes all.

    Every rank of the group calls this the same number of times per topic. RankMismatchError if one did not answer
    within the group's time-out.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return [value] * group.size()
    return list(_Round(group, topic, group_timeout_s(group)).run({}, value=value)["values"])


def identify_host() -> str:
    """Return an identifier of this host. Names would not do: containers and hosts may share one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def wait_limit_s(group: dist.ProcessGroup, most_s: float) -> float:
    """Return how long to wait for ranks that may arrive late, in seconds.

    At most half of the group's time-out, so that a rank that waits in a collective for one that waits here does not
    fail.
    """
    return min(most_s, group_timeout_s(group) / 2)


# --- one round ---
#
# The store may outlive the group, the processes and a launcher's whole attempt, with the keys of earlier rounds in it,
# also of rounds in which a rank died. So arrivals cannot be counted. Group rank 0 opens each round under a new number.
# The others answer to the newest round with a mark of their own, until a verdict quotes that mark: a verdict that
# quotes another was meant for an earlier process.
#
# ``Store.wait()``, and ``get()`` of a missing key, block a TCPStore's connection for all threads of the process, and
# another thread may have a round in another group that this one waits for. So missing keys are polled by ``check()``.


class _Round:
    """One comparison over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, topic: str, timeout_s: float, remedy: str = "") -> None:
        self._group, self._topic, self._timeout_s, self._remedy = group, topic, timeout_s, remedy
        self._store = c10d._get_process_group_store(group)
        self._base = f"ovpatch/{topic}/{group.size()}"

    def run(self, terms: Mapping[str, Any], objection: str = "", value: Any = None) -> dict[str, Any]:
        """Return the verdict, or raise it: the ranks' objections, and their marks and values by rank."""
        mark = uuid.uuid4().hex
        own = json.dumps({"mark": mark, "terms": terms, "objection": objection, "value": value}, sort_keys=True)
        if self._group.rank() == 0:
            number = self._store.add(f"{self._base}/rounds", 1)
            prefix = f"{self._base}/{number}"
            self._store.set(f"{prefix}/0", own)
            verdict = self._publish(prefix, self._collect(prefix))
            if len(verdict["marks"]) == self._group.size():
                self._delete(f"{self._base}/{number - 1}")
        else:
            verdict = self._answer(mark, own) or self._missing([0])
        if "error" in verdict:
            raise RankMismatchError(verdict["error"])
        return verdict

    def _collect(self, prefix: str) -> dict[str, Any]:
        """Wait for all ranks' answers; return a verdict on them."""
        keys = [f"{prefix}/{rank}" for rank in range(self._group.size())]
        deadline, pause = time.monotonic() + self._timeout_s, 0.001
        while not (arrived := self._store.check(keys)) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_PAUSE_S)
        missing = [] if arrived else [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        texts = self._store.multi_get([key for rank, key in enumerate(keys) if rank not in missing])
        answers = [json.loads(text) for text in texts]
        marks = {"marks": [answer["mark"] for answer in answers]}
        return marks | (self._missing(missing) if missing else self._judge(answers))

    def _publish(self, prefix: str, verdict: dict[str, Any]) -> dict[str, Any]:
        """Write a verdict, unless a rank has timed out and written so; return the one that counts."""
        key = f"{prefix}/verdict"
        if "error" not in verdict:
            first = json.loads(self._store.compare_set(key, "", json.dumps(verdict)))
            if "gone" not in first:
                return verdict
            verdict = {"marks": verdict["marks"]} | self._gone(first["gone"])
        self._store.set(key, json.dumps(verdict))
        return verdict

    def _delete(self, prefix: str) -> None:
        """Delete the keys of the round before the last one, which all ranks have joined after they read its verdict."""
        for name in (*range(self._group.size()), "verdict"):
            self._store.delete_key(f"{prefix}/{name}")

    def _judge(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ranks = [dist.get_global_rank(self._group, rank) for rank in range(len(answers))]
        difference = _difference([answer["terms"] for answer in answers], ranks)
        if difference:
            text = f"ovpatch: ranks disagree on '{self._topic}': {difference}. {self._remedy or _REMEDY_SETTINGS}"
            return {"error": text}
        objection = join_texts((rank, answer["objection"]) for rank, answer in zip(ranks, answers, strict=True))
        values = [answer["value"] for answer in answers]
        return {"objection": objection} | ({} if values[0] is None else {"values": values})

    def _answer(self, mark: str, own: str) -> dict[str, Any]:
        """Answer to the newest round until a verdict quotes this rank's mark; return it, or {} after a time-out."""
        store, base, rank = self._store, self._base, self._group.rank()
        # Rank 0 may itself wait the whole time for a third rank, and then needs time to report that.
        deadline = time.monotonic() + self._timeout_s + 5
        answered, pause = -1, 0.001
        while time.monotonic() < deadline:
            newest = store.add(f"{base}/rounds", 0)
            # Checked after `newest` was read: rank 0 publishes a verdict before it opens the next round.
            if store.check([f"{base}/{answered}/verdict"]):
                verdict: dict[str, Any] = json.loads(store.get(f"{base}/{answered}/verdict"))
                if mark in verdict["marks"]:
                    return verdict
            if newest != answered:
                store.set(f"{base}/{newest}/{rank}", own)
                answered = newest
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_PAUSE_S)  # waits of a millisecond and of half a minute are both common
        if answered < 0:
            return {}
        last = store.compare_set(f"{base}/{answered}/verdict", "", json.dumps({"marks": [], "gone": rank}))
        decided: dict[str, Any] = json.loads(last)
        return decided if mark in decided["marks"] else {}

    def _missing(self, ranks: list[int]) -> dict[str, Any]:
        missing = _listed([dist.get_global_rank(self._group, rank) for rank in ranks])
        text = f"ovpatch: feature '{self._topic}' got no answer from rank {missing} within {self._timeout_s:g} s."
        return {"error": f"{text} {self._remedy or _REMEDY_INACTIVE}"}

    def _gone(self, rank: int) -> dict[str, Any]:
        text = (
            f"ovpatch: feature '{self._topic}' is not agreed on: rank {dist.get_global_rank(self._group, rank)} had "
            "waited for as long as it may when the last rank came."
        )
        return {"error": f"{text} {self._remedy or _REMEDY_LATE}"}


# --- texts ---


def join_texts(by_rank: Iterable[tuple[int, str]]) -> str:
    """Return texts, each once, with the ranks that they are of; no text, "", is left out."""
    ranks: dict[str, list[int]] = {}
    for rank, text in by_rank:
        if text:
            ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{text} (rank {_listed(own)})" for text, own in ranks.items())


def _difference(terms: list[Mapping[str, Any]], ranks: list[int]) -> str:
    parts = []
    for name in sorted({name for term in terms for name in term}):
        values: dict[str, list[int]] = {}
        for rank, term in zip(ranks, terms, strict=True):
            values.setdefault(json.dumps(term.get(name)), []).append(rank)
        if len(values) > 1:
            parts.append(
                f"{name} is " + " but ".join(f"{value} on rank {_listed(own)}" for value, own in values.items())
            )
    return "; ".join(parts)


_REMEDY_LATE = "Have all ranks build the model at about the same time, or give them a larger time-out."

_REMEDY_INACTIVE = (
    "Either ovpatch is not active there, or that rank does not build the same model. "
    "Call ovpatch.apply() on every rank before the model is wrapped, or set OVPATCH_AUTO=1 in the environment of "
    "all ranks; OVPATCH=0 on all ranks turns ovpatch off."
)

_REMEDY_SETTINGS = "Give every rank the same OVPATCH variables and the same arguments of ovpatch.apply()."


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
