"""Report files of worker processes, and their merge into the report of one job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ovpatch.session.session_report import IDLE, STATES, did_work

REPORT_DIR: Final = "OVPATCH_REPORT_DIR"

_Json = Mapping[str, Any]
# A report with its process or node: pid, rank, whether it is finished, and its name.
_Owned = tuple[_Json, _Json]


def merge_reports(reports: Sequence[_Json]) -> dict[str, Any]:
    """Merge the reports of the processes of one job.

    Totals are summed. Of a level or peak, the report has that of the process with most. After an elastic restart only
    the last generation of each rank counts; the earlier ones stay in ``processes``.

    Args:
        reports: :meth:`ovpatch.Report.to_json` of each process, with ``restart`` if known.

    Returns:
        A report with None as ``pid`` and ``rank``. ``processes`` has pid, rank and restart, and in
        each feature the state, reason and counters of each process. ``unfinished`` names the ranks
        that left no last report, because they were killed or called ``os._exit``.
    """
    if not reports:
        raise ValueError("there are no reports to merge: give the report of at least one process")
    ordered = sorted(
        reports,
        key=lambda r: (r["rank"] is None, r["rank"] or 0, r.get("restart", 0), r["pid"]),
    )
    counted = [(_identify(report), report) for report in _last_generation(ordered)]
    return _merge(counted) | {
        "processes": [
            {"pid": r["pid"], "rank": r["rank"], "restart": r.get("restart", 0)} for r in ordered
        ],
        "unfinished": [
            owner["label"]
            for owner, _ in counted
            if owner["rank"] is not None and not owner["finished"]
        ],
    }


def join_reports(reports: Mapping[str, _Json]) -> dict[str, Any]:
    """Join the merged reports of the nodes of one job, by name of the node or its file."""
    # States and remarks that differ are attributed to nodes, as they are to ranks within a node.
    owned = [
        ({"pid": None, "rank": number, "finished": True, "label": label}, report)
        for number, (label, report) in enumerate(reports.items())
    ]
    return _merge(owned) | {
        "processes": [process for report in reports.values() for process in report["processes"]],
        "unfinished": [
            label for report in reports.values() for label in report.get("unfinished", ())
        ],
    }


def _merge(owned: Sequence[_Owned]) -> dict[str, Any]:
    """Return the parts of a merged report that nodes and processes have in common."""
    reports = [report for _, report in owned]
    names = list(dict.fromkeys(part["name"] for report in reports for part in report["features"]))
    versions = {
        key: ", ".join(dict.fromkeys(str(report[key]) for report in reports))
        for key in ("version", "torch", "python")
    }
    return {
        **versions,
        "pid": None,
        "rank": None,
        "features": [_merge_feature(name, owned) for name in names],
        "patches": _merge_patches(reports),
    }


def _last_generation(reports: Sequence[_Json]) -> list[_Json]:
    last: dict[int, int] = {}
    for report in reports:
        if report["rank"] is not None:
            last[report["rank"]] = max(last.get(report["rank"], 0), report.get("restart", 0))
    return [r for r in reports if r["rank"] is None or r.get("restart", 0) == last[r["rank"]]]


def _merge_feature(name: str, owned: Sequence[_Owned]) -> dict[str, Any]:
    parts = [
        (owner, part)
        for owner, report in owned
        for part in report["features"]
        if part["name"] == name
    ]
    absent = [
        owner for owner, report in owned if all(part["name"] != name for part in report["features"])
    ]
    state, reason = _merge_state(parts, absent)
    # Files of earlier versions have no levels.
    levels = {key: value for _, part in parts for key, value in part.get("levels", {}).items()}
    counters = _merge_counters([part["counters"] for _, part in parts], levels)
    work: list[str] = next((part["work"] for _, part in parts if part["work"]), [])
    return {
        "name": name,
        "state": state,
        "reason": reason,
        "remarks": _merge_remarks(parts, worked=did_work(counters, work)),
        "options": _merge_options(parts),
        "counters": counters,
        "levels": levels,
        "distribution": parts[0][1]["distribution"],
        "requires": next((part["requires"] for _, part in parts if part["requires"]), []),
        "reorders_products": any(part["reorders_products"] for _, part in parts),
        "work": work,
        "gains": next((part["gains"] for _, part in parts if part.get("gains")), []),
        "fits": next((part["fits"] for _, part in parts if part.get("fits")), ""),
        "processes": [process for owner, part in parts for process in _list_processes(owner, part)],
    }


def _merge_counters(counts: Sequence[Mapping[str, int]], levels: _Json) -> dict[str, int]:
    """Return the sum of each counter over processes or nodes, or the largest if it is no total."""
    return {
        name: (max if name in levels else sum)(count[name] for count in counts if name in count)
        for name in dict.fromkeys(name for count in counts for name in count)
    }


def _list_processes(owner: _Json, part: _Json) -> list[_Json]:
    """Return the state of a feature in each process of an owner, which is a process or a node."""
    if "processes" in part:
        return list(part["processes"])
    state = {key: part[key] for key in ("state", "reason", "counters")}
    return [{"pid": owner["pid"], "rank": owner["rank"], **state}]


def _is_finished(report: _Json) -> bool:
    """Return whether a report is the last one of its process; an earlier one shows less than the process did."""
    return bool(report.get("finished", True))


def _identify(report: _Json) -> dict[str, Any]:
    rank, pid = report["rank"], report["pid"]
    label = f"rank {rank}" if rank is not None else f"process {pid}"
    return {"pid": pid, "rank": rank, "finished": _is_finished(report), "label": label}


def _merge_state(parts: Sequence[tuple[_Json, _Json]], absent: Sequence[_Json]) -> tuple[str, str]:
    """Return the common state and reason, or the worst state and the processes in each state.

    A process without a rank, such as a parent or a fork server, may never import the target of a patch. Its pending
    patches are no difference.
    """
    parts = [
        pair for pair in parts if pair[0]["rank"] is not None or pair[1]["state"] != "pending"
    ] or parts
    seen = {(part["state"], part["reason"]) for _, part in parts}
    if len(seen) == 1 and not absent:
        return next(iter(seen))
    states = {state for state, _ in seen} | ({"unavailable"} if absent else set())
    worst = min(states, key=STATES.index)
    if len(states) == 1:
        return worst, "; ".join(
            dict.fromkeys(f"{process['label']}: {part['reason']}" for process, part in parts)
        )
    owners: dict[str, list[str]] = {}
    for process, part in parts:
        what = part["state"] + (f" ({part['reason']})" if part["reason"] else "")
        owners.setdefault(what, []).append(process["label"])
    groups = [f"{what} on {', '.join(labels)}" for what, labels in owners.items()]
    groups += (
        [f"not installed on {', '.join(process['label'] for process in absent)}"] if absent else []
    )
    return worst, "differs between processes: " + "; ".join(groups)


def _merge_remarks(parts: Sequence[tuple[_Json, _Json]], *, worked: bool) -> list[str]:
    """Collect remarks, each once with its processes.

    A parent that only spawns workers is always idle, so its idleness is left out if another process did work. So is the
    idleness of a process without a last report, which may have worked since.
    """
    owners: dict[str, list[_Json]] = {}
    for process, part in parts:
        for remark in part["remarks"]:
            is_unknown = not process["finished"] or (worked and process["rank"] is None)
            if not (remark in IDLE and is_unknown):
                owners.setdefault(remark, []).append(process)
    total = len(parts)
    return [
        remark
        if len(processes) == total
        else f"{remark} ({', '.join(process['label'] for process in processes)})"
        for remark, processes in owners.items()
    ]


def _merge_options(parts: Sequence[tuple[_Json, _Json]]) -> dict[str, Any]:
    """Return the options of the first process that has them; ``differs`` has the values of other processes."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, part in parts for name in part["options"]):
        having = [
            (process, part["options"][name]) for process, part in parts if name in part["options"]
        ]
        merged[name] = dict(having[0][1])
        if any(option["value"] != merged[name]["value"] for _, option in having):
            merged[name]["differs"] = {
                process["label"]: option["value"] for process, option in having
            }
    return merged


def _merge_patches(reports: Sequence[_Json]) -> list[dict[str, Any]]:
    """Return one record for each patch and state, with its calls and traces summed."""
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


def save_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_reports(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Return the contents of all files of a kind (``worker``, ``failed``) in a directory."""
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(directory.glob(f"{kind}-*.json"))
    ]
