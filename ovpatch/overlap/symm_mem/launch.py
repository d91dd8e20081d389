"""Launches of Triton kernels whose arguments differ in addresses only; imported where there is Triton."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

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
