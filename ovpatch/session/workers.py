"""Worker processes of a command: their reports for ``ovpatch run``, and their orders from the tools.

A process writes its report at ``apply()`` and at exit, each time atomically, so a killed process has left the first
one. The orders of ``verify``, ``bench`` and ``timeline`` are in one environment variable, which a process, patched or
stock, reads when it imports torch (:mod:`ovpatch.autoload`); it calls the tool's own module then.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import current_process, parent_process, util
from pathlib import Path
from typing import Any, Final

from ovpatch.logs import logger
from ovpatch.session.report import IDLE, STATES, Report, did_work

_Json = Mapping[str, Any]


def merge_reports(reports: Sequence[_Json]) -> dict[str, Any]:
    """Merge the reports of the processes of one job: :meth:`ovpatch.Report.to_json` of each, with ``restart`` if known.

    Counters are summed. After an elastic restart only the last generation of each rank counts; the earlier ones stay in
    ``processes``. The merged report has None as ``pid`` and ``rank``; it has ``processes`` (pid, rank, restart), also
    for each feature (state, reason and counters of each process). ``unfinished`` names the ranks that left no last
    report, because they were killed or called ``os._exit``.
    """
    if not reports:
        raise ValueError("there are no reports to merge: give that of one process at least")
    ordered = sorted(reports, key=lambda r: (r["rank"] is None, r["rank"] or 0, r.get("restart", 0), r["pid"]))
    counted = _last_generation(ordered)
    names = list(dict.fromkeys(f["name"] for report in counted for f in report["features"]))
    return {
        **{key: ", ".join(dict.fromkeys(str(r[key]) for r in counted)) for key in ("version", "torch", "python")},
        "pid": None,
        "rank": None,
        "processes": [{"pid": r["pid"], "rank": r["rank"], "restart": r.get("restart", 0)} for r in ordered],
        "unfinished": [_identify(r)["label"] for r in counted if r["rank"] is not None and not _is_finished(r)],
        "features": [_merge_feature(name, counted) for name in names],
        "patches": _merge_patches(counted),
    }


def _last_generation(reports: Sequence[_Json]) -> list[_Json]:
    last: dict[int, int] = {}
    for report in reports:
        if report["rank"] is not None:
            last[report["rank"]] = max(last.get(report["rank"], 0), report.get("restart", 0))
    return [r for r in reports if r["rank"] is None or r.get("restart", 0) == last[r["rank"]]]


def _merge_feature(name: str, reports: Sequence[_Json]) -> dict[str, Any]:
    parts = [(_identify(report), part) for report in reports for part in report["features"] if part["name"] == name]
    absent = [_identify(report) for report in reports if all(part["name"] != name for part in report["features"])]
    state, reason = _merge_state(parts, absent)
    counters: Counter[str] = Counter()
    for _, part in parts:
        counters.update(part["counters"])
    work: list[str] = next((part["work"] for _, part in parts if part["work"]), [])
    return {
        "name": name,
        "state": state,
        "reason": reason,
        "remarks": _merge_remarks(parts, worked=did_work(counters, work)),
        "options": _merge_options(parts),
        "counters": dict(counters),
        "distribution": parts[0][1]["distribution"],
        "requires": next((part["requires"] for _, part in parts if part["requires"]), []),
        "reorders_products": any(part["reorders_products"] for _, part in parts),
        "work": work,
        "processes": [
            {"pid": process["pid"], "rank": process["rank"], **{k: part[k] for k in ("state", "reason", "counters")}}
            for process, part in parts
        ],
    }


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
    parts = [pair for pair in parts if pair[0]["rank"] is not None or pair[1]["state"] != "pending"] or parts
    seen = {(part["state"], part["reason"]) for _, part in parts}
    if len(seen) == 1 and not absent:
        return next(iter(seen))
    states = {state for state, _ in seen} | ({"unavailable"} if absent else set())
    worst = min(states, key=STATES.index)
    if len(states) == 1:
        return worst, "; ".join(dict.fromkeys(f"{process['label']}: {part['reason']}" for process, part in parts))
    owners: dict[str, list[str]] = {}
    for process, part in parts:
        what = part["state"] + (f" ({part['reason']})" if part["reason"] else "")
        owners.setdefault(what, []).append(process["label"])
    groups = [f"{what} on {', '.join(labels)}" for what, labels in owners.items()]
    groups += [f"not installed on {', '.join(process['label'] for process in absent)}"] if absent else []
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
        remark if len(processes) == total else f"{remark} ({', '.join(one['label'] for one in processes)})"
        for remark, processes in owners.items()
    ]


def _merge_options(parts: Sequence[tuple[_Json, _Json]]) -> dict[str, Any]:
    """Return the options of the first process that has them; ``differs`` has the values of other processes."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, part in parts for name in part["options"]):
        having = [(process, part["options"][name]) for process, part in parts if name in part["options"]]
        merged[name] = dict(having[0][1])
        if any(option["value"] != merged[name]["value"] for _, option in having):
            merged[name]["differs"] = {process["label"]: option["value"] for process, option in having}
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


