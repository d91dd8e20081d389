"""The version of torch, read without importing torch."""

from __future__ import annotations

import importlib.metadata
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
    from packaging.specifiers import InvalidSpecifier

    try:
        _parsed(specifier)
    except InvalidSpecifier as error:
        raise DeclarationError(
            f"torch={specifier!r} of the patch of {target} is not a version range: write it as '>=2.11,<2.16'"
        ) from error


def torch_mismatch(specifier: str) -> str | None:
    """Return why the torch at hand is outside a range, or None if it is inside.

    Args:
        specifier: A checked version range.
    """
    from packaging.version import InvalidVersion, Version

    text = torch_version()
    if text is None:
        return f"needs torch {specifier}, and torch is not installed"
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


def _parsed(specifier: str) -> SpecifierSet:
    # packaging takes 20 ms to import: only patches that name a range pay for it.
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier)
