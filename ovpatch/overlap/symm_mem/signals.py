"""What kernels on symmetric memory tell each other; for use inside of Triton kernels.

[Note: sequence numbers] Every operator of a workspace has a number, which a counter in device memory holds, so that a
replayed graph counts on as an eager call does. A rank's signals say up to which number it has come, and only grow:
nobody resets what another one may be reading. Operator ``s`` uses half ``s % 2`` of the buffers; who is about to write
into anybody's half waits until all ranks are through with operator ``s - 2``, which had it before.

[Note: who waits for whom] A program that waits holds its multiprocessor, and the programs behind it in its own grid, or
another library's kernel, may need just that one. So a program waits only for what kernels launched before its own have
done, on any rank, or programs in front of it in its own grid that wait for nothing but such kernels. Then some rank can
always go on.

[Note: made visible] What a program has stored is made visible by a barrier among its threads and a release by one of
them. Tensor memory accelerators read past the caches that an acquire is about: after one, a proxy fence is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

READY = tl.constexpr(0)  # offsets in a rank's signals, in numbers
DONE = tl.constexpr(32)
HEADER = tl.constexpr(1024)  # bytes of signals in front of the halves
RANKS = tl.constexpr(8)  # the next power of two to the most ranks

SEQUENCE = tl.constexpr(0)  # offsets in the state that only this rank sees
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
def wait_for_all(signals, value, WORLD: tl.constexpr):
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
    """Add one to a count of this device, once all that this program has stored is visible."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release", scope="gpu")


@triton.jit
def tell_all(peers, kind, rank, value, WORLD: tl.constexpr):
    """Signal ``value`` to all ranks, once all that this program has stored, or seen, is visible."""
    tl.debug_barrier()
    for to in range(WORLD):
        tl.atomic_xchg(signals_of(peers, to) + kind + rank, value, sem="release", scope="sys")


@triton.jit
def is_last_out(count, programs):
    """Tell whether this program is the last of so many; then it sees what all of them have stored."""
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def before_descriptors():
    """Order what was waited for before loads by descriptors, see [Note: made visible]."""
    if _COMPILED:
        tl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def after_descriptors():
    """Wait until what was stored by descriptors is there, see [Note: made visible]."""
    if _COMPILED:
        tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; // $0", "=r", [], tl.int32, is_pure=False, pack=1)
