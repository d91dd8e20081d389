"""Split-phase, differentiable all-to-alls: launch and wait are separate calls, in forward and backward.

The rows of several chunks are stored in one buffer, so that splitting and joining them copies nothing.
On one host the rows may go through memory that the ranks share, by one kernel of a few programs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ovpatch.hookspecs import note_failures, refuse_option
from ovpatch.overlap.autograd import apply_function
from ovpatch.overlap.comm.collectives import WorkGroup
from ovpatch.overlap.comm.lifetimes import group_state, outside_modes
from ovpatch.overlap.comm.streams import profiler_label, profiler_span
from ovpatch.overlap.kernels import symmetric_memory as memory
from ovpatch_plugins.pipe_experts.pipe_experts_options import OPTIONS, MoEConfig
from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS

if TYPE_CHECKING:
    from ovpatch.overlap.kernels.workspace_kernels import Prepared


@dataclass(frozen=True)
class CollectiveAllToAll:
    """torch.distributed's own all-to-all; all ranks start the same all-to-alls in the same order.

    Attributes:
        group: The ranks.
    """

    group: dist.ProcessGroup

    def start_transfer(
        self,
        output: Tensor,
        rows: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> WorkGroup:
        """Start to send rows and return the work to wait for.

        Args:
            output: Memory for the received rows, by rank, ``[sum(output_splits), h]``, contiguous.
            rows: The rows to send, by destination rank, ``[sum(input_splits), h]``, contiguous.
            output_splits: Number of rows from each rank.
            input_splits: Number of rows to each rank.
        """
        with profiler_span(profiler_label("pipe_experts", "all_to_all")):
            work = dist.all_to_all_single(
                output,
                rows,
                list(output_splits),
                list(input_splits),
                group=self.group,
                async_op=True,
            )
        return WorkGroup((work,), (rows,))


Allocator = Callable[[Tensor], Tensor]
"""A function that returns memory for received rows, ``[n, h]``, of the dtype and device of a tensor."""


def start_all_to_all(
    rows: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: dist.ProcessGroup,
    *,
    allocate: Allocator | None = None,
    allocate_grad: Allocator | None = None,
) -> PendingRows:
    """Start to send rows to the ranks of a group; return the rows to wait for.

    Args:
        rows: ``[sum(input_splits), h]``, by destination rank.
        input_splits: Number of rows to each rank.
        output_splits: Number of rows from each rank; they are returned by rank.
        group: The ranks.
        allocate: Returns memory for the received rows. Default: fresh memory.
        allocate_grad: Returns memory for the gradient of ``rows``. Default: fresh memory.
    """
    transport = CollectiveAllToAll(group)
    return PendingRows(
        Transfer(transport, list(input_splits), list(output_splits), allocate, allocate_grad), rows
    )


class PendingRows:
    """The rows of an all-to-all, which construction starts.

    [Note: launch and wait are nodes] An all-to-all is two nodes of the autograd graph: the launch and
    the wait. In backward the wait's node launches the reverse all-to-all, and the launch's node waits
    for it. What is computed between the two hides the communication, in both directions. The engine
    runs ready nodes in the reverse order of their creation, so backward mirrors the order of calls in
    forward, which is the same on all ranks. There is no nested backward: a weight that several chunks
    use has one gradient, hooks fire once, and checkpointing sees an ordinary graph.
    """

    def __init__(self, transfer: Transfer, rows: Tensor) -> None:
        self._transfer = transfer
        # None once :meth:`wait` has returned the rows.
        self._rows: Tensor | None = apply_function(_Launch, transfer, rows)

    def wait(self) -> Tensor:
        """Make the current stream wait for the rows and return them, ``[sum(output_splits), h]``.

        Raises:
            RuntimeError: An earlier call has returned the rows.
        """
        # This object drops its reference, so that the caller may free the rows.
        rows, self._rows = self._rows, None
        if rows is None:
            raise RuntimeError(
                "ovpatch: wait() has already returned these rows. Keep the result of the first call."
            )
        received: Tensor = apply_function(_Wait, self._transfer, rows)
        return received


@dataclass
class Transfer:
    """The state that the two nodes of an all-to-all share.

    The attributes without a line below are arguments of :func:`start_all_to_all`.

    Attributes:
        transport: Sends the rows in forward, and their gradients in backward.
    """

    transport: AllToAllTransport
    input_splits: list[int]
    output_splits: list[int]
    allocate: Allocator | None = None
    allocate_grad: Allocator | None = None
    _forward: WorkGroup = dataclasses.field(init=False)
    # The gradient of the sent rows and its work, between the two nodes of a backward.
    _backward: tuple[Tensor, WorkGroup] | None = None

    def start_forward(self, rows: Tensor) -> Tensor:
        """Start to send the rows; return the memory that will hold the received rows."""
        received, self._forward = self._start(
            rows, self.input_splits, self.output_splits, self.allocate
        )
        return received.data

    def wait_forward(self) -> None:
        """Make the current stream wait for the rows; without streams the host waits."""
        self._forward.wait()

    def start_backward(self, grad: Tensor) -> None:
        """Start to send the gradient of the received rows back."""
        self._backward = self._start(
            grad, self.output_splits, self.input_splits, self.allocate_grad
        )

    def wait_backward(self) -> Tensor:
        """Return the gradient of the rows that were sent."""
        assert self._backward is not None, "the wait's node runs before the launch's"
        (grad, work), self._backward = self._backward, None
        work.wait()
        return grad

    def _start(
        self,
        rows: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        allocate: Allocator | None,
    ) -> tuple[Tensor, WorkGroup]:
        # The tensors carry no graph, because a backend's thread may hold both longer than this call.
        rows = rows.data.contiguous()
        output = (
            rows.new_empty((sum(output_splits), *rows.shape[1:]))
            if allocate is None
            else allocate(rows)
        )
        return output, self.transport.start_transfer(output, rows, output_splits, input_splits)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, rows: Tensor) -> Tensor:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        return transfer.start_forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.transfer.wait_backward()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, rows: Tensor) -> Tensor:
        ctx.transfer = transfer
        transfer.wait_forward()
        # The result is no view, because experts may compute in place.
        return rows.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.transfer.start_backward(grad)
        # This gradient is a placeholder: the launch's node takes the real one from the transfer.
        return None, grad


class _DependOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *sources: Tensor) -> Tensor:
        ctx.count = len(sources)
        return rows.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, *[None] * ctx.count


def depend_on(rows: Tensor, *sources: Tensor) -> Tensor:
    """Return rows that depend on further tensors in the graph, though not in value.

    A rank whose chunk is empty may compute its rows without reading the received ones. Its backward
    must still launch the collectives that its peers launch.
    """
    dependent: Tensor = apply_function(_DependOn, rows, *sources)
    return dependent


class RowBuffer:
    """Contiguous memory for the rows of several chunks, allocated at the first use."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._memory: Tensor | None = None

    def get_chunk(self, index: int, like: Tensor) -> Tensor:
        """Return a chunk's memory, ``[sizes[index], h]``; ``like`` gives features, dtype and device."""
        if self._memory is None:
            self._memory = like.new_empty((self._offsets[-1], *like.shape[1:]))
        # Without ``.data`` this would be a view, whose version changes with every write to its neighbors.
        return self._memory[self._offsets[index] : self._offsets[index + 1]].data

    def join_chunks(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return the chunks as one tensor, ``[sum(sizes), h]``: this buffer if it has them, or a copy.

        The buffer releases its memory; a later :meth:`get_chunk` allocates again.
        """
        memory, self._memory = self._memory, None
        if memory is not None and all(
            self._holds(memory, i, chunk) for i, chunk in enumerate(chunks)
        ):
            return memory
        return torch.cat(list(chunks))

    def _holds(self, memory: Tensor, index: int, chunk: Tensor) -> bool:
        row_bytes = memory.stride(0) * memory.element_size()
        in_place = (
            chunk.data_ptr() == memory.data_ptr() + self._offsets[index] * row_bytes
            or not chunk.numel()
        )
        return in_place and chunk.dtype == memory.dtype and chunk.is_contiguous()


def split_rows(rows: Tensor, grad_buffer: RowBuffer) -> tuple[Tensor, ...]:
    """Return rows in chunks of the buffer's sizes; their gradients are joined in the buffer.

    For autograd the chunks are no views of each other: an in-place write to one chunk leaves the
    versions of the remaining chunks alone.
    """
    chunks: tuple[Tensor, ...] = apply_function(_Split, grad_buffer, rows)
    return chunks


def join_rows(chunks: Sequence[Tensor], buffer: RowBuffer) -> Tensor:
    """Join chunks as :meth:`RowBuffer.join_chunks` does, differentiably."""
    rows: Tensor = apply_function(_Join, buffer, *chunks)
    return rows


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: RowBuffer, rows: Tensor) -> tuple[Tensor, ...]:
        ctx.buffer = buffer
        return tuple(chunk.data for chunk in rows.split(buffer.sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, ctx.buffer.join_chunks(grads)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: RowBuffer, *chunks: Tensor) -> Tensor:
        ctx.sizes = buffer.sizes
        return buffer.join_chunks(chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *grad.contiguous().split(ctx.sizes)


# Programs of the kernel; each takes a multiprocessor.
CHANNELS: Final = 16
# The size of a slot in bytes.
_SLOT: Final = 512 * 1024
_DEPTH: Final = 2
# The number of words that a program moves at a time.
_BLOCK: Final = 8192
_WARPS: Final = 16
# The words in which a kernel may copy rows, the largest first: bytes, dtype.
_WORDS: Final = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
# The alignment in bytes that lets the kernel use its widest loads and stores.
_ALIGNED: Final = 16


class SymmAllToAll:
    """A transport over symmetric memory, for one group on one device.

    See [Note: level by level] of the kernel. Rows that stay on this rank are copied on the current
    stream. The host waits for nothing. Construction is a collective. The number of programs,
    ``channels``, may be lowered if all ranks do so between the same two calls.

    Args:
        group: The ranks, all on one host.
        device: This rank's device.
        channels: Number of programs.
        slot: Size of a ring's slot in bytes.
        depth: Number of slots of a ring.
        block: Number of words that a program moves at a time.

    Raises:
        LackingError: Some ranks have no memory for it; raised on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        channels: int = CHANNELS,
        slot: int = _SLOT,
        depth: int = _DEPTH,
        block: int = _BLOCK,
    ) -> None:
        from ovpatch.overlap.kernels.workspace_kernels import RANKS
        from ovpatch_plugins.pipe_experts.triton_kernels import HEADER

        self._world = group.size()
        self._rank = group.rank()
        self.channels = channels
        self._slot = slot
        self._depth = depth
        self._block = block
        size = HEADER.value + channels * self._world * depth * slot
        self._memory = memory.allocate_on_all(
            size, group, device, lambda own: own[: HEADER.value].zero_()
        )
        with outside_modes():
            # The addresses of all ranks' memory, and the numbers of units sent and fetched so far.
            self._peers = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
            self._state = torch.zeros(HEADER.value // 8, dtype=torch.int64, device=device)
        # The kernel takes the splits of a fixed number of ranks; ranks that do not exist send no rows.
        self._padding = [0] * (RANKS.value - self._world)
        # Prepared kernels by the dtype of words, whether rows are aligned, and the number of programs.
        self._kernels: dict[tuple[torch.dtype, bool, int], Any] = {}
        # Works whose tensors are kept until their kernel has ended.
        self._in_flight: collections.deque[_KernelWork] = collections.deque()
        # The kernels' stream has a high priority, so that they get multiprocessors while experts compute.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self._stream is not None:
            # The new stream reads tensors that the current stream has written.
            torch.cuda.synchronize(device)

    def start_transfer(
        self,
        output: Tensor,
        rows: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> WorkGroup:
        """See :meth:`CollectiveAllToAll.start_transfer`."""
        while self._in_flight and self._in_flight[0].is_done():
            self._in_flight.popleft()
        COUNTERS.symmetric += 1
        row, own = rows.shape[1:].numel() * rows.element_size(), input_splits[self._rank]
        aligned = row % _ALIGNED == 0
        size, word = next((size, word) for size, word in _WORDS if row % size == 0)
        alignment = _ALIGNED if aligned else size
        if rows.data_ptr() % alignment:
            # An expert may return any view.
            rows = rows.clone()
        if output.data_ptr() % alignment:
            raise ValueError(
                f"ovpatch: memory for received rows does not start at a multiple of {alignment} "
                "bytes. Make `allocate` return memory that does."
            )
        work = _KernelWork(output, rows, self._stream)
        with profiler_span(profiler_label("pipe_experts", "all_to_all")):
            if sum(input_splits) + sum(output_splits) > 2 * own:
                kernel = self._kernels.get((word, aligned, self.channels)) or self._make_kernel(
                    word, aligned
                )
                args = *input_splits, *self._padding, *output_splits, *self._padding, row // size
                work.launch_kernel(kernel, rows.view(word), output.view(word), *args)
                self._in_flight.append(work)
            # This copy runs on the current stream, concurrently with the kernel.
            if own:
                source, target = sum(input_splits[: self._rank]), sum(output_splits[: self._rank])
                output[target : target + own].copy_(rows[source : source + own])
        return WorkGroup((work,))

    def _make_kernel(self, word: torch.dtype, aligned: bool) -> Prepared:
        from ovpatch.overlap.kernels.workspace_kernels import Prepared
        from ovpatch_plugins.pipe_experts.triton_kernels import symm_all_to_all_kernel

        fixed = (
            self._peers, self._state, self._rank,
            self._world, self.channels, self._slot // word.itemsize, self._depth, self._block, aligned,
        )  # fmt: skip
        kernel = Prepared(symm_all_to_all_kernel, self.channels, None, fixed, num_warps=_WARPS)
        self._kernels[word, aligned, self.channels] = kernel
        return kernel


class _KernelWork:
    """An all-to-all in flight on the kernel's stream; without streams it is done once it is launched.

    The allocator reuses freed memory in the order of the stream that allocated it, here the stream of
    the launch. That stream waits for the kernel before the rows are read, so tensors freed after the
    wait are safe. After an exception no stream may ever wait for the work. Its tensors are then kept
    until the kernel has ended.
    """

    def __init__(self, output: Tensor, rows: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._tensors: tuple[Tensor, ...] = (output, rows)
        self._stream = stream
        # The event after the kernel; None without streams.
        self._end = None if stream is None else torch.cuda.Event()
        # The stream that allocated the tensors.
        self._launch_stream = None if stream is None else torch.cuda.current_stream(rows.device)

    def launch_kernel(self, kernel: Prepared, rows: Tensor, *args: Tensor | int) -> None:
        """Launch after the current stream's work so far."""
        if self._stream is not None and self._launch_stream is not None:
            self._stream.wait_stream(self._launch_stream)
        with torch.cuda.device_of(rows):
            kernel(rows, *args, stream=self._stream)
        if self._end is not None:
            self._end.record(self._stream)

    def wait(self) -> None:
        """Make the current stream wait for the kernel and for the copy on the stream of the launch."""
        if self._launch_stream is not None and self._end is not None:
            current = torch.cuda.current_stream(self._launch_stream.device)
            current.wait_event(self._end)
            # The sent rows are about to be freed, and the stream of the launch may reuse their memory.
            if current != self._launch_stream:
                self._launch_stream.wait_event(self._end)
                current.wait_stream(self._launch_stream)
        self._tensors = ()

    def is_done(self) -> bool:
        """Return whether the tensors may be freed."""
        return not self._tensors or self._end is None or self._end.query()


AllToAllTransport = CollectiveAllToAll | SymmAllToAll

_UNSUPPORTED: Final = "pipe_experts: the reason against symmetric memory"
# The report shows them even after their group was destroyed.
_unsupported_reasons: dict[str, None] = {}


def get_transport(group: dist.ProcessGroup, device: torch.device) -> SymmAllToAll | None:
    """Return the transport of a group; None if it is unsupported, which is the same on all ranks.

    The first call for a group and device is a collective; later calls allocate nothing.
    """
    return group_state(group).get_or_create(
        (SymmAllToAll, device), lambda: _make_transport(group, device)
    )


def _make_transport(group: dist.ProcessGroup, device: torch.device) -> SymmAllToAll | None:
    reason = memory.unsupported_reason(group, device)
    if not reason:
        try:
            return SymmAllToAll(group, device)
        except memory.LackingError as error:
            reason = str(error)
    _unsupported_reasons[reason] = None
    group_state(group).values[_UNSUPPORTED, device] = reason
    return None


def resolve_exchange(
    config: MoEConfig, group: dist.ProcessGroup, device: torch.device
) -> MoEConfig:
    """Return the config; its exchange is c10d's all-to-all if auto cannot choose symmetric memory.

    Raises:
        ovpatch.OptionError: The user wants symmetric memory, and a rank does not support it; raised on
            all ranks.
    """
    if config.exchange == "c10d":
        return config
    is_wanted = group.size() > 1 and (config.exchange == "symmetric" or config.cut == "auto")
    if is_wanted and get_transport(group, device) is not None:
        return config
    if is_wanted and config.exchange == "symmetric":
        reason = group_state(group).values[_UNSUPPORTED, device]
        with note_failures("pipe_experts", "the first call of an expert-parallel layer"):
            refuse_option("pipe_experts", OPTIONS, "exchange", config.exchange, reason)
    return dataclasses.replace(config, exchange="c10d")


def list_unsupported_reasons() -> list[str]:
    """Return the reasons for which groups use no symmetric memory."""
    return list(_unsupported_reasons)
