"""What the documentation says is true of the code: links, variables, options, quoted texts, and code that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ovpatch
from benchmarks import figures, tables
from ovpatch.session.plugins import Plugins, find_plugins
from ovpatch.session.session import Session
from ovpatch.settings.options import list_variables
from ovpatch.settings.settings import RESERVED, make_variable_name, suggest_variable
from tests.support.environment import clean
from tools import diagrams, docs_site, docs_table

ROOT = Path(__file__).resolve().parent.parent
FEATURE_PAGES = "docs/features"
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)

FEATURES = ("ddp", "dist_optimizer", "megatron", "pipe_experts", "pipeline", "recompute", "tp_linear")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(text: str) -> str:
    """Return a page without its code, in which brackets and hashes mean something else."""
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


# --- links ---


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        outside = not other.is_relative_to(ROOT)
        if outside or not other.exists() or (anchor and other.is_file() and anchor not in anchors(other)):
            broken.append(target)
    return broken


def test_the_pages_are_there():
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    wanted = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", f"{FEATURE_PAGES}/ddp.md", "docs/README.md"}
    assert wanted | {f"docs/{name}.md" for name in ("quick-start", "cluster", "how-it-works", "settings")} <= names


@each_page
def test_every_relative_link_resolves(page):
    assert not broken_links(page)


def test_a_broken_link_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text("# A `b`: c\n[x](#a-b-c) [y](#d) [z](gone.md) [w](a.md#e) `[code](no)`\n```\n[no](no)\n```\n")
    assert broken_links(page) == ["#d", "gone.md", "a.md#e"]


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES}
    for page in [page for page in pages if page.startswith("docs/") and page != "docs/README.md"]:
        assert f"({os.path.relpath(page, 'docs')})".replace(os.sep, "/") in index


# --- the site ---


@pytest.mark.parametrize("uri", docs_site.OUTSIDE)
def test_links_of_pages_outside_of_docs_lead_to_pages_of_the_site(uri):
    source = ROOT / docs_site.OUTSIDE[uri]
    text = docs_site.rewrite_links(source.read_text(encoding="utf-8"), source, uri)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose(text))]
    inside = [target for target in targets if target and not re.match(r"[a-z]+:", target)]
    assert all((ROOT / "docs" / target).exists() or target in docs_site.OUTSIDE for target in inside)


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


def test_the_navigation_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert named == (pages - {"README.md"}) | set(docs_site.OUTSIDE)


# --- length ---


def words(page: Path) -> int:
    """Return the number of words of a page, without code blocks and tables that are made from result files."""
    text = re.sub(r"<!-- table \w+ -->.*?<!-- /table -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return sum(re.search(r"\w", word) is not None for word in re.sub(r"^```.*?^```", "", text, flags=FENCED).split())


FENCED = re.DOTALL | re.MULTILINE
SHORT_PAGES = ("verify", "bench", "timeline", "comparison", "troubleshooting", *(f"features/{one}" for one in FEATURES))
SHORT = {"README.md": 700, **{f"docs/{page}.md": 600 for page in SHORT_PAGES}}


@pytest.mark.parametrize("page", SHORT)
def test_a_page_is_short(page):
    assert words(ROOT / page) <= SHORT[page], "move detail to the reference, numbers to benchmarks/NOTES.md"


def test_the_glossary_has_few_nouns():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert 20 < len(re.findall(r"^\| [a-z]", glossary, re.MULTILINE)) <= 35, "torch's own words need no line"


# --- names ---


def shipped_variables() -> set[str]:
    plugins = Plugins()
    features = [plugins.load_feature(found) for found in find_plugins().values() if found.first_party]
    return set(RESERVED) | {name for feature in features for name in list_variables(feature)}


def template_variables() -> set[str]:
    text = (ROOT / "examples" / "plugin_template" / "ovpatch_clip_watch.py").read_text(encoding="utf-8")
    option = re.search(r'Option\("(\w+)"', text)
    assert option
    return {make_variable_name("clip_watch"), make_variable_name("clip_watch", option[1])}


def test_every_variable_in_the_documentation_is_known():
    known = shipped_variables() | template_variables()
    unknown = {
        f"{page.relative_to(ROOT)}: {name}{suggest_variable(name, known)}"
        for page in PAGES
        for name in re.findall(r"\bOVPATCH(?:_[A-Z0-9]+)*\b(?!_?<)", page.read_text(encoding="utf-8"))
        if name not in known
    }
    assert not unknown


def test_every_note_that_the_documentation_names_is_in_the_code():
    files = [file for folder in ("ovpatch", "plugins") for file in (ROOT / folder).rglob("*.py")]
    notes = set(re.findall(r"\[Note: ([^\]]+)\]", " ".join(file.read_text(encoding="utf-8") for file in files)))
    for page in (ROOT / "docs" / "how-it-works.md", ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(r"\[Note: ([^\]\"]+)\]", page.read_text(encoding="utf-8")))
        assert named, page
        assert not named - notes


def test_every_result_file_that_the_documentation_names_is_there():
    named = {
        name for page in PAGES for name in re.findall(r"`(?:\S+/)?(\w+\.jsonl)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert not named - {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}


# --- docs/features ---


def test_no_feature_is_forgotten_here():
    assert sorted(FEATURES) == sorted(
        path.parent.name for path in (ROOT / "plugins" / "ovpatch_plugins").glob("*/plugin.py")
    )


@pytest.mark.parametrize("feature", FEATURES)
def test_the_options_table_is_the_codes(feature):
    page = ROOT / FEATURE_PAGES / f"{feature}-reference.md"
    text = page.read_text(encoding="utf-8")
    assert f"<!-- begin: options:{feature} -->" in text
    assert docs_table.refresh_page(text, page.parent) == text, (
        "run python tools/docs_table.py docs/features/*-reference.md"
    )


def test_the_versions_are_those_of_their_record():
    page = ROOT / "docs" / "compatibility.md"
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- begin: versions -->") == 1
    assert docs_table.refresh_page(text, page.parent) == text, "run python tools/docs_table.py docs/compatibility.md"


@pytest.mark.parametrize("feature", FEATURES)
def test_the_counters_are_all_explained(feature):
    Counters = importlib.import_module(f"ovpatch_plugins.{feature}.report").Counters

    text = (
        (ROOT / FEATURE_PAGES / f"{feature}-reference.md")
        .read_text(encoding="utf-8")
        .partition("## Counters")[2]
        .partition("\n## ")[0]
    )
    assert [row[0].strip("`") for row in cells(text)[2:]] == list(Counters().as_dict())


# --- docs/features/ddp-reference.md ---


def test_every_reason_for_the_stock_reducer_is_listed_and_no_other():
    from ovpatch_plugins.ddp import ddp_attach, plugin

    tree = ast.parse(inspect.getsource(ddp_attach.find_reason_for_stock))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    reasons = {value.value for value in returned if isinstance(value, ast.Constant) and value.value}
    reasons |= {getattr(ddp_attach, value.id) for value in returned if isinstance(value, ast.Name)}
    assert len(reasons) > 3
    page = ROOT / FEATURE_PAGES / "ddp-reference.md"
    text = page.read_text(encoding="utf-8").partition("## What stays")[2].partition("\n## ")[0]
    rows = {row[0] for row in cells(text) if row[0] != "Reason in the report" and row[0].strip("- ")}
    assert rows == reasons | set(plugin._NEEDS_STOCK.values())


def test_every_patched_method_of_ddp_is_explained():
    from ovpatch_plugins.ddp.plugin import ovpatch_register

    targets: list[str] = []

    class Patches:
        def register_patch(self, target: str, replacement: object = None, **details: object) -> None:
            targets.append(target.rpartition(".")[2])

    ovpatch_register(patches=Patches(), options={"bucket_cap_mb": None})
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    named = [name for row in cells(text)[2:] for name in re.findall(r"`(\w+)`", row[0])]
    lacking = {"_check_manual_backward_finalization_supported"} - set(dir(torch.nn.parallel.DistributedDataParallel))
    assert sorted(set(named) - lacking) == sorted(targets)


# --- quoted texts ---


def test_the_quoted_error_is_the_one_that_is_raised(monkeypatch):
    from ovpatch.overlap.comm import consensus

    monkeypatch.setattr(consensus.c10d, "_get_process_group_store", lambda group: None)
    monkeypatch.setattr(consensus.dist, "get_global_rank", lambda group, rank: rank)
    error = consensus._Round(SimpleNamespace(size=lambda: 2), "ddp", 20.0)._report_missing([1])["error"]
    assert f"> {error}\n" in (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


# --- tables ---


def test_tables_are_those_of_the_result_files():
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert "<!-- table " in text
        assert tables.fill(text) == text, f"{page.name}: run make tables"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_pictures_are_those_of_the_result_files(tmp_path, name):
    made = figures.draw(name, tmp_path).read_text(encoding="utf-8")
    kept = (figures.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text [^>]*>([^<]+)</text>", made)
    assert len(texts) > 5
    assert re.findall(r"<text [^>]*>([^<]+)</text>", kept) == texts, "run make figures"


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_diagrams_are_those_of_their_tool(name):
    picture = f"pictures/{name}.svg"
    assert (ROOT / "docs" / picture).read_text(encoding="utf-8") == diagrams.DIAGRAMS[name](), "run make figures"
    assert any(f"{picture})" in page.read_text(encoding="utf-8") for page in PAGES)


# --- code ---


def test_shell_scripts_in_the_documentation_can_be_parsed():
    scripts = [code for page in PAGES for code in blocks(page, "bash")]
    assert len(scripts) >= 3
    for code in scripts:
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


#: Pages whose blocks define what others call: they are imported as modules; those of the rest are run as they stand.
MODULES = (
    f"{FEATURE_PAGES}/pipe_experts.md",
    f"{FEATURE_PAGES}/pipe_experts-reference.md",
    f"{FEATURE_PAGES}/pipeline.md",
    f"{FEATURE_PAGES}/tp_linear.md",
    "CONTRIBUTING.md",
    "docs/write-a-plugin.md",
)


def defined(page: str) -> dict[str, object]:
    """Run a page's blocks as one module, in a worker."""
    names: dict[str, object] = {"__name__": "page"}
    for code in blocks(ROOT / page, "python"):
        exec(compile(code, page, "exec"), names)
    return names


