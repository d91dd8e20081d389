"""The patch manager: declared, checked, reversible patches of functions and methods.

It knows nothing of tensors and imports torch nowhere. :class:`PatchManager` is all that most callers need.
"""

from __future__ import annotations

from ovpatch.patching.manager import PatchManager
from ovpatch.patching.patch import (
    DeclarationError,
    IncompatiblePatchError,
    PatchConflictError,
    PatchError,
    PatchState,
    PatchStatus,
    Removable,
    TargetNotFoundError,
)

__all__ = [
    "DeclarationError",
    "IncompatiblePatchError",
    "PatchConflictError",
    "PatchError",
    "PatchManager",
    "PatchState",
    "PatchStatus",
    "Removable",
    "TargetNotFoundError",
]
