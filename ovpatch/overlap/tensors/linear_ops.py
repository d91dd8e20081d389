"""What several features ask of modules: the dtype of products, delayed weight gradients, streams of random numbers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which a product is computed; None if autocast leaves it alone.

    Args:
        kind: Type of the device.
        dtype: Of the input.
    """
    if not torch.is_autocast_enabled(kind) or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


ComputeGrad: TypeAlias = Callable[[], Tensor | None]
"""Returns a weight's gradient in its class and dtype, or None if it has been added to the one that is already there."""

DELAYS_WGRAD: Final = "_ovpatch_delays_wgrad"
"""Attribute of classes of linears that ask; true."""


@dataclass
class DelayedWgrad:
    """The slot for weight gradients that a linear's backward leaves to another feature, which computes them later.

    A feature with linears of its own asks the slot for each weight gradient, and leaves out what is taken. A feature
    that can compute later fills it. An empty slot costs the test for None.

    Attributes:
        take: Called inside a backward with a weight and what computes its gradient, which keeps its operands; tells
            whether the caller leaves the gradient out.
    """

    take: Callable[[Tensor, ComputeGrad], bool] | None = None


DELAYED_WGRAD: Final = DelayedWgrad()


class RandomStream(NamedTuple):
    """A stream of random numbers outside of torch's global generators.

    Attributes:
        read: Returns a state that later draws do not change.
        write: Has the stream continue from a state.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]


def make_random_stream(generator: Any) -> RandomStream:
    """Return the stream of an instance of a class for which :func:`is_generator_class` is true."""
    if isinstance(generator, random.Random):
        return RandomStream(generator.getstate, generator.setstate)
    if isinstance(generator, torch.Generator):
        return RandomStream(generator.get_state, generator.set_state)
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return RandomStream(lambda: bits.state, functools.partial(setattr, bits, "state"))
    return RandomStream(functools.partial(generator.get_state, legacy=False), generator.set_state)


@functools.lru_cache(maxsize=1024)
def is_generator_class(cls: Any) -> bool:
    """Return whether instances of a class are generators of torch, Python or numpy whose state can be restored."""
    if issubclass(cls, random.SystemRandom):
        return False
    numpy_classes = ("numpy.random._generator.Generator", "numpy.random.mtrand.RandomState")
    return issubclass(cls, (torch.Generator, random.Random)) or any(
        f"{base.__module__}.{base.__qualname__}" in numpy_classes for base in cls.__mro__
    )