def called(page: str) -> list[tuple[int, ...]]:
    """Call what the page defines on ranks, and return the shapes that come out."""
    names: dict[str, Any] = defined(page)
    torch.manual_seed(0)
    if "mlp" in names:
        x, up, down = (torch.randn(*shape, requires_grad=True) for shape in ((3, 2, 4), (5, 4), (4, 5)))
        outs = [names["mlp"](x, up, down, dist.group.WORLD)]
    elif "Block" in names:
        block = names["Block"](8, 4, 4)
        experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        x, index, weights = torch.randn(6, 8), torch.randint(4, (6, 2)), torch.rand(6, 2)
        outs = [block(torch.randn(6, 8)), names["home_made"](experts, x, index, weights)]
    elif "wrapped" in names:
        outs = [names["wrapped"](nn.Linear(8, 8), [], None)(torch.randn(6, 8))]
    elif "Model" in names:
        state = names["train"](names["Model"](), torch.randn(8, 8), torch.randn(8, 8), dist.group.WORLD)
        outs = [value for name, value in state.items() if name.endswith("weight")]
    elif "total" in names:
        outs = [names["total"](5)]
    else:
        outs = []
    for out in outs:
        if out.requires_grad:
            out.sum().backward()
    return [tuple(out.shape) for out in outs]


