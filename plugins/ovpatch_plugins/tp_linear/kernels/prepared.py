"""Launches that are alike but for where tensors lie.

[Note: asked once] ``kernel[grid](...)`` asks every argument of every launch what Triton would compile for it: its type,
whether a number is 1 or a multiple of 16, whether an address is. For kernels of 20 to 30 arguments that is most of what
a launch costs the host. Here a launch is looked up by what decides all of this, and holds on to what the first one has
compiled. What differs from launch to launch are addresses, of which all are multiples of 16, as :mod:`.launch` sees to;
they are handed over as numbers, since the driver is asked about each tensor, too.

[Note: memory for descriptors] Triton asks a context variable for it, which the script may have set for kernels of its
own, and which threads of the autograd engine have not. So a launch has a context of its own. The memory is the
workspace's, whose kernels take turns.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor

Allocator = Callable[[int, int, int | None], Any]


class Prepared:
    """A kernel, launched with as many programs and arguments that differ in addresses only.

    Args:
        kernel: The kernel, whose last parameters are those that stay.
        programs: How many.
        scratch: Makes memory for descriptors, as ``triton.set_allocator`` says; None for kernels without.
        stay: Arguments that are the same each time; tensors among them have to be kept by whoever launches.
        options: Triton's, ``num_warps`` and ``num_stages``.
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
