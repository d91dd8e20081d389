"""The specification of plugins.

A plugin is an object that an entry point of the group ``ovpatch`` names. It describes one feature and implements the
hooks below. :func:`make_feature_hooks` returns such an object. A module whose functions are marked with
:data:`hookimpl` is a plugin, too. ``docs/write-a-plugin.md`` shows an example.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol, TypeAlias

import pluggy

from ovpatch.patching.patch import Removable

# Plugins import these two functions from here: features that measure need `cache_dir`, and options whose `parse`
# accepts more than a bool need `parse_flag`.
from ovpatch.settings.settings import cache_dir as cache_dir
from ovpatch.settings.settings import make_variable_name
from ovpatch.settings.settings import parse_flag as parse_flag

PROJECT: Final = "ovpatch"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Option:
    """One option of a feature, set by ``OVPATCH_<FEATURE>_<NAME>`` or ``apply(options={feature: {name: value}})``.

    Attributes:
        name: Lower-case identifier, unique within the feature.
        default: Value without any setting. Its type (bool, int, float, str) decides how strings are parsed unless
            ``parse`` is given.
        help: The effect of the option, in short sentences for ``ovpatch list`` and the generated tables.
        choices: Allowed values, if the option is an enumeration.
        parse: Converts a string into the value, or raises ``ValueError`` with the expected form. It also gets a Python
            number or bool as a string, so that it can check a range. Other Python values are not parsed.
        aliases: Other names of the option.
        default_unless_named: Value without any setting if the feature is on by default and no setting names it; None
            for ``default``.
        verified: Value without any setting in the patched runs of ``ovpatch verify``; None for ``default``.
        values: The kind of value for the documentation, such as "a size in MiB, or `none`", unless ``choices`` or a
            bool as ``default`` show it.
        experimental: Values without a measured gain in ``benchmarks/value.toml``.
    """

    name: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    parse: Callable[[str], Any] | None = None
    aliases: tuple[str, ...] = ()
    default_unless_named: Any = None
    verified: Any = None
    values: str = ""
    experimental: tuple[Any, ...] = ()

    @property
    def meaning(self) -> str:
        """``help`` in one line, with the experimental values."""
        values = ", ".join(
            f"{value:d}" if isinstance(value, bool) else str(value) for value in self.experimental
        )
        return " ".join(self.help.split()) + (
            f" Experimental, without a measured gain: {values}." if values else ""
        )


def make_count_parser(expected: str, least: int = 0) -> Callable[[str], int]:
    """Return a ``parse`` for integers from ``least`` on, whose errors quote the ``expected`` form."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise ValueError(f"expected {expected}")
        return int(text)

    return parse


def make_seconds_parser(expected: str = "a time in seconds, more than 0") -> Callable[[str], float]:
    """Return a ``parse`` for finite times above 0, whose errors quote the ``expected`` form."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"expected {expected}")
        return value

    return parse


class OptionError(ValueError):
    """An option of the user that cannot act here. The message gives the reason and ends with the remedy."""


# The messages by feature. A dictionary keeps their order and drops repetitions.
_failures: Final[dict[str, dict[str, None]]] = {}


def refuse_option(
    feature: str, options: Sequence[Option], name: str, value: Any, reason: str
) -> None:
    """Raise OptionError for a value that cannot act here, or note the reason for the report if it is the default.

    A feature calls this when it first needs the value, on all ranks for the same reason: the machine, the backend or
    the process group cannot serve the value. Only the user sets a value other than the default.

    Args:
        feature: The feature.
        options: All options of the feature.
        name: The option.
        value: Its value.
        reason: The reason as a clause. The full stop of a quoted message is dropped.

    Raises:
        OptionError: The value is not the default.
    """
    default = next(option.default for option in options if option.name == name)
    if value == default:
        _failures.setdefault(feature, {})[
            f"{name}={value} does not act here: {reason.rstrip('.')}"
        ] = None
        return
    raise OptionError(
        f"ovpatch: option {name}={value} of feature {feature!r} cannot act here: "
        f"{reason.rstrip('.')}. Set "
        f"{make_variable_name(feature, name)}={'none' if default is None else default} on all "
        "ranks, or remove the variable and the argument of that name."
    )


@contextmanager
def note_failures(feature: str, action: str) -> Iterator[None]:
    """Show the first line of an error that ends the block in the report, until the feature is turned off.

    Args:
        feature: The feature.
        action: The work of the block, for example ``wrapping MLP in DistributedDataParallel``.
    """
    try:
        yield
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        text = f"{action} failed with {type(error).__name__}{f': {first}' if first else ''}"
        _failures.setdefault(feature, {})[text] = None
        raise


def list_failures(feature: str) -> list[str]:
    """Return the messages of :func:`refuse_option` and :func:`note_failures`, oldest first."""
    return list(_failures.get(feature, ()))


def drop_failures(feature: str) -> None:
    """Forget the messages of a feature that is turned off."""
    _failures.pop(feature, None)


@dataclass(frozen=True)
class Package:
    """A package without which a feature has nothing to patch.

    Attributes:
        module: Dotted name of the module that the feature patches. ovpatch searches for it without importing it.
        remedy: The command that installs the package, for the report and the error.
    """

    module: str
    remedy: str


@dataclass(frozen=True)
class Feature:
    """The description of a feature.

    Attributes:
        name: Name in settings and in the report, which is also the name of the entry point.
        summary: One line for ``ovpatch list``.
        options: The options of the feature.
        requires: Names of features that must be on as well.
        conflicts: Names of features that must be off.
        default: Whether a plain ``apply()`` turns the feature on.
        torch: Versions of torch that the feature was tested with, as a PEP 440 specifier. Other versions are not
            refused, but the report shows ``untested``.
        reorders_products: Whether the feature sums matrix products in another order than stock PyTorch, which rounds
            differently. ``ovpatch verify`` then measures the tolerance.
        distributed: Whether the feature needs ``torch.distributed``. It is skipped in a build of torch without it.
        packages: Packages that the feature patches. If one of them is not installed, the feature is skipped; if the
            user named the feature, this is a :class:`ovpatch.FeatureError`.
        removed_options: Names of options that no longer exist, each with the reason and the remedy. A setting of such
            an option raises :class:`OptionError` with this message.
        work: Counters of real work, such as ``("steps",)``, without counters of patched objects. Default: all counters
            except ``stock_…``.
        gains: Clauses about the work for the end of ``ovpatch run``, with counters as fields:
            ``"{models:model}"`` becomes "2 models", ``"{saved_bytes:bytes}"`` becomes "7.4 GiB", and
            ``"{full-kept:bytes}"`` is the difference of two counters. A clause whose counters are
            all zero is left out. By default the report shows names and values of counters.
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    default: bool = True
    torch: str = ">=2.11,<2.16"
    reorders_products: bool = False
    distributed: bool = False
    packages: tuple[Package, ...] = ()
    removed_options: tuple[tuple[str, str], ...] = ()
    work: tuple[str, ...] = ()
    gains: tuple[str, ...] = ()


