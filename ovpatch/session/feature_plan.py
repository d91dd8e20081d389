"""The plan of one ``apply()``, which decides about all features before anything is patched."""

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
from ovpatch.settings import feature_options, settings
from ovpatch.settings.settings import Environment, FeatureRequest


def sort_by_requirements(features: Mapping[str, Feature]) -> list[str]:
    """Return the names, each after the features that it requires.

    Unrelated features, and features that require each other in a circle, keep their order.
    """
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
    """Return the features that require ``name``, directly or through another feature."""
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
    """Return the features that conflicts turn off, each with the reason.

    Args:
        features: The features that would be on.
        ranking: Groups of names, the strongest first. Of two features in conflict, the feature in the stronger group
            stays on. Two features of the same group are both turned off.
    """
    lost: dict[str, str] = {}
    pairs = combinations(features, 2)
    for a, b in sorted(
        pairs,
        key=lambda pair: min(_get_strength(pair[0], ranking), _get_strength(pair[1], ranking)),
    ):
        are_in_conflict = b in features[a].conflicts or a in features[b].conflicts
        if not are_in_conflict or a in lost or b in lost:
            continue
        for loser, winner in ((a, b), (b, a)):
            if _get_strength(loser, ranking) >= _get_strength(winner, ranking):
                lost[loser] = (
                    f"conflicts with {winner!r}; switch one of them off, for example by "
                    f"OVPATCH=-{winner}"
                )
    return lost


def _get_strength(name: str, ranking: Sequence[Collection[str]]) -> int:
    return next((index for index, group in enumerate(ranking) if name in group), len(ranking))