REPORT_DIR: Final = "OVPATCH_REPORT_DIR"
_LAUNCHERS: Final = frozenset(
    {"torchrun", "accelerate", "accelerate-launch", "deepspeed", "fabric", "lightning", "composer", "torchx"}
)
_LAUNCHER_MODULES: Final = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "accelerate.commands",
    "deepspeed.launcher",
)
_HELPERS: Final = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "torch._inductor.compile_worker")


def get_process_role(arguments: list[str] | None = None) -> str:
    """Return the role of this process, from the command line of its interpreter.

    The role is ``launcher`` (such as torchrun's agent, which does not train), ``helper`` (fork servers and compile
    workers, which may be patched because they fork) or ``worker``.
    """
    line = sys.orig_argv if arguments is None else arguments
    program = _program(line[1:])
    if program.startswith("-c"):
        return "helper" if any(name in program for name in _HELPERS) else "worker"
    if any(program == name or program.startswith(name + ".") for name in _LAUNCHER_MODULES):
        return "launcher"
    if any(name in os.path.normpath(program).replace(os.sep, ".") for name in _HELPERS[2:]):
        return "helper"
    stem = os.path.basename(program).removesuffix(".exe").removesuffix("-script.py")
    return "launcher" if stem in _LAUNCHERS else "worker"


def _program(arguments: list[str]) -> str:
    """Return the module, ``-c`` with its code, or the script that a Python command line runs."""
    rest = iter(arguments)
    for argument in rest:
        if re.fullmatch(r"-[bBdEiIOPqsSuvx]*m", argument):
            return next(rest, "")
        if re.fullmatch(r"-[bBdEiIOPqsSuvx]*c", argument):
            return "-c " + next(rest, "")
        if argument in ("-W", "-X", "--check-hash-based-pycs"):
            next(rest, None)
        elif not argument.startswith("-"):
            return argument
    return ""


