"""The choice between copy engines and the backend's kernels, measured beside matrix products, and what was chosen."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch
import torch.distributed as dist

from ovpatch.overlap.autotune.autotuner import Candidates, Tuning, add_report_line, get_autotuner
from ovpatch.overlap.comm import collectives
from ovpatch.overlap.comm.collectives import AllGather, ReduceScatter, Work
from ovpatch.overlap.comm.consensus import check_consistent, wait_limit_s
from ovpatch.overlap.comm.lifetimes import (
    drop_values,
    group_state,
    group_timeout_s,
    group_values,
    is_exiting_by_error,
    register_at_exit,
)
from ovpatch.overlap.comm.streams import is_capturing
from ovpatch.overlap.copy_engine.collectives import Engine
from ovpatch.overlap.copy_engine.window import AllocateWindow, allocate_window
from ovpatch.overlap.symm_mem import memory
from ovpatch.overlap.symm_mem.memory import triton_unavailable_reason

if TYPE_CHECKING:
    from ovpatch.overlap.copy_engine.point_to_point import PointToPoint
    from ovpatch.overlap.copy_engine.window import Window

_log = logging.getLogger("ovpatch.copies")


@dataclass
class Chosen:
    """The choice for a group on a device."""

    engine: Engine | None = None  # the engine; None if there can be none
    gathers: bool = False  # whether it runs all-gathers
    scatters: bool = False  # whether it runs reduce-scatters
    final: bool = False  # whether the choice is kept for all later calls
    reason: str = ""  # the reason why there can be no engine


_NONE: Final = Chosen()


def get_choice(group: dist.ProcessGroup, device: torch.device) -> Chosen:
    """Return the choice for a group on a device, which may not have been made yet."""
    register_at_exit(_at_exit)
    collectives.set_transports(collectives.Transports(find_gatherer, find_scatterer, attend, abort))
    return group_state(group).get_or_create((Chosen, device), Chosen)


def find_gatherer(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return the engine that runs all-gathers instead of the group's backend, if any."""
    found = _found(group, device)
    return found.engine if found.gathers else None


