"""The choice between copy engines and the backend's kernels, measured concurrently with GEMMs."""

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
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch.overlap.kernels.autotuner import Candidates, Tuning, add_report_line, get_autotuner
from ovpatch.overlap.kernels.copy_collectives import Engine
from ovpatch.overlap.kernels.copy_window import SLOT_BYTES, AllocateWindow, allocate_window
from ovpatch.overlap.kernels.symmetric_memory import triton_unavailable_reason

if TYPE_CHECKING:
    from ovpatch.overlap.kernels.copy_messages import PointToPoint
    from ovpatch.overlap.kernels.copy_window import Window

_log = logging.getLogger("ovpatch.copies")


@dataclass
class Chosen:
    """The choice for a group on a device.

    Attributes:
        engine: The engine, or None if there is none.
        gathers: Whether the engine runs all-gathers.
        scatters: Whether the engine runs reduce-scatters.
        final: Whether the choice holds for all later calls.
        reason: The reason why there can be no engine, or "".
        is_for_rows: Whether :func:`find_row_engine` has created it.
    """

    engine: Engine | None = None
    gathers: bool = False
    scatters: bool = False
    final: bool = False
    reason: str = ""
    is_for_rows: bool = False


_NONE: Final = Chosen()
#: The first part of the key of a group's engine for rows; see :func:`find_row_engine`.
ROW_ENGINE: Final = "row engine"


def get_choice(group: dist.ProcessGroup, device: torch.device) -> Chosen:
    """Return the choice for a group on a device. It is empty until :func:`choose` fills it."""
    register_at_exit(_at_exit)
    # `comm` imports no copy engines, so it learns of them here.
    collectives.set_transports(collectives.Transports(find_gatherer, find_scatterer, attend, abort))
    return group_state(group).get_or_create((Chosen, device), Chosen)


