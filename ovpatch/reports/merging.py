"""Reports of several processes merged into one: counters summed, states that differ said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ovpatch.reports.reporting import IDLE, STATES, did_work

_Json = Mapping[str, Any]


def merge(reports: Sequence[_Json]) -> dict[str, Any]:
    """Merge the reports of the processes of one job.

    After an elastic restart only the last generation of each rank counts; the earlier ones stay in ``processes``.

    Args:
        reports: What :meth:`ovpatch.Report.to_json` returned in each process, with ``restart`` where known.

    Returns:
        The outline of one report, and beyond it: ``processes`` (pid, rank, restart), and per feature ``processes``
        (state, reason and counters of each), with ``pid`` and ``rank`` None.

    Raises:
        ValueError: There is no report.
    """
    if not reports:
        raise ValueError("there are no reports to merge; at least one process must have reported")
    ordered = sorted(reports, key=lambda r: (r["rank"] is None, r["rank"] or 0, r.get("restart", 0), r["pid"]))
    counted = _last_generation(ordered)
    names = list(dict.fromkeys(f["name"] for report in counted for f in report["features"]))
    return {
        **{key: _common(key, counted) for key in ("version", "torch", "python")},
        "pid": None,
        "rank": None,
        "processes": [{"pid": r["pid"], "rank": r["rank"], "restart": r.get("restart", 0)} for r in ordered],
        "features": [_merge_feature(name, counted) for name in names],
        "patches": _merge_patches(counted),
    }


def _last_generation(reports: Sequence[_Json]) -> list[_Json]:
    last: dict[int, int] = {}
    for report in reports:
        if report["rank"] is not None:
            last[report["rank"]] = max(last.get(report["rank"], 0), report.get("restart", 0))
    return [r for r in reports if r["rank"] is None or r.get("restart", 0) == last[r["rank"]]]


def _common(key: str, reports: Sequence[_Json]) -> str:
    return ", ".join(dict.fromkeys(str(report[key]) for report in reports))


def _merge_feature(name: str, reports: Sequence[_Json]) -> dict[str, Any]:
    parts = [(_who(report), part) for report in reports for part in report["features"] if part["name"] == name]
    absent = [_who(report) for report in reports if all(part["name"] != name for part in report["features"])]
    state, reason = _merge_state(parts, absent)
    counters = _sum(part["counters"] for _, part in parts)
    work: list[str] = next((part["work"] for _, part in parts if part["work"]), [])
    return {
        "name": name,
        "state": state,
        "reason": reason,
        "remarks": _merge_remarks(parts, worked=did_work(counters, work)),
        "options": _merge_options(parts),
        "counters": counters,
        "distribution": parts[0][1]["distribution"],
        "requires": next((part["requires"] for _, part in parts if part["requires"]), []),
        "reorders_products": any(part["reorders_products"] for _, part in parts),
        "work": work,
        "processes": [
            {"pid": who["pid"], "rank": who["rank"], **{k: part[k] for k in ("state", "reason", "counters")}}
            for who, part in parts
        ],
    }


def _who(report: _Json) -> dict[str, Any]:
    rank, pid = report["rank"], report["pid"]
    return {"pid": pid, "rank": rank, "label": f"rank {rank}" if rank is not None else f"process {pid}"}


def _merge_state(parts: Sequence[tuple[_Json, _Json]], absent: Sequence[_Json]) -> tuple[str, str]:
    """Return the common state and reason, or the worst state and who is in which."""
    seen = {(part["state"], part["reason"]) for _, part in parts}
    if len(seen) == 1 and not absent:
        return next(iter(seen))
    states = {state for state, _ in seen} | ({"unavailable"} if absent else set())
    worst = min(states, key=STATES.index)
    if len(states) == 1:
        return worst, "; ".join(dict.fromkeys(f"{who['label']}: {part['reason']}" for who, part in parts))
    groups = _grouped(parts, lambda part: part["state"] + (f" ({part['reason']})" if part["reason"] else ""))
    groups += [f"not installed on {', '.join(who['label'] for who in absent)}"] if absent else []
    return worst, "differs between processes: " + "; ".join(groups)


def _grouped(parts: Sequence[tuple[_Json, _Json]], text: Callable[[_Json], str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for who, part in parts:
        groups.setdefault(text(part), []).append(who["label"])
    return [f"{what} on {', '.join(labels)}" for what, labels in groups.items()]


def _merge_remarks(parts: Sequence[tuple[_Json, _Json]], *, worked: bool) -> list[str]:
    """Collect remarks, each once with its processes; that a feature was idle is said only where it tells something.

    A parent that only spawns the workers calls nothing, so a process without a rank does not count while others work.
    """
    owners: dict[str, list[_Json]] = {}
    for who, part in parts:
        for remark in part["remarks"]:
            if not (remark in IDLE and worked and who["rank"] is None):
                owners.setdefault(remark, []).append(who)
    everyone = len(parts)
    return [
        remark if len(who) == everyone else f"{remark} ({', '.join(one['label'] for one in who)})"
        for remark, who in owners.items()
    ]


def _merge_options(parts: Sequence[tuple[_Json, _Json]]) -> dict[str, Any]:
    """Return the options of the first process that has them; where others differ, ``differs`` says how."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, part in parts for name in part["options"]):
        having = [(who, part["options"][name]) for who, part in parts if name in part["options"]]
        merged[name] = dict(having[0][1])
        if any(option["value"] != merged[name]["value"] for _, option in having):
            merged[name]["differs"] = {who["label"]: option["value"] for who, option in having}
    return merged


def _sum(many: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counters in many:
        for name, count in counters.items():
            total[name] = total.get(name, 0) + count
    return total


def _merge_patches(reports: Sequence[_Json]) -> list[dict[str, Any]]:
    """Return one entry for each patch and state, with its calls and traces summed."""
    merged: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for report in reports:
        for patch in report["patches"]:
            key = (patch["feature"], patch["target"], patch["kind"], patch["state"])
            if key in merged:
                merged[key]["calls"] += patch["calls"]
                merged[key]["traces"] += patch["traces"]
            else:
                merged[key] = dict(patch)
    return list(merged.values())
