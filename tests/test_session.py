"""The session among threads, from inside hooks and in the logs; and the package's face in a fresh process."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

import ovpatch
from tests.support import fake_plugins, patience
from tests.support.environment import clean
from tests.support.fake_plugins import ADD, REASON

site = fake_plugins.only_site
session = fake_plugins.session
apply = fake_plugins.apply


# --- threads, reentrance, logs ---


def test_many_threads_apply_once(site, session):
    site.plugin("a", register=ADD.format(10))
    threads = [threading.Thread(target=session.apply, args=((), None, None)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert site.log == ["import a", "register a", "activate a"]
    assert site.victim.f(1) == 11


def test_apply_from_inside_a_hook_is_refused(site, session):
    site.plugin("a", register="victim.again()")
    site.victim.again = lambda: session.apply((), None, None)
    found = session.apply((), None, None)["a"]
    assert found.state == "failed"
    assert "from inside a plugin's hook" in found.reason


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
# Python warns of forks in a process with threads.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_forked_while_another_thread_applies_does_not_hang(site):
    entered, go_on = threading.Event(), threading.Event()
    site.victim.wait = lambda: (entered.set(), go_on.wait(60))
    site.plugin("a", extra="@hookimpl\ndef ovpatch_reasons_against():\n    victim.wait()")
    thread = threading.Thread(target=ovpatch.apply, args=("a",))
    thread.start()
    try:
        assert entered.wait(30)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            site.victim.wait = lambda: None
            os._exit(0 if ovpatch.apply("a")["a"].state == "applied" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        go_on.set()
        thread.join(30)
        ovpatch.revert()
    assert not thread.is_alive()


def test_one_line_at_info_and_only_when_something_changes(site, apply, caplog, capfd):
    site.plugin("a", register=ADD.format(10))
    site.plugin("b", extra=REASON)
    with caplog.at_level(logging.INFO, "ovpatch"):
        apply()
        apply()
    assert [record.getMessage() for record in caplog.records] == [
        "applied a; skipped b (no such machine)"
    ]
    assert capfd.readouterr() == ("", "")


def test_trouble_is_warned_of_once(site, apply, caplog):
    site.plugin("a", extra="raise RuntimeError('boom')")
    apply()
    apply()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "boom" in warnings[0].getMessage()


# --- the face of the package, in a process of its own ---

FACE = """
import sys
import ovpatch
early = {name for name in sys.modules if name.startswith(("torch", "ovpatch.", "pluggy"))}
assert early <= {"ovpatch._version"}, early
assert {"apply", "revert", "PatchManager"} <= set(dir(ovpatch))
from ovpatch import FeatureError, PatchManager, SettingsError, hookimpl
assert "torch" not in sys.modules
import torch, threading
before = set(sys.modules)
_ = ovpatch.apply()
report = ovpatch.apply()
assert not isinstance(_, (int, float, bool, str)), "scripts collect simple globals as their configuration"
new = set(sys.modules) - before
assert threading.active_count() == 1
assert not torch.cuda.is_initialized()
heavy = [n for n in new if n.partition(".")[0] in ("rich", "torch", "numpy", "socket")]
with ovpatch.applied():
    pass
ovpatch.revert()
import ovpatch.session.session_report, ovpatch.session.session
assert callable(ovpatch.report) and callable(ovpatch.apply)
try:
    ovpatch.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
import json
sys.stderr.write(json.dumps([heavy, report.to_json(), ovpatch.report()["ddp"].state]))
"""


def test_the_package_in_a_fresh_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FACE],
        env=clean(os.environ),
        capture_output=True,
        text=True,
        timeout=patience.scale(120),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    heavy, report, state = json.loads(done.stderr)
    assert heavy == []
    assert {"version", "torch", "python", "pid", "rank", "features", "patches"} == set(report)
    states = {feature["name"]: feature["state"] for feature in report["features"]}
    experts = "pending" if importlib.util.find_spec("transformers") else "skipped"
    waiting = {"pipe_experts": experts, "tp_linear": "pending"}
    off = dict.fromkeys(("megatron", "pipeline", "recompute"), "disabled")
    assert states == {"ddp": "applied", "dist_optimizer": "applied", **off, **waiting}
    assert state == "disabled"
