"""Symmetric memory: allocations on all ranks that the kernels of peers reach by address.

The rendezvous of torch passes handles through sockets in the directory for temporary files. The
sockets are named by process ids, and torch waits for them without limit. So ranks must have the
same directory, and see each other's process ids. :func:`unsupported_reason` checks this before.

A :class:`Workspace` is the double buffer in which the ranks of a group write to each other's
memory, with its signals and its launch order.
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

from ovpatch.overlap.comm.consensus import (
    check_consistent,
    gather_values,
    identify_host,
    join_messages,
)
from ovpatch.overlap.comm.lifetimes import group_state, outside_modes
from ovpatch.overlap.comm.streams import is_capturing

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_AGREEMENT_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Memory:
    """One allocation on every rank.

    Attributes:
        own: The memory of this rank, uint8, ``[size]``.
        addresses: The addresses of all ranks' memory in this process, by group rank.
        keeps: Keeps the memory of peers mapped.
    """

    own: Tensor
    addresses: list[int]
    keeps: Any = None


class LackingError(RuntimeError):
    """A rank has too little memory for an allocation that all ranks need."""


#: The number of symmetric allocations of this process, in all groups. torch counts them as well. If
#: the count of a rank differs from that of its peers, they wait forever
#: (https://github.com/pytorch/pytorch/issues/196082).
rendezvous_count = 0

#: Allocates a number of bytes on the ranks of a group; see :func:`allocate`.
Allocate = Callable[[int, dist.ProcessGroup, torch.device, Callable[[Tensor], object]], Memory]


def allocate(
    size: int, group: dist.ProcessGroup, device: torch.device, prepare: Callable[[Tensor], object]
) -> Memory:
    """Allocate the same number of bytes on all ranks, which call this together.

    Args:
        size: The number of bytes.
        group: The process group.
        device: The device of the memory.
        prepare: Called with this rank's memory before any peer can reach it. No rank returns before
            all ranks have called theirs.
    """
    from torch.distributed import _symmetric_memory

    global rendezvous_count
    with outside_modes():
        own = _allocate_local(size, device)
        prepare(own)
        # Peers reach the memory after the rendezvous, so the work of `prepare` must be done.
        torch.cuda.synchronize(device)
        rendezvous_count += 1
        with _without_multicast():
            handle = _symmetric_memory.rendezvous(own, group)
        addresses = [
            handle.get_buffer(rank, (size,), torch.uint8).data_ptr() for rank in range(group.size())
        ]
    return Memory(own, addresses, handle)


def allocate_on_all(
    size: int, group: dist.ProcessGroup, device: torch.device, prepare: Callable[[Tensor], object]
) -> Memory:
    """Allocate as :func:`allocate` does, but on all ranks or on none.

    In :func:`allocate`, peers would wait for a rank that cannot allocate.

    Raises:
        LackingError: A rank could not allocate. The text is the same on all ranks.
    """
    has_allocated = False

    def prepare_if_all_have_allocated(own: Tensor) -> None:
        nonlocal has_allocated
        has_allocated = True
        prepare(own)
        _agree("", group)

    try:
        return allocate(size, group, device, prepare_if_all_have_allocated)
    except RuntimeError as error:
        # torch has no error class for refusals of the driver. A rank that has allocated has already
        # joined the agreement.
        if not has_allocated:
            objection = f"{size / 2**20:.0f} MiB of symmetric memory: {str(error).splitlines()[0]}"
            _agree(objection, group)
        raise


def _agree(objection: str, group: dist.ProcessGroup) -> None:
    lacking = check_consistent(
        group, "symmetric memory", {}, objection=objection, timeout_s=_AGREEMENT_TIMEOUT_S
    )
    if lacking:
        raise LackingError(lacking)


def _allocate_local(size: int, device: torch.device) -> Tensor:
    """Allocate, and if this fails, empty torch's cache and try again.

    Symmetric memory does not come from the cache, but the cache occupies memory.
    """
    from torch.distributed import _symmetric_memory

    try:
        return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError:
        torch.cuda.empty_cache()
    return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Keep torch from binding multicast objects.

    They are not used here, and some hosts cannot create them.
    """
    before = os.environ.get(_MULTICAST_OFF)
    os.environ[_MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST_OFF]
        else:
            os.environ[_MULTICAST_OFF] = before


