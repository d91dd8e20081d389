"""The patch manager: declared, checked, reversible patches of functions and methods.

The package does not know tensors and never imports torch. Most callers need :class:`PatchManager` only.
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
    "TargetNotFoundError",
]
