"""Checks of the documentation site: links, names that can break, search, navigation, and nothing from other hosts."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace

import pytest

import ovpatch
from tests.test_docs import PAGES, ROOT, prose
from tools import docs_site


@pytest.mark.parametrize("uri", docs_site.OUTSIDE)
def test_links_of_pages_outside_of_docs_lead_to_pages_of_the_site(uri):
    source = ROOT / docs_site.OUTSIDE[uri]
    text = docs_site.rewrite_links(source.read_text(encoding="utf-8"), source, uri)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose(text))]
    inside = [target for target in targets if target and not re.match(r"[a-z]+:", target)]
    assert all(
        (ROOT / "docs" / target).exists() or target in docs_site.OUTSIDE for target in inside
    )


def test_a_link_between_two_pages_is_rewritten_for_the_site():
    text = "[`a` b](../CONTRIBUTING.md#c) [code](../ovpatch/api.py) [x](settings.md)\n```\n[y](gone.md)\n```\n"
    expected = "[`a` b](../contributing.md#c) code [x](../settings.md)\n```\n[y](gone.md)\n```\n"
    assert docs_site.rewrite_links(text, ROOT / "docs" / "verify.md", "deep/verify.md") == expected
    with pytest.raises(ValueError, match=r"docs/verify\.md: there is no gone\.md"):
        docs_site.rewrite_links("[y](gone.md)", ROOT / "docs" / "verify.md", "verify.md")


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://a.b/c.js">',
        "<img alt=x src=http://a.b/c.png>",
        '<pre class="mermaid">',
        "<p class=mermaid>",
    ],
)
def test_a_page_that_loads_something_from_another_host_is_refused(text):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="verify.md"))
    own = '<a href="https://a.b"><script src="assets/c.js"><link href=../d.css>'
    assert docs_site.on_post_page(own, page, None) == own
    with pytest.raises(ValueError, match=r"verify\.md loads (http|Mermaid)"):
        docs_site.on_post_page(own + text, page, None)


@pytest.mark.parametrize(
    ("code", "broken"),
    [
        ("OVPATCH_DDP", "OVPATCH_-DDP"),
        ("a_b", "a_b"),
        ("a/b_c.py::d_e", "a/|b_|c.py::|d_|e"),
        ("torch.distributed.pipelining", "torch.-distributed.-pipelining"),
        ("destroy_process_group()", "destroy_-process_-group()"),
        ("a.b is not OVPATCH_DDP", "a.b is not OVPATCH_-DDP"),
        ("<span>OVPATCH_DDP</span>", "<span>OVPATCH_DDP</span>"),
    ],
)
def test_long_names_can_break(code, broken):
    """A long name would make a table wider than a narrow screen."""
    html = docs_site.on_page_content(f"<code>{code}</code>", None, None, None)
    assert html.replace("<wbr class=path>", "|").replace("<wbr>", "-") == f"<code>{broken}</code>"


def test_the_search_ranks_guides_above_references():
    uris = [
        page.relative_to(ROOT / "docs").as_posix()
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
    ]
    boosts = {uri: docs_site.find_boost(uri) for uri in [*uris, *docs_site.OUTSIDE]}
    details = {
        uri for uri in boosts if re.search(r"-reference|^adr/|^(notes|changelog|api)\.md", uri)
    }
    assert len(details) > 10
    assert max(boosts[uri] for uri in details) < min(boosts[uri] for uri in set(boosts) - details)


def test_headings_of_the_api_are_names_that_users_import():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^::: (\S+)\n    options: \{ heading: (\S+), toc_label: \2 \}$", text, re.MULTILINE
    )
    assert len(found) > 15
    for place, name in found:
        for path in (place, name):
            module, _, attribute = path.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), path


def test_the_site_shows_the_version_and_the_repository_once_there_is_one(tmp_path, monkeypatch):
    config = docs_site.on_config(SimpleNamespace())
    assert config.site_name == f"ovpatch {ovpatch.__version__}"
    assert not hasattr(config, "repo_url")
    (tmp_path / "ovpatch").mkdir()
    (tmp_path / "ovpatch" / "_version.py").write_text('__version__ = "7"\n')
    (tmp_path / "pyproject.toml").write_text(
        '[project.urls]\nHomepage = "https://a.b"\nRepository = "https://a.b/c"\n'
    )
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    assert docs_site.on_config(SimpleNamespace()).repo_url == "https://a.b/c"


def test_the_navigation_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert named == (pages - {"README.md"}) | set(docs_site.OUTSIDE)
