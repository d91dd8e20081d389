"""The script's own traceback is found in a launcher's log."""

from __future__ import annotations

from ovpatch.insight.variants import find_failure

LOG = """step 1
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in <module>
W1121 torch/distributed/elastic: sending SIGTERM
[rank1]:     raise RuntimeError("rank 1 has no data")
[rank1]: RuntimeError: rank 1 has no data
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 8, in <module>
[rank0]: RuntimeError: connection closed by peer
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1019, in run
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====
"""


def test_the_first_traceback_of_the_script():
    assert find_failure(LOG).splitlines() == [LOG.splitlines()[line] for line in (1, 2, 4, 5)]


def test_a_launchers_traceback_alone_is_not_it():
    log = LOG[LOG.index("Traceback (most recent call last):\n  File") :]
    assert find_failure(log, 2).splitlines() == log.splitlines()[-2:]
    usage = "usage: train.py [-h]\ntrain.py: error: no such option\n"
    warning = "W1121 14:19:07.464000 22 torch/distributed/elastic/agent.py:9] sending SIGTERM\n"
    assert find_failure(usage + warning + log, 2) == usage.strip()
    root = "Root Cause (first observed failure):\n  exitcode  : -9 (pid: 7)"
    assert find_failure(f"step 7\n{log}\nFailures:\n{root}", 2) == f"step 7\n{root}"
    assert find_failure("a\nb\nc", 2) == "b\nc"
    assert find_failure("") == ""


def test_a_deep_traceback_keeps_its_two_ends():
    frames = "".join(f'  File "f.py", line {n}\n' for n in range(500))
    short = find_failure(f"Traceback (most recent call last):\n{frames}ValueError: x\n").splitlines()
    assert len(short) < 30
    assert short[-1] == "ValueError: x"
    assert short[1].endswith("line 0")
