"""Find the uses of torch that its documentation does not promise, and keep the ledger of them.

    $ python -m tools.upstream            # print each use, with its rooms
    $ python -m tools.upstream --write    # renew the table of docs/upstream.md

A *use* is a private name of torch, a private attribute of an object that torch made, or the target of a patch. The
name of a private class that an object is compared with is a use as well.
``ovpatch/upstream.toml`` has a reason for each, and when it can go. ``tests/test_upstream.py`` compares both.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from ovpatch.session.plugins import Plugins, find_plugins

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).resolve().parent.parent
LEDGER_FILE: Final = ROOT / "ovpatch" / "upstream.toml"
PAGE: Final = ROOT / "docs" / "upstream.md"
FOLDERS: Final = ("ovpatch", "plugins/ovpatch_plugins")

# The packages that are patched, as in the fields of the ledger, by the name of the module.
PACKAGES: Final = {"torch": "torch", "megatron": "megatron-core", "transformers": "transformers"}

# Attributes of objects of Python's own library.
_PYTHON_NAMES: Final = {
    "_actions",
    "_asdict",
    "_fields",
    "_initializing",
    "_option_string_actions",
    "_path",
    "_replace",
    "_value_",
}
# Attributes of torch's autograd nodes that no page of torch describes. A node has no file that could show it.
_UNDESCRIBED_NAMES: Final = {"variable"}
_PRIVATE: Final = re.compile(r"_[A-Za-z]\w*\Z|_\d+\Z")
_LEDGER_PART: Final = re.compile(r"(<!-- ledger -->\n).*?(<!-- /ledger -->)", re.DOTALL)


@dataclass(frozen=True)
class LedgerRow:
    """Symbols of the ledger with one reason.

    Attributes:
        symbols: Names, such as ``torch._C._is_tracing``, ``._stages`` for an attribute of an object, or a pattern with
            ``*``.
        versions: The range of versions in which they were tested, by package.
        reason: The purpose, and why no public name serves it.
        remove_when: The change of torch after which the use can go.
        issue: The address of a request to torch, or "".
    """

    symbols: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    reason: str
    remove_when: str
    issue: str = ""

    def covers(self, symbol: str) -> bool:
        """Return whether a symbol is one of this row."""
        return any(fnmatchcase(symbol, pattern) for pattern in self.symbols)


def read_ledger(text: str) -> list[LedgerRow]:
    """Return the rows of a ledger.

    Raises:
        ValueError: An row lacks a field or has an unknown one.
    """
    rows = []
    for table in tomllib.loads(text).get("use", []):
        fields = dict(table)
        symbols = fields.pop("symbol", ())
        symbols = (symbols,) if isinstance(symbols, str) else tuple(symbols)
        versions = tuple((name, fields.pop(name)) for name in PACKAGES.values() if name in fields)
        missing = [name for name in ("reason", "remove_when") if not fields.get(name)]
        unknown = sorted(fields.keys() - {"reason", "remove_when", "issue"})
        if not symbols or not versions or missing or unknown:
            raise ValueError(
                f"ledger: row {symbols or table} lacks "
                f"{missing or 'a symbol or a range of versions'} or has unknown "
                f"fields {unknown}. Write symbol, torch, reason and remove_when."
            )
        rows.append(LedgerRow(symbols, versions, **fields))
    return rows


# --- uses ---


def list_sources(root: Path) -> dict[str, ast.Module]:
    """Return the syntax trees of the package and its plugins by path."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in paths
    }


def find_uses(sources: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the files that use each symbol, without targets of patches.

    An attribute counts as one of a foreign object if no source defines a name like it.
    """
    own = {name for tree in sources.values() for name in _list_own_names(tree)}
    uses: dict[str, set[str]] = {}
    for path, tree in sources.items():
        for symbol in _list_symbols(tree, own):
            uses.setdefault(symbol, set()).add(path)
    return uses


def _list_own_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, and attributes of instances, classes and modules."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for assigned in node.body:
                if isinstance(assigned, (ast.Assign, ast.AnnAssign)):
                    targets = (
                        assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]
                    )
                    yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if _is_name(node.value, "self", "cls") else []


def _list_symbols(tree: ast.Module, own: set[str]) -> Iterator[str]:
    imported = dict(_list_imports(tree))
    yield from filter(None, map(shorten_symbol, imported.values()))
    inner: set[int] = set()
    for node in ast.walk(tree):
        attributes: list[str] = []
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, attributes = _split_chain(node, inner)
            origin = imported.get(root.id) if isinstance(root, ast.Name) else None
            if origin is not None:
                yield from filter(None, [shorten_symbol(".".join([origin, *attributes]))])
                continue
        elif isinstance(node, ast.Call) and _is_name(node.func, "getattr", "hasattr", "setattr"):
            attributes = [
                str(name.value) for name in node.args[1:2] if isinstance(name, ast.Constant)
            ]
        elif isinstance(node, ast.Compare) and _is_class_name(node.left):
            # Classes that C++ makes, and those of autograd functions, are in no module.
            attributes = [
                str(name.value) for name in node.comparators if isinstance(name, ast.Constant)
            ]
        yield from (
            f".{name}"
            for name in attributes
            if (_PRIVATE.match(name) and name not in own | _PYTHON_NAMES)
            or name in _UNDESCRIBED_NAMES
        )


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_class_name(node: ast.expr) -> bool:
    """Return whether this is the name of a class that a call returns: ``type(x).__name__``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "__name__"
        and isinstance(node.value, ast.Call)
    )


