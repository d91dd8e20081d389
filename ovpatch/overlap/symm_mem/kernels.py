"""What Triton kernels on symmetric memory share: their signals to each other, and how they are launched.

[Note: sequence numbers] Each operator of a workspace has a sequence number, from a counter in device memory, so that a
replayed graph counts on like an eager call. A rank's signals hold the number that it has reached and only grow: a
signal that a peer may be reading is never reset. Operator ``s`` uses half ``s % 2`` of the buffers. Before a rank
writes into a half, it waits until all ranks have finished operator ``s - 2``, which used that half before.

Deadlocks: a waiting program holds its multiprocessor, which the programs behind it in its grid, or another library's
kernel, may need. So a program waits only for kernels launched before its own, on any rank, or for programs in front of
it in its grid that wait for such kernels only. Then some rank can always proceed.

Visibility: a program's stores become visible by a barrier among its threads and a release by one of them. Tensor memory
accelerators read past the caches that an acquire invalidates: after one, a proxy fence is needed.
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

READY = tl.constexpr(0)  # offsets in a rank's signals, in numbers
DONE = tl.constexpr(32)
HEADER = tl.constexpr(1024)  # bytes of signals in front of the halves
RANKS = tl.constexpr(8)  # the next power of two to the most ranks

SEQUENCE = tl.constexpr(0)  # offsets in the state that only this rank's kernels see
FIRST_OUT = tl.constexpr(1)
SECOND_OUT = tl.constexpr(2)

_COMPILED = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def signals_of(peers, rank):
    """Return the address of a rank's signals."""
    return tl.load(peers + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def half_of(peers, rank, sequence, half_bytes, like):
    """Return the address of a rank's half for an operator, as a pointer of the type of ``like``."""
    base = tl.load(peers + rank) + HEADER + (sequence & 1) * half_bytes
    return tl.multiple_of(base.to(like.dtype), 16)


@triton.jit
def wait_for_signals(signals, value, WORLD: tl.constexpr):
    """Wait until all ranks have signalled ``value`` or more."""
    ranks = tl.arange(0, RANKS)
    least = value - 1
    while least < value:
        seen = tl.atomic_add(signals + ranks, tl.zeros_like(ranks).to(tl.int64), ranks < WORLD, "acquire", "sys")
        least = tl.min(tl.where(ranks < WORLD, seen, value), 0)
    tl.debug_barrier()


@triton.jit
def wait_for(signal, value):
    """Wait until a signal from another device is ``value`` or more."""
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < value:
        pass


@triton.jit
def wait_here(count, value):
    """Wait until a count that programs of this device add to is ``value`` or more."""
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < value:
        pass


@triton.jit
def add_here(count):
    """Add one to a count of this device, after this program's stores have become visible."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release", scope="gpu")


@triton.jit
def tell_all(peers, kind, rank, value, WORLD: tl.constexpr):
    """Signal ``value`` to all ranks, after all that this program has stored or seen has become visible."""
    tl.debug_barrier()
    for to in range(WORLD):
        tl.atomic_xchg(signals_of(peers, to) + kind + rank, value, sem="release", scope="sys")


@triton.jit
def is_last_out(count, programs):
    """Return whether this program is the last of ``programs``; then it sees the stores of all of them."""
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def before_descriptors():
    """Order the signals that were waited for before loads by descriptors: a proxy fence."""
    if _COMPILED:
        tl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def after_descriptors():
    """Wait until stores by descriptors are complete."""
    if _COMPILED:
        tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


# --- launches ---

Allocator = Callable[[int, int, int | None], Any]


class Prepared:
    """A kernel with a fixed number of programs and with fixed last arguments.

    The fixed arguments are ``stay``; the caller keeps the tensors among them alive. ``scratch`` makes memory for
    descriptors, as ``triton.set_allocator`` expects.

    [Note: asked once] ``kernel[grid](...)`` inspects every argument of every launch: its type, whether a number is 1 or
    a multiple of 16, whether an address is. For kernels of 20 to 30 arguments that is most of a launch's host time. A
    launch here is looked up by everything that decides this, and keeps the kernel that its first call has compiled.
    Later calls differ in addresses, all multiples of 16 where the kernel asks, and in numbers that it does not; tensors
    are passed as addresses, because the driver inspects them as well.
    """

    def __init__(
        self, kernel: Any, programs: int, scratch: Allocator | None, stay: Sequence[Any], **options: int
    ) -> None:
        self._kernel, self._grid, self._scratch, self._options = kernel, (programs, 1, 1), scratch, options
        self._stay, self._addressed = stay, [*map(_address, stay)]
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Tensor | int | None, stream: torch.cuda.Stream | None = None) -> None:
        """Launch on a stream, by default the current device's current one, with the kernel's first arguments."""
        run: Callable[..., Any]
        if self._run is None:
            run, given = functools.partial(self._first, stream), [*args, *self._stay]
        else:
            run, given = self._run, [*map(_address, args), *self._addressed]
            if stream is not None:
                run = functools.partial(run, stream=stream.cuda_stream)
        if self._scratch is None:
            run(*given)
        else:
            # A context of its own: Triton reads its allocator from a context variable, which the script may have set,
            # and which threads of the autograd engine lack.
            contextvars.copy_context().run(_with_scratch, self._scratch, run, given)

    def _first(self, stream: torch.cuda.Stream | None, *args: Any) -> None:
        with torch.cuda.stream(stream):
            compiled = self._kernel[self._grid](*args, **self._options)
        if compiled is not None:  # else it is interpreted
            self._run = compiled[self._grid]


def _address(arg: Any) -> Any:
    return arg.data_ptr() if isinstance(arg, Tensor) else arg


def _with_scratch(scratch: Allocator, run: Callable[..., Any], args: Sequence[Any]) -> None:
    triton.set_allocator(scratch)
    run(*args)
