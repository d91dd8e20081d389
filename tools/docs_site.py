"""The hook of MkDocs for the documentation site, which ``mkdocs.yml`` names.

Some pages are outside of ``docs/``, because people and package indexes look for them elsewhere. They are added here.
Links between pages are written for the repository, and are rewritten for the site. A link to a file that is not a page,
such as a source file, becomes its text. The site shows the version, and links the repository if the project has one.
The search ranks guides above pages for reference.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent

#: Pages outside of ``docs/``, by their path on the site.
OUTSIDE: Final = {
    "index.md": "README.md",
    "pages.md": "docs/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "examples.md": "examples/README.md",
    "notes.md": "benchmarks/NOTES.md",
}

_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCED: Final = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
_FOREIGN: Final = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?:[^\s\">]+)|class=\"?mermaid\b"
)
_ROLE: Final = re.compile(r":(?:func|class|meth|mod|attr|data|exc):(?=<code>)")
# Code in a sentence or a table. Blocks of code are highlighted, so they contain tags.
_CODE: Final = re.compile(r"(?<=<code>)[^<>]+(?=</code>)")
_LONG_NAME: Final = re.compile(r"[\w./=(]{10,}")
_TEST: Final = re.compile(r"(?<=<code>)[\w/.]+::\w+(?=</code>)")


# The rank of pages in the search. The first folder or name that a path begins or ends with counts, other pages have 1.
_BOOSTS: Final = {
    "quick-start.md": 3.0,
    "works-with.md": 2.0,
    "what-if-it-goes-wrong.md": 2.0,
    "-reference.md": 0.3,
    "adr/": 0.2,
    "notes.md": 0.2,
    "changelog.md": 0.2,
    "api.md": 0.5,
    "features/": 1.5,
}


def find_boost(uri: str) -> float:
    """Return how much the search favors a page of the site."""
    return next(
        (boost for part, boost in _BOOSTS.items() if uri.startswith(part) or uri.endswith(part)),
        1.0,
    )


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version, and link the repository if the project names one."""
    version = re.search(
        r'__version__ = "(.+)"', (ROOT / "ovpatch" / "_version.py").read_text(encoding="utf-8")
    )
    assert version, "ovpatch/_version.py has the version"
    config.site_name = f"ovpatch {version[1]}"
    config.copyright = f"ovpatch {version[1]}, Apache-2.0"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(
        r'^\[project\.urls\]\n(?:.+\n)*?(?:Repository|Source) = "(.+)"', project, re.MULTILINE
    )
    if repository:
        config.repo_url, config.repo_name = repository[1], "Repository"
    return config


def locate(file: Path) -> str | None:
    """Return where the site has a file of the repository, or None if it does not."""
    name = file.relative_to(ROOT).as_posix()
    for uri, source in OUTSIDE.items():
        if name == source:
            return uri
    return name.removeprefix("docs/") if name.startswith("docs/") and file.is_file() else None


def rewrite_links(text: str, source: Path, uri: str) -> str:
    """Return a page with the links of the repository made links of the site.

    Args:
        text: Markdown of the page.
        source: The page's file in the repository.
        uri: The page's path on the site.

    Raises:
        ValueError: A link leads to a file that does not exist.
    """

    def rewrite(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        file = Path(os.path.normpath(source.parent / path))
        if not file.is_relative_to(ROOT) or not file.exists():
            raise ValueError(f"{source.relative_to(ROOT)}: there is no {target}. Correct the link.")
        found = locate(file)
        if found is None:
            return label
        return f"{picture}[{label}]({posixpath.relpath(found, posixpath.dirname(uri) or '.')}{mark}{anchor})"

    pieces = _FENCED.split(text)
    return "".join(
        piece if index % 2 else _LINK.sub(rewrite, piece) for index, piece in enumerate(pieces)
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of ``docs/``."""
    from mkdocs.structure.files import File

    for uri, name in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, and rank the page in the search."""
    uri = page.file.src_uri
    page.meta.setdefault("search", {"boost": find_boost(uri)})
    return rewrite_links(markdown, ROOT / OUTSIDE.get(uri, f"docs/{uri}"), uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the roles of Sphinx that docstrings have around names, and let long names break.

    In tables names break between their words on narrow screens. Names of tests break everywhere, because a column of
    them would otherwise push its neighbors out of the screen.
    """
    html = _ROLE.sub("", html)
    html = _TEST.sub(lambda match: re.sub("(::|[_/])", r"\1<wbr class=path>", match[0]), html)
    return _CODE.sub(lambda match: _LONG_NAME.sub(_break_name, match[0]), html)


def _break_name(match: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)([_./=(])(?=\w)", r"\1<wbr>", match[0])


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would load from another host a script, style or picture: the site works offline."""
    found = _FOREIGN.search(output)
    if found:
        raise ValueError(
            f"{page.file.src_uri} loads {found[1] or 'Mermaid'} when it is read. Keep that file in "
            "docs/."
        )
    return output
