"""Random mutants: small changes of the sources, of which good tests notice nearly all.

Chosen faults show that a mechanism is tested, but tests can be written for them. Mutants are drawn at random, so a
deletion of tests that makes the set of killed mutants smaller has removed more than repetition.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A changed expression or statement.

    Attributes:
        file: The file, relative to the repository.
        line: The line where the changed code begins.
        kind: "dropped call", "negated test", "one more", "one less" or "swapped arguments".
        old: The code that is replaced.
        new: The code that replaces it.
        begin: The offset of ``old`` in the bytes of the file.
        tests: Arguments for pytest.
    """

    file: str
    line: int
    kind: str
    old: str
    new: str
    begin: int
    tests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The description of the mutant: the place, the kind and the code, in one line."""
        return f"{self.file}:{self.line}: {self.kind}: {' '.join(self.old.split())}"

    def plant(self, root: Path) -> None:
        """Change the file below ``root``."""
        path = root / self.file
        path.write_bytes(self.change(path.read_bytes()))

    def change(self, source: bytes) -> bytes:
        """Return the source with the change."""
        end = self.begin + len(self.old.encode())
        return source[: self.begin] + self.new.encode() + source[end:]


def list_mutants(file: str, source: bytes, tests: Sequence[str] = ()) -> list[Mutant]:
    """Return all mutants of a source in the order of their places."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, kind, replace in _list_sites(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = source[begin:end].decode()
        mutant = Mutant(
            file, node.lineno, kind, old, replace or f"not ({old})", begin, tuple(tests)
        )
        if mutant.new != old and _can_compile(mutant.change(source)):
            found.append(mutant)
    return sorted(found, key=lambda mutant: (mutant.begin, mutant.kind))


def _can_compile(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _list_sites(tree: ast.Module) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield the nodes to replace, the kind of change, and the new code; "" negates the node."""
    for node in _walk_code(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node.value, "dropped call", "None"
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test, "negated test", ""
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "one more", str(node.value + 1)
            yield node, "one less", f"({node.value - 1})"
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            swapped = _swap_arguments(node)
            if swapped:
                yield node, "swapped arguments", swapped


def _swap_arguments(call: ast.Call) -> str:
    """Return the call with its first two arguments in the other order; "" if that changes nothing."""
    first, second, *_ = call.args
    if (
        isinstance(first, ast.Starred)
        or isinstance(second, ast.Starred)
        or ast.dump(first) == ast.dump(second)
    ):
        return ""
    return ast.unparse(ast.Call(call.func, [second, first, *call.args[2:]], call.keywords))


def _walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without annotations, which do nothing, and f-strings, whose places Python 3.10 does not know."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.alias)):
                yield child
                yield from _walk_code(child)


def draw_mutants(
    root: Path, room: str, count: int, seed: int, tests: Sequence[str]
) -> list[Mutant]:
    """Draw mutants of the Python files at or below a path; equal sources and seeds give equal mutants.

    Raises:
        ValueError: The room has no code to change.
    """
    path = root / room
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    found = []
    for file in files:
        found += list_mutants(file.relative_to(root).as_posix(), file.read_bytes(), tests)
    if not found:
        raise ValueError(
            f"{room} has no code that a mutant changes. Name a folder or file of the sources."
        )
    return random.Random(seed).sample(found, min(count, len(found)))
