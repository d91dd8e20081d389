"""The boundaries between a script's steps, the script's modules, and the end of an observed process."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ovpatch.session import session_report, worker_exit, worker_orders

Before = Callable[[Optimizer, tuple[Any, ...], Mapping[str, Any]], None]
After = Callable[[Optimizer], None]

#: The code of torch's wrapper of every ``step()``; the same for all classes.
_WRAPPER: Final = Optimizer.profile_hook_step(lambda: None).__code__


class StepHooks:
    """Hooks around each step of every optimizer.

    A ``step()`` that calls its base class's ``step()`` runs torch's hooks again
    in the middle of the step. A depth counter fails: after an exception torch calls no post hook. So the stack decides:
    a step begins and ends where torch's wrapper is on the stack once for the optimizer. Where Dynamo has compiled the
    wrapper, the first post hook after a pre hook counts.

    ``before`` gets the optimizer and the arguments of its ``step()``, the optimizer first. ``after`` gets the
    optimizer, but not if its step raises.
    """

    def __init__(self, *, after: After, before: Before | None = None) -> None:
        self._before, self._after = before, after
        # A step that raised stays in the set until the next step.
        self._in_progress: WeakSet[Optimizer] = WeakSet()
        self._handles = (
            register_optimizer_step_pre_hook(self._pre),
            register_optimizer_step_post_hook(self._post),
        )

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    @torch._disable_dynamo
    def _pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_outermost(optimizer):
            self._in_progress.add(optimizer)
            if self._before is not None:
                self._before(optimizer, args, kwargs)

    @torch._disable_dynamo
    def _post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer in self._in_progress and _is_outermost(optimizer):
            self._in_progress.discard(optimizer)
            self._after(optimizer)


def _is_outermost(optimizer: Optimizer) -> bool:
    """Return whether the running hook belongs to the outermost ``step()`` of its optimizer."""
    depth = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None and depth < 2:
        depth += frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth < 2


def find_root_modules() -> list[nn.Module]:
    """Return all modules of the process that are no other module's child."""
    # By type: isinstance() reads __class__, which makes lazy proxies load their objects.
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    children = {
        id(child) for module in modules for child in vars(module).get("_modules", {}).values()
    }
    return [
        module for module in modules if id(module) not in children and "_modules" in vars(module)
    ]


def list_children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a mapping, list or tuple, by key or index; None for other objects."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else None


#: Seconds to wait for ranks before their last step; some scripts have ranks that never step.
EXIT_TIMEOUT_S: Final = 60.0
# Seconds between searches for ranks that have ended without a mark.
_SEARCH_INTERVAL_S: Final = 1.0


