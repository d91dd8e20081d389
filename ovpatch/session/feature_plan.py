"""The plan of one ``apply()``: which features are on, and why not. All decisions are made before any patch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from itertools import combinations
from typing import Any, Final

from ovpatch.exit_codes import ExitCode
from ovpatch.hookspecs import Feature, OptionError
from ovpatch.session.plugins import FoundPlugin, PluginError, Plugins, describe_error
from ovpatch.settings import options as opts
from ovpatch.settings import settings
from ovpatch.settings.settings import Environment, FeatureRequest


def sort_by_requirements(features: Mapping[str, Feature]) -> list[str]:
    """Return the names, each after the features that it requires; otherwise, and in circles, in the given order."""
    ordered: list[str] = []
    visiting: set[str] = set()

    def visit(name: str) -> None:
        if name in visiting or name not in features:
            return
        visiting.add(name)
        for required in features[name].requires:
            visit(required)
        ordered.append(name)

    for name in features:
        visit(name)
    return ordered


def find_dependents(name: str, features: Mapping[str, Feature]) -> list[str]:
    """Return the features that require ``name``, directly or through others."""
    found: list[str] = []
    wave = [name]
    while wave:
        wave = [
            dependent
            for dependent, feature in features.items()
            if dependent != name and dependent not in found and set(wave) & set(feature.requires)
        ]
        found += wave
    return found


def find_conflicts(
    features: Mapping[str, Feature], ranking: Sequence[Collection[str]]
) -> dict[str, str]:
    """Return the features that cannot run together, each with the reason why it stays off.

    ``ranking`` has groups of names, the strongest first. Of two features in conflict the one in the stronger group
    stays on; two of the same group are both left out.
    """
    lost: dict[str, str] = {}
    pairs = combinations(features, 2)
    for a, b in sorted(
        pairs, key=lambda pair: min(_rank(pair[0], ranking), _rank(pair[1], ranking))
    ):
        in_conflict = b in features[a].conflicts or a in features[b].conflicts
        if not in_conflict or a in lost or b in lost:
            continue
        for loser, winner in ((a, b), (b, a)):
            if _rank(loser, ranking) >= _rank(winner, ranking):
                lost[loser] = (
                    f"conflicts with {winner!r}; switch one of them off, for example by "
                    f"OVPATCH=-{winner}"
                )
    return lost


def _rank(name: str, ranking: Sequence[Collection[str]]) -> int:
    return next((index for index, group in enumerate(ranking) if name in group), len(ranking))


def find_unmet(features: Mapping[str, Feature], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the features whose requirements are not on, directly or through others, each with the reason.

    ``reasons`` has the reasons why other features are off; a feature without a reason is not installed.
    """
    lost: dict[str, str] = {}
    changed = True
    while changed:
        changed = False
        for name, feature in features.items():
            missing = [
                required
                for required in feature.requires
                if required not in features or required in lost
            ]
            if missing and name not in lost:
                lost[name] = "; ".join(
                    _why_missing(required, reasons, lost) for required in missing
                )
                changed = True
    return lost


def _why_missing(name: str, reasons: Mapping[str, str], lost: Mapping[str, str]) -> str:
    why = lost.get(name) or reasons.get(name)
    if why is None:
        return f"requires {name!r}, which is not installed"
    return f"requires {name!r}, which is not on ({why}); name both, or OVPATCH=+{name}"


PLANNED: Final = "planned"
# The beginning of the reasons of settings that turn a feature off.
SWITCHED_OFF: Final = "off by OVPATCH"
_FINE: Final = frozenset({"applied", "pending", "disabled", PLANNED})


class FeatureError(RuntimeError):
    """A feature requested by name, or any feature in strict mode, cannot run. The call changes nothing."""

    exit_code = ExitCode.USAGE


@dataclass
class FeatureRecord:
    """One feature and its state."""

    found: FoundPlugin
    # Whether the settings turn it on, and which setting does.
    request: FeatureRequest
    # A state of the report, or ``planned`` during the call.
    state: str = "disabled"
    # The reason for this state.
    reason: str = ""
    # Its description; None if the plugin is not imported.
    feature: Feature | None = None
    options: dict[str, opts.OptionValue] = field(default_factory=dict)  # resolved options
    # Remarks of the plugin from its activation.
    remarks: tuple[str, ...] = ()
    # Whether the settings name it, or those of an earlier call while it was on.
    is_named: bool = False

    @property
    def is_switched_off(self) -> bool:
        """True if the user turned this feature off, rather than left it out."""
        return self.request.on is False and self.reason.startswith(SWITCHED_OFF)

    def stand_down(self, state: str, reason: str) -> None:
        """Set the state of a feature that will not be on."""
        self.state, self.reason = state, reason


