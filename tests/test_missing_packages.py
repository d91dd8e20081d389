"""Features whose package is missing: skipped by default, an error if the user names them, whatever the feature."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ovpatch.cli import doctor_command
from ovpatch.session.feature_plan import FeatureError, find_missing_module
from ovpatch.session.plugins import find_plugins
from ovpatch.session.session import Session
from ovpatch.settings.settings import make_variable_name

DISTRIBUTED = "torch.distributed"
FOUND = {name: found for name, found in find_plugins().items() if found.first_party}
NEEDS = {
    "ddp": (DISTRIBUTED,),
    "dist_optimizer": (DISTRIBUTED,),
    "megatron": (DISTRIBUTED, "megatron", "megatron.core"),
    "pipe_experts": (DISTRIBUTED, "transformers", "transformers.distributed.expert_parallel"),
    "pipeline": (DISTRIBUTED, "torch.distributed.pipelining"),
    "recompute": (),
    "tp_linear": (DISTRIBUTED, "torch.distributed.tensor"),
}
CASES = [(name, missing) for name, needs in NEEDS.items() for missing in needs]


@pytest.fixture
def session(monkeypatch) -> Iterator[Session]:
    for name in [name for name in os.environ if name == "OVPATCH" or name.startswith("OVPATCH_")]:
        monkeypatch.delenv(name)
    made = Session()
    yield made
    made.revert(())


def remove(monkeypatch: Any, module: str) -> None:
    """Let a module be missing in this process."""
    if "." in module and importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip("the package is not installed at all")
    if module == DISTRIBUTED:
        monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    else:
        monkeypatch.setitem(sys.modules, module, None)


def test_the_table_has_all_features(session):
    records = session.plan(should_check_machine=False, environ={"OVPATCH": "all"}).records
    assert NEEDS.keys() == FOUND.keys()
    for name, needs in NEEDS.items():
        feature = records[name].feature
        assert feature is not None
        assert feature.distributed is (DISTRIBUTED in needs)
        assert [package.module for package in feature.packages] == [
            need for need in needs[-1:] if need != DISTRIBUTED
        ]


@pytest.mark.parametrize(("name", "missing"), CASES)
def test_by_default_it_is_skipped_with_the_remedy(session, monkeypatch, name, missing):
    remove(monkeypatch, missing)
    record = session.plan(environ={"OVPATCH": "all"}).records[name]
    assert record.state == "skipped"
    if missing == DISTRIBUTED:
        assert record.reason == "this build of torch has no torch.distributed"
        return
    top, _, below = missing.partition(".")
    what, separator, remedy = record.reason.partition(": ")
    assert what == (
        f"package {top!r} has no module {missing!r}" if below else f"there is no package {top!r}"
    )
    assert separator
    assert remedy


@pytest.mark.parametrize("how", ["call", "OVPATCH", "switch", "strict"])
@pytest.mark.parametrize(("name", "missing"), CASES)
def test_by_name_or_strict_it_is_an_error_with_the_remedy(session, monkeypatch, name, missing, how):
    remove(monkeypatch, missing)
    names, reason = (), session.plan(environ={"OVPATCH": "all"}).records[name].reason
    if how == "call":
        names = (name,)
    elif how == "OVPATCH":
        monkeypatch.setenv("OVPATCH", name)
    elif how == "switch":
        monkeypatch.setenv(make_variable_name(name), "1")
    else:
        monkeypatch.setenv("OVPATCH", "all")
        monkeypatch.setenv("OVPATCH_STRICT", "1")
    with pytest.raises(FeatureError) as error:
        session.apply(names, None, None)
    assert f"{name} (" in str(error.value)
    assert reason in str(error.value)
    assert f"{make_variable_name(name)}=0" in str(error.value)
    assert not session.report().patches


def test_doctor_calls_it_a_problem(session, monkeypatch):
    remove(monkeypatch, "megatron")
    monkeypatch.setenv("OVPATCH", "megatron")
    monkeypatch.setattr(doctor_command, "session", session)
    records, report = doctor_command._apply()
    problems = doctor_command.collect_findings(records, report)["problems"]
    assert report["megatron"].state == "skipped"
    reason = "is skipped: there is no package 'megatron': pip install 'ovpatch[megatron]'"
    assert any(problem.startswith("megatron ") and problem.endswith(reason) for problem in problems)


def test_a_missing_module_is_found_without_importing_its_parents(tmp_path, monkeypatch):
    files = (
        "parent_here/__init__.py",
        "parent_here/below/__init__.py",
        "parent_here/below/leaf.py",
    )
    for file in (*files, "parent_here/space/leaf.py", "space_here/leaf.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    monkeypatch.setitem(sys.modules, "blocked_here", None)
    cases = {
        "parent_here": "",
        "parent_here.below": "",
        "parent_here.below.leaf": "",
        "parent_here.below.absent.leaf": "parent_here.below.absent",
        "parent_here.below.leaf.absent": "parent_here.below.leaf.absent",
        "parent_here.space.leaf": "",
        "space_here.leaf": "",
        "space_here.absent": "space_here.absent",
        "no_such_package_here.below": "no_such_package_here",
        "made_here.below": "made_here.below",
        "blocked_here.below": "blocked_here",
        "os.path": "",
    }
    assert {name: find_missing_module(name) for name in cases} == cases
