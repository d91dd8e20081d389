"""Telling managers that a module has been imported.

wrapt's import hooks are used through one listener per module for the whole process: wrapt neither removes nor
de-duplicates hooks, and an exception in one makes the user's import fail.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Final

Listener = Callable[[str], None]

_logger: Final = logging.getLogger("ovpatch.patching")
_lock: Final = threading.Lock()
if hasattr(os, "register_at_fork"):  # see ovpatch.patching.slot; nothing foreign runs under this lock either
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_listeners: Final[dict[str, list[Callable[[], Listener | None]]]] = {}


def watch(module: str, listener: Listener) -> None:
    """Call ``listener(module)`` once, after the next import of a module that is not imported now.

    Args:
        module: Dotted name.
        listener: Bound methods are held weakly, so that a forgotten manager can go away.
    """
    if module in sys.modules:
        return
    held = _held(listener)
    with _lock:
        first = module not in _listeners
        known = _listeners.setdefault(module, [])
        if not any(one() == listener for one in known):
            known.append(held)
    if first:
        # Importing wrapt takes some 20 ms beyond what torch imports: only who waits for a module pays for it.
        from wrapt import register_post_import_hook

        register_post_import_hook(_imported, module)


def _held(listener: Listener) -> Callable[[], Listener | None]:
    return weakref.WeakMethod(listener) if isinstance(listener, types.MethodType) else lambda: listener


def _imported(module: types.ModuleType) -> None:
    name = module.__name__
    with _lock:
        listeners = _listeners.pop(name, [])
    for held in listeners:
        listener = held()
        if listener is None:
            continue
        try:
            listener(name)
        except Exception:  # whatever it is, it must not break the user's import
            _logger.exception("a patch that waited for %s failed", name)
