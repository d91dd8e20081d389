"""Where measurements are kept from one run to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

VARIABLE: Final = "OVPATCH_CACHE_DIR"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the directory that ``OVPATCH_CACHE_DIR`` names, or ovpatch's own in the user's cache.

    The latter is by the XDG rules: in ``XDG_CACHE_HOME`` if that is an absolute path, else in ``~/.cache``.

    Args:
        environ: Variables; those of the process by default.

    Returns:
        The directory, which need not exist; None for a user who has no home, as many containers' have none.
    """
    source = os.environ if environ is None else environ
    named = source.get(VARIABLE, "").strip()
    if named:
        return _expanded(Path(named))
    bases = (source.get("XDG_CACHE_HOME", ""), source.get("LOCALAPPDATA", ""))
    base = next((path for path in bases if os.path.isabs(path)), os.path.join("~", ".cache"))
    return _expanded(Path(base) / "ovpatch")


def _expanded(path: Path) -> Path | None:
    try:
        return path.expanduser()
    except RuntimeError:  # pathlib's word for a user without a home
        return None
