"""Plugins: the search for their entry points, their import, the checks of their hooks, and calls of single hooks.

Any error of a plugin becomes a :class:`PluginError`, so that it stops no other plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, Final

import pluggy

from ovpatch.hookspecs import PROJECT, Feature, FeatureSpecs
from ovpatch.patching.patch import is_version_range
from ovpatch.settings.feature_options import check_declaration
from ovpatch.settings.settings import NAME, OFF_WORDS, ON_WORDS, normalise_name, suggest_name

GROUP: Final = "ovpatch"
FIRST_PARTY: Final = "ovpatch"
# The words of OVPATCH that no feature may have as its name.
_WORDS: Final = frozenset((*ON_WORDS, *OFF_WORDS, "all"))


@dataclass(frozen=True)
class FoundPlugin:
    """An entry point of the group ``ovpatch``, which need not be imported yet."""

    # The name of the feature.
    name: str
    # Module, or ``module:attribute``, of the plugin.
    target: str
    # The distribution that contains the plugin, and its version.
    distribution: str
    version: str
    # The directory of the distribution's metadata.
    path: str
    # The reason for not loading the plugin; empty if it can be loaded.
    problem: str = ""
    # Whether the problem is that several distributions announce the feature.
    duplicate: bool = False
    # A remark for the report.
    remark: str = ""
    entry_point: EntryPoint | None = field(default=None, repr=False, compare=False)

    @property
    def first_party(self) -> bool:
        """True if ovpatch ships the plugin."""
        return self.distribution == FIRST_PARTY

    @property
    def origin(self) -> str:
        """The distribution, version and target, for messages."""
        return f"{self.distribution} {self.version} ({self.target})"


def find_plugins(path: list[str] | None = None) -> dict[str, FoundPlugin]:
    """Return all installed features by name, first-party features first, without an import.

    A distribution that is on the path twice, such as an editable install and its egg-info, counts once: the first
    match wins. If two distributions have a feature of the same name, ovpatch's own feature is kept. Without an own
    feature, neither is loaded.
    """
    by_name: dict[str, list[FoundPlugin]] = {}
    for found in _list_announced(distributions() if path is None else distributions(path=path)):
        by_name.setdefault(found.name, []).append(found)
    chosen = [_choose(candidates) for candidates in by_name.values()]
    return {
        found.name: found
        for found in sorted(chosen, key=lambda plugin: (not plugin.first_party, plugin.name))
    }


def _list_announced(installed: Iterable[Distribution]) -> Iterable[FoundPlugin]:
    seen: set[str] = set()
    for distribution in installed:
        text = distribution.read_text("entry_points.txt") or ""
        # Parsing is slow, so only the metadata of distributions with such a group is parsed.
        if f"[{GROUP}]" not in text.replace(" ", ""):
            continue
        # Each access parses the metadata, which takes as long as importing a module.
        metadata = distribution.metadata
        name = normalise_name(metadata["Name"] or "unknown").replace("_", "-").replace(".", "-")
        if name in seen:
            continue
        seen.add(name)
        for entry_point in dict.fromkeys(distribution.entry_points):
            if entry_point.group == GROUP:
                yield _describe_entry_point(
                    distribution, name, metadata["Version"] or "unknown", entry_point
                )


def _describe_entry_point(
    distribution: Distribution, owner: str, version: str, entry_point: EntryPoint
) -> FoundPlugin:
    name, problem = normalise_name(entry_point.name), ""
    if not NAME.fullmatch(name):
        problem = f"the entry point's name {name!r} is not a lower-case identifier"
    elif name in _WORDS:
        problem = f"the entry point's name {name!r} is a word of the variable OVPATCH"
    return FoundPlugin(
        name=name,
        target=entry_point.value,
        distribution=owner,
        version=version,
        path=str(getattr(distribution, "_path", "") or distribution.locate_file("")),
        problem=problem,
        entry_point=entry_point,
    )


def _choose(candidates: list[FoundPlugin]) -> FoundPlugin:
    if len(candidates) == 1:
        return candidates[0]
    origins = " and ".join(found.origin for found in candidates)
    own = [found for found in candidates if found.first_party]
    if len(own) == 1:
        left_out = ", ".join(found.origin for found in candidates if not found.first_party)
        return replace(
            own[0],
            remark=f"the plugin of the same name from {left_out} was left out; uninstall or rename it",
        )
    problem = f"announced by {origins}; none is loaded. Uninstall or rename one of them"
    return replace(candidates[0], problem=problem, duplicate=True)


_PREFIX: Final = "ovpatch_"
_MANDATORY: Final = ("ovpatch_feature", "ovpatch_register")
_HOOKS: Final = tuple(name for name in vars(FeatureSpecs) if name.startswith(_PREFIX))


class PluginError(Exception):
    """A plugin that cannot be used. The message is the reason in the report."""

    def __init__(self, reason: str, state: str = "failed") -> None:
        super().__init__(reason)
        self.state = state


class _Manager(pluggy.PluginManager):
    """A pluggy manager that inspects only functions.

    pluggy is slow for each name in a module, and most of these names are imported classes.
    """

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if inspect.ismodule(plugin):
            value = vars(plugin).get(name)
            if not (inspect.isroutine(value) or isinstance(value, (staticmethod, classmethod))):
                return None
        return super().parse_hookimpl_opts(plugin, name)


class Plugins:
    """The plugins of a session, in one pluggy manager."""

    def __init__(self) -> None:
        self._manager: Final = _Manager(PROJECT)
        self._manager.add_hookspecs(FeatureSpecs)
        self._features: Final[dict[str, Feature]] = {}

    def load_feature(self, found: FoundPlugin) -> Feature:
        """Return the description of a feature. The first call imports and checks its plugin.

        Raises:
            PluginError: The plugin is a duplicate, raises at import, misspells a hook, or has a wrong description.
        """
        if found.problem:
            raise PluginError(found.problem, "conflict" if found.duplicate else "failed")
        if found.name not in self._features:
            plugin = self._import(found)
            self._register(found, plugin)
            try:
                self._check_hooks(found.name, plugin)
                self._features[found.name] = self._describe_feature(found)
            # A plugin that fails must not stay registered.
            except Exception:
                self._manager.unregister(name=found.name)
                raise
        return self._features[found.name]

    def _import(self, found: FoundPlugin) -> object:
        if found.entry_point is None:
            raise PluginError(f"{found.origin} has no entry point. Install the distribution again")
        try:
            return found.entry_point.load()
        # A plugin may raise any exception at import.
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"importing {found.target} of {found.distribution} raised {describe_error(error)}. "
                f"Correct the plugin, or turn it off by OVPATCH=-{found.name}"
            ) from error

    def _register(self, found: FoundPlugin, plugin: object) -> None:
        _check_marks(plugin)
        try:
            self._manager.register(plugin, name=found.name)
        except (pluggy.PluginValidationError, ValueError) as error:
            cause = " ".join(str(error).split()).rstrip(".")
            raise PluginError(
                f"{found.target} does not fit the specification: {cause}. Correct its hook"
            ) from error

    def _check_hooks(self, name: str, plugin: object) -> None:
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            callers = self._manager.get_hookcallers(plugin) or []
            unknown = [caller.name for caller in callers if caller.name not in _HOOKS]
            hints = " and ".join(f"{name!r}{suggest_name(name, _HOOKS)}" for name in unknown)
            raise PluginError(f"unknown hook {hints}. Correct the name") from error
        missing = [hook for hook in _MANDATORY if not self.implements(name, hook)]
        if missing:
            raise PluginError(f"does not implement {' and '.join(missing)}. Add it to the plugin")

    def _describe_feature(self, found: FoundPlugin) -> Feature:
        feature = self.call_hook(found.name, "ovpatch_feature")
        if not isinstance(feature, Feature):
            raise PluginError(
                f"ovpatch_feature returned {type(feature).__name__}, not a Feature. Return a "
                "Feature"
            )
        if feature.name != found.name:
            raise PluginError(
                f"its feature is called {feature.name!r}, its entry point {found.name!r}: use one "
                "name"
            )
        try:
            check_declaration(feature)
        except ValueError as error:
            raise PluginError(str(error)) from error
        if not is_version_range(feature.torch):
            raise PluginError(
                f"torch={feature.torch!r} is not a version range: write it as '>=2.11,<2.16'"
            )
        return feature

    def implements(self, name: str, hook: str) -> bool:
        """Return whether a loaded plugin implements a hook."""
        callers = self._manager.get_hookcallers(self._manager.get_plugin(name)) or []
        return any(caller.name == hook for caller in callers)

    def call_hook(self, name: str, hook: str, /, **arguments: Any) -> Any:
        """Return the result of one hook of a plugin, or None if the plugin does not implement it.

        Raises:
            PluginError: The hook raises.
        """
        plugin = self._manager.get_plugin(name)
        rest = [member for member in self._manager.get_plugins() if member is not plugin]
        try:
            results = self._manager.subset_hook_caller(hook, rest)(**arguments)
        # A plugin may raise any exception.
        except (Exception, SystemExit) as error:
            raise PluginError(f"{hook} raised {describe_error(error)}") from error
        return results[0] if results else None

    def call_for_texts(self, name: str, hook: str, /, **arguments: Any) -> tuple[str, ...]:
        """Return the strings that a hook returns, which may also return a single string or None.

        Raises:
            PluginError: The hook returns something else.
        """
        found = self.call_hook(name, hook, **arguments)
        if isinstance(found, str):
            return (found,)
        try:
            return tuple(str(text) for text in found or ())
        # A plugin's objects may raise any exception.
        except Exception as error:
            raise PluginError(
                f"{hook} returned {type(found).__name__}, not a list of strings. Return a list"
            ) from error


def describe_error(error: BaseException) -> str:
    """Return the type and message of an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_marks(plugin: object) -> None:
    """Refuse functions named like a hook but without ``@hookimpl``, which pluggy ignores silently."""
    for name in dir(plugin):
        if name.startswith(_PREFIX):
            value = getattr(plugin, name, None)
            if (
                callable(value)
                and not isinstance(value, type)
                and not hasattr(value, f"{PROJECT}_impl")
            ):
                raise PluginError(
                    f"{name!r} looks like a hook but is not marked with @hookimpl. Mark it, or "
                    "rename it"
                )
