"""Collectives under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Make the current stream (the host, without streams) wait for the result."""


class WorkGroup:
    """Collectives under way.

    Args:
        works: The collectives.
        inputs: What they read, kept until then.
    """

    __slots__ = ("_inputs", "_works")

    def __init__(self, works: Sequence[Work], inputs: tuple[Tensor, ...] = ()) -> None:
        self._works, self._inputs = works, inputs

    def wait(self) -> None:
        """Make the current stream (the host, without streams) wait for the results, and let go of the inputs."""
        for work in self._works:
            work.wait()
        self._works = self._inputs = ()


class WorkWithEpilogue:
    """Collectives under way whose results will then be put where they belong.

    Args:
        works: The collectives.
        unpack: Puts the results in place. May be called more than once, if a signal handler comes to wait meanwhile.
    """

    def __init__(self, works: Sequence[Work], unpack: Callable[[], None]) -> None:
        self._works, self._unpack = works, unpack

    def wait_for_results(self) -> None:
        """Wait for the collectives; nothing has been put in place yet."""
        for work in self._works:
            work.wait()

    def wait(self) -> None:
        """Wait for the collectives and put the results in place, once: what is there later is not ours."""
        self.wait_for_results()
        with torch.no_grad():
            self._unpack()
        self._unpack = _done


def _done() -> None:
    pass