#: A counter whose sum over processes means nothing. It is a value that falls again, such as the bytes that a rank keeps
#: now, or a time, which passes in all processes at once. A merged report has that of the process with most.
Level: TypeAlias = Annotated[int, "level"]
#: A counter that keeps the largest value so far. A merged report has that of the process with most.
Peak: TypeAlias = Annotated[int, "peak"]


class FeatureCounters:
    """The numbers of a feature in the report: the annotated attributes of a subclass.

    The annotation decides the merge of reports of several processes. An ``int`` is a total since the process started,
    and totals are added. A :data:`Level` or :data:`Peak` is not: the merged report has the largest of all processes.

    This is no dataclass, because each feature's ``apply()`` would spend half a millisecond on creating the class.
    """

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        names = [
            name for cls in reversed(type(self).__mro__) for name in inspect.get_annotations(cls)
        ]
        return {name: getattr(self, name) for name in names}

    def list_levels(self) -> dict[str, str]:
        """Return "level" or "peak" for each counter that is no total, by name."""
        levels: dict[str, str] = {}
        for cls in reversed(type(self).__mro__):
            # Most classes have totals alone, and evaluating their annotations would take longer than the report.
            if set(inspect.get_annotations(cls).values()) <= {"int", int}:
                continue
            for name, hint in inspect.get_annotations(cls, eval_str=True).items():
                # Only an Annotated type has metadata.
                if metadata := getattr(hint, "__metadata__", ()):
                    levels[name] = str(metadata[0])
        return levels


class Registrar(Protocol):
    """The patch manager of one feature, to which all that it registers belongs."""

    def register_patch(
        self,
        target: str,
        replacement: Callable[..., Any] | None = None,
        *,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | str | None = None,
        optional: bool = False,
        order: int = 0,
        torch: str | None = None,
        why: str = "",
        expires: str = "",
    ) -> None:
        """Declare a patch; see :meth:`ovpatch.PatchManager.register_patch`.

        A string ``wrap="package.module:function"`` names the function. The module is imported when the target is
        wrapped, and the function gets the feature's options if it has a parameter ``options``.
        """

    def register_hook(self, name: str, install: Callable[[], Removable], *, why: str = "") -> None:
        """Declare an official hook; ``install`` is called at apply and its handle removed at revert."""

    def apply(self) -> None:
        """Apply all patches that were registered since :func:`ovpatch.apply`, or none of them.

        Use it for patches that are needed only once the feature has work.

        Raises:
            PatchError: A patch cannot be applied, or the feature has been turned off. Nothing is applied then. See
                :class:`ovpatch.PatchError`.
        """


