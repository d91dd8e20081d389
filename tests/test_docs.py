"""Checks of the documentation against the code: links, variables, options, quoted messages, and code that runs."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import os
import re
import socket
import subprocess
import sys
import textwrap
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
from ovpatch.settings.feature_options import list_variables
from ovpatch.settings.settings import RESERVED, make_variable_name, suggest_variable
from tests.support import patience
from tests.support.environment import clean
from tools import diagrams, docs_table
from tools.prose import read_page

ROOT = Path(__file__).resolve().parent.parent
FEATURE_PAGES = "docs/features"
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)

FEATURES = (
    "ddp",
    "dist_optimizer",
    "megatron",
    "pipe_experts",
    "pipeline",
    "recompute",
    "tp_linear",
)

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


def prose(text: str) -> str:
    """Return a page without its code, in which brackets and hashes mean something else."""
    return re.sub(
        r"`[^`\n]*`", "`code`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def cells(table: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ]


# --- links ---


def anchors(page: Path) -> set[str]:
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        for heading in headings
    }


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        outside = not linked.is_relative_to(ROOT)
        if (
            outside
            or not linked.exists()
            or (anchor and linked.is_file() and anchor not in anchors(linked))
        ):
            broken.append(target)
    return broken


def test_the_pages_are_there():
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    wanted = {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        f"{FEATURE_PAGES}/ddp.md",
        "docs/README.md",
    }
    assert (
        wanted
        | {f"docs/{name}.md" for name in ("quick-start", "cluster", "how-it-works", "settings")}
        <= names
    )


@each_page
def test_every_relative_link_resolves(page):
    assert not broken_links(page)


def test_a_broken_link_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text(
        "# A `b`: c\n[x](#a-b-c) [y](#d) [z](gone.md) [w](a.md#e) "
        "`[code](no)`\n```\n[no](no)\n```\n"
    )
    assert broken_links(page) == ["#d", "gone.md", "a.md#e"]


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES}
    for page in [page for page in pages if page.startswith("docs/") and page != "docs/README.md"]:
        assert f"({os.path.relpath(page, 'docs')})".replace(os.sep, "/") in index


def list_poor_openings(table: str) -> list[str]:
    """Return the rows of the index whose page does not begin with a short sentence."""
    return [
        row[0] for row in cells(table)[2:] if not re.fullmatch(r"[\w`*][^|]{9,199}[.?*]+", row[1])
    ]


def test_each_page_begins_with_the_sentence_that_the_index_shows():
    table = docs_table.make_pages_table(ROOT / "docs")
    assert len(cells(table)) > 15
    assert not list_poor_openings(table)


def test_a_page_that_begins_with_code_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_table, "SITE", tmp_path / "mkdocs.yml")
    docs_table.SITE.write_text("nav:\n  - A: a.md\n  - B: b.md\n  - C: c.md\n")
    (tmp_path / "a.md").write_text("# A\n\n```console\n$ true\n```\n")
    (tmp_path / "b.md").write_text("# B\n\nYou find\nB here. No more.\n\nThe end.\n")
    table = docs_table.make_pages_table(tmp_path)
    assert "| [B](b.md) | You find B here. |" in table
    assert list_poor_openings(table) == ["[A](a.md)"]


# --- length ---


SHORT_PAGES = ("comparison", "troubleshooting", *(f"features/{one}" for one in FEATURES))
SHORT = {
    "README.md": 450,
    **{f"docs/{page}.md": 600 for page in SHORT_PAGES},
    **{f"docs/{page}.md": 900 for page in ("verify", "bench", "timeline")},
}


@pytest.mark.parametrize("page", SHORT)
def test_a_page_is_short(page):
    assert count_written_words(ROOT / page) <= SHORT[page], (
        "move reasons to a design record, numbers to benchmarks/NOTES.md"
    )


def count_written_words(page: Path) -> int:
    """Return the number of words of a page that a person wrote: without code and without all generated parts."""
    (passage,) = read_page(page.read_text(encoding="utf-8"))
    return sum(re.search(r"\w", word) is not None for word in passage.text.split())


def test_all_pages_together_are_short():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    total = sum(map(count_written_words, pages))
    assert total <= 25_000, f"{total} words: replace words instead of adding them"


# --- docs/works-with.md ---


def is_test(file: Path, name: str) -> bool:
    """Return whether a file defines a test."""
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def list_unproven_rows(page: str, root: Path) -> list[str]:
    """Return the rows of tables whose last cell names no test, or a test that does not exist below a folder."""
    unproven = []
    for row in cells(page):
        if row[0] == "Question" or not row[0].strip("- "):
            continue
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
        if not named or not all(is_test(root / file, name) for file, name in named):
            unproven.append(row[0])
    return unproven


def test_every_row_of_does_it_work_with_names_a_test_that_exists():
    page = (ROOT / "docs" / "works-with.md").read_text(encoding="utf-8")
    assert len(cells(page)) > 20
    assert not list_unproven_rows(page, ROOT / "tests")


#: The questions of users before they try ovpatch, by the page on which one row or heading replies.
QUESTIONS = {
    "works-with": (
        "Gradient clipping|Accumulation and `no_sync`|AMP and `GradScaler`|`torch.compile`|Activation checkpointing|"
        "EMA of the weights|`find_unused_parameters`|`static_graph`|LoRA by peft|Freezing and thawing layers|"
        "Several models, GANs|Custom optimizers|FSDP2|DeepSpeed|Checkpoints and resuming without ovpatch|SLURM|Docker|"
        "Notebooks"
    ),
    "what-if-it-goes-wrong": (
        "Can numbers be wrong in silence?|Can it hang?|How do I turn it off in a running job?|"
        "What does a checkpoint need?|Who has run it?"
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_of_users_has_a_reply_one_click_from_the_readme(name):
    page = ROOT / "docs" / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    asked = [row[0] for row in cells(text)] + re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert not set(QUESTIONS[name].split("|")) - set(asked)
    assert f"(docs/{name}.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"({name}.md)" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def list_long_replies(page: str) -> list[str]:
    """Return the questions whose third cell is not one sentence."""
    return [
        row[0]
        for row in cells(page)
        if len(row) == 4 and len(re.findall(r"[.?!](?: |$)", row[2])) > 1
    ]


def test_every_row_of_does_it_work_with_replies_in_one_sentence():
    page = (ROOT / "docs" / "works-with.md").read_text(encoding="utf-8")
    assert not list_long_replies(page)
    assert list_long_replies("| a | yes | It does. It is. | b |\n| c | yes | It does. | d |") == [
        "a"
    ]


def test_tests_that_pages_name_exist():
    named = [
        (page.name, file, name)
        for page in PAGES
        for file, name in re.findall(
            r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")
        )
    ]
    assert len(named) > 20
    assert not [found for found in named if not is_test(ROOT / found[1], found[2])]


def test_a_row_without_a_test_is_found(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_b(): ...\n")
    lines = [
        f"| {number} | yes | {test} |"
        for number, test in enumerate(
            ("`test_a.py::test_b`", "`test_a.py::test_c`", "`no.py::test_b`", "none")
        )
    ]
    assert list_unproven_rows(
        "\n".join(["| Question | Yes or no | Test |", "| --- | --- | --- |", *lines]), tmp_path
    ) == ["1", "2", "3"]


def test_the_glossary_has_few_nouns():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert 20 < len(re.findall(r"^\| [a-z]", glossary, re.MULTILINE)) <= 35, (
        "torch's own words need no line"
    )


# --- names ---


def shipped_variables() -> set[str]:
    plugins = Plugins()
    features = [
        plugins.load_feature(found) for found in find_plugins().values() if found.first_party
    ]
    return set(RESERVED) | {name for feature in features for name in list_variables(feature)}


def template_variables() -> set[str]:
    folder = ROOT / "examples" / "plugin_template"
    return {
        make_variable_name(path.stem.removeprefix("ovpatch_"))
        for path in folder.glob("ovpatch_*.py")
    }


def test_every_variable_in_the_documentation_is_known():
    known = shipped_variables() | template_variables()
    unknown = {
        f"{page.relative_to(ROOT)}: {name}{suggest_variable(name, known)}"
        for page in PAGES
        for name in re.findall(
            r"\bOVPATCH(?:_[A-Z0-9]+)*\b(?!_?<)", page.read_text(encoding="utf-8")
        )
        if name not in known
    }
    assert not unknown


def test_every_note_that_the_documentation_names_is_in_the_code():
    files = [file for folder in ("ovpatch", "plugins") for file in (ROOT / folder).rglob("*.py")]
    notes = set(
        re.findall(
            r"\[Note: ([^\]]+)\]", " ".join(file.read_text(encoding="utf-8") for file in files)
        )
    )
    named = {
        page: {
            " ".join(note.split())
            for note in re.findall(r"\[Note: ([^\]\"]+)\]", page.read_text(encoding="utf-8"))
        }
        for page in PAGES
        if page.name != "CHANGELOG.md"
    }
    assert named[ROOT / "docs" / "how-it-works.md"]
    assert named[ROOT / "CONTRIBUTING.md"]
    for page, found in named.items():
        assert not found - notes, page


def test_every_result_file_that_the_documentation_names_is_there():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(?:\S+/)?(\w+\.jsonl)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert not named - {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}


# --- docs/features ---


def test_no_feature_is_forgotten_here():
    assert sorted(FEATURES) == sorted(
        path.parent.name for path in (ROOT / "plugins" / "ovpatch_plugins").glob("*/*_feature.py")
    )


GENERATED = [page for page in PAGES if "<!-- begin: " in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_generated_parts_are_those_of_the_code(page):
    text, remedy = page.read_text(encoding="utf-8"), f"run tools/docs_table.py {page}"
    assert docs_table.refresh_page(text, page.parent) == text, remedy


def list_rows_by_option(pages: dict[str, str]) -> dict[str, list[str]]:
    """Return the pages with a table that has an option in its first cell, once for each row, by option."""
    rows: dict[str, list[str]] = {}
    for page, text in pages.items():
        for row in cells(text):
            for option in re.findall(r"`(OVPATCH_[A-Z0-9_]+|--[a-z-]+)[^`]*`", row[0]):
                rows.setdefault(option, []).append(page)
    return rows


def test_each_option_has_one_row():
    """An option that several tables explain is soon explained in several ways."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    rows = list_rows_by_option(pages)
    options = shipped_variables() - {make_variable_name(feature) for feature in FEATURES}
    aliases = {
        make_variable_name(feature.name, alias)
        for feature in docs_table._shipped()
        for option in feature.options
        for alias in option.aliases
    }
    named = {name: rows.get(name) for name in options - aliases - set(RESERVED)}
    assert {name for name, found in named.items() if found is None or len(found) != 1} == set()
    for command in ("verify", "bench", "timeline"):
        options = set(re.findall(r"^\| `(--[a-z-]+)", docs_table.make_command_table(command), re.M))
        page = f"{command}.md"
        assert {name for name in options if rows[name].count(page) != 1} == set(), page


