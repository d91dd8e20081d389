"""The session: the features of a process that are on, their options, and the recovery from failed calls.

:class:`ActiveFeatures` calls plugin hooks and the patch manager in the order that turns features on and off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from ovpatch import logs
from ovpatch.hookspecs import Feature, drop_failures
from ovpatch.patching import PatchError, PatchManager, PatchStatus
from ovpatch.patching.patch import NamedFunction
from ovpatch.session import feature_plan, plugins, session_report
from ovpatch.session.feature_plan import (
    PLANNED,
    FeatureError,
    FeaturePlan,
    FeatureRecord,
    find_dependents,
    sort_by_requirements,
)
from ovpatch.session.plugins import PluginError, Plugins
from ovpatch.session.script_names import list_script_names
from ovpatch.session.session_report import TROUBLE, Report
from ovpatch.settings import feature_options, settings
from ovpatch.settings.settings import FeatureRequest, SettingsError, normalise_name


class _Registrar:
    """The patch manager of one feature, which implements :class:`ovpatch.Registrar`."""

    def __init__(self, manager: PatchManager, feature: str, options: Mapping[str, Any]) -> None:
        self._manager = manager
        self._feature = feature
        self._options = options
        # Whether the feature may apply patches. Another thread may turn the feature off at any time.
        self.is_open = True

    def register_patch(
        self, target: str, replacement: Any = None, *, wrap: Any = None, **details: Any
    ) -> None:
        if isinstance(wrap, str):
            wrap = NamedFunction(wrap, self._options)
        self._manager.register_patch(
            target, replacement, wrap=wrap, feature=self._feature, **details
        )

    def register_hook(self, name: str, install: Any, *, why: str = "") -> None:
        self._manager.register_hook(name, install, feature=self._feature, why=why)

    def apply(self) -> None:
        if self.is_open:
            self._manager.apply(self._feature)
        # If the feature was turned off during the call, its revert() may have come too early for these patches.
        if not self.is_open:
            self._manager.revert(self._feature)
            raise PatchError(
                f"feature {self._feature!r} has been turned off during the call; turn it on and "
                "start again"
            )


class ActiveFeatures:
    """The features that are on, and the patch manager below them. The session's lock guards it."""

    def __init__(self) -> None:
        # The plugins that are imported.
        self.plugins: Final = Plugins()
        # The features that are on, in the order of their activation.
        self.active: Final[dict[str, FeatureRecord]] = {}
        self._manager: Final = PatchManager()
        # The registrar of the last activation of each feature.
        self._registrars: Final[dict[str, _Registrar]] = {}

    def statuses(self) -> Sequence[PatchStatus]:
        """Return the states of all patches."""
        return self._manager.statuses()

    def turn_off(self, names: Collection[str]) -> None:
        """Turn features off, starting with the last activated.

        Raises:
            FeatureError: A plugin cannot restore the stock behaviour of its live objects. Its feature stays on, and so
                do features that became active before it. Or all are off, but a hook's handle could not be removed.
        """
        remainders: list[str] = []
        for name in [name for name in reversed(self.active) if name in names]:
            try:
                self.plugins.call_hook(name, "ovpatch_deactivate")
            except PluginError as error:
                cause = str(error).rstrip(".")
                raise FeatureError(
                    f"{name!r} cannot be turned off now and stays on: {cause}."
                ) from error
            remainders += self._revert_patches(name)
            del self.active[name]
            drop_failures(name)
        if remainders:
            raise FeatureError(
                "turned off, but parts of the features remain: "
                f"{'; '.join(remainders)}. Remove them, or restart."
            )

    def drop_unfinished(self) -> None:
        """Revert features that an interrupted call patched but did not activate."""
        for name in dict.fromkeys(status.feature for status in self.statuses()):
            if name not in self.active:
                self._withdraw(name)

    def turn_on(self, plan: FeaturePlan) -> None:
        """Register all planned features, patch and activate them. A feature that fails is off in the plan."""
        for name in self.active:
            plan.records[name].state = "applied"
            plan.records[name].remarks = self.active[name].remarks
        self._register(plan)
        self._patch(plan)
        for name in sort_by_requirements(plan.get_planned()):
            if plan.records[name].state == PLANNED:
                self._activate(plan, name)

    def _register(self, plan: FeaturePlan) -> None:
        for name in sort_by_requirements(plan.get_planned()):
            record = plan.records[name]
            self._manager.unregister(name)
            # A layer of the feature that was used while the feature was off may have noted failures.
            drop_failures(name)
            try:
                options = feature_options.get_values(record.options)
                registrar = _Registrar(self._manager, name, options)
                self._registrars[name] = registrar
                self.plugins.call_hook(name, "ovpatch_register", patches=registrar, options=options)
            except PluginError as error:
                self._fail(record, error, error.__cause__)
        self._drop_unmet(plan)

    def _patch(self, plan: FeaturePlan) -> None:
        """Apply all patches in one call; if that fails, feature by feature, to find the feature at fault."""
        # Some features have no patch, and the manager does not know them.
        patching = {status.feature for status in self.statuses()}
        names = [name for name in sort_by_requirements(plan.get_planned()) if name in patching]
        if not names:
            return
        try:
            self._manager.apply(*names)
        # The call runs functions of plugins, which may raise any exception.
        except (Exception, SystemExit):  # noqa: BLE001
            # Features that the user named come first: of two features in conflict, the second fails.
            for name in sorted(names, key=lambda name: not plan.records[name].request.by_name):
                try:
                    self._manager.apply(name)
                except (Exception, SystemExit) as error:  # noqa: BLE001
                    self._fail(plan.records[name], error, error)
        self._drop_unmet(plan)

    def _activate(self, plan: FeaturePlan, name: str) -> None:
        record = plan.records[name]
        options = feature_options.get_values(record.options)
        try:
            record.remarks = self.plugins.call_for_texts(name, "ovpatch_activate", options=options)
        except PluginError as error:
            # The plugin may have changed some live objects before it failed.
            try:
                self.plugins.call_hook(name, "ovpatch_deactivate")
            except PluginError as second:
                logs.logger.debug("%s: %s", name, second)
            self._fail(record, error, error.__cause__)
            self._drop_unmet(plan)
            return
        record.state = "applied"
        record.reason = ""
        self.active[name] = record

    def _drop_unmet(self, plan: FeaturePlan) -> None:
        for name in plan.drop_unmet():
            self._withdraw(name)

    def _fail(
        self, record: FeatureRecord, error: BaseException, cause: BaseException | None
    ) -> None:
        state = cause.state if isinstance(cause, PatchError) else "failed"
        record.set_off(
            state, str(error) if isinstance(error, (PluginError, PatchError)) else repr(error)
        )
        self._withdraw(record.found.name)

    def _withdraw(self, name: str) -> None:
        """Revert and unregister a feature that did not become active.

        If another library has patched one of its functions afterwards, the feature's declarations stay, so that the
        report shows the state *shadowed*.
        """
        for problem in self._revert_patches(name):
            logs.logger.error("%s", problem)
        if not any(
            status.feature == name and status.state == "shadowed" for status in self.statuses()
        ):
            self._manager.unregister(name)

    def _revert_patches(self, name: str) -> list[str]:
        """Revert the patches of a feature. Return the errors of hooks that could not be removed."""
        if name in self._registrars:
            self._registrars[name].is_open = False
        try:
            self._manager.revert(name)
        # The handle of a hook failed. Everything else was reverted.
        except PatchError as error:
            return [str(error)]
        return []


