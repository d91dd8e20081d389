"""Whether kernels that are written in Triton can be compiled and run here."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil


@functools.cache
def objection() -> str:
    """Return why Triton's kernels cannot run in this process, with the remedy, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton, in the version that this torch names"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 has kernels interpreted, which is for tests: unset it"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler for its launchers: install gcc or clang, or set CC to one"
    return ""