def test_a_second_row_of_an_option_is_noticed():
    table = "| Option | Meaning |\n| --- | --- |\n"
    pages = {
        "a.md": f"{table}| `OVPATCH_DDP_MAX_CTAS` | b |",
        "c.md": f"{table}| `OVPATCH_DDP_MAX_CTAS` `--steps N` | d |",
    }
    assert list_rows_by_option(pages) == {
        "OVPATCH_DDP_MAX_CTAS": ["a.md", "c.md"],
        "--steps": ["c.md"],
    }


def test_the_plugin_page_has_every_field():
    page = (ROOT / "docs" / "write-a-plugin.md").read_text(encoding="utf-8")
    for described in (ovpatch.Feature, ovpatch.Option):
        assert f"<!-- begin: fields:{described.__name__} -->" in page
        rows = cells(docs_table.make_fields_table(described))[2:]
        assert [row[0].strip("`") for row in rows] == [
            field.name for field in dataclasses.fields(described)
        ]


@pytest.mark.parametrize("feature", FEATURES)
def test_the_counters_are_all_explained(feature):
    hooks: Any = importlib.import_module(f"ovpatch_plugins.{feature}.{feature}_feature").hooks
    counters = hooks.ovpatch_counters()

    page = (ROOT / FEATURE_PAGES / f"{feature}-reference.md").read_text(encoding="utf-8")
    text = page.partition("## Counters")[2].partition("\n## ")[0]
    # A table that a person writes differs from the docstring sooner or later.
    assert f"<!-- begin: counters:{feature} -->" in text
    rows = {row[0].strip("`"): row for row in cells(text)[2:]}
    assert list(rows) == list(counters)
    assert not list_counters_without_unit(rows)


