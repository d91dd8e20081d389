"""Commands with a session of their own: all that they started hears of a signal, and nothing outlives them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ovpatch.insight import launch


@pytest.fixture
def started(tmp_path):
    """Start a line of shell, whose child leaves its number; wait for that."""

    def started(line, pid=tmp_path / "pid"):
        job = launch.Command(own_session=True)
        job.start_process(["bash", "-c", line.replace("PID", f"'{pid}'")], os.environ, None)
        while not (pid.exists() and pid.read_text().strip()):
            time.sleep(0.01)
        return job, int(pid.read_text())

    return started


def lives(pid):
    return launch._state(launch.Path(f"/proc/{pid}/stat"))[0] not in "ZX"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_what_a_shell_runs(started, number):
    ready = "import os, time; open(PID, 'w').write(str(os.getpid())); time.sleep(60)"
    job, child = started(f'python3 -c "{ready}"; true')
    job.forward_signal(number, None)
    assert job.wait_for_exit() == 128 + number
    job.stop_process(5)
    assert not lives(child)


def test_what_a_command_leaves_behind_is_ended(started):
    job, child = started("sleep 60 & echo $! > PID")
    assert job.wait_for_exit() == 0
    assert lives(child)
    job.stop_process(5)
    assert not lives(child)


def test_what_does_not_want_to_end_is_killed(started):
    job, child = started(
        "trap '' TERM; (trap '' TERM; while true; do sleep 0.05; done) & echo $! > PID; wait"
    )
    job.stop_process(0.3)
    assert not lives(child)
