"""The report as data: the features that are on or off, with reasons and counters."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ovpatch._version import OLDEST_TORCH, __version__
from ovpatch.hookspecs import list_failures
from ovpatch.patching import PatchStatus
from ovpatch.patching.patch import explain_torch_mismatch
from ovpatch.session.feature_plan import FeatureRecord
from ovpatch.session.plugins import PluginError, Plugins
from ovpatch.settings.feature_options import OptionValue

# From worst to best; a merged report has the worst state of any process.
TROUBLE: Final = ("failed", "conflict", "incompatible", "unavailable", "shadowed")
STATES: Final = (*TROUBLE, "skipped", "pending", "disabled", "applied")
NEVER_CALLED: Final = "applied, but not called so far"
NO_WORK: Final = "applied and called, but it has done nothing so far"
IDLE: Final = frozenset({NEVER_CALLED, NO_WORK})
# An active feature has the first of these states that any of its patches has.
_LIVE_STATES: Final = (
    "failed",
    "conflict",
    "incompatible",
    "applied",
    "pending",
    "shadowed",
    "skipped",
)
UNTESTED: Final = "untested with torch"
NOT_IMPORTED: Final = "not imported"
SPAWNED: Final = (
    "child processes were started that run apply() only if it is at the top of the program's "
    'module: move it out of if __name__ == "__main__", or set OVPATCH_AUTO=1'
)


@dataclass(frozen=True)
class FeatureReport:
    """The report of one feature.

    Attributes:
        name: The feature.
        state: One of :data:`STATES`.
        reason: The reason for this state; empty for an applied feature.
        remarks: Remarks for the user.
        options: Value and source of every option; empty while the plugin is not imported.
        counters: Counters of the feature in this process.
        levels: The counters that are no totals: ``level`` or ``peak`` by name.
        distribution: Distribution of the plugin.
        summary: One line; empty while the plugin is not imported.
        default: Whether a plain ``apply()`` turns it on; None while the plugin is not imported.
        requires: Features without which it cannot run; empty while the plugin is not imported.
        reorders_products: Whether it sums matrix products in another order than stock PyTorch.
        work: Counters of real work; see :attr:`ovpatch.Feature.work`.
        gains: Clauses about the work; see :attr:`ovpatch.Feature.gains`.
        fits: For a feature that is off, the reason why it would help this script; empty otherwise,
            and in all reports but the last one of a process under ``ovpatch run``.
    """

    name: str
    state: str
    reason: str = ""
    remarks: tuple[str, ...] = ()
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    levels: Mapping[str, str] = field(default_factory=dict)
    distribution: str = ""
    summary: str = ""
    default: bool | None = None
    requires: tuple[str, ...] = ()
    reorders_products: bool = False
    work: tuple[str, ...] = ()
    gains: tuple[str, ...] = ()
    fits: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the feature as plain data for JSON."""
        options = {name: option._asdict() for name, option in self.options.items()}
        return {
            name: to_plain_data(value)
            for name, value in (vars(self) | {"options": options}).items()
            if name not in ("summary", "default")
        }


