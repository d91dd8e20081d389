"""The style checker: each rule finds its fault and nothing next to it, and ceilings only go down."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.torch_versions import ON_LISTED_TORCH
from tools import prose

ROOT = Path(__file__).resolve().parent.parent
WORDS = prose.read_words(prose.WORDS.read_text(encoding="utf-8"))
LIST = prose.read_words(
    "[phrases]\nhop/hops on -> continue\nleave ... grey -> fall back\nentire unless an entire "
    "number -> full\n"
    "[names]\nof_*, one -> the noun\n"
)


def find(path: str, source: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in prose.check_source(path, source, LIST)]


LONG = " ".join(["word"] * 31)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Words: a phrase may span lines; code and short strings are no prose.
        ("x = 1\n# It hops\n# on.\n", [(2, "word")]),
        ('"""The backward\n\n    hops  on."""\n', [(3, "word")]),
        ("raise E('all the ranks hop on')\n", [(1, "word")]),
        ("x = 'hop on'\n", []),
        ("# The call ``hop on`` and `entire` are code.\n", []),
        ("# Carhop only hops one way.\n", []),
        ("# We leave this big model grey. We leave a b c d grey.\n", [(1, "word")]),
        ("# The entire gradient is an entire number.\n", [(1, "word")]),
        # Names: where they are defined, and not where they are read.
        ("def _of_group(one, *, others): return one\n", [(1, "name")] * 2),
        ("def __eq__(self, one): return one\n", []),
        ("self.one = 1\nlambda one: one\n", [(1, "name"), (2, "name")]),
        ("class Of_Group(Base): pass\n", [(1, "name")]),
        # Comments.
        ("# which is not needed\n", [(1, "fragment")]),
        ("# As the rank waits, peers continue.\n", []),
        ("# why not?\n", []),
        (f"x = 1  # {'far ' * 11}\n", [(1, "trailing")]),
        (f"x = 1  # {'Far ' * 11}\n", []),
        ("x = 1  # noqa: E501, which is a comment for a tool and not for a reader\n", []),
        # Docstrings.
        ('"""Whether it runs."""\n', [(1, "opening")]),
        ('"""Return whether it runs."""\n', []),
        (f'"""One.\n\n{LONG}.\n"""\n', [(3, "long")]),
        (f'"""One, e.g. {LONG}."""\n', [(1, "long")]),
        (f'"""One:\n\n- {LONG[:100]}\n- {LONG[:100]}\n"""\n', []),
        (f'"""One::\n\n    {LONG}\n\nTwo."""\n', []),
        (f'"""One.\n\n>>> {LONG}\n"""\n', []),
        (f"# {LONG}\n", []),
    ],
)
def test_a_rule_finds_its_fault_and_nothing_next_to_it(source, expected):
    assert find("module.py", source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("One.\nIt hops on.\n", [(2, "word")]),
        ("```text\nIt hops on.\n```\n\n<!-- It\nhops on -->\nIt hops on.\n", [(7, "word")]),
        (
            "<!-- begin: a -->\nIt hops on.\n<!-- end: a -->\n<!-- table b -->\nIt hops on.\n<!-- /table -->\n"
            "It hops on.\n",
            [(7, "word")],
        ),
        ("::: a.hops_on\n    options: { hops on }\n\nIt hops on.\n", [(4, "word")]),
        ("[entire](entire) [x](<entire>)\n", [(1, "word")]),
        (f"# {LONG}\n\n| {LONG} |\n\n{LONG}\n", [(5, "long")]),
    ],
)
def test_a_page_is_read_without_its_code_links_and_generated_parts(source, expected):
    assert find("page.md", source) == expected


@pytest.mark.parametrize("text", ["[phrases]\nhop: report\n", "hop -> report\n"])
def test_a_line_of_the_word_list_that_is_no_rule_is_an_error(text):
    with pytest.raises(ValueError, match=r"words, line \d: 'hop.* is no rule\. Write"):
        prose.read_words(text)


@ON_LISTED_TORCH
def test_torchs_own_fsdp_is_nearly_clean():
    """Its authors use the words of the field, so it has at most 3 findings per 1,000 lines."""
    folder = Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard"
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]
    findings = [
        finding for source in sources for finding in prose.check_source("fsdp.py", source, WORDS)
    ]
    assert len(sources) > 5
    assert len(findings) <= 3 * sum(source.count("\n") for source in sources) / 1000


# --- rooms ---

CEILINGS = "# Rooms.\n.      1\na      5\na/b    2\n"


def test_a_file_belongs_to_the_room_with_the_longest_path():
    rooms = prose.read_ceilings(CEILINGS)
    assert rooms == {".": 1, "a": 5, "a/b": 2}
    paths = ("a/b/c.py", "a/bc.py", "ab/c.py", "README.md")
    assert [prose.find_room(path, rooms) for path in paths] == ["a/b", "a", ".", "."]


def test_a_room_above_its_ceiling_is_an_error_and_lowering_never_raises():
    ceilings = prose.read_ceilings(CEILINGS)
    counts = prose.count_by_room([prose.Finding("a/b/c.py", 1, "word", "")] * 3, ceilings)
    assert counts == {".": 0, "a": 0, "a/b": 3}
    (message,) = prose.check_rooms(counts, ceilings)
    assert message.startswith("a/b: 3 findings are more than the ceiling, 2. Correct the new ones")
    assert prose.lower_ceilings(CEILINGS, counts) == "# Rooms.\n.      0\na      0\na/b    2\n"


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_only_changed_lines_are_listed(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1\n2\n3\n4\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "a.py").write_text("1\nnew\n3\n4\nnew\nnew\n")
    (tmp_path / "b.txt").write_text("no prose\n")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    (tmp_path / "ignored.py").write_text("1\n")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "ä b.py").write_text("1\n2\n")
    (tmp_path / "new" / "empty.py").write_text("")
    changed = prose.list_changed_lines(tmp_path, "HEAD")
    assert changed.pop("a.py") == {2, 5, 6}
    assert changed.pop("new/ä b.py") >= {1, 2}, "git does not track it yet, so each line is new"
    assert changed.keys() <= {"b.txt", ".gitignore", "new/empty.py"}
    assert prose.list_files(tmp_path, []) == ["a.py", "new/empty.py", "new/ä b.py"]
    git(tmp_path, "add", ".")
    staged = prose.list_changed_lines(tmp_path, "HEAD")
    assert (staged["a.py"], staged["new/ä b.py"]) == ({2, 5, 6}, {1, 2}), "neither do staged files"


def test_a_finding_in_a_new_file_fails_the_check_of_changes(tmp_path, monkeypatch, capsys):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "first", "--allow-empty")
    (tmp_path / "new.py").write_text("x = 1\n\n# which is not needed\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert prose.main(["--changed"]) == 1
    assert capsys.readouterr().out.startswith("new.py:3: fragment: ")


def test_every_room_is_there():
    rooms = prose.read_ceilings(prose.CEILINGS.read_text(encoding="utf-8"))
    assert rooms.keys() >= {".", "docs", "examples", "ovpatch", "tests", "tools"}
    assert [room for room in rooms if not (ROOT / room).is_dir()] == []
