"""The specification of plugins.

A plugin is an object that an entry point of the group ``ovpatch`` names. It describes one feature and implements the
hooks below. :func:`make_feature_hooks` returns such an object; a module whose functions are marked with
:data:`hookimpl` is one, too. ``docs/write-a-plugin.md`` shows an example.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pluggy

from ovpatch.patching.patch import (
    Removable,  # the handle of a hook, such as torch.utils.hooks.RemovableHandle
)
from ovpatch.settings.settings import cache_dir as cache_dir  # for features that measure
from ovpatch.settings.settings import make_variable_name
from ovpatch.settings.settings import (
    parse_flag as parse_flag,  # for options whose parse accepts more than a bool
)

PROJECT: Final = "ovpatch"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Option:
    """One option of a feature, set by ``OVPATCH_<FEATURE>_<NAME>`` or ``apply(options={feature: {name: value}})``.

    Attributes:
        name: Lower-case identifier, unique within the feature.
        default: Value without any setting. Its type decides how text is parsed (bool, int, float, str) unless
            ``parse`` is given.
        help: What it does, in short sentences; they go into ``ovpatch list`` and the generated tables.
        choices: Allowed values, if the option is an enumeration.
        parse: Turns text into the value; raises ``ValueError`` with the expected form. It also gets a Python number or
            bool, as text, so that it can check a range; other Python values are not parsed.
        aliases: Other names of the option.
        default_unless_named: Value without any setting where the feature is on by default, and nothing names it; None
            if that is ``default``, too.
        verified: Value without any setting in the patched runs of ``ovpatch verify``; None if that is ``default``, too.
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
        """``help`` in one line, and the experimental values."""
        values = ", ".join(
            f"{value:d}" if isinstance(value, bool) else str(value) for value in self.experimental
        )
        return " ".join(self.help.split()) + (
            f" Experimental, without a measured gain: {values}." if values else ""
        )


def make_count_parser(expected: str, least: int = 0) -> Callable[[str], int]:
    """Return a ``parse`` for whole numbers from ``least`` on; what is ``expected`` is in the text of its errors."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise ValueError(f"expected {expected}")
        return int(text)

    return parse


def make_seconds_parser(expected: str = "a time in seconds, more than 0") -> Callable[[str], float]:
    """Return a ``parse`` for finite times above 0; what is ``expected`` is in the text of its errors."""

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
    """An option that the user has set cannot act here; the message gives the reason and ends with the remedy."""


_failures: Final[dict[str, dict[str, None]]] = {}  # messages by feature


def refuse_option(
    feature: str, options: Sequence[Option], name: str, value: Any, reason: str
) -> None:
    """Raise OptionError for a value of an option that cannot act here, or note the reason if the value is the default.

    A feature calls this when the value is first needed, on all ranks for the same reason: the machine, the backend or
    the process group lacks what the value needs. Only the user sets a value other than the default.

    Args:
        feature: The feature.
        options: All options of the feature.
        name: The option.
        value: Its value.
        reason: Why the value cannot act, as a clause; the full stop of a quoted message is dropped.
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
        "ranks, or remove the "
        "variable and the argument of that name."
    )


@contextmanager
def note_failures(feature: str, action: str) -> Iterator[None]:
    """Have the report show an error that ends the block, by its first line, until the feature is turned off.

    ``action`` names what failed, for example ``wrapping MLP in DistributedDataParallel``.
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
        module: Dotted name of the module that the feature patches. It is searched for, and not imported.
        remedy: The line that installs it, which the report and the error show.
    """

    module: str
    remedy: str