class StepCounter:
    """Counts the steps of this process and writes the count to the file ``beat-<pid>`` for the tool.

    A step is one step of the optimizer that steps most often; where several take turns, as in a GAN, one turn of all. A
    boundary is the end of that optimizer's ``step()``; the file's time stamp shows the last one. Steps that
    :class:`~torch.amp.GradScaler` skips make no boundary. ``at_border`` is called after step 1, 2, ... with its number.
    """

    def __init__(self, directory: Path, at_border: Callable[[int], None]) -> None:
        self._directory, self._at_border = directory, at_border
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        # The process id and its file, because a forked child needs another file.
        self._beat: tuple[int, int] | None = None
        self._latest: ReferenceType[Optimizer] | None = None
        self.count = 0

    def start_counting(self) -> None:
        """Install the hooks."""
        self._hooks = StepHooks(after=self._stepped)

    def stop_counting(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()

    def find_device(self) -> torch.device:
        """Return the device of the parameters of the last step."""
        optimizer = self._latest() if self._latest is not None else None
        groups = optimizer.param_groups if optimizer is not None else []
        return next((p.device for group in groups for p in group["params"]), torch.device("cpu"))

    def _stepped(self, optimizer: Optimizer) -> None:
        # A later optimizer, as after unfreezing, joins the current step.
        joined = max(0, self.count - 1)
        mine = self._counts[optimizer] = self._counts.get(optimizer, joined) + 1
        if mine > self.count:
            self.count, self._latest = mine, ref(optimizer)
            if mine == 1:
                _NodeMarks("steps").set_mark()
            self._at_border(mine)
            self._write_count()

    def _write_count(self) -> None:
        pid = os.getpid()
        if self._beat is None or self._beat[0] != pid:
            path = self._directory / f"beat-{worker_orders.number_process()}"
            self._beat = pid, os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
        os.pwrite(self._beat[1], b"%8d" % self.count, 0)


def get_rank() -> int:
    """Return this process's rank in the job; 0 in a job of one process."""
    return session_report.get_rank() or 0


def get_world_size() -> int:
    """Return the number of ranks of the job."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1") or 1)


def get_node_ranks() -> range:
    """Return the ranks of this node if the launcher numbers them, as torchrun does; otherwise all ranks of the job."""
    first, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not (first.isdigit() and count.isdigit()):
        return range(get_world_size())
    start = get_rank() - int(first)
    return range(start, start + int(count))


class _NodeMarks:
    """Marks of one kind that ranks leave in the job's store for the ranks of other nodes.

    Each node has its own folder, so marks in files do not reach other nodes. A job of one node has none of these marks.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._store: torch.distributed.Store | None = None
        node = get_node_ranks()
        self._remote_ranks = [rank for rank in range(get_world_size()) if rank not in node]
        group = torch.distributed.group.WORLD if torch.distributed.is_available() else None
        if self._remote_ranks and group is not None:
            # Only a job of several nodes needs the store.
            from ovpatch.overlap.comm.lifetimes import group_store

            self._store = group_store(group)

    def set_mark(self) -> None:
        """Set the mark of this rank."""
        # The store ends with the process that serves it, and the script must not fail by that.
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set(self._key(get_rank()), "")

    def find_missing(self) -> set[int]:
        """Return the ranks of other nodes without such a mark; none if the store has ended, as all ranks leave then."""
        with suppress(RuntimeError):
            if self._store is not None:
                return {
                    rank for rank in self._remote_ranks if not self._store.check([self._key(rank)])
                }
        return set()

    def _key(self, rank: int) -> str:
        return f"ovpatch: {self._kind} of rank {rank}"


def find_ended_ranks(directory: Path, ranks: Collection[int]) -> set[int]:
    """Return the ranks of which all processes that signed in have ended.

    The launcher numbers ranks in the environment; other ranks, and those of other hosts, do not count.
    """
    # Only the end of a run needs what the tool's own process uses.
    from ovpatch.insight import variants

    alive = set(variants.list_processes(directory))
    pids: dict[int, set[int]] = {}
    for pid, rank in variants.read_ranks(directory).items():
        pids.setdefault(int(rank), set()).add(pid)
    return {
        rank
        for rank in ranks
        if rank in pids and alive.isdisjoint(pids[rank]) and max(pids[rank]) < worker_orders.MAX_PID
    }


def exit_with_peers(directory: Path) -> None:
    """End this process with exit code 0, together with its peers. Does not return.

    A rank that ends early tears down connections on which a peer still receives its last collective, so the ranks wait
    for each other: those of one node by marks in their folder, those of other nodes by marks in the job's store, if a
    tool counts steps there as well. They do not wait for ranks that have ended. They call ``os._exit``: an
    exception would run the script's clean-up, whose collectives peers do not enter.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    (directory / f"left-{get_rank()}").touch()
    left = _NodeMarks("exit")
    left.set_mark()
    # A node without a tool continues, so this rank does not wait for its ranks.
    unobserved = _NodeMarks("steps").find_missing()
    node = get_node_ranks()
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    ended: set[int] = set()
    next_search = time.monotonic()
    while time.monotonic() < deadline:
        # A folder that several nodes share has marks of their ranks as well.
        missing = {rank for rank in node if not (directory / f"left-{rank}").exists()}
        if missing <= ended and left.find_missing() <= unobserved:
            break
        if time.monotonic() > next_search:
            ended = find_ended_ranks(directory, missing)
            next_search = time.monotonic() + _SEARCH_INTERVAL_S
        time.sleep(0.02)
    worker_exit.write_report_now(is_last=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
