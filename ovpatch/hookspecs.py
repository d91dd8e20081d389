"""What a plugin may implement.

A plugin is any object, usually a module, that an entry point of the group ``ovpatch`` names. It describes exactly one
feature and implements the hooks below with :data:`hookimpl`. ``docs/write-a-plugin.md`` walks through one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pluggy

from ovpatch.settings.selection import parse_flag as parse_flag  # for options whose parse accepts more than a bool
from ovpatch.settings.settings import cache_dir as cache_dir  # for features that measure

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
        help: One sentence; it goes into the report and the generated table of variables.
        choices: Allowed values, if the option is an enumeration.
        parse: Turns text into the value; raises ``ValueError`` with what it expects. A number or a bool given in Python
            is passed through it as text too, so that it can check a range; other values are taken as they are.
        aliases: Other names that users know the option by.
    """

    name: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    parse: Callable[[str], Any] | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feature:
    """What a plugin tells about its feature before anything is patched.

    Attributes:
        name: Name by which users turn it on and off; equals the entry point's name.
        summary: One line.
        options: Its options.
        requires: Names of features without which it cannot run.
        conflicts: Names of features with which it cannot run.
        default: Whether a plain ``apply()`` turns it on.
        torch: Versions of torch it was tested with, as a PEP 440 specifier. Other versions are said to be untested in
            the report; they are not refused.
        reorders_products: Whether it adds up matrix products in another order than stock, which rounds otherwise;
            ``ovpatch verify`` then measures how much that may be.
        work: Counters that move only when it does its work, such as ``("steps",)``; those that move when it takes an
            object over are not among them. By default all but those called ``stock_…``.
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    default: bool = True
    torch: str = ">=2.11,<2.16"
    reorders_products: bool = False
    work: tuple[str, ...] = ()


class Removable(Protocol):
    """What an official hook returns when it is registered, for example ``torch.utils.hooks.RemovableHandle``."""

    def remove(self) -> None:
        """Take the hook away."""


class Registrar(Protocol):
    """The part of the patch manager that a feature sees; everything it registers belongs to that feature."""

    def register_patch(
        self,
        target: str,
        replacement: Callable[..., Any] | None = None,
        *,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        optional: bool = False,
        order: int = 0,
        torch: str | None = None,
        why: str = "",
        expires: str = "",
    ) -> None:
        """Declare a patch; see :meth:`ovpatch.PatchManager.register_patch`."""

    def register_hook(self, name: str, install: Callable[[], Removable], *, why: str = "") -> None:
        """Declare an official hook; ``install`` is called at apply and its handle removed at revert."""


class FeatureSpecs:
    """The hooks. A plugin implements :meth:`ovpatch_feature` and :meth:`ovpatch_register`; the others are optional."""

    @hookspec
    def ovpatch_feature(self) -> Feature:
        """Describe the feature. Called once, before any other hook; imports nothing heavy."""

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
            patches: Where to register.
            options: Resolved options of the feature, by name.
        """

    @hookspec
    def ovpatch_activate(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Called when all patches of the feature are in place. Returns remarks for the report, or nothing.

        A remark says what the user should know although the feature is on, for example that an object was built
        before ``apply()`` and stays stock.
        """

    @hookspec
    def ovpatch_deactivate(self) -> None:
        """Called before the feature's patches are reverted: give live objects their stock behaviour back.

        Also called when :meth:`ovpatch_activate` raised half-way. If it raises, the feature stays on, its patches
        included, and ``revert()`` passes the error on: raise where live objects cannot go back at the moment.
        """

    @hookspec
    def ovpatch_counters(self) -> Mapping[str, int]:
        """Return what the feature did so far in this process, by name.

        Counters called ``stock_…`` tell what was left to stock. If all others are zero, it did nothing.
        """

    @hookspec
    def ovpatch_remarks(self) -> Sequence[str]:
        """Return remarks that came up while running, for example which model fell back to stock, and why."""
