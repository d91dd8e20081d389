"""The script runner: results, time-outs that show stacks, and nothing left running."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support import scripts


def python(code, **options):
    return scripts.run([sys.executable, "-c", code], **options)


def test_result_of_a_program(tmp_path, monkeypatch):
    monkeypatch.setenv("OVPATCH", "0")
    monkeypatch.setenv("KEPT", "1")
    code = "import os, sys; print(os.getcwd(), sorted(set(os.environ) & {'OVPATCH', 'KEPT', 'A', 'HOME'}));"
    result = python(
        code + "sys.stderr.write('problem'); sys.exit(3)",
        env={"A": "b", "HOME": None},
        cwd=tmp_path,
    )
    assert (result.rc, result.timed_out, result.left) == (3, False, ())
    assert result.stdout == f"{tmp_path} ['A', 'KEPT']\n"
    assert result.stderr == "problem"
    with pytest.raises(AssertionError, match=r"(?s)ended with 3.*\['A', 'KEPT'\].*problem"):
        result.check()
    assert python("").check().rc == 0


def test_a_program_that_dies_by_a_signal():
    assert python("import os; os.kill(os.getpid(), 9)").rc == -9


HANG_WITH_CHILD = """
import multiprocessing, subprocess, sys, threading, time

def parent_hangs_here():
    time.sleep(1000)

def thread_hangs_here():
    time.sleep(1000)

child = "import os, time\\ndef child_hangs_here():\\n    time.sleep(1000)\\nos.setsid()\\nchild_hangs_here()"
subprocess.Popen([sys.executable, "-c", child], env=dict(__import__("os").environ, RANK="5"))
threading.Thread(target=thread_hangs_here).start()
print("started")
parent_hangs_here()
"""


def test_a_time_out_shows_the_stacks_of_all_processes_and_kills_them(tmp_path):
    # A busy machine may not have come that far.
    for timeout in (1.5, 6, 24):
        result = python(
            HANG_WITH_CHILD,
            timeout=timeout,
            env={"HANG_TEST": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        )
        if all(f"in {who}_hangs_here" in result.stderr for who in ("child", "parent", "thread")):
            break
    assert result.timed_out
    assert result.stdout == "started\n"
    child, parent = result.stderr.split("-------- stacks of process ")[1:]
    assert ", rank 5: " in child.splitlines()[0]
    assert "in child_hangs_here" in child
    assert "in parent_hangs_here" in parent
    assert "in thread_hangs_here" in parent
    with pytest.raises(AssertionError, match=r"exceeded its time"):
        result.check()
    assert not _with_variable(f"HANG_TEST={tmp_path}")


def test_what_a_program_leaves_running_is_named_and_killed(tmp_path):
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(997)'],"
        "start_new_session=True)"
    )
    result = python(code, env={"LEAVE_TEST": str(tmp_path)})
    assert result.rc == 0
    assert len(result.left) == 1
    assert "time.sleep(997)" in result.left[0]
    with pytest.raises(AssertionError, match="left running"):
        result.check()
    assert not _with_variable(f"LEAVE_TEST={tmp_path}")


def _with_variable(text):
    return [
        pid
        for pid in scripts._processes()
        if text.encode() in scripts._read(pid, "environ") and pid != os.getpid()
    ]
