"""Kernel launches that differ in addresses only."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor

Allocator = Callable[[int, int, int | None], Any]


class Prepared:
    """A kernel with a fixed number of programs, whose launches differ in addresses only.

    The kernel's last parameters are the fixed ones, ``stay``; the caller keeps the tensors among them alive.
    ``scratch`` makes memory for descriptors, as ``triton.set_allocator`` expects.

    [Note: asked once] ``kernel[grid](...)`` inspects every argument of every launch: its type, whether a number is 1 or
    a multiple of 16, whether an address is. For kernels of 20 to 30 arguments that is most of a launch's host time. A
    launch here is looked up by everything that decides this, and keeps the kernel that its first call has compiled.
    Later calls differ in addresses, all multiples of 16 by :mod:`.launch`; they are passed as numbers, because the
    driver inspects tensors as well.
    """

    def __init__(
        self, kernel: Any, programs: int, scratch: Allocator | None, stay: Sequence[Any], **options: int
    ) -> None:
        self._kernel, self._grid, self._scratch, self._options = kernel, (programs, 1, 1), scratch, options
        self._stay, self._addressed = stay, [_address(arg) if isinstance(arg, Tensor) else arg for arg in stay]
        self._run: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream of the current device, with the kernel's first arguments in order."""
        run, args = self._run, [*map(_address, tensors), *self._addressed]
        if run is None:
            run, args = self._first, [*tensors, *self._stay]
        if self._scratch is None:
            run(*args)
        else:
            # A context of its own: Triton reads its allocator from a context variable, which the script may have set,
            # and which threads of the autograd engine lack.
            contextvars.copy_context().run(_with_scratch, self._scratch, run, args)

    def _first(self, *args: Any) -> None:
        compiled = self._kernel[self._grid](*args, **self._options)
        if compiled is not None:  # else it is interpreted
            self._run = compiled[self._grid]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _with_scratch(scratch: Allocator, run: Callable[..., Any], args: Sequence[Any]) -> None:
    triton.set_allocator(scratch)
    run(*args)
