"""Handles of collectives in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Make the current stream (the host, without streams) wait for the result."""


class WorkGroup:
    """Several collectives in flight; it keeps the tensors that they read until :meth:`wait`."""

    __slots__ = ("_inputs", "_works")

    def __init__(self, works: Sequence[Work], inputs: tuple[Tensor, ...] = ()) -> None:
        self._works, self._inputs = works, inputs

    def wait(self) -> None:
        """Make the current stream (the host, without streams) wait for the results, and drop the inputs."""
        for work in self._works:
            work.wait()
        self._works = self._inputs = ()


def without_grad(function: Callable[..., object], *args: Any) -> None:
    """Call a function outside of autograd, without the seven calls of ``torch.no_grad()``."""
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        function(*args)
    finally:
        torch._C._set_grad_enabled(enabled)


class WorkWithEpilogue:
    """Collectives in flight, and a function that copies their results to the outputs.

    ``unpack`` is called again if a signal handler waits while it runs.
    """

    def __init__(self, works: Sequence[Work], unpack: Callable[[], object]) -> None:
        self._works, self._unpack = works, unpack

    def wait_for_results(self) -> None:
        """Wait for the collectives only; the outputs are not written yet."""
        for work in self._works:
            work.wait()

    def wait(self) -> None:
        """Wait for the collectives and write the outputs, once: later content of the outputs is not ours."""
        self.wait_for_results()
        without_grad(self._unpack)
        self._unpack = lambda: None
