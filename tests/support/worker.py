"""The worker's side of the pool: one process that runs the cases of one rank sequentially."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _pytest.outcomes import Skipped

from tests.support import finalizers, fresh_reports, gloo, guard, stacks, wire
from tests.support.compiler import skip_guard_timing
from tests.support.environment import updated


@dataclass(frozen=True)
class FunctionName:
    """A module-level function by name."""

    module: str
    qualname: str

    def load(self) -> Callable[..., Any]:
        target: Any = importlib.import_module(self.module)
        for part in self.qualname.split("."):
            target = getattr(target, part)
        return target


@dataclass(frozen=True)
class Case:
    """One call on one rank. ``arguments`` stays pickled, so that a failing import is the case's failure."""

    number: int
    rank: int
    world: int
    # The index of the rank's device under NCCL.
    gpu: int
    backend: str | None
    timeout: float
    store_port: int
    env: Mapping[str, str | None]
    function: FunctionName
    arguments: bytes


# The number of objects above which collections are slow. The collector reads some ten million objects a second.
_MAX_COLLECTED_OBJECTS = 10_000
# The number of passes of the collector after a case.
_MAX_PASSES = 200

_case: Case | None = None
_client: dist.TCPStore | None = None


@dataclass(frozen=True)
class Outcome:
    """The report of one rank. ``error`` is the exception in one line, ``details`` the traceback."""

    # "ok", "failed" or "skipped".
    kind: str
    value: bytes = b""
    error: str = ""
    details: str = ""
    when: float = field(default_factory=time.monotonic)


def main(
    connection: Connection, output: Path, stack_file: Path, environment: Mapping[str, str]
) -> None:
    """Run cases until the pool hangs up."""
    _settle_process(output, environment)
    finalizers.install()
    gloo.use_one_thread()
    skip_guard_timing()
    _ignore_missing_devices()
    keep = stacks.install(stack_file)
    # Objects that exist by now are never freed. Without them, the collection after a case takes one millisecond
    # instead of sixty.
    gc.freeze()
    while True:
        try:
            case: Case = wire.loads(connection.recv_bytes())
        except EOFError:
            keep.close()
            return
        runner = _Runner(case)
        connection.send_bytes(wire.dumps(runner.run()))
        _flush()
        try:
            # The pool sends this when every rank has run the case, so connections may be closed.
            connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(wire.dumps(runner.clean_up()))
        _flush()


@dataclass
class _Runner:
    case: Case
    before: guard.Snapshot = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def run(self) -> Outcome:
        return _attempt(self._run)

    def clean_up(self) -> Outcome:
        return _attempt(self._clean_up)

    def _run(self) -> bytes:
        self.environment = dict(os.environ)
        self.before = guard.snapshot()
        self._enter()
        global _case
        _case = self.case
        function = self.case.function.load()
        args, kwargs = wire.loads(self.case.arguments)
        return wire.dumps(function(*args, **kwargs))

    def _enter(self) -> None:
        case = self.case
        place = {"RANK": str(case.rank), "LOCAL_RANK": str(case.rank)}
        place |= {"WORLD_SIZE": str(case.world), "LOCAL_WORLD_SIZE": str(case.world)}
        _set_environment(updated(self.environment | place, case.env))
        _reset_torch()
        if case.backend is None:
            return
        options: dict[str, Any] = {}
        if "nccl" in case.backend:
            torch.cuda.set_device(case.gpu)
            options["device_id"] = torch.device("cuda", case.gpu)
        # This is longer than the case, so that a hang ends by the pool's timeout, which shows stacks.
        timeout = timedelta(seconds=case.timeout + 60)
        dist.init_process_group(
            case.backend,
            store=_store(case, "default"),
            rank=case.rank,
            world_size=case.world,
            timeout=timeout,
            **options,
        )
        self._await_peers()

    def _await_peers(self) -> None:
        """Wait until all ranks are connected: a rank that fails immediately would make its peers fail to connect."""
        store = _store(self.case, "start")
        if store.add("ranks", 1) == self.case.world:
            store.set("all", "")
        store.wait(["all"])

    def _clean_up(self) -> bytes:
        revert = getattr(sys.modules.get("ovpatch"), "revert", None)
        if revert is not None:
            revert()
        backends = _list_backends()
        if dist.is_initialized():
            dist.destroy_process_group()
        _reset_torch()
        _set_environment(self.environment)
        _collect_all()
        del backends
        if gloo.count_groups(os.getpid()) > gloo.MAX_GROUPS_LEFT:
            gloo.drop_cached_meshes()
            # Meshes of earlier cases may be frozen.
            gc.unfreeze()
            _collect_all()
        freeze_remainder()
        fresh_reports.reset()
        _renew_tuning_budget()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        left = guard.leftovers(self.before, guard.snapshot())
        if left:
            raise AssertionError("the case leaves torch patched: " + "; ".join(left))
        pending = getattr(sys.modules.get("ovpatch.overlap.tensors.pending_param"), "PENDING", None)
        if pending:
            raise AssertionError(f"the case leaves {len(pending)} parameters pending")
        if locked := finalizers.take():
            raise AssertionError(f"a finalizer takes a lock, which may hang:\n{locked[0]}")
        return b""