def _list_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that imports bind, with the full names of the imported objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                yield local, alias.name if alias.asname else local
                if not alias.asname:
                    yield alias.name, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _split_chain(node: ast.Attribute, inner: set[int]) -> tuple[ast.expr, list[str]]:
    """Return the root and the attributes of ``root.a.b``; a later walk skips the inner nodes."""
    names: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        inner.add(id(value))
        names.append(value.attr)
        value = value.value
    return value, names[::-1]


def shorten_symbol(name: str) -> str:
    """Return a name up to its last private part; "" if it has none or belongs to no package that is patched.

    The attribute of a private module is private, too: ``torch._C.DisableTorchFunction``.
    """
    parts = name.split(".")
    private = [number for number, part in enumerate(parts, 1) if _PRIVATE.match(part)]
    if parts[0] not in PACKAGES or not private:
        return ""
    length = private[-1]
    while length < len(parts) and inspect.ismodule(find_object(".".join(parts[:length]))):
        length += 1
    return ".".join(parts[:length])


@functools.cache
def find_object(name: str) -> Any:
    """Return the module, class or function of a dotted name; None if there is none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, _, attribute = name.rpartition(".")
        return getattr(find_object(owner), attribute, None) if owner else None


# --- targets ---


class _Recorder:
    """A registrar that keeps the targets of patches and applies nothing."""

    def __init__(self) -> None:
        self.targets: set[str] = set()

    def register_patch(self, target: str, *args: Any, **details: Any) -> None:
        self.targets.add(target)

    def register_hook(self, *args: Any, **details: Any) -> None:
        pass

    def apply(self) -> None:
        pass


def find_targets() -> dict[str, set[str]]:
    """Return the targets that each shipped feature patches, for any value of its options."""
    plugins = Plugins()
    targets: dict[str, set[str]] = {}
    for found in find_plugins().values():
        if not found.first_party:
            continue
        feature = plugins.load_feature(found)
        defaults = {option.name: option.default for option in feature.options}
        variants = [defaults]
        for option in feature.options:
            values = (True, False) if isinstance(option.default, bool) else option.choices
            variants += [
                defaults | {option.name: value} for value in values if value != option.default
            ]
        for options in variants:
            recorder = _Recorder()
            plugins.call_hook(feature.name, "ovpatch_register", patches=recorder, options=options)
            targets.setdefault(feature.name, set()).update(recorder.targets)
    return targets


def list_static_targets(tree: ast.Module) -> Iterator[str]:
    """Yield the targets of calls of ``register_patch`` that the source spells; "*" represents a variable."""
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and node.args
            and ast.unparse(node.func).split(".")[-1] == "register_patch"
        ):
            target = _spell(node.args[0], constants)
            if target.partition(".")[0] in PACKAGES:
                yield target


def _spell(node: ast.expr, constants: Mapping[str, Any]) -> str:
    """Return the text of a string, in which "*" represents a variable."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_spell(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return str(constants.get(node.value.id, "*"))
    return "*"


def find_all_uses(root: Path) -> dict[str, set[str]]:
    """Return the rooms that use each symbol, targets of patches included."""
    sources = list_sources(root)
    uses: dict[str, set[str]] = {}
    for symbol, paths in find_uses(sources).items():
        uses.setdefault(symbol, set()).update(map(get_room, paths))
    for feature, targets in find_targets().items():
        for target in targets:
            uses.setdefault(target, set()).add(feature)
    for path, tree in sources.items():
        # A feature's targets are already in the list, with the values of all variables.
        if path.startswith("ovpatch/"):
            for target in list_static_targets(tree):
                uses.setdefault(target, set()).add(get_room(path))
    return uses


def get_room(path: str) -> str:
    """Return the room of a file, such as ``ddp``, ``overlap/comm`` or ``insight``."""
    folder, *parts = path.split("/")[:-1]
    if folder == "plugins":
        return parts[1]
    return "/".join(parts[:2] if parts[:1] == ["overlap"] else parts[:1]) or folder


def find_matches(pattern: str, uses: Iterable[str]) -> list[str]:
    """Return the used symbols that a symbol of the ledger covers."""
    return sorted(symbol for symbol in uses if fnmatchcase(symbol, pattern))


# --- the page ---


def refresh_page(text: str, rows: Sequence[LedgerRow]) -> str:
    """Return the page with the current ledger."""
    return _LEDGER_PART.sub(lambda match: match[1] + make_section(rows) + match[2], text)


def make_section(rows: Sequence[LedgerRow]) -> str:
    """Return the ledger as a Markdown table."""
    lines = ["| Symbols | Versions | Reason | Can go when |", "| --- | --- | --- | --- |"]
    for row in rows:
        symbols = " ".join(f"`{symbol}`" for symbol in row.symbols)
        versions = " ".join(f"{package} `{versions}`" for package, versions in row.versions)
        reason = f"[{row.reason}]({row.issue})" if row.issue else row.reason
        lines.append(f"| {symbols} | {versions} | {reason} | {row.remove_when} |")
    return "".join(f"{line}\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the uses, or write the page."""
    parser = argparse.ArgumentParser(
        description="Print the uses of names that other packages do not promise."
    )
    parser.add_argument("--write", action="store_true", help="renew the table of docs/upstream.md")
    if parser.parse_args(arguments).write:
        rows = read_ledger(LEDGER_FILE.read_text(encoding="utf-8"))
        PAGE.write_text(refresh_page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return
    for symbol, rooms in sorted(find_all_uses(ROOT).items()):
        print(symbol, "in", *sorted(rooms))


if __name__ == "__main__":
    main()
