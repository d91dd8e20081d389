"""The tests of ``torch.testing._internal.distributed.distributed_test``, and how a rank runs one of them."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist

import ovpatch

MODULE: Final = "torch.testing._internal.distributed.distributed_test"

ARMS: Final[dict[str, tuple[str, ...]]] = {
    "stock": (),
    "ddp": ("ddp",),
    "ddp,dist_optimizer": ("ddp", "dist_optimizer"),
}
"""Features that are applied around a test, by the name of the arm."""

_WORDS: Final = (
    "DistributedDataParallel",
    "ZeroRedundancyOptimizer",
    "DDP",
    "ddp",
    "Join",
    "no_sync",
    "optimizer",
)


def texts() -> dict[str, str]:
    """Return the text of each test and helper in the installed torch, by name."""
    path = _path()
    source = path.read_text(encoding="utf-8")
    outer = next(
        one
        for one in ast.parse(source).body
        if isinstance(one, ast.ClassDef) and one.name == "DistributedTest"
    )
    base = next(one for one in outer.body if isinstance(one, ast.ClassDef))
    lines = source.splitlines()
    return {
        one.name: "\n".join(lines[one.lineno - 1 : one.end_lineno])
        for one in base.body
        if isinstance(one, ast.FunctionDef)
    }


def names() -> list[str]:
    """Return the tests whose text, or whose helper's, has to do with what we patch."""
    by_name = texts()
    helpers = {
        name for name, text in by_name.items() if not name.startswith("test_") and _concerns(text)
    }
    return [
        name
        for name, text in by_name.items()
        if name.startswith("test_")
        and (_concerns(text) or any(f"self.{helper}(" in text for helper in helpers))
    ]


def _concerns(text: str) -> bool:
    return any(word in text for word in _WORDS)


def _path() -> Path:
    package = importlib.util.find_spec("torch")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "testing/_internal/distributed/distributed_test.py"


@functools.cache
def _suite(device: str) -> Any:
    if device == "as it is":
        module: Any = importlib.import_module(MODULE)
    else:
        from tests.torch_suite.on_cpu import rewritten

        path = _path()
        name = f"{MODULE}_on_cpu"
        module = types.ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module
        # A rewritten text of torch's own: it has the same right to run as what importing the module runs.
        exec(
            compile(rewritten(path.read_text(encoding="utf-8"), str(path)), str(path), "exec"),
            vars(module),
        )
    tests = type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    return module, tests


def run_test(name: str, device: str, arm: str, folder: str) -> str:
    """Run one test on this rank, with a default group of its own.

    Args:
        name: Of the test.
        device: ``"as it is"`` or ``"cpu"``, see :mod:`tests.torch_suite.on_cpu`.
        arm: One of :data:`ARMS`.
        folder: An empty folder for this test alone.

    Returns:
        Why the test skipped itself, or "".
    """
    from torch.testing._internal.common_distributed import TEST_SKIPS

    module, tests = _suite(device)
    one = tests(name)
    one.rank, one.file_name = int(os.environ["RANK"]), f"{folder}/group"
    module.Barrier.barrier_id = 0
    dist.set_debug_level_from_env()
    with _applied(arm):
        dist.init_process_group(
            "gloo",
            init_method=one.init_method,
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=one.rank,
            timeout=timedelta(
                seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
            ),
        )
        one._barrier()
        why = ""
        try:
            getattr(one, name)()
        except SystemExit as ended:
            skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
            if ended.code not in skips:
                raise
            why = skips[ended.code] or "skipped"
        except (unittest.SkipTest, pytest.skip.Exception) as skipped:
            why = str(skipped) or "skipped"
        if not why:
            one._barrier(timeout=60)
        dist.destroy_process_group()
    return why


@contextlib.contextmanager
def _applied(arm: str) -> Iterator[None]:
    features = ARMS[arm]
    if not features:
        yield
        return
    options = {"dist_optimizer": {"min_param_numel": 1}} if "dist_optimizer" in features else {}
    with ovpatch.applied(*features, options=options):
        yield
