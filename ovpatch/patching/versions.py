"""The version of torch, read without importing torch.

[Note: plain ranges] Importing packaging takes a sixth of what ``apply()`` may cost. Ranges such as ``>=2.11,<2.16``, as
nearly all are, need only a comparison of two pairs of numbers; packaging does the others.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from typing import TYPE_CHECKING

from ovpatch.patching.errors import DeclarationError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


def check_specifier(specifier: str, target: str) -> None:
    """Raise if ``specifier`` is no version range.

    Args:
        specifier: For example ``">=2.11,<2.16"``.
        target: Target of the patch it belongs to, for the error.

    Raises:
        DeclarationError: It cannot be parsed.
    """
    if not is_range(specifier):
        raise DeclarationError(
            f"torch={specifier!r} of the patch of {target} is not a version range: write it as '>=2.11,<2.16'"
        )


def is_range(specifier: str) -> bool:
    """Tell whether a text is a version range."""
    if _plain(specifier):
        return True
    from packaging.specifiers import InvalidSpecifier

    try:
        _parsed(specifier)
    except InvalidSpecifier:
        return False
    return True


def torch_mismatch(specifier: str) -> str | None:
    """Return why the torch at hand is outside a range, or None if it is inside.

    Args:
        specifier: A checked version range.
    """
    text = torch_version()
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
    # Vendors ship builds such as 2.11.0a0+5228986, which are 2.11 in all but name.
    allowed = _parsed(specifier)
    if allowed.contains(version, prereleases=True) or allowed.contains(version.base_version):
        return None
    return f"needs torch {specifier}, and this is torch {text}"


def torch_version() -> str | None:
    """Return the version of the imported torch, else of the installed one, else None."""
    imported = getattr(sys.modules.get("torch"), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(specifier: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return both ends of a range ``>=A.B,<C.D``; see [Note: plain ranges]."""
    match = re.fullmatch(r">=(\d+)\.(\d+),<(\d+)\.(\d+)", specifier)
    return ((int(match[1]), int(match[2])), (int(match[3]), int(match[4]))) if match else None


def _parsed(specifier: str) -> SpecifierSet:
    # packaging takes 20 ms to import: only patches that name a range pay for it.
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier)