SHAPES = {
    f"{FEATURE_PAGES}/pipe_experts.md": [(6, 8), (6, 8)],
    f"{FEATURE_PAGES}/pipe_experts-reference.md": [(6, 8)],
    f"{FEATURE_PAGES}/pipeline.md": [(8, 8), (8, 8)],
    f"{FEATURE_PAGES}/tp_linear.md": [(3, 2, 4)],
    "CONTRIBUTING.md": [(1,)],
    "docs/write-a-plugin.md": [],  # which tests/test_cli.py installs
}


@pytest.mark.parametrize("page", MODULES)
def test_what_a_page_defines_can_be_called(ranks, page):
    assert ranks(2)(called, page) == [SHAPES[page]] * 2


def test_no_python_in_the_documentation_is_left_out():
    having = {page.relative_to(ROOT).as_posix() for page in PAGES if blocks(page, "python")}
    assert having == {*MODULES, *RUN}


PROGRAM = """
import sys
import ovpatch
for number, code in enumerate({codes!r}):
    names = {{"__name__": f"block_{{number}}"}} | ({{"ovpatch": ovpatch}} if "import ovpatch" not in code else {{}})
    try:
        exec(compile(code, f"<block {{number}}>", "exec"), names)
    except ovpatch.FeatureError as error:  # strict=True on a machine that lacks something
        assert "strict=True" in code, error
    ovpatch.revert()
"""