def find_unmet(features: Mapping[str, Feature], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the features whose requirements are not on, directly or through another feature, each with the reason.

    Args:
        features: The features that would be on.
        reasons: The reasons for features that are off. A feature without a reason is not installed.
    """
    lost: dict[str, str] = {}
    # A feature that is lost here may be the requirement of another feature.
    has_changed = True
    while has_changed:
        has_changed = False
        for name, feature in features.items():
            missing = [
                required
                for required in feature.requires
                if required not in features or required in lost
            ]
            if missing and name not in lost:
                lost[name] = "; ".join(
                    _explain_missing(required, reasons, lost) for required in missing
                )
                has_changed = True
    return lost


def _explain_missing(name: str, reasons: Mapping[str, str], lost: Mapping[str, str]) -> str:
    reason = lost.get(name) or reasons.get(name)
    if reason is None:
        return f"requires {name!r}, which is not installed"
    return f"requires {name!r}, which is not on ({reason}); name both, or OVPATCH=+{name}"


# The state of a feature that will be on if nothing fails.
PLANNED: Final = "planned"
# The beginning of the reasons of settings that turn a feature off.
SWITCHED_OFF: Final = "off by OVPATCH"
# The states of features that need no error, even if the user named them.
_ACCEPTED_STATES: Final = frozenset({"applied", "pending", "disabled", PLANNED})


class FeatureError(RuntimeError):
    """A feature that cannot run although it was requested by name, or in strict mode. The call changes nothing."""

    exit_code = ExitCode.USAGE


@dataclass
class FeatureRecord:
    """One feature and its state."""

    # The entry point of its plugin.
    found: FoundPlugin
    # The decision of the settings on the feature.
    request: FeatureRequest
    # A state of the report, or ``planned`` during the call.
    state: str = "disabled"
    # The reason for this state.
    reason: str = ""
    # Its description; None if the plugin is not imported.
    feature: Feature | None = None
    # The resolved options.
    options: dict[str, feature_options.OptionValue] = field(default_factory=dict)
    # Remarks of the plugin from its activation.
    remarks: tuple[str, ...] = ()
    # Whether the settings of this call, or of an earlier call since which it has been on, name the feature.
    is_named: bool = False

    @property
    def is_switched_off(self) -> bool:
        """True if a setting turns this feature off, False if the settings merely do not name it."""
        return self.request.on is False and self.reason.startswith(SWITCHED_OFF)

    def set_off(self, state: str, reason: str) -> None:
        """Set the state of a feature that will not be on."""
        self.state = state
        self.reason = reason


@dataclass
class FeaturePlan:
    """The decisions of one call on all features."""

    environment: Environment
    # Whether it is an error if any feature is skipped.
    strict: bool
    # The features by name.
    records: dict[str, FeatureRecord]

    def get_planned(self) -> dict[str, Feature]:
        """Return the features that are planned, by name."""
        return {
            name: record.feature
            for name, record in self.records.items()
            if record.state == PLANNED and record.feature is not None
        }

    def drop_unmet(self) -> list[str]:
        """Turn off features whose requirements are not on. Return their names."""
        on = {
            name: record.feature
            for name, record in self.records.items()
            if record.state == "applied" and record.feature is not None
        }
        reasons = {
            record.found.name: record.reason or record.state
            for record in self.records.values()
            if record.state not in (PLANNED, "applied")
        }
        lost = find_unmet({**on, **self.get_planned()}, reasons)
        for name, reason in lost.items():
            record = self.records[name]
            record.set_off("disabled" if self._follows_setting(record) else "skipped", reason)
        return list(lost)

    def _follows_setting(self, record: FeatureRecord) -> bool:
        """Return whether the settings turn off a requirement of a feature that is on by default.

        This is no error, even in strict mode, because the user chose it.
        """
        required = record.feature.requires if record.feature is not None else ()
        off = [self.records[name].request.on is False for name in required if name in self.records]
        return record.request.on is None and any(off)

    def set_failed(self, error: BaseException) -> None:
        """Turn all features off in the plan because the call failed."""
        for record in self.records.values():
            if record.state in (PLANNED, "applied"):
                record.set_off(
                    "skipped", f"the call of apply() failed: {str(error) or repr(error)}"
                )

    def check_requests(self) -> None:
        """Raise a FeatureError that names every required feature that cannot run, with its reason."""
        refused = [
            record
            for record in self.records.values()
            if record.state not in _ACCEPTED_STATES and (record.request.by_name or self.strict)
        ]
        if not refused:
            return
        lines = [
            f"{record.found.name} ({record.request.reason}) is {record.state}: {record.reason}"
            for record in refused
        ]
        rule = (
            "OVPATCH_STRICT or strict= makes any skip an error"
            if self.strict
            else "A feature that is requested by name must run"
        )
        # Unlike OVPATCH=-name, these variables leave the other features of the user as they are.
        without = " ".join(
            f"{settings.make_variable_name(record.found.name)}=0" for record in refused
        )
        raise FeatureError(
            f"{'; '.join(lines)}. Nothing was changed. {rule}; remove the cause, or continue "
            f"without: {without}."
        )


def make_plan(
    environment: Environment,
    strict: bool | None,
    requested: Collection[str],
    arguments: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, FoundPlugin],
    plugins: Plugins,
    active: Mapping[str, FeatureRecord],
    *,
    should_check_machine: bool = True,
) -> FeaturePlan:
    """Decide for every feature whether it will be on.

    Active features stay on unless the environment turns them off.

    Args:
        environment: The environment variables.
        strict: The argument ``strict`` of the call.
        requested: The features that the call names. Empty: the defaults.
        arguments: The options of all calls so far, by feature.
        found: All plugins by name.
        plugins: The plugins that are imported.
        active: The features that are on.
        should_check_machine: Whether to call the plugins' ``ovpatch_reasons_against``, which need torch.

    Raises:
        SettingsError: A setting cannot be parsed.
    """
    settings.check_names(environment, requested, arguments, found)
    is_strict = bool(strict) if environment.strict is None else environment.strict
    plan = FeaturePlan(environment, is_strict, {})
    for name, plugin in found.items():
        if environment.third_party or plugin.first_party:
            request = settings.get_request(name, environment, requested, found)
        else:
            request = FeatureRequest(
                False, enforced=True, reason="left out by OVPATCH_THIRD_PARTY=0"
            )
        plan.records[name] = record = FeatureRecord(plugin, request, PLANNED)
        if request.on is False and (request.enforced or name not in active):
            record.set_off("disabled", request.reason)
    _load_plugins(plan, plugins)
    for name, record in plan.records.items():
        record.is_named = record.request.by_name or (name in active and active[name].is_named)
    _resolve_options(plan, arguments)
    if should_check_machine:
        _check_machine(plan, plugins, active)
    named = {name for name, record in plan.records.items() if record.request.by_name}
    ranking = (active, named, {name for name, plugin in found.items() if plugin.first_party})
    for name, reason in find_conflicts(plan.get_planned(), ranking).items():
        plan.records[name].set_off("conflict", reason)
    plan.drop_unmet()
    return plan


def _load_plugins(plan: FeaturePlan, plugins: Plugins) -> None:
    """Load the plugins of features that may be on, and turn features off that are off by default."""
    for record in plan.records.values():
        if record.state == PLANNED:
            with _note_plugin_failure(record):
                record.feature = plugins.load_feature(record.found)
    for record in plan.records.values():
        if record.feature is not None and record.request.on is None and not record.feature.default:
            record.set_off("disabled", f"off by default; on by OVPATCH=+{record.found.name}")


@contextmanager
def _note_plugin_failure(record: FeatureRecord) -> Iterator[None]:
    """Turn a feature off if its plugin raises in the block."""
    try:
        yield
    except PluginError as error:
        record.set_off(error.state, str(error))


def _resolve_options(plan: FeaturePlan, arguments: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the variables of all imported features and resolve their options."""
    described = {
        name: record.feature for name, record in plan.records.items() if record.feature is not None
    }
    own = {name for name, record in plan.records.items() if record.found.first_party}
    for name, reason in feature_options.find_clashes(described, own, plan.records).items():
        if plan.records[name].state == PLANNED:
            plan.records[name].set_off("conflict", reason)
    variables = plan.environment.features
    feature_options.check_variables(
        variables, described.values(), [name for name in plan.records if name not in described]
    )
    for name, feature in described.items():
        record = plan.records[name]
        if record.state in (PLANNED, "disabled"):
            try:
                record.options = feature_options.resolve_options(
                    feature, arguments.get(name, {}), variables, named=record.is_named
                )
            except (settings.SettingsError, OptionError):
                raise
            # A plugin's parse= may raise any exception, although only ValueError is allowed.
            except Exception as error:  # noqa: BLE001
                record.set_off("failed", f"parsing its options raised {describe_error(error)}")


def _check_machine(
    plan: FeaturePlan, plugins: Plugins, active: Mapping[str, FeatureRecord]
) -> None:
    """Let each planned feature check this machine, unless it is on already with the same options."""
    for name in plan.get_planned():
        record = plan.records[name]
        if name in active and active[name].options == record.options:
            continue
        options = feature_options.get_values(record.options)
        with _note_plugin_failure(record):
            reasons = (
                _explain_missing_distributed(record.feature)
                or _list_missing_packages(record.feature)
                or plugins.call_for_texts(name, "ovpatch_reasons_against", options=options)
            )
            if reasons:
                record.set_off("skipped", "; ".join(reasons))


def _explain_missing_distributed(feature: Feature | None) -> list[str]:
    if feature is None or not feature.distributed:
        return []
    # A plan without such features must not import torch.
    import torch

    return (
        [] if torch.distributed.is_available() else ["this build of torch has no torch.distributed"]
    )


def _list_missing_packages(feature: Feature | None) -> list[str]:
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
    """Return the outermost part of a module's dotted name that cannot be found, or "", without an import."""
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
    """Return the spec of a module.

    Python's own finder comes first, because a finder of wrapt imports the parents of modules that it listens for.

    Args:
        name: The dotted name.
        path: The directories of its parent; None for a module without a parent.
    """
    for finder in (PathFinder, *sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path)
        if spec is not None:
            return spec
    return None
