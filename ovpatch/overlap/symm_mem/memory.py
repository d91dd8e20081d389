"""Symmetric memory: allocations on all ranks that the other ranks' kernels reach by address, and whether they can.

Torch's rendezvous passes handles through sockets in the directory for temporary files, named by process ids, and waits
for them without end. So ranks must have the same directory, and see each other's process ids.

A :class:`Workspace` is the double buffer in which the ranks of a group write to each other's memory, with its signals
and its launch order.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.consensus import check_consistent, gather_values, identify_host, join_messages
from ovpatch.overlap.comm.lifetimes import group_state, outside_modes
from ovpatch.overlap.comm.streams import is_capturing

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Memory:
    """One allocation on every rank."""

    own: Tensor  # this rank's memory, uint8, ``[size]``
    addresses: list[int]  # addresses of all ranks' memory in this process, by group rank
    keeps: Any = None  # keeps the peers' memory mapped


class LackingError(RuntimeError):
    """A rank has too little memory for an allocation that all ranks need."""


# Symmetric allocations of this process, in all groups together. Torch counts them, too, and a rank with another count
# than the rest of a group leaves them waiting for ever (https://github.com/pytorch/pytorch/issues/196082).
rendezvous_count = 0

Allocate = Callable[[int, dist.ProcessGroup, torch.device, Callable[[Tensor], object]], Memory]


def allocate(size: int, group: dist.ProcessGroup, device: torch.device, prepare: Callable[[Tensor], object]) -> Memory:
    """Allocate the same number of bytes on all ranks, which call this together.

    ``prepare`` is called with this rank's memory before any peer can reach it; no rank returns before all have
    prepared.
    """
    from torch.distributed import _symmetric_memory

    global rendezvous_count
    with outside_modes():
        own = _empty(size, device)
        prepare(own)
        torch.cuda.synchronize(device)
        rendezvous_count += 1
        with _without_multicast():
            handle = _symmetric_memory.rendezvous(own, group)
        addresses = [handle.get_buffer(rank, (size,), torch.uint8).data_ptr() for rank in range(group.size())]
    return Memory(own, addresses, handle)


def allocate_on_all(
    size: int, group: dist.ProcessGroup, device: torch.device, prepare: Callable[[Tensor], object]
) -> Memory:
    """As :func:`allocate`, but on all ranks or on none: there, peers would wait for a rank that cannot allocate.

    LackingError, with the same text on all ranks, if one could not allocate.
    """
    found = False

    def prepare_if_all_have(own: Tensor) -> None:
        nonlocal found
        found = True
        prepare(own)
        _agree("", group)

    try:
        return allocate(size, group, device, prepare_if_all_have)
    except RuntimeError as error:  # torch has no error class of its own for refusals of the driver
        if not found:
            _agree(f"{size / 2**20:.0f} MiB of symmetric memory: {str(error).splitlines()[0]}", group)
        raise


def _agree(objection: str, group: dist.ProcessGroup) -> None:
    lacking = check_consistent(group, "symmetric memory", {}, objection=objection, timeout_s=_PATIENCE_S)
    if lacking:
        raise LackingError(lacking)


def _empty(size: int, device: torch.device) -> Tensor:
    """Allocate; if that fails, empty torch's cache first, which symmetric memory does not come from."""
    from torch.distributed import _symmetric_memory

    try:
        return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError:
        torch.cuda.empty_cache()
    return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Keep torch from binding multicast objects, which are not used here and which some hosts cannot make."""
    before = os.environ.get(_MULTICAST_OFF)
    os.environ[_MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST_OFF]
        else:
            os.environ[_MULTICAST_OFF] = before


MOST_RANKS: Final = 8
_HOPPER: Final = (9, 0)
_TEMPORARY: Final = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # in the order in which torch looks at them
_LONGEST: Final = 90  # of the 107 characters that a socket's name may have


def unsupported_reason(
    group: dist.ProcessGroup,
    device: torch.device,
    local_reason: Callable[[torch.device], str] | None = None,
    *,
    shares_devices: bool = True,
) -> str:
    """Return why the ranks of a group cannot use symmetric memory, the same text on all of them, or "".

    Every rank of the group calls this at the same place. ``local_reason`` tells why this process cannot use it, by
    default :func:`kernels_unsupported_reason`; ``shares_devices`` whether ranks may have one GPU together.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    facts = {"host": identify_host(), "place": _place(), "before": str(rendezvous_count), "uuid": uuid}
    reason = (local_reason or kernels_unsupported_reason)(device)
    found = gather_values(group, "symmetric memory: places", facts | {"reason": reason})
    reasons = [
        (dist.get_global_rank(group, rank), reason)
        for rank, told in enumerate(found)
        for reason in (told["reason"], _elsewhere(told, found[0]))
    ]
    if group.size() > MOST_RANKS:
        return f"{group.size()} ranks, and kernels are made for {MOST_RANKS} at most"
    uuids = [told["uuid"] for told in found]
    return join_messages(reasons) or ("" if shares_devices else _shared(group, uuids)) or _without_access(uuids)