class FeatureSpecs:
    """The hooks. Only :meth:`ovpatch_feature` and :meth:`ovpatch_register` are mandatory."""

    @hookspec
    def ovpatch_feature(self) -> Feature:
        """Return the description of the feature.

        ovpatch calls this once, before any other hook. It must not import heavy modules.
        """

    @hookspec
    def ovpatch_reasons_against(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the reasons against running the feature on this machine; empty if it can run.

        Args:
            options: Resolved options of the feature, by name.
        """

    @hookspec
    def ovpatch_register(self, patches: Registrar, options: Mapping[str, Any]) -> None:
        """Register patches and official hooks. Nothing is written until every feature has registered.

        Args:
            patches: The patch manager of this feature.
            options: Resolved options of the feature, by name.
        """

    @hookspec
    def ovpatch_activate(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Attach to live objects, and return remarks for the report, or nothing.

        ovpatch calls this after all patches of the feature are applied. A remark informs the user, for example, that an
        object was built before ``apply()`` and falls back to torch.
        """

    @hookspec
    def ovpatch_deactivate(self) -> None:
        """Restore the stock behaviour of live objects.

        ovpatch calls this before it reverts the feature's patches, and after :meth:`ovpatch_activate` has raised. If
        this hook raises because live objects cannot be restored now, the feature and its patches stay on, and
        ``revert()`` raises the error.
        """

    @hookspec
    def ovpatch_counters(self) -> Mapping[str, int]:
        """Return the counters of the feature in this process, by name.

        Counters ``stock_…`` count calls that fell back to torch. If all remaining counters are zero, the feature did
        nothing.
        """

    @hookspec
    def ovpatch_levels(self) -> Mapping[str, str]:
        """Return ``level`` or ``peak`` for each counter that is no total; see :data:`Level` and :data:`Peak`."""

    @hookspec
    def ovpatch_remarks(self) -> Sequence[str]:
        """Return remarks on the run, for example the name of a model that fell back to torch, with the reason."""

    @hookspec
    def ovpatch_fits(
        self, names: Collection[str], counters: Mapping[str, Mapping[str, int]]
    ) -> str:
        """Return the reason why the feature, which is off, would help this script; "" if it would not.

        ovpatch calls this at the end of a process under ``ovpatch run``. It must not import heavy modules.

        Args:
            names: Names in the script's code: modules, attributes, names of arguments.
            counters: Counters of each feature that is on, by name.

        Returns:
            A clause after "this script", such as ``uses Schedule1F1B``.
        """


class FeatureHooks:
    """The hooks of one feature, by name. The object is hashable, because pluggy keeps plugins in sets."""

    def __init__(self, hooks: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update({name: hookimpl(hook) for name, hook in hooks.items()})


def make_feature_hooks(
    feature: Feature,
    register: Callable[..., None],
    *,
    counters: FeatureCounters | str | None = None,
    reasons_against: Callable[..., Sequence[str]] | None = None,
    activate: Callable[..., Sequence[str] | None] | str | None = None,
    deactivate: Callable[[], None] | str | None = None,
    remarks: Callable[[], Sequence[str]] | str | None = None,
    fits: Callable[..., str] | None = None,
) -> FeatureHooks:
    """Return the plugin object of a feature, which its entry point names.

    A string, if it is accepted, is ``package.module:name``. The module is imported when the hook needs it, so that
    describing the feature imports no other module of the feature.

    Args:
        feature: The description.
        register: The hook ``ovpatch_register``.
        counters: The counters of the feature, or the string that names them. Default: none.
        reasons_against: The hook ``ovpatch_reasons_against``. Default: none.
        activate: The hook ``ovpatch_activate``; it gets the options. Default: none.
        deactivate: The hook ``ovpatch_deactivate``. A hook that a string names is called only if something has
            imported its module, because otherwise no live object has changed. Default: none.
        remarks: The hook ``ovpatch_remarks``. A hook that a string names is called only if something has imported its
            module. Default: none.
        fits: The hook ``ovpatch_fits``. Default: none.
    """
    hooks: dict[str, Callable[..., Any]] = {
        "ovpatch_feature": lambda: feature,
        "ovpatch_register": register,
    }
    if reasons_against is not None:
        hooks["ovpatch_reasons_against"] = reasons_against
    if fits is not None:
        hooks["ovpatch_fits"] = fits
    if counters is not None:
        hooks["ovpatch_counters"] = lambda: _load_named(counters).as_dict()
        hooks["ovpatch_levels"] = lambda: _load_named(counters).list_levels()
    if activate is not None:
        hooks["ovpatch_activate"] = (
            _call_with_options(activate) if isinstance(activate, str) else activate
        )
    for name, hook in (("ovpatch_deactivate", deactivate), ("ovpatch_remarks", remarks)):
        if hook is not None:
            hooks[name] = _call_if_imported(hook) if isinstance(hook, str) else hook
    return FeatureHooks(hooks)


def _load_named(value: Any) -> Any:
    """Return a value, or the value that a string ``package.module:name`` names."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    return getattr(importlib.import_module(module), name)


def _call_with_options(text: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda options: _load_named(text)(options)


def _call_if_imported(text: str) -> Callable[[], Any]:
    return lambda: _load_named(text)() if text.partition(":")[0] in sys.modules else None