def list_counters_without_unit(rows: dict[str, list[str]]) -> list[str]:
    """Return the counters of sizes and durations whose last cell does not name that unit."""
    words = {"bytes": "bytes", "ms": "milliseconds"}
    units = {name: words[word] for name in rows for word in name.split("_") if word in words}
    return [name for name, unit in units.items() if rows[name][-1] != unit]


def test_a_counter_without_its_unit_is_noticed():
    rows = {"bytes_reduced": ["", "count"], "state_read_ms": ["", "milliseconds"], "steps": [""]}
    assert list_counters_without_unit(rows) == ["bytes_reduced"]


# --- docs/features/ddp-reference.md ---


def test_every_reason_for_the_stock_reducer_is_listed_and_no_other():
    from ovpatch_plugins.ddp import ddp_attach, ddp_feature

    tree = ast.parse(inspect.getsource(ddp_attach.find_reason_for_stock))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    reasons = {value.value for value in returned if isinstance(value, ast.Constant) and value.value}
    reasons |= {getattr(ddp_attach, value.id) for value in returned if isinstance(value, ast.Name)}
    assert len(reasons) > 3
    page = ROOT / FEATURE_PAGES / "ddp-reference.md"
    text = page.read_text(encoding="utf-8").partition("## What stays")[2].partition("\n## ")[0]
    rows = {
        row[0] for row in cells(text) if row[0] != "Reason in the report" and row[0].strip("- ")
    }
    assert rows == reasons | set(ddp_feature._NEEDS_STOCK.values())


