"""The faults of tools/faults/ fit the sources, and none has lost its last catcher. To plant all takes too long."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import rarely
from tools import plant_faults
from tools.faults import FAULTS, FAULTS_BY_ROOM, Fault, FaultNotFoundError
from tools.mutants import Mutant, draw_mutants, list_mutants

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_exist(fault, tmp_path):
    copied = tmp_path / fault.file
    copied.parent.mkdir(parents=True)
    shutil.copy(ROOT / fault.file, copied)
    fault.plant(tmp_path)
    compile(copied.read_text(), fault.file, "exec")
    assert copied.read_text() != (ROOT / fault.file).read_text()
    assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests)


def test_a_fault_that_does_not_fit_is_an_error(tmp_path):
    (tmp_path / "module.py").write_text("wait()\nwait()\n")
    for file, times in (("module.py", 2), ("gone.py", 0)):
        with pytest.raises(FaultNotFoundError, match=f"{file} has {times} times what it replaces"):
            Fault("no wait", file, "wait()", "", ()).plant(tmp_path)


def test_there_are_a_hundred_with_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 100


def test_a_fault_is_in_the_module_of_the_nearest_folder():
    for room, faults in FAULTS_BY_ROOM.items():
        for fault in faults:
            folders = [part for part in fault.file.split("/")[:-1] if part in FAULTS_BY_ROOM]
            assert folders[-1:] == [room], f"move '{fault.name}' to its room in tools/faults/"


def test_each_module_of_faults_is_planted():
    modules = {path.stem for path in (ROOT / "tools" / "faults").glob("*.py")}
    assert modules - {"__init__", "fault"} == FAULTS_BY_ROOM.keys()


# --- catchers ---

MODULE = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return add(a, a)\n"
TESTS = """
from module import add, double
import pytest

def test_first(): assert add(1, 2) == 3

@pytest.mark.parametrize("value", [0, 2])
def test_second(value): assert double(value) == 2 * value

@pytest.fixture
def sum(): assert add(3, 4) == 7

def test_third(sum): pass

