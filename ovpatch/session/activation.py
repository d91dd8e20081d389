"""Activation: plugin hooks and calls of the patch manager, in the order that turns features on and off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from ovpatch import logs
from ovpatch.patching import (
    IncompatiblePatchError,
    PatchConflictError,
    PatchError,
    PatchManager,
    PatchStatus,
    TargetNotFoundError,
)
from ovpatch.session.plan import PLANNED, FeatureError, FeaturePlan, FeatureRecord, sort_by_requirements
from ovpatch.session.plugins import PluginError, Plugins
from ovpatch.settings import options as opts


class _Registrar:
    """The patch manager of one feature; an :class:`ovpatch.Registrar`."""

    def __init__(self, manager: PatchManager, feature: str) -> None:
        self._manager, self._feature = manager, feature

    def register_patch(self, target: str, replacement: Any = None, **details: Any) -> None:
        self._manager.register_patch(target, replacement, feature=self._feature, **details)

    def register_hook(self, name: str, install: Any, *, why: str = "") -> None:
        self._manager.register_hook(name, install, feature=self._feature, why=why)


class ActiveFeatures:
    """The features that are on, and the patch manager below them. The session's lock guards it."""

    def __init__(self) -> None:
        self.plugins: Final = Plugins()  # the plugins in memory
        self.active: Final[dict[str, FeatureRecord]] = {}  # features that are on, in the order of their activation
        self._manager: Final = PatchManager()

    def statuses(self) -> Sequence[PatchStatus]:
        """Return the states of all patches."""
        return self._manager.statuses()

    def turn_off(self, names: Collection[str]) -> None:
        """Turn features off, the last one first.

        Raises:
            FeatureError: A plugin cannot give its live objects their stock behaviour back. It stays on, and so do
                the features that became active before it. Or all are off, but a hook's handle could not be removed.
        """
        left: list[str] = []
        for name in [name for name in reversed(self.active) if name in names]:
            try:
                self.plugins.call_hook(name, "ovpatch_deactivate")
            except PluginError as error:
                raise FeatureError(f"{name!r} cannot be turned off now and stays on: {error}.") from error
            left += self._take_back(name)
            del self.active[name]
        if left:
            raise FeatureError(f"turned off, and yet something is left: {'; '.join(left)}.")

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
            try:
                registrar, options = _Registrar(self._manager, name), opts.get_values(record.options)
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

    def _fail(self, record: FeatureRecord, error: BaseException, cause: BaseException | None) -> None:
        record.stand_down(_state_of(cause), str(error) if isinstance(error, (PluginError, PatchError)) else repr(error))
        self._withdraw(record.found.name)

    def _withdraw(self, name: str) -> None:
        """Revert and unregister a feature that did not become active.

        If another library patched on top meanwhile, its declarations stay, so that the report says *shadowed*.
        """
        for problem in self._take_back(name):
            logs.logger.error("%s", problem)
        if not any(status.feature == name and status.state == "shadowed" for status in self.statuses()):
            self._manager.unregister(name)

    def _take_back(self, name: str) -> list[str]:
        """Revert the patches of a feature; returns the errors of hooks that could not be removed."""
        try:
            self._manager.revert(name)
        except PatchError as error:  # from a hook's handle; everything else is reverted
            return [str(error)]
        return []


def _state_of(error: BaseException | None) -> str:
    if isinstance(error, TargetNotFoundError):
        return "unavailable"
    if isinstance(error, PatchConflictError):
        return "conflict"
    return "incompatible" if isinstance(error, IncompatiblePatchError) else "failed"
