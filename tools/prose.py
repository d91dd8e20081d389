"""Find prose that the style of this project rejects, and hold each room of the repository to its ceiling.

    $ python -m tools.prose                    # check the ceilings of all rooms (`make lint`)
    $ python -m tools.prose docs README.md     # list the findings of folders and files
    $ python -m tools.prose --changed          # list the findings of lines that differ from HEAD, and of new files
    $ python -m tools.prose --lower            # lower the ceilings of rooms that have improved

A *room* is a path of ``tools/prose_ceilings.txt``. A file belongs to the room with the longest
matching path. The number of findings of a room may only go down. The rules are:

- ``word``: a phrase of ``tools/words.txt`` in a comment, docstring, message or page.
- ``name``: a name of ``tools/words.txt`` where it is defined.
- ``fragment``: a comment that begins with a conjunction or a relative pronoun.
- ``trailing``: a long comment after code, which belongs above it as a sentence.
- ``opening``: a docstring that begins with a question word, such as "Whether".
- ``long``: a sentence of more than 30 words in a docstring or a page.

The program exits with 1 if a room is above its ceiling or a listing is not empty.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
WORDS: Final = ROOT / "tools" / "words.txt"
CEILINGS: Final = ROOT / "tools" / "prose_ceilings.txt"

# The files that have prose.
SUFFIXES: Final = (".py", ".md")

MAX_SENTENCE_WORDS: Final = 30
MAX_TRAILING_CHARS: Final = 40
# Shorter strings are keys and formats, not messages.
MIN_MESSAGE_WORDS: Final = 4
# The words that "..." in a phrase represents.
MAX_GAP_WORDS: Final = 3

_QUESTION_WORDS: Final = "what|which|whether|how|where|why|whose"
_OPENING: Final = re.compile(rf"\W*({_QUESTION_WORDS})\b", re.IGNORECASE)
_FRAGMENT: Final = re.compile(
    r"(?:as|by|so|of|than|that|else|which|whose|whom|what|where|why|how)\b|W(?:hich|hat|hose)\b"
)
# Comments that address a tool.
_DIRECTIVE: Final = re.compile(r"(?:noqa|type:|fmt:|mypy|ruff|pragma|!|-\*-|[-=]{2})")
_CODE_SPAN: Final = re.compile(r"(`+).+?\1", re.DOTALL)
_FENCED: Final = re.compile(
    # A block of code, a remark, or a directive of mkdocstrings with its options.
    r"^([ ]*)(```|~~~).*?^\1\2[ ]*$|<!--.*?-->|^::: [^\n]*(?:\n {4}[^\n]*)*",
    re.DOTALL | re.MULTILINE,
)
# A part of a page that is generated, by this or another tool. Its sentences are checked where they are written: in the
# sources, as the help of an option, or in the tests, as the name of a program.
_GENERATED: Final = re.compile(
    r"<!-- (?:begin: |table )?([^>]+?) -->.*?<!-- (?:end: \1|/table|/\1) -->", re.DOTALL
)
_LINK_TARGET: Final = re.compile(r"\]\([^)\s]*\)")
_ABBREVIATION: Final = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf)\.$|(?:^|[\s(])\w\.$")
_SENTENCE_END: Final = re.compile(r"[.!?:][)\"'*\u201d]*(?=\s|$)")
# A line that begins a paragraph: an item of a list, a quotation, an entry of "Args:".
_ITEM: Final = re.compile(r"(?:[-*+>]|\d+[.)])\s|[*\w`. ]{1,40}(?: \([^)]*\))?:(?:\s|$)")
# A line that is no sentence: a heading, a row of a table, a doctest, HTML.
_NO_SENTENCE: Final = re.compile(r"#|\||>>>|\$ |<|---|===")


class Finding(NamedTuple):
    """A passage that breaks a rule.

    Attributes:
        path: The file, relative to the root.
        line: The line, from 1.
        rule: One of the rules above.
        advice: The passage, and the remedy.
    """

    path: str
    line: int
    rule: str
    advice: str


class Passage(NamedTuple):
    """Prose of consecutive lines of a file; ``kind`` is comment, trailing, docstring, message or page."""

    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class Phrase:
    """A rejected phrase.

    Attributes:
        pattern: The expression that finds it.
        exceptions: The expression of phrases in which it is right, or None.
        word: The word of the field.
    """

    pattern: re.Pattern[str]
    exceptions: re.Pattern[str] | None
    word: str

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches that overlap no exception."""
        allowed = (
            [match.span() for match in self.exceptions.finditer(text)] if self.exceptions else []
        )
        for match in self.pattern.finditer(text):
            if not any(begin < match.end() and match.start() < end for begin, end in allowed):
                yield match


