"""The names that the script of this process uses, from which a feature knows whether it fits."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Final

# Few scripts have more modules. The limit exists because compiling them takes time at exit.
_MAX_MODULES: Final = 100
_OURS: Final = ("ovpatch", "ovpatch_plugins")
# The path is read at import, because Python deletes ``__file__`` of the program before it calls the
# functions of :mod:`atexit`. It is "" for code without a file.
_PROGRAM: Final = getattr(sys.modules.get("__main__"), "__file__", None) or ""
_PROGRAM_PATH: Final = Path(_PROGRAM).absolute()


def list_script_names() -> set[str]:
    """Return the names in the code of the program and of the modules in its folder.

    These are modules that it imports, attributes, variables and names of arguments; also the names
    of the options on its command line.
    """
    names = {_read_option(word) for word in sys.argv[1:] if word.startswith("--")}
    for path in _list_files():
        with suppress(OSError, SyntaxError, ValueError):
            names |= _list_code_names(compile(path.read_bytes(), str(path), "exec"))
    return names


def _read_option(word: str) -> str:
    return re.sub("-", "_", word.lstrip("-").partition("=")[0])


def _list_files() -> Iterator[Path]:
    """Yield the files of the program and of the modules in its folder, libraries left out."""
    if not _PROGRAM:
        return
    folder = _PROGRAM_PATH.resolve().parent
    yield _PROGRAM_PATH
    modules = list(sys.modules.items())
    found = 0
    for name, module in modules:
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or name.partition(".")[0] in _OURS or file == _PROGRAM:
            continue
        path = Path(file)
        is_library = {"site-packages", "dist-packages"} & set(path.parts)
        if not is_library and folder in path.parents and found < _MAX_MODULES:
            found += 1
            yield path


def _list_code_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _list_code_names(constant)
        elif isinstance(constant, tuple):
            # The names of keyword arguments of a call are such a tuple.
            names |= {item for item in constant if isinstance(item, str)}
    return names
