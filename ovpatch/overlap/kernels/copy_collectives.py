"""All-gathers and reduce-scatters of one group on one device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.comm.collectives import Work
from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch.overlap.kernels.copy_window import (
    SLOT_BYTES,
    Addend,
    AllocateWindow,
    Batch,
    CopyStreams,
    Piece,
    Span,
    Window,
    allocate_window,
    rounds,
)

# --- sums ---


def add_slots(
    slots: Sequence[Span | None], addends: Sequence[Addend], scale: float, stream: int
) -> None:
    """Write scaled sums.

    Terms are added in float32, or in float64 if they are float64. They are added in the order of
    ranks, and the sum is rounded once.

    Args:
        slots: The terms of the peers by rank, all of one dtype. The item of this rank is None.
        addends: The terms of this rank, and the outputs.
        scale: The factor of each sum.
        stream: The handle of a CUDA stream; 0 without CUDA.
    """
    if addends[0].out.memory.is_cuda:
        # Triton may not be installed where there are no GPUs.
        from ovpatch.overlap.kernels import copy_sum_kernel as sum_kernel

        sum_kernel.launch_sum(slots, addends, scale, stream)
        return
    for own, out, at in addends:
        terms = [
            own.tensor() if slot is None else slot.tensor().narrow(0, at, own.numel)
            for slot in slots
        ]
        total = terms[0].to(torch.promote_types(terms[0].dtype, torch.float32))
        for term in terms[1:]:
            total = total + term
        out.tensor().copy_(total * scale)


# Pieces begin at multiples of this number of bytes.
_GRAIN: Final = 128
_SUM_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Engine:
    """The copies of tensors between the ranks of a group that are all on one host.

    It does not use the group's backend and does not keep the group alive.

    [Note: two halves] The staging window is double-buffered, and round i uses half ``i % 2``. A
    rank overwrites a half only after the stream barrier of round ``i - 1``. Every rank enters that
    barrier only after it has read round ``i - 2``. A call is several rounds. If an exception ended
    a call between two rounds on one rank, its peers would mistake the next rounds of that rank for
    the rest of the call. So the engine refuses later calls.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        allocate: AllocateWindow = allocate_window,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Allocate the staging window; all ranks of the group call this together.

        Args:
            group: The process group.
            device: The device of the tensors.
            allocate: Allocates the memory on all ranks.
            slot_bytes: The number of bytes that a rank stages in a round. Default:
                :data:`.window.SLOT_BYTES`.
        """
        self._world = group.size()
        self._rank = group.rank()
        # The peers, from the next rank on, so that not all ranks read from the same rank at a time.
        self._peers = [(self._rank + i) % self._world for i in range(1, self._world)]
        self._slot_bytes = slot_bytes
        # Each peer writes its term of a sum to its own slot of this rank's half.
        self._peer_slot_bytes = slot_bytes // max(self._world - 1, 1) // _GRAIN * _GRAIN
        self._device = device
        self._window: Window = allocate(2 * slot_bytes, group, device)
        self._addresses = [memory.data_ptr() for memory in self._window.ranks]
        self._streams = CopyStreams(device)
        # The half of the window that the next round uses, 0 or 1.
        self._half = 0
        self._lock = threading.RLock()
        # Whether a call has begun and was not issued completely.
        self._is_within_call = False

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Work]:
        """Start an all-gather, like :class:`ovpatch.overlap.comm.collectives.AllGather`."""
        sizes = tuple(part.nbytes for part in inputs)
        full_addresses = _addresses(outputs, sizes, self._world)
        part_addresses = _addresses(inputs, sizes)
        places = [
            address + self._rank * size for address, size in zip(full_addresses, sizes, strict=True)
        ]
        # Inputs that are not already at their place in the output.
        elsewhere = [i for i, place in enumerate(places) if place != part_addresses[i] and sizes[i]]

        # This rank stages its inputs in its own window, and peers copy them from there.
        def lay_out(half: int, pieces: Sequence[Piece]) -> Batch:
            slot = self._addresses[self._rank] + half
            return Batch(
                [slot + p.at for p in pieces],
                [part_addresses[p.tensor] + p.begin for p in pieces],
                [*map(_length, pieces)],
            )

        def take(half: int, pieces: Sequence[Piece], stream: int) -> None:
            lengths, batch = [*map(_length, pieces)], Batch([], [], [])
            for rank in self._peers:
                slot = self._addresses[rank] + half
                batch.to.extend(
                    [full_addresses[p.tensor] + rank * sizes[p.tensor] + p.begin for p in pieces]
                )
                batch.of.extend([slot + p.at for p in pieces])
                batch.sizes.extend(lengths)
            self._window.copy(batch, stream)

        with self._issue_completely():
            launched = self._streams.begin()
            # The part of this rank needs no window.
            if elsewhere:
                own = Batch(
                    [places[i] for i in elsewhere],
                    [part_addresses[i] for i in elsewhere],
                    [sizes[i] for i in elsewhere],
                )
                self._window.copy(own, self._streams.take())
            self._run(rounds(sizes, self._slot_bytes, _GRAIN), lay_out, take)
            return [self._streams.end(launched, [*outputs, *inputs])]

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool
    ) -> Sequence[Work]:
        """Start a reduce-scatter, like :class:`ovpatch.overlap.comm.collectives.ReduceScatter`.

        Terms are added as in :func:`add_slots`. Outputs may have another dtype than inputs.
        """
        dtype = inputs[0].dtype
        item, sizes = dtype.itemsize, tuple(output.numel() for output in outputs)
        sums = _addresses(outputs)
        full_addresses = _addresses(inputs, [item * size for size in sizes], self._world)
        slot = self._peer_slot_bytes
        scale = 1 / self._world if average else 1.0

        # This rank copies each peer's part of the inputs to its slot in the window of that peer.
        def lay_out(half: int, pieces: Sequence[Piece]) -> Batch:
            lengths, batch = [_length(p) * item for p in pieces], Batch([], [], [])
            for rank in self._peers:
                place = self._addresses[rank] + half + self._get_slot_index(self._rank, rank) * slot
                batch.to.extend([place + p.at * item for p in pieces])
                batch.of.extend(
                    [
                        full_addresses[p.tensor] + (rank * sizes[p.tensor] + p.begin) * item
                        for p in pieces
                    ]
                )
                batch.sizes.extend(lengths)
            return batch

        def take(half: int, pieces: Sequence[Piece], stream: int) -> None:
            slots = self._make_slots(half, dtype)
            # The term of this rank is read from the input itself.
            addends = []
            for tensor, begin, end, at in pieces:
                # Offsets within the window and the tensors are in elements, addresses in bytes.
                first, out = self._rank * sizes[tensor] + begin, outputs[tensor]
                own = Span(
                    inputs[tensor], first, end - begin, full_addresses[tensor] + first * item
                )
                to = Span(out, begin, end - begin, sums[tensor] + begin * out.itemsize)
                addends.append(Addend(own, to, at))
            add_slots(slots, addends, scale, stream)

        with self._issue_completely():
            launched = self._streams.begin()
            self._run(rounds(sizes, slot // item, _GRAIN // item), lay_out, take)
            return [self._streams.end(launched, [*outputs, *inputs])]

    # --- one tensor, rank after rank ---

    def fits(self, nbytes: int, *, is_sum: bool = False) -> bool:
        """Return whether one rank's part has room in a round, as the next two methods need it.

        Args:
            nbytes: The bytes of the part.
            is_sum: Whether each peer writes its own term of the part. Default: False.
        """
        return nbytes <= (self._peer_slot_bytes if is_sum else self._slot_bytes)

    def gather_in_turn(self, output: Tensor, part: Tensor) -> list[tuple[int, Work]]:
        """Start to gather one contiguous tensor; return the peers and a handle of each one's part.

        Args:
            output: The parts of all ranks, in the order of ranks.
            part: The part of this rank, which :meth:`fits`. It is at its place in ``output`` when the
                last handle has waited.
        """
        size = part.nbytes
        (full,) = _addresses([output], [size], self._world)
        (own,) = _addresses([part])
        with self._issue_completely():
            launched = self._streams.begin()
            half = self._take_half()
            slot = self._addresses[self._rank] + half
            self._window.copy(Batch([slot], [own], [size]), self._streams.lay_out())
            stream = self._streams.take()
            self._window.meet(stream)
            self._streams.met()
            arrivals = []
            for rank in self._peers:
                batch = Batch([full + rank * size], [self._addresses[rank] + half], [size])
                if rank == self._peers[-1]:
                    # No caller waits for this copy alone, so it comes last.
                    batch.to.append(full + self._rank * size)
                    batch.of.append(own)
                    batch.sizes.append(size)
                self._window.copy(batch, stream)
                arrivals.append((rank, self._streams.end(launched, [output, part])))
            return arrivals

    def scatter_in_turn(self, output: Tensor, compute: Callable[[int], Tensor]) -> Work:
        """Start to sum terms over the ranks, as :meth:`scatter` does, while they are computed.

        Args:
            output: The sum of all ranks' terms of this rank's part, contiguous.
            compute: Launches the computation of a rank's term, on the current stream. The terms are
                contiguous and :meth:`fits` holds for them. This rank's own term comes last, and hides
                the copies. If this function raises, the engine still accepts later calls.
        """
        nbytes, count = output.nbytes, output.numel()
        with self._issue_completely():
            terms = []
            # A peer reads its slot after the barrier. If a term fails before, this half stays the
            # next one, and the next call overwrites the slots.
            half = self._half * self._slot_bytes
            for rank in self._peers:
                term, address = self._compute_term(compute, rank, nbytes)
                terms.append(term)
                self._streams.begin()
                place = half + self._get_slot_index(self._rank, rank) * self._peer_slot_bytes
                batch = Batch([self._addresses[rank] + place], [address], [nbytes])
                self._window.copy(batch, self._streams.lay_out())
            # The host launches the GEMM of this term before the barrier, but the barrier's stream
            # does not wait for it.
            own, own_address = self._compute_term(compute, self._rank, nbytes)
            self._take_half()
            stream = self._streams.take()
            self._window.meet(stream)
            self._streams.met()
            launched = self._streams.begin()
            addend = Addend(
                Span(own, 0, count, own_address), Span(output, 0, count, output.data_ptr()), 0
            )
            add_slots(self._make_slots(half, output.dtype), [addend], 1.0, stream)
            return self._streams.end(launched, [output, *terms, own])

    def _compute_term(
        self, compute: Callable[[int], Tensor], rank: int, nbytes: int
    ) -> tuple[Tensor, int]:
        """Return a rank's term and its address; accept later calls if the script's tensors do not fit."""
        try:
            term = compute(rank)
            (address,) = _addresses([term], [nbytes])
        except Exception:
            # Peers have read nothing of this call, so a later call may begin.
            self._is_within_call = False
            raise
        return term, address

    @functools.cached_property
    def number(self) -> Tensor:
        """The tensor of the collective that follows copies; see :func:`.copy_choice.attend`."""
        with outside_modes():
            return torch.zeros(1, dtype=torch.int32, device=self._device)

    def behind(self) -> AbstractContextManager[None]:
        """Run the block's work after all copies that have started, in stream order."""
        return self._streams.behind()

    def unheard(self) -> list[int]:
        """Return the ranks whose memory fails a trial. Call this once all ranks have engines."""
        return self._window.unheard()

    @staticmethod
    def adds(dtype: torch.dtype) -> bool:
        """Return whether :meth:`scatter` supports a dtype."""
        return dtype in _SUM_DTYPES

    def drain(self, timeout_s: float) -> bool:
        """Let the host wait for all copies in flight; return whether they completed in time."""
        return self._streams.drain(timeout_s)

    def abort(self, timeout_s: float) -> bool:
        """End copies in flight for which ranks are missing; return whether they ended in time.

        Their outputs are undefined, and the engine refuses later calls.
        """
        self._is_within_call = True
        with self._streams.on_device():
            return self._streams.drain(timeout_s, self._window.abort)

    def failed_everywhere(self) -> None:
        """Accept calls again after a call that failed in the same round on all ranks."""
        self._is_within_call = False

    @contextmanager
    def _issue_completely(self) -> Iterator[None]:
        """Refuse calls after a call that was not issued completely; see [Note: two halves]."""
        with self._lock, self._streams.on_device():
            if self._is_within_call:
                raise RuntimeError(_ERROR_INTERRUPTED)
            self._is_within_call = True
            yield
            # An exception skips this line, so that later calls are refused.
            self._is_within_call = False

    def _run(
        self,
        cut: Sequence[Sequence[Piece]],
        lay_out: Callable[[int, Sequence[Piece]], Batch],
        take: Callable[[int, Sequence[Piece], int], None],
    ) -> None:
        for pieces in cut:
            half = self._take_half()
            self._window.copy(lay_out(half, pieces), self._streams.lay_out())
            stream = self._streams.take()
            # No rank reads a slot before all ranks have written, see [Note: two halves].
            self._window.meet(stream)
            self._streams.met()
            take(half, pieces, stream)

    def _take_half(self) -> int:
        """Return the offset of the next round's half in the window."""
        half = self._half * self._slot_bytes
        self._half = 1 - self._half
        return half

    def _make_slots(self, half: int, dtype: torch.dtype) -> list[Span | None]:
        """Return the slots in which peers have written terms for this rank, by rank; its own is None."""
        base, memory = self._addresses[self._rank], self._window.ranks[self._rank].view(dtype)
        size = self._peer_slot_bytes
        slots: list[Span | None] = [None] * self._world
        for rank in self._peers:
            place = half + self._get_slot_index(rank, self._rank) * size
            slots[rank] = Span(
                memory, place // dtype.itemsize, size // dtype.itemsize, base + place
            )
        return slots

    def _get_slot_index(self, sender: int, owner: int) -> int:
        """Return the index of the slot of ``owner`` that ``sender`` writes to."""
        return (sender - owner - 1) % self._world


def _length(piece: Piece) -> int:
    return piece.end - piece.begin


def _addresses(tensors: Sequence[Tensor], sizes: Sequence[int] = (), times: int = 1) -> list[int]:
    """Return the addresses of contiguous tensors.

    Args:
        tensors: The tensors.
        sizes: The number of bytes of each tensor, divided by ``times``. Default: not checked.
        times: The factor. Default: 1.

    Raises:
        ValueError: A tensor is not contiguous or has another size.
    """
    fit = not sizes or all(
        tensor.nbytes == times * size for tensor, size in zip(tensors, sizes, strict=True)
    )
    if not fit or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(_ERROR_SIZES)
    return [tensor.data_ptr() for tensor in tensors]


_ERROR_SIZES: Final = (
    "ovpatch: copies between ranks need contiguous tensors, and outputs whose sizes match the "
    "inputs. Pass contiguous tensors of matching sizes."
)

_ERROR_INTERRUPTED: Final = (
    "ovpatch: copies between ranks were interrupted in the middle of a call, by Ctrl-C or by an "
    "earlier error, and peers would mistake the next call for the rest of it. Restart all ranks. If "
    "it happens again, set OVPATCH_DIST_OPTIMIZER_COPY_ENGINES=off, and another schedule than copy."
)