class WordList(NamedTuple):
    """The rejected phrases of prose, and the rejected names of code.

    Attributes:
        phrases: The phrases, in the order of the file.
        names: The names, in the order of the file.
        some_phrase: The expression that finds any phrase. Few passages have one, and this search
            is faster than a search for each phrase.
    """

    phrases: tuple[Phrase, ...]
    names: tuple[Phrase, ...]
    some_phrase: re.Pattern[str]


def read_words(text: str) -> WordList:
    """Read a word list; its header describes the format.

    Raises:
        ValueError: A line is neither empty, a comment, a section nor a rule.
    """
    sections: dict[str, list[Phrase]] = {"phrases": [], "names": []}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split(" # ")[0].strip()
        if not content or content.startswith("#"):
            continue
        if content.strip("[]") in sections and content.startswith("["):
            section = content.strip("[]")
            continue
        rejected, arrow, word = content.partition(" -> ")
        if not arrow or not section:
            raise ValueError(
                f"words, line {number}: {line!r} is no rule. Write 'phrase, phrase -> word'."
            )
        phrases, _, exceptions = rejected.partition(" unless ")
        found = (
            _compile(phrases, section),
            _compile(exceptions, section) if exceptions else None,
            word.strip(),
        )
        sections[section].append(Phrase(*found))
    patterns = [phrase.pattern.pattern for phrase in sections["phrases"]]
    some_phrase = re.compile("|".join(patterns) or r"(?!)", re.IGNORECASE)
    return WordList(tuple(sections["phrases"]), tuple(sections["names"]), some_phrase)


def _compile(phrases: str, section: str) -> re.Pattern[str]:
    if section == "names":
        names = [re.escape(phrase.strip()).replace(r"\*", r"\w*") for phrase in phrases.split(",")]
        return re.compile(rf"^(?:{'|'.join(names)})$", re.IGNORECASE)
    parts = []
    for phrase in phrases.split(","):
        words = [_compile_word(word) for word in phrase.split()]
        parts.append(r"\s+".join(words))
    return re.compile(rf"(?<![\w-])(?:{'|'.join(parts)})(?![\w-])", re.IGNORECASE)


def _compile_word(word: str) -> str:
    if word == "...":
        return rf"[\w'-]+(?:\s+[\w'-]+){{0,{MAX_GAP_WORDS - 1}}}?"
    return (
        "(?:" + "|".join(re.escape(part).replace(r"\*", r"\w*") for part in word.split("/")) + ")"
    )


# --- passages ---


def read_python(source: str, nodes: Sequence[ast.AST]) -> Iterator[Passage]:
    """Yield the comments, docstrings and messages of Python code, which consists of some nodes."""
    yield from _read_comments(source)
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield Passage(node.lineno, "docstring", node.value)
            elif len(node.value.split()) >= MIN_MESSAGE_WORDS:
                yield Passage(node.lineno, "message", node.value.replace("\n", " "))


def _read_comments(source: str) -> Iterator[Passage]:
    block: list[str] = []
    begin = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, column), text = token.start, token.string.lstrip("#: ").rstrip()
        if token.line[:column].strip():
            yield Passage(line, "trailing", text)
            continue
        if block and line != begin + len(block):
            yield Passage(begin, "comment", "\n".join(block))
            block = []
        begin = begin if block else line
        block.append(text)
    if block:
        yield Passage(begin, "comment", "\n".join(block))


def read_page(source: str) -> Iterator[Passage]:
    """Yield a Markdown page as one passage, without generated parts, code, remarks and the targets of links."""
    text = source
    for pattern in (_GENERATED, _FENCED):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    yield Passage(1, "page", _LINK_TARGET.sub("]", text))


