"""Facts about modules: the dtype of GEMMs, delayed weight gradients, streams of random numbers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor


def autocast_dtype(kind: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which a GEMM runs, or None if autocast does not change it.

    Args:
        kind: The type of the device.
        dtype: The dtype of the input.
    """
    # torch's autocast does not cast float64 either.
    if not torch.is_autocast_enabled(kind) or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


#: Returns the gradient of a weight in the weight's class and dtype. Returns None if it has already
#: added the gradient to ``weight.grad``.
ComputeGrad: TypeAlias = Callable[[], Tensor | None]

#: Name of an attribute that is true in classes of linears that offer their weight gradients to
#: :data:`DELAYED_WGRAD`.
DELAYS_WGRAD: Final = "_ovpatch_delays_wgrad"


@dataclass
class DelayedWgrad:
    """A slot for weight gradients that a linear's backward leaves to another feature.

    A feature with its own linears offers each weight gradient to the slot, and omits the gradients
    that the slot takes. A feature that can compute gradients later fills the slot. An empty slot
    costs one test for None.

    Attributes:
        take: Called inside a backward, with a weight and a function that computes its gradient and
            holds the operands. Returns whether the caller must omit the gradient.
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
