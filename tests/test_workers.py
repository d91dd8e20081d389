"""Which processes are workers, and what they write for ``ovpatch run``."""

from __future__ import annotations

import json
import os

import pytest

from ovpatch.session import worker_exit, worker_reports
from ovpatch.session.session_report import FeatureReport, Report


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("python train.py", "worker"),
        ("python -u -m pkg.train --x", "worker"),
        ("python -X dev -W error train.py", "worker"),
        ("python", "worker"),
        ("python -c code", "worker"),
        ("python -m torch.distributed.run train.py", "launcher"),
        ("python -um torch.distributed.run train.py", "launcher"),
        ("python -m torch.distributed.launch train.py", "launcher"),
        ("python -m accelerate.commands.launch train.py", "launcher"),
        ("python -m accelerate.commands.accelerate_cli launch train.py", "launcher"),
        ("python /env/bin/torchrun --nproc-per-node 2 train.py", "launcher"),
        ("python /env/bin/accelerate launch train.py", "launcher"),
        ("python C/torchrun.exe train.py", "launcher"),
        # a script of the same name, or the launcher's name among the arguments, is the user's
        ("python torchrun.py", "worker"),
        ("python train.py torchrun -m torch.distributed.run", "worker"),
        ("python -m torch.distributed.runner", "worker"),
        ("python -c from_multiprocessing.spawn", "worker"),
        ("python -c multiprocessing.forkserver", "helper"),
        ("python -c multiprocessing.resource_tracker", "helper"),
        ("python /site/torch/_inductor/compile_worker/__main__.py", "helper"),
    ],
)
def test_roles(line, role):
    assert worker_exit.get_process_role(line.split()) == role


def test_a_report_without_what_the_parent_had_counted():
    def data(calls, count):
        return {
            "features": [{"name": "a", "counters": {"n": count}}],
            "patches": [{"feature": "a", "target": "m.f", "calls": calls, "traces": 0}],
        }

    left = worker_exit.subtract_report(data(5, 7), data(2, 3))
    assert left == data(3, 4)
    assert worker_exit.subtract_report(data(5, 7), {}) == data(5, 7)


@pytest.fixture
def reporter(tmp_path):
    made = Report(
        "0.1",
        "2.13",
        "3.11",
        os.getpid(),
        None,
        (FeatureReport("a", "applied", counters={"n": 1}),),
    )
    return worker_exit._Reporter(tmp_path, lambda with_fits=False: made)


def test_one_file_per_process_rewritten_in_place(reporter, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    reporter.write()
    reporter.write()
    (found,) = worker_reports.read_reports(tmp_path, "worker")
    assert found["restart"] == 2
    assert found["features"][0]["counters"] == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == [reporter.get_path().name], (
        "no temporary file stays"
    )


def test_a_directory_that_is_gone_is_no_error(reporter, tmp_path):
    tmp_path.rmdir()
    reporter.write()
    assert not tmp_path.exists()


def test_nothing_goes_wrong_at_exit(reporter, tmp_path):
    reporter._make_report = lambda with_fits=False: 1 / 0
    reporter.write_at_exit()
    assert not list(tmp_path.iterdir())


def test_a_failure_is_recorded_only_under_ovpatch_run(tmp_path, monkeypatch):
    monkeypatch.delenv(worker_reports.REPORT_DIR, raising=False)
    worker_exit.write_failure("x")
    monkeypatch.setenv(worker_reports.REPORT_DIR, str(tmp_path / "gone"))
    worker_exit.write_failure("x")
    monkeypatch.setenv(worker_reports.REPORT_DIR, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    worker_exit.write_failure("why")
    (found,) = worker_reports.read_reports(tmp_path, "failed")
    assert found == {"pid": os.getpid(), "rank": "3", "error": "why"}


def test_json_is_written_whole(tmp_path):
    path = tmp_path / "x.json"
    worker_reports.save_json(path, {"a": 1})
    worker_reports.save_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]
