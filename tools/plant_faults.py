"""Plants faults in the sources, one at a time, and tells which of them the tests catch.

    $ python tools/plant_faults.py              # all, some twenty minutes
    $ python tools/plant_faults.py wait stale   # those whose names hold one of these words

A fault is a small replacement in one file of a scratch copy of the repository, in which the tests that should catch it
are run. The program ends with 1 if a fault is not caught, and with 2 if a replacement does not fit the sources, which
``tests/test_planted_faults.py`` checks in every run of the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_COPIED: Final = ("ovpatch", "plugins", "tests", "setup.cfg", "pyproject.toml")
_TIMEOUT_S: Final = 900.0
_FAILED: Final = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)

_REDUCTION: Final = "ovpatch/overlap/data_parallel/"
_SHARDING: Final = "plugins/ovpatch_plugins/dist_optimizer/"
_DDP_TESTS: Final = "tests/plugins/ddp/"
_SHARDING_TESTS: Final = "tests/plugins/dist_optimizer/"


class FaultNotFoundError(ValueError):
    """The text that a fault replaces is not there exactly once. Adapt the fault to the sources."""


@dataclass(frozen=True)
class Fault:
    """A replacement in the sources.

    Attributes:
        name: What is wrong then.
        file: Where, relative to the repository.
        old: A text that stands there exactly once.
        new: What takes its place.
        tests: What should fail: arguments for pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Change the file below ``root``.

        Raises:
            FaultNotFoundError: The old text is not there, or several times.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.count(self.old) != 1:
            raise FaultNotFoundError(
                f"fault '{self.name}': {self.file} has {text.count(self.old)} times what it replaces, not once: "
                f"{self.old!r}. Adapt the fault in tools/plant_faults.py to the sources."
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


FAULTS: Final = (
    Fault(
        "the last bucket is skipped",
        _REDUCTION + "grad_sync.py",
        "while self.launched < len(self.buckets):",
        "while self.launched < len(self.buckets) - 1:",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "a wait for the reductions is left out",
        _REDUCTION + "grad_sync.py",
        "for work in self._works:\n            work.wait()",
        "for work in self._works:\n            pass",
        ("tests/overlap/test_ledger.py", _DDP_TESTS + "test_loops.py"),
    ),
    Fault(
        "gradients are divided by another number",
        _REDUCTION + "grad_sync.py",
        "self._divisor = 1 if average else group.size()",
        "self._divisor = 1 if average else group.size() + 1",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "a reader finds parameters that are stale",
        "ovpatch/overlap/tensors/pending_param.py",
        "param.__class__ = PendingParameter",
        "pass",
        ("tests/overlap/test_pending_readers.py",),
    ),
    Fault(
        "the zero of lazy gradients belongs to a mode of the script",
        "ovpatch/overlap/tensors/lazy_tensor.py",
        "    with without_modes():\n        if own:",
        "    if True:\n        if own:",
        ("tests/plugins/dist_optimizer/test_modes.py",),
    ),
    Fault(
        "another name of the first parameter is accepted",
        "ovpatch/patching/wrapper_chain.py",
        "if name != old_name and old_name not in names:",
        "if name != old_name and old_name not in names and name != names[0]:",
        ("tests/patching/test_checks.py",),
    ),
    Fault(
        "a gradient is added twice",
        _REDUCTION + "fp32_accumulation.py",
        "found.total.add_(added)",
        "found.total.add_(added, alpha=2)",
        (_DDP_TESTS + "test_sums_in_fp32.py",),
    ),
    Fault(
        "a shard ends one element early",
        "ovpatch/overlap/tensors/memory.py",
        "min((rank + 1) * size, numel)",
        "min((rank + 1) * size - 1, numel)",
        (_SHARDING_TESTS + "test_loops.py",),
    ),
    Fault(
        "the hook of the first parameter does not fire",
        _REDUCTION + "reducer.py",
        "if listener is not None and not listener.quiet:",
        "if index and listener is not None and not listener.quiet:",
        (_DDP_TESTS + "test_loops.py",),
    ),
    Fault(
        "a norm is that of this rank's shard",
        _SHARDING + "clip_grad.py",
        "    dist.all_reduce(powers, group=group)\n",
        "",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "an infinity on another rank is lost",
        _SHARDING + "clip_grad.py",
        "found[device].copy_(seen)",
        "pass",
        (_SHARDING_TESTS + "test_scaler.py",),
    ),
    Fault(
        "a ring sends what it should receive",
        "plugins/ovpatch_plugins/tp_linear/schedules/overlapped.py",
        "by_rank[owner], (rank + 1) % world, by_rank[owner - 1], (rank - 1) % world",
        "by_rank[owner - 1], (rank + 1) % world, by_rank[owner], (rank - 1) % world",
        ("tests/plugins/tp_linear/test_auto.py", "tests/plugins/tp_linear/test_rare.py"),
    ),
    Fault(
        "a patch is not reverted",
        "ovpatch/patching/manager.py",
        "chain.writes = [write for write in reversed(chain.writes) if not write.undo()]",
        "chain.writes = []",
        ("tests/patching/test_revert.py",),
    ),
    Fault(
        "a norm is not counted",
        _SHARDING + "clip_grad.py",
        "COUNTERS.norms += 1",
        "COUNTERS.norms += 0",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "one contribution more is expected than declared",
        _REDUCTION + "grad_sync.py",
        "self._expected[index] = before + count",
        "self._expected[index] = before + count + 1",
        (_DDP_TESTS + "test_declared.py",),
    ),
    Fault(
        "norms of half precision are computed in half precision",
        _SHARDING + "sharded_bucket.py",
        "[shard.to(wide) for shard in shards]",
        "list(shards)",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "a gradient is a view of the flat tensor of its bucket",
        _REDUCTION + "bucket.py",
        "_write_grad(self.params[i], view, is_shared=True)",
        "_write_grad(self.params[i], view, is_shared=False)",
        ("tests/overlap/test_buckets.py", "tests/overlap/test_buckets_in_place.py"),
    ),
    Fault(
        "a reader gets the state of another step",
        "ovpatch/overlap/peer_rpc/versioned.py",
        "                return self._begun > version\n",
        "                return False\n",
        ("tests/overlap/test_versioned.py",),
    ),
    Fault(
        "shards are put together in another order",
        "ovpatch/overlap/tensors/memory.py",
        "own = ranges[rank]",
        "own = ranges[-1 - rank]",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
    Fault(
        "a stream does not wait for what arrives on another one",
        _SHARDING + "param_all_gather.py",
        "for work in arrived.works if arrived.event is None else (arrived.event,):",
        "for work in arrived.works[:0]:",
        ("tests/overlap/test_side_streams.py",),
    ),
    Fault(
        "a product that was computed ahead outlives a change of its weight",
        "plugins/ovpatch_plugins/tp_linear/precomputed.py",
        "if (_version(found.weight), _version(found.bias)) != found.versions:",
        "if False:",
        ("tests/plugins/tp_linear/test_shared.py",),
    ),
    Fault(
        "the failure of another rank is swallowed",
        "ovpatch/overlap/comm/step_flags.py",
        "raise RuntimeError(text(steps[0]))",
        "return",
        (_DDP_TESTS + "test_failures.py",),
    ),
)


def choose(words: Sequence[str]) -> list[Fault]:
    """Return the faults whose names hold one of some words; all of them without words."""
    return [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]


def find_catcher(fault: Fault, root: Path) -> str:
    """Plant a fault in a copy of the repository, run its tests, and take it out again.

    Returns:
        The first test that failed; "" if none did.

    Raises:
        FaultNotFoundError: It does not fit the sources.
        RuntimeError: pytest could not run the tests.
    """
    before = (root / fault.file).read_bytes()
    fault.plant(root)
    try:
        code, output = _run_tests(fault.tests, root)
    finally:
        (root / fault.file).write_bytes(before)
    failed = _FAILED.search(output)
    if code == 0 or (code == 1 and failed):
        return failed[1] if failed else ""
    raise RuntimeError(f"fault '{fault.name}': pytest ended with {code}; correct its tests:\n{output[-2000:]}")


def _run_tests(tests: Sequence[str], root: Path) -> tuple[int, str]:
    """Return pytest's exit code and output; a run that had to be ended counts as failed: a rank waited for ever."""
    paths = [str(root), str(root / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "FAILED by its time limit"
    return done.returncode, done.stdout + done.stderr


def copy_repository(target: Path) -> None:
    """Copy what the tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy(source, target / name)


def main() -> int:
    """Plant the chosen faults and print a line for each."""
    parser = argparse.ArgumentParser(description="Plant faults and tell which of them the tests catch.")
    parser.add_argument("words", nargs="*", help="only faults whose names hold one of these")
    chosen, missed = choose(parser.parse_args().words), []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy_repository(Path(folder))
        for fault in chosen:
            begin = time.monotonic()
            try:
                catcher = find_catcher(fault, Path(folder))
            except (FaultNotFoundError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 2
            missed += [] if catcher else [fault]
            verdict = f"caught by {catcher}" if catcher else "NOT CAUGHT"
            print(f"{time.monotonic() - begin:4.0f} s  {fault.name}: {verdict}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
