"""The report: which features are on or off and why, as data, as JSON and as a table."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from ovpatch._version import OLDEST_TORCH, __version__
from ovpatch.hookspecs import list_failures
from ovpatch.patching import PatchStatus
from ovpatch.patching.patch import explain_torch_mismatch
from ovpatch.session.plan import FeatureRecord
from ovpatch.session.plugins import PluginError, Plugins
from ovpatch.settings.options import DEFAULT, OptionValue

# From worst to best; a merged report has the worst state of any process.
TROUBLE: Final = ("failed", "conflict", "incompatible", "unavailable", "shadowed")
STATES: Final = (*TROUBLE, "skipped", "pending", "disabled", "applied")
NEVER_CALLED: Final = "applied, but not called so far"
NO_WORK: Final = "applied and called, but it has done nothing so far"
IDLE: Final = frozenset({NEVER_CALLED, NO_WORK})
# The first of these that any patch of an active feature has is the feature's.
_LIVE_STATES: Final = ("failed", "conflict", "incompatible", "applied", "pending", "shadowed", "skipped")
_HEADS: Final = ("feature", "state", "details")
_MOST_WORKED: Final = 3
_UNTESTED: Final = "untested with torch"
_OFF: Final = "off by default"
_COLOURS: Final = {
    "applied": "green",
    "applied, idle": "yellow",
    "pending": "yellow",
    "skipped": "yellow",
    "disabled": "dim",
}


@dataclass(frozen=True)
class FeatureReport:
    """The report of one feature.

    Attributes:
        name: The feature.
        state: One of :data:`STATES`.
        reason: Why it is in this state; empty for an applied feature.
        remarks: Remarks for the user.
        options: Value and source of every option; empty while the plugin is not imported.
        counters: Counters of the feature in this process.
        distribution: Distribution of the plugin.
        summary: One line; empty while the plugin is not imported.
        default: Whether a plain ``apply()`` turns it on; None while the plugin is not imported.
        requires: Features without which it cannot run; empty while the plugin is not imported.
        reorders_products: Whether it sums matrix products in another order than stock.
        work: Counters of real work; see :attr:`ovpatch.Feature.work`.
    """

    name: str
    state: str
    reason: str = ""
    remarks: tuple[str, ...] = ()
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    distribution: str = ""
    summary: str = ""
    default: bool | None = None
    requires: tuple[str, ...] = ()
    reorders_products: bool = False
    work: tuple[str, ...] = ()

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
            why = f" ({feature.reason})" if feature.reason and feature.state != "disabled" else ""
            groups.setdefault(feature.state, []).append(feature.name + why)
        parts = [f"{state} {', '.join(groups[state])}" for state in reversed(STATES) if state in groups]
        return "; ".join(parts) or "no features are installed (is the package installed, or only on the path?)"

    def table(self, *, colour: bool = False, width: int | None = None) -> str:
        """Return the report as a table.

        Args:
            colour: Whether to use terminal colours.
            width: Columns; those of the terminal by default.
        """
        return format_report(self.to_json(), colour=colour, width=width)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """Return the report as HTML, which Jupyter shows."""
        data = self.to_json()
        rows = [(f["name"], _shown_state(f), _details(f)) for f in data["features"]]
        body = "".join(f"<tr>{''.join(f'<td>{_to_html(cell)}</td>' for cell in row)}</tr>" for row in rows)
        heads = "".join(f"<th>{head}</th>" for head in _HEADS)
        return f"<table><caption>{_to_html(_title(data))}</caption><tr>{heads}</tr>{body}</table>"


def did_work(counters: Mapping[str, int], work: Collection[str] = ()) -> bool:
    """Return whether counters show work: those of ``work``, or all but ``stock_…``, which count calls left to stock."""
    return any(count for name, count in counters.items() if (name in work if work else not name.startswith("stock_")))


def to_plain_data(value: Any) -> Any:
    """Return a value with JSON types only; other types become text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain_data(item) for item in value]
    return str(value)


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour output to a stream, by NO_COLOR, FORCE_COLOR, TERM and whether it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def format_report(data: Mapping[str, Any], *, colour: bool = False, width: int | None = None) -> str:
    """Return the table of :meth:`Report.to_json`, or of :func:`ovpatch.session.workers.merge_reports`."""
    rows = [(f["name"], _shown_state(f), _details(f)) for f in data["features"]]
    return render_table(_title(data), _HEADS, rows, colour=colour, width=width)