#: The largest number of ranks that kernels support.
MOST_RANKS: Final = 8
_HOPPER: Final = (9, 0)
# The variables of the directory for temporary files, in the order in which torch reads them.
_TMPDIR_VARIABLES: Final = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
# The name of a socket may have 107 bytes. torch adds a file name to the directory.
_MAX_TMPDIR_BYTES: Final = 90


def unsupported_reason(
    group: dist.ProcessGroup,
    device: torch.device,
    local_reason: Callable[[torch.device], str] | None = None,
    *,
    shares_devices: bool = True,
) -> str:
    """Return the reason why the ranks of a group cannot use symmetric memory, or "".

    The reason is the same on all ranks. All ranks of the group call this at the same place.

    Args:
        group: The process group.
        device: The device of this rank.
        local_reason: Returns the reason why this process cannot use it, or "". Default:
            :func:`kernels_unsupported_reason`.
        shares_devices: Whether several ranks may use one GPU. Default: True.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    facts = {
        "host": identify_host(),
        "place": _identify_socket_place(),
        "before": str(rendezvous_count),
        "uuid": uuid,
    }
    reason = (local_reason or kernels_unsupported_reason)(device)
    found = gather_values(group, "symmetric memory: places", facts | {"reason": reason})
    reasons = [
        (dist.get_global_rank(group, rank), reason)
        for rank, rank_facts in enumerate(found)
        for reason in (rank_facts["reason"], _explain_other_place(rank_facts, found[0]))
    ]
    if group.size() > MOST_RANKS:
        return f"{group.size()} ranks, and kernels are made for {MOST_RANKS} at most"
    uuids = [rank_facts["uuid"] for rank_facts in found]
    return (
        join_messages(reasons)
        or ("" if shares_devices else _explain_shared_devices(group, uuids))
        or _explain_missing_access(uuids)
    )


def memory_unsupported_reason(device: torch.device) -> str:
    """Return the reason why this process cannot use symmetric memory, or ""."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, not on CUDA devices"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return "this build of torch has no symmetric memory"
    if len(os.fsencode(_find_tmpdir())) > _MAX_TMPDIR_BYTES:
        return (
            f"TMPDIR has more than {_MAX_TMPDIR_BYTES} characters, too many for the names of "
            "torch's sockets: set a shorter TMPDIR"
        )
    return ""


def kernels_unsupported_reason(device: torch.device) -> str:
    """Return the reason why this process cannot run kernels on symmetric memory, or ""."""
    if reason := memory_unsupported_reason(device):
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability < _HOPPER:
        return "the GPU has compute capability {}.{}, and kernels need 9.0".format(*capability)
    return triton_unavailable_reason()


@functools.cache
def triton_unavailable_reason() -> str:
    """Return the reason why Triton cannot run kernels here, with the remedy, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton, in the version that this torch names"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, which interprets kernels and is for tests: unset it"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return (
            "Triton finds no C compiler for its launchers: install gcc or clang, or set CC to one"
        )
    return ""


def _explain_other_place(facts: dict[str, str], first: dict[str, str]) -> str:
    """Return the reason why a rank and rank 0 cannot share memory, or ""."""
    if facts["host"] != first["host"]:
        return "it runs on another host than rank 0"
    if facts["place"] != first["place"]:
        return "it runs in another container than rank 0, or with another TMPDIR"
    if facts["before"] != first["before"]:
        return "it has shared memory another number of times than rank 0, in other groups"
    return ""


def _find_tmpdir() -> str:
    return next((os.environ[name] for name in _TMPDIR_VARIABLES if name in os.environ), "/tmp")


def _identify_socket_place() -> str:
    """Return an identifier of the namespace of process ids and the directory of torch's sockets."""
    folder = _find_tmpdir()
    # Containers may have equal paths, so the inode identifies the directory.
    namespace = Path("/proc/self/ns/pid")
    found = os.stat(folder) if os.path.isdir(folder) else None
    inode = f"{found.st_dev}:{found.st_ino}" if found is not None else ""
    return f"{os.readlink(namespace) if namespace.exists() else ''} {folder} {inode}"