def test_fourth(): assert True
"""


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TESTS)
    return tmp_path


def test_all_catchers_of_a_fault_are_found(repository):
    fault = Fault("minus", "module.py", "a + b", "a - b", ("test_module.py",))
    assert plant_faults.find_catchers(fault, repository) == [
        "test_module.py::test_first",
        "test_module.py::test_second[2]",
        "test_module.py::test_third",
    ]
    assert (repository / "module.py").read_text() == MODULE
    harmless = Fault("harmless", "module.py", "add(a, a)", "add(a, a) + 0", ("test_module.py",))
    assert plant_faults.find_catchers(harmless, repository) == []
    with pytest.raises(
        RuntimeError, match=r"fault 'gone': pytest exited with 4\. Correct its tests"
    ):
        plant_faults.find_catchers(
            Fault("gone", "module.py", "a + b", "a", ("gone.py",)), repository
        )


def test_the_time_limit_grows_with_the_load_as_limits_of_tests_do(repository, monkeypatch):
    """Otherwise the run of a fault that makes ranks hang would end before the pool names the test."""
    limits = []

    def run(command, **kwargs):
        limits.append(kwargs["timeout"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(plant_faults.subprocess, "run", run)
    for shares in (1, 10):
        load = float(shares * (os.cpu_count() or 1))
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        fault = Fault("minus", "module.py", "a + b", "a - b", ("test_module.py",))
        plant_faults.find_catchers(fault, repository)
    assert limits == [900.0, 9000.0]


def test_a_fault_that_never_ends_is_caught_by_the_time_limit(repository, monkeypatch):
    monkeypatch.setattr(plant_faults, "_TIMEOUT_S", 0.0)
    fault = Fault("endless", "module.py", "a + b", "a - b", ("test_module.py",))
    assert plant_faults.find_catchers(fault, repository) == [f"{plant_faults.TIME_LIMIT}::0 s"]


def test_a_fault_whose_last_catcher_goes_is_listed(repository):
    record = {
        "one file": ["test_module.py::test_first", "test_module.py::test_second[2]"],
        "a folder": ["tests/a/test_b.py::test_c"],
        "a renamed test": ["test_module.py::test_fir"],
        "never ends": [f"{plant_faults.TIME_LIMIT}::900 s"],
    }
    (repository / "tests" / "a").mkdir(parents=True)
    (repository / "tests" / "a" / "test_b.py").write_text("def test_c(): pass\n")
    assert plant_faults.list_uncaught(record, (), repository) == ["a renamed test"]
    assert plant_faults.list_uncaught(record, ["test_module.py::test_second"], repository) == [
        "a renamed test"
    ]
    gone = ["tests/a/", "test_module.py"]
    assert plant_faults.list_uncaught(record, gone, repository) == [
        "a folder",
        "a renamed test",
        "one file",
    ]


def test_the_record_is_updated_and_forgets_faults_that_no_longer_exist(tmp_path):
    path = tmp_path / "faults" / "caught.json"
    first, second = FAULTS[0].name, FAULTS[1].name
    for name, catchers in (("gone", ["a"]), (first, ["a"]), (second, []), (first, ["b", "c"])):
        plant_faults.update_record(name, catchers, path)
    assert plant_faults.read_record(path) == {first: ["b", "c"], second: []}


def test_no_recorded_fault_has_lost_its_last_catcher_to_the_nightly_tests():
    names = {fault.name for fault in FAULTS}
    record = {
        name: catchers for name, catchers in plant_faults.read_record().items() if name in names
    }
    assert record
    uncaught = plant_faults.list_uncaught(record, rarely.read_nightly())
    assert not uncaught, (
        "remove one of its catchers from tests/nightly.txt, or write a test that catches it, then: "
        "python tools/plant_faults.py NAME"
    )


def test_the_list_of_nightly_tests_names_tests():
    lines = rarely.read_nightly()
    assert lines == list(dict.fromkeys(lines))
    assert all(line.partition("::")[0].endswith(".py") for line in lines)
    assert [line for line in lines if not plant_faults.exists(line, plant_faults.ROOT)] == []


# --- mutants ---

MUTATED = b'''"""Doc."""
NAME: Final = f"{1 + 2}"

def run(self, count: Literal[3] = 3) -> None:
    # \xc3\xa4
    "\xc3\xa4", self.start(count, *rest)
    if count > 1:
        self.send(count, peer)
    return wait(peer, peer)
'''


def test_each_place_has_its_mutants_and_annotations_and_texts_have_none():
    mutants = list_mutants("module.py", MUTATED)
    assert [(mutant.line, mutant.kind, mutant.old, mutant.new) for mutant in mutants] == [
        (4, "one less", "3", "(2)"),
        (4, "one more", "3", "4"),
        (7, "negated test", "count > 1", "not (count > 1)"),
        (7, "one less", "1", "(0)"),
        (7, "one more", "1", "2"),
        (8, "dropped call", "self.send(count, peer)", "None"),
        (8, "swapped arguments", "self.send(count, peer)", "self.send(peer, count)"),
    ]
    assert mutants[2].name == "module.py:7: negated test: count > 1"
    assert b"    if not (count > 1):\n" in mutants[2].change(MUTATED)


def test_mutants_are_drawn_by_their_seed_and_killed_by_tests(repository):
    (repository / "module.py").write_text(
        MODULE + "\n\ndef unused(a):\n    return a + 1\n\n\nadd(1, 2)\n"
    )
    drawn = [
        draw_mutants(repository, "module.py", 3, seed, ["test_module.py"]) for seed in (1, 1, 2, 3)
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(mutants) for mutants in drawn}) > 1
    with pytest.raises(ValueError, match=r"gone has no code that a mutant changes\. Name a folder"):
        draw_mutants(repository, "gone", 3, 1, [])
    dead = Mutant(
        "module.py",
        2,
        "negated test",
        "a + b",
        "not (a + b)",
        MODULE.index("a + b"),
        ("test_module.py",),
    )
    assert plant_faults.is_killed(dead, repository)
    broken = Mutant("module.py", 1, "dropped call", "def add", "def old", 0, ("test_module.py",))
    assert plant_faults.is_killed(broken, repository)
    mutants = list_mutants("module.py", (repository / "module.py").read_bytes(), ["test_module.py"])
    (unused,) = [mutant for mutant in mutants if mutant.kind == "one more" and mutant.line == 10]
    assert not plant_faults.is_killed(unused, repository)
