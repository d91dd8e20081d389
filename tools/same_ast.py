"""Check that a change of layout has changed nothing that Python runs.

    $ python tools/same_ast.py          # compare the files of the working tree with HEAD
    $ python tools/same_ast.py HEAD~1   # with another revision

The syntax trees of each Python file must be equal. Docstrings may differ in white space, quotes, parentheses and
trailing commas, because the formatter also formats their examples. The program lists all other files that differ, and
then exits with 1.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

# The parts of docstrings that the formatter may change.
_LAYOUT: Final = re.compile(r"[\s\\'\"()]|,(?=\s*[)\]}])")


def find_difference(before: str, after: str) -> str:
    """Return where two sources differ; "" if they are the same program.

    Raises:
        SyntaxError: A source cannot be parsed.
    """
    trees = [ast.parse(source) for source in (before, after)]
    docstrings = [_take_docstrings(tree) for tree in trees]
    dumps = [[ast.dump(node) for node in tree.body] for tree in trees]
    for number, (old, new) in enumerate(zip(*dumps, strict=False)):
        if old != new:
            return f"line {trees[1].body[number].lineno}: the code differs"
    if len(dumps[0]) != len(dumps[1]):
        return "the number of statements differs"
    for old, new in zip(*docstrings, strict=True):
        if _LAYOUT.sub("", old) != _LAYOUT.sub("", new):
            return f"the docstring {new.strip().partition(chr(10))[0]!r} differs"
    return ""


def _take_docstrings(tree: ast.Module) -> list[str]:
    """Return the docstrings of a tree and empty them there."""
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found.append(node.value.value)
            node.value.value = ""
    return found


def list_changed_files(revision: str, root: Path = ROOT) -> list[str]:
    """Return the Python files that a revision has and the working tree has changed."""
    command = ["git", "diff", "--name-only", "--diff-filter=M", "-z", revision, "--", "*.py"]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the files and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Check that a change of layout has changed no code."
    )
    parser.add_argument(
        "revision", nargs="?", default="HEAD", help="what the working tree is compared with (HEAD)"
    )
    revision = parser.parse_args(arguments).revision
    files = list_changed_files(revision)
    differences = 0
    for file in files:
        show = ["git", "show", f"{revision}:{file}"]
        before = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        difference = find_difference(before, (ROOT / file).read_text(encoding="utf-8"))
        if difference:
            print(f"{file}: {difference}", file=sys.stderr)
            differences += 1
    print(
        f"{len(files) - differences} of {len(files)} changed files are the same programs as in "
        f"{revision}"
    )
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
