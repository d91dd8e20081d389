"""The session: which features of a process are on, with which options, and the way back from failures.

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
from ovpatch.settings import options as opts
from ovpatch.settings import settings
from ovpatch.settings.settings import FeatureRequest, SettingsError, normalise_name


class _Registrar:
    """The patch manager of one feature; an :class:`ovpatch.Registrar`."""

    def __init__(self, manager: PatchManager, feature: str, options: Mapping[str, Any]) -> None:
        self._manager = manager
        self._feature = feature
        self._options = options
        # Whether patches may be registered: until the feature is off, which another thread may
        # cause.
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
        if not self.is_open:
            self._manager.revert(self._feature)
            raise PatchError(
                f"feature {self._feature!r} has been turned off meanwhile; turn it on and start "
                "again"
            )


class ActiveFeatures:
    """The features that are on, and the patch manager below them. The session's lock guards it."""

    def __init__(self) -> None:
        self.plugins: Final = Plugins()  # the plugins in memory
        # The features that are on, in the order of their activation.
        self.active: Final[dict[str, FeatureRecord]] = {}
        self._manager: Final = PatchManager()
        self._registrars: Final[dict[str, _Registrar]] = {}

    def statuses(self) -> Sequence[PatchStatus]:
        """Return the states of all patches."""
        return self._manager.statuses()

    def turn_off(self, names: Collection[str]) -> None:
        """Turn features off, the last one first.

        Raises FeatureError if a plugin cannot give its live objects their stock behaviour back: it stays on, as do the
        features that became active before it. Or all are off, but a hook's handle could not be removed.
        """
        left: list[str] = []
        for name in [name for name in reversed(self.active) if name in names]:
            try:
                self.plugins.call_hook(name, "ovpatch_deactivate")
            except PluginError as error:
                cause = str(error).rstrip(".")
                raise FeatureError(
                    f"{name!r} cannot be turned off now and stays on: {cause}."
                ) from error
            left += self._take_back(name)
            del self.active[name]
            drop_failures(name)
        if left:
            raise FeatureError(
                f"turned off, and yet something is left: {'; '.join(left)}. Remove it, or restart."
            )

    def drop_unfinished(self) -> None:
        """Revert features that an interrupted call patched but did not activate."""
        for name in dict.fromkeys(status.feature for status in self.statuses()):
            if name not in self.active:
                self._withdraw(name)

    def turn_on(self, plan: FeaturePlan) -> None:
        """Register all planned features, patch, activate; a feature that fails is off in the plan."""
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
            # A layer of the feature that was used while the feature was off may have noted some.
            drop_failures(name)
            try:
                options = opts.get_values(record.options)
                registrar = _Registrar(self._manager, name, options)
                self._registrars[name] = registrar
                self.plugins.call_hook(name, "ovpatch_register", patches=registrar, options=options)
            except PluginError as error:
                self._fail(record, error, error.__cause__)
        self._drop_unmet(plan)

    def _patch(self, plan: FeaturePlan) -> None:
        """Apply all patches at once; if that fails, feature by feature, to find the one at fault."""
        patching = {status.feature for status in self.statuses()}  # a feature may have no patch
        names = [name for name in sort_by_requirements(plan.get_planned()) if name in patching]
        if not names:
            return
        try:
            self._manager.apply(*names)
        except (Exception, SystemExit):  # noqa: BLE001  # runs plugins' functions; the next lines find the one at fault
            for name in sorted(names, key=lambda name: not plan.records[name].request.by_name):
                try:
                    self._manager.apply(name)
                except (Exception, SystemExit) as error:  # noqa: BLE001  # as above
                    self._fail(plan.records[name], error, error)
        self._drop_unmet(plan)

    def _activate(self, plan: FeaturePlan, name: str) -> None:
        record = plan.records[name]
        options = opts.get_values(record.options)
        try:
            record.remarks = self.plugins.call_for_texts(name, "ovpatch_activate", options=options)
        except PluginError as error:
            try:  # let the plugin clean up
                self.plugins.call_hook(name, "ovpatch_deactivate")
            except PluginError as second:
                logs.logger.debug("%s: %s", name, second)
            self._fail(record, error, error.__cause__)
            self._drop_unmet(plan)
            return
        record.state, record.reason = "applied", ""
        self.active[name] = record

    def _drop_unmet(self, plan: FeaturePlan) -> None:
        for name in plan.drop_unmet():
            self._withdraw(name)

    def _fail(
        self, record: FeatureRecord, error: BaseException, cause: BaseException | None
    ) -> None:
        state = cause.state if isinstance(cause, PatchError) else "failed"
        record.stand_down(
            state, str(error) if isinstance(error, (PluginError, PatchError)) else repr(error)
        )
        self._withdraw(record.found.name)

    def _withdraw(self, name: str) -> None:
        """Revert and unregister a feature that did not become active.

        If another library has patched on top, its declarations stay, so that the report says *shadowed*.
        """
        for problem in self._take_back(name):
            logs.logger.error("%s", problem)
        if not any(
            status.feature == name and status.state == "shadowed" for status in self.statuses()
        ):
            self._manager.unregister(name)

    def _take_back(self, name: str) -> list[str]:
        """Revert the patches of a feature; returns the errors of hooks that could not be removed."""
        if name in self._registrars:
            self._registrars[name].is_open = False
        try:
            self._manager.revert(name)
        # A hook's handle failed, and everything else was reverted.
        except PatchError as error:
            return [str(error)]
        return []