def memory_unsupported_reason(device: torch.device) -> str:
    """Return why this process cannot use symmetric memory at all, or ""."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, not on CUDA devices"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return "this build of torch has no symmetric memory"
    if len(os.fsencode(_folder())) > _LONGEST:
        return (
            f"TMPDIR has more than {_LONGEST} characters, with which torch cannot name its sockets: set a shorter one"
        )
    return ""


def kernels_unsupported_reason(device: torch.device) -> str:
    """Return why this process cannot use kernels on symmetric memory, or ""."""
    if reason := memory_unsupported_reason(device):
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability < _HOPPER:
        return "the GPU has compute capability {}.{}, and kernels need 9.0".format(*capability)
    return triton_unavailable_reason()


@functools.cache
def triton_unavailable_reason() -> str:
    """Return why Triton's kernels cannot run in this process, with the remedy, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton, in the version that this torch names"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, which interprets kernels and is for tests: unset it"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler for its launchers: install gcc or clang, or set CC to one"
    return ""


def _elsewhere(told: dict[str, str], first: dict[str, str]) -> str:
    """Return the reason why a rank and rank 0 cannot share memory, or ""."""
    if told["host"] != first["host"]:
        return "it runs on another host than rank 0"
    if told["place"] != first["place"]:
        return "it runs in another container than rank 0, or with another TMPDIR"
    differs = told["before"] != first["before"]
    return "it has shared memory another number of times than rank 0, in other groups" if differs else ""


def _folder() -> str:
    return next((os.environ[name] for name in _TEMPORARY if name in os.environ), "/tmp")


def _place() -> str:
    """Return an identifier of the place where torch's sockets are."""
    folder = _folder()
    namespace = Path("/proc/self/ns/pid")
    found = os.stat(folder) if os.path.isdir(folder) else None
    inode = f"{found.st_dev}:{found.st_ino}" if found is not None else ""
    return f"{os.readlink(namespace) if namespace.exists() else ''} {folder} {inode}"


def _shared(group: dist.ProcessGroup, uuids: list[str]) -> str:
    """Return which ranks have one device together, or ""."""
    for uuid in dict.fromkeys(uuids):
        ranks = [str(dist.get_global_rank(group, rank)) for rank, own in enumerate(uuids) if own == uuid]
        if len(ranks) > 1 and uuid:
            return f"ranks {', '.join(ranks)} share a GPU"
    return ""


def _without_access(uuids: list[str]) -> str:
    """Return which devices cannot reach each other, among those that this process sees."""
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for one in uuids:
        for other in uuids:
            if one == other or one not in seen or other not in seen:
                continue
            if not torch.cuda.can_device_access_peer(seen[one], seen[other]):
                return f"GPU {one} cannot reach the memory of GPU {other}"
    return ""


HEADER: Final = 1024  # bytes of signals in front of the halves
_GRAIN: Final = 2 * 1024 * 1024  # bytes: the smallest unit that devices map
_STATE: Final = 8
_MIN_COUNTS: Final = 16384


class Scratch:
    """Scratch memory for kernels of one device that never run at the same time; for ``triton.set_allocator``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[Tensor] = []
        self._size = 0

    def __call__(self, size: int, alignment: int, stream: int | None) -> Tensor:
        """Return memory for a kernel on a stream; torch's allocations are aligned well enough for any alignment."""
        if size <= self._size:
            return self._made[-1]
        with outside_modes():
            made = torch.empty(size, dtype=torch.int8, device=self._device)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return made  # it belongs to the graph
        self._made.append(made)  # smaller ones may still be in use, by any stream or graph
        self._size = size
        return made


