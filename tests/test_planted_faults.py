"""The faults of tools/faults.py fit the sources. Whether they are caught takes too long for every run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.faults import FAULTS, Fault, FaultNotFoundError

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
