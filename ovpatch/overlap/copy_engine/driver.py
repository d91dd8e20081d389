"""Functions of the CUDA driver that torch does not offer, through the driver's library.

A copy within a GPU is a kernel, unless the driver is asked to run it beside computation. A batch of copies can ask
that; drivers obey from CUDA 13.1 on. Drivers older than CUDA 13.0 have no batches: there copies are issued one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import Tensor

# A step moves hundreds of pieces. Making a tensor for each takes the host longer than the copy takes the device, so
# pieces are addresses, and a tensor is made only where one is needed.


class Batch(NamedTuple):
    """Copies, in any order among themselves."""

    to: list[int]  # addresses to copy to
    of: list[int]  # addresses to copy from
    sizes: list[int]  # bytes


class Span(NamedTuple):
    """A range of elements of a contiguous tensor."""

    memory: Tensor
    begin: int  # index of the first element in ``memory``
    numel: int  # number of elements
    address: int  # address of the first element

    def tensor(self) -> Tensor:
        """Return the range as a tensor, ``[numel]``."""
        return self.memory.view(-1).narrow(0, self.begin, self.numel)


class Addend(NamedTuple):
    """A sum of this rank's term and those in the other ranks' slots."""

    own: Span  # this rank's term
    out: Span  # the output, of the same length
    at: int  # index of the first element of the others' terms in their slots


_AT_LEAST: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares differences, so that numbers may wrap
_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_NO_PEERS: Final = 13010  # CUDA 13.1; from there on, streams write to their own GPU's memory only
_BESIDE_COMPUTE: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the hints, of a type and a number each, are for managed memory."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class Driver:
    """The driver's functions, on streams given by their handles.

    Construction raises OSError if there is no such library, and AttributeError if no stream can wait for memory.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        value = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._write = _function(library, "cuStreamWriteValue32_v2", value)
        self._wait = _function(library, "cuStreamWaitValue32_v2", value)
        version = ctypes.c_int(0)
        _check(library.cuDriverGetVersion(ctypes.byref(version)))
        self.writes_to_peers = version.value < _NO_PEERS  # whether write() reaches other GPUs' memory
        one = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._copy_one = _function(library, "cuMemcpyAsync", one)
        self._copy: Callable[..., int] | None = None
        if hasattr(library, "cuMemcpyBatchAsync_v2"):
            places = ctypes.POINTER(ctypes.c_uint64)
            batch = (places, places, places, ctypes.c_size_t, ctypes.POINTER(_Attributes), places, ctypes.c_size_t)
            self._copy = _function(library, "cuMemcpyBatchAsync_v2", (*batch, ctypes.c_void_p))
        self._attributes = _Attributes(_IN_STREAM_ORDER, (ctypes.c_int * 4)(), _BESIDE_COMPUTE)
        self._first = ctypes.c_uint64(0)  # the copy from which on the attributes hold

    def write(self, address: int, number: int, stream: int) -> None:
        """Write a number of 32 bits after the stream's earlier work is done and visible to other GPUs."""
        _check(self._write(stream, address, number, 0))

    def wait(self, address: int, number: int, stream: int) -> None:
        """Make the stream wait until memory holds a number of 32 bits, or a later one."""
        _check(self._wait(stream, address, number, _AT_LEAST))

    def copy(self, batch: Batch, stream: int) -> None:
        """Copy, in any order. The memory must outlive the copies."""
        if self._copy is None:
            for to, of, size in zip(*batch, strict=True):
                _check(self._copy_one(to, of, size, stream))
            return
        count = len(batch.to)
        numbers = ctypes.c_uint64 * count
        tos, ofs, sizes = (numbers(*given) for given in batch)
        _check(self._copy(tos, ofs, sizes, count, self._attributes, self._first, 1, stream))


def _function(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Callable[..., int]:
    function = library[name]
    function.argtypes, function.restype = types, ctypes.c_int
    return function


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refused what a stream was to do (CUresult {status})")
