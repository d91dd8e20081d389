"""Modes of torch in which scripts run a part of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch.eager_transforms import grad_increment_nesting, jvp_increment_nesting
from torch._functorch.vmap import vmap_increment_nesting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Functions(TorchFunctionMode):
    """Sees functions, and does nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Sees operators, and does nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def wide() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def filled() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


#: Levels of ``torch.func``, by the contexts that its transforms enter around the function that they call.
#: The transforms themselves take functions, but the tests need a context around a phase of a step.
LEVELS: dict[str, Callable[[], Any]] = {
    "grad level": grad_increment_nesting,
    "jvp level": jvp_increment_nesting,
    "vmap level": lambda: vmap_increment_nesting(2, "same"),
}


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the wrapper of a level that has ended; other tensors are returned as they are."""
    found: torch.Tensor = torch._C._functorch.unwrap_if_dead(tensor)
    return found


#: By default torch fills new memory with NaN under deterministic algorithms.
MODES: dict[str, Callable[[], Any]] = {
    "functions": Functions,
    "operators": Operators,
    "meta device": lambda: torch.device("meta"),
    "default dtype": wide,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic fill": filled,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    **LEVELS,
}

#: Modes in which nothing can be trained.
FORWARD_ONLY = ("no_grad", "inference", "fake", *LEVELS)