def split_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset in lines and the text of each sentence of a docstring or a page, without indented code."""
    for offset, lines in _split_paragraphs(text):
        paragraph, begin = "\n".join(lines), 0
        for end in _SENTENCE_END.finditer(paragraph):
            if _ABBREVIATION.search(paragraph[begin : end.start() + 1]):
                continue
            yield offset + paragraph.count("\n", 0, begin), paragraph[begin : end.end()].strip()
            begin = end.end()
        if paragraph[begin:].strip():
            yield offset + paragraph.count("\n", 0, begin), paragraph[begin:].strip()


def _split_paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    paragraph: list[str] = []
    code_indent = -1
    for number, line in enumerate([*text.split("\n"), ""]):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        if code_indent >= 0 and (not stripped or indent > code_indent):
            continue
        code_indent = indent if stripped.endswith("::") else -1
        is_prose = bool(stripped) and not _NO_SENTENCE.match(stripped)
        if paragraph and (not is_prose or _ITEM.match(stripped)):
            yield number - len(paragraph), paragraph
            paragraph = []
        if is_prose:
            paragraph.append(stripped)


# --- rules ---


def check_source(path: str, source: str, words: WordList) -> list[Finding]:
    """Return the findings of one file, by line.

    Raises:
        SyntaxError: A Python file cannot be parsed.
    """
    if path.endswith(".md"):
        found, passages = [], read_page(source)
    else:
        # Walking a tree takes longer than all rules together, so both readers share one walk.
        nodes = list(ast.walk(ast.parse(source)))
        found, passages = list(_check_names(path, nodes, words)), read_python(source, nodes)
    for passage in passages:
        found += _check_passage(path, passage, words)
    return sorted(found)


def _check_passage(path: str, passage: Passage, words: WordList) -> Iterator[Finding]:
    text = _CODE_SPAN.sub(lambda match: re.sub(r"\S", "§", match[0]), passage.text)
    for phrase in words.phrases if words.some_phrase.search(text) else ():
        for match in phrase.find(text):
            line = passage.line + text.count("\n", 0, match.start())
            yield Finding(
                path, line, "word", f"'{' '.join(match[0].split())}': write {phrase.word}"
            )
    if passage.kind in ("comment", "trailing") and not _DIRECTIVE.match(passage.text):
        yield from _check_comment(path, passage)
    if passage.kind == "docstring" and (opening := _OPENING.match(text)):
        yield Finding(
            path, passage.line, "opening", f"'{opening[1]}': write a noun phrase or an imperative"
        )
    if passage.kind in ("docstring", "page"):
        for offset, sentence in split_sentences(text):
            count = len(re.findall(r"[\w§][\w§'\u2019./-]*", sentence))
            if count > MAX_SENTENCE_WORDS:
                yield Finding(
                    path, passage.line + offset, "long", f"a sentence of {count} words: split it"
                )


def _check_comment(path: str, passage: Passage) -> Iterator[Finding]:
    text = passage.text
    fragment = _FRAGMENT.match(text)
    if fragment and not text.endswith("?"):
        yield Finding(
            path,
            passage.line,
            "fragment",
            f"begins with '{fragment[0]}': write a sentence with a subject",
        )
    elif passage.kind == "trailing" and len(text) > MAX_TRAILING_CHARS and text[0].islower():
        yield Finding(
            path,
            passage.line,
            "trailing",
            f"{len(text)} characters: write a sentence above the code",
        )


def _check_names(path: str, nodes: Sequence[ast.AST], words: WordList) -> Iterator[Finding]:
    for line, name in _list_defined_names(nodes):
        for phrase in words.names:
            if phrase.pattern.match(name.strip("_")):
                yield Finding(path, line, "name", f"'{name}': write {phrase.word}")


def _list_defined_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
            # Python names the arguments of special methods: ``__eq__(self, other)``.
            if not node.name.startswith("__"):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                arguments += filter(None, [node.args.vararg, node.args.kwarg])
                yield from ((argument.lineno, argument.arg) for argument in arguments)
        elif isinstance(node, ast.Lambda):
            yield from ((argument.lineno, argument.arg) for argument in node.args.args)
        elif isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


# --- rooms ---


def read_ceilings(text: str) -> dict[str, int]:
    """Return the number of findings that each room may have."""
    lines = [
        line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    return {room: int(count) for room, count in lines}


def find_room(path: str, rooms: Mapping[str, int]) -> str:
    """Return the room of a file; "." has all files that no other room has."""
    inside = [room for room in rooms if path == room or path.startswith(f"{room}/")]
    return max(inside, key=len, default=".")


def lower_ceilings(text: str, counts: Mapping[str, int]) -> str:
    """Return a file of ceilings with those of improved rooms lowered; no ceiling is raised."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            room, ceiling = line.split()
            lines[number] = (
                line[: line.rindex(ceiling)] + f"{min(int(ceiling), counts.get(room, 0))}\n"
            )
    return "".join(lines)


