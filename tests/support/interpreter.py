"""Triton's interpreter, for kernels that ranks run over memory that they share.

Triton decides when it is first imported whether it interprets, and the pool's workers have imported it. So such tests
run in a process of their own, or in ranks:

    interpreted(cases, 5)            # cases(5), in one process
    interpreted(cases, 5, world=2)   # on each of two ranks in a gloo group; the results by rank

They are forked from one that stays for all calls: the imports of torch and Triton take longer than most of these.
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
    """Run a module-level function where kernels are interpreted, and return what it returns."""
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
                "Triton's interpreter asks for the signature of print, which Python 3.10 does not "
                "have"
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
    """Stand for :func:`ovpatch.overlap.kernels.symmetric_memory.allocate` among processes on one CPU."""
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


_allocations: collections.Counter[str] = (
    collections.Counter()
)  # by group, of which a rank may not be in all


def _mapped(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


class _Everything:
    """Stands for a function that sees all that the interpreter replaces."""

    __globals__: dict[str, Any] = {}


class _Lasting:
    def restore(self) -> None:
        """Leave the language as it is, for the next kernel."""


class _Types(dict[str, Any]):
    """numpy's types for Triton's, by name: those have no hash that lasts."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        super().__init__()
        self._get = get

    def __call__(self, dtype: Any) -> Any:
        found = self.get(dtype.name)
        if found is None:
            found = self[dtype.name] = self._get(dtype)
        return found


def _mend_triton() -> None:
    """Let scalars be indices, which Triton 3.6 makes of arrays by int(), and numpy 2.4 refuses; and save time.

    The interpreter replaces the language anew for every function that a kernel calls. Here it is replaced once: this
    process does nothing else with it. It makes a table of numpy's types whenever it wants one, and computes each sum
    of integers again in 64 bits, to see an overflow of numbers that are small here: two fifths of the time. An
    addition of 0 asks for what another rank signals: one that waits leaves the core to those that it waits for.
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

    def create_atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, *others: Any) -> Any:
        if not value.data.any():
            time.sleep(_POLL)
        return atomic(self, operation, pointer, value, *others)

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