Options = Mapping[str, Mapping[str, Any]]


class Session:
    """The features that are on. A lock guards the session; its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._busy = False
        self._features: Final = ActiveFeatures()
        self._records: dict[str, FeatureRecord] = {}
        self._arguments: dict[str, dict[str, Any]] = {}

    def after_fork(self) -> None:
        """Reset the lock in a forked child if another thread held it, since that thread does not exist there.

        The lock is not acquired before the fork, as the patch manager's is: plugin code runs under it.
        """
        # The lock is free, or the thread that forked holds it.
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock, self._busy = threading.RLock(), False

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            if self._busy:
                raise RuntimeError(
                    "apply() or revert() was called from inside a plugin's hook; call it from "
                    "outside"
                )
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def plan(
        self,
        asked: Iterable[str] = (),
        options: Options | None = None,
        strict: bool | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        ask_machine: bool = True,
    ) -> FeaturePlan:
        """Return the plan of an ``apply``; see :func:`ovpatch.session.feature_plan.make_plan`."""
        with self._lock:
            return feature_plan.make_plan(
                settings.read_environment(environ),
                strict,
                [_name(name) for name in asked],
                self._with(options),
                {name: record.found for name, record in self._features.active.items()}
                | plugins.find_plugins(),
                self._features.plugins,
                self._features.active,
                ask_machine=ask_machine,
            )

    def apply(
        self,
        asked: Iterable[str],
        options: Options | None,
        strict: bool | None,
        *,
        tolerant: bool = False,
    ) -> Report:
        """Turn features on; see :func:`ovpatch.apply`. With ``tolerant``, what cannot run is reported, not raised."""
        with self._exclusive():
            plan = self.plan(asked, options, strict)
            logs.log_to_stderr(plan.environment.log)
            for text in () if self._records else settings.find_near_misses():
                logs.log_visibly(text, logging.WARNING)
            before, known = dict(self._features.active), dict(self._records)
            self._records = plan.records
            try:
                self._carry_out(plan, before, tolerant)
            except BaseException as error:
                plan.set_failed(error)
                raise
            self._arguments = self._with(options)
            report = self.report()
            _log(report, changed=self._features.active != before, known=known)
            return report

    def _with(self, options: Options | None) -> dict[str, dict[str, Any]]:
        """Return the options of all calls so far: an option that a call does not mention keeps its value."""
        merged = {name: dict(values) for name, values in self._arguments.items()}
        for name, values in _normalised(
            {} if options is None else options, "options=", "{feature: {option: value}}"
        ):
            own = merged.setdefault(name, {})
            own.update(_normalised(values, f"options[{name!r}]", "{option: value}"))
        return merged

    def _carry_out(
        self, plan: FeaturePlan, before: Mapping[str, FeatureRecord], tolerant: bool
    ) -> None:
        if not tolerant:
            plan.check_requests()
        try:
            self._features.turn_off(self._outdated(plan))
            self._features.turn_on(plan)
            if not tolerant:
                plan.check_requests()
        except BaseException:  # also Ctrl-C
            self._restore(before)
            raise

    def _outdated(self, plan: FeaturePlan) -> list[str]:
        """Return the active features to turn off, including those that come back with other options."""
        going: set[str] = set()
        features = self._described()
        for name, record in self._features.active.items():
            planned = plan.records[name]
            if planned.state != PLANNED or planned.options != record.options:
                going |= {name, *find_dependents(name, features)}
        return [name for name in self._features.active if name in going]

    def _described(self) -> dict[str, Feature]:
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
            logs.logger.error("while going back to the features of before: %s", error)
        for name in before:
            if name not in self._features.active:
                logs.logger.error("feature %r was on before and could not be brought back", name)

    def revert(self, asked: Iterable[str]) -> Report:
        """Turn features off; see :func:`ovpatch.revert`."""
        with self._exclusive():
            names = [_name(name) for name in asked]
            known = self._records or plugins.find_plugins()
            for name in names:
                if name not in known:
                    raise SettingsError(settings.describe_unknown_feature("revert()", name, known))
            self._revert_only(names or list(self._features.active))
            return self.report()

    def _revert_only(self, names: Collection[str]) -> None:
        features = self._described()
        named = [name for name in names if name in self._features.active]
        along = {dependent: name for name in named for dependent in find_dependents(name, features)}
        reasons = {
            dependent: f"reverted together with {name!r}, which it requires"
            for dependent, name in along.items()
        }
        reasons |= dict.fromkeys(named, "reverted")
        found = {name: self._features.active[name].found for name in reasons}
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
        self, asked: Iterable[str], options: Options | None, strict: bool | None
    ) -> Iterator[Report]:
        """Turn features on for a block; see :func:`ovpatch.applied`."""
        before, arguments = dict(self._features.active), self._with(None)
        report = self.apply(asked, options, strict)
        try:
            yield report
        except BaseException:  # also Ctrl-C
            try:
                self._go_back(before, arguments)
            # The block's own exception may have the same cause, so it is raised.
            except FeatureError as error:
                logs.logger.error("at the end of an applied() block, which raised: %s", error)
            raise
        self._go_back(before, arguments)

    def _go_back(
        self, before: Mapping[str, FeatureRecord], arguments: dict[str, dict[str, Any]]
    ) -> None:
        with self._exclusive():
            self._revert_only([name for name in self._features.active if name not in before])
            self._arguments = arguments
            if any(
                self._features.active.get(name) is not record for name, record in before.items()
            ):
                self._restore(before)

    def report(self, *, with_fits: bool = False) -> Report:
        """Return which features are on or off at this moment, and why.

        Args:
            with_fits: Whether to find out which features would help this script, which takes a few
                milliseconds.
        """
        with self._lock:
            why = "apply() has not been called in this process"
            found = {} if self._records else plugins.find_plugins()
            known = self._records or {
                name: FeatureRecord(plugin, FeatureRequest(None), "disabled", why)
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


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise SettingsError(
            f"names are texts; got {name!r}. Give them one by one, as in apply('a', 'b')."
        )
    return normalise_name(name)


def _normalised(values: object, where: str, shape: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a mapping with normalised names; two spellings of one name are an error."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{where} is {values!r}; write {shape} there.")
    seen: dict[str, str] = {}
    for key, value in values.items():
        name = _name(key)
        if name in seen:
            raise SettingsError(
                f"{where} has {seen[name]!r} and {key!r}, which mean the same. Keep one of them."
            )
        seen[name] = key
        yield name, value


def _log(report: Report, *, changed: bool, known: Mapping[str, FeatureRecord]) -> None:
    """Log a summary, and a warning for each feature that is newly in trouble."""
    if changed or not known:
        logs.logger.info("%s", report.summary())
    for feature in report.features:
        before = known.get(feature.name)
        if feature.state in TROUBLE and (before is None or before.reason != feature.reason):
            logs.logger.warning("feature %r is %s: %s", feature.name, feature.state, feature.reason)