class Workspace:
    """The symmetric memory of one group, which operators use in turn; see [Note: sequence numbers].

    ``make_memory`` makes the memory, as :func:`allocate` does. ``peers`` are the addresses of all ranks' memory,
    int64, ``[world]``. ``state`` is the number of the next operator and counts of programs, int64; only this rank's
    kernels see it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, make_memory: Allocate | None = None) -> None:
        self.group, self.device, self.world, self.rank = group, device, group.size(), group.rank()
        self._allocate = make_memory or allocate
        self.half_bytes = 0
        with outside_modes():
            self.peers = self.state = torch.empty(0, dtype=torch.int64, device=device)
            # Counts of arrived tiles, int32; only this rank's kernels see them.
            self.counts = torch.empty(0, dtype=torch.int32, device=device)
        self.kept: dict[Any, Any] = {}  # what operators keep, by key, while sizes and addresses stay the same
        self.scratch = Scratch(device)  # makes memory for descriptors of its kernels
        self._memory: Memory | None = None
        self._captured = False
        self._outgrown: list[tuple[Memory | None, Tensor, Tensor, Tensor]] = []

    def begin_operator(self, half_bytes: int, counts: int) -> bool:
        """Prepare for an operator on the current stream; all ranks call this with the same sizes.

        Returns whether it can run: memory for all ranks cannot be made under graph capture.
        """
        capturing = is_capturing(self.device)
        if half_bytes > self.half_bytes or counts > self.counts.numel():
            if capturing:
                return False
            self._grow(half_bytes, counts)
        self._captured |= capturing
        take_turn(self.device, capturing)
        return True

    def _grow(self, half_bytes: int, counts: int) -> None:
        """Replace the memory on all ranks at once, after the operators in flight.

        Memory that a graph has captured stays, with signals of its own, for as long as the group lives.
        """
        kept = (self._memory, self.peers, self.state, self.counts)
        if self._captured:
            self._outgrown.append(kept)
        self.kept.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.half_bytes = max(-(-half_bytes // _GRAIN) * _GRAIN, self.half_bytes)
        size = HEADER + 2 * self.half_bytes
        self._memory = self._allocate(size, self.group, self.device, lambda own: own[:HEADER].zero_())
        # They take few bytes, and too few mean that all memory is made again.
        count = max(1 << (max(counts, self.counts.shape[0]) - 1).bit_length(), _MIN_COUNTS)
        with outside_modes():
            self.peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=self.device)
            self.state = torch.zeros(_STATE, dtype=torch.int64, device=self.device)
            self.state[0] = 1
            self.counts = torch.zeros(count, dtype=torch.int32, device=self.device)
        self._captured = False


_last: dict[tuple[int | None, bool], tuple[int, torch.cuda.Stream]] = {}


def take_turn(device: torch.device, capturing: bool) -> None:
    """Make the current stream wait for the kernels that were launched before on other streams.

    [Note: one at a time] A kernel that fills a device and waits for its peers deadlocks if one of them is queued behind
    another such kernel that waits in turn. Hosts launch these kernels in the same order on all ranks, so every device
    runs them in launch order, whatever their streams and groups. Inside a CUDA graph they are ordered among themselves;
    a replay is ordered against other streams by the script, as for any graph.
    """
    if device.type != "cuda":
        return
    handle = torch._C._cuda_getCurrentRawStream(device.index)  # much faster than making a stream object
    before = _last.get((device.index, capturing))
    if before is not None and before[0] == handle:
        return
    current = torch.cuda.current_stream(device)
    if before is not None and (not capturing or _is_capturing(before[1])):
        current.wait_stream(before[1])
    _last[device.index, capturing] = handle, current


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def get_workspace(group: dist.ProcessGroup, device: torch.device) -> Workspace:
    """Return the workspace of a group on a device; made once, and dropped when the group is destroyed."""
    return group_state(group).get_or_create((Workspace, device), lambda: Workspace(group, device), keeps_group=True)
