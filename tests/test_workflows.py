"""The workflows, forms and hooks of the repository: they parse, and their commands are targets of the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from ovpatch.hookspecs import Feature

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".github"
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.yml"))
TARGETS = set(
    re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)
CHECKED_ACTIONS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}

# The source distribution has no files whose names begin with a dot.
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="not a checkout")


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def list_problems(workflow):
    """Return the faults that GitHub, or a reviewer, would find in a workflow."""
    problems = []
    # YAML 1.1 reads the key "on" as true.
    if (
        not workflow.keys() <= {"name", True, "permissions", "concurrency", "jobs"}
        or True not in workflow
    ):
        problems.append(f"keys {list(workflow)}")
    if workflow.get("permissions") != {"contents": "read"}:
        problems.append("permissions are more than contents: read")
    for name, job in workflow["jobs"].items():
        if not job.keys() <= {
            "name",
            "runs-on",
            "timeout-minutes",
            "strategy",
            "steps",
            "env",
            "if",
        }:
            problems.append(f"{name}: keys {list(job)}")
        if not str(job.get("runs-on", "")).startswith("ubuntu-") and job.get("runs-on") != [
            "self-hosted",
            "gpu",
        ]:
            problems.append(f"{name}: runs on {job.get('runs-on')}")
        if "timeout-minutes" not in job:
            problems.append(f"{name}: no timeout-minutes")
        matrix = job.get("strategy", {}).get("matrix", {})
        used = set(re.findall(r"matrix\.(\w+)", str(job)))
        if used != matrix.keys():
            problems.append(f"{name}: uses {sorted(used)} of the matrix {sorted(matrix)}")
        problems += [
            f"{name}: {problem}" for step in job["steps"] for problem in list_step_problems(step)
        ]
    return problems


def list_step_problems(step):
    if "uses" in step:
        action, _, version = step["uses"].partition("@")
        if action not in CHECKED_ACTIONS or not re.fullmatch(r"v\d+", version):
            yield f"action {step['uses']}"
        return
    words = step["run"].split()
    if words[0] != "make" or words[1] not in TARGETS:
        yield f"command {step['run']}"
    if re.search(r"\$\{\{ *(github|inputs)\.", step["run"]):
        yield "text of an event in a command"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_no_problem(path):
    assert list_problems(load(path)) == []


def test_a_problem_of_a_workflow_is_found():
    step = {"run": "pytest ${{ github.head_ref }}"}
    job = {
        "runs-on": "a-host",
        "strategy": {"matrix": {"torch": ["2"]}},
        "steps": [step, {"uses": "a/b@main"}],
    }
    assert list_problems({True: "push", "jobs": {"test": job}}) == [
        "permissions are more than contents: read",
        "test: runs on a-host",
        "test: no timeout-minutes",
        "test: uses [] of the matrix ['torch']",
        "test: command pytest ${{ github.head_ref }}",
        "test: text of an event in a command",
        "test: action a/b@main",
    ]


def test_the_matrix_has_the_oldest_supported_versions_and_only_supported_ones():
    matrix = load(FOLDER / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    supported = SpecifierSet(Feature("any", "").torch)
    assert matrix["torch"][0] == "2.11.0"
    assert all(supported.contains(version) for version in matrix["torch"])
    classifiers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert matrix["python"][0] == "3.10"
    assert all(f"Python :: {version}" in classifiers for version in matrix["python"])
    shards = " ".join(shard["tests"] for shard in matrix["shard"]).split()
    assert shards == ["tests/plugins", "tests", "--ignore=tests/plugins"], (
        "together they have all tests"
    )


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_a_form_has_fields_that_github_accepts(name):
    form = load(FOLDER / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert form.keys() == {"name", "description", "labels", "body"}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] == "textarea"
        assert field["attributes"].keys() <= {"label", "description", "render"}
        assert field.get("validations", {}).keys() <= {"required"}


def test_templates_and_hooks_name_files_that_exist():
    template = (FOLDER / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.\w+|[\w/]+/)`", template)
    assert len(named) >= 4
    assert [path for path in named if not (ROOT / path).exists()] == []
    hooks = [
        hook
        for repository in load(ROOT / ".pre-commit-config.yaml")["repos"]
        for hook in repository["hooks"]
    ]
    modules = {
        module for hook in hooks for module in re.findall(r"-m (\S+)", hook.get("entry", ""))
    }
    assert modules == {"ruff", "tools.prose"}


def test_the_list_of_layout_commits_has_only_hashes():
    text = (ROOT / ".git-blame-ignore-revs").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[0-9a-f]{40}", line) for line in lines)
