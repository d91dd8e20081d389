"""Agreement of ranks through the store of their process group, before they issue collectives.

One of three ways for ranks to agree. This one blocks. ``comm.step_flags`` sums flags within a step,
and ``comm.host_barrier`` synchronizes hosts. Steps of ``dist_optimizer`` vote, see its ``agreement.py``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ovpatch.overlap.comm.lifetimes import group_state, group_timeout_s

# Ranks may load or build their models at different speeds.
LATE_START_S = 300.0
# Rank 0 may itself wait the full time for a third rank, and then needs time to report it.
_REPORT_S: Final = 5.0
# Waits of a millisecond and of half a minute are both common, so pauses between polls grow.
_MIN_PAUSE_S: Final = 0.001
_MAX_PAUSE_S: Final = 0.05
_PAUSE_GROWTH: Final = 1.2


class RankMismatchError(RuntimeError):
    """Ranks differ in their terms, or a rank is missing. The message has ranks and remedy."""


def check_consistent(
    group: dist.ProcessGroup,
    topic: str,
    terms: Mapping[str, Any],
    *,
    objection: str = "",
    timeout_s: float = 20.0,
    remedy: str = "",
) -> str:
    """Agree with all ranks of ``group`` on terms, before they issue collectives of a feature.

    Every rank of the group must call this the same number of times per topic.

    [Note: store, not collective] A rank on which ovpatch is off, or has other settings, issues
    other collectives than its peers. A collective for the agreement would pair with one of them,
    and hang or corrupt data. In the store, a missing rank is a missing key, and an error can name
    it. Group rank 0 collects the terms and publishes one verdict, so N ranks cost N reads. A rank
    may time out just when rank 0 finds all keys. A compare-and-set writes the key of the verdict,
    so all ranks continue or none does.

    Args:
        group: The process group.
        topic: A name, normally that of the feature.
        terms: JSON values that must be equal on all ranks.
        objection: The reason why this rank cannot take part. Default: it can.
        timeout_s: Seconds to wait for peers.
        remedy: The end of the error message. Default: check the settings, or whether ovpatch is
            active on all ranks.

    Returns:
        The objections of all ranks in one message, the same on every rank; "" without any.

    Raises:
        RankMismatchError: Terms differ, or a rank did not reply in time.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return objection
    return str(_Round(group, topic, timeout_s, remedy).run(terms, objection)["objection"])


class _Agreed(set[tuple[str, Hashable]]):
    """The topics and keys on which the ranks of one group have agreed."""


def check_consistent_once(
    group: dist.ProcessGroup,
    topic: str,
    key: Hashable,
    terms: Callable[[], Mapping[str, Any]],
    *,
    remedy: str,
) -> None:
    """Agree with all ranks of ``group`` on terms, if this is the first call for ``key``.

    The call waits for peers for :data:`LATE_START_S` seconds, but at most for half the timeout of
    the group.

    Args:
        group: The process group.
        topic: See :func:`check_consistent`.
        key: A value that determines the terms.
        terms: Returns the terms, to which the version of ovpatch is added.
        remedy: See :func:`check_consistent`.

    Raises:
        RankMismatchError: See :func:`check_consistent`.
    """
    agreed = group_state(group).values.get(_Agreed)
    if agreed is None or (topic, key) not in agreed:
        check_consistent(
            group,
            topic,
            {"version of ovpatch": get_version(), **terms()},
            timeout_s=wait_limit_s(group, LATE_START_S),
            remedy=remedy,
        )
        group_state(group).get_or_create(_Agreed, _Agreed).add((topic, key))


@functools.cache
def get_version() -> str:
    """Return the installed version of ovpatch, for which Python parses all of its metadata."""
    return importlib.metadata.version("ovpatch")


def agree_on_name(
    group: dist.ProcessGroup, topic: str, *, timeout_s: float, remedy: str = ""
) -> str:
    """Return a new name, the same on all ranks, that no call in any process returns again.

    Every rank of the group must call this the same number of times per topic.

    Args:
        group: A process group with two or more ranks.
        topic: See :func:`check_consistent`.
        timeout_s: Seconds to wait for peers.
        remedy: See :func:`check_consistent`.

    Raises:
        RankMismatchError: A rank did not reply in time.
    """
    return str(_Round(group, topic, timeout_s, remedy).run({})["marks"][0])


