"""Declarations, statuses and errors of the patch manager: frozen data, and functions that describe them."""

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
    """The failure to declare or apply a patch. Nothing of the call that raised it stays applied.

    Each message names the patch and ends with the remedy.

    Attributes:
        patches: The declarations at fault, if known.
        state: The state that the report shows for a feature that fails with this error.
    """

    state = "failed"

    def __init__(self, text: str, *patches: Any) -> None:
        super().__init__(text)
        self.patches = patches


class DeclarationError(PatchError, TypeError):
    """A declaration that is invalid for any target."""


class TargetNotFoundError(PatchError):
    """A target that does not exist in this process."""

    state = "unavailable"


class PatchConflictError(PatchError):
    """Two patches that cannot be active together."""

    state = "conflict"


class IncompatiblePatchError(PatchError):
    """A target of another kind or signature, or a torch of another version, than the patch was written for."""

    state = "incompatible"


def is_version_range(specifier: str) -> bool:
    """Return whether a string is a version range."""
    if _parse_plain_range(specifier):
        return True
    from packaging.specifiers import InvalidSpecifier

    try:
        _parse_range(specifier)
    except InvalidSpecifier:
        return False
    return True


def explain_torch_mismatch(specifier: str) -> str | None:
    """Return the reason why the present torch is outside a checked version range; None if it is inside."""
    installed = read_torch_version()
    if installed is None:
        return f"needs torch {specifier}, and torch is not installed"
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    bounds = _parse_plain_range(specifier)
    if bounds and numbers:
        is_inside = bounds[0] <= (int(numbers[1]), int(numbers[2])) < bounds[1]
        return None if is_inside else f"needs torch {specifier}, and this is torch {installed}"
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(installed)
    except InvalidVersion:
        return f"needs torch {specifier}, and {installed!r} is not a version that can be compared"
    # Vendors ship builds such as 2.11.0a0+5228986: release 2.11 with a pre-release version.
    allowed = _parse_range(specifier)
    if allowed.contains(version, prereleases=True) or allowed.contains(version.base_version):
        return None
    return f"needs torch {specifier}, and this is torch {installed}"


def read_torch_version() -> str | None:
    """Return the version of the imported torch, otherwise of the installed torch; None without torch."""
    imported = getattr(sys.modules.get("torch"), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse_plain_range(specifier: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return both ends of a range ``>=A.B,<C.D``, for which packaging need not be imported."""
    match = re.fullmatch(r">=(\d+)\.(\d+),<(\d+)\.(\d+)", specifier)
    return ((int(match[1]), int(match[2])), (int(match[3]), int(match[4]))) if match else None


def _parse_range(specifier: str) -> SpecifierSet:
    # packaging is slow to import, so only unusual ranges import it.
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier)


Function = Callable[..., Any]
Wrap = Callable[[Function], Function]
Kind = Literal["replace", "wrap", "hook"]

_DESCRIPTORS: Final = (staticmethod, classmethod, property)


class NamedFunction:
    """A wrap function that is imported when its target is wrapped.

    A feature names the function. So describing the feature and declaring its patches import none of its modules.

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
        """Return whether both name the same function for the same options; such a patch is declared once."""
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
    """The states of a patch."""

    #: The patch is declared.
    REGISTERED = "registered"
    #: The patch is in force.
    APPLIED = "applied"
    #: The patch waits until its target is imported.
    PENDING = "pending"
    #: The patch is optional and its target does not exist.
    SKIPPED = "skipped"
    #: The target or torch differs from what the patch was written for; the reason has the difference.
    INCOMPATIBLE = "incompatible"
    #: Another patch replaces the same function; the reason names it.
    CONFLICT = "conflict"
    #: Another library's patch covers this patch. ovpatch leaves the other patch alone.
    SHADOWED = "shadowed"
    #: The patch could not be applied for another reason, which is given.
    FAILED = "failed"
    #: The patch was applied and is removed.
    REVERTED = "reverted"


class PatchStatus(NamedTuple):
    """One patch or hook at this moment.

    Attributes:
        target: The dotted path as declared, or the name of the hook.
        feature: The feature that declared the patch.
        kind: ``replace``, ``wrap`` or ``hook``.
        state: The state of the patch.
        reason: The reason for the state, unless that is obvious.
        calls: The number of eager calls that reached this patch. Calls from compiled code are not counted, see
            ``traces``.
        location: File and line of the stock function.
        rebound: References in other modules (``module.name``) that point to the patch.
        why: The reason for patching this target, as declared.
        expires: The condition under which the patch can be deleted, as declared.
        traces: The number of times that ``torch.compile`` traced the patch into a graph.
    """

    target: str
    feature: str
    kind: Kind
    state: PatchState
    reason: str = ""
    calls: int = 0
    location: str = ""
    rebound: tuple[str, ...] = ()
    why: str = ""
    expires: str = ""
    traces: int = 0

    @property
    def never_called(self) -> bool:
        """True if the patch is in force and no call, eager or compiled, has reached it yet."""
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
                    f"type: pass {'a string' if kind is str else 'a whole number'}"
                )
        if self.torch is not None and not is_version_range(self.torch):
            raise DeclarationError(
                f"torch={self.torch!r} of the patch of {self.target} is not a version range: write "
                "it as '>=2.11,<2.16'"
            )

    @property
    def kind(self) -> Kind:
        """``replace`` or ``wrap``."""
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
        """The position in a chain, innermost first: the replacement, then wrappers by order and registration."""
        return (self.kind == "wrap", self.order, self.number)

    def is_same_as(self, declared: Patch | Hook) -> bool:
        """Return whether both declare the same patch; such a patch is registered once."""
        return isinstance(declared, Patch) and self._key == declared._key

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.target, self.feature, self.order, self.replacement, self.wrap)

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

    def is_same_as(self, declared: Patch | Hook) -> bool:
        """Return whether both declare the same hook; such a hook is registered once."""
        return isinstance(declared, Hook) and self._key == declared._key

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.name, self.feature, self.install)

    def __str__(self) -> str:
        return f"{label_feature(self.feature)} (hook {self.name!r})"


def label_feature(feature: str) -> str:
    """Return the label of a feature in errors; a patch of a bare manager may have no feature."""
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
    """Return the module and name of a callable and, for Python functions, the file and line."""
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
