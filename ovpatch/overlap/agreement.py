"""Ranks compare terms before a feature's first collective, through the process group's store.

[Note: store, not collective] A rank where ovpatch is off, or set otherwise, issues other collectives than its peers.
An agreement by collective would then pair with one of those and hang or corrupt data, which is just what it is there
to prevent. The store knows no pairing: a rank that does not answer is a key that is missing, and can be named.

[Note: one collector] Group rank 0 reads everybody's terms and publishes one verdict, so that N ranks cost N reads and
not N * N.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class DisagreementError(RuntimeError):
    """Ranks differ in their settings, or a rank takes no part. The text names ranks, difference and remedy."""


def agree(
    group: dist.ProcessGroup, topic: str, terms: Mapping[str, Any], *, objection: str = "", timeout_s: float = 20.0
) -> str:
    """Agree with all ranks of ``group`` on ``terms`` before they issue collectives of a feature.

    Every rank of the group calls this the same number of times per topic.

    Args:
        group: The process group on which the collectives will run.
        topic: What is agreed on, normally the feature's name.
        terms: JSON values that must be the same on all ranks.
        objection: Why this rank cannot take part, if it cannot.
        timeout_s: How long a rank waits for the others, in seconds.

    Returns:
        "" when all ranks take part, otherwise the reasons of those that object, the same text on every rank.

    Raises:
        DisagreementError: Terms differ, or a rank did not answer in time.
    """
    world = group.size()
    if world == 1 or dist.get_backend(group) == "fake":
        return objection
    store = c10d._get_process_group_store(group)
    # The store may outlive the group, with the keys of earlier rounds in it, and processes may come and go between
    # rounds. Nobody passes a round before all have arrived, so the number of arrivals tells which round this is.
    base = f"ovpatch/{topic}/{world}"
    prefix = f"{base}/{(store.add(f'{base}/arrivals', 1) - 1) // world}"
    mine = json.dumps({"terms": terms, "objection": objection}, sort_keys=True)
    store.set(f"{prefix}/{group.rank()}", mine)
    if group.rank() == 0:
        verdict = _collect(store, prefix, group, topic, timeout_s)
        store.set(f"{prefix}/verdict", json.dumps(verdict))
    else:
        verdict = _await_verdict(store, prefix, group, topic, timeout_s)
    if "error" in verdict:
        raise DisagreementError(verdict["error"])
    return str(verdict["objection"])


def _collect(store: c10d.Store, prefix: str, group: dist.ProcessGroup, topic: str, timeout_s: float) -> dict[str, str]:
    keys = [f"{prefix}/{rank}" for rank in range(group.size())]
    if not _arrived(store, keys, timeout_s):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return {"error": _missing(topic, _global(group, missing), timeout_s)}
    answers = [json.loads(text) for text in store.multi_get(keys)]
    ranks = _global(group, range(group.size()))
    difference = _difference([answer["terms"] for answer in answers], ranks)
    if difference:
        return {"error": f"ovpatch: ranks disagree on '{topic}': {difference}. {_REMEDY_SETTINGS}"}
    objections: dict[str, list[int]] = {}
    for rank, answer in zip(ranks, answers, strict=True):
        if answer["objection"]:
            objections.setdefault(answer["objection"], []).append(rank)
    return {"objection": "; ".join(f"{text} (rank {_listed(who)})" for text, who in objections.items())}


def _await_verdict(
    store: c10d.Store, prefix: str, group: dist.ProcessGroup, topic: str, timeout_s: float
) -> dict[str, str]:
    # Rank 0 may itself wait the whole time for a third rank: leave it room to say so.
    if not _arrived(store, [f"{prefix}/verdict"], timeout_s + 5):
        return {"error": _missing(topic, _global(group, [0]), timeout_s)}
    verdict: dict[str, str] = json.loads(store.get(f"{prefix}/verdict"))
    return verdict


def _arrived(store: c10d.Store, keys: list[str], timeout_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # each store has its own subclass; all of them say that it was the time
        if not _is_timeout(error):
            raise
        return False
    return True


def _is_timeout(error: Exception) -> bool:
    text = str(error).lower()
    return "timeout" in text or "timed out" in text


def _difference(terms: list[Mapping[str, Any]], ranks: list[int]) -> str:
    parts = []
    for name in sorted({name for term in terms for name in term}):
        values: dict[str, list[int]] = {}
        for rank, term in zip(ranks, terms, strict=True):
            values.setdefault(json.dumps(term.get(name)), []).append(rank)
        if len(values) > 1:
            parts.append(
                f"{name} is " + " but ".join(f"{value} on rank {_listed(who)}" for value, who in values.items())
            )
    return "; ".join(parts)


def _missing(topic: str, ranks: list[int], timeout_s: float) -> str:
    return (
        f"ovpatch: feature '{topic}' got no answer from rank {_listed(ranks)} within {timeout_s:g} s. "
        "Either ovpatch is not active there, or that rank does not build the same model. "
        "Call ovpatch.apply() on every rank before the model is wrapped, or set OVPATCH_AUTO=1 in the environment of "
        "all ranks; OVPATCH=0 on all ranks turns ovpatch off."
    )


_REMEDY_SETTINGS = "Give every rank the same OVPATCH variables and the same arguments of ovpatch.apply()."


def _global(group: dist.ProcessGroup, ranks: Any) -> list[int]:
    return [dist.get_global_rank(group, rank) for rank in ranks]


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