def fresh_store(name: str) -> dist.Store:
    """Return another empty store that all ranks of the running case share, for the start of a group."""
    assert _case is not None, "only a case has a store"
    return _store(_case, name)


def _store(case: Case, name: str) -> dist.Store:
    """Return a store over the connection that all cases of a worker share, because connecting can be slow."""
    global _client
    timeout = timedelta(seconds=case.timeout + 60)
    if _client is None:
        _client = dist.TCPStore("127.0.0.1", case.store_port, is_master=False, timeout=timeout)
    _client.set_timeout(timeout)
    return dist.PrefixStore(f"case {case.number} {name}", _client)


def _attempt(action: Callable[[], bytes]) -> Outcome:
    try:
        return Outcome("ok", value=action())
    except Skipped as skipped:
        return Outcome("skipped", error=str(skipped.msg))
    except BaseException as error:  # noqa: BLE001 - also SystemExit: whatever ends the case is reported by its rank
        return Outcome("failed", error=_one_line(error), details=_traceback(error))


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def _traceback(error: BaseException) -> str:
    here = Path(__file__).name
    frames = error.__traceback__
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_code.co_filename.endswith(here)
    ):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    # Pytest does not rewrite assertions here, so the message shows the variables around a bare assertion.
    return text + _locals(error) if isinstance(error, AssertionError) and not error.args else text


def _locals(error: BaseException) -> str:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    variables = {} if last is None else last.tb_frame.f_locals
    shown = [(name, _repr(value)) for name, value in variables.items() if not callable(value)]
    return "".join(f"\n  where {name} = {text}" for name, text in shown)


def _repr(value: object) -> str:
    try:
        return repr(value)[:200]
    except Exception as error:  # noqa: BLE001 - a broken repr must not hide the failure
        return f"<repr failed: {error}>"


def _settle_process(output: Path, environment: Mapping[str, str]) -> None:
    # The pool kills the session, so nothing that a case started survives.
    os.setsid()
    threading.Thread(target=die_with_parent, name="die with pytest", daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _set_environment(environment)


def die_with_parent() -> None:
    """End with pytest, even if it is killed while this rank hangs. Otherwise the fork server would also stay."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _ignore_missing_devices() -> None:
    """Make ``torch.manual_seed`` ignore missing kinds of devices.

    For each kind it would keep the seed, with a stack, until such a device is initialized: milliseconds a call.
    """
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _forget_seed  # type: ignore[assignment]


def _forget_seed(seed: int) -> None:
    pass


def _set_environment(wanted: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(wanted)


def _list_backends() -> list[Any]:
    """Return the backends of all process groups. The caller holds them while garbage is collected.

    A stock reducer in a reference cycle may own the last reference to its group. The collector holds the GIL while it
    destroys both, and gloo's destructor joins a thread that may need the GIL to free a tensor. Python's own reference
    releases the GIL first.
    """
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    return [group._get_backend(device) for group in groups for device in group._device_types]


def _collect_all() -> None:
    """Collect until nothing is left, so that the next case finds no model of this case.

    The collector does not see the hooks of an autograd node. Backward hooks of nested modules, such as CommDebugMode's,
    are a chain of such nodes: each pass frees one node, and the next pass finds the objects that only this node held.
    """
    for _ in range(_MAX_PASSES):
        if not gc.collect():
            return


def freeze_remainder() -> None:
    """Exclude the remaining objects of a case from later collections: its imports, and all that Dynamo keeps for good.

    Collections would read these objects in each later case, 50 ms each after a file that compiles. This does not happen
    after every case, because a process group that is garbage a moment later would then never be freed.
    """
    if len(gc.get_objects()) > _MAX_COLLECTED_OBJECTS:
        gc.freeze()


def _renew_tuning_budget() -> None:
    """Let the next case measure candidates for as long as a process may, however long earlier cases measured."""
    autotuner = sys.modules.get("ovpatch.overlap.kernels.autotuner")
    if autotuner is not None:
        autotuner.BUDGET._spent = 0.0


def _reset_torch() -> None:
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
