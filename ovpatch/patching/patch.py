"""Declarations, statuses and errors of the patch manager: frozen data without behaviour."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


class PatchError(RuntimeError):
    """A patch cannot be declared or applied; nothing of the call that raised it stays applied.

    Each text names the patch and ends with the remedy.

    Attributes:
        patches: The declarations at fault, if known.
        state: The state of a feature that fails with this error.
    """

    state = "failed"

    def __init__(self, text: str, *patches: Any) -> None:
        super().__init__(text)
        self.patches = patches


class DeclarationError(PatchError, TypeError):
    """The declaration of a patch or hook is invalid for any target."""


class TargetNotFoundError(PatchError):
    """The target does not exist in this process."""

    state = "unavailable"


class PatchConflictError(PatchError):
    """Two patches cannot be active together."""

    state = "conflict"


class IncompatiblePatchError(PatchError):
    """The target has another kind or signature, or torch another version, than the patch was written for."""

    state = "incompatible"


def is_version_range(specifier: str) -> bool:
    """Return whether a text is a version range."""
    if _plain(specifier):
        return True
    from packaging.specifiers import InvalidSpecifier

    try:
        _parsed(specifier)
    except InvalidSpecifier:
        return False
    return True


def explain_torch_mismatch(specifier: str) -> str | None:
    """Return why the torch at hand is outside a checked version range, or None if it is inside."""
    text = read_torch_version()
    if text is None:
        return f"needs torch {specifier}, and torch is not installed"
    numbers = re.match(r"(\d+)\.(\d+)", text)
    bounds = _plain(specifier)
    if bounds and numbers:
        inside = bounds[0] <= (int(numbers[1]), int(numbers[2])) < bounds[1]
        return None if inside else f"needs torch {specifier}, and this is torch {text}"
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(text)
    except InvalidVersion:
        return f"needs torch {specifier}, and {text!r} is not a version that can be compared"
    # Vendors ship builds such as 2.11.0a0+5228986: release 2.11 with a pre-release version.
    allowed = _parsed(specifier)
    if allowed.contains(version, prereleases=True) or allowed.contains(version.base_version):
        return None
    return f"needs torch {specifier}, and this is torch {text}"


def read_torch_version() -> str | None:
    """Return the version of the imported torch, else of the installed one, else None."""
    imported = getattr(sys.modules.get("torch"), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(specifier: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return both ends of a range ``>=A.B,<C.D``, which needs no import of packaging."""
    match = re.fullmatch(r">=(\d+)\.(\d+),<(\d+)\.(\d+)", specifier)
    return ((int(match[1]), int(match[2])), (int(match[3]), int(match[4]))) if match else None


def _parsed(specifier: str) -> SpecifierSet:
    # packaging is slow to import, so only unusual ranges import it.
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier)


Function = Callable[..., Any]
Wrap = Callable[[Function], Function]
Kind = Literal["replace", "wrap", "hook"]

_DESCRIPTORS: Final = (staticmethod, classmethod, property)