def find_gatherer(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return the engine that runs all-gathers instead of the group's backend, or None."""
    found = _find_usable(group, device)
    return found.engine if found.gathers else None


def find_scatterer(group: dist.ProcessGroup, device: torch.device) -> Engine | None:
    """Return the engine that runs reduce-scatters instead of the group's backend, or None."""
    found = _find_usable(group, device)
    return found.engine if found.scatters else None


def _find_usable(group: dist.ProcessGroup, device: torch.device) -> Chosen:
    found: Chosen = group_state(group).values.get((Chosen, device), _NONE)
    # A replayed graph would use the halves in another order than eager calls.
    return _NONE if found.engine is None or is_capturing(device) else found


def finish(group: dist.ProcessGroup | None = None) -> None:
    """Let the host wait for copies in flight, so that the peers of this rank complete theirs.

    It waits at most for a group's timeout, because streams wait forever for a dead rank.

    Args:
        group: The group; None for all groups. Default: None.
    """
    _end_copies(group, lambda engine, timeout_s: engine.drain(timeout_s))


def abort(group: dist.ProcessGroup) -> None:
    """End a group's copies in flight for which ranks are missing, and refuse later calls."""
    _end_copies(group, lambda engine, timeout_s: engine.abort(timeout_s))


def _end_copies(group: dist.ProcessGroup | None, end: Callable[[Engine, float], bool]) -> None:
    """End the copies of engines, and abandon an engine whose copies do not complete in time."""
    for engine_group, chosen in group_values(Chosen, group):
        timeout_s = group_timeout_s(engine_group)
        if chosen.engine is not None and not end(chosen.engine, timeout_s):
            _log.warning(_WARNING_LATE, timeout_s)
            _stuck.append(chosen.engine)
            chosen.engine = None


def forget(group: dist.ProcessGroup | None = None) -> None:
    """Return groups to their backends, and free the memory once the copies in flight have ended.

    Args:
        group: The group; None for all groups. Default: None.
    """
    finish(group)
    drop_values(Chosen, group)
    if not group_values(Chosen):
        collectives.set_transports(None)


def _at_exit() -> None:
    # After an error, peers may never complete their copies.
    if not is_exiting_by_error():
        finish()


# Abandoned engines. To free their memory would wait for their streams, so it is never freed.
_stuck: list[Engine] = []

_WARNING_LATE: Final = (
    "copies between ranks have not ended within %g s, so this rank stops waiting. A peer may have "
    "died: look for the first error in the output of all ranks"
)


def attend(
    group: dist.ProcessGroup, device: torch.device, communicator: dist.ProcessGroup | None = None
) -> None:
    """Issue a collective of one number after the copies of a backward or step, if there are any.

    A stream that waits for a missing rank is no work of the backend, so the backend's watchdog
    would not end the job. A collective that does not complete makes the watchdog end it. All ranks
    call this.

    Args:
        group: The group of the copies.
        device: The device of the copies.
        communicator: The group that runs the collective. Default: ``group``.
    """
    engine = find_scatterer(group, device) or find_gatherer(group, device)
    if engine is None:
        return
    with engine.behind():
        work = (communicator or group).allreduce([engine.number])
    if device.type != "cuda":
        # The threads of gloo do not survive the interpreter.
        work.wait()


# --- the choice ---


BACKEND: Final = "the backend's collectives"
COPIES: Final = "copy engines"

# - The measurement. In a step, a forward takes longer than its all-gathers, and a backward longer
#   than its reduce-scatters. So the cost of a collective is the time by which it slows GEMMs down,
#   and a candidate computes about twice as long as it communicates. Its GEMMs are short, because a
#   kernel that waits for multiprocessors waits for the end of a GEMM.

# Bytes of a collective, which takes a millisecond or two, and the number of its tensors.
_COLLECTIVE_BYTES: Final = 512 * 1024 * 1024
_NUM_TENSORS: Final = 32
# The size of a GEMM, which takes a fifth of a millisecond on an H100 or H200.
_ROWS: Final = 4096
_FEATURES: Final = 4096
# Number of GEMMs that start before a collective, and of those that run concurrently with it.
_GEMMS_BEFORE: Final = 3
_GEMMS_DURING: Final = 16
# The launch of copies to all ranks takes the host this much longer than the launch of the backend's
# kernel (one gather, 2 H100). GEMMs hide it here. In a step that is limited by the host they do
# not, so copies must save more than this.
_GATHER_HOST_MS: Final = 0.3
# Ranks have synchronized just before they agree, so a minute suffices.
_AGREEMENT_TIMEOUT_S: Final = 60.0
#: Seconds after which a device that is still busy is given up.
IDLE_S = 30.0


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
    """Choose between copy engines and the backend for a group.

    It is a collective until the choice is final.

    Args:
        group: The group.
        device: The device of its tensors.
        mode: ``on``, ``off``, or ``auto``, which measures. It is the same on all ranks.
        feature: The feature whose report names the choice.
        directory: The directory of stored measurements; None stores none.
        allocate: Allocates the engine's memory on all ranks.
        communicator: The group that exchanges measurements. Default: ``group``.

    Returns:
        The reason why copy engines cannot be used, the same on all ranks, or "".
    """
    if mode == "off":
        return ""
    chosen = get_choice(group, device)
    if chosen.final or group.size() == 1 or dist.get_backend(group) == "fake":
        return chosen.reason
    if is_capturing(device):
        return ""
    if mode == "auto" and (device.type != "cuda" or torch._C._current_graph_task_id() != -1):
        # Nothing is measured during a backward, for example for a step in a parameter hook.
        return ""
    if chosen.engine is None:
        chosen.engine, reason = make_engine(group, device, allocate=allocate)
        if reason:
            chosen.final = True
            chosen.reason = reason
            add_report_line(feature, f"{COPIES} are not used: {reason}")
            return reason
    engine = chosen.engine
    assert engine is not None
    sums = memory.unsupported_reason(group, device, _explain_missing_sums)
    if sums:
        add_report_line(feature, f"{COPIES} do not reduce gradients: {sums}")
    if mode == "on":
        chosen.gathers = True
        chosen.scatters = not sums
        chosen.final = True
        return ""
    choices = {}
    for what, host_ms in (
        {"gather": _GATHER_HOST_MS} | ({} if sums else {"reduce-scatter": 0.0})
    ).items():
        tuning = _make_tuning(what, host_ms, communicator or group, engine)
        choices[what] = get_autotuner(group, device, feature, directory).tune(
            group, tuning, communicator or group
        )
    taken = [what for what, choice in choices.items() if choice.candidate == COPIES]
    chosen.gathers = "gather" in taken
    chosen.scatters = "reduce-scatter" in taken
    chosen.final = all(choice.final for choice in choices.values())
    if chosen.final and not chosen.gathers and not chosen.scatters:
        # Free the memory of the engine.
        chosen.engine = None
    return ""


def make_engine(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    slot_bytes: int = SLOT_BYTES,
    allocate: AllocateWindow = allocate_window,
) -> tuple[Engine | None, str]:
    """Create an engine on all ranks or on none, which call this together.

    Returns:
        The engine and "", or None and the reason, which is the same on all ranks.
    """
    reason = memory.unsupported_reason(group, device, reason_against) or _wait_until_idle(
        group, device
    )
    if reason:
        return None, reason
    return make_on_all(
        group, lambda: Engine(group, device, allocate=allocate, slot_bytes=slot_bytes)
    )


def find_row_engine(
    group: dist.ProcessGroup,
    device: torch.device,
    slot_bytes: int,
    *,
    allocate: AllocateWindow = allocate_window,
) -> Chosen:
    """Return a group's engine for rows of matrices, which no measurement chooses.

    The first call is a collective. It is another engine than that of :func:`choose`, because the
    halves of an engine belong to one order of calls.
    """
    register_at_exit(_at_exit)

    def make() -> Chosen:
        engine, reason = make_engine(group, device, slot_bytes=slot_bytes, allocate=allocate)
        if engine is not None:
            sums = memory.unsupported_reason(group, device, _explain_missing_sums)
            engine, reason = (None, sums) if sums else (engine, "")
        return Chosen(engine, final=True, reason=reason, is_for_rows=True)

    return group_state(group).get_or_create((ROW_ENGINE, device), make)


def list_row_objections() -> list[str]:
    """Return the reasons for which groups have no engine for rows."""
    return sorted({found.reason for _, found in group_values(Chosen) if found.is_for_rows} - {""})


def reason_against(device: torch.device) -> str:
    """Return the reason why this process cannot use copy engines, or ""."""
    if reason := memory.memory_unsupported_reason(device):
        return reason
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return "NCCL_P2P_DISABLE forbids GPUs to reach each other's memory"
    if os.environ.get("NCCL_P2P_LEVEL", "").upper() in ("LOC", "0"):
        return "NCCL_P2P_LEVEL forbids GPUs to reach each other's memory"
    return ""


def _explain_missing_sums(device: torch.device) -> str:
    return triton_unavailable_reason() if device.type == "cuda" else ""


def _wait_until_idle(group: dist.ProcessGroup, device: torch.device) -> str:
    """Wait until the GPU is idle, as allocations and measurements need it.

    The GPU may be running a collective of the script that a peer launches only after this call. So
    a thread waits, and only for a limited time.

    Returns:
        The reason why a GPU is still busy, the same on all ranks, or "".
    """
    if device.type != "cuda":
        return ""
    idle = threading.Event()

    def wait() -> None:
        torch.cuda.synchronize(device)
        idle.set()

    threading.Thread(target=wait, name="ovpatch wait for device", daemon=True).start()
    limit = wait_limit_s(group, IDLE_S)
    busy = ""
    if not idle.wait(limit):
        busy = f"{device} was still busy after {limit:g} s; a collective that is in flight?"
    timeout_s = limit + _AGREEMENT_TIMEOUT_S
    return check_consistent(group, "copy engines", {}, objection=busy, timeout_s=timeout_s)


T = TypeVar("T", "Engine", "PointToPoint", "Window")


def make_on_all(group: dist.ProcessGroup, make: Callable[[], T]) -> tuple[T | None, str]:
    """Create an object that uses the memory of other ranks, on all ranks or on none.

    Args:
        group: The group, all of whose ranks call this.
        make: Creates the object.

    Returns:
        The object and "", or None and the reason, which is the same on all ranks.
    """
    created = None
    reason = ""
    try:
        created = make()
    except RuntimeError as error:
        # The driver refuses it, for example because a container forbids processes to share memory.
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = f"memory cannot be shared ({first_line})"
    reason = check_consistent(
        group, "copy engines", {}, objection=reason, timeout_s=_AGREEMENT_TIMEOUT_S
    )
    if not reason and created is not None:
        # All ranks have created theirs, so each can try the memory of its peers.
        unheard = ", ".join(str(dist.get_global_rank(group, rank)) for rank in created.unheard())
        silent = f"data from rank {unheard} does not arrive, or arrives changed" if unheard else ""
        reason = check_consistent(
            group, "copy engines", {}, objection=silent, timeout_s=_AGREEMENT_TIMEOUT_S
        )
    return (None, reason) if reason else (created, "")


def _make_tuning(what: str, host_ms: float, group: dist.ProcessGroup, engine: Engine) -> Tuning:
    """Return the candidates that may run a collective, ``gather`` or ``reduce-scatter``."""
    # Stored measurements are found by this key.
    key = f"{what} of {_COLLECTIVE_BYTES >> 20} MiB beside products, {group.size()} ranks"
    needs = 2 * _COLLECTIVE_BYTES + 2 * (2 * _ROWS * _FEATURES + _FEATURES * _FEATURES)
    make = functools.partial(_make_candidates, what, group, engine)
    return Tuning(
        key,
        (BACKEND, COPIES),
        BACKEND,
        make,
        needs,
        host_ms={COPIES: host_ms},
        recover=engine.failed_everywhere,
    )


def _make_candidates(
    what: str, group: dist.ProcessGroup, engine: Engine, generator: torch.Generator
) -> Candidates:
    """Return the candidates for a collective. Each runs it concurrently with GEMMs."""
    world, device = group.size(), generator.device
    size = _COLLECTIVE_BYTES // _NUM_TENSORS // torch.float32.itemsize // world
    drawn = torch.randn(_NUM_TENSORS, world, size, generator=generator, device=device)
    inputs, parts = list(drawn.view(_NUM_TENSORS, -1)), list(drawn[:, group.rank()])
    run_with_gemms = _make_gemms(generator)
    starts: dict[str, Callable[[], Sequence[Work]]]
    if what == "gather":
        by_backend = AllGather(group, device)
        starts = {
            BACKEND: lambda: by_backend(inputs, parts),
            COPIES: lambda: engine.gather(inputs, parts),
        }
    else:
        sums, added = [torch.empty_like(part) for part in parts], ReduceScatter(group, device)
        scatter = functools.partial(engine.scatter, average=False)
        starts = {BACKEND: lambda: added(sums, inputs), COPIES: lambda: scatter(sums, inputs)}
    return {name: functools.partial(run_with_gemms, start) for name, start in starts.items()}


def _make_gemms(generator: torch.Generator) -> Callable[[Callable[[], Sequence[Work]]], None]:
    """Return a function that runs GEMMs concurrently with collectives.

    Some GEMMs start before, so that the GPU is busy while the host launches the collectives.
    """
    size, device = (_ROWS + _FEATURES, _FEATURES), generator.device
    x, weight = torch.randn(size, generator=generator, dtype=torch.bfloat16, device=device).split(
        [_ROWS, _FEATURES]
    )
    out = torch.empty_like(x)

    def run_with_gemms(start: Callable[[], Sequence[Work]]) -> None:
        for _ in range(_GEMMS_BEFORE):
            torch.mm(x, weight, out=out)
        works = start()
        for _ in range(_GEMMS_DURING):
            torch.mm(x, weight, out=out)
        for work in works:
            work.wait()

    return run_with_gemms
