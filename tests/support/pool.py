"""A pool of worker processes that run test functions as ranks of a process group.

Workers are forked from a server that has torch imported, once per pytest session, and are fed with functions:

    def total(value):
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor

    def test_total(ranks):
        assert ranks(2)(total, 5) == [torch.tensor([11])] * 2

The function runs inside an initialised default group with fresh seeds; afterwards the group is destroyed and ovpatch
reverted. A case that fails costs its workers their life: the next case gets new ones, in some ten milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import connection as channels
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist

from tests.support import patience, sharing, stacks, wire
from tests.support import worker as worker_module
from tests.support.environment import clean, exactly, resolve_quickly
from tests.support.failures import Fate, RankFailure, tail
from tests.support.gloo import MAX_GROUPS_LEFT, count_groups
from tests.support.worker import Case, FunctionName, Outcome, main

PRELOAD: Final = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.optim",
    "numpy",
    "pytest",
)

# The seconds for which peers may continue after a rank has failed. Most of them wait for this rank in a collective.
GRACE: Final = 3.0

#: Seconds until a rank that still cleans up counts as hanging.
_CLEAN_UP_S: Final = 60.0


class Pool:
    """The workers of one pytest session. ``pool(world)`` is the callable that runs a function on ``world`` ranks."""

    def __init__(self, *, grace: float = GRACE, share_gpu: bool = False) -> None:
        resolve_quickly()
        self._grace = grace
        self._share_gpu = share_gpu
        self._workers: list[_Worker] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._environment = clean(os.environ)
        self._store: dist.TCPStore | None = None
        self._cases = 0
        atexit.register(self.close)

    def __call__(self, world: int) -> Ranks:
        return Ranks(self.run, world)

    def close(self) -> None:
        """End all workers. The pool starts new ones if it is used again."""
        atexit.unregister(self.close)
        self._discard()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = 60,
        backend: str | None = "gloo",
        env: Mapping[str, str | None] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank and return the results by rank.

        Args:
            world: Number of ranks.
            function: A module-level function; it is sent by name, so decorators must keep ``__qualname__``.
            args: Its arguments; tensors arrive by value.
            timeout: Seconds until the case fails with the stacks of all ranks, on a quiet machine.
            backend: Of the default group; None leaves ``torch.distributed`` uninitialised. With NCCL the device is set
                by rank, unless all share one.
            env: Environment variables of this case; None removes one. pytest's own environment of the moment does not
                reach the workers.
            kwargs: Keyword arguments.

        Raises:
            RankFailure: A rank raised, died or hung, or left torch patched.
        """
        __tracebackhide__ = True
        arguments = wire.dumps((args, kwargs))
        name = _name(function)
        limit = patience.scale(timeout * (sharing.TIMEOUT_FACTOR if self._share_gpu else 1))
        workers = self._ready(world, same_history="nccl" in (backend or ""))
        self._cases += 1
        try:
            for rank, worker in enumerate(workers):
                gpu, changes = (0, sharing.environment(rank)) if self._share_gpu else (rank, {})
                changes |= env or {}
                port = self._store_port()
                worker.begin(
                    Case(
                        self._cases,
                        rank,
                        world,
                        gpu,
                        backend,
                        limit,
                        port,
                        changes,
                        name,
                        arguments,
                    )
                )
            return self._finish(workers, name, time.monotonic() + limit, timeout)
        except BaseException:
            self._discard()
            raise

    def _finish(
        self, workers: Sequence[_Worker], name: FunctionName, deadline: float, timeout: float
    ) -> list[Any]:
        __tracebackhide__ = True
        self._gather(workers, deadline)
        self._judge(workers, name, f"did not finish within {timeout:g} s")
        values = [wire.loads(worker.fate.value) for worker in workers]
        for worker in workers:
            worker.clean_up()
        self._gather(workers, time.monotonic() + patience.scale(_CLEAN_UP_S))
        self._judge(workers, name, f"did not clean up within {_CLEAN_UP_S:g} s")
        return values

    def _gather(self, workers: Sequence[_Worker], deadline: float) -> None:
        """Wait for all workers. After the first failure, wait only :data:`GRACE` for the remaining workers."""
        shortened = False
        while running := [worker for worker in workers if worker.fate.running]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            channels.wait([item for worker in running for item in worker.signals()], left)
            for worker in running:
                worker.look()
            if not shortened and any(worker.fate.bad for worker in workers):
                shortened, deadline = True, min(deadline, time.monotonic() + self._grace)

    def _judge(self, workers: Sequence[_Worker], name: FunctionName, complaint: str) -> None:
        __tracebackhide__ = True
        fates = [worker.fate for worker in workers]
        if all(fate.kind == "ok" for fate in fates):
            return
        hung = any(worker.fate.running for worker in workers)
        # Peers may wait for the reply of a rank that has finished.
        for worker in workers if hung else ():
            if not worker.fate.bad and stacks.request_stacks(worker.pid):
                worker.fate.details = stacks.keep_case_stacks(
                    stacks.read(worker.stack_file), worker_module
                )
        for worker in workers:
            worker.fate.output = tail(worker.output_file)
        if not hung and not any(fate.bad for fate in fates):
            pytest.skip(next(fate.error for fate in fates if fate.kind == "skipped"))
        raise RankFailure(f"{name.module}.{name.qualname}", fates, complaint)

    def _ready(self, world: int, *, same_history: bool) -> list[_Worker]:
        """Return workers. Symmetric memory needs ``same_history``: workers that have run the same cases so far."""
        if (
            any(not worker.process.is_alive() for worker in self._workers)
            or (same_history and len(self._workers) != world)
            or any(count_groups(worker.pid) > MAX_GROUPS_LEFT for worker in self._workers)
        ):
            self._discard()
        self._folder.mkdir(exist_ok=True)
        while len(self._workers) < world:
            self._workers.append(_Worker(self._folder, len(self._workers), self._environment))
        return self._workers[:world]

    def _store_port(self) -> int:
        if self._store is None:
            timeout = timedelta(seconds=60)
            self._store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
            )
        return int(self._store.port)

    def _discard(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


class Ranks(functools.partial[list[Any]]):
    """:meth:`Pool.run` for a number of ranks."""

    @property
    def world(self) -> int:
        """That number."""
        world: int = self.args[0]
        return world


class _Worker:
    def __init__(self, folder: Path, index: int, environment: Mapping[str, str]) -> None:
        self.output_file = folder / f"{index}.out"
        self.stack_file = folder / f"{index}.stacks"
        self.output_file.unlink(missing_ok=True)
        self.stack_file.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        start_server(environment)
        self._connection, theirs = context.Pipe()
        # Not daemonic: a case may use DataLoader workers.
        self.process = context.Process(
            target=main,
            args=(theirs, self.output_file, self.stack_file, dict(environment)),
            name=f"rank {index}",
        )
        self.process.start()
        theirs.close()
        self.fate = Fate(index)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, case: Case) -> None:
        self.fate = Fate(case.rank)
        if self.output_file.exists():
            os.truncate(self.output_file, 0)
        self._send(wire.dumps(case))

    def clean_up(self) -> None:
        self.fate = Fate(self.fate.rank)
        self._send(b"clean up")

    def signals(self) -> list[Any]:
        return [self._connection, self.process.sentinel]

    def look(self) -> None:
        """Take the outcome, or detect the death of the process."""
        try:
            if self._connection.poll():
                outcome: Outcome = wire.loads(self._connection.recv_bytes())
                self.fate.take(
                    outcome.kind, outcome.value, outcome.error, outcome.details, outcome.when
                )
                return
        except (EOFError, OSError):
            self.process.join(60)
        if self.process.exitcode is not None:
            died = _describe_exit(self.process.exitcode)
            self.fate.take("died", b"", died, self._last_words(), time.monotonic())

    def kill(self) -> None:
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # The session contains all processes that the case started.
            os.killpg(self.pid, signal.SIGKILL)
        # The process may not have called setsid() yet.
        self.process.kill()
        self.process.join(60)
        self.process.close()

    def _send(self, data: bytes) -> None:
        # If the process has died, look() will report it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(data)

    def _last_words(self) -> str:
        if not self.stack_file.exists():
            return ""
        return stacks.keep_case_stacks(
            self.stack_file.read_text(errors="replace").strip(), worker_module
        )


def _name(function: Callable[..., Any]) -> FunctionName:
    module, qualname = function.__module__, function.__qualname__
    if "<" in qualname or module == "__main__":
        raise TypeError(f"{module}.{qualname} cannot be sent to the ranks: move it to module level")
    return FunctionName(module, qualname)


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"died by {signal.Signals(-code).name}"
    return f"ended by itself with exit code {code}"


def start_server(environment: Mapping[str, str]) -> None:
    """Start the fork server, once, under a clean environment, because it imports torch, which reads variables."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    with exactly(environment):
        multiprocessing.forkserver.ensure_running()