class NamedFunction:
    """A function that takes the original of a patch, imported when its target is wrapped.

    A feature names the function, so that describing the feature and declaring its patches import none of its modules.

    Args:
        name: ``package.module:function``.
        options: Options of the feature. The function gets them as ``options=`` if it has a parameter of that name.

    Raises:
        DeclarationError: The name has another form.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        module, _, function = name.partition(":")
        if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise DeclarationError(
                f"wrap={name!r} names no function: write it as 'package.module:function'"
            )
        # Conflicts and errors show a function by these two attributes.
        self.__module__ = module
        self.__qualname__ = function
        self._options = options

    def __call__(self, original: Function) -> Function:
        """Return the function to call instead of the original."""
        function: Any = getattr(importlib.import_module(self.__module__), self.__qualname__)
        takes_options = "options" in inspect.signature(function).parameters
        wrapper: Function = (
            function(original, options=self._options) if takes_options else function(original)
        )
        return wrapper

    def __eq__(self, other: object) -> bool:
        """Return whether both name the same function for the same options, which is then declared once."""
        return isinstance(other, NamedFunction) and self._key == other._key

    def __hash__(self) -> int:
        return hash((self.__module__, self.__qualname__))

    @property
    def _key(self) -> tuple[str, str, Mapping[str, Any]]:
        return self.__module__, self.__qualname__, self._options

    def get_loaded(self) -> Any:
        """Return the function itself if its module is imported, otherwise None."""
        return getattr(sys.modules.get(self.__module__), self.__qualname__, None)


class Removable(Protocol):
    """The handle of an installed hook."""

    def remove(self) -> None:
        """Remove the hook."""


class PatchState(str, Enum):
    """State of a patch.

    ``registered``: declared. ``applied``: in force. ``pending``: waits until its target is imported. ``skipped``:
    optional, and the target does not exist. ``incompatible``, ``conflict``, ``failed``: could not be applied; the
    reason says why. ``shadowed``: another library's patch lies over it and was left alone. ``reverted``: was applied
    and is removed.
    """

    REGISTERED = "registered"
    APPLIED = "applied"
    PENDING = "pending"
    SKIPPED = "skipped"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"
    SHADOWED = "shadowed"
    FAILED = "failed"
    REVERTED = "reverted"


class PatchStatus(NamedTuple):
    """One patch or hook at this moment."""

    target: str  # dotted path as declared, or the hook's name
    feature: str  # feature it belongs to
    kind: Kind  # ``replace``, ``wrap`` or ``hook``
    state: PatchState
    reason: str = ""  # why it is in this state, unless that is obvious
    calls: int = 0  # eager calls that reached this patch; calls from compiled code are not counted, see ``traces``
    location: str = ""  # file and line of the stock function
    rebound: tuple[
        str, ...
    ] = ()  # references in other modules (``module.name``) that point to the patch
    why: str = ""  # why this target, as declared
    expires: str = ""  # when the patch can be deleted, as declared
    traces: int = 0  # how often ``torch.compile`` traced the patch into a graph

    @property
    def never_called(self) -> bool:
        """Whether the patch is in force and no call, eager or compiled, has reached it yet."""
        return (
            self.state is PatchState.APPLIED
            and self.kind != "hook"
            and not self.calls
            and not self.traces
        )

    def to_json(self) -> dict[str, Any]:
        """Return the status as plain JSON data."""
        return {**self._asdict(), "state": self.state.value, "rebound": list(self.rebound)}


@dataclass(frozen=True, eq=False)
class Patch:
    """One declared patch; see :meth:`ovpatch.patching.PatchManager.register_patch` for the fields."""

    target: str
    replacement: Any = None
    wrap: Wrap | None = None
    feature: str = ""
    optional: bool = False
    order: int = 0
    torch: str | None = None
    why: str = ""
    expires: str = ""
    number: int = 0

    def __post_init__(self) -> None:
        _check_target(self.target)
        _check_callables(self.target, self.replacement, self.wrap)
        for name, kind in (("feature", str), ("order", int)):
            if not isinstance(getattr(self, name), kind):
                raise DeclarationError(
                    f"{name}={getattr(self, name)!r} of the patch of {self.target} is of the wrong "
                    "type: "
                    f"pass {'a text' if kind is str else 'a whole number'}"
                )
        if self.torch is not None and not is_version_range(self.torch):
            raise DeclarationError(
                f"torch={self.torch!r} of the patch of {self.target} is not a version range: write "
                "it as '>=2.11,<2.16'"
            )

    @property
    def kind(self) -> Kind:
        """Whether the patch replaces the target or wraps it."""
        return "wrap" if self.replacement is None else "replace"

    @property
    def name(self) -> str:
        """The target, as errors and statuses show it."""
        return self.target

    @property
    def source(self) -> Any:
        """The declared function."""
        return self.wrap if self.replacement is None else self.replacement

    @property
    def sort_key(self) -> tuple[bool, int, int]:
        """Position in a chain, innermost first: the replacement, then wrappers by order and registration."""
        return (self.kind == "wrap", self.order, self.number)

    def is_same_as(self, other: Patch | Hook) -> bool:
        """Whether both declare the same patch, which is then registered once."""
        if not isinstance(other, Patch):
            return False
        same = (self.target, self.feature, self.order) == (other.target, other.feature, other.order)
        return same and (self.replacement, self.wrap) == (other.replacement, other.wrap)

    def __str__(self) -> str:
        return f"{label_feature(self.feature)} ({describe_callable(self.source)})"


@dataclass(frozen=True, eq=False)
class Hook:
    """One declared official hook; see :meth:`ovpatch.patching.PatchManager.register_hook` for the fields."""

    name: str
    install: Callable[[], Removable]
    feature: str = ""
    why: str = ""
    number: int = 0

    kind: Kind = "hook"
    expires: str = ""

    def __post_init__(self) -> None:
        if not callable(self.install):
            raise DeclarationError(
                f"install of hook {self.name!r} is not callable: pass a function without arguments"
            )

    def is_same_as(self, other: Patch | Hook) -> bool:
        """Whether both declare the same hook."""
        mine = (self.name, self.feature, self.install)
        return isinstance(other, Hook) and mine == (other.name, other.feature, other.install)

    def __str__(self) -> str:
        return f"{label_feature(self.feature)} (hook {self.name!r})"


def label_feature(feature: str) -> str:
    """Return a feature as errors show it; a patch of a bare manager may have none."""
    return f"feature {feature!r}" if feature else "a patch without feature"


def unwrap_callable(value: Any) -> Any:
    """Return the Python function inside partials, bound methods, descriptors and imported :class:`NamedFunction`."""
    while True:
        if isinstance(value, NamedFunction):
            loaded = value.get_loaded()
            if loaded is None:
                return value
            value = loaded
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        else:
            return value


def describe_callable(value: Any) -> str:
    """Return module, name and, for Python functions, file and line."""
    value = unwrap_callable(value)
    owner = value if hasattr(value, "__qualname__") else type(value)
    name = f"{owner.__module__}.{owner.__qualname__}"
    location = find_location(value)
    return f"{name} at {location}" if location else name


def find_location(value: Any) -> str:
    """Return ``file:line`` of a Python function, or an empty string."""
    code = getattr(unwrap_callable(value), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""


def _check_target(target: str) -> None:
    parts = target.split(".") if isinstance(target, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise DeclarationError(
            f"{target!r} is not a target: give the dotted path of a function or method, "
            "for example 'torch.nn.Linear.forward'"
        )


def _check_callables(target: str, replacement: Any, wrap: Any) -> None:
    if (replacement is None) == (wrap is None):
        raise DeclarationError(
            f"a patch of {target} needs either a replacement or wrap=, exactly one of them: "
            "register_patch(target, replacement) or register_patch(target, wrap=function)"
        )
    if wrap is not None and not callable(wrap):
        raise DeclarationError(
            f"wrap= of {target} is not callable: pass a function that takes the original"
        )
    if wrap is None and not (callable(replacement) or isinstance(replacement, _DESCRIPTORS)):
        raise DeclarationError(
            f"the replacement of {target} is {replacement!r}, which is not callable: pass a "
            "function"
        )
