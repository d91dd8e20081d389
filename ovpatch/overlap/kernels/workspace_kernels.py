"""Signals between Triton kernels on symmetric memory, and the launch of such kernels.

[Note: sequence numbers] Each operator of a workspace has a sequence number. It comes from a counter
in device memory, so that a replayed graph continues to count like an eager call. The signals of a
rank hold the number that it has reached, and only grow, because a peer may be reading them.
Operator ``s`` uses half ``s % 2`` of the buffers. Before a rank writes into a half, it waits until
all ranks have finished operator ``s - 2``, which used that half before.

Deadlocks: a waiting program holds its multiprocessor, which later programs of its grid, or kernels
of another library, may need. So a program waits only for kernels that were launched before its own
on any rank, or for earlier programs of its grid that wait only for such kernels. Then some rank can
always proceed.

Visibility: the stores of a program become visible by a barrier among its threads and a release by
one of them. Tensor memory accelerators read past the caches that an acquire invalidates, so a proxy
fence must follow the acquire.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# Offsets in the signals of a rank, in numbers.
READY = tl.constexpr(0)
DONE = tl.constexpr(32)
# Bytes of signals before the halves.
HEADER = tl.constexpr(1024)
# The largest number of ranks, rounded up to a power of two.
RANKS = tl.constexpr(8)

# Offsets in the state that only the kernels of this rank see.
SEQUENCE = tl.constexpr(0)
FIRST_OUT = tl.constexpr(1)
SECOND_OUT = tl.constexpr(2)

# False if Triton interprets kernels, which then cannot contain assembly.
_COMPILED = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def signals_of(peers, rank):
    """Return the address of the signals of a rank."""
    return tl.load(peers + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def half_of(peers, rank, sequence, half_bytes, like):
    """Return the address of the half of a rank for an operator, as a pointer like ``like``."""
    base = tl.load(peers + rank) + HEADER + (sequence & 1) * half_bytes
    return tl.multiple_of(base.to(like.dtype), 16)


@triton.jit
def wait_for_signals(signals, value, WORLD: tl.constexpr):
    """Wait until all ranks have signaled ``value`` or more."""
    # Lanes without a rank count as arrived.
    ranks = tl.arange(0, RANKS)
    least = value - 1
    while least < value:
        # An atomic addition of zero reads with acquire semantics.
        seen = tl.atomic_add(
            signals + ranks, tl.zeros_like(ranks).to(tl.int64), ranks < WORLD, "acquire", "sys"
        )
        least = tl.min(tl.where(ranks < WORLD, seen, value), 0)
    tl.debug_barrier()


@triton.jit
def wait_for(signal, value):
    """Wait until a signal from another device is ``value`` or more."""
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < value:
        pass


@triton.jit
def wait_here(count, value):
    """Wait until a count that programs of this device increase is ``value`` or more."""
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < value:
        pass


@triton.jit
def add_here(count):
    """Add one to a count of this device, once the stores of this program are visible."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release", scope="gpu")


@triton.jit
def tell_all(peers, kind, rank, value, WORLD: tl.constexpr):
    """Signal ``value`` to all ranks, once all that this program stored or saw is visible."""
    # All threads must have stored before one of them releases the signals.
    tl.debug_barrier()
    for to in range(WORLD):
        tl.atomic_xchg(signals_of(peers, to) + kind + rank, value, sem="release", scope="sys")


@triton.jit
def is_last_out(count, programs):
    """Return whether this program is the last of ``programs`` and so sees the stores of all."""
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        # The next operator counts from zero.
        tl.store(count, 0)
    return last


@triton.jit
def before_descriptors():
    """Order the observed signals before loads by descriptors, by a proxy fence."""
    if _COMPILED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; // $0", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def after_descriptors():
    """Wait until stores by descriptors are complete."""
    if _COMPILED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; // $0", "=r", [], tl.int32, is_pure=False, pack=1
        )


# --- launches ---

Allocator = Callable[[int, int, int | None], Any]


class Prepared:
    """A kernel with a fixed number of programs and with fixed last arguments.

    [Note: inspected once] ``kernel[grid](...)`` inspects every argument of every launch: its type,
    whether a number is 1 or a multiple of 16, whether an address is such a multiple. For kernels of
    20 to 30 arguments this takes most of the host time of a launch. Callers keep one object of this
    class for each combination of these properties, and it keeps the kernel that its first call has
    compiled. Later calls may differ in addresses, which are multiples of 16 if the kernel depends
    on it, and in numbers that Triton does not specialize. Tensors are passed as addresses, because
    the driver inspects tensors as well.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        scratch: Allocator | None,
        stay: Sequence[Any],
        **options: int,
    ) -> None:
        """Prepare launches.

        Args:
            kernel: The kernel.
            programs: The number of programs.
            scratch: Allocates memory for descriptors, as ``triton.set_allocator`` expects; None if
                the kernel has none.
            stay: The fixed last arguments. The caller keeps the tensors among them alive.
            **options: Options of the launch, such as ``num_warps``.
        """
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._scratch = scratch
        self._options = options
        # The fixed arguments for the first call, which compiles, and as addresses for later calls.
        self._fixed_args = stay
        self._fixed_addresses = [*map(_get_address, stay)]
        # The compiled kernel, once the first call has compiled it.
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Tensor | int | None, stream: torch.cuda.Stream | None = None) -> None:
        """Launch the kernel.

        Args:
            *args: The first arguments of the kernel.
            stream: The stream. Default: the current stream of the current device.
        """
        run: Callable[..., Any]
        if self._run is None:
            run = functools.partial(self._compile_and_run, stream)
            all_args = [*args, *self._fixed_args]
        else:
            run = self._run
            all_args = [*map(_get_address, args), *self._fixed_addresses]
            if stream is not None:
                run = functools.partial(run, stream=stream.cuda_stream)
        if self._scratch is None:
            run(*all_args)
        else:
            # Triton reads its allocator from a context variable. The script may have set it, and
            # threads of the autograd engine lack it, so the launch runs in its own context.
            context = contextvars.copy_context()
            context.run(_run_with_scratch, self._scratch, run, all_args)

    def _compile_and_run(self, stream: torch.cuda.Stream | None, *args: Any) -> None:
        with torch.cuda.stream(stream):
            compiled = self._kernel[self._grid](*args, **self._options)
        # The result is None if Triton interprets the kernel.
        if compiled is not None:
            self._run = compiled[self._grid]


def _get_address(arg: Any) -> Any:
    return arg.data_ptr() if isinstance(arg, Tensor) else arg


def _run_with_scratch(scratch: Allocator, run: Callable[..., Any], args: Sequence[Any]) -> None:
    triton.set_allocator(scratch)
    run(*args)