@dataclass
class FeaturePlan:
    """The records of all features, and whether any skip is an error."""

    environment: Environment
    strict: bool
    records: dict[str, FeatureRecord]

    def get_planned(self) -> dict[str, Feature]:
        """Return the features that are planned, by name."""
        return {
            name: record.feature
            for name, record in self.records.items()
            if record.state == PLANNED and record.feature is not None
        }

    def drop_unmet(self) -> list[str]:
        """Leave out features whose requirements are not on; returns their names."""
        on = {
            n: e.feature
            for n, e in self.records.items()
            if e.state == "applied" and e.feature is not None
        }
        refused = (e for e in self.records.values() if e.state not in (PLANNED, "applied"))
        reasons = {e.found.name: e.reason or e.state for e in refused}
        lost = find_unmet({**on, **self.get_planned()}, reasons)
        for name, reason in lost.items():
            record = self.records[name]
            record.stand_down("disabled" if self._follows_setting(record) else "skipped", reason)
        return list(lost)

    def _follows_setting(self, record: FeatureRecord) -> bool:
        """Return whether the settings turn off a requirement of a default feature: no fault, even if strict."""
        required = record.feature.requires if record.feature is not None else ()
        off = [self.records[name].request.on is False for name in required if name in self.records]
        return record.request.on is None and any(off)

    def set_failed(self, error: BaseException) -> None:
        """Leave out all features because the call failed."""
        for record in self.records.values():
            if record.state in (PLANNED, "applied"):
                record.stand_down(
                    "skipped", f"the call of apply() failed: {str(error) or repr(error)}"
                )

    def check_requests(self) -> None:
        """Raise a FeatureError that names every required feature that cannot run, with its reason."""
        refused = [
            e
            for e in self.records.values()
            if e.state not in _FINE and (e.request.by_name or self.strict)
        ]
        if not refused:
            return
        lines = [f"{e.found.name} ({e.request.reason}) is {e.state}: {e.reason}" for e in refused]
        first = refused[0].found.name
        how = (
            "OVPATCH_STRICT or strict= makes any skip an error"
            if self.strict
            else "it was asked for by name"
        )
        raise FeatureError(
            "cannot apply "
            + "; ".join(lines)
            + f". Nothing was changed. {how[0].upper() + how[1:]}; remove the "
            f"cause, or go on without it: OVPATCH=-{first}."
        )


def make_plan(
    environment: Environment,
    strict: bool | None,
    asked: Collection[str],
    arguments: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, FoundPlugin],
    plugins: Plugins,
    active: Mapping[str, FeatureRecord],
    *,
    ask_machine: bool = True,
) -> FeaturePlan:
    """Decide for every feature whether it will be on.

    ``asked`` are the features named in the call; empty means the defaults. ``arguments`` are the options given in calls
    so far. Active features stay on unless the environment turns them off. Without ``ask_machine`` the plugins'
    ``ovpatch_reasons_against``, which need torch, are not called. Raises SettingsError if a setting cannot be parsed.
    """
    settings.check_names(environment, asked, arguments, found)
    is_strict = bool(strict) if environment.strict is None else environment.strict
    plan = FeaturePlan(environment, is_strict, {})
    for name, plugin in found.items():
        if environment.third_party or plugin.first_party:
            request = settings.get_request(name, environment, asked, found)
        else:
            request = FeatureRequest(
                False, enforced=True, reason="left out by OVPATCH_THIRD_PARTY=0"
            )
        plan.records[name] = record = FeatureRecord(plugin, request, PLANNED)
        if request.on is False and (request.enforced or name not in active):
            record.stand_down("disabled", request.reason)
    _load(plan, plugins)
    for name, record in plan.records.items():
        record.is_named = record.request.by_name or (name in active and active[name].is_named)
    _resolve(plan, arguments)
    if ask_machine:
        _check_machine(plan, plugins, active)
    named = {name for name, record in plan.records.items() if record.request.by_name}
    ranking = (active, named, {name for name, plugin in found.items() if plugin.first_party})
    for name, reason in find_conflicts(plan.get_planned(), ranking).items():
        plan.records[name].stand_down("conflict", reason)
    plan.drop_unmet()
    return plan