class _Reporter:
    """Writes the report file of this process."""

    def __init__(self, directory: Path, make_report: Callable[[], Report]) -> None:
        self._directory, self._make_report = directory, make_report
        self._born: Final = {os.getpid(): time.time_ns()}  # by pid; two processes may have one, in turn
        self._base: dict[str, Any] = {}
        self._base_of_children: dict[str, Any] = {}

    def get_path(self) -> Path:
        """Return the path of this process's file; a forked child has its own."""
        born = self._born.setdefault(os.getpid(), time.time_ns())
        return self._directory / f"worker-{os.getpid()}-{born}.json"

    def write(self, *, is_last: bool = False) -> None:
        """Write the current report. A missing directory, as on another machine, is no error."""
        if not self._directory.is_dir():
            logger.debug("no directory %s here: this process does not report to `ovpatch run`", self._directory)
            return
        data = subtract_report(self._make_report().to_json(), self._base)
        data["restart"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
        data["finished"] = is_last
        worked = any(count for feature in data["features"] for count in feature["counters"].values())
        if current_process().daemon and not worked:  # of a pool or data loader
            self.get_path().unlink(missing_ok=True)
        else:
            save_json(self.get_path(), data)

    def write_safely(self, *, is_last: bool) -> None:
        """Write the report of a process that may train; never raises."""
        try:
            if may_train():
                self.write(is_last=is_last)
        except Exception as error:  # noqa: BLE001  # an error at exit would change the script's exit status
            logger.debug("the report was not written: %r", error)

    def write_at_exit(self) -> None:
        """Write the last report of a process that may train; never raises."""
        self.write_safely(is_last=True)

    def write_after_fork(self) -> None:
        """Write the first report of a forked child that may train; never raises."""
        self.write_safely(is_last=False)

    def keep_counts(self) -> None:
        """Keep the counts before a fork, so that the child does not report them again."""
        try:
            self._base_of_children = self._make_report().to_json()
        except Exception as error:  # noqa: BLE001  # an error would break the user's fork; at worst counts are doubled
            logger.debug("no report before a fork: %r", error)

    def subtract_parent(self) -> None:
        """Subtract the parent's counts in a forked child."""
        self._base = self._base_of_children


_reporter: _Reporter | None = None


def start_reporting(make_report: Callable[[], Report]) -> None:
    """Report this process to ``ovpatch run``, now and at exit, if that started it."""
    global _reporter
    directory = os.environ.get(REPORT_DIR)
    if not directory or get_process_role() == "launcher":
        return
    if _reporter is None:
        _reporter = _Reporter(Path(directory), make_report)
        os.register_at_fork(before=_reporter.keep_counts, after_in_child=_reporter.subtract_parent)
        write_at_exit(_reporter.write_at_exit)
        util.register_after_fork(_reporter, _Reporter.write_after_fork)
    if may_train():
        _reporter.write()


def may_train() -> bool:
    """Whether this process may train: it is a worker, or the child of a fork server."""
    return get_process_role() == "worker" or parent_process() is not None


def write_report_now(*, is_last: bool) -> None:
    """Write the report of a process that may be killed, or the last one before an exit without :mod:`atexit`."""
    if _reporter is not None:
        _reporter.write_safely(is_last=is_last)


_exit_actions: list[Callable[[], None]] = []


def write_at_exit(write: Callable[[], None]) -> None:
    """Call what writes results when this process, or a forked child of multiprocessing, ends by itself.

    An observed child has results of its own. What ranks do at their exit, by ``register_at_exit`` of ``overlap``,
    leaves forks out, which are no ranks. Children of :mod:`multiprocessing` drop inherited finalizers, and until Python
    3.12 skip :mod:`atexit`, so each registers its own finalizer.
    """
    if not _exit_actions:
        atexit.register(_run_exit_actions)
        util.register_after_fork(_run_exit_actions, lambda run: util.Finalize(None, run, exitpriority=100))
        if parent_process() is not None:
            util.Finalize(None, _run_exit_actions, exitpriority=100)
    _exit_actions.append(write)


def _run_exit_actions() -> None:
    while _exit_actions:
        _exit_actions.pop()()


def subtract_report(data: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report's JSON without the counts of an earlier one."""
    counted = {feature["name"]: feature["counters"] for feature in base.get("features", ())}
    for feature in data["features"]:
        before = counted.get(feature["name"], {})
        feature["counters"] = {name: count - before.get(name, 0) for name, count in feature["counters"].items()}
    called = {(patch["feature"], patch["target"]): patch for patch in base.get("patches", ())}
    for patch in data["patches"]:
        earlier = called.get((patch["feature"], patch["target"]), {})
        for count in ("calls", "traces"):
            patch[count] -= earlier.get(count, 0)
    return data


def write_failure(message: str) -> None:
    """Record that this process could not be patched, so that ``ovpatch run`` fails."""
    directory = os.environ.get(REPORT_DIR)
    if directory and Path(directory).is_dir() and get_process_role() == "worker":
        path = Path(directory) / f"failed-{os.getpid()}-{time.time_ns()}.json"
        save_json(path, {"pid": os.getpid(), "rank": os.environ.get("RANK"), "error": message})


def save_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_reports(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Return the contents of all files of a kind (``worker``, ``failed``) in a directory."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob(f"{kind}-*.json"))]


VARIABLE: Final = "OVPATCH_INSIGHT"

#: Signal that makes a process dump its stacks. Scripts and launchers use the others.
STACKS: Final = signal.SIGRTMIN + 5


@dataclass(frozen=True)
class Orders:
    """The orders to the processes of one variant."""

    worker: str  # module with a function ``start_worker(orders)``, which is called at the end of ``import torch``
    directory: Path  # directory of their results, visible to all hosts of the job
    details: Mapping[str, Any] = field(default_factory=dict)  # settings of the tool, in JSON types

    def variables(self) -> dict[str, str]:
        """Return the orders as environment variables."""
        data = {"worker": self.worker, "directory": str(self.directory.absolute()), "details": dict(self.details)}
        return {VARIABLE: json.dumps(data)}


def read_orders(environ: Mapping[str, str] | None = None) -> Orders | None:
    """Return the orders in the environment, if any."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if not text:
        return None
    data = json.loads(text)
    return Orders(data["worker"], Path(data["directory"]), data["details"])


def follow_orders() -> None:
    """Carry out the orders in this process, unless it is a launcher; OSError on a host that lacks their directory."""
    orders = read_orders()
    if orders is None or not may_train():
        return
    register_process(orders.directory)
    os.register_at_fork(after_in_child=lambda: _sign_in_again(orders.directory))
    import_module(orders.worker).start_worker(orders)


def _sign_in_again(directory: Path) -> None:
    """Register a forked child, which may be a rank, so that it does not write into its parent's file."""
    with suppress(OSError):  # the directory may be gone, and a fork must go on
        register_process(directory)


def register_process(directory: Path) -> None:
    """Write the pid of this process and its rank, if known, and install the handler that dumps its stacks."""
    launched = {name.lower(): os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    identity = {"pid": os.getpid(), "born": time.time(), **launched}
    save_json(directory / f"process-{os.getpid()}.json", identity)
    stacks = (directory / f"stacks-{os.getpid()}.txt").open("w", encoding="utf-8")
    faulthandler.register(STACKS, file=stacks, all_threads=True, chain=False)  # keeps the file open