@dataclass(frozen=True)
class Report:
    """The state of ovpatch in one process at one moment.

    Attributes:
        version: Version of ovpatch.
        torch: Version of torch.
        python: Version of Python.
        pid: The process.
        rank: Rank in the training job; None outside of one.
        features: All installed features.
        patches: All patches of the session.
    """

    version: str
    torch: str
    python: str
    pid: int
    rank: int | None
    features: tuple[FeatureReport, ...] = ()
    patches: tuple[PatchStatus, ...] = ()

    def __getitem__(self, name: str) -> FeatureReport:
        """Return the report of one feature; KeyError if no such feature is installed."""
        for feature in self.features:
            if feature.name == name:
                return feature
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, ready for ``json.dumps``."""
        return vars(self) | {
            "features": [feature.to_json() for feature in self.features],
            "patches": [patch.to_json() for patch in self.patches],
        }

    def summary(self) -> str:
        """Return one line: the features by state, with reasons."""
        groups: dict[str, list[str]] = {}
        for feature in self.features:
            has_reason = feature.reason and feature.state != "disabled"
            why = f" ({feature.reason})" if has_reason else ""
            groups.setdefault(feature.state, []).append(feature.name + why)
        lines = [
            f"{state} {', '.join(groups[state])}" for state in reversed(STATES) if state in groups
        ]
        return "; ".join(lines) or (
            "no features are installed (is the package installed, or only on the path?)"
        )

    def gains(self) -> dict[str, str]:
        """Return the work of each feature that did any in this process, in words and units."""
        from ovpatch.session.gains import describe_gains

        return {
            feature.name: describe_gains(feature.gains, feature.counters)
            for feature in self.features
            if feature.state == "applied" and did_work(feature.counters, feature.work)
        }

    def table(self, *, colour: bool = False, width: int | None = None) -> str:
        """Return the report as a table.

        Args:
            colour: Whether to use terminal colours.
            width: Columns; the width of the terminal by default.
        """
        from ovpatch.session.report_table import format_report

        return format_report(self.to_json(), colour=colour, width=width)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """Return the report as HTML, which Jupyter shows."""
        from ovpatch.session.report_table import format_html

        return format_html(self.to_json())


def did_work(counters: Mapping[str, int], work: Collection[str] = ()) -> bool:
    """Return whether counters show work: the counters ``work``, or by default all but ``stock_…``.

    Counters ``stock_…`` count calls that fell back to torch.
    """
    return any(
        count
        for name, count in counters.items()
        if (name in work if work else not name.startswith("stock_"))
    )


def to_plain_data(value: Any) -> Any:
    """Return a value with JSON types only; other types become strings."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain_data(item) for item in value]
    return str(value)


def make_report(
    records: Mapping[str, FeatureRecord],
    active: Collection[str],
    plugins: Plugins,
    patches: Sequence[PatchStatus],
    fits: Mapping[str, str],
) -> Report:
    """Return the report of this process.

    Args:
        records: All features.
        active: The features that are on.
        plugins: The plugins of the session.
        patches: All patches of the session.
        fits: The reasons why features that are off would help this script.
    """
    torch = get_torch_version()
    features = []
    for name, record in records.items():
        own = [patch for patch in patches if patch.feature == name]
        on = name in active
        features.append(
            _active(record, plugins, own, torch)
            if on
            else _inactive(record, own, fits.get(name, ""))
        )
    return Report(
        version=__version__,
        torch=torch,
        python=platform.python_version(),
        pid=os.getpid(),
        rank=get_rank(),
        features=tuple(features),
        patches=tuple(patches),
    )


def get_torch_version() -> str:
    """Return the version of torch, if it is imported."""
    return str(getattr(sys.modules.get("torch"), "__version__", NOT_IMPORTED))


def explain_old_torch() -> str:
    """Return the error that the imported torch is too old, with the remedy; "" if it is not."""
    torch = get_torch_version()
    release = tuple(int(number) for number in torch.split(".")[:2] if number.isdigit())
    if len(release) < 2 or release >= OLDEST_TORCH:
        return ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"torch {torch} is older than {oldest}, and features may be unavailable. Install torch >= {oldest}."


