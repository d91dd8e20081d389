"""Triton's interpreter, for kernels that ranks run over memory that they share.

Triton decides at its first import whether it interprets, and the pool's workers have imported it. So such tests run in
another process, or in ranks:

    interpreted(cases, 5)            # cases(5), in one process
    interpreted(cases, 5, world=2)   # on each of two ranks in a gloo group; the results by rank

These processes are forked from a server that stays for all calls, because the imports of torch and Triton take longer
than most tests.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.kernels.symmetric_memory import Memory
from tests.support import patience
from tests.support.preloaded import Server

_POLL = 1e-4  # seconds
_NO_SIGNATURE = "no signature found for builtin <built-in function print>"
INTERPRETING = {"TRITON_INTERPRET": "1"}
ROOT = Path(__file__).resolve().parent.parent.parent


def interpreted(
    function: Callable[..., Any], *args: Any, world: int = 0, timeout: float = 100
) -> Any:
    """Run a module-level function in a process that interprets kernels, and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        call = pickle.dumps((function.__module__, function.__qualname__, args))
        Path(folder, "call").write_bytes(call)
        env = {**os.environ, **INTERPRETING, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [*_server().command(world), __file__, folder]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience.scale(timeout),
        )
        if _NO_SIGNATURE in done.stdout:
            pytest.skip(
                "Triton's interpreter reads the signature of print, which Python 3.10 does not have"
            )
        assert done.returncode == 0, done.stdout[-6000:]
        results = [
            pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world or 1)
        ]
        return results if world else results[0]


@functools.cache
def _server() -> Server:
    return Server(**INTERPRETING)


def allocate(
    size: int, group: Any, device: torch.device, prepare: Callable[[Tensor], None]
) -> Memory:
    """Replace :func:`ovpatch.overlap.kernels.symmetric_memory.allocate` for processes on one CPU."""
    name = group.group_name
    _allocations[name] += 1
    rank, paths = (
        group.rank(),
        [f"{_allocations[name]}-{name}-{rank}" for rank in range(group.size())],
    )
    folder = Path(os.environ["INTERPRETED_FOLDER"])
    (folder / paths[rank]).write_bytes(bytes(size))
    own = _mapped(folder / paths[rank], size)
    prepare(own)
    dist.barrier(group)
    mapped = [own if path == paths[rank] else _mapped(folder / path, size) for path in paths]
    return Memory(own, [tensor.data_ptr() for tensor in mapped], mapped)


# The number of allocations by group. A rank may not be in all groups.
_allocations: collections.Counter[str] = collections.Counter()


def _mapped(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


class _Everything:
    """An imitation of a function whose globals have all that the interpreter replaces."""

    __globals__: dict[str, Any] = {}


class _Lasting:
    def restore(self) -> None:
        """Leave the language as it is, for the next kernel."""


class _Types(dict[str, Any]):
    """numpy's types by the names of Triton's types, whose hashes change."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        super().__init__()
        self._get = get

    def __call__(self, dtype: Any) -> Any:
        found = self.get(dtype.name)
        if found is None:
            found = self[dtype.name] = self._get(dtype)
        return found


def _mend_triton() -> None:
    """Allow scalars as indices, and save time.

    Triton 3.6 makes indices from arrays by int(), which numpy 2.4 refuses.

    The interpreter replaces the language again for every function that a kernel calls. Here the language is replaced
    once, because this process only interprets. The interpreter makes a table of numpy's types at each use, which is
    cached here. It computes each sum of integers again in 64 bits to detect overflows. Numbers are small here, and this
    would take two fifths of the time. An addition of 0 reads the signal of another rank, so a rank that waits leaves
    the core to the ranks that it waits for.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor
    _Everything.__globals__.update(tl=tl, core=tl.core)
    interpreter._patch_lang(_Everything)
    interpreter._patch_lang = lambda function: _Lasting()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _Types(interpreter._get_np_dtype)

    atomic = interpreter.InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, *more: Any) -> Any:
        if not value.data.any():
            time.sleep(_POLL)
        return atomic(self, operation, pointer, value, *more)

    interpreter.InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def main(folder: str) -> None:
    _mend_triton()
    module, name, args = pickle.loads(Path(folder, "call").read_bytes())
    os.environ["INTERPRETED_FOLDER"] = folder
    function = getattr(importlib.import_module(module), name)
    rank = os.environ.get("RANK")
    if rank is not None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=int(rank),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        torch.manual_seed(int(rank))
    result = function(*args)
    if rank is not None:
        dist.barrier()
    Path(folder, f"result-{rank or 0}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