def _title(data: Mapping[str, Any]) -> str:
    return f"ovpatch {data['version']}, torch {data['torch']}, Python {data['python']}"


def _to_html(text: str) -> str:
    """Return text for a cell: `left` so that Jupyter does not align it to the right."""
    import html  # only where a notebook shows a report

    lines = "<br>".join(html.escape(line) for line in text.splitlines())
    return f'<div style="text-align: left">{lines}</div>'


def summarise_report(data: Mapping[str, Any], processes: int, *, width: int | None = None) -> str:
    """Return a merged report in at most six lines: what each feature did, what was left to stock, what did nothing.

    Lines that are longer than ``width``, by default the terminal's, are cut; the last one continues on those left.
    """
    worked, stock, nothing, off = [], [], [], []
    for one in data["features"]:
        name, remarks = one["name"], [text for text in one["remarks"] if not text.startswith(_UNTESTED)]
        if one["state"] == "applied" and did_work(one["counters"], one["work"]):
            counts = (f"{key} {count}" for key, count in one["counters"].items() if count and key[:6] != "stock_")
            worked.append((name, ", ".join(counts)))
            if any(count for key, count in one["counters"].items() if key.startswith("stock_")):
                stock += [f"{name}: {remark}" for remark in remarks if not remark.startswith(tuple(IDLE))]
        elif one["state"] in TROUBLE:
            stock.append(f"{name} is {one['state']}: {one['reason']}")
        elif one["state"] == "disabled" and one["reason"].startswith(_OFF):
            off.append(name)
        else:
            why = one["reason"] or next(iter(remarks), "")
            nothing.append(f"{name} ({why})" if why else name)
    if len(worked) > _MOST_WORKED:
        rest = worked[_MOST_WORKED - 1 :]
        worked[_MOST_WORKED - 1 :] = [("others", ", ".join(name for name, _ in rest))]
    if off:
        nothing.append(f"{', '.join(off)} ({_OFF})")
    columns = width or shutil.get_terminal_size((120, 24)).columns
    plural = "es" if processes != 1 else ""
    lines = [f"ovpatch {data['version']}, torch {data['torch']}: {processes} process{plural} reported"]
    lines += [f"  {name:<15} {text}" for name, text in [*worked, ("stock", "; ".join(stock))] if text]
    lines = [line if len(line) <= columns else f"{line[: columns - 3]}..." for line in lines]
    if nothing:
        row = f"  {'not active':<15} {', '.join(nothing)}"
        indent = " " * 18
        lines += textwrap.wrap(row, columns, subsequent_indent=indent, max_lines=6 - len(lines), placeholder="...")
    return "\n".join(lines)


def _shown_state(feature: Mapping[str, Any]) -> str:
    idle = feature["state"] == "applied" and not IDLE.isdisjoint(feature["remarks"])
    return "applied, idle" if idle else str(feature["state"])


def _details(feature: Mapping[str, Any]) -> str:
    counted = feature["counters"] if feature["state"] != "pending" or any(feature["counters"].values()) else {}
    counters = ", ".join(f"{name} {count}" for name, count in counted.items())
    changed = [
        f"{name}={option['value']} ({option['source']})"
        for name, option in feature["options"].items()
        if option["source"] != DEFAULT
    ]
    return "\n".join(line for line in (feature["reason"], counters, ", ".join(changed), *feature["remarks"]) if line)