def test_every_patched_method_of_ddp_is_explained():
    from ovpatch_plugins.ddp.ddp_feature import register

    targets: list[str] = []

    class Patches:
        def register_patch(
            self, target: str, replacement: object = None, **details: object
        ) -> None:
            targets.append(target.rpartition(".")[2])

    register(patches=Patches(), options={"bucket_cap_mb": None})
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    named = [name for row in cells(text)[2:] for name in re.findall(r"`(\w+)`", row[0])]
    lacking = {"_check_manual_backward_finalization_supported"} - set(
        dir(torch.nn.parallel.DistributedDataParallel)
    )
    assert sorted(set(named) - lacking) == sorted(targets)


# --- quoted messages ---


def test_the_quoted_error_is_the_one_that_is_raised(monkeypatch):
    from ovpatch.overlap.comm import consensus

    monkeypatch.setattr(consensus.c10d, "_get_process_group_store", lambda group: None)
    monkeypatch.setattr(consensus.dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(consensus, "known_hosts", lambda group: {})
    error = consensus._Round(SimpleNamespace(size=lambda: 2), "ddp", 20.0)._report_missing([1])[
        "error"
    ]
    assert f"> {error}\n" in (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


# --- tables ---


def test_tables_are_those_of_the_result_files():
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert "<!-- table " in text
        assert tables.fill(text) == text, f"{page.name}: run make tables"


def test_rows_of_the_readme_are_of_several_rounds():
    results = {result["program"]: result for result in tables.read_results("programs")}
    for name in tables.README_PROGRAMS:
        assert (
            min(len(row["round_medians_ms"]) for row in tables.find_program_pair(results[name])) > 1
        ), name


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
    assert (ROOT / "docs" / picture).read_text(encoding="utf-8") == diagrams.DIAGRAMS[name](), (
        "run make figures"
    )
    assert any(f"{picture})" in page.read_text(encoding="utf-8") for page in PAGES)


def list_poor_headings(text: str) -> list[str]:
    """Return the headings of columns that do not begin with a capital letter, code or the name of a package."""
    headings = re.findall(r"^\|(.+)\|\n\| ---", text, re.MULTILINE)
    found = [cell.strip(" *") for heading in headings for cell in heading.split("|")]
    good = re.compile(r"[A-Z0-9`]|(?:ovpatch|torch|transformers)\b")
    return [cell for cell in found if not good.match(cell)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "benchmarks" not in page.parts], ids=lambda page: page.name
)
def test_columns_of_tables_have_headings_in_one_style(page):
    assert not list_poor_headings(page.read_text(encoding="utf-8"))


def test_a_poor_heading_is_noticed():
    table = "| Run | ms | | **ovpatch** | `a` |\n| --- | --- | --- | --- | --- |\n| b | c | d | e | f |\n"
    assert list_poor_headings(table) == ["ms", ""]


# --- code ---


def test_shell_scripts_in_the_documentation_can_be_parsed():
    scripts = [code for page in PAGES for code in blocks(page, "bash")]
    assert len(scripts) >= 3
    for code in scripts:
        done = subprocess.run(
            ["bash", "-n"], input=code, capture_output=True, text=True, timeout=patience.scale(60)
        )
        assert done.returncode == 0, done.stderr


#: Pages whose blocks define functions that other blocks call. These blocks are imported as modules; the blocks of all
#: remaining pages run unchanged.
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
        x, up, down = (
            torch.randn(*shape, requires_grad=True) for shape in ((3, 2, 4), (5, 4), (4, 5))
        )
        outs = [names["mlp"](x, up, down, dist.group.WORLD)]
    elif "Block" in names:
        block = names["Block"](8, 4, 4)
        experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        x, index, weights = torch.randn(6, 8), torch.randint(4, (6, 2)), torch.rand(6, 2)
        outs = [block(torch.randn(6, 8)), names["home_made"](experts, x, index, weights)]
    elif "wrapped" in names:
        outs = [names["wrapped"](nn.Linear(8, 8), [], None)(torch.randn(6, 8))]
    elif "Model" in names:
        state = names["train"](
            names["Model"](), torch.randn(8, 8), torch.randn(8, 8), dist.group.WORLD
        )
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
    # tests/test_cli.py installs the plugin of this page.
    "docs/write-a-plugin.md": [],
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


RUN = (
    "docs/quick-start.md",
    "docs/settings.md",
    f"{FEATURE_PAGES}/recompute.md",
    "examples/README.md",
)


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
        timeout=patience.scale(300),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["applied", "disabled"]


# --- docstrings ---

SOURCES = [
    file for folder in ("ovpatch", "plugins") for file in sorted((ROOT / folder).rglob("*.py"))
]


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Return each docstring with its place."""
    return [
        (f"{file.relative_to(ROOT)}:{getattr(node, 'name', 'module')}", text)
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and (text := ast.get_docstring(node))
    ]


def test_examples_in_docstrings_run():
    found = [text for text in docstrings() if ">>>" in text[1]]
    assert found, "the patch manager's has one"
    for place, text in found:
        runner = doctest.DocTestRunner(verbose=False)
        case = doctest.DocTestParser().get_doctest(
            text, {"PatchManager": ovpatch.PatchManager}, place, place, 0
        )
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
            Session().plan(options=options, environ={}, should_check_machine=False)
        except ovpatch.SettingsError as error:
            pytest.fail(f"{place}: {error}")


def test_imports_in_docstrings_are_there():
    statements = [
        (place, textwrap.dedent(match.group()))
        for place, text in docstrings()
        for match in re.finditer(
            r"^    (from ovpatch\S* import (\([^)]*\)|.+)|import ovpatch\S*)$", text, re.MULTILINE
        )
    ]
    assert len(statements) >= 3
    for _, statement in statements:
        exec(statement, {})


def test_settings_name_the_kind_of_value_of_every_option():
    plan = Session().plan(environ={"OVPATCH": "all"}, should_check_machine=False)
    features = [record.feature for record in plan.records.values() if record.found.first_party]
    options = [option for feature in features for option in feature.options]
    named = {o.name for o in options if o.choices or isinstance(o.default, bool) or o.values}
    unnamed = [option.name for option in options if option.name not in named]
    assert len(options) > 40
    assert not unnamed, f"give values= to the Option of {', '.join(unnamed)}"
