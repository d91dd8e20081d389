"""The check of layout changes sees each change of code, and none of layout."""

from __future__ import annotations

import subprocess

import pytest

from tools import same_ast

SOURCE = 'def f(a, b):\n    """Do.\n\n    >>> f(\'a\',  [1, 2])\n    """\n    return a if b else (a, "x" "y")\n'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("f(a, b)", "f(\n    a,\n    b,\n)"),
        ('"x" "y"', '"xy"'),
        ("f('a',  [1, 2])", 'f("a", [1, 2])'),
        ("f('a',  [1, 2])", 'f(\n    ...     "a", [1, 2],\n    ... )'.replace("...", "   ")),
        ("    return", "    # A comment.\n    return"),
    ],
)
def test_layout_is_no_difference(old, new):
    assert same_ast.find_difference(SOURCE, SOURCE.replace(old, new)) == ""


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("f(a, b)", "f(a, c)", "line 1: the code differs"),
        ('"x" "y"', '"x y"', "line 1: the code differs"),
        ("if b", "if not b", "line 1: the code differs"),
        ("Do.", "Do it.", "the docstring 'Do it.' differs"),
        ("[1, 2]", "[1, 3]", "the docstring 'Do.' differs"),
        ("y", "y", ""),
    ],
)
def test_a_change_of_code_is_a_difference(old, new, difference):
    assert same_ast.find_difference(SOURCE, SOURCE.replace(old, new)) == difference
    assert (
        same_ast.find_difference(SOURCE, SOURCE + "x = 1\n") == "the number of statements differs"
    )


def test_changed_files_are_found(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("a.py", "b.py", "c.md"):
        (tmp_path / name).write_text("x = 1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    for name in ("a.py", "c.md", "new.py"):
        (tmp_path / name).write_text("x = 2\n")
    assert same_ast.list_changed_files("HEAD", tmp_path) == ["a.py"]