def list_files(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the Python and Markdown files at or below some paths that git tracks, or may track."""
    command = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
        "--",
        *(paths or ["."]),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        names = done.stdout.split("\0")
    else:
        # The source distribution is no checkout.
        found = [
            [path] if path.is_file() else path.rglob("*")
            for path in map(root.joinpath, paths or ["."])
        ]
        names = [file.relative_to(root).as_posix() for files in found for file in files]
        names = [
            name
            for name in names
            if not any(part[0] == "." or part == "build" for part in name.split("/"))
        ]
    return sorted({name for name in names if name.endswith(SUFFIXES) and (root / name).is_file()})


def list_changed_lines(root: Path, revision: str) -> dict[str, set[int]]:
    """Return the numbers of the lines of each file that are new since a revision.

    All lines of a file are new if git does not track it yet.
    """

    def run_git(*words: str) -> str:
        # Otherwise git writes the bytes of other letters than ASCII as numbers.
        command = ["git", "-c", "core.quotePath=false", *words]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout

    changed: dict[str, set[int]] = {}
    # A difference to a revision has no file that git does not track.
    for name in run_git("ls-files", "--others", "--exclude-standard", "-z").split("\0"):
        if name.endswith(SUFFIXES) and (root / name).is_file():
            count = (root / name).read_text(encoding="utf-8").count("\n") + 1
            changed[name] = set(range(1, count + 1))
    lines: set[int] = set()
    options = ("--unified=0", "--no-color", "--no-ext-diff", "--no-prefix")
    for line in run_git("diff", *options, revision).splitlines():
        if line.startswith("+++ "):
            # Git ends a name that has a space by a tab.
            lines = changed.setdefault(line[4:].removesuffix("\t"), set())
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            lines.update(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return changed


def check_rooms(counts: Mapping[str, int], ceilings: Mapping[str, int]) -> list[str]:
    """Return a message for each room that is above its ceiling."""
    return [
        f"{room}: {count} findings are more than the ceiling, {ceilings.get(room, 0)}. Correct the "
        f"new ones: python -m tools.prose --changed HEAD~1, or python -m tools.prose {room}."
        for room, count in counts.items()
        if count > ceilings.get(room, 0)
    ]


def count_by_room(findings: Sequence[Finding], ceilings: Mapping[str, int]) -> dict[str, int]:
    """Return the number of findings of each room."""
    counts = dict.fromkeys(ceilings, 0)
    for finding in findings:
        room = find_room(finding.path, ceilings)
        counts[room] = counts.get(room, 0) + 1
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check that the command line chooses, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Find prose that the style rejects; hold each room to its ceiling."
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="list the findings of these, relative to the root"
    )
    parser.add_argument(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="REVISION",
        help="only lines new since it (HEAD)",
    )
    parser.add_argument(
        "--lower", action="store_true", help="lower the ceilings of rooms that have improved"
    )
    parser.add_argument("--rooms", action="store_true", help="print the rate of each room")
    options = parser.parse_args(arguments)

    words = read_words(WORDS.read_text(encoding="utf-8"))
    changed = list_changed_lines(ROOT, options.changed) if options.changed else None
    findings: list[Finding] = []
    sizes: dict[str, int] = {}
    for path in list_files(ROOT, options.paths):
        source = (ROOT / path).read_text(encoding="utf-8")
        sizes[path] = source.count("\n")
        if changed is None or path in changed:
            findings += check_source(path, source, words)

    if options.paths or changed is not None:
        shown = [
            found for found in findings if changed is None or found.line in changed[found.path]
        ]
        for finding in shown:
            print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.advice}")
        return int(bool(shown))

    text = CEILINGS.read_text(encoding="utf-8")
    ceilings = read_ceilings(text)
    counts = count_by_room(findings, ceilings)
    if options.rooms:
        for room, count in counts.items():
            lines = sum(size for path, size in sizes.items() if find_room(path, ceilings) == room)
            rate = 1000 * count / max(lines, 1)
            print(f"{room:36} {count:5} findings in {lines:6} lines, {rate:6.1f} per 1,000")
    if options.lower:
        CEILINGS.write_text(lower_ceilings(text, counts), encoding="utf-8")
    messages = check_rooms(counts, ceilings)
    print(*messages, sep="\n", file=sys.stderr, end="\n" if messages else "")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