def _load(plan: FeaturePlan, plugins: Plugins) -> None:
    """Load the plugins that may be on, and leave out those that are off by default."""
    for record in plan.records.values():
        if record.state == PLANNED:
            with _noting_failure(record):
                record.feature = plugins.load_feature(record.found)
    for record in plan.records.values():
        if record.feature is not None and record.request.on is None and not record.feature.default:
            record.stand_down("disabled", f"off by default; on by OVPATCH=+{record.found.name}")


@contextmanager
def _noting_failure(record: FeatureRecord) -> Iterator[None]:
    """Turn a feature off if its plugin raises in the block."""
    try:
        yield
    except PluginError as error:
        record.stand_down(error.state, str(error))


def _resolve(plan: FeaturePlan, arguments: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the variables of all imported features and resolve their options."""
    described = {
        name: record.feature for name, record in plan.records.items() if record.feature is not None
    }
    own = {name for name, record in plan.records.items() if record.found.first_party}
    for name, reason in opts.find_clashes(described, own, plan.records).items():
        if plan.records[name].state == PLANNED:
            plan.records[name].stand_down("conflict", reason)
    variables = plan.environment.features
    opts.check_variables(
        variables, described.values(), [name for name in plan.records if name not in described]
    )
    for name, feature in described.items():
        record = plan.records[name]
        if record.state in (PLANNED, "disabled"):
            try:
                record.options = opts.resolve_options(
                    feature, arguments.get(name, {}), variables, named=record.is_named
                )
            except (settings.SettingsError, OptionError):
                raise
            except Exception as error:  # noqa: BLE001  # of a plugin's parse=, although only ValueError is allowed
                record.stand_down("failed", f"parsing its options raised {describe_error(error)}")


def _check_machine(
    plan: FeaturePlan, plugins: Plugins, active: Mapping[str, FeatureRecord]
) -> None:
    """Let each planned feature check this machine, unless it is on already with the same options."""
    for name in plan.get_planned():
        record = plan.records[name]
        if name in active and active[name].options == record.options:
            continue
        options = opts.get_values(record.options)
        with _noting_failure(record):
            reasons = (
                _lacks_distributed(record.feature)
                or _lacks_packages(record.feature)
                or plugins.call_for_texts(name, "ovpatch_reasons_against", options=options)
            )
            if reasons:
                record.stand_down("skipped", "; ".join(reasons))


def _lacks_distributed(feature: Feature | None) -> list[str]:
    if feature is None or not feature.distributed:
        return []
    import torch  # not for a plan without such features

    return (
        [] if torch.distributed.is_available() else ["this build of torch has no torch.distributed"]
    )


def _lacks_packages(feature: Feature | None) -> list[str]:
    """Return a reason for each package that the feature patches and that is not installed here."""
    reasons = []
    for package in () if feature is None else feature.packages:
        missing = find_missing_module(package.module)
        if missing:
            top = package.module.partition(".")[0]
            lacks = (
                f"there is no package {top!r}"
                if missing == top
                else f"package {top!r} has no module {missing!r}"
            )
            reasons.append(f"{lacks}: {package.remedy}")
    return reasons


def find_missing_module(module: str) -> str:
    """Return the outermost part of a module's dotted name that cannot be found, or "". Import nothing."""
    parts = module.split(".")
    path: list[str] | None = None
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        if name in sys.modules:
            loaded: Any = sys.modules[name]
            if loaded is None:
                return name
            path = list(vars(loaded).get("__path__", ()))
            continue
        try:
            spec = _find_spec(name, path)
        except KeyError:
            # Only the parent of a namespace knows its path, and the parent is not imported. The patch manager reports
            # such a module at its import.
            return ""
        if spec is None:
            return name
        path = list(spec.submodule_search_locations or ())
    return ""


def _find_spec(name: str, path: list[str] | None) -> Any:
    """Return the spec of a module in the directories of its parent, or of a module without parents if that is None.

    Python's own finder comes first, because a finder of wrapt imports the parents of modules that it listens for.
    """
    for finder in (PathFinder, *sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path)
        if spec is not None:
            return spec
    return None