@dataclass(frozen=True)
class Feature:
    """The description of a feature.

    Attributes:
        name: Name in settings and in the report; equals the entry point's name.
        summary: One line.
        options: Its options.
        requires: Names of features that it needs.
        conflicts: Names of features that exclude it.
        default: Whether a plain ``apply()`` turns it on.
        torch: Versions of torch it was tested with, as a PEP 440 specifier. With other versions the report says
            ``untested``; they are not refused.
        reorders_products: Whether it sums matrix products in another order than stock, which rounds differently;
            ``ovpatch verify`` then measures the tolerance.
        distributed: Whether it needs ``torch.distributed``, which some builds of torch lack; there it is skipped.
        packages: Packages that it patches. If one is not installed, the feature is skipped, and the user who named it
            gets a :class:`ovpatch.FeatureError`.
        removed_options: Names of options that no longer exist, each with the reason and the remedy. A setting of one
            raises :class:`OptionError` with that text.
        work: Counters of real work, such as ``("steps",)``, without those that count objects taken over. By default all
            but ``stock_…``.
        gains: Clauses about the work for the end of ``ovpatch run``, with counters as fields:
            ``"{models:model}"`` becomes "2 models", ``"{saved_bytes:bytes}"`` becomes "7.4 GiB", and
            ``"{whole-kept:bytes}"`` is the difference of two counters. A clause whose counters are
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


class FeatureCounters:
    """The numbers of a feature in the report: the annotated attributes of a subclass, all of them ``int``.

    Most are totals since the process started. Some are levels, which fall again, such as the bytes that a rank keeps
    now. The docstring of the subclass names its levels.

    No dataclass: to make one takes half a millisecond, of each feature's part in ``apply()``.
    """

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        names = [
            name for cls in reversed(type(self).__mro__) for name in inspect.get_annotations(cls)
        ]
        return {name: getattr(self, name) for name in names}


class Registrar(Protocol):
    """The patch manager of one feature; all that it registers belongs to that feature."""

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

        A text ``wrap="package.module:function"`` names the function. The module is imported when the target is
        wrapped, and the function gets the feature's options if it has a parameter ``options``.
        """

    def register_hook(self, name: str, install: Callable[[], Removable], *, why: str = "") -> None:
        """Declare an official hook; ``install`` is called at apply and its handle removed at revert."""

    def apply(self) -> None:
        """Apply what was registered since :func:`ovpatch.apply`, all of it or nothing.

        For patches that are needed only once the feature has work.

        Raises:
            PatchError: Something cannot be applied, or the feature has been turned off; nothing is applied then. See
                :class:`ovpatch.PatchError`.
        """


class FeatureSpecs:
    """The hooks. :meth:`ovpatch_feature` and :meth:`ovpatch_register` are mandatory, the others optional."""

    @hookspec
    def ovpatch_feature(self) -> Feature:
        """Return the description of the feature. Called once, before any other hook; must not import heavy modules."""

    @hookspec
    def ovpatch_reasons_against(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the reasons why the feature cannot run on this machine, or nothing.

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
        """Called after all patches of the feature are applied. Returns remarks for the report, or nothing.

        A remark tells the user, for example, that an object was built before ``apply()`` and stays stock.
        """

    @hookspec
    def ovpatch_deactivate(self) -> None:
        """Called before the feature's patches are reverted: restore the stock behaviour of live objects.

        Also called after :meth:`ovpatch_activate` raised. If this hook raises, because live objects cannot be restored
        now, the feature and its patches stay on, and ``revert()`` raises the error.
        """

    @hookspec
    def ovpatch_counters(self) -> Mapping[str, int]:
        """Return the counters of the feature in this process, by name.

        Counters ``stock_…`` count calls left to stock. If all others are zero, the feature did nothing.
        """

    @hookspec
    def ovpatch_remarks(self) -> Sequence[str]:
        """Return remarks on the run, for example which model fell back to stock, and why."""

    @hookspec
    def ovpatch_fits(
        self, names: Collection[str], counters: Mapping[str, Mapping[str, int]]
    ) -> str:
        """Return the reason why the feature, which is off, would help this script; "" otherwise.

        Called at the end of a process under ``ovpatch run``. It must not import heavy modules.

        Args:
            names: Names in the script's code: modules, attributes, names of arguments.
            counters: Counters of each feature that is on, by name.

        Returns:
            A clause after "this script", such as ``uses Schedule1F1B``.
        """


class FeatureHooks:
    """The hooks of one feature, by name. Hashable, because pluggy keeps plugins in sets."""

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

    Where a text is accepted, it is ``package.module:name``: that module is imported when the hook needs it, so that
    describing the feature imports nothing else of it.

    Args:
        feature: The description.
        register: The hook ``ovpatch_register``.
        counters: The counters of the feature, or the text that names them. Default: none.
        reasons_against: The hook ``ovpatch_reasons_against``. Default: none.
        activate: The hook ``ovpatch_activate``; it gets the options. Default: none.
        deactivate: The hook ``ovpatch_deactivate``. A text is called only if something has imported its module,
            because otherwise no live object has changed. Default: none.
        remarks: The hook ``ovpatch_remarks``. A text is called only if something has imported its module. Default:
            none.
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
        hooks["ovpatch_counters"] = lambda: _find_named(counters).as_dict()
    if activate is not None:
        hooks["ovpatch_activate"] = (
            _call_with_options(activate) if isinstance(activate, str) else activate
        )
    for name, hook in (("ovpatch_deactivate", deactivate), ("ovpatch_remarks", remarks)):
        if hook is not None:
            hooks[name] = _call_if_imported(hook) if isinstance(hook, str) else hook
    return FeatureHooks(hooks)


def _find_named(value: Any) -> Any:
    """Return a value, or the value that a text ``package.module:name`` names."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    return getattr(importlib.import_module(module), name)


def _call_with_options(text: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda options: _find_named(text)(options)


def _call_if_imported(text: str) -> Callable[[], Any]:
    return lambda: _find_named(text)() if text.partition(":")[0] in sys.modules else None