def get_rank() -> int | None:
    """Return the rank of this process; None outside of a job.

    The process group knows it. Before there is one, the launcher's variables do.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


def _inactive(record: FeatureRecord, patches: Sequence[PatchStatus], fits: str) -> FeatureReport:
    shadowed = [patch for patch in patches if patch.state == "shadowed"]
    state, reason = record.state, record.reason
    if shadowed:
        state = state if state in TROUBLE else "shadowed"
        reason = "; ".join([reason, *(_describe_patch(patch) for patch in shadowed)])
    return replace(_row(record, state, reason, (), {}), fits=fits)


def _active(
    record: FeatureRecord, plugins: Plugins, patches: Sequence[PatchStatus], torch: str
) -> FeatureReport:
    state, reason = _live_state(patches)
    counters, levels, trouble = _counters(record.found.name, plugins)
    remarks = [
        *record.remarks,
        *list_failures(record.found.name),
        *_call_remarks(record.found.name, plugins),
        *trouble,
        *_untested(record, torch),
    ]
    if state == "applied":
        remarks += [
            _describe_patch(patch)
            for patch in patches
            if patch.state in ("pending", "skipped", "shadowed")
        ]
        if idle := _idleness(
            counters, record.feature.work if record.feature is not None else (), patches
        ):
            # Children of these start methods import the program again.
            ways = ("popen_spawn_posix", "popen_forkserver")
            spawned = any(f"multiprocessing.{way}" in sys.modules for way in ways)
            remarks += [idle, SPAWNED] if spawned and "OVPATCH_AUTO" not in os.environ else [idle]
    row = _row(record, state, reason, tuple(dict.fromkeys(remarks)), counters)
    return replace(row, levels=levels)


def _idleness(
    counters: Mapping[str, int], work: Collection[str], patches: Sequence[PatchStatus]
) -> str:
    """Return the remark on a feature that has done no work so far; "" if it has, or has no counters."""
    functions = [patch for patch in patches if patch.kind != "hook" and patch.state == "applied"]
    if did_work(counters, work) or not (counters or functions):
        return ""
    if all(patch.never_called for patch in functions):
        return NEVER_CALLED
    return NO_WORK if counters else ""


def _row(
    record: FeatureRecord,
    state: str,
    reason: str,
    remarks: tuple[str, ...],
    counters: Mapping[str, int],
) -> FeatureReport:
    feature = record.feature
    return FeatureReport(
        name=record.found.name,
        state=state,
        reason=reason,
        remarks=(*remarks, record.found.remark) if record.found.remark else remarks,
        options=dict(record.options),
        counters=counters,
        distribution=f"{record.found.distribution} {record.found.version}",
        summary=feature.summary if feature is not None else "",
        default=feature.default if feature is not None else None,
        requires=tuple(feature.requires) if feature is not None else (),
        reorders_products=feature is not None and feature.reorders_products,
        work=tuple(feature.work) if feature is not None else (),
        gains=tuple(feature.gains) if feature is not None else (),
    )


def _live_state(patches: Sequence[PatchStatus]) -> tuple[str, str]:
    """Return the state of an active feature from its patches: one that waited for an import may have failed."""
    by_state = {
        state: [patch for patch in patches if patch.state == state] for state in _LIVE_STATES
    }
    state = next((state for state, found in by_state.items() if found), "applied")
    # Pending or skipped patches mostly share a reason, such as a library that is not installed.
    reasons = [
        patch.reason if state in ("pending", "skipped") else _describe_patch(patch)
        for patch in by_state[state]
    ]
    return state, "" if state == "applied" else "; ".join(dict.fromkeys(reasons))


def _describe_patch(patch: PatchStatus) -> str:
    return f"{patch.target} is {patch.state.value}" + (f": {patch.reason}" if patch.reason else "")


def _counters(name: str, plugins: Plugins) -> tuple[dict[str, int], dict[str, str], list[str]]:
    """Return the counters, the levels and peaks among them, and remarks."""
    try:
        raw: Mapping[str, int] = plugins.call_hook(name, "ovpatch_counters") or {}
        levels: Mapping[str, str] = plugins.call_hook(name, "ovpatch_levels") or {}
        return {str(key): int(count) for key, count in raw.items()}, dict(levels), []
    # A plugin's objects may raise any exception.
    except Exception as error:  # noqa: BLE001
        return {}, {}, [f"its counters cannot be read: {error}"]


def _call_remarks(name: str, plugins: Plugins) -> list[str]:
    try:
        return list(plugins.call_for_texts(name, "ovpatch_remarks"))
    except PluginError as error:
        return [str(error)]


def _untested(record: FeatureRecord, torch: str) -> list[str]:
    if record.feature is None or not record.feature.torch or torch == NOT_IMPORTED:
        return []
    untested = explain_torch_mismatch(record.feature.torch) is not None
    return [f"{UNTESTED} {torch} (tested with {record.feature.torch})"] if untested else []