RUN = ("docs/quick-start.md", "docs/settings.md", f"{FEATURE_PAGES}/recompute.md", "examples/README.md")


def test_python_in_the_documentation_runs(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    codes = [code for page in reversed(RUN) for code in blocks(ROOT / page, "python")]
    assert len(codes) >= 6
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(codes=codes)],
        env={**clean(os.environ), **alone},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["applied", "disabled"]


# --- docstrings ---

SOURCES = [file for folder in ("ovpatch", "plugins") for file in sorted((ROOT / folder).rglob("*.py"))]


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield each docstring with the place where it stands."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield f"{file.relative_to(ROOT)}:{getattr(node, 'name', 'module')}", text


def test_examples_in_docstrings_run():
    found = [text for text in docstrings() if ">>>" in text[1]]
    assert found, "the patch manager's has one"
    for place, text in found:
        runner = doctest.DocTestRunner(verbose=False)
        case = doctest.DocTestParser().get_doctest(text, {"PatchManager": ovpatch.PatchManager}, place, place, 0)
        assert runner.run(case).failed == 0, place


def test_options_in_docstrings_are_understood():
    """A dictionary of options by feature, wherever one is written, is one that apply() takes."""
    names = "|".join(FEATURES)
    found = [
        (place, ast.literal_eval(options))
        for place, text in docstrings()
        for options in re.findall(rf'\{{"(?:{names})": \{{[^{{}}]*\}}\}}', text)
    ]
    assert any(place.endswith("api.py:apply") for place, _ in found)
    for place, options in found:
        try:
            Session().plan(options=options, environ={}, ask_machine=False)
        except ovpatch.SettingsError as error:
            pytest.fail(f"{place}: {error}")


def test_imports_in_docstrings_are_there():
    statements = [
        (place, line.strip())
        for place, text in docstrings()
        for line in text.splitlines()
        if re.fullmatch(r"    (from ovpatch\S* import .+|import ovpatch\S*)", line)
    ]
    assert len(statements) >= 3
    for _, statement in statements:
        exec(statement, {})


def test_settings_name_the_kind_of_value_of_every_option():
    plan = Session().plan(environ={"OVPATCH": "all"}, ask_machine=False)
    features = [record.feature for record in plan.records.values() if record.found.first_party]
    options = [option for feature in features for option in feature.options]
    unnamed = [
        option.name for option in options if not (option.choices or isinstance(option.default, bool) or option.values)
    ]
    assert (len(options) > 40, unnamed) == (True, [])