def render_table(
    title: str,
    heads: Iterable[str],
    rows: Iterable[tuple[str, ...]],
    *,
    colour: bool = False,
    width: int | None = None,
    right: Collection[str] = (),
) -> str:
    """Return a table as text, plain ASCII unless ``colour``; ``right`` are the heads of right-aligned columns."""
    from rich import box  # rich is slow to import, and apply() does not need it
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), box=box.SIMPLE_HEAD if colour else box.ASCII, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold", justify="right" if head in right else "left")
    for row in rows:
        table.add_row(*(Text(cell, style="red" if cell in TROUBLE else _COLOURS.get(cell, "")) for cell in row))
    columns = width or shutil.get_terminal_size((120, 24)).columns
    console = Console(width=columns, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


NOT_IMPORTED: Final = "not imported"
SPAWNED: Final = (
    "child processes were started that run apply() only where it stands at the top of the program's module: move it "
    'out of if __name__ == "__main__", or set OVPATCH_AUTO=1'
)


def make_report(
    records: Mapping[str, FeatureRecord], active: Collection[str], plugins: Plugins, patches: Sequence[PatchStatus]
) -> Report:
    """Return the report of this process."""
    torch = get_torch_version()
    features = []
    for name, record in records.items():
        own = [patch for patch in patches if patch.feature == name]
        on = name in active
        features.append(_active(record, plugins, own, torch) if on else _inactive(record, own))
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
    """Return why the imported torch is too old, with the remedy; empty if it is not."""
    torch = get_torch_version()
    release = tuple(int(number) for number in torch.split(".")[:2] if number.isdigit())
    if len(release) < 2 or release >= OLDEST_TORCH:
        return ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"torch {torch} is older than {oldest}, and features may be unavailable. Install torch >= {oldest}."


def get_rank() -> int | None:
    """Return the rank of this process, from the process group if there is one, else from the launcher's variables."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


def _inactive(record: FeatureRecord, patches: Sequence[PatchStatus]) -> FeatureReport:
    shadowed = [patch for patch in patches if patch.state == "shadowed"]
    state, reason = record.state, record.reason
    if shadowed:
        state = state if state in TROUBLE else "shadowed"
        reason = "; ".join([reason, *(_say(patch) for patch in shadowed)])
    return _row(record, state, reason, (), {})


def _active(record: FeatureRecord, plugins: Plugins, patches: Sequence[PatchStatus], torch: str) -> FeatureReport:
    state, reason = _live_state(patches)
    counters, trouble = _counters(record.found.name, plugins)
    remarks = [
        *record.remarks,
        *list_failures(record.found.name),
        *_asked_remarks(record.found.name, plugins),
        *trouble,
        *_untested(record, torch),
    ]
    if state == "applied":
        remarks += [_say(patch) for patch in patches if patch.state in ("pending", "skipped", "shadowed")]
        if idle := _idleness(counters, record.feature.work if record.feature is not None else (), patches):
            ways = ("popen_spawn_posix", "popen_forkserver")  # of starting children that import the program anew
            spawned = any(f"multiprocessing.{way}" in sys.modules for way in ways)
            remarks += [idle, SPAWNED] if spawned and "OVPATCH_AUTO" not in os.environ else [idle]
    return _row(record, state, reason, tuple(dict.fromkeys(remarks)), counters)


def _idleness(counters: Mapping[str, int], work: Collection[str], patches: Sequence[PatchStatus]) -> str:
    """Return the remark on a feature that has done no work so far; "" if it has, or has no counters."""
    functions = [patch for patch in patches if patch.kind != "hook" and patch.state == "applied"]
    if did_work(counters, work) or not (counters or functions):
        return ""
    if all(patch.never_called for patch in functions):
        return NEVER_CALLED
    return NO_WORK if counters else ""


def _row(
    record: FeatureRecord, state: str, reason: str, remarks: tuple[str, ...], counters: Mapping[str, int]
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
    )


def _live_state(patches: Sequence[PatchStatus]) -> tuple[str, str]:
    """Return the state of an active feature from its patches: one that waited for an import may have failed."""
    by_state = {state: [patch for patch in patches if patch.state == state] for state in _LIVE_STATES}
    state = next((state for state, found in by_state.items() if found), "applied")
    # Pending or skipped patches mostly share a reason, such as a library that is not installed.
    texts = [patch.reason if state in ("pending", "skipped") else _say(patch) for patch in by_state[state]]
    return state, "" if state == "applied" else "; ".join(dict.fromkeys(texts))


def _say(patch: PatchStatus) -> str:
    return f"{patch.target} is {patch.state.value}" + (f": {patch.reason}" if patch.reason else "")


def _counters(name: str, plugins: Plugins) -> tuple[dict[str, int], list[str]]:
    try:
        raw: Mapping[str, int] = plugins.call_hook(name, "ovpatch_counters") or {}
        return {str(key): int(count) for key, count in raw.items()}, []
    except Exception as error:  # noqa: BLE001  # a plugin's objects may raise any exception
        return {}, [f"its counters cannot be read: {error}"]


def _asked_remarks(name: str, plugins: Plugins) -> list[str]:
    try:
        return list(plugins.call_for_texts(name, "ovpatch_remarks"))
    except PluginError as error:
        return [str(error)]


def _untested(record: FeatureRecord, torch: str) -> list[str]:
    if record.feature is None or not record.feature.torch or torch == NOT_IMPORTED:
        return []
    untested = explain_torch_mismatch(record.feature.torch) is not None
    return [f"{_UNTESTED} {torch} (tested with {record.feature.torch})"] if untested else []