def _explain_shared_devices(group: dist.ProcessGroup, uuids: list[str]) -> str:
    """Return the ranks that share a GPU, as a reason, or ""."""
    for uuid in dict.fromkeys(uuids):
        ranks = [
            str(dist.get_global_rank(group, rank)) for rank, own in enumerate(uuids) if own == uuid
        ]
        if len(ranks) > 1 and uuid:
            return f"ranks {', '.join(ranks)} share a GPU"
    return ""


def _explain_missing_access(uuids: list[str]) -> str:
    """Return two visible devices that cannot reach each other, as a reason, or ""."""
    visible = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    for reader in uuids:
        for owner in uuids:
            # This process cannot query devices that it does not see.
            if reader == owner or reader not in visible or owner not in visible:
                continue
            if not torch.cuda.can_device_access_peer(visible[reader], visible[owner]):
                return f"GPU {reader} cannot reach the memory of GPU {owner}"
    return ""


#: Bytes of signals before the halves.
HEADER: Final = 1024
# The smallest number of bytes that devices map.
_GRAIN: Final = 2 * 1024 * 1024
# Numbers in `Workspace.state`.
_STATE_NUMEL: Final = 8
_MIN_COUNTS: Final = 16384


class Scratch:
    """Scratch memory for kernels of one device that never run concurrently.

    It is an allocator for ``triton.set_allocator``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # All allocations, the largest last. Streams or graphs may still use the smaller ones.
        self._allocations: list[Tensor] = []
        self._size = 0

    def __call__(self, size: int, alignment: int, stream: int | None) -> Tensor:
        """Return memory for a kernel on a stream.

        The allocations of torch satisfy any alignment that Triton requests.
        """
        if size <= self._size:
            return self._allocations[-1]
        with outside_modes():
            scratch = torch.empty(size, dtype=torch.int8, device=self._device)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The memory belongs to the graph, so no other kernel may use it.
            return scratch
        self._allocations.append(scratch)
        self._size = size
        return scratch


class Workspace:
    """The symmetric memory of one group, which operators use sequentially.

    See [Note: sequence numbers].

    Attributes:
        group: The process group.
        device: The device of the memory.
        world: Number of ranks.
        rank: The rank of this process in the group.
        half_bytes: The bytes of a half of the buffer.
        peers: The addresses of all ranks' memory, int64, ``[world]``.
        state: The number of the next operator and counts of programs, int64. Only the kernels of
            this rank see it.
        counts: Counts of arrived tiles, int32. Only the kernels of this rank see them.
        kept: Values of operators, by key, which are dropped if sizes or addresses change.
        scratch: Allocates memory for the descriptors of kernels.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, make_memory: Allocate | None = None
    ) -> None:
        """Prepare a workspace without memory.

        Args:
            group: The process group.
            device: The device of the memory.
            make_memory: Allocates the memory. Default: :func:`allocate`.
        """
        self.group = group
        self.device = device
        self.world = group.size()
        self.rank = group.rank()
        self._allocate = make_memory or allocate
        self.half_bytes = 0
        with outside_modes():
            self.peers = torch.empty(0, dtype=torch.int64, device=device)
            self.state = self.peers
            self.counts = torch.empty(0, dtype=torch.int32, device=device)
        self.kept: dict[Any, Any] = {}
        self.scratch = Scratch(device)
        self._memory: Memory | None = None
        # Whether a graph has captured the present memory.
        self._is_captured = False
        # Memory that was replaced after a graph had captured it.
        self._outgrown: list[tuple[Memory | None, Tensor, Tensor, Tensor]] = []

    def begin_operator(self, half_bytes: int, counts: int) -> bool:
        """Prepare for an operator on the current stream; all ranks call this with the same sizes.

        Args:
            half_bytes: The bytes of a half that the operator needs.
            counts: The number of counts that it needs.

        Returns:
            Whether the operator can run. During the capture of a graph, memory for all ranks cannot
            be allocated.
        """
        capturing = is_capturing(self.device)
        if half_bytes > self.half_bytes or counts > self.counts.numel():
            if capturing:
                return False
            self._grow(half_bytes, counts)
        self._is_captured |= capturing
        take_turn(self.device, capturing)
        return True

    def _grow(self, half_bytes: int, counts: int) -> None:
        """Replace the memory on all ranks together, after the operators in flight.

        Memory that a graph has captured remains, with its own signals, while the group exists.
        """
        # The replaced memory exists until the end of this method at least.
        old = (self._memory, self.peers, self.state, self.counts)
        if self._is_captured:
            self._outgrown.append(old)
        self.kept.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.half_bytes = max(-(-half_bytes // _GRAIN) * _GRAIN, self.half_bytes)
        size = HEADER + 2 * self.half_bytes
        # Signals begin at zero, and no peer may write one before.
        self._memory = self._allocate(
            size, self.group, self.device, lambda own: own[:HEADER].zero_()
        )
        # Counts take few bytes, and too few counts would mean that all memory is replaced.
        count = max(1 << (max(counts, len(self.counts)) - 1).bit_length(), _MIN_COUNTS)
        with outside_modes():
            self.peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=self.device)
            self.state = torch.zeros(_STATE_NUMEL, dtype=torch.int64, device=self.device)
            # The signals of no operator are zero, so the first operator has number 1.
            self.state[0] = 1
            self.counts = torch.zeros(count, dtype=torch.int32, device=self.device)
        self._is_captured = False


# The last stream that launched such kernels, with its handle, by device and whether it captures.
_last: dict[tuple[int | None, bool], tuple[int, torch.cuda.Stream]] = {}


def take_turn(device: torch.device, capturing: bool) -> None:
    """Let the current stream wait for the kernels that other streams have launched before.

    [Note: one at a time] A kernel that fills a device and waits for its peers deadlocks if one of
    them is queued after another such kernel, which waits in turn. So every device runs these
    kernels in launch order, whatever their streams and groups, and hosts launch them in the same
    order on all ranks. Inside a CUDA graph they are ordered among themselves. The script orders a
    replay against other streams, as for any graph.

    Args:
        device: The device.
        capturing: Whether the current stream is being captured.
    """
    if device.type != "cuda":
        return
    # This call is much faster than the creation of a stream object.
    handle = torch._C._cuda_getCurrentRawStream(device.index)
    before = _last.get((device.index, capturing))
    if before is not None and before[0] == handle:
        return
    current = torch.cuda.current_stream(device)
    # A stream that is being captured cannot wait for a stream outside of the capture.
    if before is not None and (not capturing or _is_capturing(before[1])):
        current.wait_stream(before[1])
    _last[device.index, capturing] = handle, current


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def get_workspace(group: dist.ProcessGroup, device: torch.device) -> Workspace:
    """Return the workspace of a group on a device, created by the first call.

    It is dropped when the group is destroyed.
    """
    state, key = group_state(group), (Workspace, device)
    # Every operator calls this function, and a read of the dictionary takes fewer calls than get_or_create().
    workspace: Workspace | None = state.values.get(key)
    if workspace is None:
        workspace = state.get_or_create(key, lambda: Workspace(group, device), keeps_group=True)
    return workspace