def find_scatterer(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return the engine that runs reduce-scatters instead of the group's backend, if any."""
    found = _found(group, device)
    return found.engine if found.scatters else None


def _found(group: dist.ProcessGroup, device: torch.device) -> Chosen:
    found: Chosen = group_state(group).values.get((Chosen, device), _NONE)
    # A replayed graph would use the halves in another order than eager calls.
    return _NONE if found.engine is None or is_capturing(device) else found


def finish(group: dist.ProcessGroup | None = None) -> None:
    """Make the host wait for copies in flight, in one group or in all, so that its peers complete theirs.

    At most for a group's time-out: a dead rank leaves its peers' streams waiting for ever.
    """
    _end(group, lambda engine, timeout_s: engine.drain(timeout_s))


def abort(group: dist.ProcessGroup) -> None:
    """End a group's copies in flight, for which ranks are missing; later calls of its engines are refused."""
    _end(group, lambda engine, timeout_s: engine.abort(timeout_s))


def _end(group: dist.ProcessGroup | None, end: Callable[[Engine, float], bool]) -> None:
    """End the copies of engines; one whose copies do not complete in time is given up."""
    for one, chosen in group_values(Chosen, group):
        timeout_s = group_timeout_s(one)
        if chosen.engine is not None and not end(chosen.engine, timeout_s):
            _log.warning(_LATE, timeout_s)
            _stuck.append(chosen.engine)
            chosen.engine = None


def forget(group: dist.ProcessGroup | None = None) -> None:
    """Leave one group or all to the backends again, and free the memory after the copies in flight."""
    finish(group)
    drop_values(Chosen, group)
    if not group_values(Chosen):
        collectives.set_transports(None)


def _at_exit() -> None:
    if not is_exiting_by_error():
        finish()


_stuck: list[Engine] = []  # their memory is never freed, which would wait for their streams, too

_LATE = (
    "copies between ranks have not ended in %g s and are not waited for any longer: look at the output of the other "
    "ranks, one of which may have died"
)


def attend(group: dist.ProcessGroup, device: torch.device, communicator: dist.ProcessGroup | None = None) -> None:
    """Issue a collective of one number behind the copies of a backward or step, if there are any.

    A stream that waits for a missing rank is no work of the backend, so the backend's watchdog would not end the job.
    For a collective that does not complete it does. All ranks call this. It runs on the communicator, by default on the
    copies' group.
    """
    engine = find_scatterer(group, device) or find_gatherer(group, device)
    if engine is None:
        return
    with engine.behind():
        work = (communicator or group).allreduce([engine.number])
    if device.type != "cuda":
        work.wait()  # gloo's threads do not survive the interpreter


# --- the choice ---


BACKEND: Final = "the backend's collectives"
COPIES: Final = "copy engines"

# In a step, a forward takes longer than its all-gathers, and a backward than its reduce-scatters, so what counts is how
# much longer the products take beside them. So a candidate computes for about twice as long as it communicates. Its
# products are short: a kernel that waits for multiprocessors waits for the end of a product.
_BYTES: Final = 512 * 1024 * 1024  # of a collective, which takes a millisecond or two
_TENSORS: Final = 32
_ROWS, _FEATURES = 4096, 4096  # of a product, which takes a fifth of a millisecond on an H100 or H200
_BEFORE, _BESIDE = 3, 16
# To launch copies to all ranks takes the host so much longer than the backend's kernel does (one gather, 2 H100). The
# products hide it, but where the host is the limit a step is longer by it, so the copies must save more.
_GATHER_HOST_MS: Final = 0.3
_TIMEOUT_S: Final = 60.0  # ranks have synchronised just before
IDLE_S = 30.0  # until a device that is still busy is not waited for any longer


def choose(
    group: dist.ProcessGroup,
    device: torch.device,
    mode: str,
    *,
    feature: str,
    directory: Path | None,
    allocate: AllocateWindow = allocate_window,
    communicator: dist.ProcessGroup | None = None,
) -> str:
    """Choose what moves a group's tensors from now on; a collective, unless the choice is final.

    Returns the reason why copy engines cannot be used, the same on all ranks; "" otherwise.

    All ranks call this with the same mode: ``on``, ``off`` or ``auto``, which measures on the communicator, by default
    on the group itself. The report of ``feature`` names the choice. Without a directory no measurements are kept.
    """
    if mode == "off":
        return ""
    chosen = get_choice(group, device)
    if chosen.final or group.size() == 1 or dist.get_backend(group) == "fake":
        return chosen.reason
    if is_capturing(device):
        return ""
    if mode == "auto" and (device.type != "cuda" or torch._C._current_graph_task_id() != -1):
        return ""  # in backward, as of a step there, nothing is measured
    if chosen.engine is None:
        reason = memory.unsupported_reason(group, device, reason_against) or _still_busy(group, device)
        if not reason:
            chosen.engine, reason = make_on_all(group, lambda: Engine(group, device, allocate=allocate))
        if reason:
            chosen.final, chosen.reason = True, reason
            add_report_line(feature, f"{COPIES} are not used: {reason}")
            return reason
    engine = chosen.engine
    assert engine is not None
    sums = memory.unsupported_reason(group, device, _reason_against_sums)
    if sums:
        add_report_line(feature, f"{COPIES} do not reduce gradients: {sums}")
    if mode == "on":
        chosen.gathers, chosen.scatters, chosen.final = True, not sums, True
        return ""
    choices = {}
    for what, host_ms in ({"gather": _GATHER_HOST_MS} | ({} if sums else {"reduce-scatter": 0.0})).items():
        tuning = _tuning(what, host_ms, communicator or group, engine)
        choices[what] = get_autotuner(group, device, feature, directory).tune(group, tuning, communicator or group)
        engine.failed_everywhere()  # a candidate may have failed; on some ranks only, it would have raised
    taken = [what for what, choice in choices.items() if choice.candidate == COPIES]
    chosen.gathers, chosen.scatters = "gather" in taken, "reduce-scatter" in taken
    chosen.final = all(choice.final for choice in choices.values())
    if chosen.final and not chosen.gathers and not chosen.scatters:
        chosen.engine = None  # its memory
    return ""


def reason_against(device: torch.device) -> str:
    """Return why this process cannot use copy engines, or ""."""
    if reason := memory.memory_unsupported_reason(device):
        return reason
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return "NCCL_P2P_DISABLE forbids GPUs to reach each other's memory"
    if os.environ.get("NCCL_P2P_LEVEL", "").upper() in ("LOC", "0"):
        return "NCCL_P2P_LEVEL forbids GPUs to reach each other's memory"
    return ""


def _reason_against_sums(device: torch.device) -> str:
    return triton_unavailable_reason() if device.type == "cuda" else ""


def _still_busy(group: dist.ProcessGroup, device: torch.device) -> str:
    """Wait for the GPU, which memory and measurements need idle; return why not, or "", the same on all ranks.

    What it is busy with may be a collective of the script that another rank launches after this call.
    """
    if device.type != "cuda":
        return ""
    idle = threading.Event()

    def wait() -> None:
        torch.cuda.synchronize(device)
        idle.set()

    threading.Thread(target=wait, name="ovpatch wait for device", daemon=True).start()
    limit = wait_limit_s(group, IDLE_S)
    busy = "" if idle.wait(limit) else f"{device} was still busy after {limit:g} s; a collective that is in flight?"
    return check_consistent(group, "copy engines", {}, objection=busy, timeout_s=limit + _TIMEOUT_S)


T = TypeVar("T", "Engine", "PointToPoint", "Window")


def make_on_all(group: dist.ProcessGroup, make: Callable[[], T]) -> tuple[T | None, str]:
    """Make what uses other ranks' memory on all ranks, or on none and return why not. All ranks call this."""
    made, reason = None, ""
    try:
        made = make()
    except RuntimeError as error:  # of the driver: containers may forbid processes to share memory
        reason = f"memory cannot be shared ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    reason = check_consistent(group, "copy engines", {}, objection=reason, timeout_s=_TIMEOUT_S)
    if not reason and made is not None:
        unheard = ", ".join(str(dist.get_global_rank(group, rank)) for rank in made.unheard())
        silent = f"what rank {unheard} sends does not arrive, or arrives changed" if unheard else ""
        reason = check_consistent(group, "copy engines", {}, objection=silent, timeout_s=_TIMEOUT_S)
    return (None, reason) if reason else (made, "")


def _tuning(what: str, host_ms: float, group: dist.ProcessGroup, engine: Engine) -> Tuning:
    """Return the choice of what runs a collective, ``gather`` or ``reduce-scatter``."""
    key = f"{what} of {_BYTES >> 20} MiB beside products, {group.size()} ranks"
    needs = 2 * _BYTES + 2 * (2 * _ROWS * _FEATURES + _FEATURES * _FEATURES)
    make = functools.partial(_candidates, what, group, engine)
    return Tuning(key, (BACKEND, COPIES), BACKEND, make, needs, host_ms={COPIES: host_ms})


def _candidates(what: str, group: dist.ProcessGroup, engine: Engine, generator: torch.Generator) -> Candidates:
    """Return the candidates for a collective, each beside products."""
    world, device = group.size(), generator.device
    size = _BYTES // _TENSORS // torch.float32.itemsize // world
    drawn = torch.randn(_TENSORS, world, size, generator=generator, device=device)
    wholes, parts = list(drawn.view(_TENSORS, -1)), list(drawn[:, group.rank()])
    beside = _products(generator)
    starts: dict[str, Callable[[], Sequence[Work]]]
    if what == "gather":
        by_backend = AllGather(group, device)
        starts = {BACKEND: lambda: by_backend(wholes, parts), COPIES: lambda: engine.gather(wholes, parts)}
    else:
        sums, added = [torch.empty_like(part) for part in parts], ReduceScatter(group, device)
        scatter = functools.partial(engine.scatter, average=False)
        starts = {BACKEND: lambda: added(sums, wholes), COPIES: lambda: scatter(sums, wholes)}
    return {name: functools.partial(beside, start) for name, start in starts.items()}


def _products(generator: torch.Generator) -> Callable[[Callable[[], Sequence[Work]]], None]:
    """Return a function that computes products beside collectives, and some before, while the host launches those."""
    size, device = (_ROWS + _FEATURES, _FEATURES), generator.device
    x, weight = torch.randn(size, generator=generator, dtype=torch.bfloat16, device=device).split([_ROWS, _FEATURES])
    out = torch.empty_like(x)

    def beside(start: Callable[[], Sequence[Work]]) -> None:
        for _ in range(_BEFORE):
            torch.mm(x, weight, out=out)
        works = start()
        for _ in range(_BESIDE):
            torch.mm(x, weight, out=out)
        for work in works:
            work.wait()

    return beside
