"""Where a module that a test imports in one thread meets the other thread."""

from __future__ import annotations

import threading

from ovpatch.patching import PatchManager

importing = threading.Event()
wrapping = threading.Event()
other: PatchManager | None = None
