"""Taking a report: the session's entries, the plugins' counters and the patches' states at one moment."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ovpatch._version import __version__
from ovpatch.patching import PatchStatus
from ovpatch.patching.versions import torch_mismatch
from ovpatch.reports.reporting import NEVER_CALLED, NO_WORK, TROUBLE, FeatureReport, Report, did_work
from ovpatch.session.plan import Entry
from ovpatch.session.plugins import PluginError, Plugins

NOT_IMPORTED: Final = "not imported"
SPAWNED: Final = (
    "child processes were started that run apply() only where it stands at the top of the program's module: move it "
    'out of if __name__ == "__main__", or set OVPATCH_AUTO=1'
)


def take(
    entries: Mapping[str, Entry], active: Collection[str], plugins: Plugins, patches: Sequence[PatchStatus]
) -> Report:
    """Return the report of this process.

    Args:
        entries: What the session knows, by feature.
        active: Features that are on.
        plugins: Where to ask for counters and remarks.
        patches: States of all patches.
    """
    torch = torch_version()
    features = []
    for name, entry in entries.items():
        own = [patch for patch in patches if patch.feature == name]
        on = name in active
        features.append(_active(entry, plugins, own, torch) if on else _inactive(entry, own))
    return Report(
        version=__version__,
        torch=torch,
        python=platform.python_version(),
        pid=os.getpid(),
        rank=rank(),
        features=tuple(features),
        patches=tuple(patches),
    )


def torch_version() -> str:
    """Return the version of torch, if it is imported."""
    return str(getattr(sys.modules.get("torch"), "__version__", NOT_IMPORTED))


def rank() -> int | None:
    """Return the rank of this process, from the process group if there is one, else from the launcher's variables."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


def _inactive(entry: Entry, patches: Sequence[PatchStatus]) -> FeatureReport:
    shadowed = [patch for patch in patches if patch.state == "shadowed"]
    state, reason = entry.state, entry.reason
    if shadowed:
        state = state if state in TROUBLE else "shadowed"
        reason = "; ".join([reason, *(_say(patch) for patch in shadowed)])
    return _row(entry, state, reason, (), {})


def _active(entry: Entry, plugins: Plugins, patches: Sequence[PatchStatus], torch: str) -> FeatureReport:
    state, reason = _live_state(patches)
    counters, trouble = _counters(entry.found.name, plugins)
    remarks = [*entry.remarks, *_asked_remarks(entry.found.name, plugins), *trouble, *_untested(entry, torch)]
    if state == "applied":
        remarks += [_say(patch) for patch in patches if patch.state in ("pending", "skipped", "shadowed")]
        if idle := _idleness(counters, entry.feature.work if entry.feature is not None else (), patches):
            remarks += [idle, SPAWNED] if _has_spawned() else [idle]
    return _row(entry, state, reason, tuple(dict.fromkeys(remarks)), counters)


def _idleness(counters: Mapping[str, int], work: Collection[str], patches: Sequence[PatchStatus]) -> str:
    """Return what to say of a feature that has done nothing so far; "" if it has, or cannot tell.

    Calls are counted where they enter a patch, so a wrapper that raised was called.
    """
    functions = [patch for patch in patches if patch.kind != "hook" and patch.state == "applied"]
    if did_work(counters, work) or not (counters or functions):
        return ""
    if all(patch.never_called for patch in functions):
        return NEVER_CALLED
    return NO_WORK if counters else ""


def _has_spawned() -> bool:
    """Whether this process started children that import the program anew, without being told to patch them."""
    ways = ("popen_spawn_posix", "popen_spawn_win32", "popen_forkserver")
    return "OVPATCH_AUTO" not in os.environ and any(f"multiprocessing.{way}" in sys.modules for way in ways)


def _row(entry: Entry, state: str, reason: str, remarks: tuple[str, ...], counters: Mapping[str, int]) -> FeatureReport:
    feature = entry.feature
    return FeatureReport(
        name=entry.found.name,
        state=state,
        reason=reason,
        remarks=(*remarks, entry.found.remark) if entry.found.remark else remarks,
        options=dict(entry.options),
        counters=counters,
        distribution=f"{entry.found.distribution} {entry.found.version}",
        summary=feature.summary if feature is not None else "",
        default=feature.default if feature is not None else None,
        requires=tuple(feature.requires) if feature is not None else (),
        reorders_products=feature is not None and feature.reorders_products,
        work=tuple(feature.work) if feature is not None else (),
    )


def _live_state(patches: Sequence[PatchStatus]) -> tuple[str, str]:
    """Return the state of a feature that is on, from its patches: late imports may still have gone wrong."""
    for state in ("failed", "conflict", "incompatible"):
        bad = [patch for patch in patches if patch.state == state]
        if bad:
            return state, "; ".join(_say(patch) for patch in bad)
    states = {str(patch.state.value) for patch in patches}
    if not states or "applied" in states:
        return "applied", ""
    for state in ("pending", "shadowed", "skipped"):
        if state in states:
            found = [patch for patch in patches if patch.state == state]
            # Patches that wait or were skipped mostly share a reason: a library that is not imported, or not there.
            texts = [_say(patch) if state == "shadowed" else patch.reason for patch in found]
            return state, "; ".join(dict.fromkeys(texts))
    return "applied", ""


def _say(patch: PatchStatus) -> str:
    return f"{patch.target} is {patch.state.value}" + (f": {patch.reason}" if patch.reason else "")


def _counters(name: str, plugins: Plugins) -> tuple[dict[str, int], list[str]]:
    try:
        raw: Mapping[str, int] = plugins.call(name, "ovpatch_counters") or {}
        return {str(key): int(count) for key, count in raw.items()}, []
    except Exception as error:  # noqa: BLE001  # what a plugin returns may raise anything when it is read
        return {}, [f"its counters cannot be read: {error}"]


def _asked_remarks(name: str, plugins: Plugins) -> list[str]:
    try:
        return list(plugins.texts(name, "ovpatch_remarks"))
    except PluginError as error:
        return [str(error)]


def _untested(entry: Entry, torch: str) -> list[str]:
    if entry.feature is None or not entry.feature.torch or torch == NOT_IMPORTED:
        return []
    untested = torch_mismatch(entry.feature.torch) is not None
    return [f"untested with torch {torch} (tested with {entry.feature.torch})"] if untested else []