def gather_values(group: dist.ProcessGroup, topic: str, value: Any) -> list[Any]:
    """Return the values of all ranks, by group rank.

    Every rank of the group must call this the same number of times per topic. It waits for peers
    for the timeout of the group.

    Args:
        group: The process group.
        topic: See :func:`check_consistent`.
        value: A JSON value of at most some hundred bytes, because rank 0 publishes all values.

    Raises:
        RankMismatchError: A rank did not reply in time.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return [value] * group.size()
    return list(_Round(group, topic, group_timeout_s(group)).run({}, value=value)["values"])


def identify_host() -> str:
    """Return an identifier of this host: its name and the id of its boot, as NCCL tells hosts apart.

    Hosts of a cluster may share a name, and the containers of a machine share the id of its boot.
    Addresses identify no host, because a host has several, and containers may share one.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return " ".join([socket.gethostname(), *([boot.read_text().strip()] if boot.exists() else [])])


class HostNames(dict[int, str]):
    """The host names of the ranks of one group, by global rank; empty unless several are known.

    Attributes:
        identifiers: The results of :func:`identify_host`, by group rank; None before the ranks
            have agreed on anything.
    """

    identifiers: Sequence[str] | None = None


def known_hosts(group: dist.ProcessGroup) -> HostNames:
    """Return the hosts of a group's ranks.

    The first agreement of the ranks fills this object, so an error can name hosts without a
    message.
    """
    return group_state(group).get_or_create(HostNames, HostNames)


def find_hosts(group: dist.ProcessGroup) -> Sequence[str]:
    """Return the result of :func:`identify_host` on each group rank.

    All ranks make the first call together. It sends no message if they have agreed on anything
    before.

    Raises:
        RankMismatchError: A rank did not reply in time.
    """
    hosts = known_hosts(group)
    if hosts.identifiers is None:
        if group.size() == 1 or dist.get_backend(group) == "fake":
            return [identify_host()] * group.size()
        _Round(group, "hosts", group_timeout_s(group)).run({})
    assert hosts.identifiers is not None, "all ranks have the same version of ovpatch"
    return hosts.identifiers


def _keep_hosts(group: dist.ProcessGroup, identifiers: Sequence[str]) -> None:
    hosts = known_hosts(group)
    # One host is sent once.
    hosts.identifiers = identifiers if len(identifiers) > 1 else [identifiers[0]] * group.size()
    ranks = [dist.get_global_rank(group, rank) for rank in range(group.size())]
    hosts.update(_name_hosts(ranks, hosts.identifiers))


def _list_node_ranks() -> list[int]:
    """Return the global ranks that the launcher has started on this node; [] if it does not say."""
    try:
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, local_rank, count = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError):
        return []
    # A script may start its ranks itself.
    if rank != dist.get_rank() or not 0 <= local_rank < count:
        return []
    first = rank - local_rank
    return list(range(first, first + count))


def _guess_hosts(replies: Iterable[Mapping[str, Any]], ranks: Iterable[int]) -> dict[int, str]:
    """Return the host names of global ranks from the replies of some; {} if there is one host.

    A rank that has not replied is on the host of those that the launcher has started with it.
    """
    hosts = {
        rank: str(reply["host"]).partition(" ")[0]
        for reply in replies
        for rank in reply.get("node", ())
    }
    return hosts if len({hosts.get(rank) for rank in ranks}) > 1 else {}


def _name_hosts(ranks: Iterable[int], identifiers: Sequence[str]) -> dict[int, str]:
    """Return the host names of global ranks; {} if they are on one host."""
    if len(set(identifiers)) < 2:
        return {}
    names = (identifier.partition(" ")[0] for identifier in identifiers)
    return dict(zip(ranks, names, strict=True))


def wait_limit_s(group: dist.ProcessGroup, most_s: float) -> float:
    """Return the seconds to wait for ranks that may arrive late, at most ``most_s``.

    The limit is at most half the timeout of the group. So a peer that waits for this rank in a
    collective does not time out first.
    """
    return min(most_s, group_timeout_s(group) / 2)


# --- one round ---
#
# The store may outlive the group, the processes and a full attempt of the launcher. It then has the
# keys of earlier rounds, also of rounds in which a rank died, so ranks cannot count arrivals. Group
# rank 0 opens each round under a new number. Its peers join the newest round with their own marks,
# until a verdict quotes their mark. A verdict without it was for an earlier process.
#
# `Store.wait()`, and `get()` of a missing key, block the connection of a TCPStore for all threads
# of the process. Another thread may be in a round of another group for which this one waits. So
# ranks poll missing keys with `check()`.


