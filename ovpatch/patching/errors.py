"""Errors of the patch manager. Every text names what is meant and ends with the remedy."""

from __future__ import annotations

from typing import Any


class PatchError(RuntimeError):
    """Something about a patch is wrong; nothing of the call that raised it stays applied.

    Attributes:
        patches: The declarations at fault, where they are known.
    """

    def __init__(self, text: str, *patches: Any) -> None:
        super().__init__(text)
        self.patches = patches


class DeclarationError(PatchError, TypeError):
    """A patch or hook was declared in a way that can never work, whatever the target."""


class TargetNotFoundError(PatchError):
    """The target does not exist here."""


class PatchConflictError(PatchError):
    """Two patches cannot be active together."""


class IncompatiblePatchError(PatchError):
    """The target exists but is not what the patch was written for: kind, signature or version of torch."""