Options = Mapping[str, Mapping[str, Any]]


class Session:
    """The features that are on. A lock guards the session, so any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Whether apply() or revert() is running. A hook of a plugin must not call them again.
        self._is_busy = False
        self._features: Final = ActiveFeatures()
        # The records of all features since the last apply(); empty before the first.
        self._records: dict[str, FeatureRecord] = {}
        # The options of all calls so far, by feature.
        self._arguments: dict[str, dict[str, Any]] = {}

    def after_fork(self) -> None:
        """Reset the lock in a forked child if another thread held it, because the child does not have that thread.

        The patch manager's lock is acquired before a fork. This lock is not, because plugin code runs under it and
        would delay the fork.
        """
        # If this succeeds, the lock was free, or the thread that forked holds it.
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()
            self._is_busy = False

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            if self._is_busy:
                raise RuntimeError(
                    "apply() or revert() was called from inside a plugin's hook; call it from "
                    "outside"
                )
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    def plan(
        self,
        requested: Iterable[str] = (),
        options: Options | None = None,
        strict: bool | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        should_check_machine: bool = True,
    ) -> FeaturePlan:
        """Return the plan of an ``apply``; see :func:`ovpatch.session.feature_plan.make_plan`."""
        with self._lock:
            return feature_plan.make_plan(
                settings.read_environment(environ),
                strict,
                [_check_name(name) for name in requested],
                self._merge_options(options),
                {name: record.found for name, record in self._features.active.items()}
                | plugins.find_plugins(),
                self._features.plugins,
                self._features.active,
                should_check_machine=should_check_machine,
            )

    def apply(
        self,
        requested: Iterable[str],
        options: Options | None,
        strict: bool | None,
        *,
        tolerant: bool = False,
    ) -> Report:
        """Turn features on; see :func:`ovpatch.apply`. If ``tolerant``, a feature that cannot run raises no error."""
        with self._exclusive():
            plan = self.plan(requested, options, strict)
            logs.log_to_stderr(plan.environment.log)
            for text in () if self._records else settings.find_near_misses():
                logs.log_visibly(text, logging.WARNING)
            before, known = dict(self._features.active), dict(self._records)
            self._records = plan.records
            try:
                self._switch_features(plan, before, tolerant)
            except BaseException as error:
                plan.set_failed(error)
                raise
            self._arguments = self._merge_options(options)
            report = self.report()
            _log_report(report, has_changed=self._features.active != before, known=known)
            return report

    def _merge_options(self, options: Options | None) -> dict[str, dict[str, Any]]:
        """Return the options of all calls so far: an option that a call does not mention keeps its value."""
        merged = {name: dict(values) for name, values in self._arguments.items()}
        for name, values in _normalise_items(
            {} if options is None else options, "options=", "{feature: {option: value}}"
        ):
            own = merged.setdefault(name, {})
            own.update(_normalise_items(values, f"options[{name!r}]", "{option: value}"))
        return merged

    def _switch_features(
        self, plan: FeaturePlan, before: Mapping[str, FeatureRecord], tolerant: bool
    ) -> None:
        if not tolerant:
            plan.check_requests()
        try:
            self._features.turn_off(self._list_outdated(plan))
            self._features.turn_on(plan)
            if not tolerant:
                plan.check_requests()
        # Ctrl-C must not leave half of the features on.
        except BaseException:
            self._restore(before)
            raise

    def _list_outdated(self, plan: FeaturePlan) -> list[str]:
        """Return the active features to turn off, including features that will come back with other options."""
        outdated: set[str] = set()
        features = self._describe_active()
        for name, record in self._features.active.items():
            planned = plan.records[name]
            if planned.state != PLANNED or planned.options != record.options:
                outdated |= {name, *find_dependents(name, features)}
        return [name for name in self._features.active if name in outdated]

    def _describe_active(self) -> dict[str, Feature]:
        return {
            name: record.feature
            for name, record in self._features.active.items()
            if record.feature is not None
        }

    def _restore(self, before: Mapping[str, FeatureRecord]) -> None:
        """Restore the features that were active before a failed call."""
        try:
            self._features.drop_unfinished()
            changed = [
                name
                for name, record in self._features.active.items()
                if before.get(name) is not record
            ]
            self._features.turn_off(changed)
            lost = {
                name: record for name, record in before.items() if name not in self._features.active
            }
            for record in lost.values():
                record.state = PLANNED
            self._features.turn_on(
                FeaturePlan(settings.read_environment(), False, {**self._features.active, **lost})
            )
        except FeatureError as error:
            logs.logger.error("while restoring the features of before the call: %s", error)
        for name in before:
            if name not in self._features.active:
                logs.logger.error("feature %r was on before and could not be brought back", name)

    def revert(self, requested: Iterable[str]) -> Report:
        """Turn features off; see :func:`ovpatch.revert`."""
        with self._exclusive():
            names = [_check_name(name) for name in requested]
            known = self._records or (plugins.find_plugins() if names else {})
            for name in names:
                if name not in known:
                    raise SettingsError(settings.describe_unknown_feature("revert()", name, known))
            self._revert_features(names or list(self._features.active))
            return self.report()

    def _revert_features(self, names: Collection[str]) -> None:
        features = self._describe_active()
        named = [name for name in names if name in self._features.active]
        requirements = {
            dependent: name for name in named for dependent in find_dependents(name, features)
        }
        reasons = {
            dependent: f"reverted together with {name!r}, which it requires"
            for dependent, name in requirements.items()
        }
        reasons |= dict.fromkeys(named, "reverted")
        found = {name: self._features.active[name].found for name in reasons}
        # A failed call may have turned some features off.
        try:
            self._features.turn_off(reasons)
        finally:
            for name in [name for name in reasons if name not in self._features.active]:
                self._records[name] = FeatureRecord(
                    found[name], FeatureRequest(False), "disabled", reasons[name]
                )
                self._arguments.pop(name, None)

    @contextmanager
    def applied(
        self, requested: Iterable[str], options: Options | None, strict: bool | None
    ) -> Iterator[Report]:
        """Turn features on for a block; see :func:`ovpatch.applied`."""
        before, arguments = dict(self._features.active), self._merge_options(None)
        report = self.apply(requested, options, strict)
        try:
            yield report
        except BaseException:
            try:
                self._restore_previous(before, arguments)
            # The block's own exception may have the same cause, so it is raised.
            except FeatureError as error:
                logs.logger.error("at the end of an applied() block, which raised: %s", error)
            raise
        self._restore_previous(before, arguments)

    def _restore_previous(
        self, before: Mapping[str, FeatureRecord], arguments: dict[str, dict[str, Any]]
    ) -> None:
        with self._exclusive():
            self._revert_features([name for name in self._features.active if name not in before])
            self._arguments = arguments
            if any(
                self._features.active.get(name) is not record for name, record in before.items()
            ):
                self._restore(before)

    def report(self, *, with_fits: bool = False) -> Report:
        """Return the present state of each feature, with the reason.

        Args:
            with_fits: Whether to find the features that would help this script, which takes a few milliseconds.
        """
        with self._lock:
            reason = "apply() has not been called in this process"
            found = {} if self._records else plugins.find_plugins()
            known = self._records or {
                name: FeatureRecord(plugin, FeatureRequest(None), "disabled", reason)
                for name, plugin in found.items()
            }
            active = self._features.active
            records = {name: active.get(name, record) for name, record in known.items()}
            return session_report.make_report(
                records,
                active,
                self._features.plugins,
                self._features.statuses(),
                self._find_fits(records) if with_fits else {},
            )

    def _find_fits(self, records: Mapping[str, FeatureRecord]) -> dict[str, str]:
        """Return the features that are off and would help this script, with the reasons."""
        off = {name: record for name, record in records.items() if record.state == "disabled"}
        candidates = {name for name, record in off.items() if not record.is_switched_off}
        if not candidates:
            return {}
        names, counters = list_script_names(), self._read_counters()
        fits: dict[str, str] = {}
        for name in sorted(candidates):
            # A plugin that fails must not cost the report of all features.
            with suppress(PluginError):
                self._features.plugins.load_feature(off[name].found)
                reason = self._features.plugins.call_hook(
                    name, "ovpatch_fits", names=names, counters=counters
                )
                if reason:
                    fits[name] = str(reason)
        return fits

    def _read_counters(self) -> dict[str, Mapping[str, int]]:
        counters: dict[str, Mapping[str, int]] = {}
        for name in self._features.active:
            with suppress(PluginError):
                counters[name] = self._features.plugins.call_hook(name, "ovpatch_counters") or {}
        return counters


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        raise SettingsError(
            f"names are strings; got {name!r}. Pass each name as an argument: apply('a', 'b')."
        )
    return normalise_name(name)


def _normalise_items(values: object, where: str, shape: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a mapping with normalised names; two spellings of one name are an error."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{where} is {values!r}; write {shape} there.")
    seen: dict[str, str] = {}
    for key, value in values.items():
        name = _check_name(key)
        if name in seen:
            raise SettingsError(
                f"{where} has {seen[name]!r} and {key!r}, which mean the same. Keep one of them."
            )
        seen[name] = key
        yield name, value


def _log_report(report: Report, *, has_changed: bool, known: Mapping[str, FeatureRecord]) -> None:
    """Log a summary, and a warning for each feature that is newly in trouble."""
    if has_changed or not known:
        logs.logger.info("%s", report.summary())
    for feature in report.features:
        before = known.get(feature.name)
        if feature.state in TROUBLE and (before is None or before.reason != feature.reason):
            logs.logger.warning("feature %r is %s: %s", feature.name, feature.state, feature.reason)