class _Round:
    """One comparison of terms over the ranks of a group."""

    def __init__(
        self, group: dist.ProcessGroup, topic: str, timeout_s: float, remedy: str = ""
    ) -> None:
        self._group = group
        self._topic = topic
        self._timeout_s = timeout_s
        self._remedy = remedy
        self._hosts = known_hosts(group)
        self._store = c10d._get_process_group_store(group)
        self._base = f"ovpatch/{topic}/{group.size()}"

    def run(
        self, terms: Mapping[str, Any], objection: str = "", value: Any = None
    ) -> dict[str, Any]:
        """Return the verdict, which has the objections, marks and values of the ranks.

        Raises:
            RankMismatchError: The verdict is an error.
        """
        mark = uuid.uuid4().hex
        reply = {"mark": mark, "terms": terms, "objection": objection, "value": value}
        # Ranks exchange their hosts once.
        if self._hosts.identifiers is None:
            reply |= {"host": identify_host(), "node": _list_node_ranks()}
        own = json.dumps(reply, sort_keys=True)
        if self._group.rank() == 0:
            number = self._store.add(f"{self._base}/rounds", 1)
            prefix = f"{self._base}/{number}"
            self._store.set(f"{prefix}/0", own)
            verdict = self._publish(prefix, self._collect(prefix))
            if len(verdict["marks"]) == self._group.size():
                self._delete(f"{self._base}/{number - 1}")
        else:
            verdict = self._join(mark, own) or self._report_missing([0], [reply])
        if "error" in verdict:
            raise RankMismatchError(verdict["error"])
        if "hosts" in verdict:
            _keep_hosts(self._group, verdict["hosts"])
        return verdict

    # --- group rank 0 ---

    def _collect(self, prefix: str) -> dict[str, Any]:
        """Wait for the replies of all ranks, and return a verdict on them."""
        keys = [f"{prefix}/{rank}" for rank in range(self._group.size())]
        deadline = time.monotonic() + self._timeout_s
        pause_s = _MIN_PAUSE_S
        while not (have_arrived := self._store.check(keys)) and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(_PAUSE_GROWTH * pause_s, _MAX_PAUSE_S)
        missing = []
        if not have_arrived:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        arrived_keys = [key for rank, key in enumerate(keys) if rank not in missing]
        replies = [json.loads(data) for data in self._store.multi_get(arrived_keys)]
        marks = {"marks": [reply["mark"] for reply in replies]}
        if missing:
            return marks | self._report_missing(missing, replies)
        return marks | self._judge(replies)

    def _judge(self, replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ranks = [dist.get_global_rank(self._group, rank) for rank in range(len(replies))]
        known = self._hosts.identifiers
        # Another version of ovpatch may send no host.
        identifiers = known or [reply.get("host", "") for reply in replies]
        hosts = _name_hosts(ranks, identifiers)
        difference = _describe_difference([reply["terms"] for reply in replies], ranks, hosts)
        if difference:
            return {
                "error": f"ovpatch: ranks disagree on '{self._topic}': {difference}. {self._remedy or _REMEDY_SETTINGS}"
            }
        objections = [reply["objection"] for reply in replies]
        verdict: dict[str, Any] = {
            "objection": join_messages(zip(ranks, objections, strict=True), hosts)
        }
        if known is None and all(identifiers):
            verdict["hosts"] = identifiers if len(set(identifiers)) > 1 else identifiers[:1]
        values = [reply["value"] for reply in replies]
        # The verdict is read by all ranks, so it has no values if there are none.
        return verdict if values[0] is None else {**verdict, "values": values}

    def _publish(self, prefix: str, verdict: dict[str, Any]) -> dict[str, Any]:
        """Write a verdict, unless a rank has timed out first; return the valid verdict."""
        key = f"{prefix}/verdict"
        if "error" not in verdict:
            first = json.loads(self._store.compare_set(key, "", json.dumps(verdict)))
            if "gone" not in first:
                return verdict
            verdict = {"marks": verdict["marks"]} | self._report_timed_out(first["gone"])
        self._store.set(key, json.dumps(verdict))
        return verdict

    def _delete(self, prefix: str) -> None:
        # All ranks have joined the round after this one, so they have read its verdict.
        for name in (*range(self._group.size()), "verdict"):
            self._store.delete_key(f"{prefix}/{name}")

    # --- its peers ---

    def _join(self, mark: str, own: str) -> dict[str, Any]:
        """Join the newest round until a verdict quotes ``mark``; return {} after a timeout."""
        store = self._store
        own_rank = self._group.rank()
        deadline = time.monotonic() + self._timeout_s + _REPORT_S
        pause_s = _MIN_PAUSE_S
        joined = -1
        while time.monotonic() < deadline:
            newest = store.add(f"{self._base}/rounds", 0)
            # Rank 0 publishes a verdict before it opens the next round, so the order of these reads
            # matters: no verdict may be missed.
            if store.check([f"{self._base}/{joined}/verdict"]):
                verdict: dict[str, Any] = json.loads(store.get(f"{self._base}/{joined}/verdict"))
                if mark in verdict["marks"]:
                    return verdict
            if newest != joined:
                store.set(f"{self._base}/{newest}/{own_rank}", own)
                joined = newest
            time.sleep(pause_s)
            pause_s = min(_PAUSE_GROWTH * pause_s, _MAX_PAUSE_S)
        if joined < 0:
            return {}
        # The verdict may have come just now, and then it is valid for this rank as well.
        given_up = json.dumps({"marks": [], "gone": own_rank})
        decided: dict[str, Any] = json.loads(
            store.compare_set(f"{self._base}/{joined}/verdict", "", given_up)
        )
        return decided if mark in decided["marks"] else {}

    # --- errors ---

    def _report_missing(
        self, ranks: list[int], replies: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        members = [dist.get_global_rank(self._group, rank) for rank in range(self._group.size())]
        hosts = self._hosts or _guess_hosts(replies, members)
        missing = name_ranks([members[rank] for rank in ranks], hosts)
        return {
            "error": f"ovpatch: feature '{self._topic}' got no reply from rank {missing} within "
            f"{self._timeout_s:g} s. {self._remedy or _REMEDY_INACTIVE}"
        }

    def _report_timed_out(self, rank: int) -> dict[str, Any]:
        return {
            "error": f"ovpatch: ranks did not agree on feature '{self._topic}': rank "
            f"{name_group_ranks(self._group, [rank])} had timed out when the last rank came. "
            f"{self._remedy or _REMEDY_LATE}"
        }


# --- messages ---


def join_messages(
    by_rank: Iterable[tuple[int, str]], hosts: Mapping[int, str] | None = None
) -> str:
    """Return the messages of ranks in one string, each once with its ranks, without empty ones.

    Args:
        by_rank: Global ranks and their messages.
        hosts: See :func:`name_ranks`. Default: all ranks are on one host.
    """
    ranks: dict[str, list[int]] = {}
    for rank, message in by_rank:
        if message:
            ranks.setdefault(message, []).append(rank)
    return "; ".join(
        f"{message} (rank {name_ranks(own, hosts or {})})" for message, own in ranks.items()
    )


def _describe_difference(
    terms: list[Mapping[str, Any]], ranks: list[int], hosts: Mapping[int, str]
) -> str:
    parts = []
    for name in sorted({name for term in terms for name in term}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, term in zip(ranks, terms, strict=True):
            ranks_by_value.setdefault(json.dumps(term.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            values = [
                f"{value} on rank {name_ranks(own, hosts)}" for value, own in ranks_by_value.items()
            ]
            parts.append(f"{name} is {' but '.join(values)}")
    return "; ".join(parts)


def name_ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return ranks for a message after the word "rank", such as ``1, 2 (host a), 5 (host b)``.

    Args:
        ranks: Global ranks.
        hosts: Their host names, such as :func:`known_hosts`; ranks without a name are listed alone.
    """
    # The error of a large job must stay readable.
    parts = []
    for host, own in itertools.groupby(ranks[:8], hosts.get):
        listed = ", ".join(map(str, own))
        parts.append(f"{listed} (host {host})" if host else listed)
    text = ", ".join(parts)
    return text if len(ranks) <= 8 else f"{text} and {len(ranks) - 8} more"


def name_group_ranks(group: dist.ProcessGroup, ranks: Iterable[int]) -> str:
    """Return ranks of a group for a message; see :func:`name_ranks`.

    Args:
        group: The process group.
        ranks: Group ranks.
    """
    return name_ranks([dist.get_global_rank(group, rank) for rank in ranks], known_hosts(group))


def describe_missing(
    place: str,
    timeout_s: float,
    ranks: Sequence[int] = (),
    hosts: Mapping[int, str] | None = None,
) -> str:
    """Return the clause of a message that ranks are missing: ``rank 1 (host a) did not reach a step within 5 s``.

    Args:
        place: The place in the program where this rank waits for them.
        timeout_s: The time that this rank has waited, in seconds.
        ranks: The missing global ranks. Default: this rank knows only that some rank is missing.
        hosts: See :func:`name_ranks`. Default: no host is known.
    """
    missing = f"rank {name_ranks(ranks, hosts or {})} did not reach" if ranks else _NOT_ALL_REACHED
    return f"{missing} {place} within {timeout_s:g} s"


_NOT_ALL_REACHED: Final = "not all ranks reached"

_REMEDY_LATE: Final = (
    "Let all ranks build the model at about the same time, or give them a larger timeout."
)

_REMEDY_INACTIVE: Final = (
    "Either ovpatch is not active there, or that rank does not build the same model. "
    "Call ovpatch.apply() on every rank before the model is wrapped, or set OVPATCH_AUTO=1 in the "
    "environment of all ranks; OVPATCH=0 on all ranks turns ovpatch off."
)

_REMEDY_SETTINGS: Final = (
    "Give every rank the same OVPATCH variables and the same arguments of ovpatch.apply()."
)
